//! Fuses the FP8 cast that saves SwiGLU's input for the backward into SwiGLU, which reads that input.

use super::{edges, one};
use crate::quantize::{Quantize, SAVE};
use crate::swiglu::Swiglu;
use crate::swiglu_saving::SwigluSaving;
use xtrain_program::{Edge, Link, Pair, Replacement, Rewrite};

pub(super) const REWRITE: Rewrite = Rewrite { name: "save_swiglu", link: Link::Input, apply };

/// `Quantize(gate_up) -> (q, inv_scale, amax)`, `Swiglu(gate_up[, ..]) -> y` => `SwigluSaving(gate_up[, ..])
/// -> (y, q, inv_scale)`.
fn apply(pair: &Pair<'_>) -> Option<Replacement> {
    let &Swiglu { weighted, tail } = pair.consumer()?;
    let is_saved = *pair.producer::<Quantize>()? == SAVE && pair.is_private(SAVE.amax());
    let inputs = edges(Edge::ConsumerInput, 0..pair.consumer_inputs()).collect();
    let outputs = [Edge::ConsumerOutput(0)].into_iter().chain(edges(Edge::ProducerOutput, 0..2)).collect();
    is_saved.then(|| one(SwigluSaving { weighted, tail }, inputs, outputs))
}
