//! CPU kernels of [`LinearCrossEntropy`] and [`LinearCrossEntropyGrad`].
//!
//! A chunk is a GEMM, then its rows on all cores, then, for gradients, two GEMMs more. The passes over a row find it in the cache.
//! How tokens are cut changes the order in which dw is summed and nothing else, except where a chunk has a single token: the GEMM crate
//! sums such products in another order.

use super::{IGNORED, LinearCrossEntropy, LinearCrossEntropyGrad};
use crate::host::gemm::{Mat, MatMut, gemm};
use crate::host::math::{exp, max, sum, vectorized};
use crate::host::rows::{for_row_blocks2, store};
use xtrain_tensor::formats::round_bf16;
use xtrain_tensor::{CpuKernel, DType, Real, View, ViewMut, with_real};

impl CpuKernel for LinearCrossEntropy {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let (scalars, workspace) = outputs.split_at_mut(2);
        let grads = Grads { dx: None, dw: None };
        with_real!(inputs[0].ty.dtype, T => chunks::<T>(self, inputs, scalars, grads, workspace));
    }
}

impl CpuKernel for LinearCrossEntropyGrad {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let (scalars, rest) = outputs.split_at_mut(2);
        let (grads, workspace) = rest.split_at_mut(rest.len() - 2);
        let mut grads = grads.iter_mut();
        let dx = if self.dx { grads.next() } else { None };
        let grads = Grads { dx, dw: grads.next() };
        with_real!(inputs[0].ty.dtype, T => chunks::<T>(&self.loss, inputs, scalars, grads, workspace));
    }
}

/// The gradients to write, where they are wanted.
struct Grads<'a, 'm> {
    dx: Option<&'a mut ViewMut<'m>>,
    dw: Option<&'a mut ViewMut<'m>>,
}

fn chunks<T: Real>(
    loss: &LinearCrossEntropy,
    inputs: &[View<'_>],
    scalars: &mut [ViewMut<'_>],
    grads: Grads<'_, '_>,
    workspace: &mut [ViewMut<'_>],
) {
    let [x, w, targets, inv_targets] = inputs else { unreachable!("four inputs") };
    let [logits, terms] = workspace else { unreachable!("two tensors of workspace") };
    let ((t, d), (v, _)) = (x.ty.shape.rows_cols(), w.ty.shape.rows_cols());
    let targets = targets.ints();
    check_targets(targets, v);
    let rows = Rows {
        inv_targets: inv_targets.scalar(),
        z_loss: T::of(f64::from(loss.z_loss)),
        bf16: x.ty.dtype == DType::BF16,
        gradients: grads.dx.is_some() || grads.dw.is_some(),
    };
    let (x, w) = (x.reals::<T>(), w.reals::<T>());
    let (mut logits, mut terms) = (logits.reals::<T>(), terms.reals::<T>());
    let mut dx = grads.dx.map(|dx| dx.reals::<T>());
    let mut dw_holds_a_sum = grads.dw.as_ref().is_some_and(|dw| dw.accumulate);
    let mut dw = grads.dw.map(|dw| dw.reals::<T>());

    let w_vd = Mat::new(&w, v, d);
    for tokens in loss.chunks(t) {
        let (first, c) = (tokens.start, tokens.len());
        let x_cd = Mat::new(&x[first * d..][..c * d], c, d);
        let logits = &mut logits[..c * v];
        gemm(T::ONE, x_cd, w_vd.t(), MatMut::new(logits, c, v), false);
        for_row_blocks2(logits, v, &mut terms[2 * first..][..2 * c], 2, |row, logits, terms| {
            let made = logits.chunks_exact_mut(v).zip(terms.chunks_exact_mut(2));
            for ((logits, terms), &target) in made.zip(&targets[first + row..]) {
                terms.copy_from_slice(&rows.run(logits, target));
            }
        });
        let dlogits_cv = Mat::new(logits, c, v);
        if let Some(dx) = &mut dx {
            let dx_cd = MatMut::new(&mut dx[first * d..][..c * d], c, d);
            gemm(T::ONE, dlogits_cv, w_vd, dx_cd, false);
        }
        if let Some(dw) = &mut dw {
            gemm(T::ONE, dlogits_cv.t(), x_cd, MatMut::new(dw, v, d), dw_holds_a_sum);
            dw_holds_a_sum = true;
        }
    }

    // Where nothing is to be predicted the mean is 0, whatever the inverse of no targets is.
    let any = targets.iter().any(|&target| target != IGNORED);
    for (k, scalar) in scalars.iter_mut().enumerate() {
        let total = sum(t, |token| terms[2 * token + k].f64());
        let mean = if any { T::of(rows.inv_targets.f64() * total) } else { T::ZERO };
        let accumulate = scalar.accumulate;
        store(&mut scalar.reals::<T>(), &[mean], accumulate);
    }
}

fn check_targets(targets: &[i32], vocab: usize) {
    for (token, &target) in targets.iter().enumerate() {
        let valid = target == IGNORED || usize::try_from(target).is_ok_and(|target| target < vocab);
        assert!(
            valid,
            "target {target} of token {token} is not in a vocabulary of {vocab}: the loader must refuse it"
        );
    }
}

/// What is done with a row of logits.
struct Rows<T> {
    inv_targets: T,
    z_loss: T,
    /// Whether logits and their gradients are rounded to bf16.
    bf16: bool,
    gradients: bool,
}

impl<T: Real> Rows<T> {
    /// The token's terms of the objective and of the cross-entropy, not yet divided. The logits become their gradients
    /// where these are wanted, else nothing of use.
    fn run(&self, logits: &mut [T], target: i32) -> [T; 2] {
        if target == IGNORED {
            logits.fill(T::ZERO);
            return [T::ZERO; 2];
        }
        let target = target as usize;
        vectorized(
            #[inline(always)]
            || {
                if self.bf16 {
                    round(logits);
                }
                // Every exponent is at most 0 with the largest logit taken off, so nothing overflows.
                let largest = max(logits);
                let correct = logits[target] - largest;
                let total = exponentials(logits, largest);
                let log_total = total.ln();
                let lse = largest + log_total;
                let cross_entropy = log_total - correct;
                if self.gradients {
                    let scale = self.inv_targets * (T::ONE + T::of(2.0) * self.z_loss * lse) / total;
                    for l in logits.iter_mut() {
                        *l *= scale;
                    }
                    logits[target] -= self.inv_targets;
                    if self.bf16 {
                        round(logits);
                    }
                }
                [cross_entropy + self.z_loss * lse * lse, cross_entropy]
            },
        )
    }
}

/// Replaces every logit by e^(logit - largest); returns their sum, of 16 interleaved partial sums.
#[inline(always)]
fn exponentials<T: Real>(logits: &mut [T], largest: T) -> T {
    let mut lanes = [T::ZERO; 16];
    let mut add = |chunk: &mut [T]| {
        for (lane, l) in lanes.iter_mut().zip(chunk) {
            *l = exp(*l - largest);
            *lane += *l;
        }
    };
    let mut chunks = logits.chunks_exact_mut(16);
    chunks.by_ref().for_each(&mut add);
    add(chunks.into_remainder());
    lanes.iter().copied().sum()
}

/// Rounds to bf16.
#[inline(always)]
fn round<T: Real>(values: &mut [T]) {
    for v in values {
        *v = T::of(f64::from(round_bf16(v.f64() as f32)));
    }
}
