//! CPU kernels of [`MuonMomentum`], [`Orthogonalize`] and [`MuonStep`], in f32.

use super::{COEFFICIENTS, EPS, MuonMomentum, MuonStep, Orthogonalize, STEPS, pieces, scale};
use crate::gemm_work_bytes;
use crate::host::math::vectorized;
use crate::host::matmul::{Addend, MatmulOperand, matmul};
use crate::host::rows::{for_row_blocks, sum_over_rows};
use std::ops::Range;
use xtrain_tensor::{CpuKernel, DType, TensorType, View, ViewMut};

impl CpuKernel for MuonMomentum {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let (coefficient, skips) = (inputs[0].scalar::<f32>(), inputs[1].counters()[0] != 0);
        let (momentum, rest) = (self.momentum as f32, (1.0 - self.momentum) as f32);
        let (moments, update) = outputs.split_at_mut(self.matrices());
        let rows = inputs[MuonMomentum::CONTROLS].ty.shape[0];
        let grads = inputs[MuonMomentum::CONTROLS..].iter().skip(1).step_by(2);
        let mut slots = update[0].chunks(moments[0].ty.numel());
        for ((moment, grad), mut update) in moments.iter_mut().zip(grads).zip(&mut slots) {
            if skips {
                update.bytes().fill(0);
                continue;
            }
            let moment = &mut moment.slice_mut(0..moment.ty.numel());
            for_row_blocks(rows, [moment, &mut update], |rows, [mut moment, mut update]| {
                let grad = grad.rows(rows).reals::<f32>();
                let (mut moment, mut update) = (moment.reals::<f32>(), update.fresh::<f32>());
                vectorized(
                    #[inline(always)]
                    || {
                        for ((m, u), g) in moment.iter_mut().zip(update.iter_mut()).zip(&*grad) {
                            let g = g * coefficient;
                            *m = momentum * *m + rest * g;
                            *u = momentum * *m + rest * g;
                        }
                    },
                );
            });
        }
        slots.for_each(|mut unused| unused.bytes().fill(0));
    }
}

impl CpuKernel for Orthogonalize {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let [out, x, y, gram, square] = outputs else { unreachable!("an output and the workspace") };
        let [n, p, cols] = pieces(inputs[0].ty).expect("its type is checked");
        let layout = Pieces { rows: n * p, before: self.first * p, cols };
        for range in self.ranges() {
            let (rows, side) = (range.len(), range.len().min(cols));
            let mut part = Iteration {
                rows,
                cols,
                x: x.slice_mut(0..rows * cols),
                y: y.slice_mut(0..rows * cols),
                gram: gram.slice_mut(0..side * side),
                square: square.slice_mut(0..side * side),
            };
            layout.read(inputs[0], range.clone(), &mut part.x);
            if part.normalize() {
                (0..STEPS).for_each(|_| part.step());
            }
            layout.write(part.x.view(), range, scale(rows, cols), out);
        }
        for (_, padding) in layout.runs(self.rows()..layout.rows) {
            out.slice_mut(padding.start * cols..padding.end * cols).bytes().fill(0);
        }
    }

    /// A part, its product with the products of its rows or columns, these, and their square.
    fn workspace(&self, inputs: &[TensorType]) -> Vec<TensorType> {
        let cols = pieces(inputs[0]).map_or(0, |[_, _, cols]| cols);
        let [part, products] = self.largest(cols);
        [part, part, products, products].map(|elements| TensorType::new(DType::F32, [elements])).into()
    }

    fn work_bytes(&self, inputs: &[TensorType], threads: usize) -> usize {
        let cols = pieces(inputs[0]).map_or(0, |[_, _, cols]| cols);
        let of_part = |&rows: &usize| {
            let (side, long) = (rows.min(cols), rows.max(cols));
            let gemms = [[side, side, long], [side, side, side], [rows, cols, side]];
            gemms.map(|mnk| gemm_work_bytes(mnk, DType::F32, 1, threads)).into_iter().max().unwrap_or(0)
        };
        self.parts.iter().map(of_part).max().unwrap_or(0)
    }
}

/// The places of rows in pieces, which begin with a later one.
#[derive(Clone, Copy)]
struct Pieces {
    /// Rows of all pieces.
    rows: usize,
    /// Rows before the first one.
    before: usize,
    cols: usize,
}

impl Pieces {
    /// Runs of these rows that follow each other in the pieces, and their places there.
    fn runs(self, rows: Range<usize>) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
        let until_end = self.rows - self.before;
        let [first, rest] = [rows.start..rows.end.min(until_end), rows.start.max(until_end)..rows.end];
        let place = move |rows: Range<usize>| {
            let start = (self.before + rows.start) % self.rows;
            (rows.clone(), start..start + rows.len())
        };
        [first, rest].into_iter().filter(|rows| !rows.is_empty()).map(place)
    }

    /// Copies the rows of a part to `to`.
    fn read(self, from: View<'_>, part: Range<usize>, to: &mut ViewMut<'_>) {
        for (rows, held) in self.runs(part.clone()) {
            let to =
                &mut to.slice_mut((rows.start - part.start) * self.cols..(rows.end - part.start) * self.cols);
            for_row_blocks(rows.len(), [to], |rows, [mut to]| {
                let first = (held.start + rows.start) * self.cols;
                let elements = to.ty.numel();
                to.bytes().copy_from_slice(from.slice(first..first + elements).bytes());
            });
        }
    }

    /// Writes the rows of a part, scaled.
    fn write(self, from: View<'_>, part: Range<usize>, scale: f32, to: &mut ViewMut<'_>) {
        for (rows, held) in self.runs(part.clone()) {
            let to = &mut to.slice_mut(held.start * self.cols..held.end * self.cols);
            for_row_blocks(rows.len(), [to], |block, [mut to]| {
                let first = (rows.start - part.start + block.start) * self.cols;
                let from = from.slice(first..first + to.ty.numel()).reals::<f32>();
                to.fresh::<f32>().iter_mut().zip(&*from).for_each(|(to, x)| *to = scale * x);
            });
        }
    }
}

/// The iteration of a part.
struct Iteration<'a> {
    rows: usize,
    cols: usize,
    x: ViewMut<'a>,
    y: ViewMut<'a>,
    gram: ViewMut<'a>,
    square: ViewMut<'a>,
}

impl Iteration<'_> {
    /// Divides x by its norm; false if it is 0, and so is the result.
    fn normalize(&mut self) -> bool {
        let (rows, x) = (self.rows, self.x.view());
        let squares = sum_over_rows::<f64, 0>(rows, 1, [], |rows, [], sum| {
            let x = x.slice(rows.start * self.cols..rows.end * self.cols).reals::<f32>();
            sum[0] += x.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>();
        });
        if squares[0] == 0.0 {
            return false;
        }
        let norm = (squares[0].sqrt() as f32).max(EPS as f32);
        for_row_blocks(rows, [&mut self.x], |_, [mut x]| {
            x.reals::<f32>().iter_mut().for_each(|x| *x /= norm)
        });
        true
    }

    fn step(&mut self) {
        let Iteration { rows, cols, x, y, gram, square } = self;
        let (rows, cols, side) = (*rows, *cols, (*rows).min(*cols));
        let [a, b, c] = COEFFICIENTS.map(|coefficient| coefficient as f32);
        let is_wide = rows <= cols;
        {
            let x = MatmulOperand::new(x.view(), rows, cols);
            match is_wide {
                true => matmul(x, x.t(), gram, Addend::None),
                false => matmul(x.t(), x, gram, Addend::None),
            }
            let g = MatmulOperand::new(gram.view(), side, side);
            matmul(g, g, square, Addend::None);
        }
        combine(side, gram, b, c, square.view());
        {
            let (x, g) =
                (MatmulOperand::new(x.view(), rows, cols), MatmulOperand::new(gram.view(), side, side));
            match is_wide {
                true => matmul(g, x, y, Addend::None),
                false => matmul(x, g, y, Addend::None),
            }
        }
        combine(rows, x, a, 1.0, y.view());
    }
}

/// Replaces x by `a x + b y`, in which both have these rows.
fn combine(rows: usize, x: &mut ViewMut<'_>, a: f32, b: f32, y: View<'_>) {
    let width = x.ty.numel() / rows.max(1);
    for_row_blocks(rows, [x], |rows, [mut x]| {
        let y = y.slice(rows.start * width..rows.end * width).reals::<f32>();
        let mut x = x.reals::<f32>();
        vectorized(
            #[inline(always)]
            || x.iter_mut().zip(&*y).for_each(|(x, y)| *x = a * *x + b * y),
        );
    });
}

impl CpuKernel for MuonStep {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let (lr, skips) = (inputs[0].scalar::<f32>(), inputs[1].counters()[0] != 0);
        let decay = self.weight_decay as f32;
        let mut outputs = outputs.iter_mut();
        for (n, copy) in self.copies.iter().enumerate() {
            let master = outputs.next().expect("a master of each matrix");
            let (rows, elements) = (master.ty.shape[0], master.ty.numel());
            let update = inputs[2].slice(n * elements..(n + 1) * elements);
            if !skips {
                let cols = elements / rows.max(1);
                for_row_blocks(rows, [&mut master.slice_mut(0..elements)], |rows, [mut master]| {
                    let update = update.slice(rows.start * cols..rows.end * cols).reals::<f32>();
                    let mut master = master.reals::<f32>();
                    vectorized(
                        #[inline(always)]
                        || master.iter_mut().zip(&*update).for_each(|(w, o)| *w -= lr * (o + decay * *w)),
                    );
                });
            }
            if copy.is_some() {
                let (copy, master) = (outputs.next().expect("its copy"), master.view());
                let copy = &mut copy.slice_mut(0..elements);
                for_row_blocks(rows, [copy], |rows, [mut copy]| {
                    copy.write::<f32>(&master.rows(rows).reals())
                });
            }
        }
    }
}
