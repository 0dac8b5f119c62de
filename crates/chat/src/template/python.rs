//! `str` and `repr` of Python, and Python's white space.

use std::cmp::Ordering;
use std::fmt;
use std::sync::Arc;

use minijinja::value::{DynObject, Enumerator, Object, ObjectRepr, ValueKind};
use minijinja::{Error, State, Value};

use super::work::{self, MAX_DEPTH};
use super::{lazy, refuse};

/// A float that prints with an exponent.
#[derive(Debug)]
pub(super) struct Float(pub(super) f64);

impl Object for Float {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn is_true(self: &Arc<Self>) -> bool {
        self.0 != 0.0
    }

    fn custom_cmp(self: &Arc<Self>, other: &DynObject) -> Option<Ordering> {
        other.downcast_ref::<Self>().map(|other| self.0.total_cmp(&other.0))
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&float(self.0))
    }
}

/// A group of items: a pair whose parts have names.
#[derive(Debug)]
pub(super) struct ItemGroup {
    pub(super) grouper: Value,
    pub(super) items: Vec<Value>,
}

impl Object for ItemGroup {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        match (key.as_str(), key.as_i64()) {
            (Some("grouper"), _) | (_, Some(0 | -2)) => Some(self.grouper.clone()),
            (Some("list"), _) | (_, Some(1 | -1)) => Some(self.items.clone().into()),
            _ => None,
        }
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(2)
    }
}

/// `str(value)`. Undefined is empty, as in Jinja2.
///
/// # Errors
/// A value whose text depends on its address in memory; values nested too deeply; more text than `state` has
/// fuel for.
pub(super) fn string(state: &State, value: &Value) -> Result<String, Error> {
    match value.as_str() {
        Some(text) => {
            work::pay_for_copy(state, text.len())?;
            Ok(text.to_owned())
        }
        None if value.is_undefined() => Ok(String::new()),
        None => printed(value, &mut |bytes| work::pay_for_text(state, bytes)),
    }
}

/// Maximum size of a text that no fuel pays for.
const MAX_UNPAID_BYTES: usize = 1 << 20;

/// `repr(value)`, where no state pays for it.
///
/// # Errors
/// Those of [`string`]; more than a MiB.
pub(super) fn repr(value: &Value) -> Result<String, Error> {
    let mut left = MAX_UNPAID_BYTES;
    printed(value, &mut |bytes| {
        left = left.checked_sub(1 + bytes).ok_or_else(|| refuse("a value is too long to be printed"))?;
        Ok(())
    })
}

fn printed(value: &Value, pay: &mut dyn FnMut(usize) -> Result<(), Error>) -> Result<String, Error> {
    let mut text = String::new();
    write(value, &mut text, 0, pay)?;
    Ok(text)
}

fn write(
    value: &Value,
    out: &mut String,
    depth: usize,
    pay: &mut dyn FnMut(usize) -> Result<(), Error>,
) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return Err(refuse("values are nested too deeply to be printed"));
    }
    pay(value.as_str().map_or(0, str::len))?;
    if let Some(text) = value.as_str() {
        quote(text, out);
        return Ok(());
    }
    if let Some(number) = as_float(value) {
        out.push_str(&float(number));
        return Ok(());
    }
    match value.kind() {
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => out.push_str(&value.to_string()),
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::Map if !is_opaque(value) => {
            out.push('{');
            for (at, key) in value.try_iter()?.enumerate() {
                out.push_str(if at > 0 { ", " } else { "" });
                write(&key, out, depth + 1, pay)?;
                out.push_str(": ");
                write(&value.get_item(&key)?, out, depth + 1, pay)?;
            }
            out.push('}');
        }
        _ if is_list(value) => {
            let is_tuple = value.is_tuple() || value.downcast_object_ref::<ItemGroup>().is_some();
            let (open, close) = if is_tuple { ('(', ')') } else { ('[', ']') };
            out.push(open);
            let mut len = 0;
            for item in value.try_iter()? {
                out.push_str(if len > 0 { ", " } else { "" });
                write(&item, out, depth + 1, pay)?;
                len += 1;
            }
            out.push_str(if is_tuple && len == 1 { "," } else { "" });
            out.push(close);
        }
        _ if lazy::is_lazy(value) => return Err(refuse("an iterator is printed: add `|list` to it")),
        // Macros, namespaces and methods print their addresses.
        _ => return Err(refuse("a value that is no text, number, list or dictionary is printed")),
    }
    Ok(())
}

/// True for what `minijinja` takes for a dictionary and Python does not: namespaces, macros and loops.
pub(super) fn is_opaque(value: &Value) -> bool {
    const TYPES: [&str; 3] = ["::Namespace", "::Macro", "::Loop"];
    let name = value.as_object().map_or("", |object| object.type_name());
    TYPES.iter().any(|kind| name.ends_with(kind))
}

/// True for lists, tuples and slices of them, but not for generators, which have no length.
pub(super) fn is_list(value: &Value) -> bool {
    match value.kind() {
        ValueKind::Seq => true,
        ValueKind::Iterable => value.len().is_some(),
        _ => false,
    }
}

/// The number, if the value is a float.
pub(super) fn as_float(value: &Value) -> Option<f64> {
    if let Some(Float(number)) = value.downcast_object_ref() {
        return Some(*number);
    }
    let is_float = value.kind() == ValueKind::Number && !value.is_integer();
    if is_float { f64::try_from(value.clone()).ok() } else { None }
}

/// `repr` of a float: the shortest digits that read back, with an exponent outside 1e-4 to 1e16.
pub(super) fn float(number: f64) -> String {
    if number.is_nan() {
        return "nan".to_owned();
    }
    if number.is_infinite() {
        return if number > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or_default();
    match (-4..16).contains(&exponent) {
        true => format!("{number:?}"),
        false => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", exponent.abs())
        }
    }
}

/// `repr` of a string.
fn quote(text: &str, out: &mut String) {
    let mark = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(mark);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == mark => out.extend(['\\', c]),
            c if is_printable(c) => out.push(c),
            c => match u32::from(c) {
                code @ ..0x100 => out.push_str(&format!("\\x{code:02x}")),
                code @ ..0x1_0000 => out.push_str(&format!("\\u{code:04x}")),
                code => out.push_str(&format!("\\U{code:08x}")),
            },
        }
    }
    out.push(mark);
}

fn is_printable(c: char) -> bool {
    if c.is_ascii() {
        return !c.is_ascii_control();
    }
    // A letter before it keeps a combining mark as it is.
    let mut text = [b'a'; 5];
    let len = 1 + c.encode_utf8(&mut text[1..]).len();
    str::from_utf8(&text[..len]).is_ok_and(|text| !text.escape_debug().any(|escaped| escaped == '\\'))
}

/// True for Python's white space: that of Unicode and U+001C to U+001F.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}
