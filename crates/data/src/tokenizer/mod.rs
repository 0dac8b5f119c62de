//! Tokenizers: encode text to tokens and decode it again.
//!
//! A [`Tokenizer`] always has a `tokenizer.json`, loaded or generated here, so that other engines tokenize
//! exactly as training did. The file is stored and saved verbatim. Fast paths of this crate encode documents
//! for four kinds (byte-level BPE with a known word pattern, BPE with marked spaces, bytes, characters). The
//! `tokenizers` crate encodes documents of all other kinds, encodes prompts, and decodes. Conversations, for
//! which the places of tokens are found too, have a fast path for byte-level BPE.
//!
//! Documents are encoded as plain text: the name of a special token in a document is not that token. Prompts
//! are encoded as the file specifies, with special tokens. Both start with the same tokens.

mod added_in_text;
mod begin_of_document;
mod byte_bpe;
mod byte_budget;
mod chat;
mod chat_identity;
mod cut_rule;
mod cuts;
mod documents;
mod encoder;
mod end_tokens;
mod generated;
mod grow;
mod load;
mod long_text;
mod merge;
mod normalized_size;
mod placed_bpe;
mod prompt;
mod read_tokenizer;
mod regex_limits;
mod shape;
mod space_bpe;
mod stream_decoder;
mod tokenizer_json;
mod train_bpe;
mod transformers;
mod words;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::OnceLock;

use aho_corasick::AhoCorasick;
use serde_json::Value;
use sha2::{Digest, Sha256};

pub use begin_of_document::BeginOfDocument;
pub(crate) use chat::MAX_CONVERSATION_BYTES;
pub use cut_rule::CutRule;
pub(crate) use documents::MAX_HF_BYTES;
pub use generated::MIN_BPE_TOKENS;
pub use grow::Growth;
pub(crate) use regex_limits::set as limit_expressions;
pub use stream_decoder::StreamDecoder;

use crate::catch_panic::catch_panic;
use crate::error::{DataError, Result};
use crate::files;
use added_in_text::AddedInText;
use byte_budget::ByteBudget;
use encoder::Encoder;
use long_text::LongText;
use normalized_size::NormalizedSize;
use placed_bpe::PlacedBpe;

/// A tokenizer: encodes documents and prompts, decodes, and is saved with datasets and models.
#[derive(Debug)]
pub struct Tokenizer {
    /// Path of its file, for messages.
    location: String,
    json: Vec<u8>,
    side_files: BTreeMap<String, Vec<u8>>,
    hf: tokenizers::Tokenizer,
    /// `hf` with special tokens as plain text; created when first needed.
    hf_plain_text: OnceLock<tokenizers::Tokenizer>,
    /// True if special tokens in a prompt are plain text too.
    splits_special_tokens: bool,
    /// Search for names of special tokens, if names are enough to find them; created when first needed.
    special_names: OnceLock<Option<AhoCorasick>>,
    encoder: Encoder,
    added: AddedInText,
    /// The finder of tokens' places, if the encoder has one; created when first needed.
    placed: OnceLock<Option<PlacedBpe>>,
    /// Limits the text after normalization.
    normalized_size: NormalizedSize,
    /// Limits the text that the `tokenizers` crate encodes at a time.
    budget: ByteBudget,
    /// Proven when first needed, for encoders that do not know it.
    cut: OnceLock<CutRule>,
    /// Encoder of long texts that cannot be cut, if there is one; created when first needed.
    long_text: OnceLock<Option<LongText>>,
    hash: [u8; 32],
    vocab_size: usize,
    end_of_document: u32,
    stop_tokens: Vec<u32>,
    begin: Option<u32>,
    /// The begin or end token that the tokenizer's own files name.
    named_prefix: Option<u32>,
    template_begin: Vec<u32>,
    document_begin: Vec<u32>,
    config_tokens: end_tokens::ConfigTokens,
    /// Set if the model is trained on conversations.
    chat: Option<chat_identity::ChatIdentity>,
}

impl Tokenizer {
    /// Loads a tokenizer file, or the `tokenizer.json` of a folder. Other Hugging Face files beside a
    /// `tokenizer.json` (`tokenizer_config.json`, `special_tokens_map.json`, `generation_config.json`,
    /// `config.json`) name the tokens that begin and end a text.
    ///
    /// # Errors
    /// A missing or unreadable file; a file that is not a tokenizer; a tokenizer without an end-of-document
    /// token.
    pub fn load(path: impl AsRef<Path>) -> Result<Tokenizer> {
        load::load(path.as_ref(), None)
    }

    /// As [`Tokenizer::load`], with the name of the token that ends documents, for files that name none or
    /// another one.
    ///
    /// # Errors
    /// Those of [`Tokenizer::load`]; a token that the vocabulary lacks.
    pub fn load_with_end_of_document(path: impl AsRef<Path>, name: &str) -> Result<Tokenizer> {
        load::load(path.as_ref(), Some(name))
    }

    /// Ends documents with the token `name`.
    ///
    /// # Errors
    /// A token that the vocabulary lacks.
    pub fn with_end_of_document(mut self, name: &str) -> Result<Tokenizer> {
        let Some(id) = self.hf.token_to_id(name) else {
            let end = self.end_of_document_name().unwrap_or_default();
            return Err(end_tokens::no_such_end(&self.location, name, &[&end]));
        };
        // The saved files name it too.
        if id != self.end_of_document {
            self.config_tokens.add_end(id);
        }
        self.with_end_of_document_id(id)
    }

    /// Decodes tokens. Bytes that are not UTF-8 become U+FFFD. Ids without a token (a model's vocabulary may
    /// be padded) are skipped.
    ///
    /// # Errors
    /// Errors of the `tokenizers` crate.
    pub fn decode(&self, ids: &[u32], special: SpecialTokens) -> Result<String> {
        catch_panic(|| self.hf.decode(ids, special == SpecialTokens::Hide)).map_err(|e| self.refused(&e))
    }

    /// Decodes tokens that continue the tokens `before`. The result is what they add to the text of `before`:
    /// some decoders write no space before the first token of a text.
    ///
    /// # Errors
    /// Errors of the `tokenizers` crate.
    pub fn decode_after(&self, before: &[u32], ids: &[u32], special: SpecialTokens) -> Result<String> {
        let mut decoder = self.stream_decoder(before, special)?;
        let mut text = String::new();
        for &id in ids {
            text.push_str(&decoder.push(id)?);
        }
        text.push_str(&decoder.finish()?);
        Ok(text)
    }

    /// A decoder that takes one token at a time and returns text as soon as it is complete. The tokens
    /// continue `before`, as in [`Tokenizer::decode_after`].
    ///
    /// # Errors
    /// Errors of the `tokenizers` crate.
    pub fn stream_decoder(&self, before: &[u32], special: SpecialTokens) -> Result<StreamDecoder<'_>> {
        StreamDecoder::new(self, before, special)
    }

    /// `tokenizer.json` and its side files, by name, as `AutoTokenizer` loads them.
    pub fn files(&self) -> impl Iterator<Item = (&str, &[u8])> {
        let side = self.side_files.iter().map(|(name, bytes)| (name.as_ref(), bytes.as_ref()));
        side.chain([("tokenizer.json", self.json.as_ref())])
    }

    /// Writes [`Tokenizer::files`] to `folder`, and a `generation_config.json` with the begin and end tokens
    /// of the model's config, if it named any, so that a tokenizer loaded from `folder` has the same ones.
    ///
    /// # Errors
    /// The folder or a file cannot be written.
    pub fn save(&self, folder: &Path) -> Result<()> {
        files::create_folder(folder)?;
        for (name, bytes) in self.files() {
            let path = folder.join(name);
            path.parent().map(files::create_folder).transpose()?;
            files::write_atomically(&path, bytes)?;
        }
        if let Some(chat) = &self.chat {
            files::write_json(&folder.join(chat_identity::CHAT_FILE), chat)?;
        }
        match self.config_tokens.file() {
            Some((name, text)) => files::write_atomically(&folder.join(name), text.as_bytes()),
            None => Ok(()),
        }
    }

    /// Names of all files that [`Tokenizer::save`] may write directly to its folder.
    pub(crate) fn saved_names() -> impl Iterator<Item = &'static str> {
        load::saved_names()
    }

    /// Removes what [`Tokenizer::save`] wrote to `folder`.
    ///
    /// # Errors
    /// A file that cannot be removed.
    pub(crate) fn remove_saved(folder: &Path) -> Result<()> {
        load::remove_saved(folder)
    }

    /// Largest token id plus one, including added tokens.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The token after each document of a dataset.
    pub fn end_of_document(&self) -> u32 {
        self.end_of_document
    }

    /// Name of the end-of-document token.
    pub fn end_of_document_name(&self) -> Option<String> {
        self.hf.id_to_token(self.end_of_document)
    }

    /// The name of a token, if there is one with this id.
    pub fn token(&self, id: u32) -> Option<String> {
        self.hf.id_to_token(id)
    }

    /// The id of the token with this name, if there is one.
    pub(crate) fn id_of(&self, name: &str) -> Option<u32> {
        self.hf.token_to_id(name)
    }

    /// True if names of special tokens in texts are text (`split_special_tokens` of tokenizer_config.json).
    pub fn splits_special_tokens(&self) -> bool {
        self.splits_special_tokens
    }

    /// Tokens at which generation stops, including the end-of-document token. Ascending.
    pub fn stop_tokens(&self) -> &[u32] {
        &self.stop_tokens
    }

    /// The beginning-of-sequence token, if the files name one.
    pub fn begin_of_sequence(&self) -> Option<u32> {
        self.begin
    }

    /// SHA-256 of `tokenizer.json` in canonical form (sorted keys, no white space), which does not depend on
    /// formatting.
    pub fn hash(&self) -> [u8; 32] {
        self.hash
    }

    /// [`Tokenizer::hash`] in hexadecimal, comparable with [`crate::Dataset::tokenizer_hash`].
    pub fn hash_hex(&self) -> String {
        files::hex(&self.hash)
    }

    /// The rule for splitting long documents without changing their tokens.
    pub fn cut_rule(&self) -> CutRule {
        let rule = *self.cut.get_or_init(|| self.added.limit(cuts::rule_of(&self.hf), ' '));
        match rule {
            CutRule::Never if self.long_text().is_some() => CutRule::InEncoder,
            rule => rule,
        }
    }

    /// Replaces the end-of-document token.
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

    fn refused(&self, error: &str) -> DataError {
        DataError::tokenizer(&self.location, format!("failed: {error}"), "check that file")
    }
}

/// Treatment of special tokens such as `<|endoftext|>` in decoding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpecialTokens {
    /// Skip special tokens.
    Hide,
    /// Write their names.
    Show,
}

/// SHA-256 of a JSON value with sorted keys.
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
