//! A foreign scheduler around the pool: jobs wait in a queue and start in order, as soon as each fits whole.

use std::{collections::VecDeque, error::Error, thread, time::Duration};

use placement_core::{Demand, NodeSpec, Pool};

fn main() -> Result<(), Box<dyn Error>> {
    let pool = Pool::new([
        NodeSpec::new("gpu-0", [0, 1, 2, 3], 32.0, 128.0),
        NodeSpec::new("gpu-1", [0, 1, 2, 3], 32.0, 128.0),
        NodeSpec::new("cpu-0", [], 64.0, 256.0).with_resource("licence", 8),
    ])?;
    let mut queue = VecDeque::from([
        ("shares", 18, Demand::new(0.33, 1.0, 4.0)?),
        ("whole GPUs", 2, Demand::new(2.0, 4.0, 16.0)?),
        ("licences", 8, Demand::new(0.0, 1.0, 1.0)?.with_resource("licence", 1)?),
        ("another zone", 1, Demand::new(0.0, 1.0, 1.0)?.requiring("zone", "c")?),
    ]);
    while let Some((name, samples, sample)) = queue.pop_front() {
        if pool.max_tokens_for(&sample) < samples {
            println!("{name}: never: {}", pool.explain(&sample, samples));
            continue;
        }
        // The version is read before the attempt, so that a release in between is not missed.
        let mut version = pool.release_version();
        let lease = loop {
            match pool.try_acquire(&sample, samples)? {
                Some(lease) => break lease,
                None => println!("{name}: waits: {}", pool.explain(&sample, samples)),
            }
            version = pool.wait_for_release(version);
        };
        println!("{name}: runs, its first sample on {:?}", lease.placements()[0]);
        // A lease is owned, so it can go along with the work; dropping it gives the room back.
        thread::spawn(move || {
            thread::sleep(Duration::from_millis(20));
            drop(lease);
        });
    }
    Ok(())
}
