//! What is judged as a ratio, measured in turns. Criterion times one thing after another, seconds apart, and a processor
//! whose clock changes in between makes anything of the ratio of two such figures. Here all that is compared runs in each
//! of many short rounds, so that whatever slows the machine meets all of it.
//!
//! Prints one line of JSON for each case: per contender the median over the rounds, in nanoseconds a token, and the median
//! of what the first contender took in a round over what this one took. The placements are checked in `placement_bench`.

use std::hint::black_box;
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use common::{At, Handed, Lines, half_full, pool, sample};
use placement_core::{Demand, Pool};

mod common;

const ROUNDS: usize = 301;
/// Long beside reading the clock, short beside the milliseconds for which another process takes the processor.
const TURN: Duration = Duration::from_micros(50);
/// Long beside starting two threads.
const TURN_OF_THREADS: Duration = Duration::from_millis(2);

/// Something that is measured: its name, and how long so many calls of it take.
type Contender<'a> = (&'static str, Box<dyn FnMut(u64) -> Duration + 'a>);

fn alone<'a>(name: &'static str, mut once: impl FnMut() + 'a) -> Contender<'a> {
    let timed = move |calls| {
        let begun = Instant::now();
        for _ in 0..calls {
            once();
        }
        begun.elapsed()
    };
    (name, Box::new(timed))
}

/// So many calls in all, by some threads, from the moment they all begin.
fn together<'a>(name: &'static str, threads: u64, once: impl Fn() + Sync + 'a) -> Contender<'a> {
    let timed = move |calls: u64| {
        let start = Barrier::new(threads as usize + 1);
        thread::scope(|scope| {
            let work = || {
                start.wait();
                for _ in 0..calls.div_ceil(threads) {
                    once();
                }
            };
            let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            start.wait();
            let begun = Instant::now();
            for worker in workers {
                worker.join().expect("nothing panics in it");
            }
            begun.elapsed()
        })
    };
    (name, Box::new(timed))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn compare(case: &str, nodes: usize, batch: usize, turn: Duration, mut contenders: Vec<Contender<'_>>) {
    let calls_in_a_turn = |(_, time): &mut Contender<'_>| {
        let mut calls = 1;
        // The least of three: the first call builds what is built once, and any may be interrupted.
        while (0..3).map(|_| time(calls)).min() < Some(turn) {
            calls *= 2;
        }
        calls
    };
    let calls: Vec<u64> = contenders.iter_mut().map(calls_in_a_turn).collect();
    let mut found: Vec<Vec<f64>> = vec![Vec::with_capacity(ROUNDS); contenders.len()];
    for _ in 0..ROUNDS {
        for (((_, time), &calls), found) in contenders.iter_mut().zip(&calls).zip(&mut found) {
            found.push(time(calls).as_nanos() as f64 / (calls * batch as u64) as f64);
        }
    }
    let ratio =
        |other: &[f64]| median(found[0].iter().zip(other).map(|(first, other)| first / other).collect());
    let one = |((name, _), costs): (&Contender<'_>, &Vec<f64>)| {
        let (nanoseconds, ratio) = (median(costs.clone()), ratio(costs));
        format!(r#"{{"name": "{name}", "nanoseconds": {nanoseconds:.3}, "first_over_it": {ratio:.4}}}"#)
    };
    let all: Vec<String> = contenders.iter().zip(&found).map(one).collect();
    let all = all.join(", ");
    println!(r#"{{"case": "{case}", "nodes": {nodes}, "batch": {batch}, "contenders": [{all}]}}"#);
}

fn place(pool: &Pool, demand: &Demand, batch: usize) {
    drop(black_box(pool.try_acquire(demand, batch as u64)));
}

fn hand_out(shared: &Arc<Mutex<Lines>>, tokens: &[At]) {
    drop(black_box(Handed::out(shared, black_box(tokens))));
}

/// Plain nodes with the tokens that a batch gets on them.
fn known(nodes: usize, batch: usize) -> (Lines, Vec<At>) {
    let (mut lines, mut tokens) = (Lines::new(nodes), Vec::with_capacity(batch));
    lines.acquire(batch, &mut tokens);
    lines.give_all(&tokens);
    (lines, tokens)
}

fn over_the_limits(nodes: usize, batch: usize) {
    let (pool, demand, (mut lines, tokens)) = (pool(nodes), sample(), known(nodes, batch));
    let shared = Arc::new(Mutex::new(lines.clone()));
    let (mut scanned, mut out) = (lines.clone(), Vec::with_capacity(batch));
    let mut contenders = vec![
        alone("pool", || place(&pool, &demand, batch)),
        alone("touch", || lines.touch(black_box(&tokens))),
        alone("touch, locked and handed out", || hand_out(&shared, &tokens)),
    ];
    if nodes == 1 {
        contenders.push(alone("scan", || {
            scanned.acquire(batch, &mut out);
            scanned.give_all(&out);
            out.clear();
        }));
    }
    compare("over the limits", nodes, batch, TURN, contenders);
}

/// 10 000 nodes over 16.
fn over_few_nodes(case: &str, pools: [&Pool; 2]) {
    let demand = &sample();
    let [many, few] = pools.map(|pool| move || place(pool, demand, 64));
    compare(case, 10_000, 64, TURN, vec![alone("10 000 nodes", many), alone("16 nodes", few)]);
}

/// One pool, or one lock with known tokens behind it, under one thread and under two.
fn two_threads(nodes: usize, batch: usize) {
    let (pool, demand, (lines, tokens)) = (pool(nodes), sample(), known(nodes, batch));
    let shared = Arc::new(Mutex::new(lines));
    let (place, hand_out) = (|| place(&pool, &demand, batch), || hand_out(&shared, &tokens));
    let contenders = vec![
        together("pool, two threads", 2, place),
        together("pool, one thread", 1, place),
        together("lock, two threads", 2, hand_out),
        together("lock, one thread", 1, hand_out),
    ];
    compare("two threads", nodes, batch, TURN_OF_THREADS, contenders);
}

fn main() {
    // `cargo test --benches` wants nothing of it.
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    for nodes in [1, 16, 256, 1_024, 10_000] {
        for batch in [1, 64, 1_024].into_iter().filter(|&batch| batch <= nodes * 24) {
            over_the_limits(nodes, batch);
        }
    }
    let (many, few) = (pool(10_000), pool(16));
    over_few_nodes("empty pool", [&many, &few]);
    let _held = (half_full(&many, 10_000), half_full(&few, 16));
    over_few_nodes("half full", [&many, &few]);
    for batch in [1, 64] {
        two_threads(256, batch);
    }
}
