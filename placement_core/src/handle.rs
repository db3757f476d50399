//! Shared ownership of a value together with the lock that guards it: an `Arc<Mutex<_>>` for very short sections.
//!
//! The only unsafe code of the crate. What it is for: acquiring and releasing one token takes two turns of the lock and
//! one owner more and one less. In a loop of nothing else, two turns of a `Mutex` and a clone of an `Arc` took 20 ns, two
//! turns of a lock like this one 6 ns. (The pool as a whole was not measured with both.) Owners are counted under the
//! lock, which is held anyhow, and unlocking is a plain store, since nobody sleeps on the lock: who finds it taken spins,
//! then yields, then naps. `tests/threads.rs` and the tests below run it under load. The tests below were also run under
//! Miri, in a crate that held this file alone.
//!
//! Invariants: `is_locked` is true exactly while one guard lives; `owners` and `guarded` are touched only by who holds
//! the lock; `owners` is the number of handles that were not dropped, and the allocation lives until it is 0.

#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const SPINS: u32 = 100;
const YIELDS: u32 = 50;
const NAP: Duration = Duration::from_micros(50);

struct Inner<Open, Guarded> {
    is_locked: AtomicBool,
    owners: UnsafeCell<usize>,
    guarded: UnsafeCell<Guarded>,
    open: Open,
}

/// One owner of an open part, which anybody reads, and of a guarded one.
pub(crate) struct Handle<Open, Guarded> {
    inner: NonNull<Inner<Open, Guarded>>,
}

// SAFETY: the guarded part is reached by one thread at a time and may move with the last handle to another thread, so it
// must be `Send`; the open part is also read by several threads at once, so it must be `Sync` too.
unsafe impl<Open: Send + Sync, Guarded: Send> Send for Handle<Open, Guarded> {}
// SAFETY: as above; a shared handle gives nothing that an owned one does not.
unsafe impl<Open: Send + Sync, Guarded: Send> Sync for Handle<Open, Guarded> {}

impl<Open, Guarded> Handle<Open, Guarded> {
    pub(crate) fn new(open: Open, guarded: Guarded) -> Self {
        let inner = Box::new(Inner {
            is_locked: AtomicBool::new(false),
            owners: UnsafeCell::new(1),
            guarded: UnsafeCell::new(guarded),
            open,
        });
        Self { inner: NonNull::from(Box::leak(inner)) }
    }

    #[inline]
    fn inner(&self) -> &Inner<Open, Guarded> {
        // SAFETY: this handle is counted, so the allocation lives at least as long as it does.
        unsafe { self.inner.as_ref() }
    }

    #[inline]
    pub(crate) fn lock(&self) -> Guard<'_, Open, Guarded> {
        self.try_lock().unwrap_or_else(|| self.wait_for_lock())
    }

    #[inline]
    pub(crate) fn try_lock(&self) -> Option<Guard<'_, Open, Guarded>> {
        let is_ours = self
            .inner()
            .is_locked
            .compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed)
            .is_ok();
        // Not `then_some`: a guard that is made and thrown away would unlock for somebody else.
        is_ours.then(|| Guard { handle: self })
    }

    #[cold]
    fn wait_for_lock(&self) -> Guard<'_, Open, Guarded> {
        let mut tries = 0_u32;
        loop {
            // Only read until it looks free, so that waiting does not take the cache line from the holder.
            if !self.inner().is_locked.load(Ordering::Relaxed)
                && let Some(guard) = self.try_lock()
            {
                return guard;
            }
            if tries < SPINS {
                std::hint::spin_loop();
            } else if tries < SPINS + YIELDS {
                std::thread::yield_now();
            } else {
                std::thread::sleep(NAP);
            }
            tries = tries.saturating_add(1);
        }
    }
}

impl<Open, Guarded> Clone for Handle<Open, Guarded> {
    fn clone(&self) -> Self {
        self.lock().another_handle()
    }
}

impl<Open, Guarded> Deref for Handle<Open, Guarded> {
    type Target = Open;

    fn deref(&self) -> &Open {
        &self.inner().open
    }
}

impl<Open, Guarded> Drop for Handle<Open, Guarded> {
    fn drop(&mut self) {
        std::mem::forget(self.lock());
        drop(Leaving { inner: self.inner });
    }
}

/// The last turn of an owner: the lock, held until this is dropped, and one owner less then.
pub(crate) struct Leaving<Open, Guarded> {
    /// Locked by this, and counted until this is dropped.
    inner: NonNull<Inner<Open, Guarded>>,
}

impl<Open, Guarded> Leaving<Open, Guarded> {
    /// Takes the lock for the last time.
    #[inline]
    pub(crate) fn of(handle: Handle<Open, Guarded>) -> Self {
        std::mem::forget(handle.lock());
        let inner = handle.inner;
        std::mem::forget(handle);
        Self { inner }
    }

    #[inline]
    pub(crate) fn parts(&mut self) -> (&Open, &mut Guarded) {
        // SAFETY: counted, so the allocation lives; the lock is held, and this borrows what holds it alone.
        let inner = unsafe { self.inner.as_ref() };
        (&inner.open, unsafe { &mut *inner.guarded.get() })
    }
}

impl<Open, Guarded> Drop for Leaving<Open, Guarded> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: counted, so the allocation lives; the lock is held.
        let is_last = unsafe {
            let inner = self.inner.as_ref();
            *inner.owners.get() -= 1;
            *inner.owners.get() == 0
        };
        if is_last {
            // SAFETY: made from a box in `new`, and nobody is left to reach it. What others did happened before they let
            // go of the lock for the last time, which was before it was taken here.
            drop(unsafe { Box::from_raw(self.inner.as_ptr()) });
        } else {
            // SAFETY: others are counted, and cannot leave before this unlocks.
            unsafe { self.inner.as_ref() }.is_locked.store(false, Ordering::Release);
        }
    }
}

/// The lock, held until this is dropped.
pub(crate) struct Guard<'a, Open, Guarded> {
    handle: &'a Handle<Open, Guarded>,
}

impl<Open, Guarded> Guard<'_, Open, Guarded> {
    /// One owner more, at the price of an addition.
    #[inline]
    pub(crate) fn another_handle(&mut self) -> Handle<Open, Guarded> {
        // SAFETY: the lock is held.
        unsafe { *self.handle.inner().owners.get() += 1 };
        Handle { inner: self.handle.inner }
    }
}

impl<Open, Guarded> Deref for Guard<'_, Open, Guarded> {
    type Target = Guarded;

    #[inline]
    fn deref(&self) -> &Guarded {
        // SAFETY: the lock is held, and `DerefMut` borrows the guard alone.
        unsafe { &*self.handle.inner().guarded.get() }
    }
}

impl<Open, Guarded> DerefMut for Guard<'_, Open, Guarded> {
    #[inline]
    fn deref_mut(&mut self) -> &mut Guarded {
        // SAFETY: the lock is held, and this borrows the guard alone.
        unsafe { &mut *self.handle.inner().guarded.get() }
    }
}

impl<Open, Guarded> Drop for Guard<'_, Open, Guarded> {
    #[inline]
    fn drop(&mut self) {
        self.handle.inner().is_locked.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread;

    use super::*;

    #[test]
    fn one_at_a_time() {
        let rounds = if cfg!(miri) { 20 } else { 20_000 };
        let handle = Handle::new((), 0_u64);
        let other = handle.clone();
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..rounds {
                        let mut guard = handle.lock();
                        let before = *guard;
                        thread::yield_now();
                        *guard = before + 1;
                    }
                });
            }
        });
        drop(handle);
        assert_eq!(*other.lock(), 4 * rounds);
    }

    #[test]
    fn a_held_lock_is_not_given_twice() {
        let handle = Handle::new((), ());
        let guard = handle.lock();
        assert!(handle.try_lock().is_none());
        drop(guard);
        assert!(handle.try_lock().is_some());
    }

    /// The last of many owners, wherever it is, drops the value: once.
    #[test]
    fn the_last_owner_drops() {
        let open = Arc::new(());
        let guarded = Arc::new(());
        let handle = Handle::new(Arc::clone(&open), Arc::clone(&guarded));
        let rounds = if cfg!(miri) { 10 } else { 2_000 };
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let handle = handle.clone();
                thread::spawn(move || {
                    for _ in 0..rounds {
                        let one = handle.lock().another_handle();
                        assert_eq!(Arc::strong_count(&one), 2);
                        drop(one);
                    }
                })
            })
            .collect();
        drop(handle);
        for thread in threads {
            thread.join().unwrap();
        }
        assert_eq!((Arc::strong_count(&open), Arc::strong_count(&guarded)), (1, 1));
    }

    #[test]
    fn a_panic_lets_go_of_the_lock() {
        let handle = Handle::new((), 1);
        let result = thread::scope(|scope| {
            scope
                .spawn(|| {
                    let _guard = handle.lock();
                    panic!("meant");
                })
                .join()
        });
        assert!(result.is_err());
        assert_eq!(*handle.lock(), 1);
    }
}
