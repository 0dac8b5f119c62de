//! Fuses the dequantization of gate and up, saved in FP8, into the cast of SwiGLU or of its gradient.

use super::{edges, one};
use crate::quantize::{CastSource, Dequantize, Quantize};
use xtrain_program::{Edge, Link, Pair, Replacement, Rewrite};
use xtrain_tensor::{DType, Scaling};

pub(super) const REWRITE: Rewrite = Rewrite { name: "restored_swiglu_cast", link: Link::Output, apply };

/// `Dequantize(q, inv_scale) -> gate_up`, `Quantize([dy, ]gate_up[, weights, starts][, scale]) -> casts` =>
/// `Quantize([dy, ]q, inv_scale[, weights, starts][, scale]) -> casts`.
fn apply(pair: &Pair<'_>) -> Option<Replacement> {
    let restore = pair.producer::<Dequantize>()?;
    let cast = *pair.consumer::<Quantize>()?;
    let (source, gate_up) = match cast.source {
        CastSource::Swiglu { restored: false, weighted } => {
            (CastSource::Swiglu { restored: true, weighted }, 0)
        }
        CastSource::SwigluGrad { restored: false, weighted } => {
            (CastSource::SwigluGrad { restored: true, weighted }, 1)
        }
        _ => return None,
    };
    let is_saved_copy = restore.scaling == Scaling::Tile && restore.out == DType::BF16;
    if !is_saved_copy || pair.reads(gate_up) != Some(0) || !pair.is_private(0) {
        return None;
    }
    let mut inputs: Vec<Edge> = edges(Edge::ConsumerInput, 0..pair.consumer_inputs()).collect();
    inputs.splice(gate_up..=gate_up, edges(Edge::ProducerInput, 0..2));
    let outputs = edges(Edge::ConsumerOutput, 0..cast.outputs()).collect();
    Some(one(Quantize { source, ..cast }, inputs, outputs))
}
