//! `[log]`: interval of reports, and the files that they are written to.

section! {
    /// The keys of `[log]`. What the section is for stands at [`Config::log`](crate::Config).
    pub struct LogConfig {
        /// Reports every this many steps.
        #[schemars(range(min = 1))]
        #[schemars(extend("x-unit" = "steps"))]
        #[schemars(extend("x-aliases" = [
            "log_interval", "logging_steps", "log_freq", "log_every", "interval"
        ]))]
        pub every: u64 = 10,
        /// Writes TensorBoard events into the run folder.
        #[schemars(extend("x-aliases" = ["enable_tensorboard", "tb", "tensorboard_log"]))]
        pub tensorboard: bool = true,
        /// Writes metrics.jsonl, one JSON object per line, into the run folder. The report reads it.
        #[schemars(extend("x-aliases" = ["json", "metrics", "metrics_file"]))]
        pub jsonl: bool = true,
    }
}
