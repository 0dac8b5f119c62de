//! Matrix-vector products that read the weights once, in their stored type. Decoding a token spends its time
//! here.
//!
//! Each output is a sum of its own, in 16 interleaved partial sums, so it does not depend on how outputs are
//! split over threads.

use super::math::{dot, vectorized};
use rayon::prelude::*;
use xtrain_tensor::{Real, Stored};

/// Rows of weights that are multiplied at a time, sharing the loads of x.
pub(crate) const ROWS_AT_ONCE: usize = 4;

/// Number of weights that one task reads.
const TASK: usize = 64 * 1024;

/// y_o = w_oi x_i + bias_o, with i >= 1.
pub(crate) fn gemv<S: Stored>(x: &[S::Real], w: &[S], bias: Option<&[S::Real]>, y: &mut [S::Real]) {
    let i = x.len();
    let outputs = TASK.div_ceil(i).next_multiple_of(ROWS_AT_ONCE);
    let task = |n: usize, y: &mut [S::Real]| {
        vectorized(
            #[inline(always)]
            || products(x, &w[n * outputs * i..][..y.len() * i], y),
        );
        if let Some(bias) = bias {
            y.iter_mut().zip(&bias[n * outputs..]).for_each(|(y, bias)| *y += *bias);
        }
    };
    match w.len() <= TASK {
        true => task(0, y),
        false => y.par_chunks_mut(outputs).enumerate().for_each(|(n, y)| task(n, y)),
    }
}

#[inline(always)]
fn products<S: Stored>(x: &[S::Real], w: &[S], y: &mut [S::Real]) {
    let i = x.len();
    let (quads, rest) = y.as_chunks_mut::<ROWS_AT_ONCE>();
    let mut rows = w.chunks_exact(ROWS_AT_ONCE * i);
    for (y, w) in quads.iter_mut().zip(&mut rows) {
        *y = dots(x, std::array::from_fn(|k| &w[k * i..][..i]));
    }
    for (y, w) in rest.iter_mut().zip(rows.remainder().chunks_exact(i)) {
        *y = dot(x, w);
    }
}

/// The dot products of `x` with each of `w`, summed in the order of [`dot`]. Written out for four rows, so
/// that all partial sums stay in registers.
#[inline(always)]
pub(crate) fn dots<S: Stored>(x: &[S::Real], w: [&[S]; ROWS_AT_ONCE]) -> [S::Real; ROWS_AT_ONCE] {
    let zeros = [S::Real::ZERO; 16];
    let (mut p, mut q, mut r, mut s) = (zeros, zeros, zeros, zeros);
    let (x, x_rest) = x.as_chunks::<16>();
    let [(a, a_rest), (b, b_rest), (c, c_rest), (d, d_rest)] = w.map(|w| w.as_chunks::<16>());
    for ((((x, a), b), c), d) in x.iter().zip(a).zip(b).zip(c).zip(d) {
        for l in 0..16 {
            p[l] += x[l] * a[l].real();
            q[l] += x[l] * b[l].real();
            r[l] += x[l] * c[l].real();
            s[l] += x[l] * d[l].real();
        }
    }
    for (l, x) in x_rest.iter().enumerate() {
        p[l] += *x * a_rest[l].real();
        q[l] += *x * b_rest[l].real();
        r[l] += *x * c_rest[l].real();
        s[l] += *x * d_rest[l].real();
    }
    [p, q, r, s].map(|lanes| lanes.iter().copied().sum())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{on_threads, seed};
    use xtrain_tensor::Philox;
    use xtrain_tensor::real::bf16;

    fn normal(n: usize, site: u32) -> Vec<f32> {
        let mut x = vec![0.0; n];
        Philox::new(seed(), 0, site).fill_normal(1.0, &mut x);
        x
    }

    #[test]
    fn an_output_does_not_depend_on_the_other_outputs() {
        // Several tasks, and a number of outputs that is not a multiple of four.
        let (o, i) = (1031, 203);
        let (x, w, bias) = (normal(i, 0), normal(o * i, 1), normal(o, 2));
        let narrow: Vec<bf16> = w.iter().map(|&w| bf16::from_f32(w)).collect();
        let wide: Vec<f32> = narrow.iter().map(|w| w.to_f32()).collect();
        let (mut plain, mut stored) = (vec![f32::NAN; o], vec![f32::NAN; o]);
        on_threads(3, || gemv(&x, &w, None, &mut plain));
        gemv(&x, &narrow, Some(&bias), &mut stored);
        for n in 0..o {
            assert_eq!(plain[n], dot(&x, &w[n * i..][..i]));
            assert_eq!(stored[n], dot(&x, &wide[n * i..][..i]) + bias[n]);
        }
    }
}
