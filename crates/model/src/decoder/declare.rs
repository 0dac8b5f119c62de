//! The declaration of parameters while a model is traced, from the list of all by name.

use crate::{Architecture, ModelRanks, ParameterSpec};
use std::collections::HashMap;
use xtrain_program::{StateKind, TensorCut, Tracer, ValueId};
use xtrain_tensor::{DType, Shape, TensorType};

/// The parameters of a model by name, to be declared while it is traced.
pub(super) struct Parameters {
    all: HashMap<String, ParameterSpec>,
    /// How ranks share the model.
    ranks: ModelRanks,
}

impl Parameters {
    pub(super) fn new(model: &Architecture, ranks: ModelRanks) -> Self {
        let all = model.parameters().into_iter().map(|p| (p.name.clone(), p)).collect();
        Parameters { all, ranks }
    }

    /// The parameter called `name`, in f32; of experts, those of one rank, and of what a tensor group shares,
    /// the part of one rank.
    ///
    /// # Panics
    /// If the model's list does not have it: a parameter must not go without initial values, checkpoints and
    /// exports.
    pub(super) fn declare(&self, t: &mut Tracer, name: &str) -> ValueId {
        let parameter =
            self.all.get(name).unwrap_or_else(|| panic!("`{name}` is not in the model's list of parameters"));
        let mut shape = parameter.shape.clone();
        shape[0] /= if parameter.experts.is_some() { self.ranks.experts.count } else { 1 };
        let ty = TensorType::new(DType::F32, Shape::new(&shape));
        match (parameter.group.has_gradient(), &parameter.tensor_cut) {
            (true, _) if parameter.is_frozen => t.frozen(name, ty),
            (true, Some(by)) if self.ranks.tensor.size > 1 => {
                t.part(name, ty, TensorCut { groups: self.ranks.tensor, by: by.clone() })
            }
            (true, _) => t.parameter(name, ty),
            (false, _) if parameter.is_frozen => t.state(StateKind::Frozen, name, ty),
            (false, _) => t.state(StateKind::Master, name, ty),
        }
    }
}
