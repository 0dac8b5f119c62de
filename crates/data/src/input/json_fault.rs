//! Explains why a line is not a JSON object: what stands at the place of the fault, and how to repair it.

use serde_json::error::Category;
use serde_json::{Error, Value};

/// A fault in a line.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) problem: String,
    pub(crate) advice: &'static str,
}

pub(super) const REPAIR: &str = "fix or remove the line (one JSON object per line, UTF-8)";
const ARRAY: &str = "write one object per line: jq -c '.[]' FILE > NEW.jsonl";
const SEVERAL_LINES: &str = "write each object in one line: jq -c . FILE > NEW.jsonl";
const PYTHON: &str = "it looks like Python's repr; write lines with json.dumps";
const CSV: &str = "it looks like CSV; write one JSON object per line, for example with pandas: \
                   pd.read_csv(FILE).to_json(NEW, orient=\"records\", lines=True)";
const NULS: &str =
    "a crash while a file is written leaves such bytes; remove them (tr -d '\\000' < FILE > NEW.jsonl)";
pub(super) const LATIN: &str =
    "convert the file to UTF-8 (iconv -f LATIN1 -t UTF-8), or fix or remove the line";

/// The fault of `line`, whose parser returned `error`.
pub(crate) fn explain(line: &[u8], error: &Error) -> Fault {
    let text = match std::str::from_utf8(line) {
        Ok(text) => text,
        Err(error) => {
            let (valid, rest) = line.split_at(error.valid_up_to());
            let column = String::from_utf8_lossy(valid).chars().count() + 1;
            let byte = rest.first().copied().unwrap_or_default();
            let problem = format!("broken JSON at column {column}: 0x{byte:02X} is not valid UTF-8");
            return Fault { problem, advice: LATIN };
        }
    };
    let start = text.trim_start();
    if let Some(fault) = not_an_object(start) {
        return fault;
    }
    // The parser counts bytes, from 1, and at the end of the line 0 or the length.
    let is_at_end = error.classify() == Category::Eof;
    let at = match is_at_end {
        true => text.trim_end().len(),
        // An element of an array may have several lines.
        false => {
            let lines = text.split_inclusive('\n').take(error.line().saturating_sub(1));
            (lines.map(str::len).sum::<usize>() + error.column().saturating_sub(1)).min(text.len())
        }
    };
    let at = text.floor_char_boundary(at);
    let line_start = text[..at].rfind('\n').map_or(0, |end| end + 1);
    let column = text[line_start..at].chars().count() + 1;
    let reason = error.to_string();
    let reason = reason.rsplit_once(" at line ").map_or(reason.as_str(), |(reason, _)| reason);
    let found =
        if is_at_end { "the line ends".to_owned() } else { format!("there is {}", shown(&text[at..])) };
    let rest = &text[at..];
    let is_pythons =
        rest.starts_with('\'') || ["None", "True", "False"].iter().any(|word| rest.starts_with(word));
    let advice = match () {
        () if is_at_end && start.trim_end().ends_with(['{', '[', ',']) => SEVERAL_LINES,
        () if is_at_end => {
            "the line was cut off, or has a line break within; fix or remove it (one JSON object per line)"
        }
        () if is_pythons => PYTHON,
        () if rest.starts_with('\0') => NULS,
        () => REPAIR,
    };
    Fault { problem: format!("broken JSON at column {column}: {reason}; {found}"), advice }
}

/// The fault of a line that does not begin as an object.
fn not_an_object(start: &str) -> Option<Fault> {
    let fault = |problem: String, advice| Some(Fault { problem, advice });
    let value = || serde_json::from_str::<Value>(start);
    let first = start.chars().next()?;
    match first {
        '{' => None,
        '[' => fault("broken JSON: the line is or begins an array, not an object".into(), ARRAY),
        '\0' => {
            let nuls = start.chars().take_while(|&c| c == '\0').count();
            let bytes = if nuls == 1 { "NUL byte" } else { "NUL bytes" };
            fault(format!("broken JSON at column 1: there are {nuls} {bytes} (U+0000)"), NULS)
        }
        // The rest of an object of several lines, or of an array of them.
        '}' | ']' => fault(format!("broken JSON at column 1: there is {}", shown(start)), SEVERAL_LINES),
        _ => {
            if let Ok(value) = value() {
                let kind = match value {
                    Value::String(_) if start.contains("\":") => return None,
                    Value::String(_) => "a string",
                    Value::Number(_) => "a number",
                    _ => "a word",
                };
                return fault(format!("broken JSON: the line is {kind}, not an object"), REPAIR);
            }
            let advice = match start {
                _ if start.trim_end().trim_end_matches(',').starts_with('"') && start.contains("\":") => {
                    SEVERAL_LINES
                }
                _ if start.contains([',', '\t', ';']) => CSV,
                _ => REPAIR,
            };
            fault(format!("broken JSON at column 1: there is {}, not an object", shown(start)), advice)
        }
    }
}

/// The word or character that `text` begins with.
fn shown(text: &str) -> String {
    const LONGEST: usize = 20;
    let is_word = |c: &char| c.is_ascii_alphanumeric() || "_+-.".contains(*c);
    let word: String = text.chars().take_while(is_word).take(LONGEST).collect();
    match text.chars().next() {
        _ if !word.is_empty() => format!("`{word}`"),
        None => "the end of the line".to_owned(),
        Some('\0') => "a NUL byte (U+0000)".to_owned(),
        Some(c) if c.is_ascii_graphic() => format!("`{c}`"),
        Some(c) if c.is_alphanumeric() || "“”„‘’«»".contains(c) => {
            format!("`{c}` (U+{:04X})", u32::from(c))
        }
        Some(c) => format!("U+{:04X}", u32::from(c)),
    }
}

/// Replaces halves of surrogate pairs in escapes, which are no characters, by another character. Whole pairs
/// too: only the keys of the row are read.
pub(crate) fn replace_surrogates(line: &mut [u8]) {
    let mut at = 0;
    while let Some(escape) = line.get_mut(at..) {
        let Some(found) = escape.iter().position(|&byte| byte == b'\\') else { break };
        if let [_, b'u', b'd' | b'D', b'8'..=b'9' | b'a'..=b'f' | b'A'..=b'F', ..] = &escape[found..] {
            escape[found + 2..][..2].copy_from_slice(b"ff");
        }
        at += found + 2;
    }
}

/// Replaces `NaN`, `Infinity` and `-Infinity`, as Python's json writes them, by numbers of the same length;
/// true if there are any.
pub(crate) fn replace_non_numbers(line: &mut [u8]) -> bool {
    const WORDS: [(&[u8], &[u8]); 3] =
        [(b"NaN", b"0.0"), (b"Infinity", b"0.000000"), (b"-Infinity", b"-0.000000")];
    let (mut is_in_string, mut is_replaced, mut at) = (false, false, 0);
    while let Some(&byte) = line.get(at) {
        match byte {
            b'"' => is_in_string = !is_in_string,
            b'\\' if is_in_string => at += 1,
            _ if is_in_string => {}
            b'N' | b'I' | b'-' => {
                let ends = |end: usize| {
                    line.get(end).is_none_or(|byte| !byte.is_ascii_alphanumeric() && *byte != b'_')
                };
                let found =
                    WORDS.iter().find(|(word, _)| line[at..].starts_with(word) && ends(at + word.len()));
                if let Some((word, number)) = found {
                    line[at..at + word.len()].copy_from_slice(number);
                    is_replaced = true;
                    at += word.len() - 1;
                }
            }
            _ => {}
        }
        at += 1;
    }
    is_replaced
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(line: &[u8]) -> Fault {
        explain(line, &serde_json::from_slice::<serde_json::Map<String, Value>>(line).unwrap_err())
    }

    #[test]
    fn a_fault_says_what_stands_there() {
        for (line, problem, advice) in [
            (&b"{\"a\": 1, \"text\": None}\n"[..], "column 18: expected value; there is `None`", PYTHON),
            (b"{'text': 'a'}", "column 2: key must be a string; there is `'`", PYTHON),
            (b"{text: 1}", "column 2: key must be a string; there is `text`", REPAIR),
            ("{\"tä\": undefined}".as_bytes(), "column 8: expected value; there is `undefined`", REPAIR),
            (b"{\"text\": \"caf\xE9\"}", "column 14: 0xE9 is not valid UTF-8", LATIN),
            (b"{\"text\": \"a\0\"}", "; there is a NUL byte (U+0000)", NULS),
            (b"\0\0\0\n", "there are 3 NUL bytes (U+0000)", NULS),
            (b"{\"text\": \"a\"}\0\0", "column 14: trailing characters; there is a NUL byte (U+0000)", NULS),
            (b"{\"text\": \"a\tb\"}", "; there is U+0009", REPAIR),
            ("{“text”: 1}".as_bytes(), "there is `“` (U+201C)", REPAIR),
            ("\u{FEFF}{\"text\": 1}".as_bytes(), "column 1: there is U+FEFF", REPAIR),
            (b"{\"text\": \"a\"} {\"text\": \"b\"}", "column 15: trailing characters; there is `{`", REPAIR),
            (b"{\"text\": \"a\",}", "column 14: trailing comma; there is `}`", REPAIR),
            (b"{\n", "column 2: EOF while parsing an object; the line ends", SEVERAL_LINES),
            (b"  \"text\": \"a\",\n", "column 1: there is `\"`, not an object", SEVERAL_LINES),
            (b"}\n", "there is `}`", SEVERAL_LINES),
            (b"[\n", "an array", ARRAY),
            (b"[{\"text\": \"a\"}]", "an array", ARRAY),
            (b"id,text\n", "column 1: there is `id`, not an object", CSV),
            (b"\"id\",\"text\"\n", "there is `\"`, not an object", CSV),
            (b"\"text\"", "the line is a string, not an object", REPAIR),
            (b"null", "the line is a word, not an object", REPAIR),
            (b"12", "the line is a number, not an object", REPAIR),
        ] {
            let fault = of(line);
            let shown = String::from_utf8_lossy(line);
            assert!(fault.problem.contains(problem), "{shown}: {}", fault.problem);
            assert_eq!(fault.advice, advice, "{shown}");
        }
        assert!(of(b"{\"text\": \"cut o").advice.starts_with("the line was cut off"));
    }

    #[test]
    fn numbers_that_json_lacks_are_replaced_outside_strings() {
        for (line, replaced) in [
            (
                &b"{\"a\": NaN, \"b\": [-Infinity,Infinity]}"[..],
                &b"{\"a\": 0.0, \"b\": [-0.000000,0.000000]}"[..],
            ),
            (b"{\"NaN\": \"NaN \\\" NaN\"}", b"{\"NaN\": \"NaN \\\" NaN\"}"),
            (b"{\"a\": NaNs, \"b\": -1}", b"{\"a\": NaNs, \"b\": -1}"),
            (b"{\"a\": \"NaN", b"{\"a\": \"NaN"),
            (b"{\"a\": \"\\", b"{\"a\": \"\\"),
        ] {
            let mut changed = line.to_vec();
            assert_eq!(replace_non_numbers(&mut changed), line != replaced);
            assert_eq!(changed, replaced);
        }
    }
}
