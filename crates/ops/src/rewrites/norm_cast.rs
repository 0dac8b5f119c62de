//! A cast computes the norm that it casts. The norm is never written; what is left of its op gives 1/rms and,
//! for a scale of the whole tensor, the norm's amax.

use super::{cast, edges, node};
use crate::quantize::{CastSource, Given, Quantize};
use crate::rms_norm::{AddRmsNorm, Rms, RmsNorm};
use xtrain_program::{Edge, Link, Pair, Replacement, Rewrite};
use xtrain_tensor::Scaling;

pub(super) const REWRITE: Rewrite = Rewrite { name: "norm_cast", link: Link::Output, apply };

/// `RmsNorm(x, w) -> (y, rstd)`, `Quantize(y[, scale]) -> casts` => `Rms(x[, w]) -> (rstd[, amax])`,
/// `Quantize(x, rstd, w[, scale or amax]) -> casts`; so for `AddRmsNorm`, with the sum as x.
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
    let measures = cast.scaling == Scaling::Tensor && cast.given == Given::Nothing;
    let known = if measures { Given::Amax } else { cast.given };

    let rest = Rms { eps, adds, amax: measures };
    let rest_inputs = edges(Edge::ProducerInput, 0..w + usize::from(measures)).collect();
    let sum = adds.then_some(x);
    let amax = measures.then_some(Edge::New(0));
    let rest_outputs = sum.into_iter().chain([rstd]).chain(amax).collect();

    let scale = edges(Edge::ConsumerInput, 1..pair.consumer_inputs());
    let inputs = [x, rstd, Edge::ProducerInput(w)].into_iter().chain(scale).chain(amax).collect();
    let outputs = edges(Edge::ConsumerOutput, 0..cast.outputs()).collect();
    let of_norm = Quantize { source: CastSource::Norm, given: known, ..cast };
    Some(Replacement {
        producer: node(rest, rest_inputs, rest_outputs),
        consumer: node(of_norm, inputs, outputs),
    })
}
