//! Linear layers of experts compute the same bits in equal runs on a Hopper GPU. Without such a GPU the tests
//! count as ignored.

mod common;

use libtest_mimic::{Arguments, Failed, Trial};
use std::sync::Arc;
use xtrain_cuda::{Arch, Gpu};
use xtrain_ops::grouped_linear::{GroupedDgrad, GroupedLinear, GroupedWgrad};
use xtrain_ops::grouped_scaled_matmul::GroupedScaledMatmul;
use xtrain_ops::groups::Groups;
use xtrain_ops::registry::cuda_kernels;
use xtrain_program::{Code, LinearGemm, Op, Program, Tail, Tracer};
use xtrain_runtime::{CudaEngine, Engine, Part};
use xtrain_tensor::{DType, HostTensor, Philox, Scaling, TILE, TensorType};

/// Columns of an output. The last tile has 192, 80, 16 and 128 columns in bf16, and 256, 16, 208 and 128 in
/// FP8.
const COLUMNS: [usize; 4] = [768, 272, 208, 128];

/// Operands of a GEMM.
#[derive(Clone, Copy, Debug)]
enum Operands {
    Bf16,
    Fp8ByBlocks,
    Fp8ByTensors,
}

/// An op of experts with its inputs.
struct Case {
    op: Arc<dyn Op>,
    inputs: Vec<HostTensor>,
}

/// Normal numbers.
fn normal(dtype: DType, shape: [usize; 2], n: u32) -> HostTensor {
    let mut x = vec![0.0f32; shape.iter().product()];
    Philox::new(common::seed(), 0, n).fill_normal(1.0, &mut x);
    HostTensor::from_f64(TensorType::new(dtype, shape), &x.into_iter().map(f64::from).collect::<Vec<_>>())
}

impl Case {
    /// A GEMM of this many experts, of which each fourth has no rows, with outputs of so many columns.
    /// With an expert for each multiprocessor, clusters compute several tiles each.
    fn new(gemm: LinearGemm, operands: Operands, experts: usize, columns: usize) -> Case {
        let mut first_rows = vec![0];
        first_rows.extend((0..experts).scan(0, |end, expert| {
            *end += [384, 0, 128, 256][expert % 4];
            Some(*end)
        }));
        let live_rows = first_rows[experts];
        let rows = live_rows + TILE;
        let first_rows: Vec<f64> = first_rows.into_iter().map(|row| row as f64).collect();
        let starts = HostTensor::from_f64(TensorType::new(DType::I32, [experts + 1]), &first_rows);
        let other = if gemm == LinearGemm::Dgrad { 256 } else { 272 };
        let [outputs, inputs] = if gemm == LinearGemm::Fprop { [columns, other] } else { [other, columns] };
        let scaling = match operands {
            Operands::Bf16 => return Case::bf16(gemm, [rows, outputs, inputs], starts, live_rows),
            Operands::Fp8ByTensors => [Scaling::Tensor; 2],
            Operands::Fp8ByBlocks if gemm == LinearGemm::Wgrad => [Scaling::Tile; 2],
            Operands::Fp8ByBlocks => [Scaling::Tile, Scaling::Block],
        };
        let [a, b] = match gemm {
            LinearGemm::Fprop => [[rows, inputs], [experts * outputs, inputs]],
            LinearGemm::Dgrad => [[rows, outputs], [inputs, experts * outputs]],
            LinearGemm::Wgrad => [[outputs, rows], [inputs, rows]],
        };
        let is_gradient = gemm != LinearGemm::Fprop && scaling[0] == Scaling::Tensor;
        let formats = [if is_gradient { DType::E5M2 } else { DType::E4M3 }, DType::E4M3];
        let mut tensors = Vec::new();
        for (n, (shape, format)) in [a, b].into_iter().zip(formats).enumerate() {
            let scales = scaling[n].shape(shape[0], shape[1]);
            tensors.push(normal(format, shape, n as u32));
            tensors.push(normal(DType::F32, scales, 2 + n as u32));
        }
        tensors.push(starts);
        let out = if gemm == LinearGemm::Wgrad { DType::F32 } else { DType::BF16 };
        let groups = Groups { experts, align: TILE, live_rows };
        let op = GroupedScaledMatmul { gemm, groups, out, scaling, tail: Tail::Zeros };
        Case { op: Arc::new(op), inputs: tensors }
    }

    fn bf16(
        gemm: LinearGemm,
        [rows, outputs, inputs]: [usize; 3],
        starts: HostTensor,
        live_rows: usize,
    ) -> Case {
        let experts = starts.ty().numel() - 1;
        let (groups, out) = (Groups { experts, align: TILE, live_rows }, DType::F32);
        let (x, dy) = ([rows, inputs], [rows, outputs]);
        let weights = [experts * outputs, inputs];
        let (op, [a, b]): (Arc<dyn Op>, _) = match gemm {
            LinearGemm::Fprop => (Arc::new(GroupedLinear::new(groups)), [x, weights]),
            LinearGemm::Dgrad => (Arc::new(GroupedDgrad::new(groups)), [dy, weights]),
            LinearGemm::Wgrad => (Arc::new(GroupedWgrad { groups, out }), [dy, x]),
        };
        Case { op, inputs: vec![normal(DType::BF16, a, 0), normal(DType::BF16, b, 1), starts] }
    }

    fn program(&self) -> (Program, TensorType) {
        let mut tracer = Tracer::default();
        let named = self.inputs.iter().enumerate();
        let ids: Vec<_> = named.map(|(n, input)| tracer.input(&format!("in{n}"), input.ty())).collect();
        let output =
            tracer.site("experts").apply_code(Code::Plain(self.op.clone()), &ids).expect("traced")[0];
        tracer.output("out", output);
        let ty = tracer.ty(output);
        (tracer.finish(), ty)
    }

    /// The outputs of so many runs of two micro-steps, of which the second one adds to gradients of weights.
    fn outputs(&self, runs: usize) -> Result<Vec<Vec<u8>>, Failed> {
        let mut engine = CudaEngine::new(Arc::new(cuda_kernels()), Gpu::open(0)?)?;
        let (program, ty) = self.program();
        let id = engine.load(program)?;
        for (n, input) in self.inputs.iter().enumerate() {
            engine.write_input(id, &format!("in{n}"), input.bytes())?;
        }
        let mut outputs = Vec::new();
        for part in [Part::First, Part::Next].repeat(runs) {
            engine.run(id, part)?;
            outputs.push(engine.outputs(id)?.get("out")?.to_vec());
        }
        assert_eq!(outputs[0].len(), HostTensor::zeros(ty).bytes().len());
        Ok(outputs)
    }
}

/// Runs a GEMM several times.
fn check(gemm: LinearGemm, operands: Operands, multiprocessors: usize) -> Result<(), Failed> {
    let runs = if common::is_sampled() { 2 } else { 5 };
    for columns in COLUMNS {
        // Blocks of scales do not cross experts.
        if matches!(operands, Operands::Fp8ByBlocks) && gemm == LinearGemm::Fprop && columns % TILE != 0 {
            continue;
        }
        // Each expert has several tiles of its own in a gradient of weights.
        let many = if gemm == LinearGemm::Wgrad { multiprocessors.div_ceil(2) } else { multiprocessors };
        let experts = if columns == COLUMNS[0] { many } else { 5 };
        let outputs = Case::new(gemm, operands, experts, columns).outputs(runs)?;
        for (n, output) in outputs.iter().enumerate().skip(2) {
            let first = &outputs[n % 2];
            if let Some(byte) = output.iter().zip(first).position(|(a, b)| a != b) {
                let seed = common::seed();
                let of = format!("{gemm:?} of {columns} columns in {operands:?}, XTRAIN_TEST_SEED={seed}");
                return Err(format!("{of}: byte {byte} of run {n} is not that of run {}", n % 2).into());
            }
        }
    }
    Ok(())
}

fn main() {
    let arguments = Arguments::from_args();
    let gpu = common::gpu();
    let is_hopper = gpu.as_ref().is_some_and(|gpu| gpu.info().arch == Arch::SM90);
    let experts = gpu.as_ref().map_or(1, |gpu| gpu.info().multiprocessors as usize);
    let mut tests = Vec::new();
    for gemm in LinearGemm::ALL {
        for (operands, of) in [
            (Operands::Bf16, "bf16"),
            (Operands::Fp8ByBlocks, "fp8_by_blocks"),
            (Operands::Fp8ByTensors, "fp8_by_tensors"),
        ] {
            let name = format!("runs_of_{gemm:?}_in_{of}_compute_the_same_bits").to_lowercase();
            let test = Trial::test(name, move || check(gemm, operands, experts));
            tests.push(test.with_ignored_flag(!is_hopper));
        }
    }
    let conclusion = libtest_mimic::run(&arguments, tests);
    drop(gpu);
    conclusion.exit();
}
