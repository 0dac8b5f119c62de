//! The part of a tokenizer that conversations need: its templates, the names of its special tokens, and
//! tokens with their places in a text.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::Value;
use xtrain_chat::template::special_tokens;
use xtrain_chat::{ChatError, Encode, EncodedToken, TemplateSettings, Templates};

use super::documents::{may_change_under_nfc, unknown_character};
use super::encoder::Encoder;
use super::placed_bpe::PlacedBpe;
use super::{MAX_HF_BYTES, Tokenizer};
use crate::catch_panic::catch_panic;
use crate::error::DataError;

/// Text put before a piece that is no beginning, so that no space is put before the piece. It is a token of
/// its own, or the piece is refused.
const ANCHOR: char = '\n';

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

    /// True if a space is put before a text that has none.
    fn puts_space(&self) -> bool {
        let ids = |text: &str| {
            catch_panic(|| self.hf.encode_fast(text, false)).map(|found| found.get_ids().to_vec())
        };
        matches!((ids("a"), ids(" a")), (Ok(one), Ok(other)) if one == other)
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
        if begins || !self.puts_space() {
            return self.encode_with_places(text, splits_special);
        }
        let tokens = self.encode_with_places(&format!("{ANCHOR}{text}"), splits_special)?;
        // The space before the anchor may be a token of its own.
        let is_anchors = |token: &&EncodedToken| token.end <= 1;
        let anchors = tokens.iter().take_while(is_anchors).count();
        let rest = tokens[anchors..].iter().map(|token| {
            let (start, end) = (token.start.checked_sub(1)?, token.end.checked_sub(1)?);
            Some(EncodedToken { id: token.id, start, end })
        });
        rest.collect::<Option<_>>().filter(|_| anchors > 0).ok_or_else(|| {
            let begins = &text[..text.floor_char_boundary(24)];
            let problem =
                format!("the name of a special token in the row splits a text, and the part {begins:?} cannot be encoded alone");
            ChatError::new(problem, "remove the name from the row")
        })
    }
}
