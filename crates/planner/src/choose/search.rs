//! The search for the fastest settings that fit.
//!
//! Memory falls and time rises linearly with the number of blocks that recompute, so the smallest number that
//! fits is the fastest for its policy, and two or three plans find it. Norms of all blocks are recomputed
//! even where everything fits, if that saves much memory for next to no time.

use crate::estimate::{Device, Timeline, step_seconds};
use crate::fit::{first_that_fits, needed_bytes};
use xtrain_config as config;
use xtrain_config::{OrAuto, TrainConfig};
use xtrain_program::{Program, Recompute, Reduce};
use xtrain_step::engine::Target;
use xtrain_step::error::LearnError;
use xtrain_step::programs;
use xtrain_step::training_spec::TrainingSpec;

/// Settings of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The policy.
    pub recompute: Recompute,
    /// Number of blocks, from the first one, in which the policy applies.
    pub blocks: usize,
    /// Tokens whose logits exist at a time.
    pub loss_chunk: usize,
    /// Sequences of a micro-batch.
    pub micro_batch_size: usize,
}

/// The estimated cost of a step with these settings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// The settings.
    pub settings: Settings,
    /// Memory in bytes.
    pub bytes: u64,
    /// Time in seconds.
    pub seconds: f64,
}

/// The settings that a run file leaves open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Open {
    pub(super) recompute: bool,
    pub(super) blocks: bool,
    pub(super) loss_chunk: bool,
    pub(super) micro_batch_size: bool,
}

/// Minimum share of the time that another loss chunk must save, because it changes rounding. Gains of half of
/// this by the estimate were not measured (docs/decisions/chosen-settings.md).
pub(super) const GAIN: f64 = 0.01;

/// Recomputing norms is worth it, though everything fits, if the step becomes slower by at most this share.
const SLOWER: f64 = 0.0075;

/// ... and the step needs less memory by at least this share.
const SAVED: f64 = 0.05;

/// Smallest and largest loss chunk to try. Smaller GEMMs are slow; larger ones gain nothing.
const CHUNKS: (usize, usize) = (256, 1 << 16);

pub(super) struct Search<'a> {
    spec: &'a TrainingSpec,
    batch_size: usize,
    /// With the rates and connections for choosing settings.
    device: Device,
    /// Bytes that a step may use.
    usable_bytes: u64,
    pub(super) open: Open,
    /// All estimates so far.
    known: Vec<Estimate>,
    /// Number of blocks of each policy with which it fitted last: it changes little from chunk to chunk.
    fitted: Vec<(Recompute, usize)>,
    /// The step without recomputation, with the usual chunk and the largest micro-batch.
    everything: Option<Estimate>,
}

impl Open {
    /// The settings that `train` leaves open; `None` if there are none.
    pub(super) fn of(train: &TrainConfig) -> Option<Open> {
        let recompute = train.recompute == config::Recompute::Auto;
        let is_policy = train.recompute != config::Recompute::None;
        let open = Open {
            recompute,
            blocks: recompute || is_policy && train.recompute_blocks == Some(OrAuto::Auto),
            loss_chunk: train.loss_chunk == OrAuto::Auto,
            micro_batch_size: train.micro_batch_size == Some(OrAuto::Auto),
        };
        (open.recompute || open.blocks || open.loss_chunk || open.micro_batch_size).then_some(open)
    }
}

impl<'a> Search<'a> {
    pub(super) fn new(spec: &'a TrainingSpec, batch_size: usize, device: &Device, open: Open) -> Self {
        Search {
            spec,
            batch_size,
            device: Device { rates: device.choice_rates, network: device.choice_network, ..device.clone() },
            usable_bytes: device.usable_bytes.unwrap_or(u64::MAX),
            open,
            known: Vec::new(),
            fitted: Vec::new(),
            everything: None,
        }
    }

    /// The settings to train with; `None` if nothing fits. A CPU recomputes nothing and uses the usual chunk
    /// if that fits. A GPU takes the fastest settings, with norms recomputed if that is worth it.
    pub(super) fn best(&mut self) -> Result<Option<Estimate>, LearnError> {
        if self.device.target == Target::Cpu {
            let sequences = self.micro_batches()[0];
            let usual = self.of_chunk(sequences, self.chunks(sequences)[0])?;
            if let Some(usual) = usual.filter(|of| !self.open.blocks || of.settings.blocks == 0) {
                return Ok(Some(usual));
            }
        }
        let mut best: Option<Estimate> = None;
        for sequences in self.micro_batches_that_may_fit()? {
            // Skip a micro-batch that is too slow even without recomputation.
            if let Some(best) = &best {
                let saving = self.saving_everything(sequences, self.chunks(sequences)[0]);
                if self.seconds(&self.spec_with(saving))? >= best.seconds {
                    continue;
                }
            }
            best = faster(best, self.of_micro_batch(sequences)?);
        }
        best.map(|best| self.with_norms(best)).transpose()
    }

    /// These settings, with norms recomputed if that is worth it.
    fn with_norms(&mut self, fastest: Estimate) -> Result<Estimate, LearnError> {
        if !self.open.recompute || fastest.settings.recompute != Recompute::None {
            return Ok(fastest);
        }
        let blocks = self.spec.model.layers.len();
        let of = self.estimate(Settings { recompute: Recompute::Norms, blocks, ..fastest.settings })?;
        let is_worth_it = of.seconds <= fastest.seconds * (1.0 + SLOWER)
            && of.bytes as f64 <= fastest.bytes as f64 * (1.0 - SAVED)
            && self.fits(&of);
        Ok(if is_worth_it { of } else { fastest })
    }

    /// Micro-batch sizes with which some settings may fit, largest first.
    fn micro_batches_that_may_fit(&mut self) -> Result<Vec<usize>, LearnError> {
        let mut sizes = self.micro_batches();
        sizes.retain(|&sequences| self.least_saved_bytes(sequences) <= self.usable_bytes);
        let [largest, _, ..] = sizes[..] else { return Ok(sizes) };
        // The fewer micro-steps, the fewer partial sums: then a larger micro-batch may need less.
        if matches!(self.spec.parallel.reduce, Reduce::AnyWorld { .. }) {
            return Ok(sizes);
        }
        let mut over = u64::MAX;
        if self.open.blocks {
            let everything = self.estimate(self.saving_everything(largest, self.chunks(largest)[0]))?;
            self.everything.get_or_insert(everything);
            over = everything.bytes;
        }
        let usable = self.usable_bytes;
        if over <= usable {
            return Ok(sizes);
        }
        let first = first_that_fits(sizes.len(), over, usable, |n| {
            Ok::<_, LearnError>((self.least_of(sizes[n])?.bytes, n))
        })?;
        sizes.drain(..first.unwrap_or(sizes.len()));
        Ok(sizes)
    }

    /// The fastest settings that fit, for micro-batches of `sequences`.
    fn of_micro_batch(&mut self, sequences: usize) -> Result<Option<Estimate>, LearnError> {
        let chunks = self.chunks(sequences);
        let usual = self.of_chunk(sequences, chunks[0])?;
        let Some(usual) = usual else {
            // Check first if anything fits.
            let least = self.least_of(sequences)?;
            if !self.fits(&least) {
                return Ok(None);
            }
            let mut best = None;
            for &chunk in &chunks[1..] {
                best = faster(best, self.of_chunk(sequences, chunk)?);
            }
            return Ok(best);
        };
        // Another chunk must beat the usual one by `GAIN`. Skip those that would not even without
        // recomputation, or, as larger chunks need more memory, with as much of it; a model of one layer
        // shows the difference in time.
        let saving = self.saving_everything(sequences, chunks[0]);
        let everything = match self.everything {
            Some(everything) if everything.settings == saving => everything.seconds,
            _ => self.seconds(&self.spec_with(saving))?,
        };
        let of_loss = self.loss_seconds(saving)?;
        let mut best = None;
        for &chunk in &chunks[1..] {
            let bound = best.map_or(usual.seconds * (1.0 - GAIN), |best: Estimate| best.seconds);
            let least = if chunk > chunks[0] { usual.seconds } else { everything };
            let least = least + self.loss_seconds(Settings { loss_chunk: chunk, ..saving })? - of_loss;
            if least < bound {
                best = faster(best, self.of_chunk(sequences, chunk)?.filter(|of| of.seconds < bound));
            }
        }
        Ok(best.or(Some(usual)))
    }

    /// Seconds of the kernels of a step of the model's first layer alone. Differences between chunks are
    /// those of the whole model.
    fn loss_seconds(&self, settings: Settings) -> Result<f64, LearnError> {
        let mut spec = self.spec_with(settings);
        spec.model = spec.model.truncated(1);
        let program = programs::training(&spec)?;
        Ok(step_seconds(&program, &self.device.rates, spec.micro_steps(self.batch_size)))
    }

    /// The fastest settings that fit, for this chunk.
    fn of_chunk(&mut self, sequences: usize, chunk: usize) -> Result<Option<Estimate>, LearnError> {
        let saving = self.saving_everything(sequences, chunk);
        if !self.open.blocks {
            let fixed = Settings { recompute: self.spec.recompute, blocks: self.blocks(), ..saving };
            return Ok(Some(self.estimate(fixed)?).filter(|of| self.fits(of)));
        }
        let everything = self.estimate(saving)?;
        self.everything.get_or_insert(everything);
        if self.fits(&everything) {
            return Ok(Some(everything));
        }
        // Check first if anything fits with this chunk: planning many layers takes long.
        let least = self.least_of_chunk(sequences, chunk)?;
        if !self.fits(&least) {
            return Ok(None);
        }
        let mut best = None;
        for &recompute in self.policies() {
            let at = |blocks| Settings { recompute, blocks, ..saving };
            let count = self.spec.model.layers.len();
            let mut found = self.as_before(at, recompute)?;
            if found.is_none() {
                let (over, usable) = (everything.bytes, self.usable_bytes);
                found = first_that_fits(count, over, usable, |n| {
                    let of = self.estimate(at(n + 1))?;
                    Ok::<_, LearnError>((of.bytes, of))
                })?;
            }
            // The last block's activations are read at once, so recomputing them may even need more memory.
            if found.is_none() && count > 1 {
                found = Some(self.estimate(at(count - 1))?).filter(|of| self.fits(of));
            }
            if let Some(found) = &found {
                self.fitted.retain(|(policy, _)| *policy != recompute);
                self.fitted.push((recompute, found.settings.blocks));
            }
            best = faster(best, found);
        }
        Ok(best)
    }

    /// The step with as many blocks as fitted last, if that is still the smallest number that fits.
    fn as_before(
        &mut self,
        at: impl Fn(usize) -> Settings,
        recompute: Recompute,
    ) -> Result<Option<Estimate>, LearnError> {
        let Some(&(_, blocks)) = self.fitted.iter().find(|(policy, _)| *policy == recompute) else {
            return Ok(None);
        };
        let of = self.estimate(at(blocks))?;
        let one_less = if blocks > 1 { Some(self.estimate(at(blocks - 1))?) } else { None };
        let is_least = self.fits(&of) && one_less.is_none_or(|of| !self.fits(&of));
        Ok(is_least.then_some(of))
    }

    /// The fastest settings that fit and differ from `chosen` in more than the number of blocks.
    pub(super) fn next_best(&mut self, chosen: &Estimate) -> Result<Option<Estimate>, LearnError> {
        let differs = |of: &Estimate| {
            let is_other = Settings { blocks: chosen.settings.blocks, ..of.settings } != chosen.settings;
            // Faster settings were rejected because the gain does not justify other rounding.
            is_other && of.seconds >= chosen.seconds
        };
        let found = |search: &Self| {
            let fitting = search.known.iter().copied().filter(|of| search.fits(of));
            fitting.filter(differs).fold(None, |best, of| faster(best, Some(of)))
        };
        if found(self).is_none() && self.open.recompute {
            let blocks = self.spec.model.layers.len();
            self.estimate(Settings { recompute: Recompute::Norms, blocks, ..chosen.settings })?;
        }
        Ok(found(self))
    }

    /// The settings that need the least memory.
    pub(super) fn least(&mut self) -> Result<Estimate, LearnError> {
        let sequences = self.micro_batches().pop().unwrap_or(1);
        self.least_of(sequences)
    }

    /// The settings that need the least memory, for micro-batches of `sequences`, or others that fit.
    fn least_of(&mut self, sequences: usize) -> Result<Estimate, LearnError> {
        let chunk = self.chunks(sequences).into_iter().min().unwrap_or(config::LOSS_CHUNK);
        self.least_of_chunk(sequences, chunk)
    }

    /// The settings that need the least memory, for this chunk, or others that fit.
    fn least_of_chunk(&mut self, sequences: usize, chunk: usize) -> Result<Estimate, LearnError> {
        let saving = self.saving_everything(sequences, chunk);
        let (true, [.., recompute]) = (self.open.blocks, self.policies()) else {
            let given = Settings { recompute: self.spec.recompute, blocks: self.blocks(), ..saving };
            return self.estimate(given);
        };
        let blocks = self.spec.model.layers.len();
        let all = self.estimate(Settings { recompute: *recompute, blocks, ..saving })?;
        if self.fits(&all) {
            return Ok(all);
        }
        let but_one = self.estimate(Settings { recompute: *recompute, blocks: blocks - 1, ..saving })?;
        Ok(if but_one.bytes < all.bytes { but_one } else { all })
    }

    /// The step without recomputation.
    pub(super) fn everything(&self) -> Option<Estimate> {
        self.everything
    }

    pub(super) fn fits(&self, of: &Estimate) -> bool {
        of.bytes <= self.usable_bytes
    }

    /// Memory and time of a step with these settings.
    pub(super) fn estimate(&mut self, settings: Settings) -> Result<Estimate, LearnError> {
        if let Some(known) = self.known.iter().find(|known| known.settings == settings) {
            return Ok(*known);
        }
        let spec = self.spec_with(settings);
        let program = programs::training(&spec)?;
        let bytes = needed_bytes(&spec, &program, self.device.target, self.device.threads)?;
        let seconds = self.step_seconds(&spec, &program);
        let estimate = Estimate { settings, bytes, seconds };
        self.known.push(estimate);
        Ok(estimate)
    }

    fn seconds(&self, spec: &TrainingSpec) -> Result<f64, LearnError> {
        Ok(self.step_seconds(spec, &programs::training(spec)?))
    }

    /// Seconds of a step of `spec`, which is `program`. Those of several ranks also wait for collectives.
    fn step_seconds(&self, spec: &TrainingSpec, program: &Program) -> f64 {
        let micro_steps = spec.micro_steps(self.batch_size);
        match spec.parallel.world_size {
            1 => step_seconds(program, &self.device.rates, micro_steps),
            _ => Timeline::new(program, &self.device, micro_steps).seconds(),
        }
    }

    fn spec_with(&self, settings: Settings) -> TrainingSpec {
        let Settings { recompute, blocks, loss_chunk, micro_batch_size } = settings;
        let mut spec = self.spec.with_micro_batches(micro_batch_size, self.batch_size);
        spec.recompute = recompute;
        spec.recompute_blocks = (blocks < spec.model.layers.len()).then_some(blocks);
        spec.loss.chunk_tokens = loss_chunk;
        spec
    }

    fn saving_everything(&self, sequences: usize, loss_chunk: usize) -> Settings {
        Settings { recompute: Recompute::None, blocks: 0, loss_chunk, micro_batch_size: sequences }
    }

    /// A lower bound of the memory of a step: the inputs of all blocks, which every policy saves.
    fn least_saved_bytes(&self, sequences: usize) -> u64 {
        let model = &self.spec.model;
        (2 * sequences * self.spec.batch.seq_len * model.dim * model.layers.len()) as u64
    }

    /// The number of blocks that the run file gives.
    fn blocks(&self) -> usize {
        self.spec.recompute_blocks.unwrap_or(self.spec.model.layers.len())
    }

    /// The policies that recompute something, the cheapest first.
    fn policies(&self) -> &'static [Recompute] {
        match (self.open.recompute, self.spec.recompute) {
            (true, _) => &[Recompute::Norms, Recompute::Block],
            (false, Recompute::Norms) => &[Recompute::Norms],
            (false, Recompute::Block) => &[Recompute::Block],
            (false, Recompute::None) => &[],
        }
    }

    /// Micro-batch sizes to try, largest first.
    pub(super) fn micro_batches(&self) -> Vec<usize> {
        match self.open.micro_batch_size {
            true => {
                let of_a_rank = self.batch_size / self.spec.parallel.world_size;
                (1..=of_a_rank).rev().filter(|n| of_a_rank.is_multiple_of(*n)).collect()
            }
            false => vec![self.spec.batch.sequences],
        }
    }

    /// Loss chunks to try, the usual one first. Of sizes that give equally many chunks, only the smallest is
    /// tried.
    pub(super) fn chunks(&self, sequences: usize) -> Vec<usize> {
        if !self.open.loss_chunk {
            return vec![self.spec.loss.chunk_tokens];
        }
        let tokens = sequences * self.spec.batch.seq_len;
        let sizes = std::iter::successors(Some(CHUNKS.0), |size| Some(2 * size));
        let sizes = sizes.take_while(|size| *size <= CHUNKS.1 && size / 2 < tokens);
        let others = sizes.filter(|&size| tokens.div_ceil(size) != tokens.div_ceil(config::LOSS_CHUNK));
        std::iter::once(config::LOSS_CHUNK).chain(others).collect()
    }
}

fn faster(one: Option<Estimate>, other: Option<Estimate>) -> Option<Estimate> {
    match (one, other) {
        (Some(one), Some(other)) => Some(if other.seconds < one.seconds { other } else { one }),
        (one, other) => one.or(other),
    }
}
