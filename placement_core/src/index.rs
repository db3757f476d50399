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

use crate::held::Held;
use crate::node::{NodeState, Phase, Tightness};
use crate::order::{Order, Step};
use crate::shape::{GpuShape, Shape, UNLIMITED};

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
        if after.holds(self.0) {
            entry.chosen = after;
        } else {
            // Before the slot is written: reading several slots at once right after one was written stalls.
            entry.choose(node.tightest_from(before.next()));
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

    #[inline(never)]
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
        match self.shape.gpu {
            GpuShape::Share(share) => self.take_kind(Share(share), nodes, out),
            _ => self.take_kind(NoneOrWhole(self.shape), nodes, out),
        }
    }

    /// Nodes that go down several levels by one call change buckets once: that step is `pending` until others go another
    /// way.
    #[inline(never)]
    fn take_kind(&mut self, kind: impl Gpus, nodes: &mut [NodeState], out: &mut [Held]) {
        let room = self.shape.room();
        let mut pending = Step::NOBODY;
        let mut left = out;
        while !left.is_empty() {
            let Some((from, mut word, mut mask)) = self.order.freest_after(&mut pending) else {
                debug_assert!(false, "{} tokens were counted that are not there", left.len());
                return;
            };
            let to = self.order.below(from);
            while mask != 0 && !left.is_empty() {
                let (mut rest, mut full) = (mask, 0);
                while rest != 0 && !left.is_empty() {
                    // Neighbours, so that the loop over them need not look for the next one. Nodes of one bucket take
                    // turns: once a token is on one, the others are freer.
                    let bit = rest.trailing_zeros();
                    let first = word * 64 + bit;
                    let len = ((rest >> bit).trailing_ones() as usize).min(left.len());
                    let (out, later) = left.split_at_mut(len);
                    let nodes = &mut nodes[first as usize..][..len];
                    let entries = &mut self.entries[first as usize..][..len];
                    for (((node, entry), held), position) in
                        nodes.iter_mut().zip(entries).zip(out).zip(first..)
                    {
                        let gpus = kind.take(entry, node);
                        node.take(room);
                        entry.fits -= 1;
                        entry.bucket = to;
                        if entry.fits == 0 {
                            full |= rare_bit(position % 64);
                        }
                        *held = Held::new(position, node.info, gpus);
                    }
                    left = later;
                    rest &= !(u64::MAX >> (64 - len) << bit);
                }
                let leaving = mask ^ rest;
                let step = Step { from, to, word, leaving, arriving: leaving ^ full };
                if from == pending.to || self.order.are_all(from, word, leaving) {
                    self.order.make_after(&mut pending, step);
                    break;
                }
                self.order.make(step);
                (word, mask) = self.order.lowest(from);
            }
        }
        self.order.flush(&mut pending);
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
    pub(crate) fn give_one_back(&mut self, nodes: &mut [NodeState], token: &Held) -> bool {
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
        match self.shape.gpu {
            GpuShape::Share(share) => self.give_back_kind(Share(share), nodes, tokens),
            _ => self.give_back_kind(NoneOrWhole(self.shape), nodes, tokens),
        }
    }

    /// As in [`Self::take_kind`], nodes that go up several levels change buckets once.
    #[inline(never)]
    fn give_back_kind(&mut self, kind: impl Gpus, nodes: &mut [NodeState], tokens: &[Held]) -> bool {
        let room = self.shape.room();
        let (mut has_left, mut inactive) = (false, 0);
        let mut pending = Step::NOBODY;
        let mut left = tokens;
        while let Some((last, others)) = left.split_last() {
            let (word, from) = (last.node() / 64, self.entries[last.node() as usize].bucket);
            if from == NO_BUCKET {
                has_left |= give_back_inactive(self.shape, &mut nodes[last.node() as usize], last);
                inactive += 1;
                left = others;
                continue;
            }
            let to = self.order.above(from);
            // As many as lie on nodes of one word and one bucket: these nodes go a step up together.
            let first = word as usize * 64;
            let len = (self.entries.len() - first).min(64);
            let (nodes, entries) = (&mut nodes[first..][..len], &mut self.entries[first..][..len]);
            let (mut arriving, mut were_full) = (0, 0);
            let mut tokens = left.iter();
            while let Some(token) = tokens.as_slice().last() {
                let bit = token.node().wrapping_sub(word * 64) as usize;
                let (Some(node), Some(entry)) = (nodes.get_mut(bit), entries.get_mut(bit)) else { break };
                if entry.bucket != from {
                    break;
                }
                kind.give_back(entry, node, token.gpus);
                node.give_back(room);
                arriving |= 1 << bit;
                if entry.fits == 0 {
                    were_full |= rare_bit(bit as u32);
                }
                entry.fits += 1;
                entry.bucket = to;
                tokens.next_back();
            }
            left = tokens.as_slice();
            let leaving = arriving ^ were_full;
            let step = Step { from, to, word, leaving, arriving };
            if from == pending.to || self.order.are_all(from, word, leaving) {
                self.order.make_after(&mut pending, step);
            } else {
                self.order.make(step);
            }
        }
        self.order.flush(&mut pending);
        self.set_free(self.free_tokens() + (tokens.len() - inactive) as u64);
        has_left
    }
}

/// Gives a token back to a node that takes no new ones. Whether the node is left now.
#[cold]
fn give_back_inactive(shape: Shape, node: &mut NodeState, token: &Held) -> bool {
    shape.restore(node, token.gpus);
    node.is_left()
}

/// Keeps what is rare a call away: without it every token pays for the case.
#[cold]
#[inline(never)]
fn rare_bit(bit: u32) -> u64 {
    1 << bit
}
