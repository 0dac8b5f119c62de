//! Markers that templates write around turns, found by rendering conversations of known texts.
//!
//! A marker is a name such as `<|im_start|>`, or one of Gemma's two. Rendering shows which of the names in a
//! template are written, and which of them ends an answer.

use serde_json::{Value, json};

use super::work::TOO_LONG;
use super::{Literals, Template, Templates};
use crate::error::RowFailure;
use crate::row::{ChatRow, Conversation, RowFormat, read_row};

/// Markers of templates.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Markers {
    /// Names, in the order of their first occurrence.
    pub names: Vec<String>,
    /// The text that follows the last answer of a conversation; `None` if no conversation was rendered.
    pub after_answer: Option<String>,
}

/// Markers that are not written as `<|name|>`.
const NAMES: [&str; 2] = ["<start_of_turn>", "<end_of_turn>"];
/// Maximum length of the name in `<|name|>`.
const MAX_NAME_BYTES: usize = 64;

const SYSTEM: &str = "xtrain probe system";
const QUESTIONS: [&str; 2] = ["xtrain probe question 1", "xtrain probe question 2"];
const ANSWERS: [&str; 2] = ["xtrain probe answer 1", "xtrain probe answer 2"];

/// A conversation that is rendered.
struct Probe {
    row: Value,
    /// True if rows may lack what it has, so that only names count that the template's source spells out:
    /// others may be made from the name of a role.
    is_optional: bool,
}

impl Templates {
    /// The markers that the templates write, for rows with and without system messages, tools and thoughts.
    /// What a template refuses has none.
    pub fn markers(&self) -> Markers {
        let mut found = Markers::default();
        for Probe { row, is_optional } in probes() {
            let row = row.as_object().cloned().unwrap_or_default();
            let Ok(ChatRow::Chat(conversation)) = read_row(RowFormat::Messages, &row) else { continue };
            let Ok(template) = self.for_row(conversation.tools.is_some()) else { continue };
            let [whole, prompt] = match renderings(template, &conversation) {
                Ok(texts) => texts,
                // It would take as long for all others.
                Err(RowFailure::Error(error)) if error.problem.ends_with(TOO_LONG) => break,
                Err(_) => continue,
            };
            for name in names_in(&whole).chain(names_in(&prompt)) {
                let counts = !is_optional || template.source().contains(name);
                if counts && !found.names.iter().any(|known| known == name) {
                    found.names.push(name.to_owned());
                }
            }
            let after = whole.rfind(ANSWERS[1]).map(|at| whole[at + ANSWERS[1].len()..].to_owned());
            found.after_answer = found.after_answer.or(after);
        }
        found
    }
}

/// The conversation, and its messages before the last answer with the generation prompt.
fn renderings(template: &Template, conversation: &Conversation) -> Result<[String; 2], RowFailure> {
    let Conversation { messages, tools } = conversation;
    let none = Literals::new::<&str>([])?;
    let render = |len: usize, prompt: bool| {
        let rendering = template.render(&messages[..len], tools.as_deref(), prompt, &none);
        rendering.map(|rendering| rendering.text)
    };
    Ok([render(messages.len(), false)?, render(messages.len() - 1, true)?])
}

/// The conversations that are rendered, plain ones first.
fn probes() -> Vec<Probe> {
    let message = |role: &str, content: &str| json!({"role": role, "content": content});
    let system = || message("system", SYSTEM);
    let turn = |at: usize| [message("user", QUESTIONS[at]), message("assistant", ANSWERS[at])];
    let plain = [turn(0), turn(1)].concat();
    let thoughts = {
        let mut turns = plain.clone();
        turns[3]["reasoning_content"] = "xtrain probe thought".into();
        turns
    };
    let schema = json!({"type": "object", "properties": {"a": {"type": "string", "description": "b"}}});
    let tools =
        json!([{"type": "function", "function": {"name": "f", "description": "c", "parameters": schema}}]);
    let calls = {
        let mut call = message("assistant", "");
        call["tool_calls"] = json!([{"id": "abcdef123", "type": "function", "function": {"name": "f", "arguments": {"a": "d"}}}]);
        let mut result = message("tool", "e");
        result["tool_call_id"] = "abcdef123".into();
        vec![message("user", QUESTIONS[0]), call, result, message("assistant", ANSWERS[1])]
    };
    let probe = |messages: Vec<Value>, tools: Option<&Value>, is_optional: bool| Probe {
        row: json!({"messages": messages, "tools": tools}),
        is_optional,
    };
    let with_system = |turns: &[Value]| [&[system()], turns].concat();
    vec![
        probe(with_system(&plain), None, false),
        probe(plain.clone(), None, false),
        probe(with_system(&calls), Some(&tools), true),
        probe(calls, Some(&tools), true),
        probe(plain, Some(&tools), true),
        probe(thoughts, None, true),
    ]
}

/// The markers in a text, in order.
fn names_in(text: &str) -> impl Iterator<Item = &str> {
    let starts = text.match_indices('<').map(|(at, _)| &text[at..]);
    starts.filter_map(|rest| {
        let named = NAMES.into_iter().find(|name| rest.starts_with(name)).map(|name| &rest[..name.len()]);
        named.or_else(|| {
            let inside = rest.strip_prefix("<|")?;
            let is_end = |c: char| c.is_whitespace() || matches!(c, '<' | '>' | '|');
            let len = inside.find(is_end).filter(|len| (1..=MAX_NAME_BYTES).contains(len))?;
            inside[len..].starts_with("|>").then(|| &rest[..len + 4])
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::template::TemplateSettings;

    fn markers(source: &str) -> Markers {
        let settings = TemplateSettings::default();
        Templates::of(Template::compile(source, "here", &settings).expect("a template")).markers()
    }

    #[test]
    fn chatml_writes_two_markers_and_ends_answers_with_the_second() {
        let found = Templates::chatml(&TemplateSettings::default()).expect("chatml").markers();
        assert_eq!(found.names, ["<|im_start|>", "<|im_end|>"]);
        assert_eq!(found.after_answer.as_deref(), Some("<|im_end|>\n"));
    }

    #[test]
    fn a_marker_that_is_never_written_is_none() {
        let found = markers(
            "{# <|comment|> #}{% for m in messages %}{% if m.role == 'wizard' %}<|wizard|>{% endif %}<start_of_turn>\
             {{ m.content }}<end_of_turn>{% endfor %}{% if add_generation_prompt %}{{ '<|go|>' }}{% endif %}[INST] < | a |> <|b c|>",
        );
        assert_eq!(found.names, ["<start_of_turn>", "<end_of_turn>", "<|go|>"]);
        assert!(found.after_answer.is_some_and(|after| after.starts_with("<end_of_turn>")));
    }

    #[test]
    fn names_made_of_roles_count_for_the_roles_of_all_rows_and_those_of_tools_if_spelled_out() {
        let roles = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}";
        assert_eq!(markers(roles).names, ["<|system|>", "<|end|>", "<|user|>", "<|assistant|>"]);
        let with_tools = format!("{{% if tools %}}<|tools|>{{% endif %}}{roles}");
        assert_eq!(
            markers(&with_tools).names,
            ["<|system|>", "<|end|>", "<|user|>", "<|assistant|>", "<|tools|>"]
        );
    }

    #[test]
    fn a_template_that_refuses_system_messages_is_rendered_without() {
        let found = markers(
            "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}<|a|>{{ m.content }}</s>{% endfor %}",
        );
        assert_eq!((found.names, found.after_answer.as_deref()), (vec!["<|a|>".to_owned()], Some("</s>")));
        assert_eq!(markers("{{ raise_exception('never') }}<|a|>"), Markers::default());
    }
}
