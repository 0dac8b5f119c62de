//! Work that a graph leaves out: the head computes only rows of tokens with a target.

use libtest_mimic::Failed;
use std::sync::Arc;
use xtrain_cuda::{CudaKernel, CudaOutput, CudaTensor, DeviceMemory, Gpu, Operands, Stream};
use xtrain_ops::linear_cross_entropy::{IGNORED, LinearCrossEntropy, LinearCrossEntropyGrad, Terms};
use xtrain_ops::registry::{cpu_kernels, cuda_kernels};
use xtrain_program::{Op, Program, Tracer};
use xtrain_runtime::{Checks, CpuEngine, CudaEngine, Engine, EngineError, Outputs, Part};
use xtrain_tensor::{DType, HostTensor, Philox, TensorType};

/// Tokens, width, vocabulary. The rows have five sizes and are computed in chunks of two.
const EXTENTS: (usize, usize, usize) = (300, 16, 40);

/// The numbers of tokens with a target of consecutive runs: all, none, one, whole chunks, and one more.
const TRAINED: [usize; 16] = [300, 120, 0, 1, 64, 65, 300, 128, 129, 0, 192, 193, 256, 257, 299, 40];

/// The head.
const HEAD: LinearCrossEntropyGrad = LinearCrossEntropyGrad {
    loss: LinearCrossEntropy { chunk_tokens: 150, z_loss: 0.01, terms: Terms::Losses },
    dx: true,
    dw: Some(DType::F32),
};

/// The names and types of its inputs.
fn inputs(dtype: DType) -> [(&'static str, TensorType); 4] {
    let (t, d, v) = EXTENTS;
    [
        ("x", TensorType::new(dtype, [t, d])),
        ("w", TensorType::new(dtype, [v, d])),
        ("targets", TensorType::new(DType::I32, [t])),
        ("inv_targets", TensorType::new(DType::F32, [])),
    ]
}

/// The types of the outputs, named by number, and the program of the head with them.
fn head(dtype: DType) -> (Program, Vec<TensorType>) {
    let mut tracer = Tracer::default();
    let inputs = inputs(dtype).map(|(name, ty)| tracer.input(name, ty));
    let outputs = tracer.site("head").emit(HEAD, &inputs).expect("the operands fit");
    let types = outputs.iter().map(|&o| tracer.ty(o)).collect();
    outputs.iter().enumerate().for_each(|(k, &o)| tracer.output(&format!("out{k}"), o));
    (tracer.finish(), types)
}

fn normal(dtype: DType, shape: [usize; 2], std: f32, seed: u64) -> HostTensor {
    let ty = TensorType::new(dtype, shape);
    let mut x = vec![0.0; ty.numel()];
    Philox::new(seed, 0, 0).fill_normal(std, &mut x);
    HostTensor::from_f64(ty, &x.into_iter().map(f64::from).collect::<Vec<_>>())
}

/// Targets of which so many, at random places, are not ignored.
fn targets(trained: usize, seed: u64) -> Vec<i32> {
    let rng = Philox::new(seed, 1, 0);
    let mut order: Vec<usize> = (0..EXTENTS.0).collect();
    order.sort_by_key(|&token| rng.word(token as u64));
    let mut targets = vec![IGNORED; EXTENTS.0];
    for &token in &order[..trained] {
        targets[token] = (token % EXTENTS.2) as i32;
    }
    targets
}

/// Outputs of runs with these numbers of targets; all runs are enqueued before the first is waited for.
fn run(engine: &mut dyn Engine, dtype: DType, seed: u64) -> Result<Vec<Outputs>, EngineError> {
    let (t, d, v) = EXTENTS;
    let id = engine.load(head(dtype).0)?;
    engine.write_input(id, "w", normal(dtype, [v, d], 0.3, seed).bytes())?;
    let mut tickets = Vec::new();
    for (n, &trained) in TRAINED.iter().enumerate() {
        engine.write_input(id, "x", normal(dtype, [t, d], 1.0, seed + 1 + n as u64).bytes())?;
        engine.write_input(id, "targets", bytemuck::cast_slice(&targets(trained, seed + n as u64)))?;
        engine.write_input(id, "inv_targets", &(1.0 / trained as f32).to_le_bytes())?;
        engine.run(id, if n % 3 == 0 { Part::First } else { Part::Next })?;
        tickets.push(engine.fetch(id)?);
    }
    tickets.into_iter().map(|ticket| engine.collect(ticket)).collect()
}

fn relative(a: &[f64], b: &[f64]) -> f64 {
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|v| v * v).sum::<f64>().sqrt();
    norm(&mut a.iter().zip(b).map(|(x, y)| x - y)) / norm(&mut b.iter().copied()).max(1e-30)
}

/// Graphs give the bits of ops that run one by one, and both the results of the CPU, for any targets.
pub(crate) fn the_head_computes_rows_with_a_target() -> Result<(), Failed> {
    for (dtype, bar) in [(DType::F32, 1e-5), (DType::BF16, 2e-2)] {
        let seed = crate::common::seed();
        let card = || Ok::<_, Failed>(CudaEngine::new(Arc::new(cuda_kernels()), Gpu::open(0)?)?);
        let (mut graphs, mut ops) = (card()?, card()?);
        ops.set_checks(Checks { numerics: false, poison: true });
        let mut cpu = CpuEngine::new(Arc::new(cpu_kernels()));
        let graphs = run(&mut graphs, dtype, seed)?;
        let (ops, cpu) = (run(&mut ops, dtype, seed)?, run(&mut cpu, dtype, seed)?);
        for (k, ty) in head(dtype).1.into_iter().enumerate() {
            let values = |of: &Outputs| -> Result<(Vec<u8>, Vec<f64>), EngineError> {
                let mut tensor = HostTensor::zeros(ty);
                tensor.bytes_mut().copy_from_slice(of.get(&format!("out{k}"))?);
                Ok((tensor.bytes().to_vec(), tensor.to_f64()))
            };
            for (n, trained) in TRAINED.iter().enumerate() {
                let what = format!("output {k} ({ty}) of run {n}, {trained} targets, seed {seed}");
                let (graph, op, cpu) = (values(&graphs[n])?, values(&ops[n])?, values(&cpu[n])?);
                assert!(graph.0 == op.0, "{what}: the graph has other bits than its ops");
                let error = relative(&op.1, &cpu.1);
                assert!(error <= bar, "{what}: off by {error:e}");
            }
        }
    }
    Ok(())
}

/// Variants of the work, each of which computes the loss, dx and dw of the same targets: those that compute
/// more rows than needed give the results of the one that is chosen. Those that compute fewer give a loss
/// that is NaN.
pub(crate) fn more_rows_than_needed_change_nothing() -> Result<(), Failed> {
    let (dtype, trained, seed) = (DType::BF16, 100, crate::common::seed());
    let (t, d, v) = EXTENTS;
    let gpu = Gpu::open(0)?;
    let stream = Stream::new(gpu.context())?;
    let memory = |ty: TensorType| -> Result<_, Failed> {
        let memory = DeviceMemory::new(gpu.context(), ty.bytes())?;
        memory.all().fill(0, &stream)?;
        Ok((ty, memory))
    };
    let targets = targets(trained, seed);
    let contents = [
        normal(dtype, [t, d], 1.0, seed).bytes().to_vec(),
        normal(dtype, [v, d], 0.3, seed + 1).bytes().to_vec(),
        bytemuck::cast_slice(&targets).to_vec(),
        (1.0 / trained as f32).to_le_bytes().to_vec(),
    ];
    let types = inputs(dtype).map(|(_, ty)| ty);
    let all = |types: Vec<TensorType>| types.into_iter().map(memory).collect::<Result<Vec<_>, _>>();
    let (inputs, outputs) = (all(types.to_vec())?, all(HEAD.infer(&types).expect("the operands fit"))?);
    let workspace = all(CudaKernel::workspace(&HEAD, &types))?;
    for ((_, memory), content) in inputs.iter().zip(&contents) {
        memory.all().write(content, &stream)?;
    }
    // Preparing runs GEMMs on another stream.
    stream.synchronize()?;
    let tensor = |(ty, memory): &(TensorType, DeviceMemory)| CudaTensor { ty: *ty, place: memory.pointer() };
    let output = |of| {
        let CudaTensor { ty, place } = tensor(of);
        CudaOutput { ty, place, accumulate: false }
    };
    let work = HEAD.prepare(
        &gpu,
        &Operands {
            inputs: &inputs.iter().map(tensor).collect::<Vec<_>>(),
            outputs: &outputs.iter().map(output).collect::<Vec<_>>(),
            workspace: &workspace.iter().map(tensor).collect::<Vec<_>>(),
        },
    )?;
    let run = |variant: usize| -> Result<Vec<Vec<f64>>, Failed> {
        work.enqueue_variant(variant, &stream)?;
        let read = |(ty, memory): &(TensorType, DeviceMemory)| {
            let mut tensor = HostTensor::zeros(*ty);
            tensor.bytes_mut().copy_from_slice(&memory.all().read(&stream)?);
            Ok(tensor.to_f64())
        };
        outputs.iter().map(read).collect()
    };
    let chosen = HEAD.variant(&types, bytemuck::cast_slice(&targets));
    assert_eq!(chosen, 3, "variants 1 to 5 compute 0, 64, 128, 192 and 256 rows");
    let expected = run(chosen)?;
    for variant in 0..=5 {
        let found = run(variant)?;
        if (1..chosen).contains(&variant) {
            assert!(found[0][0].is_nan() && found[1][0].is_nan(), "variant {variant} lacks rows");
            continue;
        }
        for (k, (found, expected)) in found.iter().zip(&expected).enumerate() {
            // The sizes of chunks change the order in which dw is summed.
            let error = relative(found, expected);
            assert!(error <= 1e-5, "output {k} of variant {variant} is off by {error:e}");
        }
    }
    Ok(())
}
