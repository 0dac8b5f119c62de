//! Tests of [`Retile`] against a cast of the tokens' rows.

use super::Retile;
use crate::dispatch::Dispatch;
use crate::permute::Permute;
use crate::quantize::{Dequantize, Layouts, Quantize};
use crate::ragged::MAX_ROWS;
use crate::run_op::{normal, run};
use xtrain_program::Op;
use xtrain_tensor::{DType, HostTensor, Philox, Scaling, TILE, TensorType};

const TILES: Quantize = Quantize::new(DType::E4M3, Scaling::Tile, true, Layouts::RowMajor);

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
        let found = run(&Retile, &[&cast[0], &cast[1], &sources, &rows]);
        // A cast before the gather is one after it.
        let gathered = run(&Permute, &[&x, &sources, &rows]).remove(0);
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
    let found = run(&Retile, &[&cast[0], &cast[1], &sources, &rows]);
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
fn operands_that_do_not_fit_are_refused() {
    let of = |dtype, shape: [usize; 2]| TensorType::new(dtype, shape);
    let [q, scales] = [of(DType::E4M3, [6, 200]), of(DType::F32, [2, 6])];
    let [sources, rows] = [TensorType::new(DType::I32, [16]), of(DType::I32, [6, 2])];
    let many = |rows| TensorType::new(DType::I32, [rows]);
    assert!(Retile.infer(&[q, scales, many(MAX_ROWS), rows]).is_ok());
    let error = |inputs: [TensorType; 4]| Retile.infer(&inputs).expect_err("a mistake").to_string();
    for (error, says) in [
        (error([q.with_dtype(DType::E5M2), scales, sources, rows]), "q must be e4m3"),
        (error([q, of(DType::F32, [1, 6]), sources, rows]), "must be f32[2, 6], not f32[1, 6]"),
        (error([q, scales, sources, of(DType::I32, [5, 2])]), "6 tokens, not i32[5, 2]"),
        (error([q, scales, rows, rows]), "sources must be an i32 vector"),
        (error([q, scales, many(0), rows]), "at least 1 row"),
        (error([q, scales, many(MAX_ROWS + 1), rows]), "up to 8388480 rows by experts, and 8388481 are"),
    ] {
        assert!(error.contains(says), "{error}");
    }
}
