//! Errors of the core as exceptions of `py_scheduler.errors`, which is imported when the first one is raised.

use placement_core::PlacementError;
use pyo3::prelude::*;

/// A faulty field and what is wrong with it.
pub(crate) struct Violation {
    pub(crate) field: String,
    pub(crate) description: String,
}

fn exception(py: Python<'_>, class: &str, message: String) -> PyErr {
    let made = py.import("py_scheduler.errors").and_then(|errors| errors.getattr(class)?.call1((message,)));
    made.map_or_else(|failed| failed, PyErr::from_value)
}

/// `InvalidArgumentError` with every fault.
pub(crate) fn invalid(py: Python<'_>, violations: &[Violation]) -> PyErr {
    let make = || {
        let errors = py.import("py_scheduler.errors")?;
        let class = errors.getattr("FieldViolation")?;
        let listed: PyResult<Vec<_>> =
            violations.iter().map(|fault| class.call1((&fault.field, &fault.description))).collect();
        errors.getattr("InvalidArgumentError")?.call1((listed?,))
    };
    make().map_or_else(|failed| failed, PyErr::from_value)
}

/// `InvalidArgumentError` about one field.
pub(crate) fn invalid_field(py: Python<'_>, field: String, description: impl Into<String>) -> PyErr {
    invalid(py, &[Violation { field, description: description.into() }])
}

/// The exception for an error of the core; `at` is what the call's argument was named.
pub(crate) fn map(py: Python<'_>, error: &PlacementError, at: &str) -> PyErr {
    match error {
        PlacementError::InvalidAmount { field, value, fault } => {
            invalid_field(py, format!("{at}.{field}"), format!("{value} {fault}"))
        }
        PlacementError::InvalidField { field, description } => {
            invalid_field(py, format!("{at}.{field}"), description.as_str())
        }
        PlacementError::InvalidNodes(faults) => {
            let violations: Vec<Violation> = faults
                .iter()
                .map(|fault| Violation {
                    field: format!("{at}.{}", fault.field),
                    description: fault.description.clone(),
                })
                .collect();
            invalid(py, &violations)
        }
        PlacementError::InvalidTokenCount { .. } => invalid_field(py, at.to_string(), error.to_string()),
        PlacementError::BudgetTooSmall { .. } => exception(py, "UnplaceableError", error.to_string()),
        PlacementError::UnknownNode(_) => exception(py, "NotFoundError", error.to_string()),
        PlacementError::DuplicateNode(_) => exception(py, "AlreadyExistsError", error.to_string()),
        PlacementError::CannotAdopt { .. } => exception(py, "FailedPreconditionError", error.to_string()),
        _ => exception(py, "LeaseError", error.to_string()),
    }
}
