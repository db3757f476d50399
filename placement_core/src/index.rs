//! What one shape knows of the nodes: how often it fits on each, in which order they are preferred, which GPU is next.
//!
//! An index follows every change that tokens of its own shape make. What others change it learns from a log of nodes,
//! when it is used next ([`ShapeIndex::catch_up`]).
//!
//! Invariants, once it has caught up: `entries[i]` says of node i what its fields promise, and `free` is the sum of
//! their `fits`; node i is in exactly the bucket of its entry when the shape fits there, in none otherwise.

#![allow(clippy::inline_always, reason = "a call would pass what is in registers through memory")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::node::{NodeState, Phase, Room, Tightness};
use crate::order::{Order, Step};
use crate::shape::{GpuShape, Shape, UNLIMITED};
use crate::token::Held;

/// The bucket of a node that takes no tokens.
const NO_BUCKET: u32 = u32::MAX;

/// One node as the shape sees it.
#[derive(Debug, Clone, Copy)]
struct Entry {
    /// Tokens that fit.
    fits: u32,
    /// The bucket of the node's room; the node is in it when a token fits.
    bucket: u32,
    /// For a share: the GPU that the next token gets, whatever CPU and memory say. Kept, not searched for: a GPU that
    /// was the tightest is so all the more once a token is on it, until it is full.
    chosen: Tightness,
    /// No other GPU that the share fits on is tighter than this.
    rival: Tightness,
}

impl Entry {
    #[inline]
    fn of(shape: &Shape, node: &NodeState, bucket: u32, cap: u32) -> Self {
        let chosen = match shape.gpu {
            GpuShape::Share(micro) => node.tightest(micro),
            _ => Tightness::NONE,
        };
        Self { fits: shape.fits_active(node).min(cap), bucket, chosen, rival: chosen }
    }

    #[inline]
    fn choose(&mut self, tightest: Tightness) {
        // The others are no tighter than the chosen one is now, and stay so while it fills up and empties again.
        (self.chosen, self.rival) = (tightest, tightest);
    }
}

/// How GPUs of a node, named as in [`Held::gpus`], are taken and given back. Loops over tokens are compiled once for each
/// implementation, so that the most frequent kind of shape does not ask for every token which kind it is.
trait Gpus: Copy {
    /// Takes the GPUs of one token, which must fit.
    fn take(self, entry: &mut Entry, node: &mut NodeState) -> u64;
    /// Gives those of one token back.
    fn give_back(self, entry: &mut Entry, node: &mut NodeState, gpus: u64);
}

/// A share of one GPU.
#[derive(Clone, Copy)]
struct Share(u32);

impl Gpus for Share {
    #[inline(always)]
    fn take(self, entry: &mut Entry, node: &mut NodeState) -> u64 {
        let before = entry.chosen;
        let after = before.less(self.0);
        if after.free() < self.0 {
            // Before the slot is written: reading several slots at once right after one was written stalls.
            entry.choose(node.tightest_from(before.next()));
        } else {
            entry.chosen = after;
        }
        node.set(after);
        u64::from(before.slot())
    }

    #[inline(always)]
    fn give_back(self, entry: &mut Entry, node: &mut NodeState, gpus: u64) {
        let slot = gpus as u32;
        let before = entry.chosen;
        if slot == before.slot() {
            let here = before.more(self.0);
            if here > entry.rival {
                entry.choose(here.min(node.tightest_from(before.next())));
            } else {
                entry.chosen = here;
            }
            node.set(here);
        } else {
            let here = node.slot(slot).more(self.0);
            if here < before {
                (entry.chosen, entry.rival) = (here, before);
            } else {
                entry.rival = entry.rival.min(here);
            }
            node.set(here);
        }
    }
}

/// No GPU, or whole ones.
#[derive(Clone, Copy)]
struct NoneOrWhole(Shape);

impl Gpus for NoneOrWhole {
    fn take(self, _: &mut Entry, node: &mut NodeState) -> u64 {
        let gpus = self.0.choose_whole(node);
        self.0.take_gpus(node, gpus);
        gpus
    }

    fn give_back(self, _: &mut Entry, node: &mut NodeState, gpus: u64) {
        self.0.return_gpus(node, gpus);
    }
}

#[derive(Debug)]
pub(crate) struct ShapeIndex {
    pub(crate) shape: Shape,
    /// Never given twice in the life of a pool.
    pub(crate) serial: u32,
    /// How much of the log has been applied.
    pub(crate) seen: usize,
    /// Set when the log no longer leads here from what the index holds.
    pub(crate) is_stale: bool,
    /// Tokens that fit in the pool. Written under the pool's lock only, read also without it.
    free: Arc<AtomicU64>,
    entries: Vec<Entry>,
    order: Order,
}

impl ShapeIndex {
    pub(crate) fn new(shape: Shape, serial: u32, free: Arc<AtomicU64>) -> Self {
        let (entries, order) = (Vec::new(), Order::default());
        Self { shape, serial, seen: 0, is_stale: true, free, entries, order }
    }

    /// Tokens of the shape that fit in the pool.
    #[inline]
    pub(crate) fn free_tokens(&self) -> u64 {
        self.free.load(Ordering::Relaxed)
    }

    #[inline]
    fn set_free(&self, tokens: u64) {
        self.free.store(tokens, Ordering::Relaxed);
    }

    /// Applies what happened to the nodes since the index was last used.
    #[inline(always)]
    pub(crate) fn catch_up(&mut self, nodes: &[NodeState], log: &[u32]) {
        self.catch_up_capped(nodes, log, |_| UNLIMITED);
    }

    /// The same, where more than the shape decides how many tokens fit on a node: at most `cap` of its position.
    #[inline(always)]
    pub(crate) fn catch_up_capped(&mut self, nodes: &[NodeState], log: &[u32], cap: impl Fn(u32) -> u32) {
        if self.is_stale || self.order.is_littered(nodes.len()) {
            self.rebuild(nodes, cap);
        } else if self.seen < log.len() {
            self.apply(nodes, &log[self.seen..], cap);
        }
        self.seen = log.len();
    }

    #[cold]
    fn rebuild(&mut self, nodes: &[NodeState], cap: impl Fn(u32) -> u32) {
        self.is_stale = false;
        self.entries.clear();
        self.order = Order::new(self.shape.room().key(), nodes.len());
        let mut free = 0;
        for (node, position) in nodes.iter().zip(0_u32..) {
            let is_active = node.phase == Phase::Active;
            let bucket = if is_active { self.order.bucket_of(node.room.key()) } else { NO_BUCKET };
            let entry = Entry::of(&self.shape, node, bucket, cap(position));
            free += u64::from(entry.fits);
            let arriving = u64::from(entry.fits > 0) << (position % 64);
            self.order.make(Step { to: bucket, word: position / 64, arriving, ..Step::NOBODY });
            self.entries.push(entry);
        }
        self.set_free(free);
    }

    fn apply(&mut self, nodes: &[NodeState], changed: &[u32], cap: impl Fn(u32) -> u32) {
        let mut free = self.free_tokens();
        for &position in changed {
            let node = &nodes[position as usize];
            let before = self.entries[position as usize];
            if before.bucket == NO_BUCKET {
                continue;
            }
            let bucket = self.order.bucket_near(before.bucket, node.room.key());
            let entry = Entry::of(&self.shape, node, bucket, cap(position));
            self.entries[position as usize] = entry;
            free = free + u64::from(entry.fits) - u64::from(before.fits);
            if before.bucket == bucket && (before.fits > 0) == (entry.fits > 0) {
                continue;
            }
            let bit = |is_in: bool| u64::from(is_in) << (position % 64);
            let (leaving, arriving) = (bit(before.fits > 0), bit(entry.fits > 0));
            self.order.make(Step { from: before.bucket, to: bucket, word: position / 64, leaving, arriving });
        }
        self.set_free(free);
    }

    /// Takes a token for each place in `out`, of which there are at most [`Self::free_tokens`].
    pub(crate) fn take(&mut self, nodes: &mut [NodeState], out: &mut [Held]) {
        self.set_free(self.free_tokens() - out.len() as u64);
        let mut left = out;
        while !left.is_empty() {
            let Some((from, word, mask)) = self.order.freest() else {
                debug_assert!(false, "{} tokens were counted that are not there", left.len());
                return;
            };
            let to = self.order.below(from);
            let (taken, rest) = left.split_at_mut(left.len().min(mask.count_ones() as usize));
            let first = word as usize * 64;
            let (nodes, entries) = (&mut nodes[first..], &mut self.entries[first..]);
            let run = Run { room: self.shape.room(), word, from, to };
            let (unused, full) = match self.shape.gpu {
                GpuShape::Share(share) => take_run(Share(share), run, (nodes, entries), mask, taken),
                _ => take_run(NoneOrWhole(self.shape), run, (nodes, entries), mask, taken),
            };
            let leaving = mask ^ unused;
            self.order.make(Step { from, to, word, leaving, arriving: leaving ^ full });
            left = rest;
        }
    }

    /// Takes one token, which must fit. On its own, since the loops of [`Self::take`] need so many registers that a
    /// single token would pay more for them than for being placed.
    #[inline(never)]
    pub(crate) fn take_one(&mut self, nodes: &mut [NodeState]) -> Option<Held> {
        let (from, word, mask) = self.order.freest()?;
        let to = self.order.below(from);
        let bit = mask & mask.wrapping_neg();
        let position = word * 64 + mask.trailing_zeros();
        let (node, entry) = (&mut nodes[position as usize], &mut self.entries[position as usize]);
        let gpus = match self.shape.gpu {
            GpuShape::Share(share) => Share(share).take(entry, node),
            _ => NoneOrWhole(self.shape).take(entry, node),
        };
        node.take(self.shape.room());
        entry.fits -= 1;
        entry.bucket = to;
        let arriving = if entry.fits > 0 { bit } else { 0 };
        let info = node.info;
        self.order.make(Step { from, to, word, leaving: bit, arriving });
        self.set_free(self.free_tokens() - 1);
        Some(Held::new(position, info, gpus))
    }

    /// Gives one token of the shape back, while the index is caught up. Whether a leaving node is empty now.
    #[inline(never)]
    pub(crate) fn give_one_back(&mut self, nodes: &mut [NodeState], token: Held) -> bool {
        let position = token.node();
        let (node, entry) = (&mut nodes[position as usize], &mut self.entries[position as usize]);
        if entry.bucket == NO_BUCKET {
            return give_back_inactive(self.shape, node, token);
        }
        match self.shape.gpu {
            GpuShape::Share(share) => Share(share).give_back(entry, node, token.gpus),
            _ => NoneOrWhole(self.shape).give_back(entry, node, token.gpus),
        }
        node.give_back(self.shape.room());
        let (from, arriving) = (entry.bucket, 1 << (position % 64));
        let to = self.order.above(from);
        let leaving = if entry.fits > 0 { arriving } else { 0 };
        entry.fits += 1;
        entry.bucket = to;
        self.order.make(Step { from, to, word: position / 64, leaving, arriving });
        self.set_free(self.free_tokens() + 1);
        false
    }

    /// Gives tokens of the shape back, while the index is caught up. Whether a leaving node is empty now.
    ///
    /// The last one first: that undoes what taking them did, so the chosen GPUs need hardly be searched for.
    pub(crate) fn give_back(&mut self, nodes: &mut [NodeState], tokens: &[Held]) -> bool {
        let mut has_left = false;
        let mut active = 0;
        let mut rest = tokens;
        while let Some((last, others)) = rest.split_last() {
            let (word, from) = (last.node() / 64, self.entries[last.node() as usize].bucket);
            if from == NO_BUCKET {
                has_left |= give_back_inactive(self.shape, &mut nodes[last.node() as usize], *last);
                rest = others;
                continue;
            }
            let to = self.order.above(from);
            let first = word as usize * 64;
            let (nodes, entries) = (&mut nodes[first..], &mut self.entries[first..]);
            let run = Run { room: self.shape.room(), word, from, to };
            let (leaving, arriving) = match self.shape.gpu {
                GpuShape::Share(share) => give_back_run(Share(share), run, (nodes, entries), rest),
                _ => give_back_run(NoneOrWhole(self.shape), run, (nodes, entries), rest),
            };
            self.order.make(Step { from, to, word, leaving, arriving });
            // A node is in one bucket at a time, so each of them had one of these tokens.
            let count = u64::count_ones(arriving) as usize;
            active += count;
            rest = &rest[..rest.len() - count];
        }
        self.set_free(self.free_tokens() + active as u64);
        has_left
    }
}

/// Gives a token back to a node that takes no new ones. Whether the node is left now.
#[cold]
fn give_back_inactive(shape: Shape, node: &mut NodeState, token: Held) -> bool {
    shape.restore(node, token.gpus);
    node.is_left()
}

/// What the nodes of one word have in common that make a step.
#[derive(Clone, Copy)]
struct Run {
    room: Room,
    word: u32,
    from: u32,
    to: u32,
}

/// Takes one token off each of the lowest nodes of a word's `mask`, as many as `out` has places. Nodes of one bucket
/// take turns: once a token is on one, the others are freer. What is left of the mask, and the nodes on which no
/// other token fits. Nodes and entries are those from the word's first on.
#[inline(never)]
fn take_run(
    kind: impl Gpus,
    run: Run,
    (nodes, entries): (&mut [NodeState], &mut [Entry]),
    mask: u64,
    out: &mut [Held],
) -> (u64, u64) {
    let nodes = &mut nodes[..entries.len()];
    let (mut rest, mut full) = (mask, 0);
    for held in out {
        let bit = rest.trailing_zeros();
        rest &= rest.wrapping_sub(1);
        let (node, entry) = (&mut nodes[bit as usize], &mut entries[bit as usize]);
        let gpus = kind.take(entry, node);
        node.take(run.room);
        entry.fits -= 1;
        entry.bucket = run.to;
        if entry.fits == 0 {
            full |= rarely(1 << bit);
        }
        *held = Held::new(run.word * 64 + bit, node.info, gpus);
    }
    (rest, full)
}

/// Keeps what is rare a jump away: without it every token pays for the case.
#[cold]
#[inline(never)]
fn rarely(bit: u64) -> u64 {
    bit
}

/// Gives back the last tokens that lie on nodes of one word and one bucket: which nodes leave the bucket, and which
/// arrive a step above it. Nodes and entries are those from the word's first on.
#[inline(never)]
fn give_back_run(
    kind: impl Gpus,
    run: Run,
    (nodes, entries): (&mut [NodeState], &mut [Entry]),
    tokens: &[Held],
) -> (u64, u64) {
    let len = entries.len().min(64);
    let (nodes, entries) = (&mut nodes[..len], &mut entries[..len]);
    let (mut arriving, mut were_full) = (0, 0);
    for token in tokens.iter().rev() {
        let bit = token.node().wrapping_sub(run.word * 64);
        let (Some(node), Some(entry)) = (nodes.get_mut(bit as usize), entries.get_mut(bit as usize)) else {
            break;
        };
        if entry.bucket != run.from {
            break;
        }
        kind.give_back(entry, node, token.gpus);
        node.give_back(run.room);
        arriving |= 1 << bit;
        if entry.fits == 0 {
            were_full |= rarely(1 << bit);
        }
        entry.fits += 1;
        entry.bucket = run.to;
    }
    (arriving ^ were_full, arriving)
}
