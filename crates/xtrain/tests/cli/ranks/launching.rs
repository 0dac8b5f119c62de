//! The launchers of processes: options, environments, and what does not fit together.

use super::{SHARED, environment, free_port};
use crate::place::{Place, finish};
use std::net::TcpListener;

#[test]
fn half_an_environment_is_refused() {
    let place = Place::new();
    let mut command = place.command("train run.toml --out out");
    command.env("RANK", "0").env("WORLD_SIZE", "2");
    let needed = ["LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "not set"];
    finish(command, "half of torchrun's variables").refuses(&needed);
    let mut command = place.command("train run.toml --out out");
    command.env("OMPI_COMM_WORLD_SIZE", "2");
    finish(command, "half of Open MPI's variables").refuses(&["OMPI_COMM_WORLD_RANK"]);
    let mut command = place.command("train run.toml --out out");
    command.env("SLURM_STEP_NUM_TASKS", "2").env("SLURM_JOB_ID", "7");
    finish(command, "half of Slurm's variables").refuses(&["SLURM_PROCID"]);
    // Rank 1 of 2 must not train alone, nor hear how it would.
    let mut command = place.command("train run.toml --out out");
    command.envs([
        ("RANK", "1"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "29500"),
    ]);
    let ran = finish(command, "a pod of two");
    ran.refuses(&["LOCAL_RANK=0 and LOCAL_WORLD_SIZE=1"]);
    for variables in
        [[("PMIX_RANK", "1"), ("PMIX_NAMESPACE", "x")], [("FLUX_TASK_RANK", "0"), ("FLUX_JOB_SIZE", "2")]]
    {
        let mut command = place.command("train run.toml --out out");
        command.envs(variables);
        finish(command, "an unsupported launcher").refuses(&["started this process as rank", variables[0].0]);
    }
    assert!(!place.exists("out"));
}

#[test]
fn a_launcher_of_one_process_is_none() {
    let place = Place::new();
    place.train("alone", "--set train.steps=3");
    let mut command = place.command("train run.toml --out out --set train.steps=3");
    environment(&mut command, 0, 1, free_port());
    finish(command, "one process").succeeds();
    // It may start others on its GPUs, and the variables of a pod's place on its node say nothing.
    let mut command = place.command(&format!("train run.toml --out ranks --ranks 2 {SHARED}"));
    command.envs([("RANK", "0"), ("WORLD_SIZE", "1")]);
    finish(command, "a pod that starts ranks").succeeds();
    let [a, b] = ["alone", "out"].map(|out| place.path(&format!("{out}/hf/model.safetensors")));
    crate::place::assert_same_file(&a, &b);
}

#[test]
fn ranks_of_mpich_are_one_run() {
    let place = Place::new();
    let port = free_port().to_string();
    let mut started: Vec<_> = (0..2)
        .map(|rank: usize| {
            let mut command = place.command(&format!("train run.toml --out out {SHARED}"));
            let rank = rank.to_string();
            command.envs([("PMI_RANK", &*rank), ("PMI_SIZE", "2"), ("MPI_LOCALRANKID", &rank)]);
            command.envs([("MPI_LOCALNRANKS", "2"), ("XTRAIN_PORT", &port)]);
            std::thread::spawn(move || finish(command, "a rank of MPICH"))
        })
        .collect();
    started.drain(..).for_each(|rank| drop(rank.join().expect("it ran").succeeds()));
    place.train("alone", &format!("{SHARED} --ranks 2"));
    let [a, b] = ["alone", "out"].map(|out| place.path(&format!("{out}/hf/model.safetensors")));
    crate::place::assert_same_file(&a, &b);
}

#[test]
fn variables_of_nccl_are_reported_once() {
    let place = Place::new();
    let mut command = place.command("train run.toml --out out --ranks 2 --set train.steps=3");
    command.env("NCCL_DEBUG", "WARN");
    let ran = finish(command, "a variable of NCCL").succeeds();
    assert_eq!(ran.stderr.matches("NCCL_DEBUG=WARN").count(), 1, "{}", ran.stderr);
}

#[test]
fn options_and_launchers_are_not_both_given() {
    let place = Place::new();
    let mut command = place.command("train run.toml --out out --ranks 2");
    environment(&mut command, 0, 2, free_port());
    finish(command, "--ranks in torchrun").refuses(&["torchrun", "rank 0 of 2", "leave out --ranks"]);
    place.run("train run.toml --ranks 2 --gpus 2").refuses(&["--ranks", "--gpus"]);
    place.run("train run.toml --ranks 0").refuses(&["--ranks"]);
    place
        .run("train run.toml --ranks 2 --set train.device=cuda")
        .refuses(&["--ranks 2", "train.device=cuda"]);
}

#[test]
fn more_gpus_than_the_machine_has_are_refused() {
    let place = Place::new();
    let mut command = place.command("train run.toml --out out --gpus 8");
    command.env("CUDA_VISIBLE_DEVICES", "");
    finish(command, "8 GPUs").refuses(&["--gpus 8", "no GPU"]);
    assert!(!place.exists("out"));
}

#[test]
fn a_batch_that_the_ranks_cannot_share_is_refused_with_sizes_that_would_do() {
    let place = Place::new();
    place.run("train run.toml --out out --ranks 3").refuses(&[
        "`batch_size` = 4",
        "3 ranks",
        "`batch_size = 3` or `batch_size = 6`",
    ]);
    place
        .run("train run.toml --out out --ranks 2 --set train.micro_batch_size=4")
        .refuses(&["`micro_batch_size` = 4", "try `micro_batch_size = 2`"]);
    assert!(!place.exists("out"));
}

#[test]
fn ways_to_share_that_do_not_fit_the_ranks_are_refused() {
    let place = Place::new();
    place
        .run(&format!("train run.toml --out out --ranks 3 {SHARED} --set parallel.reduce=any-world"))
        .refuses(&["any-world", "a power of two, not 3"]);
    place
        .run(&format!(
            "train run.toml --out out --ranks 2 {SHARED} --set parallel.reduce=any-world --set parallel.reduce_dtype=bf16"
        ))
        .refuses(&["any-world", "reduce_dtype"]);
    place
        .run(&format!(
            "train run.toml --out out --ranks 2 {SHARED} --set parallel.reduce=fast --set parallel.reduce_dtype=bf16"
        ))
        .refuses(&["fast", "reduce_dtype", "NCCL adds"]);
    place.run(&format!("train run.toml --out out --ranks 3 {SHARED} --set parallel.replicas=2")).refuses(&[
        "[parallel] 3 ranks cannot be divided into `replicas` = 2 groups",
        "try `replicas = 1` or `replicas = 3`",
    ]);
    place
        .run("train run.toml --set parallel.hsdp=2")
        .refuses(&["parallel.shard=weights", "`parallel.replicas`"]);
    place.run("train run.toml --set parallel.shard=zero1").refuses(&["did you mean \"optimizer\"?"]);
    assert!(!place.exists("out"));
}

#[test]
fn a_port_in_use_is_named() {
    let place = Place::new();
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("an address").port();
    let mut command = place.command("train run.toml --out out");
    environment(&mut command, 0, 2, port);
    finish(command, "a port in use").refuses(&[&format!("port {port}"), "XTRAIN_PORT"]);
    assert!(!place.exists("out"));
}

#[test]
fn a_rank_that_never_comes_is_named_after_the_time_for_starting() {
    let place = Place::new();
    let mut command = place.command("train run.toml --out out --set parallel.start_timeout=2s");
    environment(&mut command, 0, 3, free_port());
    finish(command, "rank 0 alone").refuses(&["rank 1-2 did not come within 2 s"]);
    // The secret of the run is gone with it.
    assert_eq!(place.names("."), ["a.txt", "b.txt", "continued.toml", "run.toml"]);
    let mut command = place.command("train run.toml --out out --set parallel.start_timeout=2s");
    environment(&mut command, 2, 3, free_port());
    finish(command, "rank 2 alone").refuses(&["rank 2", "did not reach rank 0"]);
}

#[test]
fn other_commands_run_in_one_process() {
    let place = Place::new();
    place.train("out", "--set train.steps=2");
    for command in ["eval out", "generate out --prompt the", "export out --out hf", "report out"] {
        let mut started = place.command(command);
        environment(&mut started, 1, 2, free_port());
        finish(started, command).refuses(&["only `xtrain train`", "torchrun has started 2"]);
    }
}
