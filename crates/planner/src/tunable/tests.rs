use super::*;
use crate::choose;
use crate::estimate::Device;
use crate::planned::{Planned, plan_alone};
use std::path::Path;
use xtrain_config::{OrAuto, TrainConfig};
use xtrain_rank::Rank;
use xtrain_step::engine::Target;

/// A run file that leaves everything open that a run can choose.
const OPEN: &str = "[model]\ndim = 32\nlayers = 4\nheads = 2\nffn_dim = 96\nvocab_size = 4096\n\
                    [data]\ntrain = 'a.txt'\ntokenizer = 'bytes'\nseq_len = 64\n\
                    [train]\nsteps = 9\nbatch_size = 12\nmicro_batch_size = 'auto'\n";

/// The lines of `[train]` in the config.toml of three runs, which chose for memory that was ample, short, and
/// shorter.
const RECORDED: [&str; 3] = [
    "micro_batch_size = 12  # chosen when the run began\n\
     recompute = \"none\"  # chosen when the run began\n\
     loss_chunk = 4096  # chosen when the run began\n",
    "micro_batch_size = 6  # chosen when the run began\n\
     recompute = \"norms\"  # chosen when the run began\n\
     recompute_blocks = 3  # chosen when the run began\n\
     loss_chunk = 256  # chosen when the run began\n",
    "micro_batch_size = 2  # chosen when the run began\n\
     recompute = \"block\"  # chosen when the run began\n\
     loss_chunk = 256  # chosen when the run began\n",
];

fn config(text: &str, sets: &[&str]) -> xtrain_config::Parsed {
    Config::parse(Path::new("run.toml"), text.as_bytes(), sets).expect("a run file")
}

/// The configuration of a run that recorded these lines.
fn recorded(lines: &str) -> Config {
    config(&OPEN.replace("micro_batch_size = 'auto'\n", lines), &[]).config
}

/// A run file with these settings, resumed by so many ranks in a run with these recorded lines, while the
/// command line asks for a new choice of the keys in `asked`.
fn resumed(sets: &[&str], lines: &str, ranks: usize, asked: &[&str]) -> Planned {
    let planned = plan_alone(&config(OPEN, sets), Target::Cuda, Rank::first_of(ranks)).expect("a plan");
    // Another device, with memory for everything.
    let device = Device::model("h200").expect("it is in the table");
    let (planned, _) =
        choose::decide_for_resumed(planned, &recorded(lines), |key| asked.contains(&key), &device)
            .expect("a choice");
    planned
}

/// The lines of a configuration with a key that runs choose.
fn chosen_lines(planned: &Planned) -> String {
    let comments: Vec<_> = planned.chosen.iter().map(|field| (field.key, choose::COMMENT)).collect();
    let text = planned.resolved.config.to_toml_with(&comments);
    let is_row =
        |line: &&str| TUNABLE.iter().any(|row| line.starts_with(&format!("{} = ", row.field.name())));
    text.lines().filter(is_row).map(|line| format!("{line}\n")).collect()
}

#[test]
fn resumed_runs_keep_what_they_recorded_on_another_device() {
    for lines in RECORDED {
        assert_eq!(chosen_lines(&resumed(&[], lines, 1, &[])), lines);
    }
}

#[test]
fn the_loss_chunk_is_the_same_on_any_number_of_ranks_whose_bits_are() {
    let is_open = |reduce: &str| {
        let sets = [&format!("parallel.reduce={reduce}"), "train.micro_batch_size=1"];
        let config = config(OPEN, &sets).config;
        open(&config).iter().any(|row| row.field.key == LOSS_CHUNK.field.key)
    };
    assert_eq!(["same-world", "fast", "any-world", "any-mesh"].map(is_open), [true, true, false, false]);
}

#[test]
fn what_is_asked_for_or_does_not_suit_is_chosen_again() {
    let [_, norms, _] = RECORDED;
    let again = resumed(&[], norms, 1, &["train.recompute"]);
    assert!(chosen_lines(&again).contains("recompute = \"none\"  # chosen"), "the device has room");
    // Four ranks cannot share micro-batches of 6, and a batch of 24 has others.
    for (sets, ranks, of_a_rank) in [(&[][..], 4, 3_usize), (&["train.batch_size=24"], 1, 24)] {
        let found = resumed(sets, norms, ranks, &[]);
        let size = found.spec.batch.sequences;
        assert!(of_a_rank.is_multiple_of(size) && size != 6, "{size}");
        assert_eq!((found.spec.recompute, found.spec.recompute_blocks), (Recompute::Norms, Some(3)));
    }
    // A number of blocks belongs to its policy.
    let other = ["train.recompute=block", "train.recompute_blocks=auto"];
    assert!(chosen_lines(&resumed(&other, norms, 1, &[])).contains("recompute_blocks = 0  # chosen"));
}

#[test]
fn values_need_ever_less_and_are_set_as_they_are_read() {
    let planned = resumed(&[], RECORDED[1], 1, &[]);
    let step = TunedStep { spec: &planned.spec, batch_size: 12 };
    let own = step.settings();
    let of = |row: &Tunable| -> Vec<Value> {
        (row.values)(&step, own).iter().map(|settings| (row.value)(settings)).collect()
    };
    assert_eq!(of(&RECOMPUTE), ["norms", "block"]);
    assert_eq!(of(&RECOMPUTE_BLOCKS), [json!(1), json!(2), json!(3), json!(null)]);
    assert_eq!(of(&LOSS_CHUNK), [512, 256]);
    assert_eq!(of(&MICRO_BATCH_SIZE), [12, 6, 4, 3, 2, 1]);
    for row in TUNABLE {
        for settings in (row.values)(&step, own) {
            let mut config = planned.resolved.config.clone();
            row.field.set(&mut config, (row.value)(&settings)).expect("a value of the key");
            assert_eq!((row.field.get)(&config), (row.value)(&settings));
            let changes = own.changes(&settings);
            assert!(
                changes.len() <= 2 && TunedStep { spec: &step.with(settings), ..step }.settings() == settings
            );
        }
        assert!(row.field.set(&mut planned.resolved.config.clone(), json!([])).is_err());
    }
}

#[test]
fn rows_are_the_keys_that_the_configuration_lists() {
    assert_eq!(TUNABLE.map(|row| row.field.key), TrainConfig::CHOSEN_KEYS);
    let open = config(OPEN, &[]).config;
    // No ranks share experts.
    assert_eq!(super::open(&open).len(), TUNABLE.len() - 1);
}

/// A mixture whose experts four ranks share.
const EXPERTS: [&str; 5] = [
    "model.family=qwen3_moe",
    "experts.count=8",
    "experts.ffn_dim=256",
    "parallel.expert=4",
    "data.seq_len=256",
];

#[test]
fn a_room_for_every_routing_is_recorded_as_the_capacity_that_holds_every_routing() {
    let parsed = config(OPEN, &EXPERTS);
    let planned = plan_alone(&parsed, Target::Cuda, Rank::first_of(4)).expect("a plan");
    let h200 = Device::model("h200").expect("it is in the table");
    let capacity = |device: &Device| {
        let (planned, choice) = choose::decide(planned.clone(), device).expect("a choice");
        let capacity = planned.resolved.config.experts.capacity.and_then(OrAuto::number);
        (capacity, planned.spec.room().is_some(), choice.expect("open settings").to_string())
    };
    // A token has two experts, and a rank has two: all tokens of four ranks, instead of a quarter.
    let (ample, has_limit, _) = capacity(&h200);
    assert_eq!((ample, has_limit), (Some(4.0), false));
    // Also if the state alone does not fit, the least is that with less room.
    for bytes in [1 << 20, 150 << 20] {
        let (least, has_limit, text) = capacity(&h200.clone().with_memory(bytes));
        assert!(text.contains("the least memory"), "{text}");
        assert_eq!((least, has_limit), (Some(1.5), true), "{text}");
    }
}
