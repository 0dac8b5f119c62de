//! `[eval]`: validation during the run and samples at its end.

const EVERY: u64 = 250;
const STEPS_WORTH: u64 = 16;

section! {
    /// The keys of `[eval]`. The section is described at [`Config::eval`](crate::Config).
    pub struct EvalConfig {
        /// Measures the validation loss every this many steps. 0 leaves it to `at_end`.
        #[schemars(extend("x-unit" = "steps"))]
        #[schemars(extend("x-default" = format!("{EVERY}, or 0 without validation data")))]
        pub every: Option<u64> = None,
        /// Tokens of one evaluation, rounded up to whole sequences; always the same ones. 0 takes all
        /// validation data.
        #[schemars(extend("x-unit" = "tokens"))]
        #[schemars(extend("x-default" = format!("those of {STEPS_WORTH} training steps")))]
        #[schemars(extend("x-example" = 100_000))]
        pub tokens: Option<u64> = None,
        /// Measures the validation loss once more after the last step, if there is validation data.
        pub at_end: bool = true,
        /// Continues each of these texts after the last step, and prints the result.
        #[schemars(extend("x-example" = ["Once upon a time"]))]
        pub prompts: Vec<String> = Vec::new(),
        /// Answers each of these questions after the last step (docs/chat.md).
        #[schemars(extend("x-example" = ["Who are you?"]))]
        pub chats: Vec<String> = Vec::new(),
        /// Scores the model on these tasks after the last step (docs/evaluation.md).
        #[schemars(extend("x-example" = ["tasks/names.toml"]))]
        pub tasks: Vec<String> = Vec::new(),
        /// Also scores the tasks every this many steps. 0 does not.
        #[schemars(extend("x-unit" = "steps"))]
        pub tasks_every: u64 = 0,
        /// Scores only so many rows of each task, the first ones.
        #[schemars(range(min = 1))]
        #[schemars(extend("x-unit" = "rows", "x-default" = "all"))]
        pub tasks_limit: Option<u64> = None,
        /// Longest continuation or answer.
        #[schemars(range(min = 1, max = 1_073_741_824))]
        #[schemars(extend("x-unit" = "tokens"))]
        pub max_tokens: usize = 128,
        /// Temperature of the sampling. 0 always selects the most likely token.
        #[schemars(range(max = 100.0), extend("minimum" = 0.0))]
        pub temperature: f64 = 0.8,
    }
}

impl EvalConfig {
    /// Steps between evaluations, as given or by default; 0 for none during the run.
    pub fn every(&self, has_validation_data: bool) -> u64 {
        self.every.unwrap_or(if has_validation_data { EVERY } else { 0 })
    }

    /// True if samples are written after the last step.
    pub fn has_samples(&self) -> bool {
        !(self.prompts.is_empty() && self.chats.is_empty())
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
