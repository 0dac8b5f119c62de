//! Benchmark of attention's CPU kernels: the best of several runs, in ms and GFLOP/s. First forward and
//! backward in training, counting the causal half of the scores; then prefill chunks and decode steps at the
//! end of a KV cache, counting all of it.
//!
//!     cargo run --release -p xtrain-ops --example attention_bench

use std::time::{Duration, Instant};
use xtrain_ops::attention::{Attention, AttentionGrad};
use xtrain_ops::cached_attention::CachedAttention;
use xtrain_program::Op;
use xtrain_tensor::{CpuKernel, DType, HostTensor, Philox, TensorType, View, ViewMut};

fn main() {
    training();
    generation();
}

fn rate(flops: f64, time: Duration) -> f64 {
    flops / time.as_secs_f64() * 1e-9
}

fn training() {
    println!("{:>28} {:>5} {:>10} {:>10} {:>10} {:>10}", "", "", "fwd ms", "GFLOP/s", "bwd ms", "GFLOP/s");
    for (batch, op) in [
        (
            12,
            Attention { seq_len: 64, heads: 4, kv_heads: 4, head_dim: 32, scale: None, deterministic: true },
        ),
        (
            4,
            Attention {
                seq_len: 1024,
                heads: 8,
                kv_heads: 2,
                head_dim: 64,
                scale: None,
                deterministic: true,
            },
        ),
    ] {
        for dtype in [DType::F32, DType::BF16] {
            let tokens = batch * op.seq_len;
            let qkv = random(dtype, [tokens, (op.heads + 2 * op.kv_heads) * op.head_dim], 0);
            let d_o = random(dtype, [tokens, op.heads * op.head_dim], 1);
            let mut forward = outputs(&op, &[&qkv]);
            let (fwd, fwd_flops) = best(&op, &[&qkv], &mut forward);
            let grad = AttentionGrad(op);
            let inputs = [&d_o, &qkv, &forward[0], &forward[1]];
            let (bwd, bwd_flops) = best(&grad, &inputs, &mut outputs(&grad, &inputs));
            let shape =
                format!("B={batch} S={} H={} KV={} E={}", op.seq_len, op.heads, op.kv_heads, op.head_dim);
            println!(
                "{shape:>28} {:>5} {:>10.3} {:>10.1} {:>10.3} {:>10.1}",
                dtype.name(),
                fwd.as_secs_f64() * 1e3,
                rate(fwd_flops, fwd),
                bwd.as_secs_f64() * 1e3,
                rate(bwd_flops, bwd)
            );
        }
    }
}

fn generation() {
    let op = CachedAttention { heads: 8, kv_heads: 2, head_dim: 64, scale: None };
    let (capacity, cache_width) = (1024, op.kv_heads * op.head_dim);
    println!("{:>28} {:>5} {:>10} {:>10}", "", "", "ms", "GFLOP/s");
    for (sequences, new) in [(1, 256), (1, 1), (16, 1)] {
        for dtype in [DType::F32, DType::BF16] {
            let qkv = random(dtype, [sequences * new, (op.heads + 2 * op.kv_heads) * op.head_dim], 0);
            let positions: Vec<f64> =
                (0..sequences * new).map(|t| (capacity - new + t % new) as f64).collect();
            let positions = HostTensor::from_f64(TensorType::new(DType::I32, [positions.len()]), &positions);
            let cache = HostTensor::zeros(TensorType::new(dtype, [sequences, capacity, cache_width]));
            let inputs = [&qkv, &positions, &cache, &cache];
            let (time, flops) = best(&op, &inputs, &mut outputs(&op, &inputs));
            let shape = format!("B={sequences} N={new} of {capacity} H=8 KV=2 E=64");
            println!(
                "{shape:>28} {:>5} {:>10.3} {:>10.1}",
                dtype.name(),
                time.as_secs_f64() * 1e3,
                rate(flops, time)
            );
        }
    }
}

fn random(dtype: DType, shape: [usize; 2], site: u32) -> HostTensor {
    let ty = TensorType::new(dtype, shape);
    let mut x = vec![0.0; ty.numel()];
    Philox::new(0, 0, site).fill_normal(1.0, &mut x);
    HostTensor::from_f64(ty, &x.into_iter().map(f64::from).collect::<Vec<_>>())
}

fn outputs(op: &impl Op, inputs: &[&HostTensor]) -> Vec<HostTensor> {
    let types: Vec<_> = inputs.iter().map(|t| t.ty()).collect();
    op.infer(&types).expect("valid operands").into_iter().map(HostTensor::zeros).collect()
}

/// The shortest time among the runs that fit into two seconds, and the FLOPs of a run.
fn best(op: &(impl Op + CpuKernel), inputs: &[&HostTensor], outputs: &mut [HostTensor]) -> (Duration, f64) {
    let types = |tensors: &[&HostTensor]| tensors.iter().map(|t| t.ty()).collect::<Vec<_>>();
    let flops = op.cost(&types(inputs), &[]).flops();
    let views: Vec<View<'_>> = inputs.iter().map(|t| View::new(t.ty(), t.bytes())).collect();
    let started = Instant::now();
    let mut best = Duration::MAX;
    while started.elapsed() < Duration::from_secs(2) {
        let mut views_mut: Vec<ViewMut<'_>> =
            outputs.iter_mut().map(|t| ViewMut::new(t.ty(), t.bytes_mut(), false)).collect();
        let run = Instant::now();
        op.run(&views, &mut views_mut);
        best = best.min(run.elapsed());
    }
    (best, flops)
}
