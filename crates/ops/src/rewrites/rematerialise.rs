//! A gradient rematerialises the forward output that the backward recomputes: it reads the same inputs
//! anyway.
//!
//! What reads that output waits for the gradient.

use super::{edges, one};
use crate::rms_norm::{ExtraOutput, RmsNorm, RmsNormGrad};
use crate::swiglu::{Swiglu, SwigluGrad};
use xtrain_program::{Edge, Link, Pair, Replacement, Rewrite, Stage};

pub(super) const REWRITE: Rewrite = Rewrite { name: super::REMATERIALISE, link: Link::Input, apply };

/// `Swiglu(gate_up) -> y`, `SwigluGrad(dy, gate_up) -> dgate_up` => `SwigluGrad(dy, gate_up) -> (dgate_up,
/// y)`; so for `RmsNorm(x, w)`.
fn apply(pair: &Pair<'_>) -> Option<Replacement> {
    if pair.stage() != Stage::Backward {
        return None;
    }
    if pair.producer::<Swiglu>().is_some() && pair.shares(0) == Some(1) {
        let grad = *pair.consumer::<SwigluGrad>()?;
        return (!grad.rematerialise).then(|| {
            one(SwigluGrad { rematerialise: true }, edges(Edge::ConsumerInput, 0..2).collect(), and_y(1))
        });
    }
    pair.producer::<RmsNorm>()?;
    let grad = *pair.consumer::<RmsNormGrad>()?;
    let reads_the_same = [pair.shares(0), pair.shares(1)] == [Some(1), Some(3)];
    let is_possible = reads_the_same && grad.extra == ExtraOutput::None && pair.is_private(1);
    let inputs = edges(Edge::ConsumerInput, 0..pair.consumer_inputs()).collect();
    is_possible.then(|| one(RmsNormGrad { extra: ExtraOutput::Y, ..grad }, inputs, and_y(2)))
}

/// So many outputs of the gradient, then y.
fn and_y(outputs: usize) -> Vec<Edge> {
    edges(Edge::ConsumerOutput, 0..outputs).chain([Edge::ProducerOutput(0)]).collect()
}
