//! The work of an op, for rates in FLOP/s and bytes/s.

use xtrain_program::{Instance, Program};
use xtrain_tensor::TensorType;

/// Work of one run of an op.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct OpWork {
    /// Floating-point operations.
    pub flops: f64,
    /// Bytes of all operands, each once.
    pub bytes: usize,
}

impl OpWork {
    /// Operations and operands of `instance`.
    pub fn from_instance(program: &Program, instance: &Instance) -> Self {
        let (inputs, outputs) = (program.input_types(instance), program.output_types(instance));
        let bytes = inputs.iter().chain(&outputs).map(TensorType::bytes).sum();
        OpWork { flops: program.cost(instance).flops(), bytes }
    }
}
