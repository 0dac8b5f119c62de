//! The loader of `tokenizer.json` and its side files, which name the tokens that begin and end a text.
//!
//! The token that ends documents and those that stop generation may differ: a chat model stops at the end of
//! a turn, but its documents end with the token of pre-training. The end-of-document token is therefore a
//! well-known one if the vocabulary has it, otherwise the tokenizer's own end token.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::OnceLock;

use serde_json::{Map, Value, json};
use tokenizers::{AddedToken, ModelWrapper};

use super::added_in_text::AddedInText;
use super::byte_budget::ByteBudget;
use super::encoder::choose_encoder;
use super::{MAX_HF_BYTES, Tokenizer, begin_of_document, canonical_hash, regex_limits, tokenizer_json};
use crate::catch_panic::catch_panic;
use crate::error::{DataError, Result};
use crate::files;

/// Files that belong to a tokenizer and are saved verbatim.
const SIDE_FILES: [&str; 8] = [
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
];

/// Special tokens that end a document in every vocabulary that has them.
const DOCUMENT_ENDS: [&str; 3] = [tokenizer_json::END_OF_TEXT, "<|end_of_text|>", "<｜end▁of▁sentence｜>"];
/// End tokens tried last, for a `tokenizer.json` without side files.
const TEXT_ENDS: [&str; 4] = ["</s>", "<eos>", "<|im_end|>", "<|eot_id|>"];

/// The file of a tokenizer.
const TOKENIZER_FILE: &str = "tokenizer.json";

/// Tokens of a batch are `i32`.
const MAX_VOCAB_SIZE: usize = i32::MAX as usize;

/// The file in which a saved tokenizer stores begin and end tokens that the model's config named.
const NAMED_FILE: &str = "generation_config.json";

/// Begin and end tokens that a model's config names.
#[derive(Debug, Default)]
pub(super) struct ConfigTokens {
    ends: Vec<u32>,
    begin: Option<u32>,
}

/// Names of all files that a tokenizer may be saved in.
pub(super) fn saved_names() -> impl Iterator<Item = &'static str> {
    SIDE_FILES.into_iter().chain(["tokenizer.json", NAMED_FILE])
}

/// Loads a tokenizer; `end_of_document` names the token that ends documents.
pub(super) fn load(path: &Path, end_of_document: Option<&str>) -> Result<Tokenizer> {
    let is_folder = fs::metadata(path).map_err(DataError::io(path, "open the tokenizer"))?.is_dir();
    let (folder, file) = match is_folder {
        true => (path, path.join(TOKENIZER_FILE)),
        false => (path.parent().unwrap_or(Path::new("")), path.to_path_buf()),
    };
    if !file.exists() {
        return Err(DataError::tokenizer(
            path.display().to_string(),
            "the folder has no tokenizer.json",
            "save it with transformers (AutoTokenizer.from_pretrained(..).save_pretrained(..)), which writes one",
        ));
    }
    let mut side_files = BTreeMap::new();
    let mut config_tokens = ConfigTokens::default();
    // The files beside a tokenizer of another name may be another's.
    let has_side_files = is_folder || file.file_name().is_some_and(|name| name == TOKENIZER_FILE);
    if has_side_files {
        for name in SIDE_FILES {
            let side = folder.join(name);
            if side.exists() {
                side_files.insert(name.to_owned(), files::read(&side)?);
            }
        }
        for name in [NAMED_FILE, "config.json"] {
            let side = folder.join(name);
            if side.exists() {
                let config: Value = files::read_json(&side, "restore the file, or remove it")?;
                config_tokens.add(&config);
            }
        }
    }
    let side_folder = has_side_files.then_some(folder);
    let source = Source { location: &file.display().to_string(), side_folder, end_of_document };
    from_parts(&source, files::read(&file)?, side_files, config_tokens)
}

/// Origin of a tokenizer, and the end token that the user names.
pub(super) struct Source<'s> {
    /// For messages.
    pub(super) location: &'s str,
    /// The folder whose side files are read.
    pub(super) side_folder: Option<&'s Path>,
    /// Name of the token that ends documents, instead of the one that the files name.
    pub(super) end_of_document: Option<&'s str>,
}

/// Builds a tokenizer from the bytes of its files.
pub(super) fn from_parts(
    source: &Source<'_>,
    json: Vec<u8>,
    mut side_files: BTreeMap<String, Vec<u8>>,
    config_tokens: ConfigTokens,
) -> Result<Tokenizer> {
    let location = source.location;
    let broken = |problem: String| {
        DataError::tokenizer(location, problem, "name a tokenizer.json as Hugging Face tokenizers writes it")
    };
    let parsed: Value = serde_json::from_slice(&json).map_err(|e| broken(format!("is not JSON: {e}")))?;
    check_charsmaps(parsed.get("normalizer").unwrap_or(&Value::Null)).map_err(broken)?;
    let hf = tokenizer_of(&json).map_err(broken)?;
    let vocab_size = vocab_size(location, &hf).map_err(broken)?;
    let added: Vec<(u32, AddedToken)> = hf.get_added_tokens_decoder().into_iter().collect();

    let mut configs = Vec::new();
    for name in ["tokenizer_config.json", "special_tokens_map.json"] {
        if let Some(bytes) = side_files.get(name) {
            let config: Value =
                serde_json::from_slice(bytes).map_err(|e| broken(format!("{name} is not JSON: {e}")))?;
            configs.push(config);
        }
    }
    let by_key = |key: &str| configs.iter().find_map(|config| hf.token_to_id(token_name(config.get(key)?)?));
    let own_end = by_key("eos_token");
    let (mut listed, strange): (Vec<u32>, Vec<u32>) =
        config_tokens.ends.iter().partition(|&&id| hf.id_to_token(id).is_some());
    if !strange.is_empty() {
        tracing::warn!(
            "{location} has no token for the end ids {strange:?} of the model's config; they are ignored"
        );
    }
    let end_of_document = choose_end(source, &hf, &added, own_end.or(listed.first().copied()))?;
    // The saved files name it too, so that they can be loaded as they are.
    if source.end_of_document.is_some() && !listed.contains(&end_of_document) {
        listed.push(end_of_document);
    }
    let config_tokens =
        ConfigTokens { ends: listed, begin: config_tokens.begin.filter(|&id| hf.id_to_token(id).is_some()) };
    let mut stop_tokens: Vec<u32> =
        config_tokens.ends.iter().copied().chain(own_end).chain([end_of_document]).collect();
    stop_tokens.sort_unstable();
    stop_tokens.dedup();
    let begin = by_key("bos_token").or(config_tokens.begin);
    let template_begin = catch_panic(|| begin_of_document::tokens_before_text(&hf, &stop_tokens))
        .map_err(|e| broken(format!("cannot encode a letter: {e}")))?;

    if !side_files.contains_key("tokenizer_config.json") {
        let name = hf.id_to_token(end_of_document).unwrap_or_default();
        let config = serde_json::to_vec_pretty(&tokenizer_json::config(&name))
            .map_err(|e| DataError::Internal(e.to_string()))?;
        side_files.insert("tokenizer_config.json".to_owned(), config);
    }
    let in_text = AddedInText::of(&hf).map_err(broken)?;
    let (encoder, cut) = choose_encoder(&parsed, &in_text);
    Ok(Tokenizer {
        location: location.to_owned(),
        hash: canonical_hash(&parsed),
        json,
        side_files,
        hf,
        hf_plain_text: OnceLock::new(),
        encoder,
        added: in_text,
        budget: ByteBudget::new(MAX_HF_BYTES),
        cut: cut.map_or_else(OnceLock::new, OnceLock::from),
        vocab_size,
        end_of_document,
        stop_tokens,
        begin,
        document_begin: template_begin.clone(),
        template_begin,
        config_tokens,
    })
}

/// The tokenizer of the `tokenizers` crate, without the settings of the file's last user. The error is the
/// problem, for a message.
fn tokenizer_of(json: &[u8]) -> std::result::Result<tokenizers::Tokenizer, String> {
    regex_limits::set();
    let mut hf = catch_panic(|| tokenizers::Tokenizer::from_bytes(json))
        .map_err(|e| format!("is not a tokenizer that this version reads: {e}"))?;
    hf.with_padding(None);
    hf.with_truncation(None).map_err(|e| e.to_string())?;
    switch_dropout_off(&mut hf);
    Ok(hf)
}

/// The largest id + 1. The error is the problem, for a message.
fn vocab_size(location: &str, hf: &tokenizers::Tokenizer) -> std::result::Result<usize, String> {
    let vocab = hf.get_vocab(true);
    let vocab_size = vocab.values().max().map_or(0, |&id| id as usize + 1);
    if vocab_size == 0 {
        return Err("has no tokens".to_owned());
    }
    if vocab_size > MAX_VOCAB_SIZE {
        return Err(format!("has a token with the id {}, which is too large", vocab_size - 1));
    }
    if vocab_size > 2 * vocab.len() {
        tracing::warn!(
            "{location}: the token id {} is far beyond the {} tokens of the tokenizer, and a model has weights for \
             every id up to it; check the file, or give that token the next free id",
            vocab_size - 1,
            vocab.len()
        );
    }
    Ok(vocab_size)
}

/// The token that ends documents: the one that the user names; or else a well-known one, `named` by the
/// tokenizer's files, or a well-known end of a text.
fn choose_end(
    source: &Source<'_>,
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
fn no_end(source: &Source<'_>, special: &[&str]) -> DataError {
    let problem = match source.side_folder {
        Some(_) => {
            "no token ends a document: no tokenizer_config.json, generation_config.json or config.json beside it \
             names one"
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
    let shown: Vec<String> = names.iter().take(SHOWN).map(|name| format!("{name:?}")).collect();
    match names.len() {
        0 => "it has no special tokens".to_owned(),
        len if len > SHOWN => format!("its special tokens are {} and {} more", shown.join(", "), len - SHOWN),
        _ => format!("its special tokens are {}", shown.join(", ")),
    }
}

/// Turns off BPE dropout, a random regularisation: here a text has one encoding.
fn switch_dropout_off(hf: &mut tokenizers::Tokenizer) {
    if let ModelWrapper::BPE(bpe) = hf.get_model()
        && bpe.dropout.is_some()
    {
        let mut certain = bpe.clone();
        certain.dropout = None;
        hf.with_model(certain);
    }
}

/// Refuses character maps that declare a larger size than they have. The `tokenizers` crate allocates the
/// declared size, and an allocation that is too large ends the process.
fn check_charsmaps(normalizer: &Value) -> std::result::Result<(), String> {
    const KEY: &str = "precompiled_charsmap";
    if let Some(map) = normalizer.get(KEY).and_then(Value::as_str)
        && let Some(declared) = charsmap_bytes(map)
        && declared as usize > map.len()
    {
        return Err(format!("its {KEY} declares {declared} bytes, more than it has"));
    }
    match normalizer {
        Value::Object(entries) => entries.values().try_for_each(check_charsmaps),
        Value::Array(items) => items.iter().try_for_each(check_charsmaps),
        _ => Ok(()),
    }
}

/// The declared size at the start of a character map, a little-endian number in base64; `None` if it is
/// invalid.
fn charsmap_bytes(base64: &str) -> Option<u32> {
    let sixth = |digit: u8| match digit {
        b'A'..=b'Z' => Some(digit - b'A'),
        b'a'..=b'z' => Some(digit - b'a' + 26),
        b'0'..=b'9' => Some(digit - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let head = base64.as_bytes().get(..6)?;
    let bits = head.iter().try_fold(0u64, |bits, &digit| Some(bits << 6 | u64::from(sixth(digit)?)))?;
    Some(((bits >> 4) as u32).swap_bytes())
}

impl ConfigTokens {
    /// Adds a token that ends texts.
    pub(super) fn add_end(&mut self, id: u32) {
        if !self.ends.contains(&id) {
            self.ends.push(id);
        }
    }

    /// Name and content of the file from which [`load`] restores these tokens; `None` if there are none.
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
    fn add(&mut self, config: &Value) {
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

/// The name in `"eos_token": "x"` or `"eos_token": {"content": "x"}`.
fn token_name(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value.get("content")?.as_str())
}
