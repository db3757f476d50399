//! Nodes as a pool keeps them: what never changes, what they supply, and what is free on them.
//!
//! Invariants of [`NodeState`]: `room.gpu_micro` is the sum of the slots; a slot has at most [`WHOLE_GPU_MICRO`] free; slots
//! past `slot_count` have 0, so that nothing ever fits there; free never exceeds the supply the node was made with.

use std::sync::Arc;

use crate::amount::{WHOLE_GPU_MICRO, memory_mib, milli_cpu};
use crate::extras::Extras;
use crate::node_spec::NodeSpec;

/// GPUs a node can have: a token names its GPUs by a bit mask of this width.
pub const MAX_GPUS_PER_NODE: usize = 64;

/// Slots kept in the same cache line as the rest of the node.
const NEAR_SLOTS: usize = 8;
const FAR_SLOTS: usize = MAX_GPUS_PER_NODE - NEAR_SLOTS;

/// What never changes about a node and outlives it, so that tokens stay readable after it is gone.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(crate) struct NodeInfo {
    pub(crate) name: String,
    /// Ascending, so that the lowest slot is the lowest id.
    pub(crate) gpu_ids: Vec<u32>,
}

impl NodeInfo {
    pub(crate) fn of(spec: &NodeSpec) -> Self {
        let mut gpu_ids: Vec<u32> = spec.gpu_ids.iter().filter_map(|&id| u32::try_from(id).ok()).collect();
        gpu_ids.sort_unstable();
        Self { name: spec.name.clone(), gpu_ids }
    }

    /// The ids behind a mask of slots, ascending.
    pub(crate) fn ids_of(&self, gpus: u64) -> Vec<u32> {
        let mut rest = gpus;
        let mut ids = Vec::with_capacity(gpus.count_ones() as usize);
        while rest != 0 {
            ids.push(self.gpu_ids[rest.trailing_zeros() as usize]);
            rest &= rest - 1;
        }
        ids
    }

    /// The slot of a GPU id.
    pub(crate) fn slot_of(&self, gpu_id: u32) -> Option<usize> {
        self.gpu_ids.binary_search(&gpu_id).ok()
    }
}

/// What a node supplies when nothing is placed on it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(crate) struct Supply {
    pub(crate) gpus: u32,
    pub(crate) cpu_milli: u32,
    pub(crate) memory_mib: u32,
    pub(crate) extras: Option<Arc<Extras>>,
}

impl Supply {
    /// The supply of a node that [`check_nodes`] found nothing wrong with.
    pub(crate) fn of(spec: &NodeSpec) -> Self {
        let narrow = |amount: crate::Result<u64>| amount.ok().and_then(|units| u32::try_from(units).ok());
        Self {
            gpus: spec.gpu_ids.len() as u32,
            cpu_milli: narrow(milli_cpu(spec.cpu)).unwrap_or(0),
            memory_mib: narrow(memory_mib(spec.memory_gb)).unwrap_or(0),
            extras: Extras::shared(
                spec.named
                    .iter()
                    .filter(|&(_, &count)| count > 0)
                    .map(|(name, &count)| (name.clone(), count))
                    .collect(),
                spec.labels.clone(),
            ),
        }
    }
}

/// Free amounts of a node, in the order in which nodes are preferred.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Room {
    pub(crate) gpu_micro: u32,
    pub(crate) cpu_milli: u32,
    pub(crate) memory_mib: u32,
}

impl Room {
    /// One number that orders rooms as nodes are chosen: GPU, then CPU, then memory.
    pub(crate) const fn key(self) -> u128 {
        (self.gpu_micro as u128) << 64 | (self.cpu_milli as u128) << 32 | self.memory_mib as u128
    }
}

/// Whether a node takes tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Takes tokens.
    Active,
    /// Takes none, stays.
    Draining,
    /// Takes none, goes when the last token does.
    Leaving,
    /// A place in the table that no node has.
    Vacant,
}

/// What is free on a node now; one cache line for up to eight GPUs.
#[derive(Debug, Clone)]
#[repr(align(64))]
pub(crate) struct NodeState {
    pub(crate) room: Room,
    /// Tokens held on the node.
    pub(crate) tokens: u32,
    /// Position of its [`NodeInfo`] in the pool's table.
    pub(crate) info: u32,
    pub(crate) slot_count: u8,
    pub(crate) phase: Phase,
    /// Each slot with what is free on it. One number holds both, so that the tightest is simply the least.
    near: [Tightness; NEAR_SLOTS],
    far: Option<Box<[Tightness; FAR_SLOTS]>>,
}

impl NodeState {
    pub(crate) fn empty(supply: &Supply, info: u32, phase: Phase) -> Self {
        let gpus = supply.gpus as usize;
        let slot = |at: usize| Tightness::new(if at < gpus { WHOLE_GPU_MICRO } else { 0 }, at as u32);
        let near = std::array::from_fn(slot);
        let far = (gpus > NEAR_SLOTS).then(|| Box::new(std::array::from_fn(|at| slot(NEAR_SLOTS + at))));
        let room = Room {
            gpu_micro: supply.gpus * WHOLE_GPU_MICRO,
            cpu_milli: supply.cpu_milli,
            memory_mib: supply.memory_mib,
        };
        Self { room, tokens: 0, info, slot_count: gpus as u8, phase, near, far }
    }

    /// Free micro-GPU of each GPU, ascending by id.
    pub(crate) fn slots(&self) -> impl Iterator<Item = u32> + '_ {
        let far = self.far.as_deref().map_or(&[][..], |slots| &slots[..]);
        self.near.iter().chain(far).take(usize::from(self.slot_count)).map(|slot| slot.free())
    }

    /// The slot that best fit prefers of those that hold `share`: [`Tightness::NONE`] if none does.
    pub(crate) fn tightest(&self, share: u32) -> Tightness {
        self.tightest_from(Tightness::new(share, 0))
    }

    /// The tightest slot that is no tighter than `least`.
    #[inline(never)]
    pub(crate) fn tightest_from(&self, least: Tightness) -> Tightness {
        let near = first_from(&self.near, least);
        match &self.far {
            None => near,
            Some(far) => near.min(tightest_far(far.as_chunks().0, least)),
        }
    }

    /// The `count` lowest slots that are entirely free, as a mask.
    pub(crate) fn lowest_whole(&self, count: u32) -> Option<u64> {
        let mut mask = 0;
        let mut missing = count;
        for (slot, free) in self.slots().enumerate() {
            if missing == 0 {
                break;
            }
            if free == WHOLE_GPU_MICRO {
                mask |= 1 << slot;
                missing -= 1;
            }
        }
        (missing == 0).then_some(mask)
    }

    /// One slot, which the node must have.
    #[inline]
    pub(crate) fn slot(&self, slot: u32) -> Tightness {
        let at = slot as usize;
        if at < NEAR_SLOTS {
            return self.near[at];
        }
        let far = self.far.as_deref().and_then(|far| far.get(at - NEAR_SLOTS));
        far.copied().unwrap_or(Tightness::new(0, slot))
    }

    /// Changes what is free on one slot.
    #[inline]
    pub(crate) fn set(&mut self, slot: Tightness) {
        let at = slot.slot() as usize;
        if at < NEAR_SLOTS {
            self.near[at] = slot;
        } else if let Some(place) = self.far.as_deref_mut().and_then(|far| far.get_mut(at - NEAR_SLOTS)) {
            *place = slot;
        }
    }

    /// Takes what a token takes off the node as a whole. Its GPUs are taken apart from this.
    #[inline]
    pub(crate) fn take(&mut self, room: Room) {
        self.room.gpu_micro -= room.gpu_micro;
        self.room.cpu_milli -= room.cpu_milli;
        self.room.memory_mib -= room.memory_mib;
        self.tokens += 1;
    }

    /// Undoes [`Self::take`].
    #[inline]
    pub(crate) fn give_back(&mut self, room: Room) {
        self.room.gpu_micro += room.gpu_micro;
        self.room.cpu_milli += room.cpu_milli;
        self.room.memory_mib += room.memory_mib;
        self.tokens -= 1;
    }

    /// Whether the node was only waiting for its last token.
    pub(crate) fn is_left(&self) -> bool {
        self.phase == Phase::Leaving && self.tokens == 0
    }
}

/// A slot in the order of best fit, as one number: the less is free the better, of equals the lower.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Tightness(u32);

impl Tightness {
    // One more than the slots need, so that no slot is that of `NONE`.
    const SLOT_BITS: u32 = MAX_GPUS_PER_NODE.ilog2() + 1;
    /// No slot: worse than any.
    pub(crate) const NONE: Self = Self(i32::MAX as u32);

    #[inline]
    pub(crate) const fn new(free: u32, slot: u32) -> Self {
        // At most 10^6 is free, which leaves room for the slot, and for a share more.
        Self(free << Self::SLOT_BITS | slot)
    }

    #[inline]
    pub(crate) const fn slot(self) -> u32 {
        self.0 % (1 << Self::SLOT_BITS)
    }

    #[inline]
    pub(crate) const fn free(self) -> u32 {
        self.0 >> Self::SLOT_BITS
    }

    /// Whether a share fits.
    #[inline]
    pub(crate) const fn holds(self, share: u32) -> bool {
        // The slot is in the low bits and changes nothing about it; the other side is what `less` takes off.
        self.0 >= share << Self::SLOT_BITS
    }

    /// The same slot with less free.
    #[inline]
    pub(crate) const fn less(self, share: u32) -> Self {
        Self(self.0 - (share << Self::SLOT_BITS))
    }

    /// The same slot with more free.
    #[inline]
    pub(crate) const fn more(self, share: u32) -> Self {
        Self(self.0 + (share << Self::SLOT_BITS))
    }

    /// The least that any other slot can be which is not as tight.
    #[inline]
    pub(crate) const fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

/// The tightest of eight slots that is no tighter than `least`.
#[inline]
fn first_from(slots: &[Tightness; NEAR_SLOTS], least: Tightness) -> Tightness {
    // What is below `least` wraps to the far end of the numbers. These are signed and begin at the lowest one, because
    // that is what the vector instructions of every x86-64 compare; there is no branch.
    let origin = least.0 ^ 1 << 31;
    let place = |at: usize| slots[at].0.wrapping_sub(origin).cast_signed();
    let four: [i32; 4] = std::array::from_fn(|at| place(at).min(place(at + 4)));
    let first = four[0].min(four[2]).min(four[1].min(four[3]));
    if first < 0 { Tightness(first.cast_unsigned().wrapping_add(origin)) } else { Tightness::NONE }
}

#[cold]
#[inline(never)]
fn tightest_far(far: &[[Tightness; NEAR_SLOTS]], least: Tightness) -> Tightness {
    far.iter().map(|slots| first_from(slots, least)).min().unwrap_or(Tightness::NONE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_of_eight_gpus_is_one_cache_line() {
        assert_eq!(size_of::<NodeState>(), 64);
    }

    #[test]
    fn best_fit_prefers_the_tightest_then_the_lowest() {
        let best_fit = |node: &NodeState, share| node.tightest(share).slot();
        let supply = Supply { gpus: 12, ..Supply::default() };
        let mut node = NodeState::empty(&supply, 0, Phase::Active);
        assert_eq!(best_fit(&node, 1), 0);
        node.set(Tightness::new(400_000, 10));
        node.set(Tightness::new(400_000, 11));
        node.set(Tightness::new(300_000, 3));
        assert_eq!(best_fit(&node, 300_001), 10);
        assert_eq!(best_fit(&node, 300_000), 3);
        assert_eq!(best_fit(&node, 400_001), 0);
        assert_eq!(node.tightest(WHOLE_GPU_MICRO + 1), Tightness::NONE);
        assert_eq!(node.tightest(300_001), node.slot(10));
        assert_eq!(node.tightest_from(node.slot(10).next()), node.slot(11));
        assert_eq!(node.lowest_whole(4), Some(0b1_0111));
        assert_eq!(node.lowest_whole(10), None);
    }
}
