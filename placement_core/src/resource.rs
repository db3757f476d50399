//! Demand and budget: what one sample takes on one node, and what a batch may hold in all.

use crate::amount::{
    WHOLE_GPU_MICRO, cpu_for_display, gpu_for_display, memory_for_display, memory_mib, micro_gpu, milli_cpu,
};
use crate::error::{AmountFault, PlacementError, Result};

/// The GPU part of a [`Demand`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GpuDemand {
    /// No GPU: CPU and memory alone decide.
    None,
    /// A share of one GPU in micro-GPU, from 1 to 999 999.
    Share(u32),
    /// So many entirely free GPUs of one node.
    Whole(u64),
}

/// What one running sample takes on one node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Demand {
    gpu: GpuDemand,
    cpu_milli: u64,
    memory_mib: u64,
    concurrency: u64,
}

impl Demand {
    /// A demand of `gpu` GPUs (below 1 a share of one, from 1 on whole and entirely free ones), `cpu` cores and
    /// `memory_gb` GiB, counting as one running sample.
    ///
    /// # Errors
    /// [`PlacementError::InvalidAmount`] for NaN, infinities, negative or huge numbers, a number that is not zero but
    /// below the smallest unit, and a `gpu` above 1 that is not whole.
    ///
    /// ```
    /// use placement_core::Demand;
    /// assert_eq!(Demand::new(0.33, 4.0, 16.0)?.gpu_micro(), 330_000);
    /// assert!(Demand::new(1.5, 0.0, 0.0).is_err());
    /// # Ok::<(), placement_core::PlacementError>(())
    /// ```
    pub fn new(gpu: f64, cpu: f64, memory_gb: f64) -> Result<Self> {
        let micro = micro_gpu(gpu)?;
        let whole = u64::from(WHOLE_GPU_MICRO);
        let gpu_demand = match micro {
            0 => GpuDemand::None,
            share if share < whole => GpuDemand::Share(share as u32),
            many if many % whole == 0 => GpuDemand::Whole(many / whole),
            _ => {
                let fault = AmountFault::NotWhole;
                return Err(PlacementError::InvalidAmount { field: "gpu", value: gpu, fault });
            }
        };
        Ok(Self {
            gpu: gpu_demand,
            cpu_milli: milli_cpu(cpu)?,
            memory_mib: memory_mib(memory_gb)?,
            concurrency: 1,
        })
    }

    /// A demand of amounts that are known to be sound.
    pub(crate) const fn of_units(gpu: GpuDemand, cpu_milli: u64, memory_mib: u64) -> Self {
        Self { gpu, cpu_milli, memory_mib, concurrency: 1 }
    }

    /// The same demand, counting as `concurrency` running samples against a budget (0: not counted).
    #[must_use]
    pub const fn with_concurrency(mut self, concurrency: u64) -> Self {
        self.concurrency = concurrency;
        self
    }

    /// The GPU part.
    #[must_use]
    pub const fn gpu(&self) -> GpuDemand {
        self.gpu
    }

    /// GPUs in micro-GPU, over all GPUs taken.
    #[must_use]
    pub const fn gpu_micro(&self) -> u64 {
        match self.gpu {
            GpuDemand::None => 0,
            GpuDemand::Share(micro) => micro as u64,
            GpuDemand::Whole(gpus) => gpus * WHOLE_GPU_MICRO as u64,
        }
    }

    /// CPU in milli-cores.
    #[must_use]
    pub const fn cpu_milli(&self) -> u64 {
        self.cpu_milli
    }

    /// Memory in MiB.
    #[must_use]
    pub const fn memory_mib(&self) -> u64 {
        self.memory_mib
    }

    /// Running samples that one token counts for.
    #[must_use]
    pub const fn concurrency(&self) -> u64 {
        self.concurrency
    }
}

/// What one batch may hold in all, over all nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Budget {
    gpu_micro: u64,
    cpu_milli: u64,
    memory_mib: u64,
    concurrency: u64,
}

impl Budget {
    /// A budget of `gpu` GPUs (any fraction), `cpu` cores, `memory_gb` GiB and `concurrency` running samples.
    ///
    /// # Errors
    /// [`PlacementError::InvalidAmount`] as in [`Demand::new`], save that fractions above one GPU are fine.
    pub fn new(gpu: f64, cpu: f64, memory_gb: f64, concurrency: u64) -> Result<Self> {
        Ok(Self {
            gpu_micro: micro_gpu(gpu)?,
            cpu_milli: milli_cpu(cpu)?,
            memory_mib: memory_mib(memory_gb)?,
            concurrency,
        })
    }

    /// How many times `per_sample` fits, by every field that is not zero in `per_sample`; `u64::MAX` when all are zero.
    ///
    /// # Errors
    /// [`PlacementError::BudgetTooSmall`] when not even one fits; the first field that is short is named.
    pub fn tokens(&self, per_sample: &Demand) -> Result<u64> {
        let mut tokens = u64::MAX;
        for (field, have, take, shown) in self.fields(per_sample) {
            if take > have {
                let (budget, per_sample) = (shown(have), shown(take));
                return Err(PlacementError::BudgetTooSmall { field, budget, per_sample });
            }
            if let Some(fits) = have.checked_div(take) {
                tokens = tokens.min(fits);
            }
        }
        Ok(tokens)
    }

    #[allow(clippy::type_complexity)]
    fn fields(&self, demand: &Demand) -> [(&'static str, u64, u64, fn(u64) -> f64); 4] {
        [
            ("gpu", self.gpu_micro, demand.gpu_micro(), gpu_for_display),
            ("cpu", self.cpu_milli, demand.cpu_milli, cpu_for_display),
            ("memory_gb", self.memory_mib, demand.memory_mib, memory_for_display),
            ("concurrency", self.concurrency, demand.concurrency, |samples| samples as f64),
        ]
    }
}
