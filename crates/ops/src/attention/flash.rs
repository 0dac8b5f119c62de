//! Attention on the tensor cores of a card by kernels of our own: bf16 heads of any width that is a multiple of 16, with documents or without.
//! Every sum has one owner and one order, so it is deterministic.
#![allow(unsafe_code, reason = "it launches kernels")]

use super::Attention;
use super::operands::{Backward, Forward};
use xtrain_cuda::{Candidate, CudaError, Defines, Gpu, KernelSource, Launch, Operands, TENSOR_CORES, Work};
use xtrain_tensor::{DType, TensorType};

const HEADERS: &[&str] = &[TENSOR_CORES, include_str!("flash.cuh")];

/// Tiles by the width of heads: a block's warps, the strips of 16 rows that each owns, and the rows that they go through at a time.
macro_rules! tiles {
    ($($width:literal: $($warps:literal x $strips:literal over $tile:literal),+;)+) => {
        &[$($(&[("HEAD_DIM", $width), ("WARPS", $warps), ("STRIPS", $strips), ("TILE", $tile)]),+),+]
    };
}

const fn source(name: &'static str, text: &'static str, variants: &'static [Defines]) -> KernelSource {
    KernelSource { headers: HEADERS, variants, ..KernelSource::new(name, text) }
}

pub(super) const FORWARD: KernelSource = source(
    "attention/flash_forward.cu",
    include_str!("flash_forward.cu"),
    tiles! {
        32: 4 x 1 over 64, 8 x 1 over 64, 4 x 2 over 64, 4 x 1 over 128;
        64: 4 x 1 over 64, 8 x 1 over 64, 4 x 2 over 32;
        128: 4 x 1 over 64, 8 x 1 over 64, 4 x 1 over 32;
        256: 4 x 1 over 32, 4 x 1 over 16;
    },
);

pub(super) const QUERIES: KernelSource = source(
    "attention/flash_queries.cu",
    include_str!("flash_queries.cu"),
    tiles! {
        32: 4 x 1 over 64, 8 x 1 over 64;
        64: 4 x 1 over 64, 4 x 1 over 32, 8 x 1 over 64;
        128: 4 x 1 over 32, 4 x 1 over 64, 8 x 1 over 64;
        256: 4 x 1 over 32, 2 x 1 over 16;
    },
);

pub(super) const KEYS: KernelSource = source(
    "attention/flash_keys.cu",
    include_str!("flash_keys.cu"),
    tiles! {
        32: 4 x 1 over 64, 4 x 1 over 32, 8 x 1 over 64, 4 x 2 over 32;
        64: 4 x 1 over 64, 4 x 1 over 32, 8 x 1 over 32;
        128: 4 x 1 over 32, 4 x 1 over 16, 8 x 1 over 32;
        256: 4 x 1 over 32, 2 x 1 over 16;
    },
);

/// A choice of tiles for heads of this width.
#[derive(Clone, Copy)]
struct Tiles {
    head_dim: usize,
    warps: usize,
    strips: usize,
    tile: usize,
}

impl Tiles {
    /// Those of a source for heads of `head_dim` columns, the best known ones first: what is listed for the next width.
    fn of(source: &KernelSource, head_dim: usize) -> Vec<Tiles> {
        let read = |defines: &Defines| {
            let [head_dim, warps, strips, tile] = [0, 1, 2, 3].map(|n| defines[n].1 as usize);
            Tiles { head_dim, warps, strips, tile }
        };
        let listed = || source.variants.iter().map(read);
        let width = listed().map(|t| t.head_dim).filter(|&w| w >= head_dim).min();
        listed().filter(|t| Some(t.head_dim) == width).map(|t| Tiles { head_dim, ..t }).collect()
    }

    /// Rows that a block owns.
    fn owned(self) -> usize {
        self.warps * self.strips * 16
    }

    /// Bytes of `owned` tiles of the rows that a block owns and two stages of two tiles of those that it goes through.
    fn bytes(self, owned: usize) -> usize {
        2 * (self.head_dim + 8) * (owned * self.owned() + 4 * self.tile)
    }

    fn defines(self) -> [(&'static str, i64); 4] {
        let [width, warps, strips, tile] =
            [self.head_dim, self.warps, self.strips, self.tile].map(|n| n as i64);
        [("HEAD_DIM", width), ("WARPS", warps), ("STRIPS", strips), ("TILE", tile)]
    }

    fn name(self) -> String {
        format!("{}x{} over {}", self.warps, self.strips, self.tile)
    }
}

/// A kernel of this file and its launch shape.
struct Kernel {
    source: &'static KernelSource,
    name: &'static str,
    /// Tiles of owned rows in shared memory.
    owned: usize,
    /// Bytes of shared memory besides, a row of a tile that is gone through.
    row_bytes: usize,
    /// Heads that the grid goes over.
    heads: usize,
    /// Blocks a tile of owned rows.
    parts: usize,
}

impl Attention {
    /// Whether the kernels of this file take these operands.
    fn flashes(&self, qkv: TensorType) -> bool {
        qkv.dtype == DType::BF16 && self.head_dim.is_multiple_of(16) && (16..=256).contains(&self.head_dim)
    }

    /// The fastest tiles of a kernel on this card, with its launch; none where no tiles fit into its shared memory.
    fn fastest_tiles<A: Copy + Send + Sync + 'static>(
        &self,
        gpu: &Gpu,
        kernel: &Kernel,
        sequences: usize,
        documents: bool,
        arguments: A,
    ) -> Result<Option<Work>, CudaError> {
        let bytes = |t: &Tiles| t.bytes(kernel.owned) + t.tile * kernel.row_bytes;
        let mut tiles = Tiles::of(kernel.source, self.head_dim);
        tiles.retain(|t| bytes(t) <= gpu.info().shared_bytes_per_block);
        if documents {
            // How much they leave to do is not known here: the smallest tiles, which waste least.
            tiles.truncate(1);
        }
        let launch = |t: Tiles| {
            let function = gpu.function(kernel.source, &t.defines(), kernel.name)?;
            let shared = bytes(&t) as u32;
            function.allow_shared(shared)?;
            let blocks = self.seq_len.div_ceil(t.owned()) * kernel.parts;
            let grid = [blocks, kernel.heads, sequences].map(|n| n as u32);
            let launch = Launch { grid, ..Launch::row(1, 32 * t.warps as u32) }.shared(shared);
            // SAFETY: the kernel takes what its caller made of operands that `infer` checked.
            Ok(Some(unsafe { Work::launch(function, launch, arguments) }))
        };
        let named: Vec<(String, _)> = tiles.into_iter().map(|t| (t.name(), move || launch(t))).collect();
        let candidates: Vec<Candidate<'_>> =
            named.iter().map(|(name, make)| Candidate::new(name, make)).collect();
        gpu.fastest(&format!("{} of {self:?}, {sequences} sequences", kernel.name), &candidates)
    }

    /// The forward, where its tiles fit.
    pub(super) fn flash_forward(
        &self,
        gpu: &Gpu,
        operands: &Operands<'_>,
    ) -> Result<Option<Work>, CudaError> {
        let qkv = operands.inputs[0].ty;
        if !self.flashes(qkv) {
            return Ok(None);
        }
        let (tokens, _) = qkv.shape.rows_cols();
        let kernel = Kernel {
            source: &FORWARD,
            name: "flash_forward",
            owned: 1,
            row_bytes: 0,
            heads: self.heads,
            parts: 1,
        };
        let arguments = Forward::of(self, operands);
        self.fastest_tiles(gpu, &kernel, tokens / self.seq_len, operands.inputs.len() > 1, arguments)
    }

    /// The backward, where its tiles fit; it works in a number for each query and head.
    pub(super) fn flash_backward(
        &self,
        gpu: &Gpu,
        operands: &Operands<'_>,
    ) -> Result<Option<Work>, CudaError> {
        let qkv = operands.inputs[1].ty;
        if !self.flashes(qkv) {
            return Ok(None);
        }
        let (tokens, _) = qkv.shape.rows_cols();
        let arguments = Backward::of(self, operands);
        let fastest = |kernel: &Kernel| {
            self.fastest_tiles(gpu, kernel, tokens / self.seq_len, operands.inputs.len() > 4, arguments)
        };
        let queries = fastest(&Kernel {
            source: &QUERIES,
            name: "flash_queries",
            owned: 2,
            row_bytes: 0,
            heads: self.heads,
            parts: 1,
        })?;
        let keys = fastest(&Kernel {
            source: &KEYS,
            name: "flash_keys",
            owned: 2,
            // The log-sum-exp, delta and the document's start of each query of two stages.
            row_bytes: 2 * 3 * 4,
            heads: self.kv_heads,
            parts: if self.head_dim <= 128 { 1 } else { 2 },
        })?;
        Ok(queries.zip(keys).map(|(queries, keys)| Work::all(vec![queries, keys])))
    }
}
