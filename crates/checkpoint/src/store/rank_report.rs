//! A rank's report to rank 0 about the rows that it has written: a few bytes for each tensor, parsed as
//! untrusted input.
//!
//! Layout, in little-endian words: mark, hash of the tensors' names and shapes, rank, number of files, number
//! of tensors; the length of each file; for each tensor its index, file, first row, end of the rows and the
//! hash of each piece; and the hash of the words before it.

use std::ops::Range;

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::TensorSpec;

/// The first eight bytes.
const MARK: u64 = u64::from_le_bytes(*b"xtrows\0\x01");

const WORD: usize = size_of::<u64>();

/// The rows that a rank has written.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct RankReport {
    pub(super) rank: usize,
    /// Lengths of the rank's files.
    pub(super) files: Vec<u64>,
    /// By index of the tensor; at most one for each.
    pub(super) rows: Vec<WrittenRows>,
}

/// Rows of one tensor in one file.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct WrittenRows {
    pub(super) tensor: usize,
    /// Number among the rank's files, from 0.
    pub(super) file: usize,
    pub(super) rows: Range<usize>,
    /// The hash of each piece.
    pub(super) hashes: Vec<u64>,
}

impl RankReport {
    pub(super) fn to_bytes(&self, tensors: &[TensorSpec]) -> Vec<u8> {
        let mut words = vec![MARK, fingerprint(tensors)];
        words.extend([self.rank, self.files.len(), self.rows.len()].map(|n| n as u64));
        words.extend(&self.files);
        for WrittenRows { tensor, file, rows, hashes } in &self.rows {
            words.extend([*tensor, *file, rows.start, rows.end].map(|n| n as u64));
            words.extend(hashes);
        }
        let mut bytes: Vec<u8> = words.into_iter().flat_map(u64::to_le_bytes).collect();
        bytes.extend(xxh3_64(&bytes).to_le_bytes());
        bytes
    }

    /// Parses the report of `rank`; the error is the problem, for a message.
    pub(super) fn parse(bytes: &[u8], rank: usize, tensors: &[TensorSpec]) -> Result<Self, String> {
        let Some((content, hash)) = bytes.split_last_chunk().filter(|_| bytes.len().is_multiple_of(WORD))
        else {
            return Err(format!("has {} bytes", bytes.len()));
        };
        if xxh3_64(content) != u64::from_le_bytes(*hash) {
            return Err("does not match its checksum".to_string());
        }
        let mut words = Words(content);
        if words.next()? != MARK {
            return Err("is of another version".to_string());
        }
        if words.next()? != fingerprint(tensors) {
            return Err("is about other tensors".to_string());
        }
        if words.index()? != rank {
            return Err("is of another rank".to_string());
        }
        let (file_count, tensor_count) = (words.index()?, words.index()?);
        let files = words.take(file_count)?;
        // Each takes words, so a large number ends early.
        let mut rows = Vec::new();
        for _ in 0..tensor_count {
            let (tensor, file, start, end) = (words.index()?, words.index()?, words.index()?, words.index()?);
            let is_next = rows.last().is_none_or(|last: &WrittenRows| last.tensor < tensor);
            let spec = tensors.get(tensor).filter(|spec| end <= spec.rows() && start < end);
            let Some(spec) = spec.filter(|_| is_next && file < file_count) else {
                return Err(format!("lists rows {start} to {end} of tensor {tensor} in file {file}"));
            };
            let hashes = words.take(spec.pieces(start..end).count())?;
            rows.push(WrittenRows { tensor, file, rows: start..end, hashes });
        }
        if !words.0.is_empty() {
            return Err(format!("has {} bytes too many", words.0.len()));
        }
        Ok(Self { rank, files, rows })
    }
}

/// The words that were not yet read.
struct Words<'a>(&'a [u8]);

impl Words<'_> {
    fn next(&mut self) -> Result<u64, String> {
        let (word, rest) = self.0.split_first_chunk().ok_or("is too short")?;
        self.0 = rest;
        Ok(u64::from_le_bytes(*word))
    }

    fn index(&mut self) -> Result<usize, String> {
        let word = self.next()?;
        usize::try_from(word).map_err(|_| format!("holds the number {word}"))
    }

    fn take(&mut self, count: usize) -> Result<Vec<u64>, String> {
        let bytes = count.checked_mul(WORD).and_then(|bytes| self.0.split_at_checked(bytes));
        let (words, rest) = bytes.ok_or("is too short")?;
        self.0 = rest;
        Ok(words.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect())
    }
}

/// Hash of the names, types and shapes.
fn fingerprint(tensors: &[TensorSpec]) -> u64 {
    let mut hash = Xxh3::new();
    for spec in tensors {
        // Lengths before texts and shapes, so that no two lists give the same bytes.
        let words = [spec.name.len(), spec.dtype.name().len(), spec.shape.len()];
        words.iter().chain(&spec.shape).for_each(|&n| hash.update(&(n as u64).to_le_bytes()));
        hash.update(spec.name.as_bytes());
        hash.update(spec.dtype.name().as_bytes());
    }
    hash.digest()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use xtrain_tensor::DType;

    use super::*;

    fn tensors() -> Vec<TensorSpec> {
        let spec = |name: &str, shape: &[usize]| TensorSpec {
            name: name.to_string(),
            dtype: DType::F32,
            shape: shape.to_vec(),
        };
        vec![spec("a", &[4096, 4096]), spec("b", &[]), spec("c", &[7, 0])]
    }

    fn report(rows: Range<usize>, seed: u64) -> RankReport {
        let tensors = tensors();
        let hashes = tensors[0].pieces(rows.clone()).map(|piece| piece.start as u64 ^ seed).collect();
        let mut written = vec![
            WrittenRows { tensor: 0, file: 1, rows, hashes },
            WrittenRows { tensor: 2, file: 0, rows: 0..7, hashes: vec![seed] },
        ];
        written.retain(|written| !written.rows.is_empty());
        RankReport { rank: 3, files: vec![seed, 8], rows: written }
    }

    /// The report with its last word replaced by the right hash.
    fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
        let end = bytes.len() - WORD;
        let hash = xxh3_64(&bytes[..end]);
        bytes[end..].copy_from_slice(&hash.to_le_bytes());
        bytes
    }

    #[test]
    fn a_report_of_another_rank_or_other_tensors_is_refused() {
        let bytes = report(0..9, 1).to_bytes(&tensors());
        let mut others = tensors();
        others[1].shape = vec![1];
        let problem = |rank, tensors: &[TensorSpec]| RankReport::parse(&bytes, rank, tensors).unwrap_err();
        assert_eq!(problem(3, &others), "is about other tensors");
        assert_eq!(problem(2, &tensors()), "is of another rank");
    }

    proptest! {
        #[test]
        fn a_report_reads_back_equal(start in 0usize..4096, len in 0usize..4096, seed: u64) {
            let report = report(start..(start + len).min(4096), seed);
            let bytes = report.to_bytes(&tensors());
            prop_assert_eq!(RankReport::parse(&bytes, 3, &tensors()), Ok(report));
        }

        #[test]
        fn a_changed_report_is_refused(seed: u64, at: prop::sample::Index, flip in 1u8..) {
            let mut bytes = report(9..2000, seed).to_bytes(&tensors());
            let at = at.index(bytes.len());
            prop_assert!(RankReport::parse(&bytes[..at], 3, &tensors()).is_err());
            bytes[at] ^= flip;
            prop_assert!(RankReport::parse(&bytes, 3, &tensors()).is_err());
        }

        #[test]
        fn any_numbers_give_a_valid_report_or_an_error(word in 2usize..15, value: u64, small in 0u64..9) {
            for value in [value, small] {
                let mut bytes = report(9..2000, 5).to_bytes(&tensors());
                bytes[word * WORD..][..WORD].copy_from_slice(&value.to_le_bytes());
                if let Ok(report) = RankReport::parse(&sealed(bytes), 3, &tensors()) {
                    for written in report.rows {
                        prop_assert!(written.file < 2 && written.rows.end <= tensors()[written.tensor].rows());
                    }
                }
            }
        }

        #[test]
        fn no_bytes_make_the_parser_panic(bytes in prop::collection::vec(any::<u8>(), 8..200)) {
            prop_assert!(RankReport::parse(&bytes, 0, &[]).is_err());
            let _ = RankReport::parse(&sealed(bytes), 0, &[]);
        }
    }
}
