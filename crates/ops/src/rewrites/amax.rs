//! The op that computes a tensor also writes its amax, so that a cast with a scale of the whole tensor reads
//! the tensor once.

use super::{cast, edges, node};
use crate::adamw::AdamW;
use crate::qk_norm_rope::QkNormRopeGrad;
use crate::quantize::{Given, Quantize};
use crate::rms_norm::{ExtraOutput, RmsNormGrad};
use std::sync::Arc;
use xtrain_program::{Edge, Link, Node, Op, Pair, Place, Replacement, Rewrite};
use xtrain_tensor::Scaling;

pub(super) const REWRITE: Rewrite = Rewrite { name: super::AMAX, link: Link::Output, apply };

/// `P(..) -> (.., x, ..)`, `Quantize(x) -> casts` => `P(..) -> (.., x, .., amax)`, `Quantize(x, amax) ->
/// casts`.
fn apply(pair: &Pair<'_>) -> Option<Replacement> {
    let x = pair.reads(0)?;
    let cast = cast(pair, x)?;
    if cast.scaling != Scaling::Tensor || cast.given != Given::Nothing {
        return None;
    }
    let (producer, amax) = match measuring(pair, x)? {
        Measuring::Already(output) => (Place::Same, Edge::ProducerOutput(output)),
        Measuring::By(op) => {
            let inputs = edges(Edge::ProducerInput, 0..pair.producer_inputs()).collect();
            let outputs = edges(Edge::ProducerOutput, 0..pair.producer_outputs()).chain([Edge::New(0)]);
            (Place::New(Node { op, inputs, outputs: outputs.collect() }), Edge::New(0))
        }
    };
    let outputs = edges(Edge::ConsumerOutput, 0..cast.outputs()).collect();
    let consumer = node(Quantize { given: Given::Amax, ..cast }, vec![Edge::ConsumerInput(0), amax], outputs);
    Some(Replacement { producer, consumer })
}

/// Where the amax of an output comes from.
enum Measuring {
    /// This output of the producer.
    Already(usize),
    /// The last output of this op.
    By(Arc<dyn Op>),
}

/// How the producer can write the amax of its output `x`.
fn measuring(pair: &Pair<'_>, x: usize) -> Option<Measuring> {
    let last = pair.producer_outputs() - 1;
    if let Some(grad) = pair.producer::<RmsNormGrad>().filter(|_| x == 0) {
        return match grad.extra {
            ExtraOutput::None => {
                Some(Measuring::By(Arc::new(RmsNormGrad { extra: ExtraOutput::Amax, ..*grad })))
            }
            ExtraOutput::Amax => Some(Measuring::Already(last)),
            ExtraOutput::Y => None,
        };
    }
    if let Some(grad) = pair.producer::<QkNormRopeGrad>().filter(|_| x == 0) {
        let by = || Measuring::By(Arc::new(QkNormRopeGrad { amax: true, ..*grad }));
        return Some(if grad.amax { Measuring::Already(last) } else { by() });
    }
    let adamw = pair.producer::<AdamW>()?;
    let p = adamw.masters().position(|master| master == x)?;
    match adamw.amax(p) {
        Some(output) => Some(Measuring::Already(output)),
        None => Some(Measuring::By(Arc::new(adamw.measuring(p)?))),
    }
}
