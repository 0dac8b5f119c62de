use proptest::prelude::*;

use crate::axis::{Axis, Scale};
use crate::chart::four_digits;
use crate::range::{axis_from_zero, axis_of, outside};

fn labels(axis: &Axis) -> Vec<&str> {
    axis.ticks.iter().map(|(_, label)| label.as_str()).collect()
}

#[test]
fn ticks_are_round_numbers_in_one_form() {
    for (low, high, expected) in [
        (0.85, 5.9, &["1", "2", "3", "4", "5"][..]),
        (1.19, 1.42, &["1.20", "1.25", "1.30", "1.35", "1.40"]),
        (0.0, 1e-3, &["0", "2e-4", "4e-4", "6e-4", "8e-4", "1e-3"]),
        (0.0, 2.6e-3, &["0", "5e-4", "1e-3", "1.5e-3", "2e-3", "2.5e-3"]),
        (0.0, 64_000.0, &["0", "10k", "20k", "30k", "40k", "50k", "60k"]),
        (0.0, 2.4e6, &["0", "0.5M", "1.0M", "1.5M", "2.0M"]),
        (-1.0, 1.0, &["-1.0", "-0.5", "0", "0.5", "1.0"]),
        (0.0, 3e15, &["0", "5e14", "1e15", "1.5e15", "2e15", "2.5e15", "3e15"]),
    ] {
        assert_eq!(labels(&Axis::linear(low, high, 5)), expected);
    }
}

#[test]
fn steps_have_whole_ticks() {
    assert_eq!(labels(&Axis::whole(0.0, 3.0, 5)), ["0", "1", "2", "3"]);
    assert_eq!(labels(&Axis::whole(0.0, 1.0, 5)), ["0", "1"]);
}

#[test]
fn logarithmic_ticks_are_powers_of_ten_and_more_where_there_are_few() {
    assert_eq!(labels(&Axis::log(0.02, 30_000.0)), ["0.1", "1", "10", "100", "1000", "1e4"]);
    assert_eq!(labels(&Axis::log(0.3, 12.0)), ["0.5", "1", "2", "5", "10"]);
    assert_eq!(labels(&Axis::log(1e-12, 1e12)), ["1e-12", "1e-8", "1e-4", "1", "1e4", "1e8", "1e12"]);
}

#[test]
fn an_axis_ends_below_spikes_and_says_how_many() {
    let mut points: Vec<(f64, f64)> = (0..1000).map(|at| (at as f64, 4.0 - at as f64 / 500.0)).collect();
    points[400].1 = 1e9;
    points[500].1 = f64::NAN;
    let axis = axis_of(&[&points], 1000.0).unwrap();
    assert!(axis.low > 1.8 && axis.high < 4.2, "{axis:?}");
    assert_eq!(outside(&[&points], &axis), 1);
}

#[test]
fn an_axis_keeps_a_high_start() {
    let points: Vec<(f64, f64)> = (0..1000).map(|at| (at as f64, if at < 3 { 11.0 } else { 3.0 })).collect();
    let axis = axis_of(&[&points], 1000.0).unwrap();
    assert_eq!(outside(&[&points], &axis), 0);
}

#[test]
fn wide_positive_values_get_a_logarithmic_axis() {
    let wide = [(0.0, 0.01), (1.0, 1.0), (2.0, 5.0)];
    assert_eq!(axis_of(&[&wide], 100.0).unwrap().scale, Scale::Log);
    assert_eq!(axis_of(&[&wide], 1000.0).unwrap().scale, Scale::Linear);
    let negative = [(0.0, -0.01), (1.0, 1.0), (2.0, 50.0)];
    assert_eq!(axis_of(&[&negative], 10.0).unwrap().scale, Scale::Linear);
}

#[test]
fn an_axis_from_zero_leaves_room_on_both_sides_of_the_values() {
    let positive = axis_from_zero(&[&[(0.0, 1.0), (1.0, 3.0)]]).unwrap();
    assert!(positive.low == 0.0 && positive.high > 3.0, "{positive:?}");
    let both = axis_from_zero(&[&[(0.0, -1.0), (1.0, 3.0)]]).unwrap();
    assert!(both.low < -1.0 && both.high > 3.0, "{both:?}");
}

#[test]
fn legends_show_four_digits() {
    for (value, expected) in [
        (0.99999, "1.000"),
        (0.09588, "0.09588"),
        (2.0025, "2.002"),
        (-3.0, "-3.000"),
        (9999.7, "10.0k"),
        (53_240.0, "53.2k"),
        (1e-4, "1e-4"),
        (0.0, "0"),
        (f64::INFINITY, "inf"),
    ] {
        assert_eq!(four_digits(value), expected);
    }
}

#[test]
fn no_finite_value_means_no_axis() {
    assert!(axis_of(&[&[(0.0, f64::NAN), (1.0, f64::INFINITY)]], 10.0).is_none());
    assert!(axis_from_zero(&[]).is_none());
}

proptest! {
    #[test]
    fn any_range_can_be_drawn(low: f64, high: f64, constant in any::<bool>()) {
        let high = if constant { low } else { high };
        for axis in [Axis::linear(low, high, 5), Axis::log(low.abs(), high.abs())] {
            prop_assert!(axis.low < axis.high, "{:?}", axis);
            prop_assert!(axis.ticks.len() <= 30, "{:?}", axis);
            for (value, label) in &axis.ticks {
                let place = axis.place(*value);
                prop_assert!((-1e-6..=1.0 + 1e-6).contains(&place), "{} at {} of {:?}", label, place, axis);
                prop_assert!(label.len() <= 10, "{}", label);
            }
        }
    }

    #[test]
    fn ticks_rise_and_their_labels_differ(low in -1e6f64..1e6, height in 1e-3f64..1e6) {
        let axis = Axis::linear(low, low + height, 5);
        prop_assert!((3..=8).contains(&axis.ticks.len()), "{:?}", axis);
        for pair in axis.ticks.windows(2) {
            prop_assert!(pair[0].0 < pair[1].0 && pair[0].1 != pair[1].1, "{:?}", axis);
        }
    }
}
