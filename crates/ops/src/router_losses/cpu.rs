//! CPU kernels of [`RouterLosses`] and [`RouterLossesGrad`].

use super::{RouterLosses, RouterLossesGrad};
use crate::host::math::{exp, max, sigmoid};
use crate::host::rows::for_row_blocks;
use crate::route::{Score, TINY, score};
use xtrain_tensor::{CpuKernel, Real, TensorType, View, ViewMut, with_real};

impl CpuKernel for RouterLosses {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let (t, e) = inputs[0].ty.shape.rows_cols();
        let [objective, balance, z, terms] = outputs else { unreachable!("three outputs and the terms") };
        with_real!(inputs[0].ty.dtype, T => {
            let batch = RouterBatch::<T>::from_inputs(inputs);
            for_row_blocks(t, [&mut *terms], |rows, [mut terms]| {
                let logits = inputs[0].rows(rows.clone()).reals::<T>();
                let mut shares = vec![T::ZERO; e];
                let mut terms = terms.fresh::<T>();
                for ((token, logits), terms) in rows.zip(logits.chunks_exact(e)).zip(terms.chunks_exact_mut(2)) {
                    terms.fill(T::ZERO);
                    if !batch.is_padding(token) {
                        let lse = batch.token(self.score, logits, &mut shares);
                        terms.copy_from_slice(&[batch.dot(&shares), lse * lse]);
                    }
                }
            });
            let terms = terms.reals::<T>();
            let sum = |n: usize| terms.chunks_exact(2).map(|terms| terms[n].f64()).sum::<f64>();
            let [of_balance, of_z] = [batch.balance_factor * sum(0), batch.z_factor * sum(1)];
            let both = f64::from(self.balance_weight) * of_balance + f64::from(self.z_weight) * of_z;
            for (output, x) in [(objective, both), (balance, of_balance), (z, of_z)] {
                output.store::<T>(&[T::from_f64(x)]);
            }
        });
    }

    /// The two terms of each token.
    fn workspace(&self, inputs: &[TensorType]) -> Vec<TensorType> {
        vec![TensorType::new(inputs[0].dtype, [inputs[0].shape[0], 2])]
    }
}

/// The operands that all tokens share.
struct RouterBatch<'a, T> {
    ids: &'a [i32],
    top_k: usize,
    counts: Vec<T>,
    /// Factor of the sum over tokens of counts . P; 0 if all tokens are padding.
    balance_factor: f64,
    /// Factor of the sum over tokens of logsumexp^2; 0 if all tokens are padding.
    z_factor: f64,
}

impl<'a, T: Real> RouterBatch<'a, T> {
    fn from_inputs(inputs: &[View<'a>]) -> Self {
        let (_, top_k) = inputs[1].ty.shape.rows_cols();
        let numbers = |view: View<'_>| -> Vec<f64> {
            with_real!(view.ty.dtype, C => view.reals::<C>().iter().map(|x| x.f64()).collect())
        };
        let (counts, inv_tokens) = (numbers(inputs[2]), numbers(inputs[3])[0]);
        let tokens = counts.iter().sum::<f64>() / top_k as f64;
        let [balance_factor, z_factor] = match tokens > 0.0 {
            true => [inv_tokens * counts.len() as f64 / tokens, inv_tokens],
            false => [0.0; 2],
        };
        let counts = counts.into_iter().map(T::from_f64).collect();
        RouterBatch { ids: inputs[1].ints(), top_k, counts, balance_factor, z_factor }
    }

    fn is_padding(&self, token: usize) -> bool {
        self.ids[token * self.top_k] < 0
    }

    /// Writes the shares of the experts in a token's scores and returns the logsumexp of its logits.
    fn token(&self, kind: Score, logits: &[T], shares: &mut [T]) -> T {
        score(kind, logits, shares);
        if kind == Score::Sigmoid {
            let sum = shares.iter().copied().sum::<T>() + T::from_f64(TINY);
            shares.iter_mut().for_each(|share| *share /= sum);
        }
        let most = max(logits);
        most + logits.iter().map(|&logit| exp(logit - most)).sum::<T>().ln()
    }

    /// counts . shares
    fn dot(&self, shares: &[T]) -> T {
        self.counts.iter().zip(shares).map(|(&count, &share)| count * share).sum()
    }
}

impl CpuKernel for RouterLossesGrad {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let (t, e) = inputs[0].ty.shape.rows_cols();
        let RouterLosses { score, balance_weight, z_weight } = self.0;
        let [dlogits] = outputs else { unreachable!("one output") };
        with_real!(inputs[0].ty.dtype, T => {
            let batch = RouterBatch::<T>::from_inputs(inputs);
            let of_balance = T::from_f64(f64::from(balance_weight) * batch.balance_factor);
            let of_z = T::from_f64(2.0 * f64::from(z_weight) * batch.z_factor);
            for_row_blocks(t, [dlogits], |rows, [mut dlogits]| {
                let logits = inputs[0].rows(rows.clone()).reals::<T>();
                let mut shares = vec![T::ZERO; e];
                let mut dlogits = dlogits.fresh::<T>();
                for ((token, logits), dlogits) in rows.zip(logits.chunks_exact(e)).zip(dlogits.chunks_exact_mut(e)) {
                    if batch.is_padding(token) {
                        dlogits.fill(T::ZERO);
                        continue;
                    }
                    let lse = batch.token(score, logits, &mut shares);
                    let mean = batch.dot(&shares);
                    for (n, dlogit) in dlogits.iter_mut().enumerate() {
                        let slope = match score {
                            Score::Softmax => shares[n],
                            Score::Sigmoid => shares[n] * (T::ONE - sigmoid(logits[n])),
                        };
                        let p = exp(logits[n] - lse);
                        *dlogit = of_balance * slope * (batch.counts[n] - mean) + of_z * lse * p;
                    }
                }
            });
        });
    }
}
