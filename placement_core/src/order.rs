//! Nodes in the order in which one shape prefers them.
//!
//! Nodes with the same free room are equal but for their position, so they share a bucket. A token of the shape moves its
//! node one step down when it is placed and one step up when it is given back; the bucket a step away is known by a link,
//! and nodes of one machine word that make the same step move together.
//!
//! Invariants: each bucket with nodes is `top` or in `ranked`, and in one of them once; both may hold emptied ones too; no
//! key in `ranked` is above that of `top`; links join buckets whose keys are exactly one step apart.

#![allow(clippy::inline_always, reason = "a call would pass what is in registers through memory")]

use std::collections::{BinaryHeap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};

use crate::node_set::{NodeSet, SpareBitmaps};

const NONE: u32 = u32::MAX;
/// Buckets may outnumber the nodes by this factor before the order is made anew without those that are empty.
const BUCKETS_PER_NODE: usize = 2;
const BUCKETS_AT_LEAST: usize = 64;

#[derive(Debug)]
struct Bucket {
    nodes: NodeSet,
    /// The buckets one token of the shape below and above, once known.
    below: u32,
    above: u32,
    /// Whether it is `top` or in `ranked`.
    is_ranked: bool,
    key: u128,
}

/// Nodes of one word that make the same step. Which of them leave and which arrive differs: a node that the shape does
/// not fit on is in no bucket.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Step {
    pub(crate) from: u32,
    pub(crate) to: u32,
    pub(crate) word: u32,
    pub(crate) leaving: u64,
    pub(crate) arriving: u64,
}

impl Step {
    /// A step that no node makes.
    pub(crate) const NOBODY: Self = Self { from: NONE, to: NONE, word: NONE, leaving: 0, arriving: 0 };
}

#[derive(Debug, Default)]
pub(crate) struct Order {
    /// What one token takes, as a difference of keys.
    step: u128,
    buckets: Vec<Bucket>,
    by_key: HashMap<u128, u32, BuildHasherDefault<KeyHasher>>,
    /// Apart from the others, so that nodes which come back to the top take no heap along.
    top: Option<u32>,
    ranked: BinaryHeap<(u128, u32)>,
    spare: SpareBitmaps,
}

impl Order {
    /// An empty order for positions below `nodes`.
    pub(crate) fn new(step: u128, nodes: usize) -> Self {
        Self { step, spare: SpareBitmaps::for_nodes(nodes), ..Self::default() }
    }

    /// Whether so many buckets were left behind that the order should be made anew.
    pub(crate) fn is_littered(&self, nodes: usize) -> bool {
        self.buckets.len() > BUCKETS_PER_NODE * nodes + BUCKETS_AT_LEAST
    }

    /// The bucket with the most room that has nodes, and its lowest nodes as a word.
    #[inline(always)]
    pub(crate) fn freest(&mut self) -> Option<(u32, u32, u64)> {
        loop {
            let bucket = self.top?;
            let (word, mask) = self.buckets[bucket as usize].nodes.lowest_word();
            if mask != 0 {
                return Some((bucket, word, mask));
            }
            self.drop_emptied(bucket);
        }
    }

    #[inline(never)]
    fn drop_emptied(&mut self, top: u32) {
        self.buckets[top as usize].is_ranked = false;
        self.top = self.ranked.pop().map(|(_, bucket)| bucket);
    }

    /// Ranks a bucket that got nodes.
    #[inline(never)]
    fn rank(&mut self, bucket: u32) {
        let key = self.buckets[bucket as usize].key;
        self.buckets[bucket as usize].is_ranked = true;
        let Some(top) = self.top else {
            self.top = Some(bucket);
            return;
        };
        let Bucket { key: top_key, nodes, is_ranked, .. } = &mut self.buckets[top as usize];
        if key < *top_key {
            self.ranked.push((key, bucket));
            return;
        }
        self.top = Some(bucket);
        if nodes.is_empty() {
            *is_ranked = false;
        } else {
            self.ranked.push((*top_key, top));
        }
    }

    #[inline(always)]
    pub(crate) fn make(&mut self, step: Step) {
        if step.leaving != 0 {
            self.buckets[step.from as usize].nodes.remove(step.word, step.leaving, &mut self.spare);
        }
        if step.arriving != 0 {
            let target = &mut self.buckets[step.to as usize];
            target.nodes.insert(step.word, step.arriving, &mut self.spare);
            if !target.is_ranked {
                self.rank(step.to);
            }
        }
    }

    /// Whether these are all nodes of a bucket.
    #[inline(always)]
    pub(crate) fn are_all(&self, bucket: u32, word: u32, nodes: u64) -> bool {
        self.buckets[bucket as usize].nodes.is_just(word, nodes)
    }

    /// The lowest nodes of a bucket, as a word; no nodes if there are none.
    #[inline(always)]
    pub(crate) fn lowest(&self, bucket: u32) -> (u32, u64) {
        self.buckets[bucket as usize].nodes.lowest_word()
    }

    /// The bucket with the most room once `pending` is made, with its lowest nodes. `pending`, which empties its bucket,
    /// is made, unless its nodes are the freest themselves: then they go on, and one step is made in place of two.
    #[inline(always)]
    pub(crate) fn freest_after(&mut self, pending: &mut Step) -> Option<(u32, u32, u64)> {
        if pending.arriving != 0 {
            let target = &self.buckets[pending.to as usize];
            if target.nodes.is_empty() && self.ranked.peek().is_none_or(|next| next.0 <= target.key) {
                return Some((pending.to, pending.word, pending.arriving));
            }
        }
        self.flush(pending);
        self.freest()
    }

    /// Makes `pending` if there is one.
    #[inline(always)]
    pub(crate) fn flush(&mut self, pending: &mut Step) {
        if pending.from != NONE {
            self.make(std::mem::replace(pending, Step::NOBODY));
        }
    }

    /// Makes a step after `pending`; both in one, at a later time, when the nodes are the same.
    #[inline(always)]
    pub(crate) fn make_after(&mut self, pending: &mut Step, step: Step) {
        if (step.from, step.word, step.leaving) == (pending.to, pending.word, pending.arriving) {
            (pending.to, pending.arriving) = (step.to, step.arriving);
        } else {
            self.flush(pending);
            *pending = step;
        }
    }

    /// The bucket of the room that is left when a token is placed.
    #[inline]
    pub(crate) fn below(&mut self, bucket: u32) -> u32 {
        let here = &self.buckets[bucket as usize];
        if here.below == NONE { self.link_below(bucket) } else { here.below }
    }

    /// The bucket of the room that is there when a token is given back.
    #[inline]
    pub(crate) fn above(&mut self, bucket: u32) -> u32 {
        let here = &self.buckets[bucket as usize];
        if here.above == NONE { self.link_above(bucket) } else { here.above }
    }

    #[cold]
    fn link_above(&mut self, bucket: u32) -> u32 {
        let above = self.bucket_of(self.buckets[bucket as usize].key + self.step);
        self.link_below(above);
        above
    }

    #[cold]
    fn link_below(&mut self, bucket: u32) -> u32 {
        let below = self.bucket_of(self.buckets[bucket as usize].key - self.step);
        self.buckets[bucket as usize].below = below;
        self.buckets[below as usize].above = bucket;
        below
    }

    /// The bucket of a key, which is likely the given bucket or a step above it.
    #[inline]
    pub(crate) fn bucket_near(&mut self, bucket: u32, key: u128) -> u32 {
        let here = &self.buckets[bucket as usize];
        if here.key == key {
            return bucket;
        }
        match self.buckets.get(here.above as usize) {
            Some(above) if above.key == key => here.above,
            _ => self.bucket_of(key),
        }
    }

    /// The bucket of a key, made if there is none.
    pub(crate) fn bucket_of(&mut self, key: u128) -> u32 {
        let buckets = &mut self.buckets;
        *self.by_key.entry(key).or_insert_with(|| {
            buckets.push(Bucket {
                nodes: NodeSet::default(),
                below: NONE,
                above: NONE,
                is_ranked: false,
                key,
            });
            buckets.len() as u32 - 1
        })
    }
}

/// Mixes a room's key; nobody outside chooses keys to collide, beyond what the amounts of real nodes allow.
#[derive(Default)]
struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u128(u128::from(byte));
        }
    }

    fn write_u128(&mut self, key: u128) {
        const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
        let folded = (key as u64) ^ ((key >> 64) as u64).rotate_left(32).wrapping_mul(ODD);
        let mixed = (self.0 ^ folded).wrapping_mul(ODD);
        self.0 = mixed ^ mixed >> 29;
    }
}
