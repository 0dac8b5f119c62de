use super::*;

/// Probability, degrees of freedom, and scipy 1.17.1's `stats.t.ppf`; the last is `stats.norm.ppf`.
const QUANTILES: [(f64, f64, f64); 14] = [
    (0.975, 1.0, 12.706204736174694),
    (0.975, 2.0, 4.302652729749462),
    (0.975, 3.0, 3.1824463052837078),
    (0.8, 3.0, 0.9784723123633042),
    (0.975, 4.5, 2.6589123472044034),
    (0.975, 11.0, 2.200985160091639),
    (0.9, 29.0, 1.311433647301551),
    (0.975, 0.5, 164.55767348048818),
    (0.9999, 2.5, 34.867969321116306),
    (0.975, 199.0, 1.9719565442517533),
    (0.975, 1999.0, 1.9611514201705613),
    (0.8, 99999.0, 0.8416248280328457),
    (0.975, 10000000.0, 1.959964221767205),
    (0.8, f64::INFINITY, 0.8416212335729143),
];

#[test]
fn quantiles_are_those_of_scipy() {
    for (probability, degrees, quantile) in QUANTILES {
        let found = student_quantile(probability, degrees);
        assert!((found / quantile - 1.0).abs() < 1e-11, "{probability}, {degrees}: {found}, not {quantile}");
        let mirrored = student_quantile(1.0 - probability, degrees);
        assert!((mirrored / quantile + 1.0).abs() < 1e-9, "{probability}, {degrees}: {mirrored}");
    }
    assert!((student_quantile(0.975, f64::INFINITY) - NORMAL_95).abs() < 1e-11);
    for degrees in [0.1, 1.0, 7.5, 1e4, 1e9] {
        assert_eq!(student_quantile(0.5, degrees), 0.0);
        assert_eq!([0.0, 1.0].map(|p| student_quantile(p, degrees)), [f64::NEG_INFINITY, f64::INFINITY]);
    }
}

#[test]
fn arguments_that_are_no_probability_or_no_degrees_have_no_quantile() {
    for (probability, degrees) in
        [(-0.1, 3.0), (1.1, 3.0), (f64::NAN, 3.0), (0.9, 0.0), (0.9, -1.0), (0.9, f64::NAN)]
    {
        assert!(student_quantile(probability, degrees).is_nan(), "{probability}, {degrees}");
    }
}

#[test]
fn the_error_of_stirlings_formula_is_that_of_factorials() {
    let mut logarithm = 0.0;
    for n in 1..30 {
        let x = f64::from(n);
        logarithm += x.ln();
        let stirling = (x + 0.5) * x.ln() - x + 0.5 * (2.0 * PI).ln();
        assert!((stirling_error(x) - (logarithm - stirling)).abs() < 1e-13, "{n}");
    }
}

/// scipy 1.17.1: the noncentrality at which `stats.nct.sf(stats.t.ppf(0.975, v), v, noncentrality)` is 0.8.
#[test]
fn the_distance_of_80_percent_power_is_that_of_the_noncentral_distribution() {
    for (degrees, distance, tolerance) in [
        (1.0, 16.334, 0.02),
        (2.0, 5.6535, 0.01),
        (3.0, 4.2559, 0.005),
        (7.0, 3.2698, 0.001),
        (1e9, 2.80159, 1e-5),
    ] {
        let found = t_of_power(degrees);
        assert!((found / distance - 1.0).abs() < tolerance, "{degrees}: {found}, not {distance}");
    }
    assert!((deviation_bias(2.0) - 0.5 * PI.sqrt()).abs() < 1e-14);
    assert_eq!(deviation_bias(f64::INFINITY), 1.0);
}
