//! Named integer resources and labels: what a node has beside GPU, CPU and memory, and what a demand wants of it.
//!
//! Most demands want neither. So all of this lies beside the nodes and is only looked at for a demand that does: an
//! index then counts by [`NodeExtras::fits`] too. Named amounts gate and take no part in the order of the nodes; like
//! any amount they make one token less fit for each token that is placed: floor((f - n) / n) = floor(f / n) - 1.
//!
//! Invariants: names and counts of an [`Extras`] are sound, no count is 0, and an empty one is never kept; a node's free
//! amounts have the names of its supply and never exceed it.

use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use crate::error::{PlacementError, Result};
use crate::node::Supply;
use crate::shape::{Shape, UNLIMITED};

/// The most of one named resource that a node can have and a demand can take.
pub const MAX_NAMED_AMOUNT: u64 = u32::MAX as u64;

/// Named resources, and likewise labels, that one node, demand or budget can have.
pub const MAX_NAMES: usize = 64;

const MAX_NAME_LENGTH: usize = 63;

pub(crate) type Amounts = BTreeMap<String, u64>;
pub(crate) type Labels = BTreeMap<String, String>;

/// Of a node what it has, of a demand what it takes and requires.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(crate) struct Extras {
    pub(crate) named: Amounts,
    pub(crate) labels: Labels,
}

static NO_EXTRAS: Extras = Extras { named: Amounts::new(), labels: Labels::new() };

impl Extras {
    /// `None` when there is nothing.
    pub(crate) fn shared(named: Amounts, labels: Labels) -> Option<Arc<Self>> {
        (!named.is_empty() || !labels.is_empty()).then(|| Arc::new(Self { named, labels }))
    }

    /// The same, whether there is anything or not.
    pub(crate) fn of(extras: Option<&Arc<Self>>) -> &Self {
        extras.map_or(&NO_EXTRAS, Arc::as_ref)
    }

    /// Those of the required labels that a node lacks.
    pub(crate) fn lacking<'a>(
        &'a self,
        labels: &'a Labels,
    ) -> impl Iterator<Item = (&'a String, &'a String)> {
        self.labels.iter().filter(|(key, value)| labels.get(*key) != Some(value))
    }

    /// How often each named need fits into amounts.
    pub(crate) fn named_fits<'a>(&'a self, have: &'a Amounts) -> impl Iterator<Item = (&'a String, u32)> {
        self.named.iter().map(|(name, need)| {
            let fits = have.get(name).copied().unwrap_or(0) / need;
            (name, u32::try_from(fits).unwrap_or(UNLIMITED))
        })
    }

    /// How often the demand fits, by these alone, on a node of such labels and amounts.
    pub(crate) fn fits(&self, labels: &Labels, have: &Amounts) -> u32 {
        if self.lacking(labels).next().is_some() {
            return 0;
        }
        self.named_fits(have).map(|(_, fits)| fits).min().unwrap_or(UNLIMITED)
    }

    /// The same, on an empty node.
    pub(crate) fn fits_empty(&self, node: Option<&Arc<Self>>) -> u32 {
        let node = Self::of(node);
        self.fits(&node.labels, &node.named)
    }
}

/// What is free on a node now, and what it has in all.
#[derive(Debug, Clone)]
pub(crate) struct FreeExtras {
    pub(crate) supply: Arc<Extras>,
    pub(crate) free: Amounts,
}

impl FreeExtras {
    pub(crate) fn has_room(&self, wanted: &Extras) -> bool {
        wanted.fits(&self.supply.labels, &self.free) > 0
    }

    /// Takes what one token takes, which must fit.
    pub(crate) fn take(&mut self, wanted: &Extras) {
        self.change(wanted, |free, amount| *free -= amount);
    }

    fn give_back(&mut self, wanted: &Extras) {
        self.change(wanted, |free, amount| *free += amount);
    }

    fn change(&mut self, wanted: &Extras, change: impl Fn(&mut u64, u64)) {
        for (name, amount) in &wanted.named {
            if let Some(free) = self.free.get_mut(name) {
                change(free, *amount);
            }
        }
    }
}

/// Extras of the nodes of a pool by position; of nodes that have none there may be no place.
#[derive(Debug, Default)]
pub(crate) struct NodeExtras(Vec<Option<FreeExtras>>);

impl NodeExtras {
    /// Says what the node has that enters a position.
    pub(crate) fn enter(&mut self, position: u32, supply: Option<&Arc<Extras>>) {
        let at = position as usize;
        if supply.is_some() && at >= self.0.len() {
            self.0.resize_with(at + 1, || None);
        }
        if let Some(place) = self.0.get_mut(at) {
            *place =
                supply.map(|supply| FreeExtras { supply: Arc::clone(supply), free: supply.named.clone() });
        }
    }

    pub(crate) fn at(&self, position: u32) -> Option<&FreeExtras> {
        self.0.get(position as usize)?.as_ref()
    }

    /// What is free at a position.
    pub(crate) fn free(&self, position: u32) -> &Amounts {
        self.at(position).map_or(&NO_EXTRAS.named, |node| &node.free)
    }

    /// How often a demand fits there, by named amounts and labels alone.
    pub(crate) fn fits(&self, position: u32, wanted: &Extras) -> u32 {
        self.at(position)
            .map_or_else(|| wanted.fits_empty(None), |node| wanted.fits(&node.supply.labels, &node.free))
    }

    /// Takes what one token takes, which must fit.
    pub(crate) fn take(&mut self, position: u32, wanted: &Extras) {
        if let Some(Some(node)) = self.0.get_mut(position as usize) {
            node.take(wanted);
        }
    }

    /// Gives one token's part back.
    pub(crate) fn give_back(&mut self, position: u32, wanted: &Extras) {
        if let Some(Some(node)) = self.0.get_mut(position as usize) {
            node.give_back(wanted);
        }
    }
}

/// What one token takes and requires, by content: how caches know a demand.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub(crate) shape: Shape,
    pub(crate) extras: Option<Arc<Extras>>,
}

impl Wanted {
    pub(crate) fn new(shape: Shape, extras: Option<&Arc<Extras>>) -> Self {
        Self { shape, extras: extras.cloned() }
    }

    /// How often the demand fits on a node of this supply while it is empty.
    pub(crate) fn fits_empty(&self, supply: &Supply) -> u32 {
        let by_extras = Extras::of(self.extras.as_ref()).fits_empty(supply.extras.as_ref());
        self.shape.fits_empty(supply).all().min(by_extras)
    }

    /// Whether a token takes no room at all. It may require labels still.
    pub(crate) fn takes_nothing(&self) -> bool {
        takes_nothing(self.shape, self.extras.as_ref())
    }
}

/// See [`Wanted::takes_nothing`].
pub(crate) fn takes_nothing(shape: Shape, extras: Option<&Arc<Extras>>) -> bool {
    shape.is_nothing() && extras.is_none_or(|extras| extras.named.is_empty())
}

impl Hash for Wanted {
    fn hash<H: Hasher>(&self, state: &mut H) {
        // All that a shape says, as one number.
        self.shape.room().key().hash(state);
        // Nothing for the many that have none.
        if let Some(extras) = &self.extras {
            extras.hash(state);
        }
    }
}

/// What is wrong with a name of a resource or label, or with a label's value.
pub(crate) fn name_fault(what: &str, name: &str) -> Option<String> {
    let is_edge = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
    let bytes = name.as_bytes();
    let is_sound = bytes.len() <= MAX_NAME_LENGTH
        && is_edge(bytes.first())
        && is_edge(bytes.last())
        && bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || b"._-/".contains(byte));
    // A long name is cut, so that the message stays readable.
    let shown: String = name.chars().take(MAX_NAME_LENGTH + 1).collect();
    (!is_sound).then(|| {
        format!(
            "the {what} '{shown}' must have 1 to {MAX_NAME_LENGTH} characters of A-Z a-z 0-9 . _ - / and begin and end \
             with a letter or digit"
        )
    })
}

/// The first fault of a named amount, as (field, description).
pub(crate) fn amount_fault(name: &str, count: u64, limit: u64) -> Option<(String, String)> {
    if let Some(fault) = name_fault("name", name) {
        return Some(("named".into(), fault));
    }
    (count > limit).then(|| (format!("named.{name}"), format!("{count} must be at most {limit}")))
}

/// The first fault of a label, as (field, description).
pub(crate) fn label_fault(field: &str, key: &str, value: &str) -> Option<(String, String)> {
    if let Some(fault) = name_fault("name", key) {
        return Some((field.into(), fault));
    }
    name_fault("value", value).map(|fault| (format!("{field}.{key}"), fault))
}

/// A map of more names than there may be, as (field, description).
pub(crate) fn count_fault(field: &str, names: usize) -> Option<(String, String)> {
    (names > MAX_NAMES).then(|| (field.into(), format!("has {names} names, at most {MAX_NAMES} can be")))
}

/// Sets a named amount; 0 takes it away.
pub(crate) fn set_amount(named: &mut Amounts, name: &str, count: u64, limit: u64) -> Result<()> {
    or_error(amount_fault(name, count, limit))?;
    if count == 0 {
        named.remove(name);
    } else {
        named.insert(name.to_string(), count);
    }
    or_error(count_fault("named", named.len()))
}

/// Adds a label that is required.
pub(crate) fn require_label(labels: &mut Labels, key: &str, value: &str) -> Result<()> {
    const FIELD: &str = "required_labels";
    or_error(label_fault(FIELD, key, value))?;
    if let Some(known) = labels.insert(key.to_string(), value.to_string())
        && known != value
    {
        let description = format!("must be '{known}' and '{value}' at once, which no node can be");
        return or_error(Some((format!("{FIELD}.{key}"), description)));
    }
    or_error(count_fault(FIELD, labels.len()))
}

fn or_error(fault: Option<(String, String)>) -> Result<()> {
    match fault {
        None => Ok(()),
        Some((field, description)) => Err(PlacementError::InvalidField { field, description }),
    }
}
