//! The rewrites that fuse a producer and a consumer, a file each ([`xtrain_program::fuse`]).
//!
//! A rewrite returns a replacement whose results are equal to the bit. Whether it is legal at a place is
//! decided by the rewrite engine, whether it is wanted by the recipe. A new fusion is a file here and a line
//! in [`ALL`].

mod adamw_cast;
mod amax;
mod norm_cast;
mod rematerialise;
mod restored_swiglu_cast;
mod save_swiglu;
mod source_cast;
mod sum_norm_cast;

use crate::quantize::{CastSource, Quantize};
use std::ops::Range;
use std::sync::Arc;
use xtrain_program::{Edge, Node, Op, OpRewrite, Pair, Replacement, Rewrite};
use xtrain_tensor::DType;

/// Name of the rewrite that fuses a residual add, its norm and the cast of the norm.
pub const SUM_NORM_CAST: &str = "sum_norm_cast";
/// Name of the rewrite that fuses an amax into the op that computes the tensor.
pub const AMAX: &str = "amax";
/// Name of the rewrite that rematerialises a forward output in its gradient's kernel.
pub const REMATERIALISE: &str = "rematerialise";

/// All rewrites, in the order of their priority.
pub const ALL: &[Rewrite] = &[
    save_swiglu::REWRITE,
    sum_norm_cast::REWRITE,
    norm_cast::REWRITE,
    source_cast::REWRITE,
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

/// A new node for `op`.
fn node(op: impl Op, inputs: Vec<Edge>, outputs: Vec<Edge>) -> OpRewrite {
    OpRewrite::New(Node { op: Arc::new(op), inputs, outputs })
}

/// A replacement of both by one op in the consumer's place.
fn one(op: impl Op, inputs: Vec<Edge>, outputs: Vec<Edge>) -> Replacement {
    Replacement { producer: OpRewrite::Empty, consumer: node(op, inputs, outputs) }
}

/// One edge for each index in `range`.
fn edges(edge: fn(usize) -> Edge, range: Range<usize>) -> impl Iterator<Item = Edge> {
    range.map(edge)
}
