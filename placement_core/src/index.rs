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

use crate::node::{NO_SLOT, NodeState, Phase, Tightness, lowest_slot};
use crate::order::{Order, Step};
use crate::shape::{GpuShape, Shape};
use crate::token::Held;

/// One node as the shape sees it.
#[derive(Debug, Clone, Copy)]
struct Entry {
    /// Tokens that fit.
    fits: u32,
    /// The bucket of the node's room; the node is in it when a token fits.
    bucket: u32,
    /// For a share: the GPU that the next token gets, whatever CPU and memory say. Kept, not searched for: a GPU that
    /// was the tightest is so all the more once a token is on it, until it is full.
    slot: u32,
    /// No other GPU that the share fits on is tighter than this.
    rival: Tightness,
}

impl Entry {
    #[inline]
    fn of(shape: &Shape, node: &NodeState, bucket: u32) -> Self {
        let fits = shape.fits_active(node);
        let mut entry = Self { fits, bucket, slot: NO_SLOT, rival: Tightness::NONE };
        if let GpuShape::Share(share) = shape.gpu {
            entry.choose(node.tightest(share));
        }
        entry
    }

    #[inline]
    fn choose(&mut self, tightest: Tightness) {
        // The others are no tighter than the chosen one is now, and stay so while it fills up and empties again.
        self.rival = tightest;
        self.slot = tightest.slot();
    }
}

/// How GPUs of a node are taken and given back. Loops over tokens are compiled once for each implementation, so that
/// the most frequent kind of shape does not ask for every token which kind it is.
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
        let slot = entry.slot;
        let left = node.free(slot) - self.0;
        if left < self.0 {
            // Before the slot is written: reading several slots at once right after one was written stalls.
            entry.choose(node.tightest_but(slot, self.0));
        }
        node.set_free(slot, left);
        1 << slot
    }

    #[inline(always)]
    fn give_back(self, entry: &mut Entry, node: &mut NodeState, gpus: u64) {
        let slot = lowest_slot(gpus);
        let free = node.free(slot) + self.0;
        let here = Tightness::new(free, slot);
        if slot == entry.slot {
            if here > entry.rival {
                entry.choose(here.min(node.tightest_but(slot, self.0)));
            }
        } else {
            let chosen = node.tightness(entry.slot);
            if here < chosen {
                (entry.slot, entry.rival) = (slot, chosen);
            } else {
                entry.rival = entry.rival.min(here);
            }
        }
        node.set_free(slot, free);
    }
}

/// No GPU, or whole ones.
#[derive(Clone, Copy)]
struct NoneOrWhole(Shape);

impl Gpus for NoneOrWhole {
    fn take(self, _: &mut Entry, node: &mut NodeState) -> u64 {
        let gpus = self.0.choose(node);
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
        if self.is_stale || self.order.is_littered(nodes.len()) {
            self.rebuild(nodes);
        } else if self.seen < log.len() {
            self.apply(nodes, &log[self.seen..]);
        }
        self.seen = log.len();
    }

    #[cold]
    fn rebuild(&mut self, nodes: &[NodeState]) {
        self.is_stale = false;
        self.entries.clear();
        self.order = Order::new(self.shape.key_step(), nodes.len());
        let mut free = 0;
        for (node, position) in nodes.iter().zip(0_u32..) {
            let bucket = self.order.bucket_of(node.room.key());
            let entry = Entry::of(&self.shape, node, bucket);
            free += u64::from(entry.fits);
            let arriving = u64::from(entry.fits > 0) << (position % 64);
            self.order.make(Step { to: bucket, word: position / 64, arriving, ..Step::NOBODY });
            self.entries.push(entry);
        }
        self.set_free(free);
    }

    fn apply(&mut self, nodes: &[NodeState], changed: &[u32]) {
        let mut free = self.free_tokens();
        for &position in changed {
            let node = &nodes[position as usize];
            let before = self.entries[position as usize];
            let bucket = self.order.bucket_near(before.bucket, node.room.key());
            let entry = Entry::of(&self.shape, node, bucket);
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
            let (unused, arriving) = match self.shape.gpu {
                GpuShape::Share(share) => {
                    take_run(Share(share), self.shape, (nodes, entries), mask, to, word, taken)
                }
                _ => take_run(NoneOrWhole(self.shape), self.shape, (nodes, entries), mask, to, word, taken),
            };
            self.order.make(Step { from, to, word, leaving: mask ^ unused, arriving });
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
        self.shape.take_rest(node);
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
        match self.shape.gpu {
            GpuShape::Share(share) => Share(share).give_back(entry, node, token.gpus),
            _ => NoneOrWhole(self.shape).give_back(entry, node, token.gpus),
        }
        self.shape.return_rest(node);
        if node.phase != Phase::Active {
            return node.is_left();
        }
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
    pub(crate) fn give_back(&mut self, nodes: &mut [NodeState], tokens: &[Held]) -> bool {
        let all_active = match self.shape.gpu {
            GpuShape::Share(share) => return_all(Share(share), self.shape, nodes, &mut self.entries, tokens),
            _ => return_all(NoneOrWhole(self.shape), self.shape, nodes, &mut self.entries, tokens),
        };
        if all_active {
            self.count_returned(tokens);
            return false;
        }
        self.count_active(nodes, tokens)
    }

    /// Moves nodes of tokens that came back a step up, those of one word and one bucket together.
    #[inline(never)]
    fn count_returned(&mut self, tokens: &[Held]) {
        let entries = &mut self.entries[..];
        let mut rest = tokens;
        while let Some(first) = rest.first() {
            let (word, from) = (first.node() / 64, entries[first.node() as usize].bucket);
            let to = self.order.above(from);
            let (mut leaving, mut arriving) = (0, 0);
            while let Some((token, others)) = rest.split_first() {
                let entry = &mut entries[token.node() as usize];
                if entry.bucket != from || token.node() / 64 != word {
                    break;
                }
                let bit = token.node() % 64;
                leaving |= u64::from(entry.fits > 0) << bit;
                arriving |= 1 << bit;
                entry.fits += 1;
                entry.bucket = to;
                rest = others;
            }
            self.order.make(Step { from, to, word, leaving, arriving });
        }
        self.set_free(self.free_tokens() + tokens.len() as u64);
    }

    /// As [`Self::count_returned`], of the tokens whose nodes take new ones. Whether a leaving node is empty now.
    #[cold]
    fn count_active(&mut self, nodes: &[NodeState], tokens: &[Held]) -> bool {
        let node = |token: &Held| &nodes[token.node() as usize];
        let is_active = |token: &&Held| node(token).phase == Phase::Active;
        let active: Vec<Held> = tokens.iter().filter(is_active).copied().collect();
        self.count_returned(&active);
        tokens.iter().any(|token| node(token).is_left())
    }
}

/// Takes one token off each of the lowest nodes of a word's `mask`, as many as `out` has places. Nodes of one bucket
/// take turns: once a token is on one, the others are freer. What is left of the mask, and the nodes on which another
/// token fits. Nodes and entries are those from the word's first on.
#[inline(never)]
fn take_run(
    kind: impl Gpus,
    shape: Shape,
    (nodes, entries): (&mut [NodeState], &mut [Entry]),
    mask: u64,
    to: u32,
    word: u32,
    out: &mut [Held],
) -> (u64, u64) {
    let (mut rest, mut arriving) = (mask, 0);
    for held in out {
        let bit = rest.trailing_zeros();
        rest &= rest.wrapping_sub(1);
        let (node, entry) = (&mut nodes[bit as usize], &mut entries[bit as usize]);
        let gpus = kind.take(entry, node);
        shape.take_rest(node);
        entry.fits -= 1;
        entry.bucket = to;
        arriving |= u64::from(entry.fits > 0) << bit;
        *held = Held::new(word * 64 + bit, node.info, gpus);
    }
    (rest, arriving)
}

/// Gives nodes back what tokens took. Whether all of these nodes take new ones.
#[inline(never)]
fn return_all(
    kind: impl Gpus,
    shape: Shape,
    nodes: &mut [NodeState],
    entries: &mut [Entry],
    tokens: &[Held],
) -> bool {
    let mut all_active = true;
    for token in tokens {
        let at = token.node() as usize;
        let (node, entry) = (&mut nodes[at], &mut entries[at]);
        kind.give_back(entry, node, token.gpus);
        shape.return_rest(node);
        all_active &= node.phase == Phase::Active;
    }
    all_active
}
