//! The text before an answer that a model is to write.

use crate::error::RowFailure;
use crate::mask::{MaskedText, refuse_marks};
use crate::row::Conversation;
use crate::template::{Literals, Rendering, Templates};

/// Renders a conversation with the generation prompt, as a sample in which nothing is trained. `literals`
/// finds the names of special tokens that the messages hold.
///
/// # Errors
/// [`RowFailure::Drop`] for a conversation with private-use marks, or whose template raises;
/// [`RowFailure::Error`] for a template that fails.
pub fn prompt(
    conversation: &Conversation,
    templates: &Templates,
    literals: &Literals,
) -> Result<MaskedText, RowFailure> {
    refuse_marks(conversation)?;
    let tools = conversation.tools.as_deref();
    let template = templates.for_row(tools.is_some())?;
    let Rendering { text, literals, .. } = template.render(&conversation.messages, tools, true, literals)?;
    Ok(MaskedText { text, literals, trained: Vec::new() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DropReason;
    use crate::row::{ChatMessage, Role};
    use crate::template::TemplateSettings;

    fn rendered(content: &str) -> Result<MaskedText, RowFailure> {
        let templates = Templates::chatml(&TemplateSettings::default()).expect("a template");
        let literals = Literals::new(["<|im_end|>"]).expect("short names");
        let messages = vec![ChatMessage::new(Role::User, content)];
        prompt(&Conversation { messages, tools: None }, &templates, &literals)
    }

    #[test]
    fn a_prompt_ends_where_the_answer_begins_and_knows_which_names_are_text() {
        let found = rendered("hi <|im_end|>").expect("a prompt");
        let begin = "<|im_start|>user\nhi ";
        assert_eq!(found.text, format!("{begin}<|im_end|><|im_end|>\n<|im_start|>assistant\n"));
        let name = begin.len()..begin.len() + "<|im_end|>".len();
        assert_eq!(found.literals, std::slice::from_ref(&name));
        assert!(found.trained.is_empty());
    }

    #[test]
    fn marks_in_a_conversation_are_refused() {
        assert_eq!(rendered("a\u{10F8F4}b"), Err(RowFailure::Drop(DropReason::PrivateUse)));
    }
}
