//! The class with which `AutoTokenizer` of transformers 5 reads a folder.
//!
//! Most classes read `tokenizer.json` as it is. Some build the pipeline themselves, and for some models the
//! class that `tokenizer_config.json` names is ignored. `classes.json` lists these, with all names under
//! which transformers has them; it is generated from transformers by `tests/tokenizers/classes.py`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

use serde::Deserialize;
use serde_json::{Map, Value};

use super::named_tokens::SideConfigs;

/// Tables of transformers.
#[derive(Deserialize)]
struct Tables {
    /// Class of a model, by `model_type`.
    models: BTreeMap<String, String>,
    /// Models for which the class that the files name is ignored.
    ignores_named_class: BTreeSet<String>,
    /// Classes that build the pipeline themselves, or do not read `tokenizer.json` at all.
    own_pipeline: BTreeSet<String>,
    /// Classes of that list, by other names under which transformers has them.
    aliases: BTreeMap<String, String>,
}

static TABLES: LazyLock<Tables> =
    LazyLock::new(|| serde_json::from_str(include_str!("classes.json")).expect("the tables are a constant"));

/// A class that reads a folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Class {
    /// One that reads `tokenizer.json` as it is.
    Generic,
    /// One that builds the pipeline itself.
    Own(String),
}

impl Class {
    /// The class that is named `name`; one that transformers does not have reads the file as it is.
    fn of_name(name: &str) -> Class {
        let short = name.strip_suffix("Fast").unwrap_or(name);
        let alias = TABLES.aliases.get(name).or_else(|| TABLES.aliases.get(short));
        let class = alias.map_or(short, String::as_str);
        if TABLES.own_pipeline.contains(class) { Class::Own(class.to_owned()) } else { Class::Generic }
    }
}

/// The name of the class in the files, if any.
fn named_class(files: &SideConfigs) -> Option<&str> {
    let in_file = |file: &'_ Map<String, Value>| file.get("tokenizer_class").is_some_and(Value::is_string);
    let file = [&files.tokenizer_config, &files.model].into_iter().find(|file| in_file(file))?;
    file.get("tokenizer_class")?.as_str()
}

/// The class that the files ask for, without rules for certain models.
pub(super) fn asked_for(files: &SideConfigs) -> Class {
    named_class(files).map_or(Class::Generic, Class::of_name)
}

/// The class that reads the folder of `files`. `is_byte_level` tells if its `tokenizer.json` has a
/// `ByteLevel` step.
pub(super) fn chosen(files: &SideConfigs, is_byte_level: bool) -> Class {
    let model = files.model.get("model_type").and_then(Value::as_str).unwrap_or_default();
    let of_model = TABLES.models.get(model).map(|name| name.strip_suffix("Fast").unwrap_or(name));
    let ignores_named = TABLES.ignores_named_class.contains(model);
    let named = named_class(files);
    let has_code = match files.tokenizer_config.get("auto_map") {
        Some(Value::Object(map)) => map.get("AutoTokenizer").is_some_and(|code| !code.is_null()),
        Some(Value::Array(_)) => true,
        _ => false,
    };
    let Some(named) = named else { return of_model.map_or(Class::Generic, Class::of_name) };
    let short = named.strip_suffix("Fast").unwrap_or(named);
    if has_code {
        return Class::of_name(named);
    }
    let is_mistral =
        ["mistral", "mistral3", "mistral_large4", "mixtral", "ministral", "ministral3", "pixtral", "voxtral"];
    if short == "LlamaTokenizer" && is_byte_level && !ignores_named && !is_mistral.contains(&model) {
        return Class::Generic;
    }
    match of_model {
        Some(of_model) if of_model != short => match Class::of_name(of_model) {
            Class::Generic => Class::Generic,
            own if ignores_named => own,
            Class::Own(_) => Class::of_name(named),
        },
        _ => Class::of_name(named),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_has_its_pipeline_under_all_names_of_transformers() {
        for (name, class) in [
            ("ElectraTokenizer", "BertTokenizer"),
            ("ElectraTokenizerFast", "BertTokenizer"),
            ("LayoutLMTokenizer", "BertTokenizer"),
            ("LongformerTokenizerFast", "RobertaTokenizer"),
            ("LEDTokenizer", "RobertaTokenizer"),
            ("BartTokenizer", "RobertaTokenizer"),
            ("Phi3Tokenizer", "LlamaTokenizer"),
            ("Qwen2TokenizerFast", "Qwen2Tokenizer"),
            ("DPRReaderTokenizerFast", "BertTokenizer"),
            ("DPRReaderTokenizer", "DPRReaderTokenizer"),
        ] {
            assert_eq!(Class::of_name(name), Class::Own(class.to_owned()), "{name}");
        }
        for name in
            ["PreTrainedTokenizerFast", "TokenizersBackend", "BloomTokenizer", "ElectraToken", "MptTokenizer"]
        {
            assert_eq!(Class::of_name(name), Class::Generic, "{name}");
        }
    }
}
