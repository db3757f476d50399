//! The pool: every call of the crate that places, explains or changes nodes.
//!
//! Invariants: a token is free or in exactly one lease; a batch gets all its tokens under one lock or none; free amounts
//! are never negative and equal the supply when no lease is left; `releases` rises with each call that may have made
//! room, while the lock is held. Lock order: state, then one of infos, layout, counts and gate.

use std::sync::Arc;

use crate::adopt::{first_without_room, locate};
use crate::error::{PlacementError, Result};
use crate::explain::{Explanation, NodeUsage, explain_nodes, usage_of};
use crate::extras::{Extras, Wanted, takes_nothing};
use crate::handle::{Open, Shared};
use crate::held::Tokens;
use crate::layout::{Layout, UNLIMITED_TOKENS};
use crate::lease::{Lease, Placement};
use crate::node::{NodeInfo, Phase, Supply};
use crate::node_spec::{NodeSpec, check_nodes};
use crate::resource::{Budget, Demand};
use crate::state::{NO_INDEX, State};

/// Tokens that one lease can hold.
pub const MAX_LEASE_TOKENS: u64 = 1 << 24;

/// Supply that batches are placed on. A clone is another handle to the same pool.
///
/// ```
/// use placement_core::{Budget, Demand, NodeSpec, Pool};
///
/// let pool = Pool::new([NodeSpec::new("10.0.0.1", [0, 1], 16.0, 64.0)])?;
/// let sample = Demand::new(0.33, 1.0, 4.0)?;
/// assert_eq!(pool.max_tokens_for(&sample), 6);
///
/// let budget = Budget::new(2.0, 8.0, 32.0, 4)?;
/// let lease = pool.try_acquire_batch(&budget, &sample, 64)?.expect("the pool is empty");
/// assert_eq!((lease.len(), pool.free_tokens_for(&sample)), (4, 2));
/// assert!(pool.try_acquire_batch(&budget, &sample, 64)?.is_none());
///
/// lease.release_token(0)?;
/// lease.release()?;
/// assert_eq!(pool.free_tokens_for(&sample), 6);
/// # Ok::<(), placement_core::PlacementError>(())
/// ```
#[derive(Clone)]
pub struct Pool {
    shared: Shared,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("nodes", &self.nodes().len()).finish_non_exhaustive()
    }
}

impl Pool {
    /// A pool of these nodes. It may be empty and be added to later.
    ///
    /// # Errors
    /// [`PlacementError::InvalidNodes`] with every fault of every node, as [`check_nodes`] finds them.
    pub fn new(nodes: impl IntoIterator<Item = NodeSpec>) -> Result<Self> {
        let specs: Vec<NodeSpec> = nodes.into_iter().collect();
        let faults = check_nodes(&specs);
        if !faults.is_empty() {
            return Err(PlacementError::InvalidNodes(faults));
        }
        Ok(Self::of(specs.iter().map(|spec| (Arc::new(NodeInfo::of(spec)), Supply::of(spec)))))
    }

    /// A pool of nodes that nothing is wrong with, all of which take tokens.
    fn of(nodes: impl Iterator<Item = (Arc<NodeInfo>, Supply)>) -> Self {
        let mut state = State::default();
        let mut infos = Vec::new();
        for (info, supply) in nodes {
            state.add(info, supply, &mut infos);
        }
        let layout = Layout::new(0, state.tenants.iter().map(|tenant| tenant.supply.clone()));
        let open = Open::new(infos, layout, Arc::clone(&state.counts));
        Self { shared: Shared::new(open, state) }
    }

    /// Whether every node that takes tokens could hold one of this demand if it were empty. Does not wait for the pool's
    /// lock.
    #[must_use]
    pub fn could_hold_everywhere(&self, per_sample: &Demand) -> bool {
        let wanted = |shape| Wanted::new(shape, per_sample.extras());
        per_sample.shape().is_some_and(|shape| self.shared.layout().holds_everywhere(&wanted(shape)))
    }

    /// Another pool of the nodes that take tokens, in which nothing is held.
    #[must_use]
    pub fn emptied(&self) -> Self {
        let state = self.shared.lock();
        let nodes = state.nodes.iter().zip(&state.tenants).filter(|(node, _)| node.phase == Phase::Active);
        Self::of(nodes.map(|(_, tenant)| (Arc::clone(&tenant.info), tenant.supply.clone())))
    }

    /// Takes room for min(`max_tokens`, what of `per_sample` fits in `budget`) samples: for all of them, or `None`
    /// when they do not all fit now.
    ///
    /// Each token goes to the fitting node with the most free GPU (ties: most free CPU, most free memory, lowest
    /// position), there to the GPU with the least free share that still fits (ties: lowest id). Costs the same
    /// whatever the number of nodes.
    ///
    /// # Errors
    /// [`PlacementError::BudgetTooSmall`] when the budget does not hold one sample;
    /// [`PlacementError::InvalidTokenCount`] when `max_tokens` is 0 or a lease would be larger than
    /// [`MAX_LEASE_TOKENS`].
    pub fn try_acquire_batch(
        &self,
        budget: &Budget,
        per_sample: &Demand,
        max_tokens: u64,
    ) -> Result<Option<Lease>> {
        self.try_acquire(per_sample, budget.tokens(per_sample)?.min(max_tokens))
    }

    /// Takes room for `count` samples: for all of them, or `None` when they do not all fit now.
    ///
    /// # Errors
    /// [`PlacementError::InvalidTokenCount`] when `count` is 0 or above [`MAX_LEASE_TOKENS`].
    #[inline]
    pub fn try_acquire(&self, per_sample: &Demand, count: u64) -> Result<Option<Lease>> {
        if !(1..=MAX_LEASE_TOKENS).contains(&count) {
            return Err(PlacementError::InvalidTokenCount { asked: count, limit: MAX_LEASE_TOKENS });
        }
        let count = count as usize;
        let Some(shape) = per_sample.plain() else { return Ok(self.try_acquire_rare(per_sample, count)) };
        let mut state = self.shared.lock();
        let Some((by, tokens)) = state.acquire(shape, count) else { return Ok(None) };
        let owner = self.shared.clone();
        drop(state);
        Ok(Some(Lease::new(owner, per_sample, shape, by, tokens)))
    }

    /// The same for demands that have extras, take no room, or more than any node could have.
    #[inline(never)]
    fn try_acquire_rare(&self, per_sample: &Demand, count: usize) -> Option<Lease> {
        let shape = per_sample.shape()?;
        let mut state = self.shared.lock();
        let extras = per_sample.extras();
        let (by, tokens) = if takes_nothing(shape, extras) {
            state.acquire_nothing(extras, count)?
        } else {
            state.acquire_with_extras(shape, extras?, count)?
        };
        let owner = self.shared.clone();
        drop(state);
        Some(Lease::new(owner, per_sample, shape, by, tokens).with_extras_of(per_sample))
    }

    /// Takes room for `count` samples on the nodes alone that could hold no token of the `others`, were they empty: for
    /// all of them, or `None` when they do not all fit there now. The tokens go where a pool of just these nodes, as they
    /// are now, would place them.
    ///
    /// Meant for rare questions: each call looks at every such node, while [`Pool::try_acquire`] keeps all nodes in
    /// order and costs the same whatever their number.
    ///
    /// # Errors
    /// [`PlacementError::InvalidTokenCount`] as in [`Pool::try_acquire`].
    ///
    /// ```
    /// use placement_core::{Demand, NodeSpec, Pool};
    ///
    /// let node = |name: &str| NodeSpec::new(name, [0, 1], 16.0, 64.0);
    /// let pool = Pool::new([node("a").with_label("zone", "east"), node("b"), node("c")])?;
    /// let sample = Demand::new(1.0, 4.0, 8.0)?;
    /// let in_the_east = sample.clone().requiring("zone", "east")?;
    /// let lease = pool.try_acquire_apart(&sample, 3, [&in_the_east])?.expect("4 fit on b and c");
    /// let nodes: Vec<String> = lease.placements().into_iter().map(|placed| placed.node).collect();
    /// assert_eq!(nodes, ["b", "c", "b"]);
    ///
    /// assert!(pool.try_acquire_apart(&sample, 2, [&in_the_east])?.is_none());
    /// assert_eq!(pool.free_tokens_for(&sample), 3);
    /// # Ok::<(), placement_core::PlacementError>(())
    /// ```
    pub fn try_acquire_apart<'a>(
        &self,
        per_sample: &Demand,
        count: u64,
        others: impl IntoIterator<Item = &'a Demand>,
    ) -> Result<Option<Lease>> {
        if !(1..=MAX_LEASE_TOKENS).contains(&count) {
            return Err(PlacementError::InvalidTokenCount { asked: count, limit: MAX_LEASE_TOKENS });
        }
        let Some(shape) = per_sample.shape() else { return Ok(None) };
        let extras = Extras::of(per_sample.extras());
        // Before the lock is taken, under which nothing of the caller's runs. What has no shape no node could hold.
        let others: Vec<Wanted> = others
            .into_iter()
            .filter_map(|other| other.shape().map(|shape| Wanted::new(shape, other.extras())))
            .collect();
        let mut state = self.shared.lock();
        let Some(tokens) = state.acquire_apart(shape, extras, &others, count as usize) else {
            return Ok(None);
        };
        let owner = self.shared.clone();
        drop(state);
        let lease = Lease::new(owner, per_sample, shape, NO_INDEX, Tokens::Many(tokens));
        Ok(Some(lease.with_extras_of(per_sample)))
    }

    /// Whether a node could hold a token of this demand if it were empty. One that is unknown or takes no tokens could
    /// not.
    #[must_use]
    pub fn could_hold(&self, per_sample: &Demand, node: &str) -> bool {
        let Some(shape) = per_sample.shape() else { return false };
        let wanted = Wanted::new(shape, per_sample.extras());
        let state = self.shared.lock();
        state.names.get(node).is_some_and(|&position| state.could_hold(position, &wanted))
    }

    /// Takes room that is already in use, as [`Lease::placements`] recorded it, on draining nodes too: all or none.
    ///
    /// # Errors
    /// [`PlacementError::InvalidTokenCount`] for no placements or too many; [`PlacementError::CannotAdopt`] for the
    /// first placement whose node or GPU is unknown, whose node lacks a required label, whose GPUs are not what
    /// `per_sample` takes, or whose room is taken.
    pub fn adopt(&self, per_sample: &Demand, placements: &[Placement]) -> Result<Lease> {
        let count = placements.len() as u64;
        if !(1..=MAX_LEASE_TOKENS).contains(&count) {
            return Err(PlacementError::InvalidTokenCount { asked: count, limit: MAX_LEASE_TOKENS });
        }
        let cannot = |index: usize, reason: &str| {
            Err(PlacementError::CannotAdopt { index, reason: reason.to_string() })
        };
        let Some(shape) = per_sample.shape() else { return cannot(0, "no node can hold its demand") };
        let extras = Extras::of(per_sample.extras());
        let mut state = self.shared.lock();
        let mut tokens = Vec::with_capacity(placements.len());
        for (index, placement) in placements.iter().enumerate() {
            match locate(&state, shape, extras, placement) {
                Ok(token) => tokens.push(token),
                Err(reason) => return cannot(index, &reason),
            }
        }
        if let Some(index) = first_without_room(&state, shape, extras, &tokens) {
            return cannot(index, "its room is taken");
        }
        state.acquire_here(shape, extras, &tokens);
        let owner = self.shared.clone();
        drop(state);
        Ok(Lease::new(owner, per_sample, shape, NO_INDEX, Tokens::Many(tokens)).with_extras_of(per_sample))
    }

    /// Tokens of this demand that the pool holds when empty, nodes that take none left out: exactly what placing one
    /// after another reaches. [`crate::UNLIMITED_TOKENS`] for a demand that takes no room. Does not wait for the
    /// pool's lock.
    #[must_use]
    pub fn max_tokens_for(&self, per_sample: &Demand) -> u64 {
        let wanted = |shape| Wanted::new(shape, per_sample.extras());
        per_sample.shape().map_or(0, |shape| self.shared.layout().capacity(wanted(shape)))
    }

    /// Tokens of this demand that fit now. Never waits for the pool's lock: while another thread holds it, this is what was
    /// counted before, or when the demand was last used; for a demand that is not [in use](crate#cost), as nothing was
    /// counted, what the empty pool holds ([`Pool::max_tokens_for`]). Exact whenever no other call is under way.
    #[must_use]
    pub fn free_tokens_for(&self, per_sample: &Demand) -> u64 {
        // The common case, without a look at anything else.
        if let Some(shape) = per_sample.plain()
            && let Some(mut state) = self.shared.try_lock()
        {
            return state.free_tokens(shape, None);
        }
        let Some(shape) = per_sample.shape() else { return 0 };
        let extras = per_sample.extras();
        if takes_nothing(shape, extras) {
            return self.max_tokens_for(per_sample).min(UNLIMITED_TOKENS);
        }
        if let Some(mut state) = self.shared.try_lock() {
            return state.free_tokens(shape, extras);
        }
        let counted = self.shared.counts.get(&Wanted::new(shape, extras));
        counted.unwrap_or_else(|| self.max_tokens_for(per_sample))
    }

    /// Why `count` tokens of this demand fit or do not: per node, how many fit and what is short.
    #[must_use]
    pub fn explain(&self, per_sample: &Demand, count: u64) -> Explanation {
        let state = self.shared.lock();
        explain_nodes(&state, per_sample, count)
    }

    /// Every node with its supply and what is free, in order of position.
    #[must_use]
    pub fn nodes(&self) -> Vec<NodeUsage> {
        let state = self.shared.lock();
        usage_of(&state)
    }

    /// Adds a node. It gets the lowest position that a removed node left, else the next one.
    ///
    /// # Errors
    /// [`PlacementError::InvalidNodes`] as in [`Pool::new`]; [`PlacementError::DuplicateNode`] for a name in the pool.
    pub fn add_node(&self, spec: &NodeSpec) -> Result<()> {
        let faults = check_nodes(std::slice::from_ref(spec));
        if !faults.is_empty() {
            return Err(PlacementError::InvalidNodes(faults));
        }
        let mut state = self.shared.lock();
        if state.names.contains_key(&spec.name) {
            return Err(PlacementError::DuplicateNode(spec.name.clone()));
        }
        let supply = Supply::of(spec);
        state.add(Arc::new(NodeInfo::of(spec)), supply.clone(), &mut self.shared.infos_mut());
        self.shared.change_layout(&supply, true);
        self.shared.announce(&mut state);
        Ok(())
    }

    /// Lets a node take no more tokens; those on it stay.
    ///
    /// # Errors
    /// [`PlacementError::UnknownNode`].
    pub fn drain_node(&self, name: &str) -> Result<()> {
        self.change_phase(name, Phase::Draining).map(|_| ())
    }

    /// Lets a draining node, or one that is leaving, take tokens again.
    ///
    /// # Errors
    /// [`PlacementError::UnknownNode`].
    pub fn resume_node(&self, name: &str) -> Result<()> {
        self.change_phase(name, Phase::Active).map(|_| ())
    }

    /// Removes a node: at once when nothing is held on it (`true`), else with its last token, and until then it takes
    /// no more (`false`).
    ///
    /// # Errors
    /// [`PlacementError::UnknownNode`].
    pub fn remove_node(&self, name: &str) -> Result<bool> {
        self.change_phase(name, Phase::Leaving)
    }

    /// Whether the node is empty afterwards.
    fn change_phase(&self, name: &str, phase: Phase) -> Result<bool> {
        let mut state = self.shared.lock();
        let Some(&position) = state.names.get(name) else {
            return Err(PlacementError::UnknownNode(name.to_string()));
        };
        let supply = state.tenants[position as usize].supply.clone();
        let was_active = state.nodes[position as usize].phase == Phase::Active;
        let is_active = phase == Phase::Active;
        let is_empty = state.nodes[position as usize].tokens == 0;
        state.set_phase(position, phase);
        if was_active != is_active {
            self.shared.change_layout(&supply, is_active);
        }
        if is_active {
            self.shared.announce(&mut state);
        }
        Ok(is_empty)
    }

    /// Rises whenever room may have come back: tokens released, a node added or resumed.
    #[must_use]
    pub fn release_version(&self) -> u64 {
        self.shared.releases()
    }

    /// Rises whenever the set of nodes that take tokens changes.
    #[must_use]
    pub fn layout_version(&self) -> u64 {
        self.shared.layout().version
    }

    /// Blocks the thread until [`Pool::release_version`] differs from `seen`, and returns it. Read the version before
    /// the attempt that failed, so that no release in between is missed.
    #[must_use]
    pub fn wait_for_release(&self, seen: u64) -> u64 {
        let mut state = self.shared.lock();
        if state.releases != seen {
            return state.releases;
        }
        state.waiters += 1;
        drop(state);
        self.shared.sleep_while(seen);
        let mut state = self.shared.lock();
        state.waiters -= 1;
        state.releases
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use super::*;

    #[test]
    fn counting_does_not_wait_for_who_holds_the_lock() {
        let pool = Pool::new([NodeSpec::new("a", [0, 1], 16.0, 64.0).with_resource("licence", 4)]).unwrap();
        let used = Demand::new(0.5, 1.0, 1.0).unwrap();
        let fresh = [
            Demand::new(0.25, 1.0, 1.0).unwrap(),
            Demand::new(0.25, 1.0, 1.0).unwrap().with_resource("licence", 1).unwrap(),
        ];
        let _lease = pool.try_acquire(&used, 3).unwrap();
        let count = |demand: &Demand| {
            let (pool, demand) = (pool.clone(), demand.clone());
            let (say, said) = mpsc::channel();
            thread::spawn(move || say.send(pool.free_tokens_for(&demand)));
            said.recv_timeout(Duration::from_secs(30)).expect("it waits for the lock")
        };
        let held = pool.shared.lock();
        assert_eq!(count(&used), 1);
        assert_eq!(fresh.each_ref().map(count), [8, 4]);
        drop(held);
        assert_eq!(fresh.each_ref().map(count), [2, 2]);
    }
}
