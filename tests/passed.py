#!/usr/bin/env python3
"""The files with which the long tests have passed, so that CI repeats only a small part of a test while they stay equal.

`tests/passed.toml` holds a hash for each test: of the content of every file that can change its result. `.ci/run` records it after the whole
test has passed, and the record is committed with the change. If a file differs from the record, or there is no record, CI runs the whole test.

    tests/passed.py form gpu           # prints --small if the files of the test `gpu` are those of the record, and nothing otherwise
    tests/passed.py hash gpu           # prints the hash of its files
    tests/passed.py record gpu HASH    # records the hash, if it is still that of the files: only after the whole test has passed
"""

import dataclasses
import hashlib
import pathlib
import sys
import tomllib

import workspace

RECORD = workspace.ROOT / "tests" / "passed.toml"
HEADER = "# The files with which each long test has passed as a whole: CONTRIBUTING.md, \"CI\". Written by .ci/run.\n"
# They change what every package is built from: versions of dependencies, and profiles.
ALWAYS = ["Cargo.lock", "Cargo.toml"]
# What a package needs of another one.
OF_A_LIBRARY = ["src", "Cargo.toml", "build.rs"]


@dataclasses.dataclass(frozen=True)
class LongTest:
    """What a test depends on."""

    tested: tuple = ()  # packages with their own tests, and all that these are built from
    libraries: tuple = ()  # packages without their tests, and all that they are built from
    paths: tuple = ()  # other files and folders


LONG_TESTS = {
    # Kernels compiled for all architectures; GPU tests of kernels and engine on the emulated GPU, races and faults.
    "gpu": LongTest(
        tested=("xtrain-cuda", "xtrain-emulator", "xtrain-ops"),
        paths=("tests/emulated", "tests/nvrtc.sh", "docs/kernels.md"),
    ),
    # Exported models in other engines, and models of other programs imported.
    "exchange": LongTest(
        libraries=("xtrain-checkpoint", "xtrain-data", "xtrain-model"),
        paths=(
            *("tests/exchange", "tests/golden", "crates/runtime/src/cpu.rs", "crates/step/src/generate"),
            *("crates/train/src/exchange.rs", "crates/train/src/open_model.rs"),
            *("crates/xtrain/src/commands/export.rs", "crates/xtrain/src/commands/generate.rs"),
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


def digest(root, packages, test):
    """A hash of the names and contents of the inputs."""
    whole = hashlib.sha256()
    for file in sorted(inputs(root, packages, test)):
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        whole.update(f"{content} {file.relative_to(root).as_posix()}\n".encode())
    return whole.hexdigest()


def read(record):
    """The recorded hash of each test."""
    return tomllib.loads(record.read_text()) if record.exists() else {}


def write(record, name, value):
    lines = [f'{test} = "{hash}"\n' for test, hash in sorted((read(record) | {name: value}).items())]
    record.write_text(HEADER + "".join(lines))


def main():
    action, name, *more = sys.argv[1:] or [""] * 2
    if action not in ("form", "hash", "record") or name not in LONG_TESTS or len(more) != (action == "record"):
        sys.exit(f"usage: tests/passed.py form|hash|record {'|'.join(LONG_TESTS)} [HASH]")
    now = digest(workspace.ROOT, workspace.read(), LONG_TESTS[name])
    recorded = read(RECORD).get(name)
    if action == "form":
        print("--small" if now == recorded else "")
    elif action == "hash":
        print(now)
    elif now != more[0]:
        print(f"{name}: files have changed while it ran, so nothing is recorded")
    elif now != recorded:
        write(RECORD, name, now)
        print(f"{name}: recorded in tests/passed.toml; commit it with the change")


if __name__ == "__main__":
    main()
