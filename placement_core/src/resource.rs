//! Demand and budget: what one sample takes on one node, and what a batch may hold in all.

use std::borrow::Cow;
use std::sync::Arc;

use crate::amount::{
    WHOLE_GPU_MICRO, cpu_for_display, gpu_for_display, memory_for_display, memory_mib, micro_gpu, milli_cpu,
};
use crate::error::{AmountFault, PlacementError, Result};
use crate::extras::{Amounts, Extras, MAX_NAMED_AMOUNT, require_label, set_amount};
use crate::shape::Shape;

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

/// What one running sample takes on one node, and the labels that the node must have.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Demand {
    gpu: GpuDemand,
    cpu_milli: u64,
    memory_mib: u64,
    concurrency: u64,
    /// Shared, since a demand is copied into each of its leases.
    extras: Option<Arc<Extras>>,
    /// What follows from the amounts, so that an acquire need not narrow them again.
    shape: Option<Shape>,
    /// The same, of a demand of which it says all that there is: it takes some room and has no extras.
    plain: Option<Shape>,
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
        let (cpu_milli, memory_mib) = (milli_cpu(cpu)?, memory_mib(memory_gb)?);
        let shape = Shape::of(gpu_demand, cpu_milli, memory_mib);
        let demand =
            Self { gpu: gpu_demand, cpu_milli, memory_mib, concurrency: 1, extras: None, shape, plain: None };
        Ok(demand.with_extras(None))
    }

    /// A demand of amounts that are known to be sound.
    pub(crate) fn of_shape(shape: Shape, gpu: GpuDemand, extras: Option<Arc<Extras>>) -> Self {
        let (cpu_milli, memory_mib) = (shape.cpu_milli.into(), shape.memory_mib.into());
        let shape = Some(shape);
        let demand = Self { gpu, cpu_milli, memory_mib, concurrency: 1, extras: None, shape, plain: None };
        demand.with_extras(extras)
    }

    /// The amounts in the width of a node's; `None` when no node could ever hold them.
    #[inline]
    pub(crate) const fn shape(&self) -> Option<Shape> {
        self.shape
    }

    fn with_extras(mut self, extras: Option<Arc<Extras>>) -> Self {
        self.plain = self.shape.filter(|shape| extras.is_none() && !shape.is_nothing());
        self.extras = extras;
        self
    }

    /// The shape of a demand that takes some room and has no extras, as almost all do.
    #[inline]
    pub(crate) const fn plain(&self) -> Option<Shape> {
        self.plain
    }

    /// Named amounts and required labels; `None` when there are neither.
    #[inline]
    pub(crate) const fn extras(&self) -> Option<&Arc<Extras>> {
        self.extras.as_ref()
    }

    /// The same demand, counting as `concurrency` running samples against a budget (0: not counted).
    #[must_use]
    pub const fn with_concurrency(mut self, concurrency: u64) -> Self {
        self.concurrency = concurrency;
        self
    }

    /// The same demand, taking `count` of a named resource (0: none of it) in place of what it took of it before.
    ///
    /// # Errors
    /// [`PlacementError::InvalidField`] for a name that is none (from 1 to 63 letters, digits and `.`, `_`, `-`, `/`,
    /// beginning and ending with a letter or digit), a count above [`MAX_NAMED_AMOUNT`], and more than
    /// [`MAX_NAMES`](crate::MAX_NAMES) names.
    ///
    /// ```
    /// use placement_core::{Demand, NodeSpec, Pool};
    /// let pool = Pool::new([NodeSpec::new("a", [0], 8.0, 32.0).with_resource("licence", 4)])?;
    /// let sample = Demand::new(0.1, 1.0, 1.0)?.with_resource("licence", 1)?;
    /// assert_eq!(pool.max_tokens_for(&sample), 4);
    /// # Ok::<(), placement_core::PlacementError>(())
    /// ```
    pub fn with_resource(self, name: &str, count: u64) -> Result<Self> {
        self.with_changed_extras(|extras| set_amount(&mut extras.named, name, count, MAX_NAMED_AMOUNT))
    }

    /// The same demand, placed only on nodes whose label `key` is `value`.
    ///
    /// # Errors
    /// [`PlacementError::InvalidField`] for a key or value that is none, as in [`Demand::with_resource`], and for a key
    /// that is required to have another value already.
    ///
    /// ```
    /// use placement_core::{Demand, NodeSpec, Pool};
    /// let pool = Pool::new(["a", "b"].map(|zone| NodeSpec::new(zone, [0], 8.0, 32.0).with_label("zone", zone)))?;
    /// let sample = Demand::new(1.0, 1.0, 1.0)?.requiring("zone", "b")?;
    /// let lease = pool.try_acquire(&sample, 1)?.expect("the node is empty");
    /// assert_eq!(lease.placements()[0].node, "b");
    /// # Ok::<(), placement_core::PlacementError>(())
    /// ```
    pub fn requiring(self, key: &str, value: &str) -> Result<Self> {
        self.with_changed_extras(|extras| require_label(&mut extras.labels, key, value))
    }

    fn with_changed_extras(self, change: impl FnOnce(&mut Extras) -> Result<()>) -> Result<Self> {
        let mut extras = self.extras.as_deref().cloned().unwrap_or_default();
        change(&mut extras)?;
        Ok(self.with_extras(Extras::shared(extras.named, extras.labels)))
    }

    /// Named resources and how much of each it takes, by name.
    pub fn named(&self) -> impl Iterator<Item = (&str, u64)> {
        Extras::of(self.extras()).named.iter().map(|(name, &count)| (name.as_str(), count))
    }

    /// Labels that a node must have, by key.
    pub fn required_labels(&self) -> impl Iterator<Item = (&str, &str)> {
        Extras::of(self.extras()).labels.iter().map(|(key, value)| (key.as_str(), value.as_str()))
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
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Budget {
    gpu_micro: u64,
    cpu_milli: u64,
    memory_mib: u64,
    concurrency: u64,
    named: Amounts,
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
            named: Amounts::new(),
        })
    }

    /// The same budget, holding `count` of a named resource in place of what it held of it before. It holds none of
    /// those that are not named.
    ///
    /// # Errors
    /// [`PlacementError::InvalidField`] as in [`Demand::with_resource`], save that any count is fine.
    pub fn with_resource(mut self, name: &str, count: u64) -> Result<Self> {
        set_amount(&mut self.named, name, count, u64::MAX)?;
        Ok(self)
    }

    /// How many times `per_sample` fits, by every field that is not zero in `per_sample`; `u64::MAX` when all are zero.
    ///
    /// # Errors
    /// [`PlacementError::BudgetTooSmall`] when not even one fits; the first field that is short is named.
    pub fn tokens(&self, per_sample: &Demand) -> Result<u64> {
        let mut tokens = u64::MAX;
        for (field, have, take, shown) in self.fields(per_sample) {
            if take > have {
                return Err(too_small(field.into(), shown(have), shown(take)));
            }
            if let Some(fits) = have.checked_div(take) {
                tokens = tokens.min(fits);
            }
        }
        for (name, take) in per_sample.named() {
            let have = self.named.get(name).copied().unwrap_or(0);
            if take > have {
                return Err(too_small(format!("named.{name}").into(), have as f64, take as f64));
            }
            tokens = tokens.min(have / take);
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

fn too_small(field: Cow<'static, str>, budget: f64, per_sample: f64) -> PlacementError {
    PlacementError::BudgetTooSmall { field, budget, per_sample }
}
