#!/usr/bin/env python3
"""Checks that the scores of `xtrain eval --task` have the same bits, however they are computed.

    xtrain train examples/quickstart.toml --out RUN --set train.steps=40 --set eval.every=0
    python3 tests/tasks/same_bits.py target/release/xtrain RUN NEW_FOLDER

Rows are those of examples/data/continuations.jsonl.gz. In fp32, bf16, fp8-row and fp8-block, some rows are scored alone, first,
last and among the others. All rows are scored with 1 and 4 threads, in 1, 2 and 3 processes, and by evaluations that are
killed with all their processes (SIGKILL) at a random moment, some after one, two or three windows of rows are written,
and continued in another number of processes. `fp8-current` scales whole tensors, so its rows are only compared in their
own order. The model may be a Hugging Face folder too.

Prints a line for each precision and for the kills. Exit code 1 if a bit differs.
"""

import argparse
import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRECISIONS = ["fp32", "bf16", "fp8-row", "fp8-block", "fp8-current"]
WORLDS = [1, 2, 3]
# Windows in which the rows are scored and written, about: one has 64 batches.
WINDOWS = 4


class Scores:
    """Evaluations in a folder."""

    def __init__(self, xtrain, model, folder):
        self.xtrain, self.model, self.folder, self.count = xtrain, model, folder, 0

    def command(self, task, out, precision, threads=1, ranks=1):
        command = [self.xtrain, "eval", self.model, "--device", "cpu", "--task", task, "--out", out, "--precision", precision]
        return [*command, "--threads", str(threads), *(["--ranks", str(ranks)] if ranks > 1 else [])]

    def new_folder(self):
        self.count += 1
        return self.folder / f"out-{self.count}"

    def finish(self, task, out, precision, **how):
        """Evaluates to the end; the lines of its rows."""
        subprocess.run(self.command(task, out, precision, **how), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        (file,) = out.glob("*/*.jsonl")
        lines = file.read_text().splitlines()[1:]
        shutil.rmtree(out)
        return lines

    def all(self, task, precision, **how):
        return self.finish(task, self.new_folder(), precision, **how)

    def killed(self, task, precision, windows, seconds, ranks):
        """Kills an evaluation so many seconds after it has written so many windows of rows.

        Its folder, and the number of rows that it has written, or `None` if it had ended before.
        """
        out = self.new_folder()
        command = self.command(task, out, precision, ranks=ranks)
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        seen = {0}
        while process.poll() is None and len(seen) <= windows:
            seen.add(written(out))
            time.sleep(0.01)
        time.sleep(seconds)
        has_ended = process.poll() is not None
        if not has_ended:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return out, None if has_ended else written(out)


def written(out):
    """Rows in the file of scores of an evaluation that is not complete."""
    rows = 0
    for file in out.glob("*/*"):
        try:
            rows += max(file.read_bytes().count(b"\n") - 1, 0)
        except FileNotFoundError:  # It has just been given another name.
            pass
    return rows


def write(folder, name, lines):
    path = folder / f"{name}.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def numbers(line):
    """The scores of a row, which do not depend on its place in a file."""
    row = json.loads(line)
    return {key: row[key] for key in ["logprobs", "greedy", "tokens"]}


def places(scores, precision, questions, drawn, reference):
    """Counts the scores of the drawn rows alone, first, last and beside few others, that equal those among all rows."""
    equal = total = 0
    few = questions[:40]
    for at in drawn:
        line, rest = questions[at], [other for other in few if other != questions[at]]
        for rows, place in [([line], 0), ([line, *rest], 0), ([*rest, line], -1), ([*rest[:7], line, *rest[7:]], 7)]:
            found = scores.all(write(scores.folder, "place", rows), precision)
            total += 1
            equal += numbers(found[place]) == numbers(reference[at])
    return equal, total


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("xtrain", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path, help="an empty folder for files")
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--drawn", type=int, default=4, help="rows that are moved about")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--only-kills", action="store_true")
    parser.add_argument("--seed", type=int, default=random.randrange(1000))
    options = parser.parse_args()
    print(f"--seed {options.seed}")
    draw, fine = random.Random(options.seed), True
    options.folder.mkdir(parents=True, exist_ok=True)
    scores = Scores(options.xtrain.resolve(), options.model.resolve(), options.folder.resolve())
    with gzip.open(ROOT / "examples/data/continuations.jsonl.gz", "rt") as file:
        questions = file.read().splitlines()[: options.rows]
    task = write(scores.folder, "all", questions)
    references, seconds = {}, {}
    for precision in PRECISIONS:
        began = time.monotonic()
        reference = references[precision] = scores.all(task, precision)
        seconds[precision] = time.monotonic() - began
        if options.only_kills:
            continue
        ways = [dict(threads=4), *(dict(ranks=ranks) for ranks in WORLDS[1:]), dict(threads=4, ranks=2)]
        same = {str(way): scores.all(task, precision, **way) == reference for way in ways}
        equal, total = (0, 0) if precision == "fp8-current" else places(scores, precision, questions, draw.sample(range(len(questions)), options.drawn), reference)
        fine &= equal == total and all(same.values()) and len(reference) == len(questions)
        print(f"{precision}: {len(reference)} rows; {equal} of {total} rows at other places equal; {same}", flush=True)
    equal, rows_before = 0, []
    for kill in range(options.kills):
        precision, worlds = PRECISIONS[kill % len(PRECISIONS)], draw.choices(WORLDS, k=2)
        while True:
            windows = draw.randrange(WINDOWS)
            out, rows = scores.killed(task, precision, windows, draw.uniform(0, seconds[precision] / WINDOWS), worlds[0])
            if rows is not None:
                break
            shutil.rmtree(out)
        is_equal = scores.finish(task, out, precision, ranks=worlds[1]) == references[precision]
        equal, fine = equal + is_equal, fine and is_equal
        rows_before.append(rows)
        if not is_equal:
            print(f"  {precision}, {worlds[0]} then {worlds[1]} processes, killed after {rows} rows: differs")
    print(f"kills: {equal} of {options.kills} equal; rows that were written before each: {rows_before}")
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
