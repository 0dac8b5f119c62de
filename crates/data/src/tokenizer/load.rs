//! The loader of `tokenizer.json` and the files beside it.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::OnceLock;

use serde_json::{Map, Value};
use tokenizers::{AddedToken, Model};
use xtrain_checkpoint::hf::{TEMPLATES_FOLDER, is_named_template};
use xtrain_checkpoint::remove_leftovers;

use super::added_in_text::AddedInText;
use super::byte_budget::ByteBudget;
use super::chat_identity::{CHAT_FILE, ChatIdentity};
use super::encoder::choose_encoder;
use super::end_tokens::{ConfigTokens, NAMED_FILE, TokenizerSource, choose_end};
use super::normalized_size::NormalizedSize;
use super::transformers::{self, SideConfigs};
use super::{MAX_HF_BYTES, Tokenizer, begin_of_document, canonical_hash, shape, tokenizer_json};
use crate::catch_panic::catch_panic;
use crate::error::{DataError, Result};
use crate::files;

/// Files that belong to a tokenizer and are saved with it.
const SIDE_FILES: [&str; 8] = [
    CONFIG_FILE,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
];

/// The file of a tokenizer.
const TOKENIZER_FILE: &str = "tokenizer.json";
/// The file of its settings.
const CONFIG_FILE: &str = "tokenizer_config.json";

/// Tokens of a batch are `i32`.
const MAX_VOCAB_SIZE: usize = i32::MAX as usize;

/// Names of all files directly in its folder that a tokenizer may be saved in.
pub(super) fn saved_names() -> impl Iterator<Item = &'static str> {
    SIDE_FILES.into_iter().chain(["tokenizer.json", NAMED_FILE, CHAT_FILE])
}

/// Names of the files with named chat templates in `folder`, sorted.
fn named_templates(folder: &Path) -> Result<Vec<String>> {
    let templates = folder.join(TEMPLATES_FOLDER);
    if !templates.is_dir() {
        return Ok(Vec::new());
    }
    let failed = |error| DataError::io(&templates, "list the folder")(error);
    let mut names = Vec::new();
    for entry in fs::read_dir(&templates).map_err(failed)? {
        let file = entry.map_err(failed)?.file_name();
        let name = file.to_str().map(|file| format!("{TEMPLATES_FOLDER}/{file}"));
        names.extend(name.filter(|name| is_named_template(name)));
    }
    names.sort();
    Ok(names)
}

/// Removes the files of a saved tokenizer from `folder`.
pub(super) fn remove_saved(folder: &Path) -> Result<()> {
    saved_names().try_for_each(|name| files::remove(&folder.join(name)))?;
    let templates = folder.join(TEMPLATES_FOLDER);
    if templates.is_dir() {
        let is_template = |name: &str| is_named_template(&format!("{TEMPLATES_FOLDER}/{name}"));
        remove_leftovers(&templates, is_template)?;
        named_templates(folder)?.iter().try_for_each(|name| files::remove(&folder.join(name)))?;
        fs::remove_dir(&templates).map_err(DataError::io(&templates, "remove"))?;
    }
    Ok(())
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
    let mut model = Map::new();
    // The files beside a tokenizer of another name may be another's.
    let has_side_files = is_folder || file.file_name().is_some_and(|name| name == TOKENIZER_FILE);
    if has_side_files {
        for name in SIDE_FILES {
            let side = folder.join(name);
            if side.exists() {
                side_files.insert(name.to_owned(), read_bounded(&side)?);
            }
        }
        for name in named_templates(folder)? {
            let template = read_bounded(&folder.join(&name))?;
            side_files.insert(name, template);
        }
        for name in [NAMED_FILE, "config.json"] {
            let side = folder.join(name);
            if side.exists() {
                let config: Value = files::read_json(&side, "restore the file, or remove it")?;
                config_tokens.add(&config);
                if let (Value::Object(config), "config.json") = (config, name) {
                    model = config;
                }
            }
        }
    }
    let side_folder = has_side_files.then_some(folder);
    let chat = if has_side_files { ChatIdentity::load(folder)? } else { None };
    let end_of_document =
        end_of_document.or_else(|| chat.as_ref().and_then(|chat| chat.end_of_document.as_deref()));
    let source = TokenizerSource { location: &file.display().to_string(), side_folder, end_of_document };
    let loaded = from_parts(&source, read_bounded(&file)?, side_files, config_tokens, model)?;
    Ok(Tokenizer { chat, ..loaded })
}

/// The content of a file of a tokenizer.
fn read_bounded(path: &Path) -> Result<Vec<u8>> {
    let size = fs::metadata(path).map_err(DataError::io(path, "open the tokenizer"))?.len();
    if size > shape::MAX_FILE_BYTES {
        return Err(DataError::tokenizer(
            path.display().to_string(),
            format!(
                "has {} MiB, more than the {} MiB that are read",
                size >> 20,
                shape::MAX_FILE_BYTES >> 20
            ),
            "check that it is the file of a tokenizer",
        ));
    }
    files::read(path)
}

/// Builds a tokenizer from the bytes of its files. `model` is the model's `config.json`.
pub(super) fn from_parts(
    source: &TokenizerSource<'_>,
    json: Vec<u8>,
    mut side_files: BTreeMap<String, Vec<u8>>,
    config_tokens: ConfigTokens,
    model: Map<String, Value>,
) -> Result<Tokenizer> {
    let location = source.location;
    let broken = |problem: String| {
        DataError::tokenizer(location, problem, "name a tokenizer.json as Hugging Face tokenizers writes it")
    };
    shape::check(&json).map_err(broken)?;
    let mut parsed: Value = serde_json::from_slice(&json).map_err(|e| broken(format!("is not JSON: {e}")))?;
    shape::check_expressions(&parsed).map_err(broken)?;
    shape::check_charsmaps(parsed.get("normalizer").unwrap_or(&Value::Null)).map_err(broken)?;
    // Building normalizes the names of added tokens.
    NormalizedSize::from_normalizer(parsed.get("normalizer").unwrap_or(&Value::Null)).map_err(broken)?;
    let side = |name: &str| match side_files.get(name) {
        None => Ok(Map::new()),
        Some(bytes) => match serde_json::from_slice(bytes) {
            Ok(Value::Object(entries)) => Ok(entries),
            Ok(_) => Err(broken(format!("{name} beside it is not a JSON object"))),
            Err(e) => Err(broken(format!("{name} beside it is not JSON: {e}"))),
        },
    };
    let files = SideConfigs {
        tokenizer_config: side(CONFIG_FILE)?,
        special_tokens_map: side("special_tokens_map.json")?,
        added_tokens: side("added_tokens.json")?,
        model,
    };
    let built = transformers::build(&json, &mut parsed, &files).map_err(broken)?;
    for warning in &built.warnings {
        tracing::warn!("{location}: {warning}");
    }
    let (hf, json) = (built.tokenizer, built.json.unwrap_or(json));
    if built.needs_generic_class {
        side_files.insert(CONFIG_FILE.to_owned(), transformers::with_generic_class(&files.tokenizer_config));
    }
    let in_text = AddedInText::from_tokenizer(&hf).map_err(broken)?;
    let vocab_size = vocab_size(location, &hf, &parsed).map_err(broken)?;
    let added: Vec<(u32, AddedToken)> = hf.get_added_tokens_decoder().into_iter().collect();

    let configs = [&files.tokenizer_config, &files.special_tokens_map];
    let by_key = |key: &str| {
        let named = built.names.iter().filter(|(name, _)| name == key).map(|(_, token)| token.as_str());
        let written = configs.iter().filter_map(|config| token_name(config.get(key)?));
        named.chain(written).find_map(|name| hf.token_to_id(name))
    };
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
        listed.insert(0, end_of_document);
    }
    let config_tokens =
        ConfigTokens { ends: listed, begin: config_tokens.begin.filter(|&id| hf.id_to_token(id).is_some()) };
    let mut stop_tokens: Vec<u32> =
        config_tokens.ends.iter().copied().chain(own_end).chain([end_of_document]).collect();
    stop_tokens.sort_unstable();
    stop_tokens.dedup();
    let own_begin = by_key("bos_token");
    let begin = own_begin.or(config_tokens.begin);
    let template_begin = catch_panic(|| begin_of_document::tokens_before_text(&hf, &stop_tokens))
        .map_err(|e| broken(format!("cannot encode a letter: {e}")))?;

    if !side_files.contains_key(CONFIG_FILE) {
        let end = added.iter().find(|(id, token)| *id == end_of_document && token.special);
        let name = end.map(|(_, token)| token.content.as_str());
        let config = serde_json::to_vec_pretty(&tokenizer_json::config(name))
            .map_err(|e| DataError::Internal(e.to_string()))?;
        side_files.insert(CONFIG_FILE.to_owned(), config);
    }
    // Some classes of transformers replace the normalizer.
    let normalized_size =
        NormalizedSize::from_normalizer(parsed.get("normalizer").unwrap_or(&Value::Null)).map_err(broken)?;
    let (encoder, cut) = choose_encoder(&parsed, &in_text);
    Ok(Tokenizer {
        location: location.to_owned(),
        hash: canonical_hash(&parsed),
        json,
        side_files,
        hf,
        hf_plain_text: OnceLock::new(),
        splits_special_tokens: built.splits_special_tokens,
        special_names: OnceLock::new(),
        encoder,
        added: in_text,
        placed: OnceLock::new(),
        normalized_size,
        budget: ByteBudget::new(MAX_HF_BYTES),
        cut: cut.map_or_else(OnceLock::new, OnceLock::from),
        long_text: OnceLock::new(),
        vocab_size,
        end_of_document,
        stop_tokens,
        begin,
        named_prefix: own_begin.or(own_end),
        document_begin: template_begin.clone(),
        template_begin,
        config_tokens,
        chat: None,
    })
}

/// The largest id + 1 of `hf`, which is that of the file `parsed`. The error is the problem, for a message.
fn vocab_size(
    location: &str,
    hf: &tokenizers::Tokenizer,
    parsed: &Value,
) -> std::result::Result<usize, String> {
    let listed = parsed.get("model").and_then(|model| model.get("vocab"));
    let largest = match listed {
        Some(Value::Object(ids)) => ids.values().filter_map(Value::as_u64).max(),
        Some(Value::Array(tokens)) => (tokens.len() as u64).checked_sub(1),
        _ => None,
    };
    let added = hf.get_added_tokens_decoder();
    let largest = largest.max(added.keys().max().map(|&id| u64::from(id)));
    let Some(largest) = largest else { return Err("has no tokens".to_owned()) };
    let vocab_size = largest as usize + 1;
    if vocab_size > MAX_VOCAB_SIZE {
        return Err(format!("has a token with the id {largest}, which is too large"));
    }
    // New tokens are numbered from the number of tokens on, whatever the largest id is.
    let taken =
        |id: &u32, token: &AddedToken| hf.get_model().id_to_token(*id).filter(|name| *name != token.content);
    if let Some((id, token, name)) = added.iter().find_map(|(id, token)| Some((id, token, taken(id, token)?)))
    {
        return Err(format!(
            "its ids have gaps, and the added token {:?} gets the id {id}, which is that of {name:?}",
            token.content
        ));
    }
    let len = hf.get_vocab_size(true);
    if vocab_size > 2 * len {
        tracing::warn!(
            "{location}: the token id {largest} is far beyond the {len} tokens of the tokenizer, and a model has \
             weights for every id up to it; check the file, or give that token the next free id"
        );
    }
    Ok(vocab_size)
}

/// The name in `"eos_token": "x"` or `"eos_token": {"content": "x"}`.
fn token_name(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value.get("content")?.as_str())
}
