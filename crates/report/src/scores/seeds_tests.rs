use super::super::draws::{Draws, assert_share, coverage, ids};
use super::*;

fn run(seed: u64, values: &[f64]) -> RunScores {
    let scores = ItemScores::new(ids(values.len()), values.to_vec(), None).expect("scores");
    RunScores { seed: Some(seed), scores }
}

fn task(reference: Vec<RunScores>, candidate: Vec<RunScores>) -> TaskRuns {
    TaskRuns { chance: 0.5, reference, candidate }
}

fn difference(task: &TaskRuns) -> SeedDifference {
    SeedDifference::of_task(task).expect("the same rows").expect("rows")
}

/// Half scores of a run whose mean is `mean`.
fn about(seed: u64, mean: f64) -> RunScores {
    run(seed, &(0..40).map(|row| mean + 0.1 * f64::from(row % 2) - 0.05).collect::<Vec<_>>())
}

#[test]
fn runs_of_one_seed_are_subtracted_from_each_other() {
    let reference = vec![about(1, 0.5), about(2, 0.6), about(3, 0.7), about(9, 0.9)];
    let candidate = vec![about(3, 0.68), about(1, 0.49), about(2, 0.57)];
    let found = difference(&task(reference, candidate));
    assert_eq!((found.pairing, found.reference_seeds, found.candidate_seeds), (Pairing::BySeed, 3, 3));
    assert!((found.difference + 0.02).abs() < 1e-12 && (found.reference - 0.6).abs() < 1e-12, "{found:?}");
    // Differences of 1, 2 and 3 points: t of two degrees times 1 / sqrt 3. Rows add nothing.
    let half_width = found.interval.expect("seeds").half_width();
    assert!((half_width - 0.043_026_527_297 / 3f64.sqrt()).abs() < 1e-9, "{half_width}");
    // The band is that of all four seeds: t of three degrees, s = 0.1708.
    let band = 3.182_446_305_284 * (0.0875f64 / 3.0).sqrt() * (0.25f64 + 1.0 / 3.0).sqrt();
    assert!((found.band.expect("seeds") - band).abs() < 1e-9, "{found:?}");
}

#[test]
fn without_pairs_the_means_of_both_sides_are_compared() {
    let reference = vec![about(1, 0.5), about(2, 0.6), about(3, 0.7)];
    let found = difference(&task(reference.clone(), vec![about(4, 0.6), about(5, 0.62), about(3, 0.64)]));
    assert_eq!((found.pairing, found.candidate_seeds), (Pairing::Unpaired, 3));
    // scipy 1.17.1, stats.ttest_ind([.6, .62, .64], [.5, .6, .7], equal_var=False).confidence_interval().
    let interval = found.interval.expect("seeds");
    assert!((interval.low + 0.216_197_821_8).abs() < 1e-9, "{interval:?}");
    assert!((interval.high - 0.256_197_821_8).abs() < 1e-9, "{interval:?}");
    let one = difference(&task(reference.clone(), vec![about(2, 0.59)]));
    assert_eq!((one.pairing, one.reference_seeds), (Pairing::OneSeed, 1));
    assert!((one.difference + 0.01).abs() < 1e-12 && one.band.is_some(), "{one:?}");
    let other = difference(&task(reference, vec![about(7, 0.59)]));
    assert_eq!((other.pairing, other.reference_seeds), (Pairing::OneSeed, 3));
}

#[test]
fn runs_of_one_seed_or_of_an_unreadable_one_count_as_one() {
    let unknown = |mean: f64| RunScores { seed: None, ..about(0, mean) };
    let reference = vec![about(1, 0.5), about(1, 0.7), unknown(0.2), unknown(0.4)];
    let found = difference(&task(reference, vec![about(1, 0.6), unknown(0.3)]));
    assert_eq!((found.pairing, found.reference_seeds, found.candidate_seeds), (Pairing::Unpaired, 2, 2));
    assert!((found.reference - 0.45).abs() < 1e-12, "{found:?}");
}

#[test]
fn the_mean_over_tasks_takes_the_seeds_that_all_tasks_have() {
    let easy = task(vec![about(1, 0.5), about(2, 0.6), about(3, 0.9)], vec![about(1, 0.4), about(2, 0.6)]);
    let hard = TaskRuns {
        chance: 0.0,
        ..task(vec![about(2, 0.2), about(1, 0.1)], vec![about(1, 0.1), about(2, 0.3)])
    };
    let found = SeedDifference::of_mean(&[easy.clone(), hard.clone()]).expect("chances").expect("tasks");
    assert_eq!((found.pairing, found.reference_seeds, found.rows), (Pairing::BySeed, 2, 80));
    // Seed 1 loses 0.1 / 0.5 on one task, seed 2 wins 0.1 on the other: half of it in the mean.
    assert!((found.difference - 0.5 * (-0.1 + 0.05)).abs() < 1e-12, "{found:?}");
    assert!((found.reference - 0.5 * (0.1 + 0.15)).abs() < 1e-12, "{found:?}");
    let half_width = found.interval.expect("seeds").half_width();
    assert!((half_width - 12.706_204_736 * 0.075).abs() < 1e-8, "{half_width}");
    assert_eq!(SeedDifference::of_mean(&[]), Ok(None));
    let strange = task(vec![about(7, 0.5)], vec![about(7, 0.5)]);
    assert_eq!(SeedDifference::of_mean(&[hard, strange]), Err(ScoreError::NoCommonRun));
    let wrong = TaskRuns { chance: 1.0, ..easy.clone() };
    assert!(matches!(SeedDifference::of_mean(&[wrong]), Err(ScoreError::Chance { .. })));
    let no_run = TaskRuns { candidate: Vec::new(), ..easy };
    assert_eq!(SeedDifference::of_task(&no_run), Err(ScoreError::NoScores));
    let empty = task(vec![run(1, &[])], vec![run(1, &[])]);
    assert_eq!(SeedDifference::of_task(&empty), Ok(None));
    assert_eq!(SeedDifference::of_mean(&[empty]), Ok(None));
}

#[test]
fn equal_differences_of_seeds_leave_the_chance_of_rows() {
    // Each seed loses another row of 20.
    let run_without = |seed: u64, wrong: usize| {
        run(seed, &(0..20).map(|row| f64::from(u8::from(row != wrong))).collect::<Vec<_>>())
    };
    let right = |seed: u64| run_without(seed, 99);
    let found = difference(&task(
        vec![right(1), right(2), right(3)],
        vec![run_without(1, 4), run_without(2, 5), run_without(3, 6)],
    ));
    assert!((found.difference + 0.05).abs() < 1e-12, "{found:?}");
    assert!(found.interval.is_some_and(|interval| interval.half_width() > 0.05), "{found:?}");
    let same = difference(&task(vec![right(1), right(2)], vec![right(1), right(2)]));
    // That of 20 rows alone: seeds that do not differ add no degrees of freedom.
    let of_rows = super::super::bonett_price(0, 0, 20).expect("rows").half_width();
    let half_width = same.interval.expect("rows").half_width();
    assert!((half_width - of_rows).abs() < 1e-9 && half_width > 0.1, "{same:?}");
}

/// Runs whose differences vary by seed, by row and by both, each with this standard deviation of the mean.
fn draw(draws: &mut Draws, seeds: usize, [of_seed, of_row, rest]: [f64; 3]) -> TaskRuns {
    const ROWS: usize = 24;
    let of_rows: Vec<f64> = (0..ROWS).map(|_| of_row * (ROWS as f64).sqrt() * draws.normal()).collect();
    let (mut reference, mut candidate) = (Vec::new(), Vec::new());
    for seed in 0..seeds {
        let of_seed = of_seed * (seeds as f64).sqrt() * draws.normal();
        let rest = rest * ((seeds * ROWS) as f64).sqrt();
        let own: Vec<f64> = (0..ROWS).map(|_| draws.normal()).collect();
        let other = own.iter().zip(&of_rows).map(|(own, row)| own + of_seed + row + rest * draws.normal());
        candidate.push(run(seed as u64, &other.collect::<Vec<_>>()));
        reference.push(run(seed as u64, &own));
    }
    task(reference, candidate)
}

#[test]
fn intervals_over_seeds_and_rows_cover_the_truth_in_95_of_100_draws_or_more() {
    for seeds in [3, 8] {
        for deviations in
            [[0.0, 0.0, 1.0], [1.0, 0.0, 1.0], [0.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 0.1]]
        {
            let share = coverage(0.0, 3, |draws| difference(&draw(draws, seeds, deviations)).interval);
            assert_share(&format!("{seeds} seeds, {deviations:?}"), share, 0.94, 1.0);
        }
    }
}

#[test]
fn intervals_of_answers_that_rarely_change_cover_the_truth_too() {
    const ROWS: usize = 200;
    for (seeds, rate) in [(2, 0.0005), (2, 0.004), (3, 0.0005), (3, 0.002), (3, 0.01), (8, 0.002)] {
        // Of the right answers 60 of 100 a share is lost, in each seed on rows of its own.
        let answers = |draws: &mut Draws| {
            let (mut reference, mut candidate) = (Vec::new(), Vec::new());
            for seed in 0..seeds {
                let own: Vec<f64> = (0..ROWS).map(|_| draws.answer(0.6)).collect();
                let other: Vec<f64> = own.iter().map(|right| right * draws.answer(1.0 - rate)).collect();
                reference.push(run(seed, &own));
                candidate.push(run(seed, &other));
            }
            difference(&task(reference, candidate)).interval
        };
        let share = coverage(-0.6 * rate, 5, answers);
        assert_share(&format!("{seeds} seeds, rate {rate}"), share, 0.94, 1.0);
    }
}
