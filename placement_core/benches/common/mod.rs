//! What the benchmarks share: the pool that they measure, and the limits that it is measured against.

use std::hint::black_box;
use std::sync::{Arc, Mutex};

use placement_core::{Demand, Lease, NodeSpec, Pool};

const GPUS: usize = 8;
const SHARE: f64 = 0.33;
const SHARE_MICRO: u32 = 330_000;
const CPU_MILLI: u32 = 1_000;
const MEMORY_MIB: u32 = 4_096;

/// What a node needs at least: one cache line, like the crate's own.
#[derive(Clone)]
#[repr(align(64))]
pub(crate) struct Line {
    gpu: u32,
    cpu: u32,
    memory: u32,
    slots: [u32; GPUS],
}

pub(crate) type At = (u32, u32);

/// The limit and the scan work on the same plain nodes.
#[derive(Clone)]
pub(crate) struct Lines(Vec<Line>);

impl Lines {
    pub(crate) fn new(nodes: usize) -> Self {
        let gpu = GPUS as u32 * 1_000_000;
        Self(vec![Line { gpu, cpu: 96_000, memory: 393_216, slots: [1_000_000; GPUS] }; nodes])
    }

    pub(crate) fn take(&mut self, (node, slot): At) {
        let line = &mut self.0[node as usize];
        line.slots[slot as usize] -= SHARE_MICRO;
        line.gpu -= SHARE_MICRO;
        line.cpu -= CPU_MILLI;
        line.memory -= MEMORY_MIB;
    }

    pub(crate) fn give(&mut self, (node, slot): At) {
        let line = &mut self.0[node as usize];
        line.slots[slot as usize] += SHARE_MICRO;
        line.gpu += SHARE_MICRO;
        line.cpu += CPU_MILLI;
        line.memory += MEMORY_MIB;
    }

    pub(crate) fn give_all(&mut self, tokens: &[At]) {
        for &at in tokens {
            self.give(at);
        }
    }

    /// Takes known tokens and gives them back: what no pool can beat.
    pub(crate) fn touch(&mut self, tokens: &[At]) {
        for &at in tokens {
            self.take(at);
        }
        black_box(&mut *self);
        self.give_all(tokens);
    }

    pub(crate) fn scan(&self) -> Option<At> {
        let mut best: Option<(u32, u32, u32, At)> = None;
        for (line, node) in self.0.iter().zip(0_u32..) {
            if line.cpu < CPU_MILLI || line.memory < MEMORY_MIB {
                continue;
            }
            let fitting = line.slots.iter().zip(0_u32..).filter(|(free, _)| **free >= SHARE_MICRO);
            let Some((_, slot)) = fitting.min() else { continue };
            if best.is_none_or(|(gpu, cpu, memory, _)| (line.gpu, line.cpu, line.memory) > (gpu, cpu, memory))
            {
                best = Some((line.gpu, line.cpu, line.memory, (node, slot)));
            }
        }
        best.map(|(_, _, _, at)| at)
    }

    pub(crate) fn acquire(&mut self, count: usize, out: &mut Vec<At>) {
        for _ in 0..count {
            let Some(at) = self.scan() else { break };
            self.take(at);
            out.push(at);
        }
    }
}

/// Known tokens in an owned list, which is given back under the lock that it was taken under.
pub(crate) struct Handed {
    lines: Arc<Mutex<Lines>>,
    tokens: Vec<At>,
}

impl Handed {
    pub(crate) fn out(lines: &Arc<Mutex<Lines>>, known: &[At]) -> Self {
        let mut locked = lines.lock().expect("nothing panics under it");
        let take = |&at: &At| {
            locked.take(at);
            at
        };
        let tokens = known.iter().map(take).collect();
        drop(locked);
        Self { lines: Arc::clone(lines), tokens }
    }
}

impl Drop for Handed {
    fn drop(&mut self) {
        self.lines.lock().expect("nothing panics under it").give_all(&self.tokens);
    }
}

pub(crate) fn pool(nodes: usize) -> Pool {
    let ids: Vec<i64> = (0_i64..).take(GPUS).collect();
    Pool::new((0..nodes).map(|node| NodeSpec::new(format!("n{node}"), ids.clone(), 96.0, 384.0)))
        .expect("the nodes are sound")
}

pub(crate) fn sample() -> Demand {
    Demand::new(SHARE, 1.0, 4.0).expect("the demand is sound")
}

/// Takes five in six of a pool's tokens and gives about half of them back, at random.
pub(crate) fn half_full(pool: &Pool, nodes: usize) -> Lease {
    let mut seed = 42_u64;
    let held = pool.try_acquire(&sample(), 20 * nodes as u64).expect("sound").expect("room");
    for token in 0..held.len() {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        if seed >> 33 & 1 == 1 {
            held.release_token(token).expect("held");
        }
    }
    held
}
