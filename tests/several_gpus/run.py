#!/usr/bin/env python3
"""Trains a small model on several GPUs in many settings, and compares each run with one on a single GPU, to the bit. See README.md."""

import argparse
import concurrent.futures
import hashlib
import itertools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[2]
RECIPES = ["fp32", "bf16", "fp8-delayed", "fp8-current", "fp8-row", "fp8-block"]
# Settings of several ranks under which a run has the bits of one GPU, with `parallel.reduce = "any-world"`.
MODES = [
    {"parallel.shard": "none"},
    {"parallel.shard": "optimizer"},
    {"parallel.shard": "gradients"},
    {"parallel.shard": "weights"},
    {"parallel.shard": "weights", "parallel.prefetch_blocks": "0"},
    {"parallel.shard": "weights", "parallel.prefetch_blocks": "3"},
    {"parallel.shard": "weights", "parallel.gather": "fp32"},
    {"parallel.shard": "weights", "parallel.transport": "nccl"},
    {"parallel.shard": "weights", "parallel.transport": "host"},
    {"parallel.shard": "none", "parallel.replicas": "2"},
]
# Settings under which runs with as many ranks repeat to the bit, on each path between GPUs.
OF_THE_SAME_WORLD = [
    {"parallel.shard": "none"},
    {"parallel.shard": "weights"},
    {"parallel.shard": "none", "parallel.reduce_dtype": "bf16"},
    {"parallel.shard": "weights", "parallel.reduce_dtype": "bf16"},
]
# Settings with `parallel.reduce = "fast"`: runs repeat to the bit, and their losses are near those of the default.
FAST = [
    {"parallel.shard": "none"},
    {"parallel.shard": "optimizer"},
    {"parallel.shard": "weights"},
    {"parallel.shard": "weights", "parallel.replicas": "2"},
]
# A mixture of sizes that FP8 takes, whose tokens most choose the same experts in the first steps.
MIXTURE = {
    "model.family": "qwen3_moe", "model.dim": "256", "model.heads": "4", "experts.count": "8", "experts.per_token": "2", "experts.ffn_dim": "128",
    "experts.balance": "none", "eval.tasks": "[]",
}
# Recipes in which ranks that share experts have the bits of one GPU, and settings under which they do.
EXPERT_RECIPES = ["fp32", "bf16", "fp8-delayed", "fp8-block"]
EXPERT_MODES = [
    {"parallel.shard": "none"},
    {"parallel.shard": "optimizer", "parallel.transport": "nccl"},
    {"parallel.shard": "weights"},
    {"parallel.shard": "none", "parallel.transport": "host"},
    {"parallel.shard": "gradients", "experts.capacity": "1.0"},
]
# Models, whose step has four micro-batches, and settings of stages under which they have the bits of one GPU.
STAGE_MODELS = [{"model.tie_embeddings": "true"}, {"model.tie_embeddings": "false"}, MIXTURE]
STAGE_RECIPES = ["fp32", "bf16", "fp8-delayed", "fp8-current", "fp8-block"]
STAGE_MODES = [
    {"parallel.transport": "copy"},
    {"parallel.transport": "nccl"},
    {"parallel.transport": "host"},
    {"parallel.transport": "copy", "parallel.shard": "weights"},
    {"parallel.transport": "nccl", "parallel.shard": "weights"},
    {"parallel.transport": "copy", "train.recompute": "block"},
]
# A model whose heads and columns up to four ranks cut into parts of sizes that FP8 takes, and settings of these ranks.
TENSOR_MODEL = {"model.dim": "256", "model.heads": "8", "model.kv_heads": "4", "model.head_dim": "64", "model.ffn_dim": "512"}
TENSOR_MODES = [
    {"parallel.shard": "none"},
    {"parallel.shard": "gradients", "train.recompute": "norms"},
    {"parallel.shard": "weights", "train.recompute": "block"},
    {"parallel.shard": "weights", "model.family": "qwen3_moe", "experts.count": "8", "experts.per_token": "2", "experts.ffn_dim": "128"},
]
# Settings under which they have the bits of one GPU, with `parallel.reduce = "any-mesh"`.
MESH_MODES = [
    {"parallel.transport": "copy"},
    {"parallel.transport": "nccl", "parallel.shard": "weights"},
    {"parallel.transport": "host", "parallel.shard": "gradients", "train.recompute": "norms"},
]
# The largest difference of the last loss from that of one GPU, as a part of it.
TENSOR_LOSS = {"fp32": 1e-4, "bf16": 5e-3, "fp8-delayed": 2e-2, "fp8-current": 2e-2, "fp8-row": 2e-2, "fp8-block": 2e-2}
# The largest difference of the last loss from that of the default, as a part of it.
FAST_LOSS = 5e-3
# Seconds after a kill by which all processes must have ended.
GONE = 15


class Place:
    """The runs of a check, in a folder."""

    def __init__(self, options, folder):
        self.options, self.folder, self.numbers = options, folder, itertools.count()
        self.shards = folder / "shards"
        self.xtrain("tokenize", ROOT / "examples/data/snapshot.txt.gz", "--bpe-vocab-size", 512, "--out", self.shards)

    def xtrain(self, *arguments):
        command = [self.options.xtrain, *map(str, arguments)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stdout[-3000:]}")

    def command(self, settings, gpus, out):
        """A run on so many GPUs. Algorithms are chosen by the first run, and taken from the machine's cache by the others."""
        every = {
            "data.train": self.shards, "data.tokenizer": "", "data.bpe_vocab_size": "", "data.held_out": "0.0",
            "train.steps": self.options.steps, "train.micro_batch_size": 2, "train.attention_deterministic": "true",
            "precision.skip_slower": "[]", "eval.every": 0, "eval.at_end": "false", "eval.prompts": "[]",
            "checkpoint.every": 0, "checkpoint.export_dtype": "fp32", "log.every": 1, "log.tensorboard": "false",
        }
        sets = [*(every | settings).items()] + [setting.split("=", 1) for setting in self.options.set]
        sets = [part for key, value in sets for part in ("--set", f"{key}={value}")]
        processes = ["--gpus", gpus] if gpus > 1 else []
        return ["train", ROOT / "examples/quickstart.toml", "--out", out, *processes, *sets]

    def train(self, settings, gpus, out=None, resume=False):
        """Trains, and returns the last step, its loss and its gradient norm, and the hash of the master weights."""
        out = out or self.folder / f"run-{next(self.numbers)}"
        self.xtrain(*self.command(settings, gpus, out), *(["--resume"] if resume else []))
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        steps = [(line["step"], line["loss"], line["grad_norm"]) for line in lines if line["kind"] == "step"]
        return steps[-1], hashlib.sha256((out / "hf/model.safetensors").read_bytes()).hexdigest()


class Checks:
    """The results, which are printed as they come."""

    def __init__(self):
        self.passed, self.failed = 0, 0

    def that(self, what, is_true, otherwise=""):
        self.passed += is_true
        self.failed += not is_true
        print(what if is_true else f"FAILED: {what} {otherwise}", flush=True)


def named(settings):
    return ", ".join(f"{key.split('.')[-1]} {value}" for key, value in settings.items())


def equal_one_gpu(place, checks, base, modes, what, reduce="any-world"):
    """Runs of a recipe in these modes have the bits of one GPU. `what` names a run by its mode."""
    gpus, any_world = place.options.gpus, base | {"parallel.reduce": reduce}
    alone = place.train(any_world, 1)
    for mode in modes:
        found = place.train(any_world | mode, gpus)
        checks.that(f"{base['precision.recipe']}: {what(mode)} equals one GPU", found == alone, f"{found} {alone}")


def repeats_on_each_path(place, checks, settings, what):
    """In the default order, runs with these settings have equal bits on each path between GPUs."""
    gpus = place.options.gpus
    first = place.train(settings, gpus)
    for transport in ("copy", "nccl", "host"):
        found = place.train(settings | {"parallel.transport": transport}, gpus)
        checks.that(f"{settings['precision.recipe']}: {what}: {transport} repeats", found == first, f"{found} {first}")


def check_recipe(place, checks, recipe):
    """Every mode of a recipe has the bits of one GPU."""
    gpus = place.options.gpus
    modes = [mode for mode in MODES if gpus % int(mode.get("parallel.replicas", 1)) == 0]
    equal_one_gpu(place, checks, {"precision.recipe": recipe}, modes, lambda mode: f"{named(mode)} on {gpus} GPUs")


def check_experts(place, checks, recipe):
    """Ranks that share experts have the bits of one GPU, also if their tokens travel in FP8."""
    gpus = place.options.gpus
    modes = [mode | {"parallel.expert": str(expert)} for mode, expert in itertools.product(EXPERT_MODES, {2, gpus})]
    for wire in ("bf16", "fp8") if recipe in ("fp8-delayed", "fp8-block") else ("bf16",):
        base = MIXTURE | {"precision.recipe": recipe, "experts.wire": wire}
        equal_one_gpu(place, checks, base, modes, lambda mode: f"experts over {gpus} GPUs, tokens in {wire}, {named(mode)}")


def check_experts_of_the_same_world(place, checks):
    """In the default order they repeat to the bit, on each path between GPUs."""
    gpus = place.options.gpus
    for recipe in ("bf16", "fp8-current", "fp8-block"):
        settings = MIXTURE | {"precision.recipe": recipe, "parallel.expert": str(gpus)}
        repeats_on_each_path(place, checks, settings, f"experts over {gpus} GPUs in the default order")


def check_stages(place, checks, recipe):
    """Stages of a pipeline have the bits of one GPU."""
    gpus = place.options.gpus
    modes = [mode | {"parallel.pipeline": str(stages)} for mode, stages in itertools.product(STAGE_MODES, {2, gpus})]
    for model in STAGE_MODELS:
        base = model | {"precision.recipe": recipe}
        equal_one_gpu(place, checks, base, modes, lambda mode: f"stages on {gpus} GPUs, {named(model | mode)}")


def check_stages_of_the_same_world(place, checks):
    """In the default order stages repeat to the bit, on each path between GPUs."""
    gpus = place.options.gpus
    for recipe in ("bf16", "fp8-current"):
        settings = {"precision.recipe": recipe, "parallel.pipeline": str(gpus)}
        repeats_on_each_path(place, checks, settings, f"{gpus} stages in the default order")


def check_tensor(place, checks, recipe):
    """Ranks of a tensor group are near one GPU, and with sums for any mesh have its bits."""
    gpus = place.options.gpus
    meshes = [{"parallel.tensor": str(tensor)} for tensor in {2, gpus}] + [{"parallel.pipeline": str(gpus)}]
    modes = [mode | mesh for mode, mesh in itertools.product(MESH_MODES, meshes)]
    base = TENSOR_MODEL | {"precision.recipe": recipe}
    equal_one_gpu(place, checks, base, modes, lambda mode: f"any mesh of {gpus} GPUs, {named(mode)}", "any-mesh")
    for mode, tensor in itertools.product(TENSOR_MODES, {2, gpus}):
        base = TENSOR_MODEL | {"precision.recipe": recipe} | mode
        alone, found = place.train(base, 1), place.train(base | {"parallel.tensor": str(tensor)}, gpus)
        near = abs(found[0][1] / alone[0][1] - 1) < TENSOR_LOSS[recipe]
        checks.that(f"{recipe}: {tensor} tensor ranks on {gpus} GPUs, {named(mode)}, are near one GPU", near, f"{found} {alone}")


def check_tensor_of_the_same_world(place, checks):
    """They repeat to the bit, on each path between GPUs."""
    for recipe, shard in itertools.product(("bf16", "fp8-block"), ("none", "weights")):
        settings = TENSOR_MODEL | {"precision.recipe": recipe, "parallel.shard": shard, "parallel.tensor": str(place.options.gpus)}
        repeats_on_each_path(place, checks, settings, f"{place.options.gpus} tensor ranks, shard {shard}")


def check_same_world(place, checks):
    gpus = place.options.gpus
    for mode in OF_THE_SAME_WORLD:
        settings = {"precision.recipe": "bf16"} | mode
        first, second = place.train(settings, gpus), place.train(settings, gpus)
        checks.that(f"bf16: {named(mode)} on {gpus} GPUs repeats", first == second, f"{first} {second}")
        repeats_on_each_path(place, checks, settings, f"{named(mode)} on {gpus} GPUs")


def check_fast(place, checks):
    gpus = place.options.gpus
    for mode in FAST:
        if gpus % int(mode.get("parallel.replicas", 1)) != 0:
            continue
        settings = {"precision.recipe": "bf16"} | mode
        default, fast = place.train(settings, gpus), settings | {"parallel.reduce": "fast"}
        first, second = place.train(fast, gpus), place.train(fast, gpus)
        checks.that(f"bf16: {named(mode)}, reduce fast on {gpus} GPUs repeats", first == second, f"{first} {second}")
        near = abs(first[0][1] / default[0][1] - 1) < FAST_LOSS
        checks.that(f"bf16: {named(mode)}, reduce fast on {gpus} GPUs is near the default", near, f"{first} {default}")
        host = place.train(fast | {"parallel.transport": "host"}, gpus)
        checks.that(f"bf16: {named(mode)}, reduce fast through the host equals the default", host == default, f"{host} {default}")


def check_resume(place, checks):
    """A run that is continued on one GPU, and again on all, equals one that is not interrupted."""
    gpus, steps, out = place.options.gpus, place.options.steps, place.folder / "resumed"
    settings = {"precision.recipe": "fp8-current", "parallel.shard": "weights", "parallel.reduce": "any-world"}
    whole = place.train(settings, gpus)
    every = {"checkpoint.every": max(steps // 3, 1), "checkpoint.keep_last": 4}
    found = place.train(settings | every, gpus, out)
    for continued_on in (1, gpus):
        newest = sorted((out / "checkpoints").iterdir(), key=lambda path: int(path.name.split("-")[1]))
        for checkpoint in newest[-2:] if continued_on == 1 else newest[-1:]:
            shutil.rmtree(checkpoint)
        found = place.train(settings | every, continued_on, out, resume=True)
    checks.that(f"fp8-current: {gpus} GPUs, then one, then {gpus}: equals one run", found == whole, f"{found} {whole}")


def check_kill(place, checks, rank, transport):
    """After SIGKILL to one rank all processes end soon."""
    out = place.folder / f"killed-{rank}-{transport}"
    settings = {"train.steps": 100000, "parallel.shard": "weights", "parallel.transport": transport}
    command = [place.options.xtrain, *map(str, place.command(settings, place.options.gpus, out))]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    metrics, begun = out / "metrics.jsonl", time.monotonic()
    while not (metrics.exists() and metrics.read_text().count("\n") > 5):
        if run.poll() is not None or time.monotonic() - begun > 300:
            run.kill()
            raise RuntimeError(f"no steps: {run.communicate()[0][-3000:]}")
        time.sleep(0.1)
    ranks = subprocess.run(["pgrep", "-P", str(run.pid)], stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    begun = time.monotonic()
    os.kill(sorted(map(int, ranks))[rank], signal.SIGKILL)
    try:
        run.communicate(timeout=GONE)
        seconds = time.monotonic() - begun
        checks.that(f"rank {rank} is killed, {transport}: all processes have ended after {seconds:.1f} s", run.returncode != 0)
    except subprocess.TimeoutExpired:
        run.kill()
        checks.that(f"rank {rank} is killed, {transport}", False, f"processes are left after {GONE} s")


def main():
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--gpus", type=int, default=2)
    arguments.add_argument("--steps", type=int, default=20)
    arguments.add_argument("--recipes", default=",".join(RECIPES), help="separated by commas")
    arguments.add_argument("--only", choices=["experts", "stages", "tensor"], help="these checks alone")
    arguments.add_argument("--jobs", type=int, default=1, help="recipes at a time, on the same GPUs")
    arguments.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of every run")
    options = arguments.parse_args()
    options.xtrain = os.environ.get("XTRAIN", str(ROOT / "target/release/xtrain"))
    checks, begun = Checks(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        place = Place(options, pathlib.Path(folder))
        chosen = options.recipes.split(",")
        of_recipes = {
            "experts": (check_experts, EXPERT_RECIPES, check_experts_of_the_same_world),
            "stages": (check_stages, STAGE_RECIPES, check_stages_of_the_same_world),
            "tensor": (check_tensor, RECIPES, check_tensor_of_the_same_world),
            None: (check_recipe, RECIPES, check_same_world),
        }
        for kind, (check, recipes, of_the_same_world) in of_recipes.items():
            if options.only not in (kind, None):
                continue
            for submitted in [pool.submit(check, place, checks, recipe) for recipe in recipes if recipe in chosen]:
                submitted.result()
            of_the_same_world(place, checks)
        if not options.only:
            check_fast(place, checks)
            check_resume(place, checks)
            for rank, transport in itertools.product(range(options.gpus), ("auto", "nccl")):
                check_kill(place, checks, rank, transport)
    print(f"{checks.passed} passed, {checks.failed} failed, in {time.monotonic() - begun:.0f} s")
    raise SystemExit(checks.failed > 0)


if __name__ == "__main__":
    main()
