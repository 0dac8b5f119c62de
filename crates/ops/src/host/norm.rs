//! RMSNorm of one row and its backward, for the norms of tokens and of heads.

use super::math::dot;
use xtrain_tensor::Real;

/// y = x * rstd * w; returns rstd = 1 / sqrt(mean(x^2) + eps).
#[inline(always)]
pub(crate) fn norm_row<T: Real>(x: &[T], w: &[T], eps: T, y: &mut [T]) -> T {
    let rstd = rstd_of(x, eps);
    scale_row(x, rstd, w, y);
    rstd
}

/// 1 / sqrt(mean(x^2) + eps).
#[inline(always)]
pub(crate) fn rstd_of<T: Real>(x: &[T], eps: T) -> T {
    T::ONE / (dot(x, x) / T::from_f64(x.len() as f64) + eps).sqrt()
}

/// y = x * rstd * w.
#[inline(always)]
pub(crate) fn scale_row<T: Real>(x: &[T], rstd: T, w: &[T], y: &mut [T]) {
    for ((y, x), w) in y.iter_mut().zip(x).zip(w) {
        *y = *x * rstd * *w;
    }
}

/// Adds dy n to `dw` and replaces dy by dx = rstd * (dy w - n mean(dy w n)), where n = x * rstd.
#[inline(always)]
pub(crate) fn norm_grad_row<T: Real>(x: &[T], rstd: T, w: &[T], dy: &mut [T], dw: &mut [T]) {
    for ((dw, dy), x) in dw.iter_mut().zip(&*dy).zip(x) {
        *dw += *dy * (*x * rstd);
    }
    // From here on dy holds dy w, so that the mean is a dot product of two rows.
    for (dy, w) in dy.iter_mut().zip(w) {
        *dy *= *w;
    }
    let along = dot(dy, x) * rstd / T::from_f64(w.len() as f64);
    for (dy, x) in dy.iter_mut().zip(x) {
        *dy = rstd * (*dy - *x * rstd * along);
    }
}
