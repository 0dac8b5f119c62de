//! Launches of the GPU kernels of [`MuonMomentum`], [`Orthogonalize`] and [`MuonStep`].
#![allow(unsafe_code, reason = "it launches kernels")]

use super::{COEFFICIENTS, EPS, MuonMomentum, MuonStep, Orthogonalize, STEPS, pieces, scale};
use crate::device::{Floats, PARTS};
use crate::grad_norm::cuda::SQUARES;
use std::collections::HashMap;
use std::sync::Arc;
use xtrain_cuda::{
    CudaError, CudaKernel, DevicePtr, Gemm, GemmOperands, Gpu, KernelSource, KernelValue, Launch, Operands,
    Work, kernel_struct,
};
use xtrain_tensor::{DType, TensorType};

pub(super) const SOURCE: KernelSource = KernelSource {
    constants: &[&[("THREADS", THREADS as i64), ("PER_THREAD", PER_THREAD as i64)]],
    headers: &[SQUARES],
    structs: &[
        MomentumArguments::LAYOUT,
        PartArguments::LAYOUT,
        PolynomialArguments::LAYOUT,
        StepArguments::LAYOUT,
    ],
    ..KernelSource::new("muon/kernel.cu", include_str!("kernel.cu"))
};

/// Threads of a block.
const THREADS: u32 = 256;
/// Elements of a thread.
const PER_THREAD: u64 = 4;

kernel_struct! {
    struct MomentumArguments {
        moment: DevicePtr,
        grad: DevicePtr,
        update: DevicePtr,
        coefficient: Floats,
        skip: DevicePtr,
        elements: u64,
        momentum: f32,
        rest: f32,
    }

    struct PartArguments {
        from: DevicePtr,
        to: DevicePtr,
        x: DevicePtr,
        sum: DevicePtr,
        diagonal: DevicePtr,
        squares: DevicePtr,
        /// The place of the first element in the pieces, behind whose end follows their begin.
        start: u64,
        total: u64,
        elements: u64,
        cols: u64,
        parts: u32,
        by_row: u32,
        scale: f32,
        eps: f32,
    }

    struct PolynomialArguments {
        gram: DevicePtr,
        square: DevicePtr,
        diagonal: DevicePtr,
        side: u64,
        a: f32,
        b: f32,
        c: f32,
        padding: u32,
    }

    struct StepArguments {
        master: DevicePtr,
        update: DevicePtr,
        copy: Floats,
        lr: Floats,
        skip: DevicePtr,
        elements: u64,
        decay: f32,
        has_copy: u32,
    }
}

/// Launches a kernel for so many elements.
///
/// # Safety
/// The kernel takes these arguments, whose pointers are those of at least as many elements.
unsafe fn elementwise<A: KernelValue + Send + Sync + 'static>(
    gpu: &Gpu,
    kernel: &str,
    elements: u64,
    arguments: A,
) -> Result<Work, CudaError> {
    let blocks = elements.div_ceil(u64::from(THREADS) * PER_THREAD).max(1) as u32;
    let function = gpu.function(&SOURCE, &[], kernel)?;
    // SAFETY: the caller's promise.
    Ok(unsafe { Work::launch(function, Launch::row(blocks, THREADS), arguments) })
}

impl CudaKernel for MuonMomentum {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let (inputs, outputs) = (operands.inputs, operands.outputs);
        let (n, update) = (self.matrices(), outputs[self.matrices()]);
        let elements = outputs[0].ty.numel();
        let of_slot = |slot: usize| update.place.offset(DType::F32.bytes(slot * elements));
        let mut works = Vec::new();
        for (slot, moment) in outputs[..n].iter().enumerate() {
            let arguments = MomentumArguments {
                moment: moment.place,
                grad: inputs[MuonMomentum::CONTROLS + 2 * slot + 1].place,
                update: of_slot(slot),
                coefficient: inputs[0].into(),
                skip: inputs[1].place,
                elements: elements as u64,
                momentum: self.momentum as f32,
                rest: (1.0 - self.momentum) as f32,
            };
            // SAFETY: the kernel takes one `MomentumArguments`; moment, gradient and the slot of the update
            // have as many f32 elements.
            works.push(unsafe { elementwise(gpu, "muon_momentum", elements as u64, arguments)? });
        }
        let unused = DType::F32.bytes((self.slots - n) * elements);
        if unused > 0 {
            // SAFETY: these are the last slots of the update, which nothing else uses until it is written.
            works.push(unsafe { Work::zeros(of_slot(n), unused) });
        }
        Ok(Work::sequence(works))
    }
}

impl CudaKernel for Orthogonalize {
    /// A part in bf16 and in f32, the products of its rows or columns, their square and the diagonal of their
    /// polynomial, sums of squares, and the workspace of GEMMs.
    fn workspace(&self, inputs: &[TensorType]) -> Vec<TensorType> {
        let cols = pieces(inputs[0]).map_or(0, |[_, _, cols]| cols);
        let [part, products] = self.largest(cols);
        vec![
            TensorType::new(DType::BF16, [part]),
            TensorType::new(DType::F32, [part]),
            TensorType::new(DType::BF16, [products]),
            TensorType::new(DType::F32, [products]),
            TensorType::new(DType::F32, [products.isqrt()]),
            TensorType::new(DType::F64, [PARTS]),
            Gemm::workspace(),
        ]
    }

    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let (from, to) = (operands.inputs[0], operands.outputs[0]);
        let [n, p, cols] = pieces(from.ty).expect("its type is checked");
        let total = (n * p * cols) as u64;
        let place = |row: usize| ((self.first * p + row) * cols) as u64 % total;
        let [x, sum, _, _, diagonal, squares, _] = workspace(operands);
        // Parts of equal rows have the same iteration.
        let mut iterations: HashMap<usize, Arc<Work>> = HashMap::new();
        let mut works = Vec::new();
        for part in self.ranges() {
            let rows = part.len();
            let elements = (rows * cols) as u64;
            let parts = elements.div_ceil(u64::from(THREADS) * PER_THREAD).min(PARTS as u64) as u32;
            let arguments = PartArguments {
                from: from.place,
                to: to.place,
                x,
                sum,
                diagonal,
                squares,
                start: place(part.start),
                total,
                elements,
                cols: cols as u64,
                parts,
                by_row: u32::from(rows <= cols),
                scale: scale(rows, cols),
                eps: EPS as f32,
            };
            let iteration = match iterations.get(&rows) {
                Some(iteration) => iteration.clone(),
                None => {
                    let iteration = Arc::new(iteration(gpu, operands, [rows, cols], arguments)?);
                    iterations.insert(rows, iteration.clone());
                    iteration
                }
            };
            let squares = gpu.function(&SOURCE, &[], "muon_squares")?;
            // SAFETY: the kernels take one `PartArguments`. Elements of the part lie in the pieces, whose
            // `total` elements are f32; the workspace has as many for the largest part, and a sum for each
            // block of the first launch.
            works.push(unsafe { Work::launch(squares, Launch::row(parts, THREADS), arguments) });
            // SAFETY: as above.
            works.push(unsafe { elementwise(gpu, "muon_normalize", elements, arguments) }?);
            works.push(Work::new(move |stream| iteration.enqueue(stream)));
            // SAFETY: as above.
            works.push(unsafe { elementwise(gpu, "muon_store", elements, arguments) }?);
        }
        let (rows, padding) = (self.rows(), (n * p - self.rows()) * cols);
        let start = place(rows) as usize;
        let until_end = padding.min(total as usize - start);
        for (start, elements) in [(start, until_end), (0, padding - until_end)] {
            let at = to.place.offset(DType::F32.bytes(start));
            if elements > 0 {
                // SAFETY: this padding is a part of the output, which nothing else uses until it is written.
                works.push(unsafe { Work::zeros(at, DType::F32.bytes(elements)) });
            }
        }
        Ok(Work::sequence(works))
    }
}

fn workspace(operands: &Operands<'_>) -> [DevicePtr; 7] {
    std::array::from_fn(|n| operands.workspace[n].place)
}

/// The steps of a part of these rows and columns, which begin with its rounded elements and the sum to which
/// the GEMM of the first step adds, and end with the sum of the last one.
fn iteration(
    gpu: &Gpu,
    operands: &Operands<'_>,
    [rows, cols]: [usize; 2],
    arguments: PartArguments,
) -> Result<Work, CudaError> {
    let [x, sum, gram, square, diagonal, _, workspace] = workspace(operands);
    let (side, long) = (rows.min(cols), rows.max(cols));
    let is_wide = rows <= cols;
    let gemm = |gemm: Gemm, [a, b, d]: [DevicePtr; 3]| {
        gemm.prepare(gpu, &GemmOperands { a, b, d, bias: None, scales: None, workspace })
    };
    let products = Gemm::new([side, side, long], DType::BF16, [!is_wide, is_wide], DType::BF16);
    let squares = Gemm::new([side; 3], DType::BF16, [false; 2], DType::F32);
    let sums = Gemm::new([rows, cols, side], DType::BF16, [false; 2], DType::F32).accumulate(true);
    let of_sums = if is_wide { [gram, x, sum] } else { [x, gram, sum] };
    let [a, b, c] = COEFFICIENTS.map(|coefficient| coefficient as f32);
    let polynomial = PolynomialArguments { gram, square, diagonal, side: side as u64, a, b, c, padding: 0 };
    let steps = [
        gemm(products, [x, x, gram])?,
        gemm(squares, [gram, gram, square])?,
        // SAFETY: the kernel takes one `PolynomialArguments`, whose matrices have `side` rows and columns.
        unsafe { elementwise(gpu, "muon_polynomial", (side * side) as u64, polynomial)? },
        // SAFETY: the kernel takes one `PartArguments`; there is a factor for each row or column.
        unsafe { elementwise(gpu, "muon_scale", arguments.elements, arguments)? },
        gemm(sums, of_sums)?,
    ];
    let step = Work::sequence(steps.into());
    // SAFETY: the kernel takes one `PartArguments`; the workspace has the elements of the part in both types.
    let round = unsafe { elementwise(gpu, "muon_round", arguments.elements, arguments)? };
    Ok(Work::new(move |stream| {
        for n in 0..STEPS {
            step.enqueue(stream)?;
            if n + 1 < STEPS {
                round.enqueue(stream)?;
            }
        }
        Ok(())
    }))
}

impl CudaKernel for MuonStep {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let (inputs, mut outputs) = (operands.inputs, operands.outputs.iter());
        let mut works = Vec::new();
        for (n, copy) in self.copies.iter().enumerate() {
            let master = outputs.next().expect("a master of each matrix");
            let copy = copy.and_then(|_| outputs.next());
            let elements = master.ty.numel();
            let arguments = StepArguments {
                master: master.place,
                update: inputs[2].place.offset(DType::F32.bytes(n * elements)),
                copy: copy.map_or_else(Floats::none, |copy| (*copy).into()),
                lr: inputs[0].into(),
                skip: inputs[1].place,
                elements: elements as u64,
                decay: self.weight_decay as f32,
                has_copy: u32::from(copy.is_some()),
            };
            // SAFETY: the kernel takes one `StepArguments`; the master, its part of the update and its copy
            // have as many elements.
            works.push(unsafe { elementwise(gpu, "muon_step", elements as u64, arguments)? });
        }
        Ok(Work::sequence(works))
    }
}
