//! Random batches for measurements, with tokens and documents distributed as in text.

use crate::training_spec::TrainingSpec;
use xtrain_data::Batch;
use xtrain_tensor::Philox;

/// Mean length of a document in tokens, if attention stays within documents.
const DOCUMENT_TOKENS: usize = 512;

/// Random tokens with the frequencies of a text by Zipf's law: a token's index is its rank, and the logarithm
/// of the rank is uniform. Uniform tokens would leave nothing to learn, and would hardly ever collide in the
/// embedding's gradient.
pub fn random_batch(spec: &TrainingSpec, n: u32) -> Batch {
    let (sequences, seq_len) = (spec.batch.sequences, spec.batch.seq_len);
    let count = sequences * seq_len;
    let rng = Philox::new(0, n, 0);
    let tokens = spec.model.vocab_size;
    let of_all = |i: usize| f64::from(rng.word(i as u64)) / 2f64.powi(32);
    let token = |i: usize| (((tokens as f64 + 1.0).powf(of_all(i)) - 1.0) as usize).min(tokens - 1) as i32;
    let doc_start = match spec.document_mask {
        true => documents([sequences, seq_len], DOCUMENT_TOKENS),
        false => vec![0; count],
    };
    Batch {
        batch_size: sequences,
        seq_len,
        tokens: (0..count).map(token).collect(),
        targets: (1..=count).map(token).collect(),
        positions: (0..count).map(|i| (i % seq_len) as i32 - doc_start[i]).collect(),
        doc_start,
        valid_targets: count,
        row_inputs: vec![seq_len; sequences],
    }
}

/// Start of each token's document in its sequence. Lengths are random about `mean`, most of them shorter, as
/// in texts.
pub fn documents([sequences, seq_len]: [usize; 2], mean: usize) -> Vec<i32> {
    let rng = Philox::new(1, 0, 0);
    let (mut starts, mut drawn) = (Vec::with_capacity(sequences * seq_len), 0);
    for _ in 0..sequences {
        let mut start = 0;
        while start < seq_len {
            // An exponential length; the last document may be cut off.
            let length = (-f64::from(rng.uniform(drawn)).ln() * mean as f64).ceil().max(1.0) as usize;
            drawn += 1;
            let end = start.saturating_add(length).min(seq_len);
            starts.extend(std::iter::repeat_n(start as i32, end - start));
            start = end;
        }
    }
    starts
}
