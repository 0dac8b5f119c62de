#!/usr/bin/env python3
"""The files with which the long tests have passed, so that CI repeats only a small form of a test while they stay equal.

A long test has two forms. The usual one draws its cases and is what every change of its files must pass; it is not every case there is, which
`tests/emulated/run.sh --all` runs. The small one is a few of these cases. `tests/passed.toml` holds a hash for each test: of the content of
every file that can change its result, of the lines of `.ci/run` that run it, and of the compiler's version. `.ci/run` records it after the
usual form has passed, and the record is committed with the change. If the hash differs from the record, CI runs the usual form.

    tests/passed.py form gpu     # prints --small if the hash of the test `gpu` is that of the record, and nothing otherwise
    tests/passed.py hash gpu     # prints the hash
    tests/passed.py record gpu HASH STEP=SECONDS ...    # by .ci/run alone: records the hash, if it still holds and every step has run
"""

import dataclasses
import hashlib
import pathlib
import re
import subprocess
import sys
import tomllib

import workspace

RECORD = workspace.ROOT / "tests" / "passed.toml"
HEADER = "# The files with which each long test has passed in its usual form: CONTRIBUTING.md, \"Build and test\". Written by .ci/run.\n"
# They change what every package is built from: versions of dependencies, and profiles.
ALWAYS = ["Cargo.lock", "Cargo.toml"]
# What a package needs of another one.
OF_A_LIBRARY = ["src", "Cargo.toml", "build.rs"]
# Defines the steps.
STEPS = ".ci/run"


@dataclasses.dataclass(frozen=True)
class LongTest:
    """What a test depends on."""

    steps: tuple = ()  # of .ci/run, which run it and what it needs
    tested: tuple = ()  # packages with their own tests, and all that these are built from
    libraries: tuple = ()  # packages without their tests, and all that they are built from
    paths: tuple = ()  # other files and folders


LONG_TESTS = {
    # Kernels compiled for the architectures; GPU tests of kernels and engine on the emulated GPU, races and faults.
    "gpu": LongTest(
        steps=("kernels", "gpu", "races", "faults"),
        tested=("xtrain-cuda", "xtrain-emulator", "xtrain-ops"),
        paths=("tests/emulated", "tests/nvrtc.sh", "docs/kernels.md"),
    ),
    # Models are trained and exported, and run in other engines; models of other programs are imported. So it needs all that trains, and of
    # the command line what is not of other commands' crates.
    "exchange": LongTest(
        steps=("build", "exchange"),
        libraries=("xtrain-train",),
        paths=(
            *("crates/xtrain/src", "crates/xtrain/Cargo.toml", "crates/xtrain/build.rs"),
            *("tests/exchange", "tests/golden", "examples/data/snapshot.txt.gz"),
        ),
    ),
}


def files(root, path):
    """The files below a path, without pages and compiled Python; a path may also name one file of any kind."""
    path = root / path
    if path.is_dir():
        found = (file for file in path.rglob("*") if file.is_file())
        return {file for file in found if file.suffix not in (".md", ".pyc") and "target" not in file.relative_to(path).parts}
    return {path} if path.is_file() else set()


def inputs(root, packages, test):
    """Every file that can change the result of the test."""
    for path in test.paths:
        if not (root / path).exists():
            raise SystemExit(f"tests/passed.py: {path} is not there: name the file that has its content now")
    built = workspace.libraries(packages, set(test.libraries))
    for name in test.tested:
        built |= workspace.tested_with(packages, name)
    paths = [*ALWAYS, *test.paths, *(packages[name].folder for name in test.tested)]
    paths += [f"{packages[name].folder}/{part}" for name in built for part in OF_A_LIBRARY]
    return set().union(*(files(root, path) for path in paths))


def commands(root, step):
    """The lines of .ci/run that are this step, without comments."""
    found = re.search(rf"^{step}\(\) \{{\n(.*?)^\}}$", (root / STEPS).read_text(), re.DOTALL | re.MULTILINE)
    if not found:
        raise SystemExit(f"tests/passed.py: {STEPS} has no step {step}")
    return re.sub("^ *#.*\n", "", found[1], flags=re.MULTILINE)


def compiler():
    """The version of the Rust compiler, with its commit."""
    return subprocess.run(["rustc", "--version"], cwd=workspace.ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def digest(root, packages, test, compiler):
    """A hash of the names and contents of the inputs, of the commands and of the compiler's version."""
    whole = hashlib.sha256(compiler.encode())
    for step in test.steps:
        whole.update(f"{step}\n{commands(root, step)}".encode())
    for file in sorted(inputs(root, packages, test)):
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        whole.update(f"{content} {file.relative_to(root).as_posix()}\n".encode())
    return whole.hexdigest()


def current(name):
    """The hash of a test in this repository."""
    return digest(workspace.ROOT, workspace.read(), LONG_TESTS[name], compiler())


def read(record):
    """The recorded hash of each test."""
    return tomllib.loads(record.read_text()) if record.exists() else {}


def write(record, name, value):
    lines = [f'{test} = "{hash}"\n' for test, hash in sorted((read(record) | {name: value}).items())]
    record.write_text(HEADER + "".join(lines))


def seconds_of_steps(arguments):
    """The seconds by step of arguments like `races=150`; None if one is not of this form."""
    found = [re.fullmatch(r"(\w+)=([0-9]+)", argument) for argument in arguments]
    return {one[1]: int(one[2]) for one in found} if all(found) else None


def why_not(test, seconds):
    """Why a run of these steps does not show that the test has passed in its usual form; None if it does."""
    missing = [step for step in test.steps if step not in seconds]
    # To build can take no time, if all is built; a test that takes none has not run.
    idle = [step for step in test.steps if seconds.get(step) == 0 and step != "build"]
    if missing:
        return f"{', '.join(missing)} did not run"
    return f"{', '.join(idle)} took no second" if idle else None


def usage():
    print(f"usage: tests/passed.py form|hash {'|'.join(LONG_TESTS)}, or record {'|'.join(LONG_TESTS)} HASH STEP=SECONDS ...", file=sys.stderr)
    sys.exit(2)


def main(arguments):
    action, name, *more = arguments if len(arguments) >= 2 else ("", "")
    if action not in ("form", "hash", "record") or name not in LONG_TESTS or (len(more) > 0) != (action == "record"):
        usage()
    seconds = seconds_of_steps(more[1:])
    if seconds is None or more and not re.fullmatch("[0-9a-f]{64}", more[0]):
        usage()
    now = current(name)
    recorded = read(RECORD).get(name)
    if action == "form":
        print("--small" if now == recorded else "")
    elif action == "hash":
        print(now)
    elif reason := why_not(LONG_TESTS[name], seconds):
        print(f"{name}: {reason}, so nothing is recorded")
    elif now != more[0]:
        print(f"{name}: files have changed while it ran, so nothing is recorded")
    elif now != recorded:
        write(RECORD, name, now)
        print(f"{name}: recorded in tests/passed.toml; commit it with the change")


if __name__ == "__main__":
    main(sys.argv[1:])
