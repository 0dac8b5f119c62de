"""The variables of launchers: whole, in part, of several launchers at once, of allocations, and of launchers that are not supported.

Ranks whose variables are whole train one run. All others refuse before a run folder exists; none trains alone that is one of several.
"""

import launched
import place
from program import Failure

SHORT = 8


def prepare(folder, program):
    """The run of one process."""
    place.texts(folder)
    program.run(folder, [*launched.COMMAND, "--out", "alone"]).succeeds()


def open_mpi(rank, size, port):
    numbers = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size, "NODE_RANK": rank}
    found = {f"OMPI_COMM_WORLD_{name}": str(number) for name, number in numbers.items()}
    return found | {"PMIX_RANK": str(rank), "PMIX_NAMESPACE": f"prterun-a-{port}@1"}


def mpich(rank, size, port):
    numbers = {"PMI_RANK": rank, "PMI_SIZE": size, "MPI_LOCALRANKID": rank, "MPI_LOCALNRANKS": size, "PMI_FD": 9}
    return {name: str(number) for name, number in numbers.items()} | {"XTRAIN_PORT": str(port)}


def slurm(rank, size, port):
    numbers = {"SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": size, "SLURM_LOCALID": rank, "SLURM_STEP_NUM_NODES": 1, "SLURM_NODEID": 0}
    found = {name: str(number) for name, number in numbers.items()}
    return found | {"SLURM_JOB_ID": str(port), "SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": str(size), "MASTER_PORT": str(port)}


WHOLE = {"torchrun": launched.torchrun, "Open MPI": open_mpi, "MPICH": mpich, "Slurm": slurm}
# The variables without which a rank does not know its place.
NEEDED = {
    "torchrun": ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"],
    "Open MPI": [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")],
    "MPICH": ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"],
    "Slurm": ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_ID"],
}
# Variables of rank and size of launchers that are not supported.
UNSUPPORTED = [
    ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    ("PALS_RANKID", "PMI_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("PET_NODE_RANK", "PET_NNODES"),
    ("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES"),
    ("AWS_BATCH_JOB_NODE_INDEX", "AWS_BATCH_JOB_NUM_NODES"),
    ("LWS_WORKER_INDEX", "LWS_GROUP_SIZE"),
    ("PMIX_RANK", None),
    ("ALPS_APP_PE", None),
]
# Sizes that the shells of allocations and arrays of jobs have.
ALLOCATIONS = ["SLURM_NTASKS", "SLURM_NPROCS", "FLUX_JOB_SIZE", "PBS_NP", "LSB_DJOB_NUMPROC", "NSLOTS", "JOB_COMPLETION_INDEX", "SLURM_ARRAY_TASK_ID"]


def trial(prepared, base, folder, program, dice, count):
    place.texts(folder)
    case = dice.choice([whole, whole, in_part, in_part, unsupported, unsupported, alone, conflict])
    return case(base, folder, program, dice)


def words(out="run", timeout="60s"):
    return [*launched.COMMAND, "--set", f"parallel.start_timeout={timeout}", "--out", out]


def whole(base, folder, program, dice):
    """All ranks of a launcher, among variables of others that agree or decide nothing."""
    launcher, size, port = dice.choice(list(WHOLE)), dice.choice([2, 2, 4]), launched.free_port()
    around = slurm if launcher in ("torchrun", "Open MPI", "MPICH") and dice.random() < 0.4 else None
    started = []
    for rank in range(size):
        variables = WHOLE[launcher](rank, size, port)
        if around:
            # A step of Slurm in which the launcher started its daemons: one for all ranks.
            variables = around(0, 1, port) | variables
        if launcher != "torchrun" and dice.random() < 0.5:
            variables |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
        variables |= {dice.choice(ALLOCATIONS): str(dice.randint(1, 64)), "OMP_NUM_THREADS": "1"} if launcher == "torchrun" else {}
        started.append(launched.Rank(program, folder, words(), variables))
    launched.all_end(started, 100, codes=(0,))
    launched.same_as_alone(base, folder, "a launched run")
    return f"ranks of {launcher}"


def refused(program, folder, variables, names):
    """Runs a rank that must refuse, at once and with one of the names."""
    ended = program.run(folder, words(timeout="2s"), env=variables).refuses()
    if (folder / "run").exists() or not any(name in ended.err for name in names):
        raise Failure(f"{variables}: does not name {names}: {ended.err}")
    if ended.seconds > 20:
        raise Failure(f"{variables}: refused after {ended.seconds:.0f} s: {ended.err}")


def in_part(base, folder, program, dice):
    """A rank of several that lacks a variable, or has one that is no number."""
    launcher = dice.choice(list(WHOLE))
    size = dice.randint(2, 9)
    variables = WHOLE[launcher](dice.randrange(size), size, 29999)
    name = dice.choice(NEEDED[launcher])
    broken = dice.choice(["", " ", "x", "-1", "1e3", "99999999999999999999"])
    if broken.strip() or dice.random() < 0.5:
        variables[name] = broken
    else:
        del variables[name]
    if name in ("MASTER_ADDR", "SLURM_JOB_ID") and broken.strip():
        return "any address or job"
    refused(program, folder, variables, [name])
    return f"{launcher} in part"


def unsupported(base, folder, program, dice):
    rank_name, size_name = dice.choice(UNSUPPORTED)
    size = dice.randint(1, 4)
    rank = dice.randrange(size)
    variables = {rank_name: str(rank)} | ({size_name: str(size)} if size_name else {})
    if size_name and size == 1:
        program.run(folder, words(), env=variables).succeeds()
        launched.same_as_alone(base, folder, "a launched run")
        return "one process of an unsupported launcher"
    refused(program, folder, variables, [rank_name])
    return "several of an unsupported launcher"


def alone(base, folder, program, dice):
    """A process that is the only one, and shells of allocations."""
    launcher = dice.choice([*WHOLE, None])
    variables = {}
    if launcher:
        variables = {name: value for name, value in WHOLE[launcher](0, 1, 29999).items() if "LOCAL" not in name or dice.random() < 0.5}
    if launcher != "Slurm":
        variables |= {name: str(dice.randint(1, 64)) for name in dice.sample(ALLOCATIONS, 3)}
    program.run(folder, words(), env=variables).succeeds()
    launched.same_as_alone(base, folder, "a launched run")
    return "alone"


def conflict(base, folder, program, dice):
    """Some of torchrun's variables, with other numbers than those of the launcher."""
    launcher = dice.choice(["Open MPI", "MPICH", "Slurm"])
    size = dice.randint(2, 8)
    rank = dice.randrange(size)
    name, value = dice.choice([("RANK", (rank + 1) % size), ("WORLD_SIZE", 1), ("WORLD_SIZE", size + 1), ("LOCAL_RANK", rank + 1)])
    refused(program, folder, WHOLE[launcher](rank, size, 29999) | {name: str(value)}, [f"{name}={value}"])
    return "conflicts"
