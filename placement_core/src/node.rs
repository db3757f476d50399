//! Nodes: how they are described, what is free on them, and how a list of them is checked.
//!
//! Invariants of [`NodeState`]: `room.gpu` is the sum of `slots`; a slot is at most [`WHOLE_GPU_MICRO`]; slots past
//! `slot_count` are 0, so that nothing ever fits there; free never exceeds the supply the node was made with.

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

    /// The slot with the least free share that still holds `share`; of equals the lowest.
    #[inline]
    pub(crate) fn best_fit(&self, share: u32) -> Option<u32> {
        let mut best = tightest(&self.near, share, 0);
        if let Some(far) = &self.far {
            best = best.min(tightest(&far[..], share, NEAR_SLOTS as u32));
        }
        (best < TOO_SMALL).then_some(best & SLOT_MASK)
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
    pub(crate) fn slot(&self, slot: usize) -> u32 {
        self.slots().nth(slot).unwrap_or(0)
    }
}

const SLOT_BITS: u32 = 6;
const SLOT_MASK: u32 = (1 << SLOT_BITS) - 1;
// A slot's surplus is below 2^20, so a fitting one stays below this; a negative surplus wraps to above it.
const TOO_SMALL: u32 = 1 << (20 + SLOT_BITS);

/// Least (surplus, slot) of a run of slots as one number, so that the search has no branch.
#[inline]
fn tightest(slots: &[u32], share: u32, first_slot: u32) -> u32 {
    let mut best = u32::MAX;
    for (slot, &free) in (first_slot..).zip(slots) {
        best = best.min(free.wrapping_sub(share) << SLOT_BITS | slot);
    }
    best
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
        let supply = Supply { gpus: 12, cpu_milli: 0, memory_mib: 0 };
        let mut node = NodeState::empty(supply, 0, Phase::Active);
        assert_eq!(node.best_fit(1), Some(0));
        *node.slot_mut(10).unwrap() = 400_000;
        *node.slot_mut(11).unwrap() = 400_000;
        *node.slot_mut(3).unwrap() = 300_000;
        assert_eq!(node.best_fit(300_001), Some(10));
        assert_eq!(node.best_fit(300_000), Some(3));
        assert_eq!(node.best_fit(400_001), Some(0));
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
