"""Writes ids of the Python libraries for `cargo test`: crates/data/tests/golden/{pipelines,folders}.json.

    python tests/tokenizers/golden.py

All cases share one small vocabulary. `pipelines.json` has ids of `tokenizers`, `folders.json` those of AutoTokenizer.
"""
import json
import os
import shutil
import tempfile
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

from tokenizers import Tokenizer, normalizers, pre_tokenizers

import folders
import shapes

byte_bpe = shapes.byte_bpe
OUT = Path(__file__).parents[2] / "crates/data/tests/golden"
TEXTS = ["In 1234567 years, 12 days; it's 3.14", "a\n the end\n\n  two  spaces\t\r\n x", "naïve tiếng Việt tie\u0302\u0301ng e\u0301 İ ſ ß ﬁ", "x ® y §5 — “x”… 、。 $^~",
         "東京タワー 中文 한국어 각 हिन्दी ไทย", "camelCase HTTPServer snake_case don't I'LL 'ſ", "½ ² Ⅷ ٣٤ 𝟙𝟚 \u00a0\u3000\u2028z", "the cat, THE CAT; thethe <think>x</think>"]


def base(size=300):
    return byte_bpe(shapes.byte_split(shapes.QWEN), size=size)


def with_steps(pre, norm):
    t = base()
    t.pre_tokenizer = pre
    if norm:
        t.normalizer = norm
    return t


def pipelines():
    """Parts of tokenizer.json over that of `base`, and ids."""
    p, n = pre_tokenizers, normalizers
    steps = lambda *steps: p.Sequence([*steps, p.ByteLevel(add_prefix_space=False, use_regex=False)])
    split = shapes.split
    parts = {name: (shapes.byte_split(regex), None, []) for name, regex in
             {"gpt2": shapes.GPT2, "qwen": shapes.QWEN, "llama3": shapes.LLAMA3, "qwen35": shapes.QWEN35, "cl100k": shapes.CL100K, "o200k": shapes.O200K, "bloom": shapes.BLOOM}.items()}
    parts |= {f"spelling {regex}": (shapes.byte_split(regex), None, []) for regex in shapes.SPELLINGS}
    parts |= {
        "bytes": (p.ByteLevel(add_prefix_space=True), None, []),
        "deepseek": (shapes.byte_split(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", shapes.DEEPSEEK), None, []),
        "digits": (p.Sequence([p.Digits(True), p.ByteLevel(add_prefix_space=False)]), n.NFC(), []),
        "punctuation": (steps(p.Punctuation("merged_with_previous")), n.NFKC(), []),
        "scripts": (steps(p.UnicodeScripts()), n.Lowercase(), []),
        "removed": (steps(split(r"\w+", "removed", True)), n.NFD(), []),
        "replaced": (shapes.byte_split(shapes.QWEN), n.Sequence([n.Replace(shapes.Regex(r"(?i)the|\d{2}+"), "§"), n.NFC()]), []),
        "stripped": (shapes.byte_split(shapes.QWEN), n.Sequence([n.NFD(), n.StripAccents(), n.Strip()]), []),
        "added in nfc": (shapes.byte_split(shapes.QWEN), n.NFC(), [("tiếng", {}), ("Việt", {}), ("e\u0301", {}), ("<think>", {"normalized": False})]),
        "added words": (shapes.byte_split(shapes.QWEN), n.NFC(), [("the", {"single_word": True}), ("cat", {"lstrip": True}), (";", {"rstrip": True, "normalized": False})]),
        "added in lower case": (shapes.byte_split(shapes.LLAMA3), n.Sequence([n.NFD(), n.Lowercase()]), [("CAT", {}), ("Việt", {"single_word": True})]),
    }
    cases = []
    for name, (pre, norm, added) in parts.items():
        t = with_steps(pre, norm)
        t.add_tokens([shapes.AddedToken(content, **flags) for content, flags in added])
        shapes.end(t)
        t.encode_special_tokens = True
        content = json.loads(t.to_str())
        cases.append({"name": name, **{key: content[key] for key in ("normalizer", "pre_tokenizer", "added_tokens")},
                      "ids": [t.encode(text, add_special_tokens=False).ids for text in TEXTS]})
    return cases


# Cases of folders.py that need no other vocabulary.
FOLDERS = """decoder_qwen decoder_fast decoder_gap decoder_far decoder_other_id decoder_other_flags decoder_drops decoder_over_map decoder_names_flags map_only
map_over_config map_dicts map_extra map_extra_dict map_and_config_extra map_own added_json added_json_special additional additional_typed extra_list extra_dict
extra_and_additional model_specific own_name own_name_typed names names_equal names_null no_end_gpt2 no_end_qwen split_special gpt2_prefix gpt2_over_qwen gpt2_of_model
fast_prefix qwen_fast qwen_of_model qwen_llama_class qwen35 neox_prefix cohere llama_bytes longformer_prefix mistral_of_bytes""".split()


def folder_cases():
    """Files of a folder over `base`, and the tokenizer that transformers makes of them."""
    folders.shapes.byte_bpe = lambda pre, norm=None: with_steps(pre, norm)
    found = folders.cases() | {"mistral_of_bytes": (folders.qwen, folders.LLAMA | folders.END, {"config.json": {"model_type": "mistral"}})}
    vocabulary = json.loads(base().to_str())["model"]
    usual = json.loads(folders.qwen().to_str())
    cases, work = [], Path(tempfile.mkdtemp())
    for name in FOLDERS:
        make, config, files = found[name]
        tokenizer = make()
        content = json.loads(tokenizer.to_str())
        assert content["model"]["vocab"] == vocabulary["vocab"], name
        folders.write(work / name, tokenizer, config, files)
        hf = folders.AutoTokenizer.from_pretrained(work / name)
        backend = hf._tokenizer
        # Parts that are those of `qwen` are left out.
        parts = {key: content[key] for key in ("normalizer", "pre_tokenizer", "added_tokens") if content[key] != usual[key]}
        cases.append({"name": name, **parts, "files": {"tokenizer_config.json": config, **files}, "vocab_size": max(hf.get_vocab().values()) + 1,
                      "added": [[i, *flags] for i, flags in sorted(folders.flags(backend).items())], "prompt_ids": hf(folders.CHAT, add_special_tokens=False)["input_ids"],
                      "ids": folders.plain(backend, folders.CHAT)})
    shutil.rmtree(work)
    return {**{key: usual[key] for key in ("normalizer", "pre_tokenizer", "added_tokens")}, "texts": folders.CHAT, "cases": cases}


def write(name, content):
    # A case in a line.
    text = json.dumps(content, ensure_ascii=True, separators=(",", ":")).replace('{"name"', '\n{"name"')
    (OUT / name).write_text(text + "\n")


if __name__ == "__main__":
    OUT.mkdir(exist_ok=True)
    model = json.loads(base().to_str())["model"]
    write("pipelines.json", {"model": model, "texts": TEXTS, "cases": pipelines()})
    write("folders.json", folder_cases())
