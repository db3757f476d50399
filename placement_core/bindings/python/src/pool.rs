//! The pool as Python sees it.

use placement_core::{Placement, Pool};
use pyo3::prelude::*;

use crate::convert::{count, known, node, nodes};
use crate::errors::{invalid_field, map};
use crate::lease::Lease;
use crate::views::{Explanation, NodeUsage};

/// Supply that batches are placed on. Safe to use from several threads.
#[pyclass(frozen, module = "py_scheduler.placement")]
pub(crate) struct PlacementPool {
    pool: Pool,
}

#[pymethods]
impl PlacementPool {
    /// Raises `InvalidArgumentError` with every fault of every node.
    #[new]
    #[pyo3(signature = (nodes))]
    fn new(nodes: &Bound<'_, PyAny>) -> PyResult<Self> {
        let specs = self::nodes(nodes)?;
        let pool = Pool::new(specs).map_err(|error| map(nodes.py(), &error, "nodes"))?;
        Ok(Self { pool })
    }

    /// Takes room for min(`max_tokens`, what of `per_sample` fits in budget) samples, all of them or None.
    ///
    /// Raises `UnplaceableError` when the budget does not hold one sample, `InvalidArgumentError` for bad numbers.
    fn try_acquire_batch<'py>(
        &self,
        budget: &Bound<'py, PyAny>,
        per_sample: &Bound<'py, PyAny>,
        max_tokens: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, Lease>>> {
        let max_tokens = count(max_tokens, "max_tokens")?;
        let known = known(Some(budget), per_sample)?;
        // The object is made here at once: on the way through more hands its lease would be copied by each.
        match self.pool.try_acquire(&known.demand, known.tokens.min(max_tokens)) {
            Ok(Some(lease)) => Bound::new(per_sample.py(), Lease::new(lease, per_sample)).map(Some),
            Ok(None) => Ok(None),
            Err(error) => Err(map(per_sample.py(), &error, "max_tokens")),
        }
    }

    /// Takes room for `count` samples, all of them or None, on the nodes alone that could hold no token of the `others`,
    /// demands like `per_sample`, were they empty.
    ///
    /// Raises `InvalidArgumentError` for bad numbers.
    fn try_acquire_apart(
        &self,
        per_sample: &Bound<'_, PyAny>,
        count: &Bound<'_, PyAny>,
        others: &Bound<'_, PyAny>,
    ) -> PyResult<Option<Lease>> {
        let py = per_sample.py();
        let count = self::count(count, "count")?;
        let others: Vec<_> = others.try_iter()?.map(|other| known(None, &other?)).collect::<PyResult<_>>()?;
        let known = known(None, per_sample)?;
        let lease =
            self.pool.try_acquire_apart(&known.demand, count, others.iter().map(|other| &other.demand));
        Ok(lease.map_err(|error| map(py, &error, "count"))?.map(|lease| Lease::new(lease, per_sample)))
    }

    /// Whether a node could hold a token if it were empty; not one that is unknown or takes no tokens.
    fn could_hold(&self, per_sample: &Bound<'_, PyAny>, node_ip: &str) -> PyResult<bool> {
        Ok(self.pool.could_hold(&known(None, per_sample)?.demand, node_ip))
    }

    /// Whether every node that takes tokens could hold one if it were empty.
    fn could_hold_everywhere(&self, per_sample: &Bound<'_, PyAny>) -> PyResult<bool> {
        Ok(self.pool.could_hold_everywhere(&known(None, per_sample)?.demand))
    }

    /// Another pool of the nodes that take tokens, in which nothing is held.
    fn emptied(&self) -> Self {
        Self { pool: self.pool.emptied() }
    }

    /// Takes room that is already in use, also on draining nodes. `FailedPreconditionError` when it is not there.
    fn adopt(&self, per_sample: &Bound<'_, PyAny>, tokens: &Bound<'_, PyAny>) -> PyResult<Lease> {
        let py = tokens.py();
        let mut placements = Vec::new();
        for token in tokens.try_iter()? {
            let token = token?;
            let gpu_ids = token.getattr("gpu_ids")?;
            let gpu_ids = gpu_ids.extract::<Vec<u32>>().map_err(|_| {
                let field = format!("tokens[{}].gpu_ids", placements.len());
                invalid_field(py, field, format!("{gpu_ids} is not a list of GPU ids"))
            })?;
            placements.push(Placement::new(token.getattr("node_ip")?.extract::<String>()?, gpu_ids));
        }
        let lease = self.pool.adopt(&known(None, per_sample)?.demand, &placements);
        Ok(Lease::new(lease.map_err(|error| map(py, &error, "tokens"))?, per_sample))
    }

    /// Tokens that the pool holds when empty, draining nodes left out. Never waits for an acquire.
    fn max_tokens_for(&self, per_sample: &Bound<'_, PyAny>) -> PyResult<u64> {
        Ok(self.pool.max_tokens_for(&known(None, per_sample)?.demand))
    }

    /// Tokens that fit now.
    fn free_tokens_for(&self, per_sample: &Bound<'_, PyAny>) -> PyResult<u64> {
        Ok(self.pool.free_tokens_for(&known(None, per_sample)?.demand))
    }

    /// Why n tokens fit or not, node by node.
    fn explain(&self, per_sample: &Bound<'_, PyAny>, n: &Bound<'_, PyAny>) -> PyResult<Explanation> {
        let wanted = count(n, "n")?;
        Ok(Explanation::new(self.pool.explain(&known(None, per_sample)?.demand, wanted)))
    }

    /// Every node with its supply and what is free.
    fn nodes(&self) -> Vec<NodeUsage> {
        self.pool.nodes().into_iter().map(NodeUsage::new).collect()
    }

    /// Raises `AlreadyExistsError` for a `node_ip` that is in the pool, draining included.
    fn add_node(&self, node: &Bound<'_, PyAny>) -> PyResult<()> {
        self.pool.add_node(&self::node(node)?).map_err(|error| map(node.py(), &error, "node"))
    }

    /// The node takes no more tokens; those on it stay.
    fn drain_node(&self, py: Python<'_>, node_ip: &str) -> PyResult<()> {
        self.pool.drain_node(node_ip).map_err(|error| map(py, &error, "node_ip"))
    }

    /// A draining or leaving node takes tokens again.
    fn resume_node(&self, py: Python<'_>, node_ip: &str) -> PyResult<()> {
        self.pool.resume_node(node_ip).map_err(|error| map(py, &error, "node_ip"))
    }

    /// True when the node is gone; False when it goes with its last token.
    fn remove_node(&self, py: Python<'_>, node_ip: &str) -> PyResult<bool> {
        self.pool.remove_node(node_ip).map_err(|error| map(py, &error, "node_ip"))
    }

    /// Rises whenever room may have come back.
    #[getter]
    fn release_version(&self) -> u64 {
        self.pool.release_version()
    }

    /// Rises whenever the set of nodes that take tokens changes.
    #[getter]
    fn layout_version(&self) -> u64 {
        self.pool.layout_version()
    }

    fn __repr__(&self) -> String {
        format!("<PlacementPool of {} nodes>", self.pool.nodes().len())
    }
}
