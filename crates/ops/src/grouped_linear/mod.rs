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
use crate::tail;
use crate::{int_vector, matrix};
use std::any::Any;
use std::sync::Arc;
use xtrain_cuda::KernelSource;
use xtrain_program::{
    Arithmetic, Backward, Cost, Differentiable, Gemms, LinearGemm, Op, OpError, OpGemm, Operand,
    OperandSource, RaggedOp, Role, ScaledGemm, Tail, ValueId,
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
/// once. Rows after `starts[E]` are zeros.
#[derive(Clone, Copy, Debug)]
pub struct GroupedLinear {
    /// The groups of rows of the ragged tensors.
    pub groups: Groups,
    /// The tail of y.
    pub tail: Tail,
}

impl GroupedLinear {
    /// With zeros in the tail.
    pub const fn new(groups: Groups) -> Self {
        GroupedLinear { groups, tail: Tail::Zeros }
    }
}

impl Op for GroupedLinear {
    fn name(&self) -> &'static str {
        kernel_name(LinearGemm::Fprop)
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        let [rows, width, out, w_in] = extents(self.name(), "x", self.groups.experts, inputs)?;
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
        cost_by_rows(self.groups, self.tail, inputs, outputs)
    }

    fn gemms(&self, inputs: &[TensorType]) -> Option<Gemms> {
        Some(gemms_by_rows(LinearGemm::Fprop, self.groups, inputs))
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
                    let wgrad = GroupedWgrad { groups: self.groups, out: cx.grad_dtype(1) };
                    cx.emit(Role::Wgrad, wgrad, &[dy, x, starts])?[0]
                }
                Some((ranks, starts)) => {
                    let groups = Groups { experts: self.groups.experts * ranks, ..self.groups };
                    let wgrad = GroupedWgrad { groups, out: DType::F32 };
                    let of_ranks = cx.emit(Role::Wgrad, wgrad, &[dy, x, starts])?;
                    cx.emit(Role::Wgrad, SumSources { experts: self.groups.experts, ranks }, &of_ranks)?[0]
                }
            };
            cx.set_grad(1, dw)?;
        }
        if cx.wants(0) {
            let dx = cx.emit(Role::Dgrad, GroupedDgrad::new(self.groups), &[dy, w, starts])?[0];
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
/// zeros.
#[derive(Clone, Copy, Debug)]
pub struct GroupedDgrad {
    /// The groups of rows of the ragged tensors.
    pub groups: Groups,
    /// The tail of dx.
    pub tail: Tail,
}

impl GroupedDgrad {
    /// With zeros in the tail.
    pub const fn new(groups: Groups) -> Self {
        GroupedDgrad { groups, tail: Tail::Zeros }
    }
}

impl Op for GroupedDgrad {
    fn name(&self) -> &'static str {
        kernel_name(LinearGemm::Dgrad)
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        let [rows, out, w_out, width] = extents(self.name(), "dy", self.groups.experts, inputs)?;
        OpError::ensure(out == w_out, || {
            let (weight, experts) = (inputs[1], self.groups.experts);
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
        cost_by_rows(self.groups, self.tail, inputs, outputs)
    }

    fn gemms(&self, inputs: &[TensorType]) -> Option<Gemms> {
        Some(gemms_by_rows(LinearGemm::Dgrad, self.groups, inputs))
    }
}

/// Fprop and dgrad: they read the rows of groups of their first input, and write those of their output.
macro_rules! ragged_by_rows {
    ($($op:ty),*) => {
        $(impl RaggedOp for $op {
            fn reads_tail(&self, input: usize) -> bool {
                input != 0
            }

            fn tail(&self, _: usize) -> Option<Tail> {
                Some(self.tail)
            }

            fn with_tail(&self, tail: Tail) -> Option<Arc<dyn Op>> {
                Some(Arc::new(Self { tail, ..*self }))
            }

            fn live_rows(&self) -> Option<usize> {
                Some(self.groups.live_rows)
            }
        })*
    };
}

ragged_by_rows!(GroupedLinear, GroupedDgrad);

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
        let mnk = [inputs[0].shape[1], inputs[1].shape[1], self.groups.live_rows];
        let [dy, x] = [0, 1].map(|n| self.groups.bytes(inputs[n], inputs[n].shape[0]));
        cost(mnk, inputs, dy + x + outputs[0].bytes() as f64)
    }

    fn gemms(&self, inputs: &[TensorType]) -> Option<Gemms> {
        let ((rows, out), (_, width)) = (inputs[0].shape.rows_cols(), inputs[1].shape.rows_cols());
        Some(gemms(LinearGemm::Wgrad, self.groups, [rows, out, width], self.out))
    }
}

impl RaggedOp for GroupedWgrad {
    fn reads_tail(&self, input: usize) -> bool {
        input > 1
    }

    fn live_rows(&self) -> Option<usize> {
        Some(self.groups.live_rows)
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
        Arc::new(GroupedScaledMatmul { gemm: kind, groups, out, scaling, tail: Tail::Zeros })
    };
    Gemms { list: vec![gemm], in_fp8: Box::new(in_fp8) }
}

fn operand(input: usize) -> Operand {
    if input == STARTS { Operand::Full } else { Operand::Compute }
}

/// Cost of the GEMMs of all experts: as many operations as one GEMM of these extents, with so many bytes.
fn cost(mnk: [usize; 3], inputs: &[TensorType], bytes: f64) -> Cost {
    Cost::of_kernel(Arithmetic::Gemm { mnk, operands: inputs[0].dtype, scaling: None }, bytes)
}

/// Cost of fprop or dgrad.
fn cost_by_rows(groups: Groups, tail: Tail, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
    let rows = outputs[0].shape[0];
    let bytes =
        groups.bytes(inputs[0], rows) + inputs[1].bytes() as f64 + tail::bytes(outputs[0], rows, tail);
    cost([groups.live_rows, outputs[0].shape[1], inputs[0].shape[1]], inputs, bytes)
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
