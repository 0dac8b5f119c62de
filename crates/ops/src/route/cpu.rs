//! CPU kernels of [`Route`] and [`RouteGrad`].

use super::{Route, RouteGrad, Router, Score};
use crate::host::math::{exp, max, sigmoid};
use crate::host::rows::for_row_blocks;
use xtrain_tensor::{CpuKernel, Real, View, ViewMut, with_real};

/// Added to a sum of scores before it divides them, as DeepSeek-V3's code does: all may be 0.
pub(crate) const TINY: f64 = 1e-20;

impl CpuKernel for Route {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let (t, e) = inputs[0].ty.shape.rows_cols();
        let [gates, ids] = outputs else { unreachable!("two outputs") };
        with_real!(inputs[0].ty.dtype, T => {
            let bias = self.0.biased.then(|| inputs[1].reals::<T>());
            let padding = inputs.get(self.0.padding()).map(|padding| padding.ints());
            for_row_blocks(t, [gates, ids], |rows, [mut gates, mut ids]| {
                let logits = inputs[0].rows(rows.clone()).reals::<T>();
                let (mut scores, mut keys) = (vec![T::ZERO; e], vec![T::ZERO; e]);
                let ids = ids.ints().chunks_exact_mut(self.0.top_k);
                let mut gates = gates.fresh::<T>();
                let gates = gates.chunks_exact_mut(self.0.top_k);
                for (((token, logits), ids), gates) in rows.zip(logits.chunks_exact(e)).zip(ids).zip(gates) {
                    if padding.is_some_and(|padding| padding[token] < 0) {
                        ids.fill(-1);
                        gates.fill(T::ZERO);
                        continue;
                    }
                    score(self.0.score, logits, &mut scores);
                    match &bias {
                        None if self.0.orders_logits() => keys.copy_from_slice(logits),
                        None => keys.copy_from_slice(&scores),
                        Some(bias) => {
                            for ((key, &score), &bias) in keys.iter_mut().zip(&scores).zip(bias.iter()) {
                                *key = score + bias;
                            }
                        }
                    }
                    choose(&self.0, &keys, ids);
                    weigh(&self.0, &scores, ids, gates);
                }
            });
        });
    }
}

/// The scores of all experts.
pub(crate) fn score<T: Real>(kind: Score, logits: &[T], scores: &mut [T]) {
    match kind {
        Score::Sigmoid => scores.iter_mut().zip(logits).for_each(|(score, &logit)| *score = sigmoid(logit)),
        Score::Softmax => {
            let most = max(logits);
            scores.iter_mut().zip(logits).for_each(|(score, &logit)| *score = exp(logit - most));
            let sum = sum_as_warp(scores);
            scores.iter_mut().for_each(|score| *score /= sum);
        }
    }
}

/// The sum of `x` in the order of the GPU kernel, in which lane l of a warp adds the elements l, l + 32 and
/// so on.
fn sum_as_warp<T: Real>(x: &[T]) -> T {
    let mut lanes = [T::ZERO; 32];
    x.iter().enumerate().for_each(|(n, &x)| lanes[n % 32] += x);
    for half in [16, 8, 4, 2, 1] {
        (0..half).for_each(|lane| lanes[lane] += lanes[lane + half]);
    }
    lanes[0]
}

/// Writes the best experts by their keys.
fn choose<T: Real>(router: &Router, keys: &[T], ids: &mut [i32]) {
    let of_group = keys.len() / router.groups;
    let mut allowed = vec![true; keys.len()];
    if router.groups > 1 {
        let sums: Vec<T> = keys.chunks_exact(of_group).map(two_best).collect();
        let mut groups = vec![0; router.top_groups];
        best(&sums, &mut vec![true; sums.len()], &mut groups);
        for (group, allowed) in allowed.chunks_exact_mut(of_group).enumerate() {
            allowed.fill(groups.contains(&(group as i32)));
        }
    }
    best(keys, &mut allowed, ids);
}

/// The sum of the two largest keys; the key, if there is one.
fn two_best<T: Real>(keys: &[T]) -> T {
    let mut ids = vec![0; keys.len().min(2)];
    best(keys, &mut vec![true; keys.len()], &mut ids);
    ids.iter().map(|&id| keys[id as usize]).sum()
}

/// Writes the indices of the largest keys of those that are left, best first, and takes them away.
fn best<T: Real>(keys: &[T], left: &mut [bool], ids: &mut [i32]) {
    for id in ids {
        let candidates = (0..keys.len()).filter(|&n| left[n]);
        let better = |a: T, b: T| a > b || (b.f64().is_nan() && !a.f64().is_nan());
        let first = candidates.reduce(|first, n| if better(keys[n], keys[first]) { n } else { first });
        let Some(first) = first else { unreachable!("more experts than a token chooses") };
        left[first] = false;
        *id = first as i32;
    }
}

/// Writes the gates of the chosen experts.
fn weigh<T: Real>(router: &Router, scores: &[T], ids: &[i32], gates: &mut [T]) {
    let scale = T::from_f64(router.scale.into());
    let mut sum = T::ZERO;
    for (gate, &id) in gates.iter_mut().zip(ids) {
        *gate = scores[id as usize];
        sum += *gate;
    }
    let divisor = if router.normalise { sum + T::from_f64(TINY) } else { T::ONE };
    gates.iter_mut().for_each(|gate| *gate = *gate / divisor * scale);
}

impl CpuKernel for RouteGrad {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let (t, e) = inputs[1].ty.shape.rows_cols();
        let k = self.0.top_k;
        let [dlogits] = outputs else { unreachable!("one output") };
        with_real!(inputs[1].ty.dtype, T => {
            for_row_blocks(t, [dlogits], |rows, [mut dlogits]| {
                let (dgates, logits) = (inputs[0].rows(rows.clone()).reals::<T>(), inputs[1].rows(rows.clone()).reals::<T>());
                let ids = &inputs[2].ints()[rows.start * k..rows.end * k];
                let mut scores = vec![T::ZERO; e];
                let mut dlogits = dlogits.fresh::<T>();
                let rows = dgates.chunks_exact(k).zip(logits.chunks_exact(e)).zip(ids.chunks_exact(k));
                for (((dgates, logits), ids), dlogits) in rows.zip(dlogits.chunks_exact_mut(e)) {
                    if ids[0] < 0 {
                        dlogits.fill(T::ZERO);
                        continue;
                    }
                    score(self.0.score, logits, &mut scores);
                    grad_row(&self.0, dgates, &scores, ids, dlogits);
                }
            });
        });
    }
}

/// The gradient of a token's logits. With s for scores and S for the sum by which they are divided, the
/// gradients of the chosen scores are scale (dgate - sum(dgate s) / S) / S, or scale dgate.
fn grad_row<T: Real>(router: &Router, dgates: &[T], scores: &[T], ids: &[i32], dlogits: &mut [T]) {
    let scale = T::from_f64(router.scale.into());
    let chosen = || dgates.iter().zip(ids).map(|(&dgate, &id)| (dgate, scores[id as usize], id as usize));
    let (mut sum, mut dot) = (T::ZERO, T::ZERO);
    for (dgate, score, _) in chosen() {
        sum += score;
        dot += dgate * score;
    }
    let (divisor, mean) = match router.normalise {
        true => (sum + T::from_f64(TINY), dot / (sum + T::from_f64(TINY))),
        false => (T::ONE, T::ZERO),
    };
    let dscore = |dgate: T| scale * (dgate - mean) / divisor;
    dlogits.fill(T::ZERO);
    match router.score {
        Score::Sigmoid => {
            for (dgate, score, id) in chosen() {
                dlogits[id] = dscore(dgate) * score * (T::ONE - score);
            }
        }
        Score::Softmax => {
            let mut all = T::ZERO;
            for (dgate, score, _) in chosen() {
                all += dscore(dgate) * score;
            }
            for (dlogit, &score) in dlogits.iter_mut().zip(scores) {
                *dlogit = -(score * all);
            }
            for (dgate, score, id) in chosen() {
                dlogits[id] += dscore(dgate) * score;
            }
        }
    }
}
