#!/usr/bin/env python3
"""Writes muon.safetensors: twenty steps of torch.optim.Muon and torch.optim.AdamW from given gradients.

    python tests/golden/make_muon.py

Needs torch 2.11 and safetensors; takes a second on a CPU. Muon updates the matrices of a block, AdamW the other
parameters, with the same learning rates. torch casts the matrices of the iteration to bf16; here it is torch's code
in fp32, which is what xtrain computes on a CPU. The same code in fp64 gives the error of torch itself, which must be
below a fifth of the tolerance (1e-5, relative, for each tensor).

Names: W outputs, I inputs of a matrix.
"""

import inspect
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.optim import _muon

STEPS, OWN_ERROR = 20, 2e-6
BLOCK = "model.layers.0."
# A block of Qwen3 with dim 8, two heads of 4, one key/value head and a feed-forward of 12; a vocabulary of 11.
MATRICES = {
    "self_attn.q_proj": (8, 8), "self_attn.k_proj": (4, 8), "self_attn.v_proj": (4, 8), "self_attn.o_proj": (8, 8),
    "mlp.gate_proj": (12, 8), "mlp.up_proj": (12, 8), "mlp.down_proj": (8, 12),
}
NORMS = {"self_attn.q_norm": 4, "self_attn.k_norm": 4, "input_layernorm": 8, "post_attention_layernorm": 8}


def in_full_precision():
    """Replaces the iteration of torch.optim.Muon with its own code without the cast to bf16."""
    source = inspect.getsource(_muon._zeropower_via_newtonschulz)
    assert source.count(".bfloat16()") == 1, "torch's code has changed"
    exec(source.replace("grad.bfloat16()", "grad.clone()"), vars(_muon))


def run(weights, gradients, lr, dtype):
    parameters = {name: torch.nn.Parameter(value.to(dtype).clone()) for name, value in weights.items()}
    of = lambda chosen: [p for name, p in parameters.items() if chosen(name)]
    is_matrix = lambda name: name.startswith(BLOCK) and "norm" not in name
    is_head = lambda name: name == "lm_head.weight"
    muon = torch.optim.Muon(of(is_matrix), weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(
        [{"params": of(is_head), "weight_decay": 0.1},
         {"params": of(lambda name: not is_matrix(name) and not is_head(name)), "weight_decay": 0.0}],
        betas=(0.9, 0.95), eps=1e-8)
    for step in range(STEPS):
        for optimizer in (muon, adamw):
            for group in optimizer.param_groups:
                group["lr"] = float(lr[step])
        for name, parameter in parameters.items():
            parameter.grad = gradients[name][step].to(dtype).clone()
        muon.step()
        adamw.step()
    return {name: p.detach() for name, p in parameters.items()}


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    in_full_precision()
    shapes = {f"{BLOCK}{name}.weight": shape for name, shape in MATRICES.items()}
    shapes |= {f"{BLOCK}{name}.weight": (size,) for name, size in NORMS.items()}
    shapes |= {"model.embed_tokens.weight": (11, 8), "model.norm.weight": (8,), "lm_head.weight": (11, 8)}
    weights = {name: 0.3 * torch.randn(shape) for name, shape in shapes.items()}
    # What steps have in common, and noise, of very different sizes.
    gradients = {}
    for n, (name, shape) in enumerate(shapes.items()):
        gradients[name] = 10.0 ** (n % 4 - 2) * (torch.randn(shape) + torch.randn(STEPS, *shape))
    lr = 0.02 * torch.minimum(torch.ones(STEPS), (torch.arange(STEPS) + 1) / 4)
    found, exact = (run(weights, gradients, lr, dtype) for dtype in (torch.float32, torch.float64))
    worst = 0.0
    for name, value in exact.items():
        error = (found[name] - value).norm()
        worst = max(worst, float(error / value.norm()))
    print(f"fp32 against fp64: {worst:.1e}")
    assert worst < OWN_ERROR, "torch's own error is too close to the tolerance"
    tensors = {"lr": lr}
    for name in shapes:
        tensors |= {f"initial.{name}": weights[name], f"grad.{name}": gradients[name], f"final.{name}": found[name]}
    save_file({name: value.contiguous() for name, value in tensors.items()}, Path(__file__).parent / "muon.safetensors")


if __name__ == "__main__":
    main()
