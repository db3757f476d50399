//! A foreign scheduler around the pool: jobs wait in a queue and start in order, as soon as each fits whole.

use std::collections::VecDeque;
use std::error::Error;
use std::thread;
use std::time::Duration;

use placement_core::{Demand, NodeSpec, Pool};

struct Job {
    name: &'static str,
    samples: u64,
    per_sample: Demand,
}

fn main() -> Result<(), Box<dyn Error>> {
    let pool = Pool::new([
        NodeSpec::new("gpu-0", [0, 1, 2, 3], 32.0, 128.0),
        NodeSpec::new("gpu-1", [0, 1, 2, 3], 32.0, 128.0),
        NodeSpec::new("cpu-0", [], 64.0, 256.0).with_resource("licence", 8).with_label("zone", "b"),
    ])?;
    let third = Demand::new(0.33, 1.0, 4.0)?;
    let mut queue = VecDeque::from([
        Job { name: "shares", samples: 18, per_sample: third.clone() },
        Job { name: "whole GPUs", samples: 2, per_sample: Demand::new(2.0, 4.0, 16.0)? },
        Job { name: "CPU alone", samples: 20, per_sample: Demand::new(0.0, 4.0, 8.0)? },
        Job {
            name: "licences",
            samples: 8,
            per_sample: Demand::new(0.0, 1.0, 1.0)?.with_resource("licence", 1)?,
        },
        Job {
            name: "another zone",
            samples: 1,
            per_sample: Demand::new(0.0, 1.0, 1.0)?.requiring("zone", "c")?,
        },
        Job { name: "too large", samples: 99, per_sample: third },
    ]);
    while let Some(job) = queue.pop_front() {
        if pool.max_tokens_for(&job.per_sample) < job.samples {
            println!("{}: never: {}", job.name, pool.explain(&job.per_sample, job.samples));
            continue;
        }
        // The version is read before the attempt, so that a release in between is not missed.
        let mut version = pool.release_version();
        let lease = loop {
            if let Some(lease) = pool.try_acquire(&job.per_sample, job.samples)? {
                break lease;
            }
            println!("{} waits: {}", job.name, pool.explain(&job.per_sample, job.samples));
            version = pool.wait_for_release(version);
        };
        println!("{} runs, its first sample on {:?}", job.name, lease.placements()[0]);
        // A lease is owned, so it can go along with the work; dropping it gives the room back.
        thread::spawn(move || {
            thread::sleep(Duration::from_millis(20));
            drop(lease);
        });
    }
    Ok(())
}
