//! All-or-nothing placement of batches over nodes, GPU shares, CPUs, memory and named resources.
//!
//! A scheduler asks a [`Pool`] for room for a batch of equal samples and gets a [`Lease`] with one token for each, or
//! `None` while they do not all fit. The crate keeps no clock, starts no thread and does no I/O; amounts are integers
//! inside, so nothing is lost to rounding (see [`Demand::new`]).
//!
//! ```
//! use placement_core::{Demand, NodeSpec, Pool};
//!
//! let pool = Pool::new((0..4).map(|node| NodeSpec::new(format!("node-{node}"), [0, 1, 2, 3], 64.0, 256.0)))?;
//! let sample = Demand::new(0.25, 2.0, 8.0)?;
//! let lease = pool.try_acquire(&sample, 40)?.expect("64 fit");
//! assert_eq!(pool.free_tokens_for(&sample), 24);
//!
//! let refused = pool.explain(&sample, 25);
//! assert!(!refused.fits_now() && refused.fits_ever());
//! drop(lease);
//! assert_eq!(pool.free_tokens_for(&sample), pool.max_tokens_for(&sample));
//! # Ok::<(), placement_core::PlacementError>(())
//! ```
//!
//! # Named resources and labels
//! Whatever else a node has a number of is a named resource: licences, sandboxes. It gates as memory does and takes no
//! part in the choice of the node. A label says what a node is; a demand that requires labels is placed only on nodes
//! that have all of them.
//!
//! ```
//! use placement_core::{Budget, Demand, NodeSpec, Pool};
//!
//! let pool = Pool::new([
//!     NodeSpec::new("a", [0, 1], 16.0, 64.0).with_resource("licence", 4).with_label("zone", "a"),
//!     NodeSpec::new("b", [0, 1], 16.0, 64.0).with_label("zone", "b"),
//! ])?;
//! let sample = Demand::new(0.1, 1.0, 1.0)?.with_resource("licence", 1)?.requiring("zone", "a")?;
//! assert_eq!(pool.max_tokens_for(&sample), 4);
//!
//! let budget = Budget::new(2.0, 8.0, 8.0, 8)?.with_resource("licence", 3)?;
//! let lease = pool.try_acquire_batch(&budget, &sample, 64)?.expect("the pool is empty");
//! assert_eq!((lease.len(), pool.nodes()[0].named_free["licence"]), (3, 1));
//! assert_eq!(
//!     pool.explain(&sample, 2).to_string(),
//!     "2 tokens wanted, 1 fit now, 4 in the empty pool; short of named.licence on 2 of 2 nodes, label zone=a on 1 of 2 \
//!      nodes"
//! );
//! # Ok::<(), placement_core::PlacementError>(())
//! ```
//!
//! # Cost
//! A token costs the same at 16 and at 10 000 nodes. Nodes are kept in order for each shape (distinct demand) in use,
//! up to 32 of them; a change by one shape reaches the others when they are used next. A node costs 64 bytes (up to
//! eight GPUs), its names, and for each shape in use 16 bytes and its part of a bucket of about 100. Named resources and
//! labels lie beside the nodes: a demand without them never looks there.
//!
//! # Threads
//! Every call takes `&self` and may come from any thread; all of them share one short lock, save `max_tokens_for`,
//! `release_version` and `layout_version`, which do not take it, and `free_tokens_for`, which does not wait for it.
//!
//! # Features
//! `serde`: `Serialize` (and where it is safe `Deserialize`) for plain values. None by default.

#![forbid(unsafe_code)]

// Who knows whom, from top to bottom. The plain values below the line know one another.
//
//     pool --> adopt --> lease --> handle --> state --> index --> order --> node_set
//        \                                    /            \
//         explain --------------------------->             held
//     -------------------------------------------------------------------------------
//     layout, shape, resource, extras, node, node_spec, amount, error

mod adopt;
mod amount;
mod error;
mod explain;
mod extras;
mod handle;
mod held;
mod index;
mod layout;
mod lease;
mod node;
mod node_set;
mod node_spec;
mod order;
mod pool;
mod resource;
mod shape;
mod state;

/// The example of the README, compiled and run as a test.
#[doc = include_str!("../README.md")]
#[cfg(doctest)]
struct Readme;

pub use amount::WHOLE_GPU_MICRO;
pub use error::{AmountFault, NodeFault, PlacementError, Result};
pub use explain::{Explanation, NodeExplanation, NodePhase, NodeUsage, Shortage};
pub use extras::{MAX_NAMED_AMOUNT, MAX_NAMES};
pub use layout::UNLIMITED_TOKENS;
pub use lease::{Lease, Placement};
pub use node::MAX_GPUS_PER_NODE;
pub use node_spec::{NodeSpec, check_nodes};
pub use pool::{MAX_LEASE_TOKENS, Pool};
pub use resource::{Budget, Demand, GpuDemand};
