//! Attention kernels for Hopper's tensor cores, in bf16, for heads of 64 and 128 columns, with and without
//! documents. Each sum has one order, so results are deterministic.
#![allow(unsafe_code, reason = "it launches kernels")]

use super::Attention;
use super::block::scale_define;
use crate::device::{holding, table};
use std::num::NonZeroUsize;
use xtrain_cuda::{
    Arch, CudaError, Defines, DevicePtr, Gpu, HOPPER, Header, KernelSource, Launch, Operands, TENSOR_CORES,
    TensorMap, Work, kernel_struct,
};
use xtrain_tensor::{DType, TensorType};

/// Name of these kernels among the algorithms for attention.
pub(super) const NAME: &str = "hopper";

mod backward;

pub(super) use backward::{AROUND_BACKWARD, BACKWARD, DOCUMENTS};

/// Queries or keys of a group of four warps, and columns of a strip of a tile.
const UNIT: usize = 64;
/// Keys of a tile.
const KEYS: usize = 128;

const COMMON: Header = Header::new("attention/hopper/common.cuh", include_str!("common.cuh"));

pub(super) const FORWARD: KernelSource = KernelSource {
    headers: &[TENSOR_CORES, HOPPER, COMMON],
    archs: &[Arch::SM90],
    structs: &[Arguments::LAYOUT],
    variants: || TILES.iter().map(Tiles::defines).collect(),
    ..KernelSource::new("attention/hopper/forward.cu", include_str!("forward.cu"))
};

kernel_struct! {
    #[repr(align(64))]
    struct Arguments {
        q: TensorMap,
        kv: TensorMap,
        o: TensorMap,
        lse: DevicePtr,
        counter: DevicePtr,
        seq_len: u32,
        heads: u32,
        kv_heads: u32,
        sequences: u32,
        section: u32,
        padding: u32,
        doc_start: DevicePtr,
    }
}

/// A variant of the forward.
struct Tiles {
    head_dim: usize,
    documents: bool,
    /// Groups of four warps that multiply 64 queries each.
    consumers: usize,
    /// Tiles of keys, and of values, in shared memory.
    stages: usize,
    /// True if the consumers take turns.
    turns: bool,
}

/// One variant for each width of heads, with and without documents: the fastest on an H200.
const TILES: [Tiles; 4] = [
    Tiles { head_dim: 64, documents: false, consumers: 3, stages: 3, turns: true },
    Tiles { head_dim: 64, documents: true, consumers: 3, stages: 4, turns: false },
    Tiles { head_dim: 128, documents: false, consumers: 2, stages: 2, turns: false },
    Tiles { head_dim: 128, documents: true, consumers: 2, stages: 2, turns: true },
];

impl Tiles {
    fn defines(&self) -> Defines {
        vec![
            ("HEAD_DIM", self.head_dim as i64),
            ("CONSUMERS", self.consumers as i64),
            ("KEYS", KEYS as i64),
            ("STAGES", self.stages as i64),
            ("TURNS", self.turns.into()),
            ("SHARED_BYTES", self.shared_bytes() as i64),
            ("DOCUMENTS", self.documents.into()),
        ]
    }

    fn queries(&self) -> usize {
        UNIT * self.consumers
    }

    /// Queries of two tiles, keys and values, barriers, and the numbers of two tiles; with documents, the
    /// first tiles of keys of both.
    fn shared_bytes(&self) -> usize {
        let rows = 2 * self.queries() + 2 * self.stages * KEYS;
        let numbers = if self.documents { 2 } else { 1 };
        2 * self.head_dim * rows + 8 * (4 + 4 * self.stages) + 4 * 2 * numbers
    }
}

impl Attention {
    /// The forward by the kernel for Hopper, or `None` if this GPU lacks it or it does not support the
    /// operands.
    pub(super) fn hopper_forward(
        &self,
        gpu: &Gpu,
        operands: &Operands<'_>,
    ) -> Result<Option<Work>, CudaError> {
        let qkv = operands.inputs[0];
        let doc_start = operands.inputs.get(1);
        let fits = |tiles: &&Tiles| tiles.head_dim == self.head_dim && tiles.documents == doc_start.is_some();
        let tiles = TILES.iter().find(fits);
        let Some(tiles) = tiles.filter(|_| self.runs_on_hopper(gpu, qkv.ty)) else {
            return Ok(None);
        };
        let Attention { seq_len, heads, kv_heads, head_dim, .. } = *self;
        let (tokens, columns) = qkv.ty.shape.rows_cols();
        let sequences = tokens / seq_len;
        let map = |at, columns, rows| self.map(gpu, at, columns, sequences, rows);
        let counter = table(gpu, &[0u32])?;
        let arguments = Arguments {
            q: map(qkv.place, columns, tiles.queries())?,
            kv: map(qkv.place, columns, KEYS)?,
            o: map(operands.outputs[0].place, heads * head_dim, UNIT)?,
            lse: operands.outputs[1].place,
            counter: counter.pointer(),
            seq_len: seq_len as u32,
            heads: heads as u32,
            kv_heads: kv_heads as u32,
            sequences: sequences as u32,
            section: self.section(gpu.info().l2_bytes) as u32,
            padding: 0,
            doc_start: doc_start.map_or(DevicePtr(0), |starts| starts.place),
        };
        let mut defines = tiles.defines();
        defines.extend(scale_define(self.scale));
        let function = gpu.function(&FORWARD, &defines, "hopper_forward")?;
        let shared = tiles.shared_bytes() as u32;
        function.allow_shared(shared)?;
        let all = seq_len.div_ceil(tiles.queries()) * heads * sequences;
        let blocks = all.min(gpu.info().multiprocessors as usize) as u32;
        let launch = Launch::row(blocks, 128 * (tiles.consumers as u32 + 1)).shared(shared);
        // SAFETY: the kernel takes one `Arguments`, and the launch has the threads and the shared memory that
        // it uses. The maps, lse and document starts have the extents that `infer` checked; TMA accesses
        // nothing outside of the maps, and the kernel clamps document starts. The counter lives as long as
        // the work, whose launches follow each other, and is 0 between them.
        Ok(Some(holding(unsafe { Work::launch(function, launch, arguments) }, counter)))
    }

    /// The map of a matrix in boxes of so many rows of a sequence and 64 columns.
    fn map(
        &self,
        gpu: &Gpu,
        at: DevicePtr,
        columns: usize,
        sequences: usize,
        rows: usize,
    ) -> Result<TensorMap, CudaError> {
        let (extents, strides) = ([columns, self.seq_len, sequences], [columns, columns * self.seq_len]);
        TensorMap::new(gpu.context(), DType::BF16, at, &extents, &strides, &[UNIT, rows, 1])
    }

    /// True if the kernels support operands of this type, on this GPU.
    fn runs_on_hopper(&self, gpu: &Gpu, qkv: TensorType) -> bool {
        // The kernels count tiles in 32 bits.
        gpu.info().arch == Arch::SM90
            && Attention::is_hopper_type(qkv)
            && qkv.shape.rows_cols().0.checked_mul(self.heads).is_some_and(|rows| rows <= 1 << 31)
    }

    /// True if there are kernels for operands of this type.
    fn is_hopper_type(qkv: TensorType) -> bool {
        qkv.dtype == DType::BF16 && qkv.numel() > 0
    }

    /// Heads whose keys and values fill a third of L2 at most: whole groups of query heads, at least one.
    fn section(&self, l2_bytes: usize) -> usize {
        let of_group = 2 * 2 * self.seq_len * self.head_dim;
        let groups = NonZeroUsize::new(l2_bytes / 3 / of_group).map_or(1, NonZeroUsize::get);
        groups * (self.heads / self.kv_heads)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_memory_fits_a_block_of_hopper() {
        assert!(TILES.iter().all(|tiles| tiles.shared_bytes() <= 227 * 1024));
    }

    #[test]
    fn a_section_is_whole_groups_of_heads_that_fit_into_l2() {
        let op = |seq_len, kv_heads| Attention {
            seq_len,
            heads: 32,
            kv_heads,
            head_dim: 128,
            scale: None,
            deterministic: true,
        };
        // 2 MiB of keys and values of a head of 4,096 tokens, 16 MiB of 32,768.
        assert_eq!(op(4096, 32).section(50 << 20), 8);
        assert_eq!(op(4096, 8).section(50 << 20), 8 * 4);
        assert_eq!(op(32768, 8).section(50 << 20), 4);
        assert_eq!(op(1 << 20, 32).section(50 << 20), 1);
    }
}
