//! Splitting text into words exactly as the GPT-2, Qwen 2/3 and Llama 3 regular expressions do, by hand.
//!
//! Byte-level BPE first cuts the text into words with a regular expression, then merges inside each word. The
//! three expressions below cover most open models and every vocabulary trained here; a hand-written scanner runs
//! them some ten times faster than a backtracking engine. Any other expression is left to the tokenizers crate.
//! Tests compare the scanner with that crate on random text.

use std::sync::LazyLock;

use tokenizers::utils::SysRegex;

/// The expression of Qwen 2 and 3, which vocabularies trained here use too.
pub(super) const QWEN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The expression of Llama 3: Qwen's, with up to three digits in a word.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The expression of GPT-2, for files that spell it out instead of asking the byte-level step for it.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// How text is cut into words before the merges: digits first, then each part between them by the pattern.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Words {
    pub(super) pattern: WordPattern,
    pub(super) digits: Digits,
}

/// What happens to digits before the pattern sees the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Digits {
    /// Nothing: the pattern deals with them.
    InWords,
    /// Each is a part of its own (StarCoder, SmolLM).
    Alone,
    /// Neighbours are a part together.
    Together,
}

impl Words {
    /// Calls `each` with the words of `text` in order; together they are the text.
    pub(super) fn each(self, text: &str, mut each: impl FnMut(&str)) {
        if self.digits == Digits::InWords {
            return self.pattern.each(text, &mut each);
        }
        let mut rest = text;
        while let Some(first) = rest.chars().next() {
            // The standard library's notion of digits, as in the tokenizers crate; the pattern's may be of another
            // version of Unicode.
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

/// The expression that finds words.
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
    /// The pattern whose expression this is, if it is one that the scanner knows.
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

    /// Byte length of the word at the start of `text`, which must not be empty.
    fn word_len(self, text: &str) -> usize {
        match self {
            WordPattern::Gpt2 => gpt2_word(text),
            WordPattern::Qwen => modern_word(text, 1),
            WordPattern::Llama3 => modern_word(text, 3),
        }
    }
}

/// What the expressions can tell apart.
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

/// The class of a character, as the regular-expression engine sees it.
pub(super) fn char_class(c: char) -> CharClass {
    static TABLE: LazyLock<Vec<CharClass>> = LazyLock::new(char_class_table);
    TABLE[c as usize]
}

/// Asks the engine itself, once, so that both agree on one version of Unicode.
fn char_class_table() -> Vec<CharClass> {
    let everything: String = ('\0'..=char::MAX).collect();
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

/// `\s+(?!\S)|\s+`: a run of spaces leaves its last one to the word that follows.
fn space_word(text: &str) -> usize {
    let end = run_of(text, CharClass::Space);
    if end == text.len() {
        return end;
    }
    let last = text[..end].chars().next_back().map_or(0, char::len_utf8);
    if end > last { end - last } else { end }
}

/// Length of `s`, `t`, `m`, `d`, `re`, `ve` or `ll` at the start of `text`, after mapping characters by `fold`.
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

/// Unicode's simple case folding, as far as the contractions can see it.
fn fold(c: char) -> char {
    if c == 'ſ' { 's' } else { c.to_ascii_lowercase() }
}

fn first_char(text: &str) -> char {
    text.chars().next().expect("the scanner is called on text that is left")
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
