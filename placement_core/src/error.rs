//! Every error of the crate. "Full for now" is not one of them: that is `None`.
//!
//! Each message names the field at fault and, where there is one, the way out.

use std::borrow::Cow;
use std::fmt;

/// What is wrong with a number that was to become an amount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum AmountFault {
    /// NaN or an infinity.
    NotFinite,
    /// Below zero.
    Negative,
    /// Beyond what the crate counts with.
    TooLarge,
    /// Not zero, but below the smallest unit, so that it would silently ask for nothing.
    TooSmall,
    /// A GPU demand of 1 or more that is not a whole number.
    NotWhole,
}

impl fmt::Display for AmountFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotFinite => "must be a finite number",
            Self::Negative => "must be 0 or more",
            Self::TooLarge => "is larger than what can be counted",
            Self::TooSmall => {
                "is below the smallest unit (0.000001 GPU, 0.001 CPU, 1/1024 GiB): use 0 or more"
            }
            Self::NotWhole => "must be below 1 (a share of one GPU) or a whole number of GPUs",
        })
    }
}

/// One fault in a list of nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct NodeFault {
    /// Position of the node in the list that was given.
    pub index: usize,
    /// The node's name.
    pub node: String,
    /// The field at fault: `node_ip`, `gpus`, `cpu`, `memory_gb`, or one such as `named.licence` and `labels.zone`.
    pub field: Cow<'static, str>,
    /// What is wrong with it.
    pub description: String,
}

impl fmt::Display for NodeFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node {} ('{}'): {} {}", self.index, self.node, self.field, self.description)
    }
}

/// Why a call cannot be done, now or later.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum PlacementError {
    /// A number that is no amount.
    InvalidAmount {
        /// The field: `gpu`, `cpu`, `memory_gb`.
        field: &'static str,
        /// What was given.
        value: f64,
        /// What is wrong with it.
        fault: AmountFault,
    },
    /// A named resource or a label that is none.
    InvalidField {
        /// The field: one such as `named.licence` or `required_labels.zone`, or just `named` when it is the name that
        /// is wrong.
        field: String,
        /// What is wrong with it.
        description: String,
    },
    /// One or more nodes are faulty; all faults found are listed.
    InvalidNodes(Vec<NodeFault>),
    /// `max_tokens` is 0, or more tokens are asked for than a lease can hold.
    InvalidTokenCount {
        /// How many tokens were asked for.
        asked: u64,
        /// How many there may be.
        limit: u64,
    },
    /// The budget does not hold a single sample, so no wait could help.
    BudgetTooSmall {
        /// The field that is short; `named.licence` for a named resource.
        field: Cow<'static, str>,
        /// The budget's amount, in the field's own unit.
        budget: f64,
        /// What one sample takes.
        per_sample: f64,
    },
    /// No node of this name is in the pool.
    UnknownNode(String),
    /// A node of this name is in the pool already (it may be draining).
    DuplicateNode(String),
    /// The lease was released before.
    LeaseReleased,
    /// The token was released before, alone or with its lease.
    TokenReleased {
        /// The token's position in its lease.
        index: usize,
    },
    /// The lease has no token at this position.
    NoSuchToken {
        /// The position asked for.
        index: usize,
        /// How many tokens the lease has.
        len: usize,
    },
    /// A recorded placement cannot be taken over.
    CannotAdopt {
        /// Position of the placement in the list that was given.
        index: usize,
        /// Why not.
        reason: String,
    },
}

impl fmt::Display for PlacementError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InvalidAmount { field, value, fault } => write!(f, "{field} {value} {fault}"),
            Self::InvalidField { field, description } => write!(f, "{field}: {description}"),
            Self::InvalidNodes(faults) => {
                let texts: Vec<String> = faults.iter().map(ToString::to_string).collect();
                f.write_str(&texts.join("; "))
            }
            Self::InvalidTokenCount { asked, limit } => {
                write!(f, "max_tokens {asked} must be from 1 to {limit}")
            }
            Self::BudgetTooSmall { field, budget, per_sample } => write!(
                f,
                "the budget holds no sample: its {field} is {budget}, one sample takes {per_sample}: \
                 raise the budget's {field} or lower the sample's"
            ),
            Self::UnknownNode(node) => write!(f, "no node '{node}' in the pool"),
            Self::DuplicateNode(node) => {
                write!(f, "node '{node}' is in the pool already: remove or resume it instead")
            }
            Self::LeaseReleased => f.write_str("this lease was released already"),
            Self::TokenReleased { index } => write!(f, "token {index} was released already"),
            Self::NoSuchToken { index, len } => write!(f, "no token {index} in a lease of {len}"),
            Self::CannotAdopt { index, reason } => write!(f, "placement {index} cannot be adopted: {reason}"),
        }
    }
}

impl std::error::Error for PlacementError {}

/// Result with [`PlacementError`].
pub type Result<T, E = PlacementError> = std::result::Result<T, E>;
