//! Text in which the names of special tokens are these tokens, as the `tokenizers` crate reads it.

use aho_corasick::AhoCorasick;

use super::documents::unknown_character;
use super::encoder::Encoder;
use super::{MAX_HF_BYTES, Tokenizer};
use crate::catch_panic::catch_panic;
use crate::error::{DataError, Result};

impl Tokenizer {
    /// Encodes a prompt: the begin tokens of a document, then the text, with special tokens recognised.
    /// Tokens that the file's template puts after a text are not added, because the model continues the
    /// prompt.
    ///
    /// # Errors
    /// A character that a character vocabulary lacks; errors of the `tokenizers` crate.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>> {
        Ok([self.document_begin(), &self.encode_with_hf_and_special(text)?].concat())
    }

    /// Encodes a text with special tokens recognised, and without the tokens that the file's template puts
    /// before or after a text.
    ///
    /// # Errors
    /// A character that a character vocabulary lacks; a text of more than 3 MiB with a special token, or one
    /// too long for this kind of tokenizer; errors of the `tokenizers` crate.
    pub fn encode_with_special(&self, text: &str) -> Result<Vec<u32>> {
        let names = self.special_names.get_or_init(|| self.search_for_special_names());
        let has_none = names.as_ref().is_some_and(|names| !names.is_match(text));
        if has_none || self.splits_special_tokens {
            return self.encode(text);
        }
        if text.len() > MAX_HF_BYTES {
            return Err(DataError::tokenizer(
                &self.location,
                format!("cannot encode {} MiB of text with special tokens", text.len() >> 20),
                "shorten the text",
            ));
        }
        let _share = self.budget.take(text.len());
        self.encode_with_hf_and_special(text)
    }

    /// The token before a text that has none before it, where a model needs one: that which
    /// `AutoTokenizer` knows as `bos_token`, or else as `eos_token`; for files that name neither, the token
    /// that begins or ends documents.
    pub fn prefix_token(&self) -> u32 {
        self.named_prefix.or(self.begin).unwrap_or(self.end_of_document)
    }

    fn encode_with_hf_and_special(&self, text: &str) -> Result<Vec<u32>> {
        if let Encoder::Chars(vocab) = &self.encoder {
            let mut special = self.special_names();
            special.extend(self.end_of_document_name());
            special.retain(|name| !name.is_empty());
            let mut at = 0;
            while let Some(c) = text[at..].chars().next() {
                let named =
                    special.iter().filter(|name| text[at..].starts_with(*name)).map(String::len).max();
                if named.is_none() && !vocab.contains_key(&c) {
                    return Err(unknown_character(text, at));
                }
                at += named.unwrap_or(c.len_utf8());
            }
        }
        self.refuse_growth(text)?;
        let hf = if self.splits_special_tokens { self.hf_plain_text() } else { &self.hf };
        let encoding = catch_panic(|| hf.encode_fast(text, false)).map_err(|e| self.refused(&e))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// `None` if a special token is looked for in the text after normalization.
    fn search_for_special_names(&self) -> Option<AhoCorasick> {
        let added = self.hf.get_added_tokens_decoder().into_values();
        let special: Vec<_> = added.filter(|token| token.special && !token.content.is_empty()).collect();
        let are_plain = special.iter().all(|token| !token.normalized);
        are_plain.then(|| AhoCorasick::new(special.iter().map(|token| &token.content)).ok())?
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    /// The bytes tokenizer with an added special token, and with these names in its config.
    fn with_special(name: &str, normalized: bool, config: &Value) -> Tokenizer {
        let folder = tempfile::tempdir().expect("a folder");
        Tokenizer::bytes().save(folder.path()).expect("saved");
        let path = folder.path().join("tokenizer.json");
        let mut json: Value = serde_json::from_slice(&std::fs::read(&path).expect("a file")).expect("JSON");
        json["added_tokens"].as_array_mut().expect("a list").push(json!({
            "id": 257, "content": name, "special": true, "single_word": false, "lstrip": true,
            "rstrip": false, "normalized": normalized
        }));
        std::fs::write(&path, json.to_string()).expect("written");
        std::fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).expect("written");
        Tokenizer::load(folder.path()).expect("a tokenizer")
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

        #[test]
        fn texts_without_special_tokens_have_the_same_tokens_on_both_paths(
            parts in proptest::collection::vec(prop_oneof!["[a-c <>|]{0,6}", Just("<x>".to_owned()), Just("é\n".to_owned())], 0..6),
            normalized: bool,
        ) {
            let tokenizer = with_special("<x>", normalized, &json!({"eos_token": "<|endoftext|>"}));
            let text = parts.concat();
            let found = tokenizer.encode_with_special(&text).expect("encoded");
            prop_assert_eq!(&found, &tokenizer.encode_with_hf_and_special(&text).expect("encoded"));
            prop_assert_eq!(found.contains(&257), text.contains("<x>"));
        }
    }

    #[test]
    fn the_prefix_token_is_the_begin_token_that_the_tokenizer_names_or_its_end_token() {
        let prefix = |config: Value| with_special("<x>", false, &config).prefix_token();
        assert_eq!(prefix(json!({"bos_token": "<x>", "eos_token": "<|endoftext|>"})), 257);
        // Documents end with another token than chats.
        assert_eq!(prefix(json!({"eos_token": "<x>"})), 257);
        assert_eq!(prefix(json!({})), 256);
        assert_eq!(Tokenizer::bytes().prefix_token(), 256);
    }
}
