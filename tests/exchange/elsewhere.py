"""Hugging Face folders as others make them: the golden weights in the forms of transformers 5 and of transformers 4.

All have the same tokenizer of 49 tokens, keys that xtrain knows nothing of, and files that no export holds.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

import weights
from xtrain import ROOT

GOLDEN = ROOT / "tests" / "golden"

MERGES = [("t", "h"), ("th", "e"), ("i", "n"), ("e", "r"), ("a", "n"), ("o", "u")]
PLAIN = ["<unk>", *"abcdefghijklmnopqrstuvwxyz .,-'!?:\n1234", *("".join(m) for m in MERGES)]
TURN, BEGIN, END = "<|turn|>", "<s>", "</s>"
# Prompts to choose from: a model of 49 tokens soon ends after most.
# Many, because a model may end some of them early.
PROMPTS = [
    *["the house ", "an inn, where ", "run in thin sand", "3 things!", "hours and hours", "'over ", "where?", "i"],
    *["one two", "fn ", "in a house ", "so", "and the inn ", "two hours ", "sand", "thin things "],
]
TEMPLATE = "{% for m in messages %}<|turn|>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"

# Nothing here reads these: what was there must be there again.
CONFIG_EXTRA = {
    "_name_or_path": "someone/some-model",
    "pad_token_id": 46,
    "unheard_of": {"nested": [1, 2.5, None, "\u00e9"], "big": 9007199254740993, "tiny": 1.2345678901234567e-7},
}
GENERATION_EXTRA = {
    "do_sample": True,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "repetition_penalty": 1.05,
    "pad_token_id": 46,
    "eos_token_id": [48, 46],
}
STAYS = {"README.md": "# A model\n", "LICENSE": "Do as you like.\n", ".gitattributes": "*.safetensors filter=lfs\n"}


@dataclass(frozen=True)
class Variant:
    """A folder: which golden model, written in which form."""

    golden: str
    form: str  # of config.json and the tokenizer's files: "v5" or "v4"
    dtype: str  # of the weights, as safetensors names it
    shards: int
    # What only some folders have.
    linear: bool = False  # rope scaling under its oldest name
    buffers: bool = False  # tables among the weights that the model computes
    head: bool = False  # the tied head written out
    bare: bool = False  # no file beside config.json and tokenizer.json

    @property
    def name(self):
        return f"{self.golden}-{self.form}"


VARIANTS = [
    Variant("qwen3", "v5", "F32", 1),
    Variant("qwen3", "v4", "BF16", 2),
    Variant("qwen2", "v5", "BF16", 1),
    Variant("qwen2", "v4", "F32", 3, head=True),
    Variant("llama3", "v5", "F32", 2),
    Variant("llama3", "v4", "F16", 1),
    Variant("mistral", "v5", "BF16", 2),
    Variant("mistral", "v4", "F32", 1),
    Variant("llama2", "v5", "F32", 1),
    Variant("llama2", "v4", "F32", 1, linear=True, buffers=True, bare=True),
    Variant("mixtral", "v5", "BF16", 2),
    Variant("mixtral", "v4", "F32", 1),
    Variant("qwen3_moe", "v5", "F32", 1),
    Variant("qwen3_moe", "v4", "BF16", 1),
    Variant("dots1", "v5", "F32", 2),
]


def make(variant, folder):
    """Writes the folder of `variant` and returns it."""
    folder.mkdir(parents=True)
    golden = GOLDEN / variant.golden
    source = golden / ("config.json" if variant.form == "v5" else "config.v4.json")
    config = {**json.loads(source.read_text()), **CONFIG_EXTRA}
    stored = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}[variant.dtype]
    config["dtype" if variant.form == "v5" else "torch_dtype"] = stored
    if variant.linear:
        config["rope_scaling"] = {"type": "linear", "factor": 2.0}
    write_json(folder / "config.json", config)
    if not variant.bare:
        generation = json.loads((golden / "generation_config.json").read_text())
        write_json(folder / "generation_config.json", {**generation, **GENERATION_EXTRA})
    write_weights(variant, golden, folder)
    if variant.form == "v5":
        fast_tokenizer().save_pretrained(folder)
    else:
        write_old_tokenizer(folder, variant.bare)
    for name, text in STAYS.items():
        (folder / name).write_text(text)
    return folder


def write_weights(variant, golden, folder):
    tensors = weights.read(golden / "model.safetensors")
    if variant.head:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors = {name: weights.rounded(tensor, variant.dtype) for name, tensor in tensors.items()}
    if variant.buffers:
        for layer in range(2):
            table = weights.of_floats([1.0, 0.1, 0.01, 0.001])
            tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = table
    weights.write(folder, tensors, variant.shards)


def tokenizer():
    """Characters and a few merges; a text begins with <s>."""
    vocab = {token: id for id, token in enumerate([*PLAIN, TURN, BEGIN, END])}
    assert len(vocab) == 49, len(vocab)
    made = Tokenizer(models.BPE(vocab=vocab, merges=MERGES, unk_token="<unk>"))
    made.normalizer = normalizers.Lowercase()
    made.decoder = decoders.Fuse()
    made.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, 47)])
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in (TURN, BEGIN, END)])
    return made


def fast_tokenizer():
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer(),
        bos_token=BEGIN,
        eos_token=END,
        unk_token="<unk>",
        pad_token=TURN,
        additional_special_tokens=[TURN],
        chat_template=TEMPLATE,
    )


def write_old_tokenizer(folder, bare):
    """The files that transformers 4 wrote around tokenizer.json, with the template inside one of them."""
    tokenizer().save(str(folder / "tokenizer.json"))
    if bare:
        return
    special = {"bos_token": BEGIN, "eos_token": END, "unk_token": "<unk>", "pad_token": TURN}
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    added = {"46": TURN, "47": BEGIN, "48": END}
    write_json(
        folder / "tokenizer_config.json",
        {
            "added_tokens_decoder": {id: {"content": token, **flags} for id, token in added.items()},
            **special,
            "additional_special_tokens": [TURN],
            "chat_template": TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 1000000000000000019884624838656,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
    write_json(folder / "special_tokens_map.json", {**special, "additional_special_tokens": [TURN]})
    write_json(folder / "added_tokens.json", {token: int(id) for id, token in added.items()})
    write_json(folder / "vocab.json", {token: id for id, token in enumerate(PLAIN)})
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in MERGES))


def write_text(path):
    """Something to train on in that vocabulary: documents between blank lines."""
    draw = random.Random(5)
    words = "the house and an inn where hours run in thin sand over other things".split()
    lines = (" ".join(draw.choices(words, k=12)) + "." for _ in range(400))
    path.write_text("\n\n".join(lines))


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2) + "\n")
