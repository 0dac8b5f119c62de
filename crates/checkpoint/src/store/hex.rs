//! Serialization of hashes as sixteen hexadecimal digits, because many readers lose bits of JSON numbers.

use std::fmt;

use serde::de::{Deserializer, Error, Visitor};
use serde::ser::Serializer;

pub(super) fn serialize<S: Serializer>(hash: &u64, out: S) -> Result<S::Ok, S::Error> {
    let mut digits = [0; 16];
    for (place, digit) in digits.iter_mut().enumerate() {
        *digit = b"0123456789abcdef"[(hash >> (60 - 4 * place) & 15) as usize];
    }
    out.serialize_str(std::str::from_utf8(&digits).unwrap_or_default())
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(parser: D) -> Result<u64, D::Error> {
    parser.deserialize_str(Digits)
}

/// Without a copy of the text: a manifest may hold a million hashes.
struct Digits;

impl Visitor<'_> for Digits {
    type Value = u64;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("sixteen hexadecimal digits")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<u64, E> {
        let is_digit = |c: u8| matches!(c, b'0'..=b'9' | b'a'..=b'f');
        match u64::from_str_radix(text, 16) {
            Ok(hash) if text.len() == 16 && text.bytes().all(is_digit) => Ok(hash),
            _ => Err(E::custom("not sixteen hexadecimal digits")),
        }
    }
}
