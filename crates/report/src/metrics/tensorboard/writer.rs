//! The event file of one process of a run.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::proto::HParam;
use super::{frame::frame, proto, resume};
use crate::metrics::event::{SAMPLE, SOURCE, TASK};
use crate::metrics::{DroppedRecords, Event, MetricsError, Record};

const PREFIX: &str = "events.out.tfevents.";
const SUFFIX: &str = ".xtrain";

/// An open event file. Each record is one unbuffered write.
#[derive(Debug)]
pub struct Writer {
    file: File,
    path: PathBuf,
    len_bytes: u64,
}

impl Writer {
    /// Creates an event file in `folder`, at `time` (seconds since 1970).
    ///
    /// The name holds the time, or one second more than the newest file there, so that names sort in the
    /// order in which the files were created. Events that are `dropped` are cut off the existing files, and
    /// their steps are declared void in the new one.
    pub fn create(folder: &Path, time: f64, dropped: Option<DroppedRecords>) -> Result<Self, MetricsError> {
        let files = event_files(folder).map_err(MetricsError::io("read the run folder", folder))?;
        if let Some(dropped) = dropped {
            for (_, path) in &files {
                resume::cut(path, dropped).map_err(MetricsError::io("cut TensorBoard events", path))?;
            }
        }
        let newest = files.iter().map(|&(stamp, _)| stamp).max();
        let stamp = newest.map_or(0, |newest| newest.saturating_add(1)).max(time as u64);
        let path = folder.join(format!("{PREFIX}{stamp:010}{SUFFIX}"));
        let file = OpenOptions::new().create_new(true).append(true).open(&path);
        let file = file.map_err(MetricsError::io("open TensorBoard events", &path))?;
        let mut writer = Self { file, path, len_bytes: 0 };
        writer.append(&proto::file_version(time))?;
        if let Some(dropped) = dropped {
            writer.append(&proto::session_start(time, dropped.after.saturating_add(1)))?;
        }
        Ok(writer)
    }

    /// Writes the configuration: its text, and its values as hyperparameters of the run.
    pub fn describe(&mut self, time: f64, config: &str) -> Result<(), MetricsError> {
        let values = crate::config_text::flatten(config).unwrap_or_default();
        let hparams: Vec<(String, HParam)> =
            values.iter().map(|(key, value)| (key.clone(), HParam::from_toml(value))).collect();
        self.append(&proto::hparams_experiment(time, &hparams, &["train/loss", "eval/loss"]))?;
        self.append(&proto::hparams_start(time, &hparams))?;
        self.append(&proto::text(time, 0, "config", &code_block(config)))
    }

    /// Writes the scalars or the text of `record`. Events with neither are skipped.
    pub fn write(&mut self, record: &Record) -> Result<(), MetricsError> {
        let (time, step) = (record.time, record.event.step());
        match &record.event {
            Event::Sample(sample) => {
                self.append(&proto::text(time, step, SAMPLE, &code_block(&sample.whole())))
            }
            Event::Warning(warning) => {
                self.append(&proto::text(time, step, "warning", &code_block(&warning.text)))
            }
            Event::Source(source) => {
                let figures = [
                    ("tokens", source.tokens.map(|n| n as f64)),
                    ("epoch", source.epoch),
                    ("train_loss", source.train_loss),
                    ("loss", source.loss),
                    ("perplexity", source.perplexity()),
                    ("token_accuracy", source.token_accuracy),
                ];
                let scalars: Vec<(String, f64)> = figures
                    .into_iter()
                    .filter_map(|(figure, value)| {
                        Some((format!("{SOURCE}/{figure}/{}", source.name), value?))
                    })
                    .collect();
                let scalars: Vec<(&str, f64)> =
                    scalars.iter().map(|(tag, value)| (tag.as_str(), *value)).collect();
                self.append(&proto::scalars(time, step, &scalars))
            }
            Event::Task(score) => {
                let tag = format!("{TASK}/{}/{}", score.task, score.metric);
                self.append(&proto::scalars(time, step, &[(&tag, score.value)]))
            }
            event => {
                let scalars = scalars(event);
                if scalars.is_empty() { Ok(()) } else { self.append(&proto::scalars(time, step, &scalars)) }
            }
        }
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Appends a frame. After an error the file is unchanged, because readers stop at a torn frame.
    fn append(&mut self, payload: &[u8]) -> Result<(), MetricsError> {
        let frame = frame(payload);
        if let Err(source) = self.file.write_all(&frame) {
            // Return the error of the write.
            let _ = self.file.set_len(self.len_bytes);
            return Err(MetricsError::io("write TensorBoard events", &self.path)(source));
        }
        self.len_bytes += frame.len() as u64;
        Ok(())
    }
}

fn scalars(event: &Event) -> Vec<(&'static str, f64)> {
    match event {
        Event::Step(m) => {
            let mut scalars = vec![
                ("train/loss", m.loss),
                ("train/grad_norm", m.grad_norm),
                ("train/lr", m.lr),
                ("train/tokens_per_second", m.tokens_per_second),
                ("train/tflops", m.tflops),
                ("train/step_ms", m.step_ms),
                ("train/tokens", m.tokens as f64),
                ("train/epoch", m.epoch),
                ("train/memory_gib", m.memory_bytes as f64 / f64::from(1 << 30)),
                ("train/skipped", m.skipped as f64),
            ];
            if let Some(trained) = m.trained {
                scalars.extend([
                    ("train/trained_tokens_per_second", trained.tokens_per_second),
                    ("train/trained_share", trained.share),
                    ("train/padding_share", trained.padding),
                ]);
            }
            scalars.extend(m.mfu.map(|mfu| ("train/mfu", mfu)));
            scalars.extend(m.saturated.map(|casts| ("train/saturated", casts as f64)));
            scalars
        }
        Event::Eval(m) => {
            let mut scalars = vec![("eval/loss", m.loss), ("eval/perplexity", m.perplexity())];
            scalars.extend(m.bits_per_byte.map(|bits| ("eval/bits_per_byte", bits)));
            scalars.extend(m.token_accuracy.map(|share| ("eval/token_accuracy", share)));
            scalars
        }
        Event::Experts(m) => {
            let mut scalars = vec![("experts/balance", m.balance), ("experts/z_loss", m.z_loss)];
            scalars.extend(m.worst_load().map(|(load, _)| ("experts/max_load", load)));
            scalars.extend(m.worst_rank_load().map(|(load, _)| ("experts/rank_load", load)));
            scalars.extend(m.least_tokens().map(|tokens| ("experts/min_tokens", tokens as f64)));
            scalars
        }
        Event::Reference(r) => vec![("reference/gap", r.gap()), ("reference/bf16_loss", r.bf16_loss)],
        Event::Checkpoint(_)
        | Event::Skipped(_)
        | Event::Resumed(_)
        | Event::Sample(_)
        | Event::Source(_)
        | Event::Task(_)
        | Event::Warning(_) => Vec::new(),
    }
}

/// Four spaces begin a Markdown code block, which shows the text verbatim.
fn code_block(text: &str) -> String {
    text.lines().map(|line| format!("    {line}\n")).collect()
}

/// The event files of xtrain in `folder`, each with the time in its name.
fn event_files(folder: &Path) -> io::Result<Vec<(u64, PathBuf)>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let stamp = name.strip_prefix(PREFIX).and_then(|name| name.strip_suffix(SUFFIX)?.parse().ok());
        files.extend(stamp.map(|stamp| (stamp, path)));
    }
    Ok(files)
}
