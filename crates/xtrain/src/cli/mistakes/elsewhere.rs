//! Names of commands and options in other programs, and their counterparts in xtrain.
//!
//! Names are compared without case, dashes and underscores. Settings of runs need no row: the run file's keys
//! and tables know them (`xtrain_config::advice`).

/// Names in other programs, and what they correspond to.
pub(super) struct Row {
    /// The names, without the dashes of an option.
    pub(super) names: &'static [&'static str],
    /// Counterparts in xtrain: for an option, the first that the command has; for a command, all of them.
    pub(super) here: &'static [Here],
}

/// A counterpart in xtrain.
#[derive(Clone, Copy)]
pub(super) enum Here {
    /// A command, without `xtrain`. Words in capitals are placeholders.
    Command(&'static str),
    /// An option of the command, with its value if that is fixed.
    Option(&'static str),
    /// A positional argument.
    Argument(&'static str),
    /// A key of the run file, with its value if that is fixed.
    Key(&'static str),
    /// No counterpart, for this reason.
    Nothing(&'static str),
}

use Here::{Argument, Command, Key, Nothing, Option};

const fn row(names: &'static [&'static str], here: &'static [Here]) -> Row {
    Row { names, here }
}

/// Commands.
pub(super) const COMMANDS: &[Row] = &[
    row(
        &["finetune", "finetunefull", "ft", "sft", "tune", "continue", "cpt", "midtrain"],
        &[Command("init MODEL TEXT"), Command("train run.toml")],
    ),
    row(&["pretrain", "basetrain", "fit", "run", "start", "launch", "trainer"], &[Command("train run.toml")]),
    row(&["resume", "restart", "recover"], &[Command("train run.toml --resume")]),
    row(
        &["sample", "infer", "inference", "complete", "predict", "prompt", "ask", "decode", "demo"],
        &[Command("generate MODEL --prompt TEXT")],
    ),
    row(&["webchat", "repl", "talk", "converse", "chatcli", "interactive"], &[Command("chat MODEL")]),
    row(
        &[
            "test",
            "validate",
            "validation",
            "val",
            "score",
            "perplexity",
            "ppl",
            "lmeval",
            "evals",
            "evaluate",
            "evaluation",
            "baseeval",
        ],
        &[Command("eval MODEL")],
    ),
    row(
        &[
            "convert",
            "save",
            "tohf",
            "mergeweights",
            "mergeshardedfsdpweights",
            "convertcheckpoint",
            "converttohf",
            "converttolitgpt",
            "convertfromlitgpt",
            "saveweights",
        ],
        &[Command("export RUN --out FOLDER")],
    ),
    row(
        &["mergelora", "mergeadapter", "mergeandunload", "mergeloraweights"],
        &[Command("merge RUN --out FOLDER")],
    ),
    row(&["quantize", "quantise", "quant"], &[Command("export RUN --dtype fp8 --out FOLDER")]),
    row(
        &["serve", "server", "api", "deploy", "vllm", "vllmserve", "webui", "gradio"],
        &[
            Nothing("xtrain does not serve models; inference engines serve its exports"),
            Command("export RUN --out FOLDER"),
        ],
    ),
    row(
        &[
            "prepare",
            "preprocess",
            "preparedata",
            "data",
            "encode",
            "traintokenizer",
            "tokenizer",
            "bpe",
            "shard",
        ],
        &[Command("tokenize TEXT --bpe-vocab-size 4096 --out FOLDER")],
    ),
    row(
        &["estimate", "estimatememory", "memory", "dryrun", "params", "flops", "check", "size", "summary"],
        &[Command("plan run.toml")],
    ),
    row(
        &["new", "create", "template", "config", "configure", "configschema", "quickstart"],
        &[Command("init TEXT")],
    ),
    row(&["plot", "dashboard", "tensorboard", "show", "view", "visualize", "ui"], &[Command("report RUN")]),
    row(&["diff"], &[Command("compare RUN RUN")]),
    row(
        &["env", "devices", "gpus", "diagnose", "info", "system", "status", "dsreport", "selftest"],
        &[Command("doctor")],
    ),
    row(&["benchmark", "speed", "throughput", "benchstep"], &[Command("bench step run.toml")]),
    row(&["profile", "trace"], &[Command("train run.toml --profile")]),
    row(&["completion", "autocomplete", "shellcompletions"], &[Command("completions bash")]),
    row(&["version"], &[Command("--version")]),
    row(
        &["install", "setup", "uninstall", "upgrade", "update", "selfupdate"],
        &[
            Nothing(
                "nothing more is to be installed; in a clone, cargo install --locked --path crates/xtrain puts xtrain on the path",
            ),
            Command("doctor"),
        ],
    ),
    row(
        &["download", "pull", "fetch", "get"],
        &[Nothing(
            "xtrain downloads nothing; use Hugging Face's client: hf download OWNER/NAME --local-dir FOLDER",
        )],
    ),
    row(
        &["push", "upload", "publish"],
        &[
            Nothing("xtrain uploads nothing; use Hugging Face's client: hf upload OWNER/NAME FOLDER"),
            Command("export RUN --out FOLDER"),
        ],
    ),
    row(
        &[
            "dpo",
            "rlhf",
            "rl",
            "ppo",
            "grpo",
            "rloo",
            "kto",
            "orpo",
            "reward",
            "rewardmodel",
            "trainrm",
            "chatrl",
            "distill",
            "chatsft",
        ],
        &[Nothing(
            "xtrain only learns to predict text so far; TRL, for preferences, continues from the Hugging Face folder of a run",
        )],
    ),
    row(
        &["lora", "qlora", "finetunelora", "finetuneadapter"],
        &[Nothing("a run file with [adapter] trains adapters (docs/adapters.md)"), Command("train run.toml")],
    ),
    row(
        &["torchrun", "accelerate", "deepspeed", "distributed", "multigpu"],
        &[Command("train run.toml --gpus 8")],
    ),
];

/// Options.
pub(super) const OPTIONS: &[Row] = &[
    row(&["temp"], &[Option("--temperature")]),
    row(&["greedy", "nosample"], &[Option("--temperature 0")]),
    row(&["dosample"], &[Option("--temperature 1")]),
    row(
        &[
            "maxnewtokens",
            "numtokens",
            "ntokens",
            "npredict",
            "maxlength",
            "maxlen",
            "length",
            "max",
            "tokenlimit",
        ],
        &[Option("--max-tokens")],
    ),
    row(
        &["text", "question", "message", "input", "start"],
        &[Option("--prompt"), Option("--data"), Argument("INPUTS")],
    ),
    row(&["inputids", "promptids", "ids"], &[Option("--tokens")]),
    row(
        &["config", "c", "cfg", "conf", "runfile", "file", "f", "yaml", "toml"],
        &[Argument("FILE"), Nothing("run files are for train, plan and bench")],
    ),
    row(
        &["model", "m", "modelpath", "modelnameorpath", "ckptdir", "hfmodel", "pretrained"],
        &[Argument("MODEL"), Argument("RUN"), Argument("RUNS")],
    ),
    // A run to read, or the name of one that begins.
    row(&["run"], &[Argument("MODEL"), Argument("RUN"), Argument("RUNS"), Key("train.out")]),
    row(&["checkpoint", "ckpt", "iter", "iteration", "checkpointstep"], &[Option("--step")]),
    row(
        &[
            "o",
            "output",
            "outputdir",
            "outdir",
            "savedir",
            "savepath",
            "dest",
            "destination",
            "name",
            "runname",
            "experiment",
            "expname",
            "project",
            "html",
            "save",
        ],
        &[Option("--out"), Key("train.out")],
    ),
    row(
        &[
            "resumefrom",
            "resumefromcheckpoint",
            "restart",
            "continue",
            "load",
            "loadcheckpoint",
            "autoresume",
        ],
        &[Option("--resume")],
    ),
    row(&["q", "silent", "noprogress", "noverbose"], &[Option("--quiet")]),
    row(&["v", "debug", "loglevel"], &[Option("--verbose"), Option("--all")]),
    row(&["cpu", "nocuda", "nogpu", "cpuonly", "forcecpu"], &[Option("--device cpu")]),
    row(&["gpu", "cuda", "usegpu"], &[Option("--device cuda")]),
    row(
        &[
            "numgpus",
            "ngpus",
            "ngpu",
            "devices",
            "numdevices",
            "nprocpernode",
            "nproc",
            "numprocesses",
            "worldsize",
        ],
        &[Option("--gpus")],
    ),
    row(&["g", "gpuid", "deviceid", "visibledevices"], &[Nothing("CUDA_VISIBLE_DEVICES chooses the GPU")]),
    row(&["bf16", "bfloat16", "fp16", "half", "amp"], &[Option("--precision bf16"), Option("--dtype bf16")]),
    row(&["fp32", "float32", "full"], &[Option("--precision fp32"), Option("--dtype fp32")]),
    row(
        &["fp8", "float8", "loadin8bit", "8bit", "int8"],
        &[Option("--precision fp8-block"), Option("--dtype fp8")],
    ),
    row(&["dtype", "recipe", "weightdtype"], &[Option("--precision"), Option("--casts")]),
    row(
        &["precision", "mixedprecision", "outtype", "outputdtype", "torchdtype"],
        &[Option("--dtype"), Option("--precision"), Option("--casts")],
    ),
    row(&["j", "jobs", "numthreads", "nthreads", "numproc"], &[Option("--threads")]),
    row(&["timelimit", "timeout", "walltime", "maxhours", "maxminutes"], &[Option("--max-time")]),
    row(&["dryrun", "check", "validateonly"], &[Command("plan FILE")]),
    row(&["evalonly", "testonly"], &[Command("eval RUN")]),
    row(&["force", "replace", "overwriteoutputdir", "y", "yes"], &[Option("--overwrite")]),
    row(
        &["dataset", "corpus", "textfile", "files", "inputfile", "datapath", "valdata"],
        &[Option("--data"), Argument("INPUTS")],
    ),
    row(
        &["contextlength", "ctx", "nctx", "blocksize", "maxseqlen", "sequencelength"],
        &[Option("--seq-len")],
    ),
    row(&["b", "bs", "batch", "batchsize"], &[Option("--batch-size"), Option("--batch")]),
    row(&["vocabsize", "vocab", "nvocab"], &[Option("--bpe-vocab-size"), Key("data.bpe_vocab_size")]),
    row(&["column", "textcolumn", "field", "key", "jsonkey", "jsonkeys"], &[Option("--text-field")]),
    row(&["bpe", "trainbpe"], &[Option("--bpe-vocab-size 4096"), Key("data.tokenizer=bpe")]),
    row(&["eos", "eostoken", "appendeod", "eod"], &[Option("--end-of-document")]),
    row(&["bos", "addbos"], &[Option("--begin-of-document")]),
    row(&["shardsize", "chunksize"], &[Option("--shard-tokens"), Option("--max-shard-size")]),
    row(&["vram", "mem", "ram", "gpumemory"], &[Option("--memory")]),
    row(
        &["tasks"],
        &[
            Option("--task"),
            Key("eval.tasks"),
            Nothing("`xtrain eval --task FILE` scores tasks (docs/evaluation.md)"),
        ],
    ),
    row(
        &["numfewshot", "fewshot", "nshot"],
        &[Nothing("`shots` in the file of a task is the number of its examples (docs/evaluation.md)")],
    ),
    row(
        &["format", "gguf", "outformat"],
        &[Nothing(
            "exports are Hugging Face folders; llama.cpp's convert_hf_to_gguf.py turns them into GGUF",
        )],
    ),
    // Letters of llm.c, for commands that take keys.
    row(&["l"], &[Key("optimizer.lr")]),
    row(&["x"], &[Key("train.steps")]),
    row(&["u"], &[Key("schedule.warmup_steps")]),
    row(&["z"], &[Key("parallel.shard")]),
    row(&["t"], &[Key("data.seq_len")]),
    row(&["i"], &[Key("data.train"), Nothing("give a prompt with --prompt; - reads it from standard input")]),
    row(&["interactive"], &[Nothing("give a prompt with --prompt; - reads it from standard input")]),
];

/// The row of `table` with this name.
pub(super) fn known(table: &'static [Row], name: &str) -> std::option::Option<&'static Row> {
    let plain: String = name.chars().filter(|c| !"-_".contains(*c)).flat_map(char::to_lowercase).collect();
    table.iter().find(|row| row.names.contains(&plain.as_str()))
}
