//! Rows of JSON as documents: parsed, rendered, masked, encoded.

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use xtrain_chat::row::Role;
use xtrain_chat::{
    ChatError, ChatMessage, ChatRow, Conversation, DropReason, Encoded, MaskOptions, Method, RowFailure,
    RowFormat, Templates, TrainOn, encode, parse_row, read_row, recognise, samples,
};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::record::{RowCounts, UNREADABLE, date};
use super::{ChatOptions, vocabulary};
use crate::error::Result;
use crate::files;
use crate::tokenizer::{MAX_CONVERSATION_BYTES, Tokenizer};

/// An encoder of rows.
#[derive(Debug)]
pub(crate) struct ChatEncoder<'t> {
    tokenizer: &'t Tokenizer,
    options: ChatOptions,
    /// The error is why there are none, for a dataset whose rows need none.
    templates: std::result::Result<Templates, ChatError>,
    masks: std::result::Result<MaskOptions, ChatError>,
}

/// A document of a row.
#[derive(Debug)]
pub(crate) struct EncodedSample {
    pub(crate) ids: Vec<u32>,
    /// Which tokens are trained. That of the first says whether the document belongs to the row of the one
    /// before.
    pub(crate) trained: Vec<bool>,
    pub(crate) text_bytes: u64,
}

/// Documents of a row.
#[derive(Debug)]
pub(crate) struct EncodedRow {
    pub(crate) counts: RowCounts,
    /// Hash of the first message of a user. Rows with equal ones are held out together.
    pub(crate) question: u64,
    pub(crate) samples: Vec<EncodedSample>,
}

/// Failure of a row.
#[derive(Debug)]
pub(crate) enum RowError {
    /// It is dropped and counted under the first text. The second is what happened.
    Dropped(&'static str, String),
    /// It cannot be read.
    Row(ChatError),
    /// The template or the tokenizer cannot be used.
    Template(ChatError),
}

impl RowError {
    /// The reason under which the row is dropped and counted, and what happened. A row that cannot be read is
    /// dropped if `may_skip`.
    ///
    /// # Errors
    /// The row is not dropped.
    pub(crate) fn dropped(self, may_skip: bool) -> std::result::Result<(&'static str, String), ChatError> {
        match self {
            RowError::Dropped(reason, what) => Ok((reason, what)),
            RowError::Row(error) if may_skip => Ok((UNREADABLE, error.problem)),
            RowError::Row(error) | RowError::Template(error) => Err(error),
        }
    }
}

/// Rows with more text are dropped under this reason.
pub(super) const TOO_LONG: &str = "a text of more than 3 MiB";

impl<'t> ChatEncoder<'t> {
    /// An encoder with the template and the tokens of a tokenizer. If there is no template, or no token at
    /// which generation stops, rows that need it fail.
    ///
    /// # Errors
    /// A template that is refused.
    pub(crate) fn new(tokenizer: &'t Tokenizer, options: &ChatOptions) -> Result<ChatEncoder<'t>> {
        let templates = vocabulary::templates(tokenizer, options);
        let masks = MaskOptions::new(options.train_on, &tokenizer.stop_names(), &tokenizer.special_names());
        Ok(ChatEncoder { tokenizer, options: options.clone(), templates, masks })
    }

    /// Settings of the encoder.
    pub(crate) fn options(&self) -> &ChatOptions {
        &self.options
    }

    /// Hash of the templates, in hexadecimal; `None` if there are none.
    pub(crate) fn template_hash(&self) -> Option<String> {
        let templates = self.templates.as_ref().ok()?;
        let mut hash = Sha256::new();
        for template in templates.each() {
            hash.update(template.source().len().to_le_bytes());
            hash.update(template.source());
        }
        Some(files::hex(&hash.finalize()))
    }

    /// All that decides how a row is encoded, but the tokenizer.
    pub(crate) fn identity(&self) -> Value {
        let reads_date =
            self.templates.iter().flat_map(Templates::each).any(|template| template.reads_date());
        json!({
            "template": self.template_hash(),
            "special_tokens": self.tokenizer.template_tokens(),
            "stop_tokens": self.tokenizer.stop_tokens(),
            "kwargs": self.options.kwargs,
            "today": reads_date.then(|| date(self.options.today)),
            "train_on": self.options.train_on.name(),
        })
    }

    /// Encodes a row.
    pub(crate) fn encode(&self, text: &str) -> std::result::Result<EncodedRow, RowError> {
        let row = parse_row(text).map_err(RowError::Row)?;
        let format = recognise(&row).map_err(RowError::Row)?;
        match read_row(format, &row).map_err(RowError::Row)? {
            ChatRow::Chat(conversation) => self.conversation(format, &conversation),
            ChatRow::Pair { prompt, completion } => self.parts(format, &prompt, &completion),
            ChatRow::Text(text) => self.parts(format, "", &text),
        }
    }

    fn conversation(
        &self,
        format: RowFormat,
        conversation: &Conversation,
    ) -> std::result::Result<EncodedRow, RowError> {
        let templates = self.templates.as_ref().map_err(|error| RowError::Template(error.clone()))?;
        let masks = self.masks.as_ref().map_err(|error| RowError::Template(error.clone()))?;
        let mask = samples(conversation, templates, masks).map_err(|failure| match failure {
            RowFailure::Drop(reason) => RowError::Dropped(reason.name(), reason.to_string()),
            RowFailure::Error(error) => RowError::Template(error),
        })?;
        let mut counts = RowCounts {
            format,
            method: Some(mask.method),
            crossing_tokens: 0,
            missing_messages: mask.missing_messages as u64,
            turn_by_turn: (mask.method == Method::TurnByTurn)
                .then(|| [mask.whole_bytes as u64, mask.sample_bytes() as u64]),
        };
        let mut encoded: Vec<EncodedSample> = Vec::with_capacity(mask.samples.len());
        for sample in &mask.samples {
            if sample.text.len() > MAX_CONVERSATION_BYTES {
                return Err(RowError::Dropped(TOO_LONG, TOO_LONG.to_owned()));
            }
            let Encoded { ids, mut trained, crossing } =
                encode(self.tokenizer, sample).map_err(RowError::Template)?;
            if !trained.iter().skip(1).any(|&bit| bit) {
                continue;
            }
            if let Some(first) = trained.first_mut() {
                *first = !encoded.is_empty();
            }
            counts.crossing_tokens += crossing as u64;
            encoded.push(EncodedSample { ids, trained, text_bytes: sample.text.len() as u64 });
        }
        with_samples(EncodedRow { counts, question: question_of(conversation), samples: encoded })
    }

    /// A prompt and its completion, each encoded as text, then the end of the document.
    fn parts(
        &self,
        format: RowFormat,
        prompt: &str,
        completion: &str,
    ) -> std::result::Result<EncodedRow, RowError> {
        if prompt.len() + completion.len() > MAX_CONVERSATION_BYTES {
            return Err(RowError::Dropped(TOO_LONG, TOO_LONG.to_owned()));
        }
        let mut ids = pair_beginning(self.tokenizer, prompt).map_err(RowError::Template)?;
        let is_all = format == RowFormat::Text || self.options.train_on == TrainOn::All;
        let untrained = if is_all { 0 } else { ids.len() };
        let before = ids.len();
        let completed = encode_text(self.tokenizer, completion, prompt.is_empty());
        ids.extend(completed.map_err(RowError::Template)?);
        let is_empty = ids.len() == before;
        ids.push(self.tokenizer.end_of_document());
        let mut trained = vec![true; ids.len()];
        trained[..untrained.max(1)].fill(false);
        let samples = match is_empty {
            true => Vec::new(),
            false => {
                let text_bytes = (prompt.len() + completion.len()) as u64;
                vec![EncodedSample { ids, trained, text_bytes }]
            }
        };
        let counts =
            RowCounts { format, method: None, crossing_tokens: 0, missing_messages: 0, turn_by_turn: None };
        let question = if prompt.is_empty() { completion } else { prompt };
        with_samples(EncodedRow { counts, question: xxh3_64(question.as_bytes()), samples })
    }
}

/// Hash of the first message of a user; of all texts, if there is none.
fn question_of(conversation: &Conversation) -> u64 {
    let messages = &conversation.messages;
    let mut hash = Xxh3::new();
    let mut add = |message: &ChatMessage| message.texts().for_each(|text| hash.update(text.as_bytes()));
    match messages.iter().find(|message| message.role() == Role::User) {
        Some(question) => add(question),
        None => messages.iter().for_each(add),
    }
    hash.digest()
}

/// Token ids of a pair before its completion.
pub(super) fn pair_beginning(
    tokenizer: &Tokenizer,
    prompt: &str,
) -> std::result::Result<Vec<u32>, ChatError> {
    let mut ids = tokenizer.document_begin().to_vec();
    if !prompt.is_empty() {
        ids.extend(encode_text(tokenizer, prompt, true)?);
    }
    Ok(ids)
}

/// Token ids of a text, which begins a document or continues one.
fn encode_text(tokenizer: &Tokenizer, text: &str, begins: bool) -> std::result::Result<Vec<u32>, ChatError> {
    match begins {
        true => tokenizer.encode(text).map_err(|error| ChatError::new(error.to_string(), "check the row")),
        false => tokenizer.encode_continuation(text),
    }
}

/// The row, unless nothing in it is trained.
fn with_samples(row: EncodedRow) -> std::result::Result<EncodedRow, RowError> {
    if row.samples.is_empty() {
        let reason = DropReason::NoTrainedToken;
        return Err(RowError::Dropped(reason.name(), reason.to_string()));
    }
    Ok(row)
}
