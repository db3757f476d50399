//! Tokens as the pool keeps them: 16 bytes each, below the state that places them and the lease that holds them.

use std::sync::atomic::{AtomicU64, Ordering};

/// Stands for the node of a token that was given back.
const GIVEN_BACK: u32 = u32::MAX;

/// One token as the pool keeps it.
#[derive(Debug)]
pub(crate) struct Held {
    /// Node and info as one number: what is written in halves and read as a whole soon after stalls the processor.
    at: AtomicU64,
    /// The slot of a share, a mask of the slots of whole GPUs: [`Shape::slots`] makes it a mask.
    pub(crate) gpus: u64,
}

impl Held {
    /// Stands where a token will be written. Not zero: zeroed memory is asked of `calloc`, and glibc's takes no block from
    /// those that its thread just gave back.
    pub(crate) const fn nothing() -> Self {
        Self { at: AtomicU64::new(u64::MAX), gpus: u64::MAX }
    }

    #[inline]
    pub(crate) const fn new(node: u32, info: u32, gpus: u64) -> Self {
        Self { at: AtomicU64::new((info as u64) << 32 | node as u64), gpus }
    }

    #[inline]
    fn at(&self) -> u64 {
        self.at.load(Ordering::Relaxed)
    }

    /// The same token once more, to be given back along with others.
    pub(crate) fn copied(&self) -> Self {
        Self { at: AtomicU64::new(self.at()), gpus: self.gpus }
    }

    /// Position of the node in the pool.
    #[inline]
    pub(crate) fn node(&self) -> u32 {
        self.at() as u32
    }

    /// Position of the node's names in the pool's table.
    #[inline]
    pub(crate) fn info(&self) -> u32 {
        (self.at() >> 32) as u32
    }

    pub(crate) fn is_given_back(&self) -> bool {
        self.node() == GIVEN_BACK
    }

    pub(crate) fn mark_given_back(&self) {
        self.at.store(self.at() | u64::from(GIVEN_BACK), Ordering::Relaxed);
    }
}

/// The tokens of one batch. Leases of one token need no memory of their own.
#[derive(Debug)]
pub(crate) enum Tokens {
    One([Held; 1]),
    Many(Vec<Held>),
}

impl Tokens {
    #[inline]
    pub(crate) fn as_slice(&self) -> &[Held] {
        match self {
            Self::One(token) => token,
            Self::Many(tokens) => tokens,
        }
    }
}
