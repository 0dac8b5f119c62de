//! CPU kernels of [`RankWords`] and [`StepTotals`].

use super::{FLAGS, Losses, PlacedUnits, RankWords, SKIPPED, Squares, StepTotals};
use xtrain_tensor::{CpuKernel, TensorType, View, ViewMut};

impl CpuKernel for RankWords {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let types: Vec<TensorType> = inputs.iter().map(|input| input.ty).collect();
        let Losses { micro_batches, columns, stop } = RankWords::losses(&types);
        let mut words = inputs[0].reals::<f64>().to_vec();
        let losses: Vec<f64> =
            inputs[1..stop].iter().flat_map(|losses| losses.reals::<f32>().to_vec()).map(f64::from).collect();
        for column in 0..columns {
            words.extend((0..micro_batches).map(|n| losses[columns * n + column]));
        }
        let skips = |amax: f32| amax.is_nan() || amax.abs() >= SKIPPED;
        let has_bad_amax = inputs.get(stop + 1).is_some_and(|amax| skips(amax.scalar()));
        let asks_to_stop = inputs[stop].counters()[0] != 0;
        words.extend([has_bad_amax, asks_to_stop].map(|is_set| f64::from(u8::from(is_set))));
        outputs[0].write::<f64>(&words);
    }
}

impl CpuKernel for StepTotals {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let words = inputs[0].reals::<f64>();
        let ranks: Vec<&[f64]> = words.chunks(self.words()).collect();
        let squared_norm = match &self.squares {
            Squares::Whole => ranks[0][0],
            squares => {
                let of_gradient = |gradient: PlacedUnits| {
                    let place = gradient.before..gradient.before + gradient.units.units;
                    gradient.ranks().flat_map(|rank| ranks[rank][place.clone()].iter()).sum::<f64>()
                };
                squares.placed().into_iter().map(of_gradient).sum()
            }
        };
        let of_parts = |parts: &[&[f64]], word: usize| match parts {
            [alone] => alone[word],
            parts => f64::from(tree(parts, word)),
        };
        let micro_batches: Vec<&[&[f64]]> = ranks.chunks(self.parts).collect();
        // Of a word of each rank, and so many after it: the first of all ranks, then the second of all.
        let total = |first: usize, count: usize| -> f64 {
            let words = first..first + count;
            words.flat_map(|word| micro_batches.iter().map(move |parts| of_parts(parts, word))).sum()
        };
        let losses: Vec<f64> = (0..self.columns())
            .map(|column| total(self.squares.words() + column * self.micro_batches, self.micro_batches))
            .collect();
        let flags = self.words() - FLAGS;
        let amax = if total(flags, 1) > 0.0 { SKIPPED } else { 0.0 };
        let numbers = [squared_norm.sqrt() as f32, losses[0] as f32, losses[1] as f32, amax];
        outputs.iter_mut().zip(numbers).for_each(|(output, number)| output.write::<f32>(&[number]));
        outputs[4].counters()[0] = u32::from(total(flags + 1, 1) > 0.0);
        if let Some(sources) = outputs.get_mut(5) {
            sources.write::<f32>(&losses[2..].iter().map(|&sum| sum as f32).collect::<Vec<_>>());
        }
    }
}

/// The sum of a word of some ranks, as many as a power of two, as a binary tree.
fn tree(ranks: &[&[f64]], word: usize) -> f32 {
    match ranks {
        [rank] => rank[word] as f32,
        ranks => {
            let (left, right) = ranks.split_at(ranks.len() / 2);
            tree(left, word) + tree(right, word)
        }
    }
}
