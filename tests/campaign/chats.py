"""Conversations and chat templates that are damaged or strange: the answer is one readable error, or a success.

After an error no data set, run or run file is left that looks complete.
"""

import copy
import json
import pathlib

import mutations
import parquet
import place
from program import Failure

SHORT = 50
CHAT = pathlib.Path(__file__).parents[1] / "chat"
TEMPLATES = CHAT / "templates"
# Work, memory and nesting without end.
ENDLESS = ["".join(text * times for text, times in parts) for parts in json.loads((CHAT / "endless.json").read_text())]
# Seconds that a command with a damaged template may take on a busy machine. An optimised binary ends within two.
SLOW = 30
# A data set is read again after so many commands, on average.
VERIFIED = 4

TOOL = {"name": "find", "description": "Finds <b>", "parameters": {"type": "object", "properties": {"q": {"type": "string", "default": 1e-05}}}}
CALL = {"id": "abcdef123", "type": "function", "function": {"name": "find", "arguments": {"q": "é", "n": 1.5, "all": None}}}
ENDS = ["<|im_end|>", "<end_of_utterance>", "<｜end▁of▁sentence｜>", "<|end|>", "<|return|>", "<|call|>"]

RUN = """
[model]
dim = 16
layers = 1
heads = 2
[data]
train = "messages.jsonl"
tokenizer = "tok"
chat_template = "chatml"
seq_len = 128
cache_dir = "cache"
[train]
steps = 2
batch_size = 2
device = "cpu"
[eval]
every = 2
tokens = 256
chats = ["is it?"]
max_tokens = 2
[schedule]
kind = "constant"
[log]
tensorboard = false
"""

# Characters that JSON or a chat may not hold, sizes that nobody writes, and names that a row may have.
PIECES = [
    b"\\ud800", b"\\udc00\\ud800", b"\\u0000", b"\0", b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b"1e999", b"-0", b"9" * 400, b"0.1e-999", b"NaN", b"Infinity",
    b"[" * 500, b'{"a":' * 500, b"[" * 200 + b"]" * 200, b'"' + b"x" * 100000 + b'"', b"null", b"{}", b"[]", b"<|im_end|>", b"<|im_start|>", b"\\n\\r",
    "\U0010f8f2".encode(), "\U0010f8f4".encode(), "\u2028".encode(), b'"train": false', b'"train": 1', b"messages", b"conversations", b"tools", b"tool_calls",
    b"\xef\xbb\xbf", b"\n\n", b",", b'"role": "wizard"', b'"content": null', b'"reasoning_content": 1', b'"thinking": "t"', b'{"text": "a"}\n',
]  # fmt: skip
KEYS = [
    "messages", "conversations", "prompt", "completion", "instruction", "input", "output", "text", "tools", "role", "content", "from", "value", "train",
    "tool_calls", "reasoning_content", "thinking", "reasoning", "function", "arguments", "name", "system", "type", "id", "chosen", "tool_call_id",
]  # fmt: skip
STRANGE = [
    None, True, 0, -1, 2**63, 2**64, 10**30, 1e308, -0.0, "", " ", "x" * 3000, "\u202e\n\0", "{}", '[{"a": 1}]', [], {}, [[]], [None], "system", "tool",
    "assistant", "function_call", {"type": "image"}, [{"type": "text", "text": "a"}], [{"type": "text"}], "<|im_end|>", "\U0010f8f2", "<think>a</think>b",
]  # fmt: skip

# Parts of templates.
JINJA = [
    "{%", "%}", "{{", "}}", "{#", "#}", "-%}", "{%-", "+%}", "{% generation %}", "{% endgeneration %}", "{% raw %}", "{% endraw %}", "{% break %}",
    "{% continue %}", "{% endfor %}", "{% endif %}", "{% else %}", "{% elif 1 %}", "{% set x = messages %}", "{% set x %}", "{% endset %}", "{% macro f(a) %}",
    "{% endmacro %}", "{% filter upper %}", "{% endfilter %}", "{% call f(1) %}", "{% endcall %}", "{% with a = 1 %}", "{% endwith %}", "{% include 'x' %}",
    "{% extends 'x' %}", "{% import 'x' as y %}", "{% do x.append(1) %}", "{{ raise_exception('no') }}", "{{ strftime_now('%d %b %Y %q') }}",
    "{{ messages }}", "{{ messages|tojson(indent=4) }}", "{{ loop }}", "{{ self }}", "{{ namespace }}", "{{ caller() }}", "{{ loop.cycle() }}",
    "{{ messages[-1].content }}", "{{ messages[99] }}", "{{ messages[:0] }}", "{{ messages[::-1] }}", "{{ messages.x.y }}", "{{ 1 // 0 }}", "{{ 1 % 0 }}",
    "{{ 'é\\u00'}}", "{{ none|length }}", "{{ (1, 2) }}", "{{ {'a': {}} }}", "{{ messages|map(attribute='content')|join }}", "{{ 'x'.format(1) }}",
    "{{ messages|selectattr('role', 'equalto', 'user')|list|length }}", "{{ ''.join(messages) }}", "{{ x.__class__ }}", "{{ messages|groupby('role') }}",
    "|trim", "|tojson", "|length", "|string", "|safe", "|items", "|list", "|first", "|replace('', 'x')", "|indent(99)", "|batch(3)", ".items()", ".keys()",
    ".split('\\n')", ".strip()", "[0]", "[-1]", "[1:]", "[::-1]", " is defined", " is none", " is string", " in ", " not in ", " and ", " or ", " not ", " if ",
    " else ", " ~ ", " + ", " - ", " * ", " ** ", " // ", " == ", " < ", "(", ")", "[", "]", "{", "}", ",", "'", '"', "\\", "\r\n", "\0", "\u2028",
    "\U0010f8f2", "loop.last", "loop.previtem", "loop.nextitem", "loop.index0", "loop.changed(1)", "add_generation_prompt", "messages", "tools", "eos_token",
]  # fmt: skip


def prepare(folder, program):
    """Rows in all formats, templates, and a model that was trained on some of the rows."""
    place.texts(folder)
    program.run(folder, "tokenize a.txt --bytes --out made").succeeds()
    tokenizer = json.loads((folder / "made/tokenizer.json").read_text())
    flags = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer["added_tokens"] += [{"id": 257 + at, "content": name, **flags} for at, name in enumerate(["<|im_start|>", *ENDS])]
    (folder / "tok").mkdir()
    (folder / "tok/tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tok/tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "tok/generation_config.json").write_text(json.dumps({"eos_token_id": [258 + at for at in range(len(ENDS))]}))
    place.copy(TEMPLATES, folder / "templates")
    files = rows()
    for name, content in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in content))
    (folder / "array.json").write_text(json.dumps(files["tools"] + files["messages"], indent=1))
    parquet.write_conversations(folder / "lists.parquet", files["messages"])
    parquet.write(folder / "strings.parquet", [row["text"] for row in files["text"]], parquet.PLAIN)
    (folder / "chat.toml").write_text(RUN)
    program.run(folder, "train chat.toml --out run").succeeds()
    for path in rows_of(folder):
        program.run(folder, f"tokenize {path} --chat --tokenizer tok --chat-template chatml --show 9").succeeds()
    for path in sorted((folder / "templates").iterdir()):
        program.run(folder, f"tokenize conversations.jsonl --tokenizer tok --chat-template templates/{path.name} --show 9").succeeds()


def rows():
    """Rows by their format."""

    def user(n):
        return {"role": "user", "content": f"is it {n} é?"}

    def assistant(n, **more):
        return {"role": "assistant", "content": f"it is {n}", **more}

    numbers = range(8)
    result = {"role": "tool", "tool_call_id": "abcdef123", "name": "find", "content": "{}"}
    calls = [CALL, {**CALL, "function": {"name": "find", "arguments": '{"q": "a"}'}}]
    return {
        "messages": [{"messages": [user(n), assistant(n), user(n + 1), assistant(n + 1, train=n % 2 == 0)]} for n in numbers],
        "tools": [
            {
                "messages": [
                    {"role": "system", "content": "Use tools."},
                    user(n),
                    {"role": "assistant", "content": None, "tool_calls": [calls[n % 2]]},
                    result,
                    assistant(n, **{["reasoning_content", "thinking", "reasoning"][n % 3]: "hm\n"}),
                ],
                "tools": [[{"type": "function", "function": TOOL}], json.dumps([TOOL]), None][n % 3],
            }
            for n in numbers
        ],
        "conversations": [
            {"system": "Be brief.", "conversations": [{"from": "human", "value": f"is it {n}?"}, {"from": "gpt", "value": "yes", "train": True}]} for n in numbers
        ],
        "pairs": [{"prompt": f"one {n}", "completion": " two"} for n in numbers] + [{"prompt": [user(1)], "completion": [assistant(1)]}],
        "instructions": [{"instruction": f"add {n}", "input": ["", "1 1"][n % 2], "output": "2"} for n in numbers],
        "text": [{"text": f"the river {n}"} for n in numbers],
    }


def rows_of(folder):
    return sorted(path.name for kind in ("jsonl", "json", "parquet") for path in folder.glob(f"*.{kind}"))


def trial(prepared, base, folder, program, dice, count):
    folder.rmdir()
    place.copy(base, folder)
    if dice.random() < 1 / 6:
        seconds, command = SLOW, damaged_template(folder, dice)
    else:
        seconds, command = None, damaged_rows(folder, dice)
    before = place.files(folder)
    ended = program.run(folder, command)
    has_succeeded = ended.judge()
    if seconds is not None and ended.seconds > seconds:
        raise Failure(f"takes long: `{ended.command}`: {ended.seconds:.1f} s: {ended.err[-1000:]}")
    check(folder, program, command, ended, has_succeeded, before, dice)
    count["accepted" if has_succeeded else "refused"] += 1
    return "of templates" if seconds else "of rows"


def damaged_rows(folder, dice):
    """Damages a file of rows; the command that reads it."""
    path = folder / dice.choice(rows_of(folder))
    content = path.read_bytes()
    if path.suffix == ".parquet" or dice.random() < 0.4:
        content = mutations.mutate("bytes", content, dice)
    elif dice.random() < 0.4:
        content = bytearray(content)
        for _ in range(dice.choice([1, 1, 2, 5])):
            at = dice.randrange(len(content) + 1)
            content[at : at + dice.choice([0, 0, 1, 8])] = dice.choice(PIECES)
    else:
        is_array = path.suffix == ".json"
        values = json.loads(content) if is_array else [json.loads(line) for line in content.splitlines()]
        for _ in range(dice.choice([1, 1, 2, 6])):
            at = dice.randrange(len(values))
            values[at] = change_value(values[at], dice)
        content = (json.dumps(values) if is_array else "".join(json.dumps(value) + "\n" for value in values)).encode()
    path.write_bytes(bytes(content))
    name = path.name
    template = dice.choice(["chatml", "chatml", *sorted(f"templates/{path.name}" for path in (folder / "templates").iterdir())])
    tokenize = f"tokenize {name} --tokenizer tok --chat-template {template}"
    train = f"chat.toml --set data.train={name} --set data.chat_template={template}"
    setting = dice.choice(["", "", f"--set data.bad_rows={dice.choice([0, 0.5, 1])}", "--set data.packing=none", "--set data.too_long=error"])
    return dice.choice(
        [
            f"{tokenize} --chat --out new --skip-bad-rows {dice.choice([0, 0, 1, 100])}",
            f"{tokenize} --chat --out new --train-on {dice.choice(['assistant', 'last', 'all'])}",
            f"{tokenize} --chat --show {dice.choice([1, 3, 100])}",
            f"{tokenize} --out new",
            f"plan {train}",
            f"train {train} --out new {setting}",
            f"train chat.toml --out new --set data.valid={name}",
            f"generate run/hf --chats {name} --json -n 2",
            f"generate run --chats {name} -n 2 --chat-template {template}",
            f"eval run --data {name}",
            f"init run/hf {name} --out new.toml",
        ]
    )


def change_value(value, dice):
    """A row with a value changed, or with a key that has another name."""
    if isinstance(value, (dict, list)) and value and dice.random() < 0.9:
        key = dice.choice(list(value)) if isinstance(value, dict) else dice.randrange(len(value))
        match dice.randrange(10):
            case 0:
                del value[key]
            case 1 if isinstance(value, dict):
                value[dice.choice(KEYS)] = value.pop(key)
            case 1:
                value.insert(0, value[key])
            case 2 if isinstance(value, dict):
                value[dice.choice(KEYS)] = copy.deepcopy(dice.choice(STRANGE))
            case 2:
                value.append(copy.deepcopy(dice.choice(STRANGE)))
            case 3:
                depth = dice.choice([1, 100, 130, 400])
                for _ in range(depth):
                    value = {"a": value} if dice.random() < 0.5 else [value]
            case _:
                value[key] = change_value(value[key], dice)
        return value
    return copy.deepcopy(dice.choice(STRANGE))


def damaged_template(folder, dice):
    """Damages a template, and puts it where templates are; the command that reads it."""
    source = dice.choice(sorted((folder / "templates").iterdir())).read_text()
    if dice.random() < 0.2:
        at = dice.choice([0, len(source), dice.randrange(len(source) + 1)])
        source = source[:at] + dice.choice(ENDLESS) + source[at:]
    for _ in range(dice.choice([1, 1, 2, 4])):
        at = dice.randrange(len(source) + 1)
        to = min(at + dice.choice([0, 1, 3, 30]), len(source))
        match dice.randrange(6):
            case 0 | 1 | 2:
                source = source[:at] + dice.choice(JINJA) + source[to:]
            case 3:
                source = source[:at] + source[to:]
            case 4:
                source = source[:at] + source[at:to] * dice.choice([2, 50]) + source[to:]
            case _:
                source = mutations.mutate("bytes", source.encode(errors="surrogateescape"), dice).decode(errors=dice.choice(["replace", "surrogateescape"]))
    rows = dice.choice(["messages.jsonl", "messages.jsonl", "tools.jsonl", "conversations.jsonl"])
    return place_template(folder, source.encode(errors="surrogateescape"), rows, dice)


def place_template(folder, source, rows, dice):
    text = source.decode(errors="replace")
    model = dice.choice(["tok", "tok", "run/hf", "model"])
    place.copy(folder / "run/hf", folder / "model")
    (folder / model / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / model / "tokenizer_config.json").read_text())
    where = dice.randrange(5)
    named = ""
    match where:
        case 0:
            (folder / "t.jinja").write_bytes(source)
            named = "t.jinja"
        case 1:
            (folder / model / "chat_template.jinja").write_bytes(source)
        case 2:
            config["chat_template"] = text
        case 3:
            other = dice.choice([text, "{{ messages }}"])
            config["chat_template"] = [{"name": "default", "template": text}, {"name": "tool_use", "template": other}]
            if dice.random() < 0.3:
                mutations.change_value(config["chat_template"], dice)
        case _:
            (folder / model / "additional_chat_templates").mkdir(exist_ok=True)
            (folder / model / "additional_chat_templates/tool_use.jinja").write_bytes(source)
    (folder / model / "tokenizer_config.json").write_text(json.dumps(config))
    option = f" --chat-template {named}" if named else ""
    run = f"chat.toml --set data.train={rows} --set data.chat_template={named}"
    run += " --set data.tokenizer=tok" if model == "tok" else f" --set data.tokenizer= --set model.init_from={model} --set model.dim= --set model.layers= --set model.heads="
    commands = [
        f"tokenize {rows} --tokenizer {model} --chat --out new{option}",
        f"tokenize {rows} --tokenizer {model} --show 9{option}",
        f"plan {run}",
        f"train {run} --out new",
    ]
    if model != "tok":
        commands += [f"generate {model} --chats {rows} --json -n 2{option}", f"init {model} {rows} --out new.toml"]
    return dice.choice(commands)


def check(folder, program, command, ended, has_succeeded, before, dice):
    """Fails if an error left something that looks complete, or a success something that is not."""
    verb = command.split()[0]
    for name in ("new", "cache"):
        place.check_whole(folder / name)
    if verb == "generate" and "--json" in command:
        answers = [json.loads(line) for line in ended.out.splitlines()]
        if has_succeeded and not all("answer" in answer for answer in answers):
            raise Failure(f"succeeds without answers: `{command}`: {ended.out[-1000:]}")
    if not has_succeeded:
        after = place.files(folder)
        changed = sorted(name for name in {*before, *after} if before.get(name) != after.get(name) and not is_kept(name))
        if changed:
            raise Failure(f"leaves or changes {', '.join(changed[:5])} after `{command}`: {ended.err[-1000:]}")
    if dice.randrange(VERIFIED) == 0:
        for index in sorted(folder.glob("cache/**/dataset.json")) + sorted(folder.glob("new/dataset.json")):
            program.run(folder, ["tokenize", "--verify", index.parent]).succeeds()
        if has_succeeded and verb == "init":
            program.run(folder, "plan new.toml").succeeds()


def is_kept(name):
    """True for what an error leaves: complete data sets in the cache, measurements of the machine."""
    return name.startswith(("cache/", "kernels/"))
