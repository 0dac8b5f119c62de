//! Rates measured on this machine: the step of a small model, op by op, in relation to rates that are known
//! or supposed. The result is cached with the compiled kernels.

use super::rates::{Factors, Rates};
use super::{instance_seconds, kernels_of};
use crate::engine::{Processor, Target};
use crate::error::{LearnError, RunError};
use crate::learner::{Learner, Step};
use crate::random_batch::random_batch;
use crate::spec::plan_on;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};
use xtrain_config::Config;
use xtrain_cuda::KernelCache;
use xtrain_model::Recipe;
use xtrain_program::{Arithmetic, KernelCost, Program};
use xtrain_runtime::{Checks, TimedWork, Timing};

/// Steps that are measured at most, and the time in which they begin. The shortest time of each op counts:
/// what else runs only makes it longer.
const STEPS: usize = 5;
const PATIENCE: Duration = Duration::from_secs(1);

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

/// Times on `processor` in relation to those by `rates`, as cached.
pub(super) fn cached(processor: &Processor, recipe: Recipe, threads: usize) -> Option<Factors> {
    let line = match processor {
        Processor::Cpu => KernelCache::for_user().measurement(&cpu_key(recipe, threads)),
        Processor::Cuda(gpu) => gpu.cached_measurement(&subject(recipe)),
    };
    serde_json::from_str(&line?).ok()
}

/// As [`cached`], measured if there is nothing cached.
pub(super) fn measured(processor: &Processor, recipe: Recipe, rates: &Rates) -> Result<Factors, RunError> {
    let threads = rayon::current_num_threads();
    if let Some(factors) = cached(processor, recipe, threads) {
        return Ok(factors);
    }
    let other = match processor {
        Processor::Cpu => Processor::Cpu,
        Processor::Cuda(_) => Processor::by_name(xtrain_config::Device::Cuda)?,
    };
    let factors = measure(other, recipe, rates)?;
    let line = serde_json::to_string(&factors).unwrap_or_default();
    match processor {
        Processor::Cpu => KernelCache::for_user().replace_measurement(&cpu_key(recipe, threads), &line),
        Processor::Cuda(gpu) => gpu.replace_measurement(&subject(recipe), &line),
    }
    Ok(factors)
}

fn subject(recipe: Recipe) -> String {
    format!("rates of a step in {}", recipe.name())
}

/// The key of a CPU's rates.
fn cpu_key(recipe: Recipe, threads: usize) -> String {
    let file = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = file.lines().find(|line| line.starts_with("model name"));
    let model = model.and_then(|line| line.split_once(": ")).map_or("a CPU", |(_, model)| model);
    let version = env!("CARGO_PKG_VERSION");
    let build = if cfg!(debug_assertions) { "debug" } else { "release" };
    format!("{model} on {threads} threads, xtrain {version} ({build}): {}", subject(recipe))
}

fn measure(processor: Processor, recipe: Recipe, rates: &Rates) -> Result<Factors, RunError> {
    let target = processor.target();
    let set = [format!("precision.recipe={}", recipe.name())];
    let parsed = Config::parse(Path::new("measured.toml"), run_file(target).as_bytes(), &set)?;
    let spec = plan_on(&parsed, target)?.spec;
    let engine = processor.engine(Checks::default()).map_err(LearnError::from)?;
    let mut learner = Learner::new(engine, spec, 0)?;
    learner.weights().initialize(0, 0.02)?;
    let id = learner.program();
    let mut measured: BTreeMap<usize, f64> = BTreeMap::new();
    let begun = Instant::now();
    // The first for what is done once.
    for n in 0..=STEPS {
        if n > 1 && begun.elapsed() > PATIENCE {
            break;
        }
        if n == 1 {
            learner.weights().engine().set_timing(Timing::Ops { repeats: 1 }).map_err(LearnError::from)?;
        }
        let batch = random_batch(learner.spec(), n as u32);
        let step = Step { number: n as u64, lr: 1e-4, valid_targets: batch.valid_targets, micro_steps: 1 };
        learner.micro_step(&step, 0, &batch)?;
        for timed in learner.weights().engine().take_times().map_err(LearnError::from)? {
            if let TimedWork::Instance(index) = timed.work {
                let shortest = measured.entry(index).or_insert(f64::INFINITY);
                *shortest = shortest.min(timed.seconds());
            }
        }
    }
    let program = learner.weights().engine().program(id);
    Ok(factors(program, &measured, rates))
}

/// The measured times of each kind of op in relation to those by `rates`.
fn factors(program: &Program, measured: &BTreeMap<usize, f64>, rates: &Rates) -> Factors {
    let of = |rates: &Rates, is_kind: &dyn Fn(&[KernelCost]) -> bool| {
        let (mut seconds, mut estimate) = (0.0, 0.0);
        for (&index, shortest) in measured {
            let instance = &program.instances[index];
            if is_kind(&kernels_of(program, instance)) {
                seconds += shortest;
                estimate += instance_seconds(program, instance, rates, true);
            }
        }
        if seconds > 0.0 && estimate > 0.0 { seconds / estimate } else { 1.0 }
    };
    // What an op of several kernels takes is that of no kind.
    let of_one = |is_kind: &dyn Fn(&Arithmetic) -> bool| {
        of(rates, &|kernels| matches!(kernels, [kernel] if is_kind(&kernel.arithmetic)))
    };
    let is_attention = |arithmetic: &Arithmetic| matches!(arithmetic, Arithmetic::Attention { .. });
    let factors = Factors {
        gemm: of_one(&|arithmetic| matches!(arithmetic, Arithmetic::Gemm { .. })),
        memory: of_one(&|arithmetic| *arithmetic == Arithmetic::None),
        forward: of_one(&|arithmetic| is_attention(arithmetic) && !arithmetic.is_attention_backward()),
        backward: of_one(&|arithmetic| arithmetic.is_attention_backward()),
        several: 1.0,
    };
    Factors { several: of(&rates.scaled(factors), &|kernels| kernels.len() > 1), ..factors }
}
