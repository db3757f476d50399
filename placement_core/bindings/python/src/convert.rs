//! Python values as values of the core.
//!
//! A `Resource` is frozen, so its conversion is remembered by identity while a reference is held: the cache can never
//! be wrong, and other types are never put into it.

use std::sync::{Mutex, PoisonError};

use placement_core::{Budget, Demand, NodeSpec};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

use crate::errors::{Violation, invalid, invalid_field, map};

const REMEMBERED: usize = 8;

static RESOURCE: PyOnceLock<Py<PyType>> = PyOnceLock::new();

fn is_frozen_resource(value: &Bound<'_, PyAny>) -> bool {
    RESOURCE
        .import(value.py(), "py_scheduler.domain.resources", "Resource")
        .is_ok_and(|class| value.get_type().is(class))
}

fn number(value: &Bound<'_, PyAny>, at: &str, field: &str) -> PyResult<f64> {
    let py = value.py();
    let given = value.getattr(field)?;
    given
        .extract()
        .map_err(|_| invalid_field(py, format!("{at}.{field}"), format!("{given} is not a number")))
}

fn concurrency(value: &Bound<'_, PyAny>, at: &str) -> PyResult<u64> {
    let given = value.getattr("concurrency")?;
    given.extract().map_err(|_| {
        let description = format!("{given} must be a whole number of 0 or more");
        invalid_field(value.py(), format!("{at}.concurrency"), description)
    })
}

fn demand_of(value: &Bound<'_, PyAny>, at: &str) -> PyResult<Demand> {
    let [gpu, cpu, memory_gb] = amounts(value, at)?;
    let demand = Demand::new(gpu, cpu, memory_gb).map_err(|error| map(value.py(), &error, at))?;
    Ok(demand.with_concurrency(concurrency(value, at)?))
}

fn budget_of(value: &Bound<'_, PyAny>, at: &str) -> PyResult<Budget> {
    let [gpu, cpu, memory_gb] = amounts(value, at)?;
    Budget::new(gpu, cpu, memory_gb, concurrency(value, at)?).map_err(|error| map(value.py(), &error, at))
}

fn amounts(value: &Bound<'_, PyAny>, at: &str) -> PyResult<[f64; 3]> {
    Ok([number(value, at, "gpu")?, number(value, at, "cpu")?, number(value, at, "memory_gb")?])
}

struct Remembered {
    budget: Option<Py<PyAny>>,
    per_sample: Py<PyAny>,
    demand: Demand,
    tokens: u64,
}

#[derive(Default)]
struct Slots {
    entries: Vec<Remembered>,
    next: usize,
}

/// Demands converted before.
#[derive(Default)]
pub(crate) struct DemandCache(Mutex<Slots>);

impl DemandCache {
    /// The demand of `per_sample`.
    pub(crate) fn demand(&self, per_sample: &Bound<'_, PyAny>) -> PyResult<Demand> {
        self.find(None, per_sample).map(|(demand, _)| demand)
    }

    /// The demand of `per_sample` and how many tokens of it `budget` holds.
    pub(crate) fn tokens(
        &self,
        budget: &Bound<'_, PyAny>,
        per_sample: &Bound<'_, PyAny>,
    ) -> PyResult<(Demand, u64)> {
        self.find(Some(budget), per_sample)
    }

    #[inline]
    fn find(
        &self,
        budget: Option<&Bound<'_, PyAny>>,
        per_sample: &Bound<'_, PyAny>,
    ) -> PyResult<(Demand, u64)> {
        let is_same = |held: &Option<Py<PyAny>>| match (held, budget) {
            (Some(held), Some(budget)) => held.is(budget),
            (None, None) => true,
            _ => false,
        };
        {
            let slots = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            for known in &slots.entries {
                if known.per_sample.is(per_sample) && is_same(&known.budget) {
                    return Ok((known.demand, known.tokens));
                }
            }
        }
        let py = per_sample.py();
        let demand = demand_of(per_sample, "per_sample")?;
        let tokens = match budget {
            None => u64::MAX,
            Some(budget) => {
                budget_of(budget, "budget")?.tokens(&demand).map_err(|error| map(py, &error, "budget"))?
            }
        };
        if is_frozen_resource(per_sample) && budget.is_none_or(is_frozen_resource) {
            let budget = budget.map(|budget| budget.clone().unbind());
            let entry = Remembered { budget, per_sample: per_sample.clone().unbind(), demand, tokens };
            // Dropped after the lock is, since dropping a Python object may run code.
            let _replaced = self.remember(entry);
        }
        Ok((demand, tokens))
    }

    fn remember(&self, entry: Remembered) -> Option<Remembered> {
        let mut slots = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if slots.entries.len() < REMEMBERED {
            slots.entries.push(entry);
            return None;
        }
        let at = slots.next;
        slots.next = (at + 1) % REMEMBERED;
        Some(std::mem::replace(&mut slots.entries[at], entry))
    }
}

/// A node description, and what in it has a wrong type; those fields hold a harmless value instead.
fn node_of(node: &Bound<'_, PyAny>) -> PyResult<(NodeSpec, Vec<(&'static str, String)>)> {
    let mut wrong = Vec::new();
    let (name, gpus) = (node.getattr("node_ip")?, node.getattr("gpus")?);
    let name = name.extract::<String>().unwrap_or_else(|_| {
        wrong.push(("node_ip", format!("{name} is not a string")));
        "?".to_string()
    });
    let gpu_ids = gpus.extract::<Vec<i64>>().unwrap_or_else(|_| {
        wrong.push(("gpus", format!("{gpus} is not a list of GPU ids")));
        Vec::new()
    });
    let mut amount = |field: &'static str| -> PyResult<f64> {
        let given = node.getattr(field)?;
        Ok(given.extract().unwrap_or_else(|_| {
            wrong.push((field, format!("{given} is not a number")));
            0.0
        }))
    };
    let (cpu, memory_gb) = (amount("cpu")?, amount("memory_gb")?);
    Ok((NodeSpec::new(name, gpu_ids, cpu, memory_gb), wrong))
}

type Faults = Vec<(usize, &'static str, String)>;

fn nodes_with_faults(nodes: &Bound<'_, PyAny>) -> PyResult<(Vec<NodeSpec>, Faults)> {
    let (mut specs, mut faults) = (Vec::new(), Faults::new());
    for (index, node) in nodes.try_iter()?.enumerate() {
        let (spec, wrong) = node_of(&node?)?;
        specs.push(spec);
        faults.extend(wrong.into_iter().map(|(field, description)| (index, field, description)));
    }
    for fault in placement_core::check_nodes(&specs) {
        faults.push((fault.index, fault.field, fault.description));
    }
    faults.sort_by_key(|fault| fault.0);
    Ok((specs, faults))
}

/// Every fault of a list of nodes as (index, field, description).
#[pyfunction]
pub(crate) fn check_nodes(nodes: &Bound<'_, PyAny>) -> PyResult<Vec<(usize, String, String)>> {
    let (_, faults) = nodes_with_faults(nodes)?;
    Ok(faults
        .into_iter()
        .map(|(index, field, description)| (index, field.to_string(), description))
        .collect())
}

/// How many tokens of `per_sample` a budget holds.
#[pyfunction]
pub(crate) fn tokens_in_budget(budget: &Bound<'_, PyAny>, per_sample: &Bound<'_, PyAny>) -> PyResult<u64> {
    let tokens = budget_of(budget, "budget")?.tokens(&demand_of(per_sample, "per_sample")?);
    tokens.map_err(|error| map(budget.py(), &error, "budget"))
}

/// The nodes, or `InvalidArgumentError` with every fault.
pub(crate) fn nodes(nodes: &Bound<'_, PyAny>) -> PyResult<Vec<NodeSpec>> {
    let (specs, faults) = nodes_with_faults(nodes)?;
    if faults.is_empty() {
        return Ok(specs);
    }
    let violation = |(index, field, description): (usize, &str, String)| Violation {
        field: format!("nodes[{index}].{field}"),
        description: format!("node '{}' {description}", specs[index].name),
    };
    Err(invalid(nodes.py(), &faults.into_iter().map(violation).collect::<Vec<_>>()))
}

/// One node, or `InvalidArgumentError` with every fault.
pub(crate) fn node(node: &Bound<'_, PyAny>) -> PyResult<NodeSpec> {
    let (spec, wrong) = node_of(node)?;
    if wrong.is_empty() {
        return Ok(spec);
    }
    let violation =
        |(field, description): (&str, String)| Violation { field: format!("node.{field}"), description };
    Err(invalid(node.py(), &wrong.into_iter().map(violation).collect::<Vec<_>>()))
}

/// A count of tokens.
pub(crate) fn count(given: &Bound<'_, PyAny>, field: &str) -> PyResult<u64> {
    given.extract().map_err(|_| {
        invalid_field(given.py(), field.to_string(), format!("{given} must be a whole number of 1 or more"))
    })
}
