//! Methods of Python's strings, lists and dictionaries.

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, State, Value};

use super::arguments::{Arguments, integer, is_true, iterate, text};
use super::{case, data, python, refuse, strings, work};

/// Calls a method of a value that has no methods of its own.
pub(super) fn call(state: &State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    match (value.as_str(), value.kind()) {
        (Some(string), _) => string_method(state, string, method, args),
        (None, ValueKind::Map) if !python::is_opaque(value) => data::dict_method(value, method, args),
        (None, _) if python::is_list(value) => list_method(state, value, method, args),
        _ => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}

/// Bytes that are split for the work of one instruction.
const SPLIT_BYTES: usize = 8;

fn list_method(state: &State, list: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let items = || {
        work::pay_for_walk(state, list)?;
        list.try_iter()
    };
    match method {
        "count" => {
            let [item] = Arguments::new(method, args, ["value"])?.values();
            item.iter().try_for_each(|item| work::pay_for_walk(state, item))?;
            Ok(Value::from(items()?.filter(|other| Some(other) == item.as_ref()).count()))
        }
        "index" => {
            let [item] = Arguments::new(method, args, ["value"])?.values();
            item.iter().try_for_each(|item| work::pay_for_walk(state, item))?;
            let found = items()?.position(|other| Some(&other) == item.as_ref());
            found.map(Value::from).ok_or_else(|| refuse("index(): the value is not in the list"))
        }
        "copy" => Ok(items()?.collect::<Vec<_>>().into()),
        "append" | "clear" | "extend" | "insert" | "pop" | "remove" | "reverse" | "sort" => {
            Err(refuse(format!("{method}() changes a list, which the sandbox forbids")))
        }
        _ => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}

fn string_method(state: &State, string: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    work::pay_for_text(state, string.len())?;
    args.iter().filter_map(Value::as_str).try_for_each(|text| work::pay_for_text(state, text.len()))?;
    match method {
        "strip" | "lstrip" | "rstrip" => {
            let [chars] = Arguments::new(method, args, ["chars"])?.values();
            let chars = chars.filter(|chars| !chars.is_none());
            let chars = chars.as_ref().map(|chars| text(method, Some(chars))).transpose()?;
            Ok(Value::from(strings::strip(string, chars, method != "rstrip", method != "lstrip")))
        }
        "split" | "rsplit" => {
            let [separator, maxsplit] = Arguments::new(method, args, ["sep", "maxsplit"])?.values();
            let limit = usize::try_from(integer(method, maxsplit.as_ref(), -1)?).unwrap_or(usize::MAX - 1);
            let separator = separator.filter(|separator| !separator.is_none());
            // Parts take more room than the text.
            state.consume_fuel((string.len() / SPLIT_BYTES) as u64)?;
            let parts = match &separator {
                None => split_at_spaces(string, limit, method == "rsplit"),
                Some(separator) => {
                    let separator = text(method, Some(separator))?;
                    if separator.is_empty() {
                        return Err(refuse(format!("{method}: empty separator")));
                    }
                    match method {
                        "split" => string.splitn(limit + 1, separator).map(Value::from).collect(),
                        _ => {
                            let mut parts: Vec<_> =
                                string.rsplitn(limit + 1, separator).map(Value::from).collect();
                            parts.reverse();
                            parts
                        }
                    }
                }
            };
            state.consume_fuel(parts.len() as u64)?;
            Ok(Value::from(parts))
        }
        "splitlines" => {
            let [keep] = Arguments::new(method, args, ["keepends"])?.values();
            Ok(Value::from(split_lines(string, is_true(keep.as_ref(), false))))
        }
        "startswith" | "endswith" => {
            let [affix] = Arguments::new(method, args, ["affix"])?.values();
            let affix = affix.unwrap_or_default();
            let has = |affix: &str| match method {
                "startswith" => string.starts_with(affix),
                _ => string.ends_with(affix),
            };
            if affix.is_tuple() {
                let affixes: Vec<Value> = affix.try_iter()?.collect();
                let texts =
                    affixes.iter().map(|affix| text(method, Some(affix))).collect::<Result<Vec<_>, _>>()?;
                return Ok(Value::from(texts.into_iter().any(has)));
            }
            Ok(Value::from(has(text(method, Some(&affix))?)))
        }
        "replace" => {
            let [old, new, count] = Arguments::new(method, args, ["old", "new", "count"])?.values();
            let (old, new) = (text(method, old.as_ref())?, text(method, new.as_ref())?);
            let count = usize::try_from(integer(method, count.as_ref(), -1)?).unwrap_or(usize::MAX);
            strings::replace(state, string, old, new, count)
        }
        "find" | "rfind" | "index" | "rindex" => {
            let [part] = Arguments::new(method, args, ["part"])?.values();
            let part = text(method, part.as_ref())?;
            let found = if method.starts_with('r') { string.rfind(part) } else { string.find(part) };
            match found {
                Some(at) => Ok(Value::from(string[..at].chars().count())),
                None if method.ends_with("find") => Ok(Value::from(-1)),
                None => Err(refuse(format!("{method}: the part is not in the string"))),
            }
        }
        "count" => {
            let [part] = Arguments::new(method, args, ["part"])?.values();
            Ok(Value::from(string.matches(text(method, part.as_ref())?).count()))
        }
        "partition" | "rpartition" => {
            let [separator] = Arguments::new(method, args, ["sep"])?.values();
            let separator = text(method, separator.as_ref())?;
            if separator.is_empty() {
                return Err(refuse(format!("{method}: empty separator")));
            }
            let parts = match method {
                "partition" => {
                    string.split_once(separator).map_or([string, "", ""], |(a, b)| [a, separator, b])
                }
                _ => string.rsplit_once(separator).map_or(["", "", string], |(a, b)| [a, separator, b]),
            };
            Ok(Value::from(minijinja::value::Tuple::from(parts.map(Value::from))))
        }
        "removeprefix" | "removesuffix" => {
            let [affix] = Arguments::new(method, args, ["affix"])?.values();
            let affix = text(method, affix.as_ref())?;
            let removed = match method {
                "removeprefix" => string.strip_prefix(affix),
                _ => string.strip_suffix(affix),
            };
            Ok(Value::from(removed.unwrap_or(string)))
        }
        "join" => {
            let [items] = Arguments::new(method, args, ["items"])?.values();
            let items = iterate(items.unwrap_or_default())?;
            let texts: Vec<Value> = items.try_iter()?.collect();
            let mut joined = String::new();
            for (at, item) in texts.iter().enumerate() {
                let text = text("join", Some(item))?;
                state.consume_fuel(1 + ((text.len() + string.len()) / 64) as u64)?;
                joined.push_str(if at > 0 { string } else { "" });
                joined.push_str(text);
            }
            Ok(Value::from(joined))
        }
        _ => without_arguments(string, method, args),
    }
}

fn without_arguments(string: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let all = |is: fn(char) -> bool| !string.is_empty() && string.chars().all(is);
    let has = |is: fn(char) -> bool| string.chars().any(is);
    let value = match method {
        "upper" => Value::from(string.to_uppercase()),
        "lower" => Value::from(string.to_lowercase()),
        "capitalize" => Value::from(case::capitalize(string)),
        "title" => Value::from(case::title(string)),
        "swapcase" if string.is_ascii() => {
            let swap = |c: char| {
                if c.is_ascii_uppercase() { c.to_ascii_lowercase() } else { c.to_ascii_uppercase() }
            };
            Value::from(string.chars().map(swap).collect::<String>())
        }
        "isspace" => Value::from(all(python::is_space)),
        "isalpha" if string.is_ascii() => Value::from(all(|c| c.is_ascii_alphabetic())),
        "isalnum" if string.is_ascii() => Value::from(all(|c| c.is_ascii_alphanumeric())),
        "isdigit" | "isnumeric" | "isdecimal" if string.is_ascii() => {
            Value::from(all(|c| c.is_ascii_digit()))
        }
        "isascii" => Value::from(string.is_ascii()),
        "islower" => {
            Value::from(has(char::is_lowercase) && !has(char::is_uppercase) && !has(case::is_titlecase))
        }
        "isupper" => {
            Value::from(has(char::is_uppercase) && !has(char::is_lowercase) && !has(case::is_titlecase))
        }
        "swapcase" | "isalpha" | "isalnum" | "isdigit" | "isnumeric" | "isdecimal" => {
            return Err(refuse(format!("{method}() of text that is not ASCII is not supported")));
        }
        "casefold" | "center" | "encode" | "expandtabs" | "format" | "format_map" | "isidentifier"
        | "isprintable" | "istitle" | "ljust" | "rjust" | "translate" | "zfill" => {
            return Err(refuse(format!("the method {method}() of strings is not supported")));
        }
        _ => return Err(Error::from(ErrorKind::UnknownMethod)),
    };
    Arguments::new(method, args, [])?;
    Ok(value)
}

/// `str.split` and `str.rsplit` without a separator: at most `limit` splits. White space at the far end of
/// the rest stays, as in Python.
fn split_at_spaces(string: &str, limit: usize, from_end: bool) -> Vec<Value> {
    let mut parts = Vec::new();
    let mut rest = strings::strip(string, None, !from_end, from_end);
    while !rest.is_empty() {
        let at = if from_end { rest.rfind(python::is_space) } else { rest.find(python::is_space) };
        let Some(at) = at.filter(|_| parts.len() < limit) else {
            parts.push(Value::from(rest));
            break;
        };
        if from_end {
            let after = at + rest[at..].chars().next().map_or(1, char::len_utf8);
            parts.push(Value::from(&rest[after..]));
            rest = strings::strip(&rest[..at], None, false, true);
        } else {
            parts.push(Value::from(&rest[..at]));
            rest = strings::strip(&rest[at..], None, true, false);
        }
    }
    if from_end {
        parts.reverse();
    }
    parts
}

/// `str.splitlines`.
fn split_lines(string: &str, keep_ends: bool) -> Vec<Value> {
    const ENDS: [char; 10] =
        ['\n', '\r', '\u{b}', '\u{c}', '\u{1c}', '\u{1d}', '\u{1e}', '\u{85}', '\u{2028}', '\u{2029}'];
    let mut lines = Vec::new();
    let mut rest = string;
    while let Some(at) = rest.find(ENDS) {
        let len = if rest[at..].starts_with("\r\n") {
            2
        } else {
            rest[at..].chars().next().map_or(1, char::len_utf8)
        };
        lines.push(Value::from(&rest[..if keep_ends { at + len } else { at }]));
        rest = &rest[at + len..];
    }
    if !rest.is_empty() {
        lines.push(Value::from(rest));
    }
    lines
}
