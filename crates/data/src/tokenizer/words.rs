//! Word scanners equivalent to the regular expressions of GPT-2, Qwen 2/3 and Llama 3.
//!
//! Byte-level BPE splits text into words with a regular expression, then merges within each word. The three
//! expressions below cover most open models and all vocabularies trained here; hand-written scanners are
//! about ten times faster than a backtracking engine. Other expressions are left to the `tokenizers` crate.
//! Tests compare the scanners with that crate on random text.

use std::sync::LazyLock;

use tokenizers::utils::SysRegex;

/// The expression of Qwen 2 and 3, which is also that of vocabularies trained here.
pub(super) const QWEN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The expression of Llama 3: Qwen's, with up to three digits in a word.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The expression of GPT-2, for files that spell it out instead of using the byte-level step's.
pub(super) const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// Splitting of text into words: digits are separated first, then the pattern splits each part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Words {
    pub(super) pattern: WordPattern,
    pub(super) digits: Digits,
}

/// Separation of digits before the pattern is applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Digits {
    /// None: the pattern handles them.
    InWords,
    /// Each digit is a part (StarCoder, SmolLM).
    Alone,
    /// Each run of digits is a part.
    Together,
}

impl Words {
    /// Calls `each` with the words of `text`, in order. Concatenated, they are the text.
    pub(super) fn each(self, text: &str, mut each: impl FnMut(&str)) {
        if self.digits == Digits::InWords {
            return self.pattern.each(text, &mut each);
        }
        let mut rest = text;
        while let Some(first) = rest.chars().next() {
            // Digits as defined by the standard library, as in the `tokenizers` crate. The pattern may use
            // another version of Unicode.
            let len = match (first.is_numeric(), self.digits) {
                (true, Digits::Alone) => first.len_utf8(),
                (is_numeric, _) => rest.find(|c: char| c.is_numeric() != is_numeric).unwrap_or(rest.len()),
            };
            let (part, after) = rest.split_at(len);
            self.pattern.each(part, &mut each);
            rest = after;
        }
    }
}

/// Regular expression that matches words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WordPattern {
    /// GPT-2's expression.
    Gpt2,
    /// Qwen's expression: every digit is a word.
    Qwen,
    /// Llama 3's expression: up to three digits are a word.
    Llama3,
}

impl WordPattern {
    /// The pattern of a regular expression; `None` if there is no scanner for it.
    pub(super) fn from_regex(regex: &str) -> Option<WordPattern> {
        match regex {
            GPT2 => Some(WordPattern::Gpt2),
            QWEN => Some(WordPattern::Qwen),
            LLAMA3 => Some(WordPattern::Llama3),
            _ => None,
        }
    }

    /// Calls `each` with the words of `text` in order.
    pub(super) fn each<'t>(self, text: &'t str, each: &mut impl FnMut(&'t str)) {
        let mut rest = text;
        while !rest.is_empty() {
            let (word, after) = rest.split_at(self.word_len(rest));
            each(word);
            rest = after;
        }
    }

    /// Length in bytes of the word at the start of `text`, which must not be empty.
    fn word_len(self, text: &str) -> usize {
        match self {
            WordPattern::Gpt2 => gpt2_word(text),
            WordPattern::Qwen => modern_word(text, 1),
            WordPattern::Llama3 => modern_word(text, 3),
        }
    }
}

/// Character classes of the expressions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum CharClass {
    /// Neither space, letter nor number.
    Other,
    /// `\s`
    Space,
    /// `\p{L}`
    Letter,
    /// `\p{N}`
    Number,
}

/// The class of a character, as defined by the regular-expression engine.
pub(super) fn char_class(c: char) -> CharClass {
    static TABLE: LazyLock<Vec<CharClass>> = LazyLock::new(char_class_table);
    TABLE[c as usize]
}

/// Computed with the engine itself, so that both use the same version of Unicode. Its search is slow enough
/// to be felt at every start, so the planes without letters, numbers and white space are left out.
fn char_class_table() -> Vec<CharClass> {
    let everything: String = ('\0'..'\u{40000}').collect();
    let mut table = vec![CharClass::Other; char::MAX as usize + 1];
    for (regex, char_class) in
        [(r"\s+", CharClass::Space), (r"\p{L}+", CharClass::Letter), (r"\p{N}+", CharClass::Number)]
    {
        let regex = SysRegex::new(regex).expect("a constant expression compiles");
        for (start, end) in regex.find_iter(&everything) {
            for c in everything[start..end].chars() {
                table[c as usize] = char_class;
            }
        }
    }
    table
}

fn gpt2_word(text: &str) -> usize {
    let first = first_char(text);
    if first == '\''
        && let Some(len) = contraction(&text[1..], |c| c)
    {
        return 1 + len;
    }
    let after_space = usize::from(first == ' ');
    match text[after_space..].chars().next().map(char_class) {
        Some(char_class) if char_class != CharClass::Space => {
            after_space + run_of(&text[after_space..], char_class)
        }
        _ => space_word(text),
    }
}

fn modern_word(text: &str, max_digits: usize) -> usize {
    let first = first_char(text);
    if first == '\''
        && let Some(len) = contraction(&text[1..], fold)
    {
        return 1 + len;
    }
    let first_class = char_class(first);
    match first_class {
        CharClass::Letter => return run_of(text, CharClass::Letter),
        CharClass::Number => return digits(text, max_digits),
        CharClass::Space | CharClass::Other => {}
    }
    let rest = &text[first.len_utf8()..];
    if first != '\r' && first != '\n' && next_is(rest, CharClass::Letter) {
        return first.len_utf8() + run_of(rest, CharClass::Letter);
    }
    let after_space = usize::from(first == ' ');
    let marks = run_of(&text[after_space..], CharClass::Other);
    if marks > 0 {
        let end = after_space + marks;
        return end + newlines(&text[end..]);
    }
    let spaces = run_of(text, CharClass::Space);
    match text[..spaces].rfind(['\r', '\n']) {
        Some(last) => last + 1,
        None => space_word(text),
    }
}

/// `\s+(?!\S)|\s+`: a run of spaces, without the last one if a word follows.
fn space_word(text: &str) -> usize {
    let end = run_of(text, CharClass::Space);
    if end == text.len() {
        return end;
    }
    let last = text[..end].chars().next_back().map_or(0, char::len_utf8);
    if end > last { end - last } else { end }
}

/// Length of `s`, `t`, `m`, `d`, `re`, `ve` or `ll` at the start of `text`, with characters mapped by `fold`.
fn contraction(text: &str, fold: fn(char) -> char) -> Option<usize> {
    let mut chars = text.chars();
    let first = chars.next()?;
    if matches!(fold(first), 's' | 't' | 'm' | 'd') {
        return Some(first.len_utf8());
    }
    let second = chars.next()?;
    matches!((fold(first), fold(second)), ('r', 'e') | ('v', 'e') | ('l', 'l'))
        .then(|| first.len_utf8() + second.len_utf8())
}

/// Unicode's simple case folding, restricted to the letters of contractions.
fn fold(c: char) -> char {
    if c == 'ſ' { 's' } else { c.to_ascii_lowercase() }
}

fn first_char(text: &str) -> char {
    text.chars().next().expect("the text is not empty")
}

fn next_is(text: &str, wanted: CharClass) -> bool {
    text.chars().next().is_some_and(|c| char_class(c) == wanted)
}

fn run_of(text: &str, wanted: CharClass) -> usize {
    text.char_indices().find(|&(_, c)| char_class(c) != wanted).map_or(text.len(), |(at, _)| at)
}

fn digits(text: &str, max: usize) -> usize {
    text.chars().take(max).take_while(|&c| char_class(c) == CharClass::Number).map(char::len_utf8).sum()
}

fn newlines(text: &str) -> usize {
    text.bytes().take_while(|b| matches!(b, b'\r' | b'\n')).count()
}
