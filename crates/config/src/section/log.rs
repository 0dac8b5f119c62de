//! `[log]`: interval of reports, and the files that they are written to.

section! {
    /// The keys of `[log]`. The section is described at [`Config::log`](crate::Config).
    pub struct LogConfig {
        /// Reports every this many steps.
        #[schemars(range(min = 1))]
        #[schemars(extend("x-unit" = "steps"))]
        pub every: u64 = 10,
        /// Writes TensorBoard events into the run folder.
        pub tensorboard: bool = true,
        /// Writes metrics.jsonl, one JSON object per line, into the run folder. The report reads it.
        pub jsonl: bool = true,
        /// Program and arguments, started without a shell, that receives each line of metrics.jsonl on its
        /// standard input. The run never waits for it; a program that reads too slowly misses lines. Only a
        /// run file or `--set` starts a program: the config.toml of a run folder does not record it.
        /// docs/watching.md has examples.
        #[schemars(extend("x-example" = ["python", "to_wandb.py"]))]
        pub command: Vec<String> = Vec::new(),
    }
}
