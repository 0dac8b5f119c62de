//! [`Attention`] and [`AttentionGrad`] on a card: cuDNN's engines where they take the operands, else kernels of our own.
#![allow(unsafe_code, reason = "it launches kernels")]

use super::{Attention, AttentionGrad};
use crate::device::suffix;
use xtrain_cuda::{
    CudaError, CudaKernel, CudaTensor, Defines, DevicePtr, Function, Gpu, KernelSource, Launch, Operands,
    Sdpa, Work,
};
use xtrain_tensor::{DType, TensorType};

/// Head widths and tiles that tests compile; others are compiled where a model has them.
const VARIANTS: &[Defines] = &[
    &[("HEAD_DIM", 32), ("TILE", 64)],
    &[("HEAD_DIM", 64), ("TILE", 64)],
    &[("HEAD_DIM", 128), ("TILE", 32)],
    &[("HEAD_DIM", 256), ("TILE", 16)],
    &[("HEAD_DIM", 20), ("TILE", 64)],
];

pub(super) const SOURCE: KernelSource = KernelSource {
    variants: VARIANTS,
    ..KernelSource::new("attention/kernel.cu", include_str!("kernel.cu"))
};

/// Threads of a block: 16 x 16.
const THREADS: [u32; 3] = [16, 16, 1];
/// Queries of a block that sums the products of outputs and their gradients, a warp each.
const DELTA_QUERIES: u32 = 8;

#[derive(Clone, Copy)]
#[repr(C)]
struct Shape {
    seq_len: i32,
    heads: i32,
    kv_heads: i32,
    doc_start: DevicePtr,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Forward {
    qkv: DevicePtr,
    o: DevicePtr,
    lse: DevicePtr,
    shape: Shape,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Backward {
    d_o: DevicePtr,
    qkv: DevicePtr,
    o: DevicePtr,
    lse: DevicePtr,
    delta: DevicePtr,
    dqkv: DevicePtr,
    shape: Shape,
}

/// The largest tile whose operands, `wide` of a head's width and `square` of scores, fit into a block's shared memory; and their bytes.
fn tile(op: &Attention, gpu: &Gpu, wide: usize, square: usize) -> (usize, u32) {
    let pitch = op.head_dim.next_multiple_of(16) + 1;
    let bytes = |tile: usize| 4 * tile * (wide * pitch + square * (tile + 1));
    // Wide heads leave no registers for large tiles.
    let most = if op.head_dim <= 64 { 64 } else { 32 };
    let fits = [64, 32].into_iter().find(|&t| t <= most && bytes(t) <= gpu.info().shared_bytes_per_block);
    let tile = fits.unwrap_or(16);
    (tile, bytes(tile) as u32)
}

impl Attention {
    fn shape(&self, doc_start: Option<&CudaTensor>) -> Shape {
        Shape {
            seq_len: self.seq_len as i32,
            heads: self.heads as i32,
            kv_heads: self.kv_heads as i32,
            doc_start: doc_start.map_or(DevicePtr(0), |t| t.place),
        }
    }

    /// A kernel for tiles of this size, and its launch over the tiles of `heads` heads of all sequences.
    fn tiled(
        &self,
        gpu: &Gpu,
        name: &str,
        (tile, shared): (usize, u32),
        heads: usize,
        tokens: usize,
    ) -> Result<(Function, Launch), CudaError> {
        let defines = [("HEAD_DIM", self.head_dim as i64), ("TILE", tile as i64)];
        let function = gpu.function(&SOURCE, &defines, name)?;
        function.allow_shared(shared)?;
        let tiles = self.seq_len.div_ceil(tile) as u32;
        let grid = [tiles, heads as u32, (tokens / self.seq_len) as u32];
        Ok((function, Launch { grid, block: THREADS, ..Launch::row(1, 1) }.shared(shared)))
    }
}

impl Attention {
    /// cuDNN's attention over these operands, where it could have an engine for them.
    fn sdpa(&self, qkv: TensorType, documents: bool) -> Option<Sdpa> {
        let (tokens, _) = qkv.shape.rows_cols();
        let Attention { seq_len, heads, kv_heads, head_dim, deterministic } = *self;
        let sdpa = Sdpa { sequences: tokens / seq_len, seq_len, heads, kv_heads, head_dim, deterministic };
        (qkv.dtype == DType::BF16 && !documents && sdpa.is_thinkable()).then_some(sdpa)
    }

    fn own_forward(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let (qkv, o, lse) = (operands.inputs[0], operands.outputs[0], operands.outputs[1]);
        let (tokens, _) = qkv.ty.shape.rows_cols();
        let name = format!("attention_{}", suffix(qkv.ty));
        let (function, launch) = self.tiled(gpu, &name, tile(self, gpu, 3, 1), self.heads, tokens)?;
        let shape = self.shape(operands.inputs.get(1));
        let arguments = Forward { qkv: qkv.place, o: o.place, lse: lse.place, shape };
        // SAFETY: the kernel takes one `Forward`; it reads and writes the rows and columns that `infer` gave these tensors, of the type in
        // its name, and reads document starts where there are any.
        Ok(unsafe { Work::launch(function, launch, arguments) })
    }

    fn own_backward(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let &[d_o, qkv, o, lse, ref rest @ ..] = operands.inputs else {
            unreachable!("four inputs at least")
        };
        let (tokens, _) = qkv.ty.shape.rows_cols();
        let arguments = Backward {
            d_o: d_o.place,
            qkv: qkv.place,
            o: o.place,
            lse: lse.place,
            delta: operands.workspace[0].place,
            dqkv: operands.outputs[0].place,
            shape: self.shape(rest.first()),
        };
        let name = |part: &str| format!("attention_{part}_{}", suffix(qkv.ty));
        let queries = self.tiled(gpu, &name("queries"), tile(self, gpu, 4, 1), self.heads, tokens)?;
        let keys = self.tiled(gpu, &name("keys"), tile(self, gpu, 4, 2), self.kv_heads, tokens)?;
        let (delta, _) = self.tiled(gpu, &name("delta"), tile(self, gpu, 4, 1), self.heads, tokens)?;
        let blocks = (self.seq_len as u32).div_ceil(DELTA_QUERIES);
        let grid = [blocks, self.heads as u32, (tokens / self.seq_len) as u32];
        let delta_launch = Launch { grid, block: [32, DELTA_QUERIES, 1], ..Launch::row(1, 1) };
        // SAFETY: the kernel takes one `Backward`; it reads do and o, and writes delta, a number a query and head.
        let delta = unsafe { Work::launch(delta, delta_launch, arguments) };
        // SAFETY: the same; it reads delta, which is there by then, and writes the columns of queries.
        let queries = unsafe { Work::launch(queries.0, queries.1, arguments) };
        // SAFETY: the same; it writes the columns of keys and values.
        let keys = unsafe { Work::launch(keys.0, keys.1, arguments) };
        Ok(Work::all(vec![delta, queries, keys]))
    }
}

/// The work of cuDNN, where it has an engine.
fn accepted(what: &str, sdpa: &Sdpa, work: Result<Work, CudaError>) -> Option<Work> {
    work.map_err(|why| tracing::debug!("{what} of {sdpa:?} by a kernel of our own: {why}")).ok()
}

/// Bytes as a tensor.
fn bytes(n: usize) -> TensorType {
    TensorType::new(DType::U8, [n])
}

impl CudaKernel for Attention {
    fn workspace(&self, inputs: &[TensorType]) -> Vec<TensorType> {
        self.sdpa(inputs[0], inputs.len() > 1).map(|sdpa| bytes(sdpa.forward_bytes())).into_iter().collect()
    }

    fn ready(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let (qkv, o, lse) = (operands.inputs[0], operands.outputs[0], operands.outputs[1]);
        let by_cudnn = self.sdpa(qkv.ty, operands.inputs.len() > 1).and_then(|sdpa| {
            // SAFETY: the operands have the shapes that `infer` checked against these sizes, and the workspace what was asked for.
            let work =
                unsafe { sdpa.forward(gpu, qkv.place, o.place, lse.place, operands.workspace[0].place) };
            accepted("attention", &sdpa, work)
        });
        by_cudnn.map_or_else(|| self.own_forward(gpu, operands), Ok)
    }
}

/// The most that a deterministic backward of cuDNN's may work in: it takes two bytes a score.
const MOST_BYTES: usize = 1 << 30;

impl AttentionGrad {
    /// cuDNN's backward, where it could have an engine for these operands that does not take too much memory.
    fn sdpa(&self, inputs: &[TensorType]) -> Option<Sdpa> {
        self.0
            .sdpa(inputs[1], inputs.len() > 4)
            .filter(|sdpa| !sdpa.deterministic || sdpa.backward_bytes() <= MOST_BYTES)
    }
}

impl CudaKernel for AttentionGrad {
    /// The sums of products of outputs and their gradients, and what cuDNN takes where it is asked.
    fn workspace(&self, inputs: &[TensorType]) -> Vec<TensorType> {
        let (tokens, _) = inputs[1].shape.rows_cols();
        let own = 4 * tokens * self.0.heads;
        vec![bytes(self.sdpa(inputs).map_or(own, |sdpa| sdpa.backward_bytes()))]
    }

    fn ready(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let types: Vec<TensorType> = operands.inputs.iter().map(|t| t.ty).collect();
        let by_cudnn = self.sdpa(&types).and_then(|sdpa| {
            let [d_o, qkv, o, lse] = [0, 1, 2, 3].map(|n| operands.inputs[n].place);
            let (dqkv, workspace) = (operands.outputs[0].place, operands.workspace[0].place);
            // SAFETY: as for the forward.
            let work = unsafe { sdpa.backward(gpu, d_o, qkv, o, lse, dqkv, workspace) };
            accepted("attention's backward", &sdpa, work)
        });
        by_cudnn.map_or_else(|| self.0.own_backward(gpu, operands), Ok)
    }
}
