//! Attention on the tensor cores of a GPU by kernels of our own: bf16 heads of any width that is a multiple
//! of 16, with documents or without. Every sum has one owner and one order, so it is deterministic.
//!
//! Sequences are gone through in tiles; short ones, of which all of a head fits into a block's shared memory,
//! also whole.
#![allow(unsafe_code, reason = "it launches kernels")]

use super::Attention;
use super::block::scale_define;
use super::operands::{Backward, Forward};
use std::collections::BTreeSet;
use xtrain_cuda::{
    AlgorithmCandidate, CudaError, Defines, Gpu, Header, KernelSource, Launch, Operands, TENSOR_CORES, Work,
    WorkPurpose,
};
use xtrain_tensor::{DType, TensorType};

/// What tests compile, and what is tried where heads are that wide or a little less: a block's warps, the
/// strips of 16 rows that each owns, and the rows that they go through at a time.
macro_rules! tiles {
    ($($width:literal: $($warps:literal x $strips:literal over $tile:literal),+;)+) => {
        &[$($(&[("HEAD_DIM", $width), ("WARPS", $warps), ("STRIPS", $strips), ("TILE", $tile)]),+),+]
    };
}

/// The same for blocks that have whole sequences: all that their warps own twice.
macro_rules! whole_tiles {
    ($($width:literal: $($warps:literal x $strips:literal over $tile:literal),+;)+) => {
        &[$($(&[
            ("HEAD_DIM", $width), ("WARPS", $warps), ("STRIPS", $strips), ("TILE", $tile),
            ("WHOLE", $warps * $strips * 32),
        ]),+),+]
    };
}

const COMMON: Header = Header::new("attention/flash/common.cuh", include_str!("common.cuh"));
const OF_ONE_FORWARD: Header = Header::new("attention/flash/forward.cuh", include_str!("forward.cuh"));
const OF_ONE_BACKWARD: Header = Header::new("attention/flash/backward.cuh", include_str!("backward.cuh"));
const OF_FORWARD: &[Header] = &[TENSOR_CORES, COMMON, OF_ONE_FORWARD];
const OF_BACKWARD: &[Header] = &[TENSOR_CORES, COMMON, OF_ONE_BACKWARD];

pub(super) const FORWARD: KernelSource = KernelSource {
    headers: OF_FORWARD,
    variants: tiles! {
        32: 4 x 1 over 64, 8 x 1 over 64, 4 x 2 over 64;
        64: 4 x 1 over 64, 4 x 2 over 32, 8 x 1 over 64, 4 x 1 over 32;
        128: 4 x 1 over 64, 8 x 1 over 64, 4 x 1 over 32;
        256: 4 x 1 over 32, 4 x 1 over 16;
    },
    ..KernelSource::new("attention/flash/forward.cu", include_str!("forward.cu"))
};

pub(super) const QUERIES: KernelSource = KernelSource {
    headers: OF_BACKWARD,
    variants: tiles! {
        32: 4 x 1 over 64, 8 x 1 over 64;
        64: 4 x 1 over 64, 4 x 1 over 32, 8 x 1 over 64;
        128: 4 x 1 over 32, 4 x 1 over 64, 8 x 1 over 64;
        256: 4 x 1 over 32, 2 x 1 over 16;
    },
    ..KernelSource::new("attention/flash/queries.cu", include_str!("queries.cu"))
};

pub(super) const KEYS: KernelSource = KernelSource {
    headers: OF_BACKWARD,
    variants: tiles! {
        32: 4 x 1 over 32, 4 x 1 over 64, 4 x 2 over 32;
        64: 4 x 1 over 64, 4 x 1 over 32, 8 x 1 over 32;
        128: 4 x 1 over 32, 4 x 1 over 16, 8 x 1 over 32;
        256: 4 x 1 over 32, 2 x 1 over 16;
    },
    ..KernelSource::new("attention/flash/keys.cu", include_str!("keys.cu"))
};

pub(super) const WHOLE_FORWARD: KernelSource = KernelSource {
    headers: OF_FORWARD,
    variants: whole_tiles! {
        32: 4 x 1 over 32, 8 x 1 over 64, 8 x 1 over 32, 4 x 2 over 32, 16 x 1 over 64;
        64: 4 x 1 over 32, 8 x 1 over 64, 8 x 1 over 32, 4 x 2 over 32;
        128: 4 x 1 over 32, 8 x 1 over 32;
    },
    ..KernelSource::new("attention/flash/whole_forward.cu", include_str!("whole_forward.cu"))
};

pub(super) const WHOLE_BACKWARD: KernelSource = KernelSource {
    headers: OF_BACKWARD,
    variants: whole_tiles! {
        32: 4 x 1 over 32, 8 x 1 over 32, 8 x 1 over 16, 4 x 2 over 32, 16 x 1 over 32;
        64: 4 x 1 over 32, 8 x 1 over 32;
        128: 4 x 1 over 32;
    },
    ..KernelSource::new("attention/flash/whole_backward.cu", include_str!("whole_backward.cu"))
};

/// The names of all tiles, sorted.
pub(super) fn tile_names() -> BTreeSet<String> {
    let sources = [FORWARD, QUERIES, KEYS, WHOLE_FORWARD, WHOLE_BACKWARD];
    sources.iter().flat_map(|source| source.variants).map(|defines| Tiles::read(defines).name()).collect()
}

/// How a block works.
#[derive(Clone, Copy)]
pub(super) struct Tiles {
    head_dim: usize,
    warps: usize,
    strips: usize,
    tile: usize,
    /// Rows of whole sequences; 0 where there are none.
    whole: usize,
}

impl Tiles {
    /// Those of a source for heads of `head_dim` columns and sequences of `seq_len` tokens, the first ones
    /// first: what is listed for the next width, and, of whole sequences, for the next length.
    fn of(source: &KernelSource, head_dim: usize, seq_len: usize) -> Vec<Tiles> {
        let mut tiles: Vec<Tiles> = source.variants.iter().map(Tiles::read).collect();
        tiles.retain(|t| t.head_dim >= head_dim && (t.whole == 0 || t.whole >= seq_len));
        let width = tiles.iter().map(|t| t.head_dim).min();
        tiles.retain(|t| Some(t.head_dim) == width);
        let whole = tiles.iter().map(|t| t.whole).min();
        tiles.retain(|t| Some(t.whole) == whole);
        tiles.into_iter().map(|t| Tiles { head_dim, ..t }).collect()
    }

    /// Those that a source is compiled with by `defines`.
    fn read(defines: &Defines) -> Tiles {
        let number = |name: &str| defines.iter().find(|d| d.0 == name).map_or(0, |d| d.1 as usize);
        let [head_dim, warps, strips, tile, whole] =
            ["HEAD_DIM", "WARPS", "STRIPS", "TILE", "WHOLE"].map(number);
        Tiles { head_dim, warps, strips, tile, whole }
    }

    /// Rows that a block owns, or, of a whole sequence, that its warps own at a time.
    fn owned(self) -> usize {
        self.warps * self.strips * 16
    }

    /// Bytes of this many rows in shared memory.
    fn bytes(self, rows: usize) -> usize {
        2 * (self.head_dim + 8) * rows
    }

    fn defines(self) -> Vec<(&'static str, i64)> {
        let named = [
            ("HEAD_DIM", self.head_dim),
            ("WARPS", self.warps),
            ("STRIPS", self.strips),
            ("TILE", self.tile),
        ];
        let whole = (self.whole > 0).then_some(("WHOLE", self.whole));
        named.into_iter().chain(whole).map(|(name, n)| (name, n as i64)).collect()
    }

    fn name(self) -> String {
        format!("{}x{} over {}", self.warps, self.strips, self.tile)
    }
}

/// Blocks of a grid along y and z, at most.
const MOST_BLOCKS: usize = 65_535;

/// A kernel of these sources.
pub(super) struct Kernel {
    source: &'static KernelSource,
    /// Its name, within documents or over whole sequences.
    name: fn(documents: bool) -> &'static str,
    /// True if several query heads may share a key/value head.
    grouped: bool,
    /// Bytes of shared memory.
    shared: fn(Tiles) -> usize,
    grid: fn(&Attention, Tiles, sequences: usize) -> [usize; 3],
}

/// The forward in tiles.
pub(super) const TILED_FORWARD: &[Kernel] = &[Kernel {
    source: &FORWARD,
    name: |documents| if documents { "flash_forward_of_documents" } else { "flash_forward" },
    grouped: true,
    shared: |t| t.bytes(t.owned() + 4 * t.tile),
    grid: |op, t, sequences| [op.seq_len.div_ceil(t.owned()), op.heads, sequences],
}];

/// The forward of whole sequences.
pub(super) const FORWARD_OF_WHOLE: &[Kernel] = &[Kernel {
    source: &WHOLE_FORWARD,
    name: |_| "whole_forward",
    grouped: true,
    shared: |t| t.bytes(3 * t.whole),
    grid: |op, _, sequences| [op.heads, sequences, 1],
}];

/// The backward in tiles.
pub(super) const TILED_BACKWARD: &[Kernel] = &[
    Kernel {
        source: &QUERIES,
        name: |_| "flash_queries",
        grouped: true,
        shared: |t| t.bytes(2 * t.owned() + 4 * t.tile),
        grid: |op, t, sequences| [op.seq_len.div_ceil(t.owned()), op.heads, sequences],
    },
    Kernel {
        source: &KEYS,
        name: |_| "flash_keys",
        grouped: true,
        // Beside the tiles, three numbers for each query of two stages.
        shared: |t| t.bytes(2 * t.owned() + 4 * t.tile) + 2 * 3 * 4 * t.tile,
        // A block sums at most 128 columns.
        grid: |op, t, sequences| {
            let parts = if op.head_dim <= 128 { 1 } else { 2 };
            [op.seq_len.div_ceil(t.owned()) * parts, op.kv_heads, sequences]
        },
    },
];

/// The backward of whole sequences.
pub(super) const BACKWARD_OF_WHOLE: &[Kernel] = &[Kernel {
    source: &WHOLE_BACKWARD,
    name: |_| "whole_backward",
    grouped: false,
    // Beside the tiles, three numbers for each query.
    shared: |t| t.bytes(4 * t.whole + t.owned()) + 3 * 4 * t.whole,
    grid: |op, _, sequences| [op.heads, sequences, 1],
}];

impl Attention {
    /// The work of a kernel with the fastest tiles on this card, timed with the second arguments; none where
    /// no tiles fit into its shared memory.
    fn with_fastest_tiles<A: Copy + Send + Sync + 'static>(
        &self,
        gpu: &Gpu,
        kernel: &Kernel,
        sequences: usize,
        documents: bool,
        [arguments, rehearsed]: [A; 2],
    ) -> Result<Option<Work>, CudaError> {
        let mut tiles = Tiles::of(kernel.source, self.head_dim, self.seq_len);
        tiles.retain(|&t| (kernel.grid)(self, t, sequences)[1..].iter().all(|&blocks| blocks <= MOST_BLOCKS));
        tiles.retain(|&t| (kernel.shared)(t) <= gpu.info().shared_bytes_per_block);
        let name = (kernel.name)(documents);
        let launch = |t: Tiles, arguments: A| {
            let mut defines = t.defines();
            defines.extend(scale_define(self.scale));
            let function = gpu.function(kernel.source, &defines, name)?;
            let shared = (kernel.shared)(t) as u32;
            function.allow_shared(shared)?;
            let grid = (kernel.grid)(self, t, sequences).map(|n| n as u32);
            let launch = Launch { grid, ..Launch::row(1, 32 * t.warps as u32) }.shared(shared);
            // SAFETY: the kernel takes what its caller made of operands that `infer` checked, and has the
            // shared memory that it uses.
            Ok(Some(unsafe { Work::launch(function, launch, arguments) }))
        };
        let make = |t: Tiles| {
            move |purpose| launch(t, if purpose == WorkPurpose::Timing { rehearsed } else { arguments })
        };
        let named: Vec<(String, _)> = tiles.into_iter().map(|t| (t.name(), make(t))).collect();
        let candidates: Vec<AlgorithmCandidate<'_>> =
            named.iter().map(|(name, make)| AlgorithmCandidate::new(name, make)).collect();
        gpu.fastest(&self.tiles_key(name, sequences, documents), &candidates)
    }

    /// What `kernels` do one after the other, over `qkv`; none where they do not take these operands, or no
    /// tiles fit. The second arguments are those that they are timed with.
    fn flash<A: Copy + Send + Sync + 'static>(
        &self,
        gpu: &Gpu,
        kernels: &[Kernel],
        qkv: TensorType,
        documents: bool,
        arguments: [A; 2],
    ) -> Result<Option<Work>, CudaError> {
        let is_wide = self.head_dim.is_multiple_of(16) && (16..=256).contains(&self.head_dim);
        if qkv.dtype != DType::BF16 || !is_wide {
            return Ok(None);
        }
        let (tokens, _) = qkv.shape.rows_cols();
        let mut works = Vec::new();
        for kernel in kernels {
            if !kernel.grouped && self.heads != self.kv_heads {
                return Ok(None);
            }
            let sequences = tokens / self.seq_len;
            match self.with_fastest_tiles(gpu, kernel, sequences, documents, arguments)? {
                Some(work) => works.push(work),
                None => return Ok(None),
            }
        }
        Ok(Some(Work::sequence(works)))
    }

    /// The forward by `kernels`, where they take it; timed, if need be, on the second operands.
    pub(super) fn flash_forward(
        &self,
        gpu: &Gpu,
        operands: [Operands<'_>; 2],
        kernels: &[Kernel],
    ) -> Result<Option<Work>, CudaError> {
        let inputs = operands[0].inputs;
        let arguments = operands.map(|operands| Forward::of(self, &operands));
        self.flash(gpu, kernels, inputs[0].ty, inputs.len() > 1, arguments)
    }

    /// The backward likewise; it works in a number for each query and head.
    pub(super) fn flash_backward(
        &self,
        gpu: &Gpu,
        operands: [Operands<'_>; 2],
        kernels: &[Kernel],
    ) -> Result<Option<Work>, CudaError> {
        let inputs = operands[0].inputs;
        let arguments = operands.map(|operands| Backward::of(self, &operands));
        self.flash(gpu, kernels, inputs[1].ty, inputs.len() > 4, arguments)
    }
}
