//! A demand narrowed to what one node can count, with the arithmetic of placing it.
//!
//! Placing one token of a shape lowers the number of tokens of that shape that fit on the node by exactly one, and
//! taking it back raises it by exactly one: floor((f - s) / s) = floor(f / s) - 1 for the GPU that is chosen, for CPU
//! and for memory alike. So how many tokens fit in the pool is kept by counting, and a batch is refused before
//! anything is touched.

use std::sync::Arc;

use crate::amount::WHOLE_GPU_MICRO;
use crate::extras::Extras;
use crate::node::{NodeState, Phase, Room, Supply, Tightness};
use crate::resource::{Demand, GpuDemand};

/// "No limit" when tokens are counted.
pub(crate) const UNLIMITED: u32 = u32::MAX;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum GpuShape {
    None,
    Share(u32),
    Whole(u32),
}

/// One sample's demand in the width of a node's amounts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    pub(crate) gpu: GpuShape,
    pub(crate) cpu_milli: u32,
    pub(crate) memory_mib: u32,
}

/// How often a shape fits on a node, by each thing it needs; [`UNLIMITED`] for what it does not need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fits {
    pub(crate) gpu: u32,
    pub(crate) cpu: u32,
    pub(crate) memory: u32,
}

impl Fits {
    pub(crate) fn all(self) -> u32 {
        self.gpu.min(self.cpu).min(self.memory)
    }
}

impl Shape {
    /// `None` when no node could ever hold a demand of these amounts.
    pub(crate) fn of(gpu: GpuDemand, cpu_milli: u64, memory_mib: u64) -> Option<Self> {
        let gpu = match gpu {
            GpuDemand::None => GpuShape::None,
            GpuDemand::Share(micro) => GpuShape::Share(micro),
            GpuDemand::Whole(gpus) => GpuShape::Whole(u32::try_from(gpus).ok().filter(|&gpus| gpus <= 64)?),
        };
        Some(Self {
            gpu,
            cpu_milli: u32::try_from(cpu_milli).ok()?,
            memory_mib: u32::try_from(memory_mib).ok()?,
        })
    }

    /// The demand that this is the shape of, counting as one sample.
    pub(crate) fn demand(self, extras: Option<Arc<Extras>>) -> Demand {
        let gpu = match self.gpu {
            GpuShape::None => GpuDemand::None,
            GpuShape::Share(micro) => GpuDemand::Share(micro),
            GpuShape::Whole(gpus) => GpuDemand::Whole(gpus.into()),
        };
        Demand::of_shape(self, gpu, extras)
    }

    /// Whether a token takes no room at all.
    pub(crate) fn is_nothing(self) -> bool {
        self.gpu == GpuShape::None && self.cpu_milli == 0 && self.memory_mib == 0
    }

    /// Micro-GPU that one token takes off a node.
    pub(crate) const fn gpu_micro(self) -> u32 {
        match self.gpu {
            GpuShape::None => 0,
            GpuShape::Share(micro) => micro,
            GpuShape::Whole(gpus) => gpus * WHOLE_GPU_MICRO,
        }
    }

    /// What one token takes off a node as a whole.
    pub(crate) const fn room(self) -> Room {
        Room { gpu_micro: self.gpu_micro(), cpu_milli: self.cpu_milli, memory_mib: self.memory_mib }
    }

    /// How often the shape fits on a node as it is now, whatever the node's phase.
    pub(crate) fn fits(self, node: &NodeState) -> Fits {
        let gpu = match self.gpu {
            GpuShape::None => UNLIMITED,
            GpuShape::Share(share) => {
                let times = Reciprocal::of(share);
                node.slots().map(|free| times.divide(free)).sum()
            }
            GpuShape::Whole(gpus) => {
                node.slots().filter(|&free| free == WHOLE_GPU_MICRO).count() as u32 / gpus
            }
        };
        self.with_gpu_fits(gpu, node.room.cpu_milli, node.room.memory_mib)
    }

    /// How many tokens an active node takes now.
    pub(crate) fn fits_active(self, node: &NodeState) -> u32 {
        if node.phase == Phase::Active { self.fits(node).all() } else { 0 }
    }

    /// How often the shape fits on a node of this supply while it is empty.
    pub(crate) fn fits_empty(self, supply: &Supply) -> Fits {
        let gpu = match self.gpu {
            GpuShape::None => UNLIMITED,
            GpuShape::Share(share) => supply.gpus * (WHOLE_GPU_MICRO / share),
            GpuShape::Whole(gpus) => supply.gpus / gpus,
        };
        self.with_gpu_fits(gpu, supply.cpu_milli, supply.memory_mib)
    }

    fn with_gpu_fits(self, gpu: u32, cpu_milli: u32, memory_mib: u32) -> Fits {
        Fits {
            gpu,
            cpu: cpu_milli.checked_div(self.cpu_milli).unwrap_or(UNLIMITED),
            memory: memory_mib.checked_div(self.memory_mib).unwrap_or(UNLIMITED),
        }
    }

    /// A token's GPUs, as a token keeps them, from a mask of slots.
    pub(crate) const fn gpus(self, slots: u64) -> u64 {
        match self.gpu {
            GpuShape::Share(_) => slots.trailing_zeros() as u64,
            _ => slots,
        }
    }

    /// Undoes [`Self::gpus`].
    pub(crate) const fn slots(self, gpus: u64) -> u64 {
        match self.gpu {
            GpuShape::Share(_) => 1 << gpus,
            _ => gpus,
        }
    }

    /// The slots of a token of no or whole GPUs on a node that it fits on.
    #[inline]
    pub(crate) fn choose_whole(self, node: &NodeState) -> u64 {
        match self.gpu {
            GpuShape::Whole(gpus) => {
                let slots = node.lowest_whole(gpus);
                debug_assert!(slots.is_some(), "placed where it does not fit");
                slots.unwrap_or(0)
            }
            _ => 0,
        }
    }

    /// The GPUs of a token, as a token keeps them, on a node that it fits on.
    pub(crate) fn choose(self, node: &NodeState) -> u64 {
        match self.gpu {
            GpuShape::Share(share) => node.tightest(share).slot().into(),
            _ => self.choose_whole(node),
        }
    }

    /// Whether one token fits on given slots of a node.
    pub(crate) fn has_room_on(self, node: &NodeState, gpus: u64) -> bool {
        let part = match self.gpu {
            GpuShape::None => 0,
            GpuShape::Share(share) => share,
            GpuShape::Whole(_) => WHOLE_GPU_MICRO,
        };
        let slots = self.slots(gpus);
        let slots_hold =
            (0..64).filter(|slot| slots >> slot & 1 == 1).all(|slot| node.slot(slot).free() >= part);
        slots_hold && node.room.cpu_milli >= self.cpu_milli && node.room.memory_mib >= self.memory_mib
    }

    /// Takes one token off given slots of a node.
    pub(crate) fn place_on(self, node: &mut NodeState, gpus: u64) {
        self.take_gpus(node, gpus);
        node.take(self.room());
    }

    /// Gives one token back.
    pub(crate) fn restore(self, node: &mut NodeState, gpus: u64) {
        self.return_gpus(node, gpus);
        node.give_back(self.room());
    }

    /// Takes one token off given slots, which is a part of taking it off the node.
    pub(crate) fn take_gpus(self, node: &mut NodeState, gpus: u64) {
        self.each_slot(node, gpus, Tightness::less);
    }

    /// Undoes [`Self::take_gpus`].
    pub(crate) fn return_gpus(self, node: &mut NodeState, gpus: u64) {
        self.each_slot(node, gpus, Tightness::more);
    }

    fn each_slot(self, node: &mut NodeState, gpus: u64, change: impl Fn(Tightness, u32) -> Tightness) {
        let part = self.gpu_micro().min(WHOLE_GPU_MICRO);
        let mut rest = self.slots(gpus);
        while rest != 0 {
            node.set(change(node.slot(rest.trailing_zeros()), part));
            rest &= rest - 1;
        }
    }
}

/// Division by a share as one multiplication: exact while the dividend is below 2^20, and a slot is.
#[derive(Clone, Copy)]
struct Reciprocal(u64);

impl Reciprocal {
    const BITS: u32 = 40;

    fn of(share: u32) -> Self {
        Self((1 << Self::BITS) / u64::from(share) + 1)
    }

    fn divide(self, free: u32) -> u32 {
        ((u64::from(free) * self.0) >> Self::BITS) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reciprocal_divides_exactly() {
        for share in (1..1_000).chain((1_000..WHOLE_GPU_MICRO).step_by(7_919)).chain([333_333, 999_999]) {
            let times = Reciprocal::of(share);
            for multiple in
                (0..=WHOLE_GPU_MICRO / share).step_by(1 + (WHOLE_GPU_MICRO / share / 500) as usize)
            {
                for free in [multiple * share, (multiple * share + share - 1).min(WHOLE_GPU_MICRO)] {
                    assert_eq!(times.divide(free), free / share, "{free} / {share}");
                }
            }
        }
    }
}
