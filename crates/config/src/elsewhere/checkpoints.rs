//! Checkpoints and evaluation.

use super::{AliasRow, why, write};

/// The rows of the topic.
pub(super) const ROWS: &[AliasRow] = &[
    why(
        &["finetune", "continue_pretraining", "finetuning"],
        "a run begins with the weights of the folder that `model.init_from` names, and else with random ones",
    ),
    // Exports.
    why(
        &["export_dir", "export_path", "export_folder"],
        "a Hugging Face folder is written by a command, `xtrain export RUN --out FOLDER`; `checkpoint.export_hf = true` writes that of the \
         last weights to the run folder, `train.out`",
    ),
    why(
        &["export_size", "export_max_shard_size"],
        "the command has an option for it: `xtrain export RUN --out FOLDER --max-shard-size 5GB`",
    ),
    why(
        &["export_quantization_bit", "export_quantization_dataset"],
        "`checkpoint.export_dtype = \"fp8\"` exports FP8 numbers, as does `xtrain export RUN --dtype fp8 --out FOLDER`; other quantisation is \
         not supported",
    ),
    why(
        &["export_device", "export_legacy_format", "export_hub_model_id"],
        "an export is a Hugging Face folder of safetensors, written by the CPU; leave it out",
    ),
    // Checkpoints.
    why(
        &[
            "save_strategy",
            "saves_per_epoch",
            "checkpoint.strategy",
            "save_per_epoch",
            "save_freq_epochs",
            "save_every_epoch",
        ],
        "checkpoints are saved every so many steps, `checkpoint.every = 1000`, and at the end",
    ),
    write(&["save_strategy=best", "checkpoint.strategy=best"], "checkpoint.keep_best = true"),
    write(
        &[
            "save_strategy=false",
            "checkpoint.strategy=false",
            "saves_per_epoch=0",
            "save_per_epoch=0",
            "checkpoint.enable=false",
            "checkpoint.enable_checkpoint=false",
            "enable_checkpoint=false",
            "save_checkpoint=false",
            "checkpoint.save=false",
        ],
        "checkpoint.every = 0",
    ),
    why(
        &[
            "checkpoint.enable",
            "checkpoint.enable_checkpoint",
            "enable_checkpoint",
            "save_checkpoint",
            "checkpoint.save",
        ],
        "the last step is always saved; `checkpoint.every = 0` saves only then",
    ),
    why(
        &["always_save_checkpoint"],
        "`checkpoint.every` is the interval of saves, and `checkpoint.keep_best` keeps the one with the lowest validation loss",
    ),
    why(
        &[
            "checkpoint.folder",
            "checkpoint.path",
            "checkpoint.dir",
            "checkpoint.directory",
            "checkpoint_dir",
            "checkpoint_folder",
            "save_folder",
            "ckpt_path",
        ],
        "checkpoints are in the run folder, `train.out`, under checkpoints/",
    ),
    why(
        &["async_mode", "async_save", "async_checkpoint", "use_async_checkpoint", "dist_checkpointing"],
        "checkpoints are always written in the background, from a copy; there is nothing to turn on",
    ),
    why(
        &["async_mode=false", "async_save=false", "async_checkpoint=false", "use_async_checkpoint=false"],
        "checkpoints are always written in the background, from a copy; it cannot be turned off",
    ),
    why(
        &[
            "save_only_model",
            "last_save_model_only",
            "save_model_only",
            "save_safetensors",
            "save_on_each_node",
            "save_first_step",
            "enable_first_step_checkpoint",
            "save_optimizer",
            "no_save_optim",
            "no_load_optim",
            "exclude_from_loading",
            "zero3_save_16bit_model",
            "stage3_gather_16bit_weights_on_model_save",
            "save_16bit_model",
            "save_final_model",
            "save_format",
            "ckpt_format",
        ],
        "a checkpoint holds the whole state, once, for any number of GPUs; `checkpoint.export_hf = true` also writes the last weights as a \
         Hugging Face folder",
    ),
    why(
        &["metric_for_best_model", "greater_is_better", "best_metric", "monitor"],
        "`checkpoint.best` says which checkpoint is the best: \"loss\", or \"task NAME\" with one of `eval.tasks`",
    ),
    why(
        &[
            "resume",
            "resume_from_checkpoint",
            "resume_from_step",
            "load",
            "no_load_rng",
            "use_checkpoint_args",
            "use_checkpoint_opt_param_scheduler",
            "override_opt_param_scheduler",
            "resume_from",
            "auto_resume",
            "auto_resume_from_checkpoints",
            "load_checkpoint",
            "load_step",
            "load_only",
            "initial_load_path",
            "initial_load_model_only",
            "initial_load_in_hf",
            "load_universal_checkpoint",
            "ignore_data_skip",
            "model.init_from=resume",
        ],
        "a run is continued by the command, `xtrain train run.toml --resume`; other weights to begin with are `model.init_from`",
    ),
    why(
        &[
            "model.init_from=scratch",
            "model.init_from=random",
            "model.init_from=none",
            "from_scratch",
            "train_from_scratch",
        ],
        "weights are random unless `model.init_from` names a folder; leave it out, and name `model.dim`, `model.layers` and `model.heads`",
    ),
    why(
        &["overwrite_output_dir", "overwrite", "exist_ok"],
        "the folder of a run is never overwritten; name another one, `train.out = \"runs/second\"`, or continue it, \
         `xtrain train run.toml --resume`",
    ),
    // Evaluation.
    why(
        &[
            "eval_strategy",
            "evaluation_strategy",
            "evals_per_epoch",
            "eval.strategy",
            "eval_per_epoch",
            "eval_delay",
        ],
        "the validation loss is measured every so many steps, `eval.every = 250`, and at the end",
    ),
    write(
        &[
            "eval_strategy=false",
            "eval.strategy=false",
            "evaluation_strategy=false",
            "evals_per_epoch=0",
            "eval_per_epoch=0",
            "eval_iters=0",
            "limit_val_batches=0",
            "do_eval=false",
            "eval.enable=false",
        ],
        "eval.every = 0",
    ),
    why(
        &[
            "eval_iters",
            "eval_batches",
            "eval_num_steps",
            "max_eval_steps",
            "max_eval_batches",
            "val_max_steps",
            "limit_val_batches",
            "max_eval_samples",
            "eval_samples",
            "eval.sequences",
            "eval.steps",
            "eval.batches",
            "eval.iters",
            "eval.num_samples",
        ],
        "an evaluation is a number of tokens: `eval.tokens` is batches times sequences times `data.seq_len`",
    ),
    why(
        &["eval_only", "eval.enable", "do_eval", "do_train", "do_train=false", "do_predict", "test_only"],
        "`xtrain train` trains, and evaluates every `eval.every` steps; `xtrain eval RUN` only evaluates",
    ),
    why(
        &["eval_on_start", "eval_before_train", "eval_first_step"],
        "a run that begins with `model.init_from` is always evaluated before its first step; leave it out",
    ),
    why(
        &["eval_on_start=false", "eval_before_train=false", "eval_first_step=false"],
        "a run that begins with `model.init_from` is always evaluated before its first step; it cannot be turned off",
    ),
    why(
        &[
            "per_device_eval_batch_size",
            "eval_batch_size",
            "eval_accumulation_steps",
            "eval_sequence_len",
            "prediction_loss_only",
            "eval_do_concat_batches",
            "batch_eval_metrics",
            "include_for_metrics",
        ],
        "evaluations during a run have the batches and the length of training; leave it out",
    ),
    why(
        &[
            "sample_every",
            "sample_interval",
            "sample_steps",
            "generate_samples",
            "generate_every",
            "eval.sample_every",
            "eval.generate",
            "predict_with_generate",
            "num_generation_samples",
            "do_bench_eval",
        ],
        "samples are written after the last step: `eval.prompts = [\"Once upon a time\"]`; during a run, \
         `xtrain generate RUN --prompt TEXT` uses its latest checkpoint",
    ),
    why(
        &[
            "eval_harness",
            "lm_eval",
            "core_metric_max_per_task",
            "compute_accuracy",
            "core_metric_every",
            "hellaswag",
            "mmlu",
            "do_causal_lm_eval",
            "evals",
        ],
        "`eval.tasks` names the files of tasks that are scored, also samples of lm-eval (docs/evaluation.md)",
    ),
];
