//! The loss of held-out text.

use crate::error::EvaluationError;
use crate::exchange::Gather;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::ops::ControlFlow;
use xtrain_data::{Batch as TokenBatch, IGNORED_TARGET, TokenCounts, Validation};
use xtrain_model::ModelRanks;
use xtrain_model::decoder::{Batch, Loss, io};
use xtrain_rank::Rank;
use xtrain_runtime::{Part, ProgramId, Ticket};
use xtrain_step::batch_share::BatchShare;
use xtrain_step::error::LearnError;
use xtrain_step::learner::{IN_FLIGHT, feed};
use xtrain_step::programs;
use xtrain_step::weights::Weights;

/// The forward program of one batch shape.
#[derive(Clone, Copy, Debug)]
pub struct Evaluator {
    id: ProgramId,
    batch: Batch,
    document_mask: bool,
    /// Number of sources of the text.
    sources: usize,
    /// True if ranks exchange weights in it, so that all run it equally often.
    is_collective: bool,
    /// How ranks share the model.
    ranks: ModelRanks,
}

impl Evaluator {
    /// Loads the program; the logits of `chunk_tokens` tokens exist at one time. `sources` is the number of
    /// sources of the text.
    pub fn new(
        weights: &mut Weights,
        batch: Batch,
        document_mask: bool,
        chunk_tokens: usize,
        sources: usize,
    ) -> Result<Self, LearnError> {
        let sources = sources.max(1);
        let (model, numerics, layout) = (weights.model(), weights.numerics(), weights.layout());
        let loss = Loss { chunk_tokens, z_loss: 0.0, sources, counts_matches: true, balancing: None };
        let program = programs::evaluation(model, numerics, layout, batch, document_mask, loss)?;
        let is_collective = program.instances.iter().any(|i| i.code.op().collective().is_some());
        let ranks = layout.ranks();
        Ok(Evaluator { id: weights.load(program)?, batch, document_mask, sources, is_collective, ranks })
    }

    /// Launches the batch of this rank in a round, which starts at sequence `first`, if it has one.
    fn launch(
        &self,
        weights: &mut Weights,
        validation: &Validation,
        first: u64,
    ) -> Result<OwnBatch, EvaluationError> {
        let has_batch = first < validation.window_count();
        if !has_batch && !self.is_collective {
            return Ok(OwnBatch::None);
        }
        let sequences = self.batch.sequences;
        let batch = validation.batch(first, sequences)?;
        let mut source_of = vec![0; batch.targets.len()];
        if self.sources > 1 {
            let sources = validation.sources(first..first + sequences as u64)?;
            for (tokens, source) in source_of.chunks_mut(self.batch.seq_len).zip(sources) {
                // Rows that pad the batch have no targets.
                tokens.fill(source.unwrap_or(0) as i32);
            }
        }
        let share = weights.layout().share(batch.targets.len());
        let (targets, source_of) = (share.of(&batch.targets, IGNORED_TARGET), share.of(&source_of, 0));
        let mut of_sources = vec![0; self.sources];
        for (_, &source) in targets.iter().zip(&*source_of).filter(|(target, _)| **target != IGNORED_TARGET) {
            of_sources[source as usize] += 1;
        }
        let ticket = self.put(weights, &batch, &share, &source_of)?;
        Ok(OwnBatch::Launched { ticket, has_batch, targets: of_sources.iter().sum(), of_sources })
    }

    /// Launches a batch, with the source of each token.
    fn put(
        &self,
        weights: &mut Weights,
        batch: &TokenBatch,
        share: &BatchShare,
        source_of: &[i32],
    ) -> Result<Ticket, LearnError> {
        let engine = weights.engine();
        feed(engine, self.id, batch, self.document_mask, TokenCounts::full(1), share)?;
        if share.stage.is_last() {
            engine.write_input(self.id, io::SOURCES, bytemuck::cast_slice(source_of))?;
        }
        engine.run(self.id, Part::Whole)?;
        Ok(engine.fetch(self.id)?)
    }

    /// Waits for the sums of a batch, in nats.
    fn land(&self, weights: &mut Weights, own: OwnBatch) -> Result<Sums, LearnError> {
        let empty = Sums { sources: vec![SourceTally::default(); self.sources], ..Sums::default() };
        let OwnBatch::Launched { ticket, has_batch, targets, of_sources } = own else { return Ok(empty) };
        let outputs = weights.engine().collect(ticket)?;
        if !has_batch || !self.ranks.stage.is_last() {
            return Ok(empty);
        }
        let loss_sum = bytemuck::pod_read_unaligned::<f32>(outputs.get(io::LOSS)?).into();
        let sums: Vec<[f32; 3]> = bytemuck::pod_collect_to_vec(outputs.get(io::SUMS)?);
        let of_source = |(targets, [_, cross_entropy, matches]): (usize, [f32; 3])| SourceTally {
            targets,
            loss_sum: cross_entropy.into(),
            matches: matches as usize,
        };
        let sources: Vec<_> = of_sources.into_iter().zip(sums).map(of_source).collect();
        let matches = sources.iter().map(|source| source.matches).sum();
        Ok(Sums { is_of_a_batch: true, all: SourceTally { targets, loss_sum, matches }, sources })
    }

    /// Waits for a round and adds the batches of all ranks in order. Returns true if a rank asks to stop.
    fn add_round(
        &self,
        weights: &mut Weights,
        round: Round,
        tally: &mut Tally,
        ranks: &dyn Gather,
    ) -> Result<bool, EvaluationError> {
        let own = self.land(weights, round.own)?;
        let mut stops = false;
        // Neighbouring ranks have parts of the same sequences.
        for parts in ranks.gather(&own.message(round.stop_request))?.chunks(self.ranks.processes().size) {
            let (stop_requests, parts): (Vec<bool>, Vec<Sums>) =
                parts.iter().map(|message| Sums::from_message(message)).unzip();
            stops |= stop_requests.contains(&true);
            if let Some(sums) = Sums::of_parts(&parts).filter(|sums| sums.is_of_a_batch) {
                tally.add(&sums, self.batch.sequences as u64);
            }
        }
        Ok(stops)
    }

    /// Adds the sequences of `validation` that `tally` does not contain yet. Of the batches, rank r of the n
    /// with different data computes r, r + n, ...; their sums are added in order, so the sum has the same
    /// bits for any n. `check` is called before each batch; [`ControlFlow::Break`] on a rank makes all leave
    /// the rest for a later call, and the final sum has the same bits.
    pub fn add(
        &self,
        weights: &mut Weights,
        validation: &Validation,
        tally: &mut Tally,
        ranks: &dyn Gather,
        check: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<ControlFlow<()>, EvaluationError> {
        let all = validation.window_count();
        if tally.of != all || tally.sources.len() != self.sources {
            let sources = vec![SourceTally::default(); self.sources];
            *tally = Tally { of: all, sources, ..Tally::default() };
        }
        let Rank { index: rank, world_size } = self.ranks.data_rank(ranks.rank());
        let sequences = self.batch.sequences as u64;
        let (mut next, mut ended) = (tally.sequences, ControlFlow::Continue(()));
        let mut flying = VecDeque::new();
        loop {
            let mut stop_request = false;
            if next < all && ended.is_continue() {
                stop_request = check().is_break();
                if stop_request && ranks.rank() == Rank::ALONE {
                    ended = ControlFlow::Break(());
                }
            }
            let is_more = next < all && ended.is_continue();
            if is_more {
                let first = next + rank as u64 * sequences;
                let own = self.launch(weights, validation, first)?;
                flying.push_back(Round { own, stop_request });
                next = all.min(next + world_size as u64 * sequences);
            }
            // Collect the oldest round: of more than may be in flight, or of the remaining ones. All ranks
            // do it after the same launches, so they learn of a stop request at the same time.
            if flying.len() > if is_more { IN_FLIGHT } else { 0 }
                && let Some(oldest) = flying.pop_front()
                && self.add_round(weights, oldest, tally, ranks)?
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
    stop_request: bool,
}

/// The batch of this rank in a round.
enum OwnBatch {
    None,
    /// Its result is still to come.
    Launched {
        ticket: Ticket,
        /// False if it has no targets, because this rank only takes part in the others' batches.
        has_batch: bool,
        targets: usize,
        /// The targets of each source.
        of_sources: Vec<usize>,
    },
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
    /// The sums of ranks that have parts of a batch, added as a binary tree in f32, as the ranks' own are;
    /// None without a rank.
    fn of_parts(parts: &[Sums]) -> Option<Sums> {
        let (left, right) = match parts {
            [] => return None,
            [part] => return Some(part.clone()),
            parts => parts.split_at(parts.len().next_power_of_two() / 2),
        };
        let (mut sums, right) = (Self::of_parts(left)?, Self::of_parts(right)?);
        let add = |to: &mut SourceTally, of: &SourceTally| {
            to.add(*of);
            to.loss_sum = f64::from(to.loss_sum as f32);
        };
        add(&mut sums.all, &right.all);
        sums.sources.iter_mut().zip(&right.sources).for_each(|(to, of)| add(to, of));
        Some(sums)
    }

    /// As a message for other ranks.
    fn message(&self, stop_request: bool) -> Vec<u64> {
        let sums = std::iter::once(&self.all).chain(&self.sources);
        let sums = sums.flat_map(|sum| [sum.targets as u64, sum.loss_sum.to_bits(), sum.matches as u64]);
        [u64::from(stop_request), u64::from(self.is_of_a_batch)].into_iter().chain(sums).collect()
    }

    /// The stop request of a rank, and the sums of its batch.
    fn from_message(message: &[u64]) -> (bool, Sums) {
        let sum = |&[targets, loss_sum, matches]: &[u64; 3]| SourceTally {
            targets: targets as usize,
            loss_sum: f64::from_bits(loss_sum),
            matches: matches as usize,
        };
        let [stop_request, is_of_a_batch, sums @ ..] = message else { return (false, Sums::default()) };
        let mut sums = sums.as_chunks().0.iter().map(sum);
        let all = sums.next().unwrap_or_default();
        (*stop_request != 0, Sums { is_of_a_batch: *is_of_a_batch != 0, all, sources: sums.collect() })
    }
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
    /// Targets that are the likeliest token.
    #[serde(default)]
    pub matches: usize,
    /// The part of each source. Empty in a tally of an earlier version, which starts again.
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
    /// Targets that are the likeliest token; counted in evaluations alone.
    #[serde(default)]
    pub matches: usize,
}

impl SourceTally {
    /// Adds the sums of other targets.
    pub fn add(&mut self, other: SourceTally) {
        self.loss_sum += other.loss_sum;
        self.targets += other.targets;
        self.matches += other.matches;
    }

    /// The mean cross-entropy of its targets, in nats; `None` without any.
    pub fn mean(&self) -> Option<f64> {
        (self.targets > 0).then(|| self.loss_sum / self.targets as f64)
    }

    /// The share of its targets that are the likeliest token, 0 to 1; `None` without any.
    pub fn token_accuracy(&self) -> Option<f64> {
        (self.targets > 0).then(|| self.matches as f64 / self.targets as f64)
    }
}

impl Tally {
    /// Adds a batch of so many sequences.
    fn add(&mut self, sums: &Sums, sequences: u64) {
        self.loss_sum += sums.all.loss_sum;
        self.targets += sums.all.targets;
        self.matches += sums.all.matches;
        self.sequences = self.of.min(self.sequences + sequences);
        for (own, sum) in self.sources.iter_mut().zip(&sums.sources).filter(|(_, sum)| sum.targets > 0) {
            own.add(*sum);
        }
    }

    /// True if JSON can hold its sums.
    pub fn is_finite(&self) -> bool {
        self.loss_sum.is_finite() && self.sources.iter().all(|source| source.loss_sum.is_finite())
    }

    /// Mean cross-entropy of these targets, in nats; 0 without any.
    pub fn mean(&self) -> f64 {
        self.loss_sum / self.targets.max(1) as f64
    }

    /// The share of these targets that are the likeliest token, 0 to 1; 0 without any.
    pub fn token_accuracy(&self) -> f64 {
        self.matches as f64 / self.targets.max(1) as f64
    }
}
