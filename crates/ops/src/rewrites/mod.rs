//! The fusions: for each a file with a rule from a producer and a consumer to their replacement
//! ([`xtrain_program::fuse`]).
//!
//! A rule says what is equal to the bit; whether it is legal at a place is the engine's business, whether it
//! is wanted the recipe's. A new fusion is a file here and a line in [`ALL`].

mod adamw_cast;
mod amax;
mod norm_cast;
mod rematerialise;
mod restored_swiglu_cast;
mod save_swiglu;
mod sum_norm_cast;
mod swiglu_cast;

use crate::quantize::{CastSource, Quantize};
use std::ops::Range;
use std::sync::Arc;
use xtrain_program::{Edge, Node, Op, Pair, Place, Replacement, Rewrite};
use xtrain_tensor::DType;

/// The name of the rewrite that casts the norm of a sum where the sum is computed.
pub const SUM_NORM_CAST: &str = "sum_norm_cast";
/// The name of the rewrite that has an amax written with its tensor.
pub const AMAX: &str = "amax";
/// The name of the rewrite that recomputes a forward output in its gradient.
pub const REMATERIALISE: &str = "rematerialise";

/// All rewrites, in the order of their priority.
pub const ALL: &[Rewrite] = &[
    save_swiglu::REWRITE,
    sum_norm_cast::REWRITE,
    norm_cast::REWRITE,
    swiglu_cast::REWRITE,
    restored_swiglu_cast::REWRITE,
    rematerialise::REWRITE,
    adamw_cast::REWRITE,
    amax::REWRITE,
];

/// The consumer, if it casts this output of the producer to FP8.
fn cast(pair: &Pair<'_>, output: usize) -> Option<Quantize> {
    let cast = *pair.consumer::<Quantize>()?;
    let is_plain = cast.source == CastSource::Input && cast.format != DType::E5M6;
    (pair.reads(0) == Some(output) && is_plain).then_some(cast)
}

/// A node.
fn node(op: impl Op, inputs: Vec<Edge>, outputs: Vec<Edge>) -> Place {
    Place::New(Node { op: Arc::new(op), inputs, outputs })
}

/// One op in the consumer's place, and none in the producer's.
fn one(op: impl Op, inputs: Vec<Edge>, outputs: Vec<Edge>) -> Replacement {
    Replacement { producer: Place::Empty, consumer: node(op, inputs, outputs) }
}

/// An edge for each number.
fn edges(edge: fn(usize) -> Edge, range: Range<usize>) -> impl Iterator<Item = Edge> {
    range.map(edge)
}
