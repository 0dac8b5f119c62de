//! The loss of held-out text.

use crate::crew::Crew;
use crate::error::{LearnError, RunError};
use crate::learner::{IN_FLIGHT, feed};
use crate::member::Member;
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
        // Ranks run it equally often only up to a batch.
        debug_assert!(program.instances.iter().all(|i| i.code.op().collective().is_none()));
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

    /// Launches the batch of this rank in a round, if it has one. `flying` are the rounds before.
    fn launch(
        &self,
        weights: &mut Weights,
        validation: &Validation,
        first: u64,
        sources: usize,
        flying: &mut VecDeque<Round>,
    ) -> Result<OwnBatch, RunError> {
        if first >= validation.window_count() {
            return Ok(OwnBatch::Done(Sums::default()));
        }
        let batch = validation.batch(first, self.batch.sequences)?;
        let of = match sources {
            0 => Vec::new(),
            _ => validation.sources(first..first + self.batch.sequences as u64)?,
        };
        let of = sources_of(of);
        if of.len() > 1 {
            // No result is waited for out of turn.
            flying.iter_mut().try_for_each(|round| self.land(weights, &mut round.own, sources))?;
        }
        let apart = self.by_source(weights, &batch, of)?;
        let ticket = self.put(weights, &batch)?;
        Ok(OwnBatch::Launched(ticket, batch.valid_targets, apart))
    }

    /// Waits for the sums of a batch.
    fn land(&self, weights: &mut Weights, own: &mut OwnBatch, sources: usize) -> Result<(), LearnError> {
        let OwnBatch::Launched(ticket, targets, apart) = std::mem::take(own) else { return Ok(()) };
        let loss_sum = self.collect(weights, ticket)?;
        let all = SourceTally { targets, loss_sum };
        let mut sums = Sums { is_of_a_batch: true, all, sources: vec![SourceTally::default(); sources] };
        match apart {
            BySource::Unknown => {}
            BySource::One(source) => sums.sources[source] = all,
            BySource::Several(of) => {
                of.into_iter().for_each(|(source, sum, targets)| sums.sources[source].add(sum, targets));
            }
        }
        *own = OwnBatch::Done(sums);
        Ok(())
    }

    /// Waits for a round and adds the batches of all ranks in order. Returns true if a rank asks to stop.
    fn add_round(
        &self,
        weights: &mut Weights,
        mut round: Round,
        tally: &mut Tally,
        crew: &Crew,
    ) -> Result<bool, RunError> {
        let sources = tally.sources.len();
        self.land(weights, &mut round.own, sources)?;
        let OwnBatch::Done(own) = round.own else { unreachable!("its result has been collected") };
        let mut stops = false;
        for words in crew.gather(&own.words(round.wish, sources))? {
            let (wish, sums) = Sums::of_words(&words);
            stops |= wish;
            if sums.is_of_a_batch {
                tally.add(&sums, self.batch.sequences as u64);
            }
        }
        Ok(stops)
    }

    /// Adds the sequences of `validation` that `tally` does not contain yet. Of the batches, rank r of n
    /// computes r, r + n, ...; their sums are added in order, so the sum has the same bits for any number of
    /// ranks. `go_on` is called before each batch; [`ControlFlow::Break`] on a rank makes all leave the rest
    /// for a later call, and the final sum has the same bits.
    pub fn add(
        &self,
        weights: &mut Weights,
        validation: &Validation,
        tally: &mut Tally,
        crew: &Crew,
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
        let Member { rank, world_size } = crew.member();
        let sequences = self.batch.sequences as u64;
        let (mut next, mut ended) = (tally.sequences, ControlFlow::Continue(()));
        let mut flying = VecDeque::new();
        loop {
            let mut wish = false;
            if next < all && ended.is_continue() {
                wish = go_on().is_break();
                if wish && crew.is_alone() {
                    ended = ControlFlow::Break(());
                }
            }
            let is_more = next < all && ended.is_continue();
            if is_more {
                let first = next + rank as u64 * sequences;
                let own = self.launch(weights, validation, first, tally.sources.len(), &mut flying)?;
                flying.push_back(Round { own, wish });
                next = all.min(next + world_size as u64 * sequences);
            }
            // Collect the oldest round: of more than may be in flight, or of the remaining ones. All ranks
            // do it after the same launches, so they learn of a wish to stop at the same time.
            if flying.len() > if is_more { IN_FLIGHT } else { 0 }
                && let Some(oldest) = flying.pop_front()
                && self.add_round(weights, oldest, tally, crew)?
            {
                ended = ControlFlow::Break(());
            }
            if !is_more && flying.is_empty() {
                return Ok(ended);
            }
        }
    }
}

/// A batch of each rank.
struct Round {
    own: OwnBatch,
    /// True if this rank asks to stop.
    wish: bool,
}

/// The batch of this rank in a round.
enum OwnBatch {
    /// Its result is still to come.
    Launched(Ticket, usize, BySource),
    Done(Sums),
}

impl Default for OwnBatch {
    fn default() -> Self {
        OwnBatch::Done(Sums::default())
    }
}

/// The sums of a batch.
#[derive(Clone, Debug, Default, PartialEq)]
struct Sums {
    /// False on a rank without a batch.
    is_of_a_batch: bool,
    all: SourceTally,
    sources: Vec<SourceTally>,
}

impl Sums {
    /// As words for other ranks, with room for `sources`.
    fn words(&self, wish: bool, sources: usize) -> Vec<u64> {
        let empty = SourceTally::default();
        let padding = std::iter::repeat_n(&empty, sources - self.sources.len());
        let sums = std::iter::once(&self.all).chain(&self.sources).chain(padding);
        let sums = sums.flat_map(|sum| [sum.targets as u64, sum.loss_sum.to_bits()]);
        [u64::from(wish), u64::from(self.is_of_a_batch)].into_iter().chain(sums).collect()
    }

    /// The wish of a rank, and the sums of its batch.
    fn of_words(words: &[u64]) -> (bool, Sums) {
        let sum =
            |pair: &[u64; 2]| SourceTally { targets: pair[0] as usize, loss_sum: f64::from_bits(pair[1]) };
        let [flags, sums @ ..] = words.as_chunks().0 else { return (false, Sums::default()) };
        let mut sums = sums.iter().map(sum);
        let all = sums.next().unwrap_or_default();
        (flags[0] != 0, Sums { is_of_a_batch: flags[1] != 0, all, sources: sums.collect() })
    }
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
    /// Adds a batch of so many sequences.
    fn add(&mut self, sums: &Sums, sequences: u64) {
        self.loss_sum += sums.all.loss_sum;
        self.targets += sums.all.targets;
        self.sequences = self.of.min(self.sequences + sequences);
        for (own, sum) in self.sources.iter_mut().zip(&sums.sources).filter(|(_, sum)| sum.targets > 0) {
            own.add(sum.loss_sum, sum.targets);
        }
    }

    /// True if JSON can hold its sums.
    pub(crate) fn is_finite(&self) -> bool {
        self.loss_sum.is_finite() && self.sources.iter().all(|source| source.loss_sum.is_finite())
    }

    /// Mean cross-entropy of these targets, in nats; 0 without any.
    pub fn mean(&self) -> f64 {
        self.loss_sum / self.targets.max(1) as f64
    }
}
