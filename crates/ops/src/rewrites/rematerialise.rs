//! Fuses the recomputation of a forward output into its gradient, which reads the same inputs.
//!
//! Consumers of the output then run after the gradient.

use super::{edges, one};
use crate::rms_norm::{ExtraOutput, RmsNorm, RmsNormGrad};
use crate::swiglu::{Swiglu, SwigluGrad};
use xtrain_program::{Edge, Link, Pair, Replacement, Rewrite, Stage};

pub(super) const REWRITE: Rewrite = Rewrite { name: super::REMATERIALISE, link: Link::Input, apply };

/// `Swiglu(gate_up) -> y`, `SwigluGrad(dy, gate_up) -> dgate_up` => `SwigluGrad(dy, gate_up) -> (dgate_up,
/// y)`. Likewise for `RmsNorm(x, w)` and `RmsNormGrad`.
fn apply(pair: &Pair<'_>) -> Option<Replacement> {
    if pair.stage() != Stage::Backward {
        return None;
    }
    if pair.producer::<Swiglu>().is_some() && pair.shares(0) == Some(1) {
        let grad = *pair.consumer::<SwigluGrad>()?;
        return (!grad.rematerialise).then(|| {
            one(
                SwigluGrad { rematerialise: true },
                edges(Edge::ConsumerInput, 0..2).collect(),
                grads_and_y(1),
            )
        });
    }
    pair.producer::<RmsNorm>()?;
    let grad = *pair.consumer::<RmsNormGrad>()?;
    let has_equal_inputs = [pair.shares(0), pair.shares(1)] == [Some(1), Some(3)];
    let is_possible = has_equal_inputs && grad.extra == ExtraOutput::None && pair.is_private(1);
    let inputs = edges(Edge::ConsumerInput, 0..pair.consumer_inputs()).collect();
    is_possible.then(|| one(RmsNormGrad { extra: ExtraOutput::Y, ..grad }, inputs, grads_and_y(2)))
}

/// The first `outputs` outputs of the gradient, then y.
fn grads_and_y(outputs: usize) -> Vec<Edge> {
    edges(Edge::ConsumerOutput, 0..outputs).chain([Edge::ProducerOutput(0)]).collect()
}
