//! Promises on scores of tasks in a comparison, with files of scores of known differences.

use super::super::tests::run;
use super::*;
use crate::RunData;
use crate::scores::{Earlier, Finding, Pairing, RowScores, ScoresHeader, ScoresWriter, Settling};
use std::fs;
use std::path::PathBuf;
use xtrain_model::Recipe;

/// Runs of 200 steps in folders with files of scores.
struct Runs {
    folder: tempfile::TempDir,
    runs: Vec<RunData>,
    base: usize,
}

/// A row of two choices, which is right or wrong.
fn answer(row: u64, is_right: bool) -> RowScores {
    let logprobs = if is_right { vec![-1.0, -2.0] } else { vec![-2.0, -1.0] };
    RowScores {
        row,
        gold: Some(0),
        logprobs,
        greedy: vec![false; 2],
        tokens: vec![1; 2],
        characters: vec![1; 2],
        bytes: vec![1; 2],
        ..RowScores::default()
    }
}

/// Rows of which six of ten are right, in another order for each seed; then `wrong` of the right ones are
/// wrong.
fn answers(rows: u64, seed: u64, wrong: usize) -> Vec<RowScores> {
    let is_right = |row: &u64| (row * 7919 + seed * 31) % 10 < 6;
    let damaged: Vec<u64> = (1..=rows).filter(is_right).take(wrong).collect();
    (1..=rows).map(|row| answer(row, is_right(&row) && !damaged.contains(&row))).collect()
}

fn header(task: &str, rows: &[RowScores]) -> ScoresHeader {
    ScoresHeader {
        task: task.into(),
        hash: format!("{task}-0123456789abcdef"),
        protocol: 1,
        shots: 0,
        rows: rows.len() as u64,
        limit: None,
        metric: "acc".into(),
        chance: 0.5,
        model: "a".into(),
        model_hash: "01".into(),
        step: Some(200),
        precision: Recipe::Bf16,
    }
}

fn fp8(header: ScoresHeader) -> ScoresHeader {
    ScoresHeader { precision: Recipe::Fp8Block, ..header }
}

impl Runs {
    /// Runs `bf16-N`, the baseline, and `fp8-N` of these seeds.
    fn new(baseline: &[u64], compared: &[u64]) -> Self {
        let named = |recipe: &'static str, name: &'static str| {
            move |seed: &u64| run(&format!("{name}-{seed}"), recipe, *seed, 200, 0.0)
        };
        let own = baseline.iter().map(named("bf16", "bf16"));
        let runs = own.chain(compared.iter().map(named("fp8-block", "fp8"))).collect();
        Runs { folder: tempfile::tempdir().expect("a folder"), runs, base: baseline.len() }
    }

    fn path(&self, run: &str, header: &ScoresHeader) -> PathBuf {
        let step = header.step.unwrap_or(0);
        let name = format!("{run}/scores/{}/step-{step}.{}.jsonl", header.hash, header.precision.name());
        self.folder.path().join(name)
    }

    fn write(&self, run: &str, header: &ScoresHeader, rows: &[RowScores]) -> PathBuf {
        let path = self.path(run, header);
        let (mut writer, _) = ScoresWriter::open(&path, header, Earlier::Used).expect("begun");
        writer.append(rows).expect("written");
        writer.finish().expect("named");
        path
    }

    /// Scores of the run on a task, of its last step and in its own precision.
    fn score(&self, run: &str, task: &str, rows: &[RowScores]) -> PathBuf {
        let header = header(task, rows);
        self.write(run, &if run.starts_with("fp8") { fp8(header) } else { header }, rows)
    }

    fn compare_with(&self, settings: TaskSettings) -> Comparison {
        let mut comparison = Comparison::new(self.runs.clone(), self.base, 100);
        comparison.notes.clear();
        let names =
            comparison.baseline.runs.iter().chain(comparison.compared.iter().flat_map(|gap| &gap.runs));
        let files: Vec<ScoreFiles> =
            names.map(|name| ScoreFiles::of_run(&self.folder.path().join(name))).collect();
        compare_tasks(&mut comparison, &files, settings);
        comparison
    }

    fn compare(&self) -> Comparison {
        self.compare_with(TaskSettings { last_checkpoints: 1, margin_points: 1.0 })
    }

    fn last(&self, last_checkpoints: usize) -> Comparison {
        self.compare_with(TaskSettings { last_checkpoints, margin_points: 1.0 })
    }
}

fn only(comparison: &Comparison) -> &TaskGap {
    let tasks = &comparison.compared[0].tasks;
    assert_eq!(tasks.len(), 1, "{tasks:#?} {:?}", comparison.notes);
    &tasks[0]
}

/// The comparison has no number, and one note, which says these words.
#[track_caller]
fn assert_refused(comparison: &Comparison, words: &[&str]) {
    assert!(comparison.compared[0].tasks.is_empty(), "{:?}", comparison.compared[0].tasks);
    assert_eq!(comparison.notes.len(), 1, "{:?}", comparison.notes);
    for word in words {
        assert!(comparison.notes[0].contains(word), "{word}: {:?}", comparison.notes);
    }
}

#[test]
fn three_points_are_outside_and_few_changed_rows_are_inside() {
    for (wrong, finding, points) in [(60, Finding::Outside, -3.0), (4, Finding::Inside, -0.2)] {
        let runs = Runs::new(&[1, 2, 3], &[1, 2, 3]);
        for seed in 1..=3 {
            runs.score(&format!("bf16-{seed}"), "easy", &answers(2000, seed, 0));
            runs.score(&format!("fp8-{seed}"), "easy", &answers(2000, seed, wrong));
        }
        let comparison = runs.compare();
        assert_eq!(comparison.notes, [""; 0]);
        let task = only(&comparison);
        let verdict = &task.gap.verdict;
        assert_eq!(
            (verdict.finding, task.gap.pairing, task.gap.seeds),
            (finding, Pairing::BySeed, 3),
            "{task:?}"
        );
        assert!((verdict.difference_points - points).abs() < 1e-9, "{task:?}");
        assert!((task.gap.baseline_score - 0.6).abs() < 1e-9, "{task:?}");
        assert_eq!(
            (task.gap.rows, &task.runs[2].steps[..], task.runs[2].precision),
            (2000, &[200][..], "fp8-block")
        );
        // One task has no mean.
        assert_eq!(comparison.compared[0].task_mean, None);
    }
}

#[test]
fn few_rows_or_one_seed_are_unclear_and_the_table_says_what_settles_it() {
    let runs = Runs::new(&[1, 2, 3], &[1, 2, 3]);
    for seed in 1..=3 {
        runs.score(&format!("bf16-{seed}"), "easy", &answers(60, seed, 0));
        runs.score(&format!("fp8-{seed}"), "easy", &answers(60, seed, 2));
    }
    let comparison = runs.compare();
    let verdict = &only(&comparison).gap.verdict;
    assert_eq!(verdict.finding, Finding::Unclear, "{verdict:?}");
    let Some(Settling::Seeds(_) | Settling::Rows(_)) = verdict.settled_by else { panic!("{verdict:?}") };
    let table = comparison.task_table().expect("a table");
    assert_eq!(table.groups[0].rows[0].0, "easy");
    assert_eq!(table.groups[0].rows[0].1[7].as_deref(), Some("3 pairs"));
    let [term, reason] = &table.reasons[0];
    assert_eq!(term, "easy");
    for word in ["unclear: ", "would settle it", "in 80% of"] {
        assert!(reason.contains(word), "{reason}");
    }

    let runs = Runs::new(&[1], &[1]);
    runs.score("bf16-1", "easy", &answers(2000, 1, 0));
    runs.score("fp8-1", "easy", &answers(2000, 1, 100));
    let comparison = runs.compare();
    let task = only(&comparison);
    assert_eq!((task.gap.verdict.finding, task.gap.pairing), (Finding::Unclear, Pairing::OneSeed));
    assert!(task.gap.verdict.reason.starts_with("a single seed"), "{task:?}");
    // Rows are paired: 100 of 2000 differ, all in one direction.
    let interval = task.gap.verdict.interval_points.expect("rows");
    assert!((4.0..5.0).contains(&-interval.high) && interval.low > -6.2, "{interval:?}");
    let page = comparison.html();
    for part in ["<h2>Tasks</h2>", "<b>-5.00</b>", ">Verdict</th>", "<dt>easy</dt>"] {
        assert!(page.contains(part), "{part}");
    }
}

#[test]
fn other_tasks_shots_protocols_and_numbers_of_rows_have_no_number_but_a_note() {
    let rows = answers(40, 1, 0);
    let base = header("easy", &rows);
    let few = &rows[..20];
    for (other, words) in [
        (
            ScoresHeader { hash: "fedcba9876543210".into(), ..base.clone() },
            ["hash fedcba987654, ", "hash", "task file"],
        ),
        (ScoresHeader { shots: 5, ..base.clone() }, ["shots 5, ", "baseline 0", "fp8-1"]),
        (ScoresHeader { protocol: 2, ..base.clone() }, ["protocol 2, ", "baseline 1", "easy is not"]),
        (header("easy", few), ["rows 20, ", "baseline 40", "--limit"]),
    ] {
        let runs = Runs::new(&[1], &[1]);
        runs.write("bf16-1", &base, &rows);
        runs.write("fp8-1", &fp8(other.clone()), &rows[..other.rows as usize]);
        assert_refused(&runs.compare(), &words);
    }
    // A task of another name is not compared either.
    let runs = Runs::new(&[1], &[1]);
    runs.score("bf16-1", "easy", &rows);
    let comparison = runs.compare();
    assert_refused(&comparison, &["fp8-1: no scores of easy", "xtrain eval"]);
    assert!(comparison.task_table().is_none());
    runs.score("fp8-1", "hard", &rows);
    assert_eq!(runs.compare().notes.len(), 2);
}

#[test]
fn without_scores_nothing_is_said() {
    let runs = Runs::new(&[1], &[1]);
    let comparison = runs.compare();
    assert_eq!((comparison.notes.len(), comparison.task_table()), (0, None));
    let json = serde_json::to_value(&comparison).expect("JSON");
    assert!(json["compared"][0].get("tasks").is_none() && json["compared"][0].get("task_mean").is_none());
    assert!(!comparison.html().contains("<h2>Tasks"));
    // An interrupted evaluation has no scores.
    let path = runs.score("bf16-1", "easy", &answers(9, 1, 0));
    fs::rename(&path, ScoresWriter::partial(&path)).expect("renamed");
    assert_eq!(runs.compare().notes, [""; 0]);
}

#[test]
fn both_sides_can_have_several_versions_of_a_task() {
    let runs = Runs::new(&[1], &[1]);
    let rows = answers(40, 1, 0);
    for name in ["bf16-1", "fp8-1"] {
        let precision = if name == "fp8-1" { Recipe::Fp8Block } else { Recipe::Bf16 };
        let all = ScoresHeader { precision, ..header("easy", &rows) };
        runs.write(name, &all, &rows);
        runs.write(name, &ScoresHeader { step: Some(100), ..all.clone() }, &rows);
        // Of fewer rows, which stand in a file of another name.
        let few = runs.write(name, &ScoresHeader { rows: 20, step: Some(150), ..all.clone() }, &rows[..20]);
        fs::rename(&few, few.with_file_name("step-200.first-20.jsonl")).expect("renamed");
        runs.write(name, &ScoresHeader { hash: "other".into(), shots: 5, ..all }, &rows);
    }
    let comparison = runs.compare();
    assert_eq!(comparison.notes, [""; 0]);
    let found: Vec<_> = comparison.compared[0].tasks.iter().map(|task| (task.shots, task.gap.rows)).collect();
    assert_eq!(found, [(0, 40), (5, 40)]);
    let are_in_mean: Vec<bool> = comparison.compared[0].tasks.iter().map(|task| task.in_mean).collect();
    assert_eq!((are_in_mean, &comparison.compared[0].task_mean), (vec![true, false], &None));
    let table = comparison.task_table().expect("a table");
    let names: Vec<&str> = table.groups[0].rows.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["easy (0 shots, easy-0123456)", "easy (5 shots, other)"]);
}

#[test]
fn damaged_files_leave_their_run_out() {
    let runs = Runs::new(&[1, 2], &[1, 2]);
    for seed in 1..=2 {
        runs.score(&format!("bf16-{seed}"), "easy", &answers(100, seed, 0));
    }
    runs.score("fp8-1", "easy", &answers(100, 1, 0));
    let path = runs.score("fp8-2", "easy", &answers(100, 2, 0));
    let whole = fs::read_to_string(&path).expect("text");
    let damages =
        [whole.replacen("\"row\":50,", "\"row\":", 1), whole.lines().take(30).collect::<Vec<_>>().join("\n")];
    for damaged in damages.into_iter().chain(["{}\n".into(), String::new()]) {
        fs::write(&path, damaged).expect("written");
        let comparison = runs.compare();
        let task = only(&comparison);
        assert_eq!((task.gap.pairing, task.runs.len()), (Pairing::OneSeed, 1), "{task:?}");
        assert!(comparison.notes.iter().all(|note| note.starts_with("fp8-2: ")), "{:?}", comparison.notes);
        assert!(comparison.notes[0].contains(".jsonl, line "), "{:?}", comparison.notes);
    }
    // Nothing is left to compare.
    fs::write(runs.path("fp8-1", &fp8(header("easy", &answers(100, 1, 0)))), "{").expect("written");
    assert!(runs.compare().compared[0].tasks.is_empty());
}

#[test]
fn the_rows_of_the_last_checkpoints_are_averaged_first() {
    let runs = Runs::new(&[1], &[1]);
    let at = |step: u64, rows: &[RowScores]| ScoresHeader { step: Some(step), ..header("easy", rows) };
    for (step, own, other) in [(100, 0, 50), (150, 0, 10), (200, 10, 0)] {
        let rows = answers(100, 1, own);
        runs.write("bf16-1", &at(step, &rows), &rows);
        let rows = answers(100, 1, other);
        runs.write("fp8-1", &fp8(at(step, &rows)), &rows);
    }
    let points = |last: usize| {
        let comparison = runs.last(last);
        let task = only(&comparison);
        (task.gap.verdict.difference_points.round(), task.runs[0].steps.clone())
    };
    assert_eq!(points(1), (10.0, vec![200]));
    assert_eq!(points(2), (0.0, vec![150, 200]));
    assert_eq!(points(3), (-17.0, vec![100, 150, 200]));
    let comparison = runs.last(4);
    assert!(comparison.compared[0].tasks.is_empty());
    assert!(comparison.notes[0].contains("at 3 of 4 checkpoints"), "{:?}", comparison.notes);
}

#[test]
fn runs_are_compared_at_their_last_common_step() {
    let runs = Runs::new(&[1], &[1]);
    let rows = answers(50, 1, 0);
    let at = |step: u64| ScoresHeader { step: Some(step), ..header("easy", &rows) };
    for step in [100, 150, 200] {
        runs.write("bf16-1", &at(step), &rows);
    }
    runs.write("fp8-1", &fp8(at(100)), &rows);
    let comparison = runs.compare();
    assert_eq!(only(&comparison).baseline_runs[0].steps, [100]);
    assert_eq!(comparison.notes.len(), 1, "{:?}", comparison.notes);
    assert!(comparison.notes[0].contains("at step 100, "), "{:?}", comparison.notes);
    // Without one, each is at its own last step.
    fs::remove_file(runs.path("fp8-1", &fp8(at(100)))).expect("removed");
    runs.write("fp8-1", &fp8(at(190)), &rows);
    let comparison = runs.compare();
    assert_eq!(only(&comparison).baseline_runs[0].steps, [200]);
    assert_eq!(comparison.notes.len(), 1, "{:?}", comparison.notes);
    assert!(comparison.notes[0].contains("(bf16-1 200, fp8-1 190)"), "{:?}", comparison.notes);
}

#[test]
fn a_run_counts_in_its_own_precision() {
    let runs = Runs::new(&[1], &[1]);
    let rows = answers(50, 1, 0);
    runs.score("bf16-1", "easy", &rows);
    let in_bf16 = header("easy", &answers(50, 1, 5));
    runs.write("fp8-1", &in_bf16, &answers(50, 1, 5));
    // Only another one is there: it is used, with a note.
    let comparison = runs.compare();
    assert_eq!(only(&comparison).runs[0].precision, "bf16");
    assert!(comparison.notes[0].contains("in bf16 only"), "{:?}", comparison.notes);
    runs.write("fp8-1", &ScoresHeader { precision: Recipe::Fp32, ..in_bf16.clone() }, &answers(50, 1, 5));
    assert_refused(&runs.compare(), &["fp8-1: easy was scored", "bf16, fp32", "left out"]);
    runs.score("fp8-1", "easy", &rows);
    let comparison = runs.compare();
    assert_eq!(only(&comparison).gap.verdict.difference_points, 0.0);
    assert_eq!((comparison.notes.len(), only(&comparison).runs[0].precision), (0, "fp8-block"));
}

#[test]
fn clusters_widen_the_interval() {
    let width = |clusters: Option<u64>| {
        let runs = Runs::new(&[1, 2], &[1, 2]);
        for seed in 1..=2 {
            for (name, wrong) in [("bf16", 0), ("fp8", 60)] {
                let mut rows = answers(1000, seed, wrong);
                for row in rows.iter_mut() {
                    row.cluster = clusters.map(|size| (row.row / size).to_string());
                }
                runs.score(&format!("{name}-{seed}"), "easy", &rows);
            }
        }
        let comparison = runs.compare();
        let task = only(&comparison);
        assert_eq!(task.clusters, clusters.map(|_| 21));
        task.gap.verdict.interval_points.expect("rows").half_width()
    };
    assert!(width(Some(50)) > 2.0 * width(None));
}

#[test]
fn several_tasks_have_a_mean_above_chance_without_bits() {
    let runs = Runs::new(&[1, 2, 3], &[1, 2, 3]);
    let bits = |seed: u64, more: f64| -> Vec<RowScores> {
        let row = |row: u64| RowScores {
            row,
            gold: Some(0),
            logprobs: vec![-(1.0 + more + (row * seed % 7) as f64 / 100.0) * std::f64::consts::LN_2],
            greedy: vec![false],
            tokens: vec![1],
            characters: vec![1],
            bytes: vec![1],
            ..RowScores::default()
        };
        (1..=50).map(row).collect()
    };
    for seed in 1..=3 {
        for (name, wrong, more) in [("bf16", 0, 0.0), ("fp8", 60, 0.02)] {
            let name = format!("{name}-{seed}");
            runs.score(&name, "easy", &answers(2000, seed, wrong));
            runs.score(&name, "hard", &answers(2000, seed + 4, 2 * wrong));
            let rows = bits(seed, more);
            let header = ScoresHeader { metric: "gold_bpb".into(), chance: 0.0, ..header("words", &rows) };
            runs.write(&name, &if wrong > 0 { fp8(header) } else { header }, &rows);
        }
    }
    let comparison = runs.compare();
    assert_eq!(comparison.notes, [""; 0]);
    let gap = &comparison.compared[0];
    let are_in_mean: Vec<bool> = gap.tasks.iter().map(|task| task.in_mean).collect();
    assert_eq!(are_in_mean, [true, true, false]);
    // 3 and 6 points of 50 over chance.
    let mean = gap.task_mean.as_ref().expect("a mean");
    assert_eq!((mean.tasks, mean.gap.rows), (2, 4000));
    assert!((mean.gap.verdict.difference_points + 9.0).abs() < 1e-9, "{mean:?}");
    assert_eq!(mean.gap.verdict.finding, Finding::Outside);
    // More bits are worse, and the difference is that of the numbers shown.
    let words = &gap.tasks[2];
    assert!(words.lower_is_better && (words.gap.score - words.gap.baseline_score - 0.02).abs() < 1e-9);
    let verdict = &words.gap.verdict;
    assert!(
        (verdict.difference_points - 2.0).abs() < 1e-9 && verdict.reason.starts_with("worse"),
        "{verdict:?}"
    );
    let interval = verdict.interval_points.expect("rows");
    assert!(interval.low <= 2.0 + 1e-9 && interval.high >= 2.0 - 1e-9 && interval.low > 0.0, "{interval:?}");
    let json = serde_json::to_value(&comparison).expect("JSON");
    let json = &json["compared"][0];
    assert_eq!((&json["tasks"][0]["task"], &json["task_mean"]["tasks"]), (&"easy".into(), &2.into()));
    assert_eq!(json["tasks"][0]["verdict"]["finding"], "OUTSIDE");
    assert_eq!(json["tasks"][0]["runs"][1]["seed"], 2);
    let table = comparison.task_table().expect("a table");
    let rows: Vec<&str> = table.groups[0].rows.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(rows, ["easy", "hard", "words", "mean of 2 tasks"]);
}

#[test]
fn a_copy_of_a_run_that_stopped_early_does_not_shorten_the_comparison() {
    let mut runs = Runs::new(&[1], &[1]);
    runs.runs.push(RunData { name: "fp8-copy".into(), ..runs.runs[1].clone() });
    let rows = answers(50, 1, 0);
    let at = |step: u64| ScoresHeader { step: Some(step), ..header("easy", &rows) };
    for (name, step) in [("bf16-1", 100), ("bf16-1", 200), ("fp8-1", 200), ("fp8-copy", 100)] {
        let header = at(step);
        runs.write(name, &if name == "bf16-1" { header } else { fp8(header) }, &rows);
    }
    let comparison = runs.compare();
    let task = only(&comparison);
    assert_eq!((task.runs.len(), &task.runs[0].steps[..]), (1, &[200][..]), "{task:?}");
    assert_eq!(comparison.notes, [""; 0]);
}
