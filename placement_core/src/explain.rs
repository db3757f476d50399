//! Answers for people: what is free on each node, and why tokens do or do not fit.

use std::collections::BTreeMap;
use std::fmt;

use crate::amount::{cpu_for_display, gpu_for_display, memory_for_display};
use crate::extras::{Amounts, Extras, Labels, takes_nothing};
use crate::layout::UNLIMITED_TOKENS;
use crate::node::{NodeState, Phase};
use crate::resource::Demand;
use crate::shape::{Fits, UNLIMITED};
use crate::state::{State, Tenant};

/// What stops a node from taking one token more.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub enum Shortage {
    /// Too little GPU in all.
    Gpu,
    /// Enough GPU in all, but not on one GPU, or not enough GPUs that are entirely free.
    Fragmentation,
    /// Too little CPU.
    Cpu,
    /// Too little memory.
    Memory,
    /// The node takes no tokens: it is draining or leaving.
    Draining,
    /// Too little of the named resource.
    Named(String),
    /// The node lacks a label that the demand requires: its key and value.
    Label(String, String),
}

impl Shortage {
    /// The kind in one word: `gpu`, `fragmentation`, `cpu`, `memory`, `draining`, `named`, `label`. Displayed, the last
    /// two say which: `named.licence`, `label zone=a`.
    #[must_use]
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Gpu => "gpu",
            Self::Fragmentation => "fragmentation",
            Self::Cpu => "cpu",
            Self::Memory => "memory",
            Self::Draining => "draining",
            Self::Named(_) => "named",
            Self::Label(..) => "label",
        }
    }
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Named(name) => write!(f, "named.{name}"),
            Self::Label(key, value) => write!(f, "label {key}={value}"),
            plain => f.write_str(plain.as_str()),
        }
    }
}

/// One node's part of an [`Explanation`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct NodeExplanation {
    /// The node's name.
    pub node: String,
    /// Tokens that fit on it now.
    pub free_tokens: u64,
    /// Tokens that fit on it when it is empty; 0 while it takes none.
    pub max_tokens: u64,
    /// What stops the next token; empty when all that is wanted fits on this node alone.
    pub short: Vec<Shortage>,
}

/// Why a number of tokens fits or does not.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Explanation {
    /// Tokens asked about.
    pub wanted: u64,
    /// Tokens that fit now.
    pub free_tokens: u64,
    /// Tokens that fit in the empty pool.
    pub max_tokens: u64,
    /// Node by node, in order of position.
    pub nodes: Vec<NodeExplanation>,
}

impl Explanation {
    /// Whether an acquire would succeed now.
    #[must_use]
    pub const fn fits_now(&self) -> bool {
        self.wanted <= self.free_tokens
    }

    /// Whether it would succeed in the empty pool, so that waiting helps.
    #[must_use]
    pub const fn fits_ever(&self) -> bool {
        self.wanted <= self.max_tokens
    }

    /// On how many nodes each thing is short, the most frequent first.
    #[must_use]
    pub fn shortages(&self) -> Vec<(Shortage, usize)> {
        let mut counts: BTreeMap<&Shortage, usize> = BTreeMap::new();
        for short in self.nodes.iter().flat_map(|node| &node.short) {
            *counts.entry(short).or_insert(0) += 1;
        }
        let mut counts: Vec<_> = counts.into_iter().map(|(short, count)| (short.clone(), count)).collect();
        counts.sort_by_key(|&(_, count)| std::cmp::Reverse(count));
        counts
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { wanted, free_tokens, max_tokens, nodes } = self;
        write!(f, "{wanted} tokens wanted, {free_tokens} fit now, {max_tokens} in the empty pool")?;
        if self.fits_now() {
            return Ok(());
        }
        if nodes.is_empty() {
            return f.write_str("; the pool has no nodes");
        }
        f.write_str("; short of")?;
        for (position, (short, count)) in self.shortages().into_iter().enumerate() {
            let separator = if position == 0 { "" } else { "," };
            write!(f, "{separator} {short} on {count} of {} nodes", nodes.len())?;
        }
        Ok(())
    }
}

/// Whether a node takes tokens, for display.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub enum NodePhase {
    /// It takes tokens.
    Active,
    /// It takes none and stays.
    Draining,
    /// It takes none and goes with its last token.
    Leaving,
}

impl NodePhase {
    /// One word: `active`, `draining`, `leaving`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Draining => "draining",
            Self::Leaving => "leaving",
        }
    }
}

/// A node with what it supplies and what is free, in the units people write.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct NodeUsage {
    /// The node's name.
    pub node: String,
    /// Ids of its GPUs, ascending.
    pub gpu_ids: Vec<u32>,
    /// Free share of each GPU, in the same order.
    pub gpu_free: Vec<f64>,
    /// CPU cores in all.
    pub cpu: f64,
    /// CPU cores free.
    pub cpu_free: f64,
    /// GiB of memory in all.
    pub memory_gb: f64,
    /// GiB of memory free.
    pub memory_gb_free: f64,
    /// Named resources in all.
    pub named: Amounts,
    /// Named resources free.
    pub named_free: Amounts,
    /// Its labels.
    pub labels: Labels,
    /// Tokens held on it.
    pub tokens: u64,
    /// Whether it takes tokens.
    pub phase: NodePhase,
}

fn present(state: &State) -> impl Iterator<Item = (usize, &NodeState)> {
    state.nodes.iter().enumerate().filter(|(_, node)| node.phase != Phase::Vacant)
}

pub(crate) fn usage_of(state: &State) -> Vec<NodeUsage> {
    let usage = |(position, node): (usize, &NodeState)| {
        let Tenant { supply, info } = &state.tenants[position];
        let extras = Extras::of(supply.extras.as_ref());
        NodeUsage {
            node: info.name.clone(),
            gpu_ids: info.gpu_ids.clone(),
            gpu_free: node.slots().map(|free| gpu_for_display(free.into())).collect(),
            cpu: cpu_for_display(supply.cpu_milli.into()),
            cpu_free: cpu_for_display(node.room.cpu_milli.into()),
            memory_gb: memory_for_display(supply.memory_mib.into()),
            memory_gb_free: memory_for_display(node.room.memory_mib.into()),
            named: extras.named.clone(),
            named_free: state.extras.free(position as u32).clone(),
            labels: extras.labels.clone(),
            tokens: node.tokens.into(),
            phase: match node.phase {
                Phase::Active => NodePhase::Active,
                Phase::Draining => NodePhase::Draining,
                Phase::Leaving | Phase::Vacant => NodePhase::Leaving,
            },
        }
    };
    present(state).map(usage).collect()
}

pub(crate) fn explain_nodes(state: &State, demand: &Demand, wanted: u64) -> Explanation {
    let nodes: Vec<NodeExplanation> =
        present(state).map(|(position, node)| explain_node(state, position, node, demand, wanted)).collect();
    let sum = |part: fn(&NodeExplanation) -> u64| {
        nodes.iter().map(part).fold(0, |sum: u64, tokens| sum.saturating_add(tokens)).min(UNLIMITED_TOKENS)
    };
    let (free_tokens, max_tokens) = (sum(|node| node.free_tokens), sum(|node| node.max_tokens));
    Explanation { wanted, free_tokens, max_tokens, nodes }
}

fn explain_node(
    state: &State,
    position: usize,
    node: &NodeState,
    demand: &Demand,
    wanted: u64,
) -> NodeExplanation {
    let Tenant { supply, info } = &state.tenants[position];
    let (shape, extras) = (demand.shape(), Extras::of(demand.extras()));
    let is_active = node.phase == Phase::Active;
    let (now, empty) = match shape {
        Some(shape) => (shape.fits(node), shape.fits_empty(supply)),
        None => (fits_when_too_large(demand, node), Fits { gpu: 0, cpu: 0, memory: 0 }),
    };
    let has_no_limit = shape.is_some_and(|shape| takes_nothing(shape, demand.extras()));
    let count = |fits: Fits, by_extras: u32| match fits.all().min(by_extras) {
        _ if !is_active => 0,
        UNLIMITED if has_no_limit => UNLIMITED_TOKENS,
        tokens => tokens.into(),
    };
    let labels = &Extras::of(supply.extras.as_ref()).labels;
    let free = state.extras.free(position as u32);
    let free_tokens = count(now, extras.fits(labels, free));
    let mut short = Vec::new();
    if !is_active {
        short.push(Shortage::Draining);
    } else if free_tokens < wanted {
        short = limits(demand, node, now, free_tokens);
        short.extend(limits_of_extras(extras, labels, free, free_tokens));
    }
    let max_tokens = count(empty, extras.fits_empty(supply.extras.as_ref()));
    NodeExplanation { node: info.name.clone(), free_tokens, max_tokens, short }
}

/// A demand that is wider than a node's amounts: 0 for what is too large, no limit for the rest.
fn fits_when_too_large(demand: &Demand, node: &NodeState) -> Fits {
    let fits = |take: u64, have: u32| if take > u64::from(have) { 0 } else { UNLIMITED };
    Fits {
        gpu: fits(demand.gpu_micro(), node.room.gpu_micro),
        cpu: fits(demand.cpu_milli(), node.room.cpu_milli),
        memory: fits(demand.memory_mib(), node.room.memory_mib),
    }
}

/// Which of GPU, CPU and memory hold no more than the `tokens` that fit.
fn limits(demand: &Demand, node: &NodeState, now: Fits, tokens: u64) -> Vec<Shortage> {
    let mut short = Vec::new();
    if demand.gpu_micro() > 0 && u64::from(now.gpu) == tokens {
        let left = u64::from(node.room.gpu_micro).saturating_sub(tokens * demand.gpu_micro());
        short.push(if left >= demand.gpu_micro() { Shortage::Fragmentation } else { Shortage::Gpu });
    }
    if demand.cpu_milli() > 0 && u64::from(now.cpu) == tokens {
        short.push(Shortage::Cpu);
    }
    if demand.memory_mib() > 0 && u64::from(now.memory) == tokens {
        short.push(Shortage::Memory);
    }
    short
}

/// Which named resources hold no more than the `tokens` that fit, and which labels are lacking.
fn limits_of_extras(extras: &Extras, labels: &Labels, free: &Amounts, tokens: u64) -> Vec<Shortage> {
    let named = extras.named_fits(free).filter(|&(_, fits)| u64::from(fits) == tokens);
    let named = named.map(|(name, _)| Shortage::Named(name.clone()));
    let lacking = extras.lacking(labels).map(|(key, value)| Shortage::Label(key.clone(), value.clone()));
    named.chain(lacking).collect()
}
