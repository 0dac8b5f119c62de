//! The emulated cuBLASLt: its objects, which describe GEMMs, and its algorithms.
//!
//! * [`operation`] checks a GEMM, reads its operands and writes D.
//! * [`plain`] multiplies f32 and bf16 matrices; [`fp8`] multiplies FP8 matrices with the precision of
//!   Hopper's tensor cores.
//!
//! Deliberately absent: other types, batches, epilogues other than a bias, `alpha` and `beta` in device
//! memory.

mod fp8;
mod matrix;
pub(crate) mod operation;
mod plain;
#[cfg(test)]
mod tests;

#[cfg(test)]
pub(crate) use fp8::tests::defined as defined_fp8_sum;
pub(crate) use fp8::{AT_ONCE as FP8_PRODUCTS, add as add_fp8_products};

use crate::status::{self, Status};
use std::collections::HashMap;

/// A `cublasStatus_t` other than success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    NotInitialized = 1,
    InvalidValue = 7,
    ExecutionFailed = 13,
    NotSupported = 15,
}

impl From<Status> for Refusal {
    fn from(status: Status) -> Refusal {
        if status == status::INVALID_VALUE { Refusal::InvalidValue } else { Refusal::ExecutionFailed }
    }
}

/// The library's objects by their handles.
#[derive(Default)]
pub(crate) struct Objects {
    /// The device of each library handle.
    pub(crate) libraries: HashMap<usize, usize>,
    pub(crate) descs: HashMap<usize, Desc>,
    pub(crate) layouts: HashMap<usize, GemmLayout>,
    pub(crate) preferences: HashMap<usize, Preference>,
}

/// An element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Element {
    F32,
    Bf16,
    E4m3,
    E5m2,
}

impl Element {
    /// A `cudaDataType_t`.
    pub(crate) fn new(number: i32) -> Result<Element, Refusal> {
        let all = [(0, Element::F32), (14, Element::Bf16), (28, Element::E4m3), (29, Element::E5m2)];
        one_of(number, &all)
    }

    fn bytes(self) -> usize {
        match self {
            Element::F32 => 4,
            Element::Bf16 => 2,
            Element::E4m3 | Element::E5m2 => 1,
        }
    }

    fn is_fp8(self) -> bool {
        matches!(self, Element::E4m3 | Element::E5m2)
    }
}

/// A matrix layout: columns are stored one after the other and start `leading` elements apart.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GemmLayout {
    pub(crate) element: Element,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) leading: usize,
}

/// Elements of an FP8 operand that share a scale (`cublasLtMatmulMatrixScale_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ScaleMode {
    /// All elements.
    Tensor,
    /// The elements of one row of op(A), or of one column of op(B).
    OuterVector,
    /// 128 neighbours along k.
    Vector128,
    /// Blocks of 128 by 128.
    Block128,
}

const SCALE_MODES: [(i32, ScaleMode); 4] = [
    (0, ScaleMode::Tensor),
    (3, ScaleMode::OuterVector),
    (4, ScaleMode::Vector128),
    (5, ScaleMode::Block128),
];

/// A GEMM descriptor (`cublasLtMatmulDesc_t`).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Desc {
    /// True for a transposed operand: A, B.
    transposed: [bool; 2],
    has_bias: bool,
    bias: u64,
    /// Addresses of the scales of A and B.
    scales: [u64; 2],
    scale_modes: [ScaleMode; 2],
    fast_accumulation: bool,
}

/// The value that a number of the header stands for. Numbers of other values of the library are refused.
fn one_of<T: Copy>(number: i32, all: &[(i32, T)]) -> Result<T, Refusal> {
    let found = all.iter().find(|(of, _)| *of == number);
    found.map(|(_, value)| *value).ok_or(Refusal::NotSupported)
}

/// The bytes of an attribute.
fn exact<const N: usize>(value: &[u8]) -> Result<[u8; N], Refusal> {
    value.try_into().map_err(|_| Refusal::InvalidValue)
}

impl Desc {
    /// The descriptor of a compute and a scale type.
    pub(crate) fn new(compute: i32, scale: i32) -> Result<Desc, Refusal> {
        // CUBLAS_COMPUTE_32F and CUDA_R_32F
        if (compute, scale) != (68, 0) {
            return Err(Refusal::NotSupported);
        }
        Ok(Desc {
            transposed: [false; 2],
            has_bias: false,
            bias: 0,
            scales: [0; 2],
            scale_modes: [ScaleMode::Tensor; 2],
            fast_accumulation: false,
        })
    }

    /// Sets a `cublasLtMatmulDescAttributes_t`.
    pub(crate) fn set(&mut self, attribute: i32, value: &[u8]) -> Result<(), Refusal> {
        let number = || exact(value).map(i32::from_le_bytes);
        let address = || exact(value).map(u64::from_le_bytes);
        let index = attribute as usize;
        match attribute {
            // TRANSA and TRANSB
            3 | 4 => self.transposed[index - 3] = one_of(number()?, &[(0, false), (1, true)])?,
            // EPILOGUE: DEFAULT or BIAS
            7 => self.has_bias = one_of(number()?, &[(1, false), (4, true)])?,
            // BIAS_POINTER
            8 => self.bias = address()?,
            // A_SCALE_POINTER and B_SCALE_POINTER
            17 | 18 => self.scales[index - 17] = address()?,
            // FAST_ACCUM
            25 => self.fast_accumulation = exact(value)? != [0u8],
            // A_SCALE_MODE and B_SCALE_MODE
            31 | 32 => self.scale_modes[index - 31] = one_of(number()?, &SCALE_MODES)?,
            _ => return Err(Refusal::InvalidValue),
        }
        Ok(())
    }
}

/// A preference: limits on the algorithms that the heuristic offers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Preference {
    workspace_bytes: u64,
    /// Allowed reduction schemes: bits of `cublasLtReductionScheme_t`.
    reductions: u32,
    /// Alignment of the addresses of A, B, C and D in bytes.
    alignments: [u32; 4],
}

impl Default for Preference {
    fn default() -> Preference {
        Preference { workspace_bytes: 0, reductions: 7, alignments: [256; 4] }
    }
}

impl Preference {
    /// Sets a `cublasLtMatmulPreferenceAttributes_t`.
    pub(crate) fn set(&mut self, attribute: i32, value: &[u8]) -> Result<(), Refusal> {
        match attribute {
            1 => self.workspace_bytes = u64::from_le_bytes(exact(value)?),
            3 => self.reductions = u32::from_le_bytes(exact(value)?),
            5..=8 => self.alignments[attribute as usize - 5] = u32::from_le_bytes(exact(value)?),
            _ => return Err(Refusal::InvalidValue),
        }
        Ok(())
    }
}

/// An algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Algorithm {
    /// One sum along k, without a workspace.
    Whole,
    /// The sums of two halves of k, added in f32. It overwrites its workspace. FP8 sums are those of
    /// [`Algorithm::Whole`].
    Split,
}

impl Algorithm {
    const ALL: [Algorithm; 2] = [Algorithm::Whole, Algorithm::Split];

    /// Encodes it as a `cublasLtMatmulAlgo_t`.
    pub(crate) fn words(self) -> [u64; 8] {
        let mut words = [0; 8];
        (words[0], words[1]) = (u64::from_be_bytes(*b"emulated"), self as u64);
        words
    }

    /// Decodes a `cublasLtMatmulAlgo_t`.
    pub(crate) fn decode(words: [u64; 8]) -> Result<Algorithm, Refusal> {
        Algorithm::ALL.into_iter().find(|of| of.words() == words).ok_or(Refusal::InvalidValue)
    }

    /// Bytes of workspace that it needs.
    pub(crate) fn workspace_bytes(self) -> u64 {
        match self {
            Algorithm::Whole => 0,
            Algorithm::Split => 64 << 10,
        }
    }

    /// Its `cublasLtReductionScheme_t`: NONE or COMPUTE_TYPE.
    pub(crate) fn reduction(self) -> u32 {
        match self {
            Algorithm::Whole => 0,
            Algorithm::Split => 2,
        }
    }

    /// Nominal seconds of a GEMM, which depend only on its sizes.
    fn seconds(self, [m, n, k]: [usize; 3]) -> f64 {
        let whole = 2.0 * m as f64 * n as f64 * k as f64 / 1e11;
        match self {
            Algorithm::Whole => whole,
            Algorithm::Split if k < 1024 => whole * 1.05,
            Algorithm::Split => whole * 0.95,
        }
    }
}
