//! Linear layers of experts: a GEMM for each group of rows of a ragged tensor, and its gradients.
//!
//! [`crate::dispatch`] says what a ragged tensor is, and computes `starts`, an i32[E + 1] on the
//! device: the rows of expert e are `starts[e]..starts[e + 1]` of c.
//!
//! The weights of all experts are one matrix `w_(E*o)i`, expert after expert, so y = x w_e^T, dx = dy w_e and
//! dw_e = dy^T x over the rows of expert e. E is the number of experts, and o and i are the outputs and
//! inputs of one expert.

mod cpu;
mod cuda;
mod hopper;
#[cfg(any(test, feature = "samples"))]
mod samples;
#[cfg(test)]
mod tests;

use crate::dispatch::DispatchOwn;
use crate::grouped_scaled_matmul::GroupedScaledMatmul;
use crate::groups::Groups;
use crate::on_gpu::OnGpu;
use crate::ragged::PORTABLE;
use crate::sum_ranks::SumSources;
use crate::{int_vector, matrix};
use std::any::Any;
use std::sync::Arc;
use xtrain_cuda::KernelSource;
use xtrain_program::{
    Arithmetic, Backward, Cost, Differentiable, Gemms, LinearGemm, Op, OpError, OpGemm, Operand,
    OperandSource, Role, ScaledGemm, ValueId,
};
use xtrain_tensor::{DType, TensorType};

/// The name by which `XTRAIN_PREFER` selects the portable kernels for linear layers of experts on a Hopper
/// GPU, in bf16 and in FP8.
pub fn algorithms() -> Vec<String> {
    vec![PORTABLE.to_owned()]
}

/// The input `starts` of all three ops.
const STARTS: usize = 2;

/// `(x_ci, w_(E*o)i, starts) -> y_co`: y = x w_e^T in the rows of expert e, summed in f32 (f64) and rounded
/// once. Rows after `starts[E]` are written as zeros.
#[derive(Clone, Copy, Debug)]
pub struct GroupedLinear(pub Groups);

impl Op for GroupedLinear {
    fn name(&self) -> &'static str {
        kernel_name(LinearGemm::Fprop)
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        let [rows, width, out, w_in] = extents(self.name(), "x", self.0.experts, inputs)?;
        OpError::ensure(width == w_in, || {
            format!("x has {width} columns, but the weight {} takes {w_in}", inputs[1])
        })?;
        Ok(vec![TensorType::new(inputs[0].dtype, [rows, out])])
    }

    fn operand(&self, input: usize) -> Operand {
        operand(input)
    }

    fn gathers_apart(&self) -> bool {
        true
    }

    fn cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        cost([self.0.live_rows, outputs[0].shape[1], inputs[0].shape[1]], inputs, outputs)
    }

    fn gemms(&self, inputs: &[TensorType]) -> Option<Gemms> {
        Some(gemms_by_rows(LinearGemm::Fprop, self.0, inputs))
    }
}

impl Differentiable for GroupedLinear {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<(), OpError> {
        let Some(dy) = cx.grad(0) else { return Ok(()) };
        let (x, w, starts) = (cx.input(0), cx.input(1), cx.input(STARTS));
        // wgrad comes first: it may be the last op that reads x, so that dx can take x's memory.
        if cx.wants(1) {
            let dw = match by_source(cx) {
                None => {
                    let wgrad = GroupedWgrad { groups: self.0, out: cx.grad_dtype(1) };
                    cx.emit(Role::Wgrad, wgrad, &[dy, x, starts])?[0]
                }
                Some((ranks, starts)) => {
                    let groups = Groups { experts: self.0.experts * ranks, ..self.0 };
                    let wgrad = GroupedWgrad { groups, out: DType::F32 };
                    let of_ranks = cx.emit(Role::Wgrad, wgrad, &[dy, x, starts])?;
                    cx.emit(Role::Wgrad, SumSources { experts: self.0.experts, ranks }, &of_ranks)?[0]
                }
            };
            cx.set_grad(1, dw)?;
        }
        if cx.wants(0) {
            let dx = cx.emit(Role::Dgrad, GroupedDgrad(self.0), &[dy, w, starts])?[0];
            cx.set_grad(0, dx)?;
        }
        Ok(())
    }
}

/// The ranks by whose tokens the rows of an expert are divided, and where those of each begin, if they are
/// ([`DispatchOwn::by_source`]). The gradient of a weight is then summed rank by rank.
fn by_source(cx: &Backward<'_>) -> Option<(usize, ValueId)> {
    let dispatch = cx.producer(STARTS)?;
    let op = (dispatch.code.op() as &dyn Any).downcast_ref::<DispatchOwn>()?;
    op.by_source.then(|| (op.ranks, dispatch.outputs[DispatchOwn::SOURCE_STARTS].value))
}

/// `(dy_co, w_(E*o)i, starts) -> dx_ci`: dx = dy w_e in the rows of expert e. Rows after `starts[E]` are
/// written as zeros.
#[derive(Clone, Copy, Debug)]
pub struct GroupedDgrad(pub Groups);

impl Op for GroupedDgrad {
    fn name(&self) -> &'static str {
        kernel_name(LinearGemm::Dgrad)
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        let [rows, out, w_out, width] = extents(self.name(), "dy", self.0.experts, inputs)?;
        OpError::ensure(out == w_out, || {
            let (weight, experts) = (inputs[1], self.0.experts);
            format!("dy has {out} columns, but the weight {weight} of {experts} experts has {w_out} outputs")
        })?;
        Ok(vec![TensorType::new(inputs[0].dtype, [rows, width])])
    }

    fn operand(&self, input: usize) -> Operand {
        operand(input)
    }

    fn gathers_apart(&self) -> bool {
        true
    }

    fn cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        cost([self.0.live_rows, outputs[0].shape[1], inputs[0].shape[1]], inputs, outputs)
    }

    fn gemms(&self, inputs: &[TensorType]) -> Option<Gemms> {
        Some(gemms_by_rows(LinearGemm::Dgrad, self.0, inputs))
    }
}

/// `(dy_co, x_ci, starts) -> dw_(E*o)i`: dw_e = dy^T x over the rows of expert e. The output accumulates: the
/// gradient of an expert without rows is written as zeros, or stays as it is where dw is added to.
#[derive(Clone, Copy, Debug)]
pub struct GroupedWgrad {
    /// The groups of rows of the ragged tensors.
    pub groups: Groups,
    /// Element type of the gradient.
    pub out: DType,
}

impl Op for GroupedWgrad {
    fn name(&self) -> &'static str {
        kernel_name(LinearGemm::Wgrad)
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity(self.name(), inputs, 3)?;
        let ((rows, out), (x_rows, width)) = (matrix("dy", inputs[0])?, matrix("x", inputs[1])?);
        OpError::ensure(rows == x_rows, || format!("dy has {rows} rows, x has {x_rows}"))?;
        one_dtype(["dy", "x"], inputs)?;
        int_vector("starts", inputs[STARTS], self.groups.experts + 1)?;
        Ok(vec![TensorType::new(self.out, [self.groups.experts * out, width])])
    }

    fn operand(&self, input: usize) -> Operand {
        operand(input)
    }

    fn accumulates(&self, _: usize) -> bool {
        true
    }

    fn cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        cost([inputs[0].shape[1], inputs[1].shape[1], self.groups.live_rows], inputs, outputs)
    }

    fn gemms(&self, inputs: &[TensorType]) -> Option<Gemms> {
        let ((rows, out), (_, width)) = (inputs[0].shape.rows_cols(), inputs[1].shape.rows_cols());
        Some(gemms(LinearGemm::Wgrad, self.groups, [rows, out, width], self.out))
    }
}

/// Rows and columns of input 0, called `name`, and outputs and inputs of one expert of the weight, input 1.
fn extents(op: &str, name: &str, experts: usize, inputs: &[TensorType]) -> Result<[usize; 4], OpError> {
    OpError::arity(op, inputs, 3)?;
    let ((rows, cols), (w_rows, w_cols)) = (matrix(name, inputs[0])?, matrix("the weight", inputs[1])?);
    OpError::ensure(experts > 0 && w_rows % experts == 0, || {
        format!("the weight {} has {w_rows} rows, which {experts} experts do not divide", inputs[1])
    })?;
    one_dtype([name, "the weight"], inputs)?;
    int_vector("starts", inputs[STARTS], experts + 1)?;
    Ok([rows, cols, w_rows / experts, w_cols])
}

/// Checks that the first two inputs have one element type.
fn one_dtype(names: [&str; 2], inputs: &[TensorType]) -> Result<(), OpError> {
    let [a, b] = [inputs[0].dtype, inputs[1].dtype];
    OpError::ensure(a == b && a.is_float(), || {
        format!("{} and {} must have one float type, not {a} and {b}", names[0], names[1])
    })
}

/// The name of the kernels of a GEMM, and of its op.
fn kernel_name(gemm: LinearGemm) -> &'static str {
    match gemm {
        LinearGemm::Fprop => "grouped_linear",
        LinearGemm::Dgrad => "grouped_dgrad",
        LinearGemm::Wgrad => "grouped_wgrad",
    }
}

/// The GEMM of an op with the inputs of fprop or dgrad.
fn gemms_by_rows(kind: LinearGemm, groups: Groups, inputs: &[TensorType]) -> Gemms {
    let ((rows, _), (w_rows, width)) = (inputs[0].shape.rows_cols(), inputs[1].shape.rows_cols());
    gemms(kind, groups, [rows, w_rows / groups.experts, width], inputs[0].dtype)
}

/// The GEMM of an op, of experts with these numbers of rows, outputs and inputs.
fn gemms(kind: LinearGemm, groups: Groups, extents: [usize; 3], out: DType) -> Gemms {
    let [rows, outputs, inputs] = extents;
    let operands = [OperandSource::Input(0), OperandSource::Input(1)];
    let gemm = OpGemm { kind, operands, extents: kind.extents(rows, outputs, inputs) };
    let in_fp8 = move |formats: [Option<ScaledGemm>; 3]| -> Arc<dyn Op> {
        let Some(format) = formats[kind as usize] else { unreachable!("the op has one GEMM") };
        let scaling = format.operands.map(|operand| operand.scaling);
        Arc::new(GroupedScaledMatmul { gemm: kind, groups, out, scaling })
    };
    Gemms { list: vec![gemm], in_fp8: Box::new(in_fp8) }
}

fn operand(input: usize) -> Operand {
    if input == STARTS { Operand::Full } else { Operand::Compute }
}

/// Cost of the GEMMs of all experts: as many operations as one GEMM of these extents.
fn cost(mnk: [usize; 3], inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
    Cost::of_operands(Arithmetic::Gemm { mnk, operands: inputs[0].dtype, scaling: None }, inputs, outputs)
}

impl OnGpu for GroupedLinear {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE, hopper::SOURCE];
}

impl OnGpu for GroupedDgrad {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE, hopper::SOURCE];
}

impl OnGpu for GroupedWgrad {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE, hopper::SOURCE];
}
