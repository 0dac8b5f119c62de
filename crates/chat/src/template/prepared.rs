//! Messages and tools of a row as a template sees them.

use std::cell::OnceCell;

use minijinja::Value;

use super::data::{self, Plain, Texts};
use super::marks::Literals;
use super::words::SourceWords;
use crate::row::ChatMessage;

/// Messages and tools, for renderings of the first messages with one template.
#[derive(Debug)]
pub(crate) struct Prepared<'c> {
    pub(super) plain: Values,
    /// With marks around names of special tokens, if there are any.
    pub(super) marked: Option<Values>,
    /// With other characters.
    replaced: OnceCell<Values>,
    messages: &'c [ChatMessage],
    tools: Option<&'c [serde_json::Value]>,
    literals: &'c Literals,
}

/// Values of the variables `messages` and `tools`.
#[derive(Debug)]
pub(super) struct Values {
    pub(super) messages: Vec<Value>,
    pub(super) tools: Value,
}

impl Values {
    fn new(messages: &[ChatMessage], tools: Option<&[serde_json::Value]>, texts: &dyn Texts) -> Values {
        let tools =
            tools.map(|tools| tools.iter().map(|tool| data::value(tool, texts)).collect::<Vec<_>>().into());
        Values {
            messages: messages.iter().map(|message| data::message(message.keys(), texts)).collect(),
            tools: tools.unwrap_or_else(|| Value::from(())),
        }
    }
}

impl<'c> Prepared<'c> {
    pub(crate) fn new(
        messages: &'c [ChatMessage],
        tools: Option<&'c [serde_json::Value]>,
        literals: &'c Literals,
    ) -> Prepared<'c> {
        let marked = literals.occur(messages, tools).then(|| Values::new(messages, tools, literals));
        let plain = Values::new(messages, tools, &Plain);
        Prepared { plain, marked, replaced: OnceCell::new(), messages, tools, literals }
    }

    /// Names of special tokens that are text in the row.
    pub(super) fn literals(&self) -> &'c Literals {
        self.literals
    }

    /// True if the first `len` messages or the tools hold a character at which a name begins or ends.
    pub(super) fn may_make_names(&self, len: usize) -> bool {
        self.literals.may_come_from(&self.messages[..len], self.tools)
    }

    /// The values with other characters. `words` are those of the template.
    pub(super) fn replaced(&self, words: &SourceWords) -> &Values {
        let replaced = || Values::new(self.messages, self.tools, &words.replacement(self.literals));
        self.replaced.get_or_init(replaced)
    }
}
