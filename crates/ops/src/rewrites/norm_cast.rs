//! Fuses a norm into the cast of its output, which is then never written. The norm's op is replaced by
//! [`Rms`], which computes 1/rms and, for a cast with one scale for the tensor, the amax of the norm.

use super::{cast, edges, node};
use crate::quantize::{CastSource, Given, Quantize};
use crate::rms_norm::{AddRmsNorm, Rms, RmsNorm};
use xtrain_program::{Edge, Link, Pair, Replacement, Rewrite};
use xtrain_tensor::Scaling;

pub(super) const REWRITE: Rewrite = Rewrite { name: "norm_cast", link: Link::Output, apply };

/// `RmsNorm(x, w) -> (y, rstd)`, `Quantize(y[, scale]) -> casts` => `Rms(x[, w]) -> (rstd[, amax])`,
/// `Quantize(x, rstd, w[, scale or amax]) -> casts`. For `AddRmsNorm`, x is the sum.
fn apply(pair: &Pair<'_>) -> Option<Replacement> {
    let (eps, adds) = match (pair.producer(), pair.producer()) {
        (Some(&RmsNorm { eps }), _) => (eps, false),
        (_, Some(&AddRmsNorm { eps })) => (eps, true),
        _ => return None,
    };
    let (y, w) = if adds { (1, 2) } else { (0, 1) };
    let (x, rstd) =
        (if adds { Edge::ProducerOutput(0) } else { Edge::ProducerInput(0) }, Edge::ProducerOutput(y + 1));
    let cast = cast(pair, y).filter(|_| pair.is_private(y))?;
    let needs_amax = cast.scaling == Scaling::Tensor && cast.given == Given::Nothing;
    let given = if needs_amax { Given::Amax } else { cast.given };

    let rms = Rms { eps, adds, amax: needs_amax };
    let rms_inputs = edges(Edge::ProducerInput, 0..w + usize::from(needs_amax)).collect();
    let sum = adds.then_some(x);
    let amax = needs_amax.then_some(Edge::New(0));
    let rms_outputs = sum.into_iter().chain([rstd]).chain(amax).collect();

    let scale = edges(Edge::ConsumerInput, 1..pair.consumer_inputs());
    let inputs = [x, rstd, Edge::ProducerInput(w)].into_iter().chain(scale).chain(amax).collect();
    let outputs = edges(Edge::ConsumerOutput, 0..cast.outputs()).collect();
    let norm_cast = Quantize { source: CastSource::Norm, given, ..cast };
    Some(Replacement {
        producer: node(rms, rms_inputs, rms_outputs),
        consumer: node(norm_cast, inputs, outputs),
    })
}
