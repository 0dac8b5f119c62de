//! The environments of real launchers, recorded in `tests/environments`, and variations of them.

use super::*;
use crate::messages::assert_message;
use xtrain_rank::Rank;

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
    let rank = Rank { index: rank, world_size };
    let local_rank = Rank { index: local_rank, world_size: local_world_size };
    World { rank, local_rank, address: address.into(), port }
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
        assert!(error.contains(&format!("incomplete: {name} is not set; ")), "{file}: {error}");
    }
    let error = refused(&changed("torchrun-static", &[("RANK", ""), ("MASTER_ADDR", "")]));
    assert_message("half an environment names what is missing", &error);
}

#[test]
fn the_place_on_its_node_is_asked_of_a_pod_whose_operator_sets_none() {
    let pod = [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "job-0"), ("MASTER_PORT", "23456")];
    let error = refused(&pod.into_iter().collect());
    assert_message("the place on its node is asked of a pod whose operator sets none", &error);
    // Each pod would train alone.
    assert!(!error.contains("unset"), "{error}");
    let place = [("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")];
    let environment = detected(&pod.into_iter().chain(place).collect());
    assert_eq!(environment.world, world([1, 2, 0, 1], "job-0", 23456));
}

#[test]
fn a_world_of_one_has_no_open_question() {
    for alone in [
        &[("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")][..],
        &[("WORLD_SIZE", "1")],
        &[("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "1")],
        &[("PMI_RANK", "0"), ("PMI_SIZE", "1"), ("PMI_FD", "9")],
        &[("FLUX_TASK_RANK", "0"), ("FLUX_JOB_SIZE", "1"), ("PMI_RANK", "0"), ("PMI_SIZE", "1")],
        &[("PMIX_RANK", "0"), ("WORLD_SIZE", "1")],
        &[("PET_NODE_RANK", "0"), ("PET_NNODES", "1:1")],
        // Allocations and arrays of jobs have sizes, but number no rank.
        &[("FLUX_JOB_SIZE", "4")],
        &[("SLURM_NTASKS", "4"), ("SLURM_JOB_ID", "3"), ("SLURM_ARRAY_TASK_ID", "2")],
        &[("PBS_NP", "8"), ("LSB_DJOB_NUMPROC", "8"), ("NSLOTS", "8"), ("JOB_COMPLETION_INDEX", "3")],
        &[("SM_HOSTS", "[\"algo-1\"]"), ("SM_CURRENT_HOST", "algo-1")],
        &[("NODE_RANK", "0")],
        &[("RANK", ""), ("WORLD_SIZE", " "), ("PMI_RANK", "")],
    ] {
        assert_eq!(Environment::detect(&alone.iter().copied().collect()), Ok(None), "{alone:?}");
    }
    for wrong in [
        &[("RANK", "1"), ("WORLD_SIZE", "1")][..],
        &[("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "1")],
        &[("PMI_RANK", "2"), ("PMI_SIZE", "1")],
        &[("RANK", "0"), ("WORLD_SIZE", "0")],
        &[("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "1")],
    ] {
        assert!(refused(&wrong.iter().copied().collect()).contains("does not exist"), "{wrong:?}");
    }
}

#[test]
fn ranks_of_mpich_and_intel_mpi_meet_as_those_of_open_mpi() {
    let mpich = detected(&recorded("mpiexec-mpich"));
    assert_eq!((mpich.launcher, mpich.world), (Launcher::Hydra, world([2, 3, 2, 3], "127.0.0.1", 29500)));
    let intel = detected(&recorded("mpiexec-intel"));
    assert_eq!(intel.world, world([2, 3, 2, 3], "127.0.0.1", intel.world.port));
    assert!(HIGH_PORTS.contains(&intel.world.port));
    let two_nodes = "mpiexec-mpich-two-nodes";
    assert_message("ranks of mpich and intel mpi meet as those of open mpi", refused(&recorded(two_nodes)));
    let addressed = changed(two_nodes, &[("MASTER_ADDR", "node-a"), ("MASTER_PORT", "4000")]);
    assert_eq!(detected(&addressed).world, world([2, 3, 0, 1], "node-a", 4000));
    // Hydra starts its daemons with `srun`, whose tasks number nodes.
    let slurm = recorded("srun");
    let in_slurm: Variables = slurm.with_prefix("").chain(recorded(two_nodes).with_prefix("")).collect();
    let environment = detected(&in_slurm);
    assert_eq!(environment.launcher, Launcher::Hydra);
    assert_eq!((environment.world.rank.index, &*environment.world.address), (2, "n001"));
    assert!(HIGH_PORTS.contains(&environment.world.port));
    for (name, others) in [("PMI_SIZE", "PMI_SIZE"), ("MPI_LOCALRANKID", "MPI_LOCALRANKID")] {
        let error = refused(&changed("mpiexec-mpich", &[(name, "")]));
        assert!(error.contains(others) && error.contains("MPICH"), "{error}");
    }
    let error = refused(&[("PMI_RANK", "1"), ("PMI_SIZE", "2")].into_iter().collect());
    assert_message("ranks of mpich and intel mpi meet as those of open mpi, 2", &error);
}

#[test]
fn open_mpi_5_names_its_run_in_another_form() {
    let environment = detected(&recorded("mpirun-5"));
    assert_eq!(environment.launcher, Launcher::OpenMpi);
    assert_eq!(environment.world, world([2, 3, 1, 3], "127.0.0.1", environment.world.port));
}

#[test]
fn several_processes_of_unsupported_launchers_are_refused_by_name() {
    for (name, variables) in [
        (
            "Flux",
            &[("FLUX_TASK_RANK", "0"), ("FLUX_JOB_SIZE", "2"), ("PMI_RANK", "0"), ("PMI_SIZE", "2")][..],
        ),
        ("PALS", &[("PALS_RANKID", "1"), ("PMI_RANK", "1"), ("PMI_SIZE", "2"), ("PMI_LOCAL_RANK", "1")]),
        ("MVAPICH", &[("MV2_COMM_WORLD_RANK", "0"), ("MV2_COMM_WORLD_SIZE", "2")]),
        ("MVAPICH", &[("MVP_COMM_WORLD_RANK", "0"), ("MVP_COMM_WORLD_SIZE", "2")]),
        ("MVAPICH", &[("MPIRUN_RANK", "1"), ("MPIRUN_NPROCS", "2")]),
        ("jsrun", &[("JSM_NAMESPACE_RANK", "1"), ("JSM_NAMESPACE_SIZE", "2")]),
        ("aprun", &[("ALPS_APP_PE", "3")]),
        ("Horovod", &[("HOROVOD_RANK", "0"), ("HOROVOD_SIZE", "4")]),
        ("PMIx", &[("PMIX_RANK", "1"), ("PMIX_NAMESPACE", "x")]),
        ("Kubeflow", &[("PET_NODE_RANK", "0"), ("PET_NNODES", "1:2"), ("PET_NPROC_PER_NODE", "1")]),
        ("SkyPilot", &[("SKYPILOT_NODE_RANK", "1"), ("SKYPILOT_NUM_NODES", "2")]),
        ("dstack", &[("DSTACK_NODE_RANK", "1"), ("DSTACK_NODES_NUM", "2")]),
        ("AWS Batch", &[("AWS_BATCH_JOB_NODE_INDEX", "1"), ("AWS_BATCH_JOB_NUM_NODES", "2")]),
        ("LeaderWorkerSet", &[("LWS_WORKER_INDEX", "0"), ("LWS_GROUP_SIZE", "2")]),
        ("SageMaker", &[("SM_HOSTS", "[\"algo-1\", \"algo-2\"]"), ("SM_CURRENT_HOST", "algo-2")]),
        ("launcher of nodes", &[("NODE_RANK", "1")]),
        // Some of torchrun's variables do not say where the rest of the ranks are.
        ("Flux", &[("FLUX_TASK_RANK", "1"), ("FLUX_JOB_SIZE", "2"), ("RANK", "0"), ("WORLD_SIZE", "1")]),
    ] {
        let error = refused(&variables.iter().copied().collect());
        assert!(error.contains(&format!("{name} started this process as rank ")), "{error}");
        assert!(error.contains(variables[0].0) || error.contains("SM_CURRENT_HOST"), "{error}");
    }
    assert!(refused(&recorded("prterun")).contains("PMIx"));
    // Nothing says how many there are.
    let error = refused(&[("PMIX_RANK", "0")].into_iter().collect());
    assert!(error.contains("set WORLD_SIZE=1"), "{error}");
}

#[test]
fn all_of_torchruns_variables_make_a_rank_of_any_launcher() {
    let torchrun = recorded("torchrun-standalone");
    for file in ["srun", "mpirun", "mpiexec-mpich", "prterun", "sbatch"] {
        let launcher = recorded(file);
        let both: Variables = launcher.with_prefix("").chain(torchrun.with_prefix("")).collect();
        assert_eq!(detected(&both), detected(&torchrun), "{file}");
    }
    let flux = [("FLUX_TASK_RANK", "1"), ("FLUX_JOB_SIZE", "2")];
    assert_eq!(detected(&torchrun.with_prefix("").chain(flux).collect()), detected(&torchrun));
}

#[test]
fn some_of_torchruns_variables_must_agree_with_the_launcher() {
    // Scripts set them for torch.
    for (file, numbers) in [("srun", ["4", "5"]), ("mpirun", ["1", "3"]), ("mpiexec-mpich", ["2", "3"])] {
        let plain = detected(&recorded(file));
        for changes in [
            &[("RANK", numbers[0]), ("WORLD_SIZE", numbers[1])][..],
            &[("WORLD_SIZE", numbers[1])],
            &[("RANK", numbers[0]), ("LOCAL_RANK", &plain.world.local_rank.index.to_string())],
        ] {
            assert_eq!(detected(&changed(file, changes)), plain, "{file} {changes:?}");
        }
        // `export RANK=$SLURM_PROCID` in the script of sbatch is 0 on all ranks.
        for (name, value) in [("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_WORLD_SIZE", "7")] {
            let error = refused(&changed(file, &[("RANK", numbers[0]), (name, value)]));
            assert!(error.contains(&format!("{name}={value} is set")), "{file}: {error}");
        }
    }
}

#[test]
fn tasks_of_slurm_are_slurms_whatever_its_plugins_set() {
    let plain = detected(&recorded("srun"));
    for changes in [
        &[("PMI_RANK", "4"), ("PMI_SIZE", "5"), ("PMI_FD", "7")][..],
        &[("PMIX_RANK", "4"), ("PMIX_NAMESPACE", "slurm.pmix.2.0")],
        &[("PALS_RANKID", "4"), ("PALS_LOCAL_RANKID", "0"), ("PMI_RANK", "4"), ("PMI_SIZE", "5")],
        // Of an interactive shell in another step around this one.
        &[("PMI_RANK", "0"), ("PMI_SIZE", "1"), ("PMIX_RANK", "0")],
    ] {
        assert_eq!(detected(&changed("srun", changes)), plain, "{changes:?}");
    }
    let shell = changed("srun-shell", &[("PMIX_RANK", "0"), ("PMI_RANK", "0"), ("PMI_SIZE", "1")]);
    assert_eq!(Environment::detect(&shell), Ok(None));
    // Flux, whose brokers are tasks of Slurm.
    for file in ["srun", "srun-one-task"] {
        let flux = changed(file, &[("FLUX_TASK_RANK", "4"), ("FLUX_JOB_SIZE", "8")]);
        assert!(refused(&flux).contains("Flux"), "{file}");
    }
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
    let World { rank, local_rank, address, .. } = environment.world;
    assert_eq!([rank, local_rank], [Rank { index: 3, world_size: 4 }, Rank { index: 1, world_size: 2 }]);
    assert_eq!(address, "n001");
    let outside = changed("mpirun-in-slurm", &[("SLURM_JOB_NODELIST", "")]);
    assert!(refused(&outside).contains("mpirun -x MASTER_ADDR="));
}

#[test]
fn ports_of_mpirun_depend_on_the_run_alone() {
    let environment = detected(&recorded("mpirun"));
    assert_eq!(environment.world.rank.index, 1);
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
