"""Programs of `log.command` that hang, flood, end, close their input, ignore signals, start others or kill their group.

The run never waits and never fails, its log is bounded, the program sees no variable of the launch, and it ends with its run: some
seconds after a kill, half a minute after an orderly end.
"""

import signal
import time

import launched
import place
import ranks
from program import Failure

SHORT = 4
# What a program does at first, and then.
FIRST = ["", "", "trap '' TERM HUP INT", "exec <&-", "(trap '' TERM HUP; while true; do sleep 0.2; done) &", "sleep 600 &", "kill -STOP $$ &"]
THEN = [
    "exec cat > got",
    "while read line; do sleep 0.05; done",
    "exec sleep 600",
    "while true; do :; done",
    "yes 0123456789",
    "yes flood >&2",
    "head -c 30000000 /dev/zero; exec cat > got",
    "exit 3",
    "kill 0",
    "kill -9 $$",
    "exec true",
]
# Seconds after which the program is gone.
AFTER_A_KILL, AFTER_THE_END = 12, 45
MOST_BYTES = 5 << 20
OF_A_LAUNCH = ("RANK=", "WORLD_SIZE=", "LOCAL_", "MASTER_", "XTRAIN_SECRET=", "XTRAIN_LAUNCHER=", "OMPI_", "PMI", "SLURM_PROCID=", "SLURM_STEP")


def prepare(folder, program):
    place.texts(folder)
    program.run(folder, [*launched.COMMAND, "--out", "alone"]).succeeds()


def trial(prepared, base, folder, program, dice, count):
    place.texts(folder)
    first, then = dice.choice(FIRST), dice.choice(THEN)
    (folder / "program.sh").write_text(f"env > variables.new; mv variables.new variables\n{first}\n{then}\n")
    command = [*launched.COMMAND, "--out", "run", "--set", 'log.command=["sh","program.sh"]', "--set", "log.every=1"]
    number = dice.choice([1, 1, 2])
    around = dice.choice([{}, {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0"}, {"PMI_RANK": "0", "PMI_SIZE": "1"}])
    around = around | {"SLURM_JOB_ID": "7", "XTRAIN_SECRET": launched.SECRET}
    if number > 1:
        command += ["--ranks", "2"]
    what = f"`{first}`, then `{then}` on {number}"
    is_killed = dice.random() < 0.6
    run = launched.Rank(program, folder, command + (["--set", "train.steps=100000", "--set", "schedule.kind=constant"] if is_killed else []), around)
    if is_killed:
        begun = time.monotonic()
        while not (folder / "variables").exists() and run.process.poll() is None and time.monotonic() - begun < 60:
            time.sleep(0.02)
        time.sleep(dice.uniform(0, 1.5))
        if run.process.poll() is not None:
            raise Failure(f"{what}: the run ended: {run.said()[-2000:]}")
        run.process.send_signal(signal.SIGKILL)
        run.process.wait()
    elif run.ends(100) != 0:
        raise Failure(f"{what}: the run failed: {run.said()[-2000:]}")
    begun = time.monotonic()
    while time.monotonic() - begun < 1:
        check_log(folder, what)
    try:
        launched.none_is_left(folder, AFTER_A_KILL if is_killed else AFTER_THE_END)
    except Failure as failure:
        raise Failure(f"{what}, {'killed' if is_killed else 'ended'}: {failure}") from failure
    check_log(folder, what)
    # A program that stops itself at once may not come so far.
    variables = (folder / "variables").read_text(errors="replace").splitlines() if (folder / "variables").exists() else ["XTRAIN_RUN=", "SLURM_JOB_ID="]
    if shown := [line for line in variables if line.startswith(OF_A_LAUNCH)]:
        raise Failure(f"{what}: inherits {shown}")
    if not all(any(line.startswith(name) for line in variables) for name in ("XTRAIN_RUN=", "SLURM_JOB_ID=")):
        raise Failure(f"{what}: lacks a variable: {variables}")
    if not is_killed:
        expected, found = ranks.lasting(base / "alone"), ranks.lasting(folder / "run")
        place.same(expected | {"records": 0}, found | {"records": 0}, f"a run beside a program that does {what}")
        # A program that has stopped itself reads no further.
        if then == "exec cat > got" and first not in ("exec <&-", "kill -STOP $$ &") and (folder / "got").read_bytes() != (folder / "run/metrics.jsonl").read_bytes():
            raise Failure(f"{what}: misses lines")
    return "killed" if is_killed else "ended"


def check_log(folder, what):
    log = folder / "run/command.log"
    if log.exists() and log.stat().st_size > MOST_BYTES:
        raise Failure(f"{what}: a log of {log.stat().st_size} bytes")
