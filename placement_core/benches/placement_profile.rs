//! One of the benchmarks' loops without a clock, for a profiler that counts: `make profile-placement`.
//!
//!     placement_profile WHAT NODES BATCH ROUNDS
//!
//! WHAT is a name of [`run`]. Everything inside [`measured`] is what a round costs, and nothing else is.

use std::hint::black_box;
use std::sync::{Arc, Mutex};

use common::{Handed, Lines, half_full, pool, sample};

mod common;

/// What the profiler collects: `rounds` times `once`.
#[inline(never)]
fn measured(rounds: u64, mut once: impl FnMut()) {
    for _ in 0..rounds {
        once();
    }
}

fn run(what: &str, nodes: usize, batch: usize, rounds: u64) {
    let (pool, demand) = (pool(nodes), sample());
    let acquire_and_release = || drop(black_box(pool.try_acquire(&demand, batch as u64)));
    let mut lines = Lines::new(nodes);
    let mut tokens = Vec::with_capacity(batch);
    let warm_up = rounds / 4;
    match what {
        "pool" => {
            measured_after(warm_up, rounds, acquire_and_release);
        }
        "half-full" => {
            let _held = half_full(&pool, nodes);
            measured_after(warm_up, rounds, acquire_and_release);
        }
        "scan" => measured_after(warm_up, rounds, || {
            lines.acquire(batch, &mut tokens);
            lines.give_all(&tokens);
            tokens.clear();
        }),
        "touch" | "locked" => {
            lines.acquire(batch, &mut tokens);
            lines.give_all(&tokens);
            if what == "touch" {
                measured_after(warm_up, rounds, || lines.touch(black_box(&tokens)));
            } else {
                let shared = Arc::new(Mutex::new(lines));
                measured_after(warm_up, rounds, || drop(black_box(Handed::out(&shared, black_box(&tokens)))));
            }
        }
        _ => panic!("{what} is none of: pool, half-full, scan, touch, locked"),
    }
}

/// The first rounds build what is built once, and fill the caches.
fn measured_after(warm_up: u64, rounds: u64, mut once: impl FnMut()) {
    for _ in 0..=warm_up {
        once();
    }
    measured(rounds, once);
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let [what, nodes, batch, rounds] = &arguments[..] else {
        // As `cargo bench` calls it, which wants nothing of it.
        return;
    };
    let number = |text: &String| text.parse().expect("a whole number");
    run(what, number(nodes) as usize, number(batch) as usize, number(rounds));
}
