//! Samples of [`QkNormRope`] and [`QkNormRopeGrad`].

use super::{QkNormRope, QkNormRopeGrad};
use crate::samples::{Fill, Sample, SampleInput, Sampled};
use xtrain_tensor::DType;

impl Sampled for QkNormRope {
    fn samples() -> Vec<Sample> {
        let rotation = QkNormRope { heads: 3, kv_heads: 1, head_dim: 6, norm: None };
        let normed = QkNormRope { heads: 2, kv_heads: 2, head_dim: 10, norm: Some(1e-6) };
        let weight = || SampleInput::parameter([10]).fill(Fill::Normal(1.0, 0.3));
        vec![
            Sample::forward(
                rotation,
                [SampleInput::activation([7, 30]), SampleInput::ids(7, 9), SampleInput::activation([9, 6])],
            ),
            Sample::forward(
                normed,
                [
                    SampleInput::activation([5, 60]),
                    SampleInput::ids(5, 4),
                    SampleInput::activation([4, 10]),
                    weight(),
                    weight(),
                ],
            ),
        ]
    }

    fn large() -> Sample {
        Sample::forward(
            QkNormRope { heads: 4, kv_heads: 2, head_dim: 20, norm: Some(1e-6) },
            [
                SampleInput::activation([300, 160]),
                SampleInput::ids(300, 9),
                SampleInput::activation([9, 20]),
                SampleInput::parameter([20]),
                SampleInput::parameter([20]),
            ],
        )
    }

    fn gpu_samples() -> Vec<Sample> {
        let mut all = Vec::new();
        for [t, heads, kv_heads, head_dim] in GPU_SHAPES {
            let (cols, weight) = ((heads + 2 * kv_heads) * head_dim, || SampleInput::parameter([head_dim]));
            let mut inputs = vec![
                SampleInput::activation([t, cols]),
                SampleInput::ids(t, 9),
                SampleInput::activation([9, head_dim]),
            ];
            let op = |norm| QkNormRope { heads, kv_heads, head_dim, norm };
            all.push(Sample::forward(op(None), inputs.clone()));
            inputs.extend([weight(), weight()]);
            all.push(Sample::forward(op(Some(1e-6)), inputs));
        }
        all
    }
}

impl Sampled for QkNormRopeGrad {
    fn samples() -> Vec<Sample> {
        let op = |weights| QkNormRopeGrad { heads: 4, kv_heads: 2, head_dim: 34, weights, amax: false };
        let rotation =
            [SampleInput::activation([131, 272]), SampleInput::ids(131, 9), SampleInput::activation([9, 34])];
        let norm = [
            SampleInput::activation([131, 272]),
            SampleInput::activation([131, 6]),
            SampleInput::activation([34]),
            SampleInput::activation([34]),
        ];
        let normed: Vec<_> = rotation.iter().cloned().chain(norm).collect();
        vec![
            Sample::plain(op(None), rotation.clone()),
            Sample::plain(QkNormRopeGrad { amax: true, ..op(None) }, rotation.clone()),
            Sample::plain(op(Some([DType::F32; 2])), normed.clone()),
            Sample::plain(QkNormRopeGrad { amax: true, ..op(Some([DType::F32; 2])) }, normed),
        ]
    }

    fn large() -> Sample {
        QkNormRopeGrad::samples().swap_remove(2)
    }

    fn gpu_samples() -> Vec<Sample> {
        let mut all = Vec::new();
        for [t, heads, kv_heads, head_dim] in GPU_SHAPES {
            let qkv = || SampleInput::activation([t, (heads + 2 * kv_heads) * head_dim]);
            let weight = || SampleInput::activation([head_dim]);
            let mut inputs = vec![qkv(), SampleInput::ids(t, 9), SampleInput::activation([9, head_dim])];
            let op = |weights| QkNormRopeGrad { heads, kv_heads, head_dim, weights, amax: false };
            let mut add = |op: QkNormRopeGrad, inputs: &[SampleInput]| {
                all.push(Sample::plain(op, inputs));
                let mut inputs = inputs.to_vec();
                inputs[0].fill = largest_at_the_end(t, (heads + kv_heads) * head_dim, kv_heads * head_dim);
                all.push(Sample::plain(QkNormRopeGrad { amax: true, ..op }, inputs));
            };
            add(op(None), &inputs);
            inputs.extend([qkv(), SampleInput::activation([t, heads + kv_heads]), weight(), weight()]);
            add(op(Some([DType::F32, DType::BF16])), &inputs);
        }
        all
    }
}

/// Gradients of which the largest is the last one of the values. Those of queries and keys, which are
/// `rotated` columns, are small.
fn largest_at_the_end(tokens: usize, rotated: usize, values: usize) -> Fill {
    let columns = rotated + values;
    Fill::each(move |i| {
        let x = (i * 7919 % 2003) as f64 / 1001.0 - 1.0;
        match i + 1 == tokens * columns {
            true => -30.0,
            false if i % columns < rotated => 0.1 * x,
            false => x,
        }
    })
}

/// Tokens, query heads, key heads and head width: usual shapes, more heads than fit into a block, wide and
/// odd heads, one token, and more tokens than blocks.
const GPU_SHAPES: [[usize; 4]; 6] =
    [[700, 8, 2, 128], [9, 40, 40, 128], [1, 6, 2, 64], [40, 3, 1, 512], [5, 2, 2, 300], [530, 2, 1, 80]];
