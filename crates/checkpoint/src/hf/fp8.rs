//! FP8 matrices with a scale for each block of 128 x 128, in the layout of DeepSeek-V3: `NAME` in E4M3, and
//! `NAME_scale_inv`, the factor that dequantizes each block, as a number or as the exponent of a power of two
//! (E8M0). Blocks at the edges are smaller if 128 does not divide the size.

use rayon::prelude::*;
use xtrain_tensor::formats::{cast_scale, narrow};
use xtrain_tensor::{DType, TILE, vectorized};

use super::folder::{HfFolder, Stored};
use super::standard_names::SCALES;
use super::{Fp8Scales, first_position};
use crate::error::{CheckpointError, Result};
use crate::tensor_file::{StoredDtype, TensorFile, TensorInfo};

/// The name of the scales of the matrix `name`.
pub(super) fn scale_name(name: &str) -> String {
    format!("{name}{SCALES}")
}

/// True for a tensor in the FP8 type that can be read.
pub(super) fn is_e4m3(tensor: &TensorInfo) -> bool {
    tensor.dtype == StoredDtype::F8_E4M3
}

/// True for an inverse scale with which dequantized values are exact in bf16 and survive a second cast: a
/// power of two of moderate size.
pub(super) fn is_exact_in_bf16(inverse: f32) -> bool {
    inverse.to_bits() & 0x807F_FFFF == 0 && (2f32.powi(-100)..=2f32.powi(100)).contains(&inverse)
}

/// The number of blocks down and across, which is the shape of the scales of a matrix.
pub(super) fn block_grid(rows: usize, cols: usize) -> [usize; 2] {
    [rows.div_ceil(TILE), cols.div_ceil(TILE)]
}

/// Casts a row-major matrix of finite values, `cols` wide, to E4M3. Returns its bytes and the inverse scales.
pub(super) fn quantize(values: &[f32], cols: usize, scales: Fp8Scales) -> (Vec<u8>, Vec<f32>) {
    let [down, across] = block_grid(values.len() / cols.max(1), cols);
    let (mut numbers, mut inverse) = (vec![0u8; values.len()], vec![0.0; down * across]);
    let band = (TILE * cols).max(1);
    let bands = numbers.par_chunks_mut(band).zip(values.par_chunks(band));
    let bands = bands.zip(inverse.par_chunks_mut(across.max(1)));
    bands.for_each(|((numbers, values), inverse)| {
        let mut scaled = values.to_vec();
        vectorized(
            #[inline(always)]
            || {
                // `inverse` holds the amax of each block first, then its scale.
                for row in values.chunks_exact(cols) {
                    for (amax, piece) in inverse.iter_mut().zip(row.chunks(TILE)) {
                        *amax = piece.iter().fold(*amax, |a: f32, x| a.max(x.abs()));
                    }
                }
                for scale in inverse.iter_mut() {
                    *scale = cast_scale(DType::E4M3, *scale, scales == Fp8Scales::PowersOfTwo);
                }
                multiply_blocks(&mut scaled, cols, inverse);
                narrow(DType::E4M3, &scaled, numbers);
            },
        );
        inverse.iter_mut().for_each(|scale| *scale = 1.0 / *scale);
    });
    (numbers, inverse)
}

/// Multiplies one row of blocks by one factor per block.
#[inline(always)]
fn multiply_blocks(values: &mut [f32], cols: usize, factors: &[f32]) {
    for row in values.chunks_exact_mut(cols) {
        for (piece, &factor) in row.chunks_mut(TILE).zip(factors) {
            piece.iter_mut().for_each(|x| *x *= factor);
        }
    }
}

/// Checks the type of a tensor whose shape is known to be right. It must be readable and have no scales, or
/// be an E4M3 matrix with block scales.
pub(super) fn check_type(source: &HfFolder, matrix: Stored<'_>) -> Result<()> {
    let Stored { file, tensor, .. } = matrix;
    let (name, dtype) = (&tensor.name, tensor.dtype);
    let scale_name = scale_name(name);
    let refuse = |file: &TensorFile, name: &str, problem: String, advice: &str| {
        Err(CheckpointError::unsupported(file.path(), name, problem, advice))
    };
    match (is_e4m3(tensor), source.get(&self::scale_name(matrix.name))) {
        (false, None) => file.check_readable(tensor),
        (false, Some(scale)) => {
            file.check_readable(tensor)?;
            let problem = format!("holds scales for '{name}', which is {dtype} and takes none");
            refuse(
                scale.file,
                &scale.tensor.name,
                problem,
                "the weights belong to different versions: download all of them again",
            )
        }
        (true, None) => {
            let problem = format!("is F8_E4M3, but there is no '{scale_name}'");
            let advice = "FP8 weights need scales for blocks of 128 x 128: check that the download is \
                       complete, or use the bf16 version of this model";
            refuse(file, name, problem, advice)
        }
        (true, Some(Stored { file: scale_file, tensor: scale, .. })) => {
            let &[rows, cols] = &tensor.shape[..] else {
                let problem =
                    format!("is F8_E4M3 of shape {:?}, but FP8 tensors must be matrices", tensor.shape);
                return refuse(file, name, problem, "use the bf16 version of this model");
            };
            scale_file.check_scales(scale)?;
            let (found, expected) = (&scale.shape, block_grid(rows, cols));
            if *found != expected {
                let problem =
                    format!("is {found:?}, but blocks of 128 x 128 of {:?} need {expected:?}", tensor.shape);
                let advice = "other block sizes are not supported: use the bf16 version of this model";
                return refuse(scale_file, &scale.name, problem, advice);
            }
            Ok(())
        }
    }
}

/// Reads and dequantizes whole rows, from row `first` on, of an FP8 matrix that [`check_type`] accepted: each
/// value times its scale, rounded once to f32.
pub(super) fn read_dequantized(
    source: &HfFolder,
    matrix: Stored<'_>,
    first: usize,
    out: &mut [f32],
) -> Result<()> {
    let Stored { file, tensor, .. } = matrix;
    let (inverse, &[_, cols]) = (read_scales(source, &matrix)?, &tensor.shape[..]) else {
        return Err(CheckpointError::Internal(format!("'{}' is no matrix", tensor.name)));
    };
    file.read_e4m3_part(tensor, first * cols, out)?;
    let across = cols.div_ceil(TILE);
    // The first row may be inside of a block.
    let inverse = inverse.get(first / TILE * across..).unwrap_or_default();
    let in_first_block = (TILE - first % TILE) * cols;
    let (head, tail) = out.split_at_mut(in_first_block.min(out.len()));
    let bands = rayon::iter::once(head).chain(tail.par_chunks_mut((TILE * cols).max(1)));
    bands.zip(inverse.par_chunks(across.max(1))).for_each(|(values, inverse)| {
        vectorized(
            #[inline(always)]
            || multiply_blocks(values, cols, inverse),
        );
    });
    Ok(())
}

/// The scales of a matrix in FP8, finite and not negative.
pub(super) fn read_scales(source: &HfFolder, matrix: &Stored<'_>) -> Result<Vec<f32>> {
    let Some(Stored { file, tensor: scale, .. }) = source.get(&scale_name(matrix.name)) else {
        return Err(CheckpointError::Internal(format!(
            "the scales of '{}' were checked and are gone",
            matrix.name
        )));
    };
    let mut inverse = vec![0.0; scale.shape.iter().product()];
    file.read_scales(scale, &mut inverse)?;
    match first_position(&inverse, |x| !(x.is_finite() && *x >= 0.0)) {
        None => Ok(inverse),
        Some(at) => {
            let problem = format!(
                "element {at} of {:?} is {}, but scales must be finite and not negative",
                scale.shape, inverse[at]
            );
            let advice = "the file is damaged: download it again";
            Err(CheckpointError::unsupported(file.path(), &scale.name, problem, advice))
        }
    }
}
