//! Cost of placement, each figure beside its limits in the same run: `touch` (the same tokens known in advance, node
//! and slot touched once) is what no scheduler can beat, `touch, locked and handed out` what no pool can that threads
//! share and whose batches are owned, `scan` the straightforward one. One iteration acquires a batch and releases it.
//! Placements are compared with the scan's before anything is timed.

#![allow(missing_docs, reason = "criterion's macros make public functions")]

use std::hint::black_box;
use std::sync::{Arc, Mutex};

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use placement_core::{Demand, Pool};

use common::{At, Handed, Lines, half_full, pool, sample};

mod common;

const NODES: [usize; 5] = [1, 16, 256, 1_024, 10_000];
const BATCHES: [usize; 3] = [1, 64, 1_024];

/// The tokens of the next batch, agreed on by the scan and the pool.
fn known(lines: &mut Lines, pool: &Pool, batch: usize) -> Vec<At> {
    let mut tokens = Vec::with_capacity(batch);
    lines.acquire(batch, &mut tokens);
    let lease = pool.try_acquire(&sample(), batch as u64).expect("sound").expect("room");
    for (placed, (node, slot)) in lease.placements().iter().zip(&tokens) {
        assert_eq!((&placed.node, placed.gpu_ids[0]), (&format!("n{node}"), *slot));
    }
    lines.give_all(&tokens);
    tokens
}

fn bench_acquire_release(c: &mut Criterion) {
    for nodes in NODES {
        let mut group = c.benchmark_group(format!("empty pool, {nodes} nodes"));
        for batch in BATCHES.into_iter().filter(|&batch| batch <= nodes * 24) {
            group.throughput(Throughput::Elements(batch as u64));
            let (mut lines, pool) = (Lines::new(nodes), pool(nodes));
            let tokens = known(&mut lines, &pool, batch);
            group.bench_function(BenchmarkId::new("touch", batch), |b| {
                b.iter(|| lines.touch(black_box(&tokens)));
            });
            let shared = Arc::new(Mutex::new(lines.clone()));
            group.bench_function(BenchmarkId::new("touch, locked and handed out", batch), |b| {
                b.iter(|| drop(black_box(Handed::out(&shared, black_box(&tokens)))));
            });
            let demand = sample();
            group.bench_function(BenchmarkId::new("pool", batch), |b| {
                b.iter(|| drop(black_box(pool.try_acquire(&demand, batch as u64))));
            });
            // Above this a single iteration takes longer than the whole run may.
            if nodes * batch <= 100_000 || (nodes, batch) == (10_000, 64) {
                let mut out = Vec::with_capacity(batch);
                group.bench_function(BenchmarkId::new("scan", batch), |b| {
                    b.iter(|| {
                        lines.acquire(batch, &mut out);
                        lines.give_all(&out);
                        out.clear();
                    });
                });
            }
        }
        group.finish();
    }
}

/// About half of the pool is taken, and then given back in part, at random.
fn bench_half_full(c: &mut Criterion) {
    for nodes in [16, 10_000] {
        let mut group = c.benchmark_group(format!("half full, {nodes} nodes"));
        let (pool, demand) = (pool(nodes), sample());
        let _held = half_full(&pool, nodes);
        for batch in [1_usize, 64] {
            group.throughput(Throughput::Elements(batch as u64));
            group.bench_function(BenchmarkId::new("pool", batch), |b| {
                b.iter(|| drop(black_box(pool.try_acquire(&demand, batch as u64))));
            });
        }
        group.finish();
    }
}

fn bench_refusals(c: &mut Criterion) {
    let mut group = c.benchmark_group("refusal, 10000 nodes");
    let (full, demand) = (pool(10_000), sample());
    let _held = full.try_acquire(&demand, full.max_tokens_for(&demand) - 63).expect("sound").expect("room");
    group.bench_function(BenchmarkId::new("63 of 64 fit", 63), |b| {
        b.iter(|| black_box(full.try_acquire(&demand, 64)));
    });
    let no_cpu = pool(10_000);
    let cpu_alone = Demand::new(0.0, 96.0, 0.0).expect("sound");
    let _cpus = no_cpu.try_acquire(&cpu_alone, 10_000).expect("sound").expect("room");
    group.bench_function(BenchmarkId::new("GPUs free, no CPU", 1), |b| {
        b.iter(|| black_box(no_cpu.try_acquire(&demand, 1)));
    });
    group.finish();
}

/// Two shapes in turns: each finds the other's changes in the log.
fn bench_mixed(c: &mut Criterion) {
    let mut group = c.benchmark_group("two shapes in turns, 10000 nodes");
    group.throughput(Throughput::Elements(64 * 128));
    let whole = Demand::new(1.0, 4.0, 16.0).expect("sound");
    group.bench_function("64 and 64", |b| {
        b.iter_batched_ref(
            || pool(10_000),
            |pool| {
                for _ in 0..64 {
                    let first = pool.try_acquire(&sample(), 64);
                    let second = pool.try_acquire(&whole, 64);
                    drop(black_box((first, second)));
                }
            },
            BatchSize::LargeInput,
        );
    });
    group.finish();
}

/// What a pool that threads share and whose leases are owned pays before it places anything: an acquire and a release
/// each take the lock, and between them the lease owns the pool.
fn bench_lock_alone(c: &mut Criterion) {
    let mut group = c.benchmark_group("no placement");
    let shared = Arc::new(Mutex::new(0_u64));
    let add = |shared: &Mutex<u64>| *shared.lock().expect("nothing panics under it") += 1;
    group.bench_function("two locks", |b| {
        b.iter(|| {
            add(black_box(&*shared));
            add(black_box(&*shared));
        });
    });
    group.bench_function("two locks and an owner", |b| {
        b.iter(|| {
            add(black_box(&*shared));
            let owner = black_box(Arc::clone(&shared));
            add(&owner);
        });
    });
    group.finish();
}

criterion_group!(
    benches,
    bench_acquire_release,
    bench_lock_alone,
    bench_half_full,
    bench_refusals,
    bench_mixed
);
criterion_main!(benches);
