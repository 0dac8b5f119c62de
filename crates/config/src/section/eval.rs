//! `[eval]`: validation during the run and samples at its end.

const EVERY: u64 = 250;
const STEPS_WORTH: u64 = 16;

section! {
    /// The keys of `[eval]`. The section is described at [`Config::eval`](crate::Config).
    pub struct EvalConfig {
        /// Measures the validation loss every this many steps. 0 leaves it to `at_end`.
        #[schemars(extend("x-unit" = "steps"))]
        #[schemars(extend("x-default" = format!("{EVERY}, or 0 without validation data")))]
        #[schemars(extend("x-aliases" = [
            "eval_interval", "eval_steps", "eval_every", "freq", "interval", "eval_freq", "val_interval",
            "val_loss_every", "eval_every_n_steps", "validation_interval", "val_check_interval",
            "steps_per_eval", "val_freq"
        ]))]
        pub every: Option<u64> = None,
        /// Tokens of one evaluation, rounded up to whole sequences; always the same ones. 0 takes all
        /// validation data.
        #[schemars(extend("x-unit" = "tokens"))]
        #[schemars(extend("x-default" = format!("those of {STEPS_WORTH} training steps")))]
        #[schemars(extend("x-example" = 100_000))]
        #[schemars(extend("x-aliases" = ["eval_tokens"]))]
        pub tokens: Option<u64> = None,
        /// Measures the validation loss once more after the last step, if there is validation data.
        #[schemars(extend("x-aliases" = ["eval_at_end", "final_eval"]))]
        pub at_end: bool = true,
        /// Continues each of these texts after the last step, and prints the result.
        #[schemars(extend("x-example" = ["Once upon a time"]))]
        #[schemars(extend("x-aliases" = [
            "prompt", "start", "samples", "sample_prompts", "generation_prompts", "sample_prompt"
        ]))]
        pub prompts: Vec<String> = Vec::new(),
        /// Longest continuation of a prompt.
        #[schemars(range(min = 1, max = 1_073_741_824))]
        #[schemars(extend("x-unit" = "tokens"))]
        #[schemars(extend("x-aliases" = [
            "max_new_tokens", "sample_tokens", "num_tokens_to_generate", "generation_max_new_tokens",
            "eval_max_new_tokens"
        ]))]
        pub max_tokens: usize = 128,
        /// Temperature of the sampling. 0 always selects the most likely token.
        #[schemars(range(max = 100.0), extend("minimum" = 0.0))]
        #[schemars(extend("x-aliases" = ["temp", "sample_temperature", "generation_temperature"]))]
        pub temperature: f64 = 0.8,
    }
}

impl EvalConfig {
    /// Steps between evaluations, as given or by default; 0 for none during the run.
    pub fn every(&self, has_validation_data: bool) -> u64 {
        self.every.unwrap_or(if has_validation_data { EVERY } else { 0 })
    }

    /// Tokens of one evaluation: as given (0: all), or those of some training steps.
    ///
    /// `step_tokens` is the number of tokens in an optimizer step.
    pub fn tokens(&self, step_tokens: u64) -> u64 {
        self.tokens.unwrap_or_else(|| step_tokens.saturating_mul(STEPS_WORTH).min(i64::MAX as u64))
    }

    /// Maximum number of sequences of one evaluation, once its tokens are known.
    pub fn sequences(&self, seq_len: usize) -> u64 {
        match self.tokens.unwrap_or(0) {
            0 => u64::MAX,
            tokens => tokens.div_ceil(seq_len as u64),
        }
    }
}
