"""Peak memory of training on the CPU beside what `xtrain plan` says, as lines of benches/results.

    python3 benches/peak_memory.py --xtrain target/release/xtrain >> benches/results/DATE-cpu-resident.jsonl

Each run tokenizes its text, makes two steps, two saves and evaluations, and the export at the end. The plan's lines count all that: memory of the step, of kernels
and of the copy that a save makes, and the process itself.
"""

import argparse
import datetime
import gzip
import json
import os
import pathlib
import re
import subprocess
import tempfile

EXPERTS = ["model.layers=2", "data.seq_len=256", "experts.count=8", "experts.ffn_dim=512", "experts.per_token=2"]
RUNS = {
    "dim 256, 4 layers, fp32": ["model.dim=256", "model.layers=4", "data.seq_len=256"],
    "dim 512, 6 layers, 256 tokens, fp32": ["model.dim=512", "model.layers=6", "data.seq_len=256"],
    "dim 256, 2 layers, vocabulary of 50,000, fp32": ["model.dim=256", "model.layers=2", "model.vocab_size=50000", "data.seq_len=256"],
    "dim 256, 6 layers, bf16, blocks recomputed, bf16 moments": [
        "model.dim=256",
        "model.layers=6",
        "data.seq_len=256",
        "precision.recipe=bf16",
        "train.recompute=block",
        "optimizer.moments=bf16",
    ],
    "dim 512, 4 layers, fp8-block": ["model.dim=512", "model.layers=4", "data.seq_len=256", "precision.recipe=fp8-block"],
    "dim 128, 2 layers, 1500 tokens, fp32": ["model.dim=128", "model.layers=2", "data.seq_len=1500"],
    "qwen3_moe, dim 512, 8 experts, fp32": ["model.family=qwen3_moe", "model.dim=512", *EXPERTS],
    "mixtral, dim 512, 4 experts, fp8-block": [
        "model.family=mixtral",
        "model.dim=512",
        *EXPERTS,
        "experts.count=4",
        "precision.recipe=fp8-block",
    ],
    "qwen3_moe, dim 512, 16 experts, bf16": ["model.family=qwen3_moe", "model.dim=512", *EXPERTS, "experts.count=16", "precision.recipe=bf16"],
    "dim 64, 1 layer, a new vocabulary": ["model.dim=64", "model.layers=1", "data.seq_len=64", "data.tokenizer=bpe", "data.bpe_vocab_size=2000"],
    "2 ranks, weights, dim 256, 4 layers, fp32": ["--ranks", "2", "parallel.shard=weights", "model.dim=256", "model.layers=4", "data.seq_len=256"],
    "2 ranks, none, vocabulary of 50,000, fp32": ["--ranks", "2", "model.dim=256", "model.layers=2", "model.vocab_size=50000", "data.seq_len=256"],
    "4 ranks, weights, 8 experts, fp32": ["--ranks", "4", "parallel.shard=weights", "model.family=qwen3_moe", "model.dim=512", *EXPERTS],
}
FILE = """
[model]
dim = 0
layers = 0
heads = 4
vocab_size = 4096
[data]
train = "text.txt"
tokenizer = "bytes"
[train]
steps = 2
batch_size = 4
device = "cpu"
recompute = "none"
loss_chunk = 4096
[checkpoint]
every = 1
[eval]
every = 1
tokens = 512
"""
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def options(setting):
    """The command line of an entry of a run: a setting, or an option and its value."""
    return ["--set", setting] if "=" in setting else [setting]


def planned(text):
    """Bytes of all lines of a plan: those of training, or those of tokenizing before it, if they are more."""

    def line(words):
        found = re.search(rf"^{words} ([\d.,]+) (\w+)", text, re.MULTILINE)
        return float(found.group(1).replace(",", "")) * UNITS[found.group(2)] if found else 0

    total = int(re.search(r"^total +([\d,]+)", text, re.MULTILINE).group(1).replace(",", ""))
    process = line("the process itself uses up to")
    training = total + line("CPU kernels use up to") + line("a save copies")
    return process + max(training, line("turning text into tokens uses up to"))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--xtrain", type=pathlib.Path, required=True)
    parser.add_argument("--card", default="2 cores")
    arguments = parser.parse_args()
    xtrain = arguments.xtrain.absolute()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    text = gzip.decompress(pathlib.Path("examples/data/snapshot.txt.gz").read_bytes())
    for work, settings in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            (folder / "text.txt").write_bytes(text)
            (folder / "run.toml").write_text(FILE)
            sets = [word for setting in settings for word in options(setting)]
            plan = subprocess.run([xtrain, "plan", "run.toml", *sets], cwd=folder, capture_output=True, text=True, check=True).stdout
            run = subprocess.Popen([xtrain, "train", "run.toml", *sets], cwd=folder, stdout=subprocess.DEVNULL)
            _, status, usage = os.wait4(run.pid, 0)
            run.returncode = os.waitstatus_to_exitcode(status)
            assert run.returncode == 0, f"{work}: exit code {run.returncode}"
        value, peer = usage.ru_maxrss / 1024, planned(plan) / (1 << 20)
        line = {"work": work, "metric": "MiB", "value": round(value, 1), "peer": "xtrain plan, all lines"}
        line |= {"peer_value": round(peer, 1), "ratio": round(value / peer, 3), "card": arguments.card, "driver": "none"}
        line |= {"command": "python3 benches/peak_memory.py --xtrain XTRAIN", "commit": commit, "date": str(datetime.date.today())}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
