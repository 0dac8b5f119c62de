//! Decisions and checks of all ranks: they end after the same step, and compare their state.

use super::finish::first_stop_request;
use super::observer::Outcome;
use super::steps::exchange_error;
use super::watch::Watch;
use super::{Run, is_due};
use crate::error::RunError;
use std::ops::Range;
use std::time::Duration;
use xtrain_program::StateKind;
use xtrain_runtime::StateEntry;
use xtrain_step::layout::Twins;
use xtrain_step::learner::{IN_FLIGHT, StepResult};
use xxhash_rust::xxh3::Xxh3;

/// Bytes of state that one comparison reads, while the GPU waits. State that is larger is compared part by
/// part.
const COMPARED_BYTES: usize = 16 << 20;

/// The state of a rank's checks between steps.
#[derive(Default)]
pub(super) struct Together {
    /// The reason for which this rank asked all to end the run, if it has.
    own_request: Option<Outcome>,
    /// The step after which all end the run, once a rank has asked for it.
    last: Option<u64>,
    /// The place up to which comparisons have come.
    compared: Cursor,
    /// Steps of this process that were repeated because rows of experts did not fit.
    pub(super) repeated_steps: u64,
}

/// A place in a list of values.
#[derive(Default)]
struct Cursor {
    value: usize,
    byte: usize,
}

impl Cursor {
    /// The next parts of values of these sizes: `bytes` of them at most, and no byte twice. Each part has the
    /// index of its value.
    fn advance(&mut self, sizes: &[usize], bytes: usize) -> Vec<(usize, Range<usize>)> {
        let (mut parts, mut left) = (Vec::new(), bytes.min(sizes.iter().sum()));
        while left > 0 {
            let value = self.value % sizes.len();
            let from = self.byte.min(sizes[value]);
            let end = sizes[value].min(from + left);
            left -= end - from;
            if end > from {
                parts.push((value, from..end));
            }
            (self.value, self.byte) = if end == sizes[value] { (value + 1, 0) } else { (value, end) };
        }
        parts
    }
}

impl Run {
    /// The end of the run, if this process trains alone and must end it now to have `next` left. A rank asks
    /// all others to end instead.
    pub(super) fn request_stop(&mut self, watch: &Watch<'_>, next: Duration) -> Option<Outcome> {
        let request = watch.ended(next)?;
        if self.process_group.is_alone() {
            return Some(request);
        }
        self.together.own_request.get_or_insert(request);
        self.learner.ask_to_stop();
        None
    }

    /// The end of the run, if a rank has asked for it and this is the step after which all end.
    pub(super) fn agreed_end(&mut self, watch: &Watch<'_>) -> Result<Option<Outcome>, RunError> {
        // The steps until all have learned of the request, and the one that ends the run.
        let steps = IN_FLIGHT as u32 + 2;
        let _ = self.request_stop(watch, steps * watch.step + self.saving(watch));
        let is_last = self.together.last.is_some_and(|last| self.position.step >= last);
        is_last.then(|| self.stop_request_of_any()).transpose()
    }

    /// The stop request for which all ranks end. They all call it.
    pub(super) fn stop_request_of_any(&self) -> Result<Outcome, RunError> {
        let request = first_stop_request(&self.process_group, self.together.own_request)
            .map_err(|error| exchange_error(self.position.step, "end of the run", error))?;
        Ok(request.unwrap_or(Outcome::Stopped))
    }

    /// Notes that a rank asked to end the run when `step` was launched. A rank learns it when it has launched
    /// at most [`IN_FLIGHT`] steps more, so no rank has launched the step after those.
    pub(super) fn note_stop_request(&mut self, step: u64, result: &StepResult) {
        if result.stopping {
            self.together.last.get_or_insert(step + IN_FLIGHT as u64 + 1);
        }
    }

    /// True if the ranks compare their state after the step that was launched last: after each of which the
    /// run reports.
    pub(super) fn is_comparison_due(&self) -> bool {
        !self.process_group.is_alone() && is_due(self.position.step, self.config.log.every)
    }

    /// Compares the state that several ranks hold alike, when no step is in flight.
    ///
    /// # Errors
    /// The state of a rank differs from that of rank 0, or its rows from those of the first replica.
    pub(super) fn compare_states(&mut self) -> Result<(), RunError> {
        if !self.is_comparison_due() {
            return Ok(());
        }
        let checksums = self.checksums()?;
        let all = self.process_group.gather(&checksums);
        let all = all.map_err(|error| exchange_error(self.position.step, "comparison of states", error))?;
        let layout = self.learner.layout();
        let different = |(n, twins): (usize, Twins)| {
            let first = |rank: usize| layout.first_twin(twins, rank);
            let differs = |rank: &usize| all[*rank][n] != all[first(*rank)][n];
            (0..all.len()).find(differs).map(|rank| (rank, first(rank)))
        };
        match Twins::ALL.into_iter().enumerate().find_map(different) {
            None => Ok(()),
            Some((rank, other)) => Err(RunError::Diverged(format!(
                "after step {} the weights of rank {rank} differ from those of rank {other}, which must be equal: a device or its \
                 memory may be faulty; continue with --resume, which gives all ranks the state of the latest checkpoint",
                self.position.step
            ))),
        }
    }

    /// Checksums of the next part of the state that other ranks hold alike, for each of [`Twins::ALL`].
    fn checksums(&mut self) -> Result<[u64; 3], RunError> {
        let mut entries = self.learner.weights().engine().state_entries();
        let layout = self.learner.layout();
        let ranks = 0..layout.parallel().rank.world_size;
        let has_twins = Twins::ALL.map(|twins| ranks.clone().any(|n| layout.first_twin(twins, n) != n));
        let place = |entry: &StateEntry| {
            let twins = layout.twins(entry.kind, &entry.name);
            Twins::ALL.iter().position(|of| *of == twins).unwrap_or(0)
        };
        let is_compared = |entry: &StateEntry| match entry.kind {
            StateKind::Compute | StateKind::Gathered => layout.cuts_state() && !layout.cuts_weights(),
            StateKind::Master | StateKind::Frozen | StateKind::Counter | StateKind::Scale => true,
            _ => false,
        };
        entries.retain(|entry| is_compared(entry) && has_twins[place(entry)]);
        let places: Vec<usize> = entries.iter().map(place).collect();
        let sizes: Vec<usize> = entries.iter().map(|entry| entry.ty.bytes()).collect();
        let mut hashes = [Xxh3::new(), Xxh3::new(), Xxh3::new()];
        for (value, part) in self.together.compared.advance(&sizes, COMPARED_BYTES) {
            let hash = &mut hashes[places[value]];
            hash.update(&self.learner.read_state_part(&entries[value], part)?);
        }
        Ok(hashes.map(|hash| hash.digest()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_its_turn() {
        for (sizes, bytes) in [(vec![5, 0, 30, 1], 7), (vec![3, 4], 100), (vec![8, 8], 8), (vec![0], 3)] {
            let (total, mut cursor) = (sizes.iter().sum::<usize>(), Cursor::default());
            let mut seen: Vec<Vec<u32>> = sizes.iter().map(|&size| vec![0; size]).collect();
            let calls = if total == 0 { 1 } else { bytes * total };
            for _ in 0..calls {
                let parts = cursor.advance(&sizes, bytes);
                assert_eq!(parts.iter().map(|(_, part)| part.len()).sum::<usize>(), bytes.min(total));
                for (value, part) in parts {
                    seen[value][part].iter_mut().for_each(|times| *times += 1);
                }
            }
            let times = (calls * bytes.min(total)).checked_div(total).unwrap_or(0);
            assert!(seen.iter().flatten().all(|&seen| seen as usize == times), "{sizes:?} {bytes}");
        }
    }
}
