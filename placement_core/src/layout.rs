//! The supply of a pool as a whole: what it could hold when empty, counted without the pool's lock.
//!
//! A [`Layout`] never changes; a change of nodes makes the next version, and with it an empty cache. So a capacity that
//! was read belongs to the version it was read from.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use crate::node::Supply;
use crate::shape::Shape;

/// What `max_tokens_for` answers for a demand that takes no room.
pub const UNLIMITED_TOKENS: u64 = i64::MAX as u64;

/// How many nodes there are of each supply, those that take no tokens left out.
#[derive(Debug, Default)]
pub(crate) struct Layout {
    pub(crate) version: u64,
    supplies: HashMap<Supply, u64>,
    capacities: RwLock<HashMap<Shape, u64>>,
}

impl Layout {
    pub(crate) fn new(version: u64, active: impl IntoIterator<Item = Supply>) -> Self {
        let mut supplies = HashMap::new();
        for supply in active {
            *supplies.entry(supply).or_insert(0) += 1;
        }
        Self { version, supplies, capacities: RwLock::default() }
    }

    /// The next version, with one more (or one less) node of a supply.
    pub(crate) fn next(&self, supply: Supply, is_added: bool) -> Self {
        let mut supplies = self.supplies.clone();
        let count = supplies.entry(supply).or_insert(0);
        *count = if is_added { *count + 1 } else { count.saturating_sub(1) };
        supplies.retain(|_, count| *count > 0);
        Self { version: self.version + 1, supplies, capacities: RwLock::default() }
    }

    /// Tokens of a shape that the empty pool holds; [`UNLIMITED_TOKENS`] when they take no room.
    pub(crate) fn capacity(&self, shape: Shape) -> u64 {
        let known = self.capacities.read().unwrap_or_else(PoisonError::into_inner).get(&shape).copied();
        known.unwrap_or_else(|| {
            let counted = self.count(shape);
            let mut capacities = self.capacities.write().unwrap_or_else(PoisonError::into_inner);
            // Shapes come from clients: a bound keeps them from growing the cache for ever.
            if capacities.len() >= 1_024 {
                capacities.clear();
            }
            capacities.insert(shape, counted);
            counted
        })
    }

    fn count(&self, shape: Shape) -> u64 {
        if shape.is_nothing() {
            return if self.supplies.is_empty() { 0 } else { UNLIMITED_TOKENS };
        }
        self.supplies.iter().map(|(&supply, nodes)| u64::from(shape.fits_empty(supply).all()) * nodes).sum()
    }
}

/// How many tokens of each shape in use fit now, for readers that find the pool's lock taken.
#[derive(Debug, Default)]
pub(crate) struct FreeCounts(RwLock<HashMap<Shape, Arc<AtomicU64>>>);

impl FreeCounts {
    /// The count that was last known, of a shape that is in use.
    pub(crate) fn get(&self, shape: Shape) -> Option<u64> {
        let counts = self.0.read().unwrap_or_else(PoisonError::into_inner);
        counts.get(&shape).map(|free| free.load(Ordering::Relaxed))
    }

    pub(crate) fn insert(&self, shape: Shape, free: Arc<AtomicU64>) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).insert(shape, free);
    }

    pub(crate) fn remove(&self, shape: Shape) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).remove(&shape);
    }
}
