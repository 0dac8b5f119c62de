#!/usr/bin/env python3
"""Speed of training on several GPUs against one, with the same batch on each GPU. Prints both as a line of JSON.

    XTRAIN=target/release/xtrain benches/weak_scaling.py benches/configs/llama1b.toml --gpus 2 --batch 8 --set parallel.shard=weights

GPUs of one machine differ by some percent, and all ranks wait for the slowest. So the run on one GPU is made on every GPU at the same time, and the
slowest of these counts. Rounds alternate between both. The runs are ended after the measured steps; their text is this project's own.
"""

import argparse
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[1]
# Steps of a window whose mean time is logged, and windows that are left out at the beginning.
WINDOW, WARMUP = 4, 3


def steps(out):
    """The logged windows of a run so far."""
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    parsed = [json.loads(line) for line in lines if line.endswith("}")]
    return [line for line in parsed if line["kind"] == "step"]


def begin(options, out, batch, gpus=1, visible=None):
    """Starts a run with so many sequences in a step, on so many GPUs, or on the one that is `visible`."""
    every = {
        "data.train": options.shards, "data.tokenizer": "", "data.held_out": "0.0", "train.steps": 10**6, "train.batch_size": batch,
        "checkpoint.every": 0, "eval.every": 0, "eval.at_end": "false", "log.every": WINDOW, "log.tensorboard": "false",
    }
    sets = [part for key, value in every.items() for part in ("--set", f"{key}={value}")] + [part for s in options.set for part in ("--set", s)]
    command = [options.xtrain, "train", options.run_file, "--out", out, *(["--gpus", gpus] if gpus > 1 else []), *sets]
    environment = dict(os.environ) if visible is None else dict(os.environ, CUDA_VISIBLE_DEVICES=str(visible))
    log = open(out.with_suffix(".log"), "w")
    return subprocess.Popen([*map(str, command)], stdout=log, stderr=log, env=environment, start_new_session=True)


def measure(options, runs):
    """Seconds of a step of each run, the median over windows, once all have made enough steps."""
    needed = options.steps // WINDOW + WARMUP
    try:
        while any(len(steps(out)) < needed for _, out in runs):
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
    windows = [steps(out)[WARMUP:needed] for _, out in runs]
    return [statistics.median(line["step_ms"] for line in of_run) / 1e3 for of_run in windows], windows[0][0]


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("run_file")
    arguments.add_argument("--gpus", type=int, default=2)
    arguments.add_argument("--batch", type=int, required=True, help="sequences of a step on each GPU")
    arguments.add_argument("--steps", type=int, default=16, help="measured steps of a round")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = arguments.parse_args()
    options.xtrain = os.environ.get("XTRAIN", str(ROOT / "target/release/xtrain"))
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        options.shards = folder / "shards"
        text = ROOT / "examples/data/snapshot.txt.gz"
        subprocess.run([options.xtrain, "tokenize", text, "--bpe-vocab-size", "2048", "--out", options.shards], check=True, stdout=sys.stderr)
        alone, together = [], []
        for n in range(options.rounds):
            outs = [folder / f"one-{n}-{gpu}" for gpu in range(options.gpus)]
            runs = [(begin(options, out, options.batch, visible=gpu), out) for gpu, out in enumerate(outs)]
            seconds, _ = measure(options, runs)
            alone.append(max(seconds))
            out = folder / f"all-{n}"
            seconds, line = measure(options, [(begin(options, out, options.batch * options.gpus, gpus=options.gpus), out)])
            together += seconds
            print(f"round {n + 1}: one GPU {alone[-1] * 1e3:.1f} ms, {options.gpus} GPUs {together[-1] * 1e3:.1f} ms", file=sys.stderr)
    one, all_ = statistics.median(alone), statistics.median(together)
    tokens = line["tokens_per_second"] * line["step_ms"] / 1e3
    print(json.dumps({"tokens_per_second": tokens / all_, "one_gpu_tokens_per_second": tokens / options.gpus / one,
                      "efficiency": one / all_, "memory_bytes": line["memory_bytes"], "gpus": options.gpus,
                      "command": " ".join(["benches/weak_scaling.py", *sys.argv[1:]])}))


if __name__ == "__main__":
    main()
