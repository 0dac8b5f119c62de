//! A cast of what is made on the way is, to the bit, the cast of what its op would write, and so is one that is told what its op measures:
//! on the CPU, and on a card if there is one.

mod common;

use libtest_mimic::{Arguments, Failed, Trial};
use std::sync::Arc;
use xtrain_cuda::Gpu;
use xtrain_ops::quantize::{Dequantize, Layouts, Quantize};
use xtrain_ops::registry::{cpu_kernels, cuda_kernels};
use xtrain_ops::rms_norm::{AddRmsNorm, RmsNorm, RmsNormGrad};
use xtrain_ops::swiglu::{Swiglu, SwigluGrad, SwigluKeeping};
use xtrain_program::{Code, Op, Program, Tracer, fuse, measured};
use xtrain_runtime::{CpuEngine, CudaEngine, Engine, Part};
use xtrain_tensor::{DType, HostTensor, Philox, Scaling, Shape, TensorType};

/// Shapes of inputs for so many rows and columns.
type Shapes = fn(usize, usize) -> Vec<Vec<usize>>;

/// What makes a tensor that is cast.
struct Maker {
    op: Arc<dyn Op>,
    /// The shapes of its inputs for so many rows and columns.
    shapes: Shapes,
    /// The output that is cast.
    output: usize,
    /// Whether its last input is kept in FP8 and restored.
    keeps: bool,
    /// Whether it only measures what is cast.
    measures: bool,
}

fn makers() -> Vec<Maker> {
    let maker = |op, shapes, output| Maker { op, shapes, output, keeps: false, measures: false };
    let dx = RmsNormGrad { out: DType::F32, remake: false, amax: false };
    let (grad, eps) = (SwigluGrad { remake: false }, 1e-5);
    let gate_up: Shapes = |t, d| vec![vec![t, 2 * d]];
    let both: Shapes = |t, d| vec![vec![t, d], vec![t, 2 * d]];
    vec![
        Maker { keeps: true, ..maker(Arc::new(Swiglu), gate_up, 0) },
        Maker { keeps: true, ..maker(Arc::new(grad), both, 0) },
        maker(Arc::new(Swiglu), gate_up, 0),
        maker(Arc::new(grad), both, 0),
        maker(Arc::new(SwigluKeeping), gate_up, 0),
        maker(Arc::new(RmsNorm { eps }), |t, d| vec![vec![t, d], vec![d]], 0),
        maker(Arc::new(AddRmsNorm { eps }), |t, d| vec![vec![t, d], vec![t, d], vec![d]], 1),
        Maker {
            measures: true,
            ..maker(Arc::new(dx), |t, d| vec![vec![t, d], vec![t, d], vec![t], vec![d], vec![t, d]], 0)
        },
    ]
}

/// The op and its cast; all that is read afterwards is an output.
fn program(maker: &Maker, cast: Quantize, [rows, cols]: [usize; 2], dtype: DType) -> Program {
    let mut t = Tracer::default();
    let shapes = (maker.shapes)(rows, cols);
    let mut inputs: Vec<_> = (shapes.iter().enumerate())
        .map(|(n, shape)| {
            let dtype = if shape.len() == 1 { DType::F32 } else { dtype };
            let ty = TensorType { dtype, shape: Shape::new(shape) };
            t.input(&format!("in{n}"), ty)
        })
        .collect();
    if maker.keeps {
        let Some(gate_up) = inputs.last_mut() else { unreachable!("makers have inputs") };
        let keep = Quantize::new(DType::E4M3, Scaling::Tile, true, Layouts::Direct);
        let copy = t.emit(keep, &[*gate_up]).expect("a matrix");
        // Of what is an output, nothing is lost.
        t.output("kept", copy[0]);
        let restore = Dequantize { out: t.ty(*gate_up).dtype, scaling: Scaling::Tile };
        *gate_up = t.emit(restore, &copy[..2]).expect("tiles")[0];
    }
    let made = t.apply_code(Code::Plain(maker.op.clone()), &inputs).expect("operands that fit");
    let casts = t.emit(cast, &[made[maker.output]]).expect("a matrix");
    let rest = made.iter().enumerate().filter(|(k, _)| *k != maker.output).map(|(_, v)| *v);
    for (n, v) in casts.into_iter().chain(rest).enumerate() {
        t.output(&format!("out{n}"), v);
    }
    t.finish()
}

/// The bytes of all outputs.
fn run(engine: &mut dyn Engine, program: Program, seed: u64) -> Vec<Vec<u8>> {
    let outputs: Vec<_> = program.outputs().map(|(name, _)| name).collect();
    let inputs: Vec<_> = program.inputs().map(|(name, v)| (name, program.ty(v))).collect();
    let id = engine.load(program).expect("a program that fits");
    for (n, (name, ty)) in inputs.into_iter().enumerate() {
        let mut x = vec![0.0; ty.numel()];
        Philox::new(seed, 0, n as u32).fill_normal(2.0, &mut x);
        let x = HostTensor::from_f64(ty, &x.into_iter().map(f64::from).collect::<Vec<_>>());
        engine.write_input(id, &name, x.bytes()).expect("an input");
    }
    engine.run(id, Part::First).expect("a run");
    let made = engine.outputs(id).expect("outputs");
    outputs.iter().map(|name| made.get(name).expect("an output").to_vec()).collect()
}

fn check(new: &dyn Fn() -> Box<dyn Engine>, maker: &Maker) -> Result<(), Failed> {
    let seed = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?.as_nanos() as u64;
    let casts = [
        (DType::E4M3, Scaling::Tensor, false, Layouts::Both),
        (DType::E5M2, Scaling::Tensor, true, Layouts::Transposed),
        (DType::E4M3, Scaling::Row, true, Layouts::Both),
        (DType::E4M3, Scaling::Tile, true, Layouts::Both),
        (DType::E4M3, Scaling::Tile, false, Layouts::Direct),
    ];
    for (format, scaling, pow2_scales, layouts) in casts {
        for shape in [[300, 256], [131, 264], [37, 77]] {
            for dtype in [DType::BF16, DType::F32] {
                let cast = Quantize::new(format, scaling, pow2_scales, layouts);
                let apart = program(maker, cast, shape, dtype);
                let fused = fuse::apply(apart.clone()).and_then(measured::apply).expect("a program");
                let names = |program: &Program| -> Vec<_> {
                    program.instances.iter().map(|i| i.code.op().name()).collect()
                };
                let (before, after) = (names(&apart), names(&fused));
                if maker.measures {
                    // Where one scale is for all.
                    let told = fused.instances[1].inputs.len() == 2;
                    assert_eq!(told, scaling == Scaling::Tensor, "{cast:?}");
                } else {
                    let apart_by = if maker.keeps { 4 } else { 2 };
                    // What keeps is left, and what casts.
                    assert!(!maker.keeps || dtype == DType::F32 || after == ["quantize"; 2], "{after:?}");
                    assert!(before.len() == apart_by && before != after, "{before:?} stays {after:?}");
                }
                let expected = run(&mut *new(), apart, seed);
                let found = run(&mut *new(), fused, seed);
                for (n, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    let off = found.iter().zip(expected).filter(|(a, b)| a != b).count();
                    assert!(
                        off == 0,
                        "{after:?} with {cast:?} of {shape:?} {dtype}: output {n} differs in {off} of {} bytes",
                        found.len()
                    );
                }
            }
        }
    }
    Ok(())
}

fn main() {
    let arguments = Arguments::from_args();
    let card = common::card();
    let is_missing = card.is_none();
    let mut tests = Vec::new();
    for (n, maker) in makers().into_iter().enumerate() {
        let maker = Arc::new(maker);
        let cpu = || Box::new(CpuEngine::new(Arc::new(cpu_kernels()))) as Box<dyn Engine>;
        tests.push(Trial::test(format!("cpu_{n}"), {
            let maker = maker.clone();
            move || check(&cpu, &maker)
        }));
        let card = || {
            let gpu = Gpu::open(0).expect("a card");
            Box::new(CudaEngine::new(Arc::new(cuda_kernels()), gpu).expect("an engine")) as Box<dyn Engine>
        };
        let test = Trial::test(format!("card_{n}"), move || check(&card, &maker));
        tests.push(test.with_ignored_flag(is_missing));
    }
    let conclusion = libtest_mimic::run(&arguments, tests);
    drop(card);
    conclusion.exit();
}
