//! Python face of `placement_core`: conversion and error mapping only, no placement logic.
//!
//! The module is private to the package; `py_scheduler.placement` is its only importer. Calls keep the interpreter
//! lock: giving it up costs more than an acquire. The pool's own lock is never held while Python code could run.

mod convert;
mod errors;
mod lease;
mod pool;
mod views;

use pyo3::prelude::*;

/// The extension module.
#[pymodule]
mod _placement_core {
    #[pymodule_export]
    use super::convert::{check_nodes, tokens_in_budget};
    #[pymodule_export]
    use super::lease::{Lease, PlacementToken};
    #[pymodule_export]
    use super::pool::PlacementPool;
    #[pymodule_export]
    use super::views::{Explanation, NodeExplanation, NodeUsage};
}
