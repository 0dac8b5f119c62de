//! Tokens that are added to a vocabulary, by names that its files reserve or at its end.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use super::end_tokens::{ConfigTokens, TokenizerSource};
use super::{Tokenizer, load};
use crate::catch_panic::catch_panic;
use crate::error::{DataError, Result};

/// Tokens that were added to a vocabulary.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Growth {
    /// Names with new ids, ascending.
    pub added: Vec<String>,
    /// Reserved tokens and their new names.
    pub renamed: Vec<(String, String)>,
    /// Tokens of the vocabulary that texts did not have as one token before.
    pub made_special: Vec<String>,
    /// Largest id plus one before.
    pub from: usize,
    /// Largest id plus one now.
    pub to: usize,
}

impl Growth {
    /// True if there is nothing new.
    pub fn is_empty(&self) -> bool {
        self.added.is_empty() && self.renamed.is_empty() && self.made_special.is_empty()
    }

    /// This and then `later`.
    pub fn then(mut self, later: Growth) -> Growth {
        if self.is_empty() {
            return later;
        }
        if !later.is_empty() {
            self.to = later.to;
        }
        self.added.extend(later.added);
        self.renamed.extend(later.renamed);
        self.made_special.extend(later.made_special);
        self
    }
}

impl Tokenizer {
    /// This tokenizer with `names` as special tokens, which texts then have as one token each. Unused tokens
    /// whose names match `reserved` (a pattern with `*`) are renamed, in the order of their ids; without a
    /// pattern, names get the ids after the largest one. Names that are one token already are left alone.
    ///
    /// # Errors
    /// Fewer reserved tokens than names; a tokenizer that gives the tokens other ids.
    pub(crate) fn grown(self, names: &[String], reserved: Option<&str>) -> Result<(Tokenizer, Growth)> {
        let mut growth = Growth { from: self.vocab_size, to: self.vocab_size, ..Growth::default() };
        let missing: Vec<&String> = names.iter().filter(|name| !self.is_one_token(name)).collect();
        let (made_special, new): (Vec<&String>, Vec<&String>) =
            missing.into_iter().partition(|name| self.hf.token_to_id(name).is_some());
        growth.made_special = made_special.into_iter().cloned().collect();
        match reserved.filter(|_| !new.is_empty()) {
            None => growth.added = new.into_iter().cloned().collect(),
            Some(pattern) => {
                let unused = self.unused(pattern, names);
                if unused.len() < new.len() {
                    let lacking: Vec<&str> = new[unused.len()..].iter().map(|name| name.as_str()).collect();
                    let found = match unused.len() {
                        0 => "no unused token".to_owned(),
                        1 => "1 unused token".to_owned(),
                        count => format!("{count} unused tokens"),
                    };
                    return Err(DataError::tokenizer(
                        &self.location,
                        format!(
                            "data.reserved_tokens = {pattern:?} matches {found}, too few for {}",
                            lacking.join(", ")
                        ),
                        "name a pattern with more tokens, or leave it out to add tokens at the end",
                    ));
                }
                growth.renamed = unused.into_iter().zip(new.into_iter().cloned()).collect();
            }
        }
        growth.to += growth.added.len();
        if growth.is_empty() {
            Ok((self, growth))
        } else {
            self.with_growth(&growth).map(|grown| (grown, growth))
        }
    }

    /// The growth by which this tokenizer becomes `other`, if it does.
    ///
    /// # Errors
    /// Those of building a tokenizer.
    pub fn growth_to(&self, other: &Tokenizer) -> Result<Option<Growth>> {
        if other.vocab_size < self.vocab_size {
            return Ok(None);
        }
        let mut growth = Growth { from: self.vocab_size, to: other.vocab_size, ..Growth::default() };
        // Names of a large vocabulary that differ everywhere are no growth.
        const MOST: usize = 1 << 10;
        for id in 0..other.vocab_size as u32 {
            match (self.token(id), other.token(id)) {
                (Some(one), Some(two)) if one != two => growth.renamed.push((one, two)),
                (None, Some(two)) if id as usize >= self.vocab_size => growth.added.push(two),
                (one, two) if one != two => return Ok(None),
                _ => {}
            }
            if growth.added.len() + growth.renamed.len() > MOST {
                return Ok(None);
            }
        }
        let special: BTreeSet<String> = self.special_names().into_iter().collect();
        let is_renamed = |name: &String| growth.renamed.iter().any(|(_, new)| new == name);
        let is_new = |name: &String| growth.added.contains(name) || is_renamed(name);
        growth.made_special = other
            .special_names()
            .into_iter()
            .filter(|name| !special.contains(name) && !is_new(name))
            .collect();
        if growth.is_empty() {
            return Ok(None);
        }
        let grown = self.files_with(&growth).and_then(|(json, sides)| self.build(json, sides))?;
        Ok((grown.hash == other.hash).then_some(growth))
    }

    /// True if a text that is `name` becomes the token of this name.
    pub(crate) fn is_one_token(&self, name: &str) -> bool {
        let ids = catch_panic(|| self.hf.encode_fast(name, false)).map(|found| found.get_ids().to_vec());
        matches!(ids.as_deref(), Ok([id]) if self.token(*id).is_some_and(|token| token == name))
    }

    /// Tokens with names like `pattern`, by id, other than those that begin or end texts and `used` ones.
    fn unused(&self, pattern: &str, used: &[String]) -> Vec<String> {
        let is_used = |id: u32| {
            self.stop_tokens.contains(&id) || self.begin == Some(id) || self.document_begin.contains(&id)
        };
        let ids = (0..u32::try_from(self.vocab_size).unwrap_or(u32::MAX)).filter(|id| !is_used(*id));
        let names = ids.filter_map(|id| self.token(id));
        names.filter(|name| matches(pattern, name) && !used.contains(name)).collect()
    }

    /// This tokenizer with the tokens, and the settings of conversations, that `other` has beside its own;
    /// unchanged if `other` is another one.
    ///
    /// # Errors
    /// Those of building a tokenizer.
    pub fn grown_as(self, other: &Tokenizer) -> Result<(Tokenizer, Growth)> {
        let growth = match self.hash == other.hash {
            true => Some(Growth::default()),
            false => self.growth_to(other)?,
        };
        let Some(growth) = growth else { return Ok((self, Growth::default())) };
        let mut grown = if growth.is_empty() { self } else { self.with_growth(&growth)? };
        if other.chat.is_some() {
            grown.chat.clone_from(&other.chat);
        }
        if let Some(end) = other.end_of_turn() {
            grown.add_stop(end);
        }
        Ok((grown, growth))
    }

    fn with_growth(self, growth: &Growth) -> Result<Tokenizer> {
        let (json, sides) = self.files_with(growth)?;
        let grown = self.build(json, sides)?;
        let renamed = growth.renamed.iter().map(|(old, new)| (new, self.hf.token_to_id(old)));
        let added = growth.added.iter().zip(growth.from as u32..).map(|(name, id)| (name, Some(id)));
        let special = growth.made_special.iter().map(|name| (name, self.hf.token_to_id(name)));
        for (name, id) in renamed.chain(added).chain(special) {
            let found = grown.hf.token_to_id(name);
            if found != id || !grown.is_one_token(name) {
                let found = found.map_or("none".to_owned(), |id| id.to_string());
                let expected = id.map_or("none".to_owned(), |id| id.to_string());
                return Err(DataError::tokenizer(
                    &self.location,
                    format!(
                        "it cannot take the token {name:?}, which the chat template writes: with it in added_tokens the \
                         token has the id {found}, not {expected}, or texts are split at other places"
                    ),
                    "add the token with transformers (tokenizer.add_special_tokens, then save_pretrained), or name \
                     another template with data.chat_template",
                ));
            }
        }
        if grown.vocab_size != growth.to {
            return Err(DataError::Internal(format!("a vocabulary grew to {} tokens", grown.vocab_size)));
        }
        Ok(Tokenizer {
            splits_special_tokens: self.splits_special_tokens,
            end_of_document: self.end_of_document,
            stop_tokens: self.stop_tokens,
            begin: self.begin,
            document_begin: self.document_begin,
            config_tokens: self.config_tokens,
            chat: self.chat,
            ..grown
        })
    }

    /// A tokenizer of these files with the end token of this one.
    fn build(&self, json: Vec<u8>, side_files: BTreeMap<String, Vec<u8>>) -> Result<Tokenizer> {
        let end = self.end_of_document_name();
        let source =
            TokenizerSource { location: &self.location, side_folder: None, end_of_document: end.as_deref() };
        load::from_parts(&source, json, side_files, ConfigTokens::default(), Map::new())
    }

    /// `tokenizer.json` and its side files after a growth.
    fn files_with(&self, growth: &Growth) -> Result<(Vec<u8>, BTreeMap<String, Vec<u8>>)> {
        let internal = |error: serde_json::Error| DataError::Internal(error.to_string());
        let names: BTreeMap<&str, &str> =
            growth.renamed.iter().map(|(old, new)| (old.as_str(), new.as_str())).collect();
        let entry = |name: &str| {
            json!({
                "content": name, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
                "special": true,
            })
        };
        let old_ids = growth.renamed.iter().map(|(old, new)| (new, self.hf.token_to_id(old)));
        let old_ids = old_ids.chain(growth.made_special.iter().map(|name| (name, self.hf.token_to_id(name))));
        let old_ids = old_ids.filter_map(|(name, id)| Some((name.clone(), id?)));
        let new_ids = growth.added.iter().cloned().zip(growth.from as u32..);
        let special: Vec<(String, u32)> = old_ids.chain(new_ids).collect();

        let mut json: Value = serde_json::from_slice(&self.json).map_err(internal)?;
        rename(&mut json, &names);
        if !json["added_tokens"].is_array() {
            json["added_tokens"] = json!([]);
        }
        if let Some(list) = json["added_tokens"].as_array_mut() {
            for (name, id) in &special {
                let mut token = Map::from_iter([("id".to_owned(), json!(id))]);
                token.extend(object(entry(name)));
                match list.iter_mut().find(|token| token["id"] == *id) {
                    Some(known) => *known = Value::Object(token),
                    None => list.push(Value::Object(token)),
                }
            }
        }
        let json = serde_json::to_vec_pretty(&json).map_err(internal)?;

        let mut sides = self.side_files.clone();
        for (file, bytes) in &mut sides {
            let Ok(mut content) = serde_json::from_slice::<Value>(bytes) else { continue };
            let before = content.clone();
            // Templates are text, whatever names they hold.
            let template = content.as_object_mut().and_then(|content| content.shift_remove("chat_template"));
            rename(&mut content, &names);
            match file.as_str() {
                "tokenizer_config.json" => {
                    let decoder = content.get_mut("added_tokens_decoder").and_then(Value::as_object_mut);
                    if let Some(decoder) = decoder {
                        decoder.extend(special.iter().map(|(name, id)| (id.to_string(), entry(name))));
                    }
                }
                "added_tokens.json" => {
                    if let Some(ids) = content.as_object_mut() {
                        ids.extend(special.iter().map(|(name, id)| (name.clone(), json!(id))));
                    }
                }
                _ => {}
            }
            if let (Some(content), Some(template)) = (content.as_object_mut(), template) {
                content.insert("chat_template".to_owned(), template);
            }
            if content != before {
                *bytes = serde_json::to_vec_pretty(&content).map_err(internal)?;
            }
        }
        Ok((json, sides))
    }
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(entries) => entries,
        _ => Map::new(),
    }
}

/// Replaces names, where they are a whole string or key.
fn rename(value: &mut Value, names: &BTreeMap<&str, &str>) {
    if names.is_empty() {
        return;
    }
    match value {
        Value::String(text) => {
            if let Some(new) = names.get(text.as_str()) {
                *text = (*new).to_owned();
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| rename(item, names)),
        Value::Object(entries) => {
            entries.values_mut().for_each(|value| rename(value, names));
            if names.keys().any(|name| entries.contains_key(*name)) {
                let renamed = std::mem::take(entries).into_iter().map(|(key, value)| {
                    let new = names.get(key.as_str()).map(|new| (*new).to_owned());
                    (new.unwrap_or(key), value)
                });
                *entries = renamed.collect();
            }
        }
        _ => {}
    }
}

/// True if `name` is `pattern`, in which each `*` stands for any text.
fn matches(pattern: &str, name: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else { return pattern == name };
    let Some(mut left) = name.strip_prefix(first) else { return false };
    let mut parts: Vec<&str> = rest.split('*').collect();
    let last = parts.pop().unwrap_or_default();
    for part in parts {
        let Some(at) = left.find(part) else { return false };
        left = &left[at + part.len()..];
    }
    left.ends_with(last)
}
