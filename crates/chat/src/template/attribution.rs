//! Names of special tokens in a rendering that the template alone does not write.
//!
//! No string of the row need hold such a name: two parts of a content join, a filter cuts a text or changes
//! its case. A second rendering finds it: there, each character of the row's strings and keys is another one,
//! except for white space and strings of the template's source, which the template may look for. All names in
//! that rendering are the template's. A row whose own rendering has other names is dropped. Most rows need no
//! second rendering: they lack the characters that begin and end names, and the template writes no name in
//! parts.

use std::ops::Range;

use super::marks::remove_spans;
use super::{Prepared, Template};
use crate::error::{DropReason, RowFailure};

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
        if !self.words.compose(names) && !prepared.may_make_names(len) {
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
