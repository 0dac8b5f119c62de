//! Runs of a few steps on several ranks, and what they leave.

use crate::common::{built, freeze, in_documents, random_batch, spec, use_muon, wide};
use crate::counting::{Counting, Sent};
use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};
use std::thread;
use xtrain_data::{Batch as TokenBatch, IGNORED_TARGET, TokenCounts};
use xtrain_distributed::{Communicator, ThreadCommunicator};
use xtrain_model::decoder::{Balancing, Batch};
use xtrain_model::{
    Adapter, Architecture, BlockSet, Capacity, Description, Family, Init, Mixture, ParameterSpec, Recipe,
    StaticScales, Targets,
};
use xtrain_ops::registry::cpu_kernels;
use xtrain_program::{Gather, Parallel, Recompute, Reduce, Shard, StateKind};
use xtrain_rank::Rank;
use xtrain_runtime::{Checks, CpuEngine, Ticket};
use xtrain_step::engine::Target;
use xtrain_step::error::LearnError;
use xtrain_step::layout::{HeldRows, Twins};
use xtrain_step::learner::{Learner, Step, StepResult};
use xtrain_step::training_spec::TrainingSpec;
use xtrain_step::{programs, training_spec};
use xtrain_tensor::{DType, Philox, TILE};

/// Steps of a run.
pub(crate) const STEPS: usize = 5;

/// A model of sizes that FP8 takes. Weights of the feed-forward consist of several blocks of 128 rows. With a
/// family of experts, each token passes through 2 of so many, and in a family that has it one that all share.
/// Outputs of experts are 128 and `dim`.
fn model(
    tied: bool,
    layers: usize,
    experts: Option<Family>,
    count: usize,
    dim: usize,
    kv_heads: usize,
) -> Architecture {
    let mixture = |family: Family| Mixture {
        count,
        ffn_dim: 64,
        router: family.router().expect("a family with experts"),
        shared_ffn_dim: if family.shares_an_expert() { 64 } else { 0 },
        dense: BlockSet::default(),
    };
    let description = Description {
        family: experts.unwrap_or(wide().family),
        mixture: experts.map(mixture),
        dim,
        layers,
        heads: 2 * kv_heads,
        kv_heads,
        head_dim: 16,
        // Parts of tensor ranks are of sizes that FP8 takes, too.
        ffn_dim: if kv_heads > 1 { 256 } else { 208 },
        tie_embeddings: tied,
        qkv_bias: true,
        ..wide()
    };
    built(description)
}

/// The seed of samples and of the orders of lanes: XTRAIN_TEST_SEED, or else the time. A failure prints it.
pub(crate) fn seed() -> u64 {
    static SEED: LazyLock<u64> = LazyLock::new(|| match std::env::var("XTRAIN_TEST_SEED") {
        Ok(seed) => seed.parse().expect("XTRAIN_TEST_SEED is a number"),
        Err(_) => std::time::UNIX_EPOCH.elapsed().map_or(0, |time| time.as_nanos() as u64),
    });
    println!("XTRAIN_TEST_SEED={}", *SEED);
    *SEED
}

/// All cases with XTRAIN_TEST_ALL=1, else a sample by a seed that a failure prints.
pub(crate) fn drawn<T>(all: Vec<T>) -> Vec<T> {
    sample(all, 24)
}

/// As [`drawn`], of so many cases.
pub(crate) fn sample<T>(mut all: Vec<T>, count: usize) -> Vec<T> {
    if std::env::var("XTRAIN_TEST_ALL").is_ok_and(|value| value == "1") {
        return all;
    }
    println!("a sample of {count} of {} cases", all.len());
    let rng = Philox::new(seed(), 0, 0);
    let mut n = 0;
    while all.len() > count {
        n += 1;
        all.remove(rng.word(n) as usize % all.len());
    }
    all
}

/// A run of several ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct World {
    pub(crate) recipe: Recipe,
    /// True if Muon updates the matrices of blocks.
    pub(crate) muon: bool,
    /// True if adapters of all linear layers are trained, with dropout.
    pub(crate) adapters: bool,
    pub(crate) tied: bool,
    pub(crate) ranks: usize,
    /// Stages of the pipeline.
    pub(crate) pipeline: usize,
    /// Chunks of each stage.
    pub(crate) chunks: usize,
    /// Micro-batches of a rank in a step.
    pub(crate) micro_steps: usize,
    /// Groups of ranks that each have all state.
    pub(crate) replicas: usize,
    pub(crate) shard: Shard,
    pub(crate) reduce: Reduce,
    pub(crate) reduce_dtype: DType,
    pub(crate) prefetch_blocks: usize,
    /// How weights in FP8 are gathered.
    pub(crate) gather: Gather,
    pub(crate) layers: usize,
    /// Sources whose losses are summed separately, 0 for none.
    pub(crate) sources: usize,
    /// The family of a mixture of experts, if it is one.
    pub(crate) experts: Option<Family>,
    /// Experts of a block.
    pub(crate) expert_count: usize,
    /// Ranks that share experts.
    pub(crate) expert: usize,
    /// Ranks that compute the same tokens in parts.
    pub(crate) tensor: usize,
    /// The width of the residual stream, if it is not that of the recipe.
    pub(crate) dim: Option<usize>,
    /// Key/value heads, half of the heads.
    pub(crate) kv_heads: usize,
    /// True if tokens travel to their experts in FP8.
    pub(crate) wire: bool,
    pub(crate) recompute: Recompute,
    /// The room for rows of experts, if it is not enough for all routings.
    pub(crate) capacity: Option<f64>,
    /// False if gradients are not clipped.
    pub(crate) clips: bool,
    /// Tokens of a sequence.
    pub(crate) seq_len: usize,
    pub(crate) text: Text,
    /// Selects the orders of lanes, with the seed.
    pub(crate) orders: u32,
    /// Scales that do not change, if there are such.
    pub(crate) scales: Option<FixedScales>,
}

/// The tokens of micro-batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Text {
    Random,
    /// Nine of ten are the same one.
    Equal,
    /// Every other micro-batch has no target.
    Padding,
    /// Sequences of several documents, within which attention stays.
    Documents,
}

/// Scales that do not change in a run.
#[derive(Clone, Copy)]
pub(crate) enum FixedScales {
    /// Static ones.
    Static(&'static StaticScales),
    /// Delayed ones, which are replaced before each step.
    Frozen(&'static StaticScales),
}

impl std::fmt::Debug for FixedScales {
    /// Without the scales, which are many.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            FixedScales::Static(_) => "static",
            FixedScales::Frozen(_) => "frozen",
        })
    }
}

/// A tensor of the state by kind and name.
pub(crate) type State = BTreeMap<(StateKind, String), Vec<u8>>;

/// The run as a rank sees it.
#[derive(Clone, Debug)]
pub(crate) struct RankRun {
    pub(crate) results: Vec<StepResult>,
    /// Updates that were applied.
    pub(crate) applied: u32,
    /// The sums of gradients of the first step: all rows, or those of this rank.
    pub(crate) first_gradients: BTreeMap<String, Vec<f32>>,
    /// State that all ranks have in the same bits at the end.
    pub(crate) shared: State,
    /// State that ranks with the same parts of matrices have in the same bits at the end.
    pub(crate) of_parts: State,
    /// State of checkpoints at the end: all rows, or those of this rank.
    pub(crate) saved: State,
    /// Bytes of a row, and the rows of this rank, of each state value of which it has a part.
    pub(crate) rows: BTreeMap<(StateKind, String), HeldRows>,
    /// Bytes that the engine holds before the first step, and that the plan predicts.
    pub(crate) memory: [usize; 2],
    /// Bytes that were sent in each step, and those that the program predicts for a step.
    pub(crate) sent: (Vec<Sent>, Sent),
    /// True if a step was repeated with more room for rows of experts.
    pub(crate) has_grown: bool,
}

/// A change of the state of a rank before the first step.
pub(crate) type Damage<'a> = &'a (dyn Fn(usize, &mut Learner) + Sync);

impl World {
    /// The default of one process.
    pub(crate) fn alone(recipe: Recipe, tied: bool, micro_steps: usize) -> World {
        World {
            recipe,
            muon: false,
            adapters: false,
            tied,
            ranks: 1,
            pipeline: 1,
            chunks: 1,
            micro_steps,
            replicas: 1,
            shard: Shard::None,
            reduce: Reduce::SameWorld,
            reduce_dtype: DType::F32,
            prefetch_blocks: 1,
            gather: Gather::Auto,
            layers: 2,
            sources: 0,
            experts: None,
            expert_count: 3,
            expert: 1,
            tensor: 1,
            dim: None,
            kv_heads: 1,
            wire: false,
            recompute: Recompute::None,
            capacity: None,
            clips: true,
            seq_len: 16,
            text: Text::Random,
            orders: 0,
            scales: None,
        }
    }

    /// The shape of a micro-batch.
    fn batch(&self) -> Batch {
        Batch { sequences: 2, seq_len: self.seq_len }
    }

    /// The specification of the step on a rank.
    pub(crate) fn spec(&self, rank: usize) -> TrainingSpec {
        let parallel = Parallel {
            rank: Rank { index: rank, world_size: self.ranks },
            pipeline: self.pipeline,
            chunks: self.chunks,
            replicas: self.replicas,
            expert: self.expert,
            tensor: self.tensor,
            shard: self.shard,
            reduce: self.reduce,
            tree_micro_steps: if self.reduce.is_any_world() { self.micro_steps } else { 1 },
            reduce_dtype: self.reduce_dtype,
            prefetch_blocks: self.prefetch_blocks,
            gather: self.gather,
        };
        // Blocks of weights do not cross experts.
        let has_blocks = self.experts.is_some() && self.recipe == Recipe::Fp8Block;
        let dim = self.dim.unwrap_or(if has_blocks { TILE } else { 48 });
        let mut model = model(self.tied, self.layers, self.experts, self.expert_count, dim, self.kv_heads);
        model.adapter = self.adapters.then_some(Adapter {
            rank: 4,
            alpha: 12.0,
            dropout: 0.2,
            targets: Targets::AllLinear,
        });
        let spec = training_spec::TrainingSpec { parallel, ..spec(model, self.batch()) };
        // Masks of dropout and stochastic rounding depend on the place in the whole batch and parameter.
        let (recipe, recompute) = (self.recipe, self.recompute);
        let mut spec = TrainingSpec { recipe, recompute, dropout: 0.1, ..spec };
        spec.fp8.wire = self.wire;
        if !self.clips {
            spec.max_grad_norm = 0.0;
        }
        spec.document_mask = self.text == Text::Documents;
        spec.loss.sources = self.sources;
        let parts = self.pipeline * self.chunks;
        if self.pipeline > 1 {
            let count = |part| self.layers / parts + usize::from(part < self.layers % parts);
            spec.split = (0..parts).map(count).collect();
        }
        spec.capacity = self.capacity.and_then(Capacity::from_factor);
        if let Some(FixedScales::Static(scales)) = self.scales {
            spec.fp8.static_scales = Some(Arc::new(scales.clone()));
        }
        let biased = self.experts.and_then(Family::router).is_some_and(|router| router.biased);
        spec.loss.balancing = self.experts.map(|_| Balancing {
            loss_weight: 0.01,
            z_weight: 0.001,
            bias_rate: biased.then_some(0.01),
        });
        crate::common::adamw(&mut spec).moments = if self.tied { DType::BF16 } else { DType::F32 };
        if self.muon {
            use_muon(&mut spec);
        }
        spec
    }

    /// Ranks of a stage.
    pub(crate) fn stage_ranks(&self) -> usize {
        self.ranks / self.pipeline
    }

    /// Ranks with different data.
    pub(crate) fn data_ranks(&self) -> usize {
        self.stage_ranks() / self.tensor
    }

    /// The ranks of the first replica of a pipeline of one stage, which have all rows.
    pub(crate) fn first_replica<'a>(&self, ranks: &'a [RankRun]) -> &'a [RankRun] {
        if self.pipeline > 1 { ranks } else { &ranks[..self.ranks / self.replicas] }
    }

    /// Runs all ranks.
    pub(crate) fn run(&self) -> Vec<RankRun> {
        self.run_with(&|_, _| {})
    }

    /// Runs all ranks after this change.
    pub(crate) fn run_with(&self, damage: Damage<'_>) -> Vec<RankRun> {
        thread::scope(|scope| {
            let spawn = |communicator: ThreadCommunicator| {
                scope.spawn(move || self.run_rank(Counting::new(communicator), damage))
            };
            let handles: Vec<_> = ThreadCommunicator::world(self.ranks).into_iter().map(spawn).collect();
            handles.into_iter().map(|handle| handle.join().expect("a rank")).collect()
        })
    }

    /// The run of a rank.
    fn run_rank(&self, communicator: Counting, damage: Damage<'_>) -> RankRun {
        let (rank, communicator) = (communicator.rank(), Arc::new(communicator));
        let spec = self.spec(rank);
        let [training, refresh] = {
            let training = programs::training(&spec).expect("a program");
            let refresh = programs::refresh(&training).expect("a program");
            [training, refresh]
        };
        let planned_bytes = Target::Cpu.plan_bytes(&[&refresh, &training]);
        let mut learner = self.learner(communicator.clone());
        let memory = [learner.memory_bytes(), planned_bytes];
        learner.weights().initialize(5, 0.1).expect("weights");
        fill_adapters(&mut learner);
        let frozen = frozen(&mut learner);
        damage(rank, &mut learner);
        communicator.take();
        let (mut results, mut first_gradients, mut sent) = (Vec::new(), BTreeMap::new(), Vec::new());
        for number in 0..STEPS {
            if let Some(FixedScales::Frozen(scales)) = self.scales {
                freeze(&mut learner, scales);
                communicator.take();
            }
            results.push(self.step(&mut learner, number));
            sent.push(communicator.take());
            if number == 0 {
                first_gradients = gradients(&mut learner);
            }
        }
        assert!(self::frozen(&mut learner) == frozen, "{self:?}: rank {rank} has changed frozen weights");
        let mut planned_sent = training.sent_bytes(self.micro_steps);
        // Ranks on CPUs exchange what they add, and send before they receive.
        for (planned, called) in [("reduce_scatter", "all_to_all"), ("send_receive", "send")] {
            if let Some(bytes) = planned_sent.remove(planned) {
                *planned_sent.entry(called).or_default() += bytes;
            }
        }
        let sent = (sent, planned_sent);
        let applied = learner.read_state(StateKind::Counter, "applied").expect("a counter");
        let applied = u32::from_le_bytes(applied.try_into().expect("four bytes"));
        let (shared, of_parts, saved, rows) = state(&mut learner);
        let has_grown = learner.spec().capacity != spec.capacity;
        RankRun { results, applied, first_gradients, shared, of_parts, saved, rows, memory, sent, has_grown }
    }

    /// The learner of a rank, whose weights are zeros and whose lanes run in an order by the seed.
    pub(crate) fn learner(&self, communicator: Arc<dyn Communicator>) -> Learner {
        let rank = communicator.rank();
        let order = Philox::new(seed(), self.orders, 1).word(rank as u64);
        learner(self.spec(rank), communicator, order.into())
    }

    /// Runs step `number` on a rank, again with more room if rows of experts do not fit. A step has the same
    /// micro-batches in all worlds of as many.
    pub(crate) fn step(&self, learner: &mut Learner, number: usize) -> StepResult {
        loop {
            let ticket = self.launch(learner, number).expect("a step");
            let result = learner.collect(ticket).expect("outputs");
            let Some(overflow) = result.overflow else { return result };
            learner.grow(overflow).expect("a program with more room");
        }
    }

    /// Launches step `number` on a rank.
    pub(crate) fn launch(&self, learner: &mut Learner, number: usize) -> Result<Ticket, LearnError> {
        let rank = learner.spec().parallel.data_rank().index;
        let batches = self.batches(learner.spec().model.vocab_size, number);
        let counts =
            batches.iter().map(|batch| batch.counts()).fold(TokenCounts::default(), TokenCounts::plus);
        let step = Step { number: number as u64, lr: 1e-3, counts, micro_steps: self.micro_steps };
        for n in 0..self.micro_steps {
            let place = n * self.data_ranks() + rank;
            // Sequences of the global batch take turns.
            let sequences = self.batch().sequences;
            let first = place * sequences;
            let sources: Vec<usize> =
                (first..first + sequences).map(|sequence| sequence % self.sources.max(1)).collect();
            learner.name_sources(&sources)?;
            learner.micro_step(&step, n, &batches[place])?;
        }
        learner.fetch()
    }

    /// The micro-batches of step `number` of all ranks.
    fn batches(&self, vocabulary: usize, number: usize) -> Vec<TokenBatch> {
        let count = self.data_ranks() * self.micro_steps;
        let seeds = (number * count..).take(count);
        let mut batches: Vec<TokenBatch> =
            seeds.map(|seed| random_batch(self.batch(), vocabulary, seed as u64)).collect();
        match self.text {
            Text::Random => {}
            Text::Documents => batches = batches.into_iter().map(in_documents).collect(),
            Text::Equal => {
                let tokens = batches.iter_mut().flat_map(|batch| batch.tokens.iter_mut().enumerate());
                tokens.filter(|(n, _)| n % 10 != 0).for_each(|(_, token)| *token = 3);
            }
            Text::Padding => batches.iter_mut().skip(1).step_by(2).for_each(|batch| {
                batch.targets.fill(IGNORED_TARGET);
                batch.valid_targets = 0;
            }),
        }
        batches
    }
}

/// The learner of a rank, whose weights are zeros and whose lanes run in an order by this seed.
pub(crate) fn learner(spec: TrainingSpec, communicator: Arc<dyn Communicator>, order: u64) -> Learner {
    let mut engine = CpuEngine::new(Arc::new(cpu_kernels())).with_communicator(communicator);
    engine.set_checks(Checks { poison: true, numerics: false });
    engine.set_random_order(order);
    Learner::new(Box::new(engine), spec, 3).expect("a learner")
}

/// Replaces B of adapters, which begins as 0, so that A has gradients in the first step.
pub(crate) fn fill_adapters(learner: &mut Learner) {
    let names = learner.spec().model.parameters().into_iter().filter(ParameterSpec::is_adapter);
    for (n, p) in names.enumerate().filter(|(_, p)| p.init == Init::Zeros) {
        let mut values = vec![0.0; p.shape.iter().product()];
        Philox::new(6, 0, n as u32).fill_normal(0.1, &mut values);
        learner.weights().write_parameter(&p.name, &values).expect("written");
    }
    learner.weights().refresh().expect("refreshed");
}

/// The parameters that are not trained, as they are held.
pub(crate) fn frozen(learner: &mut Learner) -> BTreeMap<String, Vec<u8>> {
    let mut entries = learner.weights().engine().state_entries();
    entries.retain(|entry| entry.kind == StateKind::Frozen);
    let read = |name: String| (name.clone(), learner.read_state(StateKind::Frozen, &name).expect("held"));
    entries.into_iter().map(|entry| entry.name).map(read).collect()
}

/// The sum of the gradients of the last step, by parameter.
fn gradients(learner: &mut Learner) -> BTreeMap<String, Vec<f32>> {
    let mut trained = learner.spec().model.parameters();
    trained.retain(|p| p.is_trained() && learner.layout().has(&p.name));
    let trained = trained.into_iter();
    let names: Vec<String> = trained.map(|p| p.name).collect();
    let mut gradient = |name: String| {
        let is_cut = learner.layout().cut_of(StateKind::Master, &name).is_some();
        let kind = if is_cut { StateKind::ReducedGradient } else { StateKind::Gradient };
        let mut bytes = learner.read_state(kind, &name).expect("a gradient");
        // The rows of the gradient are those of the master.
        let master = learner.read_state(StateKind::Master, &name).expect("a master");
        bytes.truncate(master.len());
        (name, bytemuck::pod_collect_to_vec(&bytes))
    };
    names.into_iter().map(&mut gradient).collect()
}

/// The state that all ranks share, that of parts of matrices, what checkpoints contain, and the rows of the
/// latter that this rank has.
fn state(learner: &mut Learner) -> (State, State, State, BTreeMap<(StateKind, String), HeldRows>) {
    let [mut shared, mut of_parts, mut saved] = [(); 3].map(|()| State::new());
    let mut rows = BTreeMap::new();
    let entries = learner.weights().engine().state_entries();
    for entry in entries {
        let bytes = learner.read_state(entry.kind, &entry.name).expect("state");
        let key = (entry.kind, entry.name.clone());
        let held = learner.layout().held(entry.kind, &entry.name);
        let is_shared = matches!(
            entry.kind,
            StateKind::Master
                | StateKind::Frozen
                | StateKind::Compute
                | StateKind::Gathered
                | StateKind::Moment1
                | StateKind::Moment2
                | StateKind::Counter
                | StateKind::Scale
                | StateKind::AmaxHistory
        );
        // With cut weights, copies are rows too.
        let is_shared = is_shared && (entry.kind != StateKind::Compute || !learner.layout().cuts_weights());
        match learner.layout().twins(entry.kind, &entry.name) {
            Twins::All if is_shared => shared.insert(key.clone(), bytes.clone()),
            Twins::OfPart if is_shared => of_parts.insert(key.clone(), bytes.clone()),
            _ => None,
        };
        if entry.kind.is_saved() {
            saved.insert(key.clone(), bytes);
        }
        rows.extend(held.map(|held| (key, held)));
    }
    (shared, of_parts, saved, rows)
}

/// The pieces of ranks in the order of rows, those that several ranks have once.
///
/// # Panics
/// If these have other bits on some rank.
fn different<'a, T: PartialEq>(
    ranks: impl Iterator<Item = (&'a HeldRows, &'a Vec<T>)>,
) -> Vec<(&'a HeldRows, &'a Vec<T>)> {
    let mut pieces: Vec<_> = ranks.collect();
    pieces.sort_by_key(|(held, _)| (held.rows.start, held.rows.end));
    pieces.dedup_by(|(held, bits), (other, of_other)| {
        let is_same = held.rows == other.rows;
        assert!(!is_same || bits == of_other, "ranks have other bits in their rows {:?}", held.rows);
        is_same
    });
    pieces
}

/// The whole tensors of which each rank has all rows or its own.
pub(crate) fn whole(ranks: &[RankRun]) -> State {
    let assemble = |key: &(StateKind, String)| {
        let holders: Vec<&RankRun> = ranks.iter().filter(|rank| rank.saved.contains_key(key)).collect();
        match holders[0].rows.get(key) {
            None => holders[0].saved[key].clone(),
            Some(_) => {
                let pieces = different(holders.iter().map(|rank| (&rank.rows[key], &rank.saved[key])));
                let covered: usize = pieces.iter().map(|(held, _)| held.rows.len()).sum();
                assert_eq!(covered, pieces[0].0.of, "the rows of {key:?}");
                pieces.into_iter().flat_map(|(_, bytes)| bytes.clone()).collect()
            }
        }
    };
    ranks.iter().flat_map(|rank| rank.saved.keys()).map(|key| (key.clone(), assemble(key))).collect()
}

/// The whole gradients of the first step.
pub(crate) fn whole_gradients(ranks: &[RankRun]) -> BTreeMap<String, Vec<f32>> {
    let assemble = |name: &String| {
        let key = (StateKind::Master, name.clone());
        let holders: Vec<&RankRun> =
            ranks.iter().filter(|rank| rank.first_gradients.contains_key(name)).collect();
        if !holders[0].rows.contains_key(&key) {
            return holders[0].first_gradients[name].clone();
        }
        let pieces = different(holders.iter().map(|rank| (&rank.rows[&key], &rank.first_gradients[name])));
        pieces.into_iter().flat_map(|(_, values)| values.clone()).collect()
    };
    ranks
        .iter()
        .flat_map(|rank| rank.first_gradients.keys())
        .map(|name| (name.clone(), assemble(name)))
        .collect()
}
