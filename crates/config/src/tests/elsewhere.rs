//! The tables of names in other programs: each is in one place, and what an answer says to write is accepted.

use crate::messages::assert_message;
use std::collections::{HashMap, HashSet};
use xtrain_checkpoint::suggest::plain;

use super::super::elsewhere::{Answer, aliases, all, with_aliases};
use super::super::schema::{Key, Kind, Section, sections};
use super::super::{advice, is_key};
use super::{MINIMAL, errors, errors_with, minimal, parse};

/// All keys with their sections.
fn keys() -> impl Iterator<Item = (&'static Section, &'static Key)> {
    sections().iter().flat_map(|section| section.keys.iter().map(move |key| (section, key)))
}

/// The parts of a text between backticks.
fn ticked(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// Settings that need others beside them.
fn beside(setting: &str) -> &'static [&'static str] {
    match setting.split([' ', '=']).next().unwrap_or_default() {
        "experts.dense_blocks" => &["model.family=mixtral", "experts.count=4"],
        // Only this family adds biases to scores.
        "experts.balance" => &["model.family=dots1", "experts.count=4"],
        "schedule.decay_shape" => &["schedule.kind=wsd"],
        "adapter.rank" => &["model.init_from=base"],
        "adapter.targets" => &["model.init_from=base", "adapter.rank=16"],
        // Examples of a folder name none that exists, and a folder needs no sizes.
        "train.tokens" => &["train.steps="],
        "model.family" if !setting.contains("mixtral") => &[],
        "model.family" => &["experts.count=4"],
        _ => &[],
    }
}

/// Asserts that a run file takes `section.key = value`.
fn takes(setting: &str) {
    let (key, value) = setting.split_once(" = ").unwrap_or_else(|| panic!("{setting}"));
    let mut sets: Vec<String> = beside(setting).iter().map(|set| (*set).to_owned()).collect();
    if key == "model.family" && ["qwen3_moe", "mixtral", "dots1"].iter().any(|family| value.contains(family))
    {
        sets.push("experts.count=4".into());
    }
    sets.push(format!("{key}={value}"));
    let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
    if let Err(errors) = parse(MINIMAL, &sets) {
        panic!("{setting}: {errors}");
    }
}

#[test]
fn every_setting_of_an_answer_is_accepted() {
    let mut seen = 0;
    for (name, answer) in all() {
        match answer {
            Answer::Write(setting) => takes(setting),
            Answer::Why(why) => {
                assert!(why.len() > 20 && !why.ends_with('.'), "{name}: {why}");
                for part in ticked(why) {
                    match part.contains(" = ") {
                        true => takes(part),
                        false if part.contains(' ') => assert!(part.contains("xtrain "), "{name}: {part}"),
                        false => assert!(is_key(part), "{name}: {part} is no key"),
                    }
                    seen += 1;
                }
            }
        }
    }
    assert!(seen > 100, "{seen}");
}

/// The words that a key of this type takes.
fn words(kind: &Kind) -> Vec<&str> {
    match kind {
        Kind::Choice(words) => words.iter().map(|word| word.name.as_str()).collect(),
        Kind::Either(kinds) => kinds.iter().flat_map(words).collect(),
        _ => Vec::new(),
    }
}

#[test]
fn what_has_an_alias_exists() {
    let mut ours: HashSet<String> = sections().iter().map(|section| section.name.clone()).collect();
    for (section, key) in keys() {
        let path = format!("{}.{}", section.name, key.name);
        ours.extend(words(&key.kind).into_iter().map(|word| format!("{path}={word}")));
        ours.insert(path);
    }
    for name in with_aliases() {
        assert!(ours.remove(name), "{name} is no section, key or value, or has two rows");
        assert!(aliases(name).all(|alias| !alias.is_empty()), "{name}: one space between aliases");
    }
}

#[test]
fn every_name_is_in_one_place() {
    let mut seen: HashMap<String, &str> = HashMap::new();
    let mut wrong = Vec::new();
    for (name, answer) in all() {
        if let Some(before) = seen.insert(plain(name), name) {
            wrong.push(format!("{name} stands twice, as {before} too"));
        }
        let (path, value) = name.split_once('=').map_or((name, None), |(path, value)| (path, Some(value)));
        match (path.split_once('.'), value) {
            // A value of a key of ours: one that the key does not take.
            (Some(_), Some(value)) if is_key(path) => {
                let alone = minimal(&[]);
                let taken = parse(MINIMAL, &[&format!("{path}={value}")]);
                if taken.is_ok_and(|taken| taken.config != alone.config) {
                    wrong.push(format!("{name} is a value of the key"));
                }
                if let Answer::Write(setting) = answer {
                    assert!(setting.starts_with(&format!("{path} = ")), "{name}: {setting}");
                }
            }
            (Some((section, key)), _) => {
                let own = sections().iter().filter(|own| own.name == section);
                let own: Vec<&str> = own
                    .flat_map(|own| &own.keys)
                    .filter(|own| own.is_called(key))
                    .map(|key| &*key.name)
                    .collect();
                if !own.is_empty() {
                    wrong.push(format!("{name} is {own:?}"));
                }
            }
            (None, None) => {
                let known: Vec<String> = keys()
                    .filter(|(_, key)| key.is_called(path))
                    .map(|(section, key)| format!("{}.{}", section.name, key.name))
                    .collect();
                if !known.is_empty() {
                    wrong.push(format!("{name} is {known:?}"));
                }
            }
            (None, Some(_)) => {}
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_value_of_another_program_is_proposed_in_our_form() {
    for (section, written, proposed) in [
        ("train", "gradient_checkpointing = true", "`recompute = \"block\"`"),
        ("train", "gradient_checkpointing = \"True\"", "`recompute = \"block\"`"),
        ("train", "activation_checkpointing = \"selective\"", "`recompute = \"norms\"`"),
        ("parallel", "zero_stage = 3", "`shard = \"weights\"`"),
        ("parallel", "stage = 0", "`shard = \"none\"`"),
        ("parallel", "sharding_strategy = \"SHARD_GRAD_OP\"", "`shard = \"gradients\"`"),
        ("parallel", "fsdp = \"full_shard auto_wrap\"", "`shard = \"weights\"`"),
        ("parallel", "init_timeout_seconds = 300", "`start_timeout = \"5m\"`"),
        ("parallel", "ddp_timeout = 5400", "`timeout = \"1h30m\"`"),
        ("train", "max_hours = 5.5", "`max_time = \"5h30m\"`"),
        ("eval", "prompt = \"Once\"", "`prompts = [\"Once\"]`"),
        ("precision", "mixed_precision = \"bf16\"", "`recipe`"),
        ("precision", "dtype = \"bfloat16\"", "`recipe = \"bf16\"`"),
        ("precision", "recipe_name = \"rowwise\"", "`recipe = \"fp8-row\"`"),
        ("model", "tie_word_embeddings = \"True\"", "`tie_embeddings = true`"),
        ("model", "model_type = \"llama3\"", "`family = \"llama\"`"),
        ("train", "max_steps = \"5_000\"", "`steps = 5000`"),
        ("train", "num_train_epochs = 3", "`epochs`"),
        ("optimizer", "learning_rate = \"1e-4\"", "`lr = 0.0001`"),
        ("schedule", "lr_scheduler_type = \"constant_with_warmup\"", "`kind = \"constant\"`"),
    ] {
        let said = errors_with(section, written);
        assert!(said[0].contains(&format!("did you mean {proposed}?")), "{written}: {said:?}");
    }
    for (section, written, why) in [
        ("precision", "dtype = \"float16\"", "did you mean `recipe`? `recipe` must be "),
        ("model", "model_type = \"gpt2\"", "learned positions are not supported"),
        (
            "train",
            "max_steps = -1",
            "the length of a run is one of `train.steps`, `train.tokens` and `train.epochs`",
        ),
        ("train", "max_steps = -1.5", "the length of a run is one of"),
        ("train", "max_steps = 0", "`steps` must be a whole number of at least 1, not 0"),
        ("model", "rms_norm_eps = 0", "`norm_eps` must be a number greater than 0"),
    ] {
        let said = errors_with(section, written);
        assert!(said[0].contains(why), "{written}: {said:?}");
    }
}

#[test]
fn keys_of_adapters_in_other_programs_are_answered_with_ours() {
    for (section, written, said) in [
        ("train", "use_lora = true", "did you mean `rank = 16` in [adapter]?"),
        ("train", "use_peft = true", "did you mean `rank = 16` in [adapter]?"),
        ("train", "finetuning_type = \"lora\"", "did you mean `rank = 16` in [adapter]?"),
        ("train", "lora_r = 8", "did you mean `rank` in [adapter]?"),
        ("model", "lora_rank = 8", "did you mean `rank` in [adapter]?"),
        ("train", "lora_alpha = 16", "did you mean `alpha` in [adapter]?"),
        ("train", "lora_dropout = 0.05", "did you mean `dropout` in [adapter]?"),
        ("train", "lora_target_modules = [\"q_proj\"]", "did you mean `targets` in [adapter]?"),
        ("train", "lora_target = \"all\"", "did you mean `targets = \"all-linear\"` in [adapter]?"),
        ("train", "lora_target_linear = true", "did you mean `targets = \"all-linear\"` in [adapter]?"),
        ("adapter", "r = 8", "did you mean `rank`?"),
        ("adapter", "target_modules = [\"q_proj\"]", "did you mean `targets`?"),
        ("adapter", "targets = \"q_proj,v_proj\"", "for example `targets = [\"q_proj\", \"v_proj\"]`"),
        ("adapter", "targets = \"all\"", "must be \"all-linear\", or a list"),
        ("train", "adapter = \"lora\"", "did you mean `rank = 16` in [adapter]?"),
        ("train", "adapter = \"qlora\"", "weights of 4 bits are not supported"),
        ("train", "use_dora = true", "plain LoRA adapters of linear layers"),
        ("parallel", "rank = 0", "several machines need a launcher"),
        ("train", "rank = 0", "several machines need a launcher"),
    ] {
        let found = errors_with(section, written);
        assert!(found.len() == 1 && found[0].contains(said), "{section} {written}: {found:?}");
    }
}

#[test]
fn a_switch_that_is_off_is_left_out() {
    for (section, written) in
        [("train", "fp16 = false"), ("train", "use_lora = \"False\""), ("log", "wandb = 0")]
    {
        let said = errors_with(section, written);
        assert!(said[0].contains("; leave it out; "), "{said:?}");
    }
}

#[test]
fn an_answer_to_an_off_switch_itself_does_not_say_to_leave_it_out() {
    for (section, written) in [
        ("train", "train_on_inputs = false"),
        ("data", "packing = false"),
        ("data", "shuffle = \"no\""),
        ("model", "swiglu = false"),
        ("eval", "eval_strategy = \"no\""),
        ("schedule", "decay_lr = 0"),
        ("parallel", "reshard_after_forward = \"never\""),
    ] {
        let said = errors_with(section, written);
        assert!(!said[0].contains("leave it out") && !said[0].contains("turns it on"), "{said:?}");
    }
    let said = errors_with("log", "report_to = \"none\"");
    assert_eq!(said[0].matches("leave it out").count(), 1, "{said:?}");
    let said = errors_with("train", "remove_unused_columns = false");
    assert_eq!(said[0].matches("leave it out").count(), 1, "{said:?}");
}

#[test]
fn sections_of_other_programs_are_answered_key_by_key() {
    let said = errors(&format!(
        "{MINIMAL}[training]\nlocal_batch_size = 4\nseed = 1\n[zero_optimization]\nstage = 2\n[lora]\nr = 8\nuse_dora = true\n[fp16]\nenabled = true\n"
    ));
    let lines: Vec<&str> = said.lines().collect();
    assert!(lines[0].ends_with("unknown section [training]; did you mean [train]?"), "{said}");
    assert!(
        lines[1].ends_with("[training] unknown key `local_batch_size`; did you mean `micro_batch_size`?"),
        "{said}"
    );
    assert!(lines[2].ends_with("unknown section [zero_optimization]; did you mean [parallel]?"), "{said}");
    assert!(lines[3].ends_with("unknown key `stage`; did you mean `shard = \"gradients\"`?"), "{said}");
    assert!(lines[4].ends_with("unknown section [lora]; did you mean [adapter]?"), "{said}");
    assert!(lines[5].ends_with("[lora] unknown key `r`; did you mean `rank`?"), "{said}");
    assert_message("sections of other programs are answered key by key", lines[6]);
    assert_message("sections of other programs are answered key by key, 2", lines[7]);
    assert_eq!(lines.len(), 8, "{said}");

    let said =
        errors(&format!("learning_rate = 2e-5\npacking = true\noptimizer = \"adamw_torch\"\n{MINIMAL}"));
    assert_message("sections of other programs are answered key by key, 3", &said);
}

#[test]
fn an_argument_is_answered_with_the_argument_to_write() {
    for (set, said) in [
        ("zero_optimization.stage=3", "did you mean --set parallel.shard=weights?"),
        ("training.local_batch_size=4", "did you mean --set train.micro_batch_size=4?"),
        ("train.bf16=true", "did you mean --set precision.recipe=bf16?"),
        ("train.fp16=true", "--set precision.recipe=bf16"),
        ("activation_checkpoint.mode=full", "did you mean --set train.recompute=block?"),
        ("optimizer.beta2=0.99", "--set 'optimizer.betas=[0.9, 0.95]'"),
        ("lora.r=8", "did you mean --set adapter.rank=8?"),
        ("peft.use_dora=true", "other kinds, adapters of experts"),
    ] {
        let errors = parse(MINIMAL, &[set]).expect_err(set).to_string();
        assert!(errors.contains(said) && errors.lines().count() == 1, "{set}: {errors}");
    }
}

#[test]
fn an_option_is_known_by_the_setting_that_it_means() {
    for (name, value, text, exact) in [
        ("lr", Some("1e-3"), "--set optimizer.lr=1e-3", true),
        ("batch-size", Some("4"), "--set train.batch_size=4", true),
        ("optimizer.lr", Some("1"), "--set optimizer.lr=1", true),
        (
            "tokens",
            Some("1M"),
            "--set train.tokens=1M --set train.steps= --set train.epochs= or --set eval.tokens=1M",
            true,
        ),
        ("learning-rate", None, "--set optimizer.lr=VALUE", true),
        ("warmup-step", Some("3"), "--set schedule.warmup_steps=3", false),
        ("optimiser.lr", Some("3"), "--set optimizer.lr=3", true),
        ("backend", Some("nccl"), "--set parallel.transport=nccl", true),
        ("gradient_checkpointing", None, "--set train.recompute=block", true),
        ("max_hours", Some("2"), "--set train.max_time=2h", true),
        ("bf16", Some("False"), "--set precision.recipe=fp32", true),
        ("fp8", Some("False"), "leave it out; --set precision.recipe=fp8-block turns it on", true),
        ("save_strategy", Some("no"), "write --set checkpoint.every=0", true),
        ("reshard_after_forward", Some("never"), "write --set parallel.shard=gradients", true),
        ("optimizer.params.lr", Some("3"), "--set optimizer.lr=3", true),
        ("fp16.enabled", Some("true"), "fp16 is not supported", true),
    ] {
        let said = advice(name, value).unwrap_or_else(|| panic!("{name}"));
        assert!(said.text.contains(text) && said.exact == exact, "{name}: {said:?}");
    }
    assert_eq!(advice("colour", None), None);
}
