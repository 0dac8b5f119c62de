//! GEMMs of f32 numbers, with f32 sums. One thread computes them, so that results repeat.
#![allow(unsafe_code, reason = "it calls the gemm crate")]

use gemm::Parallelism;
use std::ops::Range;

/// `op(A) op(B)`, m by n. All three matrices are column-major without gaps. A split sum adds the sums of both
/// halves of k.
pub(super) fn sums(
    sizes: [usize; 3],
    inputs: &[Vec<f32>; 2],
    transposed: [bool; 2],
    is_split: bool,
) -> Vec<f32> {
    let k = sizes[2];
    if !is_split {
        return sums_within(0..k, sizes, inputs, transposed);
    }
    let middle = k.div_ceil(2);
    let mut sums = sums_within(0..middle, sizes, inputs, transposed);
    let rest = sums_within(middle..k, sizes, inputs, transposed);
    sums.iter_mut().zip(rest).for_each(|(sum, rest)| *sum += rest);
    sums
}

/// The sums over a part of k.
fn sums_within(
    part: Range<usize>,
    [m, n, k]: [usize; 3],
    inputs: &[Vec<f32>; 2],
    transposed: [bool; 2],
) -> Vec<f32> {
    let mut sums = vec![0.0f32; m * n];
    if part.is_empty() {
        return sums;
    }
    // Strides of op(A) and op(B): to the next row, and to the next column.
    let a_steps = if transposed[0] { (k, 1) } else { (1, m) };
    let b_steps = if transposed[1] { (n, 1) } else { (1, k) };
    assert!(inputs[0].len() == m * k && inputs[1].len() == k * n && part.end <= k);
    let a = &inputs[0][part.start * a_steps.1..];
    let b = &inputs[1][part.start * b_steps.0..];
    // SAFETY: the matrices have as many elements as the assertion says, and these strides address no others;
    // `sums` is newly allocated.
    unsafe {
        gemm::gemm(
            m,
            n,
            part.len(),
            sums.as_mut_ptr(),
            m as isize,
            1,
            false,
            a.as_ptr(),
            a_steps.1 as isize,
            a_steps.0 as isize,
            b.as_ptr(),
            b_steps.1 as isize,
            b_steps.0 as isize,
            0.0,
            1.0,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
    sums
}
