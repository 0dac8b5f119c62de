//! Text that a terminal may show: characters with which it would be controlled are escaped.
//!
//! A name may come from anyone (a file, a folder, a source of a mixture, a configuration), and a model
//! generates any token. C0 and C1 controls move the cursor, change colours and titles, and reprogram keys;
//! the controls of bidirectional text reorder a line. A backslash is left unchanged, so escaped text is
//! escaped only once.

use std::borrow::Cow;
use std::fmt::Write;

/// `text` on one line, with all that cannot be seen in it escaped, so that two names that differ look
/// different. Line breaks, tabs and characters without width are among these.
pub fn name(text: &str) -> Cow<'_, str> {
    escaped(text, |c| c.is_control() || is_separator(c) || reorders(c) || is_invisible(c), rust)
}

/// Text of several lines: its line breaks and tabs stay, and so do characters without width, which many
/// scripts need.
pub fn text(text: &str) -> Cow<'_, str> {
    escaped(text, |c| c.is_control() && c != '\n' && c != '\t' || reorders(c), rust)
}

/// JSON with the same values, in which what [`name`] escapes is escaped as JSON does.
pub fn json(text: &str) -> Cow<'_, str> {
    escaped(text, |c| c.is_control() && c != '\n' || is_separator(c) || reorders(c) || is_invisible(c), utf16)
}

fn escaped(text: &str, is_bad: impl Fn(char) -> bool, escape: fn(char, &mut String)) -> Cow<'_, str> {
    if !text.contains(&is_bad) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_bad(c) { escape(c, &mut out) } else { out.push(c) }
    }
    Cow::Owned(out)
}

/// As Rust writes it: `\n`, `\u{1b}`.
fn rust(c: char, out: &mut String) {
    out.extend(c.escape_default());
}

/// As JSON writes it: `\u001b`, in two parts beyond U+FFFF.
fn utf16(c: char, out: &mut String) {
    for unit in c.encode_utf16(&mut [0; 2]) {
        let _ = write!(out, "\\u{unit:04x}");
    }
}

/// Line and paragraph separator, at which some terminals and editors break a line.
fn is_separator(c: char) -> bool {
    matches!(c, '\u{2028}' | '\u{2029}')
}

/// Embeddings, overrides and isolates of bidirectional text.
fn reorders(c: char) -> bool {
    matches!(c, '\u{202A}'..='\u{202E}' | '\u{2066}'..='\u{2069}')
}

/// Characters without width: marks, joiners, tags, byte order marks.
fn is_invisible(c: char) -> bool {
    matches!(
        c,
        '\u{AD}' | '\u{61C}' | '\u{180E}' | '\u{200B}'..='\u{200F}' | '\u{2060}'..='\u{2065}'
            | '\u{206A}'..='\u{206F}' | '\u{FEFF}' | '\u{FFF9}'..='\u{FFFB}' | '\u{E0000}'..='\u{E007F}'
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_one_line_without_anything_that_moves_or_hides() {
        let bad = "a\u{1b}[31m\u{7}\u{0}\r\n\t\u{7f}\u{9b}2J\u{202e}\u{2069}\u{200b}\u{200d}\u{feff}\u{2028}\u{e0041}é\\";
        let shown = name(bad);
        assert_eq!(
            shown,
            "a\\u{1b}[31m\\u{7}\\u{0}\\r\\n\\t\\u{7f}\\u{9b}2J\\u{202e}\\u{2069}\\u{200b}\\u{200d}\\u{feff}\\u{2028}\\u{e0041}é\\"
        );
        assert_eq!(name(&shown), shown, "once");
        assert_eq!(name("runs/größe 日本.txt"), "runs/größe 日本.txt");
    }

    #[test]
    fn text_keeps_its_lines_and_its_scripts() {
        let family = "a\tb\n\u{1F469}\u{200d}\u{1F467} می\u{200c}خواهم";
        assert_eq!(text(family), family);
        assert_eq!(text("\u{1b}]0;x\u{7}\u{9d}\r\n\u{202e}"), "\\u{1b}]0;x\\u{7}\\u{9d}\\r\n\\u{202e}");
    }

    #[test]
    fn json_stays_json_with_the_same_values() {
        let value = serde_json::json!({ "text": "a\u{9b}\u{7f}\u{1b}\n\u{202e}\u{e0041}é\"\\" });
        let shown = value.to_string();
        let shown = json(&shown);
        assert!(shown.chars().all(|c| !c.is_control()) && !shown.contains('\u{202e}'), "{shown}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&shown).expect("JSON"), value);
    }
}
