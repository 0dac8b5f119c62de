//! The kernel of [`AdamW`] on a card.
#![allow(unsafe_code, reason = "it launches kernels")]

use super::{AdamW, CONTROLS, OPERANDS, SITES};
use crate::device::{Floats, suffix, table};
use xtrain_cuda::{CudaError, CudaKernel, DevicePtr, Gpu, KernelSource, Launch, Operands, Work};

pub(super) const SOURCE: KernelSource = KernelSource::new("adamw/kernel.cu", include_str!("kernel.cu"));

/// Threads of a block, and elements of a chunk; as in the source.
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

impl CudaKernel for AdamW {
    fn ready(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let Operands { inputs, outputs, .. } = operands;
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
            parameters.push(amax.map_or(0, |n| outputs[outputs.len() - self.measured.len() + n].place.0));
            parameters.extend([elements as u64, are_bf16 | decay << 32]);
            chunks.extend((0..elements.div_ceil(CHUNK) as u64).map(|number| number | (p as u64) << 32));
        }
        if chunks.is_empty() {
            return Ok(Work::all(Vec::new()));
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
        Ok(Work::new(move |stream| {
            // The tables live as long as the work.
            let _tables = (&parameters, &chunks);
            if let Some((clear, parameters)) = &clear {
                // SAFETY: the kernel takes one `Arguments`; its tables are as the source's `Parameter`, with a word for each amax.
                unsafe { clear.launch(Launch::row(*parameters, 1), &arguments, stream)? };
            }
            // SAFETY: the kernel takes one `Arguments`. The tables are as its `Parameter` and `Chunk`: every chunk of every parameter has a
            // block, and a parameter's operands have its elements, of the types that its bits say.
            unsafe { function.launch(launch, &arguments, stream) }
        }))
    }
}
