//! Names, types and ranges, each message in full.

use super::{MINIMAL, errors, errors_with, parse};
use crate::OrAuto;
use crate::messages::assert_message;

/// One message for `lines` under `section`.
fn message(section: &str, lines: &str) -> String {
    let errors = errors_with(section, lines);
    assert_eq!(errors.len(), 1, "{errors:?}");
    errors[0].clone()
}

#[test]
fn everything_wrong_is_reported_at_once_with_its_line() {
    let text = "\
lr = 3
[modle]
dim = 64
[data]
train = []
[optimizer]
betas = [0.9, 1.0]
lr = 0
[train]
steps = 1e3
";
    assert_eq!(
        errors(text),
        "runs/x.toml:1: `lr` stands outside any section; write it below [optimizer]\n\
         runs/x.toml:2: unknown section [modle]; did you mean [model]?\n\
         runs/x.toml:5: [data] `train` must be a list that is not empty, each entry a path, or a table of `path`, \
         `weight`, `text_field`, `separator`, `format`, `chat_template` and `train_on`, not a list of 0; for example `train = \"data/corpus.txt\"`\n\
         runs/x.toml:7: [optimizer] `betas[1]` must be a number of at least 0 and less than 1, not 1.0\n\
         runs/x.toml:8: [optimizer] `lr` must be a number greater than 0, not 0; for example `lr = 0.0003`\n\
         runs/x.toml:10: [train] `steps` must be a whole number of at least 1, not 1000.0; write 1000, without point and exponent"
    );
}

#[test]
fn names_of_other_programs_are_recognised() {
    for (section, name, ours) in [
        ("model", "n_embd", "dim"),
        ("model", "num_key_value_heads", "kv_heads"),
        ("model", "intermediate_size", "ffn_dim"),
        ("data", "block_size", "seq_len"),
        ("optimizer", "learning_rate", "lr"),
        ("train", "max_iters", "steps"),
        ("train", "local_batch_size", "micro_batch_size"),
        ("checkpoint", "interval", "every"),
        ("schedule", "warmup_iters", "warmup_steps"),
    ] {
        assert_eq!(
            message(section, &format!("{name} = 3")),
            format!("unknown key `{name}`; did you mean `{ours}`?")
        );
    }
}

#[test]
fn keys_that_other_programs_have_and_xtrain_lacks_are_explained() {
    for name in ["name", "type"] {
        let only = format!(
            "unknown key `{name}`; AdamW is the default, and `optimizer.kind = \"muon\"` the only other optimizer"
        );
        assert!(message("optimizer", &format!("{name} = \"muon\"")).starts_with(&only));
    }
    for (section, key) in [("train", "gpus"), ("train", "world_size"), ("parallel", "nproc_per_node")] {
        let said = message(section, &format!("{key} = 2"));
        let expected = format!("unknown key `{key}`; the number of processes is given to the command, ");
        assert!(said.starts_with(&expected), "{said}");
    }
    let said = message("model", "context_parallel_size = 2");
    assert_message("keys that other programs have and xtrain lacks are explained", &said);
    let said = message("parallel", "reshard_after_forward = true");
    assert!(
        said.contains(
            "; `parallel.shard = \"weights\"` gathers the weights of a block again for its backward, "
        ),
        "{said}"
    );
    assert_message(
        "keys that other programs have and xtrain lacks are explained, 2",
        message("parallel", "cpu_offload = true"),
    );
    assert_message(
        "keys that other programs have and xtrain lacks are explained, 3",
        message("parallel", "context_parallel = 2"),
    );
    assert_message(
        "keys that other programs have and xtrain lacks are explained, 4",
        message("train", "use_dora = true"),
    );
    // A name that may be any section's is looked for in its own alone.
    let said = message("data", "name = \"x\"");
    assert!(said.starts_with("unknown key `name`; the keys of [data] are "), "{said}");
    let said = errors(&format!("{MINIMAL}[parallelism]\ntp = 8\n"));
    assert_message("keys that other programs have and xtrain lacks are explained, 5", &said);
}

#[test]
fn names_of_other_programs_for_ways_to_share_are_answered_with_ours() {
    for (key, name, ours) in [
        ("shard", "ddp", "none"),
        ("shard", "zero1", "optimizer"),
        ("shard", "zero", "optimizer"),
        ("shard", "zero2", "gradients"),
        ("shard", "fsdp", "weights"),
        ("reduce", "default", "same-world"),
        ("reduce", "deterministic", "any-world"),
        ("reduce", "nccl", "fast"),
        ("reduce_dtype", "bfloat16", "bf16"),
    ] {
        let said = message("parallel", &format!("{key} = \"{name}\""));
        assert!(said.ends_with(&format!("; did you mean \"{ours}\"?")), "{said}");
    }
    for (name, ours) in
        [("HYBRID_SHARD", "weights"), ("hsdp", "weights"), ("_HYBRID_SHARD_ZERO2", "gradients")]
    {
        let said = message("parallel", &format!("shard = \"{name}\""));
        let replicas = format!("`parallel.shard = \"{ours}\"` with as many `parallel.replicas` as nodes");
        assert!(said.ends_with(&replicas), "{said}");
    }
}

#[test]
fn misspelt_keys_get_the_nearest_one() {
    assert_eq!(message("model", "layer = 2"), "unknown key `layer`; did you mean `layers`?");
    assert_eq!(message("model", "kvheads = 2"), "unknown key `kvheads`; did you mean `kv_heads`?");
    assert_eq!(message("train", "batch-size = 2"), "unknown key `batch-size`; did you mean `batch_size`?");
    assert_eq!(
        message("optimizer", "wieght_decay = 2"),
        "unknown key `wieght_decay`; did you mean `weight_decay`?"
    );
}

#[test]
fn keys_of_another_section_are_sent_there() {
    assert_eq!(message("train", "lr = 1e-3"), "unknown key `lr`; it belongs in [optimizer]");
    assert_eq!(
        message("train", "every = 5"),
        "unknown key `every`; it belongs in [checkpoint], [log] or [eval]"
    );
    assert_eq!(
        message("train", "learning_rate = 1"),
        "unknown key `learning_rate`; did you mean `lr` in [optimizer]?"
    );
    assert_eq!(
        message("optimizer", "warmup_step = 5"),
        "unknown key `warmup_step`; did you mean `warmup_steps` in [schedule]?"
    );
}

#[test]
fn keys_that_resemble_nothing_get_the_list() {
    assert_eq!(
        message("log", "zzzzzz = 1"),
        "unknown key `zzzzzz`; the keys of [log] are `every`, `tensorboard`, `jsonl` and `command`"
    );
}

#[test]
fn unknown_sections_get_the_nearest_one_or_the_list() {
    assert_eq!(message("training", ""), "unknown section [training]; did you mean [train]?");
    assert_eq!(message("lr_scheduler", ""), "unknown section [lr_scheduler]; did you mean [schedule]?");
    assert_eq!(
        message("weather", "wind = 2"),
        "unknown section [weather]; the sections are [model], [experts], [adapter], [data], [precision], [optimizer], [schedule], \
         [train], [parallel], [checkpoint], [log] and [eval]"
    );
}

#[test]
fn a_section_must_be_a_section() {
    let text = "[data]\ntrain = \"a\"\n[train]\nsteps = 3\n";
    for wrong in ["model = 3\n", "model = [1]\n"] {
        let expected = "runs/x.toml:1: `model` is a section; write it as [model], its keys below";
        assert_eq!(errors(&format!("{wrong}{text}")), expected);
    }
    let repeated = format!("{text}[[model]]\ndim = 3\n[[model]]\ndim = 4\n");
    assert_eq!(errors(&repeated), "runs/x.toml:5: `model` is a section; write it as [model], its keys below");
}

#[test]
fn wrong_types_say_what_is_expected_and_what_is_there() {
    let cases = [
        (
            "model",
            "kv_heads = \"two\"",
            "`kv_heads` must be a whole number from 1 to 65536, not the string \"two\"; for example `kv_heads = 2`",
        ),
        (
            "train",
            "device = \"gpu\"",
            "`device` must be \"auto\", \"cpu\" or \"cuda\", not the string \"gpu\"; did you mean \"cuda\"?",
        ),
        ("model", "tie_embeddings = 1", "`tie_embeddings` must be true or false, not 1"),
        (
            "data",
            "separator = 7",
            "`separator` must be a string that is not empty, not 7; put it in quotes; for example `separator = \"<|endoftext|>\"`",
        ),
        (
            "data",
            "cache_dir = 2026-01-01",
            "`cache_dir` must be a path, not the date 2026-01-01; put it in quotes; for example `cache_dir = \"runs/.cache\"`",
        ),
        (
            "data",
            "seq_len = 256.0",
            "`seq_len` must be a whole number from 1 to 16777216, not 256.0; write 256, without point and exponent",
        ),
        (
            "optimizer",
            "betas = 0.9",
            "`betas` must be a list of 2, each a number of at least 0 and less than 1, not 0.9; for example `betas = [0.9, 0.95]`",
        ),
        (
            "optimizer",
            "betas = [0.9]",
            "`betas` must be a list of 2, each a number of at least 0 and less than 1, not a list of 1; for example `betas = [0.9, 0.95]`",
        ),
        (
            "optimizer",
            "eps = {}",
            "`eps` must be a number greater than 0, not a table; for example `eps = 1e-8`",
        ),
        (
            "eval",
            "prompts = [\"a\", 2]",
            "`prompts[1]` must be a string, not 2; put it in quotes; for example `prompts = [\"Once upon a time\"]`",
        ),
    ];
    for (section, line, expected) in cases {
        assert_eq!(message(section, line), expected);
    }
}

#[test]
fn values_out_of_range_name_the_range() {
    let cases = [
        (
            "model",
            "dropout = 1.5",
            "`dropout` must be a number from 0 to 0.99, not 1.5; for example `dropout = 0.0`",
        ),
        ("model", "norm_eps = nan", "`norm_eps` must be a number greater than 0, not NaN"),
        ("optimizer", "lr = inf", "`lr` must be a number greater than 0, not inf; for example `lr = 0.0003`"),
        (
            "optimizer",
            "grad_clip = -1",
            "`grad_clip` must be a number of at least 0, not -1; for example `grad_clip = 1.0`",
        ),
        (
            "train",
            "batch_size = 0",
            "`batch_size` must be a whole number from 1 to 16777216, not 0; for example `batch_size = 8`",
        ),
        (
            "experts",
            "capacity = -1",
            "`capacity` must be a number from 1 to 1000, or \"auto\", not -1; for example `capacity = 1.25`",
        ),
        ("train", "seed = -1", "`seed` must be a whole number of at least 0, not -1; for example `seed = 0`"),
        (
            "train",
            "seed = 9223372036854775808",
            "`seed` must be a whole number from 0 to 9223372036854775807, not 9223372036854775808; for example `seed = 0`",
        ),
        ("log", "every = 0", "`every` must be a whole number of at least 1, not 0; for example `every = 10`"),
    ];
    for (section, line, expected) in cases {
        assert_eq!(message(section, line), expected);
    }
}

#[test]
fn choices_get_the_nearest_one() {
    assert_eq!(
        message("schedule", "kind = \"cosin\""),
        "`kind` must be \"constant\", \"linear\", \"cosine\" or \"wsd\", not the string \"cosin\"; did you mean \"cosine\"?"
    );
    assert_eq!(
        message("precision", "recipe = \"fp16\""),
        "`recipe` must be \"fp32\", \"bf16\", \"fp8-current\", \"fp8-delayed\", \"fp8-row\" or \"fp8-block\", not the string \"fp16\"; \
         fp16 is not supported; `precision.recipe = \"bf16\"` has as many bits, and needs no loss scale"
    );
    assert_eq!(
        message("train", "recompute = false"),
        "`recompute` must be \"auto\", \"none\", \"norms\" or \"block\", not false; did you mean \"none\"?"
    );
}

#[test]
fn times_need_units() {
    let form = "a time is written as numbers with units, largest first, such as \"2h30m\", \"170m\" or \"45s\" (d, h, m, s, ms)";
    for wrong in [
        "", "90", "h", "30m2h", "1h1h", "2.5h30m", "2.h", ".5h", "1.2.3s", "2h 30m", "5ms1s", "1m s", "-1h",
        "2H",
    ] {
        assert_eq!(
            message("train", &format!("max_time = {wrong:?}")),
            format!("`max_time` is the string {wrong:?}; {form}")
        );
    }
    for wrong in ["0s", "0.0001s", "9999999d", "99999999999999999999s"] {
        assert_eq!(
            message("train", &format!("max_time = {wrong:?}")),
            format!("`max_time` is the string {wrong:?}; a time limit lies between 1ms and 3650d")
        );
    }
    assert_eq!(
        message("train", "max_time = 90"),
        "`max_time` must be a time such as \"2h30m\", not 90; put it in quotes; for example `max_time = \"2h30m\"`"
    );
}

#[test]
fn tokenizer_words_are_not_taken_for_folders() {
    assert_eq!(
        message("data", "tokenizer = \"byte\""),
        "`tokenizer` is the string \"byte\"; did you mean \"bytes\"? A folder of that name is written \"./byte\""
    );
    let text = super::MINIMAL.replace("[data]\n", "[data]\ntokenizer = \"./byte\"\n");
    assert!(parse(&text, &[]).is_ok());
}

#[test]
fn tables_inside_a_section_are_checked_too() {
    let cases = [
        (
            "data",
            "valid = [\"a\", { pth = \"b\" }]",
            vec![
                "unknown key `pth` in `valid[1]`; did you mean `path`?",
                "`valid[1]` needs `path`; for example `path = \"data/corpus.txt\"`",
            ],
        ),
        (
            "data",
            "valid = [{ path = \"b\", weight = -1 }]",
            vec!["`valid[0].weight` must be a number greater than 0, not -1"],
        ),
        (
            "data",
            "valid = [{ path = \"b\", zz = 1 }]",
            vec![
                "unknown key `zz` in `valid[0]`; its keys are `path`, `weight`, `text_field`, `separator`, `format`, `chat_template` and `train_on`",
            ],
        ),
        ("data", "valid = [\"\"]", vec!["`valid[0]` must be a path, not the string \"\""]),
        (
            "model",
            "rope_scaling = { type = \"llama4\", factor = 2 }",
            vec![
                "`rope_scaling.type` must be \"linear\" or \"llama3\", not the string \"llama4\"; did you mean \"llama3\"?",
            ],
        ),
        (
            "model",
            "rope_scaling = { factor = 2 }",
            vec![
                "`rope_scaling` needs `type`, which is \"linear\" or \"llama3\"; for example `rope_scaling = { type = \"llama3\", factor = 8.0, original_max_position_embeddings = 8192 }`",
            ],
        ),
        (
            "model",
            "rope_scaling = { type = \"llama3\", factor = 0.5 }",
            vec![
                "`rope_scaling.factor` must be a number of at least 1, not 0.5",
                "`rope_scaling` needs `original_max_position_embeddings`; for example `original_max_position_embeddings = 8192`",
            ],
        ),
        (
            "model",
            "rope_scaling = 2",
            vec![
                "`rope_scaling` must be a table whose `type` is \"linear\" or \"llama3\", not 2; for example `rope_scaling = { type = \"llama3\", factor = 8.0, original_max_position_embeddings = 8192 }`",
            ],
        ),
    ];
    for (section, line, expected) in cases {
        assert_eq!(errors_with(section, line), expected, "{line}");
    }
}

#[test]
fn long_and_strange_values_keep_the_message_on_one_line() {
    let long = "x".repeat(5000);
    assert_eq!(
        message("data", &format!("seq_len = \"{long}\"")),
        format!(
            "`seq_len` must be a whole number from 1 to 16777216, not the string \"{}...\"; with a unit it is a string such as \"64K\" or \"64Ki\" (K, M, G or B, T; Ki, Mi, Gi, Ti)",
            "x".repeat(60)
        )
    );
    assert_eq!(message("log", "\"a\\nb\\u001b[2J\" = 1").lines().count(), 1);
}

#[test]
fn a_whole_number_that_is_too_large_for_the_file_hears_of_the_bound() {
    let errors = parse(MINIMAL, &["train.seed=9223372036854775808"]).unwrap_err().to_string();
    assert_message("a whole number that is too large for the file hears of the bound", &errors);
}

#[test]
fn numbers_of_tokens_may_have_units() {
    for (written, tokens) in
        [("\"1M\"", 1_000_000), ("\"10B\"", 10_000_000_000), ("\"1.5M\"", 1_500_000), ("7", 7)]
    {
        let text = MINIMAL.replace("steps = 1000", &format!("tokens = {written}"));
        assert_eq!(parse(&text, &[]).expect("it is right").config.train.tokens, Some(tokens));
    }
    let with = |set: &str| parse(MINIMAL, &[set]).unwrap_or_else(|errors| panic!("{set}: {errors}")).config;
    assert_eq!(with("data.seq_len=2Ki").data.seq_len, 2048);
    assert_eq!(with("eval.tokens=64K").eval.tokens, Some(64_000));
    assert_eq!(with("eval.tokens=0").eval.tokens, Some(0));
    assert_eq!(with("train.loss_chunk=1Ki").train.loss_chunk, OrAuto::Is(1024));
    // The printed configuration has numbers.
    assert!(with("data.seq_len=2Ki").to_toml().contains("seq_len = 2048\n"));
    // The range holds for them too, and other numbers have no unit.
    assert_eq!(
        message("data", "seq_len = \"1G\""),
        "`seq_len` must be a whole number from 1 to 16777216, not 1000000000; for example `seq_len = 1024`"
    );
    for wrong in ["1.5", "M", "64m", "1 M", "-1M", "1MB"] {
        let message = message("data", &format!("seq_len = \"{wrong}\""));
        assert!(message.contains("such as \"64K\" or \"64Ki\""), "{wrong}: {message}");
    }
    assert!(message("train", "batch_size = \"1K\"").contains("not the string \"1K\""));
}
