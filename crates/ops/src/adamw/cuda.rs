//! The GPU kernels of [`AdamW`].
#![allow(unsafe_code, reason = "it launches kernels")]

use super::{AdamW, CONTROLS, OPERANDS, SITES};
use crate::device::{Floats, suffix, table};
use crate::quantize::cuda::{AREA, FusedCast, PIECE, QuantizeArguments, SCALES};
use crate::quantize::variants::{ANY, NONE, Table, fused_variants};
use crate::quantize::{CastSource, Quantize};
use xtrain_cuda::{
    CudaError, CudaKernel, CudaTensor, DevicePtr, Gpu, Header, KernelSource, Launch, Operands, Work,
    kernel_struct,
};
use xtrain_tensor::{DType, TensorType};

const UPDATE: Header = Header::new("adamw/update.cuh", include_str!("update.cuh"));

pub(super) const SOURCE: KernelSource = KernelSource {
    constants: &[&[("THREADS", THREADS as i64), ("CHUNK", CHUNK as i64)]],
    headers: &[UPDATE],
    structs: &[UpdateArguments::LAYOUT, Parameter::LAYOUT, Chunk::LAYOUT],
    ..KernelSource::new("adamw/kernel.cu", include_str!("kernel.cu"))
};

pub(super) const CAST: KernelSource = KernelSource {
    headers: &[UPDATE, SCALES, PIECE, AREA],
    structs: &[UpdateCastArguments::LAYOUT, Parameter::LAYOUT],
    variants: || fused_variants(TABLE),
    ..KernelSource::new("adamw/cast.cu", include_str!("cast.cu"))
};

#[rustfmt::skip]
const TABLE: Table = &[
    //                                current  delayed  rows   tiles  blocks
    (CastSource::Input, DType::E4M3, [NONE,    ANY,     NONE,  NONE,  ANY]),
];

/// Threads of a block.
const THREADS: u32 = 256;
/// Elements of a chunk.
const CHUNK: usize = 16384;

kernel_struct! {
    struct UpdateArguments {
        parameters: DevicePtr,
        chunks: DevicePtr,
        lr: Floats,
        coefficient: Floats,
        applied: DevicePtr,
        skip: DevicePtr,
        beta1: f64,
        beta2: f64,
        rest1: f32,
        rest2: f32,
        eps: f32,
        sites: u32,
        seed_low: u32,
        seed_high: u32,
    }

    struct UpdateCastArguments {
        update: UpdateArguments,
        cast: QuantizeArguments,
        parameter: u64,
    }

    struct Parameter {
        master: DevicePtr,
        m: DevicePtr,
        v: DevicePtr,
        grad: DevicePtr,
        compute: DevicePtr,
        amax: DevicePtr,
        elements: u64,
        first_element: u64,
        are_bf16: u32,
        weight_decay: f32,
    }

    struct Chunk {
        number: u32,
        parameter: u32,
    }
}

impl CudaKernel for AdamW {
    /// The workspaces of all casts.
    fn workspace(&self, inputs: &[TensorType]) -> Vec<TensorType> {
        let workspace = |(p, cast): &(usize, Quantize)| cast.workspace(&[inputs[CONTROLS + OPERANDS * p]]);
        self.casts.iter().flat_map(workspace).collect()
    }

    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let inputs = operands.inputs;
        let Casts { fused: fused_casts, later: later_casts } = self.prepare_casts(gpu, operands)?;
        let (mut parameters, mut chunks) = (Vec::new(), Vec::new());
        for (p, first) in self.masters().enumerate() {
            let parameter = self.parameter(p, first, operands);
            parameters.push(parameter);
            if fused_casts.iter().any(|(fused, _)| *fused == p) {
                continue;
            }
            let numbers = 0..parameter.elements.div_ceil(CHUNK as u64) as u32;
            chunks.extend(numbers.map(|number| Chunk { number, parameter: p as u32 }));
        }
        if parameters.is_empty() {
            return Ok(Work::sequence(Vec::new()));
        }
        let launch = Launch::row(chunks.len() as u32, THREADS);
        let clear = match self.measured.is_empty() {
            true => None,
            false => Some((gpu.function(&SOURCE, &[], "adamw_clear")?, self.parameters.len() as u32)),
        };
        let (parameters, chunks) = (table(gpu, &parameters)?, table(gpu, &chunks)?);
        let arguments = UpdateArguments {
            parameters: parameters.pointer(),
            chunks: chunks.pointer(),
            lr: inputs[0].into(),
            coefficient: inputs[1].into(),
            applied: inputs[2].place,
            skip: inputs[3].place,
            beta1: self.beta1,
            beta2: self.beta2,
            rest1: (1.0 - self.beta1) as f32,
            rest2: (1.0 - self.beta2) as f32,
            eps: self.eps as f32,
            sites: SITES + self.first_parameter as u32,
            seed_low: self.seed as u32,
            seed_high: (self.seed >> 32) as u32,
        };
        let function = gpu.function(&SOURCE, &[], "adamw")?;
        let has_chunks = launch.grid[0] > 0;
        let mut works = Vec::new();
        for (p, fused) in fused_casts {
            let function = gpu.function(&CAST, &fused.defines, &format!("adamw_cast_{}", fused.path))?;
            let arguments =
                UpdateCastArguments { update: arguments, cast: fused.arguments, parameter: p as u64 };
            works.extend(fused.before);
            // SAFETY: the kernel takes one `UpdateCastArguments`. A block has an area of the master, which
            // has the extents of the cast and the size of the parameter's other operands; the tables live as
            // long as the last of these works, which is stored with them.
            works.push(unsafe { Work::launch(function, fused.launch, arguments) });
            works.extend(fused.after);
        }
        works.push(Work::new(move |stream| {
            // The tables live as long as the work.
            let _tables = (&parameters, &chunks);
            if let Some((clear, parameters)) = &clear {
                // SAFETY: the kernel takes one `UpdateArguments`, whose table has a `Parameter` for each
                // block, with a word for each amax.
                unsafe { clear.launch(Launch::row(*parameters, 1), &arguments, stream)? };
            }
            if !has_chunks {
                return Ok(());
            }
            // SAFETY: the kernel takes one `UpdateArguments`. Every chunk of every parameter has a block, and
            // a parameter's operands have its elements, of the types that its bits say.
            unsafe { function.launch(launch, &arguments, stream) }
        }));
        works.extend(later_casts);
        Ok(Work::sequence(works))
    }
}

/// The casts of the updated masters.
struct Casts {
    /// Casts that the update of their parameter computes, with its index.
    fused: Vec<(usize, FusedCast)>,
    /// Casts that cannot be fused, because their rows are not multiples of 8. They run after all updates.
    later: Vec<Work>,
}

impl AdamW {
    fn prepare_casts(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Casts, CudaError> {
        let Operands { inputs, outputs, workspace: mut workspaces } = *operands;
        let (mut fused, mut later) = (Vec::new(), Vec::new());
        let masters: Vec<usize> = self.masters().collect();
        for ((&(p, cast), first), scale) in self.casts.iter().zip(self.cast_outputs()).zip(self.scales()) {
            let master = outputs[masters[p]];
            let workspace;
            (workspace, workspaces) = workspaces.split_at(cast.workspace(&[master.ty]).len());
            let master = CudaTensor { ty: master.ty, place: master.place };
            let inputs: Vec<_> = [master].into_iter().chain(scale.map(|scale| inputs[scale])).collect();
            let outputs = &outputs[first..first + cast.outputs()];
            let cast_operands = Operands { inputs: &inputs, outputs, workspace };
            match cast.fused(gpu, &cast_operands)? {
                Some(cast) => fused.push((p, cast)),
                None => later.push(cast.prepare(gpu, &cast_operands)?),
            }
        }
        Ok(Casts { fused, later })
    }

    /// The `p`-th parameter, whose master is output `first`.
    fn parameter(&self, p: usize, first: usize, operands: &Operands<'_>) -> Parameter {
        let Operands { inputs, outputs, .. } = operands;
        let parameter = &self.parameters[p];
        let [master, m, v] = [0, 1, 2].map(|k| (outputs[first + k].ty, outputs[first + k].place));
        let grad = inputs[CONTROLS + OPERANDS * p + 3];
        let compute = parameter.compute.map(|_| (outputs[first + 3].ty, outputs[first + 3].place));
        let tensors = [Some(master), Some(m), Some(v), Some((grad.ty, grad.place)), compute];
        let is_bf16 = |tensor: Option<(TensorType, _)>| tensor.is_some_and(|(ty, _)| suffix(ty) == "bf16");
        let places = tensors.map(|tensor| tensor.map_or(DevicePtr(0), |(_, place)| place));
        let amax = self.measured.iter().position(|&measured| measured == p);
        Parameter {
            master: places[0],
            m: places[1],
            v: places[2],
            grad: places[3],
            compute: places[4],
            amax: amax.map_or(DevicePtr(0), |n| outputs[self.first_amax() + n].place),
            elements: grad.ty.numel() as u64,
            first_element: parameter.first_element,
            are_bf16: tensors.iter().enumerate().map(|(n, &tensor)| u32::from(is_bf16(tensor)) << n).sum(),
            weight_decay: parameter.weight_decay as f32,
        }
    }
}
