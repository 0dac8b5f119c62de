"""Ids of xtrain beside those of the Python library `tokenizers`.

    python tests/tokenizers/library.py --xtrain target/debug/xtrain --encode target/debug/examples/encode [--documents 2000] [NAME ...]

Each tokenizer of shapes.py encodes the same documents in both, and a few long ones. With --xtrain they are
tokenized into a dataset. With --encode they are encoded whole, cut at every position that the tokenizer's rule allows, and in pieces of 30 bytes
and of 1 MiB. One of the two is enough.
"""
import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tokenizers import Tokenizer

import documents
import shapes

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import shards  # noqa: E402


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


def difference(kind, texts, right, given):
    """A line about the first text with other ids."""
    number = first_difference(texts, right, given)
    if number is None:
        return []
    wanted, got = right[number], given[number] if number < len(given) else []
    at = next((i for i, (a, b) in enumerate(zip(wanted, got)) if a != b), min(len(wanted), len(got)))
    near = slice(max(at - 2, 0), at + 4)
    return [f"{kind}, document {number}, token {at} of {len(wanted)}: right {wanted[near]}, xtrain {got[near]}, {texts[number][:600]!a}"]


def encoded(program, folder, cut, texts, right):
    """Differences of the example `encode`, and the rule for cuts."""
    lines = "".join(json.dumps(text) + "\n" for text in texts)
    run = subprocess.run([program, folder, *cut], input=lines, capture_output=True, text=True)
    if run.returncode != 0:
        return [f"encode {cut}: exit {run.returncode}: {run.stderr.strip()[-400:]}"], ""
    head, *given = [json.loads(line) for line in run.stdout.splitlines()]
    return difference(f"encode {cut}", texts, right, given), head[1]


def tokenized(folder, out, texts, right, long, whole, options):
    """Differences of a dataset."""
    command = [options.xtrain, "tokenize", out.with_suffix(".jsonl"), "--tokenizer", folder, "--out", out]

    def tokenize(texts):
        # A document without tokens is not stored as such.
        out.with_suffix(".jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return subprocess.run(command, capture_output=True, text=True)

    run = tokenize(texts + long)
    if long and ("must encode it as a whole" in run.stderr or "cannot encode" in run.stderr):
        run, long, whole = tokenize(texts), [], []
    if run.returncode != 0:
        return [f"exit {run.returncode}: {run.stderr.strip()[-400:]}"]
    # Without the token that ends each document.
    given = [document.ids[:-1] for document in shards.read(out)]
    found = difference("dataset", texts + long, right + whole, given)
    vocabulary, wanted = json.loads((out / "dataset.json").read_text())["vocab_size"], size(folder)
    return found + ([] if vocabulary == wanted else [f"vocabulary: right {wanted}, xtrain {vocabulary}"])


def size(folder):
    return max(Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab().values()) + 1


def compare(name, make, options, work):
    """Lines about differences."""
    tokenizer = shapes.end(make())
    folder, out = work / name, work / f"{name}.shards"
    for path in (folder, out):
        shutil.rmtree(path, ignore_errors=True)
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}))
    tokenizer.encode_special_tokens = True
    texts, right = encode_all(tokenizer, documents.documents(options.documents, shapes.NAMES, options.seed))
    long, whole = encode_all(tokenizer, documents.long_documents(options.long, texts) if options.long else [])
    found, rule = [], ""
    if options.xtrain:
        found += tokenized(folder, out, texts, right, long, whole, options)
    if options.encode:
        for cut in ([], ["--cut", "1"], ["--cut", "30"]):
            problem, rule = encoded(options.encode, folder, cut, texts, right)
            found += problem
        for cut in ([], ["--cut", str(1 << 20)]) if long else ():
            problem, _ = encoded(options.encode, folder, cut, long, whole)
            if any("cannot encode" in line for line in problem):
                rule, problem = f"{rule}, long documents {' '.join(cut)} refused", []
            found += problem
    return found, rule


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--xtrain")
    parser.add_argument("--encode")
    parser.add_argument("--documents", type=int, default=2000)
    parser.add_argument("--long", type=int, default=4 << 20, help="bytes of the long documents; 0 for none")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work", default="/tmp/xtrain-tokenizers")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    failed, made_of = 0, shapes.tokenizers()
    begun = time.time()
    for name in options.names or made_of:
        found, rule = compare(name, made_of[name], options, Path(options.work))
        print(name, rule, "same" if not found else "OTHER", *found, sep=" " if not found else "\n  ", flush=True)
        failed += bool(found)
    print(f"{len(options.names or made_of)} tokenizers, {options.documents} documents each, {failed} with other ids, {time.time() - begun:.0f} s")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
