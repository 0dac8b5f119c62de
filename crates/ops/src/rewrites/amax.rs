//! Fuses the amax of a tensor into the op that computes the tensor, so that a cast with one scale for the
//! tensor reads it once.

use super::{cast, edges, node};
use crate::adamw::AdamW;
use crate::qk_norm_rope::QkNormRopeGrad;
use crate::quantize::{Amaxes, Given, Quantize};
use crate::rms_norm::{ExtraOutput, RmsNormGrad};
use std::sync::Arc;
use xtrain_program::{Edge, Link, Node, Op, OpRewrite, Pair, Replacement, Rewrite};
use xtrain_tensor::Scaling;

pub(super) const REWRITE: Rewrite = Rewrite { name: super::AMAX, link: Link::Output, apply };

/// `P(..) -> (.., x, ..)`, `Quantize(x) -> casts` => `P(..) -> (.., x, .., amax)`, `Quantize(x, amax) ->
/// casts`.
///
/// For AdamW also `AdamW(..) -> (.., master, ..)`, `Amaxes(master) -> amax` => `AdamW(..) -> (.., master, ..,
/// amax)`: ranks gather the amaxes of their rows.
fn apply(pair: &Pair<'_>) -> Option<Replacement> {
    let x = pair.reads(0)?;
    if pair.consumer() == Some(&Amaxes { by_column: false }) {
        let op = measuring(pair, x)?;
        let inputs = edges(Edge::ProducerInput, 0..pair.producer_inputs()).collect();
        let outputs = edges(Edge::ProducerOutput, 0..pair.producer_outputs());
        let outputs = outputs.chain([Edge::ConsumerOutput(0)]).collect();
        return Some(Replacement { producer: node(op, inputs, outputs), consumer: OpRewrite::Empty });
    }
    let cast = cast(pair, x)?;
    if cast.scaling != Scaling::Tensor || cast.given != Given::Nothing {
        return None;
    }
    let (producer, amax) = match amax_source(pair, x)? {
        AmaxSource::Output(output) => (OpRewrite::Same, Edge::ProducerOutput(output)),
        AmaxSource::NewOp(op) => {
            let inputs = edges(Edge::ProducerInput, 0..pair.producer_inputs()).collect();
            let outputs = edges(Edge::ProducerOutput, 0..pair.producer_outputs()).chain([Edge::New(0)]);
            (OpRewrite::New(Node { op, inputs, outputs: outputs.collect() }), Edge::New(0))
        }
    };
    let outputs = edges(Edge::ConsumerOutput, 0..cast.outputs()).collect();
    let consumer = node(Quantize { given: Given::Amax, ..cast }, vec![Edge::ConsumerInput(0), amax], outputs);
    Some(Replacement { producer, consumer })
}

/// The output that holds the amax of another output.
enum AmaxSource {
    /// This output of the unchanged producer.
    Output(usize),
    /// The last output of this op, which replaces the producer.
    NewOp(Arc<dyn Op>),
}

/// The source of the amax of the producer's output `x`, or `None` if the producer cannot compute it.
fn amax_source(pair: &Pair<'_>, x: usize) -> Option<AmaxSource> {
    let last = pair.producer_outputs() - 1;
    if let Some(grad) = pair.producer::<RmsNormGrad>().filter(|_| x == 0) {
        let with_amax = || AmaxSource::NewOp(Arc::new(RmsNormGrad { extra: ExtraOutput::Amax, ..*grad }));
        return match grad.extra {
            ExtraOutput::None => Some(with_amax()),
            ExtraOutput::Amax => Some(AmaxSource::Output(last)),
            ExtraOutput::Y => None,
        };
    }
    if let Some(grad) = pair.producer::<QkNormRopeGrad>().filter(|_| x == 0) {
        let with_amax = || AmaxSource::NewOp(Arc::new(QkNormRopeGrad { amax: true, ..*grad }));
        return Some(if grad.amax { AmaxSource::Output(last) } else { with_amax() });
    }
    let adamw = pair.producer::<AdamW>()?;
    let p = adamw.masters().position(|master| master == x)?;
    match adamw.amax(p) {
        Some(output) => Some(AmaxSource::Output(output)),
        None => Some(AmaxSource::NewOp(Arc::new(measuring(pair, x)?))),
    }
}

/// The update that also writes the amax of its output `x`, a new master, as its last output.
fn measuring(pair: &Pair<'_>, x: usize) -> Option<AdamW> {
    let adamw = pair.producer::<AdamW>()?;
    adamw.measuring(adamw.masters().position(|master| master == x)?)
}
