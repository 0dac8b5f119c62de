"""Commands that are killed at random moments, again and again until one ends: the result has the bits of one that was never killed."""

import place
from program import HANG, Failure

# Settings of the runs: each has state of its own that a resumed run must restore.
RECIPES = {
    "bpe": ["data.tokenizer=bpe", "data.bpe_vocab_size=300", "checkpoint.every=1"],
    "bf16": ["precision.recipe=bf16", "train.micro_batch_size=2", "model.dropout=0.1", "train.recompute=block", "optimizer.moments=bf16"],
    "fp8-row": [
        "precision.recipe=fp8-row",
        "precision.skip_slower=[]",
        "data.seq_len=32",
        "model.ffn_dim=32",
        "train.micro_batch_size=2",
        "precision.reference_every=7",
        "precision.reference_steps=5",
        "checkpoint.every=2",
    ],
    "fp8-delayed": [
        "precision.recipe=fp8-delayed",
        "precision.skip_slower=[]",
        "precision.amax_history_len=3",
        "data.seq_len=32",
        "model.ffn_dim=32",
        "checkpoint.every=2",
    ],
    "mixture": [
        "data.train=[{path='a.txt',weight=1.0},{path='b.txt',weight=3.0,separator='bridge'}]",
        "data.document_mask=true",
        "train.batch_size=16",
        "train.micro_batch_size=8",
    ],
    "shards": ["data.train=tokens", "data.tokenizer=", "checkpoint.keep_last=3", "log.tensorboard=true"],
}
# How often each command is tried.
COMMANDS = {"train": 8, "tokenize": 3, "learn": 1, "export": 2, "eval": 2, "report": 1, "compare": 1}
SHORT = 4


def sets(recipe):
    return [word for setting in RECIPES[recipe] for word in ("--set", setting)]


def prepare(folder, program):
    """A run of each recipe in peace, and its time."""
    place.texts(folder)
    program.run(folder, "tokenize a.txt --bytes --out tokens").succeeds()
    seconds = {}
    for recipe in RECIPES:
        seconds[recipe] = program.run(folder, ["train", "run.toml", "--out", recipe, *sets(recipe)]).succeeds().seconds
    return {"seconds": seconds}


def trial(prepared, base, folder, program, dice, count):
    place.texts(folder)
    command = dice.choices(list(COMMANDS), COMMANDS.values())[0]
    {"train": train, "tokenize": tokenize, "learn": learn}.get(command, read)(prepared, base, folder, program, dice, count, command)
    place.check_no_leftovers(folder)
    return command


def until_it_ends(folder, program, dice, count, seconds, command):
    """Runs the command, and kills it, until it ends; it takes so many seconds in peace. Returns the last one."""
    kills = 0
    while True:
        # Short at first, for many kills; longer after each, since beside other tries a command takes several times as long as alone.
        patience = min(seconds / 8 * 1.05**kills, HANG)
        threads = {"RAYON_NUM_THREADS": str(dice.choice([1, 2, 3]))}
        ended = program.run(folder, command(), kill_after=dice.uniform(0, patience), env=threads)
        place.check_whole(folder)
        if not ended.is_killed:
            return ended.succeeds()
        kills += 1
        count["kills"] += 1
        if kills > 300:
            raise Failure(f"never ends: `{ended.command}`")


def train(prepared, base, folder, program, dice, count, _):
    recipe = dice.choice(list(RECIPES))
    if recipe == "shards":
        place.copy(base / "tokens", folder / "tokens")
    command = lambda: ["train", "run.toml", "--out", "run", "--resume", *sets(recipe), "--threads", str(dice.choice([0, 1, 2]))]
    until_it_ends(folder, program, dice, count, prepared["seconds"][recipe], command)
    place.same(place.lasting(base / recipe), place.lasting(folder / "run"), f"a killed run of {recipe}")


def tokenize(prepared, base, folder, program, dice, count, _):
    lines = dice.choice([400, 4000, 20000])
    (folder / "c.txt").write_text(place.text(3, lines))
    how = dice.choice(["--bytes", "--chars", "--bpe-vocab-size 300"])
    command = lambda: f"tokenize c.txt {how} --shard-tokens {lines} --verify --out tokens"
    seconds = program.run(folder, command()).succeeds().seconds
    (folder / "tokens").rename(folder / "peace")
    until_it_ends(folder, program, dice, count, seconds, command)
    place.same(place.files(folder / "peace"), place.files(folder / "tokens"), "killed shards")


def learn(prepared, base, folder, program, dice, count, _):
    """The cache of vocabularies and tokens, which several runs share."""
    run = ["train", "run.toml", "--set", "train.steps=1", "--set", "schedule.warmup_steps=0", *sets("bpe")]
    outs = iter(range(10**9))
    command = lambda: [*run, "--out", f"run{next(outs)}"]
    until_it_ends(folder, program, dice, count, prepared["seconds"]["bpe"] / 2, command)
    for out in folder.glob("run[0-9]*"):
        # A run that was killed before it had anything is begun again.
        program.run(folder, [*run, "--out", out.name, "--resume"]).succeeds()


def read(prepared, base, folder, program, dice, count, command):
    """Commands that read a run and write elsewhere, or nothing."""
    recipe = dice.choice([name for name in RECIPES if name not in ("mixture", "shards")])
    place.copy(base / recipe, folder / "run")
    before = place.files(folder / "run")
    words = {
        "export": f"export run --dtype {dice.choice(['fp32', 'bf16'])} --max-shard-size 10KB --overwrite --out hf",
        "eval": "eval run --data b.txt --cache-dir tokens --json",
        "report": "report run --out page.html --overwrite",
        "compare": "compare run run2 --out page.html --overwrite",
    }[command]
    if command == "compare":
        place.copy(folder / "run", folder / "run2")
    peace = folder / "peace"
    place.texts(peace)
    for name in ("run", "run2"):
        if (folder / name).exists():
            place.copy(folder / name, peace / name)
    expected = program.run(peace, words).succeeds()
    ended = until_it_ends(folder, program, dice, count, expected.seconds, lambda: words)
    if command == "eval":
        place.same({"output": place.without_times(expected.out)}, {"output": place.without_times(ended.out)}, "eval")
    if command == "export":
        place.same(place.files(peace / "hf"), place.files(folder / "hf"), "a killed export")
    place.same(before, place.files(folder / "run"), f"a run that `{command}` has read")

