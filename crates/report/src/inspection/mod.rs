//! Errors of the casts to FP8 in a training step, and the page that shows them.

mod page;

pub use page::{INSPECT_FILE, write_inspection};

use serde::{Serialize, Serializer};
use std::path::PathBuf;

/// The casts of a step.
#[derive(Clone, Debug, Serialize)]
pub struct Inspection {
    /// The run's folder.
    pub run: PathBuf,
    /// The step of the checkpoint; the batch is that of the next.
    pub step: u64,
    /// The recipe that the step was computed in.
    pub recipe: String,
    /// The recipe whose casts were measured.
    pub casts: String,
    /// The loss of the batch, in nats a token.
    pub loss: f64,
    /// What was measured, in the order of the step.
    pub tensors: Vec<TensorCast>,
}

/// What a cast does to a factor of a product.
#[derive(Clone, Debug, Serialize)]
pub struct TensorCast {
    /// The product as `[precision] skip` takes it: `blocks.3.attn.o_proj:wgrad`.
    pub name: String,
    /// The block.
    pub block: u32,
    /// The place in it, e.g. `attn.o_proj`.
    pub site: String,
    /// `fprop`, `dgrad` or `wgrad`.
    pub product: &'static str,
    /// `input`, `weight` or `output gradient`.
    pub factor: &'static str,
    /// The format, `e4m3` or `e5m2`.
    pub format: String,
    /// What shares a scale: `tensor`, `row`, `tile` or `block`.
    pub scaling: &'static str,
    /// The largest magnitude.
    pub amax: f64,
    /// Share of the elements that are zero before the cast.
    pub zeros: f64,
    /// Share of the others that the cast makes zero.
    pub underflow: f64,
    /// Share of the others that lie beyond the largest number of the format.
    pub saturation: f64,
    /// Elements that are not finite; they are in no other figure.
    pub not_finite: u64,
    /// How much larger the tensor is than the error of its cast, in decibels; infinite where there is none, NaN where
    /// numbers are too large to tell.
    #[serde(serialize_with = "finite")]
    pub sqnr_db: f64,
    /// Why the run, or this recipe by itself, computes the product in bf16, where it does.
    pub kept: Option<String>,
}

/// A number for JSON, which has none that are not finite.
pub fn finite<S: Serializer>(value: &f64, to: S) -> Result<S::Ok, S::Error> {
    if value.is_finite() { to.serialize_some(value) } else { to.serialize_none() }
}

#[cfg(test)]
pub(crate) use page::render;
