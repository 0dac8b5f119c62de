//! Tokens of the expressions and statements of a Jinja2 template.

/// Token of a tag.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct TemplateToken {
    pub(super) kind: TagKind,
    /// Source of the token.
    pub(super) text: String,
    /// Line of the token, from 1.
    pub(super) line: usize,
}

/// Kind of a token.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum TagKind {
    Space,
    Name,
    Number,
    /// A string, with its value.
    Text(String),
    Operator,
}

impl TemplateToken {
    pub(super) fn is(&self, text: &str) -> bool {
        self.text == text && matches!(self.kind, TagKind::Name | TagKind::Operator)
    }
}

/// Operators of two characters.
const PAIRS: [&str; 6] = ["//", "**", "==", "!=", "<=", ">="];

/// Splits the inside of a tag up to `close` (`}}` or `%}`), with a minus or plus before it if any. Returns
/// the tokens and the bytes read, without `close`.
pub(super) fn tokens(
    source: &str,
    close: &str,
    mut line: usize,
) -> Result<(Vec<TemplateToken>, usize), (usize, String)> {
    let mut found = Vec::new();
    let mut open: Vec<char> = Vec::new();
    let mut at = 0;
    loop {
        let rest = &source[at..];
        let Some(c) = rest.chars().next() else {
            return Err((line, format!("a tag is not closed with `{close}`")));
        };
        let is_end = rest.starts_with(close)
            || rest.strip_prefix(['-', '+']).is_some_and(|rest| rest.starts_with(close));
        if is_end && open.is_empty() {
            return Ok((found, at));
        }
        let (kind, len) = match c {
            c if c.is_whitespace() => {
                (TagKind::Space, rest.len() - rest.trim_start_matches(char::is_whitespace).len())
            }
            '\'' | '"' => {
                let len = string_len(rest, c).ok_or_else(|| (line, "a string is not closed".to_owned()))?;
                (TagKind::Text(unescape(&rest[1..len - 1]).map_err(|problem| (line, problem))?), len)
            }
            c if c.is_alphabetic() || c == '_' => {
                let is_part = |c: char| c.is_alphanumeric() || c == '_';
                (TagKind::Name, rest.find(|c| !is_part(c)).unwrap_or(rest.len()))
            }
            c if c.is_ascii_digit() => (TagKind::Number, number_len(rest)),
            c => {
                match c {
                    '(' | '[' | '{' => open.push(c),
                    ')' | ']' | '}' => {
                        let expected = match c {
                            ')' => '(',
                            ']' => '[',
                            _ => '{',
                        };
                        if open.pop() != Some(expected) {
                            return Err((line, format!("`{c}` without `{expected}`")));
                        }
                    }
                    _ => {}
                }
                let is_pair = PAIRS.iter().any(|pair| rest.starts_with(pair));
                (TagKind::Operator, if is_pair { 2 } else { c.len_utf8() })
            }
        };
        let text = rest[..len].to_owned();
        let lines = text.matches('\n').count();
        found.push(TemplateToken { kind, text, line });
        line += lines;
        at += len;
    }
}

/// Length of a string with its quotes.
fn string_len(rest: &str, quote: char) -> Option<usize> {
    let mut is_escaped = false;
    for (at, c) in rest.char_indices().skip(1) {
        match c {
            c if c == quote && !is_escaped => return Some(at + 1),
            '\\' => is_escaped = !is_escaped,
            _ => is_escaped = false,
        }
    }
    None
}

/// Length of a number: an integer, or a float with digits after the point or an exponent.
fn number_len(rest: &str) -> usize {
    let bytes = rest.as_bytes();
    let digits = |from: usize| {
        bytes[from.min(bytes.len())..].iter().take_while(|b| b.is_ascii_digit() || **b == b'_').count()
    };
    let mut len = digits(0);
    if bytes.get(len) == Some(&b'.') && bytes.get(len + 1).is_some_and(u8::is_ascii_digit) {
        len += 1 + digits(len + 1);
    }
    if matches!(bytes.get(len), Some(b'e' | b'E')) {
        let sign = usize::from(matches!(bytes.get(len + 1), Some(b'+' | b'-')));
        let exponent = digits(len + 1 + sign);
        len += if exponent > 0 { 1 + sign + exponent } else { 0 };
    }
    len
}

/// Value of a string: escapes of Python.
fn unescape(inside: &str) -> Result<String, String> {
    if !inside.contains('\\') {
        return Ok(inside.to_owned());
    }
    let mut value = String::with_capacity(inside.len());
    let mut chars = inside.chars().peekable();
    while let Some(c) = chars.next() {
        if c != '\\' {
            value.push(c);
            continue;
        }
        let Some(escaped) = chars.next() else { break };
        let mut code = |digits: usize| {
            let text: String = chars.by_ref().take(digits).collect();
            let is_hex = text.len() == digits && text.bytes().all(|byte| byte.is_ascii_hexdigit());
            let code = is_hex.then(|| u32::from_str_radix(&text, 16).ok()).flatten();
            code.and_then(char::from_u32)
                .ok_or_else(|| format!("the escape \\{escaped}{text} is no character"))
        };
        match escaped {
            'n' => value.push('\n'),
            't' => value.push('\t'),
            'r' => value.push('\r'),
            'a' => value.push('\u{7}'),
            'b' => value.push('\u{8}'),
            'f' => value.push('\u{c}'),
            'v' => value.push('\u{b}'),
            '\n' => {}
            '\\' | '\'' | '"' => value.push(escaped),
            'x' => value.push(code(2)?),
            'u' => value.push(code(4)?),
            'U' => value.push(code(8)?),
            'N' => return Err("escapes \\N{...} are not supported".to_owned()),
            '0'..='7' => {
                let mut number = escaped.to_digit(8).unwrap_or_default();
                for _ in 0..2 {
                    let Some(digit) = chars.peek().and_then(|c| c.to_digit(8)) else { break };
                    number = number * 8 + digit;
                    chars.next();
                }
                value.extend(char::from_u32(number));
            }
            // Python leaves the backslash before any other character.
            other => value.extend(['\\', other]),
        }
    }
    Ok(value)
}
