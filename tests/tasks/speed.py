#!/usr/bin/env python3
"""Measures the speed of `xtrain eval --task` on the CPU.

    pip install tokenizers
    python3 tests/tasks/speed.py items target/release/xtrain smollm2 NEW_FOLDER
    python3 tests/tasks/speed.py choices target/release/xtrain smollm2 NEW_FOLDER

    xtrain train examples/quickstart.toml --out RUN --set train.steps=40 --set checkpoint.every=4 \\
        --set checkpoint.keep_last=10 --set checkpoint.keep_best=false --set eval.every=0
    python3 tests/tasks/speed.py checkpoints target/release/xtrain RUN NEW_FOLDER

items: tokens a second of rows of 512 tokens, of which the last 16 or all are scored, over those of `xtrain eval` on text
in sequences of 512.
choices: the time of rows of four choices of 16 tokens with one context of 400, over that of rows of one choice.
checkpoints: the time of `--every-checkpoint` over that of an evaluation of each step, without loading, which is measured
as an evaluation of one row.

Runs alternate, and each ratio is the median of those of the rounds. The speed of rows and of text is that of the tokens
that a long run reads more than a short one, so loading does not count. Both the clock and the time of the processors are
reported: on a machine that is shared, the second is the steadier one.
"""

import argparse
import gzip
import json
import os
import shutil
import statistics
import subprocess
import time
from pathlib import Path

from texts import ROOT, pages, rows, tokenizer_of

ITEM, CONTEXT, CHOICE = 512, 400, 16


class Timed:
    """Evaluations whose seconds are measured, by the clock and of the processors."""

    def __init__(self, options):
        self.options = options

    def run(self, *arguments):
        command = [self.options.xtrain, "eval", self.options.model, "--device", "cpu", "--threads", self.options.threads, "--json", *arguments]
        began = time.monotonic()
        process = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE)
        printed = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{command} failed")
        return (time.monotonic() - began, usage.ru_utime + usage.ru_stime), printed

    def task(self, file, *arguments):
        out = self.options.folder / "scores"
        shutil.rmtree(out, ignore_errors=True)
        return self.run("--task", file, "--out", out, *arguments)[0]


def more(long, short):
    """Seconds that the long run took more than the short one."""
    return [a - b for a, b in zip(long, short)]


def shown(name, ratios):
    """The medians of ratios by the clock and of the processors."""
    clock, processors = (statistics.median(of) for of in zip(*ratios))
    every = ", ".join(f"{clock:.2f} ({processors:.2f})" for clock, processors in ratios)
    print(f"{name}: {clock:.3f} by the clock, {processors:.3f} of the processors; all {every}", flush=True)


def write_task(folder, name, questions):
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    (folder / f"{name}.toml").write_text(f'data = "{name}.jsonl"\ndelimiter = ""\n')
    return folder / f"{name}.toml"


def items(timed, options):
    tokenizer, folder, few = tokenizer_of(options.model), options.folder, options.items // 5
    # A row reads all of its tokens but the last one.
    tasks = {}
    for scored in (CHOICE, ITEM):
        texts = rows(tokenizer, options.items, ITEM + 1 - scored, scored)
        tasks[scored] = write_task(folder, f"scored-{scored}", [dict(context=context, continuation=own) for context, own in texts])
    ids = tokenizer.encode(pages(), add_special_tokens=False).ids
    texts = {}
    for count in (few, options.items):
        texts[count] = folder / f"text-{count}.txt"
        texts[count].write_text(tokenizer.decode(ids[: ITEM * count]))
    for precision in options.precision:
        ratios, speeds = {scored: [] for scored in tasks}, []

        def of_text(count):
            seconds, printed = timed.run("--data", texts[count], "--seq-len", ITEM, "--batch-size", options.batch_size, "--precision", precision)
            return seconds, json.loads(printed)["tokens"]

        for _ in range(options.rounds):
            (short, few_tokens), (long, tokens) = of_text(few), of_text(options.items)
            text = [(tokens - few_tokens) / seconds for seconds in more(long, short)]
            speeds.append(text[0])
            for scored, task in tasks.items():
                how = ["--precision", precision, "--limit"]
                seconds = more(timed.task(task, *how, options.items), timed.task(task, *how, few))
                speed = [(options.items - few) * ITEM / second for second in seconds]
                ratios[scored].append([own / other for own, other in zip(speed, text)])
        print(f"{precision}: {statistics.median(speeds):.0f} tokens of text a second by the clock; rows {few} to {options.items}")
        for scored in tasks:
            shown(f"  the last {scored} of {ITEM} tokens scored, over text", ratios[scored])


def choices(timed, options):
    tokenizer = tokenizer_of(options.model)
    texts = rows(tokenizer, 4 * options.items, CONTEXT, CHOICE)
    groups = [texts[at : at + 4] for at in range(0, len(texts), 4)]
    # Other rows' continuations are choices of about as many tokens.
    four = write_task(options.folder, "four", [dict(query=group[0][0], choices=[own for _, own in group], gold=0) for group in groups])
    single = write_task(options.folder, "single", [dict(context=group[0][0], continuation=group[0][1]) for group in groups])
    for precision in options.precision:
        ratios = []
        for _ in range(options.rounds):
            how, few = ["--precision", precision, "--limit"], max(options.items // 4, 1)
            of_four, of_single = (more(timed.task(task, *how, options.items), timed.task(task, *how, few)) for task in (four, single))
            ratios.append([a / b for a, b in zip(of_four, of_single)])
        bound = 4 * (CONTEXT + CHOICE) / (CONTEXT + 4 * CHOICE)
        shown(f"{precision}: four choices over one; {bound:.2f} times less if a context were read once", ratios)


def checkpoints(timed, options):
    with gzip.open(ROOT / "examples/data/continuations.jsonl.gz", "rt") as file:
        task = options.folder / "continuations.jsonl"
        task.write_text("".join(file.readlines()[: options.items]))
    names = (options.model / "checkpoints").glob("step-*")
    steps = sorted(int(name.name.removeprefix("step-")) for name in names)
    ratios = []
    for _ in range(options.rounds):
        every = timed.task(task, "--every-checkpoint")
        single = [timed.task(task, "--step", step) for step in steps]
        loading = [timed.task(task, "--step", step, "--limit", 1) for step in steps]
        without = more(map(sum, zip(*single)), map(sum, zip(*loading)))
        ratios.append([a / b for a, b in zip(every, without)])
    shown(f"{len(steps)} checkpoints, {options.items} rows: --every-checkpoint over single ones without loading", ratios)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["items", "choices", "checkpoints"])
    parser.add_argument("xtrain", type=Path)
    parser.add_argument("model", type=Path, help="a Hugging Face folder; for checkpoints, a run")
    parser.add_argument("folder", type=Path, help="an empty folder for files")
    parser.add_argument("--items", type=int, help="rows; by default 40, 16 and 1000")
    parser.add_argument("--precision", action="append", help="by default bf16 and fp32")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences of text at once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    options.items = options.items or {"items": 40, "choices": 16, "checkpoints": 1000}[options.what]
    options.precision = options.precision or ["bf16", "fp32"]
    options.folder.mkdir(parents=True, exist_ok=True)
    {"items": items, "choices": choices, "checkpoints": checkpoints}[options.what](Timed(options), options)


if __name__ == "__main__":
    main()
