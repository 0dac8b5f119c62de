//! Tokens that the files beside a `tokenizer.json` name, in the order in which transformers adds them.
//!
//! transformers reads `added_tokens_decoder` of `tokenizer_config.json`, or else `special_tokens_map.json`
//! and `added_tokens.json`. Then come `eos_token` and the other names of tokens, and lists of further
//! special tokens. A token that the vocabulary lacks gets the next free id, whatever id the files give it.

use std::collections::BTreeMap;

use serde_json::{Map, Value};
use tokenizers::AddedToken;

/// Keys of special tokens that all models may have.
const NAMES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// A token as the files write it.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Written {
    /// A name.
    Name(String),
    /// A name with flags.
    Token(Flagged),
}

/// An added token of which not all flags may be given.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Flagged {
    content: String,
    single_word: bool,
    lstrip: bool,
    rstrip: bool,
    /// By default, all but special tokens are normalized.
    normalized: Option<bool>,
    special: bool,
}

impl Flagged {
    /// The token in an object with its content and flags.
    fn read(object: &Map<String, Value>) -> Option<Flagged> {
        let flag = |key: &str| object.get(key).and_then(Value::as_bool);
        Some(Flagged {
            content: object.get("content")?.as_str()?.to_owned(),
            single_word: flag("single_word").unwrap_or(false),
            lstrip: flag("lstrip").unwrap_or(false),
            rstrip: flag("rstrip").unwrap_or(false),
            normalized: flag("normalized"),
            special: flag("special").unwrap_or(false),
        })
    }

    pub(super) fn content(&self) -> &str {
        &self.content
    }

    fn token(&self) -> AddedToken {
        AddedToken {
            content: self.content.clone(),
            single_word: self.single_word,
            lstrip: self.lstrip,
            rstrip: self.rstrip,
            normalized: self.normalized.unwrap_or(!self.special),
            special: self.special,
        }
    }
}

impl Written {
    /// A token in a configuration: a name, or an object with its content.
    pub(super) fn read(value: &Value) -> Option<Written> {
        match value {
            Value::String(name) => Some(Written::Name(name.clone())),
            Value::Object(object) => Flagged::read(object).map(Written::Token),
            _ => None,
        }
    }

    pub(super) fn content(&self) -> &str {
        match self {
            Written::Name(name) => name,
            Written::Token(token) => &token.content,
        }
    }

    /// The token as a special one.
    pub(super) fn special(&self) -> AddedToken {
        match self {
            Written::Name(name) => AddedToken::from(name, true),
            Written::Token(token) => Flagged { special: true, ..token.clone() }.token(),
        }
    }
}

/// The JSON files beside a `tokenizer.json`.
#[derive(Debug, Default)]
pub(in crate::tokenizer) struct SideConfigs {
    pub(in crate::tokenizer) tokenizer_config: Map<String, Value>,
    pub(in crate::tokenizer) special_tokens_map: Map<String, Value>,
    pub(in crate::tokenizer) added_tokens: Map<String, Value>,
    /// The model's `config.json`.
    pub(in crate::tokenizer) model: Map<String, Value>,
}

/// The tokens that the files name.
#[derive(Debug, Default)]
pub(super) struct NamedTokens {
    /// Tokens by the id that the files give them.
    pub(super) by_id: BTreeMap<u32, Flagged>,
    /// Special tokens by key.
    pub(super) by_key: Vec<(String, Written)>,
    /// Further special tokens.
    pub(super) extra: Vec<Written>,
    /// True if the files have a list `extra_special_tokens`, or null in its place, over which a class adds
    /// none.
    has_extra: bool,
}

impl NamedTokens {
    /// Reads the tokens of `files` and of the `tokenizer.json` with `added`. `defaults` are the names that
    /// the class gives, by key. The error is the problem, for a message.
    pub(super) fn read(
        files: &SideConfigs,
        added: &[Value],
        defaults: &[(&str, &str)],
    ) -> Result<NamedTokens, String> {
        let mut config = files.tokenizer_config.clone();
        let is_given = |value: Option<&Value>| match value {
            None | Some(Value::Null | Value::Bool(false)) => false,
            Some(Value::Array(items)) => !items.is_empty(),
            Some(Value::Object(entries)) => !entries.is_empty(),
            Some(_) => true,
        };
        if !is_given(config.get("extra_special_tokens"))
            && let Some(additional) = config.remove("additional_special_tokens")
        {
            config.insert("extra_special_tokens".to_owned(), additional);
        }
        // Names of a model's own, such as `image_token`.
        let own: Vec<String> = config
            .iter()
            .filter(|(key, value)| {
                key.ends_with("_token") && value.is_string() && !NAMES.contains(&key.as_str())
            })
            .map(|(key, _)| key.clone())
            .collect();
        let mut own: Map<String, Value> =
            own.into_iter().filter_map(|key| config.remove(&key).map(|value| (key, value))).collect();
        take_object(&mut config, "extra_special_tokens", &mut own);
        if own.is_empty() {
            take_object(&mut config, "model_specific_special_tokens", &mut own);
        }
        let mut tokens = NamedTokens::default();
        match config.get("added_tokens_decoder") {
            Some(decoder) => {
                for (id, token) in decoder.as_object().into_iter().flatten() {
                    let read = || Some((id.parse().ok()?, Flagged::read(token.as_object()?)?));
                    let problem = || format!("its added_tokens_decoder has no token under {id:?}");
                    let (id, token) = read().ok_or_else(problem)?;
                    tokens.by_id.insert(id, token);
                }
            }
            None => {
                merge_special_tokens_map(&mut config, files);
                take_object(&mut config, "extra_special_tokens", &mut own);
                tokens.by_id = listed_tokens(&config, files, added);
            }
        }
        let by_content: BTreeMap<&str, &Flagged> =
            tokens.by_id.values().map(|token| (token.content.as_str(), token)).collect();
        for key in NAMES {
            let named = config.get(key).and_then(Written::read);
            let named = named.map(|named| match by_content.get(named.content()) {
                Some(&token) => Written::Token(token.clone()),
                None => named,
            });
            let default = || {
                let default = defaults.iter().find(|(name, _)| *name == key && !config.contains_key(key));
                default.map(|(_, name)| Written::Name((*name).to_owned()))
            };
            tokens.by_key.extend(named.or_else(default).map(|token| (key.to_owned(), token)));
        }
        // Then come names of the class and of the files, over which those of `own` have precedence.
        let is_own_name = |key: &str| key.ends_with("_token") && !NAMES.contains(&key);
        let mut by_own_key: Vec<(String, Written)> = Vec::new();
        let defaults =
            defaults.iter().map(|(key, name)| ((*key).to_owned(), Written::Name((*name).to_owned())));
        let listed =
            config.iter().chain(&own).filter_map(|(key, value)| Some((key.clone(), Written::read(value)?)));
        for (key, token) in
            defaults.chain(listed).filter(|(key, _)| is_own_name(key) || own.contains_key(key))
        {
            match by_own_key.iter_mut().find(|(name, _)| *name == key) {
                Some(entry) => entry.1 = token,
                None => by_own_key.push((key, token)),
            }
        }
        tokens.by_key.extend(by_own_key);
        let extra = config.get("extra_special_tokens");
        tokens.has_extra = extra.is_some();
        let extra = extra.or_else(|| config.get("additional_special_tokens"));
        tokens.extra =
            extra.and_then(Value::as_array).into_iter().flatten().filter_map(Written::read).collect();
        Ok(tokens)
    }

    /// Adds the sentinels of T5, `<extra_id_0>` and so on, unless the files list further special tokens.
    pub(super) fn add_sentinels(&mut self, files: &SideConfigs) -> Result<(), String> {
        let config = &files.tokenizer_config;
        let count = config.get("extra_ids").and_then(Value::as_u64).unwrap_or(100);
        if count > 100_000 {
            return Err(format!("its tokenizer_config.json asks for {count} extra_ids"));
        }
        if !self.has_extra && !self.extra.iter().any(|token| token.content().contains("<extra_id_")) {
            self.extra.extend((0..count).map(|number| Written::Name(format!("<extra_id_{number}>"))));
        }
        Ok(())
    }

    /// Forgets the tokens with these contents.
    pub(super) fn leave_out(&mut self, contents: &[String]) {
        let is_kept = |content: &str| !contents.iter().any(|left_out| left_out == content);
        self.by_id.retain(|_, token| is_kept(&token.content));
        self.by_key.retain(|(_, token)| is_kept(token.content()));
        self.extra.retain(|token| is_kept(token.content()));
    }

    /// The token under a key such as `eos_token`.
    pub(super) fn get(&self, key: &str) -> Option<&str> {
        self.by_key.iter().find(|(name, _)| name == key).map(|(_, token)| token.content())
    }

    /// All special tokens, each once.
    pub(super) fn all_special(&self) -> Vec<&Written> {
        let mut all: Vec<&Written> = Vec::new();
        for token in self.by_key.iter().map(|(_, token)| token).chain(&self.extra) {
            if !all.iter().any(|known| known.content() == token.content()) {
                all.push(token);
            }
        }
        all
    }

    /// The tokens to add to a tokenizer with the added tokens `known`, in order.
    pub(super) fn missing_from(&self, known: &[AddedToken]) -> Vec<AddedToken> {
        let special_names: Vec<&str> = self.by_key.iter().map(|(_, token)| token.content()).collect();
        let by_id = self.by_id.values().filter(|token| !known.contains(&token.token()));
        let mut missing: Vec<Written> = by_id.cloned().map(Written::Token).collect();
        let present: Vec<String> = known
            .iter()
            .map(|token| token.content.clone())
            .chain(missing.iter().map(|token| token.content().to_owned()))
            .collect();
        for token in self.by_key.iter().map(|(_, token)| token).chain(&self.extra) {
            if !present.iter().any(|name| name == token.content()) && !missing.contains(token) {
                missing.push(token.clone());
            }
        }
        let as_added = |token: &Written| match token {
            Written::Token(token) if !special_names.contains(&token.content.as_str()) => token.token(),
            token => token.special(),
        };
        missing.iter().map(as_added).collect()
    }
}

/// Moves the entries of an object in `config` to `entries`.
fn take_object(config: &mut Map<String, Value>, key: &str, entries: &mut Map<String, Value>) {
    if config.get(key).is_some_and(Value::is_object)
        && let Some(Value::Object(object)) = config.remove(key)
    {
        entries.extend(object);
    }
}

/// Adds the entries of `special_tokens_map.json` to `config`, over its own.
fn merge_special_tokens_map(config: &mut Map<String, Value>, files: &SideConfigs) {
    for (key, value) in &files.special_tokens_map {
        let special = |value: &Value| {
            let mut value = value.clone();
            if let Value::Object(token) = &mut value {
                token.insert("special".to_owned(), true.into());
            }
            value
        };
        let value = match value {
            Value::Array(tokens) if key == "extra_special_tokens" => {
                let mut all = config.get(key).and_then(Value::as_array).cloned().unwrap_or_default();
                for token in tokens.iter().map(special) {
                    if !all.contains(&token) {
                        all.push(token);
                    }
                }
                Value::Array(all)
            }
            Value::Array(tokens) => Value::Array(tokens.iter().map(special).collect()),
            Value::Object(_) if key != "extra_special_tokens" => special(value),
            other => other.clone(),
        };
        config.insert(key.clone(), value);
    }
}

/// The tokens of `added_tokens.json`, and over them those of the `tokenizer.json`.
fn listed_tokens(
    config: &Map<String, Value>,
    files: &SideConfigs,
    added: &[Value],
) -> BTreeMap<u32, Flagged> {
    let id_of = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok());
    let named = NAMES.iter().filter_map(|key| Written::read(config.get(*key)?));
    let extra = config.get("extra_special_tokens").and_then(Value::as_array);
    let extra = extra.into_iter().flatten().filter_map(Written::read);
    let special: Vec<Written> = named.chain(extra).collect();
    let mut by_id = BTreeMap::new();
    for (content, id) in &files.added_tokens {
        let special = special.iter().any(|token| token.content() == content);
        if let Some(id) = id_of(id) {
            let content = content.clone();
            let (single_word, lstrip, rstrip, normalized) = (false, false, false, Some(!special));
            by_id.insert(id, Flagged { content, single_word, lstrip, rstrip, normalized, special });
        }
    }
    for token in added.iter().filter_map(Value::as_object) {
        if let (Some(id), Some(token)) = (token.get("id").and_then(id_of), Flagged::read(token)) {
            by_id.insert(id, token);
        }
    }
    by_id
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Number of sentinels beside lists of further tokens, which are in `tokenizer_config.json` or in
    /// `special_tokens_map.json`.
    fn sentinels(lists: &Value, in_map: bool) -> usize {
        let lists = lists.as_object().unwrap().clone();
        let files = match in_map {
            true => SideConfigs { special_tokens_map: lists, ..SideConfigs::default() },
            false => SideConfigs { tokenizer_config: lists, ..SideConfigs::default() },
        };
        let mut names = NamedTokens::read(&files, &[], &[]).unwrap();
        names.add_sentinels(&files).unwrap();
        names.extra.iter().filter(|token| token.content().starts_with("<extra_id_")).count()
    }

    #[test]
    fn t5_has_sentinels_unless_further_special_tokens_are_listed_over_them() {
        // As `T5Tokenizer` of transformers 5.24 counts them, in either file.
        for (lists, in_config, in_map) in [
            (json!({}), 100, 100),
            (json!({"extra_special_tokens": {}}), 100, 100),
            (json!({"extra_special_tokens": {"x_token": "<x>"}}), 100, 100),
            (json!({"extra_special_tokens": []}), 0, 0),
            (json!({"extra_special_tokens": null}), 0, 0),
            (json!({"extra_special_tokens": ["<x>"]}), 0, 0),
            (json!({"extra_special_tokens": ["<extra_id_0>"]}), 1, 1),
            (json!({"additional_special_tokens": null}), 0, 100),
            (json!({"additional_special_tokens": []}), 0, 100),
            (json!({"additional_special_tokens": ["<x>"]}), 0, 100),
            (json!({"extra_special_tokens": {}, "additional_special_tokens": []}), 0, 100),
            (json!({"extra_special_tokens": {"x_token": "<x>"}, "additional_special_tokens": []}), 100, 100),
        ] {
            assert_eq!((sentinels(&lists, false), sentinels(&lists, true)), (in_config, in_map), "{lists}");
        }
    }
}
