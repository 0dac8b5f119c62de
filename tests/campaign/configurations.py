"""Random run files: each is refused with readable errors, or planned; and what the plan accepts trains, evaluates, samples and exports."""

import json
import re

import place
from program import Failure

SHORT = 40
# Errors of a run that its plan cannot foresee, as it does not read the text.
OF_THE_TEXT = re.compile(
    r"less than the tokenizer's (?!257 )|held.out|too short|too few|not finite|needs at least|has only|infinite in bf16|vocabulary|"
    r"validation data|special token|no token|cannot open the input|holds what is in"
)


def whole(low, high):
    return lambda dice: dice.randint(low, high)


def log(low, high):
    """A number, whose logarithm is distributed evenly."""
    return lambda dice: low * (high / low) ** dice.random()


def one(*values):
    return lambda dice: dice.choice(values)


# Values of keys. Most are valid alone; together they often are not.
KEYS = {
    "model.family": one("llama", "mistral", "qwen2", "qwen3"),
    "model.dim": one(1, 2, 8, 16, 24, 32, 64, 128, 130),
    "model.layers": whole(1, 5),
    "model.heads": one(1, 2, 3, 4, 8),
    "model.kv_heads": one(1, 2, 4),
    "model.head_dim": one(2, 4, 6, 8, 10, 16, 32, 64, 128, 256),
    "model.ffn_dim": one(1, 3, 16, 32, 128, 200, 256),
    "model.vocab_size": one(2, 256, 257, 300, 1000, 5000),
    "model.max_position_embeddings": one(1, 16, 64, 4096, 2**30),
    "model.rope_theta": log(1e-3, 1e9),
    "model.rope_scaling": one({"type": "linear", "factor": 2.0}, {"type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16}),
    "model.norm_eps": log(1e-12, 1),
    "model.tie_embeddings": one(True, False),
    "model.qkv_bias": one(True, False),
    "model.qk_norm": one(True, False),
    "model.dropout": one(0, 0.1, 0.5, 0.99),
    "model.init_std": log(1e-6, 10),
    "model.z_loss": log(1e-6, 100),
    "data.train": one(["a.txt", "b.txt"], "*.txt", [{"path": "a.txt", "weight": 1e-7}, {"path": "b.txt", "weight": 2}], "b.txt", "tokens"),
    "data.valid": one("b.txt", "a.txt", ["b.jsonl"]),
    "data.held_out": one(0, 0.005, 0.1, 0.5, 0.9),
    "data.tokenizer": one("bpe", "bytes", "chars"),
    "data.bpe_vocab_size": one(257, 300, 1000),
    "data.begin_of_document": one(True, False, "auto"),
    "data.end_of_document": one("the", "<|endoftext|>"),
    "data.seq_len": one(1, 2, 7, 16, 32, 64, 128, 256),
    "data.document_mask": one(True, False),
    "data.separator": one("\n", "river", ".\n"),
    "precision.recipe": one("fp32", "bf16", "fp8-current", "fp8-delayed", "fp8-row", "fp8-block"),
    "precision.skip": one(["blocks.0.*"], ["*:wgrad"], ["blocks.*.mlp.down_proj"], ["none of them"]),
    "precision.skip_slower": one([], [{"layer": "attn.o_proj", "speed": 0.9, "tokens": 64}]),
    "precision.bf16_first_layers": whole(0, 3),
    "precision.bf16_last_layers": whole(0, 3),
    "precision.head": one("bf16", "fp8"),
    "precision.fast_accumulation": one([], ["fprop"], ["dgrad", "wgrad"]),
    "precision.pow2_scales": one(True, False),
    "precision.swiglu_input": one("bf16", "fp8"),
    "precision.attention_output": one("bf16", "e5m6"),
    "precision.amax_history_len": one(1, 2, 1024, 65536),
    "precision.amax_compute": one("max", "most-recent"),
    "precision.margin": whole(0, 16),
    "precision.reference_every": one(0, 1, 2, 5),
    "precision.reference_steps": whole(1, 5),
    "optimizer.lr": log(1e-9, 10),
    "optimizer.betas": one([0.9, 0.95], [0, 0], [0.999, 0.999999]),
    "optimizer.eps": log(1e-30, 1),
    "optimizer.moments": one("fp32", "bf16"),
    "optimizer.weight_decay": log(1e-6, 10),
    "optimizer.grad_clip": one(0, 1e-6, 1, 1e6),
    "schedule.kind": one("constant", "linear", "cosine", "wsd"),
    "schedule.warmup_steps": whole(0, 3),
    "schedule.min_lr_ratio": one(0, 0.5, 1),
    "schedule.min_lr": log(1e-12, 1e-3),
    "schedule.decay_steps": whole(1, 3),
    "schedule.decay_fraction": one(0.1, 1),
    "schedule.decay_shape": one("linear", "sqrt", "cosine"),
    "train.batch_size": one(1, 2, 3, 4, 8, 16),
    "train.micro_batch_size": one(1, 2, 3, 4, "auto"),
    "train.seed": one(0, 1, 2**32, 2**63 - 1),
    "train.recompute": one("auto", "none", "norms", "block"),
    "train.recompute_blocks": one(0, 1, 2, "auto"),
    "train.loss_chunk": one(1, 7, 16, 128, 4096, "auto"),
    "train.threads": whole(0, 3),
    "train.max_nonfinite_steps": whole(0, 2),
    "train.stop_on_divergence": one(True, False),
    "train.check_numerics": one(True, False),
    "train.attention_deterministic": one(True, False),
    "train.max_time": one("1h", "30m"),
    "checkpoint.every": whole(0, 3),
    "checkpoint.keep_last": whole(1, 3),
    "checkpoint.keep_every": whole(0, 2),
    "checkpoint.keep_best": one(True, False),
    "checkpoint.export_hf": one(True, False),
    "checkpoint.export_dtype": one("fp32", "bf16", "fp8"),
    "log.every": whole(1, 3),
    "log.tensorboard": one(True, False),
    "log.jsonl": one(True, False),
    "log.command": one([], ["cat"], ["false"]),
    "eval.every": whole(0, 2),
    "eval.tokens": one(0, 1, 64, 500),
    "eval.at_end": one(True, False),
    "eval.prompts": one([], ["the"], ["é", ""]),
    "eval.max_tokens": whole(1, 5),
    "eval.temperature": one(0, 0.8, 100),
}
# What keys need: (pattern of keys, key, values).
NEEDS = [
    (r"schedule\.decay_", "schedule.kind", ["wsd"]),
    (r"precision\.(?!recipe|skip_slower)", "precision.recipe", ["fp8-current", "fp8-delayed", "fp8-row", "fp8-block"]),
    (r"precision\.(amax|margin)", "precision.recipe", ["fp8-delayed"]),
    (r"precision\.fast", "precision.recipe", ["fp8-current", "fp8-row"]),
    (r"data\.bpe_vocab_size", "data.tokenizer", ["bpe"]),
    (r"model\.max_position_embeddings", "model.max_position_embeddings", [4096, 2**30]),
    (r"train\.recompute_blocks", "train.recompute", ["norms", "block"]),
    (r"model\.(heads|kv_heads)", "model.head_dim", [4, 16]),
    (r"model\.kv_heads", "model.heads", [4, 8]),
    (r"model\.qk_norm", "model.family", ["llama", "qwen2"]),
    (r"train\.micro_batch_size", "train.batch_size", [4, 12]),
    (r"checkpoint\.(keep|every)", "eval.every", [1, 2]),
    (r"log\.command", "log.jsonl", [True]),
]
# Keys that exclude each other.
EXCLUDE = [
    ("data.valid", "data.held_out"),
    ("schedule.min_lr", "schedule.min_lr_ratio"),
    ("schedule.decay_steps", "schedule.decay_fraction"),
]
STRANGE = [-1, 0, 2**31, 2**63 - 1, 1e300, "", "nonsense", [], {}, True, "\u202e"]


def prepare(folder, program):
    place.texts(folder)
    place.documents(folder)
    program.run(folder, "tokenize b.txt --bytes --out tokens").succeeds()


def draw(dice):
    """A run file as its sections, and whether all its values are plausible."""
    keys = {"model.dim": 32, "model.layers": 2, "model.heads": 2, "data.train": "a.txt", "data.seq_len": 32, "data.held_out": 0.05}
    keys |= {"data.cache_dir": "cache", "data.tokenizer": "bytes", "train.steps": 2, "train.device": "cpu", "train.batch_size": 4}
    for key in dice.sample(list(KEYS), dice.choice([1, 2, 3, 4, 6, 8, 12])):
        keys[key] = KEYS[key](dice)
    if dice.random() < 0.8:
        for pattern, key, values in NEEDS:
            if any(re.match(pattern, given) for given in keys):
                keys[key] = dice.choice(values)
        for key, other in EXCLUDE:
            if key in keys:
                keys.pop(other, None)
    if dice.random() < 0.1:
        keys[dice.choice(list(keys))] = dice.choice(STRANGE)
    if dice.random() < 0.1:
        del keys[dice.choice(list(keys))]
    return keys


def toml(keys):
    lines = []
    for section in dict.fromkeys(key.split(".")[0] for key in keys):
        lines.append(f"[{section}]")
        lines += [f"{key.split('.')[1]} = {value(keys[key])}" for key in keys if key.startswith(section + ".")]
    return "\n".join(lines) + "\n"


def value(of):
    """A value of TOML."""
    match of:
        case dict():
            return "{ " + ", ".join(f"{key} = {value(inner)}" for key, inner in of.items()) + " }"
        case list():
            return "[" + ", ".join(map(value, of)) + "]"
        case _:
            # As in JSON, but for a number like 1e-07.
            return json.dumps(of)


def trial(_, base, folder, program, dice, count):
    folder.rmdir()
    place.copy(base, folder)
    keys = draw(dice)
    (folder / "run.toml").write_text(toml(keys))
    planned = program.run(folder, "plan run.toml")
    if not planned.judge():
        return "refused by the plan"
    if "\nfits                        no" in planned.out:
        return "do not fit"
    # A strange number of steps may be a large one.
    trained = program.run(folder, "train run.toml --out run --max-time 30s")
    if not trained.judge():
        # Data and numbers are the run's to judge.
        if OF_THE_TEXT.search(trained.err):
            return "refused for their text or numbers"
        raise Failure(f"planned, but not trained: {trained.err}\n{toml(keys)}")
    after = ["generate run --prompt the -n 3", "eval run --data b.txt", "export run --out hf", "inspect run", "report run", "plan run"]
    ended = program.run(folder, dice.choice(after))
    count[f"of {ended.command.split()[0]} " + ("succeeded" if ended.judge() else "refused")] += 1
    return "trained"
