//! How answers are generated: greedily, with a maximum length and stop strings.

/// Rules of generated answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GenerationRules {
    /// Maximum number of new tokens.
    pub max_tokens: usize,
    /// Strings at which the text ends. None of them is empty.
    pub until: Vec<String>,
}

impl GenerationRules {
    /// lm-eval's default of [`GenerationRules::max_tokens`] (`max_gen_toks`).
    pub(super) const MAX_TOKENS: usize = 256;
    /// The largest maximum that a task may have.
    pub(super) const MOST_TOKENS: usize = 1 << 20;
}
