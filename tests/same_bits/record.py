"""Recordings of a commit: short runs on the CPU, memory plans, programs, and the PTX of its kernels."""

import collections
import concurrent.futures
import gzip
import hashlib
import itertools
import json
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time

import ptx

HERE = pathlib.Path(__file__).parent
# To be raised when runs and plans are recorded otherwise: recordings by another version are made anew. A change of
# the settings below does so too.
VERSION = 1
RECIPES = ["fp32", "bf16", "fp8-current", "fp8-delayed", "fp8-row", "fp8-block"]
RECOMPUTE = ["none", "norms", "block"]
# The text of the runs: the first bytes of this checkout's example, and their number.
TEXT, TEXT_BYTES = HERE / "../../examples/data/snapshot.txt.gz", 60_000

# The two models differ in what a block and the optimizer may have. All sizes of linear layers are multiples
# of 128.
FAMILIES = {
    "llama": {"model.qkv_bias": True, "model.rope_scaling": "{ type = 'linear', factor = 2.0 }"},
    "qwen3": {
        "model.tie_embeddings": True,
        "model.dropout": 0.1,
        "model.z_loss": 1e-4,
        "data.document_mask": True,
        "optimizer.moments": "bf16",
    },
}
# Further settings of the second model under FP8 recipes.
FP8 = {"qwen3": {"precision.head": "fp8", "precision.swiglu_input": "fp8", "precision.attention_output": "e5m6"}}
RUN = """
[model]
dim = 128
layers = 2
heads = 4
kv_heads = 2
head_dim = 64
ffn_dim = 256
vocab_size = 384

[data]
train = "text.txt"
separator = "\\f\\n"
held_out = 0.02
tokenizer = "bytes"
seq_len = 64
cache_dir = "cache"

[optimizer]
lr = 2e-3

[train]
steps = 20
batch_size = 4
micro_batch_size = 2
loss_chunk = 128
device = "cpu"
threads = 2

[checkpoint]
every = 0
export_hf = false

[log]
every = 1
tensorboard = false

[eval]
every = 10
tokens = 512
"""
# Fields of metrics.jsonl that depend on the time or on the machine.
VOLATILE = {"time", "step_ms", "tokens_per_second", "tflops", "seconds_left", "memory_total_bytes", "seconds", "ms"}

# The planned run files, the settings of all plans, and the further settings of one small file. No plan depends on
# the machine's memory and threads.
PLANNED = ["examples/*.toml", "benches/configs/*.toml"]
ALWAYS = {"train.threads": 2, "data.train": "text.txt"}
VARIED = "examples/fp8.toml"
VARIATIONS = [
    {"train.recompute": "norms"},
    {"train.recompute": "block"},
    {"train.micro_batch_size": 4, "optimizer.moments": "bf16", "model.dropout": 0.1, "data.document_mask": True},
    {"train.recompute": "norms", "train.micro_batch_size": 4, "model.qkv_bias": True, "model.z_loss": 1e-4},
]
FP8_VARIATIONS = [
    {"precision.head": "fp8"},
    {"precision.swiglu_input": "fp8", "precision.attention_output": "e5m6", "train.recompute": "norms"},
    {"precision.swiglu_input": "bf16", "precision.attention_output": "bf16", "train.recompute": "block"},
    {"precision.skip": "['*.o_proj:wgrad', 'blocks.1.mlp.*']", "precision.bf16_last_layers": 1},
]


class Recorder:
    """The recordings in one folder, and what it takes to make more."""

    def __init__(self, folder, jobs):
        self.folder = folder
        self.jobs = jobs
        self.tree = folder / "tree"
        self.build = folder / "build"
        kept = {k: v for k, v in os.environ.items() if not k.startswith("XTRAIN_")}
        # No GPU is looked at, and nothing that one has measured.
        nowhere = {"CUDA_VISIBLE_DEVICES": "", "XTRAIN_CACHE": str(folder / "cache")}
        # Without incremental builds, which an interrupted build may damage.
        cargo = {"CARGO_TARGET_DIR": str(self.build), "CARGO_TERM_COLOR": "never", "CARGO_INCREMENTAL": "0"}
        self.environment = kept | nowhere | cargo

    def recording(self, commit, parts, library):
        """The parts of a commit's recording by name, from their files or made now."""
        return {part: self.part(commit, part, library) for part in parts}

    def part(self, commit, part, library):
        file = self.folder / commit / f"{part}.json"
        by = made_by(part, library)
        if file.exists():
            recording = json.loads(file.read_text())
            if recording["by"] == by:
                return recording["content"]
        print(f"recording the {part} of {commit[:10]}", file=sys.stderr, flush=True)
        start = time.monotonic()
        self.check_out(commit)
        content = {"runs": self.runs, "plans": self.plans, "kernels": self.kernels}[part](library)
        file.parent.mkdir(parents=True, exist_ok=True)
        ptx.write(file, json.dumps({"by": by, "content": content}, indent=1).encode())
        print(f"  {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        return content

    def check_out(self, commit):
        if not (self.tree / ".git").exists():
            run("git", "-C", HERE, "worktree", "add", "--quiet", "--force", "--detach", self.tree, commit)
        run("git", "-C", self.tree, "checkout", "--quiet", "--force", "--detach", commit)

    def binary(self):
        run("cargo", "build", "--quiet", "--package", "xtrain", cwd=self.tree, env=self.environment)
        return self.build / "debug" / "xtrain"

    def runs(self, _):
        """From a run's name to its metrics and the hash of each tensor of its checkpoint."""
        binary = self.binary()
        names = list(itertools.product(RECIPES, FAMILIES, RECOMPUTE))
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            scratch = pathlib.Path(scratch)
            (scratch / "text.txt").write_bytes(text())
            (scratch / "run.toml").write_text(RUN)
            with concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:
                results = pool.map(lambda name: self.one_run(binary, scratch, *name), names)
                return {" ".join(name): result for name, result in zip(names, results)}

    def one_run(self, binary, scratch, recipe, family, recompute):
        settings = FAMILIES[family] | precision(recipe) | {"model.family": family, "train.recompute": recompute}
        if recipe.startswith("fp8"):
            settings |= FP8.get(family, {})
        out = f"{recipe}-{family}-{recompute}"
        run(binary, "train", "run.toml", "--out", out, *options(settings), cwd=scratch, env=self.environment)
        lines = (scratch / out / "metrics.jsonl").read_text().splitlines()
        metrics = [{k: v for k, v in json.loads(line).items() if k not in VOLATILE} for line in lines]
        tensors = {}
        for file in sorted((scratch / out / "checkpoints" / "step-20").glob("*.safetensors")):
            tensors |= tensor_hashes(file.read_bytes())
        if len(metrics) < 20 or not tensors:
            raise SystemExit(f"{out}: {len(metrics)} lines of metrics and {len(tensors)} tensors are too few")
        shutil.rmtree(scratch / out)
        return {"metrics": metrics, "tensors": tensors}

    def plans(self, _):
        """From a run file with its settings to the lines of its plan, and its program in numbers."""
        binary = self.binary()
        files = sorted(str(f.relative_to(self.tree)) for pattern in PLANNED for f in self.tree.glob(pattern))
        cases = []
        for file, recipe, device in itertools.product(files, RECIPES, ["cpu", "cuda"]):
            varied = VARIATIONS + FP8_VARIATIONS * recipe.startswith("fp8") if file == VARIED else []
            for variation in [{}, *varied]:
                words = [f"{key.split('.')[-1]}={value}" for key, value in variation.items()]
                settings = {"train.device": device} | precision(recipe) | variation
                cases.append((" ".join([file, recipe, device, *words]), file, settings))

        def planned(case):
            name, file, settings = case
            command = [binary, "plan", file, *options(ALWAYS | settings)]
            plan = self.attempt(*command, "--memory", "80GiB")
            dump = self.attempt(*command, "--dump")
            return name, {"plan": plan.splitlines(), "program": program(dump) if "\n" in dump else dump}

        with concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:
            return dict(pool.map(planned, cases))

    def attempt(self, *command):
        """The output of a command, or its message where it refuses."""
        done = subprocess.run(command, cwd=self.tree, env=self.environment, capture_output=True, text=True)
        if done.returncode not in (0, 2):
            raise SystemExit(f"{' '.join(map(str, command))} ended with {done.returncode}\n{done.stderr}")
        return done.stdout if done.returncode == 0 else done.stderr.strip()

    def kernels(self, library):
        """What each compile of the commit's kernel test gives."""
        test = ["cargo", "test", "--quiet", "--package", "xtrain-ops", "--test", "kernels"]
        compiles = ptx.recorded(test, self.tree, self.environment)
        return ptx.compiled_kernels(compiles, library, self.folder / "ptx", self.jobs)


def made_by(part, library):
    """The hash of the inputs of a part; if it changes, the part is recorded again."""
    if part == "kernels":
        return f"{ptx.FORM} {ptx.digest(pathlib.Path(library).read_bytes())}"
    settings = [RECIPES, RECOMPUTE, FAMILIES, FP8, RUN, PLANNED, ALWAYS, VARIED, VARIATIONS, FP8_VARIATIONS]
    return f"{VERSION} {ptx.digest(repr(settings).encode() + text())}"


def run(*command, **settings):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **settings)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))} ended with {done.returncode}\n{done.stdout[-4000:]}")


def text():
    with gzip.open(TEXT) as file:
        return file.read(TEXT_BYTES)


def precision(recipe):
    """The settings of a recipe. No measurement decides which layers are in FP8."""
    measured = {"precision.skip_slower": "[]"} if recipe.startswith("fp8") else {}
    return {"precision.recipe": recipe} | measured


def options(settings):
    words = {key: str(value).lower() if isinstance(value, bool) else value for key, value in settings.items()}
    return [f"--set={key}={word}" for key, word in words.items()]


def tensor_hashes(file):
    """The type, shape and hash of each tensor of a safetensors file, by name."""
    (length,) = struct.unpack("<Q", file[:8])
    header = json.loads(file[8 : 8 + length])
    header.pop("__metadata__", None)
    hashes = {}
    for name, tensor in header.items():
        start, end = (8 + length + offset for offset in tensor["data_offsets"])
        head = f"{tensor['dtype']} {tensor['shape']}"
        hashes[name] = f"{head} {hashlib.sha256(file[start:end]).hexdigest()[:32]}"
    return hashes


VALUE = re.compile(r"([*+]?)%(\d+)(?:: (\w+\[[\d, ]*\]))?")


def program(dump):
    """The counts of a program of `plan --dump`, the numbers of blocks left out.

    ops: launches by the op's name. launches: launches by part, site, and types of inputs and outputs; `*` and `+`
    say how an output is written. values: values outside of scratch memory by kind and type.
    """
    ops, launches, values = collections.Counter(), collections.Counter(), collections.Counter()
    types, part = {}, 0
    for line in dump.splitlines():
        if re.fullmatch(r"[\w -]+:", line):
            part += 1
        elif value := re.fullmatch(r"%(\d+): (\S+?\[[\d, ]*\]) = (\S+).*", line):
            types[value[1]] = value[2]
            values[f"{value[3]} {value[2]}"] += 1
        elif launch := re.fullmatch(r"  (.*?) ?= (\w+)(.*?)\(((?:%\d+(?:, )?)*)\)  # (\S+)(?: .*)?", line):
            outputs, op, _, inputs, site = launch.groups()
            types |= {number: type for _, number, type in VALUE.findall(outputs) if type}
            outs = [mode + types[number] for mode, number, _ in VALUE.findall(outputs)]
            ins = [types[number] for _, number, _ in VALUE.findall(inputs)]
            ops[op] += 1
            site = re.sub(r"\bblocks\.\d+", "blocks.*", site)
            launches[f"{part} {site}: {' '.join(ins)} -> {' '.join(outs)}".replace(", ", "x")] += 1
        elif line:
            raise SystemExit(f"cannot read this line of plan --dump: {line}")
    counts = {"ops": ops, "launches": launches, "values": values}
    return {kind: dict(sorted(counter.items())) for kind, counter in counts.items()}
