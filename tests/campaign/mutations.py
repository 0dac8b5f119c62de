"""Files that are damaged or strange: the answer is one readable error, or a success.

What has checksums (checkpoints, shards, compressed texts) is never accepted with damage that matters: after a success the result is that of
the whole file.
"""

import copy
import json

import parquet
import place

SHORT = 150
TOKENS = [b"0", b"-1", b"null", b"1e999", b"9" * 20, b'""', b"{}", b"[", b"\0", b"\xff\xfe", b"true", b"\n", b"NaN", b"\xef\xbb\xbf"]
VALUES = [None, True, 0, -1, 1, 2**31, 2**63, 2**64, 1e308, 0.5, "", "x" * 5000, "../../x", "/dev/zero", "\u202e\n\0", [], {}, {"a": 1}]
RESUME = "train run.toml --out run --resume"
EVALUATE = "eval run --data tokens --json"
EXPORT = "export run --dtype fp32 --out new"
GENERATE = "generate {} --prompt the -n 2"
TOKENIZE = "tokenize {} --bytes --out new"

# Commands that read a file. Those of the second table give the result of the whole file, if they succeed.
READERS = {
    "run.toml": ["plan run.toml", "train run.toml --out new"],
    "run/config.toml": [GENERATE.format("run"), EVALUATE, "report run", "plan run"],
    "run/tokenizer/tokenizer.json": [GENERATE.format("run"), RESUME],
    "run/metrics.jsonl": ["report run", "compare run run2 --out page.html", RESUME],
    "run/summary.json": ["report run", "compare run run2 --out page.html"],
    "bpe/tokenizer.json": ["tokenize b.txt --tokenizer bpe --out new", "train run.toml --out new --set data.tokenizer=bpe"],
    "bpe/tokenizer_config.json": ["tokenize b.txt --tokenizer bpe --out new"],
    "hf/config.json": [GENERATE.format("hf"), "plan hf", "train run.toml --out new --set model.init_from=hf"],
    "hf/generation_config.json": [GENERATE.format("hf")],
    "hf/tokenizer.json": [GENERATE.format("hf"), "eval hf --data b.txt"],
    "hf/*.safetensors": [GENERATE.format("hf"), "export hf --dtype bf16 --out new"],
    "hf/model.safetensors.index.json": [GENERATE.format("hf"), "export hf --dtype fp32 --out new"],
    "b.txt": [TOKENIZE.format("b.txt"), "tokenize b.txt --chars --separator river --out new", "eval run --data b.txt"],
    "b.jsonl": [TOKENIZE.format("b.jsonl")],
    "plain.parquet": [TOKENIZE.format("plain.parquet")],
    "length.parquet": [TOKENIZE.format("length.parquet")],
    "delta.parquet": [TOKENIZE.format("delta.parquet")],
}
CHECKED = {
    "tokens/shard-00000.tokens": [EVALUATE, "train shards.toml --out new"],
    "tokens/dataset.json": [EVALUATE],
    "run/checkpoints/step-3/manifest.json": [RESUME, EXPORT],
    "run/checkpoints/step-3/position.json": [RESUME],
    "run/checkpoints/step-3/loader.json": [RESUME],
    "run/checkpoints/step-3/config.json": [RESUME],
    "run/checkpoints/step-3/rank-00000-00001.safetensors": [RESUME, EXPORT],
    "b.txt.gz": [TOKENIZE.format("b.txt.gz")],
    "b.jsonl.gz": [TOKENIZE.format("b.jsonl.gz")],
}


def prepare(folder, program):
    """The whole files, and the results of the commands that read what has checksums."""
    place.texts(folder)
    place.documents(folder)
    lines = place.text(4, 200).splitlines()
    for name, encoding in (("plain", parquet.PLAIN), ("length", parquet.DELTA_LENGTH), ("delta", parquet.DELTA)):
        parquet.write(folder / f"{name}.parquet", lines, encoding)
        program.run(folder, f"tokenize {name}.parquet --bytes --out {name}").succeeds()
    run = place.RUN.replace("[schedule]", '[schedule]\nkind = "constant"').replace("steps = 20", "steps = 6")
    (folder / "run.toml").write_text(run.replace('prompts = ["the river"]', "prompts = []"))
    shards = place.RUN.replace('train = "a.txt"\ntokenizer = "bytes"', 'train = "tokens"').replace("steps = 20", "steps = 4")
    (folder / "shards.toml").write_text(shards)
    program.run(folder, "train run.toml --out run --set train.steps=3").succeeds()
    place.copy(folder / "run", folder / "run2")
    program.run(folder, "tokenize b.txt --bytes --out tokens").succeeds()
    program.run(folder, "tokenize b.txt --bpe-vocab-size 300 --out bpe").succeeds()
    program.run(folder, "export run --dtype fp32 --max-shard-size 10KB --out hf").succeeds()
    expected = {}
    for number, command in enumerate(dict.fromkeys(command for commands in CHECKED.values() for command in commands)):
        whole = folder.with_name(f"whole-{number}")
        place.copy(folder, whole)
        expected[command] = result(whole, program.run(whole, command).succeeds())
    return expected


def result(folder, ended):
    """What a command leaves, without times."""
    verb, *_ = ended.command.split()
    if verb == "eval":
        return {"output": place.without_times(ended.out)}
    if verb == "train":
        return place.lasting(folder / ("new" if (folder / "new").exists() else "run"))
    if verb == "tokenize":
        return place.shards(folder / "new")
    return place.files(folder / "new")


def trial(expected, base, folder, program, dice, count):
    folder.rmdir()
    place.copy(base, folder)
    table = CHECKED if dice.random() < 0.5 else READERS
    pattern = dice.choice(list(table))
    command = dice.choice(table[pattern])
    name = str(sorted(folder.glob(pattern))[0].relative_to(folder))
    whole = (folder / name).read_bytes()
    damaged = mutate(name, whole, dice)
    (folder / name).write_bytes(damaged)
    ended = program.run(folder, command)
    has_succeeded = ended.judge()
    place.check_whole_pages(folder)
    count["accepted" if has_succeeded else "refused"] += 1
    if has_succeeded and table is CHECKED and damaged != whole:
        what = f"accepted {name} with other bytes at {first_difference(whole, damaged)}: `{command}`"
        place.same(expected[command], result(folder, ended), what)
    return f"of {name.split('/')[0]}"


def first_difference(a, b):
    return next((n for n, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def mutate(name, content, dice):
    """Changes some bytes, or a value of JSON."""
    if name.endswith(".json") and dice.random() < 0.5:
        return json.dumps(change_value(json.loads(content), dice)).encode()
    content = bytearray(content)
    for _ in range(dice.choice([1, 1, 1, 2, 3])):
        at = dice.randrange(max(len(content), 1))
        # Headers are short, and most of what matters.
        if dice.random() < 0.3:
            at = dice.choice([at % 64, max(len(content) - 1 - at % 64, 0)])
        to = min(at + 1 + dice.randrange(dice.choice([1, 8, 200])), len(content))
        match dice.randrange(8):
            case 0 | 1 if at < len(content):
                content[at] ^= 1 << dice.randrange(8)
            case 2 if at < len(content):
                content[at] = dice.choice(b'0123456789"{}[],:.-= \n')
            case 3:
                del content[at:to]
            case 4:
                content[at:to] = dice.choice(TOKENS)
            case 5:
                del content[at:]
            case 6:
                content[at:at] = content[at:to] * dice.choice([1, 1, 50])
            case _:
                content[at:to] = dice.randbytes(to - at)
    return bytes(content)


def change_value(value, dice):
    """The value with one value in it, chosen at random, replaced, removed or repeated."""
    if isinstance(value, (dict, list)) and value and dice.random() < 0.9:
        key = dice.choice(list(value)) if isinstance(value, dict) else dice.randrange(len(value))
        match dice.randrange(12):
            case 0:
                del value[key]
            case 1 if isinstance(value, dict):
                value[f"{key}x"] = value.pop(key)
            case 1:
                value.insert(0, value[key])
            case _:
                value[key] = change_value(value[key], dice)
        return value
    return copy.deepcopy(dice.choice(VALUES))
