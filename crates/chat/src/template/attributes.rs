//! Attributes and positions that a template looks up in a value that has them in Python, but not here:
//! methods that are not called, such as `x.strip`, attributes of numbers, and positions that are floats.

use minijinja::value::ValueKind;
use minijinja::{Environment, Value};

use super::operands::{Placed, is_operand};
use super::scan::{TagKind, TemplateToken};
use super::{lazy, python, refuse};

/// Filter that looks up an attribute.
const ATTRIBUTE_FILTER: &str = "xtrain_attribute";
/// Filter that refuses a float as a position.
const POSITION_FILTER: &str = "xtrain_position";

const OF_STRINGS: [&str; 47] = [
    "capitalize",
    "casefold",
    "center",
    "count",
    "encode",
    "endswith",
    "expandtabs",
    "find",
    "format",
    "format_map",
    "index",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "isidentifier",
    "islower",
    "isnumeric",
    "isprintable",
    "isspace",
    "istitle",
    "isupper",
    "join",
    "ljust",
    "lower",
    "lstrip",
    "maketrans",
    "partition",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rindex",
    "rjust",
    "rpartition",
    "rsplit",
    "rstrip",
    "split",
    "splitlines",
    "startswith",
    "strip",
    "swapcase",
    "title",
    "translate",
    "upper",
    "zfill",
];
const OF_LISTS: [&str; 11] =
    ["append", "clear", "copy", "count", "extend", "index", "insert", "pop", "remove", "reverse", "sort"];
const OF_NUMBERS: [&str; 13] = [
    "as_integer_ratio",
    "bit_count",
    "bit_length",
    "conjugate",
    "denominator",
    "from_bytes",
    "fromhex",
    "hex",
    "imag",
    "is_integer",
    "numerator",
    "real",
    "to_bytes",
];

/// Adds the filters.
pub(super) fn add(environment: &mut Environment<'static>) {
    environment.add_filter(ATTRIBUTE_FILTER, |value: Value, name: &str| {
        let known: &[&str] = match value.kind() {
            ValueKind::String => &OF_STRINGS,
            ValueKind::Number | ValueKind::Bool => &OF_NUMBERS,
            _ if python::as_float(&value).is_some() => &OF_NUMBERS,
            _ if python::is_list(&value) || lazy::is_lazy(&value) => &OF_LISTS,
            _ => &[],
        };
        match known.contains(&name) {
            true => Err(refuse(format!("the attribute {name} of a {} is not supported", value.kind()))),
            false => value.get_attr(name),
        }
    });
    environment.add_filter(POSITION_FILTER, |position: Value| match python::as_float(&position) {
        Some(_) => Err(refuse("a position is a float, at which Python finds nothing: use // or `|int`")),
        None => Ok(position),
    });
}

/// Passes values whose attributes are looked up through a filter, if other values than dictionaries have
/// attributes of that name.
pub(super) fn pass(tokens: &Placed, statement: Option<&str>, out: &mut [String]) {
    let is = |at: usize, text: &str| tokens.get(at).is_some_and(|(token, _)| token.is(text));
    // Targets of an assignment are looked up nowhere.
    let targets = (statement == Some("set")).then(|| tokens.iter().position(|(token, _)| token.is("=")));
    let from = targets.flatten().unwrap_or_default();
    for at in from + 1..tokens.len() {
        let is_subscript = is(at, "[") && is(at + 2, "]") && is_operand(&tokens[at - 1].0);
        let name = match tokens.get(at + 1).map(|(token, _)| (&token.kind, token.text.as_str())) {
            Some((TagKind::Text(name), _)) if is_subscript => name.as_str(),
            Some((TagKind::Name, name)) if is(at, ".") && !is(at + 2, "(") && !is(at - 1, "loop") => name,
            _ => continue,
        };
        let is_known = [&OF_STRINGS[..], &OF_LISTS, &OF_NUMBERS].iter().any(|names| names.contains(&name));
        if !is_known || super::data::DICT_METHODS.contains(&name) {
            continue;
        }
        out[tokens[first_of(tokens, at - 1)].1].insert(0, '(');
        out[tokens[at].1] = String::new();
        out[tokens[at + 1].1] = format!("|{ATTRIBUTE_FILTER}(\"{name}\"))");
        if is_subscript {
            out[tokens[at + 2].1] = String::new();
        }
    }
}

/// Passes positions that may be floats through a filter.
pub(super) fn pass_positions(tokens: &Placed, out: &mut [String]) {
    let mut open: Vec<Option<usize>> = Vec::new();
    // True for each open bracket with a comma or colon in it.
    let mut is_list: Vec<bool> = Vec::new();
    for (at, (token, _)) in tokens.iter().enumerate() {
        match token.text.as_str() {
            _ if token.kind != TagKind::Operator => {}
            "(" | "[" | "{" => {
                let is_subscript = token.is("[") && at > 0 && is_operand(&tokens[at - 1].0);
                open.push(is_subscript.then_some(at + 1));
                is_list.push(false);
            }
            "," | ":" => is_list.iter_mut().last().into_iter().for_each(|is_list| *is_list = true),
            ")" | "]" | "}" => {
                let (first, is_list) = (open.pop().flatten(), is_list.pop().unwrap_or_default());
                let Some(first) = first.filter(|&first| !is_list && first < at) else { continue };
                let is_sure = |(token, _): &(TemplateToken, usize)| match token.kind {
                    TagKind::Text(_) => at - first == 1,
                    TagKind::Number => !token.text.contains(['.', 'e', 'E']),
                    _ => token.is("-") && at - first == 2,
                };
                if !tokens[first..at].iter().all(is_sure) {
                    out[tokens[first].1].insert(0, '(');
                    out[tokens[at - 1].1].push_str(&format!(")|{POSITION_FILTER}"));
                }
            }
            _ => {}
        }
    }
}

/// The first token of the value that ends with the token at `at`.
fn first_of(tokens: &Placed, mut at: usize) -> usize {
    let is = |at: usize, text: &str| tokens[at].0.is(text);
    loop {
        let token = &tokens[at].0;
        if [")", "]", "}"].iter().any(|close| token.is(close)) {
            let mut depth = 0_usize;
            let opens = (0..=at).rev().find(|&at| {
                let token = &tokens[at].0;
                depth += usize::from([")", "]", "}"].iter().any(|close| token.is(close)));
                let is_open = ["(", "[", "{"].iter().any(|open| token.is(open));
                depth -= usize::from(is_open && depth > 0);
                is_open && depth == 0
            });
            let Some(open) = opens else { return at };
            match open > 0 && !is(open, "{") && is_operand(&tokens[open - 1].0) {
                true => at = open - 1,
                false => return open,
            }
        } else if at >= 2 && is(at - 1, ".") {
            at -= 2;
        } else if at >= 1
            && matches!((&token.kind, &tokens[at - 1].0.kind), (TagKind::Text(_), TagKind::Text(_)))
        {
            at -= 1;
        } else {
            return at;
        }
    }
}
