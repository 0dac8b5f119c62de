//! Renderings of the first messages of a conversation, from one rendering of the whole.
//!
//! A template with a loop over the messages renders the first n as follows: it writes what it writes before
//! the loop asks for message n, and then runs its *tail*, the source after the loop. A second source of the
//! template (module `source`) has copies of the tail at the start of the loop's body, with and without the
//! generation prompt; their text is captured, as for the n messages before. It equals that of n messages:
//! - A template is deterministic. It learns the number of messages only from the value `messages`, from
//!   `loop.last`, `loop.nextitem`, `loop.length` and `loop.revindex`, and where the loop ends. The object in
//!   place of the list and functions around those attributes (module `messages`) note what is read; numbers
//!   of messages that would have given another value have no text here.
//! - In a copy of the tail, that object is the list of n messages.
//! - The loop is the last that lies in no block, and has no condition and no `else` (module `loops`): nothing
//!   written before message n is captured, to change later, and no message is read before its turn.
//! - The tail names no variable of the loop, sets no attribute of a namespace, and calls nothing if a macro
//!   sets one: a copy reads what the tail would read, and changes nothing.
//! - `add_generation_prompt` is read nowhere else.
//!
//! A loop before that may *gather*: it reads all messages, and leaves text and attributes of namespaces. For
//! n messages it leaves what it had left before its step for message n. Where this differs from what it left
//! in the end, n messages have no text here.
//!
//! Conversations with names of special tokens, templates without such a loop, and failures of the second
//! source give no texts. Where a text is missing, the template renders the messages by themselves.

mod loops;
mod messages;
mod source;
mod tags;

use std::sync::Arc;

use minijinja::Value;

use super::MAX_TEXT_BYTES;
use super::marks::{SPAN, is_marked};

pub(super) use messages::Observed;
pub(super) use source::with_copies;

/// Name of the variable with the functions that the second source calls.
const VARIABLE: &str = "xtrain_prefix";

/// The rendering of the first messages of a conversation.
#[derive(Debug)]
struct PrefixText {
    /// Number of messages.
    len: usize,
    /// Size of what the loop has written.
    written: usize,
    /// Texts of the tail with and without the generation prompt, where they were needed.
    tails: [Option<String>; 2],
}

/// Renderings of the first messages of a conversation, as far as they were found.
#[derive(Debug, Default)]
pub(crate) struct Prefixes {
    /// By number of messages, ascending.
    texts: Vec<PrefixText>,
}

impl Prefixes {
    /// The texts found in a rendering of the second source, whose text has marks of spans.
    pub(super) fn new(marked: &str, observed: &Observed) -> Prefixes {
        let mut texts = observed.texts();
        if is_marked(marked) {
            let (mut from, mut marks) = (0, 0);
            for text in &mut texts {
                marks += marked[from..text.written].matches([SPAN.0, SPAN.1]).count();
                from = text.written;
                text.written -= marks * SPAN.0.len_utf8();
            }
        }
        Prefixes { texts }
    }

    /// The rendering of the first `len` messages, if it was found: the number of its bytes that begin the
    /// rendering of all messages, and the text after them.
    pub(crate) fn get(&self, len: usize, add_generation_prompt: bool) -> Option<(usize, &str)> {
        let at = self.texts.binary_search_by_key(&len, |text| text.len).ok()?;
        let PrefixText { written, tails, .. } = &self.texts[at];
        let tail = tails[usize::from(!add_generation_prompt)].as_deref()?;
        let is_plain = written + tail.len() <= MAX_TEXT_BYTES && !is_marked(tail);
        is_plain.then_some((*written, tail))
    }
}

/// Variables of a rendering of the second source: the messages, and the functions.
pub(super) fn variables(observed: &Arc<Observed>) -> [(String, Value); 2] {
    let messages = messages::Messages { observed: observed.clone(), from: 0, is_slice: false };
    let functions = messages::Functions { observed: observed.clone() };
    [
        ("messages".to_owned(), Value::from_object(messages)),
        (VARIABLE.to_owned(), Value::from_object(functions)),
    ]
}
