//! Reading config.json.

use super::{CONTEXT, HfConfig, QUANTIZATION, fail};
use crate::{Architecture, Family, ModelError};
use serde_json::{Map, Value, json};
use xtrain_ops::qk_norm_rope::RopeScaling;

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
            kv_heads: file.size("num_key_value_heads")?.unwrap_or(
                match file.is_null("num_key_value_heads") {
                    true => heads,
                    false => default_kv_heads,
                },
            ),
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
}

fn missing(key: &str) -> ModelError {
    fail(format!("`{key}` is missing; the file must come from a Llama, Qwen2 or Qwen3 model"))
}

/// The keys of the file, or of a table in it.
pub(super) struct Reader<'a> {
    json: &'a Map<String, Value>,
    /// The key of the table, if it is one.
    table: Option<&'static str>,
}

impl<'a> Reader<'a> {
    pub(super) fn of(file: &'a Map<String, Value>) -> Self {
        Reader { json: file, table: None }
    }

    /// The key's value; nothing where it is absent or null.
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.json.get(key).filter(|v| !v.is_null())
    }

    /// Whether the key is there and null, which for some keys means something else than its absence.
    fn is_null(&self, key: &str) -> bool {
        self.json.get(key).is_some_and(Value::is_null)
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

    pub(super) fn token_ids(&self, key: &str) -> Result<Vec<u32>, ModelError> {
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
        self.refuse_other_quantization()?;
        self.refuse_partial_rotation()
    }

    /// Of quantized weights, FP8 with scales for blocks of 128 x 128 are read: what the weights themselves cannot say is checked here.
    fn refuse_other_quantization(&self) -> Result<(), ModelError> {
        let Some(json) = self.read(QUANTIZATION, "an object", Value::as_object)? else { return Ok(()) };
        let table = Reader { json, table: Some(QUANTIZATION) };
        let refuse = |key: &str, only: &str| {
            let value = json.get(key).unwrap_or(&Value::Null);
            Err(fail(format!(
                "the weights are quantized, and `{}` is {value}; of quantized weights only \"fp8\" with {only} is read: load the bf16 \
                 or fp32 folder",
                table.path(key)
            )))
        };
        if table.text("quant_method")? != Some("fp8") {
            return refuse("quant_method", "blocks of 128 x 128");
        }
        let block = table.read("weight_block_size", "a list of two sizes", Value::as_array)?;
        if block.is_none_or(|block| *block != [json!(128), json!(128)]) {
            return refuse("weight_block_size", "blocks of [128, 128]");
        }
        if table.text("fmt")?.is_some_and(|fmt| fmt != "e4m3") {
            return refuse("fmt", "the format \"e4m3\"");
        }
        if table.text("activation_scheme")?.is_some_and(|scheme| scheme != "dynamic") {
            return refuse("activation_scheme", "activations that are scaled as they come, \"dynamic\",");
        }
        Ok(())
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
    pub(super) fn rope_tables(&self) -> impl Iterator<Item = (&'static str, &'a Map<String, Value>)> {
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
