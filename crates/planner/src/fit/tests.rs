use super::*;
use std::path::Path;
use xtrain_config::Config;
use xtrain_program::{Parallel, Shard};
use xtrain_rank::Rank;
use xtrain_step::programs;

/// A model whose memory is mostly activations, and these mostly logits.
const RUN: &str = "[model]\ndim = 32\nlayers = 4\nheads = 2\nvocab_size = 4096\n[data]\ntrain = 'a.txt'\ntokenizer = 'bytes'\n\
                   seq_len = 256\n[train]\nsteps = 1\nbatch_size = 12\n";

/// Threads of the CPU in these tests.
const THREADS: usize = 3;

fn planned(text: &str, set: &[&str], target: Target) -> (TrainingSpec, usize) {
    let run = Config::parse(Path::new("run.toml"), text.as_bytes(), set).expect("a run file");
    let planned = crate::planned::plan_alone(&run, target, Rank::ALONE).expect("a plan");
    (planned.spec, planned.resolved.config.train.batch_size)
}

/// Bytes that a step of `RUN` needs with these settings.
fn needed(set: &[&str], target: Target) -> u64 {
    let (spec, batch_size) = planned(RUN, set, target);
    Fit::new(&spec, target, THREADS, batch_size, Room::new(u64::MAX)).expect("a plan").needed_bytes
}

fn fit(target: Target, available: u64) -> Fit {
    let (spec, batch_size) = planned(RUN, &[], target);
    Fit::new(&spec, target, THREADS, batch_size, Room::new(available)).expect("a plan")
}

#[test]
fn the_last_byte_decides_and_kernels_and_libraries_count() {
    for target in [Target::Cpu, Target::Cuda] {
        let (spec, _) = planned(RUN, &[], target);
        let program = programs::training(&spec).expect("a program");
        let beside = target.work_bytes(&[&program], THREADS) as u64
            + target.library_bytes()
            + target.process_bytes(&[&program], spec.model.vocab_size);
        let needed = target.plan(&program).total_bytes() as u64 + beside;
        assert!(beside > 0);
        assert_eq!(fit(target, needed).verdict, Verdict::Fits);
        fit(target, needed).check("it").expect("it fits");
        let message = fit(target, needed - 1).check("the GPU").expect_err("it does not").to_string();
        assert!(message.contains("but the GPU has "), "{message}");
        let norms = "what would fit: --set train.recompute=norms --set train.recompute_blocks=1 (";
        assert!(message.contains(norms), "{message}");
    }
}

#[test]
fn reference_segments_are_the_first_to_be_left_out() {
    let fp8 = ["precision.recipe=fp8-row", "precision.reference_every=9", "precision.reference_steps=9"];
    for target in [Target::Cpu, Target::Cuda] {
        let (with, without) = (needed(&fp8, target), needed(&fp8[..1], target));
        let (spec, batch_size) = planned(RUN, &fp8, target);
        let of = |room| Fit::new(&spec, target, THREADS, batch_size, Room::new(room)).expect("a plan");
        // At least the bf16 weights of the blocks; on a CPU the copied state is in the same memory.
        let program = programs::training(&spec).expect("a program");
        let aside = if target == Target::Cpu { programs::saved_bytes(&program) as u64 } else { 0 };
        assert!(with > without + aside, "{with} and {without}");
        assert_eq!(of(with).verdict, Verdict::Fits);
        let left_out = |room| match of(room).verdict {
            Verdict::WouldFit(alternatives) => alternatives,
            other => panic!("{other}"),
        };
        let only = Alternative { settings: vec!["precision.reference_every=0".into()], bytes: without };
        for room in [without, with - 1] {
            assert_eq!(left_out(room), std::slice::from_ref(&only));
        }
        // First the problem, then settings that fit without segments.
        let (plain, _) = planned(RUN, &fp8[..1], target);
        let fit = Fit::new(&plain, target, THREADS, batch_size, Room::new(without - 1)).expect("a plan");
        let Verdict::WouldFit(alternatives) = fit.verdict else { panic!("something fits") };
        let mut told = left_out(without - 1);
        told.iter_mut().for_each(|alternative| {
            assert_eq!(alternative.settings.remove(0), "precision.reference_every=0")
        });
        assert_eq!(told, alternatives);
    }
}

#[test]
fn each_way_needs_what_it_says_and_fits() {
    for target in [Target::Cpu, Target::Cuda] {
        let all = needed(&[], target);
        let floor =
            needed(&["train.recompute=block", "train.loss_chunk=256", "train.micro_batch_size=1"], target);
        let mut seen = 0;
        for step in 0..=40 {
            let available = floor + (all - 1 - floor) * step / 40;
            let Verdict::WouldFit(alternatives) = fit(target, available).verdict else {
                panic!("{available}: nothing")
            };
            for alternative in &alternatives {
                assert!(alternative.bytes <= available, "{alternative} in {available}");
                let set: Vec<&str> = alternative.settings.iter().map(String::as_str).collect();
                assert_eq!(needed(&set, target), alternative.bytes, "{alternative}");
            }
            seen |= alternatives.iter().map(|alternative| 1 << alternative.settings.len()).sum::<u64>();
        }
        // Single settings, pairs and all three were needed.
        assert_eq!(seen & 0b1110, 0b1110, "{target:?}");
    }
}

#[test]
fn norms_are_recomputed_in_no_more_blocks_than_must_be_and_beside_a_larger_micro_batch() {
    for target in [Target::Cpu, Target::Cuda] {
        let two = needed(&["train.recompute=norms", "train.recompute_blocks=2"], target);
        let Verdict::WouldFit(alternatives) = fit(target, two).verdict else { panic!("something fits") };
        assert_eq!(alternatives[0].settings, ["train.recompute=norms", "train.recompute_blocks=2"]);
        let all = needed(&["train.recompute=norms"], target);
        let Verdict::WouldFit(alternatives) = fit(target, all).verdict else { panic!("something fits") };
        assert_eq!(alternatives[0].settings, ["train.recompute=norms"]);
        // Six sequences at a time fit with norms, and without them fewer.
        let six = needed(&["train.recompute=norms", "train.micro_batch_size=6"], target);
        let Verdict::WouldFit(alternatives) = fit(target, six).verdict else { panic!("something fits") };
        let both = alternatives.iter().find(|alternative| {
            alternative.settings == ["train.recompute=norms", "train.micro_batch_size=6"]
        });
        assert_eq!(both.map(|alternative| alternative.bytes), Some(six), "{alternatives:?}");
    }
}

#[test]
fn a_run_that_recomputes_is_offered_more_of_the_same() {
    let target = Target::Cuda;
    let offered = |set: &[&str], available| {
        let (spec, batch_size) = planned(RUN, set, target);
        match Fit::new(&spec, target, THREADS, batch_size, Room::new(available)).expect("a plan").verdict {
            Verdict::WouldFit(alternatives) => alternatives[0].settings.clone(),
            other => panic!("{other}"),
        }
    };
    let of = |blocks: &str| needed(&["train.recompute=norms", blocks], target);
    let one = ["train.recompute=norms", "train.recompute_blocks=1"];
    assert_eq!(offered(&one, of("train.recompute_blocks=3")), ["train.recompute_blocks=3"]);
    assert_eq!(offered(&one, of("train.recompute_blocks=")), ["train.recompute_blocks="]);
}

#[test]
fn memory_that_others_hold_is_told() {
    let (spec, batch_size) = planned(RUN, &[], Target::Cuda);
    let said = |available_bytes, alone_bytes| {
        let room = Room { available_bytes, alone_bytes };
        let fit = Fit::new(&spec, Target::Cuda, THREADS, batch_size, room).expect("a plan");
        fit.check("the GPU").expect_err("too little").to_string()
    };
    let needed = needed(&[], Target::Cuda);
    let rest = "available, because other programs hold the rest of its 80.00 GiB; ";
    assert!(said(needed - 1, 80 << 30).contains(&format!("{rest}what would fit: ")));
    let nothing = said(1 << 20, 80 << 30);
    assert!(nothing.contains(&format!("{rest}nothing fits: ")), "{nothing}");
    assert!(nothing.contains("; end the other programs (`nvidia-smi` lists those on a GPU)"), "{nothing}");
    // Segments are not to blame if the step does not fit without them either.
    assert!(!said(1 << 20, 2 << 20).contains("other programs"));
}

/// As [`fit`], for a step of two ranks with micro-batches of `sequences`. Each rank has `available` bytes.
fn fit_of_two(sequences: usize, shard: Shard, available: u64) -> Fit {
    let set = format!("train.micro_batch_size={sequences}");
    let (mut spec, batch_size) = planned(RUN, &[&set], Target::Cuda);
    (spec.parallel.rank.world_size, spec.parallel.shard) = (2, shard);
    Fit::new(&spec, Target::Cuda, THREADS, batch_size, Room::new(available)).expect("a plan")
}

#[test]
fn ranks_divide_the_optimizers_state_before_anything_gets_slower() {
    let needed = fit_of_two(6, Shard::None, u64::MAX).needed_bytes;
    let Verdict::WouldFit(found) = fit_of_two(6, Shard::None, needed - 1).verdict else { panic!("it fits") };
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].settings, ["parallel.shard=optimizer"]);
    let needed = fit_of_two(6, Shard::Optimizer, u64::MAX).needed_bytes;
    for shard in [Shard::None, Shard::Optimizer] {
        let Verdict::WouldFit(found) = fit_of_two(6, shard, needed - 1).verdict else { panic!("it fits") };
        assert_eq!(found[0].settings, ["parallel.shard=weights"], "{shard:?}");
    }
}

#[test]
fn fewer_replicas_divide_the_state_among_more_ranks() {
    let fit_of_four = |replicas, available| {
        let (mut spec, batch_size) = planned(RUN, &["train.micro_batch_size=3"], Target::Cuda);
        spec.parallel =
            Parallel { rank: Rank::first_of(4), replicas, shard: Shard::Weights, ..Parallel::ALONE };
        Fit::new(&spec, Target::Cuda, THREADS, batch_size, Room::new(available)).expect("a plan")
    };
    let [one, two] = [1, 2].map(|replicas| fit_of_four(replicas, u64::MAX).needed_bytes);
    assert!(one < two);
    for (available, setting) in [(two, "parallel.replicas=2"), (one, "parallel.replicas=1")] {
        let Verdict::WouldFit(found) = fit_of_four(4, available).verdict else { panic!("it fits") };
        assert_eq!((found.len(), &*found[0].settings), (1, &[setting.to_owned()][..]));
    }
    // Then the other settings, with groups as large as possible.
    let Verdict::WouldFit(found) = fit_of_four(2, one - 1).verdict else { panic!("it fits") };
    assert!(found.iter().all(|found| found.settings[0] == "parallel.replicas=1"), "{found:?}");
}

#[test]
fn ranks_can_share_the_micro_batches_that_are_suggested() {
    // Three micro-batches of four sequences would fit, but two ranks cannot share them.
    let needed = fit_of_two(4, Shard::Optimizer, u64::MAX).needed_bytes;
    let Verdict::WouldFit(found) = fit_of_two(6, Shard::Optimizer, needed).verdict else { panic!("it fits") };
    let settings: Vec<_> = found.iter().flat_map(|alternative| &alternative.settings).collect();
    assert!(settings.iter().any(|setting| *setting == "train.micro_batch_size=3"), "{settings:?}");
}

#[test]
fn the_micro_batch_is_the_largest_that_divides_the_batch_and_fits() {
    let target = Target::Cuda;
    let four = needed(&["train.micro_batch_size=4"], target);
    let Verdict::WouldFit(alternatives) = fit(target, four).verdict else { panic!("something fits") };
    let micro = alternatives
        .iter()
        .find(|alternative| alternative.settings[0].starts_with("train.micro_batch_size="));
    assert_eq!(micro.expect("a smaller micro-batch").settings, ["train.micro_batch_size=4"]);
}

#[test]
fn where_nothing_fits_it_is_said_with_what_no_setting_makes_less() {
    let message = fit(Target::Cuda, 1 << 20).check("it").expect_err("too little").to_string();
    let least = "nothing fits: even --set optimizer.moments=bf16 --set train.recompute=block --set train.loss_chunk=256 --set train.micro_batch_size=1 (";
    assert!(message.contains(least) && message.contains("choose a smaller model"), "{message}");
    // A head of 4096 rows cannot be divided among more.
    assert!(message.contains(" number of GPUs up to "), "{message}");
    let on_cpu = fit(Target::Cpu, 1 << 20).check("it").expect_err("too little").to_string();
    assert!(on_cpu.contains("; choose a smaller model") && !on_cpu.contains("GPUs"), "{on_cpu}");
}

/// The first block is dense, so fewer blocks may have no experts.
#[test]
fn a_mixture_that_is_too_large_is_told_how_many_of_its_layers_would_fit() {
    let mixture = [
        "model.family=qwen3_moe",
        "experts.count=8",
        "experts.ffn_dim=512",
        "experts.dense_blocks=[0]",
        "optimizer.moments=bf16",
        "train.recompute=block",
        "train.loss_chunk=256",
        "train.micro_batch_size=1",
    ];
    for target in [Target::Cpu, Target::Cuda] {
        let (spec, batch_size) = planned(RUN, &mixture, target);
        for left in 1..4 {
            let fewer = TrainingSpec { model: spec.model.truncated(left), ..spec.clone() };
            let fewer = Fit::new(&fewer, target, THREADS, batch_size, Room::new(u64::MAX)).expect("a plan");
            let room = Room::new(fewer.needed_bytes);
            let fit = Fit::new(&spec, target, THREADS, batch_size, room).expect("a plan");
            let message = fit.check("it").expect_err("too little").to_string();
            assert!(message.contains(&format!(": {left} of its 4 layers would fit")), "{left}: {message}");
        }
    }
}

#[test]
fn a_batch_that_many_gpus_cannot_share_grows() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/llama3_8b.toml");
    let run = std::fs::read_to_string(file).expect("the example");
    let sets = ["model.vocab_size=128256", "train.batch_size=2"];
    for (ranks, replicas, reduce) in [(1, 1, "same-world"), (2, 2, "any-world"), (2, 1, "fast")] {
        let reduce = format!("parallel.reduce={reduce}");
        let (mut spec, batch_size) = planned(&run, &[sets[0], sets[1], &reduce], Target::Cuda);
        spec.parallel = Parallel { rank: Rank::first_of(ranks), replicas, ..spec.parallel };
        let room = Room::new(24 << 30);
        let fit = Fit::new(&spec, Target::Cuda, THREADS, batch_size, room).expect("a plan");
        let Verdict::Nothing { least, instead, .. } = fit.verdict else { panic!("{}", fit.verdict) };
        assert!(least.bytes > 24 << 30);
        let Some(MoreGpus { count, bytes, batch_size: Some(batch_size) }) = instead.gpus else {
            panic!("no number of GPUs")
        };
        assert_eq!((count, batch_size), (8, 8), "{reduce}");
        assert!(bytes <= 24 << 30);
        let said = instead.to_string();
        assert!(
            said.contains("`--gpus 8 --set parallel.shard=weights --set train.batch_size=8` each needs"),
            "{said}"
        );
    }
}

#[test]
fn llama_3_8b_does_not_fit_into_a_small_card() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/llama3_8b.toml");
    let run = std::fs::read_to_string(file).expect("the example");
    let (spec, batch_size) = planned(&run, &["model.vocab_size=128256"], Target::Cuda);
    let message =
        Fit::new(&spec, Target::Cuda, THREADS, batch_size, Room::new(24 << 30)).expect("a plan").check("it");
    let message = message.expect_err("too little").to_string();
    // Masters and gradients in fp32, two moments, and the bf16 copies for GEMMs.
    assert!(message.contains("104.71 GiB of it for weights, gradients and moments"), "{message}");
    let instead = "; on 8 GPUs it does: with these settings and `--gpus 8 --set parallel.shard=weights` each needs 21.60 GiB; or \
                   choose a smaller model: 3 of its 32 layers would fit. `xtrain plan` lists what needs it";
    assert!(message.ends_with(instead), "{message}");
}

/// The fit of a mixture on a rank of four that share experts, with these settings.
fn fit_of_experts(set: &[&str], available: u64) -> Fit {
    let all = [
        "model.family=qwen3_moe",
        "experts.count=8",
        "experts.ffn_dim=256",
        "optimizer.moments=bf16",
        "parallel.expert=4",
        "parallel.shard=weights",
    ];
    let run =
        Config::parse(Path::new("run.toml"), RUN.as_bytes(), &[&all, set].concat()).expect("a run file");
    let planned = crate::planned::plan_alone(&run, Target::Cuda, Rank::first_of(4)).expect("a plan");
    let batch_size = planned.resolved.config.train.batch_size;
    Fit::new(&planned.spec, Target::Cuda, THREADS, batch_size, Room::new(available)).expect("a plan")
}

#[test]
fn less_room_for_rows_of_experts_is_offered_and_is_part_of_the_least() {
    let [every, small, least] = [
        &[][..],
        &["experts.capacity=1.5"],
        &[
            "experts.capacity=1.5",
            "train.recompute=block",
            "train.loss_chunk=256",
            "train.micro_batch_size=1",
        ],
    ]
    .map(|set| fit_of_experts(set, u64::MAX).needed_bytes);
    assert!(small < every && least < small, "{every} {small} {least}");
    let Verdict::WouldFit(found) = fit_of_experts(&[], small).verdict else { panic!("it does not fit") };
    assert_eq!((&*found[0].settings, found[0].bytes), (&["experts.capacity=1.5".to_owned()][..], small));
    // With the least memory of all settings it fits, and with a byte less not.
    let Verdict::WouldFit(found) = fit_of_experts(&[], least).verdict else { panic!("it does not fit") };
    let has_room = |found: &Alternative| found.settings.contains(&"experts.capacity=1.5".to_owned());
    assert!(found.iter().all(|found| has_room(found) && found.bytes <= least), "{found:?}");
    let Verdict::Nothing { least: found, .. } = fit_of_experts(&[], least - 1).verdict else {
        panic!("it fits")
    };
    assert!(has_room(&found) && found.bytes == least, "{found:?}");
    // A room that the run file makes smaller stays, and one for every routing is made smaller.
    let Verdict::Nothing { least: found, .. } = fit_of_experts(&["experts.capacity=1.0"], 1 << 20).verdict
    else {
        panic!("it fits")
    };
    assert!(found.settings.iter().all(|setting| !setting.contains("capacity")), "{found:?}");
    let Verdict::WouldFit(found) = fit_of_experts(&["experts.capacity=64"], small).verdict else {
        panic!("it does not fit")
    };
    assert_eq!(found[0].settings, ["experts.capacity=1.5"]);
}
