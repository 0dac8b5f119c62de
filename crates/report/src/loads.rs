//! Loads of experts by block over a whole run, in bounded memory: the columns of a heat map.

use std::collections::BTreeMap;

use crate::metrics::ExpertMetrics;

/// Maximum number of columns of a map.
const COLUMNS: usize = 28;
/// Maximum number of cells, unless a map of two columns has more.
const CELLS: usize = 2000;

/// Loads by block over the steps. A long run has no more columns than a short one: their number is halved
/// when there are too many, and a column then covers twice as many reports.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Loads {
    pub(super) columns: Vec<Column>,
    /// Number of reports of a full column; 0 stands for 1.
    reports: u64,
}

/// Successive reports.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Column {
    /// Step of its first report.
    pub(super) first: u64,
    /// Step of its last report.
    pub(super) last: u64,
    reports: u64,
    /// Extremes of each block by its number.
    pub(super) blocks: BTreeMap<u64, Load>,
}

/// Extremes of a block over some reports.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Load {
    /// Largest load of an expert over the mean load; NaN if none is a number.
    pub(super) largest: f64,
    /// Load of the least used expert, in tokens.
    pub(super) least_tokens: u64,
}

impl Loads {
    /// Adds a report of a later step than all others.
    pub(super) fn add(&mut self, m: &ExpertMetrics) {
        let figures = m.max_load.iter().zip(&m.min_tokens);
        let loads = figures.map(|(&largest, &least_tokens)| Load { largest, least_tokens });
        let blocks = m.blocks.iter().copied().zip(loads).collect();
        let column = Column { first: m.step, last: m.step, reports: 1, blocks };
        match self.columns.last_mut() {
            Some(last) if last.reports < self.reports => last.append(column),
            _ => self.columns.push(column),
        }
        let most = (CELLS / m.blocks.len().max(1)).clamp(2, COLUMNS);
        while self.columns.len() > most {
            self.halve();
        }
    }

    /// Drops the reports of `step` and later. A column with earlier ones too is dropped whole.
    pub(super) fn cut(&mut self, step: u64) {
        while self.columns.last().is_some_and(|last| last.last >= step) {
            self.columns.pop();
        }
    }

    fn halve(&mut self) {
        self.reports = self.reports.max(1) * 2;
        let mut columns = std::mem::take(&mut self.columns).into_iter();
        while let Some(mut column) = columns.next() {
            if let Some(next) = columns.next() {
                column.append(next);
            }
            self.columns.push(column);
        }
    }
}

impl Column {
    fn append(&mut self, next: Column) {
        self.last = next.last;
        self.reports += next.reports;
        for (block, load) in next.blocks {
            let all = self.blocks.entry(block).or_insert(load);
            all.largest = all.largest.max(load.largest);
            all.least_tokens = all.least_tokens.min(load.least_tokens);
        }
    }
}
