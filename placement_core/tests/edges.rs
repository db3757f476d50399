//! What the random sequences do not reach: errors, waiting, threads, owned leases.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use placement_core::{
    Budget, Demand, Lease, MAX_LEASE_TOKENS, NodeSpec, Placement, PlacementError, Pool, UNLIMITED_TOKENS,
};

fn pool(nodes: usize) -> Pool {
    Pool::new((0..nodes).map(|node| NodeSpec::new(format!("n{node}"), [0, 1, 2, 3], 16.0, 64.0))).unwrap()
}

fn is_shared<T: Send + Sync>() {}
fn is_owned<T: Send + 'static>() {}

#[test]
fn pool_is_shared_and_lease_is_owned() {
    is_shared::<Pool>();
    is_shared::<Lease>();
    is_owned::<Lease>();
    let pool = pool(1);
    let half = Demand::new(0.5, 0.0, 0.0).unwrap();
    let lease = pool.try_acquire(&half, 3).unwrap().unwrap();
    let other = pool.clone();
    drop(pool);
    thread::spawn(move || drop(lease)).join().unwrap();
    assert_eq!(other.free_tokens_for(&half), 8);
}

#[test]
fn what_was_given_back_is_not_given_back_again() {
    let (pool, sample) = (pool(2), Demand::new(0.25, 1.0, 1.0).unwrap());
    for count in [1, 3] {
        let lease = pool.try_acquire(&sample, count).unwrap().unwrap();
        let len = count as usize;
        lease.release_token(0).unwrap();
        assert_eq!(lease.release_token(0), Err(PlacementError::TokenReleased { index: 0 }));
        assert_eq!(lease.release_token(len), Err(PlacementError::NoSuchToken { index: len, len }));
        assert_eq!((lease.held(), lease.is_held(0), lease.is_held(len - 1)), (len - 1, false, len > 1));
        lease.release().unwrap();
        assert_eq!(lease.release(), Err(PlacementError::LeaseReleased));
        assert_eq!(lease.release_token(len - 1), Err(PlacementError::TokenReleased { index: len - 1 }));
        assert_eq!((lease.held(), lease.is_held(len - 1), lease.len()), (0, false, len));
        assert!(lease.node(0).is_some() && lease.placements().len() == len);
        drop(lease);
        assert_eq!(pool.free_tokens_for(&sample), pool.max_tokens_for(&sample));
    }
}

#[test]
fn bad_counts_are_errors() {
    let (pool, share) = (pool(1), Demand::new(0.5, 0.0, 0.0).unwrap());
    for count in [0, MAX_LEASE_TOKENS + 1, u64::MAX] {
        assert!(matches!(pool.try_acquire(&share, count), Err(PlacementError::InvalidTokenCount { .. })));
    }
    assert!(matches!(pool.adopt(&share, &[]), Err(PlacementError::InvalidTokenCount { .. })));
    let nothing = Demand::new(0.0, 0.0, 0.0).unwrap().with_concurrency(0);
    let budget = Budget::new(0.0, 0.0, 0.0, 0).unwrap();
    assert!(pool.try_acquire_batch(&budget, &nothing, u64::MAX).is_err());
    assert_eq!(pool.try_acquire_batch(&budget, &nothing, 9).unwrap().unwrap().len(), 9);
    assert_eq!(pool.max_tokens_for(&nothing), UNLIMITED_TOKENS);
}

#[test]
fn what_no_node_could_hold_is_full_and_never_fits() {
    let pool = pool(2);
    for demand in [Demand::new(5_000.0, 0.0, 0.0), Demand::new(0.0, 1e9, 0.0), Demand::new(0.5, 1.0, 1e12)] {
        let demand = demand.unwrap();
        assert!(pool.try_acquire(&demand, 1).unwrap().is_none());
        let explained = pool.explain(&demand, 1);
        assert_eq!((pool.max_tokens_for(&demand), explained.max_tokens, explained.free_tokens), (0, 0, 0));
        assert!(explained.nodes.iter().all(|node| node.short.len() == 1));
    }
}

#[test]
fn adopting_is_all_or_none() {
    let pool = pool(1);
    let half = Demand::new(0.5, 1.0, 1.0).unwrap();
    let at = |gpu_ids: &[u32]| Placement::new("n0", gpu_ids);
    for (placements, index) in [
        (vec![at(&[0]), at(&[9])], 1),
        (vec![at(&[0]), at(&[0]), at(&[0])], 2),
        (vec![at(&[0, 1])], 0),
        (vec![at(&[])], 0),
        (vec![Placement::new("elsewhere", [0])], 0),
    ] {
        match pool.adopt(&half, &placements) {
            Err(PlacementError::CannotAdopt { index: at, .. }) => assert_eq!(at, index),
            other => panic!("{other:?}"),
        }
        assert_eq!(pool.free_tokens_for(&half), 8);
    }
    let whole = Demand::new(2.0, 0.0, 0.0).unwrap();
    assert!(pool.adopt(&whole, &[at(&[1, 1])]).is_err());
    let lease = pool.adopt(&whole, &[at(&[3, 1])]).unwrap();
    assert_eq!(lease.gpu_ids(0), Some(vec![1, 3]));
    assert_eq!(pool.free_tokens_for(&half), 4);
}

#[test]
fn a_waiter_wakes_on_release() {
    let pool = pool(1);
    let whole = Demand::new(4.0, 0.0, 0.0).unwrap();
    let lease = pool.try_acquire(&whole, 1).unwrap().unwrap();
    let waiting = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut seen = pool.release_version();
            while pool.try_acquire(&whole, 1).unwrap().is_none() {
                waiting.store(true, Ordering::Release);
                seen = pool.wait_for_release(seen);
            }
        });
        while !waiting.load(Ordering::Acquire) {
            thread::yield_now();
        }
        drop(lease);
    });
    assert_eq!(pool.free_tokens_for(&whole), 1);
}

#[test]
fn threads_never_overbook() {
    let pool = pool(3);
    let shares = [0.25, 1.0 / 3.0, 0.5, 1.0].map(|gpu| Demand::new(gpu, 0.5, 1.0).unwrap());
    thread::scope(|scope| {
        for seed in 0..8_usize {
            let (pool, shares) = (&pool, &shares);
            scope.spawn(move || {
                for round in 0..2_000 {
                    let demand = &shares[(seed + round) % 4];
                    let count = 1 + (seed * 5 + round * 3) as u64 % 11;
                    if let Some(lease) = pool.try_acquire(demand, count).unwrap() {
                        lease.release_token(0).unwrap();
                        assert!(lease.release_token(0).is_err());
                    }
                    if round % 50 == 0 {
                        pool.drain_node("n1").unwrap();
                        pool.resume_node("n1").unwrap();
                    }
                }
            });
        }
    });
    for demand in &shares {
        assert_eq!(pool.free_tokens_for(demand), pool.max_tokens_for(demand));
    }
}

#[test]
fn more_shapes_than_indexes() {
    let pool = Pool::new((0..70).map(|node| NodeSpec::new(format!("n{node}"), [0], 100.0, 64.0))).unwrap();
    let shapes: Vec<Demand> = (1..=100).map(|cpu| Demand::new(0.0, f64::from(cpu), 0.0).unwrap()).collect();
    let mut leases = Vec::new();
    for _ in 0..3 {
        for shape in &shapes {
            leases.push(pool.try_acquire(shape, 1).unwrap().unwrap());
            drop(leases.swap_remove(0));
        }
    }
    drop(leases);
    for (shape, cpu) in shapes.iter().zip(1..) {
        assert_eq!(pool.free_tokens_for(shape), 70 * (100 / cpu));
    }
}

#[test]
fn a_shape_that_was_not_used_for_long_is_still_right() {
    let pool = pool(2);
    let (rare, busy) = (Demand::new(0.5, 1.0, 0.0).unwrap(), Demand::new(0.25, 0.5, 1.0).unwrap());
    for round in 0..20 {
        let held = pool.try_acquire(&rare, 1 + round % 3).unwrap().unwrap();
        assert_eq!(pool.free_tokens_for(&rare), 16 - held.len() as u64);
        let mut kept = Vec::new();
        for _ in 0..700 {
            kept.push(pool.try_acquire(&busy, 5).unwrap().unwrap());
            kept.truncate(1);
        }
        drop(held);
        assert_eq!(pool.free_tokens_for(&rare), explained(&pool, &rare));
        drop(kept);
        assert_eq!(pool.free_tokens_for(&rare), 16);
    }
}

/// Counted node by node, without the index.
fn explained(pool: &Pool, demand: &Demand) -> u64 {
    pool.explain(demand, 1).free_tokens
}
