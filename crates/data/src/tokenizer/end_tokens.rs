//! The tokens that end documents and stop generation.
//!
//! They may differ: a chat model stops at the end of a turn, but its documents end with the token of
//! pre-training. The end-of-document token is therefore a well-known one if the vocabulary has it, otherwise
//! the tokenizer's own end token.

use std::path::Path;

use serde_json::{Map, Value, json};
use tokenizers::AddedToken;

use super::tokenizer_json;
use crate::error::{DataError, Result};
use xtrain_checkpoint::first_few;

/// Special tokens that end a document in every vocabulary that has them.
const DOCUMENT_ENDS: [&str; 3] = [tokenizer_json::END_OF_TEXT, "<|end_of_text|>", "<｜end▁of▁sentence｜>"];
/// End tokens tried last, for a `tokenizer.json` without side files.
const TEXT_ENDS: [&str; 4] = ["</s>", "<eos>", "<|im_end|>", "<|eot_id|>"];

/// The file in which a saved tokenizer stores begin and end tokens that the model's config named.
pub(super) const NAMED_FILE: &str = "generation_config.json";

/// Origin of a tokenizer, and the end token that the user names.
pub(super) struct TokenizerSource<'s> {
    /// For messages.
    pub(super) location: &'s str,
    /// The folder whose side files are read.
    pub(super) side_folder: Option<&'s Path>,
    /// Name of the token that ends documents, instead of the one that the files name.
    pub(super) end_of_document: Option<&'s str>,
}

/// Begin and end tokens that a model's config names.
#[derive(Debug, Default)]
pub(super) struct ConfigTokens {
    pub(super) ends: Vec<u32>,
    pub(super) begin: Option<u32>,
}

impl ConfigTokens {
    /// Adds a token that ends texts.
    pub(super) fn add_end(&mut self, id: u32) {
        if !self.ends.contains(&id) {
            self.ends.push(id);
        }
    }

    /// Name and content of the file from which a loader restores these tokens; `None` if there are none.
    pub(super) fn file(&self) -> Option<(&'static str, String)> {
        let mut ids = Map::new();
        if let Some(begin) = self.begin {
            ids.insert("bos_token_id".to_owned(), json!(begin));
        }
        if !self.ends.is_empty() {
            ids.insert("eos_token_id".to_owned(), json!(self.ends));
        }
        (!ids.is_empty()).then(|| (NAMED_FILE, format!("{:#}\n", Value::Object(ids))))
    }

    /// Adds `eos_token_id` (a number or a list) and `bos_token_id` from a model's config.
    pub(super) fn add(&mut self, config: &Value) {
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        let ends = match config.get("eos_token_id") {
            Some(Value::Array(ids)) => ids.as_slice(),
            Some(value) => std::slice::from_ref(value),
            None => &[],
        };
        ends.iter().filter_map(id).for_each(|end| self.add_end(end));
        self.begin = self.begin.or_else(|| config.get("bos_token_id").and_then(id));
    }
}

/// The token that ends documents: the one that the user names; or else a well-known one, `named` by the
/// tokenizer's files, or a well-known end of a text.
pub(super) fn choose_end(
    source: &TokenizerSource<'_>,
    hf: &tokenizers::Tokenizer,
    added: &[(u32, AddedToken)],
    named: Option<u32>,
) -> Result<u32> {
    let is_special = |id: u32| added.iter().any(|(at, token)| *at == id && token.special);
    let known =
        |names: &[&str]| names.iter().filter_map(|name| hf.token_to_id(name)).find(|&id| is_special(id));
    let special: Vec<&str> =
        added.iter().filter(|(_, token)| token.special).map(|(_, token)| token.content.as_str()).collect();
    match source.end_of_document {
        Some(name) => hf.token_to_id(name).ok_or_else(|| no_such_end(source.location, name, &special)),
        None => known(&DOCUMENT_ENDS)
            .or(named)
            .or_else(|| known(&TEXT_ENDS))
            .ok_or_else(|| no_end(source, &special)),
    }
}

/// The error for a tokenizer without an end token.
fn no_end(source: &TokenizerSource<'_>, special: &[&str]) -> DataError {
    let problem = match source.side_folder {
        Some(_) => {
            "no token ends a document: no tokenizer_config.json, generation_config.json or config.json beside it \
             names one of its tokens"
        }
        None => "no token ends a document",
    };
    let file = source.side_folder.map_or(String::new(), |folder| {
        format!(", or as \"eos_token\" in {}", folder.join("tokenizer_config.json").display())
    });
    let advice = format!(
        "name one with data.end_of_document in a run file, with --end-of-document in tokenize{file}; {}",
        special_tokens(special)
    );
    DataError::tokenizer(source.location, problem, advice)
}

/// The error for a named end token that does not exist.
pub(super) fn no_such_end(location: &str, name: &str, special: &[&str]) -> DataError {
    DataError::tokenizer(
        location,
        format!("there is no token {name:?} to end documents with"),
        format!("name one of its tokens; {}", special_tokens(special)),
    )
}

/// The special tokens of a vocabulary, for messages.
fn special_tokens(names: &[&str]) -> String {
    const SHOWN: usize = 8;
    match names {
        [] => "it has no special tokens".to_owned(),
        names => {
            let quoted = names.iter().map(|name| format!("{name:?}"));
            format!("its special tokens are {}", first_few(quoted, SHOWN))
        }
    }
}
