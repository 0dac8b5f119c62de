//! CPU kernel of [`TokenLogprobs`]: rows in parallel.

use super::{IGNORED, TokenLogprobs};
use crate::host::math::{Rounding, exponentials, max, vectorized};
use rayon::prelude::*;
use xtrain_tensor::{CpuKernel, Real, TensorType, View, ViewMut, with_real};

impl CpuKernel for TokenLogprobs {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        with_real!(inputs[0].ty.dtype, T => run::<T>(self.top, inputs, outputs));
    }

    /// A row of exponentials for each thread.
    fn work_bytes(&self, inputs: &[TensorType], threads: usize) -> usize {
        threads * inputs[0].dtype.bytes(inputs[0].shape[1])
    }
}

/// The outputs of a token.
struct TokenScores<T> {
    logprob: T,
    rank: i32,
    top: Vec<(i32, T)>,
}

fn run<T: Real>(top: usize, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
    let (targets, vocab) = (inputs[1].ints(), inputs[0].ty.shape[1]);
    let logits = inputs[0].reals::<T>();
    let rows = logits.par_chunks_exact(vocab).zip(targets);
    let found: Vec<TokenScores<T>> = rows
        .map_init(|| vec![T::ZERO; vocab], |scratch, (logits, &target)| row(top, logits, target, scratch))
        .collect();
    let ranks = outputs[1].ints();
    ranks.iter_mut().zip(&found).for_each(|(rank, found)| *rank = found.rank);
    outputs[0].write(&found.iter().map(|found| found.logprob).collect::<Vec<T>>());
    if let [_, _, ids, logprobs] = outputs {
        let all = || found.iter().flat_map(|found| &found.top);
        ids.ints().iter_mut().zip(all()).for_each(|(id, found)| *id = found.0);
        logprobs.write(&all().map(|found| found.1).collect::<Vec<T>>());
    }
}

fn row<T: Real>(top: usize, logits: &[T], target: i32, scratch: &mut [T]) -> TokenScores<T> {
    let mut found = TokenScores { logprob: T::ZERO, rank: -1, top: Vec::with_capacity(top) };
    if target == IGNORED && top == 0 {
        return found;
    }
    scratch.copy_from_slice(logits);
    let (highest, log_total) = vectorized(
        #[inline(always)]
        || {
            let highest = max(scratch);
            (highest, exponentials(scratch, highest, Rounding::None).ln())
        },
    );
    // With the highest logit subtracted first, the difference of two large numbers does not lose bits.
    let logprob = |id: usize| (logits[id] - highest) - log_total;
    if target != IGNORED {
        let target = usize::try_from(target).ok().filter(|target| *target < logits.len());
        let target = target.unwrap_or_else(|| panic!("a target is not in a vocabulary of {}", logits.len()));
        let own = logits[target];
        let before = |(id, &logit): (usize, &T)| logit > own || logit == own && id < target;
        let rank = logits.iter().enumerate().filter(|&entry| before(entry)).count();
        (found.logprob, found.rank) = (logprob(target), rank as i32);
    }
    let mut last: Option<usize> = None;
    for _ in 0..top {
        let is_after = |id: usize| match last {
            None => true,
            Some(last) => logits[id] < logits[last] || logits[id] == logits[last] && id > last,
        };
        let rest = (0..logits.len()).filter(|&id| is_after(id));
        // The first of equal ones stays.
        let next = rest.reduce(|best, id| if logits[id] > logits[best] { id } else { best });
        // A logit that is not a number has no place in the order.
        let Some(next) = next else {
            found.top.push((-1, T::from_f64(f64::NAN)));
            continue;
        };
        found.top.push((next as i32, logprob(next)));
        last = Some(next);
    }
    found
}
