//! The backward for Hopper: a small kernel before the pass over tiles of keys, and one after it.
#![allow(unsafe_code, reason = "it launches kernels")]

use super::super::Attention;
use super::super::block::scale_define;
use super::{COMMON, KEYS, UNIT};
use crate::device::{holding, table};
use xtrain_cuda::{
    Arch, CudaError, Defines, DevicePtr, Gpu, HOPPER, KernelSource, Launch, Operands, TENSOR_CORES,
    TensorMap, Work, kernel_struct,
};
use xtrain_tensor::TensorType;

/// Groups of four warps that multiply 64 keys each.
const CONSUMERS: usize = 2;
/// Tiles of queries, of do and of dS in shared memory.
const STAGES: usize = 2;

pub(crate) const BACKWARD: KernelSource = KernelSource {
    constants: &[&[("KEYS", KEYS as i64)]],
    headers: &[TENSOR_CORES, HOPPER, COMMON],
    archs: &[Arch::SM90],
    structs: &[Arguments::LAYOUT],
    variants: || {
        WIDTHS.iter().flat_map(|width| width.orders().map(|order| width.pass_defines(order))).collect()
    },
    ..KernelSource::new("attention/hopper/backward.cu", include_str!("backward.cu"))
};

pub(crate) const AROUND_BACKWARD: KernelSource = KernelSource {
    archs: &[Arch::SM90],
    structs: &[Rows::LAYOUT, Queries::LAYOUT],
    variants: || WIDTHS.map(Width::defines).to_vec(),
    ..KernelSource::new("attention/hopper/around_backward.cu", include_str!("around_backward.cu"))
};

pub(crate) const DOCUMENTS: KernelSource = KernelSource {
    constants: &[&[("KEYS", KEYS as i64)]],
    archs: &[Arch::SM90],
    structs: &[DocumentArguments::LAYOUT],
    variants: || WIDTHS.map(|width| vec![("QUERIES", width.queries as i64)]).to_vec(),
    ..KernelSource::new("attention/hopper/documents.cu", include_str!("documents.cu"))
};

kernel_struct! {
    #[repr(align(64))]
    struct Arguments {
        q: TensorMap,
        kv: TensorMap,
        d_o: TensorMap,
        d_kv: TensorMap,
        rows: DevicePtr,
        dq: DevicePtr,
        turns: DevicePtr,
        counter: DevicePtr,
        seq_len: u32,
        heads: u32,
        kv_heads: u32,
        sequences: u32,
        starts: DevicePtr,
        ends: DevicePtr,
    }
}

kernel_struct! {
    struct DocumentArguments {
        doc_start: DevicePtr,
        starts: DevicePtr,
        ends: DevicePtr,
        seq_len: u32,
        padding: u32,
    }
}

kernel_struct! {
    struct Rows {
        d_o: DevicePtr,
        o: DevicePtr,
        lse: DevicePtr,
        rows: DevicePtr,
        turns: DevicePtr,
        seq_len: u32,
        heads: u32,
    }
}

kernel_struct! {
    struct Queries {
        dq: DevicePtr,
        d_qkv: DevicePtr,
        seq_len: u32,
        heads: u32,
        kv_heads: u32,
        padding: u32,
    }
}

/// A width of heads, and the queries of a tile for it: as many as registers hold the scores of.
#[derive(Clone, Copy)]
struct Width {
    head_dim: usize,
    queries: usize,
}

const WIDTHS: [Width; 2] = [Width { head_dim: 64, queries: 128 }, Width { head_dim: 128, queries: 64 }];

/// The order of tiles of keys, and the queries that see them.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    /// One tile after the other, of whole sequences.
    Whole,
    /// Two tiles at a time, of whole sequences.
    Pairs,
    /// One tile after the other, within documents.
    Documents,
}

impl Width {
    fn from_op(op: &Attention) -> Option<Width> {
        WIDTHS.into_iter().find(|width| width.head_dim == op.head_dim)
    }

    fn defines(self) -> Defines {
        vec![
            ("HEAD_DIM", self.head_dim as i64),
            ("QUERIES", self.queries as i64),
            ("SHARED_BYTES", self.shared_bytes(Order::Whole) as i64),
        ]
    }

    /// Orders that a variant exists for.
    fn orders(self) -> impl Iterator<Item = Order> {
        let orders = [Order::Whole, Order::Pairs, Order::Documents];
        orders.into_iter().filter(move |&order| order != Order::Pairs || self.head_dim == 64)
    }

    fn pass_defines(self, order: Order) -> Defines {
        vec![
            ("HEAD_DIM", self.head_dim as i64),
            ("QUERIES", self.queries as i64),
            ("SHARED_BYTES", self.shared_bytes(order) as i64),
            ("PAIRS", (order == Order::Pairs).into()),
            ("DOCUMENTS", (order == Order::Documents).into()),
        ]
    }

    /// The order to use. Tiles of keys of whole sequences are taken in pairs where that is faster on an H200,
    /// and the blocks of a head fit on the GPU together.
    fn order(self, op: &Attention, documents: bool, multiprocessors: usize) -> Order {
        let fit = op.seq_len.div_ceil(KEYS).div_ceil(2) <= multiprocessors;
        if documents {
            Order::Documents
        } else if self.head_dim == 64 && op.heads > op.kv_heads && fit {
            Order::Pairs
        } else {
            Order::Whole
        }
    }

    /// Keys and values; queries and do; dS; dq in f32; two numbers of each query, and with documents their
    /// start; 14 barriers and two numbers.
    fn shared_bytes(self, order: Order) -> usize {
        let Width { head_dim, queries } = self;
        let tiles = 2 * KEYS * head_dim + 2 * STAGES * queries * head_dim + STAGES * KEYS * queries;
        let numbers = if order == Order::Documents { 3 } else { 2 };
        2 * tiles + 4 * queries * head_dim + STAGES * numbers * 4 * queries + 8 * (6 + 4 * STAGES) + 8
    }
}

/// Bytes of the parts of the workspace, in this order: dq, numbers of queries, counts of parts, and with
/// documents their starts and ends.
struct Workspace {
    dq: usize,
    rows: usize,
    turns: usize,
    starts: usize,
    ends: usize,
}

impl Workspace {
    fn new(op: &Attention, width: Width, sequences: usize, documents: bool) -> Workspace {
        let of_head = sequences * op.seq_len.div_ceil(width.queries);
        let tiles = op.heads * of_head;
        let with_documents = |bytes| if documents { bytes } else { 0 };
        let turns = 4 * tiles;
        Workspace {
            dq: 4 * tiles * width.queries * width.head_dim,
            rows: 4 * tiles * 2 * width.queries,
            // Starts are copied 16 bytes at a time.
            turns: if documents { turns.next_multiple_of(16) } else { turns },
            starts: with_documents(4 * of_head * width.queries),
            ends: with_documents(4 * sequences * op.seq_len.div_ceil(KEYS)),
        }
    }
}

impl Attention {
    /// Bytes of workspace of the backward for Hopper; 0 if there is none for these operands.
    pub(in super::super) fn hopper_backward_bytes(&self, qkv: TensorType, documents: bool) -> usize {
        let Some(width) = Width::from_op(self).filter(|_| Attention::is_hopper_type(qkv)) else {
            return 0;
        };
        let sequences = qkv.shape.rows_cols().0 / self.seq_len;
        let Workspace { dq, rows, turns, starts, ends } = Workspace::new(self, width, sequences, documents);
        dq + rows + turns + starts + ends
    }

    /// The backward by the kernels for Hopper, or `None` if this GPU lacks them or they do not support the
    /// operands.
    pub(in super::super) fn hopper_backward(
        &self,
        gpu: &Gpu,
        operands: &Operands<'_>,
    ) -> Result<Option<Work>, CudaError> {
        let [d_o, qkv, o, lse] = [0, 1, 2, 3].map(|n| operands.inputs[n]);
        let (workspace, d_qkv) = (operands.workspace[0], operands.outputs[0]);
        let doc_start = operands.inputs.get(4);
        let Some(width) = Width::from_op(self).filter(|_| self.runs_on_hopper(gpu, qkv.ty)) else {
            return Ok(None);
        };
        let Attention { seq_len, heads, kv_heads, head_dim, .. } = *self;
        let (tokens, columns) = qkv.ty.shape.rows_cols();
        let sequences = tokens / seq_len;
        let parts = Workspace::new(self, width, sequences, doc_start.is_some());
        if heads > MAX_BLOCKS_YZ || sequences > MAX_BLOCKS_YZ {
            return Ok(None);
        }
        let dq = workspace.place;
        let rows = DevicePtr(dq.0 + parts.dq as u64);
        let turns = DevicePtr(rows.0 + parts.rows as u64);
        let starts = DevicePtr(turns.0 + parts.turns as u64);
        let ends = DevicePtr(starts.0 + parts.starts as u64);
        let multiprocessors = gpu.info().multiprocessors as usize;
        let order = width.order(self, doc_start.is_some(), multiprocessors);
        let with_scale = |mut defines: Defines| {
            defines.extend(scale_define(self.scale));
            defines
        };
        let defines = with_scale(width.defines());
        let grid = [seq_len.div_ceil(width.queries), heads, sequences].map(|blocks| blocks as u32);
        let launch = |threads| Launch { grid, ..Launch::row(1, threads) };
        let sizes = [seq_len, heads, kv_heads, sequences].map(|size| size as u32);
        let [seq_len_u32, heads_u32, kv_heads_u32, sequences_u32] = sizes;

        let before = gpu.function(&AROUND_BACKWARD, &defines, "hopper_rows")?;
        let numbers = Rows {
            d_o: d_o.place,
            o: o.place,
            lse: lse.place,
            rows,
            turns,
            seq_len: seq_len_u32,
            heads: heads_u32,
        };
        // SAFETY: the kernel takes one `Rows`. Inputs have the extents that `infer` checked, and the
        // workspace has `hopper_backward_bytes`.
        let mut works = vec![unsafe { Work::launch(before, launch(128), numbers) }];
        if let Some(doc_start) = doc_start {
            let defines = [("QUERIES", width.queries as i64)];
            let function = gpu.function(&DOCUMENTS, &defines, "hopper_documents")?;
            let documents = DocumentArguments {
                doc_start: doc_start.place,
                starts,
                ends,
                seq_len: seq_len_u32,
                padding: 0,
            };
            let launch = Launch { grid: [grid[0], sequences_u32, 1], ..Launch::row(1, 128) };
            // SAFETY: the kernel takes one `DocumentArguments`; as for the kernel before it.
            works.push(unsafe { Work::launch(function, launch, documents) });
        }

        let map = |at, columns, rows| self.map(gpu, at, columns, sequences, rows);
        let counter = table(gpu, &[0u32])?;
        let arguments = Arguments {
            q: map(qkv.place, columns, width.queries)?,
            kv: map(qkv.place, columns, KEYS)?,
            d_o: map(d_o.place, heads * head_dim, width.queries)?,
            d_kv: map(d_qkv.place, columns, UNIT)?,
            rows,
            dq,
            turns,
            counter: counter.pointer(),
            seq_len: seq_len_u32,
            heads: heads_u32,
            kv_heads: kv_heads_u32,
            sequences: sequences_u32,
            starts,
            ends,
        };
        let function = gpu.function(&BACKWARD, &with_scale(width.pass_defines(order)), "hopper_backward")?;
        let shared = width.shared_bytes(order) as u32;
        function.allow_shared(shared)?;
        let of_head = seq_len.div_ceil(KEYS).div_ceil(if order == Order::Pairs { 2 } else { 1 });
        let blocks = (of_head * kv_heads * sequences).min(multiprocessors) as u32;
        let pass = Launch::row(blocks, 128 * (CONSUMERS as u32 + 1)).shared(shared);
        // SAFETY: the kernel takes one `Arguments`, and the launch has the threads and the shared memory that
        // it uses. The maps have the extents that `infer` checked, and TMA accesses nothing outside of them.
        // The kernels before this one set `turns` to zeros, and write starts and ends. The counter lives as
        // long as the work, whose launches follow each other, and is 0 between them. A block waits only for
        // blocks that began before it drew its tile, or, in pairs, for those of its head, which fit on the
        // GPU together.
        works.push(holding(unsafe { Work::launch(function, pass, arguments) }, counter));

        let after = gpu.function(&AROUND_BACKWARD, &defines, "hopper_dq")?;
        let queries = Queries {
            dq,
            d_qkv: d_qkv.place,
            seq_len: seq_len_u32,
            heads: heads_u32,
            kv_heads: kv_heads_u32,
            padding: 0,
        };
        // SAFETY: the kernel takes one `Queries`; as for the first kernel.
        works.push(unsafe { Work::launch(after, launch(256), queries) });
        Ok(Some(Work::sequence(works)))
    }
}

/// Maximum number of blocks along y and z of a grid.
const MAX_BLOCKS_YZ: usize = 65_535;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_are_paired_for_groups_of_narrow_heads_that_fit_on_the_gpu() {
        let op = |seq_len, kv_heads, head_dim| Attention {
            seq_len,
            heads: 32,
            kv_heads,
            head_dim,
            scale: None,
            deterministic: true,
        };
        let order = |op: Attention, documents| Width::from_op(&op).unwrap().order(&op, documents, 132);
        let paired = |op: Attention| order(op, false) == Order::Pairs;
        assert!(paired(op(4096, 8, 64)) && paired(op(132 * 256, 8, 64)));
        assert!(!paired(op(132 * 256 + 1, 8, 64)) && !paired(op(4096, 32, 64)) && !paired(op(4096, 8, 128)));
        assert!(order(op(4096, 8, 64), true) == Order::Documents);
    }

    #[test]
    fn shared_memory_fits_a_block_of_hopper() {
        assert!(
            WIDTHS.iter().all(|width| width.orders().all(|order| width.shared_bytes(order) <= 227 * 1024))
        );
    }
}
