"""Ids of xtrain beside those of the Python library `tokenizers`.

    python tests/tokenizers/library.py --xtrain target/debug/xtrain [--encode target/debug/examples/encode] [--documents 2000] [NAME ...]

Each tokenizer of made.py encodes the same documents in both. Long documents, made of the others, are cut by xtrain. With --encode, each
document is also cut at every position that the tokenizer's rule allows.
"""
import argparse
import json
import os
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import documents
import made


def shards(folder):
    """The documents of a dataset folder, without the token that ends them."""
    found = []
    for name in sorted(Path(folder).glob("shard-*.tokens")):
        content = name.read_bytes()
        width = struct.unpack_from("<I", content, 12)[0]
        tokens, count = struct.unpack_from("<QQ", content, 64)
        ids = struct.unpack_from(f"<{tokens}{'H' if width == 2 else 'I'}", content, 256)
        at, start = 256 + (tokens * width + 7) // 8 * 8, 0
        for stop in struct.unpack_from(f"<{count}Q", content, at):
            found.append(list(ids[start:stop - 1]))
            start = stop
    return found


def first_difference(texts, right, given):
    for number, text in enumerate(texts):
        if number >= len(given) or given[number] != right[number]:
            return number
    return None


def encode_all(tokenizer, texts):
    """Texts that the library can encode, and their ids. It panics where a token that strips white space meets another one."""
    kept, ids = [], []
    for text in texts:
        try:
            ids.append(tokenizer.encode(text, add_special_tokens=False).ids)
            kept.append(text)
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
    return kept, ids


def compare(name, make, options, work):
    """Lines about differences."""
    tokenizer = made.end(make())
    folder, out = work / name, work / f"{name}.shards"
    for path in (folder, out):
        shutil.rmtree(path, ignore_errors=True)
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}))
    tokenizer.encode_special_tokens = True
    texts, right = encode_all(tokenizer, documents.documents(options.documents, made.NAMES, options.seed))
    # Words between documents, so that there are places to cut.
    joined = " and words\nhere, ".join(texts)
    long, whole = [], []
    if options.long:
        joined = joined * (1 + options.long // len(joined.encode()))
        long, whole = encode_all(tokenizer, [joined.encode()[:options.long].decode(errors="ignore")])
    source = work / f"{name}.jsonl"
    with open(source, "w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts + long)
    # A document without tokens is not stored as such.
    run = subprocess.run([options.xtrain, "tokenize", source, "--tokenizer", folder, "--out", out], capture_output=True, text=True)
    found, rule = [], ""
    refused = "must encode it as a whole" in run.stderr or "split safely" in run.stderr
    if refused and long:
        # The tokenizer encodes documents as a whole, and this one is too long for that.
        with open(source, "w") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
        run, long = subprocess.run([options.xtrain, "tokenize", source, "--tokenizer", folder, "--out", out], capture_output=True, text=True), []
    if run.returncode != 0:
        return [f"exit {run.returncode}: {run.stderr.strip()[-400:]}"], "refused"
    given = shards(out)
    if (number := first_difference(texts, right, given)) is not None:
        found.append(f"document {number} {texts[number]!a}\n    right  {right[number]}\n    xtrain {given[number] if number < len(given) else None}")
    if long:
        whole = whole[0]
        if given[-1] != whole:
            at = next((i for i, (a, b) in enumerate(zip(whole, given[-1])) if a != b), min(len(whole), len(given[-1])))
            found.append(f"long document, token {at} of {len(whole)}: right {whole[at - 2:at + 4]}, xtrain {given[-1][at - 2:at + 4]}")
        rule = "long document cut"
    vocabulary = json.loads((out / "dataset.json").read_text())["vocab_size"]
    if vocabulary != max(tokenizer.get_vocab().values()) + 1:
        found.append(f"vocabulary: right {max(tokenizer.get_vocab().values()) + 1}, xtrain {vocabulary}")
    if options.encode:
        lines = "".join(json.dumps(text) + "\n" for text in texts)
        for limit in (1, 30):
            run = subprocess.run([options.encode, folder, "--cut", str(limit)], input=lines, capture_output=True, text=True)
            if run.returncode != 0:
                found.append(f"cut: exit {run.returncode}: {run.stderr.strip()[-400:]}")
                continue
            head, *cut = [json.loads(line) for line in run.stdout.splitlines()]
            rule = head[1]
            if (number := first_difference(texts, right, cut)) is not None:
                found.append(f"cut at {limit}, document {number} {texts[number]!a}\n    right  {right[number]}\n    xtrain {cut[number]}")
    return found, rule


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--xtrain", required=True)
    parser.add_argument("--encode")
    parser.add_argument("--documents", type=int, default=2000)
    parser.add_argument("--long", type=int, default=4 << 20, help="bytes of the long document; 0 for none")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work", default="/tmp/xtrain-tokenizers")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    failed, made_of = 0, made.tokenizers()
    begun = time.time()
    for name in options.names or made_of:
        found, rule = compare(name, made_of[name], options, Path(options.work))
        print(name, rule, "same" if not found else "OTHER", *found, sep=" " if not found else "\n  ", flush=True)
        failed += bool(found)
    print(f"{len(options.names or made_of)} tokenizers, {options.documents} documents each, {failed} with other ids, {time.time() - begun:.0f} s")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
