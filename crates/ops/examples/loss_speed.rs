//! Benchmark of the fused head and cross-entropy on the CPU: the loss, the loss with its gradients, also if
//! 30% of the tokens have a target, and each of its three GEMMs.
//!
//!     cargo run --release -p xtrain-ops --example loss_speed [-- TOKENS WIDTH VOCABULARY CHUNK_TOKENS]

use std::time::Instant;
use xtrain_ops::linear::{Linear, LinearDgrad, LinearWgrad};
use xtrain_ops::linear_cross_entropy::{IGNORED, LinearCrossEntropy, LinearCrossEntropyGrad, Terms};
use xtrain_ops::registry::cpu_kernels;
use xtrain_program::Op;
use xtrain_tensor::{DType, HostTensor, Philox, TensorType, View, ViewMut};

const ROUNDS: usize = 5;

fn main() {
    let numbers: Vec<usize> =
        std::env::args().skip(1).map(|a| a.parse().expect("arguments are numbers")).collect();
    let argument = |n: usize, default| numbers.get(n).copied().unwrap_or(default);
    let (t, d, v, chunk_tokens) = (argument(0, 512), argument(1, 768), argument(2, 50304), argument(3, 256));
    println!("{t} tokens in chunks of {chunk_tokens}, width {d}, vocabulary {v}; best of {ROUNDS}");

    for dtype in [DType::F32, DType::BF16] {
        let (x, w) = (normal(dtype, [t, d], 1.0, 1), normal(dtype, [v, d], 0.05, 2));
        let targets: Vec<f64> =
            (0..t as u64).map(|i| f64::from(Philox::new(3, 0, 0).word(i) % v as u32)).collect();
        let targets = HostTensor::from_f64(TensorType::new(DType::I32, [t]), &targets);
        let inverse = HostTensor::from_f64(TensorType::new(DType::F32, []), &[1.0 / t as f64]);
        let inputs = [&x, &w, &targets, &inverse];
        let loss = LinearCrossEntropy { chunk_tokens, z_loss: 1e-4, terms: Terms::None };
        println!("{dtype}");
        time("loss", &loss, &inputs);
        time("loss and gradients", &LinearCrossEntropyGrad { loss, dx: true, dw: Some(DType::F32) }, &inputs);
        let few: Vec<f64> = (targets.to_f64().iter().enumerate())
            .map(|(n, &target)| if n * 3 % 10 < 3 { target } else { f64::from(IGNORED) })
            .collect();
        let few = HostTensor::from_f64(targets.ty(), &few);
        time(
            "of 30% of the tokens",
            &LinearCrossEntropyGrad { loss, dx: true, dw: Some(DType::F32) },
            &[&x, &w, &few, &inverse],
        );
        let (x, dy) = (normal(dtype, [chunk_tokens, d], 1.0, 1), normal(dtype, [chunk_tokens, v], 1.0, 4));
        time("x w^T of a chunk", &Linear, &[&x, &w]);
        time("dlogits w of a chunk", &LinearDgrad, &[&dy, &w]);
        time("dlogits^T x of a chunk", &LinearWgrad { out: DType::F32 }, &[&dy, &x]);
    }
}

fn normal(dtype: DType, shape: [usize; 2], std: f32, seed: u64) -> HostTensor {
    let ty = TensorType::new(dtype, shape);
    let mut x = vec![0.0; ty.numel()];
    Philox::new(seed, 0, 0).fill_normal(std, &mut x);
    HostTensor::from_f64(ty, &x.into_iter().map(f64::from).collect::<Vec<_>>())
}

/// Prints the best time of [`ROUNDS`] runs of `op` under this name.
fn time(name: &str, op: &dyn Op, inputs: &[&HostTensor]) {
    let types: Vec<TensorType> = inputs.iter().map(|t| t.ty()).collect();
    let output_types = op.infer(&types).expect("the operands fit");
    let kernels = cpu_kernels();
    let kernel = kernels.find(op).expect("every op has a CPU kernel");
    let mut written: Vec<HostTensor> =
        output_types.iter().chain(&kernel.workspace(&types)).map(|&ty| HostTensor::zeros(ty)).collect();
    let mut best = f64::INFINITY;
    for _ in 0..ROUNDS {
        let views: Vec<View<'_>> = inputs.iter().map(|t| View::new(t.ty(), t.bytes())).collect();
        let mut outputs: Vec<ViewMut<'_>> =
            written.iter_mut().map(|t| ViewMut::new(t.ty(), t.bytes_mut(), false)).collect();
        let start = Instant::now();
        kernel.run(&views, &mut outputs);
        best = best.min(start.elapsed().as_secs_f64());
    }
    let gflops = op.cost(&types, &output_types).flops() / best / 1e9;
    println!("  {name:24} {:9.1} ms  {gflops:7.1} GFLOP/s", best * 1e3);
}
