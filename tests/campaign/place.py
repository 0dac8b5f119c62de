"""Folders for the campaigns: texts, run files, a finished run, and comparisons of what runs leave."""

import gzip
import json
import pathlib
import random
import shutil
import tomllib

from program import Failure

WORDS = "the river ran under a stone bridge and nobody saw it turn to sea again where old light fell on é ü ß".split()

# A model of a few thousand parameters; its steps take milliseconds.
RUN = """
[model]
dim = 16
layers = 2
heads = 2
kv_heads = 1
[data]
train = "a.txt"
tokenizer = "bytes"
seq_len = 16
held_out = 0.05
cache_dir = "cache"
[schedule]
warmup_steps = 2
[train]
steps = 20
batch_size = 4
device = "cpu"
recompute = "none"
loss_chunk = 4096
[checkpoint]
every = 3
[eval]
every = 7
tokens = 128
prompts = ["the river"]
max_tokens = 4
[log]
every = 1
tensorboard = false
"""


def text(seed, lines):
    """English-looking text of so many lines, always the same for a seed."""
    dice = random.Random(seed)
    return "".join(" ".join(dice.choice(WORDS) for _ in range(9)) + ".\n" for _ in range(lines))


def texts(folder):
    """Puts two texts and a run file into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a.txt").write_text(text(1, 400))
    (folder / "b.txt").write_text(text(2, 150))
    (folder / "run.toml").write_text(RUN)


def documents(folder):
    """Puts the second text into the folder in other formats."""
    lines = text(2, 40).splitlines()
    (folder / "b.jsonl").write_text("".join(json.dumps({"id": n, "text": line}) + "\n" for n, line in enumerate(lines)))
    for name in ("b.txt", "b.jsonl"):
        with gzip.GzipFile(folder / f"{name}.gz", "wb", mtime=0) as packed:
            packed.write((folder / name).read_bytes())


def copy(source, target):
    """Copies a file or a folder, as hard links cannot be damaged one by one."""
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)


def files(folder):
    """The content of each file of the folder by its name, without the locks, which name their last holder."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def shards(folder):
    """The shards of a data set, without its index, which has the path and time of the text."""
    return {name: content for name, content in files(folder).items() if name.endswith(".tokens")}


def recorded(run):
    """Records of steps and evaluations without times."""
    keys = ("kind", "step", "loss", "bf16_loss", "grad_norm", "lr", "tokens", "epoch", "skipped", "bits_per_byte")
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{key: line.get(key) for key in keys} for line in lines if line["kind"] in ("step", "eval", "skipped", "reference")]


def lasting(run):
    """What two runs of the same bits have in common: state, model, samples and records."""
    found = {}
    for name, content in files(run).items():
        if name.startswith("hf/") or name == "sample.txt" or name.endswith((".safetensors", "loader.json")):
            found[name] = content
    return found | {"records": recorded(run)}


def without_times(out):
    """The lines of an evaluation without times and rates."""
    lines = [json.loads(line) for line in out.splitlines()]
    return [{key: value for key, value in line.items() if "second" not in key and "per_s" not in key} for line in lines]


def same(expected, found, what):
    """Fails unless two dictionaries are equal, with the names that differ."""
    names = [name for name in sorted({*expected, *found}) if expected.get(name) != found.get(name)]
    if names:
        lengths = ", ".join(f"{name} ({size(expected.get(name))}, then {size(found.get(name))})" for name in names[:5])
        raise Failure(f"{what}: {len(names)} differ: {lengths}")


def size(content):
    return "absent" if content is None else len(content)


def check_whole(folder):
    """Fails unless each visible file of the folder is complete."""
    for path in sorted(folder.rglob("*")):
        # What is being written has a temporary name, or is in a folder of one.
        if not path.is_file() or any(".tmp-" in part for part in path.relative_to(folder).parts):
            continue
        try:
            check_file(path)
        except (ValueError, KeyError, AssertionError) as error:
            raise Failure(f"{path.relative_to(folder)} is not whole: {error!r}") from error


def check_whole_pages(folder):
    """Fails unless the pages in the folder are complete."""
    for path in folder.rglob("*.html"):
        if not path.read_bytes().rstrip().endswith(b"</html>"):
            raise Failure(f"{path.name} has no end")


def check_file(path):
    content = path.read_bytes()
    if path.suffix == ".json":
        json.loads(content)
    elif path.suffix == ".toml":
        tomllib.loads(content.decode())
    elif path.suffix == ".html":
        assert content.rstrip().endswith(b"</html>"), "no end"
    elif path.suffix == ".jsonl":
        # The last line may be cut off by a kill; the next process removes it.
        [json.loads(line) for line in content.splitlines(keepends=True) if line.endswith(b"\n")]
    elif path.suffix == ".safetensors":
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        assert 8 + length + max(ends) == len(content), "another length than its header says"


def check_no_leftovers(folder):
    """Fails if a temporary file or folder is left after everything has ended well."""
    left = [str(path.relative_to(folder)) for path in folder.rglob("*.tmp*")]
    if left:
        raise Failure(f"left behind: {', '.join(left)}")
