//! CPU kernels of [`SumOwners`] and [`SelectOwner`].

use super::{SelectOwner, SumOwners};
use crate::host::rows::for_row_blocks;
use crate::host::tree;
use xtrain_tensor::{CpuKernel, View, ViewMut, with_real};

impl CpuKernel for SumOwners {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let (x, shared) = (inputs[0], inputs.get(Self::SHARED).filter(|_| !self.like));
        let (tokens, top_k) = inputs[1].ty.shape.rows_cols();
        let (ranks, width) = (x.ty.shape[0], x.ty.shape[2]);
        let [sum] = outputs else { unreachable!("one output") };
        with_real!(x.ty.dtype, T => {
            for_row_blocks(tokens, [sum], |block, [mut sum]| {
                let mut sum = sum.fresh::<T>();
                for (token, sum) in block.zip(sum.chunks_exact_mut(width.max(1))) {
                    let ids = &inputs[1].ints()[token * top_k..][..top_k];
                    let owns = |rank| ids.iter().any(|&id| owner(id, self.experts) == Some(rank));
                    let of_rank = |rank| owns(rank).then(|| tree::row(x, rank * tokens + token));
                    let all = tree::sum(&of_rank, 0, ranks);
                    tree::write_sum(sum, all, shared.map(|shared| tree::row(*shared, token)));
                }
            });
        });
    }
}

/// The rank that owns the expert; None for a negative id.
fn owner(id: i32, experts: usize) -> Option<usize> {
    usize::try_from(id).ok().map(|id| id / experts)
}

impl CpuKernel for SelectOwner {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let (ids, ranks) = (inputs[1].ints(), inputs[0].ty.shape[0]);
        with_real!(inputs[0].ty.dtype, T => {
            let x = inputs[0].reals::<T>();
            for (copy, (y, &id)) in outputs[0].fresh::<T>().iter_mut().zip(ids).enumerate() {
                let rank = owner(id, self.experts).filter(|rank| *rank < ranks);
                *y = rank.map_or(0.0, |rank| x[rank * ids.len() + copy]);
            }
        });
    }
}
