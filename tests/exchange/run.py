"""Models made by xtrain, run by engines of other lineages, and models made elsewhere taken in and given out again.

    tests/exchange/run.sh                                  # what CI runs: mlx-lm and candle-transformers
    tests/exchange/run.sh --transformers /path/to/python   # also transformers, in a Python that has it with torch

Each model is trained here for some steps, exported, and run by every engine token by token along xtrain's own greedy
tokens, through the engine's own cache; so where all choices agree, the engine alone would have written the same.
compare.py holds the rule. Every model is also run with a config.json that was made wrong (theta, eps, scaling,
head_dim), and every engine must then miss the bar: what would go unnoticed is not tested.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from transformers import AutoTokenizer

import round_trip
from compare import Bar, Comparison, compare, table
from xtrain import ROOT, Xtrain

HERE = Path(__file__).resolve().parent
TOKENS = 32
PROMPT = "//! Reading and writing tensors.\n\nuse std::path::Path;\n\npub fn "

# Same weights, both in fp32: what is left is the order of sums and the tables of sines.
FP32 = Bar(relative=2e-5, decisive=TOKENS - 2)
# Same bf16 weights, each engine rounding where it likes: agreement where it is decisive, and no wrong formula.
BF16 = Bar(relative=5e-2, decisive=0)

# Models, and the engines that cannot run them, with the reason.
MODELS = {
    "qwen3": {},
    "qwen2": {},
    "llama": {},
    "llama_wide": {"candle": "no head_dim of its own, no linear scaling in its llama"},
}

# Changes of config.json that an engine must not survive, where the model has the feature.
CONTROLS = {
    "theta": lambda c: set_theta(c, 10_000.0),
    "eps": lambda c: c.update(rms_norm_eps=1e-6),
    "scaling": lambda c: (c.update(rope_scaling=None), c.update(rope_parameters={"rope_type": "default"}), set_theta(c, c["rope_theta"])),
    "head_dim": lambda c: c.pop("head_dim"),
}


def set_theta(config, theta):
    config["rope_theta"] = theta
    config["rope_parameters"]["rope_theta"] = theta


class Engine:
    """A program that answers requests; see engine_mlx.py."""

    def __init__(self, name, command):
        self.name, self.command = name, command

    def ask(self, runs, work):
        request, response = work / f"{self.name}.request.json", work / f"{self.name}.response.json"
        request.write_text(json.dumps({"runs": runs}))
        command, plain = [*self.command, str(request), str(response)], {**os.environ, "RUST_BACKTRACE": "0"}
        done = subprocess.run(command, capture_output=True, text=True, env=plain)
        if done.returncode != 0:
            raise SystemExit(f"the engine {self.name} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        answer = json.loads(response.read_text())
        return answer["engine"], answer["runs"]


def export_all(xtrain, name, work):
    """Trains a model; its exports by name, with whether xtrain's own side is computed in bf16."""
    run = work / name
    xtrain.run("train", HERE / "models" / f"{name}.toml", "--out", run)
    bf16, sharded = work / f"{name}-bf16", work / f"{name}-sharded"
    xtrain.run("export", run, "--out", bf16, "--dtype", "bf16")
    xtrain.run("export", run, "--out", sharded, "--dtype", "fp32", "--max-shard-mb", 1)
    return {"fp32": run / "hf", "fp32, sharded": sharded, "bf16": bf16}


def check_tokenizer(xtrain, name, folder):
    """transformers' tokenizer gives the same ids and text; standard output is the text alone. Returns the prompt's ids."""
    theirs = AutoTokenizer.from_pretrained(folder)
    ids = theirs(PROMPT)["input_ids"]
    flags = ["--prompt", PROMPT, "--temperature", 0, "--max-tokens", TOKENS]
    told = json.loads(xtrain.run("generate", folder, *flags, "--json"))
    if told["prompt_tokens"] != ids:
        raise SystemExit(f"{name}: xtrain encodes the prompt as {told['prompt_tokens']}, transformers as {ids}")
    text = theirs.decode(told["tokens"])
    if told["text"] != text:
        raise SystemExit(f"{name}: xtrain decodes the tokens as {told['text']!r}, transformers as {text!r}")
    if xtrain.run("generate", folder, *flags) != text + "\n":
        raise SystemExit(f"{name}: standard output is not the text alone")
    return ids


def spoiled(folder, work, change):
    """A copy of `folder` of which config.json is changed; None where the model has nothing to change."""
    config = json.loads((folder / "config.json").read_text())
    before = json.dumps(config)
    change(config)
    natural = config["hidden_size"] // config["num_attention_heads"]
    if json.dumps(config) == before or json.loads(before)["head_dim"] == config.get("head_dim", natural) and "head_dim" not in config:
        return None
    copy = work
    shutil.copytree(folder, copy)
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def questions(xtrain, name, work):
    """Everything that is asked about one model: (weights, request, our logits, bar or None for a control)."""
    exports = export_all(xtrain, name, work)
    config = json.loads((exports["fp32"] / "config.json").read_text())
    shards = len(list(exports["fp32, sharded"].glob("model-*.safetensors")))
    if name == "qwen3" and shards < 2:
        raise SystemExit(f"{name}: the sharded export has {shards} shards, so it tests no index")
    prompt = check_tokenizer(xtrain, name, exports["fp32"])
    vocab = config["vocab_size"]
    asked = []

    def ask(weights, folder, dtype, ours, bar):
        tokens, logits = ours
        run = {"folder": str(folder), "dtype": dtype, "prompt": prompt, "forced": tokens}
        asked.append((weights, run, logits, bar))

    # The run folder's own weights are what every fp32 export must give.
    ours = xtrain.generate(work / name, prompt, TOKENS, vocab)
    ask("fp32", exports["fp32"], "float32", ours, FP32)
    ask("fp32, sharded", exports["fp32, sharded"], "float32", ours, FP32)
    for label, change in CONTROLS.items():
        copy = spoiled(exports["fp32"], work / f"{name}-wrong-{label}", change)
        if copy:
            ask(f"wrong {label}", copy, "float32", ours, None)
    ours = xtrain.generate(exports["bf16"], prompt, TOKENS, vocab)
    ask("bf16, run in fp32", exports["bf16"], "float32", ours, FP32)
    ours = xtrain.generate(exports["bf16"], prompt, TOKENS, vocab, "bf16")
    ask("bf16", exports["bf16"], "native", ours, BF16)
    return asked


def judge(name, weights, engine, excuse, answer, ours, bar):
    """One answer as a line of the table."""
    if "error" in answer:
        result = Comparison(name, weights, engine)
        error = (answer["error"].splitlines() or [""])[0][:90]
        if bar is None:
            result.note = f"refused, as it must: {error}"
        elif excuse:
            result.note = f"cannot run it ({excuse}): {error}"
        else:
            result.note = "FAILED"
            result.faults.append(f"refused: {error}")
        return result
    if bar is not None:
        result = compare(name, weights, engine, ours, answer["logits"], bar)
        if excuse and result.faults:
            result.note, result.faults = f"cannot run it ({excuse})", []
        return result
    # A control: at least ten times over the bar, or it shows nothing.
    result = compare(name, weights, engine, ours, answer["logits"], Bar(float("inf"), 0))
    result.faults.clear()
    if not excuse and result.relative < 10 * FP32.relative:
        result.faults.append(f"goes unnoticed: logits differ by {result.relative:.2e} only")
    result.note = f"noticed: {result.relative:.1e} (relative)" if not result.faults else "FAILED"
    return result


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--xtrain", required=True, help="the binary")
    parser.add_argument("--candle", required=True, help="the binary of tests/exchange/candle")
    parser.add_argument("--work", required=True, help="a folder to work in; emptied first")
    parser.add_argument("--transformers", action="append", default=[], metavar="PYTHON")
    arguments = parser.parse_args()
    work = Path(arguments.work).resolve()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    xtrain = Xtrain(arguments.xtrain)
    engines = [
        Engine("mlx", [sys.executable, str(HERE / "engine_mlx.py")]),
        Engine("candle", [str(Path(arguments.candle).resolve())]),
    ]
    for number, python in enumerate(arguments.transformers):
        engines.append(Engine(f"transformers{number}", [python, str(HERE / "engine_transformers.py")]))

    started = time.time()
    asked = [(name, *question) for name in MODELS for question in questions(xtrain, name, work)]
    print(f"{len(MODELS)} models trained and exported in {time.time() - started:.0f}s")
    results = []
    for engine in engines:
        started = time.time()
        version, answers = engine.ask([run for _, _, run, _, _ in asked], work)
        print(f"{version}: {len(answers)} runs in {time.time() - started:.0f}s")
        for (name, weights, _, ours, bar), answer in zip(asked, answers, strict=True):
            excuse = MODELS[name].get(engine.name)
            results.append(judge(name, weights, version, excuse, answer, ours, bar))
    results.sort(key=lambda r: list(MODELS).index(r.model))
    print(f"\n{TOKENS} greedy tokens; \"decisive\" is a margin above 10 times the largest difference of that step's logits\n")
    print(table(results))
    faults = [f"{r.name}: {fault}" for r in results for fault in r.faults]
    started = time.time()
    faults += round_trip.check(xtrain, work)
    print(f"\nmodels made elsewhere, in and out: {time.time() - started:.0f}s")
    if faults:
        raise SystemExit("\nexchange FAILED:\n" + "\n".join(f"- {fault}" for fault in faults))
    print("exchange: all agree")


main()
