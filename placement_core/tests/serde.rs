//! The `serde` feature: what was written before there were named resources and labels still loads.
#![cfg(feature = "serde")]

use placement_core::{Demand, NodeSpec, Pool};
use serde_json::json;

#[test]
fn a_node_written_before_there_were_extras_still_loads() {
    let old = json!({"name": "a", "gpu_ids": [0], "cpu": 1.0, "memory_gb": 2.0});
    assert_eq!(serde_json::from_value::<NodeSpec>(old).unwrap(), NodeSpec::new("a", [0], 1.0, 2.0));
}

#[test]
fn nodes_and_answers_have_their_extras() {
    let node = NodeSpec::new("a", [0], 1.0, 2.0).with_resource("licence", 4).with_label("zone", "a");
    let written = serde_json::to_value(&node).unwrap();
    assert_eq!((&written["named"], &written["labels"]), (&json!({"licence": 4}), &json!({"zone": "a"})));
    assert_eq!(serde_json::from_value::<NodeSpec>(written).unwrap(), node);

    let pool = Pool::new([node]).unwrap();
    let sample = Demand::new(0.0, 0.5, 0.0).unwrap().with_resource("licence", 3).unwrap();
    let _held = pool.try_acquire(&sample, 1).unwrap().unwrap();
    let usage = serde_json::to_value(pool.nodes()).unwrap();
    assert_eq!(
        (&usage[0]["named_free"], &usage[0]["labels"]),
        (&json!({"licence": 1}), &json!({"zone": "a"}))
    );
    let explained = pool.explain(&sample.requiring("zone", "b").unwrap(), 1);
    let short = &serde_json::to_value(explained).unwrap()["nodes"][0]["short"];
    assert_eq!(short, &json!([{"Named": "licence"}, {"Label": ["zone", "b"]}]));
}
