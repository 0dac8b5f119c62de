//! The speed of generation, as commands report it.

use serde_json::{Value, json};
use xtrain_report::metrics::format;
use xtrain_step::generate::Pace;

/// Speed of generation, and the memory bandwidth that bounds it.
pub(super) struct Speed {
    pub(super) pace: Pace,
    /// Peak memory bandwidth of the processor in bytes per second.
    pub(super) bandwidth: Option<f64>,
}

impl Speed {
    /// Time for reading all weights and the cache at full bandwidth, relative to the measured time.
    fn share(&self) -> Option<f64> {
        Some(self.pace.bytes_per_second()? / self.bandwidth?)
    }

    /// The line for people; `None` if no token was generated after the prompt's pass.
    pub(super) fn line(&self) -> Option<String> {
        let Pace { prompt_tokens, prompt_seconds, .. } = self.pace;
        let rate = self.pace.tokens_per_second()?;
        let mut line = format!("{rate:.1} tokens/s, {:.3} ms each", 1e3 / rate);
        if let (Some(share), Some(bandwidth)) = (self.share(), self.bandwidth) {
            line += &format!(" ({} of the memory's {:.2} TB/s)", format::percent(share, 0), bandwidth / 1e12);
        }
        if prompt_tokens > 0 {
            line += &format!("; {prompt_tokens} tokens of the prompt in {:.3} s", prompt_seconds);
        }
        Some(line)
    }

    pub(super) fn json(&self) -> Value {
        let Pace { prompt_tokens, prompt_seconds, tokens, seconds, .. } = self.pace;
        json!({
            "prompt_tokens": prompt_tokens,
            "prompt_seconds": prompt_seconds,
            "tokens": tokens,
            "seconds": seconds,
            "tokens_per_second": self.pace.tokens_per_second(),
            "bandwidth_share": self.share(),
        })
    }
}
