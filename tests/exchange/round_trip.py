"""Models made elsewhere go in through `init_from` and come out again with nothing lost.

Each folder of elsewhere.py is trained for some steps with a learning rate that changes no bit, then is taken away. What
the run, its export after a resume, and a plain conversion of the folder hold is compared with what the folder held: every
key, every file of the tokenizer, every bit of the weights; and transformers must read the same from both.
"""

import json
import shutil

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

import elsewhere
import weights

# Not 0, which a run file may not say; in fp32 it is.
NO_RATE = 1e-44
RUN_FILE = """\
[model]
init_from = "{folder}"

[data]
train = "{text}"
separator = "\\n\\n"
seq_len = 32

[optimizer]
lr = {lr}

[train]
steps = {steps}
batch_size = 4

[eval]
at_end = false
"""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)
DTYPES = {"fp32": ("F32", "float32"), "bf16": ("BF16", "bfloat16")}
SAID = "Then the hour, and 3 things!"
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "the inn"}]


def write_run_file(path, folder, text, lr, steps):
    run = RUN_FILE.format(folder=folder, text=text, lr=lr, steps=steps)
    if "num_experts_per_tok" in config_of(folder):
        # Nothing moves the biases of routers.
        run += '[experts]\nbalance = "none"\n'
    path.write_text(run)
    return path


def losses(source, export, precision):
    """What the folder `export` lacks of the folder `source`, as lines; none where nothing is lost."""
    found = []
    found += [f"config.json: {line}" for line in missing(config_of(source), config_of(export), precision)]
    if (source / "generation_config.json").exists():
        before, after = (json.loads((f / "generation_config.json").read_text()) for f in (source, export))
        found += [f"generation_config.json: {line}" for line in missing(before, after, precision)]
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            same = (export / name).exists() and (export / name).read_bytes() == (source / name).read_bytes()
            same = same or name == "tokenizer.json" and (export / name).exists() and has_named_tokens(source, export)
            found += [] if same else [f"{name} is not what it was"]
    found += lost_weights(source, export, precision)
    if not found:
        found += read_differently(source, export)
    return found


def has_named_tokens(source, export):
    """True if the tokenizer.json of `export` differs in added tokens alone, which other files of `source` name: transformers adds these too."""
    before, after = (json.loads((f / "tokenizer.json").read_text()) for f in (source, export))
    had, has = before.pop("added_tokens"), after.pop("added_tokens")
    config = source / "tokenizer_config.json"
    named = json.loads(config.read_text()) if config.exists() else {}
    names = [value["content"] if isinstance(value, dict) else value for key, value in named.items() if key.endswith("_token")]
    more = [token for token in has if token not in had]
    return before == after and all(token in has for token in had) and all(token["content"] in names for token in more)


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def missing(before, after, precision):
    """Keys of `before` that `after` does not hold alike."""
    for key, value in before.items():
        if key in ("dtype", "torch_dtype"):
            value = DTYPES[precision][1]
        if key not in after:
            yield f"{key} is gone"
        elif isinstance(value, dict) and isinstance(after[key], dict):
            yield from (f"{key}: {line}" for line in missing(value, after[key], precision))
        elif json.dumps(after[key], sort_keys=True) != json.dumps(value, sort_keys=True):
            yield f"{key} was {value} and is {after[key]}"


def lost_weights(source, export, precision):
    """Tensors that are not to the bit what they were (rounded to `precision`, where that is less)."""
    before, after = weights.read(source), weights.read(export)
    dtype = DTYPES[precision][0]
    tied = config_of(source)["tie_word_embeddings"]
    for name, tensor in before.items():
        if name.endswith("rotary_emb.inv_freq") or tied and name == "lm_head.weight":
            continue
        if name not in after:
            yield f"{name} is gone"
            continue
        now = after.pop(name)
        expected = weights.rounded(weights.widened(tensor), dtype)
        if now.dtype != dtype or now.shape != tensor.shape:
            yield f"{name} was {tensor.shape} and is {now.dtype} {now.shape}"
        elif now.data != expected.data:
            yield f"{name} has other values"
    if after:
        yield f"tensors out of nowhere: {sorted(after)}"


def read_differently(source, export):
    """What transformers understands otherwise in the two folders."""
    ignored = {"dtype", "_name_or_path"}
    before, after = (AutoConfig.from_pretrained(f).to_dict() for f in (source, export))
    for key in sorted(set(before) - ignored):
        if after.get(key) != before[key]:
            yield f"transformers reads {key} = {after.get(key)}, before {before[key]}"
    before, after = (AutoTokenizer.from_pretrained(f) for f in (source, export))
    if after(SAID)["input_ids"] != before(SAID)["input_ids"]:
        yield "transformers encodes otherwise"
    if before.chat_template and after.apply_chat_template(CHAT, tokenize=False) != before.apply_chat_template(
        CHAT, tokenize=False
    ):
        yield "the chat template gives another text"
    if before.special_tokens_map != {k: after.special_tokens_map.get(k) for k in before.special_tokens_map}:
        yield f"special tokens were {before.special_tokens_map} and are {after.special_tokens_map}"
    if (source / "generation_config.json").exists():
        before, after = (GenerationConfig.from_pretrained(f).to_dict() for f in (source, export))
        yield from (f"generation: {k} was {v} and is {after.get(k)}" for k, v in before.items() if after.get(k) != v)


def spoil_config(folder):
    config = config_of(folder)
    config["unheard_of"]["tiny"] *= 1 + 3e-16
    elsewhere.write_json(folder / "config.json", config)


def spoil_generation(folder):
    path = folder / "generation_config.json"
    generation = json.loads(path.read_text())
    generation["eos_token_id"].reverse()
    elsewhere.write_json(path, generation)


def spoil_weights(folder):
    tensors = weights.read(folder)
    name = min(tensors)
    data = bytearray(tensors[name].data)
    data[0] ^= 1
    tensors[name] = weights.Tensor(tensors[name].dtype, tensors[name].shape, bytes(data))
    weights.write(folder, tensors, 1)


def drop_weights(folder):
    tensors = weights.read(folder)
    tensors.pop("model.norm.weight")
    weights.write(folder, tensors, 1)


def spoil_head_dim(folder):
    config = config_of(folder)
    config["head_dim"] += 2
    elsewhere.write_json(folder / "config.json", config)


# Losses that the comparison must find.
CONTROLS = {
    "one bit of a config's number": spoil_config,
    "the order of the end tokens": spoil_generation,
    "one bit of a weight": spoil_weights,
    "a tensor": drop_weights,
    "a chat template": lambda folder: (folder / "chat_template.jinja").unlink(),
    "head_dim": spoil_head_dim,
}


def check(xtrain, work, names):
    """Takes the folders with these names in and out, qwen3-v5 among them; returns the rows of a table and the faults."""
    work.mkdir(parents=True)
    text = work / "text.txt"
    elsewhere.write_text(text)
    rows, faults = [], []
    for variant in (variant for variant in elsewhere.VARIANTS if variant.name in names):
        given = elsewhere.make(variant, work / f"given-{variant.name}")
        found = in_and_out(xtrain, variant, given, work / variant.name, text)
        rows.append((variant.name, f"{variant.dtype}, {variant.shards} file(s)", "FAILED" if found else "ok"))
        faults += [f"{variant.name}: {line}" for line in found]
    given, export = work / "given-qwen3-v5", work / "qwen3-v5" / "converted-fp32"
    for label, spoil in CONTROLS.items():
        copy = work / "spoiled"
        shutil.copytree(export, copy)
        spoil(copy)
        found = losses(given, copy, "fp32")
        rows.append(("control", f"{label} lost", f"noticed: {found[0]}" if found else "FAILED"))
        faults += [] if found else [f"the loss of {label} goes unnoticed"]
        shutil.rmtree(copy)
    return rows, faults


def in_and_out(xtrain, variant, given, work, text):
    """All ways through xtrain for one folder; returns what was lost on any of them."""
    work.mkdir()
    # The folder that xtrain sees is a copy, which is taken away in the middle.
    folder, run = work / "folder", work / "run"
    shutil.copytree(given, folder)
    precisions = ["fp32"] + (["bf16"] if variant.dtype == "BF16" else [])
    ways = {}
    said = ""
    for precision in precisions:
        ways[f"converted to {precision}", precision] = converted = work / f"converted-{precision}"
        said = xtrain.warnings("export", folder, "--out", converted, "--dtype", precision)
    found = [f"export does not say that {name} stays" for name in ("LICENSE", "README.md") if name not in said]
    run_file = write_run_file(work / "run.toml", folder, text, NO_RATE, 2)
    cache = f'data.cache_dir="{work / "cache"}"'
    said = xtrain.warnings("train", run_file, "--out", run, "--set", cache)
    found += [f"train does not say that {name} stays" for name in ("LICENSE", "README.md") if name not in said]
    ways["the run's own export", "fp32"] = trained = work / "trained"
    shutil.copytree(run / "hf", trained)
    shutil.rmtree(folder)
    for precision in precisions:
        ways[f"run exported as {precision}", precision] = exported = work / f"exported-{precision}"
        xtrain.run("export", run, "--out", exported, "--dtype", precision)
    xtrain.run("train", run_file, "--out", run, "--set", cache, "--resume", "--set", "train.steps=3")
    ways["the resumed run's own export", "fp32"] = run / "hf"
    for (way, precision), export in ways.items():
        found += [f"{way}: {line}" for line in losses(given, export, precision)]
    return found
