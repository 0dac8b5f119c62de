//! The answer of `xtrain plan`: whether a run fits as it is configured, and what to run instead, or faster.
//!
//! There is one proposal. On several ranks it is the fastest of the modes that fit, which is also the last
//! line under their table. What does not fit on this number of GPUs is planned on the fewest on which it
//! does, of those that are tried.

use crate::error::PlanError;
use crate::estimate::Device;
use crate::fit::{Alternative, Fit, MoreGpus, Verdict};
use crate::meshes::{self, LeftOut, MeshRow, Tried, Tries};
use crate::planned::Planned;
use crate::shard_table::{Candidate, Mesh, fastest, modes};
use crate::tunable::MICRO_BATCH_SIZE;
use serde_json::json;
use xtrain_config::{OrAuto, ReduceDtype, Transport};
use xtrain_program::Reduce;
use xtrain_step::engine::{Processor, Room, Target};

/// The answer.
pub struct Advice {
    /// The steps that were compared.
    candidates: Vec<Candidate>,
    /// The place of the configured step among them, or of the one in its place if the run is refused.
    given: usize,
    /// The reason why the ranks cannot run it as configured, if they cannot share its batch.
    pub refused: Option<String>,
    /// The meshes beside each other, if there are others than that of the run file.
    pub meshes: Vec<MeshRow>,
    /// The meshes that were not planned.
    pub left_out: LeftOut,
    /// The check that it fits, if the memory is known.
    pub fit: Option<Fit>,
    /// A run to start instead, or a faster one.
    pub proposal: Option<Proposal>,
    /// The shown step with `parallel.reduce = "fast"`, if that is much faster between nodes. It changes bits,
    /// so it is no part of the proposal.
    pub fast: Option<Candidate>,
}

/// A step to run instead of the configured one.
pub struct Proposal {
    /// The settings to change, as `--set` takes them.
    pub settings: Vec<String>,
    /// The number of GPUs, if more are needed.
    pub gpus: Option<usize>,
    /// Other settings that would fit.
    pub others: Vec<Alternative>,
    candidate: usize,
}

/// The device of a plan, and the way to plan for it.
pub struct Planner<'a, E> {
    /// The device.
    pub device: &'a Device,
    /// The processor, if it is present.
    pub processor: Option<&'a Processor>,
    /// Memory available to a rank, if known.
    pub room: Option<Room>,
    /// Plans the run on this number of ranks with more settings, all that are open left open.
    pub replan: &'a dyn Fn(usize, &[String]) -> Result<Planned, E>,
}

/// A proposal, and the meshes of its number of GPUs if they are not those of the run.
type Instead = (Proposal, Option<(Vec<MeshRow>, LeftOut)>);

/// Share of the time that a proposal must save where the configured step fits: estimates are no better.
const GAIN: f64 = 0.02;

/// Meshes for which larger micro-batches are tried.
const MOST_LARGER: usize = 4;

/// Numbers of nodes on which meshes are tried if a run does not fit.
const NODES: [usize; 14] = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128];

/// Numbers of GPUs on which meshes are planned in full without one that fits, at most, and meshes of each.
const MOST_COUNTS: usize = 5;
const MOST_OF_COUNT: usize = 4;

/// Share of the time that `parallel.reduce = "fast"` must save, because it changes bits.
const GAIN_OF_FAST: f64 = 0.05;

impl<E: From<PlanError>> Planner<'_, E> {
    /// The advice for the run `open`.
    pub fn advise(&self, open: &Planned) -> Result<Advice, E> {
        let (mut candidates, given) = self.candidates(open)?;
        let own = candidates[given].clone();
        candidates[given] = self.on(own)?;
        let available = self.available();
        let mut sets: Vec<Vec<String>> =
            candidates.iter().map(|candidate| settings(&candidates[given], candidate)).collect();
        let of_modes = candidates.len();
        let most = most_planned(open);
        let left_out = self.add_meshes(open, open.rank.world_size, most, &mut candidates, &mut sets)?;
        let best = preferred(&candidates, available);
        let fits = candidates[given].needed_bytes <= available;
        let fit = match (self.room, best) {
            (None, _) => None,
            (Some(room), Some(best)) => {
                let verdict = match fits {
                    true => Verdict::Fits,
                    false => {
                        let (settings, bytes) = (sets[best].clone(), candidates[best].needed_bytes);
                        Verdict::WouldFit(vec![Alternative { settings, bytes }])
                    }
                };
                Some(Fit { needed_bytes: candidates[given].needed_bytes, room, verdict })
            }
            (Some(room), None) => {
                let Device { target, threads, .. } = *self.device;
                Some(Fit::from_planned(&candidates[given].planned, target, threads, room)?)
            }
        };
        let instead = match (best, &fit) {
            (None, Some(fit)) => self.instead(&mut candidates, given, fit)?,
            _ => None,
        };
        let (proposal, elsewhere) = match (best, instead) {
            (Some(best), _) => (self.mode(&candidates, given, best, fits, sets[best].clone()), None),
            (None, Some((proposal, elsewhere))) => (Some(proposal), elsewhere),
            (None, None) => (None, None),
        };
        let (meshes, left_out) = match elsewhere {
            Some(elsewhere) => elsewhere,
            None if sets.len() == of_modes => (Vec::new(), left_out),
            None => {
                let proposed = proposal.as_ref().map(|proposal| proposal.candidate);
                (self.rows(&candidates, &sets, Some(given), proposed), left_out)
            }
        };
        let mut advice =
            Advice { candidates, given, refused: None, meshes, left_out, fit, proposal, fast: None };
        advice.fast = self.fast(advice.shown())?;
        Ok(advice)
    }

    /// The advice for a run that `ranks` cannot run as configured, for the reason `why`; `alone` is its plan
    /// in one process. The meshes that were not planned if they cannot in any.
    pub fn advise_refused(
        &self,
        alone: &Planned,
        ranks: usize,
        why: &str,
    ) -> Result<Result<Advice, LeftOut>, E> {
        let (mut candidates, mut sets) = (Vec::new(), Vec::new());
        let left_out = self.add_meshes(alone, ranks, most_planned(alone), &mut candidates, &mut sets)?;
        let best = preferred(&candidates, self.available());
        let least = (0..candidates.len()).min_by_key(|n| candidates[*n].needed_bytes);
        let Some(given) = best.or(least) else { return Ok(Err(left_out)) };
        let own = candidates[given].clone();
        candidates[given] = self.on(own)?;
        let Device { target, threads, .. } = *self.device;
        let fit = |room: Room| match best {
            Some(_) => Ok(Fit { needed_bytes: candidates[given].needed_bytes, room, verdict: Verdict::Fits }),
            None => Fit::from_planned(&candidates[given].planned, target, threads, room),
        };
        let fit = self.room.map(fit).transpose()?;
        let others = Vec::new();
        let proposal =
            best.map(|best| Proposal { settings: sets[best].clone(), gpus: None, others, candidate: best });
        let meshes = self.rows(&candidates, &sets, None, best);
        let refused = Some(why.to_owned());
        let mut advice = Advice { candidates, given, refused, meshes, left_out, fit, proposal, fast: None };
        advice.fast = self.fast(advice.shown())?;
        Ok(Ok(advice))
    }

    /// Adds the steps of at most so many other meshes than those of `candidates` and their settings, and
    /// returns the number of those that were not planned. The fastest meshes that fit also have larger
    /// micro-batches.
    fn add_meshes(
        &self,
        base: &Planned,
        ranks: usize,
        most: usize,
        candidates: &mut Vec<Candidate>,
        sets: &mut Vec<Vec<String>>,
    ) -> Result<LeftOut, E> {
        let Planner { device, replan, .. } = *self;
        let available = self.available();
        let search = meshes::MeshSearch { base, ranks, device, available, most, by_memory: false, replan };
        let Tries { mut tried, left_out } = search.tries(candidates);
        let mut shapes = Vec::new();
        let mut order: Vec<usize> = (0..tried.len()).collect();
        order.retain(|n| tried[*n].candidate.needed_bytes <= available);
        let seconds = |tried: &Tried| tried.candidate.timeline.seconds();
        order.sort_by(|a, b| seconds(&tried[*a]).total_cmp(&seconds(&tried[*b])));
        for n in order {
            let shape = meshes::shape_of(&tried[n].open.spec);
            if shapes.len() < MOST_LARGER && !shapes.contains(&shape) {
                shapes.push(shape);
                while let Some(larger) = self.larger(&search, &tried[n])? {
                    tried[n] = larger;
                }
            }
        }
        for Tried { settings, candidate, .. } in tried {
            candidates.push(candidate);
            sets.push(settings);
        }
        Ok(left_out)
    }

    /// `tried` with micro-batches of twice the size, if that fits and is faster. A pipeline keeps enough of
    /// them.
    fn larger(&self, search: &meshes::MeshSearch<'_, E>, tried: &Tried) -> Result<Option<Tried>, E> {
        let train = &tried.open.resolved.config.train;
        let size = 2 * tried.candidate.planned.spec.batch.sequences;
        let of_a_rank = train.batch_size / tried.open.spec.parallel.data_rank().world_size;
        let is_enough = search.is_enough(of_a_rank / size, tried.open.spec.parallel.pipeline);
        if train.micro_batch_size == Some(OrAuto::Auto) || !of_a_rank.is_multiple_of(size) || !is_enough {
            return Ok(None);
        }
        let seconds = tried.candidate.timeline.seconds() * (1.0 - GAIN);
        let gains = |larger: &Tried| {
            let of = &larger.candidate;
            of.needed_bytes <= self.available() && of.timeline.seconds() <= seconds
        };
        Ok(search.resized(tried, size)?.filter(gains))
    }

    /// The table of meshes.
    fn rows(
        &self,
        candidates: &[Candidate],
        sets: &[Vec<String>],
        given: Option<usize>,
        proposed: Option<usize>,
    ) -> Vec<MeshRow> {
        let all: Vec<_> = candidates.iter().zip(sets.iter().map(Vec::as_slice)).collect();
        let proposed = proposed.filter(|n| *n < all.len());
        let available = self.room.map(|room| room.available_bytes);
        MeshRow::all(&all, self.device, available, given, proposed)
    }

    /// The step `of` with `parallel.reduce = "fast"`, if that fits and is much faster between nodes.
    fn fast(&self, of: &Candidate) -> Result<Option<Candidate>, PlanError> {
        let parallel = &of.planned.resolved.config.parallel;
        let is_open = parallel.reduce == Reduce::SameWorld
            && parallel.reduce_dtype == ReduceDtype::Fp32
            && matches!(parallel.transport, Transport::Auto | Transport::Nccl);
        let spans_nodes = self.device.network.spans_nodes(of.planned.rank.world_size);
        if self.device.target == Target::Cpu || !is_open || !spans_nodes {
            return Ok(None);
        }
        let changed = of.planned.clone().changed(|config| config.parallel.reduce = Reduce::Fast)?;
        let fast = Candidate::choose(changed, self.device)?;
        let gains = fast.timeline.seconds() < of.timeline.seconds() * (1.0 - GAIN_OF_FAST);
        Ok(Some(fast).filter(|fast| gains && fast.needed_bytes <= self.available()))
    }

    /// The steps to compare: the modes of several ranks, and those that a larger micro-batch makes faster;
    /// with the place of the step of `open`.
    fn candidates(&self, open: &Planned) -> Result<(Vec<Candidate>, usize), PlanError> {
        let mut all = match open.rank.world_size {
            1 => vec![Candidate::choose(open.clone(), self.device)?],
            _ => modes(&open.resolved, open.rank, self.device)?,
        };
        let mesh = |of: &Planned| Mesh::from_config(&of.resolved.config.parallel);
        let given = all.iter().position(|of| mesh(&of.planned) == mesh(open)).unwrap_or(0);
        let available = self.available();
        if let Some(best) = fastest(&all, available) {
            let seconds = all[best].timeline.seconds();
            let experts = [given, best].map(|n| all[n].planned.spec.parallel.expert);
            // With a larger micro-batch, communication alone takes much less time.
            let may_gain = |of: &&Candidate| {
                let computing = of.timeline.seconds() - of.timeline.exposed_seconds();
                let is_near = experts.contains(&of.planned.spec.parallel.expert);
                is_near && of.needed_bytes <= available && computing < seconds * (1.0 - GAIN)
            };
            let larger = |of: &Candidate| self.larger_micro_batch(open, of).transpose();
            let found: Result<Vec<_>, _> = match all.len() {
                1 => all.iter().filter_map(larger).collect(),
                _ => all.iter().filter(may_gain).filter_map(larger).collect(),
            };
            all.extend(found?);
        }
        Ok((all, given))
    }

    /// The step of `open` in the mode of `from`, with the largest micro-batch for which each doubling makes
    /// it faster. `None` if the first does not, or if the micro-batch is chosen.
    fn larger_micro_batch(&self, open: &Planned, from: &Candidate) -> Result<Option<Candidate>, PlanError> {
        let train = &open.resolved.config.train;
        if self.device.target == Target::Cpu || train.micro_batch_size == Some(OrAuto::Auto) {
            return Ok(None);
        }
        let of_a_rank = train.batch_size / open.spec.parallel.data_rank().world_size;
        let (mut best, mut size) = (None, 2 * from.planned.spec.batch.sequences);
        let mut seconds = from.timeline.seconds();
        while of_a_rank.is_multiple_of(size) {
            let changed = open.clone().changed(|config| {
                config.parallel = from.planned.resolved.config.parallel.clone();
                config.train.micro_batch_size = Some(OrAuto::Is(size));
            })?;
            let larger = Candidate::choose(changed, self.device)?;
            if larger.needed_bytes > self.available() || larger.timeline.seconds() > seconds * (1.0 - GAIN) {
                break;
            }
            (seconds, size) = (larger.timeline.seconds(), 2 * size);
            best = Some(larger);
        }
        Ok(best)
    }

    /// The proposal to run the step `best`, with these settings, unless `given` fits and is about as fast.
    fn mode(
        &self,
        all: &[Candidate],
        given: usize,
        best: usize,
        fits: bool,
        settings: Vec<String>,
    ) -> Option<Proposal> {
        let gains = all[best].timeline.seconds() < all[given].timeline.seconds() * (1.0 - GAIN);
        (gains || !fits).then(|| Proposal { settings, gpus: None, others: Vec::new(), candidate: best })
    }

    /// The proposal instead of the step `given`, of whose modes and meshes none fits, and the meshes to show
    /// with it, if it is on more GPUs. Adds its steps to `all`.
    fn instead(&self, all: &mut Vec<Candidate>, given: usize, fit: &Fit) -> Result<Option<Instead>, E> {
        match &fit.verdict {
            Verdict::Fits => Ok(None),
            Verdict::WouldFit(alternatives) => {
                let [first, others @ ..] = &alternatives[..] else { return Ok(None) };
                let open = (self.replan)(all[given].planned.rank.world_size, &first.settings)?;
                all.push(self.on(Candidate::choose(open, self.device)?)?);
                let (settings, others) = (first.settings.clone(), others.to_vec());
                let proposal = Proposal { settings, gpus: None, others, candidate: all.len() - 1 };
                Ok(Some((proposal, None)))
            }
            Verdict::Nothing { least, instead, .. } => {
                let base = all[given].planned.clone();
                let found = self.on_larger_mesh(all, &base, instead.gpus.map(|more| more.count))?;
                match (found, &instead.gpus) {
                    (None, Some(more)) => self.on_more_gpus(all, more, &least.settings),
                    (found, _) => Ok(found),
                }
            }
        }
    }

    /// The fastest mesh on the fewest of [`NODES`] on which one fits, if that is less than `below` GPUs. Adds
    /// the steps there to `all`.
    fn on_larger_mesh(
        &self,
        all: &mut Vec<Candidate>,
        base: &Planned,
        below: Option<usize>,
    ) -> Result<Option<Instead>, E> {
        let Planner { device, replan, .. } = *self;
        let (available, ranks) = (self.available(), base.rank.world_size);
        let counts = NODES.into_iter().map(|nodes| nodes * device.network.ranks_per_node);
        let counts = counts.filter(|count| *count > ranks && below.is_none_or(|below| *count < below));
        let mut planned = 0;
        for ranks in counts {
            let most = MOST_OF_COUNT;
            let search = meshes::MeshSearch { base, ranks, device, available, most, by_memory: true, replan };
            let tried = search.tries(&[]).tried;
            if tried.iter().all(|tried| tried.candidate.needed_bytes > available) {
                planned += usize::from(!tried.is_empty());
                if planned == MOST_COUNTS {
                    break;
                }
                continue;
            }
            let (mut found, mut sets) = (Vec::new(), Vec::new());
            let most = meshes::MOST_PLANNED / 2;
            let left_out = self.add_meshes(base, ranks, most, &mut found, &mut sets)?;
            let Some(best) = preferred(&found, available) else { continue };
            let rows = self.rows(&found, &sets, None, Some(best));
            let candidate = all.len() + best;
            all.extend(found);
            let (settings, others) = (sets.swap_remove(best), Vec::new());
            let proposal = Proposal { settings, gpus: Some(ranks), others, candidate };
            return Ok(Some((proposal, Some((rows, left_out)))));
        }
        Ok(None)
    }

    /// The fastest mode or mesh on this number of GPUs: with the settings of the run, or else with those that
    /// need the `least` memory. Adds the steps there to `all`.
    fn on_more_gpus(
        &self,
        all: &mut Vec<Candidate>,
        more: &MoreGpus,
        least: &[String],
    ) -> Result<Option<Instead>, E> {
        let MoreGpus { count, batch_size, .. } = *more;
        let mut given = vec!["parallel.shard=weights".to_owned(), "parallel.replicas=1".to_owned()];
        given.extend(batch_size.map(|size| format!("train.batch_size={size}")));
        // Open settings are chosen again.
        let chosen = all[0].planned.chosen.clone();
        let is_open = |setting: &str| chosen.iter().any(|chosen| key(setting) == chosen.key);
        let is_new = |setting: &&String| !setting.starts_with("parallel.") && !is_open(setting);
        let with_least: Vec<String> = given.iter().chain(least.iter().filter(is_new)).cloned().collect();
        for changed in [given, with_least] {
            // So many ranks may be unable to share the micro-batches of the run file.
            let Ok(open) = (self.replan)(count, &changed) else { continue };
            let (mut modes, weights) = self.candidates(&open)?;
            if fastest(&modes, self.available()).is_none() {
                continue;
            }
            let mut sets: Vec<Vec<String>> =
                modes.iter().map(|mode| settings(&modes[weights], mode)).collect();
            let replan = |ranks: usize, more: &[String]| (self.replan)(ranks, &[&changed[..], more].concat());
            let Planner { device, processor, room, .. } = *self;
            let there = Planner { device, processor, room, replan: &replan };
            let left_out = there.add_meshes(&open, count, most_planned(&open), &mut modes, &mut sets)?;
            let Some(best) = preferred(&modes, self.available()) else { continue };
            for settings in &mut sets {
                let is_known = |setting: &&String| settings.iter().any(|known| key(known) == key(setting));
                let others: Vec<String> = changed.iter().filter(|of| !is_known(of)).cloned().collect();
                settings.extend(others);
                settings.retain(|setting| {
                    setting != "parallel.replicas=1" || all[0].planned.spec.parallel.replicas > 1
                });
                let order =
                    |setting: &String| ["parallel.shard", "parallel."].map(|of| !setting.starts_with(of));
                settings.sort_by_key(order);
            }
            let rows = self.rows(&modes, &sets, None, Some(best));
            let candidate = all.len() + best;
            all.extend(modes);
            let (settings, others) = (sets.swap_remove(best), Vec::new());
            let proposal = Proposal { settings, gpus: Some(count), others, candidate };
            return Ok(Some((proposal, Some((rows, left_out)))));
        }
        Ok(None)
    }

    fn on(&self, candidate: Candidate) -> Result<Candidate, PlanError> {
        match self.processor {
            Some(processor) => candidate.on(processor, self.device),
            None => Ok(candidate),
        }
    }

    fn available(&self) -> u64 {
        self.room.map_or(u64::MAX, |room| room.available_bytes)
    }
}

impl Advice {
    /// The step as it is configured; one in its place if the run is refused.
    pub fn given(&self) -> &Candidate {
        &self.candidates[self.given]
    }

    /// The proposed step, if any.
    pub fn proposed(&self) -> Option<&Candidate> {
        self.proposal.as_ref().map(|proposal| &self.candidates[proposal.candidate])
    }

    /// The step that the figures of the plan are of: the proposed one if the configured one does not fit.
    pub fn shown(&self) -> &Candidate {
        self.proposed().filter(|_| !self.fits()).unwrap_or_else(|| self.given())
    }

    /// True if the configured step fits, or the memory is unknown.
    pub fn fits(&self) -> bool {
        self.refused.is_none() && self.fit.as_ref().is_none_or(|fit| fit.verdict == Verdict::Fits)
    }

    /// The modes of the meshes of the configured step, of the shown one and of the proposed one, on as many
    /// ranks as those of the shown one, if these are several.
    pub fn modes(&self) -> Vec<&Candidate> {
        let ranks = self.shown().planned.rank.world_size;
        let of_mesh = |of: &Candidate| meshes::shape_of(&of.planned.spec);
        let steps = [Some(self.given()), Some(self.shown()), self.proposed()];
        let shapes: Vec<_> = steps.into_iter().flatten().map(of_mesh).collect();
        let is_mode = |of: &&Candidate| {
            ranks > 1 && of.planned.rank.world_size == ranks && shapes.contains(&of_mesh(of))
        };
        self.candidates.iter().filter(is_mode).collect()
    }
}

/// The fastest of `all` that needs at most `available` bytes, or one of a simpler mesh that is about as fast:
/// of fewer tensor ranks times stages.
fn preferred(all: &[Candidate], available: u64) -> Option<usize> {
    let seconds = |n: usize| all[n].timeline.seconds();
    let best = fastest(all, available)?;
    let is_as_fast =
        |n: &usize| all[*n].needed_bytes <= available && seconds(*n) * (1.0 - GAIN) <= seconds(best);
    let size = |n: usize| {
        let (tensor, stages) = meshes::shape_of(&all[n].planned.spec);
        tensor * stages
    };
    let simplest = (0..all.len()).filter(is_as_fast);
    simplest.min_by(|&a, &b| size(a).cmp(&size(b)).then(seconds(a).total_cmp(&seconds(b))))
}

/// Meshes of a run that are planned in full, at most: programs of mixtures take longer to plan.
fn most_planned(of: &Planned) -> usize {
    let has_experts = of.spec.model.layers.iter().any(|layer| layer.feed_forward.experts().is_some());
    if has_experts { meshes::MOST_PLANNED / 2 } else { meshes::MOST_PLANNED }
}

/// The key of a setting as `--set` takes it.
fn key(setting: &str) -> &str {
    setting.split_once('=').map_or(setting, |(key, _)| key)
}

/// The settings in which a mode differs from `given`.
fn settings(given: &Candidate, mode: &Candidate) -> Vec<String> {
    let [from, to] = [given, mode].map(|of| &of.planned);
    let [was, is] = [from, to].map(|of| &of.resolved.config.parallel);
    let mut settings = Mesh::from_config(is).settings(was);
    let (field, sequences) = (&MICRO_BATCH_SIZE.field, to.spec.batch.sequences);
    let is_chosen = to.chosen.iter().any(|chosen| chosen.key == field.key);
    if from.spec.batch.sequences != sequences && !is_chosen {
        settings.push(field.argument(&json!(sequences)));
    }
    settings
}
