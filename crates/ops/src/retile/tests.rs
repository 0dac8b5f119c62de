//! Tests of [`Retile`] against a cast of the tokens' rows.

use super::Retile;
use crate::cast::Cast;
use crate::dispatch::Dispatch;
use crate::permute::Permute;
use crate::quantize::{Dequantize, Layouts, Quantize};
use crate::ragged::MAX_ROWS;
use crate::run_op::{normal, run};
use xtrain_program::{Op, Quantization, Tail};
use xtrain_tensor::{DType, HostTensor, Philox, Scaling, TILE, TensorType};

const TILES: Quantize = Quantize::new(DType::E4M3, Scaling::Tile, true, Layouts::RowMajor);
const BOTH: Retile = Retile { scaling: Scaling::Tile, layouts: Layouts::Both, tail: Tail::Zeros };

/// Tokens whose magnitudes differ by powers of two, and their sources and rows.
fn tokens(count: usize, width: usize, spread: i32) -> [HostTensor; 3] {
    let x = normal(DType::F32, [count, width], 1.0, 5);
    let factor = |n: usize| 2f64.powi(Philox::new(7, 0, 0).word((n / width) as u64) as i32 % (spread + 1));
    let values: Vec<f64> = x.to_f64().iter().enumerate().map(|(n, x)| x * factor(n)).collect();
    let ids: Vec<f64> = (0..count * 2).map(|n| if n % 14 < 2 { -1.0 } else { (n * n % 5) as f64 }).collect();
    let ids = HostTensor::from_f64(TensorType::new(DType::I32, [count, 2]), &ids);
    let mut routing = run(&Dispatch { experts: 5, align: TILE }, &[&ids]);
    let (sources, rows) = (routing.remove(3), routing.remove(2));
    [HostTensor::from_f64(x.ty(), &values), sources, rows]
}

#[test]
fn it_is_a_cast_of_the_rows_of_tokens_that_are_cast() {
    for (width, spread) in [(256, 3), (72, 12)] {
        let [x, sources, rows] = tokens(150, width, spread);
        let cast = run(&TILES, &[&x]);
        let found = run(&BOTH, &[&cast[0], &sources, &rows, &cast[1]]);
        // A cast before the gather is one after it.
        let gathered = run(&Permute::default(), &[&x, &sources, &rows]).remove(0);
        let after = run(&TILES, &[&gathered]);
        assert!((0..2).all(|n| found[n].bytes() == after[n].bytes()), "row-major, {width} columns");
        let restored = run(&Dequantize { out: DType::F32, scaling: Scaling::Tile }, &[&found[0], &found[1]]);
        let transposed = run(&Quantize { layouts: Layouts::Transposed, ..TILES }, &[&restored[0]]);
        assert!((0..2).all(|n| found[n + 2].bytes() == transposed[n].bytes()), "transposed, {width} columns");
    }
}

#[test]
fn numbers_that_stay_normal_are_exact() {
    let width = 64;
    let [x, sources, rows] = tokens(150, width, 20);
    let cast = run(&TILES, &[&x]);
    let found = run(&BOTH, &[&cast[0], &sources, &rows, &cast[1]]);
    let restore = |n: usize| {
        let dequantize = Dequantize { out: DType::F32, scaling: Scaling::Tile };
        run(&dequantize, &[&found[n], &found[n + 1]]).remove(0).to_f64()
    };
    let (row_major, transposed, inverses) = (restore(0), restore(2), found[3].to_f64());
    let (ragged, mut exact, mut rounded) = (sources.ty().numel(), 0, 0);
    for (n, &value) in row_major.iter().enumerate() {
        let (row, column) = (n / width, n % width);
        let (again, unit) = (transposed[column * ragged + row], inverses[row / TILE * width + column]);
        let is_normal = value.abs() >= unit / 64.0;
        assert!(!is_normal || again == value, "{again} instead of {value}");
        // Half of the smallest unit, 2^-9.
        assert!((again - value).abs() <= unit / 1024.0, "{again} instead of {value}");
        exact += usize::from(is_normal);
        rounded += usize::from(again != value);
    }
    assert!(exact > 1000 && rounded > 100, "{exact} normal numbers, {rounded} rounded");
}

#[test]
fn a_layout_alone_is_that_of_both_and_the_scales_may_be_those_of_ranks() {
    let (count, width) = (150, 200);
    let [x, sources, rows] = tokens(count, width, 6);
    let cast = run(&TILES, &[&x]);
    let both = run(&BOTH, &[&cast[0], &sources, &rows, &cast[1]]);
    // The scales of three ranks, of 50 tokens each.
    let (tiles, of_rank) = (width.div_ceil(TILE), count / 3);
    let scales = cast[1].to_f64();
    let place = |n: usize| (n / of_rank % tiles) * count + n / of_rank / tiles * of_rank + n % of_rank;
    let of_ranks: Vec<f64> = (0..scales.len()).map(|n| scales[place(n)]).collect();
    let of_ranks = HostTensor::from_f64(TensorType::new(DType::F32, [3 * tiles, of_rank]), &of_ranks);
    let bits = |found: &[HostTensor]| found.iter().map(|t| t.bytes().to_vec()).collect::<Vec<_>>();
    for (layouts, expected) in
        [(Layouts::Both, &both[..]), (Layouts::RowMajor, &both[..2]), (Layouts::Transposed, &both[2..])]
    {
        let found = run(&Retile { layouts, ..BOTH }, &[&cast[0], &sources, &rows, &of_ranks]);
        assert_eq!(bits(&found), bits(expected), "{layouts:?}");
    }
}

#[test]
fn with_one_scale_it_is_the_cast_of_gathered_rows() {
    let [x, sources, rows] = tokens(150, 72, 3);
    let scale = HostTensor::from_f64(TensorType::new(DType::F32, [1, 1]), &[3.5]);
    for format in [DType::E4M3, DType::E5M2] {
        let quantization =
            Quantization { format, scaling: Scaling::Tensor, pow2_scales: false, delayed: true };
        let cast = |x: &HostTensor, layouts| run(&Quantize::of_operand(quantization, layouts), &[x, &scale]);
        let of_tokens = cast(&x, [true, false]);
        let op = Retile { scaling: Scaling::Tensor, ..BOTH };
        let found = run(&op, &[&of_tokens[0], &sources, &rows]);
        let gathered = run(&Permute::default(), &[&x, &sources, &rows]).remove(0);
        let after = cast(&gathered, [true, true]);
        assert_eq!(found[0].bytes(), after[0].bytes(), "{format}");
        assert_eq!(found[1].bytes(), after[2].bytes(), "{format}");
    }
}

/// 10 log10 of the squares of `exact` over those of its difference to `found`.
fn sqnr(exact: &[f64], found: &[f64]) -> f64 {
    let squares = |numbers: &mut dyn Iterator<Item = f64>| numbers.map(|x| x * x).sum::<f64>();
    let error = squares(&mut exact.iter().zip(found).map(|(a, b)| a - b));
    10.0 * (squares(&mut exact.iter().copied()) / error).log10()
}

/// `dy^T x` of rows, [width of dy, width of x].
fn wgrad(dy: &[f64], x: &[f64], [outputs, inputs]: [usize; 2]) -> Vec<f64> {
    let mut dw = vec![0.0; outputs * inputs];
    for (dy, x) in dy.chunks_exact(outputs).zip(x.chunks_exact(inputs)) {
        for (dw, dy) in dw.chunks_exact_mut(inputs).zip(dy) {
            dw.iter_mut().zip(x).for_each(|(dw, x)| *dw += dy * x);
        }
    }
    dw
}

#[test]
fn a_gradient_of_weights_loses_at_most_0_3_db_to_one_from_casts_of_bf16() {
    let [inputs, outputs] = [192, 32];
    let restored = |cast: &[HostTensor], width: usize| {
        let restore = Dequantize { out: DType::F32, scaling: Scaling::Tile };
        let transposed = run(&restore, &[&cast[0], &cast[1]]).remove(0).to_f64();
        let rows = transposed.len() / width;
        (0..rows * width).map(|n| transposed[n % width * rows + n / width]).collect::<Vec<_>>()
    };
    // Tokens of equal magnitudes, and of magnitudes up to 2^10 apart.
    for spread in [0, 3, 10] {
        let [x, sources, rows] = tokens(300, inputs, spread);
        let x = run(&Cast { to: DType::BF16 }, &[&x]).remove(0);
        let x_rows = run(&Permute::default(), &[&x, &sources, &rows]).remove(0);
        let dy = normal(DType::BF16, [sources.ty().numel(), outputs], 1.0, 11);
        let transposed = Quantize { layouts: Layouts::Transposed, ..TILES };
        let direct = restored(&run(&transposed, &[&x_rows]), inputs);
        let of_tokens = run(&TILES, &[&x]);
        let retile = Retile { layouts: Layouts::Transposed, ..BOTH };
        let moved = restored(&run(&retile, &[&of_tokens[0], &sources, &rows, &of_tokens[1]]), inputs);
        let dy_cast = restored(&run(&transposed, &[&dy]), outputs);
        let exact = wgrad(&dy.to_f64(), &x_rows.to_f64(), [outputs, inputs]);
        let [direct, moved] = [direct, moved].map(|x| sqnr(&exact, &wgrad(&dy_cast, &x, [outputs, inputs])));
        println!("spread 2^{spread}: {direct:.2} dB, {moved:.2} dB");
        assert!(direct > 25.0 && moved > direct - 0.3, "spread 2^{spread}: {moved} dB after {direct} dB");
    }
}

#[test]
fn operands_that_do_not_fit_are_refused() {
    let of = |dtype, shape: [usize; 2]| TensorType::new(dtype, shape);
    let [q, scales] = [of(DType::E4M3, [6, 200]), of(DType::F32, [2, 6])];
    let [sources, rows] = [TensorType::new(DType::I32, [16]), of(DType::I32, [6, 2])];
    let many = |rows| TensorType::new(DType::I32, [rows]);
    let unscaled = Retile { scaling: Scaling::Tensor, ..BOTH };
    assert!(BOTH.infer(&[q, many(MAX_ROWS), rows, scales]).is_ok());
    assert!(BOTH.infer(&[q, sources, rows, of(DType::F32, [6, 2])]).is_ok(), "those of 3 ranks");
    assert!(unscaled.infer(&[q.with_dtype(DType::E5M2), sources, rows]).is_ok());
    let error = |inputs: [TensorType; 4]| BOTH.infer(&inputs).expect_err("a mistake").to_string();
    let of_rows = Retile { scaling: Scaling::Row, ..BOTH }.infer(&[q, sources, rows]).expect_err("rows");
    for (error, says) in [
        (error([q.with_dtype(DType::E5M2), sources, rows, scales]), "q must be e4m3"),
        (error([q, sources, rows, of(DType::F32, [1, 6])]), "must be f32[2, 6]"),
        (error([q, sources, rows, of(DType::F32, [3, 4])]), "not f32[3, 4]"),
        (error([q, sources, rows, of(DType::F32, [4, 4])]), "not f32[4, 4]"),
        (error([q, sources, of(DType::I32, [5, 2]), scales]), "6 tokens, not i32[5, 2]"),
        (error([q, rows, rows, scales]), "sources must be an i32 vector"),
        (error([q, many(0), rows, scales]), "at least 1 row"),
        (error([q, many(MAX_ROWS + 1), rows, scales]), "up to 8388480 rows by experts, and 8388481 are"),
        (of_rows.to_string(), "not of Row"),
    ] {
        assert!(error.contains(says), "{error}");
    }
}
