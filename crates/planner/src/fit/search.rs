//! The search for settings with which a step that does not fit would.

use super::{Alternative, Instead, MoreGpus, Verdict, needed_bytes};
use crate::error::PlanError;
use crate::estimate::RANKS_PER_NODE;
use xtrain_program::{Parallel, Recompute, Region, Shard};
use xtrain_step::engine::{Room, Target};
use xtrain_step::error::LearnError;
use xtrain_step::programs;
use xtrain_step::training_spec::TrainingSpec;

/// Smallest chunk of the loss that is suggested, in tokens: below it GEMMs are too small.
const SMALLEST_CHUNK: usize = 256;

/// The shortest sequence that is suggested, in tokens.
const SHORTEST: usize = 128;

/// The most GPUs that are suggested.
const MOST_GPUS: usize = 1024;

/// Largest number of combinations in a message, if no single setting is enough.
const MOST_COMBINED: usize = 2;

pub(super) struct Search<'a> {
    pub(super) spec: &'a TrainingSpec,
    pub(super) target: Target,
    pub(super) threads: usize,
    pub(super) batch_size: usize,
    pub(super) room: Room,
    /// Bytes that the step needs as configured.
    pub(super) needed_bytes: u64,
}

/// A step that needs less memory, and the settings that lead to it.
#[derive(Clone)]
struct Changed {
    spec: TrainingSpec,
    settings: Vec<String>,
}

impl Search<'_> {
    pub(super) fn bytes(&self, spec: &TrainingSpec) -> Result<u64, PlanError> {
        let program = programs::training(spec).map_err(LearnError::from)?;
        Ok(needed_bytes(spec, &program, self.target, self.threads)?)
    }

    /// This step with the most replicas that let it fit, or else the fewest possible; `None` if there cannot
    /// be fewer.
    pub(super) fn fewer_replicas(&self) -> Option<TrainingSpec> {
        let Parallel { world_size, replicas, .. } = self.spec.parallel;
        let mut found = None;
        for replicas in (1..replicas).rev().filter(|n| world_size.is_multiple_of(*n)) {
            let with =
                TrainingSpec { parallel: Parallel { replicas, ..self.spec.parallel }, ..self.spec.clone() };
            // The model may have too few rows for larger groups.
            let Ok(bytes) = self.bytes(&with) else { break };
            found = Some(with);
            if bytes <= self.room.available_bytes {
                break;
            }
        }
        found
    }

    /// The first step of `from` that fits, and its bytes. Each needs less than the one before.
    fn first(&self, from: &[Changed]) -> Result<Option<(Changed, Alternative)>, PlanError> {
        let available = self.room.available_bytes;
        let found = first_that_fits(from.len(), self.needed_bytes, available, |at| {
            let bytes = self.bytes(&from[at].spec)?;
            Ok::<_, PlanError>((bytes, (at, bytes)))
        })?;
        Ok(found.map(|(at, bytes)| {
            let changed = from[at].clone();
            (changed.clone(), Alternative { settings: changed.settings, bytes })
        }))
    }

    pub(super) fn verdict(&self) -> Result<Verdict, PlanError> {
        let as_it_is = [Changed { spec: self.spec.clone(), settings: Vec::new() }];
        let norms = self.recomputing(Recompute::Norms, "norms");
        let blocks = self.recomputing(Recompute::Block, "block");
        let recompute: Vec<Changed> = norms.last().into_iter().chain(blocks.last()).cloned().collect();
        let chunk = |from: &Changed| self.chunks(from);
        let micro = |from: &Changed| self.micro_batches(from);
        let smallest = |from: &Changed| chunk(from).pop().unwrap_or_else(|| from.clone());
        // Check first if anything can fit: planning very many layers takes long.
        let least = smallest(recompute.last().unwrap_or(&as_it_is[0]));
        let Changed { spec, settings } = micro(&least).pop().unwrap_or(least);
        let bytes = self.bytes(&spec)?;
        if bytes > self.room.available_bytes {
            let program = programs::training(&spec).map_err(LearnError::from)?;
            let state_bytes = self.target.plan(&program).region_bytes[Region::State as usize] as u64;
            let is_held = bytes <= self.room.alone_bytes;
            let instead = self.instead(&spec, bytes)?;
            let least = Alternative { settings, bytes };
            let ranks = self.spec.parallel.world_size;
            return Ok(Verdict::Nothing { least, state_bytes, ranks, is_held, instead });
        }
        let alternatives = self.cheapest(&as_it_is[0], &norms, &blocks)?;
        if !alternatives.is_empty() {
            return Ok(Verdict::WouldFit(alternatives));
        }
        // If everything is recomputed already, only the other settings are left.
        let recompute = if recompute.is_empty() { as_it_is.to_vec() } else { recompute };
        let chunked = recompute.iter().map(chunk);
        let cut = recompute.iter().map(micro);
        let both = recompute.iter().map(|from| micro(&smallest(from)));
        let mut alternatives = Vec::new();
        for from in chunked.chain(cut).chain(both) {
            let found = self.first(&from)?.map(|(_, alternative)| alternative);
            // Skip an alternative that adds a setting to one in the list.
            let is_more = |alternative: &Alternative, told: &Alternative| {
                told.settings.iter().all(|s| alternative.settings.contains(s))
            };
            alternatives.extend(
                found.filter(|alternative| !alternatives.iter().any(|told| is_more(alternative, told))),
            );
            if alternatives.len() == MOST_COMBINED {
                break;
            }
        }
        if alternatives.is_empty() {
            alternatives.push(Alternative { settings, bytes });
        }
        Ok(Verdict::WouldFit(alternatives))
    }

    /// Models and numbers of GPUs with which the run would fit, given that even `least` does not. It needs
    /// `bytes`.
    fn instead(&self, least: &TrainingSpec, bytes: u64) -> Result<Instead, PlanError> {
        let (layers, available) = (least.model.layers.len(), self.room.available_bytes);
        let fewer_layers = first_that_fits(layers - 1, bytes, available, |n| {
            let left = layers - 1 - n;
            let spec = TrainingSpec { model: least.model.truncated(left), ..least.clone() };
            Ok::<_, PlanError>((self.bytes(&spec)?, left))
        })?;
        let shorter = |n: usize| Some(least.batch.seq_len >> (n + 1)).filter(|len| *len >= SHORTEST);
        let lengths: Vec<usize> = (0..usize::BITS as usize).map_while(shorter).collect();
        let seq_len = first_that_fits(lengths.len(), bytes, available, |n| {
            let mut spec = least.clone();
            spec.batch.seq_len = lengths[n];
            spec.loss.chunk_tokens = spec.loss.chunk_tokens.min(lengths[n]);
            Ok::<_, PlanError>((self.bytes(&spec)?, lengths[n]))
        })?;
        let (gpus, most_gpus) = match self.target {
            Target::Cpu => (None, None),
            Target::Cuda => {
                let (gpus, most) = self.gpus(least, bytes)?;
                (gpus, Some(most))
            }
        };
        Ok(Instead { layers, fewer_layers, seq_len, gpus, most_gpus })
    }

    /// The least number of GPUs that has room for a rank of `least` with weights, gradients and optimizer
    /// state divided among all: a power of two, or a number of whole nodes that shares the batch evenly. A
    /// batch that is too small grows. And the largest number that the model can be divided among.
    fn gpus(&self, least: &TrainingSpec, bytes: u64) -> Result<(Option<MoreGpus>, usize), PlanError> {
        let shares = |count: &usize| self.batch_size.is_multiple_of(count * least.batch.sequences);
        let more = |count: &usize| {
            let is_round = count.is_power_of_two() || count.is_multiple_of(RANKS_PER_NODE) && shares(count);
            is_round && *count > least.parallel.world_size
        };
        let of_ranks = |count: usize| -> Result<MoreGpus, PlanError> {
            let grown = self.batch_size.next_multiple_of(count * least.batch.sequences);
            let parallel =
                Parallel { world_size: count, replicas: 1, shard: Shard::Weights, ..least.parallel };
            let spec = TrainingSpec { parallel, ..least.clone() };
            let bytes = self.bytes(&spec.with_micro_batches(least.batch.sequences, grown))?;
            Ok(MoreGpus { count, bytes, batch_size: (!shares(&count)).then_some(grown) })
        };
        // A model has too few rows for any number of ranks.
        let mut counts: Vec<usize> = (2..=MOST_GPUS).filter(more).collect();
        while counts.last().is_some_and(|&most| of_ranks(most).is_err()) {
            counts.truncate(counts.len() - counts.len().div_ceil(8));
        }
        let found = first_that_fits(counts.len(), bytes, self.room.available_bytes, |n| {
            let found = of_ranks(counts[n])?;
            Ok::<_, PlanError>((found.bytes, found))
        })?;
        Ok((found, counts.last().copied().unwrap_or(least.parallel.world_size)))
    }

    /// Alternatives of one setting, or of `norms` and a smaller micro-batch if that is larger than the one
    /// without `norms`.
    fn cheapest(
        &self,
        as_it_is: &Changed,
        norms: &[Changed],
        blocks: &[Changed],
    ) -> Result<Vec<Alternative>, PlanError> {
        // Ordered by cost: some additional arithmetic, smaller GEMMs of the head, smaller GEMMs everywhere,
        // much additional arithmetic.
        let by_norms = self.first(norms)?;
        let by_chunk = self.first(&self.chunks(as_it_is))?;
        let by_micro = self.first(&self.micro_batches(as_it_is))?;
        let (mut by_both, mut by_blocks) = (None, None);
        if by_norms.is_none() {
            let sequences = by_micro.as_ref().map_or(0, |(changed, _)| changed.spec.batch.sequences);
            if let Some(all) = norms.last() {
                by_both = self.first(&self.micro_batches(all))?;
            }
            by_both = by_both.filter(|(changed, _)| changed.spec.batch.sequences > sequences);
            by_blocks = self.first(blocks)?;
        }
        let alternatives = [by_norms, by_chunk, by_both, by_micro, by_blocks];
        Ok(alternatives.into_iter().flatten().map(|(_, alternative)| alternative).collect())
    }

    /// `recompute` in an increasing number of blocks, up to all.
    fn recomputing(&self, recompute: Recompute, name: &str) -> Vec<Changed> {
        let TrainingSpec { recompute: now, recompute_blocks: blocks, .. } = *self.spec;
        let layers = self.spec.model.layers.len();
        let done = match now {
            Recompute::None => 0,
            _ if now == recompute => blocks.unwrap_or(layers),
            Recompute::Norms => 0,
            // The policy recomputes norms as well.
            Recompute::Block => layers,
        };
        let change = |n: usize| {
            let recompute_blocks = (n < layers).then_some(n);
            let mut settings = Vec::new();
            if now != recompute {
                settings.push(format!("train.recompute={name}"));
            }
            if recompute_blocks != blocks {
                let n = recompute_blocks.map_or(String::new(), |n| n.to_string());
                settings.push(format!("train.recompute_blocks={n}"));
            }
            Changed { spec: TrainingSpec { recompute, recompute_blocks, ..self.spec.clone() }, settings }
        };
        (done + 1..=layers).map(change).collect()
    }

    /// Smaller chunks of tokens whose logits exist at once.
    fn chunks(&self, from: &Changed) -> Vec<Changed> {
        let tokens = from.spec.batch.sequences * from.spec.batch.seq_len;
        let mut chunk = from.spec.loss.chunk_tokens.min(tokens).next_power_of_two() / 2;
        let mut all = Vec::new();
        while chunk >= SMALLEST_CHUNK {
            let mut changed = from.clone();
            changed.spec.loss.chunk_tokens = chunk;
            changed.settings.push(format!("train.loss_chunk={chunk}"));
            all.push(changed);
            chunk /= 2;
        }
        all
    }

    /// Smaller micro-batches, and more of them, as many on each rank.
    fn micro_batches(&self, from: &Changed) -> Vec<Changed> {
        let ranks = from.spec.parallel.world_size;
        let fewer = (1..from.spec.batch.sequences).rev();
        let fewer = fewer.filter(|n| self.batch_size.is_multiple_of(n * ranks));
        let change = |n: usize| {
            let mut changed = from.clone();
            changed.spec = from.spec.with_micro_batches(n, self.batch_size);
            changed.settings.push(format!("train.micro_batch_size={n}"));
            changed
        };
        fewer.map(change).collect()
    }
}

/// Binary search for the first of `count` candidates that needs at most `available` bytes. Each needs fewer
/// bytes than the one before; the one before the first needs `over`, which is too much. `try_at` returns the
/// bytes of a candidate and its result.
pub fn first_that_fits<T, E>(
    count: usize,
    mut over: u64,
    available: u64,
    mut try_at: impl FnMut(usize) -> Result<(u64, T), E>,
) -> Result<Option<T>, E> {
    let Some(last) = count.checked_sub(1) else { return Ok(None) };
    let (mut bytes, mut found) = try_at(last)?;
    if bytes > available {
        return Ok(None);
    }
    // Candidates before `begin` do not fit, the last of them needs `over`; the one at `end` needs `bytes`.
    let (mut begin, mut end) = (0, last);
    let mut by_share = true;
    while begin < end {
        // Planning many layers is slow, and bytes mostly fall evenly: try the interpolated crossing and the
        // middle in turn.
        let share = (over - available) as f64 / (over - bytes) as f64;
        let crossing = (begin + (share * (end + 1 - begin) as f64).ceil() as usize).saturating_sub(1);
        let at = if by_share { crossing.clamp(begin, end - 1) } else { (begin + end) / 2 };
        by_share = !by_share;
        let (found_bytes, found_at) = try_at(at)?;
        if found_bytes <= available {
            (end, bytes, found) = (at, found_bytes, found_at);
        } else {
            (begin, over) = (at + 1, found_bytes);
        }
    }
    Ok(Some(found))
}
