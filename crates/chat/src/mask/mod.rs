//! Text of a conversation that is trained: what the model is to write, from after the generation prompt to
//! the stop token.
//!
//! Let W be the rendering of all messages, p that of the messages before an answer with the generation
//! prompt, and e that of the messages up to the answer. Then the answer is found by the first of these
//! methods that applies:
//! - *spans*: the template marks it with `{% generation %}`;
//! - *prefixes*: it is e after p, if p begins e, and e up to the stop token begins W;
//! - *turn by turn*: W renders history otherwise than e did, so each answer becomes a sample of its own, e.
//!
//! All p and e are found in one rendering, if the template allows (`template::prefix`).
//!
//! Whatever the method, what the generation prompt supplies is not trained, and a range ends with its first
//! stop token. An answer that cannot be found so is an error, never a guess.

mod beginning;
mod prefixes;
mod spans;
#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::fmt;
use std::ops::Range;

use aho_corasick::{AhoCorasick, MatchKind};

use beginning::Beginning;

use crate::error::{ChatError, DropReason, RowFailure};
use crate::row::{Conversation, Role};
use crate::template::{Literals, Prefixes, Prepared, Rendering, Template, Templates, has_mark};

/// `data.train_on`: what is trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TrainOn {
    /// All answers.
    #[default]
    Assistant,
    /// The last answer.
    Last,
    /// The whole text.
    All,
}

impl TrainOn {
    /// All values.
    pub const ALL: [TrainOn; 3] = [TrainOn::Assistant, TrainOn::Last, TrainOn::All];

    /// The word of run files and options.
    pub fn name(self) -> &'static str {
        match self {
            TrainOn::Assistant => "assistant",
            TrainOn::Last => "last",
            TrainOn::All => "all",
        }
    }
}

/// Maximum size of the samples of a conversation, if each answer becomes one.
const MAX_SAMPLES_BYTES: usize = 64 << 20;

/// Maximum work of the renderings of a conversation that are not found together, whose sum is quadratic in
/// the turns: their bytes, and [`MESSAGE_BYTES`] for each message.
const MAX_RENDERED_BYTES: usize = 256 << 20;

/// Method by which answers were found, as in "answers are found turn by turn".
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Method {
    /// The whole text is trained.
    Whole,
    /// `{% generation %}` blocks.
    Spans,
    /// Proven prefixes.
    Prefixes,
    /// A sample for each answer.
    TurnByTurn,
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Method::Whole => "in the whole text",
            Method::Spans => "in spans of {% generation %}",
            Method::Prefixes => "by prefixes",
            Method::TurnByTurn => "turn by turn",
        })
    }
}

/// A text with the ranges that are trained.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MaskedText {
    /// The text.
    pub text: String,
    /// Byte ranges of names of special tokens that are text, ascending.
    pub literals: Vec<Range<usize>>,
    /// Byte ranges that are trained, ascending, apart from each other.
    pub trained: Vec<Range<usize>>,
}

/// Samples of a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mask {
    /// Method by which the answers were found.
    pub method: Method,
    /// One sample, or one for each answer.
    pub samples: Vec<MaskedText>,
    /// Size of the rendering of all messages, in bytes.
    pub whole_bytes: usize,
    /// Number of messages of users whose text the rendering lacks.
    pub missing_messages: usize,
}

impl Mask {
    /// Size of the samples, in bytes. Over [`Mask::whole_bytes`] it is the factor by which "turn by turn"
    /// multiplies the text; with the other methods both are equal.
    pub fn sample_bytes(&self) -> usize {
        self.samples.iter().map(|sample| sample.text.len()).sum()
    }
}

/// Settings of masks.
#[derive(Debug, Clone)]
pub struct MaskOptions {
    train_on: TrainOn,
    literals: Literals,
    stops: AhoCorasick,
    stop_names: String,
    max_samples_bytes: usize,
    max_rendered_bytes: usize,
}

impl MaskOptions {
    /// Settings: what is trained, the names of the tokens at which generation stops, and the names of all
    /// special tokens.
    ///
    /// # Errors
    /// No stop tokens; names too long to search for.
    pub fn new<N: AsRef<str>>(
        train_on: TrainOn,
        stop_tokens: &[N],
        special_tokens: &[N],
    ) -> Result<MaskOptions, ChatError> {
        let stops: Vec<&str> =
            stop_tokens.iter().map(AsRef::as_ref).filter(|name| !name.is_empty()).collect();
        if stops.is_empty() {
            let advice = "name one as eos_token_id in generation_config.json";
            return Err(ChatError::new("there is no token at which generation stops", advice));
        }
        let searcher = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(&stops);
        let error = |error| ChatError::new(format!("names of stop tokens: {error}"), "check tokenizer.json");
        Ok(MaskOptions {
            train_on,
            literals: Literals::new(special_tokens.iter().map(AsRef::as_ref))?,
            stops: searcher.map_err(error)?,
            stop_names: stops.join(", "),
            max_samples_bytes: MAX_SAMPLES_BYTES,
            max_rendered_bytes: MAX_RENDERED_BYTES,
        })
    }

    /// These settings with other limits.
    #[cfg(test)]
    fn with_limits(self, max_samples_bytes: usize, max_rendered_bytes: usize) -> MaskOptions {
        MaskOptions { max_samples_bytes, max_rendered_bytes, ..self }
    }

    /// Names of special tokens, which are text where a row holds them.
    pub fn literals(&self) -> &Literals {
        &self.literals
    }

    /// End of the first stop token in `text`, which is at `start` of a rendering, other than names that are
    /// text: `literals` of the rendering.
    fn stop_end(&self, text: &str, start: usize, literals: &[Range<usize>]) -> Option<usize> {
        let is_text = |found: &Range<usize>| {
            literals.iter().any(|text| text.start < found.end && found.start < text.end)
        };
        let mut ends = self.stops.find_iter(text).map(|found| {
            let start = start + found.start();
            start..start + found.len()
        });
        ends.find(|found| !is_text(found)).map(|found| found.end)
    }

    fn no_stop(&self, template: &Template, end: &str) -> RowFailure {
        RowFailure::Error(ChatError::new(
            format!(
                "chat template {}: an answer does not end with a token at which generation stops ({}); its text ends \
                 with {}",
                template.location(),
                self.stop_names,
                crate::error::shown_end(end)
            ),
            "name its end as eos_token_id in generation_config.json, or another template with data.chat_template",
        ))
    }
}

/// Renders the first messages of a conversation.
struct Renderer<'c> {
    prepared: &'c Prepared<'c>,
    messages: usize,
    template: &'c Template,
    options: &'c MaskOptions,
    /// Rendering of all messages.
    whole: Rendering,
    /// Renderings of the first messages that were found together.
    prefixes: Prefixes,
    /// Work of the renderings that were not found together, in bytes.
    work: Cell<usize>,
}

/// Bytes of text that take as long as a message.
const MESSAGE_BYTES: usize = 64;

impl Renderer<'_> {
    /// Renders the first `len` messages by themselves.
    ///
    /// # Errors
    /// Those of the template; [`DropReason::TooManyTurns`] if all renderings together are too large.
    fn alone(&self, len: usize, add_generation_prompt: bool) -> Result<Rendering, RowFailure> {
        let rendering = self.template.render_first(self.prepared, len, add_generation_prompt);
        let most = self.options.max_rendered_bytes;
        self.work.set(match &rendering {
            Ok(rendering) => self.work.get() + rendering.text.len() + MESSAGE_BYTES * len,
            Err(RowFailure::Drop(_)) => self.work.get() + MESSAGE_BYTES * len,
            // It may have taken all the fuel.
            Err(RowFailure::Error(_)) => self.work.get() + most / 64,
        });
        match self.work.get() > most {
            true => Err(RowFailure::Drop(DropReason::TooManyTurns)),
            false => rendering,
        }
    }

    /// Renders the first `len` messages.
    fn first(&self, len: usize, add_generation_prompt: bool) -> Result<Beginning, RowFailure> {
        if len == self.messages && !add_generation_prompt {
            let literals = self.whole.literals.clone();
            return Ok(Beginning { shared: self.whole.text.len(), rest: String::new(), literals });
        }
        if let Some((shared, rest)) = self.prefixes.get(len, add_generation_prompt) {
            return Ok(Beginning { shared, rest: rest.to_owned(), literals: Vec::new() });
        }
        self.alone(len, add_generation_prompt).map(Beginning::from)
    }
}

/// Renders a conversation, and finds what is trained.
///
/// # Errors
/// [`RowFailure::Drop`] for a row without trained text, with private-use marks, with names of special tokens
/// that its template makes of its text, or with too much text turn by turn, and if the template raises;
/// [`RowFailure::Error`] for a template that fails, a prompt that does not begin its answer, and an answer
/// without a stop token.
pub fn samples(
    conversation: &Conversation,
    templates: &Templates,
    options: &MaskOptions,
) -> Result<Mask, RowFailure> {
    let Conversation { messages, tools } = conversation;
    refuse_marks(conversation)?;
    let template = templates.for_row(tools.is_some())?;
    let prepared = Prepared::new(messages, tools.as_deref(), &options.literals);
    let whole = template.render_first(&prepared, messages.len(), false)?;
    template.check_names(&prepared, &whole.text, &whole.literals, messages.len(), false)?;
    let missing_messages = missing(conversation, &whole.text);
    let whole_bytes = whole.text.len();
    if options.train_on == TrainOn::All {
        let trained = std::iter::once(0..whole.text.len()).collect();
        let sample = MaskedText { text: whole.text, literals: whole.literals, trained };
        return Ok(Mask { method: Method::Whole, samples: vec![sample], whole_bytes, missing_messages });
    }
    let answers: Vec<usize> =
        (0..messages.len()).filter(|&at| messages[at].role() == Role::Assistant).collect();
    let is_counted = |at: usize| options.train_on != TrainOn::Last || Some(&at) == answers.last();
    let trained: Vec<usize> =
        answers.iter().copied().filter(|&at| messages[at].is_trained() && is_counted(at)).collect();
    if trained.is_empty() {
        return Err(RowFailure::Drop(DropReason::NoTrainedToken));
    }
    // Spans need only the prompts.
    let needs_answers = !template.has_generation();
    let prompts = if needs_answers { &trained } else { &answers };
    let mut prefixes = Prefixes::default();
    // The renderings for one answer are as fast.
    if prompts.len() > 1 {
        let mut needed = vec![[false; 2]; messages.len() + 1];
        for &at in prompts {
            needed[at][0] = at > 0;
            needed[at + 1][1] = needs_answers;
        }
        prefixes = template.render_prefixes(&prepared, &whole, needed);
    }
    let messages = messages.len();
    let work = Cell::new(0);
    let renderer = Renderer { prepared: &prepared, messages, template, options, whole, prefixes, work };
    let (method, samples) = match template.has_generation() {
        true => (Method::Spans, vec![spans::sample(renderer, &answers, &trained)?]),
        false => prefixes::samples(renderer, &trained)?,
    };
    match samples.iter().any(|sample| sample.trained.iter().any(|range| !range.is_empty())) {
        true => Ok(Mask { method, samples, whole_bytes, missing_messages }),
        false => Err(RowFailure::Drop(DropReason::NoTrainedToken)),
    }
}

/// Drops a conversation with characters that mark ranges here.
pub(crate) fn refuse_marks(Conversation { messages, tools }: &Conversation) -> Result<(), RowFailure> {
    let is_marked = messages.iter().any(|message| {
        message.keys().iter().any(|(key, value)| has_mark(&key.as_str().into()) || has_mark(value))
    });
    match is_marked || tools.iter().flatten().any(has_mark) {
        true => Err(RowFailure::Drop(DropReason::PrivateUse)),
        false => Ok(()),
    }
}

/// Number of messages of users whose texts are not in `text`. Some templates drop content in a form that they
/// do not know.
fn missing(conversation: &Conversation, text: &str) -> usize {
    let users = conversation.messages.iter().filter(|message| message.role() == Role::User);
    // Texts mostly follow each other.
    let mut from = 0;
    let mut lacks = |part: &str| match text[from..].find(part) {
        Some(at) => {
            from += at + part.len();
            false
        }
        None => !text.contains(part),
    };
    users.filter(|message| message.texts().any(|part| lacks(part.trim()))).count()
}
