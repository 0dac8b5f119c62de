#!/usr/bin/env python3
"""Compares the scores of `xtrain eval --task` with those of lm-eval's `--model hf`, sum by sum.

    pip install 'lm_eval[hf]==0.4.13' && pip download --no-deps bigbench==1.0.0 && tar xf bigbench-1.0.0.tar.gz
    python3 tests/tasks/scores.py target/release/xtrain smollm2 NEW_FOLDER --big-bench bigbench-1.0.0

The model is a Hugging Face folder; widen.py writes one. Compared are 200 rows of each of eight BIG-bench tasks, and the
replay of a 5-shot task: `lm_eval run --model dummy --log_samples` renders it without a model, and xtrain scores the
samples. lm-eval uses its own templates of BIG-bench, on rows that BIG-bench's own code renders; xtrain reads task.json.

Equal must be each pick and greedy flag, `acc`, `acc_norm` and their stderr; sums may differ by 1e-3. Rows whose two best
choices are nearer than that are listed: rounding may explain another pick there, which still fails.
"""

import argparse
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import lm_eval

from compare import big_bench_docs, big_bench_format, read_lines, write_lines

BIG_BENCH = "strategyqa implicatures navigate social_iqa anachronisms sports_understanding logical_fallacy_detection misconceptions"
METRICS = ["acc", "acc_norm", "acc_bytes"]
ROOT = Path(__file__).resolve().parents[2]
NEAR = 1e-3


def write_task(folder, name, data, keys):
    """A task file of lm-eval. JSON is YAML."""
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "metric_list": [{"metric": metric} for metric in METRICS],
        **keys,
    }
    (folder / f"{name}.yaml").write_text(json.dumps(task))


def big_bench_tasks(folder, source, names, limit):
    """Task files with lm-eval's templates; the task.json that xtrain reads, by name."""
    templates = Path(lm_eval.__file__).parent / "tasks/bigbench"
    format_example = big_bench_format(source)
    files = {}
    for name in names:
        file = source / "bigbench/benchmark_tasks" / name / "task.json"
        write_lines(folder / f"{name}.jsonl", big_bench_docs(file, format_example)[:limit])
        own = (templates / f"multiple_choice/{name}.yaml").read_text()
        template = next(line.split("../")[1] for line in own.splitlines() if line.startswith("include:"))
        write_task(folder, f"xt_{name}", folder / f"{name}.jsonl", {"include": str(templates / template)})
        files[f"xt_{name}"] = file
    return files


def shots_task(folder, limit):
    """A task of five examples before each question, from this repository's rows."""
    with gzip.open(ROOT / "examples/data/continuations.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    write_lines(folder / "shots.jsonl", rows[:limit])
    write_lines(folder / "dev.jsonl", rows[-100:])
    files = {"test": str(folder / "shots.jsonl"), "dev": str(folder / "dev.jsonl")}
    keys = dict(doc_to_text="query", doc_to_choice="choices", doc_to_target="gold", output_type="multiple_choice")
    keys |= dict(num_fewshot=5, fewshot_split="dev", target_delimiter="", dataset_kwargs={"data_files": files})
    write_task(folder, "xt_shots", folder / "shots.jsonl", keys)


def lm_eval_run(folder, out, names, *options):
    """Runs lm-eval on tasks; its results, and the file of samples by task."""
    command = [sys.executable, "-m", "lm_eval", "run", "--tasks", ",".join(names), "--include_path", str(folder)]
    subprocess.run([*command, "--log_samples", "--output_path", str(folder / out), *options], check=True)
    (results,) = (folder / out).glob("*/results_*.json")
    samples = {name: next((folder / out).glob(f"*/samples_{name}_*.jsonl")) for name in names}
    return json.loads(results.read_text())["results"], samples


def argmax(values):
    return max(range(len(values)), key=lambda at: values[at])


def compare(name, results, samples, ours, rows):
    """True if the scores of a task are those of lm-eval. `ours` are the metrics of xtrain, `rows` its numbers of rows."""
    theirs = sorted(read_lines(samples.read_text()), key=lambda sample: sample["doc_id"])
    worst, sums, different, near = 0.0, 0, [], []
    if len(theirs) != len(rows):
        different.append(f"{len(rows)} rows, lm-eval has {len(theirs)}")
    for row, sample in zip(rows, theirs):
        found = [(float(logprob), str(greedy) == "True") for ((logprob, greedy),) in sample["resps"]]
        place = f"row {row['row']} (doc {sample['doc_id']})"
        if len(found) != len(row["logprobs"]):
            different.append(f"{place}: {len(row['logprobs'])} requests, lm-eval has {len(found)}")
            continue
        gaps = [abs(own - other) for own, (other, _) in zip(row["logprobs"], found)]
        worst, sums = max(worst, *gaps), sums + len(gaps)
        arguments = [list(sample["arguments"][f"gen_args_{at}"].values()) for at in range(len(found))]
        for at, gap in enumerate(gaps):
            if gap > NEAR or row["greedy"][at] != found[at][1]:
                different.append(f"{place}, {arguments[at]!r}: {row['logprobs'][at]} {row['greedy'][at]}, lm-eval has {found[at]}")
        best = sorted(row["logprobs"])[-2:]
        if best[1] - best[0] < NEAR:
            near.append(place)
        if argmax(row["logprobs"]) != argmax([logprob for logprob, _ in found]):
            different.append(f"{place}: pick {row['logprobs']}, lm-eval has {found}")
        gold = int(row["gold"] == argmax(row["logprobs"]))
        if gold != sample["acc"]:
            different.append(f"{place}: acc {gold}, lm-eval has {sample['acc']}")
    figures = []
    for metric in METRICS:
        own, other = [(ours[metric]["value"], ours[metric]["stderr"]), (results[f"{metric},none"], results[f"{metric}_stderr,none"])]
        figures.append(f"{metric} {own[0]:.4f} ± {own[1]:.6f}")
        if any(abs(mine - its) > 1e-12 for mine, its in zip(own, other)):
            different.append(f"{metric} {own}, lm-eval has {other}")
    print(f"{name}: {len(rows)} rows, {sums} sums, largest difference {worst:.1e}; {', '.join(figures)}; {len(different)} different, {len(near)} near ties", flush=True)
    for line in different[:5] + [f"near tie: {place}" for place in near[:5]]:
        print(f"  {line}")
    return not different


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("xtrain", type=Path)
    parser.add_argument("model", type=Path, help="a Hugging Face folder")
    parser.add_argument("folder", type=Path, help="an empty folder for files")
    parser.add_argument("--big-bench", type=Path, help="the unpacked bigbench 1.0.0")
    parser.add_argument("--tasks", default=BIG_BENCH, help="names of BIG-bench tasks, between spaces")
    parser.add_argument("--limit", type=int, default=200, help="rows of each task")
    parser.add_argument("--shot-rows", type=int, default=50, help="rows of the replayed task")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    files = big_bench_tasks(folder, options.big_bench.resolve(), options.tasks.split(), options.limit) if options.big_bench else {}
    if options.shot_rows:
        shots_task(folder, options.shot_rows)
        _, samples = lm_eval_run(folder, "dummy", ["xt_shots"], "--model", "dummy")
        files |= samples
    model = ["--model", "hf", "--model_args", f"pretrained={options.model},dtype=float32", "--device", "cpu", "--batch_size", "8"]
    results, samples = lm_eval_run(folder, "hf", list(files), *model)
    fine = True
    for name, file in files.items():
        command = [options.xtrain, "eval", options.model, "--device", "cpu", "--json", "--task", file, "--limit", str(options.limit), "--out", folder / "ours" / name]
        ours = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        (scored,) = (folder / "ours" / name).glob("*/*fp32.jsonl")
        fine &= compare(name, results[name], samples[name], ours["metrics"], read_lines(scored.read_text())[1:])
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
