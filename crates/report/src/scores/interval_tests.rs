use super::super::CentredMean;
use super::super::draws::{Draws, assert_share, coverage, ids};
use super::*;

fn scores(values: Vec<f64>) -> ItemScores {
    ItemScores::new(ids(values.len()), values, None).expect("scores")
}

fn clustered(values: Vec<f64>, clusters: impl Fn(usize) -> usize) -> ItemScores {
    let names = (0..values.len()).map(|row| clusters(row).to_string()).collect();
    ItemScores::new(ids(values.len()), values, Some(names)).expect("scores")
}

fn score(scores: &ItemScores) -> TaskScore {
    TaskScore::new(scores).expect("rows")
}

const WILSON: [(u64, u64, f64, f64); 7] = [
    (0, 10, 0.0, 0.277_532_799_862_889_26),
    (1, 10, 0.017_876_213_095_072_924, 0.404_150_026_795_238_54),
    (25, 50, 0.366_445_143_168_285_8, 0.633_554_856_831_714_2),
    (47, 50, 0.837_829_083_111_618_2, 0.979_385_029_651_026),
    (171, 200, 0.799_513_324_692_184_7, 0.897_106_493_579_955_9),
    (1319, 1319, 0.997_096_055_014_696_2, 1.0),
    (613, 2000, 0.286_681_326_075_756_8, 0.327_060_571_222_088),
];

/// statsmodels 0.15.0, `stats.proportion.proportion_confint(right, rows, method="wilson")`.
#[test]
fn wilson_is_that_of_statsmodels() {
    for (right, rows, low, high) in WILSON {
        let found = wilson(right, rows).expect("rows");
        let error = (found.low - low).abs().max((found.high - high).abs());
        assert!(error < 1e-12, "{right} of {rows}: {found:?}, not {low} to {high}");
    }
    assert_eq!((wilson(0, 0), wilson(2, 1)), (None, None));
    assert_eq!([wilson(0, 9).map(|i| i.low), wilson(9, 9).map(|i| i.high)], [Some(0.0), Some(1.0)]);
}

const VALUES: [f64; 11] = [0.5, 1.25, 0.75, 2.0, 0.125, 1.5, 0.875, 0.25, 1.0, 0.375, 1.625];
const GROUPS: [usize; 11] = [0, 0, 1, 1, 1, 2, 2, 3, 3, 3, 3];

/// statsmodels 0.15.0: `OLS(x, ones).fit(cov_type="cluster", cov_kwds={"groups": g}, use_t=True)` and,
/// without clusters, `OLS(x, ones).fit()`: `bse` and `conf_int()`.
#[test]
fn standard_errors_are_those_of_statsmodels() {
    let found = score(&clustered(VALUES.to_vec(), |row| GROUPS[row]));
    assert_eq!((found.rows, found.clusters), (VALUES.len(), Some(4)));
    let of_rows = score(&scores(VALUES.to_vec()));
    let t = found.t.expect("clusters");
    let t_of_rows = of_rows.t.expect("rows");
    for (found, expected) in [
        (found.mean, 10.25 / 11.0),
        (found.standard_error.expect("rows"), 0.183_374_025_035_857_34),
        (found.cluster_error.expect("clusters"), 0.074_856_904_981_377_18),
        (t.low, 0.693_590_101_135_224_3),
        (t.high, 1.170_046_262_501_139),
        (t_of_rows.low, 0.523_235_392_190_684_3),
        (t_of_rows.high, 1.340_400_971_445_679),
    ] {
        assert!((found - expected).abs() < 1e-12, "{found}, not {expected}");
    }
    assert_eq!((of_rows.cluster_error, of_rows.wilson, of_rows.interval), (None, None, of_rows.t));
}

#[test]
fn clusters_of_one_row_are_rows() {
    let [alone, rows] = [clustered(VALUES.to_vec(), |row| row), scores(VALUES.to_vec())].map(|s| score(&s));
    let errors = alone.cluster_error.zip(rows.standard_error);
    assert!(errors.is_some_and(|(a, b)| (a - b).abs() < 1e-15), "{errors:?}");
}

#[test]
fn few_or_equal_scores_have_the_figures_that_they_can_have() {
    assert_eq!(TaskScore::new(&scores(Vec::new())), None);
    let one = score(&scores(vec![1.0]));
    assert_eq!((one.standard_error, one.t, one.interval), (None, None, wilson(1, 1)));
    assert_eq!(score(&scores(vec![0.3])).interval, None);
    let equal = score(&scores(vec![1.0; 20]));
    assert_eq!((equal.standard_error, equal.interval), (Some(0.0), wilson(20, 20)));
    assert_eq!(equal.t, Some(Interval { low: 1.0, high: 1.0 }));
    let equal = score(&clustered(vec![0.0; 20], |row| row / 5));
    assert_eq!((equal.wilson, equal.interval), (None, wilson(0, 4)));
    let one_cluster = score(&clustered(vec![0.0, 1.0], |_| 0));
    assert_eq!((one_cluster.cluster_error, one_cluster.interval), (None, None));
}

#[test]
fn the_mean_of_tasks_is_that_of_their_scores_above_chance() {
    let half = score(&scores((0..100).map(|row| f64::from(row % 2)).collect()));
    let quarter = score(&scores((0..400).map(|row| f64::from(u8::from(row % 4 == 0))).collect()));
    let mean =
        CentredMean::new(&[(half.clone(), 0.25), (quarter.clone(), 0.0)]).expect("chances").expect("tasks");
    assert!((mean.mean - 0.5 * (1.0 / 3.0 + 0.25)).abs() < 1e-15, "{mean:?}");
    let [a, b] = [&half, &quarter].map(|task| task.standard_error.expect("rows"));
    let error = 0.5 * ((a / 0.75).powi(2) + b.powi(2)).sqrt();
    assert!((mean.standard_error.expect("rows") - error).abs() < 1e-15, "{mean:?}");
    let half_width = mean.interval.expect("rows").half_width() / error;
    assert!((1.96..1.985).contains(&half_width), "{half_width}: between t of 99 and of infinite degrees");
    assert_eq!(CentredMean::new(&[]), Ok(None));
    assert!(CentredMean::new(&[(half.clone(), 1.0)]).is_err());
    assert!(CentredMean::new(&[(half, f64::NAN)]).is_err());
    // All right is not certain.
    let right = score(&scores(vec![1.0; 50]));
    let of_right = CentredMean::new(&[(right, 0.5)]).expect("a chance").expect("a task");
    assert!(of_right.interval.is_some_and(|interval| interval.half_width() > 0.05), "{of_right:?}");
}

#[test]
fn wilson_covers_the_truth_in_95_of_100_draws() {
    for (rows, low, high) in [(50, 0.93, 0.975), (200, 0.94, 0.965), (1000, 0.94, 0.965)] {
        for p in [0.3, 0.5, 0.75, 0.9] {
            let share = coverage(p, 7, |draws| {
                let right: f64 = (0..rows).map(|_| draws.answer(p)).sum();
                wilson(right as u64, rows)
            });
            assert_share(&format!("Wilson, {rows} rows, p = {p}"), share, low, high);
        }
    }
}

/// Answers in clusters of these sizes, each with its own level between 0.25 and 0.95; the intraclass
/// correlation is 0.17.
fn draw(draws: &mut Draws, sizes: &[usize]) -> Vec<f64> {
    let mut values = Vec::new();
    for &size in sizes {
        let level = 0.25 + 0.7 * draws.uniform();
        values.extend((0..size).map(|_| draws.answer(level)));
    }
    values
}

#[test]
fn cluster_robust_intervals_cover_the_truth_and_those_of_rows_do_not() {
    let clusters = |sizes: &[usize]| Clusters {
        of_rows: sizes.iter().enumerate().flat_map(|(cluster, &size)| vec![cluster; size]).collect(),
        count: sizes.len(),
    };
    for count in [12, 30, 80, 200] {
        for sizes in [vec![5; count], (0..count).map(|cluster| 3 + cluster % 5).collect()] {
            let clusters = clusters(&sizes);
            let share =
                coverage(0.6, 11, |draws| TaskScore::of_rows(&draw(draws, &sizes), Some(&clusters)).interval);
            let of = format!("{count} clusters of {} and more", sizes[0]);
            assert_share(&of, share, 0.93, 0.96);
        }
    }
    let share = coverage(0.6, 17, |draws| TaskScore::of_rows(&draw(draws, &[20; 30]), None).interval);
    assert_share("30 clusters of 20, taken as rows", share, 0.5, 0.8);
}
