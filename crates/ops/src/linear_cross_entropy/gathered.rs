//! The loss of gathered rows on a GPU: the tokens with a target are listed, and chunks of their rows are
//! copied to workspace. Rows after the last listed token are zeros, so that GEMMs have fixed sizes.

use super::chunks::{ChunkRows, Chunks, ListPart, RowTokens, zeros};
use super::portions::Portions;
use xtrain_cuda::{CudaError, CudaOutput, CudaTensor, DevicePtr, Variants, Work};
use xtrain_tensor::DType;

/// The work on gathered rows: all variants but the first.
pub(super) struct GatheredChunks<'a> {
    pub(super) chunks: Chunks<'a>,
    pub(super) portions: Portions,
    /// The tokens with a target, then the number of them before the small chunks, and 1 if the variant
    /// computes too few.
    pub(super) list: DevicePtr,
    /// Rows of x of a large chunk, then those of dx.
    pub(super) x: DevicePtr,
}

impl GatheredChunks<'_> {
    /// Appends the work of all variants but the first to `parts`.
    pub(super) fn append(
        &self,
        w_vd: &CudaTensor,
        outputs: &[CudaOutput],
        [dx_td, dw_vd]: [Option<CudaOutput>; 2],
        parts: &mut Vec<Work>,
    ) -> Result<(), CudaError> {
        let any = Variants::only(|number| number > 0);
        let Portions { large, small, .. } = self.portions;
        for number in 1..self.portions.variants() {
            let before = self.portions.chunks(number)[0] * large;
            let list = self.chunks.list(self.list, self.portions.rows(number), before)?;
            parts.push(list.only_in(Variants::only(|n| n == number)));
        }
        parts.push(zeros(self.chunks.terms.ty, self.chunks.terms.place).only_in(any));
        if let Some(dx) = dx_td {
            parts.push(zeros(dx.ty, dx.place).only_in(any));
        }
        let holds_a_sum = dw_vd.is_some_and(|dw| dw.accumulate);
        if let Some(dw) = dw_vd.filter(|_| !holds_a_sum) {
            parts.push(zeros(dw.ty, dw.place).only_in(Variants::only(|number| number == 1)));
        }
        let [most_large, most_small] = self.portions.most_chunks();
        let outputs_of_chunk = [dx_td, dw_vd];
        for count in [(large, most_large), (small, most_small)].map(|(count, most)| count.min(most * count)) {
            self.warm_up(count, w_vd, outputs_of_chunk)?;
        }
        for n in 0..most_large {
            let part = ListPart { tokens: self.entry(n * large), before: DevicePtr::default() };
            let runs = Variants::only(|number| self.portions.chunks(number)[0] > n);
            let first = if n == 0 && !holds_a_sum { runs } else { Variants::NONE };
            parts.push(self.chunk(large, part, [runs, first], w_vd, outputs_of_chunk)?);
        }
        for n in 0..most_small {
            let part = ListPart { tokens: self.entry(n * small), before: self.entry(self.tokens()) };
            let runs = Variants::only(|number| self.portions.chunks(number)[1] > n);
            let is_first = |number| runs.contains(number) && self.portions.chunks(number)[0] == 0;
            let first = if n == 0 && !holds_a_sum { Variants::only(is_first) } else { Variants::NONE };
            parts.push(self.chunk(small, part, [runs, first], w_vd, outputs_of_chunk)?);
        }
        parts.push(self.chunks.sum(outputs, Some(self.entry(self.tokens() + 1)))?.only_in(any));
        Ok(())
    }

    /// The work of one chunk of `count` rows, those of `part`, in the variants `runs`. In the variants
    /// `first`, dw holds no sum yet.
    fn chunk(
        &self,
        count: usize,
        part: ListPart,
        [runs, first]: [Variants; 2],
        w_vd: &CudaTensor,
        [dx_td, dw_vd]: [Option<CudaOutput>; 2],
    ) -> Result<Work, CudaError> {
        let chunks = &self.chunks;
        let rows = ChunkRows { count, x_cd: self.x, tokens: RowTokens::Listed(part) };
        let mut all = vec![chunks.move_rows("gather", part, count, [chunks.x_td.place, self.x])?];
        chunks.logits(&rows, w_vd, &mut all)?;
        all.push(chunks.rows(&rows)?);
        if let Some(dw) = dw_vd {
            let later = Variants::only(|number| runs.contains(number) && !first.contains(number));
            for (variants, accumulate) in [(first, false), (later, true)] {
                let mut gemms = Vec::new();
                if variants != Variants::NONE {
                    chunks.dw(&rows, dw, accumulate, &mut gemms)?;
                }
                all.push(Work::sequence(gemms).only_in(variants));
            }
        }
        // The GEMM of dw has read the rows of x, so those of dx take their place.
        if let Some(dx) = dx_td {
            chunks.dx(&rows, w_vd, self.x, &mut all)?;
            all.push(chunks.move_rows("scatter", part, count, [self.x, dx.place])?);
        }
        Ok(Work::sequence(all).only_in(runs))
    }

    /// Runs the GEMMs of a chunk of `count` rows once: a part may be captured with chunks that have not run.
    fn warm_up(
        &self,
        count: usize,
        w_vd: &CudaTensor,
        [dx_td, dw_vd]: [Option<CudaOutput>; 2],
    ) -> Result<(), CudaError> {
        let rows = ChunkRows { count, x_cd: self.x, tokens: RowTokens::From(0) };
        let mut gemms = Vec::new();
        if count > 0 {
            self.chunks.logits(&rows, w_vd, &mut gemms)?;
            for (dw, accumulate) in dw_vd.into_iter().flat_map(|dw| [(dw, false), (dw, true)]) {
                self.chunks.dw(&rows, dw, accumulate, &mut gemms)?;
            }
            if dx_td.is_some() {
                self.chunks.dx(&rows, w_vd, self.x, &mut gemms)?;
            }
        }
        Work::sequence(gemms).warm_up(self.chunks.gpu)
    }

    /// The place of an entry of the list.
    fn entry(&self, n: usize) -> DevicePtr {
        self.list.offset(DType::I32.bytes(n))
    }

    fn tokens(&self) -> usize {
        self.chunks.x_td.ty.shape[0]
    }
}
