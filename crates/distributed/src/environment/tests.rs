//! The environments of real launchers, recorded in `tests/environments`, and variations of them.

use super::*;

fn recorded(file: &str) -> Variables {
    let path = format!("{}/tests/environments/{file}.txt", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .filter_map(|line| line.split_once('='))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}

fn changed(file: &str, changes: &[(&str, &str)]) -> Variables {
    let before = recorded(file);
    let before =
        before.with_prefix("").filter(|(name, _)| changes.iter().all(|(changed, _)| changed != name));
    before.chain(changes.iter().copied()).collect()
}

fn detected(variables: &Variables) -> Environment {
    Environment::detect(variables).expect("a complete environment").expect("a launcher")
}

fn refused(variables: &Variables) -> String {
    Environment::detect(variables).expect_err("a wrong environment").to_string()
}

fn world(numbers: [usize; 4], address: &str, port: u16) -> World {
    let [rank, world_size, local_rank, local_world_size] = numbers;
    World { rank, world_size, local_rank, local_world_size, address: address.into(), port }
}

#[test]
fn torchrun_gives_rank_address_and_port() {
    let environment = detected(&recorded("torchrun-standalone"));
    assert_eq!(environment.launcher, Launcher::Torchrun);
    assert_eq!(environment.world, world([1, 2, 1, 2], "localhost", 46197));
    assert_eq!(detected(&recorded("torchrun-c10d")).world.port, 45927);
}

#[test]
fn the_port_of_torchruns_agent_is_left_to_it() {
    assert_eq!(detected(&recorded("torchrun-static")).world.port, 29512);
    assert_eq!(detected(&changed("torchrun-static", &[("XTRAIN_PORT", "4000")])).world.port, 4000);
    // In torch 1.13 the agent of `--standalone` left it free; in 2.15 it holds it.
    assert_eq!(
        detected(&recorded("torchrun-2.15-standalone")).world,
        world([1, 2, 1, 2], "localhost", 33306)
    );
    assert!(refused(&changed("torchrun-static", &[("MASTER_PORT", "65535")])).contains("XTRAIN_PORT"));
}

#[test]
fn half_an_environment_names_what_is_missing() {
    for (file, name) in [
        ("torchrun-static", "RANK"),
        ("torchrun-static", "WORLD_SIZE"),
        ("torchrun-static", "LOCAL_RANK"),
        ("torchrun-static", "LOCAL_WORLD_SIZE"),
        ("torchrun-static", "MASTER_ADDR"),
        ("torchrun-static", "MASTER_PORT"),
        ("mpirun", "OMPI_COMM_WORLD_RANK"),
        ("mpirun", "OMPI_COMM_WORLD_SIZE"),
        ("mpirun", "OMPI_COMM_WORLD_LOCAL_RANK"),
        ("mpirun", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("srun", "SLURM_PROCID"),
        ("srun", "SLURM_LOCALID"),
        ("srun", "SLURM_JOB_ID"),
        ("srun", "SLURM_NODEID"),
    ] {
        let error = refused(&changed(file, &[(name, "")]));
        assert!(error.ends_with(&format!("incomplete: {name} is not set")), "{file}: {error}");
    }
    let error = refused(&changed("torchrun-static", &[("RANK", ""), ("MASTER_ADDR", "")]));
    assert!(error.ends_with("RANK, MASTER_ADDR are not set"), "{error}");
}

#[test]
fn values_that_are_no_numbers_are_refused_by_name() {
    for (file, name, value) in [
        ("torchrun-static", "RANK", "one"),
        ("torchrun-static", "WORLD_SIZE", "-2"),
        ("torchrun-static", "MASTER_PORT", "0"),
        ("torchrun-static", "MASTER_PORT", "70000"),
        ("mpirun", "XTRAIN_PORT", "x"),
        ("srun", "SLURM_PROCID", "99999999999999999999"),
        ("srun", "SLURM_STEP_TASKS_PER_NODE", "3"),
    ] {
        let error = refused(&changed(file, &[(name, value)]));
        assert!(error.contains(&format!("{name}={value}")), "{error}");
    }
}

#[test]
fn ranks_beyond_the_world_are_refused() {
    assert!(refused(&changed("torchrun-static", &[("RANK", "2")])).contains("rank 2"));
    assert!(refused(&changed("mpirun", &[("OMPI_COMM_WORLD_LOCAL_RANK", "3")])).contains("local rank 3"));
}

#[test]
fn a_task_of_srun_finds_rank_0_at_the_first_host_of_the_step() {
    let environment = detected(&recorded("srun"));
    assert_eq!(environment.launcher, Launcher::Slurm);
    assert_eq!(environment.world, world([4, 5, 0, 1], "n001", 20074));
    assert_eq!(detected(&recorded("srun-in-sbatch")).world, world([2, 3, 0, 1], "n001", 20111));
    assert_eq!(detected(&recorded("srun-ntasks-per-node")).world, world([3, 4, 1, 2], "n001", 20223));
}

#[test]
fn lists_of_hosts_are_replaced_by_what_the_user_sets() {
    let set = changed("srun", &[("MASTER_ADDR", "10.0.0.1"), ("MASTER_PORT", "29500"), ("WORLD_SIZE", "5")]);
    let environment = detected(&set);
    assert_eq!((environment.launcher, environment.world.port), (Launcher::Slurm, 29500));
    assert_eq!(environment.world.address, "10.0.0.1");
}

#[test]
fn without_a_list_of_hosts_rank_0_is_where_srun_was_called() {
    let lists = [("SLURM_STEP_NODELIST", ""), ("SLURM_JOB_NODELIST", ""), ("SLURM_NODELIST", "")];
    let mut changes = lists.to_vec();
    changes.push(("SLURM_LAUNCH_NODE_IPADDR", "10.0.0.9"));
    assert_eq!(detected(&changed("srun", &changes)).world.address, "10.0.0.9");
    changes[3].1 = "";
    assert!(refused(&changed("srun", &changes)).contains("MASTER_ADDR"));
}

#[test]
fn ranks_of_one_node_meet_at_loopback() {
    let one_node = [
        ("SLURM_STEP_NUM_NODES", "1"),
        ("SLURM_STEP_NODELIST", "n003"),
        ("SLURM_LOCALID", "4"),
        ("SLURM_NODEID", "0"),
    ];
    assert_eq!(detected(&changed("srun", &one_node)).world, world([4, 5, 4, 5], "127.0.0.1", 20074));
    assert_eq!(detected(&recorded("mpirun")).world.address, "127.0.0.1");
}

#[test]
fn steps_of_one_job_have_different_ports() {
    let next = changed("srun", &[("SLURM_STEP_ID", "1")]);
    assert_ne!(detected(&next).world.port, detected(&recorded("srun")).world.port);
}

#[test]
fn shells_and_scripts_in_an_allocation_are_no_ranks() {
    for file in ["sbatch", "salloc", "srun-shell", "srun-one-task"] {
        assert_eq!(Environment::detect(&recorded(file)), Ok(None), "{file}");
    }
    assert_eq!(Environment::detect(&Variables::default()), Ok(None));
    // An address alone starts no run.
    let address = [("MASTER_ADDR", "n001"), ("MASTER_PORT", "29500")].into_iter().collect();
    assert_eq!(Environment::detect(&address), Ok(None));
}

#[test]
fn mpirun_numbers_ranks_and_slurm_its_daemons() {
    let environment = detected(&recorded("mpirun-in-slurm"));
    assert_eq!(environment.launcher, Launcher::OpenMpi);
    let World { rank, world_size, local_rank, local_world_size, address, .. } = environment.world;
    assert_eq!([rank, world_size, local_rank, local_world_size], [3, 4, 1, 2]);
    assert_eq!(address, "n001");
    let outside = changed("mpirun-in-slurm", &[("SLURM_JOB_NODELIST", "")]);
    assert!(refused(&outside).contains("mpirun -x MASTER_ADDR="));
}

#[test]
fn ports_of_mpirun_depend_on_the_run_alone() {
    let environment = detected(&recorded("mpirun"));
    assert_eq!(environment.world.rank, 1);
    let port = environment.world.port;
    assert!(HIGH_PORTS.contains(&port), "{port}");
    let of = |changes: &[(&str, &str)]| detected(&changed("mpirun", changes)).world.port;
    assert_eq!(of(&[("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_LOCAL_RANK", "0")]), port);
    assert_ne!(of(&[("PMIX_NAMESPACE", "367460354")]), port);
    assert_eq!(of(&[("MASTER_PORT", "29500")]), 29500);
    assert!(refused(&changed("mpirun", &[("PMIX_NAMESPACE", "")])).contains("MASTER_PORT"));
}

#[test]
fn torchrun_in_a_step_of_slurm_is_torchrun() {
    let slurm = recorded("srun");
    let both = slurm.with_prefix("");
    let torchrun = recorded("torchrun-standalone");
    let both: Variables = both.chain(torchrun.with_prefix("")).collect();
    assert_eq!(detected(&both).launcher, Launcher::Torchrun);
}

#[test]
fn a_rank_takes_the_gpu_of_its_local_rank() {
    let torchrun = detected(&recorded("torchrun-static"));
    assert_eq!(torchrun.gpu(2), Ok(1));
    let error = torchrun.gpu(1).expect_err("a GPU for two ranks").to_string();
    assert!(error.contains("rank 1 needs GPU 1") && error.contains("sees 1"), "{error}");
    assert!(torchrun.gpu(0).is_err());
}

#[test]
fn a_task_of_slurm_with_one_visible_gpu_takes_it() {
    let task = detected(&recorded("srun-ntasks-per-node"));
    assert_eq!((task.gpu(1), task.gpu(2)), (Ok(0), Ok(1)));
    assert!(task.gpu(0).is_err());
}

#[test]
fn variables_of_nccl_are_listed() {
    let variables = changed("srun", &[("NCCL_DEBUG", "INFO"), ("NCCL_ALGO", "Ring"), ("OTHER_NCCL_X", "1")]);
    let listed = nccl_variables(&variables);
    let expected = [("NCCL_ALGO", "Ring"), ("NCCL_DEBUG", "INFO")];
    assert_eq!(listed, expected.map(|(name, value)| (name.to_owned(), value.to_owned())));
}
