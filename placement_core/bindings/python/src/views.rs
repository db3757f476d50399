//! Answers for display: plain values, copied out of the pool.

use std::collections::BTreeMap;

use placement_core::Shortage;
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
    /// Named resources in all.
    named: BTreeMap<String, u64>,
    /// Named resources free.
    named_free: BTreeMap<String, u64>,
    labels: BTreeMap<String, String>,
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
            named: usage.named,
            named_free: usage.named_free,
            labels: usage.labels,
            tokens: usage.tokens,
            phase: usage.phase.as_str(),
        }
    }
}

#[pymethods]
impl NodeUsage {
    fn __repr__(&self) -> String {
        format!(
            "<NodeUsage {} {}: {} tokens, GPUs free {:?}, CPU {} of {}, GiB {} of {}, named {:?} of {:?}, labels {:?}>",
            self.node_ip,
            self.phase,
            self.tokens,
            self.gpu_free,
            self.cpu_free,
            self.cpu,
            self.memory_gb_free,
            self.memory_gb,
            self.named_free,
            self.named,
            self.labels
        )
    }
}

/// One node's part of an explanation.
#[pyclass(frozen, get_all, module = "py_scheduler.placement")]
pub(crate) struct NodeExplanation {
    node_ip: String,
    free_tokens: u64,
    max_tokens: u64,
    /// What stops the next token, the kinds; empty when all that is wanted fits on this node alone.
    short: Vec<&'static str>,
    /// The named resources among it.
    short_named: Vec<String>,
    /// The required labels that the node lacks.
    lacking_labels: BTreeMap<String, String>,
}

impl NodeExplanation {
    fn new(node: &placement_core::NodeExplanation) -> Self {
        let mut view = Self {
            node_ip: node.node.clone(),
            free_tokens: node.free_tokens,
            max_tokens: node.max_tokens,
            short: Vec::new(),
            short_named: Vec::new(),
            lacking_labels: BTreeMap::new(),
        };
        for short in &node.short {
            match short {
                Shortage::Named(name) => view.short_named.push(name.clone()),
                Shortage::Label(key, value) => {
                    view.lacking_labels.insert(key.clone(), value.clone());
                }
                _ => {}
            }
            if !view.short.contains(&short.as_str()) {
                view.short.push(short.as_str());
            }
        }
        view
    }
}

#[pymethods]
impl NodeExplanation {
    fn __repr__(&self) -> String {
        format!(
            "<NodeExplanation {}: {} of {} tokens free, short of {:?} {:?} {:?}>",
            self.node_ip,
            self.free_tokens,
            self.max_tokens,
            self.short,
            self.short_named,
            self.lacking_labels
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

    /// On how many nodes each thing is short, the most frequent first, in words: `cpu`, `named.licence`,
    /// `label zone=a`.
    #[getter]
    fn shortages(&self) -> Vec<(String, usize)> {
        self.explanation.shortages().into_iter().map(|(short, nodes)| (short.to_string(), nodes)).collect()
    }

    #[getter]
    fn nodes(&self) -> Vec<NodeExplanation> {
        self.explanation.nodes.iter().map(NodeExplanation::new).collect()
    }

    fn __str__(&self) -> String {
        self.explanation.to_string()
    }

    fn __repr__(&self) -> String {
        format!("<Explanation {}>", self.explanation)
    }
}
