//! CPU kernels of [`Permute`], [`PermuteByTree`], [`Unpermute`], [`UnpermuteTree`] and the ops of gates.

use super::{Permute, PermuteByTree, PermuteGates, Unpermute, UnpermuteGates, UnpermuteTree};
use crate::host::rows::{add_into, for_row_blocks};
use crate::host::tree;
use crate::tail::TAIL_SOURCE;
use rayon::prelude::*;
use xtrain_tensor::{CpuKernel, View, ViewMut, with_real};

impl CpuKernel for Permute {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let (sources, (_, top_k)) = (inputs[1].ints(), inputs[2].ty.shape.rows_cols());
        let (_, width) = inputs[0].ty.shape.rows_cols();
        let row_bytes = inputs[0].ty.dtype.bytes(width);
        let x = inputs[0].bytes();
        // Rows are copied as bytes: without arithmetic there is nothing to widen.
        outputs[0].bytes().par_chunks_mut(row_bytes.max(1)).zip(sources).for_each(|(row, &source)| {
            match usize::try_from(source) {
                Ok(copy) => row.copy_from_slice(&x[copy / top_k * row_bytes..][..row_bytes]),
                Err(_) if self.tail.is_undefined() && source == TAIL_SOURCE => row.fill(0xFF),
                Err(_) => row.fill(0),
            }
        });
    }
}

impl CpuKernel for PermuteByTree {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        self.permute().run(&inputs[..3], outputs);
    }
}

impl CpuKernel for Unpermute {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let (tokens, top_k) = inputs[2].ty.shape.rows_cols();
        let (_, width) = inputs[0].ty.shape.rows_cols();
        let [x] = outputs else { unreachable!("one output") };
        with_real!(inputs[0].ty.dtype, T => {
            for_row_blocks(tokens, [x], |tokens, [mut x]| {
                let rows = &inputs[2].ints()[tokens.start * top_k..tokens.end * top_k];
                let mut x = x.fresh::<T>();
                for ((token, x), rows) in tokens.zip(x.chunks_exact_mut(width)).zip(rows.chunks_exact(top_k)) {
                    x.fill(0.0);
                    for row in rows.iter().filter_map(|&row| usize::try_from(row).ok()) {
                        add_into(x, &inputs[0].rows(row..row + 1).reals::<T>());
                    }
                    if let Some(shared) = inputs.get(3) {
                        add_into(x, &shared.rows(token..token + 1).reals::<T>());
                    }
                }
            });
        });
    }
}

impl CpuKernel for UnpermuteTree {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let (tokens, top_k) = inputs[2].ty.shape.rows_cols();
        let (_, width) = inputs[0].ty.shape.rows_cols();
        let [x] = outputs else { unreachable!("one output") };
        with_real!(inputs[0].ty.dtype, T => {
            for_row_blocks(tokens, [x], |tokens, [mut x]| {
                let mut x = x.fresh::<T>();
                for (token, x) in tokens.zip(x.chunks_exact_mut(width.max(1))) {
                    let [rows, ids] = [2, 3].map(|n| &inputs[n].ints()[token * top_k..][..top_k]);
                    let group_of = |id: i32| id as usize % self.experts / self.of_group();
                    let of_group = |group: usize| {
                        let own = rows.iter().zip(ids).filter(|(row, id)| **row >= 0 && group_of(**id) == group);
                        own.fold(None, |sum, (at, _)| tree::plus(sum, Some(tree::row(inputs[0], *at as usize))))
                    };
                    let all = tree::sum(&of_group, 0, self.groups);
                    tree::write_sum(x, all, inputs.get(4).map(|shared| tree::row(*shared, token)));
                }
            });
        });
    }
}

impl CpuKernel for PermuteGates {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        gather(inputs[0], inputs[1].ints(), &mut outputs[0]);
    }
}

impl CpuKernel for UnpermuteGates {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        gather(inputs[0], inputs[2].ints(), &mut outputs[0]);
    }
}

/// Writes the elements of these indices; 0 for negative ones.
fn gather(from: View<'_>, indices: &[i32], to: &mut ViewMut<'_>) {
    with_real!(from.ty.dtype, T => {
        let from = from.reals::<T>();
        for (to, &index) in to.fresh::<T>().iter_mut().zip(indices) {
            *to = usize::try_from(index).map_or(0.0, |index| from[index]);
        }
    });
}
