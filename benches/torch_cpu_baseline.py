#!/usr/bin/env python3
"""What PyTorch needs on this machine for nanoGPT's CPU example: the time xtrain must not exceed.

    python benches/torch_cpu_baseline.py --data shakespeare.txt             # nanoGPT's model, eager
    python benches/torch_cpu_baseline.py --data shakespeare.txt --compile   # the same, compiled
    python benches/torch_cpu_baseline.py --data shakespeare.txt --arch qwen3

The job: a character model of 4 layers, 4 heads, width 128, context 64; batches of 12 random
windows; 2,000 steps of AdamW (0.9, 0.99, weight decay 0.1 on every matrix, clip 1.0), the
learning rate warmed up over 100 steps to 1e-3, then a cosine to 1e-4; the last tenth of the text
held out; every 250 steps the loss of 20 batches of each part. `--arch qwen3` keeps the job
and swaps the model: RMSNorm, RoPE, QK-norm and SwiGLU, with an MLP of as many parameters.

Needs torch alone. fp32 throughout, fused attention and fused AdamW, as a careful user would
have it. Prints progress to stderr and one JSON object to stdout: seconds for all steps with
and without the evaluations (compiling apart), and the loss over the whole validation part.
"""

import argparse
import json
import math
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

LAYERS, HEADS, WIDTH, CONTEXT, BATCH = 4, 4, 128, 64, 12
HEAD_DIM = WIDTH // HEADS
LR_MAX, LR_MIN, WARMUP = 1e-3, 1e-4, 100
EVAL_EVERY, EVAL_BATCHES = 250, 20


# --- models: tokens [batch, time] in, logits [batch, time, vocab] out ------------------


class Attention(nn.Module):
    """Causal self-attention, with QK-norm and RoPE when `rope` (cos, sin) is handed in."""

    def __init__(self, qk_norm):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.q_norm = nn.RMSNorm(HEAD_DIM, eps=1e-6) if qk_norm else None
        self.k_norm = nn.RMSNorm(HEAD_DIM, eps=1e-6) if qk_norm else None

    def forward(self, x, rope):
        batch, seq, _ = x.shape
        q, k, v = self.qkv(x).view(batch, seq, 3, HEADS, HEAD_DIM).permute(2, 0, 3, 1, 4)
        if self.q_norm is not None:
            q, k = rotate(self.q_norm(q), *rope), rotate(self.k_norm(k), *rope)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, seq, WIDTH))


def rotate(x, cos, sin):
    """RoPE on pairs (i, i + head_dim / 2)."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def rope_table():
    """Cosines and sines [context, head_dim / 2], theta 10000."""
    frequency = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angle = torch.arange(CONTEXT)[:, None] * frequency
    return angle.cos(), angle.sin()


class GeluMlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.out = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.out(F.gelu(self.up(x)))


class SwigluMlp(nn.Module):
    """8/3 of the width, rounded up to a multiple of 8: the parameters of the GELU MLP."""

    def __init__(self):
        super().__init__()
        hidden = -(-8 * WIDTH // 3 // 8) * 8
        self.gate_up = nn.Linear(WIDTH, 2 * hidden, bias=False)
        self.out = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.out(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, norm, mlp, qk_norm):
        super().__init__()
        self.norm1, self.norm2 = norm(), norm()
        self.attention, self.mlp = Attention(qk_norm), mlp()

    def forward(self, x, rope):
        x = x + self.attention(self.norm1(x), rope)
        return x + self.mlp(self.norm2(x))


class CharModel(nn.Module):
    """GPT-2 or Qwen3 style; the head is the token embedding."""

    def __init__(self, arch, vocab):
        super().__init__()
        if arch == "gpt2":
            norm, mlp = lambda: nn.LayerNorm(WIDTH, bias=False), GeluMlp
            self.position = nn.Embedding(CONTEXT, WIDTH)
        else:
            norm, mlp = lambda: nn.RMSNorm(WIDTH, eps=1e-6), SwigluMlp
            self.position = None
        self.token = nn.Embedding(vocab, WIDTH)
        self.blocks = nn.ModuleList(Block(norm, mlp, arch == "qwen3") for _ in range(LAYERS))
        self.norm = norm()
        cos, sin = rope_table()
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                residual = name.endswith("out.weight")
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * LAYERS) if residual else 0.02)

    def forward(self, ids):
        seq = ids.shape[1]
        x = self.token(ids)
        if self.position is not None:
            x = x + self.position.weight[:seq]
        for block in self.blocks:
            x = block(x, (self.cos[:seq], self.sin[:seq]))
        return F.linear(self.norm(x), self.token.weight)


def loss_of(model, ids, targets):
    """Mean cross-entropy in nats."""
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


# --- data ------------------------------------------------------------------------------


@dataclass
class Text:
    """The characters of a file as ids, in the order of their code points."""

    train: torch.Tensor
    held_out: torch.Tensor
    vocab: int


def read_text(path):
    text = path.read_text(encoding="utf-8")
    ids = {c: i for i, c in enumerate(sorted(set(text)))}
    tokens = torch.tensor([ids[c] for c in text])
    cut = int(0.9 * len(tokens))
    return Text(tokens[:cut], tokens[cut:], len(ids))


def random_batch(tokens):
    """BATCH windows at random places, and the same windows one character on."""
    window = torch.randint(len(tokens) - CONTEXT, (BATCH, 1)) + torch.arange(CONTEXT)
    return tokens[window], tokens[window + 1]


# --- training and evaluation -----------------------------------------------------------


def learning_rate(step, steps):
    """Warmup that does not start from 0, then a cosine over the rest of the `steps`."""
    if step < WARMUP:
        return LR_MAX * (step + 1) / WARMUP
    part = (step - WARMUP) / max(1, steps - WARMUP)
    return LR_MIN + 0.5 * (1 + math.cos(math.pi * part)) * (LR_MAX - LR_MIN)


@torch.no_grad()
def sampled_loss(model, tokens):
    return sum(loss_of(model, *random_batch(tokens)).item() for _ in range(EVAL_BATCHES)) / EVAL_BATCHES


@torch.no_grad()
def whole_loss(model, tokens):
    """Loss over all of `tokens` in windows side by side (the last one shorter): every
    character but the first is predicted once."""
    full = (len(tokens) - 1) // CONTEXT
    ids = tokens[: full * CONTEXT].view(full, CONTEXT)
    targets = tokens[1 : full * CONTEXT + 1].view(full, CONTEXT)
    total = 0.0
    for i in range(0, full, 64):
        part = ids[i : i + 64]
        total += loss_of(model, part, targets[i : i + 64]).item() * part.numel()
    rest = tokens[full * CONTEXT :]
    if len(rest) > 1:
        total += loss_of(model, rest[None, :-1], rest[None, 1:]).item() * (len(rest) - 1)
    return total / (len(tokens) - 1)


def train(model, text, steps, compiled):
    """Trains in place. Returns the seconds of compiling, of all that follows and, of these,
    of the evaluations; and the evaluations as (step, training loss, validation loss)."""
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() == 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=LR_MAX, betas=(0.9, 0.99), fused=True,
    )
    run = torch.compile(model) if compiled else model
    compiling = warm_up(run, model, text) if compiled else 0.0

    evaluations, evaluating = [], 0.0
    start = time.perf_counter()
    for step in range(steps + 1):
        if step % EVAL_EVERY == 0 or step == steps:
            before = time.perf_counter()
            evaluations.append((step, sampled_loss(run, text.train), sampled_loss(run, text.held_out)))
            evaluating += time.perf_counter() - before
            print("step %d: training %.4f, validation %.4f" % evaluations[-1], file=sys.stderr)
        if step == steps:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        loss_of(run, *random_batch(text.train)).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return compiling, time.perf_counter() - start, evaluating, evaluations


def warm_up(run, model, text):
    """Compiles forward and backward, and the forward of an evaluation; returns the seconds."""
    start = time.perf_counter()
    loss_of(run, *random_batch(text.train)).backward()
    sampled_loss(run, text.train)
    model.zero_grad(set_to_none=True)
    return time.perf_counter() - start


def cpu_name():
    """The processor's name on Linux, elsewhere whatever Python knows."""
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0] if names else platform.processor()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="a UTF-8 text file")
    parser.add_argument("--arch", choices=["gpt2", "qwen3"], default="gpt2", help="model (default: %(default)s)")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model; timed apart")
    parser.add_argument("--steps", type=int, default=2000, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1337, help="(default: %(default)s)")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    text = read_text(args.data)
    model = CharModel(args.arch, text.vocab)
    compiling, total, evaluating, evaluations = train(model, text, args.steps, args.compile)
    print(json.dumps({
        "arch": args.arch,
        "mode": "compile" if args.compile else "eager",
        "steps": args.steps,
        "seconds_compiling": round(compiling, 2),
        "seconds": round(total, 2),
        "seconds_without_evaluation": round(total - evaluating, 2),
        "ms_per_step": round(1000 * (total - evaluating) / args.steps, 2),
        "tokens_per_second": round(args.steps * BATCH * CONTEXT / (total - evaluating)),
        "validation_loss_whole": round(whole_loss(model, text.held_out), 4),
        "validation_loss_sampled": round(evaluations[-1][2], 4),
        "parameters": sum(p.numel() for p in model.parameters()),
        "threads": torch.get_num_threads(),
        "seed": args.seed,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }, indent=2))


if __name__ == "__main__":
    main()
