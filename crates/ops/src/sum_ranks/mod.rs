//! The sum over ranks of what each has sent: the second half of a reduce-scatter, after
//! [`AllToAll`](crate::collective::AllToAll).

mod cpu;
mod cuda;
#[cfg(any(test, feature = "samples"))]
mod samples;
#[cfg(test)]
mod tests;

use crate::collective::AllGather;
use crate::matrix;
use crate::on_gpu::OnGpu;
use xtrain_cuda::KernelSource;
use xtrain_program::{Backward, Differentiable, Op, OpError, Operand, Role, ValueId};
use xtrain_tensor::{DType, Shape, TensorType};

/// The largest number of ranks: that of the GPU kernel's counter.
const MAX_RANKS: usize = 1 << 13;

/// `x [n, ...] -> sum f32 [...]`, f32 or bf16: the sum over the ranks in f32, as a binary tree.
///
/// The left half of a tree of n ranks is the largest power of two of ranks before the last: (x_0 + x_1) + x_2
/// for three, (x_0 + x_1) + (x_2 + x_3) for four. An accumulating output is added to this sum. So every
/// device, and every rank that receives equal pieces, computes equal bits.
#[derive(Clone, Copy, Debug)]
pub struct SumRanks;

impl Op for SumRanks {
    fn name(&self) -> &'static str {
        "sum_ranks"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("sum_ranks", inputs, 1)?;
        let ranks = inputs[0].shape.split_first().filter(|(n, _)| (1..=MAX_RANKS).contains(*n));
        let is_summed = matches!(inputs[0].dtype, DType::F32 | DType::BF16);
        match ranks {
            Some((_, piece)) if is_summed => {
                Ok(vec![TensorType { dtype: DType::F32, shape: Shape::new(piece) }])
            }
            _ => Err(OpError(format!(
                "sum_ranks takes the f32 or bf16 tensors of 1 to {MAX_RANKS} ranks, one after the other, not {}",
                inputs[0]
            ))),
        }
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }

    fn accumulates(&self, _: usize) -> bool {
        true
    }
}

/// `x_ntd -> sum_td`, f32 or bf16: the sum over n ranks of the parts of activations that each has computed,
/// as that of [`SumRanks`], rounded once.
///
/// x must be the output of [`AllToAll`](crate::collective::AllToAll), to which each rank has passed its part
/// for the tokens of all ranks. The gradient of that part is the gathered gradient of the sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SumParts {
    /// The type of the sum; None for that of x.
    pub out: Option<DType>,
}

impl Op for SumParts {
    fn name(&self) -> &'static str {
        "sum_parts"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        let dtype = self.out.unwrap_or(inputs.first().map_or(DType::F32, |x| x.dtype));
        let sum = SumRanks.infer(inputs)?[0];
        OpError::ensure(dtype == DType::F32 || dtype == inputs[0].dtype, || {
            format!("the sum of {} is f32 or of its type, not {dtype}", inputs[0])
        })?;
        Ok(vec![sum.with_dtype(dtype)])
    }
}

impl Differentiable for SumParts {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<(), OpError> {
        match cx.grad(0).filter(|_| cx.wants(0)) {
            Some(dsum) => gather_gradient(cx, dsum),
            None => Ok(()),
        }
    }
}

/// Sets the gradient of what this rank passed to the exchange that computes input 0: that of the sums of all
/// ranks, of which `dsum` is this rank's.
pub(crate) fn gather_gradient(cx: &mut Backward<'_>, dsum: ValueId) -> Result<(), OpError> {
    let exchange = cx.producer(0).and_then(|i| Some((i.code.op().collective()?.1, i.inputs[0])));
    let (groups, part) = exchange.ok_or_else(|| OpError("x must be what ranks have exchanged".into()))?;
    let gather = AllGather { groups, first: 0, rows: cx.ty(part).shape[0] };
    let gathered = cx.emit(Role::Dgrad, gather, &[dsum])?[0];
    cx.set_exchanged_grad(0, gathered)
}

/// `x_(n*p*o)i -> sum f32_(n*o)i`, f32 or bf16: the sum over p ranks of the gradients of n experts, with o
/// rows of each expert and rank, in order of experts, then of ranks. It is the tree of [`SumRanks`]: that of
/// [`GroupedWgrad`](crate::grouped_linear::GroupedWgrad) by the rank of tokens
/// ([`DispatchOwn`](crate::dispatch::DispatchOwn)) has the bits of a sum over as many micro-batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SumSources {
    /// n: experts.
    pub experts: usize,
    /// p: ranks whose tokens the experts had.
    pub ranks: usize,
}

impl Op for SumSources {
    fn name(&self) -> &'static str {
        "sum_sources"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("sum_sources", inputs, 1)?;
        let SumSources { experts, ranks } = *self;
        let (rows, width) = matrix("x", inputs[0])?;
        OpError::ensure(experts > 0 && (1..=MAX_RANKS).contains(&ranks), || {
            format!("{experts} experts of {ranks} ranks: at least 1 expert, and 1 to {MAX_RANKS} ranks")
        })?;
        let is_summed = matches!(inputs[0].dtype, DType::F32 | DType::BF16);
        OpError::ensure(is_summed && rows.is_multiple_of(experts * ranks), || {
            format!(
                "x must be f32 or bf16 rows of {experts} experts and {ranks} ranks each, not {}",
                inputs[0]
            )
        })?;
        Ok(vec![TensorType::new(DType::F32, [rows / ranks, width])])
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }

    fn accumulates(&self, _: usize) -> bool {
        true
    }
}

impl OnGpu for SumSources {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}

impl OnGpu for SumParts {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}

impl OnGpu for SumRanks {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}
