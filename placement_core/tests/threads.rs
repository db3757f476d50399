//! Many threads on one pool, under a watchdog: nothing overbooked, nothing lost, nobody stuck.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use placement_core::{Demand, NodeSpec, Pool};

const PATIENCE: Duration = Duration::from_secs(90);

/// Fails the test when `work` takes too long, instead of hanging.
fn in_time(work: impl FnOnce() + Send + 'static) {
    let (done, is_done) = mpsc::channel();
    let worker = thread::spawn(move || {
        work();
        done.send(()).ok();
    });
    match is_done.recv_timeout(PATIENCE) {
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("still at work after {PATIENCE:?}"),
        _ => worker.join().unwrap(),
    }
}

fn pool(nodes: usize) -> Pool {
    Pool::new((0..nodes).map(|node| NodeSpec::new(format!("n{node}"), [0, 1, 2, 3], 16.0, 64.0))).unwrap()
}

fn shapes() -> [Demand; 4] {
    [0.25, 1.0 / 3.0, 1.0, 0.0].map(|gpu| Demand::new(gpu, 0.5, 1.0).unwrap())
}

fn acquire_and_release(pool: &Pool, seed: usize) {
    for round in 0..1_500 {
        let demand = &shapes()[(seed + round) % 4];
        let Some(lease) = pool.try_acquire(demand, 1 + ((seed * 5 + round * 3) % 11) as u64).unwrap() else {
            continue;
        };
        match round % 3 {
            0 => lease.release().unwrap(),
            1 => lease.release_token(0).unwrap(),
            // Dropped by another thread, together with its handle to the pool.
            _ => drop(thread::Builder::new().spawn(move || drop(lease))),
        }
    }
}

#[test]
fn threads_that_share_a_lease_give_each_token_back_once() {
    in_time(|| {
        let (pool, demand) = (pool(5), &shapes()[0]);
        for _ in 0..200 {
            let lease = pool.try_acquire(demand, 40).unwrap().unwrap();
            let give_back = || {
                let tokens = (0..40).filter(|&token| lease.release_token(token).is_ok()).count();
                (tokens, usize::from(lease.release().is_ok()))
            };
            let sums = thread::scope(|scope| {
                let workers: Vec<_> = (0..4).map(|_| scope.spawn(give_back)).collect();
                let add = |sum: (usize, usize), one: (usize, usize)| (sum.0 + one.0, sum.1 + one.1);
                workers.into_iter().map(|worker| worker.join().unwrap()).fold((0, 0), add)
            });
            assert!(sums.0 <= 40, "{} of 40 tokens were given back", sums.0);
            assert_eq!((sums.1, lease.held()), (1, 0));
            assert_eq!(pool.free_tokens_for(demand), pool.max_tokens_for(demand));
        }
    });
}

#[test]
fn sixteen_threads_lose_nothing() {
    in_time(|| {
        let (pool, is_over) = (pool(5), AtomicBool::new(false));
        thread::scope(|scope| {
            let workers: Vec<_> = (0..16)
                .map(|seed| (seed, pool.clone()))
                .map(|(seed, pool)| scope.spawn(move || acquire_and_release(&pool, seed)))
                .collect();
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    for demand in &shapes() {
                        assert!(pool.free_tokens_for(demand) <= 5 * 32);
                        assert!(pool.max_tokens_for(demand) <= 6 * 32);
                    }
                }
            });
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    pool.drain_node("n1").unwrap();
                    pool.resume_node("n1").unwrap();
                    thread::yield_now();
                }
            });
            for worker in workers {
                worker.join().unwrap();
            }
            is_over.store(true, Ordering::Relaxed);
        });
        // Leases that were sent away may still be on their way back.
        while pool.nodes().iter().any(|node| node.tokens > 0) {
            thread::yield_now();
        }
        for demand in &shapes() {
            assert_eq!(pool.free_tokens_for(demand), pool.max_tokens_for(demand));
        }
    });
}

/// One token for all: whoever finds it taken sleeps until a release. A wake-up that is missed would stop them all.
#[test]
fn waiters_are_never_forgotten() {
    in_time(|| {
        let pool = Pool::new([NodeSpec::new("n", [0], 1.0, 1.0)]).unwrap();
        let whole = Demand::new(1.0, 0.0, 0.0).unwrap();
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..300 {
                        let mut seen = pool.release_version();
                        while pool.try_acquire(&whole, 1).unwrap().is_none_or(|lease| {
                            thread::yield_now();
                            drop(lease);
                            false
                        }) {
                            seen = pool.wait_for_release(seen);
                        }
                    }
                });
            }
        });
        assert_eq!(pool.free_tokens_for(&whole), 1);
    });
}
