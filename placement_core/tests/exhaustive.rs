//! What greedy placement gives away, on pools so small that every way of placing can be tried.
//!
//! A batch of equal samples is never refused while there is any way to place it in the room that is free. What greedy
//! can be blamed for is where earlier batches lie: it spreads them, and never moves them.

use std::collections::HashSet;

use placement_core::{Demand, NodeSpec, Pool};
use proptest::prelude::*;

const WHOLE: u64 = 1_000_000;
/// As written, and in micro-GPU.
const SHARES: [(f64, u64); 5] =
    [(0.0, 0), (0.3, 300_000), (1.0 / 3.0, 333_333), (0.5, 500_000), (0.7, 700_000)];

/// Free micro-GPU of each GPU, free cores, free licences and whether it lies in zone a.
type Node = (Vec<u64>, u64, u64, bool);

#[derive(Debug, Clone, Copy)]
struct Sample {
    gpu: f64,
    micro: u64,
    cpu: u64,
    licences: u64,
    needs_zone: bool,
}

impl Sample {
    fn demand(self) -> Demand {
        let demand = Demand::new(self.gpu, self.cpu as f64, 0.0).unwrap();
        let demand = demand.with_resource("licence", self.licences).unwrap();
        if self.needs_zone { demand.requiring("zone", "a").unwrap() } else { demand }
    }
}

/// The most samples that fit, by trying every GPU of every node for each.
fn most(nodes: &[Node], sample: Sample, tried: &mut HashSet<Vec<Node>>) -> u64 {
    let mut best = 0;
    for at in 0..nodes.len() {
        let (_, cpu, licences, is_in_zone) = nodes[at];
        if cpu < sample.cpu || licences < sample.licences || sample.needs_zone && !is_in_zone {
            continue;
        }
        let mut without_gpu = nodes.to_vec();
        without_gpu[at].1 -= sample.cpu;
        without_gpu[at].2 -= sample.licences;
        let mut next: Vec<Vec<Node>> = Vec::new();
        if sample.micro == 0 {
            next.push(without_gpu);
        } else {
            for gpu in 0..nodes[at].0.len() {
                let mut taken = without_gpu.clone();
                if let Some(left) = taken[at].0[gpu].checked_sub(sample.micro) {
                    taken[at].0[gpu] = left;
                    next.push(taken);
                }
            }
        }
        for nodes in next {
            // Reached by another order of the same samples: counted there.
            if tried.insert(nodes.clone()) {
                best = best.max(1 + most(&nodes, sample, tried));
            }
        }
    }
    best
}

fn sample() -> impl Strategy<Value = Sample> {
    (0..SHARES.len(), 0..4_u64, 0..3_u64, any::<bool>()).prop_map(|(share, cpu, licences, needs_zone)| {
        let (gpu, micro) = SHARES[share];
        // One that takes nothing fits without end.
        let cpu = if micro + licences == 0 { cpu.max(1) } else { cpu };
        Sample { gpu, micro, cpu, licences, needs_zone }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_batch_is_refused_that_has_a_place(
        nodes in prop::collection::vec((0..3_usize, 0..5_u64, 0..4_u64, any::<bool>()), 1..4),
        before in prop::collection::vec((sample(), 1..3_u64), 0..4),
        wanted in sample(),
    ) {
        let ids = |gpus: usize| (0_i64..).take(gpus).collect::<Vec<_>>();
        let specs = nodes.iter().enumerate();
        let specs = specs.map(|(at, &(gpus, cpu, licences, is_in_zone))| {
            NodeSpec::new(format!("n{at}"), ids(gpus), cpu as f64, 0.0)
                .with_resource("licence", licences)
                .with_label("zone", if is_in_zone { "a" } else { "b" })
        });
        let pool = Pool::new(specs).unwrap();
        let held: Vec<_> =
            before.iter().filter_map(|(sample, count)| pool.try_acquire(&sample.demand(), *count).unwrap()).collect();
        #[allow(clippy::cast_sign_loss)]
        let units = |value: f64, per_unit: f64| (value * per_unit).round() as u64;
        let free: Vec<Node> = pool
            .nodes()
            .iter()
            .map(|node| {
                let gpus = node.gpu_free.iter().map(|&free| units(free, 1e6)).collect();
                let licences = node.named_free.get("licence").copied().unwrap_or(0);
                (gpus, units(node.cpu_free, 1.0), licences, node.labels["zone"] == "a")
            })
            .collect();
        prop_assert!(free.iter().flat_map(|node| &node.0).all(|&free| free <= WHOLE));
        let possible = most(&free, wanted, &mut HashSet::new());
        prop_assert_eq!(pool.free_tokens_for(&wanted.demand()), possible);
        prop_assert!(pool.try_acquire(&wanted.demand(), possible + 1).unwrap().is_none());
        if possible > 0 {
            prop_assert_eq!(pool.try_acquire(&wanted.demand(), possible).unwrap().unwrap().len() as u64, possible);
        }
        drop(held);
    }
}

/// Two halves on two nodes leave no GPU whole, though both would fit on one.
#[test]
fn shares_that_were_spread_can_keep_a_whole_gpu_waiting() {
    let pool = Pool::new(["a", "b"].map(|name| NodeSpec::new(name, [0], 8.0, 8.0))).unwrap();
    let (half, whole) = (Demand::new(0.5, 0.0, 0.0).unwrap(), Demand::new(1.0, 0.0, 0.0).unwrap());
    let halves = pool.try_acquire(&half, 2).unwrap().unwrap();
    let nodes: Vec<String> = halves.placements().into_iter().map(|placed| placed.node).collect();
    assert_eq!(nodes, ["a", "b"]);
    assert!(pool.try_acquire(&whole, 1).unwrap().is_none());
    assert_eq!(pool.explain(&whole, 1).shortages()[0].1, 2);
    drop(halves);
    assert!(pool.try_acquire(&whole, 2).unwrap().is_some());
}
