#!/usr/bin/env python3
"""Trains a model with xtrain and with PyTorch, from the same weights on the same batches of a text, and compares the losses.

    python tests/training/against_torch.py TEXT --precision fp32 --steps 100
    python tests/training/against_torch.py TEXT --precision bf16 --steps 160 --device cpu --xtrain target/release/xtrain

TEXT is what `xtrain tokenize` takes. Needs torch and transformers; takes seconds on a GPU, minutes on a CPU. In fp32 the bar is
the relative difference of every step's loss, in bf16 (PyTorch: autocast over fp32 weights) that of the mean over the last 20 steps.
Prints one line of JSON, and ends with 1 where the bar is missed.

What both must agree on is written down twice, here and in xtrain: the order of samples and the shards' layout (docs/data-format.md),
AdamW, clipping and which parameters decay (docs/numerics.md). The learning rates are those that xtrain reports.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM

MASK = (1 << 64) - 1
BARS = {"fp32": 1e-4, "bf16": 3e-3}

RUN = """
[model]
init_from = "{folder}"
[data]
train = "{shards}"
held_out = 0.0
seq_len = {seq_len}
[precision]
recipe = "{precision}"
[optimizer]
lr = 1e-3
betas = [0.9, 0.95]
weight_decay = 0.1
[schedule]
kind = "cosine"
warmup_steps = 10
[train]
steps = {steps}
batch_size = {batch}
seed = {seed}
device = "{device}"
[checkpoint]
every = 0
export_hf = false
[eval]
every = 0
at_end = false
[log]
every = 1
tensorboard = false
"""


def mix(x):
    z = (x + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK
    return z ^ z >> 31


def hashed(key, a, b):
    return mix(mix(mix(key) ^ a) ^ b)


def place(k, count, key):
    """P(k) of docs/data-format.md: where the k-th of `count` windows lies."""
    bits = (count - 1).bit_length()
    low_bits = bits // 2
    high_bits = bits - low_bits
    while True:
        low, high = k & ((1 << low_bits) - 1), k >> low_bits
        for j in range(12):
            if j % 2 == 0:
                high = (high + hashed(key, j, low)) & ((1 << high_bits) - 1)
            else:
                low = (low + hashed(key, j, high)) & ((1 << low_bits) - 1)
        k = high << low_bits | low
        if k < count:
            return k


def tokens_of(shards):
    index = json.loads((shards / "dataset.json").read_text())
    parts = []
    for shard in index["shards"]:
        data = (shards / shard["file"]).read_bytes()
        width = np.uint16 if int.from_bytes(data[12:16], "little") == 2 else np.uint32
        parts.append(np.frombuffer(data, width, count=shard["tokens"], offset=256).astype(np.int64))
    return np.concatenate(parts), index["vocab_size"]


def torch_losses(model, tokens, reported, a):
    device = a.device
    model.to(device).train()
    windows = (len(tokens) - 1) // a.seq_len
    decayed = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed_tokens" not in n]
    others = [p for n, p in model.named_parameters() if p.dim() != 2 or "embed_tokens" in n]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for step, line in enumerate(reported):
        samples = range(step * a.batch, (step + 1) * a.batch)
        where = [place(i % windows, windows, hashed(a.seed, 0, i // windows)) * a.seq_len for i in samples]
        cut = torch.from_numpy(np.stack([tokens[w : w + a.seq_len + 1] for w in where])).to(device)
        with torch.autocast(device, torch.bfloat16, enabled=a.precision == "bf16"):
            logits = model(input_ids=cut[:, :-1]).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), cut[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = line["lr"]
        optimizer.step()
        losses.append(loss.item())
    return losses


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("text")
    ap.add_argument("--precision", choices=BARS, default="fp32")
    ap.add_argument("--steps", type=int, default=100)
    ap.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    ap.add_argument("--xtrain", default="xtrain", help="the binary")
    ap.add_argument("--dim", type=int, default=512)
    ap.add_argument("--layers", type=int, default=8)
    ap.add_argument("--seq-len", type=int, default=256)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--seed", type=int, default=7)
    a = ap.parse_args()
    torch.manual_seed(a.seed)
    torch.backends.cuda.matmul.allow_tf32 = False

    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        shards, hf, run = folder / "shards", folder / "hf", folder / "run"
        quiet = {"stdout": sys.stderr, "check": True}
        subprocess.run([a.xtrain, "tokenize", a.text, "--bpe-vocab-size", "8192", "--out", shards], **quiet)
        tokens, vocab = tokens_of(shards)
        config = Qwen3Config(
            vocab_size=vocab, hidden_size=a.dim, intermediate_size=3 * a.dim, num_hidden_layers=a.layers,
            num_attention_heads=a.dim // 64, num_key_value_heads=max(1, a.dim // 128), head_dim=64,
            max_position_embeddings=a.seq_len, tie_word_embeddings=False, initializer_range=0.02,
        )
        model = Qwen3ForCausalLM(config)
        model.save_pretrained(hf)
        for file in shards.glob("*token*.json"):
            (hf / file.name).write_bytes(file.read_bytes())
        settings = dict(vars(a), folder=hf, shards=shards)
        (folder / "run.toml").write_text(RUN.format(**settings))
        subprocess.run([a.xtrain, "train", folder / "run.toml", "--out", run], **quiet)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    reported = [line for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in reported] == list(range(1, a.steps + 1)), "a line a step"
    ours = [line["loss"] for line in reported]
    theirs = torch_losses(model, tokens, reported, a)
    differences = [abs(x - y) / y for x, y in zip(ours, theirs)]
    mean = lambda x: sum(x[-20:]) / len(x[-20:])
    value = max(differences) if a.precision == "fp32" else abs(mean(ours) - mean(theirs)) / mean(theirs)
    result = {
        "work": f"{a.steps} {a.precision} steps against PyTorch on one text",
        "metric": "largest relative difference of a loss" if a.precision == "fp32" else "relative difference of the mean loss of the last 20",
        "value": float(f"{value:.3g}"), "at_most": BARS[a.precision], "first": ours[0], "last": ours[-1], "last_of_torch": theirs[-1],
    }
    print(json.dumps(result))
    sys.exit(not (math.isfinite(value) and value <= BARS[a.precision]))


if __name__ == "__main__":
    main()
