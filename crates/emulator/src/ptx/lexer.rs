//! Tokens of PTX text.

use super::SyntaxError;

/// A token; names borrow from the text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Token<'t> {
    /// An opcode, register, label, symbol or directive: letters, digits and `_ $ % .`, and `::` within.
    Name(&'t str),
    /// An integer; negative ones are a minus sign and an integer.
    Integer(u64),
    /// The bits of an f32: `0f3F800000`.
    Single(u32),
    /// The bits of an f64: `0d3FF0000000000000`.
    Double(u64),
    /// The text between quotation marks.
    Text(&'t str),
    /// Any other character.
    Mark(char),
}

/// Splits PTX into tokens with the line of each, counted from 1.
pub(crate) fn tokens(text: &str) -> Result<Vec<(Token<'_>, u32)>, SyntaxError> {
    let bytes = text.as_bytes();
    let (mut found, mut at, mut line) = (Vec::with_capacity(bytes.len() / 4), 0, 1);
    while at < bytes.len() {
        let byte = bytes[at];
        match byte {
            b'\n' => (at, line) = (at + 1, line + 1),
            b' ' | b'\t' | b'\r' | 0 => at += 1,
            b'/' if bytes.get(at + 1) == Some(&b'/') => {
                at += bytes[at..].iter().position(|&b| b == b'\n').unwrap_or(bytes.len() - at);
            }
            b'"' => {
                let length = bytes[at + 1..].iter().position(|&b| b == b'"');
                let length = length.ok_or_else(|| SyntaxError::new(line, "text without an end"))?;
                found.push((Token::Text(&text[at + 1..at + 1 + length]), line));
                at += length + 2;
            }
            b'0'..=b'9' => {
                let length = length_of(&bytes[at..], |b| b.is_ascii_alphanumeric());
                let token = number(&text[at..at + length]);
                found.push((token.ok_or_else(|| SyntaxError::new(line, "a malformed number"))?, line));
                at += length;
            }
            _ if is_name(byte) => {
                let mut length = length_of(&bytes[at..], is_name);
                // A modifier such as `shared::cta` belongs to its opcode; a label ends with a single colon.
                while bytes[at + length..].starts_with(b"::") {
                    length += 2 + length_of(&bytes[at + length + 2..], is_name);
                }
                found.push((Token::Name(&text[at..at + length]), line));
                at += length;
            }
            _ => {
                found.push((Token::Mark(byte.into()), line));
                at += 1;
            }
        }
    }
    Ok(found)
}

fn is_name(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'$' | b'%' | b'.')
}

fn length_of(bytes: &[u8], belongs: impl Fn(u8) -> bool) -> usize {
    bytes.iter().position(|&b| !belongs(b)).unwrap_or(bytes.len())
}

fn number(text: &str) -> Option<Token<'static>> {
    let digits = |prefix| text.strip_prefix(prefix);
    if let Some(bits) = digits("0f").or(digits("0F")) {
        return u32::from_str_radix(bits, 16).ok().map(Token::Single);
    }
    if let Some(bits) = digits("0d").or(digits("0D")) {
        return u64::from_str_radix(bits, 16).ok().map(Token::Double);
    }
    let text = text.strip_suffix('U').unwrap_or(text);
    let value = match text.strip_prefix("0x").or(text.strip_prefix("0X")) {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    };
    value.ok().map(Token::Integer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instruction_is_split_into_its_parts() {
        let text = "L1:\n@!%p1 cp.async.ca.shared::cta.global [%r1+-8], {0f3F800000, 0x1F}; // end";
        let found: Vec<_> = tokens(text).unwrap();
        let names: Vec<_> =
            found.iter().filter_map(|(t, _)| matches!(t, Token::Name(_)).then_some(t)).collect();
        assert_eq!(
            names,
            [
                &Token::Name("L1"),
                &Token::Name("%p1"),
                &Token::Name("cp.async.ca.shared::cta.global"),
                &Token::Name("%r1")
            ]
        );
        assert!(found.contains(&(Token::Single(0x3F80_0000), 2)) && found.contains(&(Token::Integer(31), 2)));
        assert!(tokens("\"open").is_err());
    }
}
