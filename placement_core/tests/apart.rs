//! Placing apart from what others could use, where random sequences do not reach.

use placement_core::{Demand, Lease, MAX_LEASE_TOKENS, NodeSpec, PlacementError, Pool};

/// Four equal nodes of two GPUs; d has licences and a zone.
fn pool() -> Pool {
    let node = |name: &str| NodeSpec::new(name, [0, 1], 16.0, 64.0);
    let last = node("d").with_resource("licence", 3).with_label("zone", "d");
    Pool::new([node("a"), node("b"), node("c"), last]).unwrap()
}

fn share(gpu: f64) -> Demand {
    Demand::new(gpu, 1.0, 1.0).unwrap()
}

fn in_zone_d() -> Demand {
    share(1.0).requiring("zone", "d").unwrap()
}

fn nodes_of(lease: &Lease) -> Vec<String> {
    lease.placements().into_iter().map(|placed| placed.node).collect()
}

fn apart(pool: &Pool, demand: &Demand, count: u64, others: &[Demand]) -> Option<Lease> {
    pool.try_acquire_apart(demand, count, others).unwrap()
}

#[test]
fn what_takes_no_tokens_gives_nothing_and_nobody_could_use_it() {
    let pool = pool();
    pool.drain_node("d").unwrap();
    assert!(!pool.could_hold(&in_zone_d(), "d"));
    assert!(apart(&pool, &in_zone_d(), 1, &[]).is_none());
    assert_eq!(
        nodes_of(&apart(&pool, &share(1.0), 6, &[in_zone_d()]).unwrap()),
        ["a", "b", "c", "a", "b", "c"]
    );
    pool.resume_node("d").unwrap();
    assert!(pool.could_hold(&in_zone_d(), "d"));
    assert!(apart(&pool, &share(1.0), 7, &[in_zone_d()]).is_none(), "what was known of d is forgotten");
    assert_eq!(nodes_of(&apart(&pool, &in_zone_d(), 2, &[]).unwrap()), ["d", "d"]);
}

#[test]
fn what_is_full_is_still_one_that_another_could_use() {
    let pool = pool();
    let held = apart(&pool, &in_zone_d(), 2, &[]).unwrap();
    assert!(pool.could_hold(&in_zone_d(), "d"));
    let other = apart(&pool, &share(0.0), 4, &[in_zone_d()]).unwrap();
    assert!(!nodes_of(&other).contains(&"d".to_string()), "its CPUs are free");
    drop((held, other));
    assert!(apart(&pool, &share(1.0), 1, &[share(2.0)]).is_none());
    assert!(apart(&pool, &share(1.0), 8, &[share(3.0)]).is_some(), "no node could hold the other");
}

#[test]
fn named_amounts_and_labels_bound_it_too() {
    let pool = pool();
    let licensed = share(0.1).with_resource("licence", 1).unwrap();
    assert!(apart(&pool, &licensed, 1, &[in_zone_d()]).is_none());
    assert!(apart(&pool, &licensed, 4, &[]).is_none());
    let lease = apart(&pool, &licensed, 3, &[share(3.0)]).unwrap();
    assert_eq!((nodes_of(&lease), pool.free_tokens_for(&licensed)), (vec!["d".to_string(); 3], 0));
    lease.release_token(1).unwrap();
    assert_eq!((pool.free_tokens_for(&licensed), pool.nodes()[3].named_free["licence"]), (1, 1));
    drop(lease);
    assert_eq!(pool.free_tokens_for(&licensed), 3);
    assert_eq!(nodes_of(&apart(&pool, &share(2.0), 3, &[licensed]).unwrap()), ["a", "b", "c"]);
}

#[test]
fn a_demand_that_takes_nothing_goes_to_the_freest_of_them() {
    let pool = pool();
    let held = apart(&pool, &share(0.5), 1, &[]).unwrap();
    let nothing = Demand::new(0.0, 0.0, 0.0).unwrap();
    let lease = apart(&pool, &nothing, 3, &[in_zone_d()]).unwrap();
    assert_eq!((nodes_of(&held), nodes_of(&lease)), (vec!["a".to_string()], vec!["b".to_string(); 3]));
    assert!(apart(&pool, &nothing, 1, std::slice::from_ref(&nothing)).is_none());
    // The node goes with the last token, though none of them took room.
    assert!(!pool.remove_node("b").unwrap());
    drop(lease);
    assert_eq!(pool.nodes().len(), 3);
}

#[test]
fn counts_are_held_to_the_same_limits() {
    for count in [0, MAX_LEASE_TOKENS + 1] {
        let error = pool().try_acquire_apart(&share(1.0), count, &[]).unwrap_err();
        assert!(matches!(error, PlacementError::InvalidTokenCount { asked, .. } if asked == count));
    }
    let too_large = Demand::new(65.0, 0.0, 0.0).unwrap();
    assert!(apart(&pool(), &too_large, 1, &[]).is_none());
    assert!(!pool().could_hold(&too_large, "a"));
    assert!(apart(&pool(), &share(1.0), 8, &[too_large]).is_some());
}

/// The indexes of all shapes hear of it: of one that is used, of one that is not the latest, and when it is given back.
#[test]
fn every_count_follows() {
    let pool = pool();
    let (half, whole) = (share(0.5), share(1.0));
    let free = || (pool.free_tokens_for(&half), pool.free_tokens_for(&whole));
    assert_eq!(free(), (16, 8));
    let lease = apart(&pool, &half, 3, &[in_zone_d()]).unwrap();
    assert_eq!(free(), (13, 5));
    let other = pool.try_acquire(&whole, 5).unwrap().unwrap();
    assert_eq!(free(), (3, 0));
    let version = pool.release_version();
    lease.release().unwrap();
    assert_eq!((free(), pool.release_version()), ((6, 3), version + 1));
    drop(other);
    assert_eq!(free(), (16, 8));
}

/// Whatever clients want: what is remembered of their demands has a bound.
#[test]
fn demands_without_number() {
    let pool = pool();
    for milli in 1..1_000 {
        let other = Demand::new(0.0, 16.0 + f64::from(milli) / 1_000.0, 0.0).unwrap();
        assert!(apart(&pool, &share(1.0), 8, &[other]).is_some());
    }
}

#[test]
fn the_emptied_pool_is_another_one_of_the_nodes_that_take_tokens() {
    let pool = pool();
    let held = pool.try_acquire(&share(1.0), 8).unwrap().unwrap();
    pool.drain_node("b").unwrap();
    assert!(!pool.remove_node("c").unwrap());
    let emptied = pool.emptied();
    assert_eq!(emptied.free_tokens_for(&share(1.0)), 4);
    assert_eq!(emptied.adopt(&share(1.0), &held.placements()[..1]).unwrap().len(), 1);
    let lease = emptied.try_acquire(&in_zone_d(), 2).unwrap().unwrap();
    assert_eq!((emptied.nodes().len(), emptied.layout_version()), (2, 0));
    drop(held);
    assert_eq!(emptied.free_tokens_for(&share(1.0)), 2);
    drop((pool, emptied, lease));
}
