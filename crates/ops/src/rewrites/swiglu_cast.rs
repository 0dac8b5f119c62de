//! Fuses SwiGLU, or its gradient, into the cast of its output, which is then never written.

use super::{cast, edges, one};
use crate::quantize::{CastSource, Quantize};
use crate::swiglu::{Swiglu, SwigluGrad};
use crate::swiglu_saving::SwigluSaving;
use xtrain_program::{Edge, Link, Pair, Replacement, Rewrite};

pub(super) const REWRITE: Rewrite = Rewrite { name: "swiglu_cast", link: Link::Output, apply };

/// `Swiglu(gate_up) -> y`, `Quantize(y[, scale]) -> casts` => `Quantize(gate_up[, scale]) -> casts`. Likewise
/// for `SwigluSaving`, whose copy follows the casts, and for `SwigluGrad(dy, gate_up)`. Not if rows are
/// weighted.
fn apply(pair: &Pair<'_>) -> Option<Replacement> {
    let source = if pair.producer() == Some(&Swiglu::PLAIN) {
        CastSource::Swiglu { restored: false }
    } else if pair.producer::<SwigluSaving>().is_some() {
        CastSource::SwigluSaving
    } else if pair.producer() == Some(&SwigluGrad::PLAIN) {
        CastSource::SwigluGrad { restored: false }
    } else {
        return None;
    };
    let cast = cast(pair, 0).filter(|_| pair.is_private(0))?;
    let scale = edges(Edge::ConsumerInput, 1..pair.consumer_inputs());
    let inputs = edges(Edge::ProducerInput, 0..source.inputs()).chain(scale).collect();
    let copy = edges(Edge::ProducerOutput, 1..pair.producer_outputs());
    let outputs = edges(Edge::ConsumerOutput, 0..cast.outputs()).chain(copy).collect();
    Some(one(Quantize { source, ..cast }, inputs, outputs))
}
