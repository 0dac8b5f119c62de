//! The cost of the loss: the kernels of its chunks.
//!
//! Each chunk writes its logits and reads them again for the loss and in two GEMMs, and from the second chunk
//! on dw, f32 of the size of the weight, is read, added to and written. So few large chunks are faster than
//! many small ones.

use super::LinearCrossEntropyGrad;
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
    /// The cost of `chunks`, each with the number of chunks of so many tokens; `casts` gives the casts of x
    /// and of dlogits of such a chunk.
    pub(super) fn cost(
        &self,
        chunks: impl IntoIterator<Item = (usize, usize)>,
        casts: impl Fn(usize) -> [Cost; 2],
    ) -> Cost {
        let mut kernels = Vec::new();
        let mut is_first = true;
        for (tokens, count) in chunks.into_iter().filter(|(_, count)| *count > 0) {
            self.chunks(tokens, count, is_first, casts(tokens), &mut kernels);
            is_first = false;
        }
        Cost { kernels, sent_bytes: 0.0 }
    }

    /// The kernels of `count` chunks; the first chunk of all writes dw, the others add to it.
    fn chunks(
        &self,
        tokens: usize,
        count: usize,
        is_first: bool,
        [x_cast, dlogits_cast]: [Cost; 2],
        kernels: &mut Vec<KernelCost>,
    ) {
        let (v, d) = (self.vocab, self.x.shape[1]);
        let [_, computes_dx, computes_dw] = self.grad.computes();
        let bytes = |rows, cols| self.x.dtype.bytes(rows * cols) as f64;
        let mut add = |kernel: KernelCost, times| kernels.push(KernelCost { times, ..kernel });
        let logits = bytes(tokens, v);
        x_cast.kernels.into_iter().for_each(|kernel| add(kernel, count));
        add(self.gemm(LinearGemm::Fprop, [tokens, v, d], logits), count);
        let moved = if computes_dx || computes_dw { 2.0 * logits } else { logits };
        add(KernelCost::of_bytes(moved), count);
        dlogits_cast.kernels.into_iter().for_each(|kernel| add(kernel, count));
        if computes_dx {
            add(self.gemm(LinearGemm::Dgrad, [tokens, d, v], bytes(tokens, d)), count);
        }
        if let Some(dw) = self.grad.dw {
            let bytes = dw.bytes(v * d) as f64;
            let gemm = self.gemm(LinearGemm::Wgrad, [v, d, tokens], bytes);
            let written = usize::from(is_first);
            add(gemm, written);
            add(KernelCost { added_bytes: bytes, ..gemm }, count - written);
        }
    }

    fn gemm(&self, kind: LinearGemm, mnk: [usize; 3], written_bytes: f64) -> KernelCost {
        let [m, n, k] = mnk;
        let scaling = self.formats[kind as usize].map(|gemm| gemm.operands.map(|operand| operand.scaling));
        let operands = if scaling.is_some() { DType::E4M3 } else { self.x.dtype };
        let read_bytes = (operands.bytes(m * k) + operands.bytes(n * k)) as f64;
        let arithmetic = Arithmetic::Gemm { mnk, operands, scaling };
        KernelCost { times: 1, arithmetic, bytes: read_bytes + written_bytes, added_bytes: 0.0 }
    }
}
