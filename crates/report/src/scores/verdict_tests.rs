use super::super::draws::{self, Draws, ids};
use super::super::{ItemScores, RunScores, TaskRuns};
use super::*;

fn runs(of_seeds: Vec<Vec<f64>>) -> Vec<RunScores> {
    let run = |(seed, values): (u64, Vec<f64>)| RunScores {
        seed: Some(seed),
        scores: ItemScores::new(ids(values.len()), values, None).expect("scores"),
    };
    (1..).zip(of_seeds).map(run).collect()
}

fn difference(reference: Vec<Vec<f64>>, candidate: Vec<Vec<f64>>) -> SeedDifference {
    let task = TaskRuns { chance: 0.0, reference: runs(reference), candidate: runs(candidate) };
    SeedDifference::of_task(&task).expect("the same rows").expect("rows")
}

/// 2,000 rows of which the first are right.
fn right(count: usize) -> Vec<f64> {
    (0..2000).map(|row| f64::from(u8::from(row < count))).collect()
}

/// 2,000 rows of which these are right.
fn right_from(first: usize, count: usize) -> Vec<f64> {
    (0..2000).map(|row| f64::from(u8::from((first..first + count).contains(&row)))).collect()
}

fn seeds(counts: [usize; 3]) -> Vec<Vec<f64>> {
    counts.map(right).to_vec()
}

fn verdict(difference: &SeedDifference) -> TaskVerdict {
    TaskVerdict::new(difference, Variation::Seeds, MARGIN_POINTS)
}

#[test]
fn a_difference_that_lies_within_the_margin_is_inside() {
    let found = verdict(&difference(seeds([1000, 1004, 1008]), seeds([998, 1002, 1006])));
    assert_eq!((found.finding, found.settled_by), (Finding::Inside, None), "{found:?}");
    assert!((found.difference_points + 0.1).abs() < 1e-9, "{found:?}");
    assert_eq!(found.reason, "the whole interval lies within the margin of ±1 point");
    // Seeds that differ by the same leave the error of rows: 2 of 2000 differ.
    assert!(found.detectable_points.is_some_and(|points| (1.1..1.3).contains(&points)), "{found:?}");
}

#[test]
fn a_difference_beyond_the_margin_is_outside_in_both_directions() {
    let found = verdict(&difference(seeds([1000, 1004, 1008]), seeds([940, 944, 950])));
    assert_eq!(found.finding, Finding::Outside, "{found:?}");
    assert_eq!(found.reason, "worse by more than the margin of 1 point");
    let found = verdict(&difference(seeds([940, 944, 950]), seeds([1000, 1004, 1008])));
    assert_eq!(found.finding, Finding::Outside, "{found:?}");
    assert!(found.reason.starts_with("better by"), "{found:?}");
    // Pairs share the noise of seeds, however large it is; the verdict says so.
    let found = verdict(&difference(seeds([900, 1000, 1100]), seeds([840, 940, 1041])));
    assert_eq!((found.finding, found.inside_band), (Finding::Outside, Some(true)), "{found:?}");
    assert!(found.reason.contains("within ±17.57 points"), "{found:?}");
}

#[test]
fn a_difference_as_of_other_seeds_is_inside_unless_these_spread_far_over_the_margin() {
    // Seeds of the reference 0.7 points apart: a band of 2.46.
    let found = verdict(&difference(seeds([986, 1000, 1014]), seeds([970, 980, 1000])));
    assert_eq!(found.finding, Finding::Inside, "{found:?}");
    assert_eq!(
        found.reason,
        "other seeds of the reference would differ as much: they lie within ±2.46 points"
    );
    let found = verdict(&difference(seeds([970, 1000, 1030]), seeds([970, 980, 1000])));
    assert_eq!(found.finding, Finding::Unclear, "{found:?}");
    assert_eq!(found.inside_band, Some(true));
}

#[test]
fn an_unclear_difference_says_what_would_settle_it() {
    let found = verdict(&difference(seeds([1000, 1000, 1000]), seeds([998, 982, 992])));
    assert_eq!((found.finding, found.inside_band), (Finding::Unclear, Some(false)), "{found:?}");
    let Some(Settling::Seeds(count)) = found.settled_by else { panic!("{found:?}") };
    assert!((5..60).contains(&count), "{found:?}");
    assert!(found.reason.contains(&format!("about {count} seeds on each side")), "{found:?}");
    // At the margin itself nothing helps.
    let found = verdict(&difference(seeds([1000, 1000, 1000]), seeds([990, 980, 970])));
    assert_eq!((found.finding, found.settled_by), (Finding::Unclear, None), "{found:?}");
    assert!(found.reason.contains("no practical number"), "{found:?}");
    // Seeds agree, so that rows are missing.
    let of_seed = |_| (right_from(0, 1000), right_from(60, 996));
    let (reference, candidate) = (0..3).map(of_seed).unzip();
    let found = verdict(&difference(reference, candidate));
    let Some(Settling::Rows(rows)) = found.settled_by else { panic!("{found:?}") };
    assert!((4_000..9_000).contains(&rows), "{found:?}");
    assert!(found.reason.contains(" rows would settle it"), "{found:?}");
}

#[test]
fn one_seed_on_a_side_is_unclear_unless_the_weights_are_the_same() {
    let far = difference(vec![right(1000)], vec![right(900)]);
    let found = verdict(&far);
    assert_eq!((found.finding, found.band_points, found.detectable_points), (Finding::Unclear, None, None));
    assert!(found.reason.starts_with("a single seed on a side"), "{found:?}");
    let Some(Settling::Seeds(count)) = found.settled_by else { panic!("{found:?}") };
    assert!(found.reason.contains(&format!("at least {count} seeds")) && count >= 3, "{found:?}");
    let against_three = verdict(&difference(seeds([1000, 1004, 1008]), vec![right(900)]));
    assert_eq!((against_three.finding, against_three.inside_band), (Finding::Unclear, Some(false)));
    let same_weights = TaskVerdict::new(&far, Variation::Rows, 1.0);
    assert_eq!(same_weights.finding, Finding::Outside, "{same_weights:?}");
    let near = TaskVerdict::new(&difference(vec![right(1000)], vec![right(998)]), Variation::Rows, 1.0);
    assert_eq!(near.finding, Finding::Inside, "{near:?}");
    // 60 of 2000 rows each way: ±1.07 points.
    let wide = difference(vec![right_from(0, 1000)], vec![right_from(60, 1000)]);
    let found = TaskVerdict::new(&wide, Variation::Rows, 1.0);
    assert_eq!(
        (found.finding, found.settled_by),
        (Finding::Unclear, Some(Settling::Rows(4_800))),
        "{found:?}"
    );
    let half_width = found.interval_points.expect("rows").half_width();
    let detectable = 1.0 + half_width * 2.8034 / 1.9612;
    assert!((found.detectable_points.expect("rows") - detectable).abs() < 1e-3, "{found:?}");
}

#[test]
fn one_row_or_a_margin_that_is_no_number_has_a_verdict_too() {
    let found = TaskVerdict::new(&difference(vec![vec![0.3]], vec![vec![0.5]]), Variation::Rows, 1.0);
    assert_eq!((found.finding, found.interval_points, found.settled_by), (Finding::Unclear, None, None));
    assert!(found.reason.contains("a single row"), "{found:?}");
    for margin in [f64::NAN, -1.0, 0.0] {
        let found =
            TaskVerdict::new(&difference(seeds([9, 9, 9]), seeds([9, 9, 9])), Variation::Seeds, margin);
        assert_eq!((found.finding, found.margin_points), (Finding::Unclear, 0.0), "{found:?}");
    }
}

#[test]
fn a_verdict_is_json_without_nan() {
    let found = verdict(&difference(seeds([1000, 1000, 1000]), seeds([998, 982, 992])));
    let json = serde_json::to_value(&found).expect("JSON");
    assert_eq!(json["finding"], "unclear");
    assert!(json["settled_by"]["seeds"].is_u64() && json["interval_points"]["low"].is_f64(), "{json}");
    for finding in [Finding::Inside, Finding::Outside, Finding::Unclear] {
        assert_eq!(serde_json::json!(finding), finding.word());
    }
}

/// Chance of three seeds of both sides on 2,000 rows, of which 60% are right.
#[derive(Clone, Copy, Debug)]
struct Chance {
    /// Share of rows that each run answers in its own way. Pairs of one seed agree on them.
    of_seeds: f64,
    /// Share of rows that the candidate answers in its own way.
    of_candidate: f64,
    /// True if all seeds of the candidate change the same rows.
    is_shared: bool,
}

fn draw(draws: &mut Draws, chance: Chance, cost: f64) -> SeedDifference {
    let base: Vec<f64> = (0..2000).map(|_| draws.answer(0.6)).collect();
    let change = |draws: &mut Draws| -> Vec<Option<f64>> {
        let Chance { of_candidate, .. } = chance;
        let row = |_| (draws.answer(of_candidate) == 1.0).then(|| draws.answer(0.6 - cost / of_candidate));
        (0..2000).map(row).collect()
    };
    let shared = change(draws);
    let (mut reference, mut candidate) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        let again =
            |right: &f64| if draws.answer(chance.of_seeds) == 1.0 { draws.answer(0.6) } else { *right };
        let own: Vec<f64> = base.iter().map(again).collect();
        let changed = if chance.is_shared { shared.clone() } else { change(draws) };
        candidate.push(own.iter().zip(changed).map(|(right, changed)| changed.unwrap_or(*right)).collect());
        reference.push(own);
    }
    difference(reference, candidate)
}

#[test]
fn the_verdict_finds_two_points_where_paired_errors_allow_it_and_none_where_there_are_none() {
    let count = draws::count(100);
    let chance = |of_seeds, of_candidate, is_shared| Chance { of_seeds, of_candidate, is_shared };
    let mut allowed = 0;
    for chance in [
        chance(0.1, 0.034, true),
        chance(0.1, 0.034, false),
        chance(1.0, 0.034, true),
        chance(0.1, 0.1, false),
    ] {
        for cost in [0.0, 0.02] {
            let mut draws = Draws(9);
            let verdicts: Vec<_> = (0..count).map(|_| verdict(&draw(&mut draws, chance, cost))).collect();
            let share =
                |finding| verdicts.iter().filter(|v| v.finding == finding).count() as f64 / count as f64;
            let detectable = verdicts.iter().filter_map(|v| v.detectable_points).sum::<f64>() / count as f64;
            let [outside, inside, unclear] = [Finding::Outside, Finding::Inside, Finding::Unclear].map(share);
            let figures = format!(
                "{chance:?}, cost {cost}: OUTSIDE {outside:.3}, inside {inside:.3}, unclear {unclear:.3}, detectable \
                 {detectable:.2}"
            );
            if cost == 0.0 {
                assert!(outside <= 0.05, "{figures}");
            } else if detectable <= 2.0 {
                assert!(outside >= 0.8, "{figures}");
                allowed += 1;
            }
        }
    }
    assert!(allowed >= 2, "{allowed} cases allow two points to be seen");
}
