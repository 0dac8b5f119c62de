//! Measures the rates of this machine: each op of a small model's training step is timed and compared with
//! its estimate. The result is cached with the compiled kernels. The measurement of a CPU that other programs
//! used is repeated by a later run that finds it free, and by any after [`REPEAT_MINUTES`].

use super::load::Load;
use super::rates::{Factors, Rates};
use super::{instance_seconds, is_cast, kernels_of};
use crate::error::PlanError;
use crate::median::median;
use crate::planned::plan_alone;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};
use xtrain_config::Config;
use xtrain_cuda::KernelCache;
use xtrain_model::Recipe;
use xtrain_program::{Arithmetic, KernelCost, Program};
use xtrain_rank::Rank;
use xtrain_runtime::{Checks, TimedWork, Timing};
use xtrain_step::engine::{Processor, Target};
use xtrain_step::error::LearnError;
use xtrain_step::learner::{Learner, Step};
use xtrain_step::random_batch::random_batch;

/// Maximum number of measured steps, and the time after which no further one begins. The median time of each
/// op counts: the shortest would be that of no step.
const STEPS: usize = 5;
const PATIENCE: Duration = Duration::from_secs(1);

/// A measurement, as cached.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Measurement {
    /// The factors relative to the rates of an unmeasured device.
    #[serde(flatten)]
    pub(super) factors: Factors,
    /// True if other programs used the CPU meanwhile.
    pub(super) while_busy: bool,
    /// Seconds since 1970 at which it was made. Those of earlier versions have none and are repeated.
    pub(super) at: u64,
}

/// The age, in minutes, from which a measurement beside other programs is repeated although others still use
/// the CPU. Programs that start one after the other do not all wait for it.
pub(super) const REPEAT_MINUTES: u64 = 10;

impl Measurement {
    /// The time since it was made.
    pub(super) fn age(&self) -> Duration {
        Duration::from_secs(now().saturating_sub(self.at))
    }

    /// True if it is repeated although other programs still use the CPU.
    fn is_old(&self) -> bool {
        self.age() >= Duration::from_secs(60 * REPEAT_MINUTES)
    }

    /// The one of two that other programs disturbed less: a free CPU, or else shorter times.
    fn less_disturbed(self, other: Measurement) -> Measurement {
        let times = |of: &Measurement| (of.while_busy, of.factors.gemm * of.factors.memory);
        match times(&other) < times(&self) {
            true => other,
            false => self,
        }
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// The measured model, large enough for its GEMMs to reach the rates of large ones.
fn run_file(target: Target) -> &'static str {
    match target {
        Target::Cpu => {
            "[model]\ndim = 256\nlayers = 2\nheads = 4\nffn_dim = 768\nvocab_size = 2048\n\
             [data]\ntrain = 'none'\ntokenizer = 'bytes'\nseq_len = 256\n\
             [train]\nsteps = 1\nbatch_size = 2\nrecompute = 'none'\n[precision]\nskip_slower = []\n"
        }
        Target::Cuda => {
            "[model]\ndim = 2048\nlayers = 2\nheads = 16\nffn_dim = 8192\nvocab_size = 2048\n\
             [data]\ntrain = 'none'\ntokenizer = 'bytes'\nseq_len = 2048\n\
             [train]\nsteps = 1\nbatch_size = 8\nrecompute = 'none'\n[precision]\nskip_slower = []\n"
        }
    }
}

/// The cached measurement of `processor`, if there is one.
pub(super) fn cached(processor: &Processor, recipe: Recipe, threads: usize) -> Option<Measurement> {
    let line = match processor {
        Processor::Cpu => KernelCache::for_user().measurement(&cpu_key(recipe, threads)),
        Processor::Cuda(gpu) => gpu.cached_measurement(&subject(recipe)),
    };
    serde_json::from_str(&line?).ok()
}

/// The measurement of `processor`, a CPU's with this number of threads, relative to `rates`: cached, else
/// made now. One that other programs disturbed is repeated, and the less disturbed one is cached.
pub(super) fn measured(
    processor: &Processor,
    recipe: Recipe,
    rates: &Rates,
    threads: usize,
) -> Result<Measurement, PlanError> {
    let known = cached(processor, recipe, threads);
    let is_repeated = |known: &Measurement| known.is_old() || !Load::is_busy_now(threads);
    if let Some(known) = known.filter(|known| !known.while_busy || !is_repeated(known)) {
        return Ok(known);
    }
    let load = Load::begin();
    let factors = match processor {
        Processor::Cpu => on_threads(threads, || measure(Processor::Cpu, recipe, rates))?,
        Processor::Cuda(_) => measure(Processor::by_name(xtrain_config::Device::Cuda)?, recipe, rates)?,
    };
    let while_busy = matches!(processor, Processor::Cpu) && load.is_busy(threads);
    let measurement = Measurement { factors, while_busy, at: now() };
    let best = known.map_or(measurement, |known| measurement.less_disturbed(known));
    // Its age is that of the last attempt.
    let best = Measurement { at: measurement.at, ..best };
    let line = serde_json::to_string(&best).unwrap_or_default();
    match processor {
        Processor::Cpu => KernelCache::for_user().replace_measurement(&cpu_key(recipe, threads), &line),
        Processor::Cuda(gpu) => gpu.replace_measurement(&subject(recipe), &line),
    }
    Ok(best)
}

/// `work` on this number of threads. A process of several on one machine has fewer of its own.
fn on_threads<T: Send>(
    threads: usize,
    work: impl FnOnce() -> Result<T, PlanError> + Send,
) -> Result<T, PlanError> {
    if threads == rayon::current_num_threads() {
        return work();
    }
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    pool.map_err(|error| PlanError::Refused(error.to_string()))?.install(work)
}

fn subject(recipe: Recipe) -> String {
    format!("rates of a step in {}", recipe.name())
}

/// Cache key of a CPU's rates.
fn cpu_key(recipe: Recipe, threads: usize) -> String {
    let file = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = file.lines().find(|line| line.starts_with("model name"));
    let model = model.and_then(|line| line.split_once(": ")).map_or("a CPU", |(_, model)| model);
    let version = env!("CARGO_PKG_VERSION");
    let build = if cfg!(debug_assertions) { "debug" } else { "release" };
    format!("{model} on {threads} threads, xtrain {version} ({build}): {}", subject(recipe))
}

fn measure(processor: Processor, recipe: Recipe, rates: &Rates) -> Result<Factors, PlanError> {
    let target = processor.target();
    let set = [format!("precision.recipe={}", recipe.name())];
    let parsed = Config::parse(Path::new("measured.toml"), run_file(target).as_bytes(), &set)?;
    let spec = plan_alone(&parsed, target, Rank::ALONE)?.spec;
    let engine = processor.engine(Checks::default()).map_err(LearnError::from)?;
    let mut learner = Learner::new(engine, spec, 0)?;
    learner.weights().initialize(0, 0.02)?;
    let id = learner.program();
    let mut times: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
    let begun = Instant::now();
    // The first step also does one-time work, so it is not timed.
    for n in 0..=STEPS {
        if n > 1 && begun.elapsed() > PATIENCE {
            break;
        }
        if n == 1 {
            learner.weights().engine().set_timing(Timing::Ops { repeats: 1 }).map_err(LearnError::from)?;
        }
        let batch = random_batch(learner.spec(), n as u32);
        let step = Step { number: n as u64, lr: 1e-4, counts: batch.counts(), micro_steps: 1 };
        learner.micro_step(&step, 0, &batch)?;
        for timed in learner.weights().engine().take_times().map_err(LearnError::from)? {
            if let TimedWork::Instance(index) = timed.work {
                times.entry(index).or_default().push(timed.seconds());
            }
        }
    }
    let program = learner.weights().engine().program(id);
    let medians = times.into_iter().map(|(index, times)| (index, median(&times))).collect();
    Ok(factors(program, &medians, rates))
}

/// Measured time divided by the estimate at `rates`, for each kind of op.
fn factors(program: &Program, measured: &BTreeMap<usize, f64>, rates: &Rates) -> Factors {
    let of = |rates: &Rates, is_kind: &dyn Fn(bool, &[KernelCost]) -> bool| {
        let (mut seconds, mut estimate) = (0.0, 0.0);
        for (&index, median) in measured {
            let instance = &program.instances[index];
            if is_kind(is_cast(program, instance), &kernels_of(program, instance)) {
                seconds += median;
                estimate += instance_seconds(program, instance, rates, true);
            }
        }
        if seconds > 0.0 && estimate > 0.0 { seconds / estimate } else { 1.0 }
    };
    // Casts and ops of several kernels are of no single kind.
    let of_one = |is_kind: &dyn Fn(&Arithmetic) -> bool| {
        of(rates, &|is_cast, kernels| !is_cast && matches!(kernels, [kernel] if is_kind(&kernel.arithmetic)))
    };
    let is_attention = |arithmetic: &Arithmetic| matches!(arithmetic, Arithmetic::Attention { .. });
    let factors = Factors {
        gemm: of_one(&|arithmetic| matches!(arithmetic, Arithmetic::Gemm { .. })),
        memory: of_one(&|arithmetic| *arithmetic == Arithmetic::None),
        forward: of_one(&|arithmetic| is_attention(arithmetic) && !arithmetic.is_attention_backward()),
        backward: of_one(&|arithmetic| arithmetic.is_attention_backward()),
        several: 1.0,
        casts: 1.0,
    };
    let scaled = rates.scaled(factors);
    Factors {
        several: of(&scaled, &|is_cast, kernels| !is_cast && kernels.len() > 1),
        casts: of(&scaled, &|is_cast, _| is_cast),
        ..factors
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn casts_have_a_factor_of_their_own() {
        let config = run_file(Target::Cpu);
        let set = ["precision.recipe=fp8-block"];
        let parsed = Config::parse(Path::new("run.toml"), config.as_bytes(), &set).expect("a run file");
        let spec = plan_alone(&parsed, Target::Cpu, Rank::ALONE).expect("a plan").spec;
        let program = xtrain_step::programs::training(&spec).expect("a program");
        let rates = super::super::Device::model("h100").expect("it is in the table").rates;
        let rates = Rates { launch: 0.0, ..rates };
        let time = |(index, instance)| {
            let slower = if is_cast(&program, instance) { 60.0 } else { 2.0 };
            (index, slower * instance_seconds(&program, instance, &rates, true))
        };
        let measured: BTreeMap<usize, f64> = program.instances.iter().enumerate().map(time).collect();
        let Factors { gemm, memory, casts, .. } = factors(&program, &measured, &rates);
        for (factor, expected) in [(gemm, 2.0), (memory, 2.0), (casts, 30.0)] {
            assert!((factor / expected - 1.0).abs() < 0.05, "{factor} for {expected}");
        }
        let scaled = rates.scaled(factors(&program, &measured, &rates));
        let (step, all) = (super::super::step_seconds(&program, &scaled, 1), measured.values().sum::<f64>());
        assert!((step / all - 1.0).abs() < 0.05, "{step} s for {all} s");
    }

    #[test]
    fn a_measurement_that_other_programs_disturbed_gives_way_to_a_better_one() {
        let of = |gemm, while_busy| {
            let factors =
                Factors { gemm, memory: 2.0, forward: 0.5, backward: 1.0, several: 1.25, casts: 3.0 };
            Measurement { factors, while_busy, at: 1_000_000 }
        };
        for while_busy in [false, true] {
            let line = serde_json::to_string(&of(1.5, while_busy)).expect("JSON");
            let read: Measurement = serde_json::from_str(&line).expect("a measurement");
            assert_eq!(read, of(1.5, while_busy));
        }
        // Those of earlier versions have no age.
        let line = serde_json::to_string(&of(1.5, false)).expect("JSON").replace(",\"at\":1000000", "");
        assert!(serde_json::from_str::<Measurement>(&line).is_err() && of(1.5, false).is_old());
        let (slow, fast, free) = (of(3.0, true), of(1.5, true), of(2.0, false));
        assert_eq!(slow.less_disturbed(fast), fast);
        assert_eq!(fast.less_disturbed(slow), fast);
        assert_eq!(fast.less_disturbed(free), free);
        assert_eq!(free.less_disturbed(fast), free);
    }
}
