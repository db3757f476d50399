//! What the pool's lock guards: the nodes, one index for each shape in use, and the log that keeps indexes current.
//!
//! Invariants: `names` leads to every node that is not vacant, `vacant` lists the others; each change of an active node
//! is in `log` until every index that is not stale has seen it.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use crate::index::{Change, ShapeIndex};
use crate::node::{NodeInfo, NodeState, Phase, Supply};
use crate::shape::Shape;
use crate::token::{Held, Tokens};

/// Shapes that keep an index; the least recently used one makes room.
const MAX_INDEXES: usize = 32;
const LOG_AT_LEAST: usize = 1_024;
/// The serial of changes that no index has counted.
pub(crate) const NO_INDEX: u32 = u32::MAX;

#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) nodes: Vec<NodeState>,
    pub(crate) names: HashMap<String, u32>,
    vacant: BTreeSet<u32>,
    /// What `nodes` are when empty, by position.
    pub(crate) tenants: Vec<Tenant>,
    known_infos: HashMap<Arc<NodeInfo>, u32>,
    indexes: Vec<UsedIndex>,
    latest: usize,
    uses: u64,
    next_serial: u32,
    log: Vec<Change>,
}

/// What does not change about a node in the table.
#[derive(Debug)]
pub(crate) struct Tenant {
    pub(crate) supply: Supply,
    pub(crate) info: Arc<NodeInfo>,
}

#[derive(Debug)]
struct UsedIndex {
    last_use: u64,
    index: ShapeIndex,
}

impl State {
    /// Takes `count` tokens, or none when not all of them fit. The shape must take some room.
    pub(crate) fn acquire(&mut self, shape: Shape, count: usize) -> Option<(u32, Tokens)> {
        let at = self.current_index(shape);
        let is_alone = self.indexes.len() == 1;
        let Self { indexes, nodes, log, .. } = self;
        let index = &mut indexes[at].index;
        if index.free_tokens() < count as u64 {
            return None;
        }
        let by = index.serial;
        let tokens = if count == 1 {
            let mut one = None;
            index.take(nodes, 1, |token| one = Some(token));
            Tokens::One([one?])
        } else {
            let mut many = Vec::with_capacity(count);
            index.take(nodes, count, |token| many.push(token));
            Tokens::Many(many)
        };
        if !is_alone {
            let taken = match &tokens {
                Tokens::One(token) => &token[..],
                Tokens::Many(tokens) => tokens,
            };
            log.extend(taken.iter().map(|token| Change { node: token.node, by }));
            index.seen = log.len();
            self.trim_log();
        }
        Some((by, tokens))
    }

    /// Takes `count` tokens that take no room: all on the freest node.
    pub(crate) fn acquire_nothing(&mut self, count: usize) -> Option<(u32, Tokens)> {
        let active = self.nodes.iter_mut().zip(0_u32..).filter(|(node, _)| node.phase == Phase::Active);
        let (node, position) = active.min_by_key(|(node, _)| std::cmp::Reverse(node.room.key()))?;
        node.tokens = node.tokens.checked_add(u32::try_from(count).ok()?)?;
        let token = Held { node: position, info: node.info, gpus: 0 };
        Some((NO_INDEX, Tokens::Many(vec![token; count])))
    }

    /// Takes given tokens; the caller has checked that they fit.
    pub(crate) fn acquire_here(&mut self, shape: Shape, tokens: &[Held]) {
        for token in tokens {
            shape.place_on(&mut self.nodes[token.node as usize], token.gpus);
            self.log.push(Change { node: token.node, by: NO_INDEX });
        }
        self.trim_log();
    }

    /// Gives tokens back that the index `by` placed.
    pub(crate) fn give_back(&mut self, shape: Shape, by: u32, tokens: &[Held]) {
        let Self { nodes, indexes, log, .. } = self;
        let mut index = indexes.iter_mut().map(|used| &mut used.index).find(|index| index.serial == by);
        let by = index.as_ref().map_or(NO_INDEX, |index| index.serial);
        let mut has_left = false;
        log.reserve(tokens.len());
        for token in tokens {
            let node = &mut nodes[token.node as usize];
            shape.restore(node, token.gpus);
            if node.phase == Phase::Active {
                if let Some(index) = &mut index {
                    index.count_returned(token.node);
                }
                log.push(Change { node: token.node, by });
            } else {
                has_left |= node.phase == Phase::Leaving && node.tokens == 0;
            }
        }
        if has_left {
            self.vacate(tokens);
        }
        self.trim_log();
    }

    /// Takes out the leaving nodes that gave their last token back.
    fn vacate(&mut self, tokens: &[Held]) {
        for token in tokens {
            let node = &mut self.nodes[token.node as usize];
            if node.phase == Phase::Leaving && node.tokens == 0 {
                node.phase = Phase::Vacant;
                self.names.remove(&self.tenants[token.node as usize].info.name);
                self.vacant.insert(token.node);
            }
        }
    }

    /// Tokens of a shape that fit now. The shape must take some room.
    pub(crate) fn free_tokens(&mut self, shape: Shape) -> u64 {
        let at = self.current_index(shape);
        self.indexes[at].index.free_tokens()
    }

    /// Puts a node in the lowest vacant place.
    pub(crate) fn add(&mut self, info: Arc<NodeInfo>, supply: Supply, infos: &mut Vec<Arc<NodeInfo>>) {
        let position = self.vacant.pop_first().unwrap_or(self.nodes.len() as u32);
        self.names.insert(info.name.clone(), position);
        let tenant = Tenant { supply, info: Arc::clone(&info) };
        let known = *self.known_infos.entry(info).or_insert_with_key(|info| {
            infos.push(Arc::clone(info));
            infos.len() as u32 - 1
        });
        let node = NodeState::empty(supply, known, Phase::Active);
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
        if phase == Phase::Leaving && node.tokens == 0 {
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
    }

    /// Position of the shape's index, made if need be and caught up.
    fn current_index(&mut self, shape: Shape) -> usize {
        self.uses += 1;
        let is_latest = self.indexes.get(self.latest).is_some_and(|used| used.index.shape == shape);
        if !is_latest {
            let known = self.indexes.iter().position(|used| used.index.shape == shape);
            self.latest = known.unwrap_or_else(|| self.new_index(shape));
        }
        let used = &mut self.indexes[self.latest];
        used.last_use = self.uses;
        used.index.catch_up(&self.nodes, &self.log);
        if self.indexes.len() == 1 {
            self.log.clear();
            self.indexes[0].index.seen = 0;
        }
        self.latest
    }

    fn new_index(&mut self, shape: Shape) -> usize {
        let serial = self.next_serial;
        self.next_serial = (self.next_serial + 1) % NO_INDEX;
        let used = UsedIndex { last_use: self.uses, index: ShapeIndex::new(shape, serial) };
        if self.indexes.len() < MAX_INDEXES {
            self.indexes.push(used);
            return self.indexes.len() - 1;
        }
        let oldest = (0..MAX_INDEXES).min_by_key(|&at| self.indexes[at].last_use).unwrap_or(0);
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
