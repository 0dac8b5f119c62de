//! Fuses the cast of a norm into the op that adds and normalises. The norm itself is never written.
//!
//! The scale must not depend on the whole norm: it is a delayed scale, or one of tiles or blocks.

use super::{cast, edges, node};
use crate::quantize::{CastSource, Quantize};
use crate::rms_norm::AddRmsNorm;
use crate::rms_quantize::RmsQuantize;
use xtrain_program::{Edge, Link, OpRewrite, Pair, Replacement, Rewrite};

pub(super) const REWRITE: Rewrite = Rewrite { name: super::SUM_NORM_CAST, link: Link::Output, apply };

/// `AddRmsNorm(x, delta, w) -> (sum, y, rstd)`, `Quantize(y[, scale]) -> casts`
/// => `RmsQuantize(x, delta, w[, scale]) -> (sum, rstd, casts)`.
fn apply(pair: &Pair<'_>) -> Option<Replacement> {
    const Y: usize = 1;
    let &AddRmsNorm { eps } = pair.producer()?;
    let cast = cast(pair, Y).filter(|cast| cast.is_local() && pair.is_private(Y))?;
    let op = RmsQuantize { eps, cast: Quantize { source: CastSource::Norm, ..cast } };
    let scale = edges(Edge::ConsumerInput, 1..pair.consumer_inputs());
    let inputs = edges(Edge::ProducerInput, 0..3).chain(scale).collect();
    let casts = edges(Edge::ConsumerOutput, 0..cast.outputs());
    let outputs = [0, 2].map(Edge::ProducerOutput).into_iter().chain(casts).collect();
    Some(Replacement { producer: node(op, inputs, outputs), consumer: OpRewrite::Empty })
}
