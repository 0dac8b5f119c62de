//! Hugging Face's config.json: read in the old form and in transformers v5's (`read`), written so that old
//! and new readers agree (`write`).
//!
//! Keys that we do not know are kept and written back. Settings that would change the result (another
//! activation, other rope types) are refused by name, and those that would change training are reported.

mod read;
mod rope;
#[cfg(test)]
mod tests;
mod write;

use crate::Description;
use serde_json::{Map, Value};

/// A parsed config.json.
#[derive(Clone, Debug, PartialEq)]
pub struct HfConfig {
    /// The model that it describes.
    pub model: Description,
    /// The first token of every text, if any.
    pub bos_token_id: Option<u32>,
    /// The tokens that end a text.
    pub eos_token_ids: Vec<u32>,
    /// The weight of the balance loss of experts, from 0 to 100; an export without one keeps that of
    /// [`HfConfig::source`].
    pub balance_loss: Option<f64>,
    /// Sentences about keys of the file.
    pub notes: Notes,
    /// The keys of the file as it was read; an export writes those that we do not know back.
    pub source: Map<String, Value>,
    /// The keys of generation_config.json; empty if that file does not exist.
    pub generation: Map<String, Value>,
}

/// Sentences about keys of a config.json that do not prevent its use.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Notes {
    /// Keys by which another program may compute other results.
    pub warnings: Vec<String>,
    /// Keys by which transformers trains otherwise.
    pub training: Vec<String>,
    /// Keys that nothing reads, sorted.
    pub unknown: Vec<String>,
}

/// The key for the weight of the balance loss of experts.
const BALANCE_LOSS: &str = "router_aux_loss_coef";

/// The key for the context of the first training, in tokens.
const CONTEXT: &str = "original_max_position_embeddings";

/// The key for the optimizer that trained the weights, if it is not AdamW. Other programs do not know it.
pub(crate) const OPTIMIZER: &str = "xtrain_optimizer";

/// The value of [`OPTIMIZER`] for Muon.
const MUON: &str = "muon";

/// The table that describes quantized weights.
const QUANTIZATION: &str = "quantization_config";

impl HfConfig {
    /// A warning for a run that tunes the weights with Muon, if the file does not say that Muon trained them.
    pub fn muon_note(&self) -> Option<String> {
        let is_of_muon = self.source.get(OPTIMIZER).and_then(Value::as_str) == Some(MUON);
        (!is_of_muon).then(|| {
            format!(
                "no sign that Muon trained these weights (an export of such a run says {OPTIMIZER} = \"{MUON}\"); tuning gains little or loses \
                 if pre-training used AdamW (arXiv 2502.16982, section 3.5), so compare with optimizer.kind = \"adamw\""
            )
        })
    }

    /// Records in the file whether Muon trained the weights.
    pub fn set_of_muon(&mut self, is_of_muon: bool) {
        match is_of_muon {
            true => self.source.insert(OPTIMIZER.into(), MUON.into()),
            false => self.source.remove(OPTIMIZER),
        };
    }
}

/// Endings of names that are not imported: tables that the model computes.
pub const IGNORABLE_SUFFIXES: [&str; 1] = ["rotary_emb.inv_freq"];
