#!/usr/bin/env python3
"""Kills fine-tuning runs at random moments, resumes them in other worlds, and compares the bits.

    cargo build --release
    tests/chat/kills.py --xtrain target/release/xtrain --work /tmp/chat-kills

The run is that of examples/chat.toml, with 24 steps, a checkpoint after every third, and
`parallel.reduce = "any-world"`. Its base is the quickstart's model after a few steps. One run is trained without a
kill in a world of 1, of 2 and of 4 processes. Then, for each of these worlds, runs are killed with all their processes
(SIGKILL) at a random step from 0 to 23, some time into it, and resumed once in a world drawn from the three. The
exported weights and the records of all steps (loss, gradient norm, learning rate) must equal those of the first run to
the bit, and the resumed run must go on after the last checkpoint.

Prints a line for each world: its kills, in which worlds they were resumed, and how many were equal. Takes about ten
minutes on two cores. Exit code 1 if a run differs. The seed draws steps, moments and worlds.
"""

import argparse
import collections
import hashlib
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "campaign"))
import place  # noqa: E402

WORLDS = (1, 2, 4)
STEPS = 24
BASE = ["train.steps=20", "train.device=cpu", "checkpoint.every=0", "eval.every=0", "eval.prompts=[]"]
SETTINGS = [
    *("parallel.reduce=any-world", "train.device=cpu", "train.threads=1", "train.micro_batch_size=1"),
    *(f"train.steps={STEPS}", "checkpoint.every=3", "log.every=1", "eval.every=0", "eval.chats=[]"),
]


class Runs:
    """Runs of the binary in the work folder."""

    def __init__(self, xtrain, work):
        self.xtrain, self.work = xtrain.resolve(), work.resolve()
        self.cache = f"data.cache_dir={self.work / 'cache'}"

    def command(self, run_file, out, settings, *options):
        sets = [word for setting in [*settings, self.cache] for word in ("--set", setting)]
        return [self.xtrain, "train", ROOT / "examples" / run_file, "--quiet", "--out", self.work / out, *sets, *options]

    def base(self):
        """The model that the runs start from."""
        if not (self.work / "base/hf").exists():
            subprocess.run(self.command("quickstart.toml", "base", BASE, "--resume"), cwd=ROOT, check=True)

    def chat(self, out, world, *options):
        settings = [f"model.init_from={self.work / 'base/hf'}", *SETTINGS]
        ranks = ["--ranks", str(world)] if world > 1 else []
        return self.command("chat.toml", out, settings, *ranks, *options)

    def finish(self, out, world, *options):
        """Trains to the end, and returns the bits."""
        subprocess.run(self.chat(out, world, *options), cwd=ROOT, check=True)
        weights = (self.work / out / "hf/model.safetensors").read_bytes()
        return hashlib.sha256(weights).hexdigest(), place.recorded(self.work / out)

    def recorded(self, out, before=float("inf")):
        """Number of steps that a run has recorded, before a point in time."""
        path = self.work / out / "metrics.jsonl"
        # A kill may cut the last line.
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        records = map(json.loads, lines)
        return sum(record["kind"] == "step" and record["time"] < before for record in records)

    def saved(self, out):
        """Step of a run's last checkpoint; 0 if it has none."""
        folders = (self.work / out / "checkpoints").glob("step-*")
        return max((int(folder.name.removeprefix("step-")) for folder in folders if ".tmp" not in folder.name), default=0)

    def kill(self, out, world, step, delay):
        """Kills a run so many seconds after it has recorded the step; returns False if it has ended before."""
        shutil.rmtree(self.work / out, ignore_errors=True)
        process = subprocess.Popen(self.chat(out, world), cwd=ROOT, start_new_session=True)
        while process.poll() is None and self.recorded(out) < step:
            time.sleep(0.002)
        time.sleep(delay)
        is_running = process.poll() is None
        if is_running:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        elif process.returncode:
            raise SystemExit(f"a run in world {world} ended with {process.returncode} before it was killed")
        return is_running


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--xtrain", required=True, type=pathlib.Path)
    options.add_argument("--work", required=True, type=pathlib.Path)
    options.add_argument("--kills", type=int, default=20, help="in each world")
    options.add_argument("--seed", type=int, default=1)
    given = options.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    dice, runs = random.Random(given.seed), Runs(given.xtrain, given.work)
    runs.base()
    expected, different = None, 0
    for world in WORLDS:
        shutil.rmtree(runs.work / "whole", ignore_errors=True)
        begun = time.monotonic()
        bits = runs.finish("whole", world)
        # A little longer than a step, as it contains the start and the export.
        longest = (time.monotonic() - begun) / STEPS
        expected = expected or bits
        if bits != expected:
            print(f"world {world}: the bits of a run without a kill are not those of world {WORLDS[0]}", flush=True)
            different += 1
        equal, after_checkpoint, resumed = 0, 0, collections.Counter()
        while resumed.total() < given.kills:
            step, other = dice.randrange(STEPS), dice.choice(WORLDS)
            if not runs.kill("killed", world, step, dice.uniform(0, longest)):
                continue
            recorded, saved, killed_at = runs.recorded("killed"), runs.saved("killed"), time.time()
            bits = runs.finish("killed", other, "--resume")
            resumed[other] += 1
            after_checkpoint += saved > 0
            if bits == expected and runs.recorded("killed", before=killed_at) == saved:
                equal += 1
            else:
                problem = "other bits" if bits != expected else f"did not go on after the checkpoint of step {saved}"
                print(f"world {world}, killed after step {recorded}, resumed in world {other}: {problem}", flush=True)
        where = ", ".join(f"{count} in world {other}" for other, count in sorted(resumed.items()))
        print(f"world {world}: {given.kills} kills, {after_checkpoint} of them after a checkpoint; resumed {where}: {equal} equal", flush=True)
        different += given.kills - equal
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
