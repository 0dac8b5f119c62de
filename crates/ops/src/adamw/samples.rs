//! Samples of [`AdamW`].

use super::{AdamW, AdamWParameter, OPERANDS};
use crate::quantize::{Given, Layouts, Quantize};
use crate::samples::{Fill, GpuTolerance, MULTIPROCESSORS, Sample, SampleInput, Sampled};
use xtrain_tensor::{DType, Scaling, TensorType};

impl Sampled for AdamW {
    fn tolerance(&self, _: &[TensorType]) -> GpuTolerance {
        // Copies in bf16 are rounded from masters, which differ by their rounding.
        let has_bf16_copy = self.parameters.iter().any(|p| p.compute == Some(DType::BF16));
        GpuTolerance::FusedCast { exact_bf16: !has_bf16_copy }
    }

    fn samples() -> Vec<Sample> {
        vec![sample([5, 7], 1, 0), sample([5, 7], 30, 0), sample([5, 7], 30, 1), tiny()]
    }

    fn large() -> Sample {
        sample([300, 500], 30, 0)
    }

    /// Many parameters of very different lengths, with and without copies and decay, updated and skipped;
    /// then with one or both moments in bf16 and without copies; then with casts of masters.
    fn busy_samples(multiprocessors: usize) -> Vec<Sample> {
        let most = 1_000_003 * multiprocessors / MULTIPROCESSORS;
        let lengths = [1, 2, 7, 8, 9, 63, 500, 16_383, 16_384, 16_385, 40_001, most / 10, most];
        let sample = |applied, skip, moments: [DType; 2]| {
            let copies = if moments == [DType::F32; 2] {
                [None, Some(DType::BF16), Some(DType::F32)]
            } else {
                [None; 3]
            };
            let mut inputs = vec![
                SampleInput::activation([]).fill(Fill::Values(vec![0.02])),
                SampleInput::activation([]).fill(Fill::Values(vec![0.75])),
                SampleInput::counters([applied]),
                SampleInput::flag(skip),
            ];
            let mut parameters = Vec::new();
            for n in 0..3 * lengths.len() {
                let [master, m, v, grad] = match n {
                    6 if moments[1] == DType::BF16 => at_the_limit(lengths[n]),
                    _ => operands([lengths[n % lengths.len()]]),
                };
                inputs.extend([master, m.in_format(moments[0]), v.in_format(moments[1]), grad]);
                // Rows of a rank begin anywhere in the parameter.
                let first_element = [0, 8, 1, 4_294_967_298, 3][n % 5];
                let weight_decay = 0.1 * (n % 2) as f64;
                parameters.push(AdamWParameter { weight_decay, compute: copies[n % 3], first_element });
            }
            let op = AdamW::new(parameters, [0.9, 0.95], 1e-8, 0xFEDC_BA98_7654_3210);
            // Those of a later stage of a pipeline, where the masters have no copy.
            let op = op.from_parameter(if skip == 0 { 5 } else { 0 });
            Sample::plain(AdamW { measured: (0..lengths.len()).step_by(2).collect(), ..op }, inputs)
        };
        let (f32s, bf16s) = ([DType::F32; 2], [DType::BF16; 2]);
        let one = [DType::F32, DType::BF16];
        vec![
            sample(7, 0, f32s),
            sample(7, 1, f32s),
            sample(9, 0, bf16s),
            sample(9, 1, bf16s),
            sample(10, 0, one),
            casting(0, f32s),
            casting(1, f32s),
            casting(0, bf16s),
        ]
    }
}

/// An update of a matrix with decay and a bf16 copy, and of a vector without.
fn sample(matrix: [usize; 2], applied: u32, skip: u32) -> Sample {
    let mut inputs = vec![
        SampleInput::activation([]).fill(Fill::Values(vec![0.02])),
        SampleInput::activation([]).fill(Fill::Values(vec![0.75])),
        SampleInput::counters([applied]),
        SampleInput::flag(skip),
    ];
    inputs.extend(operands(matrix));
    inputs.extend(operands([13]));
    let parameters = vec![
        AdamWParameter { weight_decay: 0.1, compute: Some(DType::BF16), first_element: 0 },
        AdamWParameter { weight_decay: 0.0, compute: None, first_element: 0 },
    ];
    let measured = vec![1, 0];
    let op = AdamW { measured, ..AdamW::new(parameters, [0.9, 0.95], 1e-8, 7) };
    Sample::plain(op, inputs)
}

/// An update by gradients as small as epsilon, with moments to match, after more steps than a byte can count.
fn tiny() -> Sample {
    let mut sample = sample([5, 7], 1025, 0);
    // m, v and grad of the matrix.
    for (input, size) in sample.inputs[5..8].iter_mut().zip([1e-9, 1e-17, 1e-8]) {
        input.fill = Fill::Values((0..35).map(|i| size * (1.0 + f64::from(i % 6))).collect());
    }
    sample
}

/// Operands whose new v is between the largest number of bf16 and infinity.
fn at_the_limit(length: usize) -> [SampleInput; OPERANDS] {
    let [master, m, v, grad] = operands([length]);
    let all = |x: f64| Fill::Values(vec![x; length]);
    [master, m, v.fill(all(3.389e38)), grad.fill(all(1.844e19 / 0.75))]
}

/// Casts of masters: whole blocks, rows that are no multiples of 8, blocks at the edge, and delayed scales,
/// set and not set. Some elements are NaN or infinite. Some matrices are later rows of a parameter.
fn casting(skip: u32, moments: [DType; 2]) -> Sample {
    let by_blocks = |layouts| Quantize::new(DType::E4M3, Scaling::Block, true, layouts);
    let with_scale = |format, layouts| {
        let cast = Quantize::new(format, Scaling::Tensor, false, layouts);
        Quantize { given: Given::Scale, ..cast }
    };
    let all_casts = [
        ([256, 128], by_blocks(Layouts::Both)),
        ([70, 77], by_blocks(Layouts::Both)),
        ([131, 264], by_blocks(Layouts::Transposed)),
        ([128, 256], with_scale(DType::E4M3, Layouts::Both)),
        ([40, 24], with_scale(DType::E5M2, Layouts::RowMajor)),
        ([130, 40], by_blocks(Layouts::RowMajor)),
        ([130, 24], with_scale(DType::E4M3, Layouts::RowMajor)),
        ([40, 136], with_scale(DType::E4M3, Layouts::Transposed)),
    ];
    let mut inputs = vec![
        SampleInput::activation([]).fill(Fill::Values(vec![0.02])),
        SampleInput::activation([]).fill(Fill::Values(vec![0.75])),
        SampleInput::counters([5]),
        SampleInput::flag(skip),
    ];
    for (n, (shape, _)) in all_casts.iter().enumerate() {
        let [master, m, v, grad] = operands(*shape);
        let special = [0.0, 1e-44, 3e38, f64::INFINITY, f64::NAN, -0.0];
        // In the second block.
        let value = move |i: usize| if i < 128 * 128 { (i % 97) as f64 - 40.0 } else { special[i % 6] };
        let master = if n == 0 { master.fill(Fill::each(value)) } else { master };
        inputs.extend([master, m.in_format(moments[0]), v.in_format(moments[1]), grad]);
    }
    inputs.extend(
        [0.0, 30.0, 7.0, 0.5].map(|scale| SampleInput::activation([1, 1]).fill(Fill::Values(vec![scale]))),
    );
    // A tied embedding has both a copy and casts.
    let copy = |n: usize| (n.is_multiple_of(2)).then_some(DType::BF16);
    let first_rows = [0, 3, 200_000_001];
    let parameter = |(n, ([_, cols], _)): (usize, &([usize; 2], _))| {
        let first_element = first_rows[n % first_rows.len()] * *cols as u64;
        AdamWParameter { weight_decay: 0.1, compute: copy(n), first_element }
    };
    let parameters = all_casts.iter().enumerate().map(parameter).collect();
    let casts = all_casts.iter().enumerate().map(|(n, (_, cast))| (n, *cast)).collect();
    Sample::plain(AdamW { casts, ..AdamW::new(parameters, [0.9, 0.95], 1e-8, 3) }, inputs)
}

/// Master, m, v and grad of a parameter of this shape.
fn operands<const N: usize>(shape: [usize; N]) -> [SampleInput; OPERANDS] {
    let normal = || SampleInput::activation(shape);
    let squares = Fill::each(|i| 0.1 + 0.01 * i as f64);
    [normal(), normal(), normal().fill(squares), normal()]
}
