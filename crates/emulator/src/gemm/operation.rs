//! A GEMM, `D = alpha op(A) op(B) + beta C (+ bias)`: its conditions and its execution.
//!
//! The refusals are those of the cuBLAS documentation, "cublasLtMatmul()" and "Narrow Precision Data Types
//! Usage". Sums are f32 and rounded to D's type once, after everything is added.

use super::fp8::{self, Scales};
use super::matrix::Matrix;
use super::{Algorithm, Desc, Element, GemmLayout, Preference, Refusal, ScaleMode, plain};
use crate::memory::Memory;
use crate::numbers::{E4M3, E5M2};
use crate::poison::POISON;
use crate::settings::Arch;
use crate::work::GemmWork;

/// A GEMM that the library accepts, without the addresses of its matrices.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GemmOperation {
    /// m, n, k.
    sizes: [usize; 3],
    desc: Desc,
    /// Layouts of A, B, C and D.
    layouts: [GemmLayout; 4],
}

/// Arguments of one call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CallOperands {
    pub(crate) alpha: f32,
    pub(crate) beta: f32,
    /// Addresses of A, B, C and D.
    pub(crate) matrices: [u64; 4],
    pub(crate) workspace: u64,
    pub(crate) workspace_bytes: u64,
}

/// Required multiple for FP8 GEMMs: of addresses and of D's leading dimension in bytes, of sizes and other
/// leading dimensions in elements.
const FP8_MULTIPLE: usize = 16;

/// Alignment of the workspace, in bytes.
const WORKSPACE_ALIGNMENT: u64 = 256;

impl GemmOperation {
    /// The GEMM of a descriptor and the layouts of A, B, C and D. Refused if `arch` does not support it.
    pub(crate) fn new(arch: Arch, desc: Desc, layouts: [GemmLayout; 4]) -> Result<GemmOperation, Refusal> {
        let [a, b, c, d] = layouts;
        let size = |layout: GemmLayout, is_swapped: bool| match is_swapped {
            true => (layout.columns, layout.rows),
            false => (layout.rows, layout.columns),
        };
        let ((m, k), (k_of_b, n)) = (size(a, desc.transposed[0]), size(b, desc.transposed[1]));
        let sizes_agree = k_of_b == k && [size(c, false), size(d, false)] == [(m, n); 2];
        let are_stored = layouts.iter().all(|of| of.columns > 0 && of.rows > 0 && of.leading >= of.rows);
        let has_pointer = !desc.has_bias || desc.bias != 0;
        if !sizes_agree || !are_stored || !has_pointer || c.element != d.element {
            return Err(Refusal::InvalidValue);
        }
        let gemm = GemmOperation { sizes: [m, n, k], desc, layouts };
        let is_supported = match (a.element, b.element, d.element) {
            (Element::F32, Element::F32, Element::F32)
            | (Element::Bf16, Element::Bf16, Element::F32 | Element::Bf16) => {
                desc.scales == [0; 2] && desc.scale_modes == [ScaleMode::Tensor; 2]
            }
            (Element::E4m3, Element::E4m3 | Element::E5m2, _) | (Element::E5m2, Element::E4m3, _) => {
                !d.element.is_fp8() && gemm.is_supported_fp8(arch)
            }
            _ => false,
        };
        if is_supported { Ok(gemm) } else { Err(Refusal::NotSupported) }
    }

    fn is_supported_fp8(&self, arch: Arch) -> bool {
        let GemmOperation { sizes, desc, layouts: [a, b, c, d] } = *self;
        let is_hopper = arch == Arch { major: 9, minor: 0 };
        let has_modes = match desc.scale_modes {
            [ScaleMode::Tensor, ScaleMode::Tensor] => arch >= Arch { major: 8, minor: 9 },
            [ScaleMode::OuterVector, ScaleMode::OuterVector] => is_hopper,
            [ScaleMode::Vector128, ScaleMode::Vector128 | ScaleMode::Block128]
            | [ScaleMode::Block128, ScaleMode::Vector128] => is_hopper && !desc.fast_accumulation,
            _ => false,
        };
        let has_scales = desc.scale_modes.iter().zip(desc.scales).all(|(mode, address)| match mode {
            ScaleMode::Tensor => address.is_multiple_of(4),
            ScaleMode::OuterVector => address != 0 && address.is_multiple_of(4),
            ScaleMode::Vector128 | ScaleMode::Block128 => address != 0 && address.is_multiple_of(16),
        });
        let in_bytes = [c, d].map(|of| of.leading * of.element.bytes());
        let extents = sizes.into_iter().chain([a.leading, b.leading]).chain(in_bytes);
        // A GEMM into f32 would have a bf16 bias, which needs an attribute that is absent here.
        let has_bias = !desc.has_bias || d.element == Element::Bf16;
        desc.transposed == [true, false]
            && has_modes
            && has_scales
            && has_bias
            && extents.into_iter().all(|extent| extent.is_multiple_of(FP8_MULTIPLE))
    }

    fn is_fp8(&self) -> bool {
        self.layouts[0].element.is_fp8()
    }

    /// Required alignment of the addresses of A, B, C and D in bytes.
    fn alignments(&self) -> [u64; 4] {
        self.layouts.map(|of| if self.is_fp8() { FP8_MULTIPLE as u64 } else { of.element.bytes() as u64 })
    }

    /// The algorithms that a preference allows.
    pub(crate) fn algorithms(&self, preference: &Preference) -> Vec<Algorithm> {
        let alignments = self.alignments().into_iter().zip(preference.alignments);
        if alignments.into_iter().any(|(needed, kept)| u64::from(kept) < needed) {
            return Vec::new();
        }
        let fits = |of: &Algorithm| {
            of.workspace_bytes() <= preference.workspace_bytes && of.reduction() & !preference.reductions == 0
        };
        Algorithm::ALL.into_iter().filter(fits).collect()
    }

    /// The GEMM of these operands as work for a stream.
    pub(crate) fn work(self, algorithm: Algorithm, operands: CallOperands) -> Result<GemmWork, Refusal> {
        let CallOperands { matrices, workspace, workspace_bytes, .. } = operands;
        let needed = algorithm.workspace_bytes();
        let has_workspace = needed <= workspace_bytes && (needed == 0 || workspace != 0);
        if !has_workspace || !workspace.is_multiple_of(WORKSPACE_ALIGNMENT) || matrices.contains(&0) {
            return Err(Refusal::InvalidValue);
        }
        if matrices.iter().zip(self.alignments()).any(|(address, needed)| !address.is_multiple_of(needed)) {
            return Err(Refusal::NotSupported);
        }
        let bias = self.desc.has_bias.then_some(self.desc.bias);
        let workspace = (needed > 0).then_some(workspace);
        let others = self.desc.scales.into_iter().chain(bias).chain(workspace);
        Ok(GemmWork {
            operands: matrices.into_iter().chain(others).collect(),
            seconds: algorithm.seconds(self.sizes),
            run: Box::new(move |memory| self.run(memory, algorithm, &operands)),
        })
    }

    fn run(&self, memory: &Memory, algorithm: Algorithm, operands: &CallOperands) -> Result<(), String> {
        let ([m, n, _], CallOperands { alpha, beta, matrices, .. }) = (self.sizes, *operands);
        overwrite(memory, operands.workspace, algorithm.workspace_bytes())?;
        let names = ["A", "B", "C", "D"];
        let [a, b, c, d] = std::array::from_fn(|of| Matrix {
            name: names[of],
            address: matrices[of],
            layout: self.layouts[of],
        });
        let inputs = [a.read(memory)?, b.read(memory)?];
        let mut sums = if self.is_fp8() {
            let scales = |of: usize| {
                let (mode, address) = (self.desc.scale_modes[of], self.desc.scales[of]);
                Scales::read(memory, names[of], mode, address, [self.sizes[of], self.sizes[2]])
            };
            let least = [0, 1].map(|of| match self.layouts[of].element {
                Element::E5m2 => E5M2.least_exponent(),
                _ => E4M3.least_exponent(),
            });
            let scales = [scales(0)?, scales(1)?];
            fp8::sums(self.sizes, &inputs, &scales, least, !self.desc.fast_accumulation)
        } else {
            plain::sums(self.sizes, &inputs, self.desc.transposed, algorithm == Algorithm::Split)
        };
        let c = if beta != 0.0 { c.read(memory)? } else { vec![0.0; m * n] };
        let bias = match self.desc.has_bias {
            true => {
                let layout = GemmLayout { element: d.layout.element, rows: m, columns: 1, leading: m };
                Matrix { name: "the bias", address: self.desc.bias, layout }.read(memory)?
            }
            false => vec![0.0; m],
        };
        for (sums, c) in sums.chunks_mut(m).zip(c.chunks(m)) {
            for ((sum, c), bias) in sums.iter_mut().zip(c).zip(&bias) {
                *sum = alpha * *sum + beta * c + bias;
            }
        }
        d.write(memory, &sums)
    }
}

/// Overwrites a workspace, as partial sums do.
fn overwrite(memory: &Memory, workspace: u64, bytes: u64) -> Result<(), String> {
    let pieces = memory.pieces(workspace, bytes).ok_or_else(|| {
        format!("a GEMM has a workspace that is out of bounds: {}", memory.describe(workspace, bytes))
    })?;
    pieces.into_iter().for_each(|piece| piece.fill(POISON));
    Ok(())
}
