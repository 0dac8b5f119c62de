//! The loss of held-out text.

use crate::error::{LearnError, RunError};
use crate::learner::{IN_FLIGHT, feed};
use crate::programs;
use crate::weights::Weights;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::ops::{ControlFlow, Range};
use xtrain_data::{Batch as TokenBatch, IGNORED_TARGET, Validation};
use xtrain_model::decoder::{Batch, io};
use xtrain_runtime::{Part, ProgramId, Ticket};

/// The forward program of one batch shape.
#[derive(Clone, Copy, Debug)]
pub struct Evaluator {
    id: ProgramId,
    batch: Batch,
    document_mask: bool,
}

impl Evaluator {
    /// Loads the program; the logits of `chunk_tokens` tokens exist at one time.
    pub fn new(
        weights: &mut Weights,
        batch: Batch,
        document_mask: bool,
        chunk_tokens: usize,
    ) -> Result<Self, LearnError> {
        let (model, numerics, layout) = (weights.model(), weights.numerics(), weights.layout());
        let program = programs::evaluation(model, numerics, layout, batch, document_mask, chunk_tokens)?;
        Ok(Evaluator { id: weights.load(program)?, batch, document_mask })
    }

    /// Launches a batch.
    fn put(&self, weights: &mut Weights, batch: &TokenBatch) -> Result<Ticket, LearnError> {
        let engine = weights.engine();
        feed(engine, self.id, batch, self.document_mask, 1)?;
        engine.run(self.id, Part::Whole)?;
        Ok(engine.fetch(self.id)?)
    }

    /// Waits for the sum of the cross-entropies of the batch's targets, in nats.
    fn collect(&self, weights: &mut Weights, ticket: Ticket) -> Result<f64, LearnError> {
        let outputs = weights.engine().collect(ticket)?;
        Ok(bytemuck::pod_read_unaligned::<f32>(outputs.get(io::LOSS)?).into())
    }

    /// The sums of a batch by source, where its rows are from several. They come from runs with the targets
    /// of the others left out, so that the loss of the batch itself keeps its bits; such batches are as few
    /// as the places where one source follows another.
    fn by_source(
        &self,
        weights: &mut Weights,
        batch: &TokenBatch,
        of: Vec<(usize, Range<usize>)>,
    ) -> Result<BySource, LearnError> {
        match &of[..] {
            [] => return Ok(BySource::Unknown),
            [(one, _)] => return Ok(BySource::One(*one)),
            _ => {}
        }
        let mut sums = Vec::new();
        for (source, rows) in of {
            let mut alone = batch.clone();
            let targets = rows.start * batch.seq_len..rows.end * batch.seq_len;
            alone.targets[..targets.start].fill(IGNORED_TARGET);
            alone.targets[targets.end..].fill(IGNORED_TARGET);
            alone.valid_targets = alone.targets.iter().filter(|&&target| target != IGNORED_TARGET).count();
            let ticket = self.put(weights, &alone)?;
            sums.push((source, self.collect(weights, ticket)?, alone.valid_targets));
        }
        Ok(BySource::Several(sums))
    }

    /// Waits for a batch and adds it.
    fn land(
        &self,
        weights: &mut Weights,
        batch: InFlight,
        all: u64,
        tally: &mut Tally,
    ) -> Result<(), LearnError> {
        let InFlight { ticket, targets, apart } = batch;
        let sum = self.collect(weights, ticket)?;
        tally.loss_sum += sum;
        tally.targets += targets;
        tally.sequences = all.min(tally.sequences + self.batch.sequences as u64);
        match apart {
            BySource::Unknown => {}
            BySource::One(source) => tally.sources[source].add(sum, targets),
            BySource::Several(sums) => {
                sums.into_iter().for_each(|(source, sum, targets)| tally.sources[source].add(sum, targets));
            }
        }
        Ok(())
    }

    /// Adds the sequences of `validation` that `tally` does not contain yet. `go_on` is called before each
    /// batch; [`ControlFlow::Break`] leaves the rest for a later call, and the final sum has the same bits.
    pub fn add(
        &self,
        weights: &mut Weights,
        validation: &Validation,
        tally: &mut Tally,
        go_on: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<ControlFlow<()>, RunError> {
        let (all, sources) = (validation.window_count(), validation.source_names().len());
        let is_of_others = !tally.sources.is_empty() && tally.sources.len() != sources;
        if tally.of != all || is_of_others {
            *tally = Tally { of: all, ..Tally::default() };
        }
        if sources > 1 && tally.sequences == 0 {
            tally.sources = vec![SourceTally::default(); sources];
        }
        let (mut next, mut ended) = (tally.sequences, ControlFlow::Continue(()));
        let mut flying = VecDeque::new();
        loop {
            if next < all && ended.is_continue() {
                ended = go_on();
            }
            let is_more = next < all && ended.is_continue();
            if is_more {
                let batch = validation.batch(next, self.batch.sequences)?;
                let of = match tally.sources.is_empty() {
                    true => Vec::new(),
                    false => validation.sources(next..next + self.batch.sequences as u64)?,
                };
                let of = sources_of(of);
                if of.len() > 1 {
                    // No result is waited for out of turn.
                    while let Some(oldest) = flying.pop_front() {
                        self.land(weights, oldest, all, tally)?;
                    }
                }
                let apart = self.by_source(weights, &batch, of)?;
                let ticket = self.put(weights, &batch)?;
                flying.push_back(InFlight { ticket, targets: batch.valid_targets, apart });
                next = all.min(next + self.batch.sequences as u64);
            }
            // Collect the oldest batch: of more than may be in flight, or of the remaining ones.
            if flying.len() > if is_more { IN_FLIGHT } else { 0 }
                && let Some(oldest) = flying.pop_front()
            {
                self.land(weights, oldest, all, tally)?;
            }
            if !is_more && flying.is_empty() {
                return Ok(ended);
            }
        }
    }
}

/// A batch whose result is still to come.
struct InFlight {
    ticket: Ticket,
    targets: usize,
    apart: BySource,
}

/// Neighbouring rows of a batch that are from one source, as that and their range; rows that pad are none's.
fn sources_of(rows: Vec<Option<usize>>) -> Vec<(usize, Range<usize>)> {
    let mut of: Vec<(usize, Range<usize>)> = Vec::new();
    for (row, source) in rows.into_iter().enumerate() {
        match (source, of.last_mut()) {
            (Some(source), Some((last, rows))) if *last == source => rows.end = row + 1,
            (Some(source), _) => of.push((source, row..row + 1)),
            (None, _) => {}
        }
    }
    of
}

/// The sources of a batch.
enum BySource {
    /// They are not told apart.
    Unknown,
    One(usize),
    /// Each with the sum of its losses and the number of its targets.
    Several(Vec<(usize, f64, usize)>),
}

/// State of an evaluation, small enough for a checkpoint in the middle of one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tally {
    /// Sequences of the whole evaluation. A tally with another number starts again.
    pub of: u64,
    /// Sequences added so far.
    pub sequences: u64,
    /// Their number of targets.
    pub targets: usize,
    /// Sum of the targets' cross-entropies, in nats.
    pub loss_sum: f64,
    /// The part of each source, where there are several.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sources: Vec<SourceTally>,
}

/// The part of one source in an evaluation, or in steps of training.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceTally {
    /// Its targets.
    pub targets: usize,
    /// The sum of their cross-entropies, in nats.
    pub loss_sum: f64,
}

impl SourceTally {
    pub(crate) fn add(&mut self, sum: f64, targets: usize) {
        self.loss_sum += sum;
        self.targets += targets;
    }

    /// The mean cross-entropy of its targets, in nats; `None` without any.
    pub fn mean(&self) -> Option<f64> {
        (self.targets > 0).then(|| self.loss_sum / self.targets as f64)
    }
}

impl Tally {
    /// True if JSON can hold its sums.
    pub(crate) fn is_finite(&self) -> bool {
        self.loss_sum.is_finite() && self.sources.iter().all(|source| source.loss_sum.is_finite())
    }

    /// Mean cross-entropy of these targets, in nats; 0 without any.
    pub fn mean(&self) -> f64 {
        self.loss_sum / self.targets.max(1) as f64
    }
}
