//! Fused casts equal, to the bit, separate casts of the producer's output; so do casts with an amax that the
//! producer emits. On the CPU and, if there is one, on a GPU.

mod common;

use libtest_mimic::{Arguments, Failed, Trial};
use std::sync::Arc;
use xtrain_cuda::Gpu;
use xtrain_ops::adamw::{AdamW, AdamWParameter};
use xtrain_ops::permute::Permute;
use xtrain_ops::qk_norm_rope::QkNormRopeGrad;
use xtrain_ops::quantize::{Dequantize, Given, Layouts, Quantize};
use xtrain_ops::registry::{cpu_kernels, cuda_kernels};
use xtrain_ops::rewrites;
use xtrain_ops::rms_norm::{AddRmsNorm, ExtraOutput, RmsNorm, RmsNormGrad};
use xtrain_ops::swiglu::{Swiglu, SwigluGrad};
use xtrain_ops::swiglu_saving::SwigluSaving;
use xtrain_program::{Code, Op, Program, Tail, Tracer, fuse};
use xtrain_runtime::{CpuEngine, CudaEngine, Engine, Part};
use xtrain_tensor::{DType, HostTensor, Philox, Scaling, Shape, TILE, TensorType};

/// An input: its type and its contents.
type TestInput = (TensorType, Values);

/// Inputs for these rows and columns, with activations of this type.
type Inputs = fn(usize, usize, DType) -> Vec<TestInput>;

/// The contents of an input.
#[derive(Clone, Copy)]
enum Values {
    /// Normal numbers.
    Normal,
    /// Magnitudes of normal numbers.
    Magnitudes,
    /// One number everywhere.
    All(f64),
    /// Positions 0, 1, 2, ... modulo this.
    Positions(usize),
    /// For each of so many rows, the copy of a token that it holds, or -1.
    Sources(usize),
    /// The rows of these copies.
    RowsOfCopies(usize),
    /// 0 and this end.
    Starts(usize),
}

impl Values {
    /// `count` values for input `n` in micro-step `step`. Long inputs repeat the first million. The first
    /// micro-step has the largest values, so that a stale amax would be noticed.
    fn fill(self, count: usize, seed: u64, step: u32, n: u32) -> Vec<f64> {
        let mut x = vec![0.0; count.min(1_000_003)];
        Philox::new(seed, step, n).fill_normal(if step == 0 { 6.0 } else { 2.0 }, &mut x);
        let x: Vec<f32> = x.into_iter().cycle().take(count).collect();
        let value = |(i, x): (usize, f32)| match self {
            Values::Normal => x.into(),
            Values::Magnitudes => x.abs().into(),
            Values::All(x) => x,
            Values::Positions(period) => (i % period) as f64,
            Values::Starts(end) => (i * end) as f64,
            Values::Sources(rows) => copy_in(i, rows).map_or(-1.0, |copy| copy as f64),
            Values::RowsOfCopies(rows) => {
                let row = rows.checked_sub(i + 1);
                row.filter(|row| copy_in(*row, rows) == Some(i)).map_or(-1.0, |row| row as f64)
            }
        };
        x.into_iter().enumerate().map(value).collect()
    }
}

/// The copy in a row, in a routing with empty rows, tokens without a row and tokens with one row of two.
fn copy_in(row: usize, rows: usize) -> Option<usize> {
    (row % 6 < 4).then(|| rows - 1 - row)
}

/// A normal input of this type and shape.
fn normal(dtype: DType, shape: &[usize]) -> TestInput {
    (TensorType { dtype, shape: Shape::new(shape) }, Values::Normal)
}

/// The weights of rows of one expert, and its first row and end.
fn weights_and_starts(rows: usize) -> Vec<TestInput> {
    vec![normal(DType::F32, &[rows]), (TensorType::new(DType::I32, [2]), Values::Starts(rows))]
}

/// An op whose output is cast.
struct Producer {
    op: Arc<dyn Op>,
    inputs: Inputs,
    /// The output that is cast.
    output: usize,
    /// The input that is saved in FP8 and restored.
    restored: Option<usize>,
    /// True if only the amax is fused into it, not the cast.
    fuses_amax: bool,
}

fn producers() -> Vec<Producer> {
    let producer = |op, inputs, output| Producer { op, inputs, output, restored: None, fuses_amax: false };
    let dx = RmsNormGrad { out: DType::F32, extra: ExtraOutput::None };
    let eps = 1e-5;
    let gate_up: Inputs = |t, d, ty| vec![normal(ty, &[t, 2 * d])];
    let both: Inputs = |t, d, ty| vec![normal(ty, &[t, d]), normal(ty, &[t, 2 * d])];
    let weighted: Inputs = |t, d, ty| [vec![normal(ty, &[t, 2 * d])], weights_and_starts(t)].concat();
    let weighted_both: Inputs =
        |t, d, ty| [vec![normal(ty, &[t, d]), normal(ty, &[t, 2 * d])], weights_and_starts(t)].concat();
    let parameter = AdamWParameter { weight_decay: 0.1, compute: None, first_element: 0 };
    let adamw = AdamW::new(vec![parameter; 2], [0.9, 0.95], 1e-8, 7);
    let with_amax =
        |op: Arc<dyn Op>, inputs, output| Producer { fuses_amax: true, ..producer(op, inputs, output) };
    let mut all = Vec::new();
    for (weighted, inputs, of_grad) in [(false, gate_up, both), (true, weighted, weighted_both)] {
        let swiglu = || producer(Arc::new(Swiglu { weighted, ..Swiglu::PLAIN }), inputs, 0);
        let grad = || producer(Arc::new(SwigluGrad { weighted, ..SwigluGrad::PLAIN }), of_grad, 0);
        let restored = |input, of: Producer| Producer { restored: Some(input), ..of };
        let saving = producer(Arc::new(SwigluSaving { weighted, tail: Tail::Zeros }), inputs, 0);
        all.extend([restored(0, swiglu()), restored(1, grad()), swiglu(), grad(), saving]);
    }
    all.extend([
        producer(
            Arc::new(Permute::default()),
            |t, d, ty| {
                let (tokens, i32) = (t.div_ceil(2), |shape: &[usize]| normal(DType::I32, shape).0);
                let sources = (i32(&[t]), Values::Sources(t));
                vec![normal(ty, &[tokens, d]), sources, (i32(&[tokens, 2]), Values::RowsOfCopies(t))]
            },
            0,
        ),
        producer(
            Arc::new(RmsNorm { eps }),
            |t, d, ty| vec![normal(ty, &[t, d]), normal(DType::F32, &[d])],
            0,
        ),
        norm_of_sum(),
        with_amax(
            Arc::new(dx),
            |t, d, ty| {
                let activation = normal(ty, &[t, d]);
                vec![activation, activation, normal(DType::F32, &[t]), normal(DType::F32, &[d]), activation]
            },
            0,
        ),
        // The second parameter's master.
        with_amax(
            Arc::new(adamw),
            |t, d, moments| {
                let scalar = |dtype, x| (TensorType::new(dtype, []), Values::All(x));
                let mut inputs = vec![scalar(DType::F32, 0.02), scalar(DType::F32, 0.75)];
                inputs.push((TensorType::new(DType::U32, [1]), Values::All(3.0)));
                inputs.push(scalar(DType::U32, 0.0));
                for shape in [[3, 5], [t, d]] {
                    let (m, f32) = (normal(moments, &shape), normal(DType::F32, &shape));
                    inputs.extend([f32, m, (m.0, Values::Magnitudes), f32]);
                }
                inputs
            },
            3,
        ),
    ]);
    // Heads of whole 16-byte vectors in one block, and other heads in two blocks.
    all.extend(rotations::<4, 2, 64>());
    all.extend(rotations::<15, 2, 34>());
    all
}

fn norm_of_sum() -> Producer {
    Producer {
        op: Arc::new(AddRmsNorm { eps: 1e-5 }),
        inputs: |t, d, ty| vec![normal(ty, &[t, d]), normal(ty, &[t, d]), normal(DType::F32, &[d])],
        output: 1,
        restored: None,
        fuses_amax: false,
    }
}

/// The gradients of the rotation of H query and K key heads of E columns, without and with the norm.
fn rotations<const H: usize, const K: usize, const E: usize>() -> [Producer; 2] {
    fn rotation<const H: usize, const K: usize, const E: usize>(t: usize, ty: DType) -> Vec<TestInput> {
        let positions = (TensorType::new(DType::I32, [t]), Values::Positions(9));
        vec![normal(ty, &[t, (H + 2 * K) * E]), positions, normal(DType::F32, &[9, E])]
    }
    let op = |weights| QkNormRopeGrad { heads: H, kv_heads: K, head_dim: E, weights, amax: false };
    let producer = |op, inputs: Inputs| Producer {
        op: Arc::new(op),
        inputs,
        output: 0,
        restored: None,
        fuses_amax: true,
    };
    [
        producer(op(None), |t, _, ty| rotation::<H, K, E>(t, ty)),
        producer(op(Some([DType::F32; 2])), |t, _, ty| {
            let (weight, mut inputs) = (normal(DType::F32, &[E]), rotation::<H, K, E>(t, ty));
            inputs.extend([inputs[0], normal(DType::F32, &[t, H + K]), weight, weight]);
            inputs
        }),
    ]
}

/// A program of the producer and the cast, with their results as outputs.
fn program(producer: &Producer, cast: Quantize, [rows, cols]: [usize; 2], dtype: DType) -> Program {
    let mut t = Tracer::default();
    let test_inputs = (producer.inputs)(rows, cols, dtype);
    let mut inputs: Vec<_> =
        test_inputs.iter().enumerate().map(|(n, (ty, _))| t.input(&format!("in{n}"), *ty)).collect();
    if let Some(gate_up) = producer.restored {
        let gate_up = &mut inputs[gate_up];
        let save = Quantize::new(DType::E4M3, Scaling::Tile, true, Layouts::RowMajor);
        let copy = t.emit(save, &[*gate_up]).expect("a matrix");
        // An output, so that no rewrite removes it.
        t.output("saved", copy[0]);
        let restore = Dequantize { out: t.ty(*gate_up).dtype, scaling: Scaling::Tile };
        *gate_up = t.emit(restore, &copy[..2]).expect("tiles")[0];
    }
    let produced = t.apply_code(Code::Plain(producer.op.clone()), &inputs).expect("operands that fit");
    let scale = (cast.given == Given::Scale).then(|| t.input("scale", TensorType::new(DType::F32, [1, 1])));
    let read: Vec<_> = [produced[producer.output]].into_iter().chain(scale).collect();
    let casts = t.emit(cast, &read).expect("a matrix");
    let rest = produced.iter().enumerate().filter(|(k, _)| *k != producer.output).map(|(_, v)| *v);
    for (n, v) in casts.into_iter().chain(rest).enumerate() {
        t.output(&format!("out{n}"), v);
    }
    t.finish()
}

/// The bytes of all outputs after each of these micro-steps, which have different inputs. `scale` is the
/// delayed scale, if the cast reads one.
fn run(
    engine: &mut dyn Engine,
    program: Program,
    inputs: &[TestInput],
    scale: Option<f32>,
    seed: u64,
    parts: &[Part],
) -> Vec<Vec<u8>> {
    let outputs: Vec<_> = program.outputs().map(|(name, _)| name).collect();
    let id = engine.load(program).expect("a program that fits");
    if let Some(scale) = scale {
        engine.write_input(id, "scale", &scale.to_le_bytes()).expect("an input");
    }
    let mut all = Vec::new();
    for (step, &part) in (0..).zip(parts) {
        for (n, (ty, values)) in inputs.iter().enumerate() {
            let x = HostTensor::from_f64(*ty, &values.fill(ty.numel(), seed, step, n as u32));
            engine.write_input(id, &format!("in{n}"), x.bytes()).expect("an input");
        }
        engine.run(id, part).expect("a run");
        let values = engine.outputs(id).expect("outputs");
        all.extend(outputs.iter().map(|name| values.get(name).expect("an output").to_vec()));
    }
    all
}

/// The cases of a test.
struct Cases {
    /// Casts, with the delayed scale of those that read one.
    casts: Vec<(Quantize, Option<f32>)>,
    /// Rows and columns of the tensors that are cast.
    shapes: Vec<[usize; 2]>,
    dtypes: Vec<DType>,
    parts: Vec<Part>,
    /// Number of cases that run if tests are sampled.
    count: usize,
}

/// A cast that computes its own scale.
fn plain(format: DType, scaling: Scaling, pow2_scales: bool, layouts: Layouts) -> (Quantize, Option<f32>) {
    (Quantize::new(format, scaling, pow2_scales, layouts), None)
}

/// A cast with a delayed scale; 0 means "not set".
fn delayed(format: DType, scale: f32, layouts: Layouts) -> (Quantize, Option<f32>) {
    let cast = Quantize::new(format, Scaling::Tensor, false, layouts);
    (Quantize { given: Given::Scale, ..cast }, Some(scale))
}

/// The smallest width of [`Cases::large`].
const MIN_WIDTH: usize = 128;

impl Cases {
    /// Cases for all producers.
    fn small() -> Cases {
        let [e4m3, e5m2] = [DType::E4M3, DType::E5M2];
        let casts = vec![
            plain(e4m3, Scaling::Tensor, false, Layouts::Both),
            plain(e5m2, Scaling::Tensor, true, Layouts::Transposed),
            plain(e4m3, Scaling::Row, true, Layouts::Both),
            plain(e4m3, Scaling::Tile, true, Layouts::Both),
            plain(e4m3, Scaling::Tile, false, Layouts::RowMajor),
            plain(e4m3, Scaling::Block, true, Layouts::Both),
            delayed(e4m3, 20.0, Layouts::Both),
            delayed(e5m2, 0.0, Layouts::Transposed),
        ];
        let shapes = vec![[256, 128], [300, 256], [131, 264], [37, 77]];
        let (dtypes, parts) = (vec![DType::BF16, DType::F32], vec![Part::First, Part::Next]);
        Cases { casts, shapes, dtypes, parts, count: 11 }
    }

    /// Cases for the fused residual add, norm and cast, with rows of this width. The tensors are more than
    /// twice as large as the GPU's L2 cache, so that the cast is fused. Each part is run op by op, recorded
    /// as a graph and replayed.
    fn large(width: usize, l2_bytes: usize) -> Cases {
        let casts = vec![
            plain(DType::E4M3, Scaling::Tile, true, Layouts::Both),
            plain(DType::E4M3, Scaling::Tile, true, Layouts::RowMajor),
            plain(DType::E4M3, Scaling::Tile, true, Layouts::Transposed),
            plain(DType::E4M3, Scaling::Tile, false, Layouts::Transposed),
            plain(DType::E4M3, Scaling::Block, true, Layouts::Both),
            delayed(DType::E4M3, 20.0, Layouts::Both),
            delayed(DType::E4M3, 0.0, Layouts::Both),
            delayed(DType::E4M3, 0.0, Layouts::RowMajor),
            delayed(DType::E4M3, 0.0, Layouts::Transposed),
        ];
        let rows = (l2_bytes / (4 * width)).next_multiple_of(TILE) + TILE;
        let parts = vec![Part::First, Part::Next, Part::Next, Part::Next, Part::First, Part::First];
        // At one width a sample has all casts, so that every variant is launched.
        let count = if width == MIN_WIDTH { casts.len() } else { 2 };
        Cases { casts, shapes: vec![[rows, width]], dtypes: vec![DType::BF16], parts, count }
    }
}

/// Compares fused and separate casts. `new` creates an engine.
fn check(new: &dyn Fn() -> Box<dyn Engine>, producer: &Producer, cases: &Cases) -> Result<(), Failed> {
    let seed = common::seed();
    let mut all = Vec::new();
    for &(cast, scale) in &cases.casts {
        for &shape in &cases.shapes {
            all.extend(cases.dtypes.iter().map(|&dtype| (cast, scale, shape, dtype)));
        }
    }
    for (cast, scale, shape, dtype) in common::drawn(all, cases.count) {
        let separate = program(producer, cast, shape, dtype);
        let fused = fuse::apply(separate.clone(), rewrites::ALL).expect("a program");
        let names =
            |program: &Program| -> Vec<_> { program.instances.iter().map(|i| i.code.op().name()).collect() };
        let (before, after) = (names(&separate), names(&fused));
        if producer.fuses_amax {
            // AdamW also fuses casts by blocks and with delayed scales.
            let is_local = cast.scaling == Scaling::Block || scale.is_some();
            let casts = is_local && producer.op.name() == "adamw";
            assert_eq!(fused.instances.len() == 1, casts, "{cast:?}");
            // The cast reads an amax if it has one scale for the tensor.
            let reads_amax = fused.instances.get(1).is_some_and(|cast| cast.inputs.len() == 2);
            assert_eq!(reads_amax, cast.scaling == Scaling::Tensor && !casts, "{cast:?}");
        } else {
            let ops_before = if producer.restored.is_some() { 4 } else { 2 };
            // With a residual add, sum, norm and cast become one op, if the scale does not need the whole
            // norm.
            let adds = producer.op.name() == "add_rms_norm";
            let is_one_op = after == ["rms_quantize"];
            let is_local = matches!(cast.scaling, Scaling::Tile | Scaling::Block) || scale.is_some();
            assert_eq!(is_one_op, adds && is_local, "{after:?}");
            // With a saved input, its cast stays, and everything else becomes one op.
            let is_restored = after.len() == 2 && after[0] == "quantize" && after[1].ends_with("_quantize");
            assert!(producer.restored.is_none() || dtype == DType::F32 || is_restored, "{after:?}");
            assert!(before.len() == ops_before && before != after, "{before:?} stays {after:?}");
        }
        let inputs = (producer.inputs)(shape[0], shape[1], dtype);
        let expected = run(&mut *new(), separate, &inputs, scale, seed, &cases.parts);
        let found = run(&mut *new(), fused, &inputs, scale, seed, &cases.parts);
        for (n, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let off = found.iter().zip(expected).filter(|(a, b)| a != b).count();
            assert!(
                off == 0,
                "{after:?} with {cast:?} of {shape:?} {dtype}, XTRAIN_TEST_SEED={seed}: output {n} differs in {off} of {} bytes",
                found.len()
            );
        }
    }
    Ok(())
}

fn main() {
    let arguments = Arguments::from_args();
    let gpu = common::gpu();
    let is_missing = gpu.is_none();
    let mut tests = Vec::new();
    let on_gpu = || {
        let gpu = Gpu::open(0).expect("a GPU");
        Box::new(CudaEngine::new(Arc::new(cuda_kernels()), gpu).expect("an engine")) as Box<dyn Engine>
    };
    for (n, producer) in producers().into_iter().enumerate() {
        let producer = Arc::new(producer);
        let cpu = || Box::new(CpuEngine::new(Arc::new(cpu_kernels()))) as Box<dyn Engine>;
        tests.push(Trial::test(format!("cpu_{n}"), {
            let producer = producer.clone();
            move || check(&cpu, &producer, &Cases::small())
        }));
        let test = Trial::test(format!("card_{n}"), move || check(&on_gpu, &producer, &Cases::small()));
        tests.push(test.with_ignored_flag(is_missing));
    }
    // Widths for which a block has eight, four, two, two (with idle warps) and one row, and one that is too
    // wide.
    let l2_bytes = gpu.as_ref().map_or(0, |gpu| gpu.info().l2_bytes);
    for width in [MIN_WIDTH, 2048, 4096, 3072, 5120, 8192, 8320] {
        let large = move || check(&on_gpu, &norm_of_sum(), &Cases::large(width, l2_bytes));
        tests.push(Trial::test(format!("card_sum_{width}"), large).with_ignored_flag(is_missing));
    }
    let conclusion = libtest_mimic::run(&arguments, tests);
    drop(gpu);
    conclusion.exit();
}
