//! A hash of a model, so that scores of one are never taken for those of another.

use crate::error::EvaluationError;
use crate::exchange::Exchange;
use xtrain_data::Tokenizer;
use xtrain_program::StateKind;
use xtrain_step::error::LearnError;
use xtrain_step::weights::Weights;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// The hash of all that scores of a model depend on, in hexadecimal: the masters, the architecture, the
/// numerics with delayed scales, the tokenizer, and the size of batches if their tokens share scales. It does
/// not depend on the number of ranks. All ranks call it.
///
/// # Errors
/// Weights that cannot be read; the run has ended.
pub(crate) fn model_hash(
    weights: &mut Weights,
    tokenizer: &Tokenizer,
    batch_tokens: usize,
    exchange: &Exchange<'_>,
) -> Result<String, EvaluationError> {
    // Of what several ranks have, one counts. Ranks that each opened the model do not share a layout.
    let counts = |weights: &Weights, kind: StateKind, name: &str| {
        let (layout, is_first) = (weights.layout(), exchange.rank().is_first());
        let is_shared = layout.held(kind, name).is_some() || !layout.stage().is_whole();
        if is_shared { layout.saves(kind, name) } else { is_first }
    };
    let mut sum = 0_u64;
    for master in weights.parameters() {
        let held = weights.layout().held(master.kind, &master.name);
        if !counts(weights, master.kind, &master.name) {
            continue;
        }
        let values = weights.read_parameter(&master.name)?;
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
    // Delayed scales of a run, or of its checkpoint if these were read.
    for scale in weights.engine().state_entries() {
        if scale.kind == StateKind::Scale && counts(weights, scale.kind, &scale.name) {
            let bytes = weights.engine().read_state(scale.kind, &scale.name).map_err(LearnError::from)?;
            if bytes.iter().any(|&byte| byte != 0) {
                sum = sum.wrapping_add(xxh3_64_with_seed(&bytes, xxh3_64(scale.name.as_bytes())));
            }
        }
    }
    let sums = exchange.all(vec![sum])?;
    let sum = sums.iter().flatten().fold(0, |sum, of_rank| of_rank.wrapping_add(sum));
    let batch = weights.numerics().shares_scales().then_some(batch_tokens);
    let (model, numerics, file) = (weights.model(), weights.numerics(), tokenizer.hash_hex());
    // Settings that stand in other files than tokenizer.json.
    let settings = (tokenizer.prefix_token(), tokenizer.document_begin(), tokenizer.stop_tokens());
    let splits = tokenizer.splits_special_tokens();
    let rest = format!("{sum:x} {model:?} {numerics:?} {file} {settings:?} {splits} {batch:?}");
    Ok(format!("{:016x}", xxh3_64(rest.as_bytes())))
}
