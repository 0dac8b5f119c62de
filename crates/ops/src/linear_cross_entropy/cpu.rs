//! CPU kernels of [`LinearCrossEntropy`] and [`LinearCrossEntropyGrad`].
//!
//! Tokens without a target cost nothing: the others are gathered first. For each chunk: the GEMM of its
//! logits, its rows in parallel, and, for gradients, two more GEMMs. All passes over a row are made while it
//! is in the cache. The chunks affect only the order in which dw is summed, except that the GEMM of a chunk
//! of one token sums its logits in another order.

use super::{IGNORED, LinearCrossEntropy, LinearCrossEntropyGrad};
use crate::host::math::{Rounding, exponentials, max, vectorized};
use crate::host::matmul::{Addend, MatmulOperand, matmul};
use crate::host::rows::for_row_blocks;
use xtrain_tensor::{CpuKernel, HostTensor, Pooled, Real, TensorType, View, ViewMut, with_real};

impl CpuKernel for LinearCrossEntropy {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let written = WrittenMemory::split(self, outputs);
        let grads = Grads { dx: None, dw: None };
        with_real!(inputs[0].ty.dtype, T => chunks::<T>(self, inputs, written, grads));
    }

    fn workspace(&self, inputs: &[TensorType]) -> Vec<TensorType> {
        self.workspace(inputs)
    }

    fn work_bytes(&self, inputs: &[TensorType], _: usize) -> usize {
        gathered_bytes(self, inputs[0])
    }
}

impl CpuKernel for LinearCrossEntropyGrad {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let mut written = WrittenMemory::split(&self.loss, outputs);
        let mut grads = std::mem::take(&mut written.grads).iter_mut();
        let dx = if self.dx { grads.next() } else { None };
        let grads = Grads { dx, dw: grads.next() };
        with_real!(inputs[0].ty.dtype, T => chunks::<T>(&self.loss, inputs, written, grads));
    }

    fn workspace(&self, inputs: &[TensorType]) -> Vec<TensorType> {
        self.loss.workspace(inputs)
    }

    fn work_bytes(&self, inputs: &[TensorType], _: usize) -> usize {
        gathered_bytes(&self.loss, inputs[0])
    }
}

/// Memory of the gathered rows of a chunk of `x`.
fn gathered_bytes(loss: &LinearCrossEntropy, x: TensorType) -> usize {
    let (tokens, width) = x.shape.rows_cols();
    x.dtype.bytes(loss.longest(tokens) * width)
}

/// Memory that a kernel writes: its outputs, then its workspace.
pub(super) struct WrittenMemory<'a, 'm> {
    pub(super) scalars: &'a mut [ViewMut<'m>],
    /// An output or workspace.
    pub(super) terms: &'a mut ViewMut<'m>,
    /// The outputs after the scalars and the terms.
    pub(super) grads: &'a mut [ViewMut<'m>],
    pub(super) logits: &'a mut ViewMut<'m>,
}

impl<'a, 'm> WrittenMemory<'a, 'm> {
    pub(super) fn split(loss: &LinearCrossEntropy, outputs: &'a mut [ViewMut<'m>]) -> Self {
        let (scalars, rest) = outputs.split_at_mut(2);
        let (output, rest) = rest.split_at_mut(loss.outputs() - 2);
        let (grads, workspace) = rest.split_at_mut(rest.len() - 1 - usize::from(!loss.terms.are_output()));
        match (output, workspace) {
            ([terms], [logits]) | ([], [terms, logits]) => WrittenMemory { scalars, terms, grads, logits },
            _ => unreachable!("the terms are an output or workspace"),
        }
    }
}

/// The gradients to write, if any.
struct Grads<'a, 'm> {
    dx: Option<&'a mut ViewMut<'m>>,
    dw: Option<&'a mut ViewMut<'m>>,
}

/// Computes the loss chunk by chunk.
fn chunks<T: Real>(
    loss: &LinearCrossEntropy,
    inputs: &[View<'_>],
    WrittenMemory { scalars, terms, logits, .. }: WrittenMemory<'_, '_>,
    grads: Grads<'_, '_>,
) {
    let [x, w, targets, inv_targets] = inputs else { unreachable!("four inputs") };
    let ((t, d), (v, _)) = (x.ty.shape.rows_cols(), w.ty.shape.rows_cols());
    let targets = targets.ints();
    check_targets(targets, v);
    let rows = LogitRows {
        inv_targets: inv_targets.scalar(),
        z_loss: T::from_f64(f64::from(loss.z_loss)),
        gradients: grads.dx.is_some() || grads.dw.is_some(),
        columns: loss.terms.columns(),
    };
    let w_vd = MatmulOperand::new(*w, v, d);
    let Grads { mut dx, mut dw } = grads;
    let mut dw_holds_a_sum = dw.as_ref().is_some_and(|dw| dw.accumulate);
    // No chunk is longer than the longest of all tokens, which the logits have room for.
    let longest = LinearCrossEntropy { chunk_tokens: loss.longest(t), ..*loss };
    let gathered = tokens_to_gather(targets, longest.chunk_tokens);
    for tokens in longest.chunks(gathered.as_ref().map_or(t, Vec::len)) {
        let (first, c) = (tokens.start, tokens.len());
        let chunk =
            gathered.as_ref().map(|gathered| ChunkTokens::new(*x, targets, &gathered[tokens.clone()]));
        let (x_cd, targets_c) = match &chunk {
            None => (x.rows(tokens.clone()), &targets[tokens.clone()]),
            Some(ChunkTokens { x, targets }) => (View::new(x.ty(), x.bytes()), &targets[..]),
        };
        let x_cd = MatmulOperand::new(x_cd, c, d);
        let mut logits = logits.slice_mut(0..c * v);
        matmul(x_cd, w_vd.t(), &mut logits, Addend::None);
        let mut terms = terms.slice_mut(rows.columns * first..rows.columns * tokens.end);
        rows.run_chunk(&mut logits, targets_c, &mut terms);
        let dlogits_cv = MatmulOperand::new(logits.view(), c, v);
        if let Some(dx) = &mut dx {
            matmul(dlogits_cv, w_vd, &mut dx.slice_mut(first * d..tokens.end * d), Addend::None);
        }
        if let Some(dw) = &mut dw {
            let addend = if dw_holds_a_sum { Addend::Previous } else { Addend::None };
            matmul(dlogits_cv.t(), x_cd, dw, addend);
            dw_holds_a_sum = true;
        }
    }
    if let Some(gathered) = gathered {
        spread(terms, t, &gathered);
        if let Some(dx) = dx {
            spread(dx, t, &gathered);
        }
        if let Some(dw) = dw.filter(|_| !dw_holds_a_sum) {
            dw.bytes().fill(0);
        }
    }
    rows.sum(&terms.view(), targets, scalars);
}

/// The tokens with a target, unless all have one. Some without one are among them if chunks of at most
/// `longest` tokens would have a single token else, whose bits differ.
fn tokens_to_gather(targets: &[i32], longest: usize) -> Option<Vec<usize>> {
    let has_target = |token: &usize| targets[*token] != IGNORED;
    let mut tokens: Vec<usize> = (0..targets.len()).filter(has_target).collect();
    let mut others = (0..targets.len()).filter(|token| !has_target(token));
    while !tokens.is_empty() && longest > 1 && tokens.len() / tokens.len().div_ceil(longest) < 2 {
        let Some(other) = others.next() else { break };
        tokens.push(other);
    }
    tokens.sort_unstable();
    (tokens.len() < targets.len()).then_some(tokens)
}

/// Some tokens of a batch.
struct ChunkTokens {
    x: HostTensor,
    targets: Vec<i32>,
}

impl ChunkTokens {
    fn new(x: View<'_>, targets: &[i32], tokens: &[usize]) -> Self {
        let mut gathered = HostTensor::zeros(TensorType::new(x.ty.dtype, [tokens.len(), x.ty.shape[1]]));
        let row = x.ty.dtype.bytes(x.ty.shape[1]);
        for (to, &token) in gathered.bytes_mut().chunks_exact_mut(row).zip(tokens) {
            to.copy_from_slice(x.rows(token..token + 1).bytes());
        }
        ChunkTokens { x: gathered, targets: tokens.iter().map(|&token| targets[token]).collect() }
    }
}

/// Moves the first rows of a matrix of `t` rows to the `places`, which ascend. All other rows become 0.
fn spread(matrix: &mut ViewMut<'_>, t: usize, places: &[usize]) {
    let row = matrix.ty.bytes() / t;
    let bytes = matrix.bytes();
    let mut end = t;
    // A row never moves to the front, so from the last one on none is overwritten before it moves.
    for (from, &to) in places.iter().enumerate().rev() {
        bytes.copy_within(from * row..(from + 1) * row, to * row);
        bytes[(to + 1) * row..end * row].fill(0);
        end = to;
    }
    bytes[..end * row].fill(0);
}

/// # Panics
/// If a target is neither [`IGNORED`] nor in the vocabulary.
pub(super) fn check_targets(targets: &[i32], vocab: usize) {
    for (token, &target) in targets.iter().enumerate() {
        let valid = target == IGNORED || usize::try_from(target).is_ok_and(|target| target < vocab);
        assert!(
            valid,
            "target {target} of token {token} is not in a vocabulary of {vocab}: the loader must refuse it"
        );
    }
}

/// The computation on rows of logits.
pub(super) struct LogitRows<T> {
    pub(super) inv_targets: T,
    pub(super) z_loss: T,
    /// True if logits are replaced by their gradients.
    pub(super) gradients: bool,
    /// Columns of the terms; the third one is computed if there is one.
    pub(super) columns: usize,
}

impl<T: Real> LogitRows<T> {
    /// Runs all rows of a chunk and writes the terms of its tokens.
    pub(super) fn run_chunk<'a>(&self, logits: &mut ViewMut<'a>, targets: &[i32], terms: &mut ViewMut<'a>) {
        for_row_blocks(targets.len(), [logits, terms], |rows, [logits, mut terms]| {
            self.run_all(logits, &targets[rows], &mut terms.fresh::<T>());
        });
    }

    /// Sums the terms of all tokens into the two scalars.
    pub(super) fn sum(&self, terms: &View<'_>, targets: &[i32], scalars: &mut [ViewMut<'_>]) {
        // Without targets, inv_targets may be infinite; the means are 0.
        let any = targets.iter().any(|&target| target != IGNORED);
        let terms = terms.reals::<T>();
        for (k, scalar) in scalars.iter_mut().enumerate() {
            let total: f64 = terms.chunks_exact(self.columns).map(|terms| terms[k].f64()).sum();
            let mean = if any { T::from_f64(self.inv_targets.f64() * total) } else { T::ZERO };
            scalar.store(&[mean]);
        }
    }

    /// Writes the terms of some tokens. With `gradients`, replaces their logits by dlogits.
    fn run_all(&self, mut logits: ViewMut<'_>, targets: &[i32], terms: &mut [T]) {
        let v = logits.ty.numel() / targets.len();
        let mut each = |logits: &mut [T]| {
            let rows = logits.chunks_exact_mut(v).zip(terms.chunks_exact_mut(self.columns));
            rows.zip(targets).for_each(|((logits, terms), &target)| {
                terms.copy_from_slice(&self.run(logits, target)[..self.columns]);
            });
        };
        if self.gradients {
            return each(&mut logits.reals::<T>());
        }
        // Without gradients the row is scratch: it is neither rounded nor written back.
        let mut copy = Pooled::take(logits.ty.numel());
        logits.view().widen_into(&mut copy);
        each(&mut copy);
    }

    /// The token's terms of the objective and of the cross-entropy, before the division, and whether its
    /// target is the likeliest token. The logits become their gradients if these are wanted, else their
    /// contents are of no use.
    fn run(&self, logits: &mut [T], target: i32) -> [T; 3] {
        if target == IGNORED {
            logits.fill(T::ZERO);
            return [T::ZERO; 3];
        }
        let target = target as usize;
        vectorized(
            #[inline(always)]
            || {
                // With the maximum subtracted, every exponent is at most 0, so nothing overflows.
                let max_logit = max(logits);
                let is_likeliest = self.columns > 2
                    && logits[target] == max_logit
                    && logits[..target].iter().all(|logit| *logit != max_logit);
                let correct = logits[target] - max_logit;
                let total = exponentials(logits, max_logit, Rounding::None);
                let log_total = total.ln();
                let lse = max_logit + log_total;
                let cross_entropy = log_total - correct;
                if self.gradients {
                    let scale = self.inv_targets * (T::ONE + T::from_f64(2.0) * self.z_loss * lse) / total;
                    for l in logits.iter_mut() {
                        *l *= scale;
                    }
                    logits[target] -= self.inv_targets;
                }
                let is_likeliest = if is_likeliest { T::ONE } else { T::ZERO };
                [cross_entropy + self.z_loss * lse * lse, cross_entropy, is_likeliest]
            },
        )
    }
}
