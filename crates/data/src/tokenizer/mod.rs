//! Text to tokens and back.
//!
//! A [`Tokenizer`] is always backed by a `tokenizer.json`, loaded or made here, so that whatever serves the model
//! elsewhere tokenizes exactly as training did. The file is kept verbatim and written back verbatim. Four of its
//! forms (byte-level BPE with a known word pattern, BPE with marked spaces, bytes, characters) are encoded by fast
//! paths of this crate; all others, and everything that concerns prompts and decoding, by the tokenizers crate.
//!
//! Documents are encoded as plain text: the name of a special token inside a document is not that token. Prompts
//! are encoded as the file says, special tokens included. Both begin with the same tokens.

mod begin_of_document;
mod byte_bpe;
mod byte_budget;
mod cut_rule;
mod encoder;
mod load;
mod merge;
mod space_bpe;
mod stream_decoder;
mod tokenizer_json;
mod train_bpe;
mod words;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::OnceLock;

use serde_json::Value;
use sha2::{Digest, Sha256};
use tokenizers::{NormalizedString, Normalizer};

pub use begin_of_document::BeginOfDocument;
pub use cut_rule::CutRule;
pub use stream_decoder::StreamDecoder;

use crate::catch_panic::catch_panic;
use crate::error::{DataError, Result};
use crate::files;
use byte_budget::ByteBudget;
use encoder::Encoder;
use space_bpe::Prefix;
use train_bpe::WordCounts;

/// A tokenizer: encode documents and prompts, decode, save.
#[derive(Debug)]
pub struct Tokenizer {
    /// The file that it is from, for messages.
    location: String,
    json: Vec<u8>,
    side_files: BTreeMap<String, Vec<u8>>,
    hf: tokenizers::Tokenizer,
    /// The same with special tokens read as text; made when a document first needs it.
    hf_plain_text: OnceLock<tokenizers::Tokenizer>,
    encoder: Encoder,
    /// How much text the tokenizers crate works on at a time.
    budget: ByteBudget,
    cut: CutRule,
    hash: [u8; 32],
    vocab_size: usize,
    end_of_document: u32,
    stop_tokens: Vec<u32>,
    begin: Option<u32>,
    template_begin: Vec<u32>,
    document_begin: Vec<u32>,
    config_tokens: load::ConfigTokens,
}

/// So much text is with the tokenizers crate at a time, of one thread or of all together: it needs up to 300 times the
/// size of a text.
pub(crate) const MAX_HF_BYTES: usize = 3 << 20;

impl Tokenizer {
    /// Loads a `tokenizer.json`, or a folder that holds one beside the usual Hugging Face files
    /// (`tokenizer_config.json`, `special_tokens_map.json`, `generation_config.json`, `config.json`), which say
    /// which tokens begin and end a text.
    ///
    /// # Errors
    /// A missing or unreadable file, a file that is no tokenizer, and one without an end-of-document token.
    pub fn load(path: impl AsRef<Path>) -> Result<Tokenizer> {
        load::load(path.as_ref())
    }

    /// Plain bytes: 256 tokens and the end-of-document token, so a vocabulary of 257.
    pub fn bytes() -> Tokenizer {
        Tokenizer::from_generated_json(&tokenizer_json::bytes()).expect("the bytes tokenizer is a constant")
    }

    /// One token for every distinct character of `texts`, in the order of code points, and the end-of-document
    /// token. Encoding a character that is not among them is an error.
    ///
    /// # Errors
    /// Texts without any character; and the first error of `texts` itself.
    pub fn chars(texts: impl IntoIterator<Item = Result<String>>) -> Result<Tokenizer> {
        let mut alphabet = BTreeSet::new();
        for text in texts {
            alphabet.extend(text?.chars());
        }
        if alphabet.is_empty() {
            return Err(no_text("chars"));
        }
        Tokenizer::from_generated_json(&tokenizer_json::chars(&alphabet))
    }

    /// Trains byte-level BPE on `texts`: 256 bytes, merges, and the end-of-document token as the last id, together
    /// at most `vocab_size`. Fewer where the text runs out of repeated pairs. The same texts give the same file to
    /// the byte, on any number of threads. `on_merge` hears, before each merge, how many are found and how many are
    /// looked for; [`ControlFlow::Break`] ends it.
    ///
    /// # Errors
    /// `vocab_size` under 257; texts without any character; the first error of `texts` itself;
    /// [`DataError::Interrupted`].
    pub fn train_bpe(
        texts: impl IntoIterator<Item = Result<String>>,
        vocab_size: usize,
        on_merge: &mut dyn FnMut(usize, usize) -> ControlFlow<()>,
    ) -> Result<Tokenizer> {
        let Some(max_merges) = vocab_size.checked_sub(257) else {
            return Err(DataError::invalid(
                format!("a byte-level vocabulary of {vocab_size} tokens is too small"),
                "ask for at least 257 (256 bytes and the end-of-document token)",
            ));
        };
        let mut counts = WordCounts::default();
        let mut waiting = Vec::new();
        let mut waiting_bytes = 0;
        let mut seen_text = false;
        for text in texts {
            let text = text?;
            seen_text |= !text.is_empty();
            waiting_bytes += text.len();
            waiting.push(text);
            if waiting_bytes >= FEED_BYTES {
                counts.feed(&waiting);
                waiting.clear();
                waiting_bytes = 0;
            }
        }
        counts.feed(&waiting);
        if !seen_text {
            return Err(no_text("bpe"));
        }
        let merges = counts.learn_merges(max_merges, on_merge)?;
        if merges.len() < max_merges {
            tracing::warn!(
                "the text has too few repeated pairs for {vocab_size} tokens; the vocabulary has {}",
                257 + merges.len()
            );
        }
        Tokenizer::from_generated_json(&tokenizer_json::byte_level_bpe(&merges))
    }

    /// The tokens of a document, without any special token.
    ///
    /// # Errors
    /// A character outside a character vocabulary, named; a text too long for this kind of tokenizer.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_piece(text, true)
    }

    /// The tokens of a piece of a document, cut by [`Tokenizer::cut_rule`]: those of the document are those of its
    /// pieces in their order. Some vocabularies put a space before a document, so it matters which piece is the first.
    ///
    /// # Errors
    /// Those of [`Tokenizer::encode`].
    pub fn encode_piece(&self, text: &str, begins_document: bool) -> Result<Vec<u32>> {
        let contains = |added: &[String]| added.iter().any(|token| text.contains(token.as_str()));
        let mut ids = Vec::with_capacity(text.len() / 3);
        match &self.encoder {
            Encoder::Chars(vocab) => {
                for (at, c) in text.char_indices() {
                    ids.push(*vocab.get(&c).ok_or_else(|| unknown_character(text, at))?);
                }
            }
            Encoder::ByteBpe { bpe, nfc, added } => {
                if contains(added) {
                    return self.encode_with_hf(text);
                }
                // No character below U+0300 changes under NFC.
                if *nfc && text.chars().any(|c| c >= '\u{300}') {
                    bpe.encode(&self.normalise(text)?, &mut ids);
                } else {
                    bpe.encode(text, &mut ids);
                }
            }
            Encoder::SpaceBpe { bpe, added } if contains(added) => {
                // A later piece begins with the space that the file would put before it.
                let puts_space = bpe.prefix() == Prefix::Mark && !begins_document;
                return self.encode_with_hf(text.strip_prefix(' ').filter(|_| puts_space).unwrap_or(text));
            }
            Encoder::SpaceBpe { bpe, .. } => bpe.encode(text, begins_document, &mut ids),
            Encoder::HuggingFace => return self.encode_with_hf(text),
        }
        Ok(ids)
    }

    /// The tokens of a prompt: those that begin a document, then those of the text, in which special tokens are
    /// recognised. What the file adds at the end of a text is not added: the prompt goes on.
    ///
    /// # Errors
    /// A character outside a character vocabulary; whatever the tokenizer itself refuses.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>> {
        if let Encoder::Chars(vocab) = &self.encoder {
            let end = self.end_of_document_name().unwrap_or_default();
            let mut at = 0;
            for part in text.split(end.as_str()) {
                if let Some((i, _)) = part.char_indices().find(|(_, c)| !vocab.contains_key(c)) {
                    return Err(unknown_character(text, at + i));
                }
                at += part.len() + end.len();
            }
        }
        let encoding = catch_panic(|| self.hf.encode_fast(text, false)).map_err(|e| self.refused(&e))?;
        Ok([&self.document_begin, encoding.get_ids()].concat())
    }

    /// The text of `ids`. Bytes that are no UTF-8 become U+FFFD; ids without a token (a model's vocabulary may be
    /// padded beyond its tokenizer's) give nothing.
    ///
    /// # Errors
    /// Whatever the file's decoder refuses.
    pub fn decode(&self, ids: &[u32], special: SpecialTokens) -> Result<String> {
        catch_panic(|| self.hf.decode(ids, special == SpecialTokens::Hide)).map_err(|e| self.refused(&e))
    }

    /// A decoder that takes one token at a time and gives text as soon as it is complete.
    pub fn stream_decoder(&self, special: SpecialTokens) -> StreamDecoder<'_> {
        StreamDecoder::new(self, special)
    }

    /// `tokenizer.json` and the files around it, by name: what `AutoTokenizer` loads.
    pub fn files(&self) -> impl Iterator<Item = (&str, &[u8])> {
        let side = self.side_files.iter().map(|(name, bytes)| (name.as_ref(), bytes.as_ref()));
        side.chain([("tokenizer.json", self.json.as_ref())])
    }

    /// Writes [`Tokenizer::files`] into `folder`, and a `generation_config.json` with the tokens that the model's own files named where
    /// there were any: what is loaded from `folder` begins and ends texts as this one does.
    ///
    /// # Errors
    /// The folder or a file cannot be written.
    pub fn save(&self, folder: &Path) -> Result<()> {
        files::create_folder(folder)?;
        self.files().try_for_each(|(name, bytes)| files::write_atomically(&folder.join(name), bytes))?;
        match self.config_tokens.file() {
            Some((name, text)) => files::write_atomically(&folder.join(name), text.as_bytes()),
            None => Ok(()),
        }
    }

    /// The names of all files that [`Tokenizer::save`] may write.
    pub(crate) fn saved_names() -> impl Iterator<Item = &'static str> {
        load::saved_names()
    }

    /// One more than the largest token id, added tokens included.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The token that the packer puts after each document.
    pub fn end_of_document(&self) -> u32 {
        self.end_of_document
    }

    /// The name of that token.
    pub fn end_of_document_name(&self) -> Option<String> {
        self.hf.id_to_token(self.end_of_document)
    }

    /// The tokens at which generation stops; the end-of-document token is among them. Ascending.
    pub fn stop_tokens(&self) -> &[u32] {
        &self.stop_tokens
    }

    /// The beginning-of-sequence token, where the files name one.
    pub fn begin_of_sequence(&self) -> Option<u32> {
        self.begin
    }

    /// SHA-256 of `tokenizer.json` in canonical form (keys sorted, no white space): reformatting a file keeps it,
    /// any change of meaning changes it.
    pub fn hash(&self) -> [u8; 32] {
        self.hash
    }

    /// [`Tokenizer::hash`] in hexadecimal, as [`crate::Dataset::tokenizer_hash`] says it.
    pub fn hash_hex(&self) -> String {
        files::hex(&self.hash)
    }

    /// Where a long document may be cut so that its pieces give the same tokens as the whole.
    pub fn cut_rule(&self) -> CutRule {
        self.cut
    }

    /// The same tokenizer with another end-of-document token.
    pub(crate) fn with_end_of_document_id(mut self, id: u32) -> Result<Tokenizer> {
        if self.hf.id_to_token(id).is_none() {
            return Err(DataError::tokenizer(
                "option",
                format!("there is no token {id} to end documents"),
                "name a token of this vocabulary",
            ));
        }
        self.end_of_document = id;
        if let Err(at) = self.stop_tokens.binary_search(&id) {
            self.stop_tokens.insert(at, id);
        }
        Ok(self)
    }

    fn from_generated_json(json: &Value) -> Result<Tokenizer> {
        let bytes = serde_json::to_vec_pretty(json).map_err(|e| DataError::Internal(e.to_string()))?;
        let config = serde_json::to_vec_pretty(&tokenizer_json::config(tokenizer_json::END_OF_TEXT))
            .map_err(|e| DataError::Internal(e.to_string()))?;
        let side_files = BTreeMap::from([("tokenizer_config.json".to_owned(), config)]);
        load::from_parts("made here", bytes, side_files, load::ConfigTokens::default())
    }

    /// Documents as the tokenizers crate sees them: special tokens are text.
    fn encode_with_hf(&self, text: &str) -> Result<Vec<u32>> {
        if text.len() > MAX_HF_BYTES {
            return Err(DataError::tokenizer(
                "of this kind",
                format!("cannot encode {} MiB of text as one document", text.len() >> 20),
                "split the document (a separator, or one document a line)",
            ));
        }
        let hf_plain_text = self.hf_plain_text.get_or_init(|| {
            let mut copy = self.hf.clone();
            copy.set_encode_special_tokens(true);
            copy
        });
        let _share = self.budget.take(text.len());
        let encoding =
            catch_panic(|| hf_plain_text.encode_fast(text, false)).map_err(|e| self.refused(&e))?;
        Ok(encoding.get_ids().to_vec())
    }

    fn normalise(&self, text: &str) -> Result<String> {
        let mut normalised = NormalizedString::from(text);
        if let Some(normalizer) = self.hf.get_normalizer() {
            catch_panic(|| normalizer.normalize(&mut normalised)).map_err(|e| self.refused(&e))?;
        }
        Ok(normalised.get().to_owned())
    }

    fn refused(&self, error: &str) -> DataError {
        DataError::tokenizer(&self.location, format!("failed: {error}"), "check the file that it came from")
    }
}

/// Whether decoding shows special tokens such as `<|endoftext|>`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpecialTokens {
    /// Leave them out.
    Hide,
    /// Write their names.
    Show,
}

/// Training counts words in batches of about this size.
const FEED_BYTES: usize = 8 << 20;

/// SHA-256 over the value with its keys sorted.
fn canonical_hash(value: &Value) -> [u8; 32] {
    fn sorted(value: &Value) -> Value {
        match value {
            Value::Object(entries) => {
                let in_order: BTreeMap<&String, &Value> = entries.iter().collect();
                Value::Object(in_order.into_iter().map(|(key, value)| (key.clone(), sorted(value))).collect())
            }
            Value::Array(items) => Value::Array(items.iter().map(sorted).collect()),
            other => other.clone(),
        }
    }
    Sha256::digest(sorted(value).to_string()).into()
}

fn no_text(kind: &str) -> DataError {
    DataError::tokenizer(kind, "there is no text to make a vocabulary from", "name input that is not empty")
}

/// Names the character at byte `at` of `text`, with what stands before it, so that it can be searched for.
fn unknown_character(text: &str, at: usize) -> DataError {
    let c = text[at..].chars().next().unwrap_or_default();
    let before: String = text[text.floor_char_boundary(at.saturating_sub(24))..at].to_owned();
    DataError::tokenizer(
        "chars",
        format!("the character {c:?} (U+{:04X}) after {before:?} is not in the vocabulary", c as u32),
        "make the vocabulary from text that has it, or use bytes or BPE",
    )
}
