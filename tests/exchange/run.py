"""Models made by xtrain, run by engines of other lineages, and models made elsewhere taken in and given out again.

Each model is trained here for some steps, exported, and run by every engine token by token along xtrain's own greedy
tokens, through the engine's own cache; so where all choices agree, the engine alone would have written the same.
compare.py holds the rule. Every model is also run with a config.json that was made wrong (theta, eps, scaling,
head_dim), and every engine must then miss the bar: what would go unnoticed is not tested. round_trip.py does the rest.
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
from transformers import AutoTokenizer

import elsewhere
import fp8
import round_trip
import weights
from compare import Bar, Comparison, align, compare, table
from xtrain import Xtrain

HERE = Path(__file__).resolve().parent
TOKENS = 32
PROMPT = "//! Reading and writing tensors.\n\nuse std::path::Path;\n\npub fn "

# Same weights, both in fp32: what is left is the order of sums and the tables of sines.
FP32 = Bar(relative=2e-5, decisive=TOKENS - 2)
# Same bf16 weights, each engine rounding where it likes: agreement where it is decisive, and no wrong formula.
BF16 = Bar(relative=2e-2, decisive=8)

NARROW = "its llama has no head_dim of its own"
# The models made here (models/<name>.toml), and the engines that cannot run them, with the reason.
MODELS = {
    "qwen3": {},
    "qwen2": {},
    "llama": {},
    "llama_wide": {"candle": f"{NARROW}, and no linear scaling"},
    "mistral": {},
    "mixtral": {},
    "qwen3_moe": {},
    "dots1": {"candle": "it has no such family"},
    "fp8": {},
}
# Of the models made here, those that go out as FP8 too, with the layers that stay in bf16.
IN_FP8 = {"fp8": ["model.layers.1.mlp.down_proj"]}
# Engines that read no FP8 with scales of blocks in these families.
NO_FP8 = {"mlx": "reads FP8 in DeepSeek's families only", "candle": "reads no FP8"}
# Folders of elsewhere.py that are trained on and then run elsewhere again.
TAKEN_IN = {
    "qwen3-v4": {},
    "qwen2-v5": {"candle": "it insists on a number in sliding_window, which is null in the source"},
    "llama3-v5": {"candle": NARROW},
    "mistral-v5": {},
    "llama2-v5": {},
    "qwen3_moe-v4": {},
    "dots1-v5": {"candle": "it has no such family"},
}


# With --small, these models run in mlx alone, and these folders go in and out: tests/passed.py says when.
SMALL_MODELS, SMALL_TAKEN_IN, SMALL_ROUND_TRIPS = ["qwen3", "qwen3_moe", "fp8"], ["qwen2-v5"], ["qwen3-v5", "mixtral-v4"]


def wrong_theta(config):
    config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 10_000.0


def wrong_eps(config):
    config["rms_norm_eps"] = 1e-6


def wrong_scaling(config):
    if config["rope_scaling"]:
        config["rope_scaling"] = None
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_theta"]}


def wrong_head_dim(config):
    natural = config["hidden_size"] // config["num_attention_heads"]
    if config["head_dim"] != natural:
        config["head_dim"] = natural


def wrong_gates(config):
    if "norm_topk_prob" in config:
        config["norm_topk_prob"] = not config["norm_topk_prob"]


# Changes of config.json that an engine must not survive, where the model has the feature.
CONTROLS = {
    "theta": wrong_theta,
    "eps": wrong_eps,
    "scaling": wrong_scaling,
    "head_dim": wrong_head_dim,
    "gates": wrong_gates,
}


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


def train_and_export(xtrain, name, work):
    """Trains a model and returns its run folder and its exports by name."""
    run = work / name
    cache = f'data.cache_dir="{work / "cache"}"'
    xtrain.run("train", HERE / "models" / f"{name}.toml", "--out", run, "--set", cache)
    bf16, sharded = work / f"{name}-bf16", work / f"{name}-sharded"
    xtrain.run("export", run, "--out", bf16, "--dtype", "bf16")
    xtrain.run("export", run, "--out", sharded, "--dtype", "fp32", "--max-shard-size", "1MB")
    return run, {"fp32": run / "hf", "fp32, sharded": sharded, "bf16": bf16}


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


def spoiled(folder, copy, change):
    """A copy of `folder` of which config.json is made wrong; None where the model has nothing to change."""
    config = json.loads((folder / "config.json").read_text())
    wrong = json.loads(json.dumps(config))
    change(wrong)
    if wrong == config:
        return None
    shutil.copytree(folder, copy)
    (copy / "config.json").write_text(json.dumps(wrong))
    return copy


def with_experts_exchanged(folder, copy):
    """A copy of `folder` in which every expert of the last block is where the next one was; None where there are none."""
    tensors = weights.read(folder / "model.safetensors")
    names = [name for name in tensors if "layers.2." in name and ".experts." in name]
    if not names:
        return None
    number = lambda name: int(name.split(".experts.")[1].split(".")[0])
    count = 1 + max(map(number, names))
    place = lambda name: name.replace(f".experts.{number(name)}.", f".experts.{(number(name) + 1) % count}.")
    tensors |= {place(name): tensors[name] for name in names}
    shutil.copytree(folder, copy)
    weights.write(copy, tensors, 1)
    return copy


class Questions:
    """What the engines are asked, and what xtrain answers: (model, weights, request, our logits, bar or None for a control)."""

    def __init__(self, xtrain, work):
        self.xtrain, self.work, self.all = xtrain, work, []

    def ask(self, model, weights, folder, dtype, prompt, ours, bar):
        tokens, logits = ours
        run = {"folder": str(folder), "dtype": dtype, "prompt": prompt, "forced": tokens}
        self.all.append((model, weights, run, logits, bar))

    def made_here(self, name):
        """Everything about one model of models/."""
        run, exports = train_and_export(self.xtrain, name, self.work)
        config = json.loads((exports["fp32"] / "config.json").read_text())
        shards = len(list(exports["fp32, sharded"].glob("model-*.safetensors")))
        if name == "qwen3" and shards < 2:
            raise SystemExit(f"{name}: the sharded export has {shards} shards, so it tests no index")
        prompt = check_tokenizer(self.xtrain, name, exports["fp32"])
        generate = lambda folder, *more: self.xtrain.generate(folder, prompt, TOKENS, config["vocab_size"], *more)

        # The run folder's own weights are what every fp32 export must give.
        ours = generate(run)
        self.ask(name, "fp32", exports["fp32"], "float32", prompt, ours, FP32)
        if shards > 1:
            self.ask(name, f"fp32, {shards} shards", exports["fp32, sharded"], "float32", prompt, ours, FP32)
        for label, change in CONTROLS.items():
            copy = spoiled(exports["fp32"], self.work / f"{name}-wrong-{label}", change)
            if copy:
                self.ask(name, f"wrong {label}", copy, "float32", prompt, ours, None)
        copy = with_experts_exchanged(exports["fp32"], self.work / f"{name}-wrong-experts")
        if copy:
            self.ask(name, "wrong experts", copy, "float32", prompt, ours, None)
        ours = generate(exports["bf16"])
        self.ask(name, "bf16, run in fp32", exports["bf16"], "float32", prompt, ours, FP32)
        # In a mixture, rounding decides between experts of close scores; and mlx has no bf16 for experts on a CPU.
        if "num_experts_per_tok" not in config:
            ours = generate(exports["bf16"], "bf16")
            self.ask(name, "bf16", exports["bf16"], "native", prompt, ours, BF16)
        if name in IN_FP8:
            self.in_fp8(name, run, exports["fp32"], prompt, generate)

    def in_fp8(self, name, run, exact, prompt, generate):
        """The model as FP8: its bytes, and what engines make of it."""
        folder = self.work / f"{name}-fp8"
        self.xtrain.run("export", run, "--out", folder, "--dtype", "fp8")
        wrong = list(fp8.faults(folder, exact, IN_FP8[name]))
        if wrong:
            raise SystemExit(f"{name}: the FP8 export is not as it should be:\n" + "\n".join(wrong))
        print(f"{name}: every byte and scale of the FP8 export is as computed here", flush=True)
        self.ask(name, "fp8, run in fp32", folder, "float32", prompt, generate(folder), FP32)

    def taken_in(self, name):
        """A model made elsewhere and trained on here."""
        work = self.work / name
        work.mkdir()
        [variant] = [v for v in elsewhere.VARIANTS if v.name == name]
        given, text, run = elsewhere.make(variant, work / "given"), work / "text.txt", work / "run"
        elsewhere.write_text(text)
        run_file = round_trip.write_run_file(work / "run.toml", given, text, 1e-3, 10)
        self.xtrain.run("train", run_file, "--out", run, "--set", f'data.cache_dir="{work / "cache"}"')
        if not list(round_trip.lost_weights(given, run / "hf", "fp32")):
            raise SystemExit(f"{name}: training changed no weight")
        # transformers reads some tokenizers by the family and not by the file; the file is what counts here.
        tokenizer = Tokenizer.from_file(str(run / "hf" / "tokenizer.json"))
        vocab_size = json.loads((run / "hf" / "config.json").read_text())["vocab_size"]
        for prompt in elsewhere.PROMPTS:
            ids = tokenizer.encode(prompt).ids
            ours = self.xtrain.generate(run, ids, TOKENS, vocab_size, may_end=True)
            if len(ours[0]) == TOKENS:
                return self.ask(name, "fp32", run / "hf", "float32", ids, ours, FP32)
        raise SystemExit(f"{name}: every prompt ends before {TOKENS} tokens")


def judge(name, weights, engine, answer, ours, bar):
    """One answer as a line of the table."""
    if "error" in answer:
        result = Comparison(name, weights, engine)
        error = (answer["error"].splitlines() or [""])[0][:70]
        # Of a wrong config only the shapes that follow from head_dim are a reason to refuse.
        rightly = weights == "wrong head_dim"
        result.note = f"refused, as it must: {error}" if rightly else "FAILED"
        result.faults = [] if rightly else [f"refused: {answer['error']}"]
        return result
    if bar is not None:
        return compare(name, weights, engine, ours, answer["logits"], bar)
    # A control: at least ten times over the bar, or it shows nothing.
    result = compare(name, weights, engine, ours, answer["logits"], Bar(float("inf"), 0))
    result.faults.clear()
    if not result.relative >= 10 * FP32.relative:
        result.faults.append(f"goes unnoticed: logits differ by {result.relative:.2e} only")
    result.note = f"noticed: {result.relative:.1e} (relative)" if not result.faults else "FAILED"
    return result


def judge_excused(name, weights, engine, excuse, answer, ours):
    """A model that the engine cannot run: refused, or run wrongly; otherwise the excuse is out of date."""
    result = Comparison(name, weights, engine, note=f"cannot run it: {excuse}")
    if "error" not in answer and not compare(name, weights, engine, ours, answer["logits"], FP32).faults:
        result.note = "FAILED"
        result.faults.append(f"runs well, though it is excused ({excuse})")
    return result


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--xtrain", required=True, help="the binary")
    parser.add_argument("--candle", required=True, help="the binary of tests/exchange/candle")
    parser.add_argument("--small", action="store_true", help="a few models, in mlx alone")
    parser.add_argument("--work", required=True, help="a folder to work in; emptied first")
    parser.add_argument("--transformers", action="append", default=[], metavar="PYTHON")
    arguments = parser.parse_args()
    work = Path(arguments.work).resolve()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    xtrain = Xtrain(arguments.xtrain)
    engines = [Engine("mlx", [sys.executable, str(HERE / "engine_mlx.py")])]
    models, taken_in, round_trips = list(MODELS), list(TAKEN_IN), [variant.name for variant in elsewhere.VARIANTS]
    if arguments.small:
        models, taken_in, round_trips = SMALL_MODELS, SMALL_TAKEN_IN, SMALL_ROUND_TRIPS
    else:
        engines.append(Engine("candle", [str(Path(arguments.candle).resolve())]))
    for number, python in enumerate(arguments.transformers):
        engines.append(Engine(f"transformers{number}", [python, str(HERE / "engine_transformers.py")]))

    started = time.time()
    questions = Questions(xtrain, work)
    for name in models:
        questions.made_here(name)
    for name in taken_in:
        questions.taken_in(name)
    print(f"{len(models)} models made here, {len(taken_in)} taken in: {time.time() - started:.0f}s", flush=True)
    results = []
    for engine in engines:
        started = time.time()
        version, answers = engine.ask([run for _, _, run, _, _ in questions.all], work)
        print(f"{version}: {len(answers)} runs in {time.time() - started:.0f}s", flush=True)
        for (name, weights, _, ours, bar), answer in zip(questions.all, answers, strict=True):
            excuse = {**MODELS, **TAKEN_IN}[name].get(engine.name)
            if weights.startswith("fp8") and engine.name in NO_FP8:
                results.append(judge_excused(name, weights, version, NO_FP8[engine.name], answer, ours))
            elif not excuse:
                results.append(judge(name, weights, version, answer, ours, bar))
            elif weights == "fp32":
                results.append(judge_excused(name, weights, version, excuse, answer, ours))
    results.sort(key=lambda r: list({**MODELS, **TAKEN_IN}).index(r.model))
    print(f"\n{TOKENS} greedy tokens each; decisive: best logit minus second > 10 x the largest difference of the step's logits")
    print(f"made elsewhere, taken in, trained on and exported here: {', '.join(taken_in)}\n")
    print(table(results))
    faults = [f"{r.name}: {fault}" for r in results for fault in r.faults]
    started = time.time()
    rows, lost = round_trip.check(xtrain, work / "round-trip", round_trips)
    print(f"\nmodels made elsewhere, in through init_from and out again ({time.time() - started:.0f}s)\n")
    print(align(rows))
    faults += lost
    if faults:
        raise SystemExit("\nexchange FAILED:\n" + "\n".join(f"- {fault}" for fault in faults))
    print("\nexchange: all agree")


main()
