//! CPU kernels of [`TakePart`], [`PlacePart`] and [`JoinColumns`].

use super::{JoinColumns, PlacePart, TakePart};
use xtrain_program::{CutRegion, TensorCut};
use xtrain_tensor::{CpuKernel, TensorType, View, ViewMut};

impl CpuKernel for TakePart {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let (whole, to) = (inputs[0].bytes(), outputs[0].bytes());
        for PartLine { of_part, in_part, in_whole } in lines(&self.0, inputs[0].ty, place(inputs)) {
            to[in_part..][..of_part].copy_from_slice(&whole[in_whole..][..of_part]);
        }
    }
}

impl CpuKernel for PlacePart {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let (part, whole) = (inputs[0].bytes(), outputs[0].ty);
        let to = outputs[0].bytes();
        to.fill(0);
        for PartLine { of_part, in_part, in_whole } in lines(&self.0, whole, place(inputs)) {
            to[in_whole..][..of_part].copy_from_slice(&part[in_part..][..of_part]);
        }
    }
}

impl CpuKernel for JoinColumns {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let (rows, cols) = inputs[0].ty.shape.rows_cols();
        let (lines, width) = (rows / self.ranks, inputs[0].ty.dtype.bytes(cols));
        let (parts, to) = (inputs[0].bytes(), outputs[0].bytes());
        for (n, part) in parts.chunks_exact(width.max(1)).enumerate() {
            let (rank, line) = (n / lines, n % lines);
            to[(line * self.ranks + rank) * width..][..width].copy_from_slice(part);
        }
    }
}

fn place(inputs: &[View<'_>]) -> usize {
    inputs[1].counters()[0] as usize
}

/// The bytes of a line of a region in a part, and where they begin.
struct PartLine {
    of_part: usize,
    in_part: usize,
    in_whole: usize,
}

fn lines(cut: &TensorCut, whole: TensorType, place: usize) -> impl Iterator<Item = PartLine> {
    let (n, bytes) = (cut.groups.size, whole.dtype.bytes(1));
    cut.regions(whole).into_iter().flat_map(move |CutRegion { in_whole, in_part, lines, width }| {
        (0..lines).map(move |line| PartLine {
            of_part: width * bytes,
            in_part: (in_part + line * width) * bytes,
            in_whole: (in_whole + (line * n + place) * width) * bytes,
        })
    })
}
