//! The pool and a plain one, driven alike through random sequences, must agree on every placement and every count.

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;

use placement_core::{Demand, Lease, NodeSpec, Pool};
use proptest::prelude::*;

use support::{Extras, LABELS, NAMES, PlainDemand, PlainNode, PlainPool, PlainToken};

/// (as written, micro-GPU as the rule for amounts gives it)
const GPUS: [(f64, u64); 12] = [
    (0.0, 0),
    (1.0 / 3.0, 333_333),
    (1.0 / 6.0, 166_666),
    (1.0 / 7.0, 142_857),
    (0.05, 50_000),
    (0.18, 180_000),
    (0.29, 290_000),
    (0.001, 1_000),
    (0.5, 500_000),
    (1.0, 1_000_000),
    (2.0, 2_000_000),
    (3.0, 3_000_000),
];
/// (cores, milli-cores, GiB, MiB)
const REST: [(f64, u64, f64, u64); 5] = [
    (0.0, 0, 0.0, 0),
    (1.0, 1_000, 0.0, 0),
    (0.0, 0, 2.0, 2_048),
    (0.3, 300, 0.7, 716),
    (4.0, 4_000, 16.0, 16_384),
];
/// What demands want beside that: mostly nothing, a label or two, amounts that do not divide what nodes have.
const WANTED: [Extras; 8] = [
    extras([0, 0], [None, None]),
    extras([1, 0], [None, None]),
    extras([2, 1], [None, None]),
    extras([0, 3], [None, None]),
    extras([0, 0], [Some("a"), None]),
    extras([0, 0], [Some("b"), Some("h100")]),
    extras([1, 0], [Some("a"), None]),
    extras([1, 1], [None, Some("h100")]),
];
/// What nodes have of it.
const SUPPLIED: [Extras; 6] = [
    extras([0, 0], [None, None]),
    extras([4, 0], [Some("a"), None]),
    extras([7, 5], [Some("b"), Some("h100")]),
    extras([0, 0], [Some("a"), Some("h100")]),
    extras([0, 8], [None, None]),
    extras([1, 1], [Some("b"), Some("a100")]),
];

const fn extras(named: [u64; 2], labels: [Option<&'static str>; 2]) -> Extras {
    Extras { named, labels }
}

/// How far the plain pool counts free tokens at each step.
const COUNTED: u64 = 2_000;
const CPUS: [u64; 4] = [0, 3, 17, 96];
const MEMORIES: [u64; 4] = [0, 5, 64, 320];

#[derive(Debug, Clone)]
enum Step {
    Acquire { gpu: usize, rest: usize, wanted: usize, count: usize },
    AcquireApart { gpu: usize, rest: usize, wanted: usize, count: usize, others: Vec<(usize, usize, usize)> },
    ReleaseToken { lease: usize, token: usize },
    ReleaseLease { lease: usize },
    DropLease { lease: usize },
    Adopt { lease: usize },
    Add { node: Node },
    Drain { node: usize },
    Resume { node: usize },
    Remove { node: usize },
}

fn step() -> impl Strategy<Value = Step> {
    let any = any::<usize>;
    prop_oneof![
        10 => (0..GPUS.len(), 0..REST.len(), wanted(), prop_oneof![1..4_usize, 1..40_usize])
            .prop_map(|(gpu, rest, wanted, count)| Step::Acquire { gpu, rest, wanted, count }),
        3 => (0..GPUS.len(), 0..REST.len(), wanted(), 1..12_usize, others())
            .prop_map(|(gpu, rest, wanted, count, others)| Step::AcquireApart { gpu, rest, wanted, count, others }),
        6 => (any(), any()).prop_map(|(lease, token)| Step::ReleaseToken { lease, token }),
        3 => any().prop_map(|lease| Step::ReleaseLease { lease }),
        2 => any().prop_map(|lease| Step::DropLease { lease }),
        1 => any().prop_map(|lease| Step::Adopt { lease }),
        1 => (prop_oneof![0..9_u32, 0..13_u32], 0..CPUS.len(), 0..MEMORIES.len(), 0..SUPPLIED.len())
            .prop_map(|node| Step::Add { node }),
        1 => any().prop_map(|node| Step::Drain { node }),
        1 => any().prop_map(|node| Step::Resume { node }),
        1 => any().prop_map(|node| Step::Remove { node }),
    ]
}

/// Demands to stay away from: most of them not every node could hold.
fn others() -> impl Strategy<Value = Vec<(usize, usize, usize)>> {
    prop::collection::vec((0..GPUS.len(), 0..REST.len(), 0..WANTED.len()), 0..3)
}

fn wanted() -> impl Strategy<Value = usize> {
    prop_oneof![Just(0), 0..WANTED.len()]
}

/// `None` for a demand that takes no room, which fits without end.
fn demand(gpu: usize, rest: usize, wanted: usize) -> Option<(Demand, PlainDemand)> {
    let (demand, plain) = any_demand(gpu, rest, wanted);
    let takes_room = plain.gpu + plain.cpu + plain.memory + plain.extras.named.iter().sum::<u64>() > 0;
    takes_room.then_some((demand, plain))
}

fn any_demand(gpu: usize, rest: usize, wanted: usize) -> (Demand, PlainDemand) {
    let ((gpu, micro), (cpu, milli, memory_gb, mib)) = (GPUS[gpu], REST[rest]);
    let extras = WANTED[wanted];
    let plain = PlainDemand { gpu: micro, cpu: milli, memory: mib, extras };
    let mut demand = Demand::new(gpu, cpu, memory_gb).unwrap();
    for (name, count) in NAMES.into_iter().zip(extras.named) {
        demand = demand.with_resource(name, count).unwrap();
    }
    for (key, value) in LABELS.into_iter().zip(extras.labels) {
        if let Some(value) = value {
            demand = demand.requiring(key, value).unwrap();
        }
    }
    (demand, plain)
}

/// GPUs, and positions in the tables of cores, GiB and extras.
type Node = (u32, usize, usize, usize);

fn spec(name: &str, (gpus, cpu, memory, supplied): Node) -> NodeSpec {
    let ids: Vec<i64> = (0..i64::from(gpus)).rev().collect();
    let mut spec = NodeSpec::new(name, ids, CPUS[cpu] as f64, MEMORIES[memory] as f64);
    let extras = SUPPLIED[supplied];
    for (name, count) in NAMES.into_iter().zip(extras.named) {
        spec = spec.with_resource(name, count);
    }
    for (key, value) in LABELS.into_iter().zip(extras.labels) {
        spec.labels.extend(value.map(|value| (key.to_string(), value.to_string())));
    }
    spec
}

/// The numbers in the fields of these values, by field, that are the same in all of them.
fn never_varied<T: Debug>(drawn: impl Iterator<Item = T>) -> Vec<String> {
    let mut seen: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for value in drawn {
        // With `#` each field of the value itself stands in a line that four spaces begin.
        for line in format!("{value:#?}").lines() {
            let Some((field, value)) = line.strip_prefix("    ").and_then(|field| field.split_once(": "))
            else {
                continue;
            };
            let value = value.trim_end_matches(',');
            if !field.starts_with(' ') && value.parse::<f64>().is_ok() {
                seen.entry(field.to_string()).or_default().insert(value.to_string());
            }
        }
    }
    seen.into_iter().filter(|(_, values)| values.len() == 1).map(|(field, _)| field).collect()
}

/// A kind that these tests do not know would be the same in every demand and on every node.
#[test]
fn every_kind_of_room_is_drawn() {
    let demands = (0..GPUS.len()).flat_map(|gpu| (0..REST.len()).map(move |rest| any_demand(gpu, rest, 0).0));
    assert_eq!(never_varied(demands), ["concurrency"], "of a sample it is 1");
    let nodes =
        (0..CPUS.len()).flat_map(|cpu| (0..MEMORIES.len()).map(move |memory| spec("n", (1, cpu, memory, 0))));
    assert_eq!(never_varied(nodes), [] as [&str; 0]);
}

/// Both pools, and the leases of both: a token of the plain one is gone once released.
struct Twins {
    pool: Pool,
    plain: PlainPool,
    leases: Vec<(Lease, Vec<Option<PlainToken>>)>,
    added: usize,
}

impl Twins {
    fn new(nodes: &[Node]) -> Self {
        let pool = Pool::new([]).unwrap();
        let mut twins = Self { pool, plain: PlainPool::default(), leases: Vec::new(), added: 0 };
        for &node in nodes {
            twins.add(node);
        }
        twins
    }

    fn add(&mut self, (gpus, cpu, memory, supplied): Node) {
        let name = format!("n{}", self.added);
        self.added += 1;
        self.pool.add_node(&spec(&name, (gpus, cpu, memory, supplied))).unwrap();
        self.plain.add(&name, gpus, CPUS[cpu] * 1_000, MEMORIES[memory] * 1_024, SUPPLIED[supplied]);
    }

    fn acquire(&mut self, gpu: usize, rest: usize, wanted: usize, count: usize) {
        let Some((demand, plain_demand)) = demand(gpu, rest, wanted) else { return };
        let free = self.pool.free_tokens_for(&demand);
        assert_eq!(free.min(COUNTED), self.plain.free_tokens(plain_demand, COUNTED));
        let explained = self.pool.explain(&demand, count as u64);
        assert_eq!((explained.free_tokens, explained.max_tokens), (free, self.pool.max_tokens_for(&demand)));
        let version = self.pool.release_version();
        let expected = self.plain.acquire(plain_demand, count);
        let lease = self.pool.try_acquire(&demand, count as u64).unwrap();
        assert_eq!(explained.fits_now(), expected.is_some());
        assert_eq!(self.pool.release_version(), version);
        self.keep(&demand, lease, expected);
    }

    fn acquire_apart(
        &mut self,
        (demand, plain_demand): (Demand, PlainDemand),
        count: usize,
        others: &[(Demand, PlainDemand)],
    ) {
        let emptied = self.emptied();
        for (other, plain_other) in others {
            for node in &emptied {
                assert_eq!(self.pool.could_hold(other, &node.name), node.could_hold(*plain_other));
            }
            assert!(!self.pool.could_hold(other, "nowhere"));
            let mut active = emptied.iter().filter(|node| node.takes_tokens);
            let everywhere = active.all(|node| node.could_hold(*plain_other));
            assert_eq!(self.pool.could_hold_everywhere(other), everywhere);
            assert_eq!(self.pool.emptied().free_tokens_for(other), self.pool.max_tokens_for(other));
        }
        let is_apart = |node: &&PlainNode| !others.iter().any(|(_, other)| node.could_hold(*other));
        let names: Vec<String> = emptied.iter().filter(is_apart).map(|node| node.name.clone()).collect();
        let expected = self.plain.acquire_on(plain_demand, count, &names);
        let others = others.iter().map(|(other, _)| other);
        let lease = self.pool.try_acquire_apart(&demand, count as u64, others).unwrap();
        self.keep(&demand, lease, expected);
    }

    /// The nodes as they would be if everything had come back.
    fn emptied(&self) -> Vec<PlainNode> {
        let mut emptied = self.plain.clone();
        for token in self.leases.iter().flat_map(|(_, tokens)| tokens).flatten() {
            emptied.find(&token.node).give(token);
        }
        emptied.nodes.into_iter().flatten().collect()
    }

    fn keep(&mut self, demand: &Demand, lease: Option<Lease>, expected: Option<Vec<PlainToken>>) {
        assert_eq!(lease.is_some(), expected.is_some());
        if let (Some(lease), Some(expected)) = (lease, expected) {
            for (placed, expected) in lease.placements().iter().zip(&expected) {
                assert_eq!((&placed.node, &placed.gpu_ids), (&expected.node, &expected.gpu_ids));
            }
            assert_eq!((lease.len(), &lease.demand()), (expected.len(), demand));
            self.leases.push((lease, expected.into_iter().map(Some).collect()));
        }
    }

    fn release_token(&mut self, lease: usize, token: usize) {
        let Some((lease, tokens)) = pick(&mut self.leases, lease) else { return };
        let index = token % tokens.len();
        let released = lease.release_token(index);
        match tokens[index].take() {
            Some(token) => {
                released.unwrap();
                self.plain.release(&token);
            }
            None => assert!(released.is_err()),
        }
    }

    fn end_lease(&mut self, lease: usize, how: impl FnOnce(&Lease)) {
        if self.leases.is_empty() {
            return;
        }
        let at = lease % self.leases.len();
        let (lease, tokens) = self.leases.swap_remove(at);
        how(&lease);
        drop(lease);
        for token in tokens.into_iter().flatten() {
            self.plain.release(&token);
        }
    }

    /// Gives a lease up and takes the same room again, as after a restart; the plain pool does not move.
    fn adopt(&mut self, lease: usize) {
        let Some((lease, tokens)) = pick(&mut self.leases, lease) else { return };
        let plain = &mut self.plain;
        let leaving = tokens.iter().flatten().any(|token| plain.find(&token.node).leaves_when_empty);
        // A leaving node would be gone in between.
        if lease.held() < lease.len() || leaving {
            return;
        }
        let (demand, placements) = (lease.demand(), lease.placements());
        lease.release().unwrap();
        *lease = self.pool.adopt(&demand, &placements).unwrap();
        assert_eq!(lease.placements(), placements);
    }

    fn change_node(&mut self, node: usize, change: impl FnOnce(&Pool, &mut PlainPool, &str)) {
        let names = self.plain.names();
        if !names.is_empty() {
            change(&self.pool, &mut self.plain, &names[node % names.len()]);
        }
    }

    fn check(&self) {
        let usage = self.pool.nodes();
        let plain: Vec<_> = self.plain.nodes.iter().flatten().collect();
        assert_eq!(usage.len(), plain.len());
        for (node, plain) in usage.iter().zip(plain) {
            assert_eq!(node.node, plain.name);
            assert_eq!(node.tokens, plain.tokens);
            let gpu_free: Vec<u64> = node.gpu_free.iter().map(|free| micro(*free)).collect();
            assert_eq!(gpu_free, plain.gpus.values().copied().collect::<Vec<_>>());
            assert_eq!(micro(node.cpu_free), plain.cpu * 1_000);
            assert_eq!(micro(node.memory_gb_free / 1_000_000.0 * 1_024.0), plain.memory);
            let named_free = NAMES.map(|name| node.named_free.get(name).copied().unwrap_or(0));
            assert_eq!(named_free, plain.extras.named);
        }
    }
}

#[allow(clippy::cast_sign_loss)]
fn micro(value: f64) -> u64 {
    (value * 1e6).round() as u64
}

fn pick<T>(items: &mut [T], any: usize) -> Option<&mut T> {
    let len = items.len();
    if len == 0 { None } else { items.get_mut(any % len) }
}

fn run(nodes: &[Node], steps: Vec<Step>) {
    let mut twins = Twins::new(nodes);
    for step in steps {
        match step {
            Step::Acquire { gpu, rest, wanted, count } => twins.acquire(gpu, rest, wanted, count),
            Step::AcquireApart { gpu, rest, wanted, count, others } => {
                let others: Vec<_> =
                    others.into_iter().map(|(gpu, rest, wanted)| any_demand(gpu, rest, wanted)).collect();
                twins.acquire_apart(any_demand(gpu, rest, wanted), count, &others);
            }
            Step::ReleaseToken { lease, token } => twins.release_token(lease, token),
            Step::ReleaseLease { lease } => twins.end_lease(lease, |lease| lease.release().unwrap()),
            Step::DropLease { lease } => twins.end_lease(lease, |_| ()),
            Step::Adopt { lease } => twins.adopt(lease),
            Step::Add { node } => twins.add(node),
            Step::Drain { node } => twins.change_node(node, |pool, plain, name| {
                pool.drain_node(name).unwrap();
                plain.set(name, false, false);
            }),
            Step::Resume { node } => twins.change_node(node, |pool, plain, name| {
                pool.resume_node(name).unwrap();
                plain.set(name, true, false);
            }),
            Step::Remove { node } => twins.change_node(node, |pool, plain, name| {
                let is_gone = pool.remove_node(name).unwrap();
                plain.set(name, false, true);
                assert_eq!(is_gone, !plain.names().contains(&name.to_string()));
            }),
        }
        twins.check();
    }
    while !twins.leases.is_empty() {
        twins.end_lease(0, |_| ());
    }
    twins.check();
    for (gpu, wanted) in (0..GPUS.len()).zip((0..WANTED.len()).cycle()) {
        if let Some((demand, _)) = demand(gpu, 3, wanted) {
            assert_eq!(twins.pool.free_tokens_for(&demand), twins.pool.max_tokens_for(&demand));
        }
    }
}

fn node() -> impl Strategy<Value = Node> {
    let gpus = prop_oneof![Just(0_u32), Just(2), Just(8), 0..13_u32];
    (gpus, 0..CPUS.len(), 0..MEMORIES.len(), 0..SUPPLIED.len())
}

/// Nodes of one bucket lie in so many words that it needs a bitmap, and few of them in each word. Batches of all sizes,
/// so that levels are taken in part, as a whole, and several at once.
#[test]
fn half_full_pool_of_many_words() {
    let mut twins = Twins::new(&vec![(2, 3, 3, 0); 500]);
    let mut seed = 7_u64;
    let mut any = || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) as usize
    };
    for gpu in [1, 8] {
        twins.acquire(gpu, 1, 0, 700);
        for token in 0..700 {
            if any() % 2 == 0 {
                twins.release_token(twins.leases.len() - 1, token);
            }
        }
    }
    for count in [1, 64, 3, 200, 64, 31, 150] {
        twins.acquire(1, 1, 0, count);
        twins.acquire(9, 1, 0, count / 8 + 1);
        twins.check();
        twins.end_lease(any(), Lease::release_remainder);
    }
    while !twins.leases.is_empty() {
        twins.end_lease(any(), |_| {});
    }
    twins.check();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn mixed_nodes_and_mixed_shapes(
        nodes in prop::collection::vec(node(), 0..8),
        steps in prop::collection::vec(step(), 1..60),
    ) {
        run(&nodes, steps);
    }

    /// So many changes on so few nodes that buckets are dropped and the log is cut.
    #[test]
    fn long_runs_on_few_nodes(
        nodes in prop::collection::vec(node(), 1..4),
        steps in prop::collection::vec(step(), 300..600),
    ) {
        run(&nodes, steps.into_iter().filter(|step| !matches!(step, Step::Add { .. })).collect());
    }

    /// Enough equal nodes that buckets outgrow their small form and nodes span several words.
    #[test]
    fn many_equal_nodes(
        count in 60..140_usize,
        gpus in 1..9_u32,
        supplied in 0..SUPPLIED.len(),
        steps in prop::collection::vec(step(), 1..25),
    ) {
        run(&vec![(gpus, 3, 3, supplied); count], steps);
    }

    /// Few shapes and big batches, so that links between buckets are used again and again.
    #[test]
    fn one_shape_over_and_over(
        nodes in prop::collection::vec(node(), 1..20),
        gpu in 0..GPUS.len(),
        rest in 0..REST.len(),
        wanted in wanted(),
        counts in prop::collection::vec((1..120_usize, any::<usize>(), any::<bool>()), 1..40),
    ) {
        let steps = counts.into_iter().flat_map(|(count, any, whole)| {
            let back = if whole {
                Step::ReleaseLease { lease: any }
            } else {
                Step::ReleaseToken { lease: any, token: any / 7 }
            };
            [Step::Acquire { gpu, rest, wanted, count }, back]
        });
        run(&nodes, steps.collect());
    }

    #[test]
    fn capacity_of_the_empty_pool_is_what_greedy_reaches(
        nodes in prop::collection::vec(node(), 0..8),
        gpu in 1..GPUS.len(),
        rest in 0..REST.len(),
        wanted in wanted(),
    ) {
        let twins = Twins::new(&nodes);
        let (demand, plain_demand) = demand(gpu, rest, wanted).unwrap();
        prop_assert_eq!(twins.pool.max_tokens_for(&demand), twins.plain.free_tokens(plain_demand, u64::MAX));
    }
}
