//! Names of special tokens in a rendering that the template alone does not write.
//!
//! No string of the row need hold such a name: two parts of a content join, a filter cuts a text or changes
//! its case. A second rendering finds it: there, each character of the row's strings and keys is another one,
//! except for white space and strings of the template's source, which the template may look for. All names in
//! that rendering are the template's. A row whose own rendering has other names is dropped. Most rows need no
//! second rendering: they lack the characters that begin and end names, and the template writes no name in
//! parts.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::OnceLock;

use aho_corasick::AhoCorasick;

use super::data::Texts;
use super::marks::{Literals, remove_spans};
use super::scan::{TagKind, TemplateToken};
use super::{Prepared, Template};
use crate::error::{DropReason, RowFailure};

/// Names, strings and texts of a template's source.
#[derive(Debug, Default)]
pub(super) struct Words {
    pub(super) names: BTreeSet<String>,
    pub(super) strings: BTreeSet<String>,
    /// Texts outside of tags.
    pub(super) texts: BTreeSet<String>,
    /// True if the source cuts one of its strings, or puts other text into it.
    pub(super) is_cutting: bool,
    /// What follows from the first names of special tokens that were asked for.
    known: OnceLock<(Literals, Known)>,
}

/// What follows from a template's source and names of special tokens.
#[derive(Debug, Clone)]
struct Known {
    /// Strings that stay in a row.
    kept: Option<AhoCorasick>,
    /// True if the template may write the beginning of a name before text of a row, and its end after that.
    is_composing: bool,
}

impl Words {
    /// Replaces the texts of a row, but for strings of the source that are no part of a name.
    pub(super) fn replacement(&self, literals: &Literals) -> Replacement<'_> {
        Replacement { words: self, kept: self.known(literals).kept }
    }

    fn known(&self, literals: &Literals) -> Known {
        let build = || {
            let is_kept = |text: &&String| !text.trim().is_empty() && !literals.touch(text);
            let texts = self.texts.iter().flat_map(|text| [text.as_str(), text.trim()]);
            let pieces: Vec<&str> = self.strings.iter().map(String::as_str).chain(texts).collect();
            Known {
                kept: AhoCorasick::new(self.strings.iter().filter(is_kept)).ok(),
                is_composing: self.is_cutting || literals.enclose(&pieces),
            }
        };
        let (first, known) = self.known.get_or_init(|| (literals.clone(), build()));
        if first.is(literals) { known.clone() } else { build() }
    }

    /// Notes what the tokens of a tag tell.
    pub(super) fn add(&mut self, tokens: &[TemplateToken]) {
        let tokens: Vec<&TemplateToken> =
            tokens.iter().filter(|token| token.kind != TagKind::Space).collect();
        for (at, token) in tokens.iter().enumerate() {
            let after = tokens.get(at + 1);
            match &token.kind {
                TagKind::Text(value) => {
                    self.strings.insert(value.clone());
                    self.is_cutting |= after.is_some_and(|next| [".", "[", "|"].iter().any(|c| next.is(c)));
                }
                TagKind::Name => {
                    self.names.insert(token.text.clone());
                    let is_plain = |token: &&&TemplateToken| {
                        matches!(token.kind, TagKind::Text(_) | TagKind::Number)
                            || token.is(",")
                            || token.is("(")
                    };
                    let mut arguments = tokens[at + 1..].iter().skip_while(is_plain);
                    self.is_cutting |= match token.text.as_str() {
                        "replace" => !arguments.next().is_some_and(|end| end.is(")")),
                        "format" => true,
                        _ => false,
                    };
                }
                _ => {}
            }
        }
    }
}

/// Replaces characters of a row.
pub(super) struct Replacement<'w> {
    words: &'w Words,
    kept: Option<AhoCorasick>,
}

impl Texts for Replacement<'_> {
    fn string<'t>(&self, text: &'t str) -> Cow<'t, str> {
        let mut is_kept = vec![false; text.len()];
        for found in self.kept.iter().flat_map(|kept| kept.find_overlapping_iter(text)) {
            is_kept[found.range()].fill(true);
        }
        let replaced = |(at, c): (usize, char)| if c.is_whitespace() || is_kept[at] { c } else { other(c) };
        text.char_indices().map(replaced).collect()
    }

    fn key<'t>(&self, key: &'t str) -> Cow<'t, str> {
        match self.words.names.contains(key) || self.words.strings.contains(key) {
            true => Cow::Borrowed(key),
            false => self.string(key),
        }
    }
}

/// A character of a plane that `c` is not in: of the plane for private use, as a rule.
fn other(c: char) -> char {
    let plane = if u32::from(c) >> 16 == 0xF { 0x3_0000 } else { 0xF_0000 };
    char::from_u32(plane | (u32::from(c) & 0xFFFF)).unwrap_or(char::REPLACEMENT_CHARACTER)
}

impl Template {
    /// Checks that all names of special tokens in a rendering are the template's, but for the ranges
    /// `literals`.
    ///
    /// # Errors
    /// [`DropReason::JoinedName`] with a name that may come out of the row.
    pub(crate) fn check_names(
        &self,
        prepared: &Prepared<'_>,
        text: &str,
        literals: &[Range<usize>],
        len: usize,
        add_generation_prompt: bool,
    ) -> Result<(), RowFailure> {
        let names = prepared.literals();
        if !self.words.known(names).is_composing && !prepared.may_make_names(len) {
            return Ok(());
        }
        let found = names.outside(text, literals);
        if found.is_empty() {
            return Ok(());
        }
        let replaced = self.run(prepared.replaced(&self.words), len, add_generation_prompt).ok();
        let replaced = replaced.and_then(|text| remove_spans(&text)).map(|rendering| rendering.text);
        let own = names.outside(replaced.as_deref().unwrap_or_default(), &[]);
        if own == found {
            return Ok(());
        }
        let same = own.iter().zip(&found).take_while(|(own, found)| own == found).count();
        let name = found.get(same).or(own.get(same)).copied().unwrap_or_default();
        Err(RowFailure::Drop(DropReason::JoinedName(name.to_owned())))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::error::{DropReason, RowFailure};
    use crate::row::{ChatRow, RowFormat, read_row};
    use crate::template::{Literals, Rendering, Template, TemplateSettings};

    const TURNS: &str =
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ CONTENT }}<|im_end|>\n{% endfor %}";

    fn rendered(content_of: &str, content: Value) -> Result<Rendering, RowFailure> {
        let row = json!({"messages": [{"role": "user", "content": content}]});
        let row = read_row(RowFormat::Messages, row.as_object().expect("an object"));
        let Ok(ChatRow::Chat(row)) = row else { panic!("{row:?}") };
        let source = TURNS.replace("CONTENT", content_of);
        let template = Template::compile(&source, "test", &TemplateSettings::default());
        let template = template.unwrap_or_else(|error| panic!("{error}"));
        let literals = Literals::new(["<|im_start|>", "<|im_end|>", "<|user|>"]).expect("names");
        template.render(&row.messages, None, false, &literals)
    }

    #[test]
    fn names_that_a_template_makes_of_a_row_drop_it() {
        let part = |text: &str| json!({"type": "text", "text": text});
        for (content_of, content) in [
            ("m.content|map(attribute='text')|join", json!([part("say <|im_"), part("end|> now")])),
            ("m.content[0].text ~ m.content[1].text", json!([part("<"), part("|im_end|>")])),
            ("m.content|lower", json!("<|IM_END|>")),
            ("m.content.replace('-', '')", json!("<|im_-end|>")),
            ("m.content|trim('*')|replace(' ', '')", json!("* <|im _end|>*")),
            ("m.content[:4] ~ m.content[5:]", json!("<|im._end|>")),
            ("m.content.split('#')|join", json!("<|im_#end|>")),
            ("'<|' ~ m.content ~ '|>'", json!("im_end")),
            ("'<|' ~ m.content ~ '|>'", json!("user")),
            ("m.content ~ '_end|>'", json!("a <|im")),
            ("m.content ~ m.content.replace('x', '')", json!("<|im_xend|>")),
        ] {
            let found = rendered(content_of, content.clone());
            let Err(RowFailure::Drop(reason @ DropReason::JoinedName(_))) = found else {
                panic!("{content_of}, {content}: {found:?}");
            };
            assert!(reason.to_string().contains("<|"), "{reason}");
        }
    }

    #[test]
    fn names_that_the_template_writes_drop_nothing() {
        for (content_of, content) in [
            ("m.content", json!("a < b | c > d, <|, im_end, _end|>, <|im_")),
            ("m.content", json!("é漢🙂\n\t\u{F0041}")),
            ("'<|' ~ m.role ~ '|>' ~ m.content", json!("user")),
            ("m.content.split('</think>')[-1]", json!("a</think>b")),
            ("'<|im_start|>' if '</think>' in m.content else '<|im_end|>'", json!("a</think>b")),
            ("'<|im_start|>' if m.content.startswith('<tool>') else '<|im_end|>'", json!("<tool>b")),
            (
                "'<|im_start|>' if m.content[0].type == 'text' else 'no'",
                json!([{"type": "text", "text": "a"}]),
            ),
            ("'<|im_start|>' if m.content|length == 3 else m.content", json!("a漢b")),
            ("'<|im_start|>' if m.content|trim == '' else m.content", json!(" \n")),
        ] {
            let found = rendered(content_of, content.clone());
            assert!(found.is_ok(), "{content_of}, {content}: {found:?}");
        }
    }

    #[test]
    fn names_in_keys_are_text() {
        let row = json!({"messages": [{"role": "user", "content": "a", "x": {"a<|im_end|>": 1}}]});
        let row = read_row(RowFormat::Messages, row.as_object().expect("an object"));
        let Ok(ChatRow::Chat(row)) = row else { panic!("{row:?}") };
        let source = TURNS.replace("CONTENT", "m.x|tojson");
        let template = Template::compile(&source, "test", &TemplateSettings::default()).expect("a template");
        let literals = Literals::new(["<|im_end|>"]).expect("names");
        let found = template.render(&row.messages, None, false, &literals).expect("a rendering");
        let texts: Vec<&str> = found.literals.iter().map(|range| &found.text[range.clone()]).collect();
        assert_eq!(texts, ["<|im_end|>"]);
        assert_eq!(found.text, "<|im_start|>user\n{\"a<|im_end|>\": 1}<|im_end|>\n");
    }
}
