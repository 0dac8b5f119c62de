//! Lists in messages, of bounded length.

use std::fmt::Display;

/// The first `most` of `items`, comma-separated, and the number of those left out: `a, b and 3 more`.
pub fn first_few<T: Display>(items: impl IntoIterator<Item = T>, most: usize) -> String {
    /// Bytes shown of an item: names in files may have any length.
    const LONGEST: usize = 240;
    let mut items = items.into_iter();
    let shown = items.by_ref().take(most).map(|item| {
        let mut text = item.to_string();
        if text.len() > LONGEST {
            text.truncate(text.floor_char_boundary(LONGEST));
            text.push_str("...");
        }
        text
    });
    let shown = shown.collect::<Vec<_>>().join(", ");
    match items.count() {
        0 => shown,
        rest => format!("{shown} and {rest} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_left_out_are_counted() {
        assert_eq!(first_few::<u8>([], 2), "");
        assert_eq!(first_few(["a", "b"], 2), "a, b");
        assert_eq!(first_few(["a", "b", "c", "d"], 2), "a, b and 2 more");
        assert_eq!(first_few(["é".repeat(200)], 2).len(), 243);
    }
}
