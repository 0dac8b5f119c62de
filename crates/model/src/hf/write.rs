//! Writing config.json and generation_config.json.

use super::read::Reader;
use super::{HfConfig, QUANTIZATION};
use crate::Family;
use serde_json::{Map, Value, json};
use xtrain_ops::qk_norm_rope::RopeScaling;

impl HfConfig {
    /// The text of a config.json that old and new readers understand alike. `dtype` is the element type of the weights beside it
    /// (`float32` or `bfloat16`). Every key of [`HfConfig::source`] is there again; those that say what we know are set anew.
    pub fn to_json(&self, dtype: &str) -> String {
        text(self.written(dtype))
    }

    /// The same beside weights of which linear layers are FP8 with scales for blocks of 128 x 128, all but those of `modules` (as Hugging
    /// Face names them), and the rest is bf16: what DeepSeek-V3's and Qwen3-FP8's files say, and transformers reads.
    pub fn to_fp8_json(&self, modules: &[String]) -> String {
        let mut out = self.written("bfloat16");
        let quantization = json!({
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
            "activation_scheme": "dynamic",
            "modules_to_not_convert": modules,
        });
        out.insert(QUANTIZATION.into(), quantization);
        text(out)
    }

    /// All keys of config.json beside weights that are not quantized.
    fn written(&self, dtype: &str) -> Map<String, Value> {
        let m = &self.model;
        let mut out = self.source.clone();
        // Of the weights that it came with.
        out.remove(QUANTIZATION);
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
        out
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

fn text(json: Map<String, Value>) -> String {
    let mut text = serde_json::to_string_pretty(&Value::Object(json)).expect("a JSON value can be written");
    text.push('\n');
    text
}

/// As these files write token ids: a number for one.
fn token_ids(ids: &[u32]) -> Value {
    match ids {
        [] => Value::Null,
        [one] => json!(one),
        many => json!(many),
    }
}
