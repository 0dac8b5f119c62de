//! Messages about memory: whether a step fits, and the settings with which it would.

use super::{Alternative, Fit, Instead, MoreGpus, Verdict};
use crate::engine::Room;
use std::fmt;
use xtrain_report::metrics::format;

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
            Verdict::Nothing { least, state_bytes, is_held, instead } => write!(
                f,
                "nothing fits: {}, {} of it for weights, gradients and moments, which no setting reduces, not even FP8; {}choose a smaller model{instead}",
                match least.settings.is_empty() {
                    true => "no setting reduces it".to_owned(),
                    false => format!("even {least} is too much"),
                },
                format::gib(*state_bytes),
                match is_held {
                    true => "end the other programs (`nvidia-smi` lists those on a GPU), wait for them, or ",
                    false => "",
                },
            ),
        }
    }
}

impl fmt::Display for Instead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(fewer) = self.fewer_layers {
            write!(f, ": {fewer} of its {} layers would fit", self.layers)?;
        }
        if let Some(seq_len) = self.seq_len {
            write!(f, ", or a shorter context: data.seq_len={seq_len} would fit")?;
        }
        match &self.gpus {
            Some(gpus) => write!(f, "; or several GPUs: with these settings and {gpus}"),
            None => Ok(()),
        }
    }
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
