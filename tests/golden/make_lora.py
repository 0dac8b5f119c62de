#!/usr/bin/env python3
"""Writes lora/<model>: adapters of three golden models as PEFT saves them, and what PEFT and torch compute with them.

    python tests/golden/make_lora.py

Needs torch 2.11, transformers 5.24, peft 0.21.2 and safetensors; takes ten seconds on a CPU. The base is the golden
folder of the same name, and batches and learning rates are those of its golden.safetensors. All in fp32 (eager
attention, one thread). The same in fp64 gives the error of fp32 itself, which must be below a fifth of the tolerance.
"""

import json
import shutil
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
STEPS, RANK, ALPHA, MAX_NORM = 10, 2, 5, 1.0
TARGETS = {
    "llama3": "all-linear",
    "qwen2": ["q_proj", "v_proj", "layers.1.mlp.down_proj"],
    "qwen3": ["k_proj", "o_proj", "up_proj", "down_proj"],
}
# Tolerances of the tests: logits, gradients, losses of steps.
OWN_ERROR = {"logits": 1e-5 / 5, "gradient": 1e-4 / 5, "loss": 1e-5 / 5}


def base(name, dtype):
    return AutoModelForCausalLM.from_pretrained(HERE / name, attn_implementation="eager", dtype=dtype)


def write_adapters(name, folder):
    """Adapters of random numbers, saved by PEFT. B would begin as 0."""
    config = LoraConfig(
        r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=TARGETS[name], task_type="CAUSAL_LM")
    model = get_peft_model(base(name, torch.float32), config)
    for of, parameter in sorted(model.named_parameters()):
        if parameter.requires_grad:
            with torch.no_grad():
                parameter.copy_(0.1 * torch.randn(parameter.shape))
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    # A set, whose order is another in each process; and a folder of this machine.
    path = folder / "adapter_config.json"
    saved = json.loads(path.read_text())
    saved["target_modules"] = sorted(saved["target_modules"])
    saved["base_model_name_or_path"] = name
    path.write_text(json.dumps(saved, indent=2, sort_keys=True) + "\n")


def loss_of(model, tokens, labels):
    logits = model(input_ids=tokens.long()).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten().long(), ignore_index=-100)


def run(name, folder, golden, dtype):
    model = PeftModel.from_pretrained(base(name, dtype), folder, is_trainable=True, autocast_adapter_dtype=False)
    model = model.to(dtype)
    trained = {of.replace(".default", ""): p for of, p in model.named_parameters() if p.requires_grad}
    found = {}
    with torch.no_grad():
        found["logits"] = model(input_ids=golden["input_ids"][:1].long()).logits
    loss_of(model, golden["input_ids"], golden["labels"]).backward()
    found |= {f"grad.{of}": p.grad.clone() for of, p in trained.items()}
    optimizer = torch.optim.AdamW(trained.values(), betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, golden["train.input_ids"][step], golden["train.labels"][step])
        loss.backward()
        losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(trained.values(), MAX_NORM)
        optimizer.param_groups[0]["lr"] = float(golden["train.lr"][step])
        optimizer.step()
    return found | {"train.loss": torch.stack(losses)}


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for name in TARGETS:
        folder = HERE / "lora" / name
        golden = load_file(HERE / name / "golden.safetensors")
        write_adapters(name, folder)
        found, exact = (run(name, folder, golden, dtype) for dtype in (torch.float32, torch.float64))
        worst = dict.fromkeys(OWN_ERROR, 0.0)
        for of, value in exact.items():
            kind = "gradient" if of.startswith("grad.") else "loss" if of == "train.loss" else "logits"
            difference = found[of] - value
            error = (difference / value).abs().max() if kind == "loss" else difference.norm() / value.norm()
            worst[kind] = max(worst[kind], float(error))
        losses = [round(float(loss), 4) for loss in found["train.loss"]]
        print(name, {kind: f"{error:.1e}" for kind, error in worst.items()}, losses)
        assert all(worst[kind] < OWN_ERROR[kind] for kind in worst), "fp32's own error is too close to the tolerance"
        save_file({of: value.contiguous() for of, value in found.items()}, folder / "golden.safetensors")


if __name__ == "__main__":
    main()
