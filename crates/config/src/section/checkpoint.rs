//! `[checkpoint]`: saves during the run, retention, and the Hugging Face export at the end.

use xtrain_checkpoint::hf::ExportDtype;

section! {
    /// The keys of `[checkpoint]`. The section is described at
    /// [`Config::checkpoint`](crate::Config).
    pub struct CheckpointConfig {
        /// Interval of saves. 0 saves only at the end, on SIGTERM and at `train.max_time`. `keep_best` adds
        /// at most one save in as many steps.
        #[schemars(extend("x-unit" = "steps"))]
        pub every: u64 = 1000,
        /// Number of latest checkpoints that are kept.
        #[schemars(range(min = 1, max = 1_000_000))]
        #[schemars(extend("x-unit" = "checkpoints"))]
        pub keep_last: usize = 2,
        /// Also keeps the checkpoints whose step is a multiple of this, permanently. Must be a multiple of
        /// `every`; 0 keeps none.
        #[schemars(extend("x-unit" = "steps"))]
        pub keep_every: u64 = 0,
        /// Also keeps the checkpoint that is the best by `best`; `--best` uses it. An evaluation that finds a
        /// better one saves a checkpoint if its step is saved anyway, or if at least `every` steps have
        /// passed since the last best one.
        #[schemars(extend("x-default" = "true if such evaluations are made during the run"))]
        pub keep_best: Option<bool> = None,
        /// The best checkpoint has the lowest validation loss (`"loss"`), or the best score on one of
        /// `eval.tasks` (`"task NAME"`).
        #[schemars(extend("x-example" = "task names"))]
        pub best: String = "loss".to_owned(),
        /// Also exports the last state as a Hugging Face folder, `hf/` in the run folder.
        pub export_hf: bool = true,
        /// Format of the exported weights; adapters are exported in fp32.
        #[schemars(extend("x-default" = "\"fp32\" with recipe \"fp32\" or adapters, else \"bf16\""))]
        pub export_dtype: Option<ExportDtype> = None,
    }
}

impl CheckpointConfig {
    /// True if the best checkpoint is that of a task.
    pub fn is_best_of_task(&self) -> bool {
        self.best_task().is_some()
    }

    /// The task by whose score the best checkpoint is chosen; `None` if it is chosen by the loss.
    pub fn best_task(&self) -> Option<&str> {
        self.best.strip_prefix("task ")
    }
}
