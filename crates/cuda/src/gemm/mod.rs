//! GEMMs on a GPU: `D[m, n] = A[m, k] B[k, n] (+ D) (+ bias[n])`, summed in f32 and rounded once. Matrices
//! are row-major.
//!
//! cuBLASLt computes them. On Hopper, operands with a scale for every 128 elements along k may use a kernel
//! of xtrain's own ([`block_scaled`]). The algorithm is timed once for each GPU and cached on disk
//! ([`choose`]). If neither supports a GEMM, a slow kernel for any shape does ([`fallback`]). Every algorithm
//! computes the same bits in every run: none adds in the order in which blocks happen to finish. f32 operands
//! are multiplied as f32, never as TF32.
//!
//! FP8 operands come with scales ([`Scaling`]): factors by which the stored numbers are multiplied. Hopper's
//! tensor cores need both operands contiguous along k, and keep 14 bits of a sum; so partial sums are added
//! up in f32 registers, unless fast accumulation is requested.

mod block_scaled;
mod choose;
mod fallback;
mod key;
mod matmul;
mod noise;

use crate::error::CudaError;
use crate::gpu::Gpu;
use crate::kernel::Work;
use crate::memory::DevicePtr;
use crate::source::KernelSource;
use crate::stream::Stream;
use block_scaled::BlockScaledGemm;
use matmul::Matmul;
use std::fmt;
use xtrain_tensor::{DType, Scaling, TensorType};

/// The layout of an operand in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OperandLayout {
    /// The element type.
    pub dtype: DType,
    /// True if the transpose is stored: `[k, m]` for A, `[n, k]` for B.
    pub transposed: bool,
    /// The stride of rows in memory, in elements.
    pub stride: usize,
    /// The scaling of an FP8 operand, seen as `[m, k]` or `[n, k]`.
    pub scaling: Option<Scaling>,
}

/// A GEMM: everything that its algorithm depends on, except the alignment of the operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Gemm {
    /// Rows of A and D.
    pub m: usize,
    /// Columns of B and D.
    pub n: usize,
    /// Columns of A, rows of B.
    pub k: usize,
    /// The left operand.
    pub a: OperandLayout,
    /// The right operand.
    pub b: OperandLayout,
    /// The element type of D and of the bias.
    pub d: DType,
    /// The stride of D's rows, in elements.
    pub d_stride: usize,
    /// True if the product is added to D.
    pub accumulate: bool,
    /// True if FP8 sums may stay in the tensor cores, at their reduced precision.
    pub fast_accumulation: bool,
}

/// The addresses of a GEMM's operands. They stay the same for as long as the prepared work is used.
#[derive(Clone, Copy, Debug)]
pub struct GemmOperands {
    /// A.
    pub a: DevicePtr,
    /// B.
    pub b: DevicePtr,
    /// D.
    pub d: DevicePtr,
    /// One element for each column of D, added before rounding.
    pub bias: Option<DevicePtr>,
    /// The reciprocal scales of FP8 operands A and B, in the layout of [`Scaling::shape`].
    pub scales: Option<[DevicePtr; 2]>,
    /// The tensor of [`Gemm::workspace`]. Its contents do not matter before or after a run.
    pub workspace: DevicePtr,
}

/// A prepared GEMM.
pub struct GemmPlan {
    /// The origin of the algorithm.
    pub choice: GemmChoice,
    /// The algorithm; None if the fallback kernel computes the GEMM.
    pub algorithm: Option<Algorithm>,
    /// The work of one run.
    pub work: Work,
}

/// An algorithm of a GEMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// An algorithm of cuBLASLt, in the library's encoding.
    CublasLt([u64; 8]),
    /// The kernel for scales of every 128 elements along k.
    BlockScaled,
}

/// The origin of an algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GemmChoice {
    /// It was the fastest just now.
    Timed,
    /// It was chosen earlier in this process, adopted from a run, or cached on disk.
    Cached,
    /// There is none: the fallback kernel computes the GEMM.
    Fallback,
}

impl Gemm {
    /// The source of the fallback kernel.
    pub const FALLBACK_SOURCE: KernelSource = fallback::SOURCE;

    /// The source of the kernel for scales of every 128 elements along k.
    pub const BLOCK_SCALED_SOURCE: KernelSource = block_scaled::SOURCE;

    /// The names that `XTRAIN_PREFER` accepts for [`Algorithm::CublasLt`] and [`Algorithm::BlockScaled`], for
    /// GEMMs that both support.
    pub const ALGORITHM_NAMES: [&str; 2] = ["cublaslt", Gemm::BLOCK_SCALED];

    const BLOCK_SCALED: &str = "promoted";

    /// The workspace of algorithms in bytes; algorithms that need more are not used.
    pub const WORKSPACE_BYTES: usize = 32 << 20;

    /// The GEMM of packed operands of one type. `a_transposed` and `b_transposed` are
    /// [`OperandLayout::transposed`].
    pub fn new(
        [m, n, k]: [usize; 3],
        dtype: DType,
        [a_transposed, b_transposed]: [bool; 2],
        d: DType,
    ) -> Gemm {
        let operand = |transposed, stride| OperandLayout { dtype, transposed, stride, scaling: None };
        let a = operand(a_transposed, if a_transposed { m } else { k });
        let b = operand(b_transposed, if b_transposed { k } else { n });
        Gemm { m, n, k, a, b, d, d_stride: n, accumulate: false, fast_accumulation: false }
    }

    /// The GEMM of packed FP8 operands, both contiguous along k: `[m, k]` and `[n, k]`.
    pub fn scaled(
        [m, n, k]: [usize; 3],
        [(a, a_scaling), (b, b_scaling)]: [(DType, Scaling); 2],
        d: DType,
        fast_accumulation: bool,
    ) -> Gemm {
        let plain = Gemm::new([m, n, k], a, [false, true], d);
        let a = OperandLayout { scaling: Some(a_scaling), ..plain.a };
        let b = OperandLayout { dtype: b, scaling: Some(b_scaling), ..plain.b };
        Gemm { a, b, fast_accumulation, ..plain }
    }

    /// The GEMM with this stride of A's rows.
    pub fn a_stride(self, stride: usize) -> Gemm {
        Gemm { a: OperandLayout { stride, ..self.a }, ..self }
    }

    /// The GEMM with this stride of B's rows.
    pub fn b_stride(self, stride: usize) -> Gemm {
        Gemm { b: OperandLayout { stride, ..self.b }, ..self }
    }

    /// The GEMM with this stride of D's rows.
    pub fn d_stride(self, stride: usize) -> Gemm {
        Gemm { d_stride: stride, ..self }
    }

    /// The GEMM that adds to D if `accumulate`.
    pub fn accumulate(self, accumulate: bool) -> Gemm {
        Gemm { accumulate, ..self }
    }

    /// The workspace tensor, for [`CudaKernel::workspace`](crate::CudaKernel::workspace).
    pub fn workspace() -> TensorType {
        TensorType::new(DType::U8, [Gemm::WORKSPACE_BYTES])
    }

    /// Prepares the GEMM. The first time on a GPU its algorithms are timed, which overwrites D and the
    /// workspace.
    ///
    /// # Panics
    /// If no kernel supports the element types: operands are f32, bf16, or FP8 with scales; D is f32, or bf16
    /// if the operands are not f32.
    pub fn prepare(&self, gpu: &Gpu, operands: &GemmOperands) -> Result<Work, CudaError> {
        self.plan(gpu, operands).map(|plan| plan.work)
    }

    /// [`Gemm::prepare`] with the algorithm and its origin.
    pub fn plan(&self, gpu: &Gpu, operands: &GemmOperands) -> Result<GemmPlan, CudaError> {
        if self.m == 0 || self.n == 0 || self.k == 0 {
            return self.fallback(gpu, operands);
        }
        let implementations = Implementations::new(gpu, self, operands)?;
        let (choice, algorithm) = choose::choose(gpu, self, operands, &implementations)?;
        let Some(algorithm) = algorithm else {
            if self.a.scaling.is_some() {
                return Err(self.unsupported(gpu));
            }
            return self.fallback(gpu, operands);
        };
        let work = Work::new(move |stream| implementations.enqueue(&algorithm, stream));
        Ok(GemmPlan { choice, algorithm: Some(algorithm), work })
    }

    /// The GEMM by the fallback kernel.
    pub fn fallback(&self, gpu: &Gpu, operands: &GemmOperands) -> Result<GemmPlan, CudaError> {
        let work = fallback::prepare(gpu, self, operands)?;
        Ok(GemmPlan { choice: GemmChoice::Fallback, algorithm: None, work })
    }

    /// The GEMM by the block-scaled kernel; None if that does not support it. It runs on Hopper and needs A
    /// scaled by tile, B by tile or by block, sizes that are multiples of 16, and no bias.
    pub fn block_scaled(&self, gpu: &Gpu, operands: &GemmOperands) -> Result<Option<GemmPlan>, CudaError> {
        let block_scaled = BlockScaledGemm::new(gpu, self, operands)?;
        Ok(block_scaled.map(|block_scaled| GemmPlan {
            choice: GemmChoice::Cached,
            algorithm: Some(Algorithm::BlockScaled),
            work: Work::new(move |stream| block_scaled.enqueue(stream)),
        }))
    }

    /// The error for an FP8 GEMM that this GPU cannot compute.
    fn unsupported(&self, gpu: &Gpu) -> CudaError {
        let info = gpu.info();
        let text = format!(
            "{self} has no algorithm on {} ({}): FP8 needs compute capability 8.9 or newer, scales of rows, tiles and blocks 9.0, and \
             sizes that are multiples of 16; choose another precision.recipe, or keep this layer in bf16",
            info.name, info.arch
        );
        CudaError::Library { call: "cuBLASLt", text }
    }

    /// Floating-point operations of one run.
    pub fn flops(&self) -> f64 {
        2.0 * self.m as f64 * self.n as f64 * self.k as f64
    }
}

/// The implementations that may compute a GEMM, with its operands.
struct Implementations {
    matmul: Matmul,
    block_scaled: Option<BlockScaledGemm>,
}

impl Implementations {
    fn new(gpu: &Gpu, gemm: &Gemm, operands: &GemmOperands) -> Result<Implementations, CudaError> {
        let matmul = Matmul::new(gpu.blas()?, gemm, operands)?;
        // The first preferred name decides.
        let mut named = gpu.preferred().iter();
        let library_alone = named
            .find(|name| Gemm::ALGORITHM_NAMES.contains(&name.as_str()))
            .is_some_and(|name| name != Gemm::BLOCK_SCALED);
        let block_scaled = if library_alone { None } else { BlockScaledGemm::new(gpu, gemm, operands)? };
        Ok(Implementations { matmul, block_scaled })
    }

    /// The usable algorithms: cuBLASLt's in its order of preference, then the block-scaled kernel.
    fn candidates(&self) -> Result<Vec<Algorithm>, CudaError> {
        let library = self.matmul.candidates()?.into_iter().map(Algorithm::CublasLt);
        Ok(library.chain(self.block_scaled.is_some().then_some(Algorithm::BlockScaled)).collect())
    }

    /// True if a recorded algorithm supports this GEMM on this GPU.
    fn supports(&self, algorithm: &Algorithm) -> bool {
        match algorithm {
            Algorithm::CublasLt(algorithm) => self.matmul.supports(algorithm),
            Algorithm::BlockScaled => self.block_scaled.is_some(),
        }
    }

    /// Enqueues the GEMM on `stream`.
    fn enqueue(&self, algorithm: &Algorithm, stream: &Stream) -> Result<(), CudaError> {
        match (algorithm, &self.block_scaled) {
            (Algorithm::CublasLt(algorithm), _) => self.matmul.enqueue(algorithm, stream),
            (Algorithm::BlockScaled, Some(block_scaled)) => block_scaled.enqueue(stream),
            (Algorithm::BlockScaled, None) => unreachable!("an unsupported algorithm is not chosen"),
        }
    }
}

impl fmt::Display for Gemm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Gemm { m, n, k, a, b, d, .. } = self;
        let t = |operand: &OperandLayout| if operand.transposed { "^T" } else { "" };
        let equals = if self.accumulate { "+=" } else { "=" };
        write!(f, "{d}[{m}, {n}] {equals} {}{} {}{} over {k}", a.dtype, t(a), b.dtype, t(b))
    }
}
