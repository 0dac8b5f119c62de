//! adapter_config.json of PEFT's, the description of an adapter beside its weights.
//!
//! Adapters are plain LoRA of linear layers of the blocks. Kinds that compute otherwise, and those with other
//! trained weights, are refused by name. The name of the base model is a hint; shapes decide.

use crate::adapter::is_named;
use crate::keys::Keys;
use crate::{Adapter, Architecture, ModelError, Targets};
use serde_json::Value;

/// The name of the file.
const FILE: &str = "adapter_config.json";

/// Maximum rank, which bounds sizes that a file may claim.
const MAX_RANK: usize = 65_536;

/// A parsed adapter_config.json.
#[derive(Clone, Debug, PartialEq)]
pub struct PeftConfig {
    /// Rows of A, columns of B.
    pub rank: usize,
    /// The product of A and B is multiplied by alpha / rank.
    pub alpha: f64,
    /// The model that it was trained on, as the file names it.
    pub base: Option<String>,
    /// Keys that nothing reads, sorted.
    pub unknown: Vec<String>,
    targets: Modules,
    excluded: Option<Modules>,
    /// The blocks that have adapters, if not all.
    blocks: Option<Vec<usize>>,
}

/// Modules, as the file names them.
#[derive(Clone, Debug, PartialEq)]
enum Modules {
    /// All linear layers of the blocks.
    AllLinear,
    /// Names, or ends of names.
    Named(Vec<String>),
    /// A regular expression for whole names.
    Pattern(String),
}

/// Matching of a regular expression of Python's (first) with a whole name (second).
pub type WholeMatch<'a> = &'a dyn Fn(&str, &str) -> Result<bool, String>;

/// Keys that do not change what an adapter computes, and those that are read here.
const READ: [&str; 25] = [
    "auto_mapping",
    "base_model_name_or_path",
    "bias",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_alpha",
    "lora_dropout",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
];

/// Keys of kinds of adapters that are not supported unless the value is null, false or empty, each with the
/// kind.
const REFUSED: [(&str, &str); 17] = [
    // Beside it PEFT gives experts ranks of their own.
    ("target_parameters", "adapters of experts"),
    ("use_dora", "DoRA"),
    ("use_rslora", "rank-stabilised LoRA, whose scale is alpha / sqrt(rank)"),
    ("use_qalora", "QA-LoRA"),
    ("use_bdlora", "block-diagonal LoRA"),
    ("fan_in_fan_out", "weights stored by inputs"),
    ("lora_bias", "biases of adapters"),
    ("rank_pattern", "ranks that differ between layers"),
    ("alpha_pattern", "values of alpha that differ between layers"),
    ("modules_to_save", "trained copies of whole layers"),
    ("trainable_token_indices", "trained rows of the embedding"),
    ("layer_replication", "repeated layers"),
    ("alora_invocation_tokens", "activated LoRA"),
    ("arrow_config", "Arrow routing"),
    ("kasa_config", "KaSA"),
    ("monteclora_config", "MonteCLoRA"),
    ("velora_config", "VeLoRA"),
];

/// Values of `init_lora_weights` with which the base model stays as it is.
const INITIAL: [&str; 3] = ["gaussian", "eva", "orthogonal"];

impl PeftConfig {
    /// Parses the text of an adapter_config.json.
    ///
    /// # Errors
    /// No JSON object; keys that are missing or of wrong types; kinds that are not supported.
    pub fn parse(text: &str) -> Result<PeftConfig, ModelError> {
        let wrong = |message: String| ModelError::HuggingFace { file: FILE, message };
        let value: Value = serde_json::from_str(text).map_err(|e| wrong(format!("it is not JSON: {e}")))?;
        let Value::Object(json) = value else { return Err(wrong("it is not a JSON object".into())) };
        let file = Keys::of_file(&json, FILE);
        refuse_kinds(&file)?;
        let need = |key: &str| file.fail(format!("`{key}` is missing; copy the file of the adapter again"));
        let rank = file.size("r")?.ok_or_else(|| need("r"))?;
        if !(1..=MAX_RANK).contains(&rank) {
            return Err(file.fail(format!("`r` is {rank}; it must be from 1 to {MAX_RANK}")));
        }
        let alpha = file.number("lora_alpha")?.ok_or_else(|| need("lora_alpha"))?;
        let scale = alpha as f32 / rank as f32;
        if !(alpha > 0.0 && scale.is_normal()) {
            return Err(file.fail(format!("`lora_alpha` is {alpha:?}; it must be a positive number")));
        }
        let targets = modules(&file, "target_modules")?.ok_or_else(|| need("target_modules"))?;
        let is_known = |key: &&String| {
            READ.contains(&key.as_str()) || REFUSED.iter().any(|(name, _)| *name == key.as_str())
        };
        let mut unknown: Vec<String> = json.keys().filter(|key| !is_known(key)).cloned().collect();
        unknown.sort();
        Ok(PeftConfig {
            rank,
            alpha,
            base: file.text("base_model_name_or_path")?.map(str::to_owned).filter(|name| !name.is_empty()),
            unknown,
            targets,
            excluded: modules(&file, "exclude_modules")?,
            blocks: blocks(&file)?,
        })
    }

    /// The matrices of `model` that have an adapter.
    ///
    /// # Errors
    /// There are none; a regular expression that cannot be read or takes too long.
    pub fn targets(&self, model: &Architecture, whole_match: WholeMatch<'_>) -> Result<Targets, ModelError> {
        let wrong = |message: String| ModelError::HuggingFace { file: FILE, message };
        let has = |modules: &Modules, name: &str| modules.has(name, whole_match).map_err(wrong);
        let mut chosen = Vec::new();
        for (block, module) in model.adaptable_modules() {
            let is_excluded = match &self.excluded {
                Some(excluded) => has(excluded, &module)?,
                None => false,
            };
            let is_of_block = self.blocks.as_ref().is_none_or(|blocks| blocks.contains(&block));
            if is_of_block && !is_excluded && has(&self.targets, &module)? {
                chosen.push(module);
            }
        }
        if chosen.is_empty() {
            let known = model.adapter_targets().join(", ");
            return Err(wrong(format!(
                "`target_modules` names no linear layer of the model's blocks; these are {known}: the adapter is of another model"
            )));
        }
        Ok(Targets::shortest(chosen, model))
    }
}

impl Modules {
    fn has(&self, module: &str, whole_match: WholeMatch<'_>) -> Result<bool, String> {
        match self {
            Modules::AllLinear => Ok(true),
            Modules::Named(names) => Ok(names.iter().any(|name| is_named(module, name))),
            Modules::Pattern(pattern) => whole_match(pattern, module),
        }
    }
}

fn refuse_kinds(file: &Keys<'_>) -> Result<(), ModelError> {
    const ONLY: &str = "only plain LoRA adapters of linear layers are supported";
    match file.text("peft_type")? {
        Some("LORA") => {}
        Some(kind) => return Err(file.fail(format!("`peft_type` is {kind:?}; {ONLY}"))),
        None => return Err(file.fail(format!("`peft_type` is missing; {ONLY}"))),
    }
    for (key, kind) in REFUSED {
        let is_off = |value: &Value| match value {
            Value::Null | Value::Bool(false) => true,
            Value::Array(all) => all.is_empty(),
            Value::Object(all) => all.is_empty(),
            _ => false,
        };
        if let Some(value) = file.get(key).filter(|value| !is_off(value)) {
            return Err(file.fail(format!("`{key}` is {value} ({kind}); {ONLY}")));
        }
    }
    if let Some(bias) = file.text("bias")?.filter(|bias| *bias != "none") {
        return Err(file.fail(format!("`bias` is {bias:?} (trained biases); {ONLY}")));
    }
    match file.get("init_lora_weights") {
        None | Some(Value::Bool(_)) => Ok(()),
        Some(Value::String(kind)) if INITIAL.contains(&kind.as_str()) => Ok(()),
        Some(value) => Err(file.fail(format!(
            "`init_lora_weights` is {value}, which changes the base model; convert the adapter to plain LoRA first \
             (path_initial_model_for_weight_conversion of PEFT's save_pretrained)"
        ))),
    }
}

/// The modules that a key names: a list, a regular expression, or the word for all.
fn modules(file: &Keys<'_>, key: &'static str) -> Result<Option<Modules>, ModelError> {
    let names = |list: &Vec<Value>| {
        list.iter().map(|name| name.as_str().map(str::to_owned)).collect::<Option<Vec<String>>>()
    };
    let take = |value: &Value| match value {
        Value::String(word) if word.to_lowercase() == "all-linear" => Some(Modules::AllLinear),
        Value::String(pattern) => Some(Modules::Pattern(pattern.clone())),
        Value::Array(list) => names(list).map(Modules::Named),
        _ => None,
    };
    let found = file.read(key, "a list of names, or a string", take)?;
    Ok(found.filter(|modules| !matches!(modules, Modules::Named(names) if names.is_empty())))
}

/// The blocks that have adapters: those of `layers_to_transform`, if there are some.
fn blocks(file: &Keys<'_>) -> Result<Option<Vec<usize>>, ModelError> {
    let number = |value: &Value| value.as_u64().and_then(|block| usize::try_from(block).ok());
    let take = |value: &Value| match value {
        Value::Array(list) => list.iter().map(number).collect(),
        one => number(one).map(|block| vec![block]),
    };
    let found: Option<Vec<usize>> = file.read("layers_to_transform", "a block's number, or a list", take)?;
    let found = found.filter(|blocks| !blocks.is_empty());
    let is_usual = |value: &Value| match value {
        Value::String(name) => name.is_empty() || name == "layers",
        Value::Array(names) => names.iter().all(|name| name == "layers"),
        _ => false,
    };
    match file.get("layers_pattern").filter(|pattern| found.is_some() && !is_usual(pattern)) {
        Some(pattern) => {
            Err(file
                .fail(format!("`layers_pattern` is {pattern}; the blocks of the model are in \"layers\"")))
        }
        None => Ok(found),
    }
}

impl Targets {
    /// These modules, written as short as they can be.
    fn shortest(modules: Vec<String>, model: &Architecture) -> Targets {
        let names_them = |targets: &Targets| model.target_modules(targets) == modules;
        let mut ends: Vec<String> = Vec::new();
        for module in &modules {
            let end = module.rsplit('.').next().unwrap_or(module);
            if !ends.iter().any(|known| known == end) {
                ends.push(end.to_owned());
            }
        }
        let has_experts = model.linears().any(|(_, linear)| linear.experts.is_some());
        let named = [Targets::AllLinear, Targets::Named(ends)];
        let short = named.into_iter().find(|targets| !has_experts && names_them(targets));
        short.unwrap_or(Targets::Named(modules))
    }
}

/// The f64 with the shortest decimal of `value`: 0.1 as it stands in a run file.
fn shortest(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(f64::from(value))
}

impl Adapter {
    /// The text of an adapter_config.json for these adapters of `model`, whose folder is `base`.
    pub fn to_json(&self, model: &Architecture, base: Option<&str>) -> String {
        let targets: Vec<&str> = match &self.targets {
            Targets::AllLinear => model.adapter_targets(),
            Targets::Named(names) => names.iter().map(String::as_str).collect(),
        };
        let json = serde_json::json!({
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self.rank,
            "lora_alpha": shortest(self.alpha),
            "lora_dropout": shortest(self.dropout),
            "target_modules": targets,
            "bias": "none",
            "fan_in_fan_out": false,
            "inference_mode": true,
            "modules_to_save": null,
            "use_dora": false,
            "use_rslora": false,
        });
        format!("{json:#}\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Map, json};

    fn refused(key: &str, value: Value) -> String {
        let mut file = valid();
        file.insert(key.into(), value);
        PeftConfig::parse(&Value::Object(file).to_string()).expect_err(key).to_string()
    }

    fn valid() -> Map<String, Value> {
        let Value::Object(file) = json!({
            "peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none",
        }) else {
            unreachable!("an object")
        };
        file
    }

    fn parsed(changes: Value) -> PeftConfig {
        let mut file = valid();
        file.extend(changes.as_object().expect("an object").clone());
        PeftConfig::parse(&Value::Object(file).to_string()).expect("a file")
    }

    fn model() -> Architecture {
        let config = r#"{"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
            "num_key_value_heads": 2, "intermediate_size": 8, "vocab_size": 9}"#;
        crate::hf::HfConfig::parse(config).expect("a config").model.architecture().expect("a model")
    }

    /// A stand-in for regular expressions: the end of a name.
    fn ends(pattern: &str, name: &str) -> Result<bool, String> {
        Ok(name.ends_with(pattern))
    }

    #[test]
    fn kinds_that_compute_otherwise_are_refused_by_name() {
        for (key, _) in REFUSED {
            let line = refused(key, json!(true));
            assert!(
                line.starts_with("adapter_config.json: ") && line.contains(&format!("`{key}`")),
                "{line}"
            );
        }
        for (key, value) in [
            ("peft_type", json!("LOHA")),
            ("peft_type", Value::Null),
            ("bias", json!("lora_only")),
            ("rank_pattern", json!({"q_proj": 8})),
            ("modules_to_save", json!(["lm_head"])),
            ("target_parameters", json!(["mlp.experts.gate_up_proj"])),
            ("init_lora_weights", json!("pissa")),
            ("init_lora_weights", json!("pissa_niter_4")),
            ("init_lora_weights", json!("olora")),
            ("init_lora_weights", json!("loftq")),
            ("init_lora_weights", json!("corda")),
            ("r", json!(0)),
            ("r", json!(1_u64 << 40)),
            ("r", json!("four")),
            ("r", json!(2.5)),
            ("lora_alpha", json!(0)),
            ("lora_alpha", json!(-1)),
            ("lora_alpha", json!(1e300)),
            ("lora_alpha", Value::Null),
            ("target_modules", Value::Null),
            ("target_modules", json!([])),
            ("target_modules", json!([3])),
            ("exclude_modules", json!(3)),
            ("layers_to_transform", json!([-1])),
        ] {
            let line = refused(key, value);
            assert!(line.contains(&format!("`{key}`")), "{line}");
        }
        for text in ["", "[]", "{", "nan", "{\"r\": 1e999}"] {
            PeftConfig::parse(text).expect_err(text);
        }
    }

    #[test]
    fn switched_off_kinds_are_read_and_unknown_keys_are_listed() {
        let found = parsed(json!({
            "use_dora": false, "rank_pattern": {}, "modules_to_save": null, "trainable_token_indices": null,
            "init_lora_weights": "gaussian", "lora_alpha": 12.5, "base_model_name_or_path": "a/b", "later": 1,
        }));
        assert_eq!((found.rank, found.alpha, found.base.as_deref()), (4, 12.5, Some("a/b")));
        assert_eq!(found.unknown, ["later"]);
    }

    #[test]
    fn targets_are_those_of_peft() {
        let model = model();
        let targets = |changes: Value| parsed(changes).targets(&model, &ends);
        let named = |names: &[&str]| Targets::Named(names.iter().map(|name| (*name).to_owned()).collect());
        for (changes, expected) in [
            (json!({"target_modules": "ALL-linear"}), Targets::AllLinear),
            (json!({"target_modules": ["v_proj", "q_proj", "c_attn"]}), named(&["q_proj", "v_proj"])),
            (json!({"target_modules": "_proj"}), Targets::AllLinear),
            (json!({"target_modules": "all-linear", "exclude_modules": "mlp.gate_proj"}), {
                named(&["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"])
            }),
            (json!({"layers_to_transform": 1}), named(&["model.layers.1.self_attn.q_proj"])),
            (json!({"layers_to_transform": [0, 1, 2, 9], "layers_pattern": ["layers"]}), named(&["q_proj"])),
            (
                json!({"target_modules": ["model.layers.2.mlp.up_proj"]}),
                named(&["model.layers.2.mlp.up_proj"]),
            ),
        ] {
            assert_eq!(targets(changes.clone()).expect("targets"), expected, "{changes}");
        }
        for changes in [json!({"target_modules": ["c_attn"]}), json!({"layers_to_transform": 3})] {
            let line = targets(changes).expect_err("none").to_string();
            assert!(line.contains("q_proj, k_proj"), "{line}");
        }
        let broken = |_: &str, _: &str| Err("no expression".to_owned());
        let line = parsed(json!({"target_modules": "("})).targets(&model, &broken).expect_err("refused");
        assert!(line.to_string().contains("no expression"));
    }

    #[test]
    fn a_written_file_is_read_as_it_was() {
        let model = model();
        for targets in [Targets::AllLinear, Targets::Named(vec!["q_proj".into(), "down_proj".into()])] {
            let adapter = Adapter { rank: 4, alpha: 6.5, dropout: 0.0, targets: targets.clone() };
            let read = PeftConfig::parse(&adapter.to_json(&model, Some("base"))).expect("a file");
            assert_eq!(read.targets(&model, &ends).expect("targets"), targets);
            assert_eq!((read.rank, read.alpha, read.base.as_deref()), (4, 6.5, Some("base")));
            assert!(read.unknown.is_empty());
        }
    }
}
