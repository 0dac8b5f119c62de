#!/usr/bin/env python3
"""Compares the loss of `xtrain eval` on a text with the scores of its windows as rows of a task.

    pip install tokenizers
    python3 tests/tasks/held_out.py target/release/xtrain smollm2 NEW_FOLDER

The text is the first tokens of this repository's pages. A window of tokens is a row {context, continuation} whose
context is its first token. The windows are as long as the first number from 256 down at which each window, as a text,
has its own tokens again. Minus the sum of the rows' log-probabilities over their tokens is the loss of the text: it may
differ by 1e-6 of it in fp32, and by 1e-3 in bf16.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from texts import cut, pages, tokenizer_of

BOUNDS = {"fp32": 1e-6, "bf16": 1e-3}


def windows(tokenizer, eos, count):
    """A text, the length of its windows, and these as pairs of texts."""
    text = pages()[: 1200 * count]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    for length in range(256, 32, -1):
        # The text ends in the middle of a window.
        text = tokenizer.decode(ids[: count * length - length // 2])
        stream = tokenizer.encode(text, add_special_tokens=False).ids + [eos]
        pairs = [cut(tokenizer, stream[first : first + length + 1], 1) for first in range(0, len(stream) - 1, length)]
        if all(pairs):
            return text, length, pairs
    raise SystemExit("at no length do the windows have their own tokens as texts")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("xtrain", type=Path)
    parser.add_argument("model", type=Path, help="a Hugging Face folder")
    parser.add_argument("folder", type=Path, help="an empty folder for files")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--end", default="<|endoftext|>", help="the token that ends documents in training")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer_of(options.model)
    text, length, pairs = windows(tokenizer, tokenizer.token_to_id(options.end), options.windows)
    (options.folder / "text.txt").write_text(text)
    rows = [dict(context=context, continuation=continuation) for context, continuation in pairs]
    (options.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (options.folder / "rows.toml").write_text('data = "rows.jsonl"\ndelimiter = ""\n')
    command = [options.xtrain, "eval", options.model, "--device", "cpu", "--json"]
    fine = True
    for precision, bound in BOUNDS.items():
        how = ["--precision", precision]
        of_text = ["--data", options.folder / "text.txt", "--seq-len", str(length)]
        text_loss = json.loads(subprocess.run([*command, *how, *of_text], check=True, stdout=subprocess.PIPE).stdout)
        out = options.folder / f"scores-{precision}"
        subprocess.run([*command, *how, "--task", options.folder / "rows.toml", "--out", out], check=True, stdout=subprocess.DEVNULL)
        (file,) = out.glob("*/*.jsonl")
        scored = [json.loads(line) for line in file.read_text().splitlines()[1:]]
        tokens = sum(sum(row["tokens"]) for row in scored)
        loss = -sum(sum(row["logprobs"]) for row in scored) / tokens
        gap = abs(loss - text_loss["loss"]) / text_loss["loss"]
        is_fine = gap <= bound and tokens == text_loss["tokens"]
        fine &= is_fine
        print(
            f"{precision}: {text_loss['tokens']} tokens of text in windows of {length}, loss {text_loss['loss']:.9f}; "
            f"{tokens} tokens of {len(scored)} rows, {loss:.9f}; difference {gap:.1e} of it, {'within' if is_fine else 'BEYOND'} {bound}"
        )
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
