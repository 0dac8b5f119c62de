//! Fuses SwiGLU, its gradient, or the gather of rows by experts into the cast of its output, which is then
//! never written.

use super::{cast, edges, one};
use crate::permute::Permute;
use crate::quantize::{CastSource, Quantize};
use crate::swiglu::{Swiglu, SwigluGrad};
use crate::swiglu_saving::SwigluSaving;
use xtrain_program::{Edge, Link, Pair, Replacement, Rewrite};

pub(super) const REWRITE: Rewrite = Rewrite { name: "source_cast", link: Link::Output, apply };

/// `P(..) -> (y, ..)`, `Quantize(y[, scale]) -> casts` => `Quantize(..[, scale]) -> (casts, ..)`, with the
/// inputs of P and its further outputs: the copy of [`SwigluSaving`], or the gradient of the weights of rows.
fn apply(pair: &Pair<'_>) -> Option<Replacement> {
    let source = source(pair)?;
    let cast = cast(pair, 0).filter(|_| pair.is_private(0))?;
    let scale = edges(Edge::ConsumerInput, 1..pair.consumer_inputs());
    let inputs = edges(Edge::ProducerInput, 0..source.inputs()).chain(scale).collect();
    let further = edges(Edge::ProducerOutput, 1..pair.producer_outputs());
    let outputs = edges(Edge::ConsumerOutput, 0..cast.outputs()).chain(further).collect();
    Some(one(Quantize { source, ..cast }, inputs, outputs))
}

/// The source of a cast that computes the producer's first output.
fn source(pair: &Pair<'_>) -> Option<CastSource> {
    if let Some(&Swiglu { weighted, .. }) = pair.producer() {
        return Some(CastSource::Swiglu { restored: false, weighted });
    }
    if let Some(&SwigluSaving { weighted, .. }) = pair.producer() {
        return Some(CastSource::SwigluSaving { weighted });
    }
    if let Some(&SwigluGrad { rematerialise: false, weighted, .. }) = pair.producer() {
        return Some(CastSource::SwigluGrad { restored: false, weighted });
    }
    pair.producer::<Permute>().map(|_| CastSource::Permute)
}
