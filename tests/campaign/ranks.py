"""A run on several processes, of which random ones are killed or stopped at random moments, again and again until it ends.

The result has the bits of one process that was never killed, no process is left after a kill, and the number of processes changes.
"""

import os
import pathlib
import signal
import subprocess
import time

import place
from program import Failure

# Settings of the runs. Their sums are those of any number of ranks.
SHARED = ["parallel.reduce=any-world", "train.batch_size=8", "train.micro_batch_size=1", "train.steps=30", "checkpoint.every=2"]
# A text of one letter, all tokens of which choose the same experts; so many tokens that their rows are more than the mean and what a rank
# has between the rows of experts and ranks.
ONE_LETTER = "one_letter.txt"
MIXTURE = [f"data.train={ONE_LETTER}", "model.family=qwen3_moe", "experts.count=4", "experts.per_token=2", "experts.ffn_dim=12", "experts.balance=none"]
MIXTURE += ["data.seq_len=256", "train.micro_batch_size=2"]
RECIPES = {
    "fp32": [],
    "gradients": ["parallel.shard=gradients"],
    "weights": ["precision.recipe=bf16", "parallel.shard=weights", "model.layers=3"],
    "replicas": ["parallel.shard=weights", "parallel.replicas=2"],
    "bf16": ["precision.recipe=bf16", "parallel.shard=optimizer", "model.dropout=0.1", "optimizer.moments=bf16"],
    # With experts.capacity=1.0, steps are repeated with more room for their rows.
    "experts": [*MIXTURE, "parallel.shard=optimizer"],
    "experts-fp8": [*MIXTURE, "precision.recipe=fp8-delayed", "precision.skip_slower=[]", "experts.wire=fp8", "experts.ffn_dim=32"],
    "any-mesh": ["parallel.reduce=any-mesh", "model.heads=4", "model.kv_heads=4", "model.ffn_dim=32", "model.dropout=0.1"],
    "fp8-delayed": ["precision.recipe=fp8-delayed", "precision.skip_slower=[]", "precision.amax_history_len=3", "data.seq_len=32", "model.ffn_dim=32"],
}
SHORT = 2
# Seconds after which all processes are gone.
BAR = 15


def command(recipe, out, ranks, stages=1, expert=1, tensor=1):
    """The command of a run on so many ranks, in so many stages, of whose ranks `expert` share experts and `tensor` have parts of matrices."""
    sharing = [f"parallel.expert={expert}", "experts.capacity=1.0"] if expert > 1 else []
    sharing += [f"parallel.pipeline={stages}"] if stages > 1 else []
    sets = [word for setting in [*SHARED, *RECIPES[recipe], *sharing] for word in ("--set", setting)]
    sharing += [f"parallel.tensor={tensor}"] if tensor > 1 else []
    processes = ["--ranks", str(ranks)] if ranks > 1 else []
    return ["train", "run.toml", "--out", out, "--resume", "--threads", "1", *sets, *processes]


def prepare(folder, program):
    """A run of each recipe in one process, in peace, and its time."""
    texts(folder)
    return {recipe: program.run(folder, command(recipe, recipe, 1)).succeeds().seconds for recipe in RECIPES}


def texts(folder):
    place.texts(folder)
    (folder / ONE_LETTER).write_text("a" * 20_000)


def trial(prepared, base, folder, program, dice, count):
    texts(folder)
    recipe = dice.choice(list(RECIPES))
    kills = 0
    while True:
        ranks = dice.choice([1, 2, 2, 4])
        replicas = 2 if recipe == "replicas" and ranks > 1 else 1
        stages = dice.choice([n for n in [1, 1, 2] if ranks % (n * replicas) == 0])
        expert = dice.choice([n for n in [1, 2, 4, 4] if ranks // stages % n == 0]) if recipe.startswith("experts") else 1
        tensor = dice.choice([n for n in [1, 2, 2, 4] if ranks // stages % n == 0]) if recipe == "any-mesh" else 1
        # Short lives, so that they are many; longer ones as they fail to bring it to its end.
        patience = dice.uniform(0, (prepared[recipe] + 0.3) * (10 + 4 * kills) / 40)
        code, said = attacked(folder, program, command(recipe, "run", ranks, stages, expert, tensor), patience, dice, count)
        place.check_whole(folder)
        if code == 0:
            break
        kills += 1
        count["kills"] += 1
        if kills > 200:
            raise Failure(f"never ends: {said}")
    place.same(lasting(base / recipe), lasting(folder / "run"), f"a killed run of {recipe} on several processes")
    place.check_no_leftovers(folder)
    count["repeated steps"] += (folder / "run/metrics.jsonl").read_text().count("step is repeated with")
    return recipe


def lasting(run):
    """What runs of the same bits on different numbers of processes have in common."""
    found = place.lasting(run)
    return {name: content for name, content in found.items() if "rank-" not in name}


def attacked(folder, program, words, patience, dice, count):
    """Runs a command, and kills or stops one of its processes after `patience` seconds. Returns how it ended.

    Only a run that has recorded something is stopped: until they are connected, ranks wait for each other for parallel.start_timeout.
    """
    recorded = size(folder / "run/metrics.jsonl")
    process = subprocess.Popen(
        [program.path, *words],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "XTRAIN_CACHE": str(folder / "kernels")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=(folder / "said").open("w"),
    )
    try:
        process.wait(patience)
        return judged(process, folder)
    except subprocess.TimeoutExpired:
        pass
    ranks = children(process.pid)
    target = dice.choice([process.pid, *ranks])
    may_stop = target != process.pid and size(folder / "run/metrics.jsonl") > recorded
    how = signal.SIGSTOP if may_stop and dice.random() < 0.08 else signal.SIGKILL
    begun = time.monotonic()
    try:
        os.kill(target, how)
    except ProcessLookupError:
        pass
    count["stops" if how == signal.SIGSTOP else "kills of ranks" if target in ranks else "kills of launchers"] += 1
    try:
        process.wait(BAR)
        while (left := running(folder)) and time.monotonic() - begun < BAR:
            time.sleep(0.02)
    except subprocess.TimeoutExpired:
        left = [process.pid]
    if left:
        raise Failure(f"{left} still run {BAR} s after signal {how} to {target} of {ranks}: {said(folder)}")
    return judged(process, folder)


def judged(process, folder):
    """The exit code of a run, which must be one that it may have."""
    text = said(folder)
    if "panicked" in text or "fault of xtrain" in text or process.returncode not in (0, 1, -signal.SIGKILL, 128 + signal.SIGKILL):
        raise Failure(f"ends badly: exit code {process.returncode}: {text[-2000:]}")
    return process.returncode, text


def size(file):
    return file.stat().st_size if file.exists() else 0


def said(folder):
    return (folder / "said").read_text(errors="replace")


def children(pid):
    try:
        return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def running(folder):
    """The processes that run in `folder`, among them a rank that started while another process was chosen and killed."""
    found = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            state = (process / "stat").read_text().rsplit(")", 1)[1].split()[0]
            if state not in ("Z", "X") and os.path.samefile(process / "cwd", folder):
                found.append(int(process.name))
        except OSError:
            pass
    return found
