//! Filters of Jinja2 that order, group or add items: where Python refuses to order two of them, so do these.

use std::cmp::Ordering;
use std::collections::BTreeSet;

use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Environment, Error, State, Value, filters};

use super::arguments::{Arguments, is_true, iterate};
use super::lazy::LazyKind;
use super::order::{is_hashable, order};
use super::python::ItemGroup;
use super::{data, python, refuse, work};

/// Adds the filters.
pub(super) fn add(environment: &mut Environment<'static>) {
    type Filter = fn(&State, &[Value]) -> Result<Value, Error>;
    let filters: [(&'static str, Filter); 7] = [
        ("sort", sort),
        ("min", |state, args| extreme(state, "min", args, Ordering::Less)),
        ("max", |state, args| extreme(state, "max", args, Ordering::Greater)),
        ("unique", unique),
        ("dictsort", dictsort),
        ("groupby", groupby),
        ("sum", sum),
    ];
    for (name, filter) in filters {
        environment.add_filter(name, move |state: &State, args: Rest<Value>, kwargs: Kwargs| {
            filter(state, &super::filters::all(args, kwargs))
        });
    }
}

fn sort(state: &State, args: &[Value]) -> Result<Value, Error> {
    let names = ["value", "reverse", "case_sensitive", "attribute"];
    let [value, reverse, case_sensitive, attribute] = Arguments::new("sort", args, names)?.values();
    let key = SortKey { attribute: attribute.unwrap_or_default(), case_sensitive, default: Value::UNDEFINED };
    let attributes = key.attribute.as_str().map(|names| names.split(',').map(Value::from).collect());
    let attributes: Vec<Value> = attributes.unwrap_or_else(|| vec![key.attribute.clone()]);
    // The keys are lists, in which equal items need no order.
    let key_of = |item: &Value| -> Result<Value, Error> {
        let parts = attributes.iter().map(|attribute| key.of_attribute(item, attribute));
        Ok(parts.collect::<Result<Vec<_>, _>>()?.into())
    };
    let keyed = keyed(items(state, value)?, key_of)?;
    let sorted = sorted(keyed, is_true(reverse.as_ref(), false))?;
    Ok(sorted.into_iter().map(|(_, item)| item).collect::<Vec<_>>().into())
}

fn extreme(state: &State, name: &str, args: &[Value], wanted: Ordering) -> Result<Value, Error> {
    let [value, case_sensitive, attribute] =
        Arguments::new(name, args, ["value", "case_sensitive", "attribute"])?.values();
    let key = SortKey { attribute: attribute.unwrap_or_default(), case_sensitive, default: Value::UNDEFINED };
    let mut items = keyed(items(state, value)?, |item| key.of(item))?.into_iter();
    let Some(mut found) = items.next() else { return Ok(Value::UNDEFINED) };
    for item in items {
        if order(&item.0, &found.0)? == wanted {
            found = item;
        }
    }
    Ok(found.1)
}

fn unique(state: &State, args: &[Value]) -> Result<Value, Error> {
    let [value, case_sensitive, attribute] =
        Arguments::new("unique", args, ["value", "case_sensitive", "attribute"])?.values();
    let key = SortKey { attribute: attribute.unwrap_or_default(), case_sensitive, default: Value::UNDEFINED };
    let mut seen = BTreeSet::new();
    let mut kept = Vec::new();
    for (key, item) in keyed(items(state, value)?, |item| key.of(item))? {
        if !is_hashable(&key) {
            return Err(refuse(format!("unique: Python does not hash a {}", key.kind())));
        }
        if seen.insert(key) {
            kept.push(item);
        }
    }
    Ok(LazyKind::Generator.value(kept))
}

fn dictsort(state: &State, args: &[Value]) -> Result<Value, Error> {
    let [dict, case_sensitive, by, reverse] =
        Arguments::new("dictsort", args, ["value", "case_sensitive", "by", "reverse"])?.values();
    let dict = dict.unwrap_or_default();
    if dict.kind() != ValueKind::Map || python::is_opaque(&dict) {
        return Err(refuse(format!("dictsort of a value that is no dictionary ({})", dict.kind())));
    }
    let at: usize = match by.as_ref().map(Value::as_str) {
        None | Some(Some("key")) => 0,
        Some(Some("value")) => 1,
        _ => return Err(refuse("dictsort: `by` is \"key\" or \"value\"")),
    };
    work::pay_for_sort(state, &dict)?;
    let pairs = data::pairs(&dict)?;
    let key = SortKey { attribute: Value::UNDEFINED, case_sensitive, default: Value::UNDEFINED };
    let keyed = keyed(pairs, |pair| key.of(&pair.get_item_by_index(at)?))?;
    let sorted = sorted(keyed, is_true(reverse.as_ref(), false))?;
    Ok(sorted.into_iter().map(|(_, pair)| pair).collect::<Vec<_>>().into())
}

fn groupby(state: &State, args: &[Value]) -> Result<Value, Error> {
    let [value, attribute, default, case_sensitive] =
        Arguments::new("groupby", args, ["value", "attribute", "default", "case_sensitive"])?.values();
    let attribute = attribute.ok_or_else(|| refuse("groupby needs an attribute"))?;
    let default = default.filter(|default| !default.is_none()).unwrap_or_default();
    let key = SortKey { attribute, case_sensitive, default };
    let mut groups: Vec<(Value, ItemGroup)> = Vec::new();
    for (sorted_by, item) in sorted(keyed(items(state, value)?, |item| key.of(item))?, false)? {
        match groups.last_mut().filter(|(last, _)| *last == sorted_by) {
            Some((_, group)) => group.items.push(item),
            None => groups.push((sorted_by, ItemGroup { grouper: key.part(&item)?, items: vec![item] })),
        }
    }
    Ok(groups.into_iter().map(|(_, group)| Value::from_object(group)).collect::<Vec<_>>().into())
}

fn sum(state: &State, args: &[Value]) -> Result<Value, Error> {
    let [value, attribute, start] = Arguments::new("sum", args, ["iterable", "attribute", "start"])?.values();
    let attribute = attribute.unwrap_or_default();
    let items = iterate(value.unwrap_or_default())?.try_iter()?;
    let items = items.map(|item| lookup(&item, &attribute, &Value::UNDEFINED));
    let items: Vec<Value> = items.collect::<Result<_, _>>()?;
    if items.iter().any(Value::is_undefined) || start.as_ref().is_some_and(|start| start.as_str().is_some()) {
        return Err(refuse("sum adds no texts, and nothing that is undefined"));
    }
    filters::sum(state, items.into(), None, start, Kwargs::from_iter(Vec::<(String, Value)>::new()))
}

/// The items of a value that is sorted, which are paid for.
fn items(state: &State, value: Option<Value>) -> Result<Vec<Value>, Error> {
    let value = iterate(value.unwrap_or_default())?;
    work::pay_for_sort(state, &value)?;
    Ok(value.try_iter()?.collect())
}

/// The key by which an item is sorted.
struct SortKey {
    /// Name or position; undefined for the item itself.
    attribute: Value,
    case_sensitive: Option<Value>,
    default: Value,
}

impl SortKey {
    fn of(&self, item: &Value) -> Result<Value, Error> {
        self.of_attribute(item, &self.attribute)
    }

    fn of_attribute(&self, item: &Value, attribute: &Value) -> Result<Value, Error> {
        let key = lookup(item, attribute, &self.default)?;
        match key.as_str() {
            Some(text) if !is_true(self.case_sensitive.as_ref(), false) => Ok(text.to_lowercase().into()),
            _ => Ok(key),
        }
    }

    /// The attribute as it is.
    fn part(&self, item: &Value) -> Result<Value, Error> {
        lookup(item, &self.attribute, &self.default)
    }
}

/// The attribute of an item: a position, or names and positions with points between them.
fn lookup(item: &Value, attribute: &Value, default: &Value) -> Result<Value, Error> {
    let or_default = |found: Value| if found.is_undefined() { default.clone() } else { found };
    let Some(path) = attribute.as_str() else {
        return match attribute.is_none() || attribute.is_undefined() {
            true => Ok(item.clone()),
            false => item.get_item(attribute).map(or_default),
        };
    };
    path.split('.').try_fold(item.clone(), |item, part| {
        let found = match part.parse::<usize>() {
            Ok(at) => item.get_item_by_index(at)?,
            Err(_) => item.get_attr(part)?,
        };
        Ok(or_default(found))
    })
}

type Keyed = (Value, Value);

fn keyed(items: Vec<Value>, key: impl Fn(&Value) -> Result<Value, Error>) -> Result<Vec<Keyed>, Error> {
    items.into_iter().map(|item| Ok((key(&item)?, item))).collect()
}

/// Sorts items by their keys. Equal ones keep their order.
fn sorted(mut items: Vec<Keyed>, is_reversed: bool) -> Result<Vec<Keyed>, Error> {
    if items.len() < 2 {
        return Ok(items);
    }
    let second = items.split_off(items.len() / 2);
    let mut merged = Vec::with_capacity(items.len() + second.len());
    let mut first = sorted(items, is_reversed)?.into_iter().peekable();
    let mut second = sorted(second, is_reversed)?.into_iter().peekable();
    while let (Some((one, _)), Some((other, _))) = (first.peek(), second.peek()) {
        let order = order(one, other)?;
        let is_second_next = if is_reversed { order.is_lt() } else { order.is_gt() };
        merged.extend(if is_second_next { second.next() } else { first.next() });
    }
    merged.extend(first.chain(second));
    Ok(merged)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_keys_keep_their_order_and_unlike_ones_are_refused() {
        let items = |keys: &[i64]| -> Vec<Keyed> {
            keys.iter().enumerate().map(|(at, &key)| (key.into(), Value::from(at))).collect()
        };
        let places = |found: Vec<Keyed>| -> Vec<usize> {
            found.into_iter().map(|(_, at)| at.as_usize().expect("a place")).collect()
        };
        let keys = [2, 1, 2, 0, 1];
        assert_eq!(places(sorted(items(&keys), false).expect("sorted")), [3, 1, 4, 0, 2]);
        assert_eq!(places(sorted(items(&keys), true).expect("sorted")), [0, 2, 1, 4, 3]);
        let mut unlike = items(&keys);
        unlike.push(("a".into(), 9.into()));
        assert!(sorted(unlike, false).is_err());
    }
}
