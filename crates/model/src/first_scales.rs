//! The scales with which a run with delayed scales casts the rows of experts in its first step.
//!
//! A delayed scale that is not set is that of the current amax, which for the rows of an expert is an amax
//! over the tokens of all ranks that share experts. Under sums for any world the first step must not depend
//! on these ranks, and tokens that are cast before they are gathered need the same scale on all of them. So
//! it casts with fixed scales instead.

use crate::EXPERTS;
use std::sync::Arc;
use xtrain_program::{CastOperand, Delayed, Program, StateKind, Storage};

/// The first scale of inputs of experts: those of a model that has not trained yet are below 10, and E4M3
/// reaches 448.
const OF_INPUTS: f32 = 16.0;

/// The names of the delayed scales of experts' rows in a training step of so many tokens, and their first
/// values.
pub fn first_scales(program: &Program, tokens: usize) -> Vec<(Arc<str>, f32)> {
    let of_experts = program.delayed.iter().filter(|tensor| tensor.layer.site.starts_with(EXPERTS));
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
    of_experts.filter_map(scale).collect()
}
