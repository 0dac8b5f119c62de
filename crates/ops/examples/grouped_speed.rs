//! Benchmark of the linear layers of experts on the CPU: each next to one dense GEMM of as many operations.
//!
//!     cargo run --release -p xtrain-ops --example grouped_speed [-- EXPERTS ROWS OUTPUTS INPUTS]

use std::time::Instant;
use xtrain_ops::grouped_linear::{GroupedDgrad, GroupedLinear, GroupedWgrad};
use xtrain_ops::linear::{Linear, LinearDgrad, LinearWgrad};
use xtrain_ops::registry::cpu_kernels;
use xtrain_program::Op;
use xtrain_tensor::{DType, HostTensor, Philox, TensorType, View, ViewMut};

const ROUNDS: usize = 7;

fn main() {
    let numbers: Vec<usize> =
        std::env::args().skip(1).map(|a| a.parse().expect("arguments are numbers")).collect();
    let argument = |n: usize, default| numbers.get(n).copied().unwrap_or(default);
    let (experts, rows, o, i) = (argument(0, 16), argument(1, 256), argument(2, 1024), argument(3, 512));
    println!("{experts} experts of {rows} rows each, {i} inputs, {o} outputs; best of {ROUNDS}");

    let (align, live_rows) = (1, experts * rows);
    let start: Vec<f64> = (0..=experts).map(|e| (e * rows) as f64).collect();
    let start = &HostTensor::from_f64(TensorType::new(DType::I32, [experts + 1]), &start);
    let out = DType::F32;
    for dtype in [DType::F32, DType::BF16] {
        let [x, w] = &[normal(dtype, [live_rows, i], 1), normal(dtype, [experts * o, i], 2)];
        let [dy, w_one] = &[normal(dtype, [live_rows, o], 3), normal(dtype, [o, i], 4)];
        println!("{dtype}");
        compare([(&Linear, &[x, w_one]), (&GroupedLinear { experts, align, live_rows }, &[x, w, start])]);
        compare([
            (&LinearDgrad, &[dy, w_one]),
            (&GroupedDgrad { experts, align, live_rows }, &[dy, w, start]),
        ]);
        compare([
            (&LinearWgrad { out }, &[dy, x]),
            (&GroupedWgrad { experts, align, live_rows, out }, &[dy, x, start]),
        ]);
    }
}

fn normal(dtype: DType, shape: [usize; 2], seed: u64) -> HostTensor {
    let ty = TensorType::new(dtype, shape);
    let mut x = vec![0.0; ty.numel()];
    Philox::new(seed, 0, 0).fill_normal(1.0, &mut x);
    HostTensor::from_f64(ty, &x.into_iter().map(f64::from).collect::<Vec<_>>())
}

/// Prints the best times of a dense op and a grouped one, whose runs alternate.
fn compare(ops: [(&dyn Op, &[&HostTensor]); 2]) {
    let kernels = cpu_kernels();
    let mut runs = ops.map(|(op, inputs)| {
        let types: Vec<TensorType> = inputs.iter().map(|t| t.ty()).collect();
        let outputs = op.infer(&types).expect("the operands fit");
        let flops = op.cost(&types, &outputs).flops();
        (op, inputs, HostTensor::zeros(outputs[0]), flops, f64::INFINITY)
    });
    for _ in 0..ROUNDS {
        for (op, inputs, output, _, best) in &mut runs {
            let views: Vec<View<'_>> = inputs.iter().map(|t| View::new(t.ty(), t.bytes())).collect();
            let written = ViewMut::new(output.ty(), output.bytes_mut(), false);
            let start = Instant::now();
            kernels.find(*op).expect("every op has a CPU kernel").run(&views, &mut [written]);
            *best = best.min(start.elapsed().as_secs_f64());
        }
    }
    let [dense, grouped] = runs.map(|(op, _, _, flops, best)| {
        println!("  {:16} {:9.2} ms  {:7.1} GFLOP/s", op.name(), best * 1e3, flops / best / 1e9);
        best
    });
    println!("  {:16} {:9.2}", "ratio", grouped / dense);
}
