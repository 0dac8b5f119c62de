#!/usr/bin/env python3
"""Writes the golden files that the parity tests compare xtrain with.

    python tests/golden/make_golden.py                  # all models, next to this file
    python tests/golden/make_golden.py --only qwen3 --out /tmp/golden
    python tests/golden/make_golden.py --bf16           # bf16's errors anew, all else as it is
    python tests/golden/make_golden.py --balance        # the balance loss anew, all else as it is

Needs torch 2.11, transformers 5.17 and safetensors; takes seconds on a CPU. README.md in
this folder lists every file and tensor that comes out.

Two implementations compute everything. *torch*: the transformers model in fp32 with
`torch.optim.AdamW` and `clip_grad_norm_`; its results are what is stored. *reference*: the
same mathematics written out below in fp64 from the model papers and docs/numerics.md,
sharing no code with transformers (whose norms, RoPE tables and softmax stay in fp32 even
after `.double()`). Their difference is the error that PyTorch itself makes; it goes into
the manifest, so that a bar can be told from noise, and it must pass the bars.

Mixtures of experts: batches and prompts are drawn again until every token's last chosen expert leads the next one
by MARGIN in score, at every step, so that no rounding decides which experts a token has.

Names: B sequences, S tokens, V vocabulary, D head size, H query heads, G key/value heads.
"""

import argparse
import copy
import json
import math
import platform
import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

BATCH, SEQ, VOCAB = 2, 40, 49
BOS, EOS = 47, 48
IGNORED = -100
STEPS = 20
PROMPT_TOKENS, NEW_TOKENS = 6, 24

OPTIMIZER = {
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "lr_max": 1e-2,
    "warmup_steps": 4,
    "schedule": "linear warmup, then constant: lr(step) = lr_max * min(1, (step + 1) / warmup_steps), step from 0",
}

# Largest differences allowed between torch in fp32 and the fp64 reference: a fifth of the
# parity bars of docs/numerics.md, so that a test at the bar measures us and not torch.
OWN_ERROR = {"loss": 2e-7, "logits": 2e-6, "worst_gradient": 2e-5, "worst_step_loss": 2e-5}

# transformers' own loops: its faster kernels take no odd widths.
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}

# The least lead, in score, of a token's last chosen expert over the next one.
MARGIN = 1e-3

COMMON = dict(
    vocab_size=VOCAB, hidden_size=24, intermediate_size=37, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    bos_token_id=BOS, eos_token_id=EOS, tie_word_embeddings=False,
)

# name -> (transformers config class, its arguments, clip, what is special). Sizes are odd
# on purpose: an MLP of 37, heads * head_dim unlike the hidden size. `clip` is the largest
# gradient norm: 1 clips every step, 4 clips some and leaves the others alone.
MODELS = {
    # Heads of 16: what kernels on tensor cores take, which the others' widths keep from them.
    "qwen3": (
        transformers.Qwen3Config,
        COMMON | dict(head_dim=16, rms_norm_eps=1e-6,
                      rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0}),
        1.0,
        "QK-norm, GQA, head_dim * heads unlike hidden_size, untied head",
    ),
    "qwen2": (
        transformers.Qwen2Config,
        COMMON | dict(rms_norm_eps=1e-6, tie_word_embeddings=True,
                      rope_parameters={"rope_type": "default", "rope_theta": 50_000.0}),
        1.0,
        "QKV bias, GQA, tied head",
    ),
    # Wavelengths of the four frequencies: 6.3, 35, 199, 1117 tokens. Below 16 / 2 = 8 a
    # frequency is kept, above 16 / 0.25 = 64 divided by 8, between them interpolated: the
    # sequence (40) runs past the original context (16) with all three kinds present.
    "llama3": (
        transformers.LlamaConfig,
        COMMON | dict(head_dim=8, rms_norm_eps=3e-5,
                      rope_parameters={
                          "rope_type": "llama3", "rope_theta": 1000.0, "factor": 8.0,
                          "low_freq_factor": 0.25, "high_freq_factor": 2.0,
                          "original_max_position_embeddings": 16,
                      }),
        1.0,
        "GQA, llama3 rope scaling with positions past the original context, theta and eps not the defaults, untied head",
    ),
    "mistral": (
        transformers.MistralConfig,
        COMMON | dict(head_dim=8, rms_norm_eps=1e-5, sliding_window=None,
                      rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0}),
        1.0,
        "GQA, head_dim * heads unlike hidden_size, no sliding window, theta and eps not the defaults, untied head",
    ),
    "llama2": (
        transformers.LlamaConfig,
        COMMON | dict(hidden_size=16, intermediate_size=27, num_attention_heads=2, num_key_value_heads=2,
                      rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}),
        4.0,
        "multi-head attention, plain rope, untied head",
    ),
    "mixtral": (
        transformers.MixtralConfig,
        COMMON | dict(head_dim=8, intermediate_size=21, num_local_experts=5, num_experts_per_tok=2, rms_norm_eps=3e-5,
                      sliding_window=None, rope_parameters={"rope_type": "default", "rope_theta": 20_000.0}),
        1.0,
        "2 of 5 experts in every block, normalised gates, GQA, theta and eps not the defaults, untied head",
    ),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        COMMON | dict(head_dim=16, moe_intermediate_size=21, num_experts=6, num_experts_per_tok=3,
                      norm_topk_prob=False, decoder_sparse_step=2, mlp_only_layers=[0], rms_norm_eps=1e-5,
                      tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 50_000.0}),
        1.0,
        "3 of 6 experts in the second block, gates not normalised, QK-norm, GQA, theta and eps not the defaults, tied head",
    ),
    "dots1": (
        transformers.Dots1Config,
        COMMON | dict(head_dim=16, moe_intermediate_size=11, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=2,
                      n_group=4, topk_group=2, first_k_dense_replace=1, norm_topk_prob=True, routed_scaling_factor=2.5,
                      sliding_window=None, rms_norm_eps=1e-5,
                      rope_parameters={"rope_type": "default", "rope_theta": 30_000.0}),
        1.0,
        "3 of 8 experts from 2 of 4 groups in the second block, by sigmoid and a bias, gates normalised and times 2.5, two shared "
        "experts, QK-norm, GQA, theta and eps not the defaults, untied head",
    ),
}

# With SEED, qwen3_moe has no prompt with clear choices of experts, and torch itself misses OWN_ERROR in dots1.
SEED, SEEDS = 22, {"qwen3_moe": 2, "dots1": 4}

# Names of experts in files: the router, and the projections of an expert in the order gate, up, down.
QWEN_NAMES = ("mlp.gate", "mlp.experts", ("gate_proj", "up_proj", "down_proj"))
EXPERT_NAMES = {
    "mixtral": ("block_sparse_moe.gate", "block_sparse_moe.experts", ("w1", "w3", "w2")),
    "qwen3_moe": QWEN_NAMES,
    "dots1": QWEN_NAMES,
}


# --- inputs: weights and batches -------------------------------------------------------


def randomise(model, generator):
    """Fills every parameter so that nothing is trivial: attention is sharp (query and key
    gain), no norm weight is one, no bias is zero."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                p.copy_(1.6 + 1.2 * torch.rand(p.shape, generator=generator))
            elif name.endswith("norm.weight"):
                p.copy_(0.5 + torch.rand(p.shape, generator=generator))
            elif name.endswith(".bias"):
                p.copy_(0.5 * torch.randn(p.shape, generator=generator))
            elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
                p.copy_(0.4 * torch.randn(p.shape, generator=generator))
            else:
                gain = 2.2 if name.endswith(("q_proj.weight", "k_proj.weight")) else 1.0
                p.copy_(gain * torch.randn(p.shape, generator=generator) / math.sqrt(p.shape[-1]))
        for name, bias in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                bias.copy_(0.2 * torch.randn(bias.shape, generator=generator))


def weights(model):
    """The parameters, and the biases on the scores of routers, which no gradient changes."""
    yield from model.named_parameters()
    yield from ((name, b) for name, b in model.named_buffers() if name.endswith("e_score_correction_bias"))


def by_file(config, named):
    """The tensors of a model by their names in files, where every expert has matrices of its own: `named` has those of
    all experts in one, the gate above the up projection."""
    if config.model_type not in EXPERT_NAMES:
        return dict(named)
    router, experts, (gate, up, down) = EXPERT_NAMES[config.model_type]
    out = {}
    for name, tensor in named:
        layer = name.split("mlp.")[0]
        if name.endswith("mlp.experts.gate_up_proj"):
            for e, both in enumerate(tensor):
                for part, half in zip((gate, up), both.chunk(2)):
                    out[f"{layer}{experts}.{e}.{part}.weight"] = half.contiguous()
        elif name.endswith("mlp.experts.down_proj"):
            out |= {f"{layer}{experts}.{e}.{down}.weight": one.contiguous() for e, one in enumerate(tensor)}
        elif name.endswith("mlp.gate.weight"):
            out[f"{layer}{router}.weight"] = tensor
        else:
            out[name] = tensor
    return out


def make_batch(generator):
    """One batch: `(input_ids, labels)`, both i64 [B, S], labels already shifted.

    Three tokens in four follow a fixed rule, so that there is something to learn; one label
    in ten and the first five of the last sequence (a prompt, as it were) are ignored."""
    tokens = torch.randint(0, BOS, (BATCH, SEQ + 1), generator=generator)
    follows = torch.rand(BATCH, SEQ + 1, generator=generator) < 0.75
    for t in range(1, SEQ + 1):
        tokens[:, t] = torch.where(follows[:, t], (5 * tokens[:, t - 1] + 17) % BOS, tokens[:, t])
    labels = tokens[:, 1:].clone()
    labels[torch.rand(BATCH, SEQ, generator=generator) < 0.1] = IGNORED
    labels[-1, :5] = IGNORED
    return tokens[:, :-1].contiguous(), labels


def draw_batch(generator, margin):
    """A batch in which `margin`, a function of tokens, is large enough."""
    for _ in range(1000):
        batch = make_batch(generator)
        if margin(batch[0]) > MARGIN:
            return batch
    raise SystemExit("no batch of 1000 has clear choices of experts; take another seed")


def learning_rate(step):
    """Learning rate of optimizer step `step`, counted from 0."""
    return OPTIMIZER["lr_max"] * min(1.0, (step + 1) / OPTIMIZER["warmup_steps"])


def decays(name, p):
    """Whether weight decay applies: matrices but the embedding. A tied head is the
    embedding; an untied one is a matrix like any other."""
    return p.dim() > 1 and not name.endswith("embed_tokens.weight")


def loss_of(logits, labels):
    """Sum of the cross-entropies of the targets that are not ignored / their number."""
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return total / (labels != IGNORED).sum()


# --- torch: what is stored -------------------------------------------------------------


def torch_step(model, batch):
    """Logits and loss of one batch; leaves the gradients in the parameters."""
    model.zero_grad(set_to_none=True)
    logits = model(input_ids=batch[0], use_cache=False).logits
    loss = loss_of(logits, batch[1])
    loss.backward()
    return logits.detach(), loss.item()


@torch.no_grad()
def balance_losses(model, input_ids):
    """A field of the manifest with the balance loss of `input_ids`, before its coefficient, none of which are padding.
    Only for a model of one mixture: of several, transformers takes the means of loads and scores over all blocks."""
    mixtures = sum(name.endswith("mlp.gate.weight") for name, _ in model.named_parameters())
    if mixtures != 1 or not hasattr(model.config, "router_aux_loss_coef"):
        return {}
    return {"balance_loss": model(input_ids=input_ids, use_cache=False, output_router_logits=True).aux_loss.item()}


def torch_bf16_errors(model, batches):
    """How far PyTorch's bf16 is from its own fp32, relative: of the loss and of every gradient by name, the root of
    the mean square over `batches` (one batch is one throw of the dice), all with the weights as they are. bf16 is
    autocast, as it trains: fp32 weights and gradients, matrix products in bf16."""
    grads = lambda: by_file(model.config, [(n, p.grad.clone()) for n, p in model.named_parameters()])
    losses, gradients = [], {}
    for batch in batches:
        _, loss = torch_step(model, batch)
        wide = grads()
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids=batch[0], use_cache=False).logits
        narrow = loss_of(logits.float(), batch[1])
        narrow.backward()
        losses.append((narrow.item() - loss) / loss)
        for n, grad in grads().items():
            gradients.setdefault(n, []).append(relative(grad, wide[n]))
    mean = lambda errors: math.sqrt(sum(e * e for e in errors) / len(errors))
    return {"loss": mean(losses), "gradients": {n: mean(errors) for n, errors in gradients.items()}}


def torch_train(model, next_batch, max_norm):
    """Trains in place; returns every step's batch, its loss and the norm before clipping. `next_batch` draws a batch."""
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in named if decays(n, p)], "weight_decay": OPTIMIZER["weight_decay"]},
            {"params": [p for n, p in named if not decays(n, p)], "weight_decay": 0.0},
        ],
        betas=(OPTIMIZER["beta1"], OPTIMIZER["beta2"]), eps=OPTIMIZER["eps"], foreach=False,
    )
    batches, losses, norms = [], [], []
    for step in range(STEPS):
        batches.append(next_batch(model))
        losses.append(torch_step(model, batches[-1])[1])
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        optimizer.step()
    return batches, losses, norms


@torch.no_grad()
def greedy(next_logits, prompt):
    """Continues `prompt` (a list of ids) greedily by NEW_TOKENS; returns the new ids and, for
    each, by how much its logit leads the second best."""
    ids, margins = list(prompt), []
    for _ in range(NEW_TOKENS):
        best = next_logits(torch.tensor([ids])).topk(2)
        margins.append((best.values[0] - best.values[1]).item())
        ids.append(best.indices[0].item())
    return ids[len(prompt):], margins


def choose_prompt(model, generator, margin):
    """The liveliest of many random prompts (bos first) that does not reach the end token:
    most different tokens, then largest smallest margin. `margin` is that of experts."""
    def next_logits(ids):
        return model(input_ids=ids, use_cache=False).logits[0, -1]

    tried = []
    for _ in range(40):
        prompt = [BOS] + torch.randint(0, BOS, (PROMPT_TOKENS - 1,), generator=generator).tolist()
        tokens, margins = greedy(next_logits, prompt)
        clear = margin(torch.tensor([prompt + tokens])) > MARGIN
        if clear and EOS not in tokens and min(margins) > 0.02:
            tried.append((len(set(tokens)), min(margins), prompt, tokens, margins))
    _, _, prompt, tokens, margins = max(tried)
    cached = model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False,
                            pad_token_id=EOS)[0, PROMPT_TOKENS:]
    assert cached.tolist() == tokens, "generate() with its KV cache chose other tokens than full forwards"
    return prompt, tokens, margins


@torch.no_grad()
def sharpness(model, input_ids):
    """Mean over layers, heads and queries with at least 16 keys of the largest attention
    probability, and what uniform attention would give."""
    rows = slice(15, None)
    maps = torch.stack(model(input_ids=input_ids, use_cache=False, output_attentions=True).attentions)
    uniform = torch.tensor([1.0 / (t + 1) for t in range(SEQ)])[rows]
    return {
        "mean_max_probability": maps.amax(-1)[..., rows].mean().item(),
        "uniform": uniform.mean().item(),
        "by_layer": maps.amax(-1)[..., rows].mean(dim=(1, 2, 3)).tolist(),
    }


# --- reference: the same in fp64, written out ------------------------------------------


def rope_frequencies(config, head_dim):
    """Angle a position of each of the D/2 pairs, with Llama-3's scaling where asked for:
    wavelengths longer than the original context are stretched by `factor`."""
    rope = config.rope_parameters
    inverse = rope["rope_theta"] ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if rope["rope_type"] == "default":
        return inverse
    turns = rope["original_max_position_embeddings"] * inverse / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return inverse * (keep + (1 - keep) / rope["factor"])


def reference_experts(config, w, x, at, leads):
    """The sum over all experts of their outputs times their gates, which are zero for those that are not chosen. Adds
    to `leads` by how much the last chosen one leads the next in score."""
    router, experts, (gate, up, down) = EXPERT_NAMES[config.model_type]
    logits = F.linear(x, w[f"{at}{router}.weight"])
    bias = w.get(f"{at}{router}.e_score_correction_bias")
    scores = logits.softmax(-1) if bias is None else logits.sigmoid()
    choice = scores if bias is None else scores + bias
    if bias is not None:
        groups = choice.unflatten(-1, (config.n_group, -1))
        allowed = best_of(groups.topk(2, dim=-1).values.sum(-1), config.topk_group, leads)
        choice = groups.masked_fill(~allowed[..., None], -math.inf).flatten(-2)
    gates = torch.where(best_of(choice, config.num_experts_per_tok, leads), scores, 0.0)
    if config.model_type == "mixtral" or config.norm_topk_prob:
        gates = gates / gates.sum(-1, keepdim=True)
    gates = gates * getattr(config, "routed_scaling_factor", 1.0)

    def expert(name):
        project = lambda x, part: F.linear(x, w[f"{at}{name}.{part}.weight"])
        return project(F.silu(project(x, gate)) * project(x, up), down)

    total = sum(gates[..., e, None] * expert(f"{experts}.{e}") for e in range(scores.shape[-1]))
    return total if bias is None else total + expert("mlp.shared_experts")


def best_of(scores, count, leads):
    """True for the `count` largest of the last dimension. Adds to `leads` by how much the last of them leads the next."""
    best = scores.topk(count + 1, dim=-1)
    leads.append((best.values[..., count - 1] - best.values[..., count]).min().item())
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best.indices[..., :count], True)


@torch.no_grad()
def margin_of(model, input_ids):
    """The least lead of a token's last chosen expert over the next; infinite without experts."""
    leads = []
    w = by_file(model.config, [(n, p.detach().double()) for n, p in weights(model)])
    reference_logits(model.config, w, input_ids, leads)
    return min(leads, default=math.inf)


def reference_logits(config, w, input_ids, leads=None):
    """Logits [B, S, V] of a model with weights `w` (fp64, by HF name). `leads` receives those of experts."""
    batch, seq = input_ids.shape
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads

    angle = torch.arange(seq, dtype=torch.float64)[:, None] * rope_frequencies(config, head_dim)
    cos, sin = angle.cos(), angle.sin()
    past = torch.ones(seq, seq, dtype=torch.bool).tril()

    def rms_norm(x, weight):
        return x * (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt() * weight

    def project(x, prefix):
        return F.linear(x, w[prefix + ".weight"], w.get(prefix + ".bias"))

    def rotate(x):
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    x = w["model.embed_tokens.weight"][input_ids]
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}."
        h = rms_norm(x, w[at + "input_layernorm.weight"])
        q, k, v = (
            project(h, f"{at}self_attn.{part}_proj").view(batch, seq, -1, head_dim).transpose(1, 2)
            for part in "qkv"
        )
        if at + "self_attn.q_norm.weight" in w:
            q = rms_norm(q, w[at + "self_attn.q_norm.weight"])
            k = rms_norm(k, w[at + "self_attn.k_norm.weight"])
        q, k = rotate(q), rotate(k)
        # Query head h reads key/value head h // (H / G).
        q = q.view(batch, groups, heads // groups, seq, head_dim)
        scores = torch.einsum("bgnqd,bgkd->bgnqk", q, k) / math.sqrt(head_dim)
        probability = scores.masked_fill(~past, -math.inf).softmax(-1)
        mixed = torch.einsum("bgnqk,bgkd->bqgnd", probability, v).reshape(batch, seq, -1)
        x = x + project(mixed, at + "self_attn.o_proj")

        h = rms_norm(x, w[at + "post_attention_layernorm.weight"])
        if at + "mlp.down_proj.weight" in w:
            gated = F.silu(project(h, at + "mlp.gate_proj")) * project(h, at + "mlp.up_proj")
            x = x + project(gated, at + "mlp.down_proj")
        else:
            x = x + reference_experts(config, w, h, at, [] if leads is None else leads)
    x = rms_norm(x, w["model.norm.weight"])
    return F.linear(x, w["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"])


def reference_step(config, w, batch):
    """Logits, loss and gradients by name of one batch."""
    logits = reference_logits(config, w, batch[0])
    loss = loss_of(logits, batch[1])
    trained = {n: p for n, p in w.items() if p.requires_grad}
    gradients = dict(zip(trained, torch.autograd.grad(loss, list(trained.values()))))
    return logits.detach(), loss.item(), gradients


def reference_train(config, w, batches, max_norm):
    """AdamW, decoupled, as docs/numerics.md writes it. Returns losses, norms, parameters."""
    b1, b2, eps = OPTIMIZER["beta1"], OPTIMIZER["beta2"], OPTIMIZER["eps"]
    w = {n: p.detach().clone().requires_grad_(p.requires_grad) for n, p in w.items()}
    m = {n: torch.zeros_like(p) for n, p in w.items()}
    v = {n: torch.zeros_like(p) for n, p in w.items()}
    losses, norms = [], []
    for step, batch in enumerate(batches):
        _, loss, gradients = reference_step(config, w, batch)
        norm = math.sqrt(sum(g.pow(2).sum().item() for g in gradients.values()))
        clip = min(1.0, max_norm / (norm + 1e-6))
        t = step + 1
        with torch.no_grad():
            for n, p in ((n, w[n]) for n in gradients):
                g = gradients[n] * clip
                m[n] = b1 * m[n] + (1 - b1) * g
                v[n] = b2 * v[n] + (1 - b2) * g * g
                m_hat, v_hat = m[n] / (1 - b1**t), v[n] / (1 - b2**t)
                decay = OPTIMIZER["weight_decay"] if decays(n, p) else 0.0
                p -= learning_rate(step) * (m_hat / (v_hat.sqrt() + eps) + decay * p)
        losses.append(loss)
        norms.append(norm)
    return losses, norms, {n: p.detach() for n, p in w.items() if p.requires_grad}


# --- comparing and writing -------------------------------------------------------------


def relative(a, b):
    """||a - b|| / ||b|| in fp64."""
    a, b = torch.as_tensor(a).double(), torch.as_tensor(b).double()
    return ((a - b).norm() / b.norm()).item()


def worst(a, b):
    """The name with the largest relative difference, and that difference."""
    errors = {n: relative(a[n], b[n]) for n in b}
    name = max(errors, key=errors.get)
    return {"name": name, "relative": errors[name]}


def write_old_config(folder):
    """Writes config.v4.json: the same config in the form of transformers 4, where
    `head_dim` may be missing if it is hidden_size / heads, as in Llama-2's own folder."""
    config = json.loads((folder / "config.json").read_text())
    config.pop("layer_types", None)
    config.pop("pad_token_id", None)
    if config.get("head_dim") == config["hidden_size"] // config["num_attention_heads"]:
        del config["head_dim"]
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.51.3"
    config = dict(sorted(config.items()))
    (folder / "config.v4.json").write_text(json.dumps(config, indent=2) + "\n")


def check_old_config(folder, model, input_ids, logits):
    """Both forms of the config must mean the same model."""
    aside = folder / "v4.tmp"
    aside.mkdir()
    shutil.copy(folder / "config.v4.json", aside / "config.json")
    shutil.copy(folder / "model.safetensors", aside)
    again = AutoModelForCausalLM.from_pretrained(aside, dtype=torch.float32, **EAGER)
    with torch.no_grad():
        assert torch.equal(again(input_ids=input_ids, use_cache=False).logits, logits), "config.v4.json differs"
    assert again.config.rope_parameters == model.config.rope_parameters
    shutil.rmtree(aside)


def make(name, seed, out):
    """Makes the folder of one model and returns its manifest."""
    config_class, arguments, max_norm, features = MODELS[name]
    folder = out / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)

    model = AutoModelForCausalLM.from_config(
        config_class(**arguments), dtype=torch.float32, **EAGER
    ).eval()
    randomise(model, generator)
    model.save_pretrained(folder)
    write_old_config(folder)
    config = AutoConfig.from_pretrained(folder)
    # Training moves a copy. It draws the batches, because the weights decide which choices of experts are clear.
    trained = copy.deepcopy(model)
    next_batch = lambda model: draw_batch(generator, lambda ids: margin_of(model, ids))
    batches, losses, norms = torch_train(trained, next_batch, max_norm)
    final = by_file(config, [(n, p.detach().clone()) for n, p in trained.named_parameters()])

    # One step's forward and backward, by both.
    logits, loss = torch_step(model, batches[0])
    check_old_config(folder, model, batches[0][0], logits)
    gradients = by_file(config, [(n, p.grad.clone()) for n, p in model.named_parameters()])
    bf16_errors = torch_bf16_errors(model, batches)
    start = by_file(config, [(n, p.detach().double()) for n, p in weights(model)])
    start = {n: p.requires_grad_(n in gradients) for n, p in start.items()}
    ref_logits, ref_loss, ref_gradients = reference_step(config, start, batches[0])

    # Generation from the weights in the folder.
    sharp = sharpness(model, batches[0][0])
    prompt, tokens, margins = choose_prompt(model, generator, lambda ids: margin_of(model, ids))
    ref_tokens, _ = greedy(lambda ids: reference_logits(config, start, ids)[0, -1], prompt)
    assert ref_tokens == tokens, "fp32 and fp64 generate different tokens"

    ref_losses, ref_norms, ref_final = reference_train(config, start, batches, max_norm)

    errors = {
        "loss": abs(loss - ref_loss) / ref_loss,
        "logits": relative(logits, ref_logits),
        "logits_max_abs": (logits - ref_logits).abs().max().item(),
        "worst_gradient": worst(gradients, ref_gradients),
        "step_losses": [abs(a - b) / b for a, b in zip(losses, ref_losses)],
        "step_grad_norms": [abs(a - b) / b for a, b in zip(norms, ref_norms)],
        "worst_final": worst(final, ref_final),
        "final_whole_model": relative(*(torch.cat([p[n].flatten().double() for n in final]) for p in (final, ref_final))),
    }
    assert errors["loss"] < OWN_ERROR["loss"], errors
    assert errors["logits"] < OWN_ERROR["logits"], errors
    assert errors["worst_gradient"]["relative"] < OWN_ERROR["worst_gradient"], errors
    assert max(errors["step_losses"]) < OWN_ERROR["worst_step_loss"], errors
    assert sharp["mean_max_probability"] > 0.5, sharp
    assert torch.tensor(losses).isfinite().all()

    i32 = torch.int32
    save_file(
        {
            "input_ids": batches[0][0].to(i32),
            "labels": batches[0][1].to(i32),
            "logits": logits,
            "loss": torch.tensor([loss]),
            **{f"grad.{n}": g for n, g in gradients.items()},
            "train.input_ids": torch.stack([ids for ids, _ in batches]).to(i32),
            "train.labels": torch.stack([labels for _, labels in batches]).to(i32),
            "train.lr": torch.tensor([learning_rate(s) for s in range(STEPS)]),
            "train.loss": torch.tensor(losses),
            "train.grad_norm": torch.tensor(norms),
            **{f"final.{n}": p for n, p in final.items()},
            "generate.prompt": torch.tensor(prompt, dtype=i32),
            "generate.tokens": torch.tensor(tokens, dtype=i32),
            "generate.margins": torch.tensor(margins),
        },
        folder / "golden.safetensors",
    )
    manifest = {
        "name": name,
        "features": features,
        "seed": seed,
        "made_with": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "attn_implementation": "eager",
            "dtype": "float32",
            "threads": 1,
        },
        "sizes": {
            "batch": BATCH, "seq_len": SEQ, "vocab": VOCAB, "layers": config.num_hidden_layers,
            "hidden": config.hidden_size, "intermediate": config.intermediate_size,
            "heads": config.num_attention_heads, "kv_heads": config.num_key_value_heads,
            "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            "parameters": sum(p.numel() for p in final.values()),
        },
        "sharpness": sharp,
        "loss": loss,
        "loss_fp64": ref_loss,
        "targets": (batches[0][1] != IGNORED).sum().item(),
        "grad_norms": {n: g.norm().item() for n, g in gradients.items()},
        "optimizer": OPTIMIZER | {
            "max_norm": max_norm,
            "steps": STEPS,
            "decayed": [n for n, p in final.items() if decays(n, p)],
            "not_decayed": [n for n, p in final.items() if not decays(n, p)],
        },
        "train": {
            "loss": losses,
            "grad_norm": norms,
            "steps_clipped": sum(n > max_norm for n in norms),
            "relative_move_of_the_model": relative(
                *(torch.cat([p[n].detach().flatten().double() for n in final]) for p in (final, start))
            ),
        },
        "generate": {
            "prompt": prompt, "tokens": tokens, "margins": margins,
            "smallest_margin": min(margins), "different_tokens": len(set(tokens)),
        },
        "torch_fp32_against_fp64": errors,
        "torch_bf16_against_fp32": bf16_errors,
        **balance_losses(model, batches[0][0]),
    }
    write_manifest(folder, manifest)
    return manifest


def write_manifest(folder, manifest):
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")


def renew_bf16(folder):
    """Measures bf16's errors on the weights and the batches of a folder that is there, and writes nothing else: the
    last bits of fp32 depend on the machine, those of bf16's errors do not matter."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **EAGER).eval()
    golden = load_file(folder / "golden.safetensors")
    manifest = json.loads((folder / "manifest.json").read_text())
    batches = zip(golden["train.input_ids"].long(), golden["train.labels"].long())
    manifest["torch_bf16_against_fp32"] = torch_bf16_errors(model, batches)
    write_manifest(folder, manifest)
    return manifest["torch_bf16_against_fp32"]


def renew_balance(folder):
    """Computes the balance loss of a folder that is there, and writes nothing else."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **EAGER).eval()
    found = balance_losses(model, load_file(folder / "golden.safetensors")["input_ids"].long())
    if found:
        write_manifest(folder, json.loads((folder / "manifest.json").read_text()) | found)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder to write into (default: %(default)s)")
    parser.add_argument("--only", choices=MODELS, action="append", help="only this model; may be repeated")
    parser.add_argument("--bf16", action="store_true", help="only measure bf16's errors again, in the folders that are there")
    parser.add_argument("--balance", action="store_true", help="only compute the balance loss again, in the folders that are there")
    parser.add_argument("--seed", type=int, help=f"seed of weights, batches and prompts (default: {SEED}, or the model's own)")
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in args.only or MODELS:
        if args.bf16:
            e = renew_bf16(args.out / name)
            print(f"{name}: bf16 against fp32: loss {e['loss']:.1e}, worst gradient {max(e['gradients'].values()):.1e}")
            continue
        if args.balance:
            print(f"{name}: {renew_balance(args.out / name) or 'no balance loss'}")
            continue
        m = make(name, SEEDS.get(name, SEED) if args.seed is None else args.seed, args.out)
        e = m["torch_fp32_against_fp64"]
        print(
            f"{name}: sharpness {m['sharpness']['mean_max_probability']:.2f}, loss {m['train']['loss'][0]:.3f} -> "
            f"{m['train']['loss'][-1]:.3f}, clipped {m['train']['steps_clipped']}/{STEPS}, moved {m['train']['relative_move_of_the_model']:.2f}\n"
            f"  fp32 against fp64: loss {e['loss']:.1e}, logits {e['logits']:.1e}, "
            f"worst gradient {e['worst_gradient']['relative']:.1e} ({e['worst_gradient']['name']}), "
            f"worst step loss {max(e['step_losses']):.1e}, final {e['final_whole_model']:.1e}, "
            f"worst final {e['worst_final']['relative']:.1e} ({e['worst_final']['name']})\n"
            f"  generated {m['generate']['different_tokens']} different tokens, smallest margin {m['generate']['smallest_margin']:.3f}"
        )


if __name__ == "__main__":
    main()
