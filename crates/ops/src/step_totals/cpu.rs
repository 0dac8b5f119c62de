//! CPU kernels of [`RankWords`] and [`StepTotals`].

use super::{RankWords, StepTotals, WORDS};
use xtrain_tensor::{CpuKernel, View, ViewMut};

impl CpuKernel for RankWords {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let number = |n: usize| f64::from(inputs[n].scalar::<f32>());
        let has_bad_amax = inputs.get(4).is_some_and(|amax| !amax.scalar::<f32>().is_finite());
        let wishes_to_stop = inputs[3].counters()[0] != 0;
        let flag = |is_set: bool| f64::from(u8::from(is_set));
        outputs[0].write::<f64>(&[
            inputs[0].scalar::<f64>(),
            number(1),
            number(2),
            flag(has_bad_amax),
            flag(wishes_to_stop),
        ]);
    }
}

impl CpuKernel for StepTotals {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let words = inputs[0].reals::<f64>();
        let mut sums = [0.0; WORDS];
        for of_rank in words.as_chunks::<WORDS>().0 {
            sums.iter_mut().zip(of_rank).for_each(|(sum, word)| *sum += word);
        }
        let [sum_of_squares, loss, objective, bad_amaxes, stops] = sums;
        let squared_norm = if self.has_whole_gradients { words[0] } else { sum_of_squares };
        let amax = if bad_amaxes > 0.0 { f32::INFINITY } else { 0.0 };
        let numbers = [squared_norm.sqrt() as f32, loss as f32, objective as f32, amax];
        outputs.iter_mut().zip(numbers).for_each(|(output, number)| output.write::<f32>(&[number]));
        outputs[4].counters()[0] = u32::from(stops > 0.0);
    }
}
