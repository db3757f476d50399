//! Leases and tokens as Python sees them: one opaque handle, token objects made only when they are read.
//!
//! A token refers to its lease and never the other way round, so there are no cycles; the room is held until it is
//! released or the lease and all token objects read from it are gone.

use pyo3::prelude::*;
use pyo3::types::{PyList, PyString};

use crate::errors::map;

/// The tokens of one batch, held until released or until the lease and its token objects are gone.
#[pyclass(frozen, freelist = 64, module = "py_scheduler.placement")]
pub(crate) struct Lease {
    lease: placement_core::Lease,
    per_sample: Py<PyAny>,
}

impl Lease {
    pub(crate) fn new(lease: placement_core::Lease, per_sample: &Bound<'_, PyAny>) -> Self {
        Self { lease, per_sample: per_sample.clone().unbind() }
    }
}

#[pymethods]
impl Lease {
    /// New objects at each reading, equal to the earlier ones: read it once and keep the list.
    #[getter]
    fn tokens<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyList>> {
        let py = slf.py();
        let len = slf.get().lease.len();
        let token = |index| Bound::new(py, PlacementToken { lease: slf.clone().unbind(), index });
        if len == 1 {
            return PyList::new(py, [token(0)?]);
        }
        PyList::new(py, (0..len).map(token).collect::<PyResult<Vec<_>>>()?)
    }

    /// What each token takes.
    #[getter]
    fn resource(&self, py: Python<'_>) -> Py<PyAny> {
        self.per_sample.clone_ref(py)
    }

    /// Tokens not given back yet.
    #[getter]
    fn held(&self) -> usize {
        self.lease.held()
    }

    /// Gives back what is still held. `LeaseError` the second time.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        self.lease.release().map_err(|error| map(py, &error, "lease"))
    }

    fn __len__(&self) -> usize {
        self.lease.len()
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (exc_type, exc, traceback, /))]
    fn __exit__(&self, exc_type: &Bound<'_, PyAny>, exc: &Bound<'_, PyAny>, traceback: &Bound<'_, PyAny>) {
        let _ = (exc_type, exc, traceback);
        self.lease.release_remainder();
    }

    fn __repr__(&self) -> String {
        format!("<Lease of {} tokens, {} held>", self.lease.len(), self.lease.held())
    }
}

/// Room for one running sample on one node.
#[pyclass(frozen, eq, hash, module = "py_scheduler.placement")]
pub(crate) struct PlacementToken {
    lease: Py<Lease>,
    index: usize,
}

impl PartialEq for PlacementToken {
    fn eq(&self, other: &Self) -> bool {
        self.lease.is(&other.lease) && self.index == other.index
    }
}

impl std::hash::Hash for PlacementToken {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        (self.lease.as_ptr() as usize, self.index).hash(state);
    }
}

#[pymethods]
impl PlacementToken {
    #[getter]
    fn node_ip<'py>(&self, py: Python<'py>) -> Bound<'py, PyString> {
        let name = self.lease.get().lease.with_node(self.index, |name| PyString::new(py, name));
        name.unwrap_or_else(|| PyString::new(py, ""))
    }

    #[getter]
    fn gpu_ids(&self) -> Vec<u32> {
        self.lease.get().lease.gpu_ids(self.index).unwrap_or_default()
    }

    #[getter]
    fn resource(&self, py: Python<'_>) -> Py<PyAny> {
        self.lease.get().resource(py)
    }

    #[getter]
    fn is_held(&self) -> bool {
        self.lease.get().lease.is_held(self.index)
    }

    /// Gives the room back. `LeaseError` the second time, or after the lease was released.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        let released = self.lease.get().lease.release_token(self.index);
        released.map_err(|error| map(py, &error, "token"))
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        format!("<PlacementToken on {} GPUs {:?}>", self.node_ip(py), self.gpu_ids())
    }
}
