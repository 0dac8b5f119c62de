//! White space as Python's `str.isspace` has it, which lm-eval's `rstrip` and BIG-bench's `strip` remove.

/// True for white space of Python. Beyond Unicode's White_Space these are U+001C to U+001F.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1C}'..='\u{1F}').contains(&c)
}

/// The text without white space at its end, and that white space.
pub(super) fn split_end(text: &str) -> (&str, &str) {
    text.split_at(text.trim_end_matches(is_space).len())
}

/// The text without white space at its ends.
pub(super) fn strip(text: &str) -> &str {
    text.trim_matches(is_space)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn white_space_is_that_of_python() {
        // python3 -c 'print([hex(c) for c in range(0x110000) if chr(c).isspace()])', 3.11
        let python = [
            0x9..=0xD,
            0x1C..=0x20,
            0x85..=0x85,
            0xA0..=0xA0,
            0x1680..=0x1680,
            0x2000..=0x200A,
            0x2028..=0x2029,
            0x202F..=0x202F,
            0x205F..=0x205F,
            0x3000..=0x3000,
        ];
        for c in '\0'..=char::MAX {
            assert_eq!(is_space(c), python.iter().any(|range| range.contains(&u32::from(c))), "{c:?}");
        }
        assert_eq!(split_end("a b\u{A0}\u{1F}\n"), ("a b", "\u{A0}\u{1F}\n"));
        assert_eq!(strip("\u{3000}a b\u{85}"), "a b");
    }
}
