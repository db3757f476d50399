//! The part of the state that places on some of the nodes alone.
//!
//! It is asked for rarely and for other nodes each time, so it keeps no index of its own: it looks at the nodes that are
//! named, and the indexes learn from the log what it did.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

use crate::extras::Extras;
use crate::held::Held;
use crate::shape::Shape;
use crate::state::State;

impl State {
    /// Takes `count` tokens on the nodes of these names, or none when not all of them fit there.
    pub(crate) fn acquire_on(
        &mut self,
        shape: Shape,
        extras: &Extras,
        names: &[&str],
        count: usize,
    ) -> Option<Vec<Held>> {
        let positions: BTreeSet<u32> =
            names.iter().filter_map(|&name| self.names.get(name)).copied().collect();
        let candidates =
            positions.into_iter().map(|position| (position, self.fits_at(position, shape, extras)));
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

    /// How many tokens a node takes now.
    fn fits_at(&self, position: u32, shape: Shape, extras: &Extras) -> u32 {
        let node = &self.nodes[position as usize];
        let countable = u32::MAX - node.tokens;
        shape.fits_active(node).min(self.extras.fits(position, extras)).min(countable)
    }
}
