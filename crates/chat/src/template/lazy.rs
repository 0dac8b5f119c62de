//! Values that Python iterates and that are no lists: views of dictionaries, ranges, and generators, which
//! give their items once. Python prints an address or `dict_items(...)` for them, so printing one is refused.

use std::cmp::Ordering;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{self, AtomicBool};

use minijinja::value::{DynObject, Enumerator, Object, ObjectRepr};
use minijinja::{Error, Value};

use super::refuse;

/// A value that is iterated.
#[derive(Debug)]
pub(super) struct Lazy {
    kind: LazyKind,
    /// A list.
    items: Value,
    /// True for a generator that has given its items.
    is_used: AtomicBool,
}

/// Kind of a value that is iterated.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum LazyKind {
    /// Items of `map`, `select` and their like, and iterators over lists.
    Generator,
    /// Items of `keys()`, `values()` and `items()`.
    View,
    Range,
}

impl LazyKind {
    /// A value of this kind.
    pub(super) fn value(self, items: Vec<Value>) -> Value {
        Value::from_object(Lazy { kind: self, items: items.into(), is_used: AtomicBool::new(false) })
    }
}

impl Lazy {
    /// The items, for a walk that does not use them.
    pub(super) fn items(&self) -> &Value {
        &self.items
    }

    /// The kind.
    pub(super) fn kind(&self) -> LazyKind {
        self.kind
    }

    /// Name of the kind, for messages.
    pub(super) fn name(&self) -> &'static str {
        match self.kind {
            LazyKind::Generator => "a generator",
            LazyKind::View => "a view of a dictionary",
            LazyKind::Range => "a range",
        }
    }

    /// True for a range, which has positions.
    pub(super) fn is_sequence(&self) -> bool {
        self.kind == LazyKind::Range
    }
}

/// True for a value of this module.
pub(super) fn is_lazy(value: &Value) -> bool {
    value.downcast_object_ref::<Lazy>().is_some()
}

/// The list of items of a value that is iterated; `None` for other values.
///
/// # Errors
/// A generator that has given its items: Python gives none the second time.
pub(super) fn taken(value: &Value) -> Result<Option<Value>, Error> {
    let Some(lazy) = value.downcast_object_ref::<Lazy>() else { return Ok(None) };
    if lazy.kind == LazyKind::Generator && lazy.is_used.swap(true, atomic::Ordering::Relaxed) {
        return Err(refuse(
            "a generator is iterated twice, where Python has no items left: add `|list` to it",
        ));
    }
    Ok(Some(lazy.items.clone()))
}

impl Object for Lazy {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let found = self.is_sequence().then(|| self.items.get_item(key).ok()).flatten();
        found.filter(|found| !found.is_undefined())
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        match self.kind {
            // Only `taken` notes that the items are used.
            LazyKind::Generator => Enumerator::NonEnumerable,
            _ => self
                .items
                .try_iter()
                .map_or(Enumerator::NonEnumerable, |items| Enumerator::Iter(Box::new(items))),
        }
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        self.items.len().filter(|_| self.kind != LazyKind::Generator)
    }

    fn is_true(self: &Arc<Self>) -> bool {
        self.kind == LazyKind::Generator || self.items.is_true()
    }

    fn custom_cmp(self: &Arc<Self>, other: &DynObject) -> Option<Ordering> {
        let other = other.downcast_ref::<Self>()?;
        let are_ranges = self.is_sequence() && other.is_sequence();
        Some(if are_ranges { self.items.cmp(&other.items) } else { Ordering::Less })
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
