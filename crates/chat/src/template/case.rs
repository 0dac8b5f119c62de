//! Case of text as Python's `str.capitalize` and `str.title` change it, and the filter `title`.

use super::python::is_space;

/// `str.capitalize`.
pub(super) fn capitalize(text: &str) -> String {
    let Some(first) = text.chars().next() else { return String::new() };
    // A sigma ends a word only after other letters, so the whole text is needed.
    let lower = text.to_lowercase();
    let skipped: usize = first.to_lowercase().map(char::len_utf8).sum();
    title_case(first) + &lower[skipped..]
}

/// `str.title`: a capital after each character that has no case.
pub(super) fn title(text: &str) -> String {
    let lower = text.to_lowercase();
    let (mut at, mut is_inside) = (0, false);
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        // Both forms of a small sigma have the same size.
        let len: usize = c.to_lowercase().map(char::len_utf8).sum();
        match is_inside {
            true => out.push_str(&lower[at..at + len]),
            false => out.push_str(&title_case(c)),
        }
        at += len;
        is_inside = c.is_lowercase() || c.is_uppercase() || is_titlecase(c);
    }
    out
}

/// The filter `title`: a capital at the start of each word, all others small.
pub(super) fn title_words(text: &str) -> String {
    let separates = |c: char| is_space(c) || "-({[<".contains(c);
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let len = rest.find(|c| separates(c) != separates(first)).unwrap_or(rest.len());
        let (word, after) = rest.split_at(len);
        out.extend(first.to_uppercase());
        out.push_str(&word[first.len_utf8()..].to_lowercase());
        rest = after;
    }
    out
}

/// True for letters of Unicode's category Lt.
pub(super) fn is_titlecase(c: char) -> bool {
    matches!(c, 'ǅ' | 'ǈ' | 'ǋ' | 'ǲ' | '\u{1f88}'..='\u{1f8f}' | '\u{1f98}'..='\u{1f9f}' | '\u{1fa8}'..='\u{1faf}' | '\u{1fbc}' | '\u{1fcc}' | '\u{1ffc}')
}

/// Unicode's title case of a character.
fn title_case(c: char) -> String {
    let is_georgian = matches!(c, '\u{10d0}'..='\u{10fa}' | '\u{10fd}'..='\u{10ff}');
    let letter = match c {
        'Ǆ' | 'ǅ' | 'ǆ' => 'ǅ',
        'Ǉ' | 'ǈ' | 'ǉ' => 'ǈ',
        'Ǌ' | 'ǋ' | 'ǌ' => 'ǋ',
        'Ǳ' | 'ǲ' | 'ǳ' => 'ǲ',
        // Small letters with iota, each 8 or 9 before the letter of title case.
        '\u{1f80}'..='\u{1f87}' | '\u{1f90}'..='\u{1f97}' | '\u{1fa0}'..='\u{1fa7}' => {
            char::from_u32(u32::from(c) + 8).unwrap_or(c)
        }
        '\u{1fb3}' | '\u{1fc3}' | '\u{1ff3}' => char::from_u32(u32::from(c) + 9).unwrap_or(c),
        c if is_georgian || is_titlecase(c) => c,
        'ŉ' => return "ʼN".to_owned(),
        // Ligatures: only the first letter is a capital, and iota stays below.
        _ => {
            let mut upper = c.to_uppercase();
            let first = upper.next().into_iter();
            let small =
                |c: char| if c == '\u{399}' { '\u{345}' } else { c.to_lowercase().next().unwrap_or(c) };
            return first.chain(upper.map(small)).collect();
        }
    };
    letter.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capitals_are_those_of_python() {
        for (text, wanted) in [
            ("ǆabc", "ǅabc"),
            ("ﬁX", "Fix"),
            ("ßA", "Ssa"),
            ("ΑΣ", "Ας"),
            ("საქართველო", "საქართველო"),
            ("ᾳΒ", "ᾼβ"),
            ("İi", "İi"),
            ("", ""),
        ] {
            assert_eq!(capitalize(text), wanted);
        }
        let text = "\u{1fb3}β \u{1fbc}β \u{1fb2} \u{1fb7} ŉx \u{1f0}a ﬁa ßa \u{1ff3}x \u{1f90} \u{1f98} \u{390}a և ﬓa aǅbcd ΑΣ \
                    they're 3rd";
        let wanted = "\u{1fbc}β \u{1fbc}β \u{1fba}\u{345} Α\u{342}\u{345} ʼNx J\u{30c}a Fia Ssa \u{1ffc}x \u{1f98} \u{1f98} \
                      Ι\u{308}\u{301}a Եւ Մնa Aǆbcd Ας They'Re 3Rd";
        assert_eq!(title(text), wanted);
        assert_eq!(title_words("ΑΣ ΑΒΣ they're x-ray (a ﬁb"), "Ασ Αβς They're X-Ray (A FIb");
    }
}
