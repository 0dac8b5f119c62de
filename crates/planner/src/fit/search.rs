//! The search for settings with which a step that does not fit would.

use super::{Alternative, Instead, MoreGpus, Verdict};
use crate::error::PlanError;
use crate::estimate::RANKS_PER_NODE;
use crate::estimate::stages::deciding;
use crate::memory::{first_that_fits, needed_bytes};
use crate::tunable::{CAPACITY, LOSS_CHUNK, MICRO_BATCH_SIZE, RECOMPUTE_BLOCKS, Settings, TunedStep};
use xtrain_program::{Parallel, Recompute, Region, Shard};
use xtrain_rank::Rank;
use xtrain_step::engine::{Room, Target};
use xtrain_step::error::LearnError;
use xtrain_step::programs;
use xtrain_step::training_spec::TrainingSpec;

/// The shortest sequence that is suggested, in tokens.
const SHORTEST: usize = 128;

/// The most GPUs that are suggested.
const MOST_GPUS: usize = 1024;

/// Largest number of combinations in a message, if no single setting is enough.
const MOST_COMBINED: usize = 2;

pub(super) struct Search<'a> {
    pub(super) step: TunedStep<'a>,
    pub(super) target: Target,
    pub(super) threads: usize,
    pub(super) room: Room,
    /// Bytes that the step needs as configured.
    pub(super) needed_bytes: u64,
}

impl Search<'_> {
    /// Bytes that a rank needs, of a pipeline in the stage that needs the most.
    pub(super) fn bytes(&self, spec: &TrainingSpec) -> Result<u64, PlanError> {
        let of_stage = |spec: TrainingSpec| -> Result<u64, PlanError> {
            let program = programs::training(&spec).map_err(LearnError::from)?;
            Ok(needed_bytes(&spec, &program, self.target, self.threads)?)
        };
        deciding(spec).into_iter().try_fold(0, |most, spec| Ok(of_stage(spec)?.max(most)))
    }

    /// The step after the change to try first, and its setting; `None` if none is left. Reference segments,
    /// which do not affect learning, go; then ranks divide state; then there are fewer replicas.
    pub(super) fn first_change(&self) -> Result<Option<(TrainingSpec, String)>, PlanError> {
        let (spec, available) = (self.step.spec, self.room.available_bytes);
        let in_parallel = |parallel| TrainingSpec { parallel, ..spec.clone() };
        if spec.reference {
            let without = TrainingSpec { reference: false, ..spec.clone() };
            return Ok(Some((without, "precision.reference_every=0".to_owned())));
        }
        if spec.parallel.rank.world_size > 1 && spec.parallel.shard != Shard::Weights {
            let with = |shard| in_parallel(Parallel { shard, ..spec.parallel });
            // `optimizer` sends no more bytes than `none`, and `weights` gathers in every micro-step.
            let optimizer = with(Shard::Optimizer);
            let is_enough = spec.parallel.shard == Shard::None && self.bytes(&optimizer)? <= available;
            return Ok(Some(match is_enough {
                true => (optimizer, "parallel.shard=optimizer".to_owned()),
                false => (with(Shard::Weights), "parallel.shard=weights".to_owned()),
            }));
        }
        // The most replicas that let it fit, or else the fewest possible.
        let (ranks, replicas) = (spec.parallel.stage_groups().size, spec.parallel.replicas);
        let mut found = None;
        for replicas in (1..replicas).rev().filter(|n| ranks.is_multiple_of(*n)) {
            let with = in_parallel(Parallel { replicas, ..spec.parallel });
            // The model may have too few rows for larger groups.
            let Ok(bytes) = self.bytes(&with) else { break };
            found = Some((with, format!("parallel.replicas={replicas}")));
            if bytes <= available {
                break;
            }
        }
        Ok(found)
    }

    /// The alternative of these settings, which need so many bytes.
    fn alternative(&self, settings: Settings, bytes: u64) -> Alternative {
        Alternative { settings: self.step.settings().changes(&settings), bytes }
    }

    /// The first settings of `from` that fit, and their alternative. Each needs less than the one before.
    fn first(&self, from: &[Settings]) -> Result<Option<(Settings, Alternative)>, PlanError> {
        let available = self.room.available_bytes;
        first_that_fits(from.len(), self.needed_bytes, available, |at| {
            let bytes = self.bytes(&self.step.with(from[at]))?;
            Ok((bytes, (from[at], self.alternative(from[at], bytes))))
        })
    }

    pub(super) fn verdict(&self) -> Result<Verdict, PlanError> {
        let own = self.step.settings();
        let norms = self.recomputing(Recompute::Norms);
        let blocks = self.recomputing(Recompute::Block);
        let recompute: Vec<Settings> = norms.last().into_iter().chain(blocks.last()).copied().collect();
        let smallest = |from: Settings| self.chunks(from).pop().unwrap_or(from);
        let small_room = |from: Settings| self.rooms(from).pop().unwrap_or(from);
        // Check first if anything can fit: planning very many layers takes long.
        let least = smallest(recompute.last().copied().unwrap_or(own));
        let least = small_room(self.micro_batches(least).pop().unwrap_or(least));
        let spec = self.step.with(least);
        let bytes = self.bytes(&spec)?;
        let least = self.alternative(least, bytes);
        if bytes > self.room.available_bytes {
            let program = programs::training(&spec).map_err(LearnError::from)?;
            let state_bytes = self.target.plan(&program).region_bytes[Region::State as usize] as u64;
            let is_held = bytes <= self.room.alone_bytes;
            let instead = self.instead(&spec, bytes)?;
            let ranks = spec.parallel.rank.world_size;
            return Ok(Verdict::Nothing { least, state_bytes, ranks, is_held, instead });
        }
        let alternatives = self.cheapest(own, &norms, &blocks)?;
        if !alternatives.is_empty() {
            return Ok(Verdict::WouldFit(alternatives));
        }
        // If everything is recomputed already, only the other settings are left.
        let mut recompute = if recompute.is_empty() { vec![own] } else { recompute };
        if !self.rooms(own).is_empty() {
            recompute = recompute.iter().flat_map(|from| [*from, small_room(*from)]).collect();
        }
        let chunked = recompute.iter().map(|from| self.chunks(*from));
        let cut = recompute.iter().map(|from| self.micro_batches(*from));
        let both = recompute.iter().map(|from| self.micro_batches(smallest(*from)));
        let mut alternatives: Vec<Alternative> = Vec::new();
        for from in chunked.chain(cut).chain(both) {
            let Some((_, found)) = self.first(&from)? else { continue };
            // Skip an alternative that adds a setting to one in the list.
            let is_in_it = |listed: &Alternative| listed.settings.iter().all(|s| found.settings.contains(s));
            if !alternatives.iter().any(is_in_it) {
                alternatives.push(found);
            }
            if alternatives.len() == MOST_COMBINED {
                break;
            }
        }
        if alternatives.is_empty() {
            alternatives.push(least);
        }
        Ok(Verdict::WouldFit(alternatives))
    }

    /// Models and numbers of GPUs with which the run would fit, given that even `least` does not. It needs
    /// `bytes`.
    fn instead(&self, least: &TrainingSpec, bytes: u64) -> Result<Instead, PlanError> {
        let (layers, available) = (least.model.layers.len(), self.room.available_bytes);
        let fewer_layers = first_that_fits(layers - 1, bytes, available, |n| {
            let left = layers - 1 - n;
            Ok::<_, PlanError>((self.bytes(&least.with_blocks(left))?, left))
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
        let Parallel { rank: Rank { world_size, .. }, pipeline, expert, tensor, .. } = least.parallel;
        let may_be = |count: &usize| {
            *count > world_size
                && count.is_multiple_of(pipeline * expert)
                && count.is_multiple_of(pipeline * tensor)
        };
        // Sequences that ranks with different data have at a time.
        let at_a_time = |count: usize| count / pipeline / tensor * least.batch.sequences;
        let shares = |count: &usize| self.step.batch_size.is_multiple_of(at_a_time(*count));
        let more = |count: &usize| {
            may_be(count)
                && (count.is_power_of_two() || count.is_multiple_of(RANKS_PER_NODE) && shares(count))
        };
        let of_ranks = |count: usize| -> Result<MoreGpus, PlanError> {
            let grown = self.step.batch_size.next_multiple_of(at_a_time(count));
            let parallel = Parallel {
                rank: Rank { world_size: count, ..least.parallel.rank },
                replicas: 1,
                shard: Shard::Weights,
                ..least.parallel
            };
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
        Ok((found, counts.last().copied().unwrap_or(least.parallel.rank.world_size)))
    }

    /// Alternatives of one setting, or of `norms` and a smaller micro-batch if that is larger than the one
    /// without `norms`.
    fn cheapest(
        &self,
        own: Settings,
        norms: &[Settings],
        blocks: &[Settings],
    ) -> Result<Vec<Alternative>, PlanError> {
        // Ordered by cost: steps that are repeated, some additional arithmetic, smaller GEMMs of the head,
        // smaller GEMMs everywhere, much additional arithmetic.
        let by_room = self.first(&self.rooms(own))?;
        let by_norms = self.first(norms)?;
        let by_chunk = self.first(&self.chunks(own))?;
        let by_micro = self.first(&self.micro_batches(own))?;
        let (mut by_both, mut by_blocks) = (None, None);
        if by_norms.is_none() {
            let sequences = by_micro.as_ref().map_or(0, |(settings, _)| settings.micro_batch_size);
            if let Some(all) = norms.last() {
                by_both = self.first(&self.micro_batches(*all))?;
            }
            by_both = by_both.filter(|(settings, _)| settings.micro_batch_size > sequences);
            by_blocks = self.first(blocks)?;
        }
        let alternatives = [by_room, by_norms, by_chunk, by_both, by_micro, by_blocks];
        Ok(alternatives.into_iter().flatten().map(|(_, alternative)| alternative).collect())
    }

    /// `recompute` in an increasing number of blocks, up to all.
    fn recomputing(&self, recompute: Recompute) -> Vec<Settings> {
        let own = self.step.settings();
        let done = match own.recompute {
            Recompute::None => 0,
            policy if policy == recompute => own.blocks.unwrap_or(self.step.layers()),
            Recompute::Norms => 0,
            // The policy recomputes norms as well.
            Recompute::Block => self.step.layers(),
        };
        let all = (RECOMPUTE_BLOCKS.values)(&self.step, Settings { recompute, ..own });
        all.into_iter().skip(done).collect()
    }

    /// Less room for rows of experts.
    fn rooms(&self, from: Settings) -> Vec<Settings> {
        let room = |of: &Settings| of.capacity.or(of.capacity_for_all);
        let all = (CAPACITY.values)(&self.step, from);
        all.into_iter().filter(|of| room(of) < room(&from)).collect()
    }

    /// Smaller chunks of tokens whose logits exist at once.
    fn chunks(&self, from: Settings) -> Vec<Settings> {
        let at_once = from.loss_chunk.min(from.micro_batch_size * self.step.spec.batch.seq_len);
        let all = (LOSS_CHUNK.values)(&self.step, from);
        all.into_iter().filter(|of| of.loss_chunk < at_once).collect()
    }

    /// Smaller micro-batches, and more of them, as many on each rank.
    fn micro_batches(&self, from: Settings) -> Vec<Settings> {
        let all = (MICRO_BATCH_SIZE.values)(&self.step, from);
        all.into_iter().filter(|of| of.micro_batch_size < from.micro_batch_size).collect()
    }
}
