//! The CPU kernel of [`Dispatch`]: a counting sort.

use super::Dispatch;
use xtrain_tensor::{CpuKernel, View, ViewMut};

impl CpuKernel for Dispatch {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let ids = inputs[0].ints();
        let [starts, counts, rows, sources] = outputs else { unreachable!("four outputs") };
        let mut tokens = vec![0i32; self.experts];
        ids.iter().filter(|&&id| id >= 0).for_each(|&id| tokens[id as usize] += 1);
        let starts = starts.ints();
        starts[0] = 0;
        for (expert, &tokens) in tokens.iter().enumerate() {
            let rows = (tokens as usize).next_multiple_of(self.align);
            starts[expert + 1] = starts[expert] + rows as i32;
        }
        counts.write(&tokens.iter().map(|&tokens| tokens as f32).collect::<Vec<f32>>());
        let (mut next, sources) = (starts.to_vec(), sources.ints());
        sources.fill(-1);
        for (copy, (&id, row)) in ids.iter().zip(rows.ints()).enumerate() {
            *row = -1;
            if id >= 0 {
                *row = next[id as usize];
                sources[*row as usize] = copy as i32;
                next[id as usize] += 1;
            }
        }
    }
}
