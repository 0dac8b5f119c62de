#!/usr/bin/env python3
"""Speed of training on several GPUs against one, with the same batch on each GPU. Prints both as a line of JSON.

    XTRAIN=target/release/xtrain benches/weak_scaling.py benches/configs/llama1b.toml --gpus 2 --batch 8 --set parallel.shard=weights

GPUs of one machine differ by some percent, and all ranks wait for the slowest. So the run on one GPU is made on every GPU at the same time, and the
slowest of these counts. Rounds alternate between both. The runs are ended after the measured steps.
CUDA_VISIBLE_DEVICES selects the GPUs; the first --gpus of them are used.
"""

import argparse
import itertools
import json
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[1]
# Steps of a window whose mean time is logged, and windows that are left out at the beginning.
WINDOW, WARMUP = 4, 3
# The text: random characters, as frequent as the words of a text (Zipf's law), so that a model cannot memorise it in a few steps.
CHARACTERS, KINDS = 4_000_000, 16384


class Bench:
    """Runs of xtrain in a folder, which are measured and then ended."""

    def __init__(self, folder, steps):
        self.folder, self.needed, self.numbers = folder, -(-steps // WINDOW) + WARMUP, itertools.count()
        self.xtrain, self.shards = os.environ.get("XTRAIN", str(ROOT / "target/release/xtrain")), folder / "shards"
        text, kinds, draw = folder / "text.txt", [chr(0x4E00 + n) for n in range(KINDS)], random.Random(7).random
        text.write_text("".join(kinds[int((KINDS + 1) ** draw()) - 1] for _ in range(CHARACTERS)))
        tokenize = [self.xtrain, "tokenize", text, "--chars", "--out", self.shards]
        subprocess.run([*map(str, tokenize)], check=True, stdout=subprocess.DEVNULL)

    def begin(self, run_file, sets, batch, gpus=1, visible=None):
        """Starts a run with so many sequences in a step, on so many GPUs, or on the one that is `visible`."""
        out = self.folder / f"run-{next(self.numbers)}"
        every = {
            "data.train": self.shards, "data.tokenizer": "", "data.held_out": "0.0", "train.steps": 10**6, "train.batch_size": batch,
            "checkpoint.every": 0, "eval.every": 0, "eval.at_end": "false", "log.every": WINDOW, "log.tensorboard": "false",
        }
        every = [part for key, value in every.items() for part in ("--set", f"{key}={value}")]
        command = [self.xtrain, "train", run_file, "--out", out, *(["--gpus", gpus] if gpus > 1 else []), *every, *sets]
        environment = dict(os.environ) if visible is None else dict(os.environ, CUDA_VISIBLE_DEVICES=str(visible))
        log = open(out.with_suffix(".log"), "w")
        return subprocess.Popen([*map(str, command)], stdout=log, stderr=log, env=environment, start_new_session=True), out

    def measure(self, runs):
        """Seconds of a step of each run, the median over windows, once all have made enough steps; and a line of the first run's log."""
        try:
            while any(len(steps(out)) < self.needed for _, out in runs):
                for run, out in runs:
                    if run.poll() is not None:
                        sys.exit(f"{' '.join(run.args)} ended with {run.returncode}:\n{out.with_suffix('.log').read_text()[-2000:]}")
                time.sleep(0.2)
        finally:
            for run, _ in runs:
                if run.poll() is None:
                    os.killpg(run.pid, signal.SIGKILL)
                    run.wait()
            # The driver frees the memory of killed processes a little later.
            time.sleep(5)
        windows = [steps(out)[WARMUP:self.needed] for _, out in runs]
        return [statistics.median(line["step_ms"] for line in of_run) / 1e3 for of_run in windows], windows[0][0]


def steps(out):
    """The logged windows of a run so far."""
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    parsed = [json.loads(line) for line in lines if line.endswith("}")]
    return [line for line in parsed if line["kind"] == "step"]


def end_with_its_runs():
    """Lets SIGTERM end this process as Ctrl-C does, so that its runs, which have sessions of their own, are ended too."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("run_file")
    arguments.add_argument("--gpus", type=int, default=2)
    arguments.add_argument("--batch", type=int, required=True, help="sequences of a step on each GPU")
    arguments.add_argument("--steps", type=int, default=16, help="measured steps of a round")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = arguments.parse_args()
    sets = [part for setting in options.set for part in ("--set", setting)]
    end_with_its_runs()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = list(filter(None, visible.split(",")))[:options.gpus] if visible is not None else range(options.gpus)
    if len(gpus) < options.gpus:
        arguments.error(f"CUDA_VISIBLE_DEVICES={visible} shows fewer than {options.gpus} GPUs")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(pathlib.Path(folder), options.steps)
        alone, together = [], []
        for n in range(options.rounds):
            runs = [bench.begin(options.run_file, sets, options.batch, visible=gpu) for gpu in gpus]
            alone.append(max(bench.measure(runs)[0]))
            seconds, line = bench.measure([bench.begin(options.run_file, sets, options.batch * options.gpus, gpus=options.gpus)])
            together += seconds
            print(f"round {n + 1}: one GPU {alone[-1] * 1e3:.1f} ms, {options.gpus} GPUs {together[-1] * 1e3:.1f} ms", file=sys.stderr)
    one, all_ = statistics.median(alone), statistics.median(together)
    tokens = line["tokens_per_second"] * line["step_ms"] / 1e3
    print(json.dumps({"tokens_per_second": tokens / all_, "one_gpu_tokens_per_second": tokens / options.gpus / one,
                      "efficiency": one / all_, "memory_bytes": line["memory_bytes"], "gpus": options.gpus,
                      "command": " ".join(["benches/weak_scaling.py", *sys.argv[1:]])}))


if __name__ == "__main__":
    main()
