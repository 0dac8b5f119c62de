#!/usr/bin/env python3
"""Compares tasks with lm-eval and BIG-bench: rows as rendered, their replay from samples, tokens.

README.md lists what it needs. Each comparison prints a count of equal items, and the first that differ.
"""

import argparse
import ast
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

SPACES = ["", "", "", " ", "\n", "\n\n", "\t", "  ", "\u00a0", "\u3000", "\x1c", "\x1f", "\x85", "\u2028", "\u200b", "\x0b \x0c"]
WORDS = ["red", "blue", "naïve", "東京", "x=1;", "don't", "3.14", "Ünï", "🙂🙃", "the", "A", "is not", "e\u0301", "fi"]


def rows_of(program, *arguments):
    """The rows that the example task_rows prints."""
    done = subprocess.run([program, *map(str, arguments)], stdout=subprocess.PIPE, check=True)
    return read_lines(done.stdout.decode())


def read_lines(text):
    """Lines of JSON, whose strings may hold other line breaks than newlines."""
    return [json.loads(line) for line in text.split("\n") if line]


class Tally:
    """Counts of equal and different items."""

    def __init__(self, what):
        self.what, self.equal, self.different = what, 0, []

    def add(self, ours, theirs, place):
        if ours == theirs:
            self.equal += 1
        else:
            self.different.append((place, ours, theirs))

    def report(self):
        print(f"{self.what}: {self.equal} equal, {len(self.different)} different")
        for place, ours, theirs in self.different[:3]:
            print(f"  {place}\n    ours   {str(ours)[:500]}\n    theirs {str(theirs)[:500]}")
        return not self.different


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def local_tasks(folder, draw):
    """Rows of three kinds, with lm-eval's task files and ours beside them; the file of rows of each task."""

    def choices(at, count):
        words = draw.sample(WORDS + [" lead", "tail ", "x\ty"], count)
        query = f"Question {at}: which of {draw.choice(WORDS)}?\nAnswer:{draw.choice(SPACES)}"
        return dict(query=query, choices=words, gold=draw.randrange(count), cluster=f"c{at // 5}", id=at)

    def schema(at):
        options = [f"The {word} of {at}, for it{draw.choice(SPACES)}" for word in draw.sample(WORDS, draw.randint(2, 4))]
        return dict(context_options=options, continuation=f"was {at} heavy.", gold=draw.randrange(len(options)))

    def continuation(at):
        return dict(context=f"Once {at} upon a {draw.choice(WORDS)}{draw.choice(SPACES)}", continuation=f"time {at}")

    def numbers(at):
        # Each number is an index and a choice, and the right choice has another index than its text says.
        words = draw.sample(["0", "1", "2", "3"], 4)
        gold = draw.randrange(4)
        return dict(query=f"Count {at}:", choices=words, gold=gold, index=gold, text=words[gold])

    write_lines(folder / "numbers.jsonl", [numbers(at) for at in range(60)])
    fixed = [dict(query=f"Is {at} large?", gold=draw.randrange(2)) for at in range(60)]
    write_lines(folder / "fixed.jsonl", [dict(row, is_yes=row["gold"] == 1) for row in fixed])
    write_lines(folder / "mc.jsonl", [choices(at, draw.randint(2, 6)) for at in range(100)])
    write_lines(folder / "dev.jsonl", [choices(1000 + at, 3) for at in range(12)])
    write_lines(folder / "schema.jsonl", [schema(at) for at in range(60)])
    write_lines(folder / "continuation.jsonl", [continuation(at) for at in range(60)])
    mc = dict(doc_to_text="query", doc_to_choice="choices", doc_to_target="gold")
    norm = {"metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]}
    # Choices that are not in the data, after delimiters that lm-eval does not log.
    yes = dict(norm, doc_to_text="query", doc_to_choice=["no", "yes, it is"], doc_to_target="gold")
    tasks = {
        "five_shots": ("mc", "dev", 5, mc),
        "own_shots": ("mc", "mc", 3, mc),
        "no_shots": ("mc", None, 0, mc),
        "no_delimiter": ("mc", "dev", 2, dict(mc, target_delimiter="", fewshot_delimiter="\n---\n")),
        "numbers_by_index": ("numbers", None, 0, dict(mc, doc_to_target="index")),
        "numbers_by_text": ("numbers", None, 0, dict(mc, doc_to_target="text")),
        "numbers_by_template": ("numbers", None, 0, dict(mc, doc_to_target="{{index}}")),
        "newline": ("fixed", None, 0, dict(yes, target_delimiter="\n")),
        "colon": ("fixed", None, 0, dict(yes, target_delimiter=": ")),
        "own_spaces": ("fixed", None, 0, dict(yes, target_delimiter="", doc_to_choice=[" no", " yes, it is"])),
        "boolean": ("fixed", None, 0, dict(yes, doc_to_target="is_yes")),
        "text_after_newline": ("fixed", None, 0, dict(yes, target_delimiter="\n", doc_to_target="{{['no', 'yes, it is'][gold]}}")),
        "schema": ("schema", "schema", 2, dict(doc_to_text="gold", doc_to_choice="context_options", doc_to_target="continuation")),
        "continuation": ("continuation", None, 0, dict(output_type="loglikelihood", doc_to_text="context", doc_to_target="{{' ' + continuation}}")),
    }
    files = {}
    for name, (data, examples, shots, keys) in tasks.items():
        ours = {"data": f"{data}.jsonl", "shots": shots}
        theirs = {
            "task": f"xt_{name}",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(folder / f"{data}.jsonl")}},
            "test_split": "test",
            "output_type": "multiple_choice",
            "metric_list": [{"metric": "acc"}],
            **keys,
        }
        if shots:
            ours["examples"] = f"{examples}.jsonl"
            theirs["num_fewshot"] = shots
            theirs["fewshot_split"] = "test" if examples == data else "dev"
            theirs["fewshot_config"] = {"sampler": "first_n"}
            theirs["dataset_kwargs"]["data_files"][theirs["fewshot_split"]] = str(folder / f"{examples}.jsonl")
        if "target_delimiter" in keys:
            ours["delimiter"], ours["separator"] = "", "\n---\n"
        (folder / f"{name}.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in ours.items()))
        # JSON is YAML.
        (folder / f"{name}.yaml").write_text(json.dumps(theirs))
        files[name] = ours["data"]
    return files


def compare_rendering(program, folder, tokenizers, draw):
    """Rows that lm-eval renders and logs, with rows of ours, and with their replay and its tokens."""
    files = local_tasks(folder, draw)
    out = folder / "out"
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "dummy", "--tasks", ",".join(f"xt_{name}" for name in files)]
    command += ["--include_path", str(folder), "--log_samples", "--output_path", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    fine = True
    for name in files:
        (samples,) = out.glob(f"*/samples_xt_{name}_*.jsonl")
        logged = read_lines(samples.read_text())
        # Rows without choices have none of our own.
        rendered = [] if files[name] == "fixed.jsonl" else [("rendered", rows_of(program, folder / f"{name}.toml"))]
        for how, rows in [*rendered, ("replayed", rows_of(program, samples))]:
            tally = Tally(f"{name}, {how}")
            tally.add(len(rows), len(logged), "number of rows")
            for row, sample in zip(rows, logged):
                arguments = sample["arguments"]
                theirs = [(arguments[f"gen_args_{at}"]["arg_0"], arguments[f"gen_args_{at}"]["arg_1"]) for at in range(len(arguments))]
                ours = [(request["context"], request["continuation"]) for request in row["requests"]]
                doc = sample["doc"]
                fixed = [" no", " yes, it is"] if name == "own_spaces" else ["no", "yes, it is"]
                texts = doc.get("choices") or ([doc["continuation"]] * len(ours) if "continuation" in doc else fixed)
                if name == "continuation" and how == "replayed":
                    # lm-eval's continuation has its own delimiter.
                    texts = [sample["target"]]
                sizes = [(len(text), len(text.encode())) for text in texts]
                gold = doc.get("gold", "greedy")
                found = (ours, [(request["characters"], request["bytes"]) for request in row["requests"]], row["gold"], row["cluster"])
                tally.add(found, (theirs, sizes, gold, doc.get("cluster")), f"row {row['row']}")
            fine &= tally.report()
        for tokenizer in tokenizers:
            fine &= compare_replayed_tokens(program, samples, tokenizer)
    return fine


def odd_requests(draw, count):
    """Requests with odd white space, special tokens and long contexts."""

    def text(words):
        parts = [draw.choice(SPACES + [" "] * 8) + draw.choice(WORDS + ["<|im_start|>", "<|endoftext|>"]) for _ in range(words)]
        return "".join(parts)

    requests = []
    for _ in range(count):
        blank = draw.random() < 0.1
        context = "" if blank else draw.choice([text(1), text(4), text(30), text(90)])
        context += draw.choice(SPACES) + draw.choice(SPACES)
        requests.append((context, draw.choice(SPACES) + draw.choice(["", "<|im_start|>"] + [""] * 5) + text(draw.randint(1, 6))))
    return requests


class Encoder:
    """Tokens of lm-eval's `--model hf`, whose model is left out."""

    def __init__(self, tokenizer_folder):
        from lm_eval.models.huggingface import HFLM
        from transformers import AutoTokenizer

        class Tokens(HFLM):
            def __init__(self):
                self.tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
                self.backend, self.enable_thinking = "causal", None
                self.add_bos_token = self.custom_prefix_token_id = None

            def _loglikelihood_tokens(self, requests, **_):
                return requests

        self.lm = Tokens()

    def tokens(self, request, max_tokens):
        """The tokens of a pair of texts, how many are scored and how many are cut off; "refused" if it cannot be scored."""
        ((_, context, own),) = self.lm.loglikelihood([SimpleNamespace(args=request)], disable_tqdm=True)
        if not context or not own or len(own) > max_tokens:
            return "refused"
        kept = (context + own)[-(max_tokens + 1) :]
        return kept, len(own), len(context) + len(own) - len(kept)


def found_tokens(row):
    """The tokens of each request of a row of the example task_rows, as `Encoder.tokens` has them."""
    tokens = row["tokens"]
    return "refused" if "error" in tokens else [tuple(of[key] for key in ["tokens", "scored", "truncated"]) for of in tokens]


def compare_tokens(program, folder, tokenizer_folder, draw, max_tokens=64, count=300):
    """Tokens and targets of requests with odd texts."""
    encoder = Encoder(tokenizer_folder)
    requests = odd_requests(draw, count)
    # A delimiter of its own would be in the way.
    rows = [dict(context=context, continuation=continuation) for context, continuation in requests]
    write_lines(folder / "odd.jsonl", rows)
    (folder / "odd.toml").write_text('data = "odd.jsonl"\ndelimiter = ""\n')
    tally, refused, truncated = Tally(f"tokens of {tokenizer_folder}"), 0, 0
    for row, request in zip(rows_of(program, folder / "odd.toml", tokenizer_folder, max_tokens), requests):
        theirs = encoder.tokens(request, max_tokens)
        refused += theirs == "refused"
        truncated += theirs != "refused" and theirs[2] > 0
        tally.add(found_tokens(row), theirs if theirs == "refused" else [theirs], repr(request))
    fine = tally.report()
    print(f"  of these {refused} refused by both or either, {truncated} truncated")
    return fine


def compare_replayed_tokens(program, samples, tokenizer_folder, max_tokens=1024):
    """Tokens of the requests that lm-eval logged, row by row."""
    encoder, tally = Encoder(tokenizer_folder), Tally(f"tokens of {samples.name}")
    logged = read_lines(samples.read_text())
    for row, sample in zip(rows_of(program, samples, tokenizer_folder, max_tokens), logged, strict=True):
        arguments = [tuple(texts.values()) for texts in sample["arguments"].values()]
        theirs = [encoder.tokens(request, max_tokens) for request in arguments]
        tally.add(found_tokens(row), "refused" if "refused" in theirs else theirs, f"row {row['row']}")
    return tally.report()


def with_begin_token(source, folder):
    """A copy of the tokenizer whose template puts its begin token before texts."""
    target = folder / "with_begin"
    target.mkdir()
    for file in Path(source).iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((target / "tokenizer_config.json").read_text())
    name = config["bos_token"]
    data = json.loads((target / "tokenizer.json").read_text())
    (index,) = [token["id"] for token in data["added_tokens"] if token["content"] == name]
    template = lambda *kinds: [{"SpecialToken": {"id": name, "type_id": 0}}, *({"Sequence": {"id": kind, "type_id": 0}} for kind in kinds)]
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": template("A"),
        "pair": template("A", "B"),
        "special_tokens": {name: {"id": name, "ids": [index], "tokens": [name]}},
    }
    (target / "tokenizer.json").write_text(json.dumps(data))
    return target


def big_bench_format(source):
    """BIG-bench's own function that renders an example; its package needs TensorFlow."""
    code = (source / "bigbench/api/json_task.py").read_text()
    (function,) = [node for node in ast.parse(code).body if getattr(node, "name", "") == "default_format_fn"]
    scope = {"np": np, "Dict": dict, "Any": object}
    exec("from typing import Any, Dict\n" + ast.get_source_segment(code, function), scope)
    return scope["default_format_fn"]


def big_bench_docs(file, format_example):
    """Rows of choices of a task.json as BIG-bench renders them, with the columns and stripped as lm-eval's data set has them."""
    task = json.loads(file.read_text())
    seen, docs = set(), []
    for example in task.get("examples", []):
        text = json.dumps(example)
        if text in seen or "target_scores" not in example:
            continue
        seen.add(text)
        done = format_example(
            json.loads(text),
            task.get("example_input_prefix", "\nQ: "),
            task.get("example_output_prefix", "\nA: "),
            task.get("choice_prefix", "\n  choice: "),
            42,
            task.get("append_choices_to_input", True),
        )
        scores = done["target_scores"]
        docs.append(
            dict(
                inputs=(str(task.get("task_prefix", "")) + done["input"]).strip(),
                targets=[target.strip() for target in done["target"]],
                multiple_choice_targets=[choice.strip() for choice in scores],
                multiple_choice_scores=list(scores.values()),
            )
        )
    return docs


def compare_big_bench(program, source, most=200):
    """Prompts, choices and targets of BIG-bench's own formatting."""
    format_example = big_bench_format(source)
    files = sorted(source.glob("bigbench/benchmark_tasks/**/task.json"))
    tally, refused = Tally("BIG-bench"), []
    for file in files:
        docs = [] if file.stat().st_size > 5e6 else big_bench_docs(file, format_example)
        if not docs:
            continue
        expected = []
        for doc in docs:
            choices, target = doc["multiple_choice_targets"], doc["targets"][0]
            gold = choices.index(target) if target in choices else doc["multiple_choice_scores"].index(1)
            expected.append((doc["inputs"], [" " + choice for choice in choices], gold))
        try:
            found = rows_of(program, file)
        except subprocess.CalledProcessError:
            refused.append(file.parent.relative_to(source / "bigbench/benchmark_tasks"))
            continue
        tally.add(len(found), len(expected), f"rows of {file}")
        for row, theirs in list(zip(found, expected))[:most]:
            ours = (row["requests"][0]["context"], [request["continuation"] for request in row["requests"]], row["gold"])
            tally.add(ours, theirs, f"{file}, example {row['row']}")
    fine = tally.report()
    print(f"  refused (empty or equal choices): {[str(name) for name in refused]}")
    return fine


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", help="the example task_rows, built")
    parser.add_argument("folder", type=Path, help="an empty folder for files")
    parser.add_argument("--tokenizer", type=Path, action="append", default=[], help="a folder of a tokenizer")
    parser.add_argument("--big-bench", type=Path, help="the unpacked bigbench 1.0.0")
    parser.add_argument("--seed", type=int, default=random.randrange(1000))
    options = parser.parse_args()
    print(f"--seed {options.seed}")
    os.environ["HF_HUB_OFFLINE"] = "1"
    draw, folder = random.Random(options.seed), options.folder.resolve()
    fine = compare_rendering(options.program, folder, options.tokenizer, draw)
    for tokenizer in options.tokenizer:
        fine &= compare_tokens(options.program, folder, tokenizer, draw)
    if options.tokenizer:
        fine &= compare_tokens(options.program, folder, with_begin_token(options.tokenizer[0], folder), draw)
    if options.big_bench:
        fine &= compare_big_bench(options.program, options.big_bench)
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
