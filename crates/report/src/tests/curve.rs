use proptest::prelude::*;

use crate::thin::{Point, smooth, thin};

fn curve(values: &[f64]) -> Vec<Point> {
    values.iter().enumerate().map(|(at, &value)| (at as f64, value)).collect()
}

#[test]
fn a_short_curve_is_kept_as_it_is() {
    let points = curve(&[3.0, 1.0, 2.0]);
    assert_eq!(thin(&points, 100), [points]);
}

#[test]
fn a_value_that_is_not_finite_breaks_a_short_curve() {
    let pieces = thin(&curve(&[f64::NAN, 1.0, 2.0, f64::INFINITY, f64::NAN, 3.0]), 100);
    assert_eq!(pieces, [vec![(1.0, 1.0), (2.0, 2.0)], vec![(5.0, 3.0)]]);
}

#[test]
fn a_long_gap_breaks_a_thinned_curve() {
    let mut values = vec![1.0; 10_000];
    values[4000..5000].fill(f64::NAN);
    let pieces = thin(&curve(&values), 100);
    assert_eq!(pieces.len(), 2);
    assert_eq!((pieces[0].last().unwrap().0, pieces[1][0].0), (3999.0, 5000.0));
}

#[test]
fn a_smooth_curve_ignores_single_spikes_and_does_not_lag() {
    let falling = |at: usize| 2.0 + 8.0 * (-(at as f64) / 30.0).exp();
    let mut values: Vec<f64> = (0..3000).map(falling).collect();
    values[1000] = 1e30;
    values[2000] = f64::NAN;
    let (smoothed, reports) = smooth(&curve(&values));
    assert_eq!((smoothed.len(), reports), (3000, 61));
    for (at, &(x, y)) in smoothed.iter().enumerate() {
        assert_eq!(x, at as f64);
        assert!((y / falling(at) - 1.0).abs() < 0.1, "{y} at {at} for {}", falling(at));
    }
}

#[test]
fn smoothing_gets_rid_of_most_noise() {
    // The low bits of a multiplicative hash: as good as noise.
    let noise = |at: u64| (at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as f64 / f64::from(1 << 24) - 0.5;
    let values: Vec<f64> = (0..100_000).map(|at| 3.0 + noise(at)).collect();
    let (smoothed, _) = smooth(&curve(&values));
    assert!(smoothed.len() <= 8000);
    let inner = &smoothed[100..smoothed.len() - 100];
    assert!(inner.iter().all(|point| (point.1 - 3.0).abs() < 0.05));
}

#[test]
fn nothing_to_smooth_stays_nothing() {
    assert!(smooth(&[]).0.is_empty());
    assert!(smooth(&curve(&[f64::NAN; 50])).0.iter().all(|point| point.1.is_nan()));
}

proptest! {
    #[test]
    fn thinning_keeps_extremes_ends_and_order(
        values in prop::collection::vec(prop_oneof![8 => -1e3f64..1e3, 1 => Just(f64::NAN), 1 => Just(f64::INFINITY)], 1..3000),
        columns in 1usize..200,
    ) {
        let points = curve(&values);
        let kept: Vec<Point> = thin(&points, columns).concat();
        let finite: Vec<Point> = points.iter().copied().filter(|point| point.1.is_finite()).collect();
        prop_assert!(kept.len() <= 4 * (columns + 1), "{} points in {} columns", kept.len(), columns);
        prop_assert!(kept.iter().all(|point| finite.contains(point)));
        prop_assert!(kept.windows(2).all(|pair| pair[0].0 < pair[1].0));
        prop_assert_eq!((kept.first(), kept.last()), (finite.first(), finite.last()));
        let extremes = |points: &[Point]| points.iter().fold((f64::MAX, f64::MIN), |(low, high), point| (low.min(point.1), high.max(point.1)));
        prop_assert_eq!(extremes(&kept), extremes(&finite));
    }

    #[test]
    fn thinning_keeps_the_extremes_of_each_column(values in prop::collection::vec(-1e3f64..1e3, 500..2000)) {
        // Columns of exactly ten points; the last point closes the range and stands alone.
        let n = values.len() / 10 * 10;
        let points = curve(&[&values[..n], &[0.0]].concat());
        let kept: Vec<Point> = thin(&points, n / 10).concat();
        for column in points[..n].chunks(10) {
            for extreme in [f64::min, f64::max].map(|pick| column.iter().map(|point| point.1).reduce(pick).unwrap()) {
                prop_assert!(kept.iter().any(|point| point.1 == extreme && (column[0].0..=column[9].0).contains(&point.0)));
            }
        }
    }
}
