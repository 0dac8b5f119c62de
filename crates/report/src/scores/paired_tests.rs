use super::super::TaskScore;
use super::super::draws::{Draws, assert_share, coverage, ids};
use super::*;

fn scores(values: Vec<f64>, clusters: Option<Vec<String>>) -> ItemScores {
    ItemScores::new(ids(values.len()), values, clusters).expect("scores")
}

/// Answers of two models: rows that both have right, that one alone has, and that none has.
fn answers(both: usize, reference: usize, candidate: usize, none: usize) -> [ItemScores; 2] {
    let rows = |values: [f64; 4]| {
        let counts = [both, reference, candidate, none];
        let of_kinds = counts.into_iter().zip(values);
        scores(of_kinds.flat_map(|(count, value)| vec![value; count]).collect(), None)
    };
    [rows([1.0, 1.0, 0.0, 0.0]), rows([1.0, 0.0, 1.0, 0.0])]
}

fn difference(reference: &ItemScores, candidate: &ItemScores) -> PairedDifference {
    PairedDifference::new(reference, candidate).expect("the same rows").expect("rows")
}

#[test]
fn the_difference_is_that_of_the_means_with_the_error_of_rows() {
    let [reference, candidate] = answers(900, 80, 50, 970);
    let found = difference(&reference, &candidate);
    assert_eq!((found.rows, found.clusters, found.reference, found.candidate), (2000, None, 0.49, 0.475));
    assert!((found.difference + 0.015).abs() < 1e-15, "{found:?}");
    // Rows' differences: 80 of -1, 50 of 1.
    let variance = (130.0 - 2000.0 * 0.015f64.powi(2)) / 1999.0;
    let error = found.standard_error.expect("rows");
    assert!((error - (variance / 2000.0).sqrt()).abs() < 1e-15, "{error}");
    let half_width = found.interval.expect("rows").half_width();
    assert!((half_width / error - 1.961_151_4).abs() < 1e-6, "{}: t of 1999 degrees", half_width / error);
    let test = found.mcnemar.expect("answers");
    assert_eq!((test.only_reference, test.only_candidate), (80, 50));
    // scipy 1.17.1, stats.binomtest(50, 130).pvalue.
    assert!((test.p - 0.010_694_055_123_829_345).abs() < 1e-12, "{}", test.p);
}

#[test]
fn rows_are_paired_by_their_ids() {
    let reference = scores(vec![1.0, 0.0, 0.5], None);
    let shuffled = ["2", "0", "1"].map(str::to_owned).to_vec();
    let candidate = ItemScores::new(shuffled.clone(), vec![0.5, 1.0, 0.0], None).expect("scores");
    let found = difference(&reference, &candidate);
    assert_eq!((found.difference, found.mcnemar), (0.0, None));
    let of = |ids: Vec<String>| {
        PairedDifference::new(&reference, &ItemScores::new(ids, vec![0.0; 3], None).expect("scores"))
    };
    let missing = |id: &str| Err(ScoreError::MissingRow { id: id.into() });
    assert_eq!(of(["0", "1", "3"].map(str::to_owned).to_vec()), missing("2"));
    let fewer = scores(vec![1.0, 0.0], None);
    assert_eq!(PairedDifference::new(&reference, &fewer), missing("2"));
    assert_eq!(PairedDifference::new(&fewer, &reference), missing("2"));
    let clustered = ItemScores::new(shuffled.clone(), vec![0.0; 3], Some(shuffled)).expect("scores");
    assert_eq!(
        PairedDifference::new(&reference, &clustered),
        Err(ScoreError::OtherCluster { id: "0".into() })
    );
}

#[test]
fn scores_that_are_no_numbers_or_have_no_id_of_their_own_are_refused() {
    let of = |ids: [&str; 2], values: Vec<f64>| {
        ItemScores::new(ids.map(str::to_owned).to_vec(), values, None)
            .map(|_| ())
            .map_err(|error| error.to_string())
    };
    assert_eq!(of(["a", "b"], vec![0.0, 1.0]), Ok(()));
    for (found, said) in [
        (of(["a", "b"], vec![0.0, f64::NAN]), "row `b`: the score is NaN"),
        (of(["a", "a"], vec![0.0, 1.0]), "the id `a`"),
        (of(["a", "b"], vec![0.0]), "2 rows have 1 scores"),
    ] {
        assert!(found.as_ref().is_err_and(|error| error.contains(said)), "{found:?}");
    }
}

#[test]
fn few_discordant_rows_do_not_claim_certainty() {
    let [reference, candidate] = answers(10, 0, 0, 10);
    let equal = difference(&reference, &candidate);
    assert_eq!((equal.difference, equal.standard_error), (0.0, Some(0.0)));
    assert_eq!(equal.mcnemar.map(|test| test.p), Some(1.0));
    let half_width = equal.interval.expect("rows").half_width();
    assert!((half_width - NORMAL_95 * 2f64.sqrt() / 22.0).abs() < 1e-15, "{half_width}");
    // Bonett and Price: 1 of 32 and 4 of 32 in place of 0 of 30 and 3 of 30.
    let [reference, candidate] = answers(20, 0, 3, 7);
    let interval = difference(&reference, &candidate).interval.expect("rows");
    let half_width = NORMAL_95 * ((5.0 / 32.0 - (3.0f64 / 32.0).powi(2)) / 32.0).sqrt();
    assert!((interval.low - (3.0 / 32.0 - half_width)).abs() < 1e-15, "{interval:?}");
    assert_eq!(
        (bonett_price(0, 0, 0), bonett_price(2, 2, 3), bonett_price(u64::MAX, 1, 9)),
        (None, None, None)
    );
    let empty = scores(Vec::new(), None);
    assert_eq!(PairedDifference::new(&empty, &empty), Ok(None));
    let constant = difference(&scores(vec![2.0, 3.0], None), &scores(vec![2.5, 3.5], None));
    assert_eq!(constant.interval, Some(Interval { low: 0.5, high: 0.5 }));
    let one = difference(&scores(vec![2.0], None), &scores(vec![3.0], None));
    assert_eq!((one.standard_error, one.interval), (None, None));
}

#[test]
fn the_mean_over_checkpoints_is_that_of_each_row() {
    let [first, last] = [vec![1.0, 0.0, 0.0], vec![1.0, 1.0, 0.0]].map(|values| scores(values, None));
    let mean = ItemScores::average(&[first.clone(), last]).expect("the same rows");
    assert_eq!(mean.scores(), [1.0, 0.5, 0.0]);
    assert_eq!(ItemScores::average(&[]), Err(ScoreError::NoScores));
    assert!(ItemScores::average(&[first, scores(vec![1.0], None)]).is_err());
    assert_eq!(TaskScore::new(&mean).and_then(|score| score.wilson), None);
}

/// Answers of two models in clusters of `size` rows, each with its own difficulty; the candidate answers a
/// fifth of the rows anew, and a cluster may suit it better or worse.
fn draw(draws: &mut Draws, rows: usize, size: usize, cost: f64) -> [Vec<f64>; 2] {
    let (mut level, mut shift) = (0.0, 0.0);
    let (mut own, mut other) = (Vec::with_capacity(rows), Vec::with_capacity(rows));
    for row in 0..rows {
        if row % size == 0 {
            level = 0.3 + 0.5 * draws.uniform();
            shift = if size > 1 { 0.3 * (draws.uniform() - 0.5) } else { 0.0 };
        }
        let right = draws.answer(level);
        own.push(right);
        other.push(if draws.answer(0.2) == 1.0 { draws.answer(level - 5.0 * cost + shift) } else { right });
    }
    [own, other]
}

#[test]
fn paired_intervals_cover_the_truth_in_95_of_100_draws() {
    for (rows, size, cost) in [
        (200, 1, 0.0),
        (200, 1, 0.02),
        (1000, 1, 0.02),
        (2000, 1, 0.0),
        (100, 5, 0.0),
        (400, 5, 0.02),
        (1000, 5, 0.02),
    ] {
        let of_rows = (0..rows).map(|row| row / size).collect();
        let clusters = Clusters { of_rows, count: rows / size };
        let share = coverage(-cost, 5, |draws| {
            let [own, other] = draw(draws, rows, size, cost);
            PairedDifference::of_rows(&own, &other, Some(&clusters).filter(|_| size > 1)).interval
        });
        assert_share(&format!("{rows} rows in clusters of {size}, cost {cost}"), share, 0.94, 0.96);
    }
}
