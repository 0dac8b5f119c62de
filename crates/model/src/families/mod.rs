//! Families: the meaning of config.json and of run files, family by family, and the settings that are
//! refused.
//!
//! All families share one decoder, one list of parameters and their names in files. A new family is a file
//! here (with its `mod` line) and a line in the list; [a tutorial](../../../../docs/add-a-model.md) adds one
//! as an example.

mod dots1;
#[cfg(test)]
mod example;
#[cfg(test)]
mod expert_tests;
mod experts;
mod llama;
mod mistral;
mod mixtral;
mod qwen2;
mod qwen3;
mod qwen3_moe;
mod settings;
#[cfg(test)]
mod tests;
mod windows;

use crate::keys::Keys;
use crate::{Activation, Description, Family, ModelError, Norm, Router};
use experts::ExpertRules;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::Error;
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};
use settings::{ATTENTION_BIAS, MLP_BIAS, Setting};
use std::borrow::Cow;
use windows::Windows;

/// Declares the families: a line for each, its constant and its file.
macro_rules! families {
    ($($(#[$only:meta])? $family:ident: $file:ident,)*) => {
        impl Family {
            $($(#[$only])? #[doc = concat!("The family of `families/", stringify!($file), ".rs`.")]
            pub const $family: Family = Family::new($file::RULES.name);)*

            /// All families.
            pub const ALL: &[Family] = &[$($(#[$only])? Family::$family,)*];

            pub(crate) fn rules(self) -> &'static Rules {
                let all = [$($(#[$only])? &$file::RULES,)*];
                let found = all.into_iter().find(|rules| rules.name == self.name());
                found.unwrap_or_else(|| unreachable!("every family has its rules"))
            }
        }
    };
}

families! {
    LLAMA: llama,
    MISTRAL: mistral,
    QWEN2: qwen2,
    QWEN3: qwen3,
    MIXTRAL: mixtral,
    QWEN3_MOE: qwen3_moe,
    DOTS1: dots1,
    #[cfg(test)] EXAMPLE: example,
}

/// Everything that sets a family apart.
pub(crate) struct Rules {
    /// `model_type` in config.json, and `family` in run files.
    name: &'static str,
    /// A sentence for docs/configuration.md.
    about: &'static str,
    /// The class of transformers that runs it.
    pub(crate) class: &'static str,
    /// Biases on the q, k and v projections.
    qkv_bias: bool,
    /// An RMSNorm on each query and key head.
    qk_norm: bool,
    /// Everything that sets its experts apart, if it has them.
    pub(crate) experts: Option<&'static ExpertRules>,
    /// Values of keys that a config.json leaves out, as transformers takes them.
    pub(crate) defaults: Defaults,
    /// Keys of config.json by which layers have a sliding window.
    pub(crate) windows: Windows,
    /// Keys of config.json with values that are refused, or that mean other training.
    pub(crate) settings: &'static [Setting],
    /// Keys of config.json that `read` reads.
    pub(crate) keys: &'static [&'static str],
    /// Keys of config.json that its files have, and that change nothing.
    pub(crate) without_effect: &'static [&'static str],
    /// Reads and refuses what only config.json files of this family say.
    pub(crate) read: fn(&Keys<'_>, &mut Description) -> Result<(), ModelError>,
    /// Keys that an export sets, beside those of all families.
    pub(crate) written: fn(&Description) -> Value,
    /// Keys on which engines insist; a value from the folder that the model came from stays.
    pub(crate) filled: fn(&Description) -> Value,
}

/// Values of keys that a config.json leaves out.
pub(crate) struct Defaults {
    /// `num_key_value_heads`; `None` takes `num_attention_heads`.
    pub(crate) kv_heads: Option<usize>,
    /// `head_dim`; `None` takes `hidden_size / num_attention_heads`.
    pub(crate) head_dim: Option<usize>,
    /// `max_position_embeddings`.
    pub(crate) max_position_embeddings: usize,
    /// `rope_theta`.
    pub(crate) rope_theta: f64,
    /// The norm's epsilon, `rms_norm_eps`.
    pub(crate) norm_eps: f64,
    /// The norm, which has no key: from its epsilon.
    pub(crate) norm: fn(f64) -> Norm,
    /// `hidden_act`.
    pub(crate) activation: Activation,
}

/// The values of most families.
const DEFAULTS: Defaults = Defaults {
    kv_heads: None,
    head_dim: None,
    max_position_embeddings: 2048,
    rope_theta: 10_000.0,
    norm_eps: 1e-6,
    norm: |eps| Norm::Rms { eps },
    activation: Activation::Swiglu,
};

/// For families without keys of their own.
fn read_nothing(_: &Keys<'_>, _: &mut Description) -> Result<(), ModelError> {
    Ok(())
}

/// For families without keys on which engines insist.
fn fill_nothing(_: &Description) -> Value {
    json!({})
}

impl Family {
    /// The family of this name.
    pub fn named(name: &str) -> Option<Family> {
        Family::ALL.iter().copied().find(|family| family.name() == name)
    }

    /// Biases on the q, k and v projections.
    pub fn qkv_bias(self) -> bool {
        self.rules().qkv_bias
    }

    /// An RMSNorm on each query and key head.
    pub fn qk_norm(self) -> bool {
        self.rules().qk_norm
    }

    /// Its norm, with this epsilon.
    pub(crate) fn norm(self, eps: f64) -> Norm {
        (self.rules().defaults.norm)(eps)
    }

    /// The activation of its feed-forwards.
    pub(crate) fn activation(self) -> Activation {
        self.rules().defaults.activation
    }

    /// True if its models are mixtures of experts.
    pub fn has_experts(self) -> bool {
        self.rules().experts.is_some()
    }

    /// True if every token passes through a shared expert besides its own.
    pub fn shares_an_expert(self) -> bool {
        self.rules().experts.is_some_and(|rules| rules.shares)
    }

    /// How tokens choose experts where a run file does not say it; `None` without experts.
    pub fn router(self) -> Option<Router> {
        self.rules().experts.map(|rules| rules.router)
    }

    /// Why a model of this name, which is no family, cannot be trained, and what to use instead.
    pub(crate) fn why_not(name: &str) -> String {
        let why = match name {
            "deepseek_v2" | "deepseek_v3" => {
                "its attention (multi-head latent attention, MLA) is not supported; dots1 has DeepSeek-V3's \
                 experts and routing; "
            }
            _ => "",
        };
        format!("{why}the families are {}", Family::listing(|_| true, ""))
    }

    /// The names of the families of which `is` holds, for a sentence: `a, b and c`.
    pub fn listing(is: impl Fn(Family) -> bool, quote: &str) -> String {
        let names: Vec<String> = Family::ALL
            .iter()
            .filter(|family| is(**family))
            .map(|family| format!("{quote}{}{quote}", family.name()))
            .collect();
        match names.split_last() {
            Some((last, [])) => last.clone(),
            Some((last, others)) => format!("{} and {last}", others.join(", ")),
            None => "none".into(),
        }
    }
}

impl<'de> Deserialize<'de> for Family {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = Cow::<str>::deserialize(deserializer)?;
        let unknown = || D::Error::custom(format!("{name:?} is not a family; {}", Family::why_not(&name)));
        Family::named(&name).ok_or_else(unknown)
    }
}

impl JsonSchema for Family {
    fn schema_name() -> Cow<'static, str> {
        "Family".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let word = |family: &Family| json!({ "const": family.name(), "description": family.rules().about, "type": "string" });
        json_schema!({ "oneOf": Family::ALL.iter().map(word).collect::<Vec<_>>() })
    }
}
