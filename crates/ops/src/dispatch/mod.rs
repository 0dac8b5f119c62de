//! The rows of tokens by their experts: where each copy of a token goes, and what each row holds.
//!
//! A tensor of rows by experts is *ragged*: it has room for a fixed number of rows C, the most that any
//! routing needs. The rows of an expert are contiguous and begin at a multiple of `align`. Rows without a
//! token, between two experts and after the last, are zeros in every ragged tensor: its producer writes them.
//! Only its *tail*, the tiles of 128 rows after the one in which the last expert ends, may be undefined
//! instead, if no op reads it ([`xtrain_program::tails`]). The first tile is never in the tail. Kernels read
//! where experts begin; the host never reads it.
//!
//! Ranks that share the experts ([`DispatchOwn`]) know the experts of all their tokens, and have rows for
//! those of their own experts.
//!
//! Shape legend: k experts of a token, e experts, c rows of the capacity; p ranks that share the experts, g
//! tokens of all of them, n own experts of a rank.

mod cpu;
mod cuda;
#[cfg(any(test, feature = "samples"))]
pub(crate) mod samples;
#[cfg(test)]
mod tests;

use crate::matrix;
use crate::on_gpu::OnGpu;
use xtrain_cuda::KernelSource;
use xtrain_program::{Backward, Differentiable, Op, OpError, Operand, Rebuild};
use xtrain_tensor::{DType, TensorType};

/// `ids_tk -> (starts i32[e+1], counts f32[e], rows_tk i32, sources_c i32)`: the first row of each expert and
/// the end of the last one, tokens of each expert, the row of each copy of a token, and for each row the copy
/// (token times k, plus its place among the token's experts) that it holds, -1 for none, or -2 in the tail.
/// Rows of an expert are in the order of tokens.
///
/// A negative id has no row: its entry in `rows` is -1. The outputs are saved for the backward, never
/// recomputed, so no token counts twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dispatch {
    /// e: the number of experts.
    pub experts: usize,
    /// The multiple at which the rows of an expert begin.
    pub align: usize,
}

impl Dispatch {
    /// C: the rows that any routing of so many copies of tokens fits into. Each expert that has a token
    /// wastes at most `align - 1` rows.
    pub fn capacity(&self, copies: usize) -> usize {
        (copies + self.experts.min(copies) * (self.align - 1)) / self.align * self.align
    }
}

impl Op for Dispatch {
    fn name(&self) -> &'static str {
        "dispatch"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("dispatch", inputs, 1)?;
        let (tokens, top_k) = ids_of(inputs[0])?;
        OpError::ensure(self.experts > 0 && self.align > 0, || {
            format!("{} experts, aligned to {}: both must be at least 1", self.experts, self.align)
        })?;
        let capacity = self.capacity(inputs[0].numel());
        ensure_counted("dispatch", [tokens, top_k], capacity)?;
        Ok(vec![
            TensorType::new(DType::I32, [self.experts + 1]),
            TensorType::new(DType::F32, [self.experts]),
            inputs[0],
            TensorType::new(DType::I32, [capacity]),
        ])
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }

    fn rebuild(&self, _: &[bool]) -> Rebuild {
        Rebuild::Never
    }
}

impl Differentiable for Dispatch {
    /// Whole numbers have no gradient.
    fn backward(&self, _: &mut Backward<'_>) -> Result<(), OpError> {
        Ok(())
    }
}

/// `ids_tk i32 -> counts f32[e]`: tokens of each of e experts. A negative id counts for none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CountExperts {
    /// e: the number of experts, more than any id.
    pub experts: usize,
}

impl Op for CountExperts {
    fn name(&self) -> &'static str {
        "count_experts"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("count_experts", inputs, 1)?;
        let (tokens, top_k) = ids_of(inputs[0])?;
        ensure_counted("count_experts", [tokens, top_k], 0)?;
        OpError::ensure(self.experts > 0, || "count_experts counts at least 1 expert, not 0".into())?;
        Ok(vec![TensorType::new(DType::F32, [self.experts])])
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }

    /// Never: its output is smaller than its input.
    fn rebuild(&self, _: &[bool]) -> Rebuild {
        Rebuild::Never
    }
}

impl Differentiable for CountExperts {
    /// Whole numbers have no gradient.
    fn backward(&self, _: &mut Backward<'_>) -> Result<(), OpError> {
        Ok(())
    }
}

/// `(ids_gk i32, place u32[1]) -> (starts i32[n+1], counts f32[n], rows_gk i32, sources_c i32, needed i32[1]
/// [, source_starts i32[n*p+1]])`: [`Dispatch`] in expert parallelism, on a rank that has n of the p * n
/// experts, those from `place * n` on: its local experts. `ids` are those of the tokens of all ranks, in
/// order of ranks, equally many of each. Copies of tokens for experts of other ranks have no row: their entry
/// in `rows` is -1. Rows of an expert are in order of ranks, then of tokens.
///
/// * `counts` are the tokens of own experts, of all ranks.
/// * `needed` is the number of rows that all copies would take. If it is more than C, rows after C are left
///   out: their copies have -1 in `rows`, and experts that would begin after C begin and end there. What is
///   computed then lacks tokens, but nothing is read or written outside of the tensors.
/// * `source_starts` is an output if `by_source`: the rows of expert e that are of tokens of rank r begin at
///   `source_starts[e * p + r]`, a multiple of `align`. `starts` has every p-th entry. A gradient of an
///   expert can then be summed rank by rank.
///
/// `place` is an input so that all ranks have one program. The outputs are saved for the backward, never
/// recomputed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DispatchOwn {
    /// n: experts of a rank.
    pub experts: usize,
    /// p: ranks that share the experts.
    pub ranks: usize,
    /// The multiple at which the rows of an expert begin, or those of an expert and a rank if `by_source`.
    pub align: usize,
    /// The most rows of the ragged tensors, a multiple of `align`; None for as many as any routing needs.
    pub room: Option<usize>,
    /// True if the rows of an expert are divided by the rank of their tokens.
    pub by_source: bool,
}

impl DispatchOwn {
    /// The number of the output `source_starts`.
    pub(crate) const SOURCE_STARTS: usize = 5;

    /// The rows that any routing of the tokens of all ranks fits into, if each token has `top_k` distinct
    /// experts.
    pub fn capacity(&self, tokens: usize, top_k: usize) -> usize {
        let DispatchOwn { experts, align, .. } = *self;
        let splits = self.splits();
        splits * Dispatch { experts, align }.capacity(tokens / splits * top_k.min(experts))
    }

    /// C: the rows of the ragged tensors, the smaller of [`DispatchOwn::capacity`] and `room`.
    pub fn ragged_rows(&self, tokens: usize, top_k: usize) -> usize {
        let capacity = self.capacity(tokens, top_k);
        self.room.map_or(capacity, |room| room.min(capacity))
    }

    /// The rows of a room in which so many of all copies of tokens fit however they are divided: each group
    /// of rows wastes at most `align - 1`.
    pub fn room_for(&self, copies: usize, all_copies: usize) -> usize {
        (copies + self.waste(all_copies)).div_ceil(self.align) * self.align
    }

    /// The least copies for which [`DispatchOwn::room_for`] is at least so many rows.
    pub fn least_copies(&self, rows: usize, all_copies: usize) -> usize {
        let tiles = rows.div_ceil(self.align).saturating_sub(1);
        (tiles * self.align + 1).saturating_sub(self.waste(all_copies))
    }

    /// The most rows without a token between groups, of so many copies.
    fn waste(&self, all_copies: usize) -> usize {
        self.groups().min(all_copies) * (self.align - 1)
    }

    /// Groups of rows of an expert.
    fn splits(&self) -> usize {
        if self.by_source { self.ranks } else { 1 }
    }

    /// Groups of rows.
    fn groups(&self) -> usize {
        self.experts * self.splits()
    }
}

impl Op for DispatchOwn {
    fn name(&self) -> &'static str {
        "dispatch_own"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("dispatch_own", inputs, 2)?;
        let DispatchOwn { experts, ranks, align, room, by_source } = *self;
        let (tokens, top_k) = ids_of(inputs[0])?;
        OpError::ensure(inputs[1].dtype == DType::U32 && inputs[1].numel() == 1, || {
            format!("place must be u32[1], the rank's place among {ranks} ranks, not {}", inputs[1])
        })?;
        OpError::ensure(experts > 0 && ranks > 0 && align > 0, || {
            format!("{experts} experts of {ranks} ranks, aligned to {align}: each must be at least 1")
        })?;
        OpError::ensure(tokens.is_multiple_of(ranks), || {
            format!("ids must be those of equally many tokens of {ranks} ranks, not of {tokens} tokens")
        })?;
        OpError::ensure(room.is_none_or(|room| room > 0 && room.is_multiple_of(align)), || {
            format!("the room of {} rows must be a multiple of {align}, and not 0", room.unwrap_or(0))
        })?;
        ensure_counted("dispatch_own", [tokens, top_k], self.capacity(tokens, top_k))?;
        let rows = self.ragged_rows(tokens, top_k);
        let ints = |len| TensorType::new(DType::I32, [len]);
        let counts = TensorType::new(DType::F32, [experts]);
        let mut outputs = vec![ints(experts + 1), counts, inputs[0], ints(rows), ints(1)];
        outputs.extend(by_source.then(|| ints(experts * ranks + 1)));
        Ok(outputs)
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }

    fn rebuild(&self, _: &[bool]) -> Rebuild {
        Rebuild::Never
    }
}

impl Differentiable for DispatchOwn {
    /// Whole numbers have no gradient.
    fn backward(&self, _: &mut Backward<'_>) -> Result<(), OpError> {
        Ok(())
    }
}

/// Tokens and experts of a token, from the type of `ids`.
pub(crate) fn ids_of(ids: TensorType) -> Result<(usize, usize), OpError> {
    let shape = matrix("ids", ids)?;
    OpError::ensure(ids.dtype == DType::I32, || format!("ids must be i32, not {ids}"))?;
    Ok(shape)
}

/// The most tokens, those of all ranks together: the tokens of an expert are counted in f32, which has all
/// whole numbers up to 2^24. GPU kernels compute rows from these counts.
const MAX_TOKENS: usize = 1 << f32::MANTISSA_DIGITS;

/// Checks that `op` can count the tokens of each expert, and that copies and rows up to `capacity` are I32
/// numbers.
///
/// # Errors
/// If there are more tokens, copies or rows.
fn ensure_counted(op: &str, [tokens, top_k]: [usize; 2], capacity: usize) -> Result<(), OpError> {
    let (most, advice) = (i32::MAX as usize, "use smaller micro-batches or fewer ranks");
    OpError::ensure(tokens <= MAX_TOKENS, || {
        format!("{op} counts up to {MAX_TOKENS} tokens of all ranks, and {tokens} are too many: {advice}")
    })?;
    OpError::ensure(capacity.max(tokens.saturating_mul(top_k)) <= most, || {
        format!(
            "{op} numbers rows and copies up to {most}, and {tokens} tokens of {top_k} experts, with up to \
             {capacity} rows, are too many: {advice}"
        )
    })
}

impl OnGpu for CountExperts {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}

impl OnGpu for DispatchOwn {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}

impl OnGpu for Dispatch {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}
