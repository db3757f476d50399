//! The part of the state that places on the nodes alone which some other demands could never use.
//!
//! It is asked for rarely and for other demands each time, so it keeps no index: it looks at every such node, and the
//! indexes learn from the log what it did. Which nodes a demand could use is remembered until nodes change.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::extras::{Extras, Wanted};
use crate::held::Held;
use crate::node::Phase;
use crate::shape::Shape;
use crate::state::State;

/// Demands whose nodes are remembered at once: they come from clients.
const MAX_HOLDERS: usize = 256;
const WORD_BITS: usize = u64::BITS as usize;

impl State {
    /// Takes `count` tokens on the nodes that could hold none of the others, or none when not all of them fit there.
    pub(crate) fn acquire_apart(
        &mut self,
        shape: Shape,
        extras: &Extras,
        others: &[Wanted],
        count: usize,
    ) -> Option<Vec<Held>> {
        let mut kept = vec![0_u64; self.nodes.len().div_ceil(WORD_BITS)];
        for other in others {
            for (word, holders) in kept.iter_mut().zip(self.holders(other)) {
                *word |= holders;
            }
        }
        let apart = (0..self.nodes.len() as u32)
            .filter(|&at| kept[at as usize / WORD_BITS] >> (at % u64::BITS) & 1 == 0);
        let candidates = apart.map(|position| (position, self.fits_at(position, shape, extras)));
        // The freest node comes first, of equals the one at the lowest position.
        let mut fitting: BinaryHeap<_> = candidates
            .filter(|&(_, fits)| fits > 0)
            .map(|(position, fits)| (self.nodes[position as usize].room.key(), Reverse(position), fits))
            .collect();
        let free: u64 = fitting.iter().map(|&(.., fits)| u64::from(fits)).sum();
        if free < count as u64 {
            return None;
        }
        let mut tokens = Vec::with_capacity(count);
        while tokens.len() < count
            && let Some((_, Reverse(position), fits)) = fitting.pop()
        {
            let node = &self.nodes[position as usize];
            let token = Held::new(position, node.info, shape.choose(node));
            self.acquire_here(shape, extras, std::slice::from_ref(&token));
            tokens.push(token);
            // Each token makes exactly one less fit.
            if fits > 1 {
                fitting.push((self.nodes[position as usize].room.key(), Reverse(position), fits - 1));
            }
        }
        Some(tokens)
    }

    /// Whether a node takes tokens and could hold one of a demand if it were empty.
    pub(crate) fn could_hold(&self, position: u32, wanted: &Wanted) -> bool {
        let at = position as usize;
        self.nodes[at].phase == Phase::Active && wanted.fits_empty(&self.tenants[at].supply) > 0
    }

    /// The positions of those nodes, a bit for each.
    fn holders(&mut self, wanted: &Wanted) -> &[u64] {
        if !self.holders.contains_key(wanted) {
            let mut bits = vec![0_u64; self.nodes.len().div_ceil(WORD_BITS)];
            for position in 0..self.nodes.len() as u32 {
                let could = u64::from(self.could_hold(position, wanted));
                bits[position as usize / WORD_BITS] |= could << (position % u64::BITS);
            }
            if self.holders.len() >= MAX_HOLDERS {
                self.holders.clear();
            }
            self.holders.insert(wanted.clone(), bits);
        }
        &self.holders[wanted]
    }

    /// How many tokens a node takes now.
    fn fits_at(&self, position: u32, shape: Shape, extras: &Extras) -> u32 {
        let node = &self.nodes[position as usize];
        let countable = u32::MAX - node.tokens;
        shape.fits_active(node).min(self.extras.fits(position, extras)).min(countable)
    }
}
