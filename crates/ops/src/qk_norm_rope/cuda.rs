//! Launches of the GPU kernels of [`QkNormRope`] and [`QkNormRopeGrad`].
#![allow(unsafe_code, reason = "it launches kernels")]

use super::{QkNormRope, QkNormRopeGrad};
use crate::device::{Floats, PARTS, lanes, plane, suffix, warps_of};
use xtrain_cuda::{
    Constants, CudaError, CudaKernel, CudaOutput, CudaTensor, DevicePtr, Function, Gpu, KernelSource, Launch,
    Operands, Work, kernel_struct,
};
use xtrain_tensor::{DType, TensorType};

pub(super) const SOURCE: KernelSource = KernelSource {
    constants: &[&[
        ("ONE_PAIR_THREADS", ONE_PAIR_THREADS as i64),
        ("MORE_PAIRS_THREADS", MORE_PAIRS_THREADS as i64),
    ]],
    structs: &[Rope::LAYOUT, RopeGrad::LAYOUT, Sum::LAYOUT],
    variants: || VARIANTS.iter().map(|list| list.to_vec()).collect(),
    ..KernelSource::new("qk_norm_rope/kernel.cu", include_str!("kernel.cu"))
};

/// Variants that tests compile: heads of 128 columns in bf16 and in f32, of 34, and of 300.
const VARIANTS: [Constants; 4] = [
    &[("VECTOR", 1), ("GROUP", 8), ("PAIRS", 1)],
    &[("VECTOR", 1), ("GROUP", 16), ("PAIRS", 1)],
    &[("VECTOR", 0), ("GROUP", 32), ("PAIRS", 1)],
    &[("VECTOR", 0), ("GROUP", 32), ("PAIRS", 5)],
];

/// Maximum number of threads per block if a lane has one pair, and if it has more.
const ONE_PAIR_THREADS: usize = 512;
const MORE_PAIRS_THREADS: usize = 256;

/// The mapping of heads to threads.
#[derive(Clone, Copy)]
struct Cut {
    /// True if lanes read 16-byte vectors.
    vector: bool,
    /// Lanes that share a head.
    group: usize,
    /// Pairs of columns, or of vectors, per lane.
    pairs: usize,
    /// Threads per block.
    threads: usize,
    /// Blocks for the heads of one token.
    blocks: usize,
}

impl Cut {
    /// The mapping for `heads` heads of `head_dim` columns in a tensor of this type.
    fn new(ty: TensorType, heads: usize, head_dim: usize) -> Cut {
        let half = head_dim / 2;
        let vector = half.is_multiple_of(lanes(ty)) && half / lanes(ty) <= 32;
        let lanes = if vector { half / lanes(ty) } else { half };
        let group = lanes.clamp(1, 32).next_power_of_two();
        let pairs = lanes.div_ceil(group).max(1);
        let max_threads = if pairs == 1 { ONE_PAIR_THREADS } else { MORE_PAIRS_THREADS };
        let blocks = (heads * group).div_ceil(max_threads).max(1);
        let threads = warps_of(heads.div_ceil(blocks) * group, max_threads) as usize;
        Cut { vector, group, pairs, threads, blocks }
    }

    fn function(self, gpu: &Gpu, name: &str) -> Result<Function, CudaError> {
        let defines =
            [("VECTOR", i64::from(self.vector)), ("GROUP", self.group as i64), ("PAIRS", self.pairs as i64)];
        gpu.function(&SOURCE, &defines, name)
    }

    fn launch(self, tokens: usize) -> Launch {
        plane([tokens, self.blocks], [self.threads as u32, 1])
    }
}

kernel_struct! {
    struct Heads {
        positions: DevicePtr,
        table: Floats,
        q_w: Floats,
        k_w: Floats,
        tokens: u64,
        table_rows: u32,
        head_dim: u32,
        queries: u32,
        rotated: u32,
        all: u32,
    }
}

impl Heads {
    /// Without the norm the weights are not read; their pointers are then the table's.
    fn new(
        [positions, table]: [CudaTensor; 2],
        weights: Option<[CudaTensor; 2]>,
        (heads, kv_heads, head_dim): (usize, usize, usize),
    ) -> Heads {
        let [q_w, k_w] = weights.unwrap_or([table; 2]);
        Heads {
            positions: positions.place,
            table: table.into(),
            q_w: q_w.into(),
            k_w: k_w.into(),
            tokens: positions.ty.numel() as u64,
            table_rows: table.ty.shape.rows_cols().0 as u32,
            head_dim: head_dim as u32,
            queries: heads as u32,
            rotated: (heads + kv_heads) as u32,
            all: (heads + 2 * kv_heads) as u32,
        }
    }
}

kernel_struct! {
    struct Rope {
        heads: Heads,
        x: DevicePtr,
        y: DevicePtr,
        rstd: DevicePtr,
        amax: DevicePtr,
        eps: f32,
        direction: f32,
    }
}

/// The launch that rotates y in place, forward or, with a `direction` of -1, back, and writes its amax to
/// `amax`, if any.
fn rotation(
    gpu: &Gpu,
    heads: Heads,
    y: CudaOutput,
    direction: f32,
    amax: Option<CudaOutput>,
) -> Result<Work, CudaError> {
    let covered = if amax.is_some() { heads.all } else { heads.rotated };
    let cut = Cut::new(y.ty, covered as usize, heads.head_dim as usize);
    let (x, place) = (y.place, amax.map_or(DevicePtr(0), |amax| amax.place));
    let arguments = Rope { heads, x, y: x, rstd: DevicePtr(0), amax: place, eps: 0.0, direction };
    let name = if amax.is_some() { "rope_amax" } else { "rope" };
    let function = cut.function(gpu, &format!("{name}_{}", suffix(y.ty)))?;
    // SAFETY: the kernels take one `Rope`. y is [tokens, all * head_dim] of the type in the kernel's name,
    // there is a position for each token, and the table is [table_rows, head_dim]; other rows are not read.
    // The cut covers every rotated head once, with an amax every head; amax is one word.
    let rotated = unsafe { Work::launch(function, cut.launch(heads.tokens as usize), arguments) };
    if amax.is_none() {
        return Ok(rotated);
    }
    let clear = cut.function(gpu, "rope_clear")?;
    // SAFETY: as above.
    let clear = unsafe { Work::launch(clear, Launch::row(1, 1), arguments) };
    Ok(Work::sequence(vec![clear, rotated]))
}

impl CudaKernel for QkNormRope {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let Operands { inputs, outputs, .. } = operands;
        let ty = inputs[0].ty;
        let (heads, kv_heads, head_dim) = (self.heads, self.kv_heads, self.head_dim);
        let weights = self.norm.map(|_| [inputs[3], inputs[4]]);
        let description = Heads::new([inputs[1], inputs[2]], weights, (heads, kv_heads, head_dim));
        let Some(eps) = self.norm else {
            return rotation(gpu, description, outputs[0], 1.0, None);
        };
        let cut = Cut::new(ty, heads + 2 * kv_heads, head_dim);
        let arguments = Rope {
            heads: description,
            x: inputs[0].place,
            y: outputs[0].place,
            rstd: outputs[1].place,
            amax: DevicePtr(0),
            eps,
            direction: 1.0,
        };
        let function = cut.function(gpu, &format!("qk_norm_rope_{}", suffix(ty)))?;
        // SAFETY: as in `rotation`, for x and y and all heads; the weights have head_dim elements, and rstd
        // is f32 [tokens, rotated].
        Ok(unsafe { Work::launch(function, cut.launch(inputs[1].ty.numel()), arguments) })
    }
}

kernel_struct! {
    struct RopeGrad {
        heads: Heads,
        dy: DevicePtr,
        x: DevicePtr,
        rstd: Floats,
        parts: DevicePtr,
        amax: DevicePtr,
    }
}

kernel_struct! {
    struct Sum {
        parts: DevicePtr,
        dq_w: Floats,
        dk_w: Floats,
        head_dim: u32,
        count: u32,
        accumulate_q: u32,
        accumulate_k: u32,
    }
}

impl QkNormRopeGrad {
    fn cut(&self, ty: TensorType) -> Cut {
        Cut::new(ty, self.heads + self.kv_heads, self.head_dim)
    }
}

/// Number of blocks along the tokens.
fn token_blocks(tokens: usize) -> usize {
    tokens.clamp(1, PARTS)
}

impl CudaKernel for QkNormRopeGrad {
    fn workspace(&self, inputs: &[TensorType]) -> Vec<TensorType> {
        if self.weights.is_none() {
            return Vec::new();
        }
        let parts = token_blocks(inputs[1].numel()) * self.cut(inputs[0]).blocks;
        vec![TensorType::new(DType::F32, [parts, 2 * self.head_dim])]
    }

    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let Operands { inputs, outputs, workspace } = operands;
        let (ty, head_dim) = (inputs[0].ty, self.head_dim);
        let cut = self.cut(ty);
        let weights = self.weights.map(|_| [inputs[5], inputs[6]]);
        let heads = Heads::new([inputs[1], inputs[2]], weights, (self.heads, self.kv_heads, head_dim));
        if self.weights.is_none() {
            return rotation(gpu, heads, outputs[0], -1.0, outputs.get(1).copied());
        }
        let arguments = RopeGrad {
            heads,
            dy: outputs[0].place,
            x: inputs[3].place,
            rstd: inputs[4].into(),
            parts: workspace[0].place,
            amax: if self.amax { outputs[3].place } else { DevicePtr(0) },
        };
        let tokens = token_blocks(inputs[1].ty.numel());
        let shared = cut.threads / cut.group * head_dim * size_of::<f32>();
        // One more block than for the heads computes the amax of the values.
        let (name, blocks) = match self.amax {
            true => ("qk_norm_rope_grad_amax", cut.blocks + 1),
            false => ("qk_norm_rope_grad", cut.blocks),
        };
        let launch = Cut { blocks, ..cut }.launch(tokens).shared(shared as u32);
        let function = cut.function(gpu, &format!("{name}_{}", suffix(ty)))?;
        // SAFETY: the kernels take one `RopeGrad`. dy and x are as y in `rotation`, rstd is [tokens, rotated]
        // and the weights have head_dim elements; the workspace holds a row of 2 head_dim sums for each block
        // of heads, and shared memory head_dim sums for each group; amax, if any, is one word.
        let sum_heads = unsafe { Work::launch(function, launch, arguments) };

        let clear_arguments = arguments;
        let arguments = Sum {
            parts: workspace[0].place,
            dq_w: outputs[1].into(),
            dk_w: outputs[2].into(),
            head_dim: head_dim as u32,
            count: (tokens * cut.blocks) as u32,
            accumulate_q: outputs[1].accumulate.into(),
            accumulate_k: outputs[2].accumulate.into(),
        };
        let function = cut.function(gpu, "qk_norm_rope_sum")?;
        let launch = plane([(2 * head_dim).div_ceil(32), 1], [32, 32]);
        // SAFETY: the kernel takes one `Sum`; the workspace is [count, 2 head_dim], written by the launch
        // before, and the gradients have head_dim elements.
        let sum_parts = unsafe { Work::launch(function, launch, arguments) };
        let mut steps = vec![sum_heads, sum_parts];
        if self.amax {
            let clear = cut.function(gpu, "qk_norm_rope_grad_clear")?;
            // SAFETY: as above, with amax.
            steps.insert(0, unsafe { Work::launch(clear, Launch::row(1, 1), clear_arguments) });
        }
        Ok(Work::sequence(steps))
    }
}
