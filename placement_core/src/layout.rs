//! The supply of a pool as a whole: what it could hold when empty, counted without the pool's lock.
//!
//! A [`Layout`] never changes; a change of nodes makes the next version, and with it an empty cache. So a capacity that
//! was read belongs to the version it was read from.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use crate::extras::Wanted;
use crate::node::Supply;

/// What `max_tokens_for` answers for a demand that takes no room.
pub const UNLIMITED_TOKENS: u64 = i64::MAX as u64;

/// Demands whose capacity is remembered at once.
const MAX_CAPACITIES: usize = 1_024;

/// How many nodes there are of each supply, those that take no tokens left out.
#[derive(Debug, Default)]
pub(crate) struct Layout {
    pub(crate) version: u64,
    supplies: HashMap<Supply, u64>,
    capacities: RwLock<HashMap<Wanted, u64>>,
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
    pub(crate) fn next(&self, supply: &Supply, is_added: bool) -> Self {
        let mut supplies = self.supplies.clone();
        let count = supplies.entry(supply.clone()).or_insert(0);
        *count = if is_added { *count + 1 } else { count.saturating_sub(1) };
        supplies.retain(|_, count| *count > 0);
        Self { version: self.version + 1, supplies, capacities: RwLock::default() }
    }

    /// Tokens of a demand that the empty pool holds; [`UNLIMITED_TOKENS`] when they take no room.
    pub(crate) fn capacity(&self, wanted: Wanted) -> u64 {
        let known = self.capacities.read().unwrap_or_else(PoisonError::into_inner).get(&wanted).copied();
        known.unwrap_or_else(|| {
            let counted = self.count(&wanted);
            let mut capacities = self.capacities.write().unwrap_or_else(PoisonError::into_inner);
            // Demands come from clients: a bound keeps them from growing the cache for ever.
            if capacities.len() >= MAX_CAPACITIES {
                capacities.clear();
            }
            capacities.insert(wanted, counted);
            counted
        })
    }

    /// Whether each node holds a token of a demand when it is empty.
    pub(crate) fn holds_everywhere(&self, wanted: &Wanted) -> bool {
        self.supplies.keys().all(|supply| wanted.fits_empty(supply) > 0)
    }

    fn count(&self, wanted: &Wanted) -> u64 {
        if wanted.takes_nothing() {
            let fits_somewhere = self.supplies.keys().any(|supply| wanted.fits_empty(supply) > 0);
            return if fits_somewhere { UNLIMITED_TOKENS } else { 0 };
        }
        self.supplies.iter().map(|(supply, nodes)| u64::from(wanted.fits_empty(supply)) * nodes).sum()
    }
}

/// How many tokens of each demand in use fit now, for readers that find the pool's lock taken.
#[derive(Debug, Default)]
pub(crate) struct FreeCounts(RwLock<HashMap<Wanted, Arc<AtomicU64>>>);

impl FreeCounts {
    /// The count that was last known, of a demand that is in use.
    pub(crate) fn get(&self, wanted: &Wanted) -> Option<u64> {
        let counts = self.0.read().unwrap_or_else(PoisonError::into_inner);
        counts.get(wanted).map(|free| free.load(Ordering::Relaxed))
    }

    pub(crate) fn insert(&self, wanted: Wanted, free: Arc<AtomicU64>) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).insert(wanted, free);
    }

    pub(crate) fn remove(&self, wanted: &Wanted) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).remove(wanted);
    }
}
