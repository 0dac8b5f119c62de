//! Matrix products on a card: `D[m, n] = A[m, k] B[k, n] (+ D) (+ bias[n])`, summed in f32 and rounded once.
//!
//! Matrices are stored row after row. cuBLASLt multiplies, or, on Hopper with scales for every 128 along k, a kernel of our own ([`promoted`]):
//! which, and by which of its algorithms, is measured once a card and kept on the disk ([`choose`]). Where neither takes a product, a slow kernel
//! that takes any does ([`own`]). Every algorithm that may be chosen gives the same
//! bits in every run: none adds in the order in which blocks happen to end. f32 factors are multiplied as f32, never as TF32.
//!
//! Factors of FP8 have scales ([`Scaling`]) beside them: their reciprocals, which multiply what the numbers stand for. Hopper's tensor cores
//! want both factors stored along what is summed, and keep 14 bits of a sum; so partial sums are promoted to f32 registers, unless fast
//! accumulation is asked for.

mod block_scaled;
mod choose;
mod fallback;
mod key;
mod matmul;
mod noise;

use crate::choice::preferred_algorithms;
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

/// A factor of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OperandLayout {
    /// Its element type.
    pub dtype: DType,
    /// Whether its transpose is what stands in memory: `[k, m]` for A, `[n, k]` for B.
    pub transposed: bool,
    /// Elements from one row in memory to the next.
    pub stride: usize,
    /// Which elements of an FP8 factor share a scale, seen as `[m, k]` or `[n, k]`.
    pub scaling: Option<Scaling>,
}

/// A product: all that its algorithm is chosen by, except how the operands are aligned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Gemm {
    /// Rows of A and D.
    pub m: usize,
    /// Columns of B and D.
    pub n: usize,
    /// Columns of A, rows of B.
    pub k: usize,
    /// The left factor.
    pub a: OperandLayout,
    /// The right factor.
    pub b: OperandLayout,
    /// The element type of D, and of the bias.
    pub d: DType,
    /// Elements from one row of D to the next.
    pub d_stride: usize,
    /// Whether the product is added to what stands in D.
    pub accumulate: bool,
    /// Whether sums of FP8 products may stay in the tensor cores, with the bits that they keep.
    pub fast_accumulation: bool,
}

/// Where a product's operands are. They keep their places for as long as what is made ready for them is used.
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
    /// The reciprocal scales of A and B, where they are FP8, laid out as [`Scaling::shape`] says.
    pub scales: Option<[DevicePtr; 2]>,
    /// [`Gemm::workspace`], of which nothing is expected and nothing left.
    pub workspace: DevicePtr,
}

/// A product that is ready.
pub struct GemmPlan {
    /// How its algorithm was found.
    pub choice: GemmChoice,
    /// What that is; none where only the slow kernel takes the product.
    pub algorithm: Option<Algorithm>,
    /// The product.
    pub work: Work,
}

/// What a product is computed by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// cuBLASLt's, as it keeps it.
    CublasLt([u64; 8]),
    /// The kernel of our own that promotes the sums of every 128 products.
    BlockScaled,
}

/// How an algorithm was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GemmChoice {
    /// It was the fastest just now.
    Timed,
    /// It was chosen before: earlier in this process, or in one that kept it on the disk.
    Cached,
    /// There is none: the slow kernel.
    Fallback,
}

impl Gemm {
    /// The kernel of our own that takes any shape.
    pub const FALLBACK_SOURCE: KernelSource = fallback::SOURCE;

    /// The one for scales of every 128 along k.
    pub const BLOCK_SCALED_SOURCE: KernelSource = block_scaled::SOURCE;

    /// The implementations that `XTRAIN_PREFER` takes, whatever their speed, for products that both are for: [`Algorithm::CublasLt`] and
    /// [`Algorithm::BlockScaled`].
    pub const ALGORITHM_NAMES: [&str; 2] = ["cublaslt", Gemm::BLOCK_SCALED];

    const BLOCK_SCALED: &str = "promoted";

    /// Bytes that algorithms may work in; those that want more are not used.
    pub const WORKSPACE_BYTES: usize = 32 << 20;

    /// The product of factors of one type, their rows without gaps; `a_transposed` and `b_transposed` as [`OperandLayout::transposed`].
    pub fn new(
        [m, n, k]: [usize; 3],
        dtype: DType,
        [a_transposed, b_transposed]: [bool; 2],
        d: DType,
    ) -> Gemm {
        let factor = |transposed, stride| OperandLayout { dtype, transposed, stride, scaling: None };
        let a = factor(a_transposed, if a_transposed { m } else { k });
        let b = factor(b_transposed, if b_transposed { k } else { n });
        Gemm { m, n, k, a, b, d, d_stride: n, accumulate: false, fast_accumulation: false }
    }

    /// The product of FP8 factors, both stored along k: `[m, k]` and `[n, k]`.
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

    /// The same with A's rows in memory `stride` elements apart.
    pub fn a_stride(self, stride: usize) -> Gemm {
        Gemm { a: OperandLayout { stride, ..self.a }, ..self }
    }

    /// The same with D's rows `stride` elements apart.
    pub fn d_stride(self, stride: usize) -> Gemm {
        Gemm { d_stride: stride, ..self }
    }

    /// The same, added to what stands in D where `accumulate` is true.
    pub fn accumulate(self, accumulate: bool) -> Gemm {
        Gemm { accumulate, ..self }
    }

    /// The tensor that a product works in, for [`CudaKernel::workspace`](crate::CudaKernel::workspace).
    pub fn workspace() -> TensorType {
        TensorType::new(DType::U8, [Gemm::WORKSPACE_BYTES])
    }

    /// Makes the product ready. The first time that it is met on a card its algorithms are timed, which overwrites D and the workspace.
    ///
    /// # Panics
    /// If a kernel on a card is for no such element types: factors are f32, bf16, or FP8 with scales; D is f32, or bf16 of other than f32
    /// factors.
    pub fn prepare(&self, gpu: &Gpu, operands: &GemmOperands) -> Result<Work, CudaError> {
        self.plan(gpu, operands).map(|plan| plan.work)
    }

    /// As [`Gemm::ready`], with how the algorithm was found.
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

    /// The product by the kernel of our own that takes any shape and is slow.
    pub fn fallback(&self, gpu: &Gpu, operands: &GemmOperands) -> Result<GemmPlan, CudaError> {
        let work = fallback::prepare(gpu, self, operands)?;
        Ok(GemmPlan { choice: GemmChoice::Fallback, algorithm: None, work })
    }

    /// The product by the kernel of our own that promotes the sums of every 128 products, where it takes it: on Hopper, of factors that are
    /// scaled by tiles, or the second by blocks, of sizes that are multiples of 16, without a bias.
    pub fn block_scaled(&self, gpu: &Gpu, operands: &GemmOperands) -> Result<Option<GemmPlan>, CudaError> {
        let block_scaled = BlockScaledGemm::new(gpu, self, operands)?;
        Ok(block_scaled.map(|block_scaled| GemmPlan {
            choice: GemmChoice::Cached,
            algorithm: Some(Algorithm::BlockScaled),
            work: Work::new(move |stream| block_scaled.enqueue(stream)),
        }))
    }

    /// Why there is no such product of FP8 factors here.
    fn unsupported(&self, gpu: &Gpu) -> CudaError {
        let info = gpu.info();
        let text = format!(
            "{self} has no algorithm on {} ({}): FP8 needs compute capability 8.9 or newer, scales of rows, tiles and blocks 9.0, and \
             sizes that are multiples of 16; choose another precision.recipe, or keep this product in bf16",
            info.name, info.arch
        );
        CudaError::Library { call: "cuBLASLt", text }
    }

    /// Floating-point operations of one run.
    pub fn flops(&self) -> f64 {
        2.0 * self.m as f64 * self.n as f64 * self.k as f64
    }
}

/// A product with its operands, as each that may compute it is told of it.
struct Implementations {
    matmul: Matmul,
    block_scaled: Option<BlockScaledGemm>,
}

impl Implementations {
    fn new(gpu: &Gpu, gemm: &Gemm, operands: &GemmOperands) -> Result<Implementations, CudaError> {
        let matmul = Matmul::new(gpu.blas()?, gemm, operands)?;
        // The first one of those that are named.
        let mut named = preferred_algorithms().into_iter();
        let library_alone = named
            .find(|name| Gemm::ALGORITHM_NAMES.contains(&name.as_str()))
            .is_some_and(|name| name != Gemm::BLOCK_SCALED);
        let block_scaled = if library_alone { None } else { BlockScaledGemm::new(gpu, gemm, operands)? };
        Ok(Implementations { matmul, block_scaled })
    }

    /// Those that may be used, the library's first, its favourite before its others.
    fn candidates(&self) -> Result<Vec<Algorithm>, CudaError> {
        let library = self.matmul.candidates()?.into_iter().map(Algorithm::CublasLt);
        Ok(library.chain(self.block_scaled.is_some().then_some(Algorithm::BlockScaled)).collect())
    }

    /// Whether one that was kept can be used for this product, on this card.
    fn supports(&self, algorithm: &Algorithm) -> bool {
        match algorithm {
            Algorithm::CublasLt(algorithm) => self.matmul.supports(algorithm),
            Algorithm::BlockScaled => self.block_scaled.is_some(),
        }
    }

    /// Puts the product into `stream`.
    fn enqueue(&self, algorithm: &Algorithm, stream: &Stream) -> Result<(), CudaError> {
        match (algorithm, &self.block_scaled) {
            (Algorithm::CublasLt(algorithm), _) => self.matmul.enqueue(algorithm, stream),
            (Algorithm::BlockScaled, Some(block_scaled)) => block_scaled.enqueue(stream),
            (Algorithm::BlockScaled, None) => unreachable!("what is not taken is not chosen"),
        }
    }
}

impl fmt::Display for Gemm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Gemm { m, n, k, a, b, d, .. } = self;
        let t = |factor: &OperandLayout| if factor.transposed { "^T" } else { "" };
        let equals = if self.accumulate { "+=" } else { "=" };
        write!(f, "{d}[{m}, {n}] {equals} {}{} {}{} over {k}", a.dtype, t(a), b.dtype, t(b))
    }
}
