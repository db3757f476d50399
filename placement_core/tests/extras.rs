//! Named resources and labels where random sequences do not reach: errors, budgets, explanations, adoption, nothing
//! but extras, more demands than indexes.

use std::thread;

use placement_core::{
    Budget, Demand, MAX_NAMED_AMOUNT, MAX_NAMES, NodeSpec, Placement, PlacementError, Pool, Shortage,
    UNLIMITED_TOKENS,
};

fn cpu(cores: f64) -> Demand {
    Demand::new(0.0, cores, 0.0).unwrap()
}

fn licensed(count: u64) -> Demand {
    cpu(1.0).with_resource("licence", count).unwrap()
}

/// Node a: 4 licences in zone a; b: 2 sandboxes in zone b; c: nothing.
fn pool() -> Pool {
    Pool::new([
        NodeSpec::new("a", [0, 1], 16.0, 64.0).with_resource("licence", 4).with_label("zone", "a"),
        NodeSpec::new("b", [0, 1], 16.0, 64.0).with_resource("sandbox", 2).with_label("zone", "b"),
        NodeSpec::new("c", [0, 1], 16.0, 64.0),
    ])
    .unwrap()
}

fn field_of<T: std::fmt::Debug>(result: Result<T, PlacementError>) -> String {
    match result {
        Err(PlacementError::InvalidField { field, .. }) => field,
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_is_no_name_or_count_is_an_error_that_names_the_field() {
    let demand = || cpu(1.0);
    let long = "x".repeat(64);
    for name in ["", "-a", "a-", "a b", "ä", "a\n", long.as_str()] {
        assert_eq!(field_of(demand().with_resource(name, 1)), "named", "{name}");
        assert_eq!(field_of(demand().requiring(name, "a")), "required_labels", "{name}");
        assert_eq!(field_of(demand().requiring("zone", name)), "required_labels.zone", "{name}");
    }
    for name in ["a", "A.b_c-d/e9", &long[1..]] {
        demand().with_resource(name, MAX_NAMED_AMOUNT).unwrap().requiring(name, name).unwrap();
    }
    assert_eq!(field_of(demand().with_resource("licence", MAX_NAMED_AMOUNT + 1)), "named.licence");
    let in_a = demand().requiring("zone", "a").unwrap();
    assert_eq!(in_a.clone().requiring("zone", "a").unwrap(), in_a);
    let conflict = in_a.requiring("zone", "b").unwrap_err().to_string();
    assert_eq!(conflict, "required_labels.zone: must be 'a' and 'b' at once, which no node can be");
    let many =
        (0..MAX_NAMES).fold(demand(), |demand, at| demand.with_resource(&format!("n{at}"), 1).unwrap());
    assert_eq!(field_of(many.with_resource("one.more", 1)), "named");
}

#[test]
fn an_amount_of_zero_is_none() {
    assert_eq!(licensed(0), cpu(1.0));
    assert_eq!(licensed(3).with_resource("licence", 0).unwrap(), cpu(1.0));
    assert_eq!(
        licensed(3).with_resource("licence", 2).unwrap().named().collect::<Vec<_>>(),
        [("licence", 2)]
    );
    let node = NodeSpec::new("n", [], 1.0, 1.0).with_resource("licence", 0);
    let pool = Pool::new([node]).unwrap();
    assert!(pool.nodes()[0].named.is_empty());
    assert_eq!(pool.max_tokens_for(&licensed(1)), 0);
}

#[test]
fn a_budget_counts_what_the_sample_takes() {
    let budget = || Budget::new(0.0, 100.0, 0.0, 100).unwrap();
    let sample = licensed(3);
    assert_eq!(budget().with_resource("licence", 8).unwrap().tokens(&sample).unwrap(), 2);
    assert_eq!(budget().with_resource("sandbox", 1).unwrap().tokens(&cpu(1.0)).unwrap(), 100);
    let error = budget().tokens(&sample).unwrap_err();
    assert!(matches!(&error, PlacementError::BudgetTooSmall { field, .. } if field == "named.licence"));
    assert_eq!(
        error.to_string(),
        "the budget holds no sample: its named.licence is 0, one sample takes 3: raise the budget's named.licence or \
         lower the sample's"
    );
    assert_eq!(field_of(budget().with_resource("a b", 1)), "named");
    let lease =
        pool().try_acquire_batch(&budget().with_resource("licence", 2).unwrap(), &licensed(1), 9).unwrap();
    assert_eq!(lease.unwrap().len(), 2);
}

#[test]
fn an_explanation_names_what_is_short() {
    let pool = pool();
    let sample = licensed(3).requiring("zone", "a").unwrap();
    let held = pool.try_acquire(&sample, 1).unwrap().unwrap();
    let explained = pool.explain(&sample, 1);
    let (licence, zone) = (Shortage::Named("licence".into()), Shortage::Label("zone".into(), "a".into()));
    let short: Vec<_> = explained.nodes.iter().map(|node| node.short.clone()).collect();
    assert_eq!(
        short,
        [vec![licence.clone()], vec![licence.clone(), zone.clone()], vec![licence.clone(), zone.clone()]]
    );
    assert_eq!(explained.shortages(), [(licence, 3), (zone, 2)]);
    assert_eq!(
        explained.to_string(),
        "1 tokens wanted, 0 fit now, 1 in the empty pool; short of named.licence on 3 of 3 nodes, label zone=a on 2 of 3 \
         nodes"
    );
    drop(held);
    assert!(pool.explain(&sample, 1).fits_now());
    // CPU is what stops a fifth token on node a as well: 4 licences, 4 times 4 cores.
    let both = cpu(4.0).with_resource("licence", 1).unwrap();
    assert_eq!(pool.explain(&both, 5).nodes[0].short, [Shortage::Cpu, Shortage::Named("licence".into())]);
}

#[test]
fn named_amounts_take_no_part_in_the_order() {
    let pool = Pool::new([
        NodeSpec::new("few", [0, 1], 8.0, 8.0).with_resource("licence", 2),
        NodeSpec::new("many", [0], 8.0, 8.0).with_resource("licence", 9),
    ])
    .unwrap();
    let sample = Demand::new(0.0, 0.0, 0.0).unwrap().with_resource("licence", 1).unwrap();
    assert_eq!(pool.max_tokens_for(&sample), 11);
    let lease = pool.try_acquire(&sample, 5).unwrap().unwrap();
    let nodes: Vec<String> = lease.placements().into_iter().map(|placed| placed.node).collect();
    // A licence alone leaves the node with the most free GPU where it is, until it has no more.
    assert_eq!(nodes, ["few", "few", "many", "many", "many"]);
    assert_eq!(pool.nodes()[1].named_free["licence"], 6);
    drop(lease);
    assert_eq!(pool.free_tokens_for(&sample), 11);
}

#[test]
fn labels_alone_take_no_room_but_choose_the_node() {
    let pool = pool();
    let nothing = Demand::new(0.0, 0.0, 0.0).unwrap();
    let (in_b, nowhere) =
        (nothing.clone().requiring("zone", "b").unwrap(), nothing.requiring("zone", "z").unwrap());
    assert_eq!(
        (pool.max_tokens_for(&in_b), pool.free_tokens_for(&in_b)),
        (UNLIMITED_TOKENS, UNLIMITED_TOKENS)
    );
    let lease = pool.try_acquire(&in_b, 3).unwrap().unwrap();
    assert!(lease.placements().iter().all(|placed| placed.node == "b"));
    assert_eq!((lease.demand(), pool.nodes()[1].tokens), (in_b.clone(), 3));
    assert_eq!((pool.max_tokens_for(&nowhere), pool.free_tokens_for(&nowhere)), (0, 0));
    assert!(pool.try_acquire(&nowhere, 1).unwrap().is_none());
    assert_eq!(pool.explain(&nowhere, 1).nodes[2].short, [Shortage::Label("zone".into(), "z".into())]);
    drop(lease);
    pool.drain_node("b").unwrap();
    assert_eq!(pool.max_tokens_for(&in_b), 0);
}

#[test]
fn adopting_needs_the_label_and_the_amount() {
    let pool = pool();
    let sample = licensed(2).requiring("zone", "a").unwrap();
    let at = |node: &str| Placement::new(node, []);
    let reason = |placements: &[Placement]| match pool.adopt(&sample, placements) {
        Err(PlacementError::CannotAdopt { index, reason }) => (index, reason),
        other => panic!("{other:?}"),
    };
    assert_eq!(reason(&[at("a"), at("b")]), (1, "'b' lacks the label zone=a".into()));
    assert_eq!(reason(&[at("a"), at("a"), at("a")]), (2, "its room is taken".into()));
    assert!(pool.adopt(&licensed(1), &[at("c")]).is_err());
    assert_eq!(pool.free_tokens_for(&sample), 2);
    let lease = pool.adopt(&sample, &[at("a"), at("a")]).unwrap();
    assert_eq!((lease.demand(), pool.free_tokens_for(&licensed(1))), (sample, 0));
    lease.release_token(1).unwrap();
    assert_eq!(pool.nodes()[0].named_free["licence"], 2);
    assert_eq!(pool.free_tokens_for(&licensed(1)), 2);
}

#[test]
fn a_node_that_comes_back_has_what_it_is_said_to_have() {
    let pool = pool();
    let sample = licensed(1);
    let lease = pool.try_acquire(&sample, 2).unwrap().unwrap();
    assert!(!pool.remove_node("a").unwrap());
    assert_eq!((pool.max_tokens_for(&sample), pool.free_tokens_for(&sample)), (0, 0));
    lease.release().unwrap();
    assert_eq!(pool.nodes().len(), 2);
    pool.add_node(&NodeSpec::new("a", [], 4.0, 4.0)).unwrap();
    assert_eq!(pool.max_tokens_for(&sample), 0);
    pool.remove_node("a").unwrap();
    pool.add_node(&NodeSpec::new("a", [], 4.0, 4.0).with_resource("licence", 9)).unwrap();
    assert_eq!((pool.max_tokens_for(&sample), pool.free_tokens_for(&sample)), (4, 4));
}

/// Demands come from clients, so there is no end to them: what was used least is forgotten and made anew.
#[test]
fn more_demands_than_indexes() {
    let pool = Pool::new(
        (0..70).map(|node| NodeSpec::new(format!("n{node}"), [0], 100.0, 64.0).with_resource("r", 50)),
    );
    let pool = pool.unwrap();
    let demands: Vec<Demand> = (1..=50)
        .map(|count| cpu(1.0).with_resource("r", count).unwrap())
        .chain([cpu(1.0), cpu(2.0)])
        .collect();
    let mut held = Vec::new();
    for round in 0..4 {
        for demand in &demands {
            held.push(pool.try_acquire(demand, 1 + round % 2).unwrap().unwrap());
            if held.len() > 3 {
                drop(held.swap_remove(0));
            }
        }
    }
    drop(held);
    for (demand, count) in demands.iter().zip(1..=50) {
        assert_eq!(pool.free_tokens_for(demand), 70 * (50 / count));
        assert_eq!(pool.max_tokens_for(demand), 70 * (50 / count));
    }
    assert_eq!(pool.free_tokens_for(&demands[50]), 7_000);
}

/// The same amounts with and without extras are two demands, whichever is used first.
#[test]
fn equal_shapes_with_other_extras_do_not_mix() {
    for first in 0..3 {
        let pool = pool();
        let demands = [cpu(1.0), licensed(1), cpu(1.0).requiring("zone", "b").unwrap()];
        let free = [48, 4, 16];
        for at in (0..6).map(|at| (at + first) % 3) {
            assert_eq!(pool.free_tokens_for(&demands[at]), free[at]);
            let lease = pool.try_acquire(&demands[at], 2).unwrap().unwrap();
            assert_eq!(pool.free_tokens_for(&demands[at]), free[at] - 2);
            drop(lease);
        }
    }
}

#[test]
fn threads_never_overbook_a_named_resource() {
    let pool = pool();
    let demands = [licensed(1), licensed(3), cpu(0.5), cpu(1.0).requiring("zone", "a").unwrap()];
    thread::scope(|scope| {
        for seed in 0..4_usize {
            let (pool, demands) = (&pool, &demands);
            scope.spawn(move || {
                for round in 0..1_000 {
                    let lease = pool.try_acquire(&demands[(seed + round) % 4], 1).unwrap();
                    assert!(pool.free_tokens_for(&demands[0]) <= 4);
                    drop(lease);
                }
            });
        }
    });
    for demand in &demands {
        assert_eq!(pool.free_tokens_for(demand), pool.max_tokens_for(demand));
    }
}

/// What another demand did to the node is learned first, and only then what comes back is counted.
#[test]
fn what_comes_back_is_counted_once() {
    let pool = Pool::new([NodeSpec::new("n", [], 8.0, 8.0).with_resource("licence", 2)]).unwrap();
    let lease = pool.try_acquire(&licensed(1), 2).unwrap().unwrap();
    let other = pool.try_acquire(&cpu(1.0), 1).unwrap().unwrap();
    drop(lease);
    assert_eq!(pool.free_tokens_for(&licensed(1)), 2);
    drop(other);
    assert_eq!(pool.free_tokens_for(&licensed(1)), 2);
}
