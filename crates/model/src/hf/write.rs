//! Writing config.json and generation_config.json.

use super::{BALANCE_LOSS, HfConfig, QUANTIZATION};
use crate::RopeScaling;
use crate::keys::Keys;
use serde_json::{Map, Value, json};

impl HfConfig {
    /// The text of a config.json that old and new readers understand alike. `dtype` is the element type of
    /// the weights beside it (`float32` or `bfloat16`). Every key of [`HfConfig::source`] is written again,
    /// with our value if we know the key.
    pub fn to_json(&self, dtype: &str) -> String {
        text(self.written(dtype))
    }

    /// The text of config.json for FP8 weights: linear layers have scales for blocks of 128 x 128, but those
    /// of `modules` (by Hugging Face's names) and all other weights are bf16. The form is that of
    /// DeepSeek-V3's and Qwen3-FP8's files, which transformers reads.
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
        // It describes the weights that the file came with.
        out.remove(QUANTIZATION);
        let written = json!({
            "architectures": [m.family.rules().class],
            "model_type": m.family.name(),
            "hidden_size": m.dim,
            "num_hidden_layers": m.layers,
            "num_attention_heads": m.heads,
            "num_key_value_heads": m.kv_heads,
            "head_dim": m.head_dim,
            "intermediate_size": m.ffn_dim,
            "vocab_size": m.vocab_size,
            "max_position_embeddings": m.max_position_embeddings,
            (m.family.norm(m.norm_eps).eps_key()): m.norm_eps,
            "rope_theta": m.rope_theta,
            "rope_parameters": self.rope_parameters(),
            "tie_word_embeddings": m.tie_embeddings,
            "hidden_act": m.family.activation().names_in_files().1[0],
            "bos_token_id": self.bos_beside(&self.source),
            "eos_token_id": self.eos_of_config(),
            "dtype": dtype,
            "torch_dtype": dtype,
        });
        let given = out.get("intermediate_size").cloned();
        out.extend(object(written));
        if let (Some(given), Some(0)) = (given, m.mixture.map(|mixture| mixture.dense.len())) {
            // No block has it.
            out.insert("intermediate_size".into(), given);
        }
        // Readers older than v5 know only this place.
        let scaling = match self.rope_parameters() {
            Value::Object(mut table) if m.rope_scaling != RopeScaling::None => {
                table.remove("rope_theta");
                // The name before `rope_type`, for the readers that the file was written for.
                let old_name = self.source.get("rope_scaling").is_some_and(|old| old.get("type").is_some());
                if old_name {
                    table.insert("type".into(), table["rope_type"].clone());
                }
                Value::Object(table)
            }
            _ => Value::Null,
        };
        out.insert("rope_scaling".into(), scaling);
        let rules = m.family.rules();
        out.extend(object((rules.written)(m)));
        if let Some(window) = m.window {
            rules.windows.write(window, &mut out);
        }
        for (key, value) in object(json!({ "use_cache": true })).into_iter().chain(object((rules.filled)(m)))
        {
            // A file that had it keeps its value, also null.
            out.entry(key).or_insert(value);
        }
        if let Some(weight) = self.balance_loss
            && out.get(BALANCE_LOSS).and_then(Value::as_f64) != Some(weight)
        {
            out.insert(BALANCE_LOSS.into(), json!(weight));
        }
        out
    }

    /// The text of a generation_config.json: the first and the last tokens, and the other keys of
    /// [`HfConfig::generation`].
    pub fn generation_json(&self) -> String {
        let mut out = self.generation.clone();
        if out.is_empty() {
            out.insert("do_sample".into(), json!(false));
        }
        out.insert("bos_token_id".into(), self.bos_beside(&self.generation));
        out.insert("eos_token_id".into(), self.eos_of_generation());
        format!("{:#}\n", Value::Object(out))
    }

    /// The first token as `file` names it, else as the tokenizer does. Some models' files disagree, and each
    /// has its readers.
    fn bos_beside(&self, file: &Map<String, Value>) -> Value {
        file.get("bos_token_id").filter(|v| !v.is_null()).cloned().unwrap_or_else(|| json!(self.bos_token_id))
    }

    /// The end tokens that config.json names. Models often name one there and all in generation_config.json;
    /// that stays so while the one is still an end token.
    fn eos_of_config(&self) -> Value {
        let named = Keys::new(&self.source).token_ids("eos_token_id").unwrap_or_default();
        if !named.is_empty() && named.iter().all(|id| self.eos_token_ids.contains(id)) {
            return self.source["eos_token_id"].clone();
        }
        token_ids(&self.eos_token_ids)
    }

    /// All end tokens: those that generation_config.json named first, in its order (engines pad with the
    /// first), then the others.
    fn eos_of_generation(&self) -> Value {
        let named = Keys::new(&self.generation).token_ids("eos_token_id").unwrap_or_default();
        let mut ids: Vec<u32> = named.into_iter().filter(|id| self.eos_token_ids.contains(id)).collect();
        ids.extend(self.eos_token_ids.iter().filter(|id| !ids.contains(id)).copied().collect::<Vec<_>>());
        token_ids(&ids)
    }
}

/// The keys of a JSON object.
fn object(json: Value) -> Map<String, Value> {
    match json {
        Value::Object(keys) => keys,
        other => unreachable!("{other} is no object"),
    }
}

fn text(json: Map<String, Value>) -> String {
    let mut text = serde_json::to_string_pretty(&Value::Object(json)).expect("a JSON value can be written");
    text.push('\n');
    text
}

/// Token ids as these files write them: a single one as a number.
fn token_ids(ids: &[u32]) -> Value {
    match ids {
        [] => Value::Null,
        [one] => json!(one),
        many => json!(many),
    }
}
