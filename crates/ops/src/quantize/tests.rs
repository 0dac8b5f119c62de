//! Quantisation against its definition, one element at a time, and its guarantees: exact powers of two,
//! bounded errors, numbers that are not finite.

use super::{Amaxes, Dequantize, Given, Layouts, Quantize};
use crate::check::{on_threads, seed};
use crate::run_op::{run, run_over};
use xtrain_program::Op;
use xtrain_tensor::formats::{
    from_e4m3, from_e5m2, from_e5m6, max_finite, to_e4m3, to_e5m2, to_e5m6, unpack_e5m6,
};
use xtrain_tensor::{DType, HostTensor, Philox, Scaling, TensorType};

const FORMATS: [DType; 3] = [DType::E4M3, DType::E5M2, DType::E5M6];

/// Sizes below, at and above tiles, even and odd.
const SHAPES: [[usize; 2]; 7] = [[1, 1], [3, 5], [1, 300], [300, 1], [128, 256], [129, 131], [257, 127]];

fn tensor(dtype: DType, shape: [usize; 2], x: &[f32]) -> HostTensor {
    HostTensor::from_f64(TensorType::new(dtype, shape), &x.iter().map(|&x| x.into()).collect::<Vec<_>>())
}

/// Normal numbers whose rows and columns differ by orders of magnitude.
fn random(shape: [usize; 2]) -> Vec<f32> {
    let mut x = vec![0.0; shape[0] * shape[1]];
    let seed = seed();
    Philox::new(seed, 0, 0).fill_normal(1.0, &mut x);
    let orders = Philox::new(seed, 0, 1);
    for (i, x) in x.iter_mut().enumerate() {
        let (row, col) = ((i / shape[1]) as u64, (i % shape[1]) as u64);
        *x *= (20.0 * orders.uniform(2 * row) + 10.0 * orders.uniform(2 * col + 1) - 15.0).exp2();
    }
    x
}

/// One layout of a cast.
struct OneCast {
    q: HostTensor,
    inv_scale: HostTensor,
    amax: f32,
}

/// The layouts that the op writes, each with the amax.
fn quantize_all(op: Quantize, inputs: &[&HostTensor]) -> Vec<OneCast> {
    let mut outputs = run(&op, inputs);
    let amax = floats(&outputs.pop().expect("amax"))[0];
    let mut outputs = outputs.into_iter();
    std::iter::from_fn(|| Some(OneCast { q: outputs.next()?, inv_scale: outputs.next()?, amax })).collect()
}

/// The layout of an op that writes one.
fn quantize(op: Quantize, x: &HostTensor) -> OneCast {
    quantize_all(op, &[x]).remove(0)
}

fn dequantize(op: Quantize, cast: &OneCast) -> HostTensor {
    let op = Dequantize { out: DType::F32, scaling: op.scaling };
    run(&op, &[&cast.q, &cast.inv_scale]).remove(0)
}

fn floats(t: &HostTensor) -> Vec<f32> {
    t.to_f64().into_iter().map(|x| x as f32).collect()
}

/// `x` of this shape as its transpose.
fn transposed(shape: [usize; 2], x: &[f32]) -> Vec<f32> {
    let [rows, cols] = shape;
    (0..rows * cols).map(|i| x[i % rows * cols + i / rows]).collect()
}

/// The index of the scale of each element.
fn scale_indices(scaling: Scaling, [rows, cols]: [usize; 2]) -> Vec<usize> {
    let index = |(row, col)| match scaling {
        Scaling::Tensor => 0,
        Scaling::Row => row,
        Scaling::Tile => col / 128 * rows + row,
        Scaling::Block => row / 128 * cols.div_ceil(128).next_multiple_of(4) + col / 128,
    };
    (0..rows).flat_map(|row| (0..cols).map(move |col| (row, col))).map(index).collect()
}

/// All settings of the op that write the row-major layout.
fn all_ops() -> impl Iterator<Item = Quantize> {
    FORMATS.into_iter().flat_map(|format| {
        Scaling::ALL.into_iter().flat_map(move |scaling| {
            let layouts = Layouts::RowMajor;
            [false, true].map(|pow2_scales| Quantize::new(format, scaling, pow2_scales, layouts))
        })
    })
}

/// The value nearest to `x` in the format.
fn rounded(format: DType, x: f32) -> f32 {
    match format {
        DType::E4M3 => from_e4m3(to_e4m3(x)),
        DType::E5M2 => from_e5m2(to_e5m2(x)),
        _ => from_e5m6(to_e5m6(x)),
    }
}

#[test]
fn every_element_is_cast_with_the_scale_of_its_region() {
    for shape in SHAPES {
        let x = random(shape);
        for op in all_ops() {
            let cast = quantize(op, &tensor(DType::F32, shape, &x));
            let scales = op.scaling.shape(shape[0], shape[1]);
            assert_eq!(cast.q.ty(), TensorType::new(op.format, shape));
            assert_eq!(cast.inv_scale.ty(), TensorType::new(DType::F32, scales), "{op:?} of {shape:?}");
            let indices = scale_indices(op.scaling, shape);
            let mut amax = vec![f32::NAN; scales[0] * scales[1]];
            indices.iter().zip(&x).for_each(|(&at, x)| amax[at] = amax[at].max(x.abs()));
            let scale = |amax: &f32| {
                let scale = max_finite(op.format) / amax;
                if op.pow2_scales { 2f32.powi(f64::from(scale).log2().floor() as i32) } else { scale }
            };
            let scale: Vec<f32> = amax.iter().map(scale).collect();
            let q: Vec<f32> =
                indices.iter().zip(&x).map(|(&at, x)| rounded(op.format, x * scale[at])).collect();
            assert_eq!(cast.amax, x.iter().fold(0.0, |a: f32, x| a.max(x.abs())), "{op:?} of {shape:?}");
            // Scales that belong to no region are 0.
            let inverse: Vec<f32> =
                amax.iter().zip(&scale).map(|(a, s)| if a.is_nan() { 0.0 } else { 1.0 / s }).collect();
            assert_eq!(floats(&cast.inv_scale), inverse, "{op:?} of {shape:?}");
            assert_eq!(floats(&cast.q), q, "{op:?} of {shape:?}");
            let restored: Vec<f32> = indices.iter().zip(&q).map(|(&at, q)| q * inverse[at]).collect();
            assert_eq!(floats(&dequantize(op, &cast)), restored, "{op:?} of {shape:?}");
        }
    }
}

#[test]
fn a_transpose_is_quantized_as_if_it_were_the_tensor() {
    for shape in SHAPES {
        let x = random(shape);
        let [row_major, turned] =
            [tensor(DType::F32, shape, &x), tensor(DType::F32, [shape[1], shape[0]], &transposed(shape, &x))];
        for op in all_ops().filter(|op| op.format != DType::E5M6) {
            let expected = [quantize(op, &row_major), quantize(op, &turned)];
            let both = quantize_all(Quantize { layouts: Layouts::Both, ..op }, &[&row_major]);
            let other = quantize(Quantize { layouts: Layouts::Transposed, ..op }, &row_major);
            for (found, expected) in
                both.iter().chain([&other]).zip([&expected[0], &expected[1], &expected[1]])
            {
                assert!(found.q.bytes() == expected.q.bytes(), "{op:?} of {shape:?}");
                assert!(found.inv_scale.bytes() == expected.inv_scale.bytes(), "{op:?} of {shape:?}");
                assert_eq!(found.amax, expected.amax);
            }
        }
    }
}

#[test]
fn a_given_scale_is_used_and_the_amax_is_still_written() {
    let x = tensor(DType::F32, [2, 3], &[1.0, -3.5, 0.25, f32::INFINITY, 2.0, -0.5]);
    let scale = tensor(DType::F32, [1, 1], &[200.0]);
    let op = Quantize::new(DType::E4M3, Scaling::Tensor, false, Layouts::Both);
    let casts = quantize_all(Quantize { given: Given::Scale, ..op }, &[&x, &scale]);
    assert_eq!(floats(&casts[0].q), [192.0, -448.0, 48.0, 448.0, 384.0, -96.0]);
    assert_eq!(floats(&casts[1].q), [192.0, 448.0, -448.0, 384.0, 48.0, -96.0]);
    assert!(casts.iter().all(|cast| floats(&cast.inv_scale) == [1.0 / 200.0] && cast.amax == f32::INFINITY));
}

#[test]
fn a_given_amax_gives_the_scale() {
    let (shape, x) = ([5, 140], random([5, 140]));
    let x = tensor(DType::F32, shape, &x);
    for format in [DType::E4M3, DType::E5M2] {
        let op = Quantize::new(format, Scaling::Tensor, true, Layouts::Both);
        let measured = quantize_all(op, &[&x]);
        let amax = tensor(DType::F32, [1, 1], &[measured[0].amax]);
        let amax = HostTensor::from_f64(TensorType::new(DType::F32, [1]), &amax.to_f64());
        let given = quantize_all(Quantize { given: Given::Amax, ..op }, &[&x, &amax]);
        for (a, b) in measured.iter().zip(&given) {
            assert_eq!(a.q.bytes(), b.q.bytes(), "{format}");
            assert_eq!((a.inv_scale.bytes(), a.amax), (b.inv_scale.bytes(), b.amax), "{format}");
        }
    }
}

#[test]
fn amax_accumulates_as_the_largest_of_all() {
    let op = Quantize::new(DType::E4M3, Scaling::Row, false, Layouts::RowMajor);
    let of =
        |x: f32, held: Vec<HostTensor>| run_over(&op, &[&tensor(DType::F32, [1, 2], &[x, 0.5])], held, true);
    let held = run(&op, &[&tensor(DType::F32, [1, 2], &[3.0, 1.0])]);
    let amax = |outputs: &[HostTensor]| floats(&outputs[2])[0];
    let (smaller, larger) = (of(-2.0, held.clone()), of(-4.0, held.clone()));
    assert_eq!([amax(&held), amax(&smaller), amax(&larger)], [3.0, 3.0, 4.0]);
    assert_eq!(floats(&smaller[1]), [2.0f32 / 448.0], "the scale is that of this tensor");
    assert!(amax(&of(1.0, of(f32::NAN, held))).is_nan());
}

#[test]
fn scales_are_those_computed_by_hand() {
    let x = tensor(DType::F32, [2, 3], &[1.0, -3.5, 0.25, 7.0, 2.0, -0.5]);
    let op = |format, scaling, pow2_scales, layouts| Quantize::new(format, scaling, pow2_scales, layouts);
    let direct = |format, scaling, pow2_scales| op(format, scaling, pow2_scales, Layouts::RowMajor);
    let inverse = |op| floats(&quantize(op, &x).inv_scale);
    // 448 / 7 = 64; by rows 448 / 3.5 = 128; by columns 448 / 2 = 224 and 448 / 0.5 = 896 are no powers of
    // two.
    assert_eq!(inverse(direct(DType::E4M3, Scaling::Tensor, false)), [1.0 / 64.0]);
    assert_eq!(inverse(direct(DType::E4M3, Scaling::Row, false)), [1.0 / 128.0, 1.0 / 64.0]);
    let columns = |pow2_scales| op(DType::E4M3, Scaling::Row, pow2_scales, Layouts::Transposed);
    assert_eq!(inverse(columns(false)), [1.0 / 64.0, 1.0 / 128.0, 1.0 / 896.0f32]);
    assert_eq!(inverse(columns(true)), [1.0 / 64.0, 1.0 / 128.0, 1.0 / 512.0]);
    // 57344 / 7 = 8192; 65024 / 7 = 9289.1..., so 8192 as a power of two. Rows of blocks are padded to fours.
    assert_eq!(inverse(direct(DType::E5M2, Scaling::Block, false)), [1.0 / 8192.0, 0.0, 0.0, 0.0]);
    assert_eq!(inverse(direct(DType::E5M6, Scaling::Tensor, true)), [1.0 / 8192.0]);
    assert_eq!(inverse(direct(DType::E5M6, Scaling::Tensor, false)), [1.0 / (65024.0f32 / 7.0)]);
    let q = quantize(direct(DType::E4M3, Scaling::Row, false), &x).q;
    assert_eq!(q.to_f64(), [128.0, -448.0, 32.0, 448.0, 128.0, -32.0]);
}

#[test]
fn scales_of_powers_of_two_are_powers_of_two_and_at_most_twice_too_small() {
    let (shape, x) = ([130, 257], random([130, 257]));
    for op in all_ops().filter(|op| op.pow2_scales) {
        let inverse = floats(&quantize(op, &tensor(DType::F32, shape, &x)).inv_scale);
        let mut largest = vec![0.0f32; inverse.len()];
        let indices = scale_indices(op.scaling, shape);
        indices.iter().zip(&x).for_each(|(&at, x)| largest[at] = largest[at].max(x.abs() / inverse[at]));
        for (inverse, largest) in inverse.into_iter().zip(largest).filter(|(inverse, _)| *inverse > 0.0) {
            assert_eq!(inverse.to_bits() & 0x7F_FFFF, 0, "{inverse:e}");
            assert!(largest <= max_finite(op.format) && largest > max_finite(op.format) / 2.0, "{largest}");
        }
    }
}

#[test]
fn every_finite_pattern_passes_unchanged() {
    for format in FORMATS {
        // A region whose amax is the format's has scale 1.
        let patterns: Vec<f32> = match format {
            DType::E4M3 => (0..=255).map(from_e4m3).collect(),
            DType::E5M2 => (0..=255).map(from_e5m2).collect(),
            _ => (0..4096).map(from_e5m6).collect(),
        };
        let finite: Vec<f32> = patterns.into_iter().filter(|x| x.is_finite()).collect();
        let x = tensor(DType::F32, [1, finite.len()], &finite);
        for pow2_scales in [false, true] {
            let op = Quantize::new(format, Scaling::Tensor, pow2_scales, Layouts::RowMajor);
            let cast = quantize(op, &x);
            assert_eq!(floats(&cast.inv_scale), [1.0]);
            assert!(cast.q.bytes() == tensor(format, [1, finite.len()], &finite).bytes(), "{format}");
        }
    }
}

#[test]
fn an_element_is_off_by_at_most_half_a_unit_in_the_last_place() {
    for op in all_ops() {
        // The unit of the format's normal numbers, relative, and of its subnormal ones, for a region scaled
        // to the maximum.
        let (relative, smallest) = match op.format {
            DType::E4M3 => (2f64.powi(-3), 2f64.powi(-9)),
            DType::E5M2 => (2f64.powi(-2), 2f64.powi(-16)),
            _ => (2f64.powi(-6), 2f64.powi(-20)),
        };
        let shape = [131, 133];
        let x = tensor(DType::F32, shape, &random(shape));
        let cast = quantize(op, &x);
        let (scales, indices) = (cast.inv_scale.to_f64(), scale_indices(op.scaling, shape));
        for (i, (x, y)) in x.to_f64().iter().zip(dequantize(op, &cast).to_f64()).enumerate() {
            let inverse = scales[indices[i]];
            // Scaling by other than powers of two rounds three times in f32.
            let scaling = if op.pow2_scales { 0.0 } else { 3.0 * 2f64.powi(-24) * x.abs() };
            let bound = (relative * x.abs()).max(smallest * inverse) / 2.0 + scaling;
            assert!((x - y).abs() <= bound, "{op:?}: {x:e} became {y:e}, bound {bound:e}");
        }
    }
}

#[test]
fn a_second_cast_with_powers_of_two_adds_no_error() {
    for op in all_ops().filter(|op| op.pow2_scales) {
        for shape in SHAPES {
            let once = dequantize(op, &quantize(op, &tensor(DType::F32, shape, &random(shape))));
            let twice = dequantize(op, &quantize(op, &once));
            assert!(once.bytes() == twice.bytes(), "{op:?} of {shape:?}");
        }
    }
}

#[test]
fn tiles_along_one_dimension_requantize_exactly_along_the_other_where_range_allows() {
    // Within a factor of 100 of the region's amax no element becomes subnormal, and powers of two change no
    // mantissa.
    let shape = [256, 256];
    let x: Vec<f32> = random(shape).iter().map(|x| x.signum() * (1.0 + x.abs().fract() * 100.0)).collect();
    let tiles = |layouts| Quantize::new(DType::E4M3, Scaling::Tile, true, layouts);
    let (along, across) = (tiles(Layouts::RowMajor), tiles(Layouts::Transposed));
    let rows = dequantize(along, &quantize(along, &tensor(DType::F32, shape, &x)));
    let columns = dequantize(across, &quantize(across, &rows));
    assert_eq!(transposed(shape, &floats(&rows)), floats(&columns));
}

#[test]
fn packed_elements_of_odd_rows_are_unpacked_in_order() {
    for shape in [[1, 1], [3, 3], [17, 33], [33, 31], [129, 5]] {
        let x = random(shape);
        let op = Quantize::new(DType::E5M6, Scaling::Row, true, Layouts::RowMajor);
        let cast = quantize(op, &tensor(DType::F32, shape, &x));
        let mut q = vec![0.0; x.len()];
        unpack_e5m6(cast.q.bytes(), &mut q);
        let inverse = floats(&cast.inv_scale);
        for (i, (x, q)) in x.iter().zip(&q).enumerate() {
            assert_eq!(*q, rounded(DType::E5M6, x / inverse[i / shape[1]]), "element {i} of {shape:?}");
        }
    }
}

#[test]
fn zeros_have_scale_one_and_stay_zeros() {
    for op in all_ops() {
        let cast = quantize(op, &tensor(DType::F32, [3, 5], &[0.0; 15]));
        assert!(cast.q.bytes().iter().all(|&b| b == 0) && cast.q.to_f64() == [0.0; 15]);
        let inverse = floats(&cast.inv_scale);
        assert!(scale_indices(op.scaling, [3, 5]).iter().all(|&at| inverse[at] == 1.0) && cast.amax == 0.0);
    }
}

#[test]
fn numbers_that_are_not_finite_show_in_amax_and_leave_other_regions_alone() {
    for op in all_ops().filter(|op| op.scaling == Scaling::Row) {
        let rows = [
            [1.0, f32::NAN, -2.0],
            [f32::NEG_INFINITY, 5.0, 1e9],
            [f32::INFINITY, f32::NAN, 0.0],
            [7.0, 0.0, 1.0],
        ];
        let cast = quantize(op, &tensor(DType::F32, [4, 3], rows.as_flattened()));
        let (inverse, q) = (floats(&cast.inv_scale), floats(&cast.q));
        let max = max_finite(op.format);
        assert!(cast.amax.is_nan());
        let infinite = quantize(op, &tensor(DType::F32, [1, 3], &rows[1]));
        assert_eq!(infinite.amax, f32::INFINITY);
        assert_eq!(inverse[..3], [1.0; 3]);
        assert!(q[0] == 1.0 && q[1].is_nan() && q[2] == -2.0, "{op:?}: NaN stays, its neighbours are cast");
        assert_eq!(q[3..6], [-max, 5.0, max], "{op:?}: infinities saturate");
        assert!(q[6] == max && q[7].is_nan() && q[8] == 0.0);
        assert!(q[9] > max / 2.0, "{op:?}: a clean row is scaled");
    }
}

#[test]
fn scales_of_tiny_tensors_stay_finite() {
    for op in all_ops() {
        let cast = quantize(op, &tensor(DType::F32, [1, 3], &[1e-44, -3e-42, 0.0]));
        let inverse = floats(&cast.inv_scale)[0];
        let clamped = if op.pow2_scales { 2f32.powi(127) } else { f32::MAX };
        assert_eq!(inverse, 1.0 / clamped, "{op:?}");
        assert!(cast.q.to_f64().iter().chain(&dequantize(op, &cast).to_f64()).all(|x| x.is_finite()));
    }
}

#[test]
fn bf16_is_quantized_as_the_numbers_that_it_holds() {
    let shape = [131, 129];
    for op in all_ops() {
        let narrow = tensor(DType::BF16, shape, &random(shape));
        let wide = tensor(DType::F32, shape, &floats(&narrow));
        let (a, b) = (quantize(op, &narrow), quantize(op, &wide));
        assert!(a.q.bytes() == b.q.bytes() && a.inv_scale.bytes() == b.inv_scale.bytes(), "{op:?}");
        let back = Dequantize { out: DType::BF16, scaling: op.scaling };
        let back = run(&back, &[&a.q, &a.inv_scale]).remove(0);
        let once: Vec<f32> = floats(&dequantize(op, &b));
        assert!(back.bytes() == tensor(DType::BF16, shape, &once).bytes(), "{op:?}");
    }
}

#[test]
fn results_have_the_same_bits_on_any_number_of_threads() {
    let x = tensor(DType::F32, [300, 301], &random([300, 301]));
    for op in all_ops() {
        let on = |threads| {
            on_threads(threads, || {
                let cast = quantize(op, &x);
                [
                    cast.q.bytes().to_vec(),
                    cast.inv_scale.bytes().to_vec(),
                    dequantize(op, &cast).bytes().to_vec(),
                ]
            })
        };
        assert!(on(1) == on(3), "{op:?}");
    }
}

#[test]
fn invalid_operands_are_refused() {
    let ty = |dtype, shape: [usize; 2]| TensorType::new(dtype, shape);
    let op = Quantize::new(DType::E4M3, Scaling::Row, false, Layouts::RowMajor);
    assert!(op.infer(&[ty(DType::F64, [2, 2])]).is_err());
    assert!(op.infer(&[ty(DType::F32, [0, 2])]).is_err());
    assert!(op.infer(&[TensorType::new(DType::F32, [4])]).is_err());
    assert!(
        op.infer(&[ty(DType::F32, [2, 2]), ty(DType::F32, [1, 1])]).is_err(),
        "rows have scales of their own"
    );
    assert!(Quantize { format: DType::BF16, ..op }.infer(&[ty(DType::F32, [2, 2])]).is_err());
    let packed = Quantize { format: DType::E5M6, layouts: Layouts::Both, ..op };
    assert!(packed.infer(&[ty(DType::F32, [2, 2])]).is_err());
    let back = Dequantize { out: DType::F32, scaling: Scaling::Tile };
    let error = back.infer(&[ty(DType::E4M3, [300, 200]), ty(DType::F32, [3, 3])]).unwrap_err().0;
    assert!(error.contains("[2, 300]") && error.contains("f32[3, 3]"), "{error}");
    assert!(back.infer(&[ty(DType::F32, [2, 2]), ty(DType::F32, [1, 2])]).is_err());
}

/// Ranks that have rows of a matrix cast them so.
#[test]
fn rows_that_are_cast_with_the_amaxes_of_all_rows_are_those_of_the_whole_cast() {
    let (rows, cols, cut) = (21, 35, 8);
    let x = random([rows, cols]);
    let whole = tensor(DType::F32, [rows, cols], &x);
    let piece = tensor(DType::F32, [cut, cols], &x[..cut * cols]);
    let amaxes = |by_column| run(&Amaxes { by_column }, &[&whole]).remove(0);
    let one_row = |layouts| Quantize::new(DType::E4M3, Scaling::Row, true, layouts);
    let tensor_cast = Quantize::new(DType::E4M3, Scaling::Tensor, false, Layouts::RowMajor);
    let unset = tensor(DType::F32, [1, 1], &[0.0]);
    for (cast, given, inputs) in [
        (tensor_cast, Given::Amax, vec![amaxes(false)]),
        (tensor_cast, Given::ScaleOrAmax, vec![unset, amaxes(false)]),
        (one_row(Layouts::Transposed), Given::Amax, vec![amaxes(true)]),
    ] {
        let of_whole = quantize(cast, &whole);
        let inputs: Vec<&HostTensor> = [&piece].into_iter().chain(&inputs).collect();
        let of_piece = quantize_all(Quantize { given, ..cast }, &inputs).remove(0);
        assert_eq!(of_piece.inv_scale.bytes(), of_whole.inv_scale.bytes(), "{cast:?}");
        let expected: Vec<u8> = match cast.layouts {
            Layouts::Transposed => {
                of_whole.q.bytes().chunks(rows).flat_map(|row| &row[..cut]).copied().collect()
            }
            _ => of_whole.q.bytes()[..cut * cols].to_vec(),
        };
        assert_eq!(of_piece.q.bytes(), expected, "{cast:?} with {given:?}");
    }
}

#[test]
fn a_given_scale_is_used_whatever_the_given_amax() {
    let x = tensor(DType::F32, [2, 3], &[1.0, -2.0, 3.0, 0.5, 0.0, 4.0]);
    let cast = Quantize::new(DType::E4M3, Scaling::Tensor, false, Layouts::RowMajor);
    let (scale, amax) =
        (tensor(DType::F32, [1, 1], &[0.25]), HostTensor::from_f64(TensorType::new(DType::F32, [1]), &[9.0]));
    let delayed = quantize_all(Quantize { given: Given::Scale, ..cast }, &[&x, &scale]).remove(0);
    let either = quantize_all(Quantize { given: Given::ScaleOrAmax, ..cast }, &[&x, &scale, &amax]).remove(0);
    assert_eq!((delayed.q.bytes(), delayed.amax), (either.q.bytes(), either.amax));
}

#[test]
fn amaxes_are_given_to_casts_by_rows_of_one_layout_or_of_the_tensor() {
    let x = TensorType::new(DType::F32, [4, 6]);
    let amaxes = |n| TensorType::new(DType::F32, [n]);
    let infer = |scaling, layouts, given, n| {
        let cast = Quantize { given, ..Quantize::new(DType::E4M3, scaling, false, layouts) };
        cast.infer(&[x, amaxes(n)]).map(|_| ()).map_err(|e| e.to_string())
    };
    assert!(infer(Scaling::Row, Layouts::RowMajor, Given::Amax, 4).is_ok());
    assert!(infer(Scaling::Row, Layouts::Transposed, Given::Amax, 6).is_ok());
    let message = infer(Scaling::Row, Layouts::Transposed, Given::Amax, 4).expect_err("amaxes of rows");
    assert!(message.contains("f32[6], not f32[4]"), "{message}");
    for (scaling, layouts) in [(Scaling::Row, Layouts::Both), (Scaling::Block, Layouts::RowMajor)] {
        let message = infer(scaling, layouts, Given::Amax, 4).expect_err("no given amax");
        assert!(message.contains("takes no scale or amax"), "{message}");
    }
}
