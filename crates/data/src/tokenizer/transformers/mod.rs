//! The tokenizer that transformers builds from the files of a folder.
//!
//! `AutoTokenizer` adds tokens that only other files than `tokenizer.json` name, and for some classes
//! replaces the normalizer, the pre-tokenizer and settings of the model. Ids are published by people who
//! use it, so both are done here too, and written into the `tokenizer.json` that is saved: other engines,
//! which read only that file, then give the same ids. What cannot be reproduced is a warning with a remedy.

mod class;
mod named_tokens;
mod parts;
mod pipeline;

use std::borrow::Cow;

use serde_json::{Map, Value, json};
use tokenizers::{AddedToken, PostProcessorWrapper};
use xtrain_checkpoint::first_few;

use super::added_in_text::check_names;
use super::read_tokenizer::read_tokenizer;
use class::Class;
use named_tokens::NamedTokens;
pub(super) use named_tokens::SideConfigs;
use pipeline::{Recipe, SpecialFlags, Template};

/// Named class that reads `tokenizer.json` as it is, in all versions of transformers.
const GENERIC_CLASS: &str = "PreTrainedTokenizerFast";

/// Number of tokens that a warning lists.
const SHOWN: usize = 4;

/// A tokenizer as transformers builds it.
pub(super) struct Built {
    pub(super) tokenizer: tokenizers::Tokenizer,
    /// The new text of `tokenizer.json`, if it is another one.
    pub(super) json: Option<Vec<u8>>,
    /// Names of special tokens, by key.
    pub(super) names: Vec<(String, String)>,
    /// True if special tokens in a text are plain text.
    pub(super) splits_special_tokens: bool,
    /// True if other programs would build another tokenizer from the saved files, unless these name a class
    /// that reads `tokenizer.json` as it is.
    pub(super) needs_generic_class: bool,
    /// Differences that the user should know.
    pub(super) warnings: Vec<String>,
}

/// Builds the tokenizer of `bytes`, parsed as `file`, with the files beside it. `file` is changed to the new
/// content. The error is the problem, for a message.
pub(super) fn build(bytes: &[u8], file: &mut Value, files: &SideConfigs) -> Result<Built, String> {
    let mut warnings = Vec::new();
    let original = added_tokens(file);
    let is_byte_level = bytes.windows(11).any(|window| window == b"\"ByteLevel\"");
    let (chosen, asked_for) = (class::chosen(files, is_byte_level), class::asked_for(files));
    let recipe = recipe(&chosen, &asked_for, files, file, &mut warnings)?;
    for key in ["auto_map", "fast_tokenizer_files"] {
        if files.tokenizer_config.get(key).is_some_and(|value| !value.is_null()) {
            warnings.push(format!(
                "{key} of tokenizer_config.json is ignored: the ids are those of tokenizer.json, whatever Python code or \
                 other file it names; save the tokenizer again with transformers if they differ"
            ));
        }
    }
    let defaults = recipe.map_or(&[][..], |recipe| recipe.defaults);
    let mut names = NamedTokens::read(files, &original, defaults)?;
    if recipe.is_some_and(|recipe| recipe.class == "T5Tokenizer") {
        names.add_sentinels(files)?;
    }

    let mut is_changed = false;
    if let Some(recipe) = recipe
        && let Some(parts) = recipe.parts(files, &names, file).filter(|parts| parts.differ_from(file))
    {
        warnings.push(format!(
            "transformers 5 reads this folder with {}, whose normalizer, pre-tokenizer or model settings are not those \
             of tokenizer.json; the ids are those of transformers. If tokenizer.json is right, write \
             \"tokenizer_class\": \"{GENERIC_CLASS}\" into tokenizer_config.json",
            recipe.class
        ));
        parts.write_to(file);
        is_changed = true;
    }
    // A class with a pipeline of its own starts without added tokens.
    let without_added = match recipe {
        Some(_) => {
            file["added_tokens"] = json!([]);
            Cow::Owned(serde_json::to_vec(file).map_err(|e| e.to_string())?)
        }
        None => Cow::Borrowed(bytes),
    };
    let mut tokenizer = read_tokenizer(&without_added)?;
    add_tokens(&mut tokenizer, &names, recipe)?;
    let too_many = beyond_the_model(files, &original, &tokenizer);
    if !too_many.is_empty() {
        warnings.push(format!(
            "the model in this folder has no weights for tokens that only other files than tokenizer.json name, so they \
             are left out: {}",
            first_few(&too_many, SHOWN)
        ));
        names.leave_out(&too_many);
        tokenizer = read_tokenizer(&without_added)?;
        add_tokens(&mut tokenizer, &names, recipe)?;
    }
    if replaces_words(files, &tokenizer) {
        replace_words(file);
        is_changed = true;
    }
    check_names(&tokenizer)?;
    let added = listed(&tokenizer);
    warnings.extend(other_ids(&original, &names, &tokenizer));
    let has_other_tokens = !is_same_list(&original, &added);
    file["added_tokens"] = Value::Array(if has_other_tokens { added } else { original });
    if let Some(template) = recipe.and_then(|recipe| template(recipe, &names, &tokenizer)) {
        file["post_processor"] = template;
        is_changed = true;
    }
    let mut json = None;
    if is_changed || has_other_tokens {
        let text = serde_json::to_vec_pretty(file).map_err(|e| e.to_string())?;
        // Flags of a token that was added twice are only now those of the file.
        tokenizer = read_tokenizer(&text)?;
        json = Some(text);
    }
    Ok(Built {
        needs_generic_class: needs_generic_class(files, file, is_byte_level, &names),
        names: names.by_key.iter().map(|(key, token)| (key.clone(), token.content().to_owned())).collect(),
        splits_special_tokens: files
            .tokenizer_config
            .get("split_special_tokens")
            .is_some_and(|split| *split == true),
        tokenizer,
        json,
        warnings,
    })
}

/// The recipe by which the folder is read; `None` for `tokenizer.json` as it is.
fn recipe(
    chosen: &Class,
    asked_for: &Class,
    files: &SideConfigs,
    file: &Value,
    warnings: &mut Vec<String>,
) -> Result<Option<&'static Recipe>, String> {
    let Class::Own(name) = chosen else { return Ok(None) };
    let found = pipeline::recipe_of(name);
    let names = |recipe: &Recipe| NamedTokens::read(files, &added_tokens(file), recipe.defaults);
    let parts = match found {
        Some(recipe) => recipe.parts(files, &names(recipe)?, file),
        None => None,
    };
    let names_generic =
        files.tokenizer_config.contains_key("tokenizer_class") && *asked_for == Class::Generic;
    match (found, parts) {
        // The file says that it is right as it is.
        (_, parts) if names_generic => {
            if parts.is_none_or(|parts| parts.differ_from(file)) {
                let model = files.model.get("model_type").and_then(Value::as_str).unwrap_or_default();
                warnings.push(format!(
                    "transformers 5 reads the tokenizer of a {model} model with {name}, whatever tokenizer_class names, and \
                     may give other ids than tokenizer.json, which is used here; load it there with \
                     PreTrainedTokenizerFast.from_pretrained"
                ));
            }
            Ok(None)
        }
        (Some(recipe), Some(_)) => Ok(Some(recipe)),
        _ => {
            warnings.push(format!(
                "transformers 5 reads this folder with {name}, which builds its own normalizer and pre-tokenizer; the ids \
                 here are those of tokenizer.json and may be others. Compare them, or write \"tokenizer_class\": \
                 \"{GENERIC_CLASS}\" into tokenizer_config.json"
            ));
            Ok(None)
        }
    }
}

/// The entries of `added_tokens`.
fn added_tokens(file: &Value) -> Vec<Value> {
    file.get("added_tokens").and_then(Value::as_array).cloned().unwrap_or_default()
}

/// Tokens without a row in the embedding of the folder's model, if `tokenizer.json` does not have them.
fn beyond_the_model(
    files: &SideConfigs,
    original: &[Value],
    tokenizer: &tokenizers::Tokenizer,
) -> Vec<String> {
    let Some(rows) = files.model.get("vocab_size").and_then(Value::as_u64) else { return Vec::new() };
    let is_listed =
        |name: &str| original.iter().any(|token| token.get("content").is_some_and(|content| content == name));
    let mut beyond: Vec<(u32, AddedToken)> = tokenizer
        .get_added_tokens_decoder()
        .into_iter()
        .filter(|(id, token)| u64::from(*id) >= rows && !is_listed(&token.content))
        .collect();
    beyond.sort_unstable_by_key(|(id, _)| *id);
    beyond.into_iter().map(|(_, token)| token.content).collect()
}

/// Adds the tokens that the files name.
fn add_tokens(
    tokenizer: &mut tokenizers::Tokenizer,
    names: &NamedTokens,
    recipe: Option<&Recipe>,
) -> Result<(), String> {
    let known: Vec<AddedToken> = tokenizer.get_added_tokens_decoder().into_values().collect();
    let missing = names.missing_from(&known);
    let mut add = |tokens: Vec<AddedToken>| match tokens.is_empty() {
        true => Ok(()),
        false => crate::catch_panic::catch_panic(|| tokenizer.add_tokens(tokens)).map(|_| ()),
    };
    add(missing)?;
    match recipe.map_or(SpecialFlags::Unchanged, |recipe| recipe.flags) {
        SpecialFlags::Unchanged => Ok(()),
        SpecialFlags::Reset => {
            add(names.all_special().iter().map(|token| AddedToken::from(token.content(), true)).collect())
        }
        SpecialFlags::Special => add(names.all_special().iter().map(|token| token.special()).collect()),
    }
}

/// The added tokens of `tokenizer` as entries of a file, by id.
fn listed(tokenizer: &tokenizers::Tokenizer) -> Vec<Value> {
    let mut tokens: Vec<(u32, AddedToken)> = tokenizer.get_added_tokens_decoder().into_iter().collect();
    tokens.sort_unstable_by_key(|(id, _)| *id);
    let entry = |(id, token): &(u32, AddedToken)| {
        json!({
            "id": id, "content": token.content, "single_word": token.single_word, "lstrip": token.lstrip,
            "rstrip": token.rstrip, "normalized": token.normalized, "special": token.special,
        })
    };
    tokens.iter().map(entry).collect()
}

/// True if two lists have the same tokens, in any order.
fn is_same_list(one: &[Value], other: &[Value]) -> bool {
    let sorted = |tokens: &[Value]| {
        let mut tokens: Vec<String> = tokens
            .iter()
            .map(|token| match token {
                Value::Object(entries) => {
                    let sorted: std::collections::BTreeMap<_, _> = entries.iter().collect();
                    json!(sorted).to_string()
                }
                other => other.to_string(),
            })
            .collect();
        tokens.sort_unstable();
        tokens.dedup();
        tokens
    };
    sorted(one) == sorted(other)
}

/// Warnings about tokens whose ids are not those that the files give, and tokens that are dropped.
fn other_ids(original: &[Value], names: &NamedTokens, tokenizer: &tokenizers::Tokenizer) -> Vec<String> {
    let in_file = original.iter().filter_map(|token| {
        Some((token.get("content")?.as_str()?, u32::try_from(token.get("id")?.as_u64()?).ok()?))
    });
    let given: Vec<(&str, u32)> =
        in_file.chain(names.by_id.iter().map(|(&id, token)| (token.content(), id))).collect();
    let moved: std::collections::BTreeSet<String> = given
        .iter()
        .filter_map(|(name, id)| match tokenizer.token_to_id(name) {
            Some(actual) if actual == *id => None,
            Some(actual) => Some(format!("{name:?} has the id {actual} instead of {id}")),
            None => Some(format!("{name:?} ({id}) does not exist")),
        })
        .collect();
    if moved.is_empty() {
        return Vec::new();
    }
    vec![format!(
        "ids of added tokens in the tokenizer's files are ignored by transformers, which gives each new token the next \
         free id: {}. If a model was trained with the ids in the files, save its tokenizer again with transformers",
        first_few(moved, SHOWN)
    )]
}

/// The template that a class puts in place of the file's; `None` if the tokens are the same.
fn template(recipe: &Recipe, names: &NamedTokens, tokenizer: &tokenizers::Tokenizer) -> Option<Value> {
    let (before, after) = match recipe.template {
        Template::File => return None,
        Template::Empty => (None, None),
        Template::Begin => (names.get("bos_token"), None),
        Template::Around(before, after) => (names.get(before), names.get(after)),
        Template::End => (None, names.get("eos_token")),
    };
    let id = |name: Option<&str>| name.and_then(|name| tokenizer.token_to_id(name));
    let encode =
        |special| tokenizer.encode_fast("a", special).ok().map(|encoding| encoding.get_ids().to_vec());
    let wanted = || {
        Some(
            [id(before).into_iter().collect(), encode(false)?, id(after).into_iter().collect::<Vec<u32>>()]
                .concat(),
        )
    };
    let (actual, wanted) =
        (crate::catch_panic::catch_panic(|| Ok::<_, String>((encode(true), wanted()))).ok())?;
    if actual == wanted {
        return None;
    }
    let special = |name: Option<&str>, kind: usize| {
        name.filter(|_| id(name).is_some()).map(|name| json!({"SpecialToken": {"id": name, "type_id": kind}}))
    };
    let text = |name: &str, kind: usize| json!({"Sequence": {"id": name, "type_id": kind}});
    let single: Vec<Value> =
        special(before, 0).into_iter().chain([text("A", 0)]).chain(special(after, 0)).collect();
    let pair: Vec<Value> = single.iter().cloned().chain([text("B", 1)]).chain(special(after, 1)).collect();
    let tokens: Map<String, Value> = [before, after]
        .into_iter()
        .flatten()
        .filter_map(|name| {
            Some((name.to_owned(), json!({"id": name, "ids": [id(Some(name))?], "tokens": [name]})))
        })
        .collect();
    let template =
        json!({"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens});
    serde_json::from_value::<PostProcessorWrapper>(template.clone()).ok().map(|_| template)
}

/// True if transformers replaces the expression of words: for large vocabularies of Mistral models that were
/// saved by older versions, if the configuration asks for it.
fn replaces_words(files: &SideConfigs, tokenizer: &tokenizers::Tokenizer) -> bool {
    let asks = files.tokenizer_config.get("fix_mistral_regex").is_some_and(|fix| *fix == true);
    let text = |key: &str| files.model.get(key).and_then(Value::as_str);
    let is_old = text("transformers_version").is_none_or(|version| {
        version.split('.').next().and_then(|major| major.parse().ok()).is_some_and(|major: u32| major < 5)
    });
    let is_mistral = text("model_type")
        .is_none_or(|model| ["mistral", "mistral3", "voxtral", "ministral", "pixtral"].contains(&model));
    asks && !files.model.is_empty()
        && is_old
        && is_mistral
        && tokenizer.get_vocab_size(true) > 100_000
        && tokenizer.get_pre_tokenizer().is_some()
}

/// Puts the expression of Mistral's newer vocabularies in place of the first step.
fn replace_words(file: &mut Value) {
    const WORDS: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    let split =
        json!({"type": "Split", "pattern": {"Regex": WORDS}, "behavior": "Isolated", "invert": false});
    let current = file["pre_tokenizer"].take();
    let steps = match current.get("pretokenizers").and_then(Value::as_array) {
        Some(steps) => [split].into_iter().chain(steps.iter().skip(1).cloned()).collect(),
        None if current.get("type").is_some_and(|kind| kind == "Metaspace") => vec![
            split,
            json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}),
        ],
        None => vec![split, current],
    };
    file["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": steps});
}

/// True if a program that reads the saved files beside another model, or beside none, would build another
/// tokenizer.
fn needs_generic_class(files: &SideConfigs, file: &Value, is_byte_level: bool, names: &NamedTokens) -> bool {
    let alone = SideConfigs { tokenizer_config: files.tokenizer_config.clone(), ..SideConfigs::default() };
    let Class::Own(name) = class::chosen(&alone, is_byte_level) else { return false };
    // The model of this folder decided for another class, whose tokens and template are in the file.
    if !matches!(class::chosen(files, is_byte_level), Class::Own(own) if own == name) {
        return true;
    }
    let recipe = pipeline::recipe_of(&name);
    let parts = recipe.and_then(|recipe| recipe.parts(files, names, file));
    parts.is_none_or(|parts| parts.differ_from(file))
}

/// `tokenizer_config.json` with a class that reads `tokenizer.json` as it is.
pub(super) fn with_generic_class(config: &Map<String, Value>) -> Vec<u8> {
    let mut config = config.clone();
    config.insert("tokenizer_class".to_owned(), GENERIC_CLASS.into());
    serde_json::to_vec_pretty(&config).unwrap_or_default()
}
