//! Optimizers: how masters become new masters, traced like a model.
//!
//! An optimizer is one file here and a variant of [`Optimizer`]. It says which state it holds for a parameter
//! and traces its update; runs, checkpoints and memory plans ask it for both and name no field of it.
//! Gradient norm, clipping and the learning rate are the caller's ([`Controls`]).

mod adamw;
mod exchange;
mod muon;

pub use adamw::AdamWSpec;
pub use muon::MuonSpec;

use crate::{ParameterGroup, ParameterSpec};
use xtrain_program::{Parameter, StateKind, TraceError, Tracer, ValueId};
use xtrain_rank::Rank;
use xtrain_tensor::DType;

/// An optimizer with its constants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Optimizer {
    /// AdamW (Loshchilov & Hutter, arXiv 1711.05101).
    AdamW(AdamWSpec),
    /// Muon (Jordan et al. 2024) of the blocks' matrices, AdamW of all other parameters.
    Muon(MuonSpec),
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
    /// Traces the update of `parameters` on `rank`: new masters, their copies in other types, and the
    /// optimizer's state.
    pub fn trace(
        &self,
        t: &mut Tracer,
        parameters: &[Updated<'_>],
        controls: Controls,
        rank: Rank,
    ) -> Result<(), TraceError> {
        match self {
            Optimizer::AdamW(adamw) => adamw.trace(t, parameters, controls),
            Optimizer::Muon(muon) => muon.trace(t, parameters, controls, rank),
        }
    }

    /// The kinds of state that it holds for a parameter of this group. A run may go on with them in another
    /// element type.
    pub fn state(&self, group: ParameterGroup) -> &'static [StateKind] {
        match self {
            Optimizer::Muon(_) if MuonSpec::updates(group) => &MuonSpec::STATE,
            Optimizer::AdamW(_) | Optimizer::Muon(_) => &AdamWSpec::STATE,
        }
    }

    /// The kinds of state that it holds for any parameter.
    pub fn kinds_of_state(&self) -> &'static [StateKind] {
        &AdamWSpec::STATE
    }

    /// The element type of its state.
    pub fn state_dtype(&self) -> DType {
        match self {
            Optimizer::AdamW(adamw) | Optimizer::Muon(MuonSpec { adamw, .. }) => adamw.moments,
        }
    }

    /// The name of its state in messages.
    pub fn state_name(&self) -> &'static str {
        match self {
            Optimizer::AdamW(_) | Optimizer::Muon(_) => "moments",
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
            // Its moment is f32.
            Optimizer::Muon(_) => None,
        }
    }
}
