//! The search for the fastest settings that fit.
//!
//! Memory falls and time rises linearly with the number of blocks that recompute, so the smallest number that
//! fits is the fastest for its policy, and two or three plans find it. Norms of all blocks are recomputed
//! even where everything fits, if that saves much memory for next to no time.

use super::outlook::{MARGIN, Prediction, predict};
use crate::estimate::stages::deciding;
use crate::estimate::{Device, Timeline, step_seconds};
use crate::memory::{first_that_fits, least_of_stages, needed_bytes};
use crate::tunable::{
    CAPACITY, LOSS_CHUNK, MICRO_BATCH_SIZE, RECOMPUTE, RECOMPUTE_BLOCKS, Settings, Tunable, TunedStep,
};
use xtrain_config as config;
use xtrain_program::{Program, Recompute};
use xtrain_step::engine::Target;
use xtrain_step::error::LearnError;
use xtrain_step::programs;
use xtrain_step::training_spec::TrainingSpec;

/// The estimated cost of a step with these settings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// The settings.
    pub settings: Settings,
    /// Memory in bytes.
    pub bytes: u64,
    /// Time in seconds; infinite for a step that recomputes and does not fit.
    pub seconds: f64,
}

/// Minimum share of the time that another loss chunk must save, because it changes rounding. Gains of half of
/// this by the estimate were not measured (docs/decisions/chosen-settings.md).
const GAIN: f64 = 0.01;

/// Recomputing norms is worth it, though everything fits, if the step becomes slower by at most this share.
const SLOWER: f64 = 0.0075;

/// ... and the step needs less memory by at least this share.
const SAVED: f64 = 0.05;

/// Largest loss chunk to try. Larger ones gain nothing.
const LARGEST_CHUNK: usize = 1 << 16;

/// Programs that are kept: the chosen step is often one of the last two.
const MOST_PROGRAMS: usize = 2;

pub(super) struct Search<'a> {
    step: TunedStep<'a>,
    /// The settings of the run file.
    own: Settings,
    /// With the rates and connections for choosing settings.
    device: Device,
    /// Bytes that a step may use.
    usable_bytes: u64,
    open: &'a [&'static Tunable],
    /// All estimates so far.
    known: Vec<Estimate>,
    /// Number of blocks of each policy with which it fitted last: it changes little from chunk to chunk.
    fitted: Vec<(Recompute, usize)>,
    /// The step without recomputation, with the usual chunk and the largest micro-batch.
    pub(super) everything: Option<Estimate>,
    /// True if the state alone does not fit, whatever the settings.
    is_hopeless: bool,
    /// All predictions so far; `None` for a step that has to be planned.
    predicted: Vec<(Settings, Option<Prediction>)>,
    /// The last steps that were estimated, newest first.
    last: Vec<(TrainingSpec, Program)>,
}

impl<'a> Search<'a> {
    pub(super) fn new(
        step: TunedStep<'a>,
        device: &Device,
        open: &'a [&'static Tunable],
    ) -> Result<Self, LearnError> {
        let usable_bytes = device.usable_bytes.unwrap_or(u64::MAX);
        Ok(Search {
            step,
            own: step.settings(),
            device: Device { rates: device.choice_rates, network: device.choice_network, ..device.clone() },
            usable_bytes,
            open,
            known: Vec::new(),
            fitted: Vec::new(),
            everything: None,
            is_hopeless: least_of_stages(step.spec)? > usable_bytes,
            predicted: Vec::new(),
            last: Vec::new(),
        })
    }

    /// The last steps that were estimated, and their programs.
    pub(super) fn into_last(self) -> Vec<(TrainingSpec, Program)> {
        self.last
    }

    /// True if the search chooses this setting.
    fn is_open(&self, row: &Tunable) -> bool {
        row.is_in(self.open)
    }

    /// The settings to train with; `None` if nothing fits. Less room for rows of experts is tried if nothing
    /// fits with room for every routing.
    pub(super) fn best(&mut self) -> Result<Option<Estimate>, LearnError> {
        if self.is_hopeless {
            return Ok(None);
        }
        for of in self.rooms() {
            self.own = of;
            if let Some(best) = self.best_in_room()? {
                return Ok(Some(best));
            }
        }
        Ok(None)
    }

    /// The settings to train with in the room of `own`. A CPU recomputes nothing and uses the usual chunk if
    /// that fits. A GPU takes the fastest settings, with norms recomputed if that is worth it.
    fn best_in_room(&mut self) -> Result<Option<Estimate>, LearnError> {
        self.fitted.clear();
        if self.device.target == Target::Cpu {
            let usual = self.chunks(self.micro_batches()[0])[0];
            let saves = |of: &Estimate| of.settings.recompute == Recompute::None;
            let found = self.of_chunk(usual)?;
            if let Some(found) = found.filter(|of| !self.is_open(&RECOMPUTE_BLOCKS) || saves(of)) {
                return Ok(Some(found));
            }
        }
        let mut best: Option<Estimate> = None;
        for of in self.micro_batches_that_may_fit()? {
            // Skip a micro-batch that is too slow even without recomputation.
            if let Some(best) = &best
                && self.takes(self.saving_everything(self.chunks(of)[0]), best.seconds)?
            {
                continue;
            }
            best = faster(best, self.of_micro_batch(of)?);
        }
        best.map(|best| self.with_norms(best)).transpose()
    }

    /// These settings, with norms recomputed if that is worth it.
    fn with_norms(&mut self, fastest: Estimate) -> Result<Estimate, LearnError> {
        if !self.is_open(&RECOMPUTE) || fastest.settings.recompute != Recompute::None {
            return Ok(fastest);
        }
        let of = self.estimate(recomputing_norms(fastest.settings))?;
        let is_worth_it = of.seconds <= fastest.seconds * (1.0 + SLOWER)
            && of.bytes as f64 <= fastest.bytes as f64 * (1.0 - SAVED)
            && self.fits(&of);
        Ok(if is_worth_it { of } else { fastest })
    }

    /// The settings of the run file with each micro-batch size with which some may fit, largest first.
    fn micro_batches_that_may_fit(&mut self) -> Result<Vec<Settings>, LearnError> {
        let mut all = self.micro_batches();
        all.retain(|of| self.least_saved_bytes(of) <= self.usable_bytes);
        let [largest, _, ..] = all[..] else { return Ok(all) };
        // The fewer micro-steps, the fewer partial sums: then a larger micro-batch may need less.
        if self.step.spec.parallel.reduce.is_any_world() {
            return Ok(all);
        }
        // Check first if anything fits.
        if !self.least_fits(all[all.len() - 1])? {
            return Ok(Vec::new());
        }
        let mut over = u64::MAX;
        if self.is_open(&RECOMPUTE_BLOCKS) {
            let everything = self.estimate(self.saving_everything(self.chunks(largest)[0]))?;
            self.everything.get_or_insert(everything);
            over = everything.bytes;
        }
        if over <= self.usable_bytes {
            return Ok(all);
        }
        let first = first_that_fits(all.len(), over, self.usable_bytes, |n| {
            Ok::<_, LearnError>((self.least_bytes(all[n])?, n))
        })?;
        all.drain(..first.unwrap_or(all.len()));
        Ok(all)
    }

    /// The fastest settings that fit, with the micro-batches of `of`.
    fn of_micro_batch(&mut self, of: Settings) -> Result<Option<Estimate>, LearnError> {
        let chunks = self.chunks(of);
        let usual = self.of_chunk(chunks[0])?;
        let Some(usual) = usual else {
            // Check first if anything fits.
            if !self.least_fits(of)? {
                return Ok(None);
            }
            let mut best = None;
            for &chunk in &chunks[1..] {
                best = faster(best, self.of_chunk(chunk)?);
            }
            return Ok(best);
        };
        // Another chunk must beat the usual one by `GAIN`. Skip those that would not even without
        // recomputation, or, as larger chunks need more memory, with as much of it; a model of one layer
        // shows the difference in time.
        let saving = self.saving_everything(chunks[0]);
        let everything = match (self.everything, self.outlook(saving)?) {
            (Some(everything), _) if everything.settings == saving => everything.seconds,
            (_, Some(predicted)) => predicted.seconds * (1.0 - MARGIN),
            _ => self.seconds(saving)?,
        };
        let of_loss = self.loss_seconds(saving)?;
        let mut best = None;
        for &chunk in &chunks[1..] {
            let bound = best.map_or(usual.seconds * (1.0 - GAIN), |best: Estimate| best.seconds);
            let is_larger = chunk.loss_chunk > chunks[0].loss_chunk;
            let least =
                if is_larger { usual.seconds } else { everything.max(self.least_seconds(&usual, chunk)?) };
            let least = least + self.loss_seconds(self.saving_everything(chunk))? - of_loss;
            if least < bound {
                best = faster(best, self.of_chunk(chunk)?.filter(|of| of.seconds < bound));
            }
        }
        Ok(best.or(Some(usual)))
    }

    /// Seconds of the kernels of a step of the model's first layer alone. Differences between chunks are
    /// those of the whole model.
    fn loss_seconds(&self, settings: Settings) -> Result<f64, LearnError> {
        let spec = self.step.with(settings).of_one_stage().with_blocks(1);
        let program = programs::training(&spec)?;
        Ok(step_seconds(&program, &self.device.rates, spec.micro_steps(self.step.batch_size)))
    }

    /// The fastest settings that fit, with the chunk and the micro-batches of `of`.
    fn of_chunk(&mut self, of: Settings) -> Result<Option<Estimate>, LearnError> {
        if !self.is_open(&RECOMPUTE_BLOCKS) {
            return Ok(Some(self.estimate(of)?).filter(|of| self.fits(of)));
        }
        let saving = self.saving_everything(of);
        let over = match self.outlook(saving)? {
            Some(predicted) if self.everything.is_some() && self.is_clear(&predicted) == Some(false) => {
                predicted.bytes as u64
            }
            _ => {
                let everything = self.estimate(saving)?;
                self.everything.get_or_insert(everything);
                if self.fits(&everything) {
                    return Ok(Some(everything));
                }
                everything.bytes
            }
        };
        // Check first if anything fits with this chunk: planning many layers takes long.
        if !self.least_of_chunk_fits(of)? {
            return Ok(None);
        }
        let mut best = None;
        for policy in self.policies(of) {
            // One block less may fit even if a plan says that all do not.
            if self.predicted_to_fit(policy)? == Some(false) {
                continue;
            }
            // In 1, 2, ... blocks.
            let all = (RECOMPUTE_BLOCKS.values)(&self.step, policy);
            let mut found = self.as_before(policy.recompute, &all)?;
            if found.is_none() {
                found =
                    first_that_fits(all.len(), over, self.usable_bytes, |n| match self.outlook(all[n])? {
                        // The last one, with which the search begins.
                        Some(predicted) if self.is_clear(&predicted) == Some(true) => {
                            Ok::<_, LearnError>((predicted.bytes as u64, all[n]))
                        }
                        _ => Ok((self.estimate(all[n])?.bytes, all[n])),
                    })?
                    .map(|of| self.estimate(of))
                    .transpose()?;
            }
            // The last block's activations are read at once, so recomputing them may even need more memory.
            if let (None, [.., but_one, _]) = (&found, &all[..]) {
                found = Some(self.estimate(*but_one)?).filter(|of| self.fits(of));
            }
            if let Some(found) = &found {
                let blocks = found.settings.blocks.unwrap_or(all.len());
                self.fitted.retain(|(recompute, _)| *recompute != policy.recompute);
                self.fitted.push((policy.recompute, blocks));
            }
            best = faster(best, found);
        }
        Ok(best)
    }

    /// The step with as many blocks as fitted last, if that is still the smallest number that fits. `all` are
    /// the settings with this policy in 1, 2, ... blocks.
    fn as_before(&mut self, recompute: Recompute, all: &[Settings]) -> Result<Option<Estimate>, LearnError> {
        let Some(&(_, blocks)) = self.fitted.iter().find(|(policy, _)| *policy == recompute) else {
            return Ok(None);
        };
        let of = self.estimate(all[blocks - 1])?;
        let one_less = if blocks > 1 { Some(self.estimate(all[blocks - 2])?) } else { None };
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
        if found(self).is_none() && self.is_open(&RECOMPUTE) {
            self.estimate(recomputing_norms(chosen.settings))?;
        }
        Ok(found(self))
    }

    /// The settings that need the least memory.
    pub(super) fn least(&mut self) -> Result<Estimate, LearnError> {
        self.own = self.rooms().pop().unwrap_or(self.own);
        let smallest = self.micro_batches().pop().unwrap_or(self.own);
        self.least_of(smallest)
    }

    /// The settings that need the least memory, with the micro-batches of `of`, or others that fit.
    fn least_of(&mut self, of: Settings) -> Result<Estimate, LearnError> {
        let smallest = self.chunks(of).into_iter().min_by_key(|of| of.loss_chunk);
        self.least_of_chunk(smallest.unwrap_or(of))
    }

    /// True if something fits with the micro-batches of `of`.
    fn least_fits(&mut self, of: Settings) -> Result<bool, LearnError> {
        let smallest = self.chunks(of).into_iter().min_by_key(|of| of.loss_chunk);
        self.least_of_chunk_fits(smallest.unwrap_or(of))
    }

    /// True if something fits with the chunk and the micro-batches of `of`.
    fn least_of_chunk_fits(&mut self, of: Settings) -> Result<bool, LearnError> {
        if let Some(fits) = self.predicted_to_fit(self.recomputing_most(of))? {
            return Ok(fits);
        }
        let least = self.least_of_chunk(of)?;
        Ok(self.fits(&least))
    }

    /// The least bytes with the micro-batches of `of`; a prediction, if it is clear whether they fit.
    fn least_bytes(&mut self, of: Settings) -> Result<u64, LearnError> {
        let smallest = self.chunks(of).into_iter().min_by_key(|of| of.loss_chunk).unwrap_or(of);
        match self.outlook(self.recomputing_most(smallest))? {
            Some(predicted) if self.is_clear(&predicted).is_some() => Ok(predicted.bytes as u64),
            _ => Ok(self.least_of_chunk(smallest)?.bytes),
        }
    }

    /// These settings with the policy that needs the least memory, in all blocks.
    fn recomputing_most(&self, of: Settings) -> Settings {
        let most = self.policies(of).pop().filter(|_| self.is_open(&RECOMPUTE_BLOCKS));
        most.unwrap_or(of)
    }

    /// The settings that need the least memory, with the chunk and the micro-batches of `of`, or others that
    /// fit.
    fn least_of_chunk(&mut self, of: Settings) -> Result<Estimate, LearnError> {
        let (true, Some(most)) = (self.is_open(&RECOMPUTE_BLOCKS), self.policies(of).pop()) else {
            return self.estimate(of);
        };
        let all = self.estimate(most)?;
        // If nothing can fit, a block more or less does not matter.
        if self.fits(&all) || self.is_hopeless {
            return Ok(all);
        }
        let but_one = self.estimate(Settings { blocks: Some(self.step.layers() - 1), ..most })?;
        Ok(if but_one.bytes < all.bytes { but_one } else { all })
    }

    /// A lower bound of the time with another chunk than that of `usual`: all blocks recompute but those that
    /// the memory of a smaller chunk has room for. 0 if it may recompute otherwise.
    fn least_seconds(&mut self, usual: &Estimate, chunk: Settings) -> Result<f64, LearnError> {
        let Settings { recompute, blocks, .. } = usual.settings;
        let saving = self.saving_everything(usual.settings);
        let in_all = |of: Settings| Settings { recompute, blocks: None, ..of };
        if recompute != Recompute::Block || self.clearly_fits(recomputing_norms(chunk))? != Some(false) {
            return Ok(0.0);
        }
        let predicted =
            (self.outlook(saving)?, self.outlook(in_all(usual.settings))?, self.outlook(in_all(chunk))?);
        let (Some(none), Some(all), Some(of_chunk)) = predicted else { return Ok(0.0) };
        let layers = self.step.layers();
        let of_block = (none.bytes - all.bytes) / layers as f64;
        let fewer = ((all.bytes - of_chunk.bytes) / of_block).max(0.0).ceil() + 1.0;
        let seconds_of_block = (all.seconds - none.seconds) / layers as f64;
        Ok(usual.seconds - fewer.min(blocks.unwrap_or(layers) as f64) * seconds_of_block)
    }

    /// The prediction for these settings; `None` if only a plan tells.
    fn outlook(&mut self, settings: Settings) -> Result<Option<Prediction>, LearnError> {
        if let Some((_, known)) = self.predicted.iter().find(|(of, _)| *of == settings) {
            return Ok(*known);
        }
        // All blocks must have one policy, and be in one stage.
        let in_all = (settings.recompute == Recompute::None || settings.blocks.is_none())
            && self.step.spec.parallel.pipeline == 1;
        let plan = |spec: &TrainingSpec| {
            let program = programs::training(spec)?;
            let bytes = needed_bytes(spec, &program, self.device.target, self.device.threads)?;
            Ok(Prediction { bytes: bytes as f64, seconds: self.step_seconds(spec, &program) })
        };
        let predicted = if in_all { predict(&self.step.with(settings), plan)? } else { None };
        self.predicted.push((settings, predicted));
        Ok(predicted)
    }

    fn is_clear(&self, predicted: &Prediction) -> Option<bool> {
        predicted.fits(self.usable_bytes)
    }

    /// True or false if these settings surely fit or do not; `None` if a plan decides.
    fn clearly_fits(&mut self, settings: Settings) -> Result<Option<bool>, LearnError> {
        if let Some(known) = self.known.iter().find(|known| known.settings == settings) {
            return Ok(Some(self.fits(known)));
        }
        self.predicted_to_fit(settings)
    }

    /// True or false if these settings surely fit or do not, by a prediction; `None` without a clear one.
    fn predicted_to_fit(&mut self, settings: Settings) -> Result<Option<bool>, LearnError> {
        Ok(self.outlook(settings)?.and_then(|predicted| self.is_clear(&predicted)))
    }

    /// True if a step with these settings takes at least so many seconds.
    fn takes(&mut self, settings: Settings, seconds: f64) -> Result<bool, LearnError> {
        match self.outlook(settings)? {
            Some(predicted) if predicted.seconds > seconds * (1.0 + MARGIN) => Ok(true),
            Some(predicted) if predicted.seconds < seconds * (1.0 - MARGIN) => Ok(false),
            _ => Ok(self.seconds(settings)? >= seconds),
        }
    }

    pub(super) fn fits(&self, of: &Estimate) -> bool {
        of.bytes <= self.usable_bytes
    }

    /// Memory and time of a step with these settings.
    pub(super) fn estimate(&mut self, settings: Settings) -> Result<Estimate, LearnError> {
        if let Some(known) = self.known.iter().find(|known| known.settings == settings) {
            return Ok(*known);
        }
        let (mut bytes, mut seconds) = (0, 0.0_f64);
        // Those of the largest and of the slowest stage of a pipeline.
        for spec in deciding(&self.step.with(settings)) {
            let program = programs::training(&spec)?;
            bytes = bytes.max(needed_bytes(&spec, &program, self.device.target, self.device.threads)?);
            // The time of a step that does not fit matters as a bound alone.
            let is_bound = settings.recompute == Recompute::None;
            seconds = seconds.max(match bytes <= self.usable_bytes || is_bound {
                true => self.step_seconds(&spec, &program),
                false => f64::INFINITY,
            });
            self.last.insert(0, (spec, program));
        }
        let estimate = Estimate { settings, bytes, seconds };
        self.known.push(estimate);
        self.last.truncate(MOST_PROGRAMS * self.step.spec.parallel.pipeline);
        Ok(estimate)
    }

    fn seconds(&self, settings: Settings) -> Result<f64, LearnError> {
        deciding(&self.step.with(settings))
            .iter()
            .try_fold(0.0_f64, |most, spec| Ok(most.max(self.step_seconds(spec, &programs::training(spec)?))))
    }

    /// Seconds of a step of `spec`, which is `program`. Those of several ranks also wait for collectives.
    fn step_seconds(&self, spec: &TrainingSpec, program: &Program) -> f64 {
        let micro_steps = spec.micro_steps(self.step.batch_size);
        match spec.parallel.rank.world_size {
            1 => step_seconds(program, &self.device.rates, micro_steps),
            _ => Timeline::new(program, &self.device, micro_steps).seconds(),
        }
    }

    /// These settings without recomputation. A policy of the run file stays, and then applies to no block.
    fn saving_everything(&self, of: Settings) -> Settings {
        let blocks = (!self.is_open(&RECOMPUTE)).then_some(0);
        Settings { recompute: Recompute::None, blocks, ..of }
    }

    /// A lower bound of the memory of a step: the inputs of all blocks, which every policy saves.
    fn least_saved_bytes(&self, of: &Settings) -> u64 {
        let TrainingSpec { batch, model, .. } = self.step.spec;
        (2 * of.micro_batch_size * batch.seq_len * model.dim * model.layers.len()) as u64
    }

    /// These settings with each policy that recomputes something, in all blocks, the cheapest first.
    fn policies(&self, of: Settings) -> Vec<Settings> {
        match of.recompute {
            _ if self.is_open(&RECOMPUTE) => (RECOMPUTE.values)(&self.step, of),
            Recompute::None => Vec::new(),
            _ => vec![Settings { blocks: None, ..of }],
        }
    }

    /// The settings of the run file with each room for rows of experts to try, largest first.
    fn rooms(&self) -> Vec<Settings> {
        match self.is_open(&CAPACITY) {
            true => (CAPACITY.values)(&self.step, self.own),
            false => vec![self.own],
        }
    }

    /// The settings of the run file with each micro-batch size to try, largest first.
    fn micro_batches(&self) -> Vec<Settings> {
        match self.is_open(&MICRO_BATCH_SIZE) {
            true => (MICRO_BATCH_SIZE.values)(&self.step, self.own),
            false => vec![self.own],
        }
    }

    /// These settings with each loss chunk to try, the usual one first. Of sizes that give equally many
    /// chunks, only the smallest is tried.
    fn chunks(&self, of: Settings) -> Vec<Settings> {
        if !self.is_open(&LOSS_CHUNK) {
            return vec![of];
        }
        let usual = Settings { loss_chunk: config::LOSS_CHUNK, ..of };
        let spec = self.step.spec;
        let tokens = (of.micro_batch_size * spec.batch.seq_len).div_ceil(spec.ranks().tensor.size);
        let mut all = (LOSS_CHUNK.values)(&self.step, of);
        all.retain(|of| of.loss_chunk <= LARGEST_CHUNK);
        all.retain(|of| tokens.div_ceil(of.loss_chunk) != tokens.div_ceil(usual.loss_chunk));
        all.push(usual);
        all.reverse();
        all
    }
}

fn recomputing_norms(of: Settings) -> Settings {
    Settings { recompute: Recompute::Norms, blocks: None, ..of }
}

fn faster(one: Option<Estimate>, other: Option<Estimate>) -> Option<Estimate> {
    match (one, other) {
        (Some(one), Some(other)) => Some(if other.seconds < one.seconds { other } else { one }),
        (one, other) => one.or(other),
    }
}
