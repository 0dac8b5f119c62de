//! The GPU kernels of [`AdamW`].
#![allow(unsafe_code, reason = "it launches kernels")]

use super::{AdamW, CONTROLS, OPERANDS, SITES};
use crate::device::{Floats, suffix, table};
use crate::quantize::Quantize;
use crate::quantize::cuda::{self as quantize, AREA, PIECE};
use xtrain_cuda::{
    CudaError, CudaKernel, CudaTensor, DevicePtr, Gpu, Header, KernelSource, Launch, Operands, Work,
};
use xtrain_tensor::TensorType;

const UPDATE: Header = Header::new("adamw/update.cuh", include_str!("update.cuh"));

pub(super) const SOURCE: KernelSource =
    KernelSource { headers: &[UPDATE], ..KernelSource::new("adamw/kernel.cu", include_str!("kernel.cu")) };

pub(super) const CAST: KernelSource = KernelSource {
    headers: &[UPDATE, PIECE, AREA],
    variants: quantize::LOCAL_VARIANTS,
    ..KernelSource::new("adamw/cast.cu", include_str!("cast.cu"))
};

/// Threads of a block, and elements of a chunk; equal in the kernels.
const THREADS: u32 = 256;
const CHUNK: usize = 16384;

#[derive(Clone, Copy)]
#[repr(C)]
struct Arguments {
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

#[derive(Clone, Copy)]
#[repr(C)]
struct Casting {
    by: Arguments,
    at: quantize::Arguments,
    parameter: u64,
}

impl CudaKernel for AdamW {
    /// Of all casts.
    fn workspace(&self, inputs: &[TensorType]) -> Vec<TensorType> {
        let of_one = |(p, cast): &(usize, Quantize)| cast.workspace(&[inputs[CONTROLS + OPERANDS * p]]);
        self.casts.iter().flat_map(of_one).collect()
    }

    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let Operands { inputs, outputs, .. } = operands;
        // Fused, or after all updates if rows are no multiples of 8.
        let (mut casting, mut after) = (Vec::new(), Vec::new());
        let masters: Vec<usize> = self.masters().collect();
        let mut workspace = operands.workspace;
        for ((&(p, cast), first), scale) in self.casts.iter().zip(self.cast_outputs()).zip(self.scales()) {
            let master = outputs[masters[p]];
            let own;
            (own, workspace) = workspace.split_at(cast.workspace(&[master.ty]).len());
            let master = CudaTensor { ty: master.ty, place: master.place };
            let inputs: Vec<_> = [master].into_iter().chain(scale.map(|scale| inputs[scale])).collect();
            let of = Operands {
                inputs: &inputs,
                outputs: &outputs[first..first + cast.outputs()],
                workspace: own,
            };
            match cast.fused(gpu, &of)? {
                Some(fused) => casting.push((p, fused)),
                None => after.push(cast.prepare(gpu, &of)?),
            }
        }
        // The source's `Parameter` and `Chunk`, in words of 8 bytes.
        let (mut parameters, mut chunks) = (Vec::new(), Vec::new());
        let mut output = 0;
        for (p, parameter) in self.parameters.iter().enumerate() {
            let grad = inputs[CONTROLS + OPERANDS * p + 3];
            let mut of = [0, 1, 2].map(|k| (outputs[output + k].ty, outputs[output + k].place)).to_vec();
            of.push((grad.ty, grad.place));
            output += 3;
            if parameter.compute.is_some() {
                of.push((outputs[output].ty, outputs[output].place));
                output += 1;
            }
            let are_bf16 = (of.iter().enumerate()).map(|(n, (ty, _))| u64::from(suffix(*ty) == "bf16") << n);
            let are_bf16: u64 = are_bf16.sum();
            let mut places = [0; 5];
            places.iter_mut().zip(&of).for_each(|(to, (_, place))| *to = place.0);
            let elements = grad.ty.numel();
            let decay = u64::from((parameter.weight_decay as f32).to_bits());
            parameters.extend(places);
            let amax = self.measured.iter().position(|&measured| measured == p);
            parameters.push(amax.map_or(0, |n| outputs[self.first_amax() + n].place.0));
            parameters.extend([elements as u64, are_bf16 | decay << 32]);
            if casting.iter().any(|(of, _)| *of == p) {
                continue;
            }
            chunks.extend((0..elements.div_ceil(CHUNK) as u64).map(|number| number | (p as u64) << 32));
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
        let arguments = Arguments {
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
            sites: SITES,
            seed_low: self.seed as u32,
            seed_high: (self.seed >> 32) as u32,
        };
        let function = gpu.function(&SOURCE, &[], "adamw")?;
        let has_chunks = launch.grid[0] > 0;
        let mut works = Vec::new();
        for (p, fused) in casting {
            let function = gpu.function(&CAST, &fused.defines, &format!("adamw_cast_{}", fused.path))?;
            let arguments = Casting { by: arguments, at: fused.arguments, parameter: p as u64 };
            works.extend(fused.before);
            // SAFETY: the kernel takes one `Casting`. A block has an area of the master, which lies as
            // `Quantize` says and is as large as the parameter's other operands; the tables live as long as
            // the last of these works, which is kept with them.
            works.push(unsafe { Work::launch(function, fused.launch, arguments) });
            works.extend(fused.after);
        }
        works.push(Work::new(move |stream| {
            // The tables live as long as the work.
            let _tables = (&parameters, &chunks);
            if let Some((clear, parameters)) = &clear {
                // SAFETY: the kernel takes one `Arguments`; its tables are as the source's `Parameter`, with
                // a word for each amax.
                unsafe { clear.launch(Launch::row(*parameters, 1), &arguments, stream)? };
            }
            if !has_chunks {
                return Ok(());
            }
            // SAFETY: the kernel takes one `Arguments`. The tables are as its `Parameter` and `Chunk`: every
            // chunk of every parameter has a block, and a parameter's operands have its elements, of the
            // types that its bits say.
            unsafe { function.launch(launch, &arguments, stream) }
        }));
        works.extend(after);
        Ok(Work::sequence(works))
    }
}
