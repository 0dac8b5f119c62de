//! Errors of the FP8 casts in a training step, and the page that shows them.

mod page;

pub use page::{INSPECT_FILE, write_inspection};

use serde::{Serialize, Serializer};
use std::path::PathBuf;

/// The casts of a step.
#[derive(Clone, Debug, Serialize)]
pub struct Inspection {
    /// The run's folder.
    pub run: PathBuf,
    /// The step of the checkpoint; the batch is that of the next step.
    pub step: u64,
    /// The recipe that the step was computed in.
    pub recipe: String,
    /// The recipe whose casts were measured.
    pub casts: String,
    /// The loss of the batch, in nats per token.
    pub loss: f64,
    /// The casts, in the order of the step.
    pub tensors: Vec<TensorCast>,
}

/// Error of the cast of one GEMM operand.
#[derive(Clone, Debug, Serialize)]
pub struct TensorCast {
    /// The GEMM as `[precision] skip` names it: `blocks.3.attn.o_proj:wgrad`.
    pub name: String,
    /// Index of the block.
    pub block: u32,
    /// Place in the block, e.g. `attn.o_proj`.
    pub site: String,
    /// `fprop`, `dgrad` or `wgrad`.
    #[serde(rename = "product")]
    pub gemm: &'static str,
    /// `input`, `weight` or `output gradient`.
    #[serde(rename = "factor")]
    pub operand: &'static str,
    /// The format, `e4m3` or `e5m2`.
    pub format: String,
    /// Granularity of the scales: `tensor`, `row`, `tile` or `block`.
    pub scaling: &'static str,
    /// Largest absolute value.
    pub amax: f64,
    /// Share of the elements that are zero before the cast.
    pub zeros: f64,
    /// Share of the other elements that the cast turns to zero.
    pub underflow: f64,
    /// Share of the other elements that lie beyond the largest number of the format.
    pub saturation: f64,
    /// Number of elements that are not finite; no other figure includes them.
    pub not_finite: u64,
    /// Signal-to-quantization-noise ratio in decibels; infinite if the cast is exact, NaN if the computation
    /// overflows.
    #[serde(serialize_with = "finite")]
    pub sqnr_db: f64,
    /// Reason why the run, or this recipe, computes the GEMM in bf16, if it does.
    #[serde(rename = "kept")]
    pub bf16_reason: Option<String>,
}

/// Serialises a number; `null` if it is not finite, because JSON has no such numbers.
pub fn finite<S: Serializer>(value: &f64, to: S) -> Result<S::Ok, S::Error> {
    if value.is_finite() { to.serialize_some(value) } else { to.serialize_none() }
}

#[cfg(test)]
pub(crate) use page::render;
