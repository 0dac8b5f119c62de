//! Keys of config.json that xtrain does not compute with: the values under which it computes what
//! transformers does, and what other values mean.
//!
//! The lists are from the modules of transformers 5 (configuration_*.py, modeling_*.py, masking_utils.py,
//! cache_utils.py). A key that is in none of them is unknown: it stays in the file, and nothing reads it.

use super::Rules;
use crate::ModelError;
use crate::keys::{Keys, fail};
use serde_json::Value;

/// A key with a value under which xtrain computes what transformers does.
pub(crate) struct Setting {
    pub(crate) key: &'static str,
    /// The values that change nothing.
    pub(crate) harmless: Harmless,
    /// The effect of any other value.
    pub(crate) otherwise: Effect,
}

/// The values of a key that change nothing. An absent key never does.
#[derive(Clone, Copy)]
pub(crate) enum Harmless {
    /// False or null.
    False,
    /// True alone: to transformers, null is not true.
    True,
    /// 0 or null.
    Zero,
    /// Null.
    Null,
    /// Null, an empty list or an empty table.
    Empty,
    /// Null, or one of these words.
    Words(&'static [&'static str]),
}

/// The effect of a value that is not harmless.
#[derive(Clone, Copy)]
pub(crate) enum Effect {
    /// Other results: the folder is refused, for this reason.
    Refused(&'static str),
    /// Other training, with equal results otherwise: a run says so.
    Training(&'static str),
}

use Effect::{Refused, Training};

pub(super) const ATTENTION_BIAS: Setting = Setting {
    key: "attention_bias",
    harmless: Harmless::False,
    otherwise: Refused("biases on all attention projections are not supported"),
};
pub(super) const MLP_BIAS: Setting = Setting {
    key: "mlp_bias",
    harmless: Harmless::False,
    otherwise: Refused("biases in the feed-forward are not supported"),
};

const NO_DROPOUT: &str = "xtrain has no such dropout, and trains without it";
const OTHER_DROPOUT: &str =
    "xtrain trains without it; model.dropout drops parts of the embedding and of the residual branches";
const BIDIRECTIONAL: &str = "attention in both directions is not supported, only causal attention is";
const NESTED: &str = "a model inside of another one is not supported; export the language model alone";
const LAYERS_DIFFER: &str = "layers that differ are not supported";

/// Settings of all families.
static OF_ALL: [Setting; 13] = [
    Setting { key: "is_causal", harmless: Harmless::True, otherwise: Refused(BIDIRECTIONAL) },
    Setting {
        key: "use_bidirectional_attention",
        harmless: Harmless::False,
        otherwise: Refused(BIDIRECTIONAL),
    },
    Setting {
        key: "is_encoder_decoder",
        harmless: Harmless::False,
        otherwise: Refused("models with an encoder are not supported"),
    },
    Setting { key: "attention_dropout", harmless: Harmless::Zero, otherwise: Training(NO_DROPOUT) },
    Setting {
        key: "attention_chunk_size",
        harmless: Harmless::Null,
        otherwise: Refused("attention in chunks is not supported"),
    },
    Setting {
        key: "kv_sharing_modes",
        harmless: Harmless::Empty,
        otherwise: Refused("layers that share keys and values are not supported"),
    },
    Setting { key: "per_layer_config", harmless: Harmless::Empty, otherwise: Refused(LAYERS_DIFFER) },
    Setting { key: "text_config", harmless: Harmless::Null, otherwise: Refused(NESTED) },
    Setting { key: "text_encoder", harmless: Harmless::Null, otherwise: Refused(NESTED) },
    Setting { key: "decoder", harmless: Harmless::Null, otherwise: Refused(NESTED) },
    Setting { key: "generator", harmless: Harmless::Null, otherwise: Refused(NESTED) },
    Setting {
        key: "transformers_weights",
        harmless: Harmless::Words(&["model.safetensors", "model.safetensors.index.json"]),
        otherwise: Refused("weights in a file of another name are not read; rename it to model.safetensors"),
    },
    Setting {
        key: "compression_config",
        harmless: Harmless::Empty,
        otherwise: Refused("the weights are compressed; use the bf16 or fp32 folder"),
    },
];

/// Keys of all families that the model is read from, or that are checked elsewhere.
const READ: [&str; 27] = [
    "architectures",
    "auto_map",
    "bos_token_id",
    "eos_token_id",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "original_max_position_embeddings",
    "pad_token_id",
    "partial_rotary_factor",
    "quantization_config",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "tie_word_embeddings",
    "use_sliding_window",
    "vocab_size",
    crate::hf::OPTIMIZER,
];

/// Keys of all families that change nothing here, whatever their value: how transformers computes, what it
/// returns, its heads for classification, its random weights, the type in which it holds weights, and the
/// settings of its `generate`, which are options of `xtrain generate`.
const WITHOUT_EFFECT: [&str; 69] = [
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_commit_hash",
    "_experts_implementation",
    "_name_or_path",
    "add_cross_attention",
    "attn_implementation",
    "bad_words_ids",
    "begin_suppress_tokens",
    "chunk_size_feed_forward",
    "classifier_dropout",
    "cross_attention_hidden_size",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "dtype",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "epsilon_cutoff",
    "eta_cutoff",
    "experts_implementation",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "fusion_config",
    "gradient_checkpointing",
    "id2label",
    "initializer_range",
    "is_decoder",
    "label2id",
    "length_penalty",
    "max_length",
    "min_length",
    "name_or_path",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_labels",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "pruned_heads",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "sep_token_id",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "tie_last_hidden_states",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "typical_p",
    "use_bfloat16",
    "use_cache",
    "use_return_dict",
];

impl Harmless {
    /// True for a value that changes nothing; an error for one of a wrong type.
    fn holds(self, file: &Keys<'_>, key: &str) -> Result<bool, ModelError> {
        let Some(value) = file.value(key) else { return Ok(true) };
        Ok(match self {
            Harmless::False => file.flag(key)? != Some(true),
            Harmless::True if value.is_null() => false,
            Harmless::True => file.flag(key)? == Some(true),
            Harmless::Zero => file.number(key)?.is_none_or(|number| number == 0.0),
            Harmless::Null => value.is_null(),
            Harmless::Empty => match value {
                Value::Array(list) => list.is_empty(),
                Value::Object(table) => table.is_empty(),
                other => other.is_null(),
            },
            Harmless::Words(words) => file.text(key)?.is_none_or(|word| words.contains(&word)),
        })
    }
}

impl Rules {
    /// The settings of all families and of this one.
    pub(crate) fn all_settings(&self) -> impl Iterator<Item = &'static Setting> {
        OF_ALL.iter().chain(self.settings)
    }

    /// Refuses, by name, the first setting whose value means other results.
    ///
    /// # Returns
    /// A sentence for each setting whose value means other training.
    pub(crate) fn check_settings(&self, file: &Keys<'_>) -> Result<Vec<String>, ModelError> {
        let mut notes = Vec::new();
        for Setting { key, harmless, otherwise } in self.all_settings() {
            if harmless.holds(file, key)? {
                continue;
            }
            let value = &file.json[*key];
            match otherwise {
                Refused(why) => return Err(fail(format!("`{key}` = {value}: {why}"))),
                Training(why) => notes.push(format!("`{key}` = {value}: {why}")),
            }
        }
        // The families' modules read no other dropout, but a run of another program may have had it.
        for key in file.json.keys().filter(|key| is_dropout(key) && !self.knows(key)) {
            if file.json[key].as_f64().is_some_and(|rate| rate != 0.0) {
                notes.push(format!("`{key}` = {}: {OTHER_DROPOUT}", file.json[key]));
            }
        }
        Ok(notes)
    }

    /// The keys of the file that are in no list, sorted.
    pub(crate) fn unknown_keys<'a>(&self, file: &Keys<'a>) -> Vec<&'a str> {
        let mut unknown: Vec<&str> =
            file.json.keys().map(String::as_str).filter(|key| !self.knows(key)).collect();
        unknown.sort_unstable();
        unknown
    }

    fn knows(&self, key: &str) -> bool {
        let listed = [&READ[..], &WITHOUT_EFFECT, self.keys, self.without_effect];
        listed.into_iter().flatten().any(|known| *known == key)
            || self.all_settings().any(|setting| setting.key == key)
    }
}

/// True for the name of a rate of dropout: `hidden_dropout_prob`, `resid_pdrop`, `drop_path_rate`.
fn is_dropout(key: &str) -> bool {
    key.split('_').any(|word| ["dropout", "drop", "pdrop", "layerdrop"].contains(&word))
}
