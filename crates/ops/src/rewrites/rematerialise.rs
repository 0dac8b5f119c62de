//! Fuses the recomputation of a forward output into its gradient, which reads the same inputs.
//!
//! Consumers of the output then run after the gradient.

use super::{edges, one};
use crate::rms_norm::{ExtraOutput, RmsNorm, RmsNormGrad};
use crate::swiglu::{Swiglu, SwigluGrad};
use xtrain_program::{Edge, Link, Pair, Replacement, Rewrite, Stage};

pub(super) const REWRITE: Rewrite = Rewrite { name: super::REMATERIALISE, link: Link::Input, apply };

/// `Swiglu(gate_up) -> y`, `SwigluGrad(dy, gate_up) -> dgate_up` => `SwigluGrad(dy, gate_up) -> (dgate_up,
/// y)`. Likewise if rows are weighted, and for `RmsNorm(x, w)` and `RmsNormGrad`.
fn apply(pair: &Pair<'_>) -> Option<Replacement> {
    if pair.stage() != Stage::Backward {
        return None;
    }
    if let Some(&Swiglu { weighted, .. }) = pair.producer() {
        let operands = pair.producer_inputs();
        let is_possible = pair.consumer() == Some(&SwigluGrad { weighted, ..SwigluGrad::PLAIN })
            && (0..operands).all(|n| pair.shares(n) == Some(n + 1));
        let grad = SwigluGrad { rematerialise: true, weighted, ..SwigluGrad::PLAIN };
        let inputs = edges(Edge::ConsumerInput, 0..operands + 1).collect();
        return is_possible.then(|| one(grad, inputs, grads_and_y(1 + usize::from(weighted))));
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
