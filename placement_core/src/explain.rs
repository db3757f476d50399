//! Answers for people: what is free on each node, and why tokens do or do not fit.

use std::fmt;

use crate::amount::{cpu_for_display, gpu_for_display, memory_for_display};
use crate::layout::UNLIMITED_TOKENS;
use crate::node::{NodeState, Phase};
use crate::resource::Demand;
use crate::shape::{Fits, Shape};
use crate::state::{State, Tenant};

/// What stops a node from taking one token more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
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
}

impl Shortage {
    /// One word for messages: `gpu`, `fragmentation`, `cpu`, `memory`, `draining`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Gpu => "gpu",
            Self::Fragmentation => "fragmentation",
            Self::Cpu => "cpu",
            Self::Memory => "memory",
            Self::Draining => "draining",
        }
    }
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
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
        let mut counts: Vec<(Shortage, usize)> = Vec::new();
        for &short in self.nodes.iter().flat_map(|node| &node.short) {
            match counts.iter_mut().find(|(known, _)| *known == short) {
                Some((_, count)) => *count += 1,
                None => counts.push((short, 1)),
            }
        }
        counts.sort_by_key(|&(short, count)| (std::cmp::Reverse(count), short));
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
        NodeUsage {
            node: info.name.clone(),
            gpu_ids: info.gpu_ids.clone(),
            gpu_free: node.slots().map(|free| gpu_for_display(free.into())).collect(),
            cpu: cpu_for_display(supply.cpu_milli.into()),
            cpu_free: cpu_for_display(node.room.cpu_milli.into()),
            memory_gb: memory_for_display(supply.memory_mib.into()),
            memory_gb_free: memory_for_display(node.room.memory_mib.into()),
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
    let shape = Shape::of(demand);
    let nodes: Vec<NodeExplanation> = present(state)
        .map(|(position, node)| {
            let tenant = &state.tenants[position];
            let is_active = node.phase == Phase::Active;
            let (now, empty) = match shape {
                Some(shape) => (shape.fits(node), shape.fits_empty(tenant.supply)),
                None => (fits_when_too_large(demand, node), Fits { gpu: 0, cpu: 0, memory: 0 }),
            };
            let count = |fits: Fits| if is_active { tokens(shape, fits) } else { 0 };
            let free_tokens = count(now);
            let mut short = Vec::new();
            if !is_active {
                short.push(Shortage::Draining);
            } else if free_tokens < wanted {
                short = limits(demand, node, now);
            }
            NodeExplanation { node: tenant.info.name.clone(), free_tokens, max_tokens: count(empty), short }
        })
        .collect();
    let sum = |part: fn(&NodeExplanation) -> u64| {
        nodes.iter().map(part).fold(0, |sum: u64, tokens| sum.saturating_add(tokens)).min(UNLIMITED_TOKENS)
    };
    let (free_tokens, max_tokens) = (sum(|node| node.free_tokens), sum(|node| node.max_tokens));
    Explanation { wanted, free_tokens, max_tokens, nodes }
}

fn tokens(shape: Option<Shape>, fits: Fits) -> u64 {
    if shape.is_some_and(Shape::is_nothing) { UNLIMITED_TOKENS } else { u64::from(fits.all()) }
}

/// A demand that is wider than a node's amounts: 0 for what is too large, no limit for the rest.
fn fits_when_too_large(demand: &Demand, node: &NodeState) -> Fits {
    let fits = |take: u64, have: u32| if take > u64::from(have) { 0 } else { crate::shape::UNLIMITED };
    Fits {
        gpu: fits(demand.gpu_micro(), node.room.gpu_micro),
        cpu: fits(demand.cpu_milli(), node.room.cpu_milli),
        memory: fits(demand.memory_mib(), node.room.memory_mib),
    }
}

fn limits(demand: &Demand, node: &NodeState, now: Fits) -> Vec<Shortage> {
    let fits = now.all();
    let mut short = Vec::new();
    if now.gpu == fits {
        let left = u64::from(node.room.gpu_micro).saturating_sub(u64::from(fits) * demand.gpu_micro());
        short.push(if left >= demand.gpu_micro() { Shortage::Fragmentation } else { Shortage::Gpu });
    }
    if now.cpu == fits {
        short.push(Shortage::Cpu);
    }
    if now.memory == fits {
        short.push(Shortage::Memory);
    }
    short
}
