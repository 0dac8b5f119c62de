//! Samples of [`Quantize`], [`Amaxes`] and [`Dequantize`].

use super::{Amaxes, CastSource, Dequantize, Given, Layouts, Quantize};
use crate::permute;
use crate::samples::{Fill, GpuTolerance, Sample, SampleInput, Sampled};
use crate::swiglu::samples::weights_and_starts;
use crate::tail::first_row;
use xtrain_program::Tail;
use xtrain_tensor::{DType, Scaling, TensorType};

impl Sampled for Quantize {
    fn tolerance(&self, _: &[TensorType]) -> GpuTolerance {
        match self.source {
            CastSource::Input => GpuTolerance::DEFAULT,
            _ => GpuTolerance::FusedCast { exact_bf16: false },
        }
    }

    fn samples() -> Vec<Sample> {
        let sample = |format, scaling, pow2_scales, layouts, shape| {
            let op = Quantize::new(format, scaling, pow2_scales, layouts);
            Sample::plain(op, [SampleInput::activation(shape)])
        };
        let current = Quantize::new(DType::E5M2, Scaling::Tensor, false, Layouts::Both);
        let delayed = Quantize { given: Given::Scale, ..current };
        let measured = Quantize { given: Given::Amax, ..current };
        let scale = SampleInput::activation([1, 1]).fill(Fill::Values(vec![100.0]));
        let cast = |source, scaling| Quantize { source, scaling, ..current };
        vec![
            sample(DType::E4M3, Scaling::Tensor, false, Layouts::RowMajor, [13, 7]),
            sample(DType::E5M2, Scaling::Row, false, Layouts::Both, [3, 17]),
            sample(DType::E4M3, Scaling::Row, true, Layouts::Transposed, [19, 5]),
            sample(DType::E4M3, Scaling::Tile, true, Layouts::Both, [3, 131]),
            sample(DType::E5M2, Scaling::Tile, false, Layouts::Transposed, [131, 3]),
            sample(DType::E4M3, Scaling::Block, true, Layouts::Both, [129, 130]),
            sample(DType::E5M6, Scaling::Tile, true, Layouts::RowMajor, [3, 129]),
            Sample::plain(delayed, [SampleInput::activation([5, 140]), scale]),
            Sample::plain(measured, [SampleInput::activation([5, 140]), amax()]),
            given_either(0.0, [5, 140]),
            of_rows(Layouts::Transposed, [5, 140]),
            Sample::plain(
                cast(CastSource::Swiglu { restored: false, weighted: false }, Scaling::Tile),
                [SampleInput::activation([7, 22])],
            ),
            // GPUs before compute capability 8.9 widen FP8 by other instructions.
            Sample::plain(
                cast(CastSource::Swiglu { restored: true, weighted: true }, Scaling::Tile),
                [
                    SampleInput::activation([7, 256]).in_format(DType::E4M3),
                    SampleInput::activation(Scaling::Tile.shape(7, 256)),
                    SampleInput::activation([7]),
                    SampleInput::integers([2], [0, 7]),
                ],
            ),
            Sample::plain(
                cast(CastSource::SwigluSaving { weighted: false }, Scaling::Row),
                [SampleInput::activation([7, 22])],
            ),
            Sample::plain(
                cast(CastSource::SwigluGrad { restored: false, weighted: false }, Scaling::Row),
                [SampleInput::activation([7, 11]), SampleInput::activation([7, 22])],
            ),
            Sample::plain(
                cast(CastSource::SwigluGrad { restored: false, weighted: true }, Scaling::Tensor),
                [
                    SampleInput::activation([7, 11]),
                    SampleInput::activation([7, 22]),
                    SampleInput::activation([7]),
                    SampleInput::integers([2], [0, 7]),
                ],
            ),
            Sample::plain(cast(CastSource::Permute, Scaling::Tile), permuted([9, 2, 3, 4], 21)),
            undefined(
                cast(CastSource::Swiglu { restored: false, weighted: true }, Scaling::Tensor),
                [140, 3],
                7,
            ),
            undefined(
                cast(CastSource::SwigluGrad { restored: true, weighted: true }, Scaling::Tile),
                [300, 5],
                5,
            ),
            permuted_with_tail(cast(CastSource::Permute, Scaling::Tile), [9, 2, 3, 4], 140, 5),
            Sample::plain(
                cast(CastSource::Norm, Scaling::Tensor),
                [
                    SampleInput::activation([7, 11]),
                    SampleInput::activation([7]),
                    SampleInput::parameter([11]),
                ],
            ),
        ]
    }

    fn large() -> Sample {
        let op = Quantize::new(DType::E4M3, Scaling::Tensor, true, Layouts::Both);
        Sample::plain(op, [SampleInput::activation([300, 160])])
    }

    /// Every format with every scaling in every layout, over several areas, whose extents are multiples of
    /// vectors or are not; and numbers that scales treat specially.
    fn gpu_samples() -> Vec<Sample> {
        let mut all = fused_casts();
        all.extend(undefined_casts());
        for shape in [[304, 264], [256, 384], [131, 277]] {
            all.extend([0.0, 0.37].map(|scale| given_either(scale, shape)));
            all.extend([Layouts::RowMajor, Layouts::Transposed].map(|layout| of_rows(layout, shape)));
        }
        // Zeros, the smallest and largest numbers of f32, an infinity and NaNs, each in a tile of its own;
        // and numbers whose scale, 2^127, is the largest power of two.
        let special = [0.0, 1e-44, 3e38, f64::INFINITY, f64::NAN, -0.0];
        let value = |i: usize| match i.is_multiple_of(5) {
            true if i / 128 == 13 => 2e-36,
            true => special[i / 128 % 6],
            false => (i % 128) as f64 * 1e-3 * (i / 128 % 3 / 2) as f64,
        };
        let special = SampleInput::activation([4, 768])
            .computed()
            .fill(Fill::Values((0..4 * 768).map(value).collect()));
        for format in [DType::E4M3, DType::E5M2, DType::E5M6] {
            let layouts = match format {
                DType::E5M6 => &[Layouts::RowMajor][..],
                _ => &[Layouts::RowMajor, Layouts::Transposed, Layouts::Both],
            };
            for (scaling, &layouts) in Scaling::ALL.iter().flat_map(|&s| layouts.iter().map(move |l| (s, l)))
            {
                for (n, shape) in [[304, 264], [256, 384], [131, 277], [1, 1]].into_iter().enumerate() {
                    let op = Quantize::new(format, scaling, n < 2, layouts);
                    all.push(Sample::plain(op, [SampleInput::activation(shape).computed()]));
                }
                // In one layout the scales are powers of two.
                let op = Quantize::new(format, scaling, layouts == Layouts::Transposed, layouts);
                all.push(Sample::plain(op, [special.clone()]));
                let op = Quantize::new(format, scaling, false, layouts);
                if scaling == Scaling::Tensor {
                    let scale = |value| SampleInput::activation([1, 1]).fill(Fill::Values(vec![value]));
                    let measured = (format != DType::E5M6).then(|| (Given::Amax, amax()));
                    let scales = [scale(0.37), scale(0.0)].map(|scale| (Given::Scale, scale));
                    for (given, input) in scales.into_iter().chain(measured) {
                        let op = Quantize { given, ..op };
                        all.push(Sample::plain(
                            op,
                            [SampleInput::activation([304, 264]).computed(), input.clone()],
                        ));
                        all.push(Sample::plain(op, [special.clone(), input]));
                    }
                }
            }
        }
        all
    }
}

/// A cast with a delayed scale and an amax that replaces one that is not set.
fn given_either(scale: f64, shape: [usize; 2]) -> Sample {
    let cast = Quantize::new(DType::E4M3, Scaling::Tensor, false, Layouts::RowMajor);
    let scale = SampleInput::activation([1, 1]).fill(Fill::Values(vec![scale]));
    let op = Quantize { given: Given::ScaleOrAmax, ..cast };
    Sample::plain(op, [SampleInput::activation(shape).computed(), scale, amax()])
}

/// A cast by rows of one layout with given amaxes: zeros, usual ones and those that are not finite.
fn of_rows(layouts: Layouts, [rows, cols]: [usize; 2]) -> Sample {
    let cast = Quantize::new(DType::E4M3, Scaling::Row, true, layouts);
    let lines = if layouts == Layouts::RowMajor { rows } else { cols };
    let special = [0.0, 3.5, 1e-3, 7.0, f64::INFINITY, f64::NAN, 2e5];
    let amaxes = (0..lines).map(|line| special[line % special.len()]).collect();
    let amaxes = SampleInput::activation([lines]).in_format(DType::F32).fill(Fill::Values(amaxes));
    Sample::plain(
        Quantize { given: Given::Amax, ..cast },
        [SampleInput::activation([rows, cols]).computed(), amaxes],
    )
}

impl Sampled for Amaxes {
    fn samples() -> Vec<Sample> {
        vec![amaxes_of(false, [13, 7], &[]), amaxes_of(true, [13, 7], &[]), amaxes_of(true, [1, 300], &[])]
    }

    fn large() -> Sample {
        amaxes_of(true, [300, 160], &[])
    }

    fn gpu_samples() -> Vec<Sample> {
        let special = [0.0, f64::INFINITY, f64::NAN];
        let sizes = [[304, 264], [256, 384], [131, 277], [1, 1]];
        sizes
            .into_iter()
            .flat_map(|size| [false, true].map(|by_column| amaxes_of(by_column, size, &special)))
            .collect()
    }
}

/// Numbers, some of which are `special`.
fn amaxes_of(by_column: bool, shape: [usize; 2], special: &[f64]) -> Sample {
    let value = |i: usize| match i % 57 {
        50 if !special.is_empty() => special[i / 57 % special.len()],
        _ => (i * 37 % 101) as f64 * 0.07 - 3.5,
    };
    let values = (0..shape[0] * shape[1]).map(value).collect();
    Sample::plain(
        Amaxes { by_column },
        [SampleInput::activation(shape).computed().fill(Fill::Values(values))],
    )
}

impl Sampled for Dequantize {
    fn samples() -> Vec<Sample> {
        let sample = |format, scaling: Scaling, out| {
            let q = SampleInput::activation([5, 131]).in_format(format);
            Sample::plain(Dequantize { out, scaling }, [q, SampleInput::activation(scaling.shape(5, 131))])
        };
        vec![
            sample(DType::E4M3, Scaling::Tensor, DType::F32),
            sample(DType::E5M2, Scaling::Tile, DType::BF16),
            sample(DType::E5M6, Scaling::Row, DType::F32),
        ]
    }

    fn large() -> Sample {
        let q = SampleInput::activation([300, 160]).in_format(DType::E4M3);
        let op = Dequantize { out: DType::BF16, scaling: Scaling::Block };
        Sample::plain(op, [q, SampleInput::activation(Scaling::Block.shape(300, 160))])
    }

    /// Rows that are multiples of 8 and others; every 11th number is a special one.
    fn gpu_samples() -> Vec<Sample> {
        let special = [0.0, -0.0, f64::NAN, 1e30, -1e30, 2f64.powi(-9), -(2f64.powi(-16))];
        let value = move |i: usize| match i % 11 {
            0 => special[i / 11 % special.len()],
            _ => (i * 37 % 101) as f64 * 0.07 - 3.5,
        };
        let mut all = Vec::new();
        for format in [DType::E4M3, DType::E5M2, DType::E5M6] {
            for scaling in Scaling::ALL {
                for ([rows, cols], out) in [([300, 264], DType::BF16), ([131, 277], DType::F32)] {
                    let q = SampleInput::activation([rows, cols]).in_format(format).fill(Fill::each(value));
                    let scales = SampleInput::activation(scaling.shape(rows, cols));
                    all.push(Sample::plain(Dequantize { out, scaling }, [q, scales]));
                }
            }
        }
        all
    }
}

/// Tokens with these experts ([`permute::samples::routing`]), of so many columns.
fn permuted(shape: [usize; 4], cols: usize) -> Vec<SampleInput> {
    let [tokens, top_k, experts, align] = shape;
    let x = SampleInput::activation([tokens, cols]).computed();
    [x].into_iter().chain(permute::samples::routing(tokens, top_k, experts, align)).collect()
}

/// Casts of values that they compute themselves: whole areas, whole tiles, rows that are multiples of 8 in
/// each layout, and other extents.
fn fused_casts() -> Vec<Sample> {
    let mut all = Vec::new();
    for [rows, cols] in [[256, 384], [304, 256], [131, 264], [70, 77]] {
        let gate_up = |restored| match restored {
            false => vec![SampleInput::activation([rows, 2 * cols]).computed()],
            true => vec![
                SampleInput::activation([rows, 2 * cols]).in_format(DType::E4M3),
                SampleInput::activation(Scaling::Tile.shape(rows, 2 * cols)),
            ],
        };
        let with_inputs = |source: CastSource| {
            let mut inputs = match source {
                CastSource::Input => vec![SampleInput::activation([rows, cols]).computed()],
                CastSource::Swiglu { restored, .. } => gate_up(restored),
                CastSource::SwigluSaving { .. } => gate_up(false),
                CastSource::SwigluGrad { restored, .. } => {
                    [vec![SampleInput::activation([rows, cols]).computed()], gate_up(restored)].concat()
                }
                CastSource::Norm => vec![
                    SampleInput::activation([rows, cols]).computed(),
                    SampleInput::activation([rows]),
                    SampleInput::parameter([cols]),
                ],
                CastSource::Permute => unreachable!("it has routings of its own"),
            };
            inputs.extend(source.is_weighted().then(|| weights_and_starts(rows, rows)).into_iter().flatten());
            (source, inputs)
        };
        let swiglu = |weighted| {
            let of_gate_up = move |restored| {
                [CastSource::Swiglu { restored, weighted }, CastSource::SwigluGrad { restored, weighted }]
            };
            let saving = CastSource::SwigluSaving { weighted };
            [false, true].into_iter().flat_map(of_gate_up).chain([saving]).map(with_inputs)
        };
        for (source, inputs) in swiglu(false).chain([with_inputs(CastSource::Norm)]) {
            let scalings = [(Scaling::Tensor, false), (Scaling::Row, true), (Scaling::Tile, true)];
            all.extend(in_both_layouts(source, &inputs, &scalings));
            // A copy is saved by the cast only in whole tiles.
            let saves = matches!(source, CastSource::SwigluSaving { .. });
            if [rows, cols] == (if saves { [256, 384] } else { [131, 264] }) {
                for layouts in [Layouts::RowMajor, Layouts::Transposed] {
                    for scaling in [Scaling::Tensor, Scaling::Row, Scaling::Tile] {
                        let op = Quantize::new(DType::E4M3, scaling, scaling != Scaling::Tensor, layouts);
                        all.push(Sample::plain(Quantize { source, ..op }, inputs.clone()));
                    }
                    let op = Quantize::new(DType::E4M3, Scaling::Tensor, false, layouts);
                    let scale = SampleInput::activation([1, 1]).fill(Fill::Values(vec![0.37]));
                    let given = Quantize { source, given: Given::Scale, ..op };
                    all.push(Sample::plain(given, [inputs.clone(), vec![scale]].concat()));
                }
            }
        }
        // Experts, which are not cast by rows.
        for (source, inputs) in swiglu(true) {
            all.extend(in_both_layouts(source, &inputs, &[(Scaling::Tensor, false), (Scaling::Tile, true)]));
            if [rows, cols] == [256, 384] {
                all.push(delayed(source, &inputs));
                if matches!(source, CastSource::SwigluSaving { .. }) {
                    let op = Quantize::new(DType::E4M3, Scaling::Tile, true, Layouts::RowMajor);
                    all.push(Sample::plain(Quantize { source, ..op }, inputs));
                }
            }
        }
    }
    // Whole areas, one of which has no token, in two bands on the emulated GPU; rows that end within an area;
    // one expert with all rows; and tokens with more experts than a warp has threads.
    let routings =
        [([200, 2, 3, 128], 384), ([150, 4, 9, 16], 264), ([70, 1, 1, 1], 77), ([9, 40, 40, 8], 136)];
    for (shape, cols) in routings {
        let inputs = permuted(shape, cols);
        let scalings = [(Scaling::Tensor, false), (Scaling::Tile, true)];
        all.extend(in_both_layouts(CastSource::Permute, &inputs, &scalings));
        all.push(delayed(CastSource::Permute, &inputs));
        for layouts in [Layouts::RowMajor, Layouts::Transposed] {
            let op = Quantize::new(DType::E4M3, Scaling::Tile, true, layouts);
            all.push(Sample::plain(Quantize { source: CastSource::Permute, ..op }, inputs.clone()));
        }
    }
    all
}

/// A cast of the rows of experts, the last of which ends before row `end`: all tails are undefined.
fn undefined(op: Quantize, [rows, cols]: [usize; 2], end: usize) -> Sample {
    let first = first_row(end);
    let by_row = |cols: usize| {
        let live =
            SampleInput::activation([rows, cols]).fill(Fill::NormalRows(std::iter::once(0..end).collect()));
        live.without(0, first)
    };
    let gate_up = match op.source.restored() {
        None => vec![by_row(2 * cols)],
        Some(_) => {
            let scales = SampleInput::activation(Scaling::Tile.shape(rows, 2 * cols));
            vec![by_row(2 * cols).in_format(DType::E4M3), scales.without(1, first)]
        }
    };
    let dy = matches!(op.source, CastSource::SwigluGrad { .. }).then(|| by_row(cols));
    let [weights, starts] = weights_and_starts(rows, end);
    let scale =
        (op.given == Given::Scale).then(|| SampleInput::activation([1, 1]).fill(Fill::Values(vec![0.37])));
    let inputs = dy.into_iter().chain(gate_up).chain([weights.without(0, first), starts]).chain(scale);
    Sample::plain(Quantize { tail: Tail::Undefined { live_rows: end }, ..op }, inputs.collect::<Vec<_>>())
}

/// A cast of gathered rows whose tail is undefined, with so many rows after the last group.
fn permuted_with_tail(op: Quantize, shape: [usize; 4], rows: usize, cols: usize) -> Sample {
    let x = SampleInput::activation([shape[0], cols]).computed();
    let scale =
        (op.given == Given::Scale).then(|| SampleInput::activation([1, 1]).fill(Fill::Values(vec![0.37])));
    let inputs = [x].into_iter().chain(permute::samples::routing_with_tail(shape, rows)).chain(scale);
    Sample::plain(Quantize { tail: Tail::Undefined { live_rows: 1 }, ..op }, inputs.collect::<Vec<_>>())
}

/// The sample with activations in the compute type of programs.
fn computed(mut sample: Sample) -> Sample {
    for input in sample.inputs.iter_mut().filter(|input| matches!(input.fill, Fill::NormalRows(_))) {
        input.computed = true;
    }
    sample
}

/// Casts with undefined tails: of some rows, of all but the first tile, of none.
fn undefined_casts() -> Vec<Sample> {
    let mut all = Vec::new();
    let e4m3 = |source, scaling, layouts| {
        let op = Quantize::new(DType::E4M3, scaling, scaling == Scaling::Tile, layouts);
        Quantize { source, ..op }
    };
    let given = |op| Quantize { given: Given::Scale, ..op };
    for (shape, end) in [([384, 128], 130), ([304, 256], 0), ([260, 136], 100), ([256, 77], 256)] {
        for restored in [false, true] {
            let [swiglu, grad] = [
                CastSource::Swiglu { restored, weighted: true },
                CastSource::SwigluGrad { restored, weighted: true },
            ];
            for source in [swiglu, grad] {
                let [tensor, tile] =
                    [Scaling::Tensor, Scaling::Tile].map(|scaling| e4m3(source, scaling, Layouts::Both));
                all.extend([tensor, tile, given(tensor)].map(|op| computed(undefined(op, shape, end))));
            }
        }
        let saving = CastSource::SwigluSaving { weighted: true };
        all.push(computed(undefined(e4m3(saving, Scaling::Tile, Layouts::RowMajor), shape, end)));
    }
    for (shape, rows, cols) in
        [([200, 2, 3, 128], 300, 384), ([1, 2, 3, 128], 384, 136), ([70, 1, 1, 1], 200, 77)]
    {
        let [tensor, tile] =
            [Scaling::Tensor, Scaling::Tile].map(|scaling| e4m3(CastSource::Permute, scaling, Layouts::Both));
        all.extend([tensor, tile, given(tensor)].map(|op| permuted_with_tail(op, shape, rows, cols)));
    }
    all
}

/// A cast of a source to E4M3 in both layouts with a delayed scale.
fn delayed(source: CastSource, inputs: &[SampleInput]) -> Sample {
    let op = Quantize::new(DType::E4M3, Scaling::Tensor, false, Layouts::Both);
    let scale = SampleInput::activation([1, 1]).fill(Fill::Values(vec![0.37]));
    Sample::plain(Quantize { source, given: Given::Scale, ..op }, [inputs, &[scale]].concat())
}

/// Casts of a source in both layouts: to E4M3 with these scales, to E5M2 with one for the tensor, computed or
/// given.
fn in_both_layouts(source: CastSource, inputs: &[SampleInput], scalings: &[(Scaling, bool)]) -> Vec<Sample> {
    let e4m3 = |&(scaling, pow2_scales): &(Scaling, bool)| {
        let op = Quantize::new(DType::E4M3, scaling, pow2_scales, Layouts::Both);
        Sample::plain(Quantize { source, ..op }, inputs)
    };
    let mut all: Vec<Sample> = scalings.iter().map(e4m3).collect();
    let whole = Quantize { source, ..Quantize::new(DType::E5M2, Scaling::Tensor, false, Layouts::Both) };
    if matches!(source, CastSource::SwigluGrad { .. } | CastSource::Permute) {
        all.push(Sample::plain(whole, inputs));
    }
    let scale = |value| SampleInput::activation([1, 1]).fill(Fill::Values(vec![value]));
    let measured = (source == CastSource::Norm).then(|| (Given::Amax, amax()));
    let scales = [scale(0.37), scale(0.0)].map(|scale| (Given::Scale, scale));
    for (given, input) in scales.into_iter().chain(measured) {
        all.push(Sample::plain(Quantize { given, ..whole }, [inputs, &[input]].concat()));
    }
    all
}

/// A given amax.
fn amax() -> SampleInput {
    SampleInput::activation([1]).fill(Fill::Values(vec![5.5]))
}
