//! The order of nodes for one shape: finds the freest node that fits without looking at those that do not.
//!
//! Nodes that fit the shape lie in buckets, one for each distinct amount of free room; the others are parked: in no
//! bucket. Placing a token moves its node to the bucket one step below, known by a link; nodes of one bucket and one
//! machine word move together.
//!
//! Invariants, once [`ShapeIndex::catch_up`] has run: `entries[i].fits` is what fits on node i and `free_tokens` their
//! sum; node i is in exactly the bucket of its room when it fits, in none otherwise; each bucket with nodes is in
//! `ranked` (which may hold emptied ones too, each bucket once).

use std::collections::{BinaryHeap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};

use crate::node::NodeState;
use crate::node_set::{NodeSet, SpareBitmaps};
use crate::shape::Shape;
use crate::token::Held;

const NONE: u32 = u32::MAX;
/// Buckets may outnumber the nodes by this factor before those that are empty are dropped.
const BUCKETS_PER_NODE: usize = 2;
const BUCKETS_AT_LEAST: usize = 64;

/// A change to a node: an entry of the log that indexes catch up from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Change {
    pub(crate) node: u32,
    /// The index that made it and has counted it already.
    pub(crate) by: u32,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    fits: u32,
    bucket: u32,
}

#[derive(Debug)]
struct Bucket {
    key: u128,
    nodes: NodeSet,
    /// The buckets one token of the shape below and above, once known.
    below: u32,
    above: u32,
    is_ranked: bool,
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
    free_tokens: u64,
    entries: Vec<Entry>,
    buckets: Vec<Bucket>,
    by_key: HashMap<u128, u32, BuildHasherDefault<KeyHasher>>,
    ranked: BinaryHeap<(u128, u32)>,
    spare: SpareBitmaps,
}

impl ShapeIndex {
    pub(crate) fn new(shape: Shape, serial: u32) -> Self {
        Self {
            shape,
            serial,
            seen: 0,
            is_stale: true,
            free_tokens: 0,
            entries: Vec::new(),
            buckets: Vec::new(),
            by_key: HashMap::default(),
            ranked: BinaryHeap::new(),
            spare: SpareBitmaps::default(),
        }
    }

    /// Tokens of the shape that fit in the pool.
    pub(crate) fn free_tokens(&self) -> u64 {
        self.free_tokens
    }

    /// Applies what happened to the nodes since the index was last used.
    #[inline]
    pub(crate) fn catch_up(&mut self, nodes: &[NodeState], log: &[Change]) {
        if self.is_stale || self.buckets.len() > BUCKETS_PER_NODE * nodes.len() + BUCKETS_AT_LEAST {
            self.rebuild(nodes);
        } else if self.seen < log.len() {
            self.apply(nodes, &log[self.seen..]);
        }
        self.seen = log.len();
    }

    fn rebuild(&mut self, nodes: &[NodeState]) {
        self.is_stale = false;
        self.free_tokens = 0;
        self.entries.clear();
        self.buckets.clear();
        self.by_key.clear();
        self.ranked.clear();
        self.spare = SpareBitmaps::for_nodes(nodes.len());
        for (position, node) in nodes.iter().enumerate() {
            let fits = self.shape.fits_active(node);
            self.free_tokens += u64::from(fits);
            let mut bucket = NONE;
            if fits > 0 {
                bucket = self.bucket_of(node.room.key());
                self.add(bucket, position as u32 / 64, 1 << (position % 64));
            }
            self.entries.push(Entry { fits, bucket });
        }
    }

    fn apply(&mut self, nodes: &[NodeState], changes: &[Change]) {
        let mut run = Run::default();
        for change in changes {
            let position = change.node as usize;
            let node = &nodes[position];
            let entry = &mut self.entries[position];
            if change.by != self.serial {
                let fits = self.shape.fits_active(node);
                self.free_tokens = self.free_tokens + u64::from(fits) - u64::from(entry.fits);
                entry.fits = fits;
            }
            let (from, fits) = (entry.bucket, entry.fits);
            let to = if fits > 0 { self.neighbour_of(from, node.room.key()) } else { NONE };
            if from == to {
                continue;
            }
            self.entries[position].bucket = to;
            let (word, bit) = (change.node / 64, 1 << (change.node % 64));
            if !run.joins(from, to, word) {
                self.flush(run);
                run = Run { from, to, word, mask: 0 };
            }
            run.mask |= bit;
        }
        self.flush(run);
    }

    #[inline]
    fn flush(&mut self, run: Run) {
        if run.mask == 0 {
            return;
        }
        if run.from != NONE {
            self.buckets[run.from as usize].nodes.remove(run.word, run.mask, &mut self.spare);
        }
        if run.to != NONE {
            self.add(run.to, run.word, run.mask);
        }
    }

    /// Counts one token of this shape as given back on a node; the node's bucket follows by way of the log.
    #[inline]
    pub(crate) fn count_returned(&mut self, node: u32) {
        if !self.is_stale {
            self.entries[node as usize].fits += 1;
            self.free_tokens += 1;
        }
    }

    /// Takes `count` tokens, which must be at most [`Self::free_tokens`].
    pub(crate) fn take(&mut self, nodes: &mut [NodeState], count: usize, mut out: impl FnMut(Held)) {
        self.free_tokens -= count as u64;
        let shape = self.shape;
        let mut left = count;
        while left > 0 {
            let Some(top) = self.freest() else {
                debug_assert!(false, "{left} tokens were counted that are not there");
                return;
            };
            let Some((word, mask)) = self.buckets[top as usize].nodes.lowest_word() else { return };
            let below = self.below(top);
            let (mut rest, mut kept) = (mask, 0);
            while rest != 0 && left > 0 {
                let bit = rest & rest.wrapping_neg();
                let position = word * 64 + rest.trailing_zeros();
                rest ^= bit;
                let node = &mut nodes[position as usize];
                let gpus = shape.place(node);
                out(Held { node: position, info: node.info, gpus });
                let entry = &mut self.entries[position as usize];
                entry.fits -= 1;
                let fits_again = entry.fits > 0;
                entry.bucket = if fits_again { below } else { NONE };
                kept |= if fits_again { bit } else { 0 };
                left -= 1;
            }
            self.buckets[top as usize].nodes.remove(word, mask ^ rest, &mut self.spare);
            if kept != 0 {
                self.add(below, word, kept);
            }
        }
    }

    /// The bucket with nodes that has the most room.
    #[inline]
    fn freest(&mut self) -> Option<u32> {
        loop {
            let &(_, bucket) = self.ranked.peek()?;
            if !self.buckets[bucket as usize].nodes.is_empty() {
                return Some(bucket);
            }
            self.buckets[bucket as usize].is_ranked = false;
            self.ranked.pop();
        }
    }

    #[inline]
    fn add(&mut self, bucket: u32, word: u32, mask: u64) {
        let target = &mut self.buckets[bucket as usize];
        target.nodes.insert(word, mask, &mut self.spare);
        if !target.is_ranked {
            target.is_ranked = true;
            self.ranked.push((target.key, bucket));
        }
    }

    fn below(&mut self, bucket: u32) -> u32 {
        let here = &self.buckets[bucket as usize];
        if here.below != NONE {
            return here.below;
        }
        let below = self.bucket_of(here.key - self.shape.key_step());
        self.buckets[bucket as usize].below = below;
        self.buckets[below as usize].above = bucket;
        below
    }

    /// The bucket of a key, which is likely the given bucket or the one above it.
    #[inline]
    fn neighbour_of(&mut self, bucket: u32, key: u128) -> u32 {
        if let Some(here) = self.buckets.get(bucket as usize) {
            if here.key == key {
                return bucket;
            }
            if let Some(above) = self.buckets.get(here.above as usize)
                && above.key == key
            {
                return here.above;
            }
        }
        self.bucket_of(key)
    }

    fn bucket_of(&mut self, key: u128) -> u32 {
        let buckets = &mut self.buckets;
        *self.by_key.entry(key).or_insert_with(|| {
            buckets.push(Bucket {
                key,
                nodes: NodeSet::default(),
                below: NONE,
                above: NONE,
                is_ranked: false,
            });
            buckets.len() as u32 - 1
        })
    }
}

/// Nodes of one word that move between the same two buckets.
#[derive(Clone, Copy, Default)]
struct Run {
    from: u32,
    to: u32,
    word: u32,
    mask: u64,
}

impl Run {
    #[inline]
    fn joins(self, from: u32, to: u32, word: u32) -> bool {
        self.mask != 0 && (self.from, self.to, self.word) == (from, to, word)
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
