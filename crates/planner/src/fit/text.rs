//! Messages about memory: whether a step fits, and the settings with which it would.

use super::{Alternative, Fit, Instead, MoreGpus, Verdict};
use std::fmt;
use xtrain_report::metrics::format;
use xtrain_step::engine::Room;

impl Fit {
    /// Owner and size of the available memory: `NVIDIA H200 has 2.00 GiB available`. Mentions other programs
    /// if their memory would suffice.
    pub fn available(&self, owner: &str) -> String {
        let Room { available_bytes, alone_bytes } = self.room;
        let is_held = match &self.verdict {
            Verdict::Fits => false,
            Verdict::WouldFit(_) => self.needed_bytes <= alone_bytes,
            Verdict::Nothing { is_held, .. } => *is_held,
        };
        let rest = match is_held {
            true => format!(", because other programs hold the rest of its {}", format::gib(alone_bytes)),
            false => String::new(),
        };
        format!("{owner} has {} available{rest}", format::gib(available_bytes))
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Verdict::Fits => f.write_str("it fits"),
            Verdict::WouldFit(alternatives) => {
                let alternatives: Vec<String> = alternatives.iter().map(Alternative::to_string).collect();
                write!(f, "what would fit: {}", alternatives.join(", or "))
            }
            Verdict::Nothing { least, state_bytes, ranks, is_held, instead } => write!(
                f,
                "{}nothing fits: {}, {} of it for weights, gradients and moments, which no setting reduces, not even FP8; {}{instead}",
                match (ranks, instead.most_gpus) {
                    (1, _) => String::new(),
                    (ranks, Some(_)) => format!("on {ranks} GPUs "),
                    (ranks, None) => format!("on {ranks} ranks "),
                },
                match least.settings.is_empty() {
                    true => "no setting reduces it".to_owned(),
                    false => format!("even {least} is too much"),
                },
                format::gib(*state_bytes),
                match is_held {
                    true => "end the other programs (`nvidia-smi` lists those on a GPU) or wait for them; ",
                    false => "",
                },
            ),
        }
    }
}

impl fmt::Display for Instead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.gpus, self.most_gpus) {
            (Some(gpus), _) => write!(f, "{}with these settings and {gpus}; or ", on_gpus(gpus.count))?,
            (None, Some(most)) => write!(
                f,
                "with parallel.shard=weights it fits on no number of GPUs up to {most}; `xtrain plan --gpus N` also tries other \
                 parallel.tensor and parallel.pipeline; "
            )?,
            (None, None) => {}
        }
        f.write_str("choose a smaller model")?;
        if let Some(fewer) = self.fewer_layers {
            write!(f, ": {fewer} of its {} layers would fit", self.layers)?;
        }
        if let Some(seq_len) = self.seq_len {
            write!(f, ", or a shorter context: data.seq_len={seq_len} would fit")?;
        }
        Ok(())
    }
}

/// The beginning of the sentence about more GPUs on which a run fits.
pub fn on_gpus(count: usize) -> String {
    format!("on {count} GPUs it does: ")
}

impl fmt::Display for MoreGpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`--gpus {} --set parallel.shard=weights", self.count)?;
        if let Some(batch_size) = self.batch_size {
            write!(f, " --set train.batch_size={batch_size}")?;
        }
        write!(f, "` each needs {}", format::gib(self.bytes))
    }
}

impl fmt::Display for Alternative {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for setting in &self.settings {
            write!(f, "--set {setting} ")?;
        }
        write!(f, "({})", format::gib(self.bytes))
    }
}
