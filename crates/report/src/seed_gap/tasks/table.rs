//! The table of differences on tasks, for the terminal and the page.

use super::super::Comparison;
use super::super::table::{Column, GroupRows, Table, number, word};
use super::super::task_gap::{ScoreGap, TaskGap, TaskMean, short_hash};
use crate::metrics::format;
use crate::names;
use crate::scores::verdict::points;
use crate::scores::{Finding, Pairing};

const COLUMNS: [Column; 9] = [
    number("difference"),
    number("95% interval"),
    word("verdict"),
    number("score"),
    number("baseline"),
    word("metric"),
    number("rows"),
    word("seeds"),
    number("steps"),
];

/// The table; `None` if no task is compared.
pub(in super::super) fn task_table(comparison: &Comparison) -> Option<Table> {
    let mut groups = Vec::new();
    let mut reasons = Vec::new();
    let compared = comparison.compared.iter().enumerate().filter(|(_, gap)| !gap.tasks.is_empty());
    let has_several = compared.clone().count() > 1;
    for (n, gap) in compared {
        let mut rows = Vec::new();
        let mut add = |name: String, gap_of_row: &ScoreGap, cells: [Option<String>; COLUMNS.len()]| {
            let term = match has_several {
                true => format!("{name}, {}", names::of_group(&gap.runs)),
                false => name.clone(),
            };
            reasons.push([term, reason(gap_of_row)]);
            rows.push((name, cells.into()));
        };
        for task in &gap.tasks {
            add(label(task, &gap.tasks), &task.gap, of_task(task));
        }
        if let Some(mean) = &gap.task_mean {
            add(format!("mean of {} tasks", mean.tasks), &mean.gap, of_mean(mean));
        }
        groups.push(GroupRows { runs: gap.runs.clone(), number: n + 1, rows });
    }
    let margin_points =
        comparison.compared.iter().find_map(|gap| gap.tasks.first())?.gap.verdict.margin_points;
    let margin = points(margin_points);
    let mut legend = vec![
        [
            "difference",
            "compared minus baseline on the same rows, in points: hundredths of the metric's unit",
        ]
        .map(String::from),
        [
            "verdict".into(),
            format!(
                "inside: no more than ±{margin} (--margin), or than other seeds of the baseline would differ; OUTSIDE: more than the margin; unclear: chance could move the difference across it"
            ),
        ],
    ];
    if comparison.compared.iter().any(|gap| gap.task_mean.is_some()) {
        legend.push(
            ["mean of tasks", "of (score - chance) / (1 - chance): 0 is chance, 1 is all right"]
                .map(String::from),
        );
    }
    Some(Table {
        label: "Scores of tasks",
        row_name: "task",
        answers: &["difference"],
        columns: COLUMNS.to_vec(),
        groups,
        legend,
        reasons,
    })
}

/// The task's name, with what tells it from another of this name.
fn label(task: &TaskGap, all: &[TaskGap]) -> String {
    let is_alone = all.iter().filter(|other| other.task == task.task).count() < 2;
    if is_alone {
        return task.task.clone();
    }
    format!("{} ({} shots, {})", task.task, task.shots, short_hash(&task.hash))
}

fn of_task(task: &TaskGap) -> [Option<String>; COLUMNS.len()] {
    let metric =
        if task.lower_is_better { format!("{}, lower is better", task.metric) } else { task.metric.clone() };
    let mut steps: Vec<u64> =
        task.runs.iter().chain(&task.baseline_runs).flat_map(|run| run.steps.iter().copied()).collect();
    steps.sort_unstable();
    let steps = match (steps.first(), steps.last()) {
        (Some(first), Some(last)) if first < last => {
            Some(format!("{}-{}", format::grouped(*first), format::grouped(*last)))
        }
        (first, _) => first.map(|first| format::grouped(*first)),
    };
    cells(&task.gap, Some(metric), steps)
}

fn of_mean(mean: &TaskMean) -> [Option<String>; COLUMNS.len()] {
    cells(&mean.gap, Some("above chance".into()), None)
}

fn cells(gap: &ScoreGap, metric: Option<String>, steps: Option<String>) -> [Option<String>; COLUMNS.len()] {
    let verdict = &gap.verdict;
    let seeds = match gap.pairing {
        Pairing::BySeed => format!("{} pairs", gap.seeds),
        Pairing::OneSeed if (gap.seeds, gap.baseline_seeds) == (1, 1) => "1".to_owned(),
        Pairing::OneSeed | Pairing::Unpaired => format!("{} and {}", gap.seeds, gap.baseline_seeds),
    };
    [
        Some(format!("{:+.2}", verdict.difference_points)),
        verdict.interval_points.map(|interval| format!("{:+.2} to {:+.2}", interval.low, interval.high)),
        Some(verdict.finding.word().to_owned()),
        Some(format!("{:.4}", gap.score)),
        Some(format!("{:.4}", gap.baseline_score)),
        metric,
        Some(format::grouped(gap.rows as u64)),
        Some(seeds),
        steps,
    ]
}

/// The verdict, its reason, and the smallest difference that such a comparison shows.
fn reason(gap: &ScoreGap) -> String {
    let verdict = &gap.verdict;
    let detectable = match verdict.detectable_points {
        Some(smallest) if verdict.finding != Finding::Outside => {
            let smallest = points(smallest);
            format!("; a true difference of {smallest} would be found OUTSIDE in 80% of such comparisons")
        }
        _ => String::new(),
    };
    format!("{}: {}{detectable}", verdict.finding.word(), verdict.reason)
}
