"""Control characters in the names of files, folders, runs and sources, and in prompts: none reaches a terminal, nor the lines of `train`.

Commands run on a terminal of their own. xtrain's own progress bar writes escape sequences there, so planted ones are told by their text.
"""

import os
import pty
import re
import shutil
import subprocess

import place
from program import HANG, Failure

SHORT = 8
# Escape sequences of the kinds that terminals obey, with texts that no program writes by itself, and characters that reorder or hide text.
PLANTED = [
    "\x1b]0;planted\x07",
    "\x1b[38;5;213m",
    "\x1b[2;77H",
    "\x1b]52;c;cGxhbnRlZA==\x1b\\",
    "\x1bPplanted\x1b\\",
    "\x9b38;5;213m",
    "\x9d0;planted\x9c",
    "\x07",
    "\x08\x08\x08",
    "\x7f",
    "\x0e",
    "\x85",
    "\u202e",
    "\u2066",
    "a\rerror: planted",
    "a\nerror: planted",
]
# Characters that never belong into a line on a terminal.
NEVER = re.compile("[\x00-\x06\x07\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
SEQUENCES = ["\x1b]", "\x1bP", "\x1b[38;5;213m", "\x1b[2;77H"]
LINE = re.compile(r"(^|[\r\n])error: planted")


def prepare(folder, program):
    place.texts(folder)
    program.run(folder, "train run.toml --out peace").succeeds()


def name(dice):
    """A name of a file with one to three planted texts."""
    return "n" + "".join(dice.choice(PLANTED).replace("/", "") + dice.choice(["x", "y", " z"]) for _ in range(dice.randint(1, 3)))


def trial(prepared, base, folder, program, dice, count):
    folder.rmdir()
    place.copy(base, folder)
    data, out, run_file = name(dice) + ".txt", name(dice), name(dice) + ".toml"
    shutil.copy(folder / "a.txt", folder / data)
    shutil.copytree(folder / "peace", folder / out)
    (folder / run_file).write_text((folder / "run.toml").read_text())
    quoted = '"' + "".join(f"\\u{ord(c):04x}" if ord(c) < 0x20 or 0x7E < ord(c) else c for c in data) + '"'
    mixture = f"data.train=[{{path='a.txt',weight=1.0}},{{path={quoted},weight=2.0}}]"
    commands = [
        ["train", "run.toml", "--out", "new", "--set", f"data.train={quoted}"],
        ["train", "run.toml", "--out", "new", "--set", mixture],
        ["train", "run.toml", "--out", name(dice)],
        ["train", "run.toml", "--out", out],
        ["train", run_file, "--out", "new"],
        ["train", run_file + "x", "--out", "new"],
        ["train", "run.toml", "--out", "new", "--ranks", "2", "--set", f"data.train={quoted}"],
        ["train", "run.toml", "--out", "new", "--set", f"eval.prompts=[{quoted}]"],
        ["train", "run.toml", "--out", "new", "--set", f"model.init_from={quoted}"],
        ["train", "run.toml", "--out", "new", "--set", f"log.command=[{quoted}]"],
        ["train", "run.toml", "--out", "new", "--set", f"{data}=1"],
        ["plan", run_file],
        ["plan", "run.toml", "--set", f"data.train={quoted}"],
        ["tokenize", data, "--bytes", "--out", name(dice)],
        ["eval", out, "--data", data],
        ["eval", name(dice)],
        ["export", out, "--out", name(dice)],
        ["report", out],
        ["report", out, "peace", "--out", name(dice) + ".html"],
        ["compare", out, "peace"],
        ["inspect", out],
        ["generate", out, "--prompt", data, "-n", "3"],
        ["generate", "peace", "--prompt", data, "-n", "3", "--temperature", "5"],
        ["generate", name(dice), "--prompt", "x"],
        ["init", data, "--out", name(dice) + ".toml"],
        [data],
        ["train", "--" + data],
    ]
    words = dice.choice(commands)
    check(folder, program, words)
    return words[0] if words[0] in ("train", "plan", "generate", "tokenize") else "other commands"


def check(folder, program, words):
    variables = {"PATH": os.environ["PATH"], "XTRAIN_CACHE": str(folder / "kernels"), "TERM": "xterm", "COLUMNS": "4000", "HOME": str(folder)}
    if any("\x00" in word for word in words):
        return
    code, text = on_a_terminal([program.path, *words], folder, variables)
    if code not in (0, 2):
        raise Failure(f"{words}: exit code {code}: {text[-2000:]!r}")
    found(text, f"on a terminal, {words}")
    if words[0] == "train":
        piped = subprocess.run([program.path, *words, "--resume"], cwd=folder, env=variables, capture_output=True, timeout=HANG, stdin=subprocess.DEVNULL)
        found(piped.stdout.decode(errors="replace"), f"standard output of {words}")
        found(piped.stderr.decode(errors="replace"), f"standard error of {words}")


def found(text, what):
    """Fails if the text has a character or sequence that was planted."""
    bad = NEVER.search(text) or LINE.search(text) or next((s for s in SEQUENCES if s in text), None)
    if bad:
        at = bad.start() if isinstance(bad, re.Match) else text.index(bad)
        raise Failure(f"{what}: {text[max(0, at - 100) : at + 100]!r}")


def on_a_terminal(words, folder, variables):
    """Runs a command on a terminal. Returns its exit code and all that it wrote there."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(words, cwd=folder, env=variables, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    written = b""
    try:
        while chunk := os.read(ours, 65536):
            written += chunk
    except OSError:
        # The terminal's other end is closed.
        pass
    finally:
        os.close(ours)
    return process.wait(HANG), written.decode(errors="replace")
