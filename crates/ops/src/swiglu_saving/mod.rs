//! SwiGLU that also saves its input in FP8 for the backward. The rewrite `source_cast` fuses it with a cast
//! of its output.

mod cpu;
mod cuda;
#[cfg(any(test, feature = "samples"))]
mod samples;

use crate::on_gpu::OnGpu;
use crate::quantize::{Quantize, saved_types};
use crate::swiglu::Swiglu;
use crate::tail;
use std::sync::Arc;
use xtrain_cuda::KernelSource;
use xtrain_program::{Arithmetic, Cost, Op, OpError, Operand, RaggedOp, Tail};
use xtrain_tensor::TensorType;

/// `gate_up_t2f[, weights_t, starts] -> y_tf, q_t2f, inv_scale`: [`Swiglu`], and a copy of gate and up in
/// E4M3 by tiles with power-of-two scales.
#[derive(Clone, Copy, Debug)]
pub struct SwigluSaving {
    /// True if each row has a weight.
    pub weighted: bool,
    /// The tails of all outputs, if rows are those of experts.
    pub tail: Tail,
}

impl SwigluSaving {
    fn swiglu(self) -> Swiglu {
        Swiglu { weighted: self.weighted, tail: self.tail }
    }
}

impl Op for SwigluSaving {
    fn name(&self) -> &'static str {
        "swiglu_saving"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        let mut outputs = self.swiglu().infer(inputs)?;
        outputs.extend(saved_types(inputs[0]));
        Ok(outputs)
    }

    fn operand(&self, input: usize) -> Operand {
        self.swiglu().operand(input)
    }

    fn cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        tail::cost(Cost::of_operands(Arithmetic::None, inputs, outputs), outputs[0].shape[0], self.tail)
    }
}

impl RaggedOp for SwigluSaving {
    fn reads_tail(&self, input: usize) -> bool {
        self.swiglu().reads_tail(input)
    }

    fn tail(&self, output: usize) -> Option<Tail> {
        self.swiglu().tail(output)
    }

    fn with_tail(&self, tail: Tail) -> Option<Arc<dyn Op>> {
        self.weighted.then(|| Arc::new(SwigluSaving { tail, ..*self }) as Arc<dyn Op>)
    }
}

impl OnGpu for SwigluSaving {
    const SOURCES: &'static [KernelSource] = &[Swiglu::SOURCES[0], Quantize::SOURCES[0]];
}
