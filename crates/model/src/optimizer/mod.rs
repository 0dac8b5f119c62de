//! Optimizers: how masters become new masters, traced like a model.
//!
//! An optimizer is one file here and a variant of [`Optimizer`]. It says which state it holds for a parameter
//! and traces its update; runs, checkpoints and memory plans ask it for both and name no field of it.
//! Gradient norm, clipping and the learning rate are the caller's ([`Controls`]).

mod adamw;

pub use adamw::AdamWSpec;

use crate::ParameterSpec;
use xtrain_program::{Parameter, StateKind, TraceError, Tracer, ValueId};

/// An optimizer with its constants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Optimizer {
    /// AdamW (Loshchilov & Hutter, arXiv 1711.05101).
    AdamW(AdamWSpec),
}

/// A parameter that is updated: its values in the program, and its entry in the model's list with its group
/// and the parts that it fuses (q, k and v; gate and up).
#[derive(Clone, Copy)]
pub struct Updated<'a> {
    /// Master, gradient and copies.
    pub parameter: &'a Parameter,
    /// Name, shape, group and parts.
    pub spec: &'a ParameterSpec,
    /// Its index among the trained parameters of the model.
    pub index: usize,
    /// The index of the first element that this rank updates: not 0 if it has later rows of the parameter.
    pub first_element: u64,
}

/// The values that every update reads.
#[derive(Clone, Copy, Debug)]
pub struct Controls {
    /// `f32[]`: the learning rate.
    pub lr: ValueId,
    /// `f32[]`: the factor by which clipping scales gradients.
    pub coefficient: ValueId,
    /// `u32[1]`: the number of updates applied, this one included.
    pub applied: ValueId,
    /// `u32[]`: not 0 if the update must change nothing.
    pub skip: ValueId,
}

impl Optimizer {
    /// Traces the update of `parameters`, in their order: new masters, their copies in other types, and the
    /// optimizer's state.
    pub fn trace(
        &self,
        t: &mut Tracer,
        parameters: &[Updated<'_>],
        controls: Controls,
    ) -> Result<(), TraceError> {
        match self {
            Optimizer::AdamW(adamw) => adamw.trace(t, parameters, controls),
        }
    }

    /// The kinds of state that it holds for each parameter. A run may go on with them in another element
    /// type.
    pub fn state(&self) -> &'static [StateKind] {
        match self {
            Optimizer::AdamW(_) => &AdamWSpec::STATE,
        }
    }

    /// The name of its state in messages.
    pub fn state_name(&self) -> &'static str {
        match self {
            Optimizer::AdamW(_) => "moments",
        }
    }

    /// The optimizer with a smaller state, and the setting of the run file for it; `None` if its state is
    /// already the smallest.
    pub fn smaller(&self) -> Option<(Optimizer, &'static str)> {
        match self {
            Optimizer::AdamW(adamw) => {
                let (smaller, setting) = adamw.smaller()?;
                Some((Optimizer::AdamW(smaller), setting))
            }
        }
    }
}
