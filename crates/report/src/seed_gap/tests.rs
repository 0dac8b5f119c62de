//! Promises to readers of a comparison.

use super::*;
use crate::RunSummary;
use crate::fragments::assert_says;
use crate::messages::assert_message;
use crate::metrics::{EvalMetrics, Event, Record, Resumed, StepMetrics};
use xtrain_model::Recipe;

/// A run of `steps` steps of 1000 tokens: its loss falls from 10 to 2 and is `1 + over` times that, with
/// noise of its batches, which are those of its seed.
pub(super) fn run(name: &str, recipe: &str, seed: u64, steps: u64, over: f64) -> RunData {
    let noise = |step: u64| ((step * 7919 + seed * 104_729) % 1000) as f64 / 1000.0 - 0.5;
    let mut records = Vec::new();
    let mut add = |event: Event| records.push(Record { time: 1.764e9, event });
    for step in 1..=steps {
        let loss = (2.0 + 8.0 * (-(step as f64) / 20.0).exp()) * (1.0 + over) * (1.0 + 0.02 * noise(step));
        add(StepMetrics { step, loss, lr: 1e-3, tokens: step * 1000, ..StepMetrics::default() }.into());
        if step % 50 == 0 {
            add(EvalMetrics { step, loss: 2.5 * (1.0 + over), ..EvalMetrics::default() }.into());
        }
    }
    let config = format!(
        "[model]\ndim = 16\nlayers = 1\nheads = 1\n[data]\ntrain = \"a.txt\"\ntokenizer = \"bytes\"\n[precision]\nrecipe = \"{recipe}\"\n\
         [train]\nsteps = {steps}\nseed = {seed}\n"
    );
    RunData { name: name.into(), records, config: Some(config), ..RunData::default() }
}

fn compare(runs: &[RunData], base: usize) -> Comparison {
    Comparison::new(runs.to_vec(), base, 100)
}

fn training(comparison: &Comparison) -> &LossGap {
    comparison.compared[0].training.as_ref().unwrap_or_else(|| panic!("{:?}", comparison.notes))
}

fn steps_of(run: &mut RunData) -> impl Iterator<Item = &mut StepMetrics> {
    run.records.iter_mut().filter_map(|record| match &mut record.event {
        Event::Step(metrics) => Some(metrics),
        _ => None,
    })
}

#[test]
fn runs_of_one_seed_show_their_gap_without_the_noise_of_batches() {
    let runs = [run("bf16", "bf16", 1, 200, 0.0), run("fp8", "fp8-block", 1, 200, 0.002)];
    let comparison = compare(&runs, 1);
    let figure = training(&comparison);
    assert!((figure.gap_percent - 0.2).abs() < 1e-9, "{figure:?}");
    assert_eq!((figure.from, figure.to, figure.paired), (101, 200, 1));
    assert_eq!((figure.seed_spread_percent, figure.inside_spread), (None, None));
    assert_eq!((comparison.compared[0].bar_percent, figure.inside_bar), (Some(0.25), None));
    let validation = comparison.compared[0].validation.as_ref().expect("both were evaluated");
    assert!((validation.gap_percent - 0.2).abs() < 1e-9 && validation.to == 200, "{validation:?}");
    assert_eq!(comparison.notes.len(), 1, "{:?}", comparison.notes);
    assert!(comparison.notes[0].starts_with("fp8: unclear, because a single seed"), "{:?}", comparison.notes);
    assert!(comparison.notes[0].contains("--set train.seed=1"), "{:?}", comparison.notes);
}

#[test]
fn the_bar_is_that_of_the_recipe() {
    for (recipe, bar) in [("fp8-row", 0.25), ("fp8-block", 0.25), ("fp8-current", 0.5)] {
        let runs = [run("a", "bf16", 1, 100, 0.0), run("b", recipe, 1, 100, 0.012)];
        let comparison = compare(&runs, 1);
        assert_eq!(comparison.compared[0].bar_percent, Some(bar), "{recipe}");
        // One seed is clear outside of three times the bar, and nowhere else.
        assert_eq!(training(&comparison).inside_bar, (bar < 0.4).then_some(false), "{recipe}");
    }
    let runs = [run("a", "bf16", 1, 100, 0.0), run("b", "bf16", 2, 100, 0.0)];
    assert_eq!(compare(&runs, 1).compared[0].bar_percent, None);
}

#[test]
fn seeds_of_the_baseline_tell_how_far_chance_goes() {
    let seeds = [(1, -0.001), (2, 0.0), (3, 0.001)];
    let mut runs: Vec<RunData> =
        seeds.iter().map(|&(seed, over)| run(&format!("bf16-{seed}"), "bf16", seed, 200, over)).collect();
    runs.push(run("fp8-2", "fp8-current", 2, 200, 0.003));
    runs.push(run("far-2", "fp8-row", 2, 200, 0.2));
    let comparison = compare(&runs, 3);
    assert_eq!(comparison.baseline.runs, ["bf16-1", "bf16-2", "bf16-3"]);
    let figure = training(&comparison);
    let deviation = figure.seed_deviation_percent.expect("three seeds");
    assert!((0.05..0.2).contains(&deviation), "{figure:?}");
    let spread = figure.seed_spread_percent.expect("three seeds");
    assert!((spread / deviation - 4.302_653 * (4.0f64 / 3.0).sqrt()).abs() < 1e-6, "{figure:?}");
    assert!((figure.gap_percent - 0.3).abs() < 1e-9, "against its own seed: {figure:?}");
    assert_eq!((figure.inside_spread, figure.inside_bar), (Some(true), Some(true)));
    let far = comparison.compared[1].training.as_ref().expect("a gap");
    assert_eq!((far.inside_spread, far.inside_bar), (Some(false), Some(false)));
}

#[test]
fn runs_that_differ_in_their_seed_alone_are_one_row_with_an_interval() {
    let runs = [
        run("bf16-1", "bf16", 1, 200, 0.0),
        run("bf16-2", "bf16", 2, 200, 0.0),
        run("fp8-1", "fp8-block", 1, 200, 0.001),
        run("other", "fp8-row", 1, 200, 0.001),
        run("fp8-2", "fp8-block", 2, 200, 0.003),
    ];
    let comparison = compare(&runs, 2);
    let names: Vec<_> = comparison.compared.iter().map(|gap| gap.runs.join(" ")).collect();
    assert_eq!(names, ["fp8-1 fp8-2", "other"]);
    let figure = training(&comparison);
    assert_eq!(figure.paired, 2);
    assert!((figure.gap_percent - 0.2).abs() < 1e-9, "{figure:?}");
    // Two gaps 0.2% apart: 12.7062 s / sqrt 2 with s = 0.2% / sqrt 2.
    assert!((figure.gap_interval_percent.expect("two") - 1.270_620_5).abs() < 1e-6, "{figure:?}");
}

#[test]
fn runs_that_left_the_same_layers_in_bf16_are_one_row_however_slow_these_were() {
    let left = |name: &str, seed, slower: &str| {
        let run = run(name, "fp8-row", seed, 100, 0.0);
        let config = run.config.clone().unwrap_or_default();
        let config = config.replace("[train]", &format!("skip_slower = [{slower}]\n[train]"));
        RunData { config: Some(config), ..run }
    };
    let o_proj = |speed: f64| format!("{{ layer = \"attn.o_proj\", speed = {speed}, tokens = 64 }}");
    let runs = [
        run("bf16", "bf16", 1, 100, 0.0),
        left("a", 1, &o_proj(0.91)),
        left("b", 2, &o_proj(0.93)),
        left("c", 3, ""),
        run("d", "fp8-row", 4, 100, 0.0),
    ];
    let rows = compare(&runs, 1).compared;
    assert_eq!(rows.len(), 2, "those that left one, and those that left none");
}

#[test]
fn evaluations_before_training_are_no_result() {
    // Later ones are at steps 50 and 100 of the one, and at 60 and 110 of the other.
    let runs = [("bf16", 0), ("fp8-block", 10)].map(|(recipe, later)| {
        let mut run = run(recipe, recipe, 1, 100, 0.0);
        for record in &mut run.records {
            if let Event::Eval(metrics) = &mut record.event {
                metrics.step += later;
            }
        }
        let before = EvalMetrics { step: 0, loss: 5.0, ..EvalMetrics::default() };
        run.records.insert(0, Record { time: 1.764e9, event: before.into() });
        run
    });
    let comparison = compare(&runs, 1);
    assert_eq!(comparison.compared[0].validation.as_ref().map(|f| f.to), None);
    let notes = comparison.notes.join("\n");
    assert_says("compare, no evaluation", notes);
}

#[test]
fn a_shorter_run_is_compared_where_it_ends_and_that_is_said() {
    let mut short = run("short", "fp8-block", 1, 120, 0.0);
    short.summary = RunSummary { total_steps: Some(200), ..RunSummary::default() };
    steps_of(&mut short).for_each(|m| m.lr = 2e-3);
    let comparison = compare(&[run("bf16", "bf16", 1, 200, 0.0), short], 1);
    let figure = training(&comparison);
    assert_eq!((figure.from, figure.to), (21, 120));
    assert!(figure.gap_percent.abs() < 1e-9, "{figure:?}");
    assert_eq!(comparison.compared[0].validation.as_ref().map(|f| f.to), Some(100));
    let notes = comparison.notes.join("\n");
    for said in ["short: at step 120 of 200", "learning rates range from 1.00e-3 to 2.00e-3", "train.steps"] {
        assert!(notes.contains(said), "{said} in {notes}");
    }
}

#[test]
fn steps_that_a_resumed_run_made_twice_count_once() {
    let whole = run("fp8", "fp8-block", 1, 200, 0.002);
    let mut resumed = whole.clone();
    let again: Vec<Record> =
        whole.records.iter().filter(|record| record.event.step() > 150).cloned().collect();
    let spoiled = resumed.records.iter_mut().filter(|record| record.event.step() > 150);
    spoiled.for_each(|record| {
        if let Event::Step(metrics) = &mut record.event {
            metrics.loss *= 3.0;
        }
    });
    resumed.records.push(Record { time: 0.0, event: Resumed::after(150).into() });
    resumed.records.extend(again);
    let base = run("bf16", "bf16", 1, 200, 0.0);
    let gap = |run: RunData| training(&compare(&[base.clone(), run], 1)).gap_percent;
    assert_eq!(gap(resumed), gap(whole));
}

#[test]
fn the_seeds_of_the_first_run_are_found() {
    let runs = [
        run("a", "bf16", 1, 100, 0.0),
        run("b", "fp8-row", 1, 100, 0.0),
        run("c", "bf16", 2, 100, 0.0),
        run("d", "fp8-row", 2, 100, 0.0),
    ];
    assert_eq!(groups::like_the_first(&runs), [true, false, true, false]);
}

#[test]
fn a_gap_whose_interval_reaches_over_the_bar_is_unclear() {
    let inside = |over: [f64; 2]| {
        let mut runs: Vec<RunData> =
            [1, 2].map(|seed| run(&format!("bf16-{seed}"), "bf16", seed, 200, 0.0)).into();
        for (seed, over) in [1, 2].into_iter().zip(over) {
            runs.push(run(&format!("fp8-{seed}"), "fp8-block", seed, 200, over));
        }
        training(&compare(&runs, 2)).inside_bar
    };
    assert_eq!(inside([0.001, 0.001]), Some(true));
    assert_eq!(inside([0.001, 0.003]), None);
    assert_eq!(inside([0.02, 0.02001]), Some(false));
}

#[test]
fn a_run_that_changed_its_recipe_is_told() {
    let mut fp8 = run("fp8", "fp8-block", 1, 200, 0.0);
    let switched = Some([Recipe::Bf16, Recipe::Fp8Block]);
    fp8.records.insert(150, Record { time: 0.0, event: Resumed { step: 150, switched }.into() });
    let comparison = compare(&[run("bf16", "bf16", 1, 200, 0.0), fp8], 1);
    let note = "fp8: went from bf16 to fp8-block after step 150, so the gap is that of both";
    assert!(comparison.notes.iter().any(|own| own == note), "{:?}", comparison.notes);
}

#[test]
fn steps_of_other_sizes_are_compared_by_tokens() {
    let mut larger = run("larger", "fp8-block", 1, 50, 0.0);
    steps_of(&mut larger).for_each(|m| m.tokens *= 4);
    let comparison = compare(&[run("bf16", "bf16", 1, 200, 0.0), larger], 1);
    assert_eq!(comparison.counted_in, "tokens");
    let figure = training(&comparison);
    assert_eq!(figure.to, 200_000);
    assert!((100_000..=104_000).contains(&figure.from), "{figure:?}");
}

#[test]
fn what_cannot_be_told_is_not_and_the_notes_say_why() {
    let base = run("bf16", "bf16", 1, 200, 0.0);
    let mut diverged = run("diverged", "fp8-block", 1, 200, 0.0);
    steps_of(&mut diverged).filter(|m| m.step > 190).for_each(|m| m.loss = f64::NAN);
    let mut unknown = run("unknown", "fp8-block", 1, 200, 0.0);
    unknown.config = Some("no toml".into());
    unknown.problems = vec!["metrics.jsonl line 3: what?".into()];
    let empty = RunData { name: "empty".into(), ..RunData::default() };
    let comparison = compare(&[base.clone(), diverged, unknown, empty.clone()], 1);
    let is_compared: Vec<bool> = comparison.compared.iter().map(|gap| gap.training.is_some()).collect();
    assert_eq!(is_compared, [false, true, false]);
    let notes = comparison.notes.join("\n");
    for said in [
        "diverged: 10 of the 100 losses to be averaged are not finite",
        "unknown: metrics.jsonl line 3: what?",
        "unknown, empty: the configuration cannot be read",
        "empty: no step has been reported yet",
    ] {
        assert!(notes.contains(said), "{said} in {notes}");
    }
    // Nor do pages of such runs fail.
    assert!(comparison.html().contains("diverged"));
    assert!(compare(&[empty.clone(), base, empty], 1).html().contains("</html>"));
}

#[test]
fn the_page_shows_the_gap_with_the_spread_of_seeds_and_the_bar() {
    let runs = [
        run("bf16-1", "bf16", 1, 300, 0.0),
        run("bf16-2", "bf16", 2, 300, 0.0005),
        run("<b>fp8", "fp8-block", 1, 300, 0.001),
        run("<b>fp8 2", "fp8-block", 2, 300, 0.0012),
    ];
    let page = compare(&runs, 2).html();
    for part in [
        "Gap to the baseline",
        "class=\"band c0\"",
        "class=\"band c1\"",
        "bar 0.25%",
        "spread of the baseline&#39;s seeds (95%)",
        "&lt;b&gt;fp8",
        "precision.recipe",
    ] {
        assert!(page.contains(part), "{part} in {page}");
    }
    assert!(!page.contains("<b>fp8") && !page.contains("NaN") && !page.contains("http"));
}

#[test]
fn the_spread_of_seeds_is_drawn_although_the_first_run_is_not_comparable() {
    let runs = [
        with_tokenizer(run("bf16-1", "bf16", 1, 300, 0.0), 1, 1.0),
        with_tokenizer(run("bf16-2", "bf16", 2, 300, 0.0005), 1, 1.0),
        with_tokenizer(run("other", "fp8-row", 1, 300, 0.0), 2, 1.7),
        with_tokenizer(run("fp8", "fp8-block", 1, 300, 0.001), 1, 1.0),
    ];
    let page = compare(&runs, 2).html();
    assert_eq!(page.matches("spread of the baseline&#39;s seeds (95%)").count(), 1);
}

#[test]
fn what_is_set_against_a_run_of_its_seed_is_shown_beside_that_run() {
    let runs = [
        run("low", "bf16", 1, 100, 0.0),
        run("high", "bf16", 2, 100, 0.1),
        run("fp8", "fp8-row", 2, 100, 0.1),
    ];
    let comparison = compare(&runs, 2);
    let figure = training(&comparison);
    assert_eq!((figure.gap_percent, figure.loss), (0.0, figure.baseline_loss));
    // Without its like it is set against all.
    let other = compare(&[runs[0].clone(), runs[1].clone(), run("fp8", "fp8-row", 3, 100, 0.1)], 2);
    let figure = training(&other);
    assert_eq!(figure.paired, 0);
    assert!((4.0..6.0).contains(&figure.gap_percent), "{figure:?}");
}

#[test]
fn a_gap_within_a_spread_of_seeds_far_over_the_bar_is_unclear() {
    let runs = [
        run("bf16-1", "bf16", 1, 200, 0.0),
        run("bf16-2", "bf16", 2, 200, 0.02),
        run("fp8", "fp8-block", 1, 200, 0.00365),
    ];
    let comparison = compare(&runs, 2);
    let figure = training(&comparison);
    assert!(figure.seed_spread_percent.is_some_and(|spread| spread > 10.0), "{figure:?}");
    assert_eq!((figure.inside_spread, figure.inside_bar), (Some(true), None));
    let note = comparison.notes.iter().find(|note| note.contains("far over the bar"));
    assert_message("compare, seeds that spread far over the bar", note.map_or("", String::as_str));
    // A gap beyond that spread is none of chance.
    let far = [runs[0].clone(), runs[1].clone(), run("fp8", "fp8-block", 1, 200, 0.5)];
    assert_eq!(training(&compare(&far, 2)).inside_bar, Some(false));
}

/// The run with another tokenizer, whose tokens are `longer` times as many bytes.
fn with_tokenizer(mut run: RunData, tokenizer: u64, longer: f64) -> RunData {
    run.tokenizer = Some(tokenizer);
    for record in &mut run.records {
        match &mut record.event {
            Event::Step(metrics) => metrics.loss *= longer,
            Event::Eval(metrics) => {
                metrics.bits_per_byte = Some(metrics.loss);
                metrics.loss *= longer;
            }
            _ => {}
        }
    }
    run
}

#[test]
fn runs_with_other_tokenizers_are_compared_in_bits_per_byte() {
    let base = with_tokenizer(run("small", "bf16", 1, 200, 0.0), 1, 1.0);
    let other = with_tokenizer(run("large", "bf16", 1, 200, 0.01), 2, 1.7);
    let comparison = compare(&[base.clone(), other.clone()], 1);
    let gap = &comparison.compared[0];
    assert!(gap.training.is_none(), "{gap:?}");
    let validation = gap.validation.as_ref().expect("in bits");
    assert_eq!(validation.unit, "bits/byte");
    assert!((validation.gap_percent - 1.0).abs() < 1e-9, "{validation:?}");
    assert_says("compare, other tokenizers", comparison.notes.join("\n"));
    let page = comparison.html();
    assert!(page.contains("Bits per byte") && !page.contains("Gap to the baseline"));
    assert_says("compare, other tokenizers on the page", page);
    // Nor is there any gap where the text is another too.
    let elsewhere =
        RunData { config: other.config.as_ref().map(|config| config.replace("a.txt", "b.txt")), ..other };
    let comparison = compare(&[base, elsewhere], 1);
    assert!(comparison.compared[0].validation.is_none());
    assert!(
        comparison.notes.iter().any(|note| note.contains("no losses are comparable")),
        "{:?}",
        comparison.notes
    );
}

#[test]
fn each_line_has_its_label_and_seeds_have_shades_of_their_own() {
    let runs = [
        run("bf16-1", "bf16", 1, 300, 0.0),
        run("bf16-2", "bf16", 2, 300, 0.06),
        run("fp8", "fp8-block", 1, 300, 0.05),
    ];
    let page = compare(&runs, 2).html();
    let labels = page.split("class=\"reflabel\" style=\"bottom:").skip(1).filter_map(|rest| {
        let (bottom, rest) = rest.split_once("%\">")?;
        Some((bottom.parse::<f64>().ok()?, rest.split('<').next()?))
    });
    let labels: Vec<(f64, &str)> = labels.collect();
    assert_eq!(labels.iter().map(|label| label.1).collect::<Vec<_>>(), ["baseline", "bar 0.25%"]);
    assert!(labels[1].0 - labels[0].0 > 6.9, "the lines are closer than that: {labels:?}");
    for part in ["class=\"line c0\"", "class=\"line c0 t1\"", ">Within spread</th>", ">Within bar</th>"] {
        assert!(page.contains(part), "{part}");
    }
    assert_says("compare, smoothed lines", &page);
    let few = compare(&[run("a", "bf16", 1, 11, 0.0), run("b", "bf16", 1, 11, 0.1)], 1).html();
    assert!(few.contains("Solid: training loss."), "eleven points are not smoothed");
    // Columns without a value are left out: one seed has no spread, and bf16 no bar.
    assert!(!few.contains("Within spread") && !few.contains("Within bar"));
}

#[test]
fn notes_of_several_runs_that_say_the_same_are_one() {
    let mut runs: Vec<RunData> =
        (0..9).map(|n| run(&format!("lr-{n}"), "bf16", 1, 100, 0.01 * n as f64)).collect();
    for (n, run) in runs.iter_mut().enumerate().skip(1) {
        let config = run.config.as_mut().expect("a configuration");
        config.push_str(&format!("[optimizer]\nlr = {n}e-3\n"));
        steps_of(run).for_each(|m| m.lr = n as f64 * 1e-3);
        run.summary.total_steps = Some(200);
    }
    let notes = compare(&runs, 1).notes;
    assert_eq!(
        notes,
        [
            "lr-1, lr-2, lr-3, lr-4, lr-5 and 3 more: at step 100 of 200",
            "lr-1, lr-2, lr-3, lr-4, lr-5 and 3 more: differs from the baseline in optimizer.lr",
        ]
    );
}

/// The run under another name, as of a copy of its folder.
fn copy(run: &RunData, name: &str) -> RunData {
    RunData { name: name.into(), ..run.clone() }
}

#[test]
fn runs_of_one_seed_count_once_on_both_sides() {
    let base = run("bf16", "bf16", 0, 100, 0.0);
    let fp8 = run("fp8", "fp8-block", 0, 100, 0.004);
    let alone = compare(&[base.clone(), fp8.clone()], 1);
    // A key of monitoring makes it no other run.
    let mut watched = copy(&fp8, "fp8-ref");
    watched.config = watched.config.map(|text| {
        let tasks = "[eval]\ntasks = [\"easy.toml\"]\ntasks_every = 50\ntasks_limit = 9\n";
        text.replace("[train]", &format!("reference_every = 40\n{tasks}[train]"))
    });
    let runs = [base.clone(), copy(&base, "bf16-copy"), fp8.clone(), watched, copy(&fp8, "fp8-copy")];
    let comparison = compare(&runs, 2);
    assert_eq!(comparison.compared.len(), 1);
    assert_eq!(comparison.compared[0].runs, ["fp8", "fp8-ref", "fp8-copy"]);
    assert_eq!(
        serde_json::json!(comparison.compared[0].training),
        serde_json::json!(alone.compared[0].training)
    );
    let figure = training(&comparison);
    assert_eq!((figure.seeds, figure.paired, figure.inside_bar), (1, 1, None));
    assert_eq!((figure.gap_interval_percent, figure.seed_spread_percent), (None, None));
    let of_base = comparison.baseline.training.as_ref().expect("the baseline's loss");
    assert_eq!((of_base.seeds, of_base.seed_deviation_percent), (1, None));
    for note in [
        "bf16 and bf16-copy have the same seed (0) and count as one run",
        "fp8, fp8-ref and fp8-copy have the same seed (0) and count as one run",
    ] {
        assert!(comparison.notes.iter().any(|said| said == note), "{:?}", comparison.notes);
    }
    let page = comparison.html();
    assert!(!page.contains('±') && !page.contains("class=\"band"), "one seed has no interval");
}

#[test]
fn each_seed_weighs_the_same_however_often_it_was_run() {
    let base = [1, 2].map(|seed| run(&format!("bf16-{seed}"), "bf16", seed, 100, 0.0));
    let [one, other] = [run("a", "fp8-block", 1, 100, 0.001), run("b", "fp8-block", 2, 100, 0.003)];
    let once = compare(&[&base[..], &[one.clone(), other.clone()]].concat(), 2);
    let twice = compare(&[&base[..], &[one.clone(), copy(&one, "a2"), other, copy(&one, "a3")]].concat(), 2);
    let [once, twice] = [training(&once), training(&twice)];
    assert_eq!((once.seeds, twice.seeds), (2, 2));
    assert!((once.gap_percent - twice.gap_percent).abs() < 1e-9, "{once:?} {twice:?}");
    let intervals = once.gap_interval_percent.zip(twice.gap_interval_percent);
    assert!(intervals.is_some_and(|(a, b)| (a - b).abs() < 1e-9), "{once:?} {twice:?}");
}

#[test]
fn a_run_of_the_same_seed_that_stopped_early_does_not_shorten_the_comparison() {
    let fp8 = run("fp8", "fp8-block", 0, 200, 0.004);
    let mut stopped = copy(&fp8, "backup");
    stopped.records.retain(|record| record.event.step() <= 90);
    let comparison = compare(&[run("bf16", "bf16", 0, 200, 0.0), fp8, stopped], 1);
    assert_eq!((training(&comparison).from, training(&comparison).to), (101, 200));
}

#[test]
fn seeds_of_one_side_alone_leave_the_chance_of_the_other() {
    let fp8 = |over: f64| [1, 2, 3, 4].map(|seed| run(&format!("fp8-{seed}"), "fp8-block", seed, 200, over));
    let against_one = |over: f64| {
        let comparison = compare(&[&[run("bf16", "bf16", 9, 200, 0.0)][..], &fp8(over)].concat(), 1);
        (training(&comparison).inside_bar, comparison.notes.join("\n"))
    };
    let (verdict, notes) = against_one(-0.01);
    assert!(verdict.is_none(), "{verdict:?}");
    assert_says("compare, a baseline of one seed", notes);
    assert_eq!(against_one(0.03).0, Some(false), "three times the bar and more");
    // The other way round: one run with no partner, against seeds that spread by more than the distance to
    // the bar.
    let base = [-0.0008, 0.0, 0.0008].into_iter().zip(1..);
    let mut runs: Vec<RunData> =
        base.map(|(over, seed)| run(&format!("bf16-{seed}"), "bf16", seed, 200, over)).collect();
    runs.push(run("fp8", "fp8-block", 9, 200, 0.001));
    let comparison = compare(&runs, 3);
    let figure = training(&comparison);
    assert!(figure.seed_spread_percent.is_some_and(|spread| (0.2..0.75).contains(&spread)), "{figure:?}");
    assert!(figure.inside_bar.is_none(), "{figure:?}");
    let notes = comparison.notes.join("\n");
    assert_says("compare, a gap near the bar", notes);
}

#[test]
fn the_page_shows_the_cells_of_the_table_and_its_curve_that_gap() {
    let mut last = run("fp8", "fp8-block", 0, 100, 0.002);
    // The last report alone is far from the mean.
    steps_of(&mut last).filter(|m| m.step == 100).for_each(|m| m.loss *= 1.02);
    last.records.retain(|record| !matches!(&record.event, Event::Step(m) if m.step % 10 != 0));
    let comparison = compare(&[run("bf16", "bf16", 0, 100, 0.0), last], 1);
    let (table, page) = (comparison.table(), comparison.html());
    for (_, cells) in table.groups.iter().flat_map(|group| &group.rows) {
        for cell in cells.iter().flatten() {
            assert!(page.contains(&format!(">{}<", crate::html::escape(cell))), "{cell}");
        }
    }
    let gap = table.groups[1].rows[0].1[0].clone().expect("a gap");
    assert!(gap.starts_with("+0.3"), "{gap}: 0.2%, and a tenth of 2% of one of ten losses, the lowest");
    let chart =
        page.split_once("<h3>Gap to the baseline").and_then(|(_, rest)| rest.split("</figure>").next());
    let chart = chart.expect("a chart");
    assert!(chart.contains(&format!("fp8: {gap}.")), "its description");
    assert!(chart.contains("at each report") && !chart.contains("smoothed"), "ten reports are not smoothed");
    assert!(chart.contains("class=\"dots c1\""), "and are dots");
    // The legend of the losses, each of another range, has no values.
    let losses = page.split_once("mean cross-entropy").and_then(|(_, rest)| rest.split("</ul>").next());
    assert!(losses.is_some_and(|legend| !legend.contains("<b>")), "{losses:?}");
}

#[test]
fn the_legend_explains_only_what_the_table_has() {
    let terms = |runs: &[RunData], base: usize| -> Vec<String> {
        compare(runs, base).table().legend.into_iter().map(|[term, _]| term).collect()
    };
    let base = run("bf16", "bf16", 0, 100, 0.0);
    let far = run("far", "fp8-block", 0, 100, 0.1);
    assert_eq!(terms(&[base.clone(), far.clone()], 1), ["loss of", "gap", "bar"]);
    let near = run("near", "fp8-block", 0, 100, 0.001);
    assert_eq!(terms(&[base.clone(), near], 1), ["loss of", "gap", "unclear", "bar"]);
    let more = [base.clone(), run("bf16-1", "bf16", 1, 100, 0.0), far];
    assert_eq!(terms(&more, 2), ["loss of", "gap", "bar", "spread"]);
    assert_eq!(terms(&[base.clone(), run("seed", "bf16", 1, 100, 0.0)], 1), ["loss of", "gap"]);
    // Runs without a figure that compares have a note, and no row.
    let other = with_tokenizer(run("other", "bf16", 0, 100, 0.0), 2, 1.7);
    let elsewhere =
        RunData { config: other.config.as_ref().map(|config| config.replace("a.txt", "b.txt")), ..other };
    let comparison = compare(&[with_tokenizer(base, 1, 1.0), elsewhere], 1);
    let table = comparison.table();
    assert_eq!(table.groups.len(), 1, "{table:?}");
    assert!(comparison.notes.iter().any(|note| note.starts_with("other: ")), "{:?}", comparison.notes);
    assert_eq!(table.legend.len(), 1, "{table:?}");
}
