//! Whether a training step fits into memory, and what would: said before anything of it is allocated.

use super::RunError;
use crate::engine::{Processor, Target};
use crate::metrics::format;
use crate::programs::{self, TrainingSpec};
use crate::weights::LearnError;
use std::fmt;
use xtrain_program::{Recompute, Region};

/// What a step needs, beside what there is.
#[derive(Clone, Debug, PartialEq)]
pub struct Fit {
    /// The plan, what kernels work in beside it, and what libraries take.
    pub needed_bytes: u64,
    /// What there is.
    pub room: Room,
    /// What it comes to.
    pub outcome: Outcome,
}

/// Memory that a step may take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Room {
    /// Bytes that can be had.
    pub available_bytes: u64,
    /// Bytes that could be had if nothing else ran.
    pub alone_bytes: u64,
}

/// Whether it fits.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// As it is.
    Fits,
    /// Not as it is; these would, the one that costs the least speed first.
    Would(Vec<Way>),
    /// However little is asked for at once.
    Nothing {
        /// What takes the least.
        least: Way,
        /// Bytes of it that no setting changes: weights, gradients, moments.
        state_bytes: u64,
        /// Whether it would fit if no other program held memory.
        is_held: bool,
    },
}

/// Settings that take less memory, and how much.
#[derive(Clone, Debug, PartialEq)]
pub struct Way {
    /// `train.recompute=norms`, as `--set` takes them. The global batch stays.
    pub settings: Vec<String>,
    /// What the step then needs.
    pub bytes: u64,
}

/// Chunks of the loss are advised down to so many tokens: below, matrix products are too small.
const SMALLEST_CHUNK: usize = 256;

/// Combinations that are told at most where no single setting is enough.
const MOST_COMBINED: usize = 2;

impl Room {
    /// So many bytes, that nobody else holds any of.
    pub fn of(bytes: u64) -> Room {
        Room { available_bytes: bytes, alone_bytes: bytes }
    }
}

impl Fit {
    /// Whether the step of `spec`, of a global batch of `batch_size` sequences, fits into what a `target`'s memory has `room` for.
    pub fn of(spec: &TrainingSpec, target: Target, batch_size: usize, room: Room) -> Result<Fit, RunError> {
        let mut search = Search { spec, target, batch_size, room, needed_bytes: 0 };
        search.needed_bytes = search.bytes(spec)?;
        let needed_bytes = search.needed_bytes;
        let outcome = match needed_bytes <= room.available_bytes {
            true => Outcome::Fits,
            // The first thing to do without is what the model does not learn by.
            false if spec.reference => {
                let without = TrainingSpec { reference: false, ..spec.clone() };
                let Fit { needed_bytes, outcome, .. } = Fit::of(&without, target, batch_size, room)?;
                outcome.beside("precision.reference_every=0", needed_bytes)
            }
            false => match search.outcome()? {
                nothing @ Outcome::Nothing { .. } => match spec.optimizer.smaller() {
                    // The last one is what changes how the model learns.
                    Some((optimizer, setting)) => {
                        let with = TrainingSpec { optimizer, ..spec.clone() };
                        let Fit { needed_bytes, outcome, .. } = Fit::of(&with, target, batch_size, room)?;
                        outcome.beside(setting, needed_bytes)
                    }
                    None => nothing,
                },
                outcome => outcome,
            },
        };
        Ok(Fit { needed_bytes, room, outcome })
    }

    /// Who has how much: `NVIDIA H200 has 2.00 GiB available`, and, where it would help, who holds the rest.
    pub fn available(&self, owner: &str) -> String {
        let Room { available_bytes, alone_bytes } = self.room;
        let is_held = match &self.outcome {
            Outcome::Fits => false,
            Outcome::Would(_) => self.needed_bytes <= alone_bytes,
            Outcome::Nothing { is_held, .. } => *is_held,
        };
        let rest = match is_held {
            true => format!(", as other programs hold the rest of its {}", format::gib(alone_bytes)),
            false => String::new(),
        };
        format!("{owner} has {} available{rest}", format::gib(available_bytes))
    }

    /// An error where it does not fit into the memory that `owner` has.
    fn check(&self, owner: &str) -> Result<(), RunError> {
        if self.outcome == Outcome::Fits {
            return Ok(());
        }
        Err(RunError::Refused(format!(
            "the run needs {} of memory, but {}; {}. `xtrain plan` shows what it is for",
            format::gib(self.needed_bytes),
            self.available(owner),
            self.outcome
        )))
    }
}

/// An error where the step of `spec` does not fit into what `processor` has available, as far as the system tells.
pub(crate) fn check(spec: &TrainingSpec, batch_size: usize, processor: &Processor) -> Result<(), RunError> {
    match processor.room() {
        Some(room) => Fit::of(spec, processor.target(), batch_size, room)?.check(&processor.owner()),
        None => Ok(()),
    }
}

impl Outcome {
    /// The same where `setting` was needed to come to it, and then `bytes`.
    fn beside(mut self, setting: &str, bytes: u64) -> Self {
        let add = |way: &mut Way| way.settings.insert(0, setting.to_owned());
        match &mut self {
            Outcome::Fits => return Outcome::Would(vec![Way { settings: vec![setting.to_owned()], bytes }]),
            Outcome::Would(ways) => ways.iter_mut().for_each(add),
            Outcome::Nothing { least, .. } => add(least),
        }
        self
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Outcome::Fits => f.write_str("it fits"),
            Outcome::Would(ways) => {
                let ways: Vec<String> = ways.iter().map(Way::to_string).collect();
                write!(f, "what would fit: {}", ways.join(", or "))
            }
            Outcome::Nothing { least, state_bytes, is_held } => write!(
                f,
                "nothing fits: {}, {} of it for weights, gradients and moments, which no setting makes less; {}choose a smaller model{}",
                match least.settings.is_empty() {
                    true => "no setting makes it less".to_owned(),
                    false => format!("even {least} is too much"),
                },
                format::gib(*state_bytes),
                match is_held {
                    true => "end the other programs (`nvidia-smi` lists those on a GPU), wait for them, or ",
                    false => "",
                },
                if 2 * state_bytes < least.bytes { " or a shorter data.seq_len" } else { "" }
            ),
        }
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for setting in &self.settings {
            write!(f, "--set {setting} ")?;
        }
        write!(f, "({})", format::gib(self.bytes))
    }
}

struct Search<'a> {
    spec: &'a TrainingSpec,
    target: Target,
    batch_size: usize,
    room: Room,
    /// What the step needs as it is.
    needed_bytes: u64,
}

/// A step that asks for less, and the settings that make it.
#[derive(Clone)]
struct Changed {
    spec: TrainingSpec,
    settings: Vec<String>,
}

impl Search<'_> {
    fn bytes(&self, spec: &TrainingSpec) -> Result<u64, RunError> {
        let program = programs::training(spec).map_err(LearnError::from)?;
        let reference = spec.in_reference().map(|bf16| programs::training(&bf16)).transpose();
        let reference = reference.map_err(LearnError::from)?;
        let loaded: Vec<_> = std::iter::once(&program).chain(&reference).collect();
        let (plan, work) = (self.target.plan_bytes(&loaded), self.target.work_bytes(&loaded));
        // A reference segment puts the state aside in host memory, which is that of the cores.
        let aside = match self.target {
            Target::Cpu if spec.reference => programs::saved_bytes(&program),
            _ => 0,
        };
        Ok(plan.saturating_add(work).saturating_add(aside) as u64 + self.target.library_bytes())
    }

    /// The first of `from`, of which each takes less than the one before, that fits, and its bytes.
    fn first(&self, from: &[Changed]) -> Result<Option<(Changed, Way)>, RunError> {
        let available = self.room.available_bytes;
        let Some(last) = from.len().checked_sub(1) else { return Ok(None) };
        let mut bytes = self.bytes(&from[last].spec)?;
        if bytes > available {
            return Ok(None);
        }
        // Those before `begin` do not fit, the last of them takes `over`; the one at `end` takes `bytes`.
        let (mut begin, mut end, mut over) = (0, last, self.needed_bytes);
        let mut by_share = true;
        while begin < end {
            // A plan of many layers takes its time, and bytes mostly go down evenly: where they would cross, then halves, in turn.
            let share = (over - available) as f64 / (over - bytes) as f64;
            let crossing = (begin + (share * (end + 1 - begin) as f64).ceil() as usize).saturating_sub(1);
            let at = if by_share { crossing.clamp(begin, end - 1) } else { (begin + end) / 2 };
            by_share = !by_share;
            let found = self.bytes(&from[at].spec)?;
            if found <= available {
                (end, bytes) = (at, found);
            } else {
                (begin, over) = (at + 1, found);
            }
        }
        Ok(Some((from[end].clone(), Way { settings: from[end].settings.clone(), bytes })))
    }

    fn outcome(&self) -> Result<Outcome, RunError> {
        let as_it_is = [Changed { spec: self.spec.clone(), settings: Vec::new() }];
        let norms = self.recomputing(Recompute::Norms, "norms");
        let blocks = self.recomputing(Recompute::Block, "block");
        let recompute: Vec<Changed> = norms.last().into_iter().chain(blocks.last()).cloned().collect();
        let chunk = |from: &Changed| self.chunks(from);
        let micro = |from: &Changed| self.micro_batches(from);
        let smallest = |from: &Changed| chunk(from).pop().unwrap_or_else(|| from.clone());
        // First whether anything can: a plan of very many layers takes its time.
        let least = smallest(recompute.last().unwrap_or(&as_it_is[0]));
        let Changed { spec, settings } = micro(&least).pop().unwrap_or(least);
        let bytes = self.bytes(&spec)?;
        if bytes > self.room.available_bytes {
            let program = programs::training(&spec).map_err(LearnError::from)?;
            let state_bytes = self.target.plan(&program).region_bytes[Region::State as usize] as u64;
            let is_held = bytes <= self.room.alone_bytes;
            return Ok(Outcome::Nothing { least: Way { settings, bytes }, state_bytes, is_held });
        }
        let ways = self.cheapest(&as_it_is[0], &norms, &blocks)?;
        if !ways.is_empty() {
            return Ok(Outcome::Would(ways));
        }
        // Where the run recomputes all already, what else there is goes with that.
        let recompute = if recompute.is_empty() { as_it_is.to_vec() } else { recompute };
        let chunked = recompute.iter().map(chunk);
        let cut = recompute.iter().map(micro);
        let both = recompute.iter().map(|from| micro(&smallest(from)));
        let mut ways = Vec::new();
        for from in chunked.chain(cut).chain(both) {
            let found = self.first(&from)?.map(|(_, way)| way);
            // Not what is told already with a setting more.
            let is_more = |way: &Way, told: &Way| told.settings.iter().all(|s| way.settings.contains(s));
            ways.extend(found.filter(|way| !ways.iter().any(|told| is_more(way, told))));
            if ways.len() == MOST_COMBINED {
                break;
            }
        }
        if ways.is_empty() {
            ways.push(Way { settings, bytes });
        }
        Ok(Outcome::Would(ways))
    }

    /// What fits by one setting, or by `norms` and fewer sequences at a time where those are more than without.
    fn cheapest(
        &self,
        as_it_is: &Changed,
        norms: &[Changed],
        blocks: &[Changed],
    ) -> Result<Vec<Way>, RunError> {
        // What costs little arithmetic, then smaller products, then all products smaller, then much arithmetic.
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
        let ways = [by_norms, by_chunk, by_both, by_micro, by_blocks];
        Ok(ways.into_iter().flatten().map(|(_, way)| way).collect())
    }

    /// `recompute` in more and more blocks, in all at last.
    fn recomputing(&self, recompute: Recompute, name: &str) -> Vec<Changed> {
        let TrainingSpec { recompute: now, recompute_blocks: blocks, .. } = *self.spec;
        let layers = self.spec.model.layers.len();
        let done = match now {
            Recompute::None => 0,
            _ if now == recompute => blocks.unwrap_or(layers),
            Recompute::Norms => 0,
            // It makes norms again as well.
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

    /// Fewer tokens whose logits exist at once.
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

    /// Fewer sequences at a time, in more passes.
    fn micro_batches(&self, from: &Changed) -> Vec<Changed> {
        let fewer = (1..from.spec.batch.sequences).rev().filter(|n| self.batch_size.is_multiple_of(*n));
        let change = |n: usize| {
            let mut changed = from.clone();
            changed.spec.batch.sequences = n;
            changed.settings.push(format!("train.micro_batch_size={n}"));
            changed
        };
        fewer.map(change).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use std::path::Path;

    /// A model of which activations take the most, and of these the logits.
    const RUN: &str = "[model]\ndim = 32\nlayers = 4\nheads = 2\nvocab_size = 4096\n[data]\ntrain = 'a.txt'\ntokenizer = 'bytes'\n\
                       seq_len = 256\n[train]\nsteps = 1\nbatch_size = 12\n";

    fn planned(text: &str, set: &[&str], target: Target) -> (TrainingSpec, usize) {
        let run = Config::parse(Path::new("run.toml"), text.as_bytes(), set).expect("a run file");
        let planned = super::super::setup::plan_on(&run, target).expect("a plan");
        (planned.spec, planned.resolved.config.train.batch_size)
    }

    /// What a step of `RUN` with these settings needs.
    fn needed(set: &[&str], target: Target) -> u64 {
        let (spec, batch_size) = planned(RUN, set, target);
        Fit::of(&spec, target, batch_size, Room::of(u64::MAX)).expect("a plan").needed_bytes
    }

    fn fit(target: Target, available: u64) -> Fit {
        let (spec, batch_size) = planned(RUN, &[], target);
        Fit::of(&spec, target, batch_size, Room::of(available)).expect("a plan")
    }

    #[test]
    fn the_last_byte_decides_and_kernels_and_libraries_count() {
        for target in [Target::Cpu, Target::Cuda] {
            let (spec, _) = planned(RUN, &[], target);
            let program = programs::training(&spec).expect("a program");
            let beside = target.work_bytes(&[&program]) as u64 + target.library_bytes();
            let needed = target.plan(&program).total_bytes() as u64 + beside;
            assert!(beside > 0);
            assert_eq!(fit(target, needed).outcome, Outcome::Fits);
            fit(target, needed).check("it").expect("it fits");
            let message = fit(target, needed - 1).check("the card").expect_err("it does not").to_string();
            assert!(message.contains("but the card has "), "{message}");
            let norms = "what would fit: --set train.recompute=norms --set train.recompute_blocks=1 (";
            assert!(message.contains(norms), "{message}");
        }
    }

    #[test]
    fn reference_segments_are_the_first_to_be_left_out() {
        let fp8 = ["precision.recipe=fp8-row", "precision.reference_every=9", "precision.reference_steps=9"];
        for target in [Target::Cpu, Target::Cuda] {
            let (with, without) = (needed(&fp8, target), needed(&fp8[..1], target));
            let (spec, batch_size) = planned(RUN, &fp8, target);
            let of = |room| Fit::of(&spec, target, batch_size, Room::of(room)).expect("a plan");
            // The weights of the blocks in bf16 at least; on cores the state that is put aside is in the same memory.
            let program = programs::training(&spec).expect("a program");
            let aside = if target == Target::Cpu { programs::saved_bytes(&program) as u64 } else { 0 };
            assert!(with > without + aside, "{with} and {without}");
            assert_eq!(of(with).outcome, Outcome::Fits);
            let left_out = |room| match of(room).outcome {
                Outcome::Would(ways) => ways,
                other => panic!("{other}"),
            };
            let only = Way { settings: vec!["precision.reference_every=0".into()], bytes: without };
            for room in [without, with - 1] {
                assert_eq!(left_out(room), std::slice::from_ref(&only));
            }
            // Then what would fit without them.
            let (plain, _) = planned(RUN, &fp8[..1], target);
            let fit = Fit::of(&plain, target, batch_size, Room::of(without - 1)).expect("a plan");
            let Outcome::Would(ways) = fit.outcome else { panic!("something fits") };
            let mut told = left_out(without - 1);
            told.iter_mut().for_each(|way| assert_eq!(way.settings.remove(0), "precision.reference_every=0"));
            assert_eq!(told, ways);
        }
    }

    #[test]
    fn each_way_needs_what_it_says_and_fits() {
        for target in [Target::Cpu, Target::Cuda] {
            let all = needed(&[], target);
            let floor = needed(
                &["train.recompute=block", "train.loss_chunk=256", "train.micro_batch_size=1"],
                target,
            );
            let mut seen = 0;
            for step in 0..=40 {
                let available = floor + (all - 1 - floor) * step / 40;
                let Outcome::Would(ways) = fit(target, available).outcome else {
                    panic!("{available}: nothing")
                };
                for way in &ways {
                    assert!(way.bytes <= available, "{way} in {available}");
                    let set: Vec<&str> = way.settings.iter().map(String::as_str).collect();
                    assert_eq!(needed(&set, target), way.bytes, "{way}");
                }
                seen |= ways.iter().map(|way| 1 << way.settings.len()).sum::<u64>();
            }
            // Single settings, pairs and all three were needed.
            assert_eq!(seen & 0b1110, 0b1110, "{target:?}");
        }
    }

    #[test]
    fn norms_are_recomputed_in_no_more_blocks_than_must_be_and_beside_a_larger_micro_batch() {
        for target in [Target::Cpu, Target::Cuda] {
            let two = needed(&["train.recompute=norms", "train.recompute_blocks=2"], target);
            let Outcome::Would(ways) = fit(target, two).outcome else { panic!("something fits") };
            assert_eq!(ways[0].settings, ["train.recompute=norms", "train.recompute_blocks=2"]);
            let all = needed(&["train.recompute=norms"], target);
            let Outcome::Would(ways) = fit(target, all).outcome else { panic!("something fits") };
            assert_eq!(ways[0].settings, ["train.recompute=norms"]);
            // Six sequences at a time fit with norms, and without them fewer.
            let six = needed(&["train.recompute=norms", "train.micro_batch_size=6"], target);
            let Outcome::Would(ways) = fit(target, six).outcome else { panic!("something fits") };
            let both =
                ways.iter().find(|way| way.settings == ["train.recompute=norms", "train.micro_batch_size=6"]);
            assert_eq!(both.map(|way| way.bytes), Some(six), "{ways:?}");
        }
    }

    #[test]
    fn a_run_that_recomputes_is_offered_more_of_the_same() {
        let target = Target::Cuda;
        let offered = |set: &[&str], available| {
            let (spec, batch_size) = planned(RUN, set, target);
            match Fit::of(&spec, target, batch_size, Room::of(available)).expect("a plan").outcome {
                Outcome::Would(ways) => ways[0].settings.clone(),
                other => panic!("{other}"),
            }
        };
        let of = |blocks: &str| needed(&["train.recompute=norms", blocks], target);
        let one = ["train.recompute=norms", "train.recompute_blocks=1"];
        assert_eq!(offered(&one, of("train.recompute_blocks=3")), ["train.recompute_blocks=3"]);
        assert_eq!(offered(&one, of("train.recompute_blocks=")), ["train.recompute_blocks="]);
    }

    #[test]
    fn memory_that_others_hold_is_told() {
        let (spec, batch_size) = planned(RUN, &[], Target::Cuda);
        let said = |available_bytes, alone_bytes| {
            let room = Room { available_bytes, alone_bytes };
            let fit = Fit::of(&spec, Target::Cuda, batch_size, room).expect("a plan");
            fit.check("the card").expect_err("too little").to_string()
        };
        let needed = needed(&[], Target::Cuda);
        let rest = "available, as other programs hold the rest of its 80.00 GiB; ";
        assert!(said(needed - 1, 80 << 30).contains(&format!("{rest}what would fit: ")));
        let nothing = said(1 << 20, 80 << 30);
        assert!(nothing.contains(&format!("{rest}nothing fits: ")), "{nothing}");
        assert!(
            nothing.contains("; end the other programs (`nvidia-smi` lists those on a GPU)"),
            "{nothing}"
        );
        // They are not to blame for what would not fit without them.
        assert!(!said(1 << 20, 2 << 20).contains("other programs"));
    }

    #[test]
    fn the_micro_batch_is_the_largest_that_divides_the_batch_and_fits() {
        let target = Target::Cuda;
        let four = needed(&["train.micro_batch_size=4"], target);
        let Outcome::Would(ways) = fit(target, four).outcome else { panic!("something fits") };
        let micro = ways.iter().find(|way| way.settings[0].starts_with("train.micro_batch_size="));
        assert_eq!(micro.expect("a smaller micro-batch").settings, ["train.micro_batch_size=4"]);
    }

    #[test]
    fn where_nothing_fits_it_is_said_with_what_no_setting_makes_less() {
        let message = fit(Target::Cuda, 1 << 20).check("it").expect_err("too little").to_string();
        let least = "nothing fits: even --set optimizer.moments=bf16 --set train.recompute=block --set train.loss_chunk=256 --set train.micro_batch_size=1 (";
        assert!(message.contains(least) && message.contains("choose a smaller model"), "{message}");
    }

    #[test]
    fn llama_3_8b_does_not_fit_into_a_small_card() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/llama3_8b.toml");
        let run = std::fs::read_to_string(file).expect("the example");
        let (spec, batch_size) = planned(&run, &["model.vocab_size=128256"], Target::Cuda);
        let message =
            Fit::of(&spec, Target::Cuda, batch_size, Room::of(24 << 30)).expect("a plan").check("it");
        let message = message.expect_err("too little").to_string();
        // Masters and gradients in fp32, and two moments and what products read in bf16.
        assert!(message.contains("104.71 GiB of it for weights, gradients and moments"), "{message}");
        assert!(message.ends_with("choose a smaller model. `xtrain plan` shows what it is for"), "{message}");
    }
}
