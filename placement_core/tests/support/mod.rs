//! A plain pool to compare with: whole scans over integers, the written rules word by word, no code of the crate.

use std::collections::BTreeMap;

pub(crate) const MICRO: u64 = 1_000_000;

/// Free GPU, CPU and memory: nodes are preferred by these, in this order.
type Rank = (u64, u64, u64);

/// Named resources and labels that there can be; [`Extras`] have them in this order.
pub(crate) const NAMES: [&str; 2] = ["licence", "sandbox"];
pub(crate) const LABELS: [&str; 2] = ["zone", "gpu_type"];

/// Amounts of the named resources, and values of the labels: of a node what it has, of a demand what it wants.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Extras {
    pub(crate) named: [u64; 2],
    pub(crate) labels: [Option<&'static str>; 2],
}

/// What one token takes: micro-GPU, milli-cores, MiB, and the rest.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PlainDemand {
    pub(crate) gpu: u64,
    pub(crate) cpu: u64,
    pub(crate) memory: u64,
    pub(crate) extras: Extras,
}

#[derive(Debug, Clone)]
pub(crate) struct PlainNode {
    pub(crate) name: String,
    pub(crate) gpus: BTreeMap<u32, u64>,
    pub(crate) cpu: u64,
    pub(crate) memory: u64,
    pub(crate) extras: Extras,
    pub(crate) takes_tokens: bool,
    pub(crate) leaves_when_empty: bool,
    pub(crate) tokens: u64,
}

impl PlainNode {
    pub(crate) fn could_hold(&self, demand: PlainDemand) -> bool {
        self.choose(demand).is_some()
    }

    fn choose(&self, demand: PlainDemand) -> Option<Vec<u32>> {
        if !self.takes_tokens || demand.cpu > self.cpu || demand.memory > self.memory {
            return None;
        }
        for at in 0..2 {
            let (wanted, own) = (demand.extras, self.extras);
            if wanted.named[at] > own.named[at]
                || wanted.labels[at].is_some() && wanted.labels[at] != own.labels[at]
            {
                return None;
            }
        }
        if demand.gpu == 0 {
            return Some(Vec::new());
        }
        if demand.gpu < MICRO {
            let fitting = self.gpus.iter().filter(|(_, free)| **free >= demand.gpu);
            return fitting.min_by_key(|(id, free)| (**free, **id)).map(|(id, _)| vec![*id]);
        }
        let count = usize::try_from(demand.gpu / MICRO).unwrap();
        let whole: Vec<u32> =
            self.gpus.iter().filter(|(_, free)| **free == MICRO).map(|(id, _)| *id).take(count).collect();
        (whole.len() == count).then_some(whole)
    }

    fn take(&mut self, token: &PlainToken) {
        for id in &token.gpu_ids {
            *self.gpus.get_mut(id).unwrap() -= token.demand.gpu.min(MICRO);
        }
        self.cpu -= token.demand.cpu;
        self.memory -= token.demand.memory;
        for (free, amount) in self.extras.named.iter_mut().zip(token.demand.extras.named) {
            *free -= amount;
        }
        self.tokens += 1;
    }

    pub(crate) fn give(&mut self, token: &PlainToken) {
        for id in &token.gpu_ids {
            *self.gpus.get_mut(id).unwrap() += token.demand.gpu.min(MICRO);
        }
        self.cpu += token.demand.cpu;
        self.memory += token.demand.memory;
        for (free, amount) in self.extras.named.iter_mut().zip(token.demand.extras.named) {
            *free += amount;
        }
        self.tokens -= 1;
    }
}

#[derive(Debug, Clone)]
pub(crate) struct PlainToken {
    pub(crate) node: String,
    pub(crate) gpu_ids: Vec<u32>,
    pub(crate) demand: PlainDemand,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct PlainPool {
    pub(crate) nodes: Vec<Option<PlainNode>>,
}

impl PlainPool {
    pub(crate) fn add(&mut self, name: &str, gpus: u32, cpu: u64, memory: u64, extras: Extras) {
        let node = PlainNode {
            name: name.to_string(),
            gpus: (0..gpus).map(|id| (id, MICRO)).collect(),
            cpu,
            memory,
            extras,
            takes_tokens: true,
            leaves_when_empty: false,
            tokens: 0,
        };
        match self.nodes.iter().position(Option::is_none) {
            Some(vacant) => self.nodes[vacant] = Some(node),
            None => self.nodes.push(Some(node)),
        }
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.nodes.iter().flatten().map(|node| node.name.clone()).collect()
    }

    pub(crate) fn find(&mut self, name: &str) -> &mut PlainNode {
        self.nodes.iter_mut().flatten().find(|node| node.name == name).unwrap()
    }

    pub(crate) fn acquire(&mut self, demand: PlainDemand, count: usize) -> Option<Vec<PlainToken>> {
        let before = self.clone();
        let tokens: Option<Vec<_>> = (0..count).map(|_| self.place(demand)).collect();
        if tokens.is_none() {
            *self = before;
        }
        tokens
    }

    /// The same in a pool that has lost all nodes but these.
    pub(crate) fn acquire_on(
        &mut self,
        demand: PlainDemand,
        count: usize,
        names: &[String],
    ) -> Option<Vec<PlainToken>> {
        let is_named = |node: &PlainNode| names.contains(&node.name);
        let mut alone =
            Self { nodes: self.nodes.iter().cloned().map(|node| node.filter(is_named)).collect() };
        let tokens = alone.acquire(demand, count)?;
        for token in &tokens {
            self.find(&token.node).take(token);
        }
        Some(tokens)
    }

    /// How many can be placed one after another from the state now, counted up to `limit`. A token only takes room on
    /// its own node, so the nodes can be filled one by one.
    pub(crate) fn free_tokens(&self, demand: PlainDemand, limit: u64) -> u64 {
        let mut count = 0;
        for mut node in self.nodes.iter().flatten().cloned() {
            while count < limit
                && let Some(gpu_ids) = node.choose(demand)
            {
                node.take(&PlainToken { node: String::new(), gpu_ids, demand });
                count += 1;
            }
        }
        count
    }

    pub(crate) fn release(&mut self, token: &PlainToken) {
        self.find(&token.node).give(token);
        self.drop_the_left();
    }

    pub(crate) fn set(&mut self, name: &str, takes_tokens: bool, leaves_when_empty: bool) {
        let node = self.find(name);
        node.takes_tokens = takes_tokens;
        node.leaves_when_empty = leaves_when_empty;
        self.drop_the_left();
    }

    fn drop_the_left(&mut self) {
        for place in &mut self.nodes {
            if place.as_ref().is_some_and(|node| node.leaves_when_empty && node.tokens == 0) {
                *place = None;
            }
        }
    }

    fn place(&mut self, demand: PlainDemand) -> Option<PlainToken> {
        let mut best: Option<(Rank, usize, Vec<u32>)> = None;
        for (position, node) in self.nodes.iter().enumerate() {
            let Some(node) = node else { continue };
            let Some(gpu_ids) = node.choose(demand) else { continue };
            let rank = (node.gpus.values().sum(), node.cpu, node.memory);
            if best.as_ref().is_none_or(|(known, _, _)| rank > *known) {
                best = Some((rank, position, gpu_ids));
            }
        }
        let (_, position, gpu_ids) = best?;
        let node = self.nodes[position].as_mut().unwrap();
        let token = PlainToken { node: node.name.clone(), gpu_ids, demand };
        node.take(&token);
        Some(token)
    }
}
