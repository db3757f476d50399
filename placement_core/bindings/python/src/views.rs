//! Answers for display: plain values, copied out of the pool.

use pyo3::prelude::*;

/// A node with its supply and what is free, in GPUs, cores and GiB.
#[pyclass(frozen, get_all, module = "py_scheduler.placement")]
pub(crate) struct NodeUsage {
    node_ip: String,
    gpu_ids: Vec<u32>,
    gpu_free: Vec<f64>,
    cpu: f64,
    cpu_free: f64,
    memory_gb: f64,
    memory_gb_free: f64,
    tokens: u64,
    phase: &'static str,
}

impl NodeUsage {
    pub(crate) fn new(usage: placement_core::NodeUsage) -> Self {
        Self {
            node_ip: usage.node,
            gpu_ids: usage.gpu_ids,
            gpu_free: usage.gpu_free,
            cpu: usage.cpu,
            cpu_free: usage.cpu_free,
            memory_gb: usage.memory_gb,
            memory_gb_free: usage.memory_gb_free,
            tokens: usage.tokens,
            phase: usage.phase.as_str(),
        }
    }
}

#[pymethods]
impl NodeUsage {
    fn __repr__(&self) -> String {
        format!(
            "<NodeUsage {} {}: {} tokens, GPUs free {:?}, CPU {} of {}, GiB {} of {}>",
            self.node_ip,
            self.phase,
            self.tokens,
            self.gpu_free,
            self.cpu_free,
            self.cpu,
            self.memory_gb_free,
            self.memory_gb
        )
    }
}

/// One node's part of an explanation.
#[pyclass(frozen, get_all, module = "py_scheduler.placement")]
pub(crate) struct NodeExplanation {
    node_ip: String,
    free_tokens: u64,
    max_tokens: u64,
    /// What stops the next token; empty when all that is wanted fits on this node alone.
    short: Vec<&'static str>,
}

#[pymethods]
impl NodeExplanation {
    fn __repr__(&self) -> String {
        format!(
            "<NodeExplanation {}: {} of {} tokens free, short of {:?}>",
            self.node_ip, self.free_tokens, self.max_tokens, self.short
        )
    }
}

/// Why a number of tokens fits or does not; `str()` says it in one line.
#[pyclass(frozen, module = "py_scheduler.placement")]
pub(crate) struct Explanation {
    explanation: placement_core::Explanation,
}

impl Explanation {
    pub(crate) const fn new(explanation: placement_core::Explanation) -> Self {
        Self { explanation }
    }
}

#[pymethods]
impl Explanation {
    #[getter]
    fn wanted(&self) -> u64 {
        self.explanation.wanted
    }

    #[getter]
    fn free_tokens(&self) -> u64 {
        self.explanation.free_tokens
    }

    #[getter]
    fn max_tokens(&self) -> u64 {
        self.explanation.max_tokens
    }

    #[getter]
    fn fits_now(&self) -> bool {
        self.explanation.fits_now()
    }

    #[getter]
    fn fits_ever(&self) -> bool {
        self.explanation.fits_ever()
    }

    /// On how many nodes each thing is short, the most frequent first.
    #[getter]
    fn shortages(&self) -> Vec<(&'static str, usize)> {
        self.explanation.shortages().into_iter().map(|(short, nodes)| (short.as_str(), nodes)).collect()
    }

    #[getter]
    fn nodes(&self) -> Vec<NodeExplanation> {
        let view = |node: &placement_core::NodeExplanation| NodeExplanation {
            node_ip: node.node.clone(),
            free_tokens: node.free_tokens,
            max_tokens: node.max_tokens,
            short: node.short.iter().map(|short| short.as_str()).collect(),
        };
        self.explanation.nodes.iter().map(view).collect()
    }

    fn __str__(&self) -> String {
        self.explanation.to_string()
    }

    fn __repr__(&self) -> String {
        format!("<Explanation {}>", self.explanation)
    }
}
