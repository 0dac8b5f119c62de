#!/usr/bin/env python3
"""Writes the golden files of crates/chat/tests: figures of transformers.

    pip install transformers==5.24.0 jinja2==3.1.6 tokenizers
    tests/chat/make.py

`golden/rendered.json`: the templates of `templates/` x the conversations of conversations.py.
`golden/features.json`: the small templates of features.py.
`golden/tokens.json`: ids and masks of a tokenizer of bytes with special tokens.
"""

import json
import pathlib

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from conversations import CONVERSATIONS
from features import FEATURES, X
from reference import TODAY, VARIABLES, normalise, render

HERE = pathlib.Path(__file__).parent


def write(name, value):
    path = HERE / "golden" / name
    path.parent.mkdir(exist_ok=True)
    rows = ",\n".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in value.pop("rows"))
    head = json.dumps(value, ensure_ascii=False, separators=(",", ":"))[:-1]
    path.write_text(f'{head}{"," if len(value) else ""}\n"rows":[\n{rows}\n]}}\n')
    print(f"{name}: {path.stat().st_size} bytes")


def refused_or(result):
    """Errors of Python are not compared."""
    return {"refused": True} if "error" in result else result


def templates():
    for path in sorted((HERE / "templates").glob("*.jinja")):
        yield path.name, path.read_text()


def rendered():
    rows = []
    for name, source in templates():
        for at, conversation in enumerate(CONVERSATIONS):
            for thinking in [None, True, False] if "enable_thinking" in source else [None]:
                kwargs = VARIABLES | ({} if thinking is None else {"enable_thinking": thinking})
                prompt = conversation.get("prompt", False)
                result = render(source, conversation["messages"], conversation.get("tools"), prompt, kwargs)
                row = {"template": name, "conversation": at} | ({} if thinking is None else {"thinking": thinking})
                rows.append(row | refused_or(result))
    conversations = [dict(conversation) for conversation in CONVERSATIONS]
    write("rendered.json", {"today": TODAY, "variables": VARIABLES, "conversations": conversations, "rows": rows})


def features():
    messages = [{"role": "user", "content": "hi"}]
    rows = []
    for source in FEATURES:
        rows.append({"source": source} | refused_or(render(source, messages, None, False, VARIABLES | {"x": X})))
    write("features.json", {"today": TODAY, "variables": VARIABLES, "x": X, "rows": rows})


# Stop tokens of the templates, and other special tokens.
STOPS = {
    "chatml": ["<|im_end|>"],
    "headers": ["<|eot_id|>"],
    "inst": ["</s>"],
    "turns": ["<end_of_turn>"],
    "tools_xml": ["<|im_end|>"],
    "thinking": ["<｜end▁of▁sentence｜>"],
    "channels": ["<|return|>", "<|call|>", "<|end|>"],
    "ends": ["<|end|>"],
    "parameters": ["<|im_end|>"],
    "parts": ["<end_of_utterance>"],
}
SPECIAL = ["<s>", "<|im_start|>", "<|start|>"] + sorted({stop for stops in STOPS.values() for stop in stops})


def tokenizer_of_bytes():
    """Byte b has the id b; special tokens follow."""
    alphabet = {}
    shown, extra = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256)), 0
    for byte in range(256):
        if byte in shown:
            alphabet[chr(byte)] = byte
        else:
            alphabet[chr(256 + extra)] = byte
            extra += 1
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    # Not special: text in which it stands becomes the token.
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def runs(mask):
    """Lengths of runs of 0 and 1 in turn, beginning with 0."""
    found, last = [0], 0
    for bit in mask:
        if bit != last:
            found.append(0)
            last = bit
        found[-1] += 1
    return found


def tokens():
    tokenizer = tokenizer_of_bytes()
    rows = []
    for name, source in templates():
        for at in [0, 1, 2, 6]:
            conversation = CONVERSATIONS[at]
            try:
                encoded = tokenizer.apply_chat_template(
                    normalise(conversation["messages"]),
                    tools=conversation.get("tools"),
                    chat_template=source,
                    return_dict=True,
                    return_assistant_tokens_mask=True,
                    **VARIABLES,
                )
            except Exception:
                continue
            ids = encoded["input_ids"]
            ids = [ids, sum(ids), sum((place + 1) * id for place, id in enumerate(ids))]
            row = {"template": name, "conversation": at, "ids": [len(ids[0]), ids[1], ids[2]]}
            rows.append(row | {"mask": runs(encoded["assistant_masks"])})
    write("tokens.json", {"special": SPECIAL, "not_special": ["<think>"], "stops": STOPS, "rows": rows})


if __name__ == "__main__":
    rendered()
    features()
    tokens()
