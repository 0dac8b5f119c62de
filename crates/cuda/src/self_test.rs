//! Small work of known result on a card: whether the compiler, cuBLASLt and cuDNN do there what they should.

use crate::error::CudaError;
use crate::gemm::{Gemm, GemmOperands};
use crate::gpu::Gpu;
use crate::kernel::Work;
use crate::memory::{DeviceMemory, DevicePtr};
use crate::module::{Launch, Module};
use crate::sdpa::Sdpa;
use crate::stream::Stream;
use xtrain_tensor::DType;

const SOURCE: &str = r#"
struct Double { float* x; int n; };
extern "C" __global__ void twice(Double a) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < a.n) a.x[i] *= 2.0f;
}
"#;

#[derive(Clone, Copy)]
#[repr(C)]
struct Double {
    x: DevicePtr,
    n: i32,
}

/// 1.0 as bf16.
const ONE: [u8; 2] = [0x80, 0x3F];

impl Gpu {
    /// Compiles a kernel, not one that was kept, and runs it.
    ///
    /// # Errors
    /// What failed, wrong numbers among it.
    pub fn test_kernel(&self) -> Result<(), CudaError> {
        const N: usize = 1000;
        let stream = Stream::new(self.context())?;
        let cubin = self.compiler().compile("trial.cu", SOURCE, self.info().arch, &[])?.cubin;
        let function = Module::load(self.context(), &cubin)?.function("twice")?;
        let numbers: Vec<u8> = (0..N).flat_map(|i| (i as f32).to_le_bytes()).collect();
        let x = memory(self, &numbers, &stream)?;
        let arguments = Double { x: x.pointer(), n: N as i32 };
        // SAFETY: the kernel takes one `Double`, and writes the N numbers of `x`, which is kept until they are read.
        unsafe { function.launch(Launch::row(N.div_ceil(128) as u32, 128), &arguments, &stream)? };
        let found = floats(&x.all().read(&stream)?);
        check("the kernel", &found, |i| 2.0 * i as f32)
    }

    /// Multiplies two matrices of ones in bf16 by cuBLASLt.
    ///
    /// # Errors
    /// As [`Gpu::test_kernel`].
    pub fn test_gemm(&self) -> Result<(), CudaError> {
        const M: usize = 64;
        const N: usize = 128;
        const K: usize = 256;
        let stream = Stream::new(self.context())?;
        let ones = memory(self, &ONE.repeat(M.max(N) * K), &stream)?;
        let d = DeviceMemory::new(self.context(), 4 * M * N)?;
        let workspace = DeviceMemory::new(self.context(), Gemm::WORKSPACE_BYTES)?;
        // What was put in before must have run: choosing an algorithm runs the product in a stream of its own.
        stream.synchronize()?;
        let operands = GemmOperands {
            a: ones.pointer(),
            b: ones.pointer(),
            d: d.pointer(),
            bias: None,
            scales: None,
            workspace: workspace.pointer(),
        };
        let gemm = Gemm::new([M, N, K], DType::BF16, [false, true], DType::F32);
        gemm.prepare(self, &operands)?.enqueue(&stream)?;
        check("cuBLASLt's product", &floats(&d.all().read(&stream)?), |_| K as f32)
    }

    /// Attention by cuDNN, forward and backward, over keys that are all alike and values of one.
    ///
    /// # Errors
    /// As [`Gpu::test_kernel`]; also where cuDNN is missing or has no engine for this card.
    pub fn test_attention(&self) -> Result<(), CudaError> {
        const TOKENS: usize = 64;
        const HEADS: usize = 2;
        const WIDTH: usize = 64;
        let sdpa = Sdpa {
            sequences: 1,
            seq_len: TOKENS,
            heads: HEADS,
            kv_heads: HEADS,
            head_dim: WIDTH,
            deterministic: false,
        };
        let stream = Stream::new(self.context())?;
        // A row is queries, keys, values: the first two are zero, so that every key weighs alike.
        let row = [[0; 2 * 2 * HEADS * WIDTH].as_slice(), &ONE.repeat(HEADS * WIDTH)].concat();
        let qkv = memory(self, &row.repeat(TOKENS), &stream)?;
        let d_o = memory(self, &ONE.repeat(TOKENS * HEADS * WIDTH), &stream)?;
        let room = |bytes: usize| DeviceMemory::new(self.context(), bytes);
        let (o, lse) = (room(2 * TOKENS * HEADS * WIDTH)?, room(4 * TOKENS * HEADS)?);
        let dqkv = room(2 * TOKENS * 3 * HEADS * WIDTH)?;
        let workspace = room(sdpa.forward_bytes().max(sdpa.backward_bytes()))?;
        let at = DeviceMemory::pointer;
        // SAFETY: the places hold what these sizes ask for, as allocated above, and are kept until the numbers are read.
        let forward = unsafe { sdpa.forward(self, at(&qkv), at(&o), at(&lse), at(&workspace))? };
        // SAFETY: as above.
        let backward =
            unsafe { sdpa.backward(self, at(&d_o), at(&qkv), at(&o), at(&lse), at(&dqkv), at(&workspace))? };
        Work::sequence(vec![forward, backward]).enqueue(&stream)?;
        check("cuDNN's attention", &halves(&o.all().read(&stream)?), |_| 1.0)?;
        // A value's gradient is the sum of the weights that it had: 1 / (i + 1) of each query i from its own on.
        let weights = |token: usize| (token..TOKENS).map(|i| 1.0 / (i + 1) as f32).sum::<f32>();
        check("cuDNN's attention backward", &halves(&dqkv.all().read(&stream)?), |i| {
            let (token, column) = (i / (3 * HEADS * WIDTH), i % (3 * HEADS * WIDTH));
            if column < 2 * HEADS * WIDTH { 0.0 } else { weights(token) }
        })
    }
}

fn memory(gpu: &Gpu, bytes: &[u8], stream: &Stream) -> Result<DeviceMemory, CudaError> {
    let memory = DeviceMemory::new(gpu.context(), bytes.len())?;
    memory.all().write(bytes, stream)?;
    Ok(memory)
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect()
}

/// bf16 as f32: its upper half.
fn halves(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<2>().0.iter().map(|&[low, high]| f32::from_le_bytes([0, 0, low, high])).collect()
}

/// An error where a number is off by more than bf16's rounding.
fn check(call: &'static str, found: &[f32], expected: impl Fn(usize) -> f32) -> Result<(), CudaError> {
    let off = |(i, &x): (usize, &f32)| {
        let wanted = expected(i);
        // Written so that what is no number is off.
        let is_near = (x - wanted).abs() <= 0.02 * wanted.abs().max(1.0);
        (!is_near).then(|| format!("element {i} is {x} instead of {wanted}"))
    };
    match found.iter().enumerate().find_map(off) {
        None => Ok(()),
        Some(text) => Err(CudaError::Library { call, text }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_numbers_are_told_and_roundings_are_not() {
        assert_eq!(floats(&2.5f32.to_le_bytes()), [2.5]);
        assert_eq!(halves(&ONE), [1.0]);
        assert_eq!(check("x", &[1.0, 2.01, 0.0], |i| [1.0, 2.0, 0.0][i]), Ok(()));
        for wrong in [f32::NAN, f32::INFINITY, 3.1, 0.0] {
            let said = check("x", &[1.0, wrong], |i| [1.0, 3.0][i]).unwrap_err().to_string();
            assert!(said.starts_with("x failed: element 1 is ") && said.ends_with(" instead of 3"), "{said}");
        }
    }
}
