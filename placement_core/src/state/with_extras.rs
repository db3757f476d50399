//! The part of the state that serves demands with extras: named resources and required labels.
//!
//! Such a demand has an index like any other, which counts by the extras too. It works on the nodes alone; what it
//! places and gives back is then written into [`NodeExtras`](crate::extras::NodeExtras), after the index caught up, so
//! that no token is counted twice.

use std::sync::Arc;

use crate::extras::Extras;
use crate::held::{Held, Tokens};
use crate::shape::Shape;
use crate::state::State;

/// Leads to no index.
const NOWHERE: usize = usize::MAX;

impl State {
    /// Takes `count` tokens, or none when not all of them fit. The demand must take some room.
    pub(crate) fn acquire_with_extras(
        &mut self,
        shape: Shape,
        extras: &Arc<Extras>,
        count: usize,
    ) -> Option<(u32, Tokens)> {
        let at = self.index_with_extras(shape, extras);
        let index = &mut self.indexes[at].index;
        if index.free_tokens() < count as u64 {
            return None;
        }
        let by = index.serial;
        let mut tokens: Vec<Held> = std::iter::repeat_with(Held::nothing).take(count).collect();
        if shape.is_nothing() {
            // A token leaves its node as free as it was, so the next one goes to the same node.
            for token in &mut tokens {
                *token = index.take_one(&mut self.nodes)?;
            }
        } else {
            index.take(&mut self.nodes, &mut tokens);
        }
        for token in &tokens {
            self.extras.take(token.node(), extras);
        }
        if self.has_log() {
            self.record(at, tokens.iter().map(Held::node));
        }
        Some((by, Tokens::Many(tokens)))
    }

    /// Gives tokens back that the index `by` placed.
    #[inline(never)]
    pub(crate) fn give_back_with_extras(&mut self, shape: Shape, extras: &Extras, by: u32, tokens: &[Held]) {
        let is_it = |used: &super::UsedIndex| used.index.serial == by && !used.index.is_stale;
        let has_left = if let Some(at) = self.indexes.iter().position(is_it) {
            self.indexes[at].catch_up(&self.nodes, &self.extras, &self.log);
            let index = &mut self.indexes[at].index;
            let mut has_left = false;
            if shape.is_nothing() {
                for token in tokens {
                    has_left |= index.give_one_back(&mut self.nodes, token);
                }
            } else {
                has_left = index.give_back(&mut self.nodes, tokens);
            }
            if self.has_log() {
                self.record(at, tokens.iter().map(Held::node));
            }
            has_left
        } else {
            self.give_back_here(shape, tokens)
        };
        for token in tokens {
            self.extras.give_back(token.node(), extras);
        }
        if has_left {
            self.vacate(tokens);
        }
    }

    /// Position of the demand's index, made if need be and caught up.
    pub(super) fn index_with_extras(&mut self, shape: Shape, extras: &Arc<Extras>) -> usize {
        self.uses += 1;
        // The latest is in use too: it must not make room.
        if let Some(used) = self.indexes.get_mut(self.latest) {
            used.last_use = self.uses;
        }
        let known = self.indexes.iter().position(|used| used.is_of(shape, Some(extras)));
        let at = known.unwrap_or_else(|| self.new_index(shape, Some(extras)));
        self.indexes[at].last_use = self.uses;
        if self.latest == at {
            self.latest = NOWHERE;
        }
        self.indexes[at].catch_up(&self.nodes, &self.extras, &self.log);
        at
    }
}
