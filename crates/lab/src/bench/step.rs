//! The training step of a run file, measured as a run makes it.

use super::op_bench::{Ceiling, OpBench, OpBenchOptions};
use super::tokens::Tokens;
use serde::Serialize;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};
use xtrain_config::{Config, ParallelConfig, Parsed};
use xtrain_data::TokenCounts;
use xtrain_distributed::{Communicator, OneOf, Pace, PaceTime};
use xtrain_model::FixedRouting;
use xtrain_planner::estimate::{Device, Timeline};
use xtrain_planner::median::median;
use xtrain_planner::planned::Planned;
use xtrain_planner::{choose, fit, fp8_skip};
use xtrain_program::{Collective, Sent};
use xtrain_rank::Rank;
use xtrain_runtime::{Checks, groups_of_run, sending};
use xtrain_step::engine::{Processor, Target};
use xtrain_step::error::LearnError;
use xtrain_step::learner::{IN_FLIGHT, Learner, Overflow, Step, StepResult};
use xtrain_step::programs;
use xtrain_step::training_spec::TrainingSpec;
use xtrain_train::error::RunError;
use xtrain_train::process_group::{ProcessGroup, transport};
use xtrain_train::spec::plan_for;

/// Length of the measurement.
#[derive(Clone, Copy, Debug)]
pub struct BenchOptions {
    /// Steps before the measurement: what is done once is done in them.
    pub warmup: usize,
    /// Measurements, of which the median counts.
    pub repeats: usize,
    /// Steps of a measurement.
    pub steps: usize,
    /// The ranks of a run of which rank 0 is measured, if not of a run of one process.
    pub rank_of: Option<RankOf>,
    /// The routing to experts, if routers do not choose it.
    pub routing: Option<Routing>,
}

impl BenchOptions {
    /// The options with their names, which all ranks must have alike.
    fn by_name(&self) -> Vec<(String, String)> {
        let routing = self.routing.map_or("that of routers", Routing::name);
        let options = [
            ("--warmup", self.warmup.to_string()),
            ("--repeats", self.repeats.to_string()),
            ("--steps", self.steps.to_string()),
            ("--routing", routing.to_owned()),
        ];
        options.map(|(name, value)| (name.to_owned(), value)).into()
    }
}

/// A fixed routing of tokens to experts, the same in every block and step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Routing {
    /// All experts have as many tokens.
    Uniform,
    /// Experts have tokens by Zipf's law, but at most all of them.
    Zipf,
}

impl Routing {
    /// All routings.
    pub const ALL: [Routing; 2] = [Routing::Uniform, Routing::Zipf];

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Routing::Uniform => "uniform",
            Routing::Zipf => "zipf",
        }
    }

    /// The routing.
    pub(super) fn fixed(self) -> FixedRouting {
        match self {
            Routing::Uniform => FixedRouting { skew: 0.0 },
            Routing::Zipf => FixedRouting { skew: 1.0 },
        }
    }

    /// The routing, for a model that has experts.
    ///
    /// # Errors
    /// It has none.
    pub fn of_model(self, spec: &TrainingSpec) -> Result<FixedRouting, RunError> {
        let without = || RunError::Refused("the model has no experts, so there is no routing to fix".into());
        spec.loss.balancing.ok_or_else(without)?;
        Ok(self.fixed())
    }
}

/// The ranks of a run of which one is measured on one device. Local copies replace collectives.
#[derive(Clone, Copy, Debug)]
pub struct RankOf {
    /// The number of ranks.
    pub ranks: usize,
    /// True if a collective takes at least the time that the plan says. On a GPU a kernel delays its stream.
    pub stretch: bool,
    /// Bytes per second of each rank's NIC, if other than those of the device's usual one.
    pub nic: Option<f64>,
    /// Ranks of a node.
    pub ranks_per_node: usize,
}

/// The plan of a step of one of several ranks, and the bytes that were counted.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct RankSpeed {
    /// The number of ranks.
    pub ranks: usize,
    /// Bytes of memory that the plan predicts; [`StepSpeed::planned_bytes`] are allocated.
    pub plan_bytes: u64,
    /// Bytes that the rank sends in a step by the plan.
    pub plan_sent_bytes: u64,
    /// Bytes that it would have sent in a step, as counted; `None` on a GPU.
    pub sent_bytes: Option<u64>,
    /// Estimated seconds of a step whose collectives take as long as between real ranks.
    pub plan_seconds: f64,
    /// Seconds of them in which the rank waits for communication.
    pub plan_exposed_seconds: f64,
}

/// Speed of a training step.
#[derive(Clone, Debug, Serialize)]
pub struct StepSpeed {
    /// The device of a rank.
    pub device: String,
    /// The number of ranks that ran it.
    pub ranks: usize,
    /// `fp32`, `bf16`, ..
    pub precision: String,
    /// Source of the tokens: `shards`, those of the run file, or `random`.
    pub data: &'static str,
    /// Tokens of an optimizer step.
    pub tokens: u64,
    /// Seconds of a step: the median of the measurements.
    pub seconds: f64,
    /// Seconds of a step in each measurement.
    pub measured: Vec<f64>,
    /// Tokens a second.
    pub tokens_per_second: f64,
    /// 10^12 floating-point operations a second, by PaLM's count.
    pub tflops: f64,
    /// Their share of the GPU's dense bf16 peak, if that is known.
    pub mfu: Option<f64>,
    /// Best rates of the processor, measured after the steps of a run of one process.
    pub ceiling: Option<Ceiling>,
    /// The rate of operations as a share of the ceiling's GEMM.
    pub of_product: Option<f64>,
    /// Bytes of the planned arena.
    pub planned_bytes: u64,
    /// Bytes of GPU memory besides the context: the arena, libraries, recorded graphs.
    pub card_bytes: Option<u64>,
    /// Seconds from opening the processor to the end of the first step.
    pub first_step_seconds: f64,
    /// The loss of the last step: one that is not finite was not measured well. That of one of several ranks
    /// has no meaning.
    pub loss: f64,
    /// The plan of one of several ranks, if one was measured.
    pub rank: Option<RankSpeed>,
}

/// A learner of a run file with fresh weights, and what it runs on.
pub(super) struct StepBench {
    pub(super) learner: Learner,
    process_group: ProcessGroup,
    config: Config,
    tokens: Tokens,
    device: String,
    target: Target,
    /// Operations a second that the processor can do at most, where that is known.
    peak_flops: Option<f64>,
    /// Bytes that were available before, if the processor tells.
    free_before: Option<u64>,
    /// The communicator and the plan, if one of several ranks is measured.
    rank: Option<(Arc<OneOf>, RankSpeed)>,
}

impl StepBench {
    /// The bench of a run by all ranks of `process_group`, or by rank 0 of those of `rank_of`.
    pub(super) fn new(
        parsed: &Parsed,
        process_group: &ProcessGroup,
        rank_of: Option<RankOf>,
        routing: Option<Routing>,
    ) -> Result<StepBench, RunError> {
        let gpu = process_group.gpu(parsed.config.train.device)?;
        let processor = Processor::for_config_at(&parsed.config, gpu)?;
        let mut parsed = parsed.clone();
        if rank_of.is_none() && process_group.is_alone() {
            // The step of one process, which measures the device; the order of sums is one process's, too.
            let reduce = parsed.config.parallel.reduce;
            parsed.config.parallel = ParallelConfig { reduce, ..ParallelConfig::default() };
        }
        let rank = rank_of.map_or(process_group.rank(), |rank_of| Rank::first_of(rank_of.ranks));
        let planned = plan_for(&parsed, processor.target(), rank)?;
        let (threads, processes) = (rayon::current_num_threads(), process_group.processes_here());
        let mut measured = Device::new(&processor, planned.spec.recipe, threads, processes);
        if !process_group.is_alone() {
            let parallel = &planned.resolved.config.parallel;
            measured = measured.connected(|network| network.of_nodes(processes).of_run(parallel));
        }
        let choose = |planned| {
            let (planned, choice) = choose::decide(planned, &measured)?;
            if let Some(choice) = choice.filter(|choice| !choice.is_usual()) {
                tracing::info!("chosen: {choice}");
            }
            let planned = fp8_skip::decide(planned, &processor)?;
            fit::check(&planned, &processor, process_group.processes_here())?;
            Ok((planned, ()))
        };
        let (mut planned, _) = process_group.settings(planned, &processor, choose)?;
        if let Some(routing) = routing {
            planned.spec.fixed_routing = Some(routing.of_model(&planned.spec)?);
        }
        let free_before = processor.available_bytes();
        let (device, target, peak_flops) = (processor.describe(), processor.target(), processor.peak_flops());
        let rank = rank_of.map(|rank_of| of_rank(&planned, &measured, rank_of)).transpose()?;
        let Planned { resolved, spec, .. } = planned;
        let config: Config = resolved.config;
        let tokens = Tokens::open(&config, spec.model.vocab_size)?;
        // All ranks connect at once, before rank 0 prepares programs alone.
        let path = process_group.data_path(&processor, &config.parallel)?;
        let load = |choices_of_rank_0: Option<BTreeMap<String, String>>| {
            processor.adopt(&choices_of_rank_0.unwrap_or_default());
            let engine = match &rank {
                Some((communicator, _)) => processor.engine_of_absent_ranks(communicator.clone()),
                None => processor.engine_of_rank(Checks::default(), process_group.communicator(), path),
            };
            Ok(Learner::new(engine.map_err(LearnError::from)?, spec, config.train.seed)?)
        };
        let mut learner = process_group.after_first(load, |learner| learner.weights().engine().choices())?;
        learner.weights().initialize(config.train.seed, config.model.init_std)?;
        let process_group = process_group.clone();
        Ok(StepBench {
            learner,
            process_group,
            config,
            tokens,
            device,
            target,
            peak_flops,
            free_before,
            rank,
        })
    }

    /// Launches this rank's `n`-th micro-step of `step`. It is the `launched`-th of all.
    pub(super) fn micro_step(&mut self, step: &Step, n: usize, launched: usize) -> Result<(), RunError> {
        let StepBench { learner, tokens, .. } = self;
        let Rank { index, world_size } = learner.spec().parallel.data_rank();
        let number = launched * world_size + index;
        let batch = tokens.batch(learner.spec(), number)?;
        learner.name_sources(&tokens.sources(learner.spec(), number))?;
        Ok(learner.micro_step(step, n, &batch)?)
    }
}

/// Measures the step of a run file as the ranks of `process_group` make it: inputs are written for each step,
/// and results are fetched and read late. All ranks call it.
pub fn step(
    parsed: &Parsed,
    process_group: &ProcessGroup,
    options: BenchOptions,
) -> Result<StepSpeed, RunError> {
    measure(parsed, process_group, options).map_err(|error| process_group.fail(error))
}

fn measure(
    parsed: &Parsed,
    process_group: &ProcessGroup,
    options: BenchOptions,
) -> Result<StepSpeed, RunError> {
    let begun = Instant::now();
    process_group.compare_files(&parsed.config)?;
    process_group.compare_options(&options.by_name())?;
    let mut bench = StepBench::new(parsed, process_group, options.rank_of, options.routing)?;
    let micro_steps = bench.learner.spec().micro_steps(bench.config.train.batch_size);
    let all_tokens = bench.config.step_tokens();
    let step_tokens = all_tokens / options.rank_of.map_or(1, |rank_of| rank_of.ranks as u64);

    let (mut number, mut loss) = (0, f64::NAN);
    let mut run = |bench: &mut StepBench, steps: usize| -> Result<f64, RunError> {
        let begun = Instant::now();
        let mut flying = VecDeque::new();
        for _ in 0..steps {
            let step = Step { number, lr: LR, counts: TokenCounts::full(all_tokens), micro_steps };
            for n in 0..micro_steps {
                bench.micro_step(&step, n, number as usize * micro_steps + n)?;
            }
            flying.push_back(bench.learner.fetch()?);
            number += 1;
            if flying.len() > IN_FLIGHT
                && let Some(oldest) = flying.pop_front()
            {
                loss = loss_of(bench.learner.collect(oldest)?, process_group)?;
            }
        }
        for ticket in flying {
            loss = loss_of(bench.learner.collect(ticket)?, process_group)?;
        }
        Ok(begun.elapsed().as_secs_f64() / steps as f64)
    };
    run(&mut bench, 1)?;
    let first_step_seconds = begun.elapsed().as_secs_f64();
    let sent_bytes = sent_in_a_step(&mut bench, &mut run)?;
    run(&mut bench, options.warmup.max(2))?;
    let mut measured = Vec::new();
    for _ in 0..options.repeats.max(1) {
        measured.push(run(&mut bench, options.steps.max(1))?);
    }
    let StepBench {
        mut learner,
        process_group,
        config,
        tokens,
        device,
        target,
        peak_flops,
        free_before,
        rank,
    } = bench;
    let taken = |free: u64| Some(free_before?.saturating_sub(free));
    let card_bytes = match target {
        Target::Cpu => None,
        Target::Cuda => learner.weights().engine().free_bytes().and_then(taken),
    };
    let planned_bytes = learner.memory_bytes() as u64;
    let spec = learner.spec().clone();
    drop(learner);
    process_group.finish()?;
    let ranks = process_group.rank().world_size;
    let ceiling = if rank.is_none() && process_group.is_alone() { Some(ceiling(&config)?) } else { None };
    let seconds = median(&measured);
    let flops = spec.model.flops_per_token(config.data.seq_len) * step_tokens as f64 / seconds;
    Ok(StepSpeed {
        device,
        ranks,
        precision: spec.recipe.name().into(),
        data: tokens.name(),
        tokens: step_tokens,
        seconds,
        measured,
        tokens_per_second: step_tokens as f64 / seconds,
        tflops: flops / 1e12,
        mfu: peak_flops.map(|peak| flops / (peak * ranks as f64)),
        ceiling,
        of_product: ceiling.map(|ceiling| flops / 1e12 / ceiling.tflops),
        planned_bytes,
        card_bytes,
        first_step_seconds,
        loss,
        rank: rank.map(|(_, rank)| RankSpeed { sent_bytes, ..rank }),
    })
}

/// The loss of a step, whose rows of experts must have fitted: otherwise it did less work. All ranks refuse
/// the same step, and rank 0 says why.
fn loss_of(result: StepResult, process_group: &ProcessGroup) -> Result<f64, RunError> {
    let Some(Overflow { block, needed, room, .. }) = result.overflow else { return Ok(result.loss) };
    let refused = |_: Option<()>| {
        Err(RunError::Refused(format!(
            "the experts of block {block} need {needed} rows, and a rank has {room}, so a run would repeat the step with more; set a \
             larger experts.capacity"
        )))
    };
    process_group.after_first(refused, |_| ())
}

/// Runs a step, and returns the bytes that one of several ranks would have sent; `None` if nothing counts
/// them.
fn sent_in_a_step(
    bench: &mut StepBench,
    run: &mut impl FnMut(&mut StepBench, usize) -> Result<f64, RunError>,
) -> Result<Option<u64>, RunError> {
    let communicator = bench.rank.as_ref().map(|(communicator, _)| communicator.clone());
    let sent = || communicator.as_ref().map(|communicator| communicator.sent_bytes());
    let before = sent();
    run(bench, 1)?;
    // Copies within a GPU are enqueued without the communicator.
    Ok(sent().zip(before).map(|(after, before)| after - before).filter(|sent| *sent > 0))
}

/// The communicator and the plan of rank 0 of several.
fn of_rank(
    planned: &Planned,
    device: &Device,
    RankOf { ranks, stretch, nic, ranks_per_node }: RankOf,
) -> Result<(Arc<OneOf>, RankSpeed), RunError> {
    let parallel = &planned.resolved.config.parallel;
    let network = device.network.of_run(parallel).of_nodes(ranks_per_node).with_bandwidths(nic, None);
    transport::check(parallel, device.target == Target::Cuda, network.spans_nodes(ranks))?;
    let device = Device { network, ..device.clone() };
    let training = programs::training(&planned.spec).map_err(LearnError::from)?;
    let refresh = programs::refresh(&training).map_err(LearnError::from)?;
    let micro_steps = planned.micro_steps();
    let timeline = Timeline::new(&training, &device, micro_steps);
    let of_run = groups_of_run(&planned.spec.parallel);
    let time = |(collective, groups)| {
        let latency = Duration::from_secs_f64(network.latency(collective, groups, ranks));
        let bandwidth = network.bandwidth(collective, groups, ranks);
        (sending(collective, groups), PaceTime { latency, bandwidth })
    };
    let kinds = [Collective::AllGather { first: 0 }, Collective::AllToAll { first: 0 }];
    let times = kinds.iter().flat_map(|&kind| of_run.iter().map(move |&groups| (kind, groups))).map(time);
    let pace = stretch.then(|| Pace { times: times.collect() });
    let speed = RankSpeed {
        ranks,
        plan_bytes: device.target.plan_bytes(&[&refresh, &training]) as u64,
        plan_sent_bytes: training.traffic(micro_steps).iter().map(Sent::step_bytes).sum(),
        sent_bytes: None,
        plan_seconds: timeline.seconds(),
        plan_exposed_seconds: timeline.exposed_seconds(),
    };
    Ok((Arc::new(OneOf::new(ranks, pace)), speed))
}

/// Best rates of a run's processor, in the run's precision.
pub(super) fn ceiling(config: &Config) -> Result<Ceiling, RunError> {
    let (device, recipe) = (config.train.device, config.precision.recipe);
    Ok(OpBench::new(OpBenchOptions { device, recipe, repeats: 5, runs: 10 })?.ceiling)
}

/// The learning rate of steps that are measured.
pub(super) const LR: f64 = 1e-4;

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn losses_of_a_mixture_are_summed_by_source() {
        let run = r#"
            [model]
            dim = 16
            layers = 1
            heads = 2
            [data]
            train = [{ path = "a.txt", weight = 1.0 }, { path = "b.txt", weight = 1.0 }]
            tokenizer = "bytes"
            seq_len = 8
            [train]
            steps = 1
            batch_size = 2
            device = "cpu"
        "#;
        let parsed = Config::parse(Path::new("run.toml"), run.as_bytes(), &[""; 0]).expect("it is valid");
        let mut bench = StepBench::new(&parsed, &ProcessGroup::alone(), None, None).expect("it fits");
        let step = Step { number: 0, lr: LR, counts: TokenCounts::full(16), micro_steps: 1 };
        bench.micro_step(&step, 0, 0).expect("a micro-step");
        let ticket = bench.learner.fetch().expect("a result");
        let losses = bench.learner.collect(ticket).expect("a result").source_losses;
        assert!(losses.len() == 2 && losses.iter().all(|&loss| loss > 0.0), "{losses:?}");
    }

    #[test]
    fn a_fixed_routing_needs_experts_and_decides_their_loads() {
        let run = "[model]\ndim = 16\nlayers = 2\nheads = 2\n[data]\ntrain = 'text'\ntokenizer = 'bytes'\nseq_len = 32\n\
                   [train]\nsteps = 1\nbatch_size = 4\ndevice = 'cpu'\n";
        let parsed =
            |run: &str| Config::parse(Path::new("run.toml"), run.as_bytes(), &[""; 0]).expect("valid");
        let error = StepBench::new(&parsed(run), &ProcessGroup::alone(), None, Some(Routing::Zipf))
            .err()
            .map(|error| error.to_string());
        assert_eq!(error.as_deref(), Some("the model has no experts, so there is no routing to fix"));
        let experts = "[experts]\ncount = 4\nper_token = 2\nffn_dim = 16\n[data]";
        let mixture = run.replace("[model]", "[model]\nfamily = 'mixtral'").replace("[data]", experts);
        let mixture = parsed(&mixture);
        let loads = |routing| {
            let mut bench =
                StepBench::new(&mixture, &ProcessGroup::alone(), None, Some(routing)).expect("it fits");
            let step = Step { number: 0, lr: LR, counts: TokenCounts::full(128), micro_steps: 1 };
            bench.micro_step(&step, 0, 0).expect("a micro-step");
            let ticket = bench.learner.fetch().expect("a result");
            bench.learner.collect(ticket).expect("a result").experts
        };
        for (routing, largest) in [(Routing::Uniform, 64.0), (Routing::Zipf, 123.0)] {
            for block in loads(routing) {
                assert!((block.tokens[0] - largest).abs() < 15.0, "{routing:?}: {:?}", block.tokens);
                assert_eq!(block.tokens.iter().sum::<f32>(), 256.0);
            }
        }
    }

    #[test]
    fn one_of_several_ranks_takes_the_memory_and_sends_the_bytes_of_the_plan() {
        let run = "[model]\ndim = 32\nlayers = 2\nheads = 2\n[data]\ntrain = 'text'\ntokenizer = 'bytes'\nseq_len = 8\n\
                   [train]\nsteps = 1\nbatch_size = 12\nmicro_batch_size = 1\ndevice = 'cpu'\n[precision]\nrecipe = 'bf16'\n";
        for shard in ["none", "optimizer", "gradients", "weights"] {
            let set = [format!("parallel.shard={shard}")];
            let parsed = Config::parse(Path::new("run.toml"), run.as_bytes(), &set).expect("it is valid");
            let rank_of = Some(RankOf { ranks: 3, stretch: true, nic: Some(1e7), ranks_per_node: 1 });
            let options = BenchOptions { warmup: 0, repeats: 1, steps: 1, rank_of, routing: None };
            let speed = step(&parsed, &ProcessGroup::alone(), options).expect("a speed");
            let rank = speed.rank.expect("a rank");
            assert_eq!(rank.plan_bytes, speed.planned_bytes, "{shard}");
            assert_eq!(rank.sent_bytes, Some(rank.plan_sent_bytes), "{shard}");
            assert!(rank.plan_sent_bytes > 0 && speed.tokens == 32, "{shard}");
            // Over so slow a connection, collectives take most of the step.
            let sending = rank.plan_sent_bytes as f64 / 1e7;
            assert!(speed.seconds > sending && rank.plan_exposed_seconds > sending, "{shard}");
        }
    }
}
