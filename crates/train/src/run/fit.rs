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
    /// What it may take.
    pub available_bytes: u64,
    /// What it comes to.
    pub outcome: Outcome,
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

/// Combinations that are told at most.
const MOST_COMBINED: usize = 2;

impl Fit {
    /// Whether the step of `spec`, of a global batch of `batch_size` sequences, fits into `available_bytes` of a `target`'s memory.
    pub fn of(
        spec: &TrainingSpec,
        target: Target,
        batch_size: usize,
        available_bytes: u64,
    ) -> Result<Fit, RunError> {
        let search = Search { spec, target, batch_size, available_bytes };
        let needed_bytes = search.bytes(spec)?;
        let outcome = if needed_bytes <= available_bytes { Outcome::Fits } else { search.outcome()? };
        Ok(Fit { needed_bytes, available_bytes, outcome })
    }

    /// An error where it does not fit into the memory that `owner` has.
    fn check(&self, owner: &str) -> Result<(), RunError> {
        if self.outcome == Outcome::Fits {
            return Ok(());
        }
        Err(RunError::Refused(format!(
            "the run needs {} of memory, but {owner} has {} available; {}. `xtrain plan` shows what it is for",
            format::gib(self.needed_bytes),
            format::gib(self.available_bytes),
            self.outcome
        )))
    }
}

/// An error where the step of `spec` does not fit into what `processor` has available, as far as the system tells.
pub(crate) fn check(spec: &TrainingSpec, batch_size: usize, processor: &Processor) -> Result<(), RunError> {
    match processor.available_bytes() {
        Some(bytes) => Fit::of(spec, processor.target(), batch_size, bytes)?.check(&processor.owner()),
        None => Ok(()),
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
            Outcome::Nothing { least, state_bytes } => write!(
                f,
                "nothing fits: {}, {} of it for weights, gradients and moments, which no setting makes less; choose a smaller model{}",
                match least.settings.is_empty() {
                    true => "no setting makes it less".to_owned(),
                    false => format!("even {least} is too much"),
                },
                format::gib(*state_bytes),
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
    available_bytes: u64,
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
        let (plan, work) = (self.target.plan(&program).total_bytes(), self.target.work_bytes(&program));
        Ok(plan.saturating_add(work) as u64 + self.target.library_bytes())
    }

    /// The first of `from`, of which each takes less than the one before, that fits.
    fn first(&self, from: &[Changed]) -> Result<Option<Way>, RunError> {
        let (mut begin, mut end, mut found) = (0, from.len(), None);
        while begin < end {
            let middle = (begin + end) / 2;
            let Changed { spec, settings } = &from[middle];
            let bytes = self.bytes(spec)?;
            if bytes <= self.available_bytes {
                found = Some(Way { settings: settings.clone(), bytes });
                end = middle;
            } else {
                begin = middle + 1;
            }
        }
        Ok(found)
    }

    fn outcome(&self) -> Result<Outcome, RunError> {
        let as_it_is = [Changed { spec: self.spec.clone(), settings: Vec::new() }];
        // What costs no more than arithmetic, then smaller products, then all products smaller.
        let recompute = self.recompute();
        let chunk = |from: &Changed| self.chunks(from);
        let micro = |from: &Changed| self.micro_batches(from);
        let smallest = |from: &Changed| chunk(from).pop().unwrap_or_else(|| from.clone());
        // First whether anything can: a plan of very many layers takes its time.
        let least = smallest(recompute.last().unwrap_or(&as_it_is[0]));
        let Changed { spec, settings } = micro(&least).pop().unwrap_or(least);
        let bytes = self.bytes(&spec)?;
        if bytes > self.available_bytes {
            let program = programs::training(&spec).map_err(LearnError::from)?;
            let state_bytes = self.target.plan(&program).region_bytes[Region::State as usize] as u64;
            return Ok(Outcome::Nothing { least: Way { settings, bytes }, state_bytes });
        }
        let alone = [recompute.clone(), chunk(&as_it_is[0]), micro(&as_it_is[0])];
        let ways: Vec<Way> =
            alone.iter().filter_map(|from| self.first(from).transpose()).collect::<Result<_, _>>()?;
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
            ways.extend(self.first(&from)?);
            if ways.len() == MOST_COMBINED {
                break;
            }
        }
        if ways.is_empty() {
            ways.push(Way { settings, bytes });
        }
        Ok(Outcome::Would(ways))
    }

    /// More of it recomputed.
    fn recompute(&self) -> Vec<Changed> {
        let more = match self.spec.recompute {
            Recompute::None => [(Recompute::Norms, "norms"), (Recompute::Block, "block")].as_slice(),
            Recompute::Norms => &[(Recompute::Block, "block")],
            Recompute::Block => &[],
        };
        let change = |&(recompute, name): &(Recompute, &str)| Changed {
            spec: TrainingSpec { recompute, ..self.spec.clone() },
            settings: vec![format!("train.recompute={name}")],
        };
        more.iter().map(change).collect()
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
        Fit::of(&spec, target, batch_size, u64::MAX).expect("a plan").needed_bytes
    }

    fn fit(target: Target, available: u64) -> Fit {
        let (spec, batch_size) = planned(RUN, &[], target);
        Fit::of(&spec, target, batch_size, available).expect("a plan")
    }

    #[test]
    fn the_last_byte_decides_and_kernels_and_libraries_count() {
        for target in [Target::Cpu, Target::Cuda] {
            let (spec, _) = planned(RUN, &[], target);
            let program = programs::training(&spec).expect("a program");
            let beside = target.work_bytes(&program) as u64 + target.library_bytes();
            let needed = target.plan(&program).total_bytes() as u64 + beside;
            assert!(beside > 0);
            assert_eq!(fit(target, needed).outcome, Outcome::Fits);
            fit(target, needed).check("it").expect("it fits");
            let message = fit(target, needed - 1).check("the card").expect_err("it does not").to_string();
            assert!(message.contains("but the card has "), "{message}");
            assert!(message.contains("what would fit: --set train.recompute=norms ("), "{message}");
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
        let least = "nothing fits: even --set train.recompute=block --set train.loss_chunk=256 --set train.micro_batch_size=1 (";
        assert!(message.contains(least) && message.contains("choose a smaller model"), "{message}");
    }

    #[test]
    fn llama_3_8b_does_not_fit_into_a_small_card() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/llama3_8b.toml");
        let run = std::fs::read_to_string(file).expect("the example");
        let (spec, batch_size) = planned(&run, &["model.vocab_size=128256"], Target::Cuda);
        let message = Fit::of(&spec, Target::Cuda, batch_size, 24 << 30).expect("a plan").check("it");
        let message = message.expect_err("too little").to_string();
        // Masters, gradients and two moments in fp32, and what products read in bf16.
        assert!(message.contains("134.62 GiB of it for weights, gradients and moments"), "{message}");
        assert!(message.ends_with("choose a smaller model. `xtrain plan` shows what it is for"), "{message}");
    }
}
