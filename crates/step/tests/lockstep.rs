//! Training steps on a GPU and on the CPU in lockstep, of one process and of two ranks. A failure names the
//! step, the op and the output that differs. Without a GPU every test is ignored, and the reason is printed.

mod common;

use common::{
    drawn, in_documents, mixture, random_batch, slice, small_model, spec, use_muon, wide, wide_model,
    with_targets_at,
};
use libtest_mimic::{Arguments, Failed, Trial};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, RwLock};
use std::thread;
use xtrain_cuda::{Arch, CudaDevice, CudaError, Gpu, Installed, Library, NcclId};
use xtrain_distributed::{Communicator, Groups, ThreadCommunicator};
use xtrain_model::decoder::{Balancing, Batch};
use xtrain_model::{Adapter, Architecture, Description, Family, ParameterGroup, Recipe, Targets};
use xtrain_ops::registry::{cpu_kernels, cuda_kernels, ragged_ops};
use xtrain_program::{Instance, Parallel, Program, Reduce, Shard, StateKind, Storage, ValueId};
use xtrain_rank::Rank;
use xtrain_runtime::{
    Checks, CpuEngine, CudaEngine, Engine, EngineError, NcclGroups, Outputs, Part, ProgramId, StateEntry,
    Ticket, Timed, Timing, groups_of_run,
};
use xtrain_step::learner::{Learner, Step};
use xtrain_step::training_spec::TrainingSpec;
use xtrain_tensor::{DType, TensorType};

const BATCH: Batch = Batch { sequences: 2, seq_len: 48 };

/// Held exclusively by tests whose ranks are threads that wait for each other in NCCL: captures of other
/// tests would wait for them, and they for these captures.
static ALONE: RwLock<()> = RwLock::new(());

/// An engine that runs each part on the CPU and on the GPU, compares the values, and copies the CPU's state
/// to the GPU.
struct Lockstep {
    cpu: Box<dyn Engine>,
    gpu: Box<dyn Engine>,
    compared: Compared,
    /// The largest allowed difference of a value, relative to its norm.
    tolerance: f64,
    /// The number of the current step.
    step: Arc<AtomicU64>,
}

/// The values that are compared.
#[derive(Clone, Copy, PartialEq)]
enum Compared {
    /// Every value that an op writes. Each is an output of the program, so that none shares its memory.
    EveryOp,
    /// Outputs and state. Transient values share memory as the plan of a real run has it.
    OutputsAndState,
}

/// The output name of a transient value.
fn output_name(id: ValueId) -> Arc<str> {
    format!("value {}", id.0).into()
}

impl Lockstep {
    fn value(
        engine: &mut dyn Engine,
        outputs: &Outputs,
        program: &Program,
        id: ValueId,
    ) -> Result<Vec<u8>, EngineError> {
        match &program.value(id).storage {
            Storage::Output { name } => Ok(outputs.get(name)?.to_vec()),
            Storage::State { kind, name } => engine.read_state(*kind, name),
            _ => unreachable!("ops write outputs and state"),
        }
    }

    /// Compares the outputs of the part's instances in execution order.
    fn compare(&mut self, id: ProgramId, part: Part) -> Result<(), EngineError> {
        let (cpu_outputs, gpu_outputs) = (self.cpu.outputs(id)?, self.gpu.outputs(id)?);
        let program = self.cpu.program(id).clone();
        for instance in program.instances.iter().filter(|instance| part.runs(instance)) {
            let is_kept = |id| !matches!(program.value(id).storage, Storage::Transient);
            for (n, output) in instance.outputs.iter().enumerate().filter(|(_, output)| is_kept(output.value))
            {
                let expected = Lockstep::value(&mut *self.cpu, &cpu_outputs, &program, output.value)?;
                let found = Lockstep::value(&mut *self.gpu, &gpu_outputs, &program, output.value)?;
                let is_undefined = ragged_ops().leaves_undefined(instance.code.op(), n);
                let error = difference(program.ty(output.value), &found, &expected, is_undefined);
                assert!(error <= self.tolerance, "{}", self.message(instance, part, n, error));
            }
        }
        Ok(())
    }

    fn message(&self, instance: &Instance, part: Part, output: usize, error: f64) -> String {
        format!(
            "step {}, {part:?}: {} at {} ({}): output {output} differs from the CPU's by {error:e}",
            self.step.load(Ordering::Relaxed),
            instance.code.op().name(),
            instance.origin,
            instance.origin.role.name()
        )
    }

    /// Copies the CPU's state to the GPU, so that rounding differences do not accumulate over steps.
    fn copy_state_to_gpu(&mut self) -> Result<(), EngineError> {
        for StateEntry { kind, name, .. } in self.cpu.state_entries() {
            self.gpu.write_state(kind, &name, &self.cpu.read_state(kind, &name)?)?;
        }
        Ok(())
    }
}

/// The norm of the difference relative to the norm of `expected`. Quantised values are compared without their
/// scales, which may differ by a power of two if an amax is rounded differently; so may scales. If a part is
/// undefined, it is where the CPU leaves NaNs.
fn difference(ty: TensorType, found: &[u8], expected: &[u8], is_part_undefined: bool) -> f64 {
    if found == expected {
        return 0.0;
    }
    let [found, expected] = [found, expected].map(|bytes| {
        // `decode` needs bytes that are aligned for the element type.
        let mut words = vec![0u64; bytes.len().div_ceil(8)];
        let aligned = &mut bytemuck::cast_slice_mut(&mut words)[..bytes.len()];
        aligned.copy_from_slice(bytes);
        xtrain_tensor::host::decode(ty, aligned)
    });
    let is_defined = |(_, b): &(&f64, &f64)| !(is_part_undefined && b.is_nan());
    let both = found.iter().zip(&expected).filter(is_defined);
    let (found, expected): (Vec<f64>, Vec<f64>) = both.map(|(a, b)| (*a, *b)).unzip();
    // Other powers of two, such as a clipping coefficient of 1, are compared as they are.
    let is_matrix = ty.shape.len() == 2 && ty.numel() > 1;
    let is_power_of_two = |x: &f64| x.to_bits().trailing_zeros() >= 52;
    let scales: &[f64] = match ty.dtype {
        DType::E4M3 | DType::E5M2 | DType::E5M6 => &[0.5, 1.0, 2.0],
        DType::F32 if is_matrix && expected.iter().all(is_power_of_two) => &[0.5, 1.0, 2.0],
        _ => &[1.0],
    };
    let distance =
        |(a, b): (&f64, &f64)| scales.iter().map(|s| (a - s * b).abs()).fold(f64::INFINITY, f64::min);
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let off = norm(&mut found.iter().zip(&expected).map(distance));
    let error = off / norm(&mut expected.iter().copied()).max(1e-20);
    if error.is_nan() { f64::INFINITY } else { error }
}

impl Engine for Lockstep {
    fn load(&mut self, mut program: Program) -> Result<ProgramId, EngineError> {
        for (n, value) in program.values.iter_mut().enumerate() {
            if self.compared == Compared::EveryOp && matches!(value.storage, Storage::Transient) {
                value.storage = Storage::Output { name: output_name(ValueId(n as u32)) };
            }
        }
        let id = self.cpu.load(program.clone())?;
        assert_eq!(self.gpu.load(program)?, id);
        Ok(id)
    }

    fn write_input(&mut self, program: ProgramId, name: &str, bytes: &[u8]) -> Result<(), EngineError> {
        self.cpu.write_input(program, name, bytes)?;
        self.gpu.write_input(program, name, bytes)
    }

    fn run(&mut self, program: ProgramId, part: Part) -> Result<(), EngineError> {
        self.cpu.run(program, part)?;
        self.gpu.run(program, part)?;
        self.compare(program, part)?;
        self.copy_state_to_gpu()
    }

    fn fetch(&mut self, program: ProgramId) -> Result<Ticket, EngineError> {
        self.gpu.fetch(program)
    }

    fn is_ready(&self, ticket: &Ticket) -> Result<bool, EngineError> {
        self.gpu.is_ready(ticket)
    }

    fn collect(&mut self, ticket: Ticket) -> Result<Outputs, EngineError> {
        self.gpu.collect(ticket)
    }

    fn state_entries(&self) -> Vec<StateEntry> {
        self.gpu.state_entries()
    }

    fn read_state(&mut self, kind: StateKind, name: &str) -> Result<Vec<u8>, EngineError> {
        self.gpu.read_state(kind, name)
    }

    fn read_state_part(
        &mut self,
        kind: StateKind,
        name: &str,
        part: Range<usize>,
    ) -> Result<Vec<u8>, EngineError> {
        self.gpu.read_state_part(kind, name, part)
    }

    fn copy_state(&mut self, entries: &[StateEntry], targets: &mut [&mut [u8]]) -> Result<(), EngineError> {
        self.gpu.copy_state(entries, targets)
    }

    fn write_state(&mut self, kind: StateKind, name: &str, bytes: &[u8]) -> Result<(), EngineError> {
        self.cpu.write_state(kind, name, bytes)?;
        self.gpu.write_state(kind, name, bytes)
    }

    fn memory_bytes(&self) -> usize {
        self.gpu.memory_bytes()
    }

    fn program(&self, id: ProgramId) -> &Program {
        self.gpu.program(id)
    }

    fn set_timing(&mut self, timing: Timing) -> Result<(), EngineError> {
        self.gpu.set_timing(timing)
    }

    fn take_times(&mut self) -> Result<Vec<Timed>, EngineError> {
        self.gpu.take_times()
    }

    fn free_bytes(&self) -> Option<u64> {
        self.gpu.free_bytes()
    }

    fn busy_rows(&self) -> usize {
        self.gpu.busy_rows()
    }

    fn memory_bandwidth(&self) -> Option<f64> {
        self.gpu.memory_bandwidth()
    }

    fn choices(&self) -> BTreeMap<String, String> {
        self.gpu.choices()
    }
}

/// Micro-batches of a rank in a step.
const MICRO_STEPS: usize = 2;

/// Training steps to compare.
#[derive(Clone)]
struct Steps {
    spec: TrainingSpec,
    compared: Compared,
    tolerance: f64,
    path: Path,
}

/// The path on which the GPUs of ranks exchange data.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Path {
    /// The host. All ranks use one GPU.
    Host,
    /// NCCL; each rank has a GPU of its own, as for copies.
    Nccl,
    /// Copies to each other's memory.
    Copies,
}

impl Steps {
    /// Runs four steps. Several ranks are threads, whose CPU engines exchange data with each other, and so do
    /// their GPU engines.
    fn run(&self) -> Result<(), Failed> {
        let ranks = self.spec.parallel.rank.world_size;
        let [cpus, gpus] = [(); 2].map(|()| ThreadCommunicator::world(ranks));
        let kinds = groups_of_run(&self.spec.parallel);
        // An id by rank for each kind of groups, which use those of their first ranks.
        let ids = |_: &Groups| (0..ranks).map(|_| NcclId::new()).collect::<Result<Vec<_>, CudaError>>();
        let ids: Vec<_> =
            kinds.iter().filter(|_| self.path == Path::Nccl).map(ids).collect::<Result<_, _>>()?;
        let nccl = (self.path == Path::Nccl).then_some((kinds.as_slice(), ids.as_slice()));
        thread::scope(|scope| {
            let spawn = |communicators: (ThreadCommunicator, ThreadCommunicator)| {
                scope.spawn(move || self.run_rank(communicators, nccl))
            };
            let handles: Vec<_> = cpus.into_iter().zip(gpus).map(spawn).collect();
            // Joins all before it returns an error: that of a rank may follow from that of another.
            let results: Vec<_> =
                handles.into_iter().map(|handle| handle.join().expect("a rank that compares")).collect();
            results.into_iter().collect()
        })
    }

    /// Runs the steps of a rank. If outputs and state are compared, the GPU runs each part op by op, then
    /// records it as a graph, and then replays the graph; if every op is compared, and if several ranks
    /// exchange through the host, it runs op by op.
    fn run_rank(
        &self,
        (cpus, gpus): (ThreadCommunicator, ThreadCommunicator),
        nccl: Option<(&[Groups], &[Vec<NcclId>])>,
    ) -> Result<(), Failed> {
        let (ranks, rank) = (cpus.world_size(), cpus.rank());
        let parallel = Parallel { rank: self.spec.parallel.rank.with_index(rank), ..self.spec.parallel };
        let spec = TrainingSpec { parallel, ..self.spec.clone() };
        let Steps { compared, tolerance, .. } = *self;
        let mut cpu = CpuEngine::new(Arc::new(cpu_kernels()));
        cpu.set_checks(Checks { poison: compared == Compared::EveryOp, numerics: false });
        let device = Gpu::open(if self.path == Path::Host { 0 } else { rank })?;
        let join = |(kinds, ids): (&[Groups], &[Vec<NcclId>])| {
            let first = |groups: &Groups| groups.ranks(rank).next().expect("a group has ranks");
            let ids: Vec<NcclId> = kinds.iter().zip(ids).map(|(groups, ids)| ids[first(groups)]).collect();
            NcclGroups::join(device.context(), rank, kinds, &ids, &|| Ok::<_, CudaError>(()))
        };
        let nccl = nccl.map(join).transpose()?;
        let mut gpu = CudaEngine::new(Arc::new(cuda_kernels()), device)?;
        // Poisoned outputs and workspaces turn reads of unwritten memory into NaNs. Graphs are recorded
        // without poison only.
        gpu.set_checks(Checks { poison: compared == Compared::EveryOp, numerics: false });
        if ranks > 1 {
            let gpus = Arc::new(gpus);
            cpu = cpu.with_communicator(Arc::new(cpus));
            gpu = match nccl {
                Some(nccl) => gpu.with_nccl(nccl, gpus)?,
                None if self.path == Path::Copies => gpu.with_peer_copies(gpus, false)?,
                None => gpu.with_communicator(gpus),
            };
        }
        let step = Arc::new(AtomicU64::new(0));
        let (cpu, gpu) = (Box::new(cpu), Box::new(gpu));
        let engine = Lockstep { cpu, gpu, compared, tolerance, step: step.clone() };
        let mut learner = Learner::new(Box::new(engine), spec.clone(), 11)?;
        learner.weights().initialize(5, 0.1)?;
        if spec.recipe != Recipe::Fp32 {
            for p in spec.model.parameters().iter().filter(|p| p.group == ParameterGroup::RouterBias) {
                let biases: Vec<f32> = (0..p.shape[0]).map(|expert| (expert * 5 % 8) as f32 * 10.0).collect();
                learner.weights().write_parameter(&p.name, &biases)?;
            }
        }
        for number in 0..4 {
            step.store(number, Ordering::Relaxed);
            let all = Batch { sequences: ranks * MICRO_STEPS * BATCH.sequences, ..BATCH };
            // The head computes all tokens in the first step, then about 1/2, 1/3 and 1/4 of them.
            let batch = random_batch(all, spec.model.vocab_size, number);
            let batch = with_targets_at(batch, |token| token % (number as usize + 1) == 0);
            let batch = if spec.document_mask { in_documents(batch) } else { batch };
            let step = Step { number, lr: 1e-2, counts: batch.counts(), micro_steps: MICRO_STEPS };
            for n in 0..MICRO_STEPS {
                let first = (n * ranks + rank) * BATCH.sequences;
                learner.micro_step(&step, n, &slice(&batch, first, BATCH.sequences))?;
            }
            let ticket = learner.fetch()?;
            learner.collect(ticket)?;
        }
        Ok(())
    }
}

/// Steps of one process: every op of them, or their outputs and state. In the last of them the process
/// computes for both ranks of a tensor group.
fn alone(recipe: Recipe, compared: Compared, tolerance: f64) -> Vec<Steps> {
    let any_mesh = Parallel { reduce: Reduce::AnyMesh, tree_micro_steps: MICRO_STEPS, ..Parallel::ALONE };
    let models = [
        (small_model(), true, Parallel::ALONE),
        (wide_model(), false, Parallel::ALONE),
        (wide_model(), true, Parallel::ALONE),
        (wide_model(), true, any_mesh),
    ];
    let steps = |(model, document_mask, parallel)| {
        let spec = TrainingSpec { recipe, document_mask, parallel, ..spec(model, BATCH) };
        Steps { spec, compared, tolerance, path: Path::Host }
    };
    models.into_iter().map(steps).collect()
}

/// Steps of one process and of two ranks with Muon.
fn with_muon() -> Vec<Steps> {
    let cut = Parallel { rank: Rank::first_of(2), shard: Shard::Optimizer, ..Parallel::ALONE };
    let steps = |(parallel, compared)| {
        let mut spec = TrainingSpec { recipe: Recipe::Bf16, parallel, ..spec(wide_model(), BATCH) };
        use_muon(&mut spec);
        // A small singular value of a small matrix is off by more than bf16's rounding.
        Steps { spec, compared, tolerance: 0.15, path: Path::Host }
    };
    [(Parallel::ALONE, Compared::EveryOp), (cut, Compared::EveryOp), (cut, Compared::OutputsAndState)]
        .map(steps)
        .into()
}

/// Steps of one process and of two ranks that train adapters with dropout.
fn with_adapters(recipe: Recipe, tolerance: f64) -> Vec<Steps> {
    let cut = Parallel { rank: Rank::first_of(2), shard: Shard::Gradients, ..Parallel::ALONE };
    let adapter = Adapter { rank: 8, alpha: 16.0, dropout: 0.1, targets: Targets::AllLinear };
    let steps = |(parallel, compared)| {
        let model = Architecture { adapter: Some(adapter.clone()), ..wide_model() };
        let spec = TrainingSpec { recipe, parallel, ..spec(model, BATCH) };
        Steps { spec, compared, tolerance, path: Path::Host }
    };
    [
        (Parallel::ALONE, Compared::EveryOp),
        (Parallel::ALONE, Compared::OutputsAndState),
        (cut, Compared::EveryOp),
    ]
    .map(steps)
    .into()
}

/// Steps of mixtures with 2 of 8 experts. But in fp32, rounding differences would choose other experts on the
/// GPU than on the CPU, so large biases choose the same ones for all tokens ([`Steps::run_rank`]). Each with
/// and without documents; with them, tokens are cast before they are permuted, if the recipe can.
fn of_mixtures(recipe: Recipe, compared: Compared, tolerance: f64) -> Vec<Steps> {
    let families = ["mixtral", "qwen3_moe", "dots1"].map(|name| Family::named(name).expect("a family"));
    let is_biased = |family: &Family| family.router().is_some_and(|router| router.biased);
    let steps = |(family, document_mask): (Family, bool)| {
        let bias_rate = is_biased(&family).then_some(1e-3);
        let balancing = Balancing { loss_weight: 0.01, z_weight: 1e-3, bias_rate };
        // Outputs of experts are whole blocks under `fp8-block`.
        let sizes = Description { dim: 128, ffn_dim: 64, ..wide() };
        let spec = mixture(family, sizes, [8, 2], BATCH, balancing);
        let mut spec = TrainingSpec { recipe, document_mask, ..spec };
        spec.fp8.wire = document_mask && matches!(recipe, Recipe::Fp8Block | Recipe::Fp8Delayed);
        Steps { spec, compared, tolerance, path: Path::Host }
    };
    let families = families.into_iter().filter(|family| recipe == Recipe::Fp32 || is_biased(family));
    families.flat_map(|family| [(family, false), (family, true)]).map(steps).collect()
}

/// Steps of two ranks, in each way to cut state and in each order of sums, and of four as two replicas.
fn of_ranks(recipe: Recipe, tolerance: f64) -> Vec<Steps> {
    let mut all = Vec::new();
    let shards = [Shard::None, Shard::Optimizer, Shard::Gradients, Shard::Weights];
    // Without prefetching, all blocks use one slot.
    let of_two = shards.map(|shard| (2, 1, shard, 1)).into_iter().chain([(2, 1, Shard::Weights, 0)]);
    let replicas = [(2, 2, Shard::None, 1), (4, 2, Shard::Weights, 1)];
    for (world_size, replicas, shard, prefetch_blocks) in of_two.chain(replicas) {
        for reduce in [Reduce::SameWorld, Reduce::AnyWorld, Reduce::Fast] {
            for compared in [Compared::EveryOp, Compared::OutputsAndState] {
                let parallel = Parallel {
                    rank: Rank::first_of(world_size),
                    replicas,
                    shard,
                    reduce,
                    prefetch_blocks,
                    tree_micro_steps: if reduce.is_any_world() { MICRO_STEPS } else { 1 },
                    ..Parallel::ALONE
                };
                let spec = TrainingSpec { recipe, parallel, ..spec(wide_model(), BATCH) };
                all.push(Steps { spec, compared, tolerance, path: Path::Host });
            }
        }
    }
    all
}

fn main() {
    let arguments = Arguments::from_args();
    let arch = match Gpu::open(0) {
        Ok(gpu) => Some(gpu.info().arch),
        Err(error @ (CudaError::Missing(_) | CudaError::NoDevice)) => {
            eprintln!("no GPU: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    };
    let gpus = CudaDevice::all().map_or(0, |gpus| gpus.len());
    let has_nccl = gpus >= 2 && Installed::open(Library::Nccl).is_ok();
    let mut tests = Vec::new();
    for recipe in Recipe::ALL {
        // Rounding differences accumulate over the ops of a step.
        let (needed, tolerance) = match recipe {
            Recipe::Fp32 => (Arch::SM80, 1e-3),
            Recipe::Bf16 => (Arch::SM80, 5e-2),
            Recipe::Fp8Delayed | Recipe::Fp8Current => (Arch::SM89, 0.3),
            Recipe::Fp8Row | Recipe::Fp8Block => (Arch::SM90, 0.3),
        };
        let has_kernels = arch.is_some_and(|arch| arch >= needed);
        let mut add = |what: &str, runs: bool, all: Vec<Steps>| {
            let name = format!("{what}_the_cpu_in_{}", recipe.name().replace('-', "_"));
            let test = move || {
                let steps = drawn(all.clone(), 1);
                let is_alone = steps.iter().any(|steps| steps.path != Path::Host);
                let _alone = is_alone.then(|| ALONE.write());
                let _beside_others = (!is_alone).then(|| ALONE.read());
                steps.iter().try_for_each(Steps::run)
            };
            tests.push(Trial::test(name, test).with_ignored_flag(!runs));
        };
        add("every_op_matches", has_kernels, alone(recipe, Compared::EveryOp, tolerance));
        add("outputs_and_state_match", has_kernels, alone(recipe, Compared::OutputsAndState, tolerance));
        let of_mixtures = |compared| of_mixtures(recipe, compared, tolerance);
        add("every_op_of_mixtures_matches", has_kernels, of_mixtures(Compared::EveryOp));
        let of_mixtures = of_mixtures(Compared::OutputsAndState);
        add("outputs_and_state_of_mixtures_match", has_kernels, of_mixtures);
        add("every_op_with_adapters_matches", has_kernels, with_adapters(recipe, tolerance));
        if recipe == Recipe::Bf16 {
            add("every_op_with_muon_matches", has_kernels, with_muon());
        }
        // Each recipe of FP8 casts and gathers weights in a way of its own.
        if recipe != Recipe::Fp32 {
            let of_ranks = of_ranks(recipe, tolerance);
            let on_path = |path: Path| {
                let of_ranks = of_ranks.iter().filter(|steps| steps.spec.parallel.rank.world_size <= gpus);
                // Copies add nothing.
                let has_sums =
                    |steps: &&Steps| path == Path::Nccl || steps.spec.parallel.reduce != Reduce::Fast;
                of_ranks.filter(has_sums).map(|steps| Steps { path, ..steps.clone() }).collect::<Vec<_>>()
            };
            let (by_nccl, by_copies) = (on_path(Path::Nccl), on_path(Path::Copies));
            add("several_ranks_match", has_kernels, of_ranks);
            add("several_ranks_by_nccl_match", has_kernels && has_nccl, by_nccl);
            add("several_ranks_by_copies_match", has_kernels && gpus >= 2, by_copies);
        }
    }
    libtest_mimic::run(&arguments, tests).exit();
}
