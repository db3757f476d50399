//! What the handles of a pool and its leases share: a part that anybody reads, and the state, which a lock guards.

use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{
    Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError,
};

use crate::layout::{FreeCounts, Layout};
use crate::node::{NodeInfo, Supply};
use crate::state::State;

struct Inner<O, G> {
    guarded: Mutex<G>,
    open: O,
}

/// One owner of `O`, which is open to anybody, and of `G`, which a lock guards.
pub(crate) struct Handle<O, G> {
    inner: Arc<Inner<O, G>>,
}

impl<O, G> Handle<O, G> {
    pub(crate) fn new(open: O, guarded: G) -> Self {
        Self { inner: Arc::new(Inner { guarded: Mutex::new(guarded), open }) }
    }

    /// Nothing of a caller's runs under the lock, so a panic there is a fault of this crate; the pool stays usable.
    #[inline]
    pub(crate) fn lock(&self) -> MutexGuard<'_, G> {
        self.inner.guarded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, G>> {
        match self.inner.guarded.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

impl<O, G> Clone for Handle<O, G> {
    fn clone(&self) -> Self {
        Self { inner: Arc::clone(&self.inner) }
    }
}

impl<O, G> Deref for Handle<O, G> {
    type Target = O;

    fn deref(&self) -> &O {
        &self.inner.open
    }
}

/// Every handle of a pool, those of its leases included, leads to the same open part and to one [`State`].
pub(crate) type Shared = Handle<Open, State>;

/// What is read without the pool's lock.
#[derive(Debug)]
pub(crate) struct Open {
    infos: RwLock<Vec<Arc<NodeInfo>>>,
    layout: RwLock<Arc<Layout>>,
    pub(crate) counts: Arc<FreeCounts>,
    /// Written under the pool's lock only.
    releases: AtomicU64,
    /// What waiters sleep on; held for no longer than it takes to look at `releases`.
    gate: Mutex<()>,
    released: Condvar,
}

impl Open {
    pub(crate) fn new(infos: Vec<Arc<NodeInfo>>, layout: Layout, counts: Arc<FreeCounts>) -> Self {
        Self {
            infos: RwLock::new(infos),
            layout: RwLock::new(Arc::new(layout)),
            counts,
            releases: AtomicU64::new(0),
            gate: Mutex::new(()),
            released: Condvar::new(),
        }
    }

    pub(crate) fn infos(&self) -> RwLockReadGuard<'_, Vec<Arc<NodeInfo>>> {
        self.infos.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn infos_mut(&self) -> RwLockWriteGuard<'_, Vec<Arc<NodeInfo>>> {
        self.infos.write().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn layout(&self) -> Arc<Layout> {
        Arc::clone(&self.layout.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn change_layout(&self, supply: &Supply, is_added: bool) {
        let mut layout = self.layout.write().unwrap_or_else(PoisonError::into_inner);
        *layout = Arc::new(layout.next(supply, is_added));
    }

    fn gate(&self) -> MutexGuard<'_, ()> {
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Rises with each call that may have made room.
    #[inline]
    pub(crate) fn releases(&self) -> u64 {
        self.releases.load(Ordering::Acquire)
    }

    /// Returns once [`Open::releases`] differs from `seen`. The caller is registered as a waiter of the state, and does
    /// not hold the pool's lock.
    pub(crate) fn sleep_while(&self, seen: u64) {
        let mut gate = self.gate();
        while self.releases() == seen {
            gate = self.released.wait(gate).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Says that there may be more room. The caller holds the pool's lock.
    #[inline]
    pub(crate) fn announce(&self, state: &mut State) {
        // Only who holds the lock writes, so this needs no atomic addition.
        state.releases += 1;
        self.releases.store(state.releases, Ordering::Release);
        if state.waiters > 0 {
            self.wake();
        }
    }

    /// Wakes those who wait. Whoever has registered but does not sleep yet will see the new version.
    #[cold]
    fn wake(&self) {
        drop(self.gate());
        self.released.notify_all();
    }
}
