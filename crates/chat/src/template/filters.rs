//! Filters of Jinja2, where `minijinja` has others or prints otherwise. Filters that only one of both has are
//! removed, so that a template with them is refused.

use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Environment, Error, State, Value};

use super::arguments::{Arguments, integer, is_true, iterate, text};
use super::lazy::{Lazy, LazyKind};
use super::marks::SPAN;
use super::{case, data, json, operands, python, refuse, source, strings, work};

/// Filters of `minijinja` without a counterpart of the same meaning in Jinja2.
const REMOVED: [&str; 11] =
    ["attr", "bool", "chain", "e", "escape", "format", "lines", "pprint", "split", "zip", "urlencode"];

/// Adds the filters.
pub(super) fn add(environment: &mut Environment<'static>) {
    REMOVED.iter().for_each(|name| environment.remove_filter(name));
    type Filter = fn(&State, &[Value]) -> Result<Value, Error>;
    let mut add = |name: &'static str, filter: Filter| {
        environment.add_filter(name, move |state: &State, args: Rest<Value>, kwargs: Kwargs| {
            let args = all(args, kwargs);
            args.iter()
                .filter_map(Value::as_str)
                .try_for_each(|text| work::pay_for_text(state, text.len()))?;
            filter(state, &args)
        });
    };
    add("tojson", json::tojson);
    add("safe", |state, args| Ok(Value::from(subject(state, "safe", args)?)));
    add("string", |state, args| Ok(Value::from(subject(state, "string", args)?)));
    add("upper", |state, args| Ok(Value::from(subject(state, "upper", args)?.to_uppercase())));
    add("lower", |state, args| Ok(Value::from(subject(state, "lower", args)?.to_lowercase())));
    add("capitalize", |state, args| Ok(Value::from(case::capitalize(&subject(state, "capitalize", args)?))));
    add("title", |state, args| Ok(Value::from(case::title_words(&subject(state, "title", args)?))));
    add("trim", trim);
    add("indent", indent);
    add("length", |_, args| length(args));
    add("count", |_, args| length(args));
    add("first", |_, args| Ok(iterate(one("first", args)?)?.try_iter()?.next().unwrap_or_default()));
    add("last", |state, args| {
        let value = one("last", args)?;
        if value.downcast_object_ref::<Lazy>().map(Lazy::kind) == Some(LazyKind::Generator) {
            return Err(refuse("last: Python does not reverse a generator: add `|list` to it"));
        }
        let value = iterate(value)?;
        pay_for_items(state, &value)?;
        Ok(value.try_iter()?.last().unwrap_or_default())
    });
    add("list", |state, args| {
        let value = iterate(one("list", args)?)?;
        pay_for_items(state, &value)?;
        Ok(Value::from(value.try_iter()?.collect::<Vec<_>>()))
    });
    add("items", |_, args| items(args));
    add("default", |_, args| default(args));
    add("d", |_, args| default(args));
    add("int", |_, args| int(args));
    add("float", |_, args| float(args));
    add("round", |_, args| round(args));
    add(operands::ITERATE_FILTER, |_, args| {
        let value = iterate(one("for", args)?)?;
        // A loop over characters knows its length.
        let chars = value.as_str().map(|text| text.chars().map(Value::from).collect::<Vec<_>>());
        Ok(chars.map_or(value, Value::from))
    });
    add(source::SPAN_FILTER, |state, args| {
        Ok(Value::from(format!("{}{}{}", SPAN.0, subject(state, "generation", args)?, SPAN.1)))
    });
    environment.add_filter(operands::TEXT_FILTER, |state: &State, value: Value| match value.as_str() {
        Some(_) => Ok(value),
        None => python::string(state, &value).map(Value::from),
    });
    environment.add_filter("replace", |state: &State, args: Rest<Value>, kwargs: Kwargs| {
        let args = all(args, kwargs);
        let [value, old, new, count] =
            Arguments::new("replace", &args, ["s", "old", "new", "count"])?.values();
        let text = |value: Option<Value>| python::string(state, &value.unwrap_or_default());
        let count = count.filter(|count| !count.is_none());
        let count = usize::try_from(integer("replace", count.as_ref(), -1)?).unwrap_or(usize::MAX);
        strings::replace(state, &text(value)?, &text(old)?, &text(new)?, count)
    });
    environment.add_filter("join", join);
    environment.add_filter(operands::DEPTH_FILTER, |state: &State, value: Value| {
        // A sum of lists is a chain of iterators, slow to walk: a namespace stores the list itself.
        let value = match value.kind() == ValueKind::Iterable && python::is_list(&value) {
            true => {
                state.consume_fuel(value.len().unwrap_or_default() as u64)?;
                Value::from(value.try_iter()?.collect::<Vec<_>>())
            }
            false => value,
        };
        work::pay_for_walk(state, &value)?;
        Ok::<Value, Error>(value)
    });
}

/// Arguments as methods get them: those with names come last, as one value.
pub(super) fn all(args: Rest<Value>, kwargs: Kwargs) -> Vec<Value> {
    let mut args = args.0;
    if kwargs.args().next().is_some() {
        args.push(Value::from(kwargs));
    }
    args
}

/// The only argument.
fn one(filter: &str, args: &[Value]) -> Result<Value, Error> {
    let [value] = Arguments::new(filter, args, ["value"])?.values();
    Ok(value.unwrap_or_default())
}

/// The only argument as text.
fn subject(state: &State, filter: &str, args: &[Value]) -> Result<String, Error> {
    python::string(state, &one(filter, args)?)
}

/// Pays for reading the items of a value.
fn pay_for_items(state: &State, value: &Value) -> Result<(), Error> {
    state.consume_fuel(value.len().unwrap_or_default() as u64)
}

fn join(state: &State, args: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let args = all(args, kwargs);
    let [value, separator, attribute] = Arguments::new("join", &args, ["value", "d", "attribute"])?.values();
    let separator =
        separator.map(|separator| python::string(state, &separator)).transpose()?.unwrap_or_default();
    let attribute = attribute.filter(|attribute| !attribute.is_none());
    let mut joined = String::new();
    for (at, item) in iterate(value.unwrap_or_default())?.try_iter()?.enumerate() {
        let item = match &attribute {
            None => item,
            Some(attribute) => item.get_attr(text("join", Some(attribute))?)?,
        };
        let item = python::string(state, &item)?;
        state.consume_fuel(1 + ((item.len() + separator.len()) / 64) as u64)?;
        joined.push_str(if at > 0 { &separator } else { "" });
        joined.push_str(&item);
    }
    Ok(Value::from(joined))
}

fn trim(state: &State, args: &[Value]) -> Result<Value, Error> {
    let [value, chars] = Arguments::new("trim", args, ["value", "chars"])?.values();
    let string = python::string(state, &value.unwrap_or_default())?;
    let chars = chars.filter(|chars| !chars.is_none());
    let chars = chars.as_ref().map(|chars| text("trim", Some(chars))).transpose()?;
    Ok(Value::from(strings::strip(&string, chars, true, true)))
}

/// Indents all lines but the first, and not those that are empty.
fn indent(state: &State, args: &[Value]) -> Result<Value, Error> {
    let [value, width, first, blank] =
        Arguments::new("indent", args, ["s", "width", "first", "blank"])?.values();
    let value = value.unwrap_or_default();
    let string = text("indent", Some(&value))?;
    let indention = match width.as_ref().and_then(Value::as_str) {
        Some(text) => text.to_owned(),
        None => {
            " ".repeat(usize::try_from(integer("indent", width.as_ref(), 4)?.min(1000)).unwrap_or_default())
        }
    };
    if string
        .contains(['\r', '\u{b}', '\u{c}', '\u{1c}', '\u{1d}', '\u{1e}', '\u{85}', '\u{2028}', '\u{2029}'])
    {
        return Err(refuse("indent: text with line ends other than \\n is not supported"));
    }
    let lines = string.bytes().filter(|&byte| byte == b'\n').count();
    work::pay_for_copy(state, lines.saturating_mul(indention.len()))?;
    let blank = is_true(blank.as_ref(), false);
    let mut out = if is_true(first.as_ref(), false) { indention.clone() } else { String::new() };
    for (at, line) in string.split('\n').enumerate() {
        out.push_str(if at > 0 { "\n" } else { "" });
        out.push_str(if at > 0 && (blank || !line.is_empty()) { &indention } else { "" });
        out.push_str(line);
    }
    Ok(Value::from(out))
}

fn length(args: &[Value]) -> Result<Value, Error> {
    let value = one("length", args)?;
    match value.len().filter(|_| !python::is_opaque(&value)) {
        Some(len) => Ok(Value::from(len)),
        None if value.is_undefined() => Ok(Value::from(0)),
        None => Err(refuse(format!("length of a value without one ({})", value.kind()))),
    }
}

fn items(args: &[Value]) -> Result<Value, Error> {
    let value = one("items", args)?;
    match value.kind() {
        ValueKind::Undefined => Ok(LazyKind::Generator.value(Vec::new())),
        ValueKind::Map if !python::is_opaque(&value) => Ok(LazyKind::Generator.value(data::pairs(&value)?)),
        other => Err(refuse(format!("items of a value that is no dictionary ({other})"))),
    }
}

fn default(args: &[Value]) -> Result<Value, Error> {
    let [value, default, boolean] =
        Arguments::new("default", args, ["value", "default_value", "boolean"])?.values();
    let value = value.unwrap_or_default();
    match value.is_undefined() || is_true(boolean.as_ref(), false) && !value.is_true() {
        true => Ok(default.unwrap_or_else(|| Value::from(""))),
        false => Ok(value),
    }
}

/// The value that a filter converts.
fn defined(filter: &str, value: Option<Value>) -> Result<Value, Error> {
    value
        .filter(|value| !value.is_undefined())
        .ok_or_else(|| refuse(format!("{filter}: the value is undefined")))
}

fn int(args: &[Value]) -> Result<Value, Error> {
    let [value, default] = Arguments::new("int", args, ["value", "default"])?.values();
    let value = defined("int", value)?;
    let default = default.unwrap_or_else(|| Value::from(0));
    if value.kind() == ValueKind::Bool {
        return Ok(Value::from(i64::from(value.is_true())));
    }
    if value.is_integer() {
        return Ok(value);
    }
    let number = match value.as_str() {
        Some(string) => {
            let digits = strings::strip(string, None, true, true);
            match digits.parse::<i64>() {
                Ok(integer) => return Ok(Value::from(integer)),
                Err(_) => read_float(digits)?,
            }
        }
        None => python::as_float(&value),
    };
    match number {
        Some(number) if number.abs() < 9.0e15 => Ok(Value::from(number.trunc() as i64)),
        Some(_) => Err(refuse("int: a number beyond 53 bits is not supported")),
        None => Ok(default),
    }
}

fn float(args: &[Value]) -> Result<Value, Error> {
    let [value, default] = Arguments::new("float", args, ["value", "default"])?.values();
    let value = defined("float", value)?;
    let default = default.unwrap_or_else(|| Value::from(0.0));
    let number = match (value.as_str(), value.kind()) {
        (Some(string), _) => read_float(strings::strip(string, None, true, true))?,
        (_, ValueKind::Bool) => Some(if value.is_true() { 1.0 } else { 0.0 }),
        (_, ValueKind::Number) => f64::try_from(value.clone()).ok(),
        _ => python::as_float(&value),
    };
    Ok(number.map_or(default, Value::from))
}

/// The number that Python's `float` reads, unless it has a form that Rust reads otherwise.
fn read_float(digits: &str) -> Result<Option<f64>, Error> {
    let number: Option<f64> = digits.parse().ok();
    match number {
        Some(number) if !number.is_finite() => Err(refuse("a number that is not finite is not supported")),
        // Python reads digits of all scripts.
        None if digits.contains(|c: char| !c.is_ascii() && c.is_numeric()) => {
            Err(refuse("numbers with digits other than 0 to 9 are not supported"))
        }
        None if digits.contains('_') && digits.contains(|c: char| c.is_ascii_digit()) => {
            Err(refuse("numbers with underscores are not supported"))
        }
        other => Ok(other),
    }
}

fn round(args: &[Value]) -> Result<Value, Error> {
    let [value, precision, method] =
        Arguments::new("round", args, ["value", "precision", "method"])?.values();
    let (value, precision) = (value.unwrap_or_default(), integer("round", precision.as_ref(), 0)?);
    if method.is_some_and(|method| method.as_str() != Some("common")) || !(0..=15).contains(&precision) {
        return Err(refuse("round: only method \"common\" with a precision of 0 to 15 is supported"));
    }
    if value.is_integer() {
        return Ok(value);
    }
    let number = python::as_float(&value).ok_or_else(|| refuse("round: the value is no number"))?;
    let places = usize::try_from(precision).unwrap_or_default();
    let rounded: f64 = format!("{number:.places$}").parse().unwrap_or(number);
    Ok(Value::from(rounded))
}

/// A dictionary of the template with Python's methods, if its keys are text.
pub(super) fn dict_of(dict: Value) -> Result<Value, Error> {
    let keys: Vec<Value> = dict.try_iter()?.collect();
    let mut entries = Vec::new();
    for key in keys {
        match key.as_str() {
            Some(name) => entries.push((name.into(), dict.get_item(&key)?)),
            None => return Ok(dict),
        }
    }
    Ok(data::Dict::from_entries(entries))
}

/// The function `dict`: a dictionary or pairs, and names.
pub(super) fn dict(args: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let mut entries: Vec<(std::sync::Arc<str>, Value)> = Vec::new();
    let mut insert = |name: &str, value: Value| match entries.iter_mut().find(|(other, _)| **other == *name) {
        Some((_, place)) => *place = value,
        None => entries.push((name.into(), value)),
    };
    let given = match &args[..] {
        [] => None,
        [one] => Some(if one.kind() == ValueKind::Map { one.clone() } else { iterate(one.clone())? }),
        _ => return Err(refuse("dict takes one dictionary or list of pairs, and names")),
    };
    for item in given.as_ref().map(Value::try_iter).transpose()?.into_iter().flatten() {
        let (key, value) = match &given {
            Some(map) if map.kind() == ValueKind::Map => (item.clone(), map.get_item(&item)?),
            _ => (item.get_item_by_index(0)?, item.get_item_by_index(1)?),
        };
        insert(text("dict", Some(&key))?, value);
    }
    for name in kwargs.args().map(str::to_owned).collect::<Vec<_>>() {
        insert(&name, kwargs.get::<Value>(&name)?);
    }
    Ok(data::Dict::from_entries(entries))
}

/// Maximum length of a range, as in the sandbox of Jinja2.
const MAX_RANGE: i64 = 100_000;

/// The function `range`.
pub(super) fn range(state: &State, args: Rest<Value>) -> Result<Value, Error> {
    let numbers =
        args.iter().map(|value| integer("range", Some(value), 0)).collect::<Result<Vec<i64>, _>>()?;
    let (start, stop, step) = match numbers[..] {
        [stop] => (0, stop, 1),
        [start, stop] => (start, stop, 1),
        [start, stop, step] if step != 0 => (start, stop, step),
        _ => return Err(refuse("range takes one to three integers, the last not 0")),
    };
    let (from, to, by) = (i128::from(start), i128::from(stop), i128::from(step));
    let distance = if by > 0 { to - from } else { from - to };
    let len = if distance > 0 { (distance - 1) / by.abs() + 1 } else { 0 };
    if len > i128::from(MAX_RANGE) {
        return Err(refuse(format!("range of {len} numbers: at most {MAX_RANGE} are allowed")));
    }
    state.consume_fuel(u64::try_from(len).unwrap_or_default() / 16)?;
    let numbers = (0..len).map(|at| Value::from(i64::try_from(from + at * by).unwrap_or_default()));
    Ok(LazyKind::Range.value(numbers.collect()))
}
