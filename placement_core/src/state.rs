//! What the pool's lock guards: the nodes, one index for each shape in use, and the log that keeps indexes current.
//!
//! Invariants: `names` leads to every node that is not vacant, `vacant` lists the others; each change of a node is in
//! `log` until every index that is not stale has seen it or made it. With one index there is no log. `latest` is the
//! position of an index without extras, or of none.

#![allow(clippy::inline_always, reason = "a call would pass what is in registers through memory")]

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use crate::extras::{Extras, NodeExtras, Wanted};
use crate::held::{Held, Tokens};
use crate::index::ShapeIndex;
use crate::layout::FreeCounts;
use crate::node::{NodeInfo, NodeState, Phase, Supply};
use crate::shape::Shape;

mod apart;
mod with_extras;

/// Shapes that keep an index; the least recently used one makes room.
const MAX_INDEXES: usize = 32;
const LOG_AT_LEAST: usize = 1_024;
/// The serial of tokens that no index placed.
pub(crate) const NO_INDEX: u32 = u32::MAX;

#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) nodes: Vec<NodeState>,
    pub(crate) names: HashMap<String, u32>,
    /// What else the nodes have, and what is free of it.
    pub(crate) extras: NodeExtras,
    vacant: BTreeSet<u32>,
    /// What `nodes` are when empty, by position.
    pub(crate) tenants: Vec<Tenant>,
    known_infos: HashMap<Arc<NodeInfo>, u32>,
    indexes: Vec<UsedIndex>,
    latest: usize,
    uses: u64,
    next_serial: u32,
    /// Nodes that were changed, one entry a token.
    log: Vec<u32>,
    /// Of some demands the nodes that could hold a token, a bit for each position; forgotten when nodes change.
    holders: HashMap<Wanted, Vec<u64>>,
    /// What the indexes count, for those who do not hold the lock.
    pub(crate) counts: Arc<FreeCounts>,
    /// `release_version` of the pool.
    pub(crate) releases: u64,
    /// Threads that wait for a release.
    pub(crate) waiters: usize,
}

/// What does not change about a node in the table.
#[derive(Debug)]
pub(crate) struct Tenant {
    pub(crate) supply: Supply,
    pub(crate) info: Arc<NodeInfo>,
}

#[derive(Debug)]
struct UsedIndex {
    /// When another took its place as the latest.
    last_use: u64,
    index: ShapeIndex,
    /// What else the demand wants.
    extras: Option<Arc<Extras>>,
}

impl UsedIndex {
    fn is_of(&self, shape: Shape, extras: Option<&Arc<Extras>>) -> bool {
        self.index.shape == shape && self.extras.as_ref() == extras
    }

    fn wanted(&self) -> Wanted {
        Wanted::new(self.index.shape, self.extras.as_ref())
    }

    fn catch_up(&mut self, nodes: &[NodeState], node_extras: &NodeExtras, log: &[u32]) {
        match &self.extras {
            None => self.index.catch_up(nodes, log),
            Some(extras) => {
                self.index.catch_up_capped(nodes, log, |position| node_extras.fits(position, extras));
            }
        }
    }
}

impl State {
    /// Takes `count` tokens, or none when not all of them fit. The shape must take some room.
    #[inline(always)]
    pub(crate) fn acquire(&mut self, shape: Shape, count: usize) -> Option<(u32, Tokens)> {
        let at = self.current_index(shape);
        let index = &mut self.indexes[at].index;
        if index.free_tokens() < count as u64 {
            return None;
        }
        let by = index.serial;
        if count > 1 {
            return Some((by, Tokens::Many(self.take(at, count))));
        }
        let token = index.take_one(&mut self.nodes)?;
        if self.has_log() {
            self.record(at, [token.node()]);
        }
        Some((by, Tokens::One([token])))
    }

    #[inline(never)]
    fn take(&mut self, at: usize, count: usize) -> Vec<Held> {
        // Written twice, which costs less than asking for each token whether the list must grow.
        let mut tokens: Vec<Held> = std::iter::repeat_with(Held::nothing).take(count).collect();
        self.indexes[at].index.take(&mut self.nodes, &mut tokens);
        if self.has_log() {
            self.record(at, tokens.iter().map(Held::node));
        }
        tokens
    }

    /// Whether there is anybody to tell what an index did.
    #[inline]
    fn has_log(&self) -> bool {
        self.indexes.len() > 1
    }

    /// Tells the other indexes, by way of the log, what the index at `by` did, which was caught up.
    #[cold]
    fn record(&mut self, by: usize, nodes: impl IntoIterator<Item = u32>) {
        self.log.extend(nodes);
        self.indexes[by].index.seen = self.log.len();
        self.trim_log();
    }

    /// Takes `count` tokens that take no room: all on the freest node with the labels that are required.
    pub(crate) fn acquire_nothing(
        &mut self,
        extras: Option<&Arc<Extras>>,
        count: usize,
    ) -> Option<(u32, Tokens)> {
        let Self { nodes, extras: node_extras, .. } = self;
        let extras = Extras::of(extras);
        let active = nodes.iter_mut().zip(0_u32..).filter(|(node, _)| node.phase == Phase::Active);
        let fitting = active.filter(|&(_, position)| node_extras.fits(position, extras) > 0);
        let (node, position) = fitting.min_by_key(|(node, _)| std::cmp::Reverse(node.room.key()))?;
        node.tokens = node.tokens.checked_add(u32::try_from(count).ok()?)?;
        let token = || Held::new(position, node.info, 0);
        Some((NO_INDEX, Tokens::Many(std::iter::repeat_with(token).take(count).collect())))
    }

    /// Takes given tokens; the caller has checked that they fit.
    pub(crate) fn acquire_here(&mut self, shape: Shape, extras: &Extras, tokens: &[Held]) {
        for token in tokens {
            shape.place_on(&mut self.nodes[token.node() as usize], token.gpus);
            self.extras.take(token.node(), extras);
            self.log.push(token.node());
        }
        self.trim_log();
    }

    /// Gives tokens back that the index `by` placed, of a demand without extras.
    #[inline(always)]
    pub(crate) fn give_back(&mut self, shape: Shape, by: u32, tokens: &[Held]) {
        let Self { nodes, indexes, log, .. } = self;
        // A stale index learns all when it is made anew; one that is gone need not learn anything.
        let is_it = |used: &UsedIndex| used.index.serial == by && !used.index.is_stale;
        let is_latest = indexes.get(self.latest).is_some_and(is_it);
        let known = if is_latest { Some(self.latest) } else { indexes.iter().position(is_it) };
        let has_left = if let Some(at) = known {
            let index = &mut indexes[at].index;
            index.catch_up(nodes, log);
            let has_left = match tokens {
                [token] => index.give_one_back(nodes, token),
                _ => index.give_back(nodes, tokens),
            };
            if self.has_log() {
                self.record(at, tokens.iter().map(Held::node));
            }
            has_left
        } else {
            self.give_back_here(shape, tokens)
        };
        if has_left {
            self.vacate(tokens);
        }
    }

    /// Gives tokens back without the help of an index. Whether a leaving node is empty now.
    #[cold]
    fn give_back_here(&mut self, shape: Shape, tokens: &[Held]) -> bool {
        let mut has_left = false;
        for token in tokens {
            let node = &mut self.nodes[token.node() as usize];
            shape.restore(node, token.gpus);
            has_left |= node.is_left();
            self.log.push(token.node());
        }
        self.trim_log();
        has_left
    }

    /// Takes out the leaving nodes that gave their last token back.
    #[cold]
    fn vacate(&mut self, tokens: &[Held]) {
        for token in tokens {
            let node = &mut self.nodes[token.node() as usize];
            if node.is_left() {
                node.phase = Phase::Vacant;
                self.names.remove(&self.tenants[token.node() as usize].info.name);
                self.vacant.insert(token.node());
            }
        }
    }

    /// Tokens of a demand that fit now. It must take some room.
    pub(crate) fn free_tokens(&mut self, shape: Shape, extras: Option<&Arc<Extras>>) -> u64 {
        let at = match extras {
            None => self.current_index(shape),
            Some(extras) => self.index_with_extras(shape, extras),
        };
        self.indexes[at].index.free_tokens()
    }

    /// Puts a node in the lowest vacant place.
    pub(crate) fn add(&mut self, info: Arc<NodeInfo>, supply: Supply, infos: &mut Vec<Arc<NodeInfo>>) {
        let position = self.vacant.pop_first().unwrap_or(self.nodes.len() as u32);
        self.names.insert(info.name.clone(), position);
        self.extras.enter(position, supply.extras.as_ref());
        let known = *self.known_infos.entry(Arc::clone(&info)).or_insert_with_key(|info| {
            infos.push(Arc::clone(info));
            infos.len() as u32 - 1
        });
        let node = NodeState::empty(&supply, known, Phase::Active);
        let tenant = Tenant { supply, info };
        if position as usize == self.nodes.len() {
            self.nodes.push(node);
            self.tenants.push(tenant);
        } else {
            self.nodes[position as usize] = node;
            self.tenants[position as usize] = tenant;
        }
        self.invalidate();
    }

    /// Sets whether a node takes tokens; a leaving one without tokens goes at once.
    pub(crate) fn set_phase(&mut self, position: u32, phase: Phase) {
        let node = &mut self.nodes[position as usize];
        node.phase = phase;
        if node.is_left() {
            node.phase = Phase::Vacant;
            self.names.remove(&self.tenants[position as usize].info.name);
            self.vacant.insert(position);
        }
        self.invalidate();
    }

    fn invalidate(&mut self) {
        for used in &mut self.indexes {
            used.index.is_stale = true;
        }
        self.log.clear();
        self.holders.clear();
    }

    /// Position of the index of a shape without extras, made if need be and caught up.
    #[inline(always)]
    fn current_index(&mut self, shape: Shape) -> usize {
        if let Some(used) = self.indexes.get_mut(self.latest)
            && used.index.shape == shape
        {
            used.index.catch_up(&self.nodes, &self.log);
            return self.latest;
        }
        self.find_index(shape)
    }

    #[cold]
    fn find_index(&mut self, shape: Shape) -> usize {
        self.uses += 1;
        if let Some(used) = self.indexes.get_mut(self.latest) {
            used.last_use = self.uses;
        }
        let known = self.indexes.iter().position(|used| used.is_of(shape, None));
        self.latest = known.unwrap_or_else(|| self.new_index(shape, None));
        self.indexes[self.latest].index.catch_up(&self.nodes, &self.log);
        self.latest
    }

    fn new_index(&mut self, shape: Shape, extras: Option<&Arc<Extras>>) -> usize {
        let serial = self.next_serial;
        self.next_serial = (self.next_serial + 1) % NO_INDEX;
        let free = Arc::new(AtomicU64::new(0));
        let index = ShapeIndex::new(shape, serial, Arc::clone(&free));
        let mut used = UsedIndex { last_use: self.uses, index, extras: extras.cloned() };
        // Before anybody can read what it counts.
        used.catch_up(&self.nodes, &self.extras, &self.log);
        self.counts.insert(used.wanted(), free);
        if self.indexes.len() < MAX_INDEXES {
            self.indexes.push(used);
            return self.indexes.len() - 1;
        }
        let oldest = (0..MAX_INDEXES).min_by_key(|&at| self.indexes[at].last_use).unwrap_or(0);
        self.counts.remove(&self.indexes[oldest].wanted());
        self.indexes[oldest] = used;
        oldest
    }

    /// Bounds the log: an index that is too far behind is made anew when it is used again, which costs no more than
    /// the changes it missed.
    fn trim_log(&mut self) {
        if self.log.len() <= 2 * self.nodes.len() + LOG_AT_LEAST {
            return;
        }
        for used in &mut self.indexes {
            used.index.is_stale |= used.index.seen < self.log.len();
            used.index.seen = 0;
        }
        self.log.clear();
    }
}
