//! Nodes as their owner describes them, and everything that can be wrong with a list of them.

use std::collections::HashSet;

use crate::amount::{memory_mib, milli_cpu};
use crate::error::{NodeFault, PlacementError};
use crate::extras::{Amounts, Labels, MAX_NAMED_AMOUNT, amount_fault, count_fault, label_fault};
use crate::node::MAX_GPUS_PER_NODE;

/// A node as it is described: its name (usually an address), GPU ids, CPU cores, GiB of memory, and what else it has.
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
    /// Named resources and how much of each there is: licences, sandboxes.
    #[cfg_attr(feature = "serde", serde(default))]
    pub named: Amounts,
    /// Labels that demands may require: a zone, a kind of GPU.
    #[cfg_attr(feature = "serde", serde(default))]
    pub labels: Labels,
}

impl NodeSpec {
    /// A node's description. It is checked when it enters a pool, or by [`check_nodes`].
    #[must_use]
    pub fn new(name: impl Into<String>, gpu_ids: impl Into<Vec<i64>>, cpu: f64, memory_gb: f64) -> Self {
        let (named, labels) = (Amounts::new(), Labels::new());
        Self { name: name.into(), gpu_ids: gpu_ids.into(), cpu, memory_gb, named, labels }
    }

    /// The same node with `count` of a named resource.
    #[must_use]
    pub fn with_resource(mut self, name: impl Into<String>, count: u64) -> Self {
        self.named.insert(name.into(), count);
        self
    }

    /// The same node with a label.
    #[must_use]
    pub fn with_label(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.labels.insert(key.into(), value.into());
        self
    }
}

/// Every fault in a list of nodes: names that are empty or repeated, GPU ids that are negative, repeated or too many,
/// supplies that are no amounts, and named resources and labels that are none. An empty list means that a pool can be
/// made of them.
#[must_use]
pub fn check_nodes(nodes: &[NodeSpec]) -> Vec<NodeFault> {
    let mut names = HashSet::new();
    let mut faults = Vec::new();
    for (index, node) in nodes.iter().enumerate() {
        let mut fault = |field: &'static str, description: String| {
            faults.push(NodeFault { index, node: node.name.clone(), field: field.into(), description });
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
        faults.extend(extras_faults(node).map(|(field, description)| NodeFault {
            index,
            node: node.name.clone(),
            field: field.into(),
            description,
        }));
    }
    faults
}

fn extras_faults(node: &NodeSpec) -> impl Iterator<Item = (String, String)> {
    let amounts = node.named.iter().filter_map(|(name, &count)| amount_fault(name, count, MAX_NAMED_AMOUNT));
    let labels = node.labels.iter().filter_map(|(key, value)| label_fault("labels", key, value));
    let counts = [count_fault("named", node.named.len()), count_fault("labels", node.labels.len())];
    amounts.chain(labels).chain(counts.into_iter().flatten())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_faults_are_found_at_once() {
        let nodes = [
            NodeSpec::new("a", [0, 0, -1], f64::NAN, -1.0),
            NodeSpec::new("a", [], 1.0, 1e300),
            NodeSpec::new("", (0..65).collect::<Vec<_>>(), 5e6, 1.0),
            NodeSpec::new("c", [], 1.0, 1.0)
                .with_resource("licence", 1 << 32)
                .with_resource("-", 1)
                .with_label("zone", "")
                .with_label("a b", "c"),
        ];
        let faults = check_nodes(&nodes);
        let fields: Vec<_> = faults.iter().map(|fault| (fault.index, fault.field.as_ref())).collect();
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
            (3, "named"),
            (3, "named.licence"),
            (3, "labels"),
            (3, "labels.zone"),
        ];
        assert_eq!(fields, expected);
    }
}
