"""Writes config_keys.json: what keys of config.json do in transformers, family by family.

    python tests/golden/make_config_keys.py      # needs torch 2.11, transformers 5.24; 10 minutes on one core

Each case changes keys of the config.json of a golden folder. Its outcome is a letter for each family:

s  the same logits, tokens of a cached generation, loss and gradients as without the change
t  the same but for the training step (the seed of dropout is fixed)
w  the same in sequences of 8 tokens, and other results in longer ones: a window
g  the same logits without a cache, and other tokens in generation
d  other logits; the first of them at the last position are stored too
f  transformers fails, or the tensors of the folder are not those of the model

Settings of transformers' `generate` (temperature, num_beams, ...) are not among the cases: xtrain has options for them.
`fields` has the keys of each configuration class, so that a new one is noticed.
"""

import json
import os
import tempfile
import warnings
from dataclasses import fields
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

HERE = Path(__file__).parent
FOLDERS = {
    "llama": "llama2", "mistral": "mistral", "mixtral": "mixtral", "qwen2": "qwen2", "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe", "dots1": "dots1",
}
# Logits that are stored of a case.
LOGITS = 6
SHORT = 8
# The value of a key that is left out.
ABSENT = {"absent": True}

FULL, SLIDING = "full_attention", "sliding_attention"
LINEAR = {"rope_type": "linear", "factor": 2.0}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1000.0}
CONTEXT = "original_max_position_embeddings"

# Keys, each with values that are tried alone.
VALUES = {
    # Attention.
    "is_causal": [True, False, None, 0],
    "use_bidirectional_attention": [True, False],
    "attention_bias": [False, None, ABSENT, True],
    "mlp_bias": [False, True],
    "head_dim": [ABSENT, None, 8],
    "num_key_value_heads": [ABSENT, None],
    "sliding_window": [ABSENT, None, 8, 64, 0, "8"],
    "use_sliding_window": [True, False, None],
    "max_window_layers": [ABSENT, None, 0, 99],
    "layer_types": [None, [FULL, FULL], [FULL], ["attention", "attention"], ["chunked_attention", FULL], ["x", "y"], FULL],
    "attention_chunk_size": [8, None],
    "kv_sharing_modes": [["reuse", "reuse"], None],
    "per_layer_config": [None, {}, {"1": {"num_attention_heads": 2}}, {"0": {"rms_norm_eps": 0.1}}],
    # Dropout.
    "attention_dropout": [0.0, 0, 0.5, ABSENT, "x"],
    "hidden_dropout": [0.5], "resid_pdrop": [0.5], "dropout": [0.5], "classifier_dropout": [0.5],
    # Activations and norms.
    "hidden_act": ["silu", "swish", "SiLU", "gelu", "relu", None, ABSENT, 5],
    "rms_norm_eps": [ABSENT, None, 1e-3],
    "layer_norm_eps": [0.01],
    # Sizes.
    "tie_word_embeddings": [ABSENT, None, True, False],
    "vocab_size": [ABSENT, 50, 48], "hidden_size": [ABSENT, 32], "intermediate_size": [ABSENT, 7],
    "num_hidden_layers": [1, 3], "num_attention_heads": [2], "max_position_embeddings": [ABSENT, 8, 100000],
    CONTEXT: [4, None],
    # Training, and what a model returns.
    "pad_token_id": [5, None, -1], "initializer_range": [0.5], "use_cache": [False], "pretraining_tp": [2],
    "gradient_checkpointing": [True], "output_attentions": [True], "output_hidden_states": [True],
    "chunk_size_feed_forward": [4], "dtype": ["bfloat16"], "torch_dtype": ["float16"],
    # Other kinds of models.
    "is_encoder_decoder": [True], "is_decoder": [True], "add_cross_attention": [True], "pruned_heads": [{"0": [0]}],
    "architectures": [["LlamaForSequenceClassification"], ["FooForCausalLM"], [], None],
    "auto_map": [{"AutoModelForCausalLM": "modeling_x.X"}, {}],
    "text_config": [None, {}, {"hidden_size": 8}], "decoder": [{}], "num_labels": [3], "problem_type": ["regression"],
    "quantization_config": [None, {}], "transformers_weights": ["model.safetensors", "other.safetensors", None],
    # Keys of other families.
    **{key: [0.5] for key in [
        "attention_multiplier", "attn_logit_softcapping", "clip_qkv", "embedding_multiplier", "embedding_scale",
        "final_logit_softcapping", "lm_head_multiplier", "logit_scale", "logits_scaling", "query_pre_attn_scalar",
        "residual_multiplier", "rope_local_base_freq", "rotary_pct", "scale_depth", "scale_emb", "swiglu_limit",
    ]},
    **{key: [True] for key in [
        "alibi", "attention_out_bias", "attn_temperature_tuning", "qk_layernorm", "qkv_bias", "rope_interleave",
        "scale_embeddings", "tie_last_hidden_states", "use_bias", "use_mrope", "use_parallel_residual", "use_qk_norm",
    ]},
    "no_rope_layers": [[0, 0]], "num_nextn_predict_layers": [1],
    # Experts.
    "num_experts": [ABSENT, 2], "num_local_experts": [ABSENT, 2], "n_routed_experts": [ABSENT],
    "num_experts_per_tok": [ABSENT, 1, 0, 99], "norm_topk_prob": [True, False, None, ABSENT],
    "router_aux_loss_coef": [0.5, ABSENT], "output_router_logits": [True, False], "router_jitter_noise": [0.5, 0.0],
    "mlp_only_layers": [None, [0], [1], [5]], "decoder_sparse_step": [ABSENT, 1, 2, 3, 0],
    "moe_intermediate_size": [ABSENT], "n_shared_experts": [ABSENT, 1], "shared_expert_intermediate_size": [8],
    "first_k_dense_replace": [ABSENT, 0, 2], "n_group": [ABSENT, 2], "topk_group": [ABSENT, 1, 4],
    "routed_scaling_factor": [ABSENT, 1.0, 3.0], "scoring_func": ["softmax", "sigmoid"],
    "topk_method": ["greedy", "noaux_tc"], "moe_layer_freq": [1, 2], "mlp_layer_types": [["dense", "sparse"]],
    # Rotary embeddings.
    "rope_theta": [5.0], "partial_rotary_factor": [0.5, 1.0, None],
    "rope_parameters": [
        ABSENT, None, {}, {"rope_type": "default", "rope_theta": 7.0}, {"rope_theta": 7.0},
        {"type": "linear", "factor": 2.0, "rope_theta": 7.0}, {**LINEAR, "rope_theta": 7.0},
        {**LINEAR, "type": "default", "rope_theta": 7.0}, {**LINEAR, "factor": 0.5, "rope_theta": 7.0},
        {"factor": 2.0, "rope_theta": 7.0}, {"rope_type": "default", "partial_rotary_factor": 0.5},
        {**LINEAR, "rope_theta": 7.0, "attention_factor": 2.0},
        {"rope_type": "default", "rope_theta": 7.0, "mrope_section": [1, 1, 2]},
        {"rope_type": "default", "rope_theta": 7.0, "llama_4_scaling_beta": 2.0},
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 7.0}, {"rope_type": "yarn", "factor": 2.0, "rope_theta": 7.0},
        {"rope_type": "proportional", "rope_theta": 7.0}, {FULL: {"rope_type": "default", "rope_theta": 7.0}},
        {**LLAMA3, CONTEXT: 16}, LLAMA3, {**LLAMA3, CONTEXT: None}, {**LLAMA3, "high_freq_factor": None, CONTEXT: 16},
    ],
}

# Keys that are tried together.
TOGETHER = [
    *[
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": ABSENT, "max_window_layers": first}
        for first in [ABSENT, 0, 1, 2, 99]
    ],
    {"use_sliding_window": True, "sliding_window": 64, "layer_types": ABSENT, "max_window_layers": 0},
    {"use_sliding_window": True, "sliding_window": None, "layer_types": ABSENT, "max_window_layers": 0},
    {"use_sliding_window": True, "sliding_window": ABSENT, "layer_types": ABSENT, "max_window_layers": 0},
    {"use_sliding_window": True, "sliding_window": 8, "layer_types": [FULL, FULL], "max_window_layers": 0},
    {"use_sliding_window": True, "sliding_window": 8, "layer_types": [FULL, SLIDING], "max_window_layers": 2},
    {"use_sliding_window": False, "sliding_window": 8, "layer_types": ABSENT, "max_window_layers": 0},
    {"sliding_window": 8, "layer_types": ABSENT, "max_window_layers": 1},
    {"sliding_window": 8, "layer_types": ABSENT, "max_window_layers": 2},
    {"sliding_window": ABSENT, "layer_types": ABSENT, "max_window_layers": 1},
    {"sliding_window": None, "layer_types": [FULL, SLIDING]},
    *[
        {"rope_parameters": ABSENT, "rope_theta": 7.0, "rope_scaling": scaling}
        for scaling in [
            None, {"type": "linear", "factor": 2.0}, LINEAR, {"rope_type": "default"}, {"factor": 2.0},
            {key: value for key, value in LLAMA3.items() if key != "rope_theta"},
        ]
    ],
    {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "rope_theta": 5.0},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "rope_theta": 7.0, "rope_scaling": {"rope_type": "default"}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "rope_scaling": LINEAR},
    {"rope_parameters": {**LINEAR, "rope_theta": 7.0}, "rope_scaling": LINEAR},
    {"rope_parameters": {**LINEAR, "rope_theta": 7.0}, "rope_scaling": LINEAR, "rope_theta": 7.0},
    {"rope_parameters": {**LINEAR, "rope_theta": 7.0}, "rope_scaling": {}},
    {"rope_parameters": LLAMA3, CONTEXT: 16},
    {"rope_parameters": {**LLAMA3, CONTEXT: 16}, CONTEXT: 8},
]

CASES = [{key: value} for key, values in VALUES.items() for value in values] + TOGETHER


class Misfit(Exception):
    """Tensors of the folder that are not those of the model."""


def results(folder, config):
    """Logits, generated tokens, and loss and gradients of a training step."""
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "config.json").write_text(json.dumps(config))
        os.symlink(HERE / folder / "model.safetensors", Path(place) / "model.safetensors")
        model, info = AutoModelForCausalLM.from_pretrained(
            place, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager",
            output_loading_info=True,
        )
    if any(info.get(kind) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        raise Misfit
    ids = load_file(HERE / folder / "golden.safetensors")["input_ids"].long()
    model.eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0

    def generated(prompt, tokens):
        return model.generate(ids[:1, :prompt], max_new_tokens=tokens, do_sample=False)

    with torch.no_grad():
        logits, short = model(ids).logits, model(ids[:, :SHORT]).logits
        long_tokens, short_tokens = generated(SHORT, 24), generated(SHORT // 2, SHORT // 2 + 1)
    model.train()
    torch.manual_seed(0)
    loss = model(ids, labels=ids).loss
    loss.backward()
    step = [loss.detach()] + [p.grad for p in model.parameters()]
    return {"logits": logits, "short": short, "tokens": (long_tokens, short_tokens), "step": step}


def is_near(a, b, tolerance):
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and bool((a - b).abs().max() <= tolerance * b.abs().max().clamp_min(1e-30))


def outcome(base, found):
    alike = [bool(a.shape == b.shape and (a == b).all()) for a, b in zip(found["tokens"], base["tokens"])]
    if not (is_near(found["logits"], base["logits"], 1e-6) and alike[0]):
        if is_near(found["short"], base["short"], 1e-6) and alike[1]:
            return "w"
        return "d" if not is_near(found["logits"], base["logits"], 1e-6) else "g"
    return "s" if all(is_near(a, b, 1e-5) for a, b in zip(found["step"], base["step"])) else "t"


def changed(config, case):
    config = dict(config)
    for key, value in case.items():
        if value == ABSENT:
            config.pop(key, None)
        else:
            config[key] = value
    return config


def main():
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    families = {}
    for family, folder in FOLDERS.items():
        config = json.loads((HERE / folder / "config.json").read_text())
        base = results(folder, config)
        letters, logits = "", {}
        for number, case in enumerate(CASES):
            try:
                found = results(folder, changed(config, case))
                letter = outcome(base, found)
            except Exception:
                letter = "f"
            letters += letter
            if letter == "d":
                logits[number] = [float(f"{x:.7g}") for x in found["logits"][0, -1, :LOGITS].tolist()]
        keys = sorted(field.name for field in fields(type(AutoConfig.from_pretrained(HERE / folder))))
        families[family] = {"folder": folder, "fields": keys, "outcomes": letters, "logits": logits}
        print(family, {letter: letters.count(letter) for letter in "stwgdf"})
    lines = [f'  "{key}": {json.dumps(value)}' for key, value in {"torch": torch.__version__, "transformers": transformers.__version__}.items()]
    lines.append('  "cases": [\n    ' + ",\n    ".join(json.dumps(case) for case in CASES) + "\n  ]")
    rows = [f'    "{family}": {json.dumps(found)}' for family, found in families.items()]
    lines.append('  "families": {\n' + ",\n".join(rows) + "\n  }")
    (HERE / "config_keys.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
