//! Self-tests of a GPU: small computations with known results by the compiler, cuBLASLt and cuDNN.

use crate::error::CudaError;
use crate::gemm::{Gemm, GemmOperands};
use crate::gpu::Gpu;
use crate::kernel::Work;
use crate::kernel_struct;
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

kernel_struct! {
    struct Double {
        x: DevicePtr,
        n: i32,
    }
}

/// 1.0 as bf16.
const ONE: [u8; 2] = [0x80, 0x3F];

impl Gpu {
    /// Compiles a kernel, bypassing the cache, and runs it.
    ///
    /// # Errors
    /// The failed call, or a wrong result.
    pub fn test_kernel(&self) -> Result<(), CudaError> {
        const N: usize = 1000;
        let stream = Stream::new(self.context())?;
        let cubin = self.compiler().compile("self_test.cu", SOURCE, self.info().arch, &[])?.cubin;
        let function = Module::load(self.context(), &cubin)?.function("twice")?;
        let numbers: Vec<u8> = (0..N).flat_map(|i| (i as f32).to_le_bytes()).collect();
        let x = memory(self, &numbers, &stream)?;
        let arguments = Double { x: x.pointer(), n: N as i32 };
        // SAFETY: the kernel takes one `Double`, and writes the N numbers of `x`, which is kept until they
        // are read.
        unsafe { function.launch(Launch::row(N.div_ceil(128) as u32, 128), &arguments, &stream)? };
        let found = floats(&x.all().read(&stream)?);
        check("the kernel", &found, |i| 2.0 * i as f32)
    }

    /// Multiplies two bf16 matrices of ones by cuBLASLt.
    ///
    /// # Errors
    /// The failed call, or a wrong result.
    pub fn test_gemm(&self) -> Result<(), CudaError> {
        const M: usize = 64;
        const N: usize = 128;
        const K: usize = 256;
        let stream = Stream::new(self.context())?;
        let ones = memory(self, &ONE.repeat(M.max(N) * K), &stream)?;
        let d = DeviceMemory::new(self.context(), 4 * M * N)?;
        let workspace = DeviceMemory::new(self.context(), Gemm::WORKSPACE_BYTES)?;
        // The copies must have run: choosing an algorithm runs the GEMM on a stream of its own.
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
        check("cuBLASLt's GEMM", &floats(&d.all().read(&stream)?), |_| K as f32)
    }

    /// Computes attention by cuDNN, forward and backward, with equal keys and with values of one.
    ///
    /// # Errors
    /// The failed call, or a wrong result; also if cuDNN is missing or has no engine for this GPU.
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
            scale: 1.0 / (WIDTH as f32).sqrt(),
            deterministic: false,
        };
        // A row holds queries, keys, values. Zeros in the first two give every key the same weight.
        let row = [[0; 2 * 2 * HEADS * WIDTH].as_slice(), &ONE.repeat(HEADS * WIDTH)].concat();
        let (rows, ones) = (row.repeat(TOKENS), ONE.repeat(TOKENS * HEADS * WIDTH));
        let allocate = |bytes: usize| DeviceMemory::new(self.context(), bytes);
        let (qkv, d_o) = (allocate(rows.len())?, allocate(ones.len())?);
        let (o, lse) = (allocate(2 * TOKENS * HEADS * WIDTH)?, allocate(4 * TOKENS * HEADS)?);
        let dqkv = allocate(2 * TOKENS * 3 * HEADS * WIDTH)?;
        let workspace = allocate(sdpa.forward_bytes().max(sdpa.backward_bytes()))?;
        let at = DeviceMemory::pointer;
        // SAFETY: the addresses are allocations of these sizes, made above and alive until the numbers are
        // read.
        let forward = unsafe { sdpa.forward(self, at(&qkv), at(&o), at(&lse), at(&workspace))? };
        // SAFETY: as above.
        let backward =
            unsafe { sdpa.backward(self, at(&d_o), at(&qkv), at(&o), at(&lse), at(&dqkv), at(&workspace))? };
        // Without cuDNN, the calls above fail and the memory is freed. No copy to it may be enqueued before.
        let stream = Stream::new(self.context())?;
        qkv.all().write(&rows, &stream)?;
        d_o.all().write(&ones, &stream)?;
        Work::sequence(vec![forward, backward]).enqueue(&stream)?;
        check("cuDNN's attention", &halves(&o.all().read(&stream)?), |_| 1.0)?;
        // The gradient of value i is the sum of its weights: 1 / (j + 1) for each query j >= i.
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

/// bf16 numbers as f32: they are its upper half.
fn halves(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<2>().0.iter().map(|&[low, high]| f32::from_le_bytes([0, 0, low, high])).collect()
}

/// Fails if a number differs by more than bf16's rounding.
fn check(call: &'static str, found: &[f32], reference: impl Fn(usize) -> f32) -> Result<(), CudaError> {
    let off = |(i, &x): (usize, &f32)| {
        let expected = reference(i);
        // This form also rejects NaN.
        let is_near = (x - expected).abs() <= 0.02 * expected.abs().max(1.0);
        (!is_near).then(|| format!("element {i} is {x} instead of {expected}"))
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
    fn wrong_numbers_are_reported_and_rounding_is_not() {
        assert_eq!(floats(&2.5f32.to_le_bytes()), [2.5]);
        assert_eq!(halves(&ONE), [1.0]);
        assert_eq!(check("x", &[1.0, 2.01, 0.0], |i| [1.0, 2.0, 0.0][i]), Ok(()));
        for wrong in [f32::NAN, f32::INFINITY, 3.1, 0.0] {
            let message = check("x", &[1.0, wrong], |i| [1.0, 3.0][i]).unwrap_err().to_string();
            assert!(
                message.starts_with("x failed: element 1 is ") && message.ends_with(" instead of 3"),
                "{message}"
            );
        }
    }
}
