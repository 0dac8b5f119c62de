//! The metrics of a task from the numbers of its rows.

use super::file::ScoresHeader;
use super::interval::TaskScore;
use super::items::{ItemScores, ScoreError};
use super::row::RowScores;
use crate::metrics::TaskMetrics;
use xtrain_data::task::Metric;

/// The score of each row in a metric; `None` if the metric does not apply to the rows.
///
/// # Errors
/// A row twice; a score that is not a finite number.
pub fn items(rows: &[RowScores], metric: Metric) -> Result<Option<ItemScores>, ScoreError> {
    let Some(scores) = rows.iter().map(|row| row.value(metric)).collect::<Option<Vec<f64>>>() else {
        return Ok(None);
    };
    let ids = rows.iter().map(|row| row.row.to_string()).collect();
    let has_clusters = rows.iter().any(|row| row.cluster.is_some());
    // A row without a cluster is one of its own.
    let cluster = |row: &RowScores| match &row.cluster {
        Some(cluster) => format!("cluster {cluster}"),
        None => format!("row {}", row.row),
    };
    let clusters = has_clusters.then(|| rows.iter().map(cluster).collect());
    ItemScores::new(ids, scores, clusters).map(Some)
}

/// The score of a checkpoint in the task's own metric, as runs record it; `None` if the model is not from a
/// run, or the metric does not apply to the rows.
///
/// # Errors
/// Those of [`items`].
pub fn task_metrics(header: &ScoresHeader, rows: &[RowScores]) -> Result<Option<TaskMetrics>, ScoreError> {
    let (Some(step), Some(metric)) = (header.step, Metric::from_name(&header.metric)) else {
        return Ok(None);
    };
    let score = items(rows, metric)?.as_ref().and_then(TaskScore::new);
    Ok(score.map(|score| TaskMetrics {
        step,
        task: header.task.clone(),
        metric: header.metric.clone(),
        value: score.mean,
        interval: score.interval.map(|found| [found.low, found.high]),
        rows: header.rows,
        chance: header.chance,
    }))
}

/// The score of a task in each metric that applies to its rows.
///
/// # Errors
/// Those of [`items`].
pub fn summaries(rows: &[RowScores]) -> Result<Vec<(Metric, TaskScore)>, ScoreError> {
    let mut all = Vec::new();
    for metric in Metric::ALL {
        if let Some(score) = items(rows, metric)?.as_ref().and_then(TaskScore::new) {
            all.push((metric, score));
        }
    }
    Ok(all)
}
