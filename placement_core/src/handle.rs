//! Shared ownership of an open part, which anybody reads, and a part that a lock guards.

use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

struct Inner<Open, Guarded> {
    guarded: Mutex<Guarded>,
    open: Open,
}

/// One owner.
pub(crate) struct Handle<Open, Guarded> {
    inner: Arc<Inner<Open, Guarded>>,
}

impl<Open, Guarded> Handle<Open, Guarded> {
    pub(crate) fn new(open: Open, guarded: Guarded) -> Self {
        Self { inner: Arc::new(Inner { guarded: Mutex::new(guarded), open }) }
    }

    /// Nothing of a caller's runs under the lock, so a panic there is a fault of this crate; the pool stays usable.
    #[inline]
    pub(crate) fn lock(&self) -> MutexGuard<'_, Guarded> {
        self.inner.guarded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, Guarded>> {
        match self.inner.guarded.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

impl<Open, Guarded> Clone for Handle<Open, Guarded> {
    fn clone(&self) -> Self {
        Self { inner: Arc::clone(&self.inner) }
    }
}

impl<Open, Guarded> Deref for Handle<Open, Guarded> {
    type Target = Open;

    fn deref(&self) -> &Open {
        &self.inner.open
    }
}
