//! Launchers whose variables are known, but not enough to join: they are refused, so that no rank trains
//! alone.

use super::variables::{BY_HAND, Variables};
use crate::world::{World, WorldError};

/// A launcher that is recognised by the number of a process.
struct Unsupported {
    name: &'static str,
    rank: &'static str,
    /// The number of processes. Empty if the launcher does not set it.
    sizes: &'static [&'static str],
    doubt: Doubt,
}

/// The meaning of a number of a process without that of all.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Doubt {
    /// There may be several.
    Refused,
    /// As [`Doubt::Refused`]. Tasks of `srun` have the variables too, perhaps of another step around theirs,
    /// so there they mean nothing.
    RefusedOutsideSlurm,
    /// Number 0 is alone: people set the variable themselves.
    Alone,
}

const fn launcher(name: &'static str, rank: &'static str, sizes: &'static [&'static str]) -> Unsupported {
    Unsupported { name, rank, sizes, doubt: Doubt::Refused }
}

/// Those that set variables of others too come first.
const LAUNCHERS: [Unsupported; 15] = [
    launcher("Flux", "FLUX_TASK_RANK", &["FLUX_JOB_SIZE"]),
    launcher("PALS", "PALS_RANKID", &["PMI_SIZE"]),
    launcher("MVAPICH", "MV2_COMM_WORLD_RANK", &["MV2_COMM_WORLD_SIZE"]),
    launcher("MVAPICH", "MVP_COMM_WORLD_RANK", &["MVP_COMM_WORLD_SIZE"]),
    launcher("MVAPICH", "MPIRUN_RANK", &["MPIRUN_NPROCS"]),
    launcher("jsrun", "JSM_NAMESPACE_RANK", &["JSM_NAMESPACE_SIZE"]),
    launcher("aprun", "ALPS_APP_PE", &[]),
    launcher("Horovod", "HOROVOD_RANK", &["HOROVOD_SIZE"]),
    Unsupported { doubt: Doubt::RefusedOutsideSlurm, ..launcher("PMIx", "PMIX_RANK", &[]) },
    launcher("Kubeflow", "PET_NODE_RANK", &["PET_NNODES"]),
    launcher("SkyPilot", "SKYPILOT_NODE_RANK", &["SKYPILOT_NUM_NODES"]),
    launcher("dstack", "DSTACK_NODE_RANK", &["DSTACK_NODES_NUM"]),
    launcher("AWS Batch", "AWS_BATCH_JOB_NODE_INDEX", &["AWS_BATCH_JOB_NUM_NODES"]),
    launcher("LeaderWorkerSet", "LWS_WORKER_INDEX", &["LWS_GROUP_SIZE"]),
    Unsupported {
        doubt: Doubt::Alone,
        ..launcher("a launcher of nodes", "NODE_RANK", &["NNODES", "NUM_NODES"])
    },
];

/// True if one of these launchers numbers this process.
pub(super) fn is_named(variables: &Variables) -> bool {
    LAUNCHERS.iter().any(|launcher| variables.has(launcher.rank))
}

/// Refuses the variables of these launchers if they started several processes. `step` is the place of this
/// process in a step of Slurm with several tasks, with which they must agree.
///
/// # Errors
/// One of them started several processes, or does not give their number.
pub(super) fn refuse(variables: &Variables, step: Option<&World>) -> Result<(), WorldError> {
    let is_in_step = variables.has("SLURM_STEP_NUM_TASKS");
    LAUNCHERS.iter().try_for_each(|launcher| {
        let Some(rank) = variables.number::<usize>(launcher.rank)? else { return Ok(()) };
        if launcher.doubt == Doubt::RefusedOutsideSlurm && is_in_step {
            return Ok(());
        }
        let known = launcher.sizes.iter().find(|size| variables.has(size));
        // A world of one that the user states is one.
        let size_name = known.copied().or(Some("WORLD_SIZE").filter(|size| variables.has(size)));
        let size = size_name.map(|size| variables.nodes(size)).transpose()?;
        if let Some(World { rank: of_slurm, .. }) = step
            && (rank, size.unwrap_or(of_slurm.world_size)) == (of_slurm.index, of_slurm.world_size)
        {
            return Ok(());
        }
        match (rank, size) {
            (0, Some(0 | 1)) => Ok(()),
            (0, None) if launcher.doubt == Doubt::Alone => Ok(()),
            _ => Err(refusal(launcher.name, rank, size, &[&[launcher.rank], size_name.as_slice()].concat())),
        }
    })?;
    match of_sagemaker(variables) {
        Some((rank, size @ 2..)) => {
            Err(refusal("SageMaker", rank, Some(size), &["SM_CURRENT_HOST", "SM_HOSTS"]))
        }
        _ => Ok(()),
    }
}

/// The place of this host in SageMaker's list: `SM_HOSTS=["algo-1","algo-2"]`.
fn of_sagemaker(variables: &Variables) -> Option<(usize, usize)> {
    let hosts: Vec<&str> = variables.get("SM_HOSTS")?.split('"').skip(1).step_by(2).collect();
    let own = variables.get("SM_CURRENT_HOST")?;
    Some((hosts.iter().position(|host| *host == own)?, hosts.len()))
}

fn refusal(name: &str, rank: usize, size: Option<usize>, variables: &[&str]) -> WorldError {
    let of = size.map_or("several".to_owned(), |size| size.to_string());
    let variables = variables.join(", ");
    let alone = match (rank, size) {
        (0, None) => "; if it is the only one, set WORLD_SIZE=1",
        _ => "",
    };
    WorldError(format!(
        "{name} started this process as rank {rank} of {of} ({variables}), but xtrain does not read the place of a rank \
         from its variables: start the ranks with torchrun, srun, mpirun or mpiexec, or set {BY_HAND}{alone}"
    ))
}
