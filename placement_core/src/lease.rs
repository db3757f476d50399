//! Leases: room that is held, and how it is given back.
//!
//! Invariants: a token is held by exactly one lease or free; `held` counts those of a lease that were not given back;
//! a token that was given back before the others keeps its names but no longer its node. What of a lease changes is
//! written under the pool's lock only, so a lease needs no lock of its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::error::{PlacementError, Result};
use crate::extras::Extras;
use crate::handle::Shared;
use crate::held::{Held, Tokens};
use crate::node::NodeInfo;
use crate::resource::Demand;
use crate::shape::Shape;
use crate::state::State;

/// Where one token lies, in names that outlive the process.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Placement {
    /// The node's name.
    pub node: String,
    /// Ids of the GPUs taken, ascending: none, the one that is shared, or the whole ones.
    pub gpu_ids: Vec<u32>,
}

impl Placement {
    /// A placement to adopt.
    #[must_use]
    pub fn new(node: impl Into<String>, gpu_ids: impl Into<Vec<u32>>) -> Self {
        Self { node: node.into(), gpu_ids: gpu_ids.into() }
    }
}

/// Room for a batch, held until it is released token by token, as a whole, or by dropping the lease.
///
/// A lease owns its pool's share, so it may outlive every [`crate::Pool`] handle; threads may share it.
#[must_use = "dropping a lease gives its room back"]
pub struct Lease {
    shared: Shared,
    tokens: Tokens,
    shape: Shape,
    /// Serial of the index that placed the tokens.
    index: u32,
    held: AtomicU32,
    is_released: AtomicBool,
    concurrency: u64,
    extras: Option<Arc<Extras>>,
}

impl std::fmt::Debug for Lease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (tokens, held) = (self.len(), self.held());
        f.debug_struct("Lease").field("tokens", &tokens).field("held", &held).finish_non_exhaustive()
    }
}

impl Lease {
    /// A lease of a demand without extras.
    #[inline]
    pub(crate) fn new(shared: Shared, demand: &Demand, shape: Shape, index: u32, tokens: Tokens) -> Self {
        let (held, is_released) = (AtomicU32::new(tokens.as_slice().len() as u32), AtomicBool::new(false));
        let (concurrency, extras) = (demand.concurrency(), None);
        Self { shared, tokens, shape, index, held, is_released, concurrency, extras }
    }

    /// The same lease of a demand that may have extras.
    pub(crate) fn with_extras_of(mut self, demand: &Demand) -> Self {
        self.extras = demand.extras().cloned();
        self
    }

    /// Tokens of the lease, given back ones included.
    #[must_use]
    pub fn len(&self) -> usize {
        self.tokens.as_slice().len()
    }

    /// Whether the lease never had a token.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Tokens that were not given back.
    #[must_use]
    pub fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed) as usize
    }

    /// What each token takes.
    #[must_use]
    pub fn demand(&self) -> Demand {
        self.shape.demand(self.extras.clone()).with_concurrency(self.concurrency)
    }

    /// Whether one token is still held; false for a position that the lease does not have.
    #[must_use]
    pub fn is_held(&self, index: usize) -> bool {
        self.tokens.as_slice().get(index).is_some_and(|token| self.holds(token))
    }

    /// When none is held no token is marked: that would be a walk over all of them.
    fn holds(&self, token: &Held) -> bool {
        self.held() > 0 && !token.is_given_back()
    }

    /// The name of the node that a token lies on, also after it was given back.
    #[must_use]
    pub fn node(&self, index: usize) -> Option<String> {
        self.with_info(index, |info, _| info.name.clone())
    }

    /// Calls `read` with the name of a token's node, without copying it.
    pub fn with_node<R>(&self, index: usize, read: impl FnOnce(&str) -> R) -> Option<R> {
        self.with_info(index, |info, _| read(&info.name))
    }

    /// The ids of the GPUs of a token, ascending, also after it was given back.
    #[must_use]
    pub fn gpu_ids(&self, index: usize) -> Option<Vec<u32>> {
        self.with_info(index, NodeInfo::ids_of)
    }

    /// Where every token lies, fit to be recorded and [adopted](crate::Pool::adopt) later.
    #[must_use]
    pub fn placements(&self) -> Vec<Placement> {
        let infos = self.shared.infos();
        let placement = |token: &Held| {
            let info = &infos[token.info() as usize];
            Placement { node: info.name.clone(), gpu_ids: info.ids_of(self.shape.slots(token.gpus)) }
        };
        self.tokens.as_slice().iter().map(placement).collect()
    }

    /// Gives one token back.
    ///
    /// # Errors
    /// [`PlacementError::TokenReleased`] when it was given back before, alone or with the lease;
    /// [`PlacementError::NoSuchToken`] for a position the lease does not have.
    pub fn release_token(&self, index: usize) -> Result<()> {
        let Some(token) = self.tokens.as_slice().get(index) else {
            return Err(PlacementError::NoSuchToken { index, len: self.len() });
        };
        let mut state = self.shared.lock();
        if !self.holds(token) {
            return Err(PlacementError::TokenReleased { index });
        }
        self.give_these_back(&mut state, std::slice::from_ref(token));
        token.mark_given_back();
        self.held.store(self.held() as u32 - 1, Ordering::Relaxed);
        self.shared.announce(&mut state);
        Ok(())
    }

    /// Gives back every token that is still held.
    ///
    /// # Errors
    /// [`PlacementError::LeaseReleased`] when it was called before.
    pub fn release(&self) -> Result<()> {
        let mut state = self.shared.lock();
        if self.is_released.load(Ordering::Relaxed) {
            return Err(PlacementError::LeaseReleased);
        }
        self.give_back_to(&mut state);
        Ok(())
    }

    /// Gives back what is still held; does nothing when that is nothing. Dropping the lease does the same.
    pub fn release_remainder(&self) {
        self.give_back_to(&mut self.shared.lock());
    }

    /// Gives back what is held, while the pool's lock is.
    #[inline]
    fn give_back_to(&self, state: &mut State) {
        self.is_released.store(true, Ordering::Relaxed);
        let (held, tokens) = (self.held(), self.tokens.as_slice());
        if held == 0 {
            return;
        }
        if held == tokens.len() {
            self.give_these_back(state, tokens);
        } else {
            let still = tokens.iter().filter(|token| !token.is_given_back());
            self.give_these_back(state, &still.map(Held::copied).collect::<Vec<_>>());
        }
        self.held.store(0, Ordering::Relaxed);
        self.shared.announce(state);
    }

    #[inline]
    fn give_these_back(&self, state: &mut State, tokens: &[Held]) {
        match &self.extras {
            None => state.give_back(self.shape, self.index, tokens),
            Some(extras) => state.give_back_with_extras(self.shape, extras, self.index, tokens),
        }
    }

    fn with_info<R>(&self, index: usize, read: impl FnOnce(&NodeInfo, u64) -> R) -> Option<R> {
        let token = self.tokens.as_slice().get(index)?;
        Some(read(&self.shared.infos()[token.info() as usize], self.shape.slots(token.gpus)))
    }
}

impl Drop for Lease {
    #[inline]
    fn drop(&mut self) {
        if *self.held.get_mut() > 0 {
            self.release_remainder();
        }
    }
}
