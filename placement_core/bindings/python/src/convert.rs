//! Python values as values of the core.
//!
//! A `Resource` is frozen, its mappings included, so its conversion is remembered by identity while a reference is held:
//! the cache can never be wrong, and other types are never put into it.

use std::cell::RefCell;
use std::rc::Rc;

use placement_core::{Budget, Demand, NodeSpec};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyType};

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
    let fail = |error| map(value.py(), &error, at);
    let [gpu, cpu, memory_gb] = amounts(value, at)?;
    let mut demand =
        Demand::new(gpu, cpu, memory_gb).map_err(fail)?.with_concurrency(concurrency(value, at)?);
    for (name, count) in sound_entries::<u64>(value, at, "named")? {
        demand = demand.with_resource(&name, count).map_err(fail)?;
    }
    for (key, wanted) in sound_entries::<String>(value, at, "required_labels")? {
        demand = demand.requiring(&key, &wanted).map_err(fail)?;
    }
    Ok(demand)
}

/// Labels say where a sample may run, and nothing about a budget.
fn budget_of(value: &Bound<'_, PyAny>, at: &str) -> PyResult<Budget> {
    let fail = |error| map(value.py(), &error, at);
    let [gpu, cpu, memory_gb] = amounts(value, at)?;
    let mut budget = Budget::new(gpu, cpu, memory_gb, concurrency(value, at)?).map_err(fail)?;
    for (name, count) in sound_entries::<u64>(value, at, "named")? {
        budget = budget.with_resource(&name, count).map_err(fail)?;
    }
    Ok(budget)
}

fn sound_entries<T: Value>(value: &Bound<'_, PyAny>, at: &str, field: &str) -> PyResult<Vec<(String, T)>> {
    let (entries, faults) = entries(&value.getattr(field)?, field);
    if faults.is_empty() {
        return Ok(entries);
    }
    let violation = |(field, description): Fault| Violation { field: format!("{at}.{field}"), description };
    Err(invalid(value.py(), &faults.into_iter().map(violation).collect::<Vec<_>>()))
}

/// What a mapping can hold as a value, and how to say what it cannot.
trait Value: for<'a, 'py> FromPyObject<'a, 'py> {
    const EXPECTED: &'static str;
}

impl Value for u64 {
    const EXPECTED: &'static str = "must be a whole number from 0 to 2^64 - 1";
}

impl Value for String {
    const EXPECTED: &'static str = "must be a string";
}

/// A faulty field and what is wrong with it.
type Fault = (String, String);

/// The entries of a mapping from strings, and what is wrong with those that are none.
fn entries<T: Value>(mapping: &Bound<'_, PyAny>, field: &str) -> (Vec<(String, T)>, Vec<Fault>) {
    let (mut entries, mut faults) = (Vec::new(), Vec::new());
    let Ok(mapping) = mapping.cast::<PyDict>() else {
        return (entries, vec![(field.to_string(), format!("{mapping} is not a dict"))]);
    };
    for (key, value) in mapping {
        match (key.extract::<String>(), value.extract::<T>()) {
            (Ok(name), Ok(value)) => entries.push((name, value)),
            (Ok(name), Err(_)) => {
                faults.push((format!("{field}.{name}"), format!("{value} {}", T::EXPECTED)));
            }
            (Err(_), _) => faults.push((field.to_string(), format!("the name {key} is not a string"))),
        }
    }
    (entries, faults)
}

fn amounts(value: &Bound<'_, PyAny>, at: &str) -> PyResult<[f64; 3]> {
    Ok([number(value, at, "gpu")?, number(value, at, "cpu")?, number(value, at, "memory_gb")?])
}

/// A demand, and how many tokens of it a budget holds.
pub(crate) struct Known {
    pub(crate) demand: Demand,
    pub(crate) tokens: u64,
}

struct Remembered {
    budget: Option<Py<PyAny>>,
    per_sample: Py<PyAny>,
    known: Rc<Known>,
}

impl Remembered {
    fn is_of(&self, budget: Option<&Bound<'_, PyAny>>, per_sample: &Bound<'_, PyAny>) -> bool {
        let is_same = match (&self.budget, budget) {
            (Some(held), Some(budget)) => held.is(budget),
            (None, None) => true,
            _ => false,
        };
        is_same && self.per_sample.is(per_sample)
    }
}

struct Slots {
    entries: Vec<Remembered>,
    next: usize,
}

thread_local! {
    /// What this thread converted before: each thread has its own, so that none pays for a lock.
    static SLOTS: RefCell<Slots> = const { RefCell::new(Slots { entries: Vec::new(), next: 0 }) };
}

impl Slots {
    fn find(&self, budget: Option<&Bound<'_, PyAny>>, per_sample: &Bound<'_, PyAny>) -> Option<Rc<Known>> {
        let found = self.entries.iter().find(|entry| entry.is_of(budget, per_sample))?;
        Some(Rc::clone(&found.known))
    }

    fn remember(&mut self, entry: Remembered) -> Option<Remembered> {
        if self.entries.len() < REMEMBERED {
            self.entries.push(entry);
            return None;
        }
        let at = self.next;
        self.next = (at + 1) % REMEMBERED;
        Some(std::mem::replace(&mut self.entries[at], entry))
    }
}

/// The demand of `per_sample`, and how many tokens of it `budget` holds; without a budget there is no limit.
#[inline]
pub(crate) fn known(budget: Option<&Bound<'_, PyAny>>, per_sample: &Bound<'_, PyAny>) -> PyResult<Rc<Known>> {
    match SLOTS.with_borrow(|slots| slots.find(budget, per_sample)) {
        Some(known) => Ok(known),
        None => convert(budget, per_sample),
    }
}

#[cold]
fn convert(budget: Option<&Bound<'_, PyAny>>, per_sample: &Bound<'_, PyAny>) -> PyResult<Rc<Known>> {
    let demand = demand_of(per_sample, "per_sample")?;
    let tokens = match budget {
        None => u64::MAX,
        Some(budget) => {
            let fits = budget_of(budget, "budget")?.tokens(&demand);
            fits.map_err(|error| map(per_sample.py(), &error, "budget"))?
        }
    };
    let known = Rc::new(Known { demand, tokens });
    if is_frozen_resource(per_sample) && budget.is_none_or(is_frozen_resource) {
        let budget = budget.map(|budget| budget.clone().unbind());
        let entry = Remembered { budget, per_sample: per_sample.clone().unbind(), known: Rc::clone(&known) };
        // Dropped when the slots are no longer borrowed, since dropping a Python object may run code.
        let _replaced = SLOTS.with_borrow_mut(|slots| slots.remember(entry));
    }
    Ok(known)
}

/// A node description, and what in it has a wrong type; those fields hold a harmless value instead.
fn node_of(node: &Bound<'_, PyAny>) -> PyResult<(NodeSpec, Vec<Fault>)> {
    let mut wrong = Vec::new();
    let (name, gpus) = (node.getattr("node_ip")?, node.getattr("gpus")?);
    let name = name.extract::<String>().unwrap_or_else(|_| {
        wrong.push(("node_ip".to_string(), format!("{name} is not a string")));
        "?".to_string()
    });
    let gpu_ids = gpus.extract::<Vec<i64>>().unwrap_or_else(|_| {
        wrong.push(("gpus".to_string(), format!("{gpus} is not a list of GPU ids")));
        Vec::new()
    });
    let mut amount = |field: &'static str| -> PyResult<f64> {
        let given = node.getattr(field)?;
        Ok(given.extract().unwrap_or_else(|_| {
            wrong.push((field.to_string(), format!("{given} is not a number")));
            0.0
        }))
    };
    let (cpu, memory_gb) = (amount("cpu")?, amount("memory_gb")?);
    let mut spec = NodeSpec::new(name, gpu_ids, cpu, memory_gb);
    let (named, faults) = entries(&node.getattr("named")?, "named");
    spec.named.extend(named);
    wrong.extend(faults);
    let (labels, faults) = entries(&node.getattr("labels")?, "labels");
    spec.labels.extend(labels);
    wrong.extend(faults);
    Ok((spec, wrong))
}

type Faults = Vec<(usize, String, String)>;

fn nodes_with_faults(nodes: &Bound<'_, PyAny>) -> PyResult<(Vec<NodeSpec>, Faults)> {
    let (mut specs, mut faults) = (Vec::new(), Faults::new());
    for (index, node) in nodes.try_iter()?.enumerate() {
        let (spec, wrong) = node_of(&node?)?;
        specs.push(spec);
        faults.extend(wrong.into_iter().map(|(field, description)| (index, field, description)));
    }
    for fault in placement_core::check_nodes(&specs) {
        faults.push((fault.index, fault.field.into_owned(), fault.description));
    }
    faults.sort_by_key(|fault| fault.0);
    Ok((specs, faults))
}

/// Every fault of a list of nodes as (index, field, description).
#[pyfunction]
pub(crate) fn check_nodes(nodes: &Bound<'_, PyAny>) -> PyResult<Vec<(usize, String, String)>> {
    nodes_with_faults(nodes).map(|(_, faults)| faults)
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
    let violation = |(index, field, description): (usize, String, String)| Violation {
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
        |(field, description): (String, String)| Violation { field: format!("node.{field}"), description };
    Err(invalid(node.py(), &wrong.into_iter().map(violation).collect::<Vec<_>>()))
}

/// A count of tokens.
pub(crate) fn count(given: &Bound<'_, PyAny>, field: &str) -> PyResult<u64> {
    given.extract().map_err(|_| {
        invalid_field(given.py(), field.to_string(), format!("{given} must be a whole number of 1 or more"))
    })
}
