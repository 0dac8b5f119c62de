//! Rules between keys, each message in full.

use super::{MINIMAL, errors, errors_with, minimal, parse};
use crate::Facts;
use crate::messages::assert_message;

fn message(section: &str, lines: &str) -> String {
    let errors = errors_with(section, lines);
    assert_eq!(errors.len(), 1, "{errors:?}");
    errors[0].clone()
}

/// The message for overrides of the minimal configuration.
fn message_of(sets: &[&str]) -> String {
    let errors = parse(MINIMAL, sets).expect_err("the settings contradict each other");
    assert_eq!(errors.errors().len(), 1, "{errors}");
    errors.errors()[0].message.clone()
}

#[test]
fn an_empty_file_says_what_every_run_needs() {
    assert_eq!(
        errors(""),
        "runs/x.toml: [model] `dim` is missing; for example `dim = 512`, or name a Hugging Face folder with `init_from`\n\
         runs/x.toml: [model] `layers` is missing; for example `layers = 8`\n\
         runs/x.toml: [model] `heads` is missing; for example `heads = 8`\n\
         runs/x.toml: [data] `train` is missing; for example `train = \"data/corpus.txt\"`\n\
         runs/x.toml: [train] the length of the run is missing: give `steps`, `tokens` or `epochs`; for example `steps = 1000`"
    );
}

#[test]
fn sums_for_any_mesh_need_a_size_of_micro_batches_that_no_mesh_changes() {
    for size in ["", "micro_batch_size = \"auto\"\n"] {
        let errors = errors(&format!("{MINIMAL}{size}[parallel]\nreduce = \"any-mesh\"\n"));
        assert!(errors.contains("\"any-mesh\"` has equal"), "{errors}");
        assert!(errors.contains("`micro_batch_size = 1`"), "{errors}");
    }
    let fits = format!("{MINIMAL}micro_batch_size = 1\n[parallel]\nreduce = \"any-mesh\"\n");
    assert!(parse(&fits, &[]).is_ok());
}

#[test]
fn a_missing_key_is_reported_at_its_section() {
    assert_eq!(
        errors(&MINIMAL.replace("layers = 2\n", "")),
        "runs/x.toml:1: [model] `layers` is missing; for example `layers = 8`"
    );
}

#[test]
fn a_missing_key_is_reported_at_the_file_if_only_an_argument_made_its_section() {
    let without = MINIMAL.split("[train]").next().expect("a section");
    let errors = parse(without, &["train.seed=1"]).expect_err("the length is missing");
    assert!(
        errors.to_string().starts_with("runs/x.toml: [train] the length of the run is missing"),
        "{errors}"
    );
}

#[test]
fn a_misspelt_or_broken_key_is_not_also_missing() {
    for wrong in ["n_layer = 2", "layers = \"2\"", "layes = 2"] {
        let errors = parse(&MINIMAL.replace("layers = 2", wrong), &[]).unwrap_err();
        assert_eq!(errors.errors().len(), 1, "{errors}");
    }
}

#[test]
fn gradients_between_ranks_are_rounded_or_added_otherwise_but_not_both() {
    let bf16 = "reduce_dtype = \"bf16\"";
    for (reduce, why) in [
        ("any-world", "the bits of one process, which rounds no gradients"),
        ("fast", "sums in bf16 lose gradients"),
    ] {
        let errors = errors(&format!("{MINIMAL}[parallel]\nreduce = \"{reduce}\"\n{bf16}\n"));
        assert!(errors.contains("[parallel] `reduce` and `reduce_dtype` are both given, but"), "{errors}");
        assert!(errors.contains(why) && errors.ends_with("; leave one out"), "{errors}");
    }
    let copies = errors(&format!("{MINIMAL}[parallel]\nreduce = \"fast\"\ntransport = \"copy\"\n"));
    assert_message("gradients between ranks are rounded or added otherwise but not both", &copies);
    for fits in
        [format!("reduce = \"same-world\"\n{bf16}"), "reduce = \"fast\"\ntransport = \"nccl\"".to_owned()]
    {
        assert!(parse(&format!("{MINIMAL}[parallel]\n{fits}\n"), &[]).is_ok(), "{fits}");
    }
}

/// A run of a mixture: MINIMAL with this family and these keys of `[experts]`.
fn with_experts(family: &str, keys: &str) -> String {
    MINIMAL.replace("[model]\n", &format!("[model]\nfamily = \"{family}\"\n")) + "[experts]\n" + keys
}

#[test]
fn experts_belong_to_families_that_have_them() {
    let dense = parse(&format!("{MINIMAL}[experts]\ncount = 8\n"), &[]).expect("a file");
    let error = dense.resolve(&Facts::default()).expect_err("no experts").to_string();
    assert_message("experts belong to families that have them", &error);
    let file = with_experts("mixtral", "count = 8\nper_token = 2\n");
    let dense = parse(&file, &["model.family=qwen3"]).expect("a file");
    let error = dense.resolve(&Facts::default()).expect_err("no experts").to_string();
    assert_message("experts belong to families that have them, 2", &error);
    let error = errors(&with_experts("mixtral", ""));
    assert_message("experts belong to families that have them, 3", &error);
    assert!(parse(&with_experts("qwen3_moe", "count = 4\n"), &[]).is_ok());
}

#[test]
fn experts_must_fit_each_other() {
    // The last line of the keys is the one that is wrong.
    for (family, keys, says) in [
        ("mixtral", "count = 4\nper_token = 5\n", "a token chooses 5 experts, but there are only 4"),
        ("mixtral", "count = 4\nnormalise = false\n", "gates must be normalised"),
        ("mixtral", "count = 4\ndense_blocks = [0]\n", "no block can be dense"),
        ("qwen3_moe", "count = 4\ngroups = 3\n", "divide the number of experts (4)"),
        ("qwen3_moe", "count = 4\ngroups = 2\n", "experts cannot be in groups"),
        ("qwen3_moe", "count = 4\nscore = \"sigmoid\"\n", "scores must be \"softmax\""),
        ("qwen3_moe", "count = 4\nper_token = 2\ngroups = 5\n", "divide the number of experts (4)"),
        ("qwen3_moe", "count = 4\nshared_ffn_dim = 8\n", "no expert can be shared"),
        ("qwen3_moe", "count = 4\nscale = 2.0\n", "scale must be 1"),
        (
            "qwen3_moe",
            "count = 4\ndense_blocks = [2]\n",
            "`dense_blocks` has 2, but the blocks of the model are 0 to 1",
        ),
        (
            "qwen3_moe",
            "count = 4\ndense_blocks = [5000]\n",
            "`dense_blocks` has 5000, but the blocks of the model are 0 to 1",
        ),
        ("qwen3_moe", "count = 4\ndense_blocks = [0, 1]\n", "all blocks are dense; leave one with experts"),
        ("dots1", "count = 4\ndense_blocks = [1]\n", "dense blocks must be the first ones"),
        (
            "dots1",
            "count = 4\nffn_dim = 8\nshared_ffn_dim = 12\n",
            "the width of the shared expert must be a multiple of `experts.ffn_dim`",
        ),
        ("dots1", "count = 4\ngroups = 4\n", "a group must have at least 2 experts"),
        ("dots1", "per_token = 1\ncount = 1\n", "a group must have at least 2 experts"),
        ("dots1", "count = 4\nshared_ffn_dim = 0\n", "there must be a shared expert"),
        ("qwen3_moe", "count = 4\nbalance = \"bias\"\n", "a qwen3_moe model has no bias on its scores"),
        (
            "qwen3_moe",
            "count = 4\nbalance = \"none\"\nbalance_loss = 0.1\n",
            "`balance_loss` is for `balance = \"loss\"`, not \"none\"",
        ),
        (
            "qwen3_moe",
            "count = 4\nbalance = \"loss\"\nbias_rate = 0.1\n",
            "`bias_rate` is for `balance = \"bias\"`, not \"loss\"",
        ),
        (
            "dots1",
            "count = 4\nbalance_loss = 0.1\n",
            "`balance_loss` is for `balance = \"loss\"`, and a dots1 model has `balance = \"bias\"` by default; leave",
        ),
        (
            "mixtral",
            "count = 4\nbias_rate = 0.1\n",
            "`bias_rate` is for `balance = \"bias\"`, and a mixtral model has `balance = \"loss\"` by default; leave",
        ),
    ] {
        let text = with_experts(family, keys);
        let errors = parse(&text, &[]).expect("a file").resolve(&Facts::default()).expect_err(keys);
        assert_eq!(errors.errors().len(), 1, "{keys}: {errors}");
        let error = errors.to_string();
        assert!(error.contains(says) && error.contains("[experts]"), "{keys}: {error}");
        let place = format!("runs/x.toml:{}: ", text.lines().count());
        assert!(error.starts_with(&place), "{keys}: {place} {error}");
    }
}

#[test]
fn experts_have_defaults() {
    let parsed = parse(&with_experts("qwen3_moe", "count = 8\ndense_blocks = [0]\n"), &[]).expect("a file");
    let resolved = parsed.resolve(&Facts::default()).expect("it fits");
    let text = resolved.config.to_toml();
    let section = "[experts]\ncount = 8\nper_token = 2\nffn_dim = 192\nshared_ffn_dim = 0\nscore = \"softmax\"\nnormalise = true\n\
                   scale = 1.0\ngroups = 1\ntop_groups = 1\ndense_blocks = [0]\nbalance = \"loss\"\nbalance_loss = 0.001\nz_loss = 0.0\nwire = \"auto\"\n";
    assert!(text.contains(section), "{text}");
}

#[test]
fn a_resolved_file_with_experts_resolves_to_itself() {
    for (family, keys) in [
        ("qwen3_moe", "dense_blocks = [0]\n"),
        ("mixtral", "balance_loss = 0.02\n"),
        ("mixtral", "balance = \"none\"\n"),
        ("dots1", "bias_rate = 0.01\n"),
        ("dots1", "balance = \"loss\"\nbalance_loss = 0.1\n"),
    ] {
        let parsed = parse(&with_experts(family, &format!("count = 8\n{keys}")), &[]).expect(keys);
        let resolved = parsed.resolve(&Facts::default()).expect(keys);
        let again =
            parse(&resolved.config.to_toml(), &[]).expect(keys).resolve(&Facts::default()).expect(keys);
        assert_eq!(again.architecture, resolved.architecture, "{family}: {keys}");
        assert_eq!(again.config, resolved.config, "{family}: {keys}");
    }
}

#[test]
fn heads_and_widths_must_fit() {
    assert_eq!(
        message("model", "kv_heads = 3"),
        "`kv_heads` = 3 does not divide `heads` = 4; try `kv_heads = 2` or `kv_heads = 4`"
    );
    assert_eq!(
        message("model", "kv_heads = 8"),
        "`kv_heads` = 8 does not divide `heads` = 4; try `kv_heads = 4`"
    );
    assert_eq!(
        message_of(&["model.heads=5"]),
        "`heads` = 5 does not divide `dim` = 64; change one of them, or give `head_dim`"
    );
    assert_eq!(
        message("model", "head_dim = 17"),
        "`head_dim` = 17 must be even, because RoPE rotates pairs of features"
    );
    assert_eq!(
        message_of(&["model.dim=36", "model.heads=4"]),
        "`head_dim` = 9, which is `dim / heads`, must be even, because RoPE rotates pairs of features"
    );
    minimal(&["model.heads=5", "model.head_dim=16"]);
}

#[test]
fn a_block_that_no_family_has_cannot_be_exported() {
    assert_eq!(
        message("model", "qk_norm = false"),
        "`qkv_bias` = false with `qk_norm` = false is no \"qwen3\" model, so other programs could not load its export; leave both \
         keys out, or set `checkpoint.export_hf = false`"
    );
    minimal(&["model.qk_norm=false", "checkpoint.export_hf=false"]);
    minimal(&["model.family=qwen2", "model.qkv_bias=true", "model.qk_norm=false"]);
}

#[test]
fn sequences_fit_into_the_positions() {
    assert_eq!(
        message("model", "max_position_embeddings = 512"),
        "`max_position_embeddings` is 512, less than `data.seq_len` = 1024; raise it (with `rope_scaling`, if the model was \
         trained on less), or shorten `data.seq_len`"
    );
    assert_eq!(
        message(
            "model",
            "rope_scaling = { type = \"llama3\", factor = 8, low_freq_factor = 4, original_max_position_embeddings = 8192 }"
        ),
        "`rope_scaling.high_freq_factor` = 4 must be greater than `low_freq_factor` = 4"
    );
}

#[test]
fn validation_data_come_from_one_place() {
    assert_eq!(
        message("data", "valid = \"v.txt\"\nheld_out = 0.1"),
        "`held_out` and `valid` are both given, but validation data come from one of them; leave one out"
    );
    assert_eq!(
        message_of(&["data.held_out=0", "eval.every=10"]),
        "`every` = 10 needs validation data, but `data.held_out` is 0; give `data.valid`, or set `every = 0`"
    );
    assert_eq!(
        message_of(&["eval.every=0", "checkpoint.keep_best=true"]),
        "`keep_best` needs evaluations during the run; set `eval.every`, or `keep_best = false`"
    );
    minimal(&["data.held_out=0"]);
}

#[test]
fn weights_are_given_to_all_sources_or_to_none() {
    assert_eq!(
        message("data", "valid = [{ path = \"a\", weight = 2 }, \"b\"]"),
        "`valid` gives some sources a `weight` but not \"b\"; give one to all or to none"
    );
}

#[test]
fn the_vocabulary_keys_fit_the_tokenizer() {
    assert_eq!(
        message("data", "tokenizer = \"chars\"\nbpe_vocab_size = 512"),
        "`bpe_vocab_size` = 512 needs `tokenizer = \"bpe\"`; leave it out"
    );
    assert_eq!(
        message_of(&["model.init_from=models/q", "data.tokenizer=bytes"]),
        "`tokenizer` = \"bytes\" creates a vocabulary that does not fit the weights of `model.init_from`; leave it out to use the \
         folder's own. docs/data-format.md says what changing a vocabulary needs"
    );
}

#[test]
fn one_key_says_how_long_to_train() {
    assert_eq!(
        message("train", "tokens = 1000"),
        "`tokens` and `steps` are both given, but one of them says how long to train; leave one out"
    );
    assert_eq!(
        message("train", "epochs = 2"),
        "`epochs` and `steps` are both given, but one of them says how long to train; leave one out"
    );
}

#[test]
fn a_number_of_blocks_needs_to_know_what_they_recompute() {
    assert_eq!(
        message("train", "recompute_blocks = 5"),
        "`recompute_blocks` = 5 needs `recompute` = \"norms\" or \"block\"; with \"auto\", its default, both are chosen"
    );
    for given in ["recompute_blocks=auto", "loss_chunk=auto", "micro_batch_size=auto", "loss_chunk=64"] {
        minimal(&[&format!("train.{given}")]);
    }
    minimal(&["train.recompute_blocks=5", "train.recompute=norms"]);
    assert_eq!(
        message("train", "loss_chunk = \"most\""),
        "`loss_chunk` must be a whole number from 1 to 1073741824, or \"auto\", not the string \"most\"; for example `loss_chunk = \"auto\"`"
    );
}

#[test]
fn micro_batches_divide_the_batch() {
    assert_eq!(
        message("train", "batch_size = 12\nmicro_batch_size = 5"),
        "`micro_batch_size` = 5 does not divide `batch_size` = 12; try `micro_batch_size = 4` or `micro_batch_size = 6`"
    );
}

#[test]
fn the_schedule_fits_into_the_run() {
    assert_eq!(
        message("schedule", "warmup_steps = 2000"),
        "`warmup_steps` is 2000, but the run has only 1000 steps; give fewer, or train longer"
    );
    assert_eq!(
        message("schedule", "kind = \"wsd\"\nwarmup_steps = 900\ndecay_steps = 200"),
        "900 steps of warmup and 200 of decay do not fit into a run of 1000 steps; shorten one of them"
    );
    let tokens = MINIMAL.replace("steps = 1000", "tokens = 81920");
    assert_eq!(
        parse(&tokens, &["schedule.warmup_steps=11"]).unwrap_err().to_string(),
        "--set schedule.warmup_steps=11: [schedule] `warmup_steps` is 11, but the run has only 10 steps; give fewer, or train longer"
    );
}

#[test]
fn the_learning_rate_falls() {
    assert_eq!(
        message("schedule", "min_lr = 0.01"),
        "`min_lr` = 0.01 is greater than `optimizer.lr` = 0.0003; lower one or raise the other"
    );
    assert_eq!(
        message("schedule", "min_lr = 1e-5\nmin_lr_ratio = 0.5"),
        "`min_lr` and `min_lr_ratio` are both given, but both give the final learning rate; leave one out"
    );
}

#[test]
fn keys_of_another_schedule_are_refused() {
    assert_eq!(
        message("schedule", "decay_fraction = 0.2"),
        "`decay_fraction` has no meaning for `kind = \"cosine\"`; leave it out, or choose \"wsd\""
    );
    assert_eq!(
        message("schedule", "kind = \"constant\"\nmin_lr = 0"),
        "`min_lr` has no meaning for `kind = \"constant\"`; leave it out, or choose \"linear\", \"cosine\" or \"wsd\""
    );
    assert_eq!(
        message("schedule", "kind = \"wsd\"\ndecay_steps = 10\ndecay_fraction = 0.2"),
        "`decay_fraction` and `decay_steps` are both given, but both give the length of the final decay; leave one out"
    );
}

#[test]
fn kept_checkpoints_are_ones_that_are_saved() {
    assert_eq!(
        message("checkpoint", "every = 100\nkeep_every = 250"),
        "`keep_every` = 250 is not a multiple of `every` = 100, so no such step is saved; make it one"
    );
    assert_eq!(
        message("checkpoint", "every = 0\nkeep_every = 250"),
        "`keep_every` = 250 is not a multiple of `every` = 0, so no such step is saved; make it one"
    );
}

#[test]
fn what_is_to_be_left_out_of_the_file_is_said_with_the_argument_that_does_it() {
    let text = MINIMAL.replace("[data]\n", "[data]\nbpe_vocab_size = 512\nheld_out = 0.1\n");
    for (set, said, mended) in [
        ("data.tokenizer=bytes", "; leave it out with --set data.bpe_vocab_size=", "data.bpe_vocab_size="),
        ("train.tokens=5000", "; leave one out, the file's with --set train.steps=", "train.steps="),
        ("data.valid=v.txt", "; leave one out, the file's with --set data.held_out=", "data.held_out="),
    ] {
        let message = parse(&text, &[set]).unwrap_err().to_string();
        assert!(message.ends_with(said), "{message}");
        parse(&text, &[set, mended]).unwrap_or_else(|e| panic!("{mended}: {e}"));
    }
}

#[test]
fn numbers_that_f32_does_not_hold_are_refused() {
    for (key, value, shown) in [
        ("optimizer.eps", "1e-50", "1e-50"),
        ("optimizer.lr", "1e39", "1e+39"),
        ("optimizer.lr", "1e-60", "1e-60"),
        ("optimizer.weight_decay", "1e300", "1e+300"),
        ("optimizer.grad_clip", "1e-50", "1e-50"),
        ("model.init_std", "1e300", "1e+300"),
        ("experts.scale", "1e39", "1e+39"),
        ("experts.balance_loss", "1e-46", "1e-46"),
        ("experts.bias_rate", "1e-46", "1e-46"),
        ("experts.z_loss", "1e-46", "1e-46"),
    ] {
        let name = key.split_once('.').expect("a section").1;
        let expected = format!(
            "`{name}` = {shown} is out of the range of f32, in which it is used; give a number from 1e-45 to 3e38"
        );
        assert_eq!(message_of(&[&format!("{key}={value}")]), expected);
    }
    assert_eq!(
        message_of(&["optimizer.betas=[0.9, 0.99999999]"]),
        "`betas` has 0.99999999, which is 1 in f32, so that a moment would never move; give at most 0.9999999"
    );
    assert_eq!(
        message_of(&["optimizer.kind=muon", "optimizer.momentum=0.99999999"]),
        "`momentum` = 0.99999999 is 1 in f32, so that the moment would never move; give at most 0.9999999"
    );
    parse(MINIMAL, &["optimizer.weight_decay=0", "optimizer.grad_clip=0", "optimizer.eps=1e-40"])
        .expect("zero is meant, and small numbers are held");
}

#[test]
fn a_batch_that_ranks_cannot_share_evenly_is_refused_with_sizes_that_would_do() {
    let refused = |sets: &[&str], ranks: usize| {
        let facts = Facts { world_size: Some(ranks), tokenizer_vocab_size: Some(300), ..Facts::default() };
        minimal(sets).resolve(&facts).map(|_| ()).map_err(|errors| errors.to_string())
    };
    for (sets, ranks) in [
        (&["train.batch_size=8"][..], 4),
        (&["train.batch_size=8", "train.micro_batch_size=2"], 2),
        (&["train.batch_size=6", "train.micro_batch_size=\"auto\""], 3),
        (&["train.batch_size=6"], 1),
    ] {
        assert_eq!(refused(sets, ranks), Ok(()), "{sets:?} {ranks}");
    }
    for (sets, ranks, advice) in [
        (&["train.batch_size=6"][..], 4, "try `batch_size = 4` or `batch_size = 8`"),
        (&["train.batch_size=2"], 3, "by 3 ranks; try `batch_size = 3`"),
        (&["train.batch_size=16"], 3, "try `batch_size = 15` or `batch_size = 18`"),
        (
            &["train.batch_size=16", "train.micro_batch_size=4"],
            3,
            "by 3 ranks; try `batch_size = 12` or `batch_size = 24`",
        ),
        (&["train.batch_size=8", "train.micro_batch_size=8"], 2, "evenly; try `micro_batch_size = 4`"),
        (
            &["train.batch_size=12", "train.micro_batch_size=4"],
            2,
            "`micro_batch_size = 3` or `micro_batch_size = 6`",
        ),
    ] {
        let said = refused(sets, ranks).expect_err("an uneven batch");
        assert!(said.contains(advice), "{said}");
    }
}

#[test]
fn ranks_that_cannot_be_divided_into_replicas_or_added_as_a_tree_are_refused_where_the_key_is() {
    let said = |sets: &[&str], ranks: usize| {
        let sets = [&["train.batch_size=42"], sets].concat();
        minimal(&sets).check_shared(ranks).map_err(|errors| errors.to_string()).err().unwrap_or_default()
    };
    for ranks in [1, 3, 6] {
        assert_eq!(said(&["parallel.replicas=3"], ranks), "");
    }
    for (replicas, advice) in [(4, "`replicas = 3` or `replicas = 6`"), (7, "`replicas = 6`")] {
        let set = format!("parallel.replicas={replicas}");
        let expected = format!(
            "--set {set}: [parallel] 6 ranks cannot be divided into `replicas` = {replicas} groups of equal size; \
             try {advice}, or another number of ranks"
        );
        assert!(said(&[&set], 6).ends_with(&expected), "{}", said(&[&set], 6));
    }
    let any = said(&["parallel.reduce=any-world"], 3);
    assert_message(
        "ranks that cannot be divided into replicas or added as a tree are refused where the key is",
        &any,
    );
    assert_eq!(said(&["parallel.reduce=any-world"], 2), "");
}

#[test]
fn each_rank_has_one_micro_batch_unless_the_file_says_otherwise() {
    let facts = Facts { world_size: Some(4), tokenizer_vocab_size: Some(300), ..Facts::default() };
    let config = minimal(&["train.batch_size=8"]).resolve(&facts).expect("a configuration").config;
    assert_eq!(config.train.micro_batch_size(), 2);
}

#[test]
fn times_in_which_no_rank_can_answer_are_refused() {
    for key in ["timeout", "start_timeout"] {
        let errors = errors(&format!("{MINIMAL}[parallel]\n{key} = \"100ms\"\n"));
        assert!(errors.contains(&format!("`{key}` is 100ms; give at least 1s")), "{errors}");
    }
}
