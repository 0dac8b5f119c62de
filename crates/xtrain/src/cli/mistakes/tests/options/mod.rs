//! The options that users of other programs type first, each with its answer.
//!
//! Each is typed as an option of `xtrain train` and written as `--set section.name=value`. The names are
//! those of torchtitan's config (b5bcd76c, and the TOML files before it), nanoGPT's train.py, TRL's
//! SFTConfig and ModelConfig with transformers' TrainingArguments (5.x), axolotl's schema, DeepSpeed's
//! configuration and launcher, accelerate's launcher and configuration, torchrun, llm.c, llmq, and a few of
//! Megatron-LM, nanochat and LLaMA-Factory.

mod launchers;
mod trainers;

use super::{RUN, said};
use launchers::{ACCELERATE, DEEPSPEED, OTHERS, TORCHRUN};
use std::path::Path;
use trainers::{AXOLOTL, NANOGPT, TORCHTITAN, TRL};
use xtrain_config::{Config, is_key};

/// An option with its value, and the answer: a setting, or words of the reason why there is none.
type Answers = &'static [(&'static str, &'static str)];

/// All lists, with the section under which a name without one is written.
const PROGRAMS: [(&str, Answers); 8] = [
    ("train", TORCHTITAN),
    ("train", NANOGPT),
    ("train", TRL),
    ("train", AXOLOTL),
    ("parallel", DEEPSPEED),
    ("parallel", ACCELERATE),
    ("parallel", TORCHRUN),
    ("train", OTHERS),
];

#[test]
fn every_option_that_people_type_first_has_its_answer() {
    let mut wrong = Vec::new();
    for (_, answers) in PROGRAMS {
        for (option, answer) in answers {
            let (name, value) =
                option.split_once('=').map_or((*option, None), |(name, value)| (name, Some(value)));
            let flag = format!("--{name}");
            let args: Vec<&str> = ["train", "run.toml", &flag].into_iter().chain(value).collect();
            // An option of ours is no mistake.
            let Some(line) = said(&args) else { continue };
            check(&format!("--{option}"), &line, answer, &mut wrong);
        }
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn every_key_that_people_write_first_has_its_answer() {
    let mut wrong = Vec::new();
    for (section, answers) in PROGRAMS {
        for (option, answer) in answers {
            let (name, value) = option.split_once('=').unwrap_or((option, "true"));
            let path = match name.contains('.') {
                true => name.to_owned(),
                false => format!("{section}.{name}"),
            };
            let set = format!("{path}={value}");
            let Err(errors) = Config::parse(Path::new("run.toml"), RUN, &[set.as_str()]) else {
                // Only a key of ours is taken, and it is the one of the answer.
                let taken = answer.split('=').next().unwrap_or_default();
                if !is_key(&path) || (is_key(taken) && taken != path) {
                    wrong.push(format!("--set {set} is taken"));
                }
                continue;
            };
            let line = errors.errors()[0].message.clone();
            check(&format!("--set {set}"), &line, answer, &mut wrong);
        }
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}

/// True if `line` proposes the key (`train.steps`), with this value if it is not the one that was written.
fn proposes(line: &str, key: &str, value: &str) -> bool {
    let bare = line.replace(['`', '"', '\'', ' '], "");
    let (section, name) = key.split_once('.').unwrap_or(("", key));
    let number = |text: &str| text.split(['?', ';', ',']).next().and_then(|text| text.parse::<f64>().ok());
    let is_equal = |written: &str| number(written).is_some() && number(written) == number(value);
    let ways = [
        format!("{key}={value}"),
        format!("{name}={value}"),
        // The value that was written stays.
        format!("didyoumean{name}?"),
        format!("didyoumean{name}in[{section}]?"),
        format!("didyoumean[{section}]?"),
        format!("itbelongsin[{section}]"),
        // A value of theirs for a key of ours.
        format!("didyoumean{value}?"),
    ];
    ways.iter().any(|way| bare.contains(way)) || bare.split(&format!("{key}=")).skip(1).any(is_equal)
}

/// Adds to `wrong` if `line`, about `mistake`, does not give `answer`, or tells to set what no run file
/// takes.
fn check(mistake: &str, line: &str, answer: &str, wrong: &mut Vec<String>) {
    let names_key = answer.split_once('=').is_some_and(|(key, _)| is_key(key));
    let names_it = match answer.split_once('=').filter(|(key, _)| is_key(key)) {
        Some((key, value)) => proposes(line, key, value),
        None if is_key(answer) => proposes(line, answer, ""),
        None => line.contains(answer),
    };
    let is_list = line.contains("lists them")
        || line.contains("the keys of [") && !line.contains("AdamW is the default");
    // A key is proposed to be set, not to be left at its default.
    let is_opposite = names_key && (line.contains("turns it on") || line.contains("leave it out; "));
    if !answer.is_empty() && (!names_it || is_opposite || is_list || line.contains('\n') || line.len() > 400)
    {
        wrong.push(format!("{mistake}: {line}\n    not: {answer}"));
    }
    for sets in proposals(line) {
        let is_unknown = |set: &str| set.ends_with("=VALUE") || set == "section.key=value";
        if sets.iter().any(|set| is_unknown(set)) || sets.iter().all(|set| set.ends_with('=')) {
            continue;
        }
        let beside = sets.iter().flat_map(|set| beside(set.split('=').next().unwrap_or_default()));
        let all: Vec<&str> = beside.copied().chain(sets.iter().copied()).collect();
        if let Err(errors) = Config::parse(Path::new("run.toml"), RUN, &all) {
            wrong.push(format!("{mistake}: {line}\n    {sets:?}: {errors}"));
        }
    }
}

/// The settings of each proposal of a line: those that follow each other belong together.
fn proposals(line: &str) -> Vec<Vec<&str>> {
    let mut all: Vec<Vec<&str>> = Vec::new();
    let mut follows = false;
    for text in line.split("--set ").skip(1) {
        let (set, rest) = match text.strip_prefix('\'') {
            Some(quoted) => quoted.split_once('\'').unwrap_or((quoted, "")),
            None => text.split_at(text.find([' ', ';', '?', ',', ')']).unwrap_or(text.len())),
        };
        let set = set.trim_end_matches(['.', ':']);
        match all.last_mut().filter(|_| follows) {
            Some(before) => before.push(set),
            None => all.push(vec![set]),
        }
        follows = rest == " ";
    }
    all
}

/// The settings without which a run file takes no value of a key, and which are a choice of their own: a
/// mixture of experts, sizes that divide each other, a folder in place of sizes.
fn beside(key: &str) -> &'static [&'static str] {
    match key {
        "experts.balance" | "experts.bias_rate" => &["model.family=dots1", "experts.count=8"],
        _ if key.starts_with("experts.") => &["model.family=mixtral", "experts.count=8"],
        "model.heads" => &["model.dim=768"],
        "model.kv_heads" => &["model.heads=4"],
        "train.micro_batch_size" => &["train.batch_size=64"],
        "model.init_from" => &["model.dim=", "model.layers=", "model.heads="],
        "adapter.rank" => &["model.init_from=base", "model.dim=", "model.layers=", "model.heads="],
        _ if key.starts_with("adapter.") => {
            &["model.init_from=base", "model.dim=", "model.layers=", "model.heads=", "adapter.rank=16"]
        }
        _ => &[],
    }
}
