//! Our attention kernels on tensor cores (FlashAttention-2, Dao, arXiv 2307.08691), in bf16, for head widths
//! up to 256 that are multiples of 16, with and without documents. Each sum has one owner and one order, so
//! results are deterministic.
//!
//! There are two kinds: kernels that stream tiles of keys or queries through shared memory, and, for short
//! sequences, kernels that hold a whole head of a sequence in it.
#![allow(unsafe_code, reason = "it launches kernels")]

use super::Attention;
use super::block::scale_define;
use super::operands::{Backward, Forward};
use std::collections::BTreeSet;
use xtrain_cuda::{
    AlgorithmCandidate, CudaError, Defines, Gpu, Header, KernelSource, KernelValue, Launch, Operands,
    TENSOR_CORES, Work, WorkPurpose,
};
use xtrain_tensor::{DType, TensorType};

/// Tile sizes by head width: the warps of a block, the strips of 16 rows that each warp owns, and the rows of
/// a tile that it loops over. Tests compile all of them; at run time they are the candidates for heads of
/// that width and narrower ones.
macro_rules! tiles {
    ($($width:literal: $($warps:literal x $strips:literal over $tile:literal),+;)+) => {
        || vec![$($(vec![("HEAD_DIM", $width), ("WARPS", $warps), ("STRIPS", $strips), ("TILE", $tile)]),+),+]
    };
}

/// As `tiles!`, for blocks that hold whole sequences: each warp owns its strips in two turns.
macro_rules! whole_tiles {
    ($($width:literal: $($warps:literal x $strips:literal over $tile:literal),+;)+) => {
        || vec![$($(vec![
            ("HEAD_DIM", $width), ("WARPS", $warps), ("STRIPS", $strips), ("TILE", $tile),
            ("WHOLE", $warps * $strips * 32),
        ]),+),+]
    };
}

const COMMON: Header = Header::new("attention/flash/common.cuh", include_str!("common.cuh"));
const FORWARD_HEADER: Header = Header::new("attention/flash/forward.cuh", include_str!("forward.cuh"));
const BACKWARD_HEADER: Header = Header::new("attention/flash/backward.cuh", include_str!("backward.cuh"));
const FORWARD_HEADERS: &[Header] = &[TENSOR_CORES, COMMON, FORWARD_HEADER];
const BACKWARD_HEADERS: &[Header] = &[TENSOR_CORES, COMMON, BACKWARD_HEADER];

pub(super) const FORWARD: KernelSource = KernelSource {
    headers: FORWARD_HEADERS,
    structs: &[Forward::LAYOUT],
    variants: tiles! {
        32: 4 x 1 over 64, 8 x 1 over 64, 4 x 2 over 64;
        64: 4 x 1 over 64, 4 x 2 over 32, 8 x 1 over 64, 4 x 1 over 32;
        128: 4 x 1 over 64, 8 x 1 over 64, 4 x 1 over 32;
        256: 4 x 1 over 32, 4 x 1 over 16;
    },
    ..KernelSource::new("attention/flash/forward.cu", include_str!("forward.cu"))
};

pub(super) const QUERIES: KernelSource = KernelSource {
    headers: BACKWARD_HEADERS,
    structs: &[Backward::LAYOUT],
    variants: tiles! {
        32: 4 x 1 over 64, 8 x 1 over 64;
        64: 4 x 1 over 64, 4 x 1 over 32, 8 x 1 over 64;
        128: 4 x 1 over 32, 4 x 1 over 64, 8 x 1 over 64;
        256: 4 x 1 over 32, 2 x 1 over 16;
    },
    ..KernelSource::new("attention/flash/queries.cu", include_str!("queries.cu"))
};

pub(super) const KEYS: KernelSource = KernelSource {
    headers: BACKWARD_HEADERS,
    structs: &[Backward::LAYOUT],
    variants: tiles! {
        32: 4 x 1 over 32, 4 x 1 over 64, 4 x 2 over 32;
        64: 4 x 1 over 64, 4 x 1 over 32, 8 x 1 over 32;
        128: 4 x 1 over 32, 4 x 1 over 16, 8 x 1 over 32;
        256: 4 x 1 over 32, 2 x 1 over 16;
    },
    ..KernelSource::new("attention/flash/keys.cu", include_str!("keys.cu"))
};

pub(super) const WHOLE_FORWARD: KernelSource = KernelSource {
    headers: FORWARD_HEADERS,
    structs: &[Forward::LAYOUT],
    variants: whole_tiles! {
        32: 4 x 1 over 32, 8 x 1 over 64, 8 x 1 over 32, 4 x 2 over 32, 16 x 1 over 64;
        64: 4 x 1 over 32, 8 x 1 over 64, 8 x 1 over 32, 4 x 2 over 32;
        128: 4 x 1 over 32, 8 x 1 over 32;
    },
    ..KernelSource::new("attention/flash/whole_forward.cu", include_str!("whole_forward.cu"))
};

pub(super) const WHOLE_BACKWARD: KernelSource = KernelSource {
    headers: BACKWARD_HEADERS,
    structs: &[Backward::LAYOUT],
    variants: whole_tiles! {
        32: 4 x 1 over 32, 8 x 1 over 32, 8 x 1 over 16, 4 x 2 over 32, 16 x 1 over 32;
        64: 4 x 1 over 32, 8 x 1 over 32;
        128: 4 x 1 over 32;
    },
    ..KernelSource::new("attention/flash/whole_backward.cu", include_str!("whole_backward.cu"))
};

/// Names of all tile sizes, sorted.
pub(super) fn tile_names() -> BTreeSet<String> {
    let sources = [FORWARD, QUERIES, KEYS, WHOLE_FORWARD, WHOLE_BACKWARD];
    sources.iter().flat_map(KernelSource::variants).map(|defines| Tiles::read(&defines).name()).collect()
}

/// Tile sizes of a kernel: its defines.
#[derive(Clone, Copy)]
pub(super) struct Tiles {
    head_dim: usize,
    warps: usize,
    strips: usize,
    tile: usize,
    /// Maximum sequence length of a kernel that holds whole sequences; 0 for the other kernels.
    whole: usize,
}

impl Tiles {
    /// The candidates for heads of `head_dim` columns and sequences of `seq_len` tokens, in the order of the
    /// source's list: those listed for the smallest sufficient width and, for whole sequences, the smallest
    /// sufficient length.
    fn candidates(source: &KernelSource, head_dim: usize, seq_len: usize) -> Vec<Tiles> {
        let mut tiles: Vec<Tiles> = source.variants().iter().map(Tiles::read).collect();
        tiles.retain(|t| t.head_dim >= head_dim && (t.whole == 0 || t.whole >= seq_len));
        let width = tiles.iter().map(|t| t.head_dim).min();
        tiles.retain(|t| Some(t.head_dim) == width);
        let whole = tiles.iter().map(|t| t.whole).min();
        tiles.retain(|t| Some(t.whole) == whole);
        tiles.into_iter().map(|t| Tiles { head_dim, ..t }).collect()
    }

    /// The tile sizes in `defines`.
    fn read(defines: &Defines) -> Tiles {
        let number = |name: &str| defines.iter().find(|d| d.0 == name).map_or(0, |d| d.1 as usize);
        let [head_dim, warps, strips, tile, whole] =
            ["HEAD_DIM", "WARPS", "STRIPS", "TILE", "WHOLE"].map(number);
        Tiles { head_dim, warps, strips, tile, whole }
    }

    /// Rows that the warps of a block own, with whole sequences in one turn.
    fn owned(self) -> usize {
        self.warps * self.strips * 16
    }

    /// Bytes of this many padded rows in shared memory.
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

/// Maximum number of blocks along y and z of a grid.
const MAX_BLOCKS_YZ: usize = 65_535;

/// A kernel of these sources, and how it is launched.
pub(super) struct Kernel {
    source: &'static KernelSource,
    /// Its symbol, which may differ with documents.
    name: fn(documents: bool) -> &'static str,
    /// True if several query heads may share a key/value head.
    grouped: bool,
    /// Bytes of shared memory.
    shared: fn(Tiles) -> usize,
    grid: fn(&Attention, Tiles, sequences: usize) -> [usize; 3],
}

/// The tiled forward.
pub(super) const TILED_FORWARD_KERNELS: &[Kernel] = &[Kernel {
    source: &FORWARD,
    name: |documents| if documents { "flash_forward_of_documents" } else { "flash_forward" },
    grouped: true,
    shared: |t| t.bytes(t.owned() + 4 * t.tile),
    grid: |op, t, sequences| [op.seq_len.div_ceil(t.owned()), op.heads, sequences],
}];

/// The forward of whole sequences.
pub(super) const WHOLE_FORWARD_KERNELS: &[Kernel] = &[Kernel {
    source: &WHOLE_FORWARD,
    name: |_| "whole_forward",
    grouped: true,
    shared: |t| t.bytes(3 * t.whole),
    grid: |op, _, sequences| [op.heads, sequences, 1],
}];

/// The tiled backward.
pub(super) const TILED_BACKWARD_KERNELS: &[Kernel] = &[
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
        // The tiles, and three numbers for each query of two stages.
        shared: |t| t.bytes(2 * t.owned() + 4 * t.tile) + 2 * 3 * 4 * t.tile,
        // A block sums at most 128 columns.
        grid: |op, t, sequences| {
            let parts = if op.head_dim <= 128 { 1 } else { 2 };
            [op.seq_len.div_ceil(t.owned()) * parts, op.kv_heads, sequences]
        },
    },
];

/// The backward of whole sequences.
pub(super) const WHOLE_BACKWARD_KERNELS: &[Kernel] = &[Kernel {
    source: &WHOLE_BACKWARD,
    name: |_| "whole_backward",
    grouped: false,
    // The tiles, and three numbers for each query.
    shared: |t| t.bytes(4 * t.whole + t.owned()) + 3 * 4 * t.whole,
    grid: |op, _, sequences| [op.heads, sequences, 1],
}];

impl Attention {
    /// The launch of a kernel with the fastest tile sizes on this GPU, or `None` if none fit into its shared
    /// memory. They are timed with the second arguments.
    fn with_fastest_tiles<A: KernelValue + Send + Sync + 'static>(
        &self,
        gpu: &Gpu,
        kernel: &Kernel,
        sequences: usize,
        documents: bool,
        [arguments, timing]: [A; 2],
    ) -> Result<Option<Work>, CudaError> {
        let mut tiles = Tiles::candidates(kernel.source, self.head_dim, self.seq_len);
        tiles.retain(|&t| {
            (kernel.grid)(self, t, sequences)[1..].iter().all(|&blocks| blocks <= MAX_BLOCKS_YZ)
        });
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
            // SAFETY: `arguments` is the kernel's structure, which the caller filled with operands that
            // `infer` checked, and the launch has the shared memory that the kernel uses.
            Ok(Some(unsafe { Work::launch(function, launch, arguments) }))
        };
        let prepare = |t: Tiles| {
            move |purpose| launch(t, if purpose == WorkPurpose::Timing { timing } else { arguments })
        };
        let named: Vec<(String, _)> = tiles.into_iter().map(|t| (t.name(), prepare(t))).collect();
        let candidates: Vec<AlgorithmCandidate<'_>> =
            named.iter().map(|(name, prepare)| AlgorithmCandidate::new(name, prepare)).collect();
        gpu.fastest(&self.tiles_key(name, sequences, documents), &candidates)
    }

    /// The launches of `kernels` in sequence, or `None` if they do not support these operands or no tile
    /// sizes fit. The kernels are timed with the second arguments.
    fn flash<A: KernelValue + Send + Sync + 'static>(
        &self,
        gpu: &Gpu,
        kernels: &[Kernel],
        qkv: TensorType,
        documents: bool,
        arguments: [A; 2],
    ) -> Result<Option<Work>, CudaError> {
        let supports_width = self.head_dim.is_multiple_of(16) && (16..=256).contains(&self.head_dim);
        if qkv.dtype != DType::BF16 || !supports_width {
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

    /// The forward by `kernels`, or `None` if they do not support the operands. The kernels are timed with
    /// the second operands.
    pub(super) fn flash_forward(
        &self,
        gpu: &Gpu,
        operands: [Operands<'_>; 2],
        kernels: &[Kernel],
    ) -> Result<Option<Work>, CudaError> {
        let inputs = operands[0].inputs;
        let arguments = operands.map(|operands| Forward::new(self, &operands));
        self.flash(gpu, kernels, inputs[0].ty, inputs.len() > 1, arguments)
    }

    /// The backward by `kernels`, as [`Attention::flash_forward`]. Its workspace holds delta, f32 `[B, h,
    /// s]`.
    pub(super) fn flash_backward(
        &self,
        gpu: &Gpu,
        operands: [Operands<'_>; 2],
        kernels: &[Kernel],
    ) -> Result<Option<Work>, CudaError> {
        let inputs = operands[0].inputs;
        let arguments = operands.map(|operands| Backward::new(self, &operands));
        self.flash(gpu, kernels, inputs[1].ty, inputs.len() > 4, arguments)
    }
}
