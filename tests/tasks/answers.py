#!/usr/bin/env python3
"""Compares generated answers with lm-eval 0.4.13, `--model hf` in fp32, text by text, and with a replay of its samples.

python3 tests/tasks/answers.py XTRAIN MODEL NEW_FOLDER: XTRAIN is the binary, MODEL a Hugging Face folder.
It needs lm-eval and transformers: README.md.
"""

import argparse
import json
import os
import random
import subprocess
import sys
from pathlib import Path

from compare import Tally, read_lines, write_lines

STARTS = ["pub fn ", "let mut x = ", "/// The ", "impl ", "fn main() {\n", "    for row in ", "use std::", "x", " \n", "#[test]\nfn ", "naïve ", "}\n\n"]
EXPRESSIONS = [None, r"[a-z]", r"(\d)|([a-f])", r"[a-z_]+", r"(\w+)\(", r"(?<=: )(.*)(?=.)", r"(-?[$0-9.,]{2,})|(-?[0-9]+)", r"(?i)THE (\w+)", r"(?s).*\n(.*)"]


def rows(draw, count):
    def query():
        return "".join(draw.choice(STARTS) + draw.choice(["", "the ", "self", "(", "\n"]) for _ in range(draw.choice([1, 2, 3, 90])))

    return [dict(query=f"// {at}\n" + query(), answer=draw.choice("aefst01"), id=at) for at in range(count)]


def write_task(folder, name, data, settings, shots, expression):
    """A task of ours, and lm-eval's."""
    keys = {"data": data, "delimiter": " ", **settings}
    theirs = {
        "task": f"xt_{name}",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / data)}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "query",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "exact_match"}],
    }
    if settings:
        names = {"max_tokens": "max_gen_toks", "until": "until"}
        theirs["generation_kwargs"] = {"do_sample": False, **{names[key]: value for key, value in settings.items()}}
    if shots:
        keys.update(shots=shots, examples=data)
        theirs.update(num_fewshot=shots, fewshot_split="test", fewshot_config={"sampler": "first_n"})
    if expression:
        # What it finds is compared below: lm-eval's exact_match knows no white space at the ends of answers.
        theirs["filter_list"] = [{"name": "none", "filter": [{"function": "regex", "regex_pattern": expression}, {"function": "take_first"}]}]
    (folder / f"{name}.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items()))
    (folder / f"{name}.yaml").write_text(json.dumps(theirs))


def ours(xtrain, model, task, out):
    """Generated rows."""
    subprocess.run([xtrain, "eval", model, "--task", task, "--precision", "fp32", "--device", "cpu", "--out", out], check=True, stdout=subprocess.DEVNULL)
    (file,) = out.glob("*/fp32.jsonl")
    return read_lines(file.read_text())[1:]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("xtrain", help="the binary")
    parser.add_argument("model", type=Path, help="a Hugging Face folder")
    parser.add_argument("folder", type=Path, help="an empty folder for files")
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--seed", type=int, default=random.randrange(1000))
    options = parser.parse_args()
    print(f"--seed {options.seed}")
    draw, folder = random.Random(options.seed), options.folder.resolve()
    os.environ["HF_HUB_OFFLINE"] = "1"
    tasks = {
        "default": ({"max_tokens": 64, "until": ["\n\n"]}, 0),
        "line": ({"max_tokens": 40, "until": ["\n", "self", ");"]}, 0),
        "special": ({"max_tokens": 24, "until": ["<|endoftext|>", " {"]}, 0),
        "shots": ({"max_tokens": 100, "until": ["\n\n"]}, 3),
        "long": ({"max_tokens": 200, "until": ["ü", "fn "]}, 0),
    }
    expressions = {}
    for name, (settings, shots) in tasks.items():
        expressions[name] = draw.choice(EXPRESSIONS)
        data = [row if not expressions[name] else dict(row, extract=expressions[name]) for row in rows(draw, options.rows)]
        write_lines(folder / f"{name}.jsonl", data)
        write_task(folder, name, f"{name}.jsonl", settings, shots, expressions[name])
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--model_args", f"pretrained={options.model},dtype=float32", "--device", "cpu"]
    command += ["--tasks", ",".join(f"xt_{name}" for name in tasks), "--include_path", str(folder), "--log_samples", "--output_path", str(folder / "out")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    fine = True
    for name in tasks:
        (samples,) = (folder / "out").glob(f"*/samples_xt_{name}_*.jsonl")
        logged = sorted(read_lines(samples.read_text()), key=lambda sample: sample["doc_id"])
        found = {"generated": ours(options.xtrain, options.model, folder / f"{name}.toml", folder / f"ours_{name}")}
        found["replayed"] = ours(options.xtrain, options.model, samples, folder / f"replayed_{name}")
        for how, generated in found.items():
            tally = Tally(f"{name}, {how}, {expressions[name]}")
            tally.add(len(generated), len(logged), "number of rows")
            for row, sample in zip(generated, logged):
                text = sample["resps"][0][0]
                extracted = sample["filtered_resps"][0] if how == "generated" else text
                theirs = (text, extracted.strip() == sample["target"])
                tally.add((row["answer"], row["exact_match"]), theirs, f"row {row['row']}")
            fine &= tally.report()
            cut = sum(bool(row.get("truncated")) for row in generated)
            print(f"  {len({row['answer'] for row in generated})} different texts, {cut} contexts cut, {sum(row['exact_match'] for row in generated)} right")
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
