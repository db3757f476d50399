//! Placing on some nodes alone, where random sequences do not reach.

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

fn nodes_of(lease: &Lease) -> Vec<String> {
    lease.placements().into_iter().map(|placed| placed.node).collect()
}

#[test]
fn what_is_unknown_or_takes_no_tokens_gives_nothing() {
    let pool = pool();
    let held = pool.try_acquire_on(&share(0.5), 1, ["c"]).unwrap().unwrap();
    pool.drain_node("b").unwrap();
    assert!(!pool.remove_node("c").unwrap());
    let on = |names: &[&str], count| pool.try_acquire_on(&share(1.0), count, names.iter().copied()).unwrap();
    for names in [&[][..], &["x"], &["b", "c", "x", ""]] {
        assert!(on(names, 1).is_none(), "{names:?}");
    }
    assert_eq!(nodes_of(&on(&["b", "c", "x", "a"], 2).unwrap()), ["a", "a"]);
    assert!(on(&["a", "b"], 3).is_none());
    drop(held);
    assert_eq!(pool.nodes().len(), 3);
}

#[test]
fn a_name_that_is_given_twice_counts_once() {
    let pool = pool();
    assert!(pool.try_acquire_on(&share(1.0), 3, ["a", "a"]).unwrap().is_none());
    assert_eq!(pool.try_acquire_on(&share(1.0), 2, ["a", "a"]).unwrap().unwrap().len(), 2);
}

#[test]
fn named_amounts_and_labels_bound_it_too() {
    let pool = pool();
    let licensed = share(0.1).with_resource("licence", 1).unwrap();
    assert!(pool.try_acquire_on(&licensed, 1, ["a", "b", "c"]).unwrap().is_none());
    assert!(pool.try_acquire_on(&licensed, 4, ["a", "d"]).unwrap().is_none());
    let lease = pool.try_acquire_on(&licensed, 3, ["a", "d"]).unwrap().unwrap();
    assert_eq!((nodes_of(&lease), pool.free_tokens_for(&licensed)), (vec!["d".to_string(); 3], 0));
    lease.release_token(1).unwrap();
    assert_eq!((pool.free_tokens_for(&licensed), pool.nodes()[3].named_free["licence"]), (1, 1));
    drop(lease);
    let in_zone = share(1.0).requiring("zone", "d").unwrap();
    assert!(pool.try_acquire_on(&in_zone, 1, ["a"]).unwrap().is_none());
    assert_eq!(nodes_of(&pool.try_acquire_on(&in_zone, 1, ["a", "d"]).unwrap().unwrap()), ["d"]);
    assert_eq!(pool.free_tokens_for(&licensed), 3);
}

#[test]
fn a_demand_that_takes_nothing_goes_to_the_freest_of_them() {
    let pool = pool();
    let held = pool.try_acquire_on(&share(0.5), 1, ["b"]).unwrap().unwrap();
    let nothing = Demand::new(0.0, 0.0, 0.0).unwrap();
    let lease = pool.try_acquire_on(&nothing, 3, ["b", "c", "d"]).unwrap().unwrap();
    assert_eq!((nodes_of(&lease), pool.nodes()[2].tokens), (vec!["c".to_string(); 3], 3));
    assert!(pool.try_acquire_on(&nothing.requiring("zone", "d").unwrap(), 1, ["b"]).unwrap().is_none());
    drop(held);
    // The node goes with the last token, though none of them took room.
    assert!(!pool.remove_node("c").unwrap());
    drop(lease);
    assert_eq!(pool.nodes().len(), 3);
}

#[test]
fn counts_are_held_to_the_same_limits() {
    for count in [0, MAX_LEASE_TOKENS + 1] {
        let error = pool().try_acquire_on(&share(1.0), count, ["a"]).unwrap_err();
        assert!(matches!(error, PlacementError::InvalidTokenCount { asked, .. } if asked == count));
    }
    assert!(pool().try_acquire_on(&Demand::new(65.0, 0.0, 0.0).unwrap(), 1, ["a"]).unwrap().is_none());
}

/// The indexes of all shapes hear of it: of one that is used, of one that is not the latest, and when it is given back.
#[test]
fn every_count_follows() {
    let pool = pool();
    let (half, whole) = (share(0.5), share(1.0));
    let free = || (pool.free_tokens_for(&half), pool.free_tokens_for(&whole));
    assert_eq!(free(), (16, 8));
    let lease = pool.try_acquire_on(&half, 3, ["a"]).unwrap().unwrap();
    assert_eq!(lease.placements()[2].gpu_ids, [1]);
    assert_eq!(free(), (13, 6));
    let other = pool.try_acquire(&whole, 6).unwrap().unwrap();
    assert_eq!(free(), (1, 0));
    let version = pool.release_version();
    lease.release().unwrap();
    assert_eq!((free(), pool.release_version()), ((4, 2), version + 1));
    drop(other);
    assert_eq!(free(), (16, 8));
}
