//! All rows of a task in one pass: their number, and the hash that identifies the task.

use std::sync::Arc;

use sha2::{Digest, Sha256};

use super::generation::GenerationRules;
use super::metric::Metric;
use super::row::{Gold, TaskRow};
use crate::files;

/// Version of the protocol: how rows are rendered, encoded and scored. It is part of every hash.
pub const PROTOCOL: u32 = 1;

/// A task whose rows have all been read.
#[derive(Debug, Clone, PartialEq)]
pub struct TaskSummary {
    /// Number of rows.
    pub rows: u64,
    /// Number of requests.
    pub requests: u64,
    /// Number of rows that were left out: examples of BIG-bench that are equal or have no choices, and
    /// samples of lm-eval under a second filter.
    pub left_out: u64,
    /// Probability that a guess is right: that of the task file, or the mean over rows of 1 / choices.
    pub chance: f64,
    /// SHA-256, in hexadecimal, of all that numbers of the task depend on but the model: the protocol, metric
    /// and chance, the rules of generated answers, and of each row its requests as rendered, its right
    /// answer, cluster and name.
    pub hash: String,
}

/// A summary of the rows so far.
#[derive(Default)]
pub(super) struct Summing {
    hash: Sha256,
    rows: u64,
    requests: u64,
    chances: f64,
}

impl Summing {
    pub(super) fn add(&mut self, row: &TaskRow) {
        self.rows += 1;
        self.requests += row.requests.len() as u64;
        for name in [&row.id, &row.cluster] {
            self.number(u64::from(name.is_some()));
            self.text(name.as_deref().unwrap_or_default());
        }
        match &row.gold {
            Gold::Choice(index) => {
                self.chances += 1.0 / row.requests.len() as f64;
                self.number(*index as u64);
            }
            Gold::Greedy => self.text("greedy"),
            Gold::Answer { answer, extract } => {
                self.text(answer);
                self.text(extract.as_deref().unwrap_or_default());
            }
        }
        self.number(row.requests.len() as u64);
        let mut last: Option<&Arc<str>> = None;
        for request in &row.requests {
            // Choices share their context.
            let is_shared = last.is_some_and(|last| Arc::ptr_eq(last, &request.context));
            if !is_shared {
                self.text(&request.context);
            }
            last = Some(&request.context);
            self.text(&request.continuation);
            self.number(request.characters as u64);
            self.number(request.bytes as u64);
        }
    }

    /// The summary of a task with this metric, chance and rules of generated answers.
    pub(super) fn finish(
        mut self,
        metric: Metric,
        chance: Option<f64>,
        generation: Option<&GenerationRules>,
        left_out: u64,
    ) -> TaskSummary {
        let chance = chance.unwrap_or(self.chances / self.rows.max(1) as f64);
        self.text("xtrain task");
        self.number(u64::from(PROTOCOL));
        self.text(metric.name());
        self.number(chance.to_bits());
        self.number(self.rows);
        if let Some(GenerationRules { max_tokens, until }) = generation {
            self.number(*max_tokens as u64);
            until.iter().for_each(|stop| self.text(stop));
        }
        let Summing { hash, rows, requests, .. } = self;
        TaskSummary { rows, requests, left_out, chance, hash: files::hex(&hash.finalize()) }
    }

    fn text(&mut self, text: &str) {
        self.number(text.len() as u64);
        self.hash.update(text);
    }

    fn number(&mut self, number: u64) {
        self.hash.update(number.to_le_bytes());
    }
}
