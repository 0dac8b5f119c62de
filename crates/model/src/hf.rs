//! Hugging Face's config.json: read in the old form and in transformers v5's, written so that both old and new readers agree.
//!
//! What we do not understand but cannot change the result is kept and written back; what would change it (another activation,
//! sliding windows, other rope types) is refused by name.

use crate::{Architecture, Family, ModelError};
use serde_json::{Map, Value, json};
use xtrain_ops::qk_norm_rope::RopeScaling;

/// A parsed config.json.
#[derive(Clone, Debug, PartialEq)]
pub struct HfConfig {
    /// The model that it describes.
    pub model: Architecture,
    /// The first token of every text, if any.
    pub bos_token_id: Option<u32>,
    /// The tokens that end a text.
    pub eos_token_ids: Vec<u32>,
    /// The file as it was, for what else is in it.
    pub source: Map<String, Value>,
    /// The generation_config.json beside it as it was; empty where there is none.
    pub generation: Map<String, Value>,
}

/// The context of the first training, in tokens.
const CONTEXT: &str = "original_max_position_embeddings";

/// Names that need not be imported: tables that the model computes.
pub const IGNORABLE_SUFFIXES: [&str; 1] = ["rotary_emb.inv_freq"];

impl HfConfig {
    /// Parses the text of a config.json.
    pub fn parse(text: &str) -> Result<Self, ModelError> {
        let value: Value = serde_json::from_str(text).map_err(|e| fail(format!("it is not JSON: {e}")))?;
        let Value::Object(source) = value else { return Err(fail("it is not a JSON object")) };
        let file = Reader::of(&source);
        let family = file.family()?;
        file.refuse_what_differs(family)?;
        let dim = file.size("hidden_size")?.ok_or_else(|| missing("hidden_size"))?;
        let heads = file.size("num_attention_heads")?.ok_or_else(|| missing("num_attention_heads"))?;
        if heads == 0 {
            return Err(fail("num_attention_heads is 0"));
        }
        // transformers' defaults where a file leaves a key out (configuration_llama.py, configuration_qwen2.py, configuration_qwen3.py, v5).
        let (default_kv_heads, default_head_dim) = match family {
            Family::Llama => (heads, dim / heads),
            Family::Qwen2 => (32, dim / heads),
            Family::Qwen3 => (32, 128),
        };
        let (rope_theta, rope_scaling) = file.rope()?;
        let model = Architecture {
            family,
            dim,
            layers: file.size("num_hidden_layers")?.ok_or_else(|| missing("num_hidden_layers"))?,
            heads,
            kv_heads: file.size("num_key_value_heads")?.unwrap_or(default_kv_heads),
            head_dim: file.size("head_dim")?.unwrap_or(default_head_dim),
            ffn_dim: file.size("intermediate_size")?.ok_or_else(|| missing("intermediate_size"))?,
            vocab_size: file.size("vocab_size")?.ok_or_else(|| missing("vocab_size"))?,
            max_position_embeddings: file.size("max_position_embeddings")?.unwrap_or(match family {
                Family::Llama => 2048,
                _ => 32768,
            }),
            rope_theta,
            rope_scaling,
            norm_eps: file.number("rms_norm_eps")?.unwrap_or(1e-6),
            tie_embeddings: file.flag("tie_word_embeddings")?.unwrap_or(false),
            qkv_bias: family == Family::Qwen2,
            qk_norm: family == Family::Qwen3,
        };
        model.validate().map_err(|e| fail(e.to_string()))?;
        let bos_token_id = file.token_ids("bos_token_id")?.first().copied();
        let eos_token_ids = file.token_ids("eos_token_id")?;
        Ok(HfConfig { model, bos_token_id, eos_token_ids, source, generation: Map::new() })
    }

    /// Takes the text of the generation_config.json beside the config.json, so that [`HfConfig::generation_json`] keeps what it says.
    pub fn parse_generation(&mut self, text: &str) -> Result<(), ModelError> {
        let wrong = |what: String| ModelError::HuggingFace { file: "generation_config.json", message: what };
        let value: Value = serde_json::from_str(text).map_err(|e| wrong(format!("it is not JSON: {e}")))?;
        let Value::Object(generation) = value else { return Err(wrong("it is not a JSON object".into())) };
        self.generation = generation;
        Ok(())
    }

    /// The text of a config.json that old and new readers understand alike. `dtype` is the element type of the weights beside it
    /// (`float32` or `bfloat16`). Every key of [`HfConfig::source`] is there again; those that say what we know are set anew.
    pub fn to_json(&self, dtype: &str) -> String {
        let m = &self.model;
        let mut out = self.source.clone();
        let written = json!({
            "architectures": [m.family.architecture()],
            "model_type": m.family.name(),
            "hidden_size": m.dim,
            "num_hidden_layers": m.layers,
            "num_attention_heads": m.heads,
            "num_key_value_heads": m.kv_heads,
            "head_dim": m.head_dim,
            "intermediate_size": m.ffn_dim,
            "vocab_size": m.vocab_size,
            "max_position_embeddings": m.max_position_embeddings,
            "rms_norm_eps": m.norm_eps,
            "rope_theta": m.rope_theta,
            "rope_parameters": self.rope_parameters(),
            "tie_word_embeddings": m.tie_embeddings,
            "hidden_act": "silu",
            "bos_token_id": self.bos_beside(&self.source),
            "eos_token_id": self.eos_of_config(),
            "dtype": dtype,
            "torch_dtype": dtype,
        });
        if let Value::Object(written) = written {
            out.extend(written);
        }
        // Readers older than v5 know only this place.
        let scaling = match self.rope_parameters() {
            Value::Object(mut table) if m.rope_scaling != RopeScaling::None => {
                table.remove("rope_theta");
                // Its name before `rope_type`: kept for the readers that it was written for.
                let old_name = self.source.get("rope_scaling").is_some_and(|old| old.get("type").is_some());
                if old_name {
                    table.insert("type".into(), table["rope_type"].clone());
                }
                Value::Object(table)
            }
            _ => Value::Null,
        };
        out.insert("rope_scaling".into(), scaling);
        let mut set = |key: &str, value: Value| out.insert(key.into(), value);
        match m.family {
            Family::Llama => {
                set("attention_bias", json!(false));
                set("mlp_bias", json!(false));
            }
            Family::Qwen2 => {
                set("use_sliding_window", json!(false));
            }
            Family::Qwen3 => {
                set("attention_bias", json!(false));
                set("use_sliding_window", json!(false));
            }
        }
        let mut default = |key: &str, value: Value| {
            if out.get(key).is_none_or(Value::is_null) {
                out.insert(key.into(), value);
            }
        };
        default("use_cache", json!(true));
        // Engines that insist on the window's keys, though it is off (candle); Qwen2's slides over the window even so.
        if m.family != Family::Llama {
            default("max_window_layers", json!(m.layers));
        }
        if m.family == Family::Qwen2 {
            default("sliding_window", json!(m.max_position_embeddings));
        }
        let mut text =
            serde_json::to_string_pretty(&Value::Object(out)).expect("a JSON value can be written");
        text.push('\n');
        text
    }

    /// The text of a generation_config.json: how to start and when to stop, and what [`HfConfig::generation`] says beside.
    pub fn generation_json(&self) -> String {
        let mut out = self.generation.clone();
        if out.is_empty() {
            out.insert("do_sample".into(), json!(false));
        }
        out.insert("bos_token_id".into(), self.bos_beside(&self.generation));
        out.insert("eos_token_id".into(), self.eos_of_generation());
        format!("{:#}\n", Value::Object(out))
    }

    /// The first token as `file` names it, else as the tokenizer does: some models' files disagree, and each has its readers.
    fn bos_beside(&self, file: &Map<String, Value>) -> Value {
        file.get("bos_token_id").filter(|v| !v.is_null()).cloned().unwrap_or_else(|| json!(self.bos_token_id))
    }

    /// The end tokens that config.json names. Models often name one there and all in generation_config.json: that stays so, as long as
    /// the one is still an end.
    fn eos_of_config(&self) -> Value {
        let named = Reader::of(&self.source).token_ids("eos_token_id").unwrap_or_default();
        if !named.is_empty() && named.iter().all(|id| self.eos_token_ids.contains(id)) {
            return self.source["eos_token_id"].clone();
        }
        token_ids(&self.eos_token_ids)
    }

    /// All end tokens: those that generation_config.json named first, in its order (engines pad with the first), then the others.
    fn eos_of_generation(&self) -> Value {
        let named = Reader::of(&self.generation).token_ids("eos_token_id").unwrap_or_default();
        let mut ids: Vec<u32> = named.into_iter().filter(|id| self.eos_token_ids.contains(id)).collect();
        ids.extend(self.eos_token_ids.iter().filter(|id| !ids.contains(id)).copied().collect::<Vec<_>>());
        token_ids(&ids)
    }

    /// Theta and scaling in one table, with what else the source's said.
    fn rope_parameters(&self) -> Value {
        let source = Reader::of(&self.source);
        let mut table = source.rope_tables().next().map_or_else(Map::new, |(_, table)| table.clone());
        // The old name of `rope_type`.
        table.remove("type");
        if let Value::Object(known) = self.known_rope_parameters() {
            table.extend(known);
        }
        Value::Object(table)
    }

    fn known_rope_parameters(&self) -> Value {
        let theta = self.model.rope_theta;
        match self.model.rope_scaling {
            RopeScaling::None => json!({ "rope_type": "default", "rope_theta": theta }),
            RopeScaling::Linear { factor } => {
                json!({ "rope_type": "linear", "rope_theta": theta, "factor": factor })
            }
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => json!({
                "rope_type": "llama3",
                "rope_theta": theta,
                "factor": factor,
                "low_freq_factor": low_freq_factor,
                "high_freq_factor": high_freq_factor,
                "original_max_position_embeddings": original_max_position_embeddings,
            }),
        }
    }
}

impl Family {
    /// The class that transformers runs it with.
    const fn architecture(self) -> &'static str {
        match self {
            Family::Llama => "LlamaForCausalLM",
            Family::Qwen2 => "Qwen2ForCausalLM",
            Family::Qwen3 => "Qwen3ForCausalLM",
        }
    }
}

/// As these files write token ids: a number for one.
fn token_ids(ids: &[u32]) -> Value {
    match ids {
        [] => Value::Null,
        [one] => json!(one),
        many => json!(many),
    }
}

fn fail(message: impl Into<String>) -> ModelError {
    ModelError::HuggingFace { file: "config.json", message: message.into() }
}

fn missing(key: &str) -> ModelError {
    fail(format!("`{key}` is missing; the file must come from a Llama, Qwen2 or Qwen3 model"))
}

/// The keys of the file, or of a table in it.
struct Reader<'a> {
    json: &'a Map<String, Value>,
    /// The key of the table, if it is one.
    table: Option<&'static str>,
}

impl<'a> Reader<'a> {
    fn of(file: &'a Map<String, Value>) -> Self {
        Reader { json: file, table: None }
    }

    /// The key's value; nothing where it is absent or null.
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.json.get(key).filter(|v| !v.is_null())
    }

    /// The key with the table that it is in.
    fn path(&self, key: &str) -> String {
        self.table.map_or_else(|| key.into(), |table| format!("{table}.{key}"))
    }

    /// The key's value as `take` reads it; an error where it reads nothing.
    fn read<T>(
        &self,
        key: &str,
        must: &str,
        take: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
        let wrong = |v: &Value| fail(format!("`{}` is {v}; it must be {must}", self.path(key)));
        self.get(key).map(|v| take(v).ok_or_else(|| wrong(v))).transpose()
    }

    fn size(&self, key: &str) -> Result<Option<usize>, ModelError> {
        self.read(key, "a whole number", |v| v.as_u64().and_then(|n| usize::try_from(n).ok()))
    }

    fn number(&self, key: &str) -> Result<Option<f64>, ModelError> {
        self.read(key, "a number", Value::as_f64)
    }

    fn flag(&self, key: &str) -> Result<Option<bool>, ModelError> {
        self.read(key, "true or false", Value::as_bool)
    }

    fn text(&self, key: &str) -> Result<Option<&'a str>, ModelError> {
        self.read(key, "a string", Value::as_str)
    }

    fn token_ids(&self, key: &str) -> Result<Vec<u32>, ModelError> {
        let id = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok());
        let ids = |v: &Value| match v {
            Value::Array(all) => all.iter().map(id).collect::<Option<_>>(),
            one => id(one).map(|id| vec![id]),
        };
        Ok(self.read(key, "a token id or a list of them", ids)?.unwrap_or_default())
    }

    fn family(&self) -> Result<Family, ModelError> {
        let name = self.text("model_type")?.ok_or_else(|| missing("model_type"))?;
        [Family::Llama, Family::Qwen2, Family::Qwen3].into_iter().find(|f| f.name() == name).ok_or_else(|| {
            fail(format!("model_type `{name}` is not supported; xtrain loads llama (2, 3), qwen2 (2.5) and qwen3 (dense)"))
        })
    }

    fn refuse_what_differs(&self, family: Family) -> Result<(), ModelError> {
        let refuse = |key: &str, why: &str| Err(fail(format!("`{key}` = {}: {why}", self.json[key])));
        if self.text("hidden_act")?.is_some_and(|act| !matches!(act, "silu" | "swish")) {
            return refuse("hidden_act", "only \"silu\" (SwiGLU) is supported");
        }
        if self.flag("attention_bias")? == Some(true) {
            return refuse("attention_bias", "biases on all attention projections are not supported");
        }
        if self.flag("mlp_bias")? == Some(true) {
            return refuse("mlp_bias", "biases in the feed-forward are not supported");
        }
        if family != Family::Llama && self.flag("use_sliding_window")? == Some(true) {
            return refuse("use_sliding_window", "sliding-window attention is not supported");
        }
        let types = self.read("layer_types", "a list", Value::as_array)?;
        if types.is_some_and(|types| types.iter().any(|t| t.as_str() != Some("full_attention"))) {
            return refuse("layer_types", "only \"full_attention\" layers are supported");
        }
        if self.get("quantization_config").is_some() {
            return Err(fail(
                "the weights are quantized (`quantization_config`); load the original bf16 or fp32 folder",
            ));
        }
        self.refuse_partial_rotation()
    }

    fn refuse_partial_rotation(&self) -> Result<(), ModelError> {
        let key = "partial_rotary_factor";
        match self.number(key)? {
            Some(factor) if factor != 1.0 => Err(fail(format!(
                "`{}` = {factor}: only full rotary embeddings are supported",
                self.path(key)
            ))),
            _ => Ok(()),
        }
    }

    /// The tables of rope settings that are not empty: transformers v5's, and the one that it had before.
    fn rope_tables(&self) -> impl Iterator<Item = (&'static str, &'a Map<String, Value>)> {
        let table = |key| Some((key, self.get(key)?.as_object().filter(|table| !table.is_empty())?));
        ["rope_parameters", "rope_scaling"].into_iter().filter_map(table)
    }

    /// Theta and scaling, from the tables `rope_parameters` (transformers v5) and `rope_scaling`, and from `rope_theta`. What is said
    /// twice must be said alike: readers differ in which they believe.
    fn rope(&self) -> Result<(f64, RopeScaling), ModelError> {
        for key in ["rope_parameters", "rope_scaling"] {
            self.read(key, "an object", Value::as_object)?;
        }
        let mut theta = self.number("rope_theta")?.map(|theta| ("rope_theta".to_owned(), theta));
        let mut scaling: Option<(&str, RopeScaling)> = None;
        for (key, json) in self.rope_tables() {
            let table = Reader { json, table: Some(key) };
            let inner = table.number("rope_theta")?.map(|inner| (table.path("rope_theta"), inner));
            if let (Some((a, x)), Some((b, y))) = (&theta, &inner)
                && x != y
            {
                return Err(fail(format!("`{a}` is {x}, but `{b}` is {y}; make them equal")));
            }
            theta = theta.or(inner);
            let found = table.rope_scaling(self.size(CONTEXT)?)?;
            if let Some((first, other)) = scaling.replace((key, found))
                && other != found
            {
                return Err(fail(format!(
                    "`{first}` and `{key}` scale the rotary embeddings differently; make them equal, or remove one"
                )));
            }
        }
        Ok((theta.map_or(10_000.0, |(_, theta)| theta), scaling.map_or(RopeScaling::None, |(_, s)| s)))
    }

    /// The scaling that this table of rope settings asks for; `context` is what the file says outside the table of the original one.
    fn rope_scaling(&self, context: Option<usize>) -> Result<RopeScaling, ModelError> {
        if let Some((layers, _)) = self.json.iter().find(|(_, v)| v.is_object()) {
            let path = self.path(layers);
            return Err(fail(format!(
                "`{path}` is a table: frequencies that differ by layer are not supported"
            )));
        }
        self.refuse_partial_rotation()?;
        let (new, old) = (self.text("rope_type")?, self.text("type")?);
        if let (Some(new), Some(old)) = (new, old)
            && new != old
        {
            let (a, b) = (self.path("rope_type"), self.path("type"));
            return Err(fail(format!("`{a}` is \"{new}\", but `{b}` is \"{old}\"; make them equal")));
        }
        let absent = |key: &str, kind: &str| {
            fail(format!("`{}` is missing, which rope type {kind} needs", self.path(key)))
        };
        let need = |key: &str, kind: &str| -> Result<f64, ModelError> {
            self.number(key)?.ok_or_else(|| absent(key, kind))
        };
        match new.or(old) {
            None if self.get("factor").is_some() => Err(fail(format!(
                "`{}` is given without a `rope_type`; say which: \"linear\" or \"llama3\"",
                self.path("factor")
            ))),
            None | Some("default") => Ok(RopeScaling::None),
            Some("linear") => Ok(RopeScaling::Linear { factor: need("factor", "linear")? }),
            Some("llama3") => {
                let inner = self.size(CONTEXT)?;
                if let (Some(a), Some(b)) = (context, inner)
                    && a != b
                {
                    let path = self.path(CONTEXT);
                    return Err(fail(format!("`{CONTEXT}` is {a}, but `{path}` is {b}; make them equal")));
                }
                Ok(RopeScaling::Llama3 {
                    factor: need("factor", "llama3")?,
                    low_freq_factor: need("low_freq_factor", "llama3")?,
                    high_freq_factor: need("high_freq_factor", "llama3")?,
                    original_max_position_embeddings: inner
                        .or(context)
                        .ok_or_else(|| absent(CONTEXT, "llama3"))?,
                })
            }
            Some(other) => Err(fail(format!(
                "`{}`: rope type \"{other}\" is not supported; default, linear and llama3 are",
                self.table.unwrap_or_default()
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn llama(extra: &str) -> String {
        format!(
            r#"{{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "intermediate_size": 128, "vocab_size": 100{extra}}}"#
        )
    }

    /// Llama 3's scaling with this factor (and what follows it) and original context.
    fn scaled(factor: &str, context: &str) -> String {
        format!(r#", "rope_scaling": {{"rope_type": "llama3", "factor": {factor}, "{CONTEXT}": {context}}}"#)
    }

    #[test]
    fn both_forms_of_rope_say_the_same() {
        let scaling = r#""factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192"#;
        let old = llama(&format!(
            r#", "rope_theta": 500000.0, "rope_scaling": {{"rope_type": "llama3", {scaling}}}"#
        ));
        let new = llama(&format!(
            r#", "rope_parameters": {{"rope_type": "llama3", "rope_theta": 500000.0, {scaling}}}"#
        ));
        let (old, new) = (HfConfig::parse(&old).expect("old form"), HfConfig::parse(&new).expect("new form"));
        assert_eq!(old.model, new.model);
        assert_eq!(old.model.rope_theta, 500_000.0);
        assert!(matches!(old.model.rope_scaling, RopeScaling::Llama3 { .. }));
        let both = old.to_json("float32");
        assert!(both.contains("rope_scaling") && both.contains("rope_parameters"));
        assert_eq!(HfConfig::parse(&both).expect("both forms").model, old.model);
        let empty = llama(r#", "rope_scaling": {}, "rope_parameters": {"rope_type": "linear", "factor": 2}"#);
        let empty = HfConfig::parse(&empty).expect("an empty table says nothing");
        assert_eq!(empty.model.rope_scaling, RopeScaling::Linear { factor: 2.0 });
    }

    #[test]
    fn what_is_written_reads_back_equal_and_keeps_what_it_does_not_know() {
        let text = llama(
            r#", "rms_norm_eps": 1e-05, "head_dim": 24, "eos_token_id": [7, 9], "my_key": {"a": [1, 2]}"#,
        );
        let first = HfConfig::parse(&text).expect("parses");
        let written = first.to_json("bfloat16");
        let second = HfConfig::parse(&written).expect("parses again");
        assert_eq!(first.model, second.model);
        assert_eq!(second.eos_token_ids, [7, 9]);
        assert_eq!(second.source["my_key"], json!({"a": [1, 2]}));
        assert_eq!(second.source["rms_norm_eps"], json!(1e-5));
        assert_eq!(second.source["rope_theta"], second.source["rope_parameters"]["rope_theta"]);
    }

    #[test]
    fn every_key_that_was_there_is_there_again() {
        let text = llama(
            r#", "use_cache": false, "transformers_version": "4.46.0", "pad_token_id": 3, "bos_token_id": 1, "eos_token_id": 2,
            "rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2.0, "note": "kept"}, "torch_dtype": "float16""#,
        );
        let mut hf = HfConfig::parse(&text).expect("parses");
        hf.parse_generation(r#"{"temperature": 0.6, "do_sample": true, "eos_token_id": [7, 2]}"#)
            .expect("parses");
        // Tokenizers know of more ends than config.json names, and may begin otherwise.
        hf.bos_token_id = Some(6);
        hf.eos_token_ids = vec![2, 5, 7];
        let written: Map<String, Value> = serde_json::from_str(&hf.to_json("float32")).expect("JSON");
        for (key, value) in &hf.source {
            match key.as_str() {
                "torch_dtype" => assert_eq!(written[key], "float32"),
                _ => assert_eq!(&written[key], value, "{key}"),
            }
        }
        let generation: Value = serde_json::from_str(&hf.generation_json()).expect("JSON");
        assert_eq!(
            generation,
            json!({"temperature": 0.6, "do_sample": true, "eos_token_id": [7, 2, 5], "bos_token_id": 6})
        );
        let error = hf.parse_generation("[]").expect_err("no object").to_string();
        assert!(error.contains("generation_config.json"), "{error}");
    }

    #[test]
    fn an_end_token_that_is_none_any_more_is_not_written_back() {
        let mut hf = HfConfig::parse(&llama(r#", "eos_token_id": [2, 9]"#)).expect("parses");
        hf.eos_token_ids = vec![9];
        assert_eq!(HfConfig::parse(&hf.to_json("float32")).expect("parses").eos_token_ids, [9]);
    }

    #[test]
    fn the_window_that_is_off_is_named_where_engines_insist_on_it() {
        let text = llama("")
            .replace("llama", "qwen2")
            .replace("}", r#", "num_key_value_heads": 2, "sliding_window": null}"#);
        let written = HfConfig::parse(&text).expect("parses").to_json("float32");
        let written: Value = serde_json::from_str(&written).expect("JSON");
        assert_eq!(written["sliding_window"], 32768);
        assert_eq!(written["max_window_layers"], 2);
        assert_eq!(written["use_sliding_window"], false);
    }

    #[test]
    fn what_would_change_the_result_is_refused_by_name() {
        for (extra, named) in [
            (r#", "hidden_act": "gelu""#, "hidden_act"),
            (r#", "attention_bias": true"#, "attention_bias"),
            (r#", "rope_scaling": {"type": "yarn", "factor": 4.0}"#, "yarn"),
            (r#", "rope_scaling": {"type": "linear"}"#, "factor"),
            (
                r#", "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}"#,
                "partial_rotary_factor",
            ),
            (r#", "rope_parameters": {"full_attention": {"rope_theta": 1e4}}"#, "full_attention"),
            (r#", "rope_theta": 1.0, "rope_parameters": {"rope_theta": 2.0}"#, "rope_theta"),
            (r#", "layer_types": ["full_attention", "sliding_attention"]"#, "layer_types"),
            (r#", "num_key_value_heads": 3"#, "multiple of kv_heads"),
            (r#", "head_dim": 7"#, "even"),
            (r#", "num_key_value_heads": "4""#, "whole number"),
            (r#", "quantization_config": {}"#, "quantized"),
            (r#", "hidden_act": 5"#, "hidden_act"),
            (r#", "layer_types": "sliding_attention""#, "layer_types"),
            (r#", "rope_scaling": {"rope_type": 5, "factor": 4.0}"#, "rope_scaling.rope_type"),
            (r#", "rope_scaling": {"factor": 4.0}"#, "rope_scaling.factor"),
            (
                r#", "rope_scaling": {"rope_type": "default", "type": "linear", "factor": 4.0}"#,
                "rope_scaling.type",
            ),
            (r#", "rope_scaling": [1]"#, "rope_scaling"),
            (
                r#", "rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "yarn", "factor": 4.0}"#,
                "yarn",
            ),
            (
                r#", "rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear", "factor": 4.0}"#,
                "differently",
            ),
            (
                r#", "rope_parameters": {"rope_theta": 2.0}, "rope_scaling": {"rope_theta": 3.0}"#,
                "rope_theta",
            ),
            (r#", "rope_scaling": {"type": "linear", "factor": 0}"#, "factor"),
            (r#", "rope_scaling": {"type": "linear", "factor": -2}"#, "factor"),
            (r#", "rope_scaling": {"type": "linear", "factor": 1e39}"#, "factor"),
            (&scaled("8.0, \"low_freq_factor\": 4.0, \"high_freq_factor\": 1.0", "8192"), "high_freq_factor"),
            (&scaled("8.0, \"low_freq_factor\": 0.0, \"high_freq_factor\": 1.0", "8192"), "low_freq_factor"),
            (&scaled("8.0, \"low_freq_factor\": 1.0, \"high_freq_factor\": 4.0", "-5.5"), CONTEXT),
            (&scaled("8.0, \"low_freq_factor\": 1.0, \"high_freq_factor\": 4.0", "0"), CONTEXT),
            (&scaled("0.5, \"low_freq_factor\": 1.0, \"high_freq_factor\": 4.0", "8192"), "factor"),
            (r#", "rms_norm_eps": 0"#, "norm_eps"),
            (r#", "rope_theta": 1e39"#, "rope_theta"),
        ] {
            let error = HfConfig::parse(&llama(extra)).expect_err(extra).to_string();
            assert!(error.contains(named), "{error}");
        }
        let error = HfConfig::parse(r#"{"model_type": "gpt2"}"#).expect_err("gpt2").to_string();
        assert!(error.contains("gpt2") && error.contains("qwen3"), "{error}");
        assert!(HfConfig::parse("[1").is_err());
    }
}
