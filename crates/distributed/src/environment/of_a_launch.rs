//! The variables by which launchers place a process in a run.

use crate::net::secret::SECRET_VARIABLE;

/// Beginnings of names. Those of a whole job, such as `SLURM_JOB_ID` and `I_MPI_ROOT`, are not among them.
const PREFIXES: [&str; 25] = [
    "TORCHELASTIC_",
    "PET_",
    "ROLE_",
    "OMPI_",
    "PMIX_",
    "PRTE_",
    "PMI_",
    "PMI2_",
    "MPI_LOCAL",
    "HYDRA_",
    "HYDI_",
    "I_MPI_HYDRA_",
    "MV2_COMM_WORLD_",
    "MVP_COMM_WORLD_",
    "MPIRUN_",
    "PALS_",
    "FLUX_TASK_",
    "JSM_NAMESPACE_",
    "HOROVOD_",
    "LWS_",
    "SKYPILOT_NODE_",
    "DSTACK_NODE",
    "AWS_BATCH_JOB_N",
    "SLURM_STEP",
    "SLURM_SRUN_",
];

const NAMES: [&str; 26] = [
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "FLUX_JOB_SIZE",
    "FLUX_JOB_NNODES",
    "ALPS_APP_PE",
    "SKYPILOT_NUM_NODES",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_GTIDS",
    "SLURM_TASK_PID",
    "SLURM_NTASKS",
    "SLURM_NPROCS",
    "XTRAIN_PORT",
    "NNODES",
    "NUM_NODES",
    SECRET_VARIABLE,
    super::LAUNCHER_VARIABLE,
    super::OPEN_FILES_VARIABLE,
];

/// True for a variable by which a launcher, this program among them, places a process in a run. A program
/// that is no rank but inherits them may take itself for one.
pub(crate) fn is_of_a_launch(name: &str) -> bool {
    NAMES.contains(&name) || PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}
