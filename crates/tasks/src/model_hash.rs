//! A hash of a model, so that scores of one are never taken for those of another.

use crate::error::TaskError;
use crate::exchange::Exchange;
use xtrain_data::Tokenizer;
use xtrain_program::StateKind;
use xtrain_step::layout::is_saved;
use xtrain_step::weights::Weights;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// The hash of all that scores of a model depend on, in hexadecimal: the masters, the architecture, the
/// numerics and the tokenizer. It does not depend on the number of ranks. All ranks call it.
///
/// # Errors
/// Weights that cannot be read; the run has ended.
pub(crate) fn model_hash(
    weights: &mut Weights,
    tokenizer: &Tokenizer,
    exchange: &Exchange<'_>,
) -> Result<String, TaskError> {
    let mut sum = 0_u64;
    for master in weights.masters() {
        let held = weights.layout().held(StateKind::Master, &master.name);
        if !is_saved(held.is_some(), weights.layout().parallel()) {
            continue;
        }
        let values = weights.read_master(&master.name)?;
        let rows = held.map_or(0..master.ty.shape[0], |held| held.rows);
        if rows.is_empty() {
            continue;
        }
        // A sum of hashes of rows is the same for each way to share the rows.
        let of_name = xxh3_64(master.name.as_bytes());
        let hashes = rows.clone().zip(values.chunks(values.len() / rows.len())).map(|(row, values)| {
            xxh3_64_with_seed(bytemuck::cast_slice(values), of_name.wrapping_add(row as u64))
        });
        sum = hashes.fold(sum, u64::wrapping_add);
    }
    let sums = exchange.all(vec![sum])?;
    let sum = sums.iter().flatten().fold(0, |sum, of_rank| of_rank.wrapping_add(sum));
    let rest = format!("{sum:x} {:?} {:?} {}", weights.model(), weights.numerics(), tokenizer.hash_hex());
    Ok(format!("{:016x}", xxh3_64(rest.as_bytes())))
}
