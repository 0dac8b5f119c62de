//! The part of a tokenizer that conversations need: its templates, the names of its special tokens, and
//! tokens with their places in a text.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::Value;
use tokenizers::{AddedVocabulary, OffsetReferential, OffsetType, PreTokenizer};
use xtrain_chat::template::special_tokens;
use xtrain_chat::{ChatError, Encode, EncodedToken, TemplateSettings, Templates};

use super::documents::{may_change_under_nfc, unknown_character};
use super::encoder::Encoder;
use super::placed_bpe::PlacedBpe;
use super::{MAX_HF_BYTES, Tokenizer};
use crate::catch_panic::catch_panic;
use crate::error::DataError;

/// Texts, one of which is put before a piece that is no beginning, so that no space is put before the piece.
/// It has tokens of its own, or the piece is refused.
const ANCHORS: [char; 2] = ['\n', '東'];

impl Tokenizer {
    /// The templates among its files, if there are any; their place, for messages, is the tokenizer's folder.
    ///
    /// # Errors
    /// No template; a template that is refused.
    pub(crate) fn chat_templates(&self, settings: &TemplateSettings) -> Result<Templates, ChatError> {
        let folder = Path::new(&self.location).parent().unwrap_or(Path::new(""));
        let read = |name: &str| match self.side_files.get(name) {
            Some(bytes) => match String::from_utf8(bytes.clone()) {
                Ok(text) => Ok(Some(text)),
                Err(_) => Err(ChatError::new(
                    format!("{}: it is no UTF-8", folder.join(name).display()),
                    "save it as UTF-8",
                )),
            },
            None => Ok(None),
        };
        Templates::of_files(folder, &read, settings)
    }

    /// True if both have the same chat templates and stop at the same tokens. Hashes do not say that.
    pub fn is_same_in_chat(&self, other: &Tokenizer) -> bool {
        let stops = |tokenizer: &Tokenizer| tokenizer.stop_tokens.iter().copied().collect::<BTreeSet<u32>>();
        self.template_texts() == other.template_texts() && stops(self) == stops(other)
    }

    /// The texts of the templates among its files, by their place.
    fn template_texts(&self) -> BTreeMap<&str, Value> {
        let files = self.side_files.iter().filter(|(name, _)| name.contains("chat_template"));
        let mut texts: BTreeMap<&str, Value> = files
            .map(|(name, bytes)| (name.as_str(), Value::String(String::from_utf8_lossy(bytes).into_owned())))
            .collect();
        let config = self.side_files.get("tokenizer_config.json");
        let config: Option<Value> = config.and_then(|bytes| serde_json::from_slice(bytes).ok());
        if let Some(template) = config.as_ref().and_then(|config| config.get("chat_template")) {
            texts.insert("tokenizer_config.json", template.clone());
        }
        texts
    }

    /// Special tokens by the names that templates know them by, such as `bos_token`.
    pub(crate) fn template_tokens(&self) -> BTreeMap<String, String> {
        let config = self.side_files.get("tokenizer_config.json");
        let config: Option<Value> = config.and_then(|bytes| serde_json::from_slice(bytes).ok());
        special_tokens(&config.unwrap_or_default())
    }

    /// Names of the special tokens, in the order of their ids.
    pub(crate) fn special_names(&self) -> Vec<String> {
        let mut added: Vec<_> = self.hf.get_added_tokens_decoder().into_iter().collect();
        added.sort_by_key(|(id, _)| *id);
        added.into_iter().filter(|(_, token)| token.special).map(|(_, token)| token.content).collect()
    }

    /// Names of the tokens at which generation stops.
    pub(crate) fn stop_names(&self) -> Vec<String> {
        self.stop_tokens.iter().filter_map(|&id| self.token(id)).collect()
    }

    /// Encodes a text that continues another, before which no space is put.
    ///
    /// # Errors
    /// A text that cannot be encoded, or not without the text before it.
    pub fn encode_continuation(&self, text: &str) -> Result<Vec<u32>, ChatError> {
        let refused = |error: DataError| ChatError::new(error.to_string(), "check the row");
        if let Some(ids) = self.encode_fast(text, false).map_err(refused)? {
            return Ok(ids);
        }
        Ok(Encode::encode(self, text, true, false)?.into_iter().map(|token| token.id).collect())
    }

    /// True if something is put before a text, or a space at its start is removed.
    fn changes_beginnings(&self) -> bool {
        let pieces = |text: &str| {
            let pieces = catch_panic(|| {
                let mut pieces = AddedVocabulary::new().extract_and_normalize(self.hf.get_normalizer(), text);
                let step = self.hf.get_pre_tokenizer();
                step.map_or(Ok(()), |step| step.pre_tokenize(&mut pieces))?;
                Ok::<_, tokenizers::Error>(pieces)
            });
            let pieces = pieces.unwrap_or_else(|_| text.into());
            let pieces = pieces.get_splits(OffsetReferential::Normalized, OffsetType::None);
            pieces.into_iter().map(|(piece, ..)| piece).collect::<String>()
        };
        let alone = pieces("a");
        alone != "a" || pieces(" a") == alone
    }

    /// As [`Tokenizer::encode_with_places`], by the fast path; `None` for a text or a tokenizer that it does
    /// not encode.
    fn encode_with_places_fast(&self, text: &str) -> Result<Option<Vec<EncodedToken>>, ChatError> {
        let Encoder::ByteBpe { bpe, nfc } = &self.encoder else { return Ok(None) };
        let placed = self.placed.get_or_init(|| PlacedBpe::from_tokenizer(&self.hf));
        let Some(placed) = placed.as_ref().filter(|_| !bpe.lacks_byte_of(text)) else { return Ok(None) };
        if *nfc && text.chars().any(may_change_under_nfc) {
            let refused = |error: DataError| ChatError::new(error.to_string(), "check tokenizer.json");
            if self.normalise(text).map_err(refused)? != text {
                return Ok(None);
            }
        }
        Ok(Some(placed.encode(bpe, text)))
    }

    /// The byte at which a character starts that a character vocabulary lacks. The `tokenizers` crate leaves
    /// it out.
    fn unknown_character_at(&self, text: &str, splits_special: bool) -> Option<usize> {
        let Encoder::Chars(vocab) = &self.encoder else { return None };
        let added = self.hf.get_added_tokens_decoder().into_values();
        let names: Vec<String> = added
            .filter(|token| !(token.content.is_empty() || splits_special && token.special))
            .map(|token| token.content)
            .collect();
        let mut at = 0;
        while let Some(c) = text[at..].chars().next() {
            match names.iter().filter(|name| text[at..].starts_with(name.as_str())).map(String::len).max() {
                Some(name) => at += name,
                None if vocab.contains_key(&c) => at += c.len_utf8(),
                None => return Some(at),
            }
        }
        None
    }

    fn encode_with_places(&self, text: &str, splits_special: bool) -> Result<Vec<EncodedToken>, ChatError> {
        if !splits_special && let Some(tokens) = self.encode_with_places_fast(text)? {
            return Ok(tokens);
        }
        let refused = |problem: String| ChatError::new(problem, "check the text, or tokenizer.json");
        let hf = if splits_special { self.hf_plain_text() } else { &self.hf };
        let _share = self.budget.take(text.len());
        self.refuse_growth(text).map_err(|error| refused(error.to_string()))?;
        if let Some(at) = self.unknown_character_at(text, splits_special) {
            return Err(refused(unknown_character(text, at).to_string()));
        }
        let encoding = catch_panic(|| hf.encode_char_offsets(text, false)).map_err(|error| {
            let begins = &text[..text.floor_char_boundary(24)];
            refused(format!(
                "tokenizer {} cannot encode the text that begins with {begins:?}: {error}",
                self.location
            ))
        })?;
        let tokens = encoding.get_ids().iter().zip(encoding.get_offsets());
        Ok(tokens.map(|(&id, &(start, end))| EncodedToken { id, start, end }).collect())
    }
}

/// Maximum size of a rendered conversation.
pub(crate) const MAX_CONVERSATION_BYTES: usize = MAX_HF_BYTES;

impl Encode for Tokenizer {
    fn encode(&self, text: &str, splits_special: bool, begins: bool) -> Result<Vec<EncodedToken>, ChatError> {
        if begins || !self.changes_beginnings() {
            return self.encode_with_places(text, splits_special);
        }
        let added = self.hf.get_added_tokens_decoder();
        // Some tokenizers put a space after an added token.
        let is_in_name = |anchor: char| added.values().any(|token| token.content.contains(anchor));
        for anchor in ANCHORS.into_iter().filter(|&anchor| !is_in_name(anchor)) {
            let tokens = self.encode_with_places(&format!("{anchor}{text}"), splits_special)?;
            // The space before the anchor may be a token of its own.
            let anchors = tokens.iter().take_while(|token| token.end <= 1).count();
            let rest = tokens[anchors..].iter().map(|token| {
                let (start, end) = (token.start.checked_sub(1)?, token.end.checked_sub(1)?);
                Some(EncodedToken { id: token.id, start, end })
            });
            if let Some(rest) = rest.collect::<Option<_>>().filter(|_| anchors > 0) {
                return Ok(rest);
            }
        }
        let begins = &text[..text.floor_char_boundary(24)];
        Err(ChatError::new(
            format!(
                "the tokenizer changes the spaces before texts, and cannot encode {begins:?} as the rest of one"
            ),
            "remove the names of special tokens from the row, or begin its completion with a space",
        ))
    }
}
