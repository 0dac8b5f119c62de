//! The scales with which a run with delayed scales casts tokens of several ranks in its first step.
//!
//! A delayed scale that is not set is that of the current amax, which for the rows of an expert is an amax
//! over the tokens of all ranks that share experts. Under sums for any world the first step must not depend
//! on these ranks, and tokens that are cast before they are gathered need the same scale on all of them. So
//! it casts with fixed scales instead. Tokens that tensor ranks gather have them however they are gathered.

use crate::{Architecture, EXPERTS};
use std::sync::Arc;
use xtrain_program::{CastOperand, CutBy, Delayed, Parallel, Program, StateKind, Storage};

/// The first scale of inputs: those of a model that has not trained yet are below 10, and E4M3 reaches 448.
const OF_INPUTS: f32 = 16.0;

/// The names of the delayed scales that are fixed first in a training step of so many tokens, and their
/// values. `wire` says that tokens travel to their experts in FP8.
pub fn first_scales(
    program: &Program,
    model: &Architecture,
    parallel: &Parallel,
    tokens: usize,
    wire: bool,
) -> Vec<(Arc<str>, f32)> {
    let has_parts = model.parts(parallel) > 1;
    let is_fixed = |tensor: &&Delayed| {
        let site = &*tensor.layer.site;
        let of_experts = (wire || parallel.reduce.is_any_world()) && site.starts_with(EXPERTS);
        of_experts || has_parts && is_gathered(model, site, tensor.operand)
    };
    let scale = |tensor: &Delayed| {
        let value = match tensor.operand {
            CastOperand::Weight => return None,
            CastOperand::Input | CastOperand::WgradInput => OF_INPUTS,
            // Of the gradients of a mean over the tokens.
            CastOperand::OutputGradient => tokens.next_power_of_two() as f32,
        };
        match &program.value(tensor.scale).storage {
            Storage::State { kind: StateKind::Scale, name, .. } => Some((name.clone(), value)),
            _ => None,
        }
    };
    program.delayed.iter().filter(is_fixed).filter_map(scale).collect()
}

/// True if tensor ranks gather the input, or the gradient of the output, of the layer at a site of a block.
fn is_gathered(model: &Architecture, site: &str, operand: CastOperand) -> bool {
    let cut =
        model.linears().find(|(_, linear)| linear.site == site).and_then(|(_, linear)| linear.tensor_cut());
    match cut {
        Some(CutBy::Rows(_)) => operand == CastOperand::Input,
        Some(CutBy::Columns) => operand == CastOperand::OutputGradient,
        None => false,
    }
}
