//! The cost of the loss: the kernels of its chunks.
//!
//! Each chunk writes its logits and reads them again for the loss and in two GEMMs, and from the second chunk
//! on dw, f32 of the size of the weight, is read, added to and written. So few large chunks are faster than
//! many small ones.

use super::LinearCrossEntropyGrad;
use std::ops::Range;
use xtrain_program::{Arithmetic, Cost, KernelCost, LinearGemm, ScaledGemm};
use xtrain_tensor::{DType, TensorType};

/// The operands of a loss.
pub(super) struct Loss {
    pub(super) grad: LinearCrossEntropyGrad,
    pub(super) x: TensorType,
    /// Rows of the weight.
    pub(super) vocab: usize,
    /// The formats of the GEMMs on FP8 operands, in the order of [`LinearGemm::ALL`].
    pub(super) formats: [Option<ScaledGemm>; 3],
}

impl Loss {
    /// The cost of all `chunks`, of which `casts` gives those of x and of dlogits by the number of tokens.
    pub(super) fn cost(
        &self,
        chunks: impl Iterator<Item = Range<usize>>,
        casts: impl Fn(usize) -> [Cost; 2],
    ) -> Cost {
        let mut kernels = Vec::new();
        for (n, tokens) in chunks.enumerate() {
            self.chunk(tokens.len(), n == 0, casts(tokens.len()), &mut kernels);
        }
        Cost { kernels }
    }

    /// The kernels of a chunk; the first one writes dw, the others add to it.
    fn chunk(
        &self,
        tokens: usize,
        is_first: bool,
        [x_cast, dlogits_cast]: [Cost; 2],
        kernels: &mut Vec<KernelCost>,
    ) {
        let (v, d) = (self.vocab, self.x.shape[1]);
        let [_, computes_dx, computes_dw] = self.grad.computes();
        let bytes = |rows, cols| self.x.dtype.bytes(rows * cols) as f64;
        let logits = bytes(tokens, v);
        kernels.extend(x_cast.kernels);
        kernels.push(self.gemm(LinearGemm::Fprop, [tokens, v, d], logits));
        let moved = if computes_dx || computes_dw { 2.0 * logits } else { logits };
        kernels.push(KernelCost::of_bytes(moved));
        kernels.extend(dlogits_cast.kernels);
        if computes_dx {
            kernels.push(self.gemm(LinearGemm::Dgrad, [tokens, d, v], bytes(tokens, d)));
        }
        if let Some(dw) = self.grad.dw {
            let bytes = dw.bytes(v * d) as f64;
            let gemm = self.gemm(LinearGemm::Wgrad, [v, d, tokens], bytes);
            kernels.push(KernelCost { added_bytes: if is_first { 0.0 } else { bytes }, ..gemm });
        }
    }

    fn gemm(&self, kind: LinearGemm, mnk: [usize; 3], written_bytes: f64) -> KernelCost {
        let [m, n, k] = mnk;
        let scaling = self.formats[kind as usize].map(|gemm| gemm.operands.map(|operand| operand.scaling));
        let operands = if scaling.is_some() { DType::E4M3 } else { self.x.dtype };
        let read_bytes = (operands.bytes(m * k) + operands.bytes(n * k)) as f64;
        let arithmetic = Arithmetic::Gemm { mnk, operands, scaling };
        KernelCost { arithmetic, bytes: read_bytes + written_bytes, added_bytes: 0.0 }
    }
}
