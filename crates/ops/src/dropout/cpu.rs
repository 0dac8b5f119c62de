//! CPU kernel of [`Dropout`].

use super::Dropout;
use crate::host::rows::for_row_blocks;
use xtrain_tensor::philox::unit;
use xtrain_tensor::{CpuKernel, Philox, Real, View, ViewMut, with_real};

impl CpuKernel for Dropout {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        if self.p == 0.0 {
            return; // In place: y already holds x.
        }
        let (_, d) = outputs[0].ty.shape.rows_cols();
        let &[seed_low, seed_high, step, first_token] = inputs[1].counters() else {
            unreachable!("rng has four words")
        };
        let rng = Philox::new(u64::from(seed_high) << 32 | u64::from(seed_low), step, self.site);
        let start = u64::from(first_token) * d as u64;
        let [y] = outputs else { unreachable!("one output") };
        let (dtype, numel) = (y.ty.dtype, y.ty.numel());
        with_real!(dtype, T => {
            for_row_blocks(numel, [y], |elements, [mut y]| {
                apply(rng, start + elements.start as u64, self.p, &mut y.reals::<T>());
            });
        });
    }
}

/// Applies dropout to `x`, whose first element has index `first` in the stream.
fn apply<T: Real>(rng: Philox, first: u64, p: f32, x: &mut [T]) {
    let scale = T::ONE / (T::ONE - T::from_f64(f64::from(p)));
    // A dropped element becomes 0 even if it was not finite.
    let dropped = |x: T, word: u32| if unit(word) >= p { x * scale } else { T::ZERO };
    // Four elements share a block of random words. Elements before the first whole block draw one word each.
    let head = (first.next_multiple_of(4) - first).min(x.len() as u64) as usize;
    let (edge, rest) = x.split_at_mut(head);
    for (i, x) in edge.iter_mut().enumerate() {
        *x = dropped(*x, rng.word(first + i as u64));
    }
    let block = (first + head as u64) / 4;
    for (b, x) in rest.chunks_mut(4).enumerate() {
        for (x, word) in x.iter_mut().zip(rng.block(block + b as u64)) {
            *x = dropped(*x, word);
        }
    }
}
