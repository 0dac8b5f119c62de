//! JSON as Python's `json` reads it, as far as numbers go: `-0` is the integer 0, and an integer beyond 64
//! bits is refused, because `serde_json` reads it as a float.

use serde_json::{Map, Value};

use super::kind;
use crate::error::ChatError;

/// Parses an object.
pub(super) fn parse(line: &str) -> Result<Map<String, Value>, ChatError> {
    match parse_value(line)? {
        Value::Object(row) => Ok(row),
        other => Err(ChatError::new(
            format!("the row is {}, not an object", kind(Some(&other))),
            "each row is an object, such as {\"messages\": [...]}",
        )),
    }
}

/// Parses any value.
pub(super) fn parse_value(text: &str) -> Result<Value, ChatError> {
    let advice = "write it with a JSON library; NaN, Infinity and halves of surrogate pairs are no JSON";
    let parse = |text: &str| {
        serde_json::from_str::<Value>(text)
            .map_err(|error| ChatError::new(format!("invalid JSON ({error})"), advice))
    };
    let value = parse(text)?;
    let numbers = integers(text);
    if let Some(digits) = numbers.iter().map(|&(_, digits)| digits).find(|digits| !fits(digits)) {
        return Err(ChatError::new(
            format!("the integer {} does not fit into 64 bits", crate::error::shown(digits)),
            "write it as a string",
        ));
    }
    let negative_zeros: Vec<usize> =
        numbers.iter().filter(|(_, digits)| *digits == "-0").map(|n| n.0).collect();
    if negative_zeros.is_empty() {
        return Ok(value);
    }
    let mut bytes = text.as_bytes().to_vec();
    negative_zeros.into_iter().for_each(|at| bytes[at] = b' ');
    parse(&String::from_utf8_lossy(&bytes))
}

fn fits(digits: &str) -> bool {
    digits.len() < 18 || digits.parse::<i64>().is_ok() || digits.parse::<u64>().is_ok()
}

/// Integers outside strings of valid JSON: byte offset and digits.
fn integers(text: &str) -> Vec<(usize, &str)> {
    let bytes = text.as_bytes();
    let (mut found, mut at) = (Vec::new(), 0);
    while let Some(&byte) = bytes.get(at) {
        match byte {
            b'"' => {
                at += 1;
                while let Some(&inside) = bytes.get(at) {
                    match inside {
                        b'"' => break,
                        b'\\' => at += 2,
                        _ => at += 1,
                    }
                }
                at += 1;
            }
            b'-' | b'0'..=b'9' => {
                let is_part = |byte: &u8| byte.is_ascii_digit() || b"+-.eE".contains(byte);
                let len = bytes[at..].iter().take_while(|byte| is_part(byte)).count();
                let digits = &text[at..at + len];
                if !digits.contains(['.', 'e', 'E']) {
                    found.push((at, digits));
                }
                at += len;
            }
            _ => at += 1,
        }
    }
    found
}
