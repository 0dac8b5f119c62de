//! A cast of what is made on the way is, to the bit, the cast of what its op would write, and so is one that
//! is told what its op measures: on the CPU, and on a GPU if there is one.

mod common;

use libtest_mimic::{Arguments, Failed, Trial};
use std::sync::Arc;
use xtrain_cuda::Gpu;
use xtrain_ops::adamw::{AdamW, AdamWParameter};
use xtrain_ops::qk_norm_rope::QkNormRopeGrad;
use xtrain_ops::quantize::{Dequantize, Given, Layouts, Quantize};
use xtrain_ops::registry::{cpu_kernels, cuda_kernels};
use xtrain_ops::rewrites;
use xtrain_ops::rms_norm::{AddRmsNorm, ExtraOutput, RmsNorm, RmsNormGrad};
use xtrain_ops::swiglu::{Swiglu, SwigluGrad};
use xtrain_ops::swiglu_saving::SwigluSaving;
use xtrain_program::{Code, Op, Program, Tracer, fuse};
use xtrain_runtime::{CpuEngine, CudaEngine, Engine, Part};
use xtrain_tensor::{DType, HostTensor, Philox, Scaling, Shape, TILE, TensorType};

/// An input: its type, and what it is filled with.
type TestInput = (TensorType, Values);

/// Inputs for so many rows and columns, of which activations have this type.
type Inputs = fn(usize, usize, DType) -> Vec<TestInput>;

/// What an input is filled with.
#[derive(Clone, Copy)]
enum Values {
    /// Normal numbers.
    Normal,
    /// Their magnitudes.
    Magnitudes,
    /// One number everywhere.
    All(f64),
    /// Positions 0, 1, 2 and so on, of so many.
    Positions(usize),
}

impl Values {
    /// So many of them, the `n`-th input's in this turn; of very many, the first come again. What is largest
    /// comes first.
    fn fill(self, count: usize, seed: u64, turn: u32, n: u32) -> Vec<f64> {
        let mut x = vec![0.0; count.min(1_000_003)];
        Philox::new(seed, turn, n).fill_normal(if turn == 0 { 6.0 } else { 2.0 }, &mut x);
        let x: Vec<f32> = x.into_iter().cycle().take(count).collect();
        let of = |(i, x): (usize, f32)| match self {
            Values::Normal => x.into(),
            Values::Magnitudes => x.abs().into(),
            Values::All(x) => x,
            Values::Positions(of) => (i % of) as f64,
        };
        x.into_iter().enumerate().map(of).collect()
    }
}

/// A normal input of this type and shape.
fn normal(dtype: DType, shape: &[usize]) -> TestInput {
    (TensorType { dtype, shape: Shape::new(shape) }, Values::Normal)
}

/// What makes a tensor that is cast.
struct Maker {
    op: Arc<dyn Op>,
    inputs: Inputs,
    /// The output that is cast.
    output: usize,
    /// True if its last input is kept in FP8 and restored.
    keeps: bool,
    /// True if it only measures what is cast.
    measures: bool,
}

fn makers() -> Vec<Maker> {
    let maker = |op, inputs, output| Maker { op, inputs, output, keeps: false, measures: false };
    let dx = RmsNormGrad { out: DType::F32, extra: ExtraOutput::None };
    let (grad, eps) = (SwigluGrad { rematerialise: false }, 1e-5);
    let gate_up: Inputs = |t, d, ty| vec![normal(ty, &[t, 2 * d])];
    let both: Inputs = |t, d, ty| vec![normal(ty, &[t, d]), normal(ty, &[t, 2 * d])];
    let parameter = AdamWParameter { weight_decay: 0.1, compute: None };
    let adamw = AdamW::new(vec![parameter; 2], [0.9, 0.95], 1e-8, 7);
    let measuring = |op: Arc<dyn Op>, inputs, output| Maker { measures: true, ..maker(op, inputs, output) };
    let mut all = vec![
        Maker { keeps: true, ..maker(Arc::new(Swiglu), gate_up, 0) },
        Maker { keeps: true, ..maker(Arc::new(grad), both, 0) },
        maker(Arc::new(Swiglu), gate_up, 0),
        maker(Arc::new(grad), both, 0),
        maker(Arc::new(SwigluSaving), gate_up, 0),
        maker(Arc::new(RmsNorm { eps }), |t, d, ty| vec![normal(ty, &[t, d]), normal(DType::F32, &[d])], 0),
        norm_of_sum(),
        measuring(
            Arc::new(dx),
            |t, d, ty| {
                let activation = normal(ty, &[t, d]);
                vec![activation, activation, normal(DType::F32, &[t]), normal(DType::F32, &[d]), activation]
            },
            0,
        ),
        // The second parameter's master.
        measuring(
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
    ];
    // Heads of whole vectors in one block, and others in two.
    all.extend(rotations::<4, 2, 64>());
    all.extend(rotations::<15, 2, 34>());
    all
}

fn norm_of_sum() -> Maker {
    Maker {
        op: Arc::new(AddRmsNorm { eps: 1e-5 }),
        inputs: |t, d, ty| vec![normal(ty, &[t, d]), normal(ty, &[t, d]), normal(DType::F32, &[d])],
        output: 1,
        keeps: false,
        measures: false,
    }
}

/// The gradient of the rotation of H query and K key heads of E columns, without the norm and with it.
fn rotations<const H: usize, const K: usize, const E: usize>() -> [Maker; 2] {
    fn rotation<const H: usize, const K: usize, const E: usize>(t: usize, ty: DType) -> Vec<TestInput> {
        let positions = (TensorType::new(DType::I32, [t]), Values::Positions(9));
        vec![normal(ty, &[t, (H + 2 * K) * E]), positions, normal(DType::F32, &[9, E])]
    }
    let op = |weights| QkNormRopeGrad { heads: H, kv_heads: K, head_dim: E, weights, amax: false };
    let maker =
        |op, inputs: Inputs| Maker { op: Arc::new(op), inputs, output: 0, keeps: false, measures: true };
    [
        maker(op(None), |t, _, ty| rotation::<H, K, E>(t, ty)),
        maker(op(Some([DType::F32; 2])), |t, _, ty| {
            let (weight, mut inputs) = (normal(DType::F32, &[E]), rotation::<H, K, E>(t, ty));
            inputs.extend([inputs[0], normal(DType::F32, &[t, H + K]), weight, weight]);
            inputs
        }),
    ]
}

/// The op and its cast; all that is read afterwards is an output.
fn program(maker: &Maker, cast: Quantize, [rows, cols]: [usize; 2], dtype: DType) -> Program {
    let mut t = Tracer::default();
    let given = (maker.inputs)(rows, cols, dtype);
    let mut inputs: Vec<_> =
        given.iter().enumerate().map(|(n, (ty, _))| t.input(&format!("in{n}"), *ty)).collect();
    if maker.keeps {
        let Some(gate_up) = inputs.last_mut() else { unreachable!("makers have inputs") };
        let keep = Quantize::new(DType::E4M3, Scaling::Tile, true, Layouts::RowMajor);
        let copy = t.emit(keep, &[*gate_up]).expect("a matrix");
        // Of what is an output, nothing is lost.
        t.output("kept", copy[0]);
        let restore = Dequantize { out: t.ty(*gate_up).dtype, scaling: Scaling::Tile };
        *gate_up = t.emit(restore, &copy[..2]).expect("tiles")[0];
    }
    let made = t.apply_code(Code::Plain(maker.op.clone()), &inputs).expect("operands that fit");
    let scale = (cast.given == Given::Scale).then(|| t.input("scale", TensorType::new(DType::F32, [1, 1])));
    let read: Vec<_> = [made[maker.output]].into_iter().chain(scale).collect();
    let casts = t.emit(cast, &read).expect("a matrix");
    let rest = made.iter().enumerate().filter(|(k, _)| *k != maker.output).map(|(_, v)| *v);
    for (n, v) in casts.into_iter().chain(rest).enumerate() {
        t.output(&format!("out{n}"), v);
    }
    t.finish()
}

/// The bytes of all outputs of these micro-steps, each of other inputs, with this scale where one is given.
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
    for (turn, &part) in (0..).zip(parts) {
        for (n, (ty, values)) in inputs.iter().enumerate() {
            let x = HostTensor::from_f64(*ty, &values.fill(ty.numel(), seed, turn, n as u32));
            engine.write_input(id, &format!("in{n}"), x.bytes()).expect("an input");
        }
        engine.run(id, part).expect("a run");
        let made = engine.outputs(id).expect("outputs");
        all.extend(outputs.iter().map(|name| made.get(name).expect("an output").to_vec()));
    }
    all
}

/// The cases of a test.
struct Cases {
    /// With the scale, where one is given.
    casts: Vec<(Quantize, Option<f32>)>,
    /// Rows and columns.
    shapes: Vec<[usize; 2]>,
    dtypes: Vec<DType>,
    parts: Vec<Part>,
    /// The size of a sample of the cases.
    count: usize,
}

fn plain(format: DType, scaling: Scaling, pow2_scales: bool, layouts: Layouts) -> (Quantize, Option<f32>) {
    (Quantize::new(format, scaling, pow2_scales, layouts), None)
}

/// With a scale that is known, or none yet.
fn given(format: DType, scale: f32, layouts: Layouts) -> (Quantize, Option<f32>) {
    let cast = Quantize::new(format, Scaling::Tensor, false, layouts);
    (Quantize { given: Given::Scale, ..cast }, Some(scale))
}

/// The smallest width of [`Cases::large`].
const NARROWEST: usize = 128;

impl Cases {
    /// For all makers.
    fn small() -> Cases {
        let [e4m3, e5m2] = [DType::E4M3, DType::E5M2];
        let casts = vec![
            plain(e4m3, Scaling::Tensor, false, Layouts::Both),
            plain(e5m2, Scaling::Tensor, true, Layouts::Transposed),
            plain(e4m3, Scaling::Row, true, Layouts::Both),
            plain(e4m3, Scaling::Tile, true, Layouts::Both),
            plain(e4m3, Scaling::Tile, false, Layouts::RowMajor),
            plain(e4m3, Scaling::Block, true, Layouts::Both),
            given(e4m3, 20.0, Layouts::Both),
            given(e5m2, 0.0, Layouts::Transposed),
        ];
        let shapes = vec![[256, 128], [300, 256], [131, 264], [37, 77]];
        let (dtypes, parts) = (vec![DType::BF16, DType::F32], vec![Part::First, Part::Next]);
        Cases { casts, shapes, dtypes, parts, count: 11 }
    }

    /// Sums of rows of this width of which a GPU's cache has less than half: those are cast in the launch
    /// that makes them. Parts are tried, recorded as graphs and replayed.
    fn large(width: usize, l2_bytes: usize) -> Cases {
        let casts = vec![
            plain(DType::E4M3, Scaling::Tile, true, Layouts::Both),
            plain(DType::E4M3, Scaling::Tile, true, Layouts::RowMajor),
            plain(DType::E4M3, Scaling::Tile, true, Layouts::Transposed),
            plain(DType::E4M3, Scaling::Tile, false, Layouts::Transposed),
            plain(DType::E4M3, Scaling::Block, true, Layouts::Both),
            given(DType::E4M3, 20.0, Layouts::Both),
            given(DType::E4M3, 0.0, Layouts::Both),
            given(DType::E4M3, 0.0, Layouts::RowMajor),
            given(DType::E4M3, 0.0, Layouts::Transposed),
        ];
        let rows = (l2_bytes / (4 * width)).next_multiple_of(TILE) + TILE;
        let parts = vec![Part::First, Part::Next, Part::Next, Part::Next, Part::First, Part::First];
        // A sample contains every cast at one width, so that it launches every variant.
        let count = if width == NARROWEST { casts.len() } else { 2 };
        Cases { casts, shapes: vec![[rows, width]], dtypes: vec![DType::BF16], parts, count }
    }
}

fn check(new: &dyn Fn() -> Box<dyn Engine>, maker: &Maker, cases: &Cases) -> Result<(), Failed> {
    let seed = common::seed();
    let mut all = Vec::new();
    for &(cast, scale) in &cases.casts {
        for &shape in &cases.shapes {
            all.extend(cases.dtypes.iter().map(|&dtype| (cast, scale, shape, dtype)));
        }
    }
    for (cast, scale, shape, dtype) in common::drawn(all, cases.count) {
        let apart = program(maker, cast, shape, dtype);
        let fused = fuse::apply(apart.clone(), rewrites::ALL).expect("a program");
        let names =
            |program: &Program| -> Vec<_> { program.instances.iter().map(|i| i.code.op().name()).collect() };
        let (before, after) = (names(&apart), names(&fused));
        if maker.measures {
            // The update casts by blocks, or with what is given, itself.
            let is_local = cast.scaling == Scaling::Block || scale.is_some();
            let casts = is_local && maker.op.name() == "adamw";
            assert_eq!(fused.instances.len() == 1, casts, "{cast:?}");
            // Where one scale is for all.
            let told = fused.instances.get(1).is_some_and(|cast| cast.inputs.len() == 2);
            assert_eq!(told, cast.scaling == Scaling::Tensor && !casts, "{cast:?}");
        } else {
            let apart_by = if maker.keeps { 4 } else { 2 };
            // What keeps is left, and what casts.
            let is_one = |name: &str| name.ends_with("_quantize");
            // With a sum, what casts makes that too.
            let sums = maker.op.name() == "add_rms_norm";
            let is_joint = after == ["rms_quantize"];
            let is_within = matches!(cast.scaling, Scaling::Tile | Scaling::Block);
            assert_eq!(is_joint, sums && (is_within || scale.is_some()), "{after:?}");
            let is_cast = after.len() == 2 && after[0] == "quantize" && is_one(after[1]);
            assert!(!maker.keeps || dtype == DType::F32 || is_cast, "{after:?}");
            assert!(before.len() == apart_by && before != after, "{before:?} stays {after:?}");
        }
        let inputs = (maker.inputs)(shape[0], shape[1], dtype);
        let expected = run(&mut *new(), apart, &inputs, scale, seed, &cases.parts);
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
    let card = common::gpu();
    let is_missing = card.is_none();
    let mut tests = Vec::new();
    let on_card = || {
        let gpu = Gpu::open(0).expect("a card");
        Box::new(CudaEngine::new(Arc::new(cuda_kernels()), gpu).expect("an engine")) as Box<dyn Engine>
    };
    for (n, maker) in makers().into_iter().enumerate() {
        let maker = Arc::new(maker);
        let cpu = || Box::new(CpuEngine::new(Arc::new(cpu_kernels()))) as Box<dyn Engine>;
        tests.push(Trial::test(format!("cpu_{n}"), {
            let maker = maker.clone();
            move || check(&cpu, &maker, &Cases::small())
        }));
        let test = Trial::test(format!("card_{n}"), move || check(&on_card, &maker, &Cases::small()));
        tests.push(test.with_ignored_flag(is_missing));
    }
    // Rows of eight, four, two, two with warps that wait, and one for a block; and too wide for one.
    let l2_bytes = card.as_ref().map_or(0, |card| card.info().l2_bytes);
    for width in [NARROWEST, 2048, 4096, 3072, 5120, 8192, 8320] {
        let large = move || check(&on_card, &norm_of_sum(), &Cases::large(width, l2_bytes));
        tests.push(Trial::test(format!("card_sum_{width}"), large).with_ignored_flag(is_missing));
    }
    let conclusion = libtest_mimic::run(&arguments, tests);
    drop(card);
    conclusion.exit();
}
