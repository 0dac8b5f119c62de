//! Reading config.json and generation_config.json.

use super::{BALANCE_LOSS, HfConfig, Notes, QUANTIZATION};
use crate::keys::{Keys, fail};
use crate::{Activation, Architecture, Description, Family, ModelError};
use serde_json::{Map, Value, json};

impl HfConfig {
    /// Parses the text of a config.json.
    pub fn parse(text: &str) -> Result<Self, ModelError> {
        let value: Value = serde_json::from_str(text).map_err(|e| fail(format!("it is not JSON: {e}")))?;
        let Value::Object(source) = value else { return Err(fail("it is not a JSON object")) };
        let file = Keys::new(&source);
        let family = file.family()?;
        file.refuse_unsupported(family.activation())?;
        let mut training = family.rules().check_settings(&file)?;
        let warnings = file.check_classes(family)?;
        let model = file.description(family)?;
        model.architecture().and_then(|model| model.validate()).map_err(|e| fail(e.to_string()))?;
        let bos_token_id = file.token_ids("bos_token_id")?.first().copied();
        let eos_token_ids = file.token_ids("eos_token_id")?;
        let balance_loss = if family.has_experts() { file.balance_loss()? } else { None };
        training.extend(file.untrained_padding(bos_token_id, &eos_token_ids)?);
        let window = model.window.filter(|window| *window < model.max_position_embeddings);
        training.extend(window.map(|window| {
            format!("layers have a sliding window of {window} tokens, so longer sequences are refused")
        }));
        let unknown = family.rules().unknown_keys(&file).into_iter().map(str::to_owned).collect();
        let notes = Notes { warnings, training, unknown };
        let generation = Map::new();
        Ok(HfConfig { model, bos_token_id, eos_token_ids, balance_loss, notes, source, generation })
    }

    /// Reads generation_config.json; [`HfConfig::generation_json`] keeps its keys.
    pub fn parse_generation(&mut self, text: &str) -> Result<(), ModelError> {
        let wrong = |message: String| ModelError::HuggingFace { file: "generation_config.json", message };
        let value: Value = serde_json::from_str(text).map_err(|e| wrong(format!("it is not JSON: {e}")))?;
        let Value::Object(generation) = value else { return Err(wrong("it is not a JSON object".into())) };
        self.generation = generation;
        Ok(())
    }
}

fn missing(key: &str) -> ModelError {
    let families = Family::listing(|_| true, "");
    fail(format!("`{key}` is missing; the file must come from a model of one of the families {families}"))
}

impl Keys<'_> {
    fn family(&self) -> Result<Family, ModelError> {
        let name = self.text("model_type")?.ok_or_else(|| missing("model_type"))?;
        Family::named(name)
            .ok_or_else(|| fail(format!("model_type `{name}` is not supported; {}", Family::why_not(name))))
    }

    /// The model that the file describes, with the family's defaults for keys that it leaves out.
    fn description(&self, family: Family) -> Result<Description, ModelError> {
        let need = |key: &str| self.size(key)?.ok_or_else(|| missing(key));
        let (dim, heads) = (need("hidden_size")?, need("num_attention_heads")?);
        if heads == 0 {
            return Err(fail("num_attention_heads is 0"));
        }
        let layers = need("num_hidden_layers")?;
        // The family's rules go over all of them.
        Architecture::check_layers(layers).map_err(|error| fail(error.to_string()))?;
        let defaults = &family.rules().defaults;
        let max_position_embeddings =
            self.size("max_position_embeddings")?.unwrap_or(defaults.max_position_embeddings);
        let (rope_theta, rope_scaling) = self.rope(defaults.rope_theta, max_position_embeddings)?;
        let kv_heads = match self.value("num_key_value_heads") {
            // transformers takes null for multi-head attention, and a key that is left out for the family's
            // default.
            Some(Value::Null) => None,
            Some(_) => self.size("num_key_value_heads")?,
            None => defaults.kv_heads,
        };
        let norm = family.norm(defaults.norm_eps);
        let mut model = Description {
            family,
            dim,
            layers,
            heads,
            kv_heads: kv_heads.unwrap_or(heads),
            head_dim: self.size("head_dim")?.or(defaults.head_dim).unwrap_or(dim / heads),
            ffn_dim: need("intermediate_size")?,
            mixture: None,
            vocab_size: need("vocab_size")?,
            max_position_embeddings,
            window: family.rules().windows.read(self, layers)?,
            attention_scale: None,
            rope_theta,
            rope_scaling,
            norm_eps: self.norm_eps(norm.eps_key())?.unwrap_or(norm.eps()),
            tie_embeddings: self.flag("tie_word_embeddings")?.unwrap_or(false),
            qkv_bias: family.qkv_bias(),
            qk_norm: family.qk_norm(),
        };
        (family.rules().read)(self, &mut model)?;
        Ok(model)
    }

    /// The norm's epsilon, which is positive: with 0, the norm divides a row of zeros by 0.
    fn norm_eps(&self, key: &str) -> Result<Option<f64>, ModelError> {
        let is_valid = |eps: &f64| *eps as f32 > 0.0 && (*eps as f32).is_finite();
        let range = "a positive number within f32, since the norm of a row of zeros divides by its root";
        self.read(key, range, |value| value.as_f64().filter(is_valid))
    }

    /// The weight of the balance loss, in the range of `experts.balance_loss` in run files. A weight that f32
    /// rounds to 0 is refused.
    fn balance_loss(&self) -> Result<Option<f64>, ModelError> {
        let is_valid = |weight: &f64| *weight == 0.0 || *weight as f32 > 0.0 && *weight <= 100.0;
        self.read(BALANCE_LOSS, "0 or a number from 1e-45 to 100", |value| value.as_f64().filter(is_valid))
    }

    /// Refuses classes that are no causal language models of the family.
    ///
    /// # Returns
    /// A warning of a class that may compute otherwise.
    fn check_classes(&self, family: Family) -> Result<Vec<String>, ModelError> {
        let class = family.rules().class;
        let base = class.replace("ForCausalLM", "Model");
        let given: Vec<&str> = match self.get("architectures") {
            Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).collect(),
            Some(Value::String(name)) => vec![name],
            _ => Vec::new(),
        };
        let is_own = |name: &&str| [class, &base].iter().any(|own| own.eq_ignore_ascii_case(name));
        let mut warnings = Vec::new();
        if let (Some(name), None) = (given.first(), given.iter().find(|name| is_own(name))) {
            if !name.ends_with("ForCausalLM") {
                return Err(fail(format!(
                    "`architectures` = {}: only causal language models are supported, such as {class}",
                    self.json["architectures"]
                )));
            }
            warnings.push(format!(
                "`architectures` names {name}; the folder is read as {class}, by its model_type"
            ));
        }
        let code = self.get("auto_map").and_then(Value::as_object);
        if let Some((of, _)) = code.into_iter().flatten().find(|(of, _)| of.starts_with("AutoModel")) {
            warnings.push(format!(
                "`auto_map` names code of its own for {of}, which is not run; the folder is read as {class}"
            ));
        }
        Ok(warnings)
    }

    /// A note if transformers would leave the embedding of a token that texts have untrained: that of
    /// `pad_token_id` has no gradient there.
    fn untrained_padding(&self, bos: Option<u32>, eos: &[u32]) -> Result<Option<String>, ModelError> {
        let padding = self.read("pad_token_id", "a token id", Value::as_i64)?;
        let is_padding = |id: &u32| padding == Some(i64::from(*id));
        Ok(bos.iter().chain(eos).find(|id| is_padding(id)).map(|id| {
            format!("`pad_token_id` = {id} begins or ends texts: transformers does not train its embedding, xtrain does")
        }))
    }

    /// Refuses, by name, settings that would change the result.
    fn refuse_unsupported(&self, activation: Activation) -> Result<(), ModelError> {
        let refuse = |key: &str, why: &str| Err(fail(format!("`{key}` = {}: {why}", self.json[key])));
        let (name, in_files) = activation.names_in_files();
        if self.text("hidden_act")?.is_some_and(|act| !in_files.contains(&act)) {
            return refuse("hidden_act", &format!("only {:?} ({name}) is supported", in_files[0]));
        }
        self.refuse_other_quantization()?;
        self.refuse_partial_rotation()
    }

    /// Refuses quantized weights but FP8 with scales for blocks of 128 x 128; the weights themselves do not
    /// show the difference.
    fn refuse_other_quantization(&self) -> Result<(), ModelError> {
        let Some(json) = self.read(QUANTIZATION, "an object", Value::as_object)? else { return Ok(()) };
        let table = Keys::of_table(json, QUANTIZATION);
        let refuse = |key: &str, only: &str| {
            let value = json.get(key).unwrap_or(&Value::Null);
            Err(fail(format!(
                "the weights are quantized, and `{}` is {value}; xtrain reads only \"fp8\" with {only}; use the bf16 or \
                 fp32 folder",
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
        if table.text("expert_dtype")?.is_some_and(|dtype| dtype != "fp8") {
            return refuse("expert_dtype", "experts in FP8");
        }
        if table.text("activation_scheme")?.is_some_and(|scheme| scheme != "dynamic") {
            return refuse("activation_scheme", "activations that are scaled as they come, \"dynamic\",");
        }
        Ok(())
    }
}
