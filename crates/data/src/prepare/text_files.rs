//! The text of input files from which a vocabulary is learned: all of it, or an even sample.

use std::ops::ControlFlow;

use super::progress::{LearnProgress, ProgressTimer};
use crate::error::{DataError, Result};
use crate::input::{BadRows, Compression, Documents, Format, InputFile, InputOptions, read_documents};
use crate::tokenizer::CutRule;

/// Input files with common options.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextFiles {
    /// The files, in their order.
    pub inputs: Vec<InputFile>,
    /// Location of documents in them.
    pub options: InputOptions,
}

/// Iterator over the text of input files, in pieces. Reports progress, and stops if the caller asks for it.
pub(super) struct TextFileReader<'t> {
    /// The files with the numbers of their sources.
    files: Box<dyn Iterator<Item = (usize, &'t InputFile, &'t InputOptions)> + 't>,
    /// The source of the last file, and the rows of it that were skipped.
    bad_rows: (usize, BadRows),
    rule: CutRule,
    open: Option<(Documents, u64)>,
    bytes_before: u64,
    bytes_total: u64,
    report: &'t dyn Fn(LearnProgress) -> ControlFlow<()>,
    progress_timer: ProgressTimer,
}

impl<'t> TextFileReader<'t> {
    pub(super) fn new(
        texts: &'t [TextFiles],
        rule: CutRule,
        report: &'t dyn Fn(LearnProgress) -> ControlFlow<()>,
    ) -> TextFileReader<'t> {
        let files = |(source, texts): (usize, &'t TextFiles)| {
            texts.inputs.iter().map(move |input| (source, input, &texts.options))
        };
        let bytes_total = texts.iter().flat_map(|texts| &texts.inputs).map(|input| input.bytes).sum();
        TextFileReader {
            files: Box::new(texts.iter().enumerate().flat_map(files)),
            // No source has this number.
            bad_rows: (texts.len(), BadRows::default()),
            rule,
            open: None,
            bytes_before: 0,
            bytes_total,
            report,
            progress_timer: ProgressTimer::default(),
        }
    }

    fn read(&mut self) -> Result<Option<String>> {
        loop {
            if let Some((documents, bytes)) = &mut self.open {
                let bytes = *bytes;
                if let Some(piece) = documents.next() {
                    let bytes_done = self.bytes_before + documents.bytes_read().min(bytes);
                    self.report(bytes_done)?;
                    return Ok(Some(piece?.text));
                }
                self.bytes_before += bytes;
                self.bad_rows.1 = documents.bad_rows().clone();
                self.open = None;
            }
            let Some((source, input, options)) = self.files.next() else { return Ok(None) };
            if source != self.bad_rows.0 {
                self.bad_rows = (source, BadRows::new(options.skip_bad_rows, 0));
            }
            let documents = read_documents(input, options, self.rule)?.after(self.bad_rows.1.clone());
            self.open = Some((documents, input.bytes));
        }
    }

    fn report(&mut self, bytes_done: u64) -> Result<()> {
        if !self.progress_timer.is_due() {
            return Ok(());
        }
        match (self.report)(LearnProgress::Reading { bytes_done, bytes_total: self.bytes_total }) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(DataError::Interrupted),
        }
    }
}

impl Iterator for TextFileReader<'_> {
    type Item = Result<String>;

    fn next(&mut self) -> Option<Result<String>> {
        self.read().transpose()
    }
}

/// A deterministic sample of about `max_bytes` of the text, spread evenly over `texts`. Reads all of the text
/// and returns a part.
pub(super) fn sample<'t>(
    texts: &[TextFiles],
    reader: TextFileReader<'t>,
    max_bytes: u64,
) -> impl Iterator<Item = Result<String>> + use<'t> {
    let expected: u64 = texts.iter().flat_map(|texts| &texts.inputs).map(expected_text_bytes).sum();
    let (mut seen, mut taken) = (0_u64, 0_u64);
    reader.filter(move |text| {
        let Ok(text) = text else { return true };
        seen += text.len() as u64;
        // Keeps `taken` close to `seen * max_bytes / expected`.
        let is_due = u128::from(taken) * u128::from(expected) < u128::from(seen) * u128::from(max_bytes);
        let is_taken = is_due && taken < max_bytes;
        taken += if is_taken { text.len() as u64 } else { 0 };
        is_taken
    })
}

/// Estimated size of the text in a file. Text compresses to a third or a quarter of its size.
fn expected_text_bytes(input: &InputFile) -> u64 {
    let is_compressed = input.compression != Compression::None || input.format == Format::Parquet;
    if is_compressed { input.bytes * 4 } else { input.bytes }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::input::list_inputs;

    #[test]
    fn a_sample_is_even_bounded_and_deterministic() {
        let folder = tempfile::tempdir().unwrap();
        let written: Vec<String> = (0..50).map(|file| format!("{file:02}").repeat(500)).collect();
        for (number, text) in written.iter().enumerate() {
            std::fs::write(folder.path().join(format!("{number:02}.txt")), text).unwrap();
        }
        // Two groups of files, sampled as one.
        let mut inputs = list_inputs(&[folder.path()]).unwrap();
        let second = TextFiles { inputs: inputs.split_off(20), options: InputOptions::default() };
        let texts = [TextFiles { inputs, options: InputOptions::default() }, second];
        let sample = |bytes| -> Vec<String> {
            let reader = TextFileReader::new(&texts, CutRule::BetweenWords, &|_| ControlFlow::Continue(()));
            sample(&texts, reader, bytes).map(Result::unwrap).collect()
        };
        assert_eq!(sample(1 << 20), written);
        let tenth = sample(5_000);
        assert_eq!(tenth.len(), 5);
        assert_eq!(tenth, sample(5_000));
        let files: Vec<u32> = tenth.iter().map(|text| text[..2].parse().unwrap()).collect();
        assert!(files.windows(2).all(|pair| pair[1] - pair[0] == 10), "{files:?}");
    }
}
