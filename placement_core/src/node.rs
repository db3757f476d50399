//! Nodes: how they are described, what is free on them, and how a list of them is checked.
//!
//! Invariants of [`NodeState`]: `room.gpu_micro` is the sum of the slots; a slot has at most [`WHOLE_GPU_MICRO`] free; slots
//! past `slot_count` have 0, so that nothing ever fits there; free never exceeds the supply the node was made with.

use std::collections::HashSet;

use crate::amount::{WHOLE_GPU_MICRO, memory_mib, milli_cpu};
use crate::error::{NodeFault, PlacementError};

/// GPUs a node can have: a token names its GPUs by a bit mask of this width.
pub const MAX_GPUS_PER_NODE: usize = 64;

/// Slots kept in the same cache line as the rest of the node.
const NEAR_SLOTS: usize = 8;
const FAR_SLOTS: usize = MAX_GPUS_PER_NODE - NEAR_SLOTS;

/// A node as it is described: its name (usually an address), GPU ids, CPU cores and GiB of memory.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct NodeSpec {
    /// Unique name within the pool.
    pub name: String,
    /// Ids of the GPUs; none for a node without.
    pub gpu_ids: Vec<i64>,
    /// CPU cores.
    pub cpu: f64,
    /// Memory in GiB.
    pub memory_gb: f64,
}

impl NodeSpec {
    /// A node's description. It is checked when it enters a pool, or by [`check_nodes`].
    #[must_use]
    pub fn new(name: impl Into<String>, gpu_ids: impl Into<Vec<i64>>, cpu: f64, memory_gb: f64) -> Self {
        Self { name: name.into(), gpu_ids: gpu_ids.into(), cpu, memory_gb }
    }
}

/// Every fault in a list of nodes: names that are empty or repeated, GPU ids that are negative, repeated or too many,
/// and supplies that are no amounts. An empty list means that a pool can be made of them.
#[must_use]
pub fn check_nodes(nodes: &[NodeSpec]) -> Vec<NodeFault> {
    let mut names = HashSet::new();
    let mut faults = Vec::new();
    for (index, node) in nodes.iter().enumerate() {
        let mut fault = |field, description: String| {
            faults.push(NodeFault { index, node: node.name.clone(), field, description });
        };
        if node.name.is_empty() {
            fault("node_ip", "must not be empty".into());
        } else if !names.insert(node.name.as_str()) {
            fault("node_ip", "is given twice".into());
        }
        if node.gpu_ids.len() > MAX_GPUS_PER_NODE {
            fault("gpus", format!("has {} GPUs, at most {MAX_GPUS_PER_NODE} can be", node.gpu_ids.len()));
        }
        let mut ids = HashSet::new();
        for &id in &node.gpu_ids {
            if !(0..=i64::from(u32::MAX)).contains(&id) {
                fault("gpus", format!("has the id {id}, which must be from 0 to {}", u32::MAX));
            } else if !ids.insert(id) {
                fault("gpus", format!("has the id {id} more than once"));
            }
        }
        for (field, amount) in [("cpu", milli_cpu(node.cpu)), ("memory_gb", memory_mib(node.memory_gb))] {
            match amount {
                Ok(units) if units > u64::from(u32::MAX) => {
                    fault(field, "is larger than what can be counted".into());
                }
                Err(PlacementError::InvalidAmount { value, fault: what, .. }) => {
                    fault(field, format!("{value} {what}"));
                }
                _ => {}
            }
        }
    }
    faults
}

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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Supply {
    pub(crate) gpus: u32,
    pub(crate) cpu_milli: u32,
    pub(crate) memory_mib: u32,
}

impl Supply {
    /// The supply of a node that [`check_nodes`] found nothing wrong with.
    pub(crate) fn of(spec: &NodeSpec) -> Self {
        let narrow = |amount: crate::Result<u64>| amount.ok().and_then(|units| u32::try_from(units).ok());
        Self {
            gpus: spec.gpu_ids.len() as u32,
            cpu_milli: narrow(milli_cpu(spec.cpu)).unwrap_or(0),
            memory_mib: narrow(memory_mib(spec.memory_gb)).unwrap_or(0),
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
    near: [u32; NEAR_SLOTS],
    far: Option<Box<[u32; FAR_SLOTS]>>,
}

impl NodeState {
    pub(crate) fn empty(supply: Supply, info: u32, phase: Phase) -> Self {
        let gpus = supply.gpus as usize;
        let mut near = [0; NEAR_SLOTS];
        near[..gpus.min(NEAR_SLOTS)].fill(WHOLE_GPU_MICRO);
        let far = (gpus > NEAR_SLOTS).then(|| {
            let mut far = Box::new([0; FAR_SLOTS]);
            far[..gpus - NEAR_SLOTS].fill(WHOLE_GPU_MICRO);
            far
        });
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
        self.near.iter().chain(far).take(usize::from(self.slot_count)).copied()
    }

    /// The slot that best fit prefers of those that hold `share`: [`Tightness::NONE`] if none does.
    pub(crate) fn tightest(&self, share: u32) -> Tightness {
        self.tightest_but(NO_SLOT, share)
    }

    /// The same, one slot left out.
    #[inline(never)]
    pub(crate) fn tightest_but(&self, left_out: u32, share: u32) -> Tightness {
        let mut least = least_surplus(&self.near, share, 0, left_out);
        if let Some(far) = &self.far {
            least = least.min(least_surplus(&far[..], share, NEAR_SLOTS as u32, left_out));
        }
        // A surplus is below 2^20, so that of a slot that fits stays below this; a negative one wraps to above it.
        if least < 1 << (20 + Tightness::SLOT_BITS) {
            Tightness(least + (share << Tightness::SLOT_BITS))
        } else {
            Tightness::NONE
        }
    }

    /// How tight one slot is.
    #[inline]
    pub(crate) fn tightness(&self, slot: u32) -> Tightness {
        if slot == NO_SLOT { Tightness::NONE } else { Tightness::new(self.free(slot), slot) }
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

    #[inline]
    pub(crate) fn slot_mut(&mut self, slot: u32) -> Option<&mut u32> {
        let slot = slot as usize;
        if slot < NEAR_SLOTS {
            return Some(&mut self.near[slot]);
        }
        self.far.as_deref_mut().and_then(|far| far.get_mut(slot - NEAR_SLOTS))
    }

    /// Free micro-GPU of one slot; 0 for a slot that is none.
    #[inline]
    pub(crate) fn free(&self, slot: u32) -> u32 {
        let slot = slot as usize;
        if slot < NEAR_SLOTS {
            return self.near[slot];
        }
        self.far.as_deref().and_then(|far| far.get(slot - NEAR_SLOTS)).copied().unwrap_or(0)
    }

    #[inline]
    pub(crate) fn set_free(&mut self, slot: u32, free: u32) {
        if let Some(place) = self.slot_mut(slot) {
            *place = free;
        }
    }

    /// Whether the node was only waiting for its last token.
    pub(crate) fn is_left(&self) -> bool {
        self.phase == Phase::Leaving && self.tokens == 0
    }
}

/// The lowest slot of a mask of slots.
#[inline]
pub(crate) fn lowest_slot(gpus: u64) -> u32 {
    // Never 0 for the compiler, which then needs no care for it; the topmost slot is the lowest when it is the only one.
    (gpus | 1 << (MAX_GPUS_PER_NODE - 1)).trailing_zeros()
}

/// Stands for no slot.
pub(crate) const NO_SLOT: u32 = MAX_GPUS_PER_NODE as u32;

/// A slot in the order of best fit, as one number: the less is free the better, of equals the lower.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Tightness(u32);

impl Tightness {
    const SLOT_BITS: u32 = MAX_GPUS_PER_NODE.ilog2();
    /// No slot: worse than any.
    pub(crate) const NONE: Self = Self(u32::MAX);

    #[inline]
    pub(crate) const fn new(free: u32, slot: u32) -> Self {
        // At most 10^6 is free, which leaves room for the slot.
        Self(free << Self::SLOT_BITS | slot)
    }

    #[inline]
    pub(crate) const fn slot(self) -> u32 {
        if self.0 == Self::NONE.0 { NO_SLOT } else { self.0 % (1 << Self::SLOT_BITS) }
    }
}

/// Least (surplus over the share, slot) of a run of slots as one number, so that the search has no branch.
#[inline]
fn least_surplus(slots: &[u32], share: u32, first_slot: u32, left_out: u32) -> u32 {
    let mut least = u32::MAX;
    for (slot, &free) in (first_slot..).zip(slots) {
        let here = free.wrapping_sub(share) << Tightness::SLOT_BITS | slot;
        least = least.min(if slot == left_out { u32::MAX } else { here });
    }
    least
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
        let supply = Supply { gpus: 12, cpu_milli: 0, memory_mib: 0 };
        let mut node = NodeState::empty(supply, 0, Phase::Active);
        assert_eq!(best_fit(&node, 1), 0);
        *node.slot_mut(10).unwrap() = 400_000;
        *node.slot_mut(11).unwrap() = 400_000;
        *node.slot_mut(3).unwrap() = 300_000;
        assert_eq!(best_fit(&node, 300_001), 10);
        assert_eq!(best_fit(&node, 300_000), 3);
        assert_eq!(best_fit(&node, 400_001), 0);
        assert_eq!(best_fit(&node, WHOLE_GPU_MICRO + 1), NO_SLOT);
        assert_eq!(node.tightest(300_001), node.tightness(10));
        assert_eq!(node.tightest_but(10, 300_001), node.tightness(11));
        assert_eq!(node.lowest_whole(4), Some(0b1_0111));
        assert_eq!(node.lowest_whole(10), None);
    }

    #[test]
    fn all_faults_are_found_at_once() {
        let nodes = [
            NodeSpec::new("a", [0, 0, -1], f64::NAN, -1.0),
            NodeSpec::new("a", [], 1.0, 1e300),
            NodeSpec::new("", (0..65).collect::<Vec<_>>(), 5e6, 1.0),
        ];
        let fields: Vec<_> = check_nodes(&nodes).iter().map(|fault| (fault.index, fault.field)).collect();
        let expected = [
            (0, "gpus"),
            (0, "gpus"),
            (0, "cpu"),
            (0, "memory_gb"),
            (1, "node_ip"),
            (1, "memory_gb"),
            (2, "node_ip"),
            (2, "gpus"),
            (2, "cpu"),
        ];
        assert_eq!(fields, expected);
    }
}
