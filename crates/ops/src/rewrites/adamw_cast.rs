//! Fuses the cast of a new master into the AdamW update that writes it, for scales by blocks and delayed
//! scales.

use super::{cast, edges, node};
use crate::adamw::AdamW;
use xtrain_program::{Edge, Link, OpRewrite, Pair, Replacement, Rewrite};
use xtrain_tensor::Scaling;

pub(super) const REWRITE: Rewrite = Rewrite { name: "adamw_cast", link: Link::Output, apply };

/// `AdamW(..) -> (.., master, ..)`, `Quantize(master[, scale]) -> casts` => `AdamW(..[, scale]) -> (..,
/// casts)`.
fn apply(pair: &Pair<'_>) -> Option<Replacement> {
    let adamw = pair.producer::<AdamW>()?;
    let p = adamw.masters().position(|master| pair.reads(0) == Some(master))?;
    let cast = cast(pair, pair.reads(0)?)?;
    let is_possible = cast.is_local() && cast.scaling != Scaling::Tile;
    let op = adamw.casting(p, cast).filter(|_| is_possible)?;
    let scale = edges(Edge::ConsumerInput, 1..pair.consumer_inputs());
    let inputs = edges(Edge::ProducerInput, 0..pair.producer_inputs()).chain(scale).collect();
    let casts = edges(Edge::ConsumerOutput, 0..cast.outputs());
    let outputs = edges(Edge::ProducerOutput, 0..pair.producer_outputs()).chain(casts).collect();
    Some(Replacement { producer: node(op, inputs, outputs), consumer: OpRewrite::Empty })
}
