//! Quantisation against its definition one element at a time, and its promises: exact powers of two, bounded errors, numbers that are not
//! finite.

use super::{Dequantize, Granularity, Quantize};
use crate::check::{on_threads, seed};
use crate::run_op::run;
use xtrain_program::Op;
use xtrain_tensor::formats::{
    from_e4m3, from_e5m2, from_e5m6, max_finite, to_e4m3, to_e5m2, to_e5m6, unpack_e5m6,
};
use xtrain_tensor::{DType, HostTensor, Philox, TensorType};

const FORMATS: [DType; 3] = [DType::E4M3, DType::E5M2, DType::E5M6];

/// Sizes below, at and above tiles, even and odd.
const SHAPES: [[usize; 2]; 7] = [[1, 1], [3, 5], [1, 300], [300, 1], [128, 256], [129, 131], [257, 127]];

fn tensor(dtype: DType, shape: [usize; 2], x: &[f32]) -> HostTensor {
    HostTensor::from_f64(TensorType::new(dtype, shape), &x.iter().map(|&x| x.into()).collect::<Vec<_>>())
}

/// Normal numbers of which rows and columns differ in size by orders of magnitude.
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

struct Made {
    q: HostTensor,
    inv_scale: HostTensor,
    amax: HostTensor,
}

fn quantize(op: Quantize, x: &HostTensor) -> Made {
    let [q, inv_scale, amax] = run(&op, &[x]).try_into().unwrap_or_else(|_| panic!("three"));
    Made { q, inv_scale, amax }
}

fn dequantize(made: &Made) -> HostTensor {
    run(&Dequantize { out: DType::F32 }, &[&made.q, &made.inv_scale]).remove(0)
}

fn floats(t: &HostTensor) -> Vec<f32> {
    t.to_f64().into_iter().map(|x| x as f32).collect()
}

/// All settings of the op.
fn all_ops() -> impl Iterator<Item = Quantize> {
    FORMATS.into_iter().flat_map(|format| {
        Granularity::ALL.into_iter().flat_map(move |granularity| {
            [false, true].map(|pow2_scales| Quantize { format, granularity, pow2_scales })
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
            let made = quantize(op, &tensor(DType::F32, shape, &x));
            let [rows, cols] = shape;
            let (high, wide) = match op.granularity {
                Granularity::Tensor => (rows, cols),
                Granularity::Row => (1, cols),
                Granularity::Column => (rows, 1),
                Granularity::Tile1x128 => (1, 128),
                Granularity::Tile128x1 => (128, 1),
                Granularity::Block128 => (128, 128),
            };
            let scales = [rows.div_ceil(high), cols.div_ceil(wide)];
            assert_eq!(made.q.ty(), TensorType::new(op.format, shape));
            assert_eq!(made.amax.ty(), TensorType::new(DType::F32, scales), "{op:?} of {shape:?}");
            assert_eq!(made.inv_scale.ty(), made.amax.ty());
            let region = |i: usize| i / cols / high * scales[1] + i % cols / wide;
            let mut amax = vec![0.0f32; scales[0] * scales[1]];
            (0..x.len()).for_each(|i| amax[region(i)] = amax[region(i)].max(x[i].abs()));
            let scale: Vec<f32> = amax
                .iter()
                .map(|amax| {
                    let scale = max_finite(op.format) / amax;
                    if op.pow2_scales { 2f32.powi(f64::from(scale).log2().floor() as i32) } else { scale }
                })
                .collect();
            let q: Vec<f32> = (0..x.len()).map(|i| rounded(op.format, x[i] * scale[region(i)])).collect();
            assert_eq!(floats(&made.amax), amax, "{op:?} of {shape:?}");
            let inverse: Vec<f32> = scale.iter().map(|s| 1.0 / s).collect();
            assert_eq!(floats(&made.inv_scale), inverse, "{op:?} of {shape:?}");
            assert_eq!(floats(&made.q), q, "{op:?} of {shape:?}");
            let restored: Vec<f32> = (0..x.len()).map(|i| q[i] * inverse[region(i)]).collect();
            assert_eq!(floats(&dequantize(&made)), restored, "{op:?} of {shape:?}");
        }
    }
}

#[test]
fn scales_are_those_worked_out_by_hand() {
    let x = tensor(DType::F32, [2, 3], &[1.0, -3.5, 0.25, 7.0, 2.0, -0.5]);
    let op = |format, granularity, pow2_scales| Quantize { format, granularity, pow2_scales };
    let inverse = |op| floats(&quantize(op, &x).inv_scale);
    // 448 / 7 = 64; by rows 448 / 3.5 = 128; by columns 448 / 2 = 224 and 448 / 0.5 = 896 are no powers of two.
    assert_eq!(inverse(op(DType::E4M3, Granularity::Tensor, false)), [1.0 / 64.0]);
    assert_eq!(inverse(op(DType::E4M3, Granularity::Row, false)), [1.0 / 128.0, 1.0 / 64.0]);
    assert_eq!(
        inverse(op(DType::E4M3, Granularity::Column, false)),
        [1.0 / 64.0, 1.0 / 128.0, 1.0 / 896.0f32]
    );
    assert_eq!(inverse(op(DType::E4M3, Granularity::Column, true)), [1.0 / 64.0, 1.0 / 128.0, 1.0 / 512.0]);
    // 57344 / 7 = 8192; 65024 / 7 = 9289.1..., so 8192 as a power of two.
    assert_eq!(inverse(op(DType::E5M2, Granularity::Block128, false)), [1.0 / 8192.0]);
    assert_eq!(inverse(op(DType::E5M6, Granularity::Tensor, true)), [1.0 / 8192.0]);
    assert_eq!(inverse(op(DType::E5M6, Granularity::Tensor, false)), [1.0 / (65024.0f32 / 7.0)]);
    let q = quantize(op(DType::E4M3, Granularity::Row, false), &x).q;
    assert_eq!(q.to_f64(), [128.0, -448.0, 32.0, 448.0, 128.0, -32.0]);
}

#[test]
fn scales_of_powers_of_two_are_powers_of_two_and_at_most_twice_too_small() {
    for op in all_ops().filter(|op| op.pow2_scales) {
        let made = quantize(op, &tensor(DType::F32, [130, 257], &random([130, 257])));
        for (inverse, amax) in floats(&made.inv_scale).into_iter().zip(floats(&made.amax)) {
            assert_eq!(inverse.to_bits() & 0x7F_FFFF, 0, "{inverse:e}");
            let largest = amax / inverse;
            assert!(largest <= max_finite(op.format) && largest > max_finite(op.format) / 2.0, "{largest}");
        }
    }
}

#[test]
fn every_finite_pattern_passes_unchanged() {
    for format in FORMATS {
        // A region whose largest magnitude is the format's has scale 1.
        let patterns: Vec<f32> = match format {
            DType::E4M3 => (0..=255).map(from_e4m3).collect(),
            DType::E5M2 => (0..=255).map(from_e5m2).collect(),
            _ => (0..4096).map(from_e5m6).collect(),
        };
        let finite: Vec<f32> = patterns.into_iter().filter(|x| x.is_finite()).collect();
        let x = tensor(DType::F32, [1, finite.len()], &finite);
        for pow2_scales in [false, true] {
            let made = quantize(Quantize { format, granularity: Granularity::Tensor, pow2_scales }, &x);
            assert_eq!(floats(&made.inv_scale), [1.0]);
            assert!(made.q.bytes() == tensor(format, [1, finite.len()], &finite).bytes(), "{format}");
        }
    }
}

#[test]
fn an_element_is_off_by_at_most_half_a_unit_in_the_last_place() {
    for op in all_ops() {
        // The unit of the format's normal numbers, relative, and of its subnormal ones, for a region scaled to the maximum.
        let (relative, smallest) = match op.format {
            DType::E4M3 => (2f64.powi(-3), 2f64.powi(-9)),
            DType::E5M2 => (2f64.powi(-2), 2f64.powi(-16)),
            _ => (2f64.powi(-6), 2f64.powi(-20)),
        };
        let shape = [131, 133];
        let x = tensor(DType::F32, shape, &random(shape));
        let made = quantize(op, &x);
        let (high, wide) = op.granularity.region(shape[0], shape[1]);
        let scales = made.inv_scale.to_f64();
        let across = made.inv_scale.ty().shape[1];
        for (i, (x, y)) in x.to_f64().iter().zip(dequantize(&made).to_f64()).enumerate() {
            let inverse = scales[i / shape[1] / high * across + i % shape[1] / wide];
            // Scaling by other than powers of two rounds three times in f32.
            let scaling = if op.pow2_scales { 0.0 } else { 3.0 * 2f64.powi(-24) * x.abs() };
            let bound = (relative * x.abs()).max(smallest * inverse) / 2.0 + scaling;
            assert!((x - y).abs() <= bound, "{op:?}: {x:e} became {y:e}, bound {bound:e}");
        }
    }
}

#[test]
fn what_was_quantized_with_powers_of_two_is_quantized_again_without_error() {
    for op in all_ops().filter(|op| op.pow2_scales) {
        for shape in SHAPES {
            let once = dequantize(&quantize(op, &tensor(DType::F32, shape, &random(shape))));
            let twice = dequantize(&quantize(op, &once));
            assert!(once.bytes() == twice.bytes(), "{op:?} of {shape:?}");
        }
    }
}

#[test]
fn tiles_along_one_dimension_requantize_exactly_along_the_other_where_range_allows() {
    // Within a factor of 100 of the region's largest, no element becomes subnormal, and powers of two keep every mantissa.
    let shape = [256, 256];
    let x: Vec<f32> = random(shape).iter().map(|x| x.signum() * (1.0 + x.abs().fract() * 100.0)).collect();
    let tiles = |granularity| Quantize { format: DType::E4M3, granularity, pow2_scales: true };
    let rows = dequantize(&quantize(tiles(Granularity::Tile1x128), &tensor(DType::F32, shape, &x)));
    let columns = dequantize(&quantize(tiles(Granularity::Tile128x1), &rows));
    assert!(rows.bytes() == columns.bytes());
}

#[test]
fn packed_elements_of_odd_rows_come_back_in_their_places() {
    for shape in [[1, 1], [3, 3], [17, 33], [33, 31], [129, 5]] {
        let x = random(shape);
        let op = Quantize { format: DType::E5M6, granularity: Granularity::Row, pow2_scales: true };
        let made = quantize(op, &tensor(DType::F32, shape, &x));
        let mut q = vec![0.0; x.len()];
        unpack_e5m6(made.q.bytes(), &mut q);
        let inverse = floats(&made.inv_scale);
        for (i, (x, q)) in x.iter().zip(&q).enumerate() {
            assert_eq!(*q, rounded(DType::E5M6, x / inverse[i / shape[1]]), "element {i} of {shape:?}");
        }
    }
}

#[test]
fn zeros_have_scale_one_and_stay_zeros() {
    for op in all_ops() {
        let made = quantize(op, &tensor(DType::F32, [3, 5], &[0.0; 15]));
        assert!(made.q.bytes().iter().all(|&b| b == 0) && made.q.to_f64() == [0.0; 15]);
        assert!(floats(&made.inv_scale).iter().all(|&s| s == 1.0));
        assert!(floats(&made.amax).iter().all(|&a| a == 0.0));
    }
}

#[test]
fn numbers_that_are_not_finite_show_in_amax_and_leave_other_regions_alone() {
    for op in all_ops().filter(|op| op.granularity == Granularity::Row) {
        let rows = [
            [1.0, f32::NAN, -2.0],
            [f32::NEG_INFINITY, 5.0, 1e9],
            [f32::INFINITY, f32::NAN, 0.0],
            [7.0, 0.0, 1.0],
        ];
        let made = quantize(op, &tensor(DType::F32, [4, 3], rows.as_flattened()));
        let (amax, inverse, q) = (floats(&made.amax), floats(&made.inv_scale), floats(&made.q));
        let max = max_finite(op.format);
        assert!(amax[0].is_nan() && amax[1] == f32::INFINITY && amax[2].is_nan() && amax[3] == 7.0);
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
        let made = quantize(op, &tensor(DType::F32, [1, 3], &[1e-44, -3e-42, 0.0]));
        let inverse = floats(&made.inv_scale)[0];
        let clamped = if op.pow2_scales { 2f32.powi(127) } else { f32::MAX };
        assert_eq!(inverse, 1.0 / clamped, "{op:?}");
        assert!(made.q.to_f64().iter().chain(&dequantize(&made).to_f64()).all(|x| x.is_finite()));
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
        let back = run(&Dequantize { out: DType::BF16 }, &[&a.q, &a.inv_scale]).remove(0);
        let once: Vec<f32> = floats(&dequantize(&b));
        assert!(back.bytes() == tensor(DType::BF16, shape, &once).bytes(), "{op:?}");
    }
}

#[test]
fn results_have_the_same_bits_on_any_number_of_threads() {
    let x = tensor(DType::F32, [300, 301], &random([300, 301]));
    for op in all_ops() {
        let on = |threads| {
            on_threads(threads, || {
                let made = quantize(op, &x);
                [made.q.bytes().to_vec(), made.amax.bytes().to_vec(), dequantize(&made).bytes().to_vec()]
            })
        };
        assert!(on(1) == on(3), "{op:?}");
    }
}

#[test]
fn operands_that_make_no_sense_are_refused() {
    let ty = |dtype, shape: [usize; 2]| TensorType::new(dtype, shape);
    let op = Quantize { format: DType::E4M3, granularity: Granularity::Row, pow2_scales: false };
    assert!(op.infer(&[ty(DType::F64, [2, 2])]).is_err());
    assert!(op.infer(&[ty(DType::F32, [0, 2])]).is_err());
    assert!(op.infer(&[TensorType::new(DType::F32, [4])]).is_err());
    assert!(Quantize { format: DType::BF16, ..op }.infer(&[ty(DType::F32, [2, 2])]).is_err());
    let back = Dequantize { out: DType::F32 };
    let error = back.infer(&[ty(DType::E4M3, [300, 200]), ty(DType::F32, [3, 3])]).unwrap_err().0;
    assert!(error.contains("[300, 2]") && error.contains("f32[3, 3]"), "{error}");
    assert!(back.infer(&[ty(DType::F32, [2, 2]), ty(DType::F32, [1, 1])]).is_err());
}
