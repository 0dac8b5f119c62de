//! Quantiles of Student's t distribution for any degrees of freedom, and the error of Stirling's formula,
//! from which all probabilities here are computed without overflow.
//!
//! Formulas: Abramowitz and Stegun, Handbook of Mathematical Functions (6.1.41, 26.5.8, 26.7.1, 26.7.5).
//! Quantiles agree with scipy's to 1e-12, relative to their size.

use std::f64::consts::PI;

/// The 97.5% quantile of the normal distribution, of a 95% interval.
pub const NORMAL_95: f64 = 1.959_963_984_540_054;

/// Degrees of freedom from which the expansion at the normal distribution is used.
const LARGE: f64 = 1e5;

/// The number that a variable of Student's t distribution with `degrees` of freedom exceeds with probability
/// 1 - `probability`. Infinite degrees are the normal distribution.
///
/// 0 and 1 give infinities. NaN if `probability` lies outside of [0, 1] or `degrees` is not positive.
pub fn student_quantile(probability: f64, degrees: f64) -> f64 {
    if !(0.0..=1.0).contains(&probability) || degrees.is_nan() || degrees <= 0.0 {
        return f64::NAN;
    }
    if probability < 0.5 {
        return -upper_quantile(probability, degrees);
    }
    upper_quantile(1.0 - probability, degrees)
}

/// Half width of a 95% interval in standard errors, with `degrees` of freedom.
pub(super) fn t_95(degrees: f64) -> f64 {
    student_quantile(0.975, degrees)
}

/// Distance in standard errors between a limit and a true value whose 95% interval stays beyond this limit in
/// 80% of all samples, by Johnson and Welch's approximation of the noncentral t distribution (Biometrika 31,
/// 1940; Abramowitz and Stegun 26.7.10): `t c + z sqrt(1 + t² (1 - c²))`, with the 97.5% quantile t, the
/// normal 80% quantile z and c of [`deviation_bias`]. It is 2% too large at one degree of freedom.
pub(super) fn t_of_power(degrees: f64) -> f64 {
    let (t, bias) = (t_95(degrees), deviation_bias(degrees));
    t * bias + student_quantile(0.8, f64::INFINITY) * (1.0 + t * t * (1.0 - bias * bias)).sqrt()
}

/// Expected standard deviation of a normal sample with v degrees of freedom, for a true one of 1:
/// `sqrt(2 / v) Γ((v + 1) / 2) / Γ(v / 2)`.
pub(super) fn deviation_bias(degrees: f64) -> f64 {
    if degrees > LARGE { 1.0 } else { (2.0 / degrees).sqrt() * log_gamma_step(0.5 * degrees).exp() }
}

/// The number that is exceeded with probability `tail`, at most 1/2.
fn upper_quantile(tail: f64, degrees: f64) -> f64 {
    if tail == 0.0 {
        return f64::INFINITY;
    }
    if degrees > LARGE {
        let t = upper_quantile(tail, LARGE);
        let (t2, z_per) = (t * t, t / LARGE);
        let z = t - z_per * (t2 + 1.0) / 4.0 + z_per * (13.0 * t2 * t2 + 8.0 * t2 + 3.0) / (96.0 * LARGE);
        let (z2, t_per) = (z * z, z / degrees);
        return z + t_per * (z2 + 1.0) / 4.0 + t_per * (5.0 * z2 * z2 + 16.0 * z2 + 3.0) / (96.0 * degrees);
    }
    // The tail is convex, so Newton's steps from 0 never pass the quantile.
    let mut t = 0.0;
    for _ in 0..2000 {
        let density = density(t, degrees);
        let step = (tail_probability(t, density, degrees) - tail) / density;
        t += step;
        if !step.is_finite() || step <= 1e-16 * t {
            break;
        }
    }
    t
}

/// Density of Student's distribution.
fn density(t: f64, degrees: f64) -> f64 {
    let gammas = log_gamma_step(0.5 * degrees);
    (gammas - 0.5 * (degrees * PI).ln() - 0.5 * (degrees + 1.0) * (t * t / degrees).ln_1p()).exp()
}

/// Probability to exceed `t`, which is not negative: half the incomplete beta function of degrees / 2 and
/// 1/2, whose power of x is a multiple of the density.
fn tail_probability(t: f64, density: f64, degrees: f64) -> f64 {
    let half = 0.5 * degrees;
    let x = degrees / (degrees + t * t);
    if x > (half + 1.0) / (half + 2.5) {
        let rest = t * t / (degrees + t * t);
        return 0.5 - density * t * beta_fraction(rest, 0.5, half);
    }
    density * t / degrees * beta_fraction(x, half, 0.5)
}

/// The continued fraction of the incomplete beta function, by Lentz's method (Numerical Recipes, 6.4).
fn beta_fraction(x: f64, a: f64, b: f64) -> f64 {
    let nonzero = |value: f64| if value.abs() < 1e-300 { 1e-300 } else { value };
    let mut c = 1.0;
    let mut d = 1.0 / nonzero(1.0 - (a + b) * x / (a + 1.0));
    let mut fraction = d;
    for n in 1..2000 {
        let (m, two_m) = (f64::from(n), f64::from(2 * n));
        let even = m * (b - m) * x / ((a + two_m - 1.0) * (a + two_m));
        let odd = -(a + m) * (a + b + m) * x / ((a + two_m) * (a + two_m + 1.0));
        let mut change = 1.0;
        for term in [even, odd] {
            d = 1.0 / nonzero(1.0 + term * d);
            c = nonzero(1.0 + term / c);
            change = d * c;
            fraction *= change;
        }
        if (change - 1.0).abs() < 1e-16 {
            break;
        }
    }
    fraction
}

/// ln Γ(x + 1/2) - ln Γ(x), for x > 0.
fn log_gamma_step(x: f64) -> f64 {
    x * (0.5 / x).ln_1p() + 0.5 * x.ln() - 0.5 + stirling_error(x + 0.5) - stirling_error(x)
}

/// ln Γ(x + 1) minus Stirling's (x + 1/2) ln x - x + ln(2π) / 2, for x > 0.
pub(super) fn stirling_error(x: f64) -> f64 {
    let (mut x, mut sum) = (x, 0.0);
    while x < 16.0 {
        sum += (x + 0.5) * (1.0 / x).ln_1p() - 1.0;
        x += 1.0;
    }
    let x2 = x * x;
    sum + (1.0 / 12.0 - (1.0 / 360.0 - (1.0 / 1260.0 - (1.0 / 1680.0 - 1.0 / (1188.0 * x2)) / x2) / x2) / x2)
        / x
}

#[cfg(test)]
#[path = "student_tests.rs"]
mod tests;
