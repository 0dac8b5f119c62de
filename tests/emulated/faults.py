"""Puts known faults into kernels and into the executor, one at a time, and checks that tests on the emulated GPU catch each of them.

Each file in `faults/` is one fault. Its header has `source:`, the kernel's source file; `test:`, a suite and a pattern of test names; and
`message:`, a regular expression that the output of a failing test must match. It may have `settings:` of the emulator.
After an empty line follows the change, written like a diff.
A fault of the executor has, instead of `source:` and a change, `omit:` with what the emulator leaves out, one
at a time, by number.
A fault is caught if one of the first matching tests fails with this message, and passes without the fault. Run it through `run.sh faults`.
"""

import argparse
import concurrent.futures
import fnmatch
import os
import pathlib
import re
import sys
import tempfile
import time

from run import MAIN, Test, binaries, draw, output, run, seed_of_sample

FOLDER = pathlib.Path(__file__).parent / "faults"
# The number of matching tests to try. Patterns match several tests, because the numbers in test names change with the op samples.
MOST = 15
# Orders of execution that are tried for a fault of the executor, by seed.
ORDERS = 100
# The share of faults in a sample, and in the small one. The seed of the sample is that of `run.py`.
SHARE, SMALL_SHARE = 0.5, 0.1


def head(file):
    """The header fields by name."""
    lines = file.read_text().split("\n\n", 1)[0].splitlines()
    return dict(line.split(": ", 1) for line in lines)


def find_omitted(keys, seed, out, suites):
    """Leaves out one wait, event, copy or edge after another. Each must be caught, in some order of execution."""
    suite, name = keys["test"].split(" ", 1)
    what, ranges = keys["omit"].split()
    ends = [item.split("-") for item in ranges.split(",")]
    numbers = [number for first, *last in ends for number in range(int(first), int((last or [first])[0]) + 1)]
    test = Test(suite, suites[suite], name, MAIN)
    (out / "kernels").mkdir(parents=True, exist_ok=True)
    passes_without, _, without = run(test, seed, out)
    if not passes_without:
        return False, f"{test} does not pass without it\n{without}"
    for number in numbers:
        texts = (run(test, seed + n, out, [f"omit={what}:{number}"])[2] for n in range(ORDERS))
        if not any(re.search(keys["message"], text) for text in texts):
            return False, f"{test} does not fail without {what} {number} in {ORDERS} orders of execution"
    return True, f"{test} fails without each {what} of {ranges}"


def find(file, seed, out, suites):
    """Returns whether the fault is caught, and the test that caught it or the reason why none did."""
    keys = head(file)
    if "omit" in keys:
        return find_omitted(keys, seed, out, suites)
    suite, pattern = keys["test"].split(" ", 1)
    settings = keys.get("settings", "").split()
    names = [line.removesuffix(": test") for line in output(suites[suite], "--list").splitlines() if line.endswith(": test")]
    tests = [Test(suite, suites[suite], name, MAIN) for name in fnmatch.filter(names, pattern)[:MOST]]
    (out / "kernels").mkdir(parents=True, exist_ok=True)
    # The kernel cache is keyed by the unpatched source, so a fault needs a cache of its own.
    with tempfile.TemporaryDirectory() as cache:
        for test in tests:
            has_passed, _, text = run(test, seed, out, [*settings, f"patch={file.resolve()}"], cache)
            if "does not compile" in text:
                return False, text
            found = re.search(f".*({keys['message']}).*", text)
            if has_passed or found is None:
                continue
            passes_without, _, without = run(test, seed, out, settings)
            if not passes_without:
                return False, f"{test} does not pass without it\n{without}"
            line = found.group(0).removeprefix(f"test {test.test} ... ").removeprefix("test panicked: ")
            line = line if len(line) <= 240 else f"{line[:80]} ... {line[-160:]}"
            return True, f"{test}: {line}"
    return False, f"none of {len(tests)} tests {keys['test']} fails with `{keys['message']}`"


def main():
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--all", action="store_true", help="every fault, not a sample of them")
    arguments.add_argument("--small", action="store_true", help="a small sample")
    arguments.add_argument("--only", default="", help="only faults whose names contain this text")
    seeds = os.environ.get("XTRAIN_TEST_SEED", "1")
    arguments.add_argument("--seeds", default=seeds, help="comma-separated seeds; each fault must be caught with each seed")
    arguments.add_argument("--jobs", type=int, default=2)
    arguments.add_argument("--out", type=pathlib.Path, required=True)
    arguments = arguments.parse_args()

    suites = binaries()
    files = sorted(file for file in FOLDER.glob("*.txt") if arguments.only in file.stem)
    if not files:
        sys.exit(f"no fault has `{arguments.only}` in its name")
    if not (arguments.all or arguments.only):
        sample, share = seed_of_sample(), SMALL_SHARE if arguments.small else SHARE
        files = sorted(files, key=lambda file: draw(sample, file.stem))[:max(1, round(share * len(files)))]
        print(f"{len(files)} faults, a sample by XTRAIN_TEST_SEED={sample}; --all checks every one", flush=True)
    jobs = [(file, int(seed)) for file in files for seed in arguments.seeds.split(",")]
    missed = set()

    def check(job):
        file, seed = job
        begun = time.monotonic()
        is_caught, what = find(file, seed, arguments.out / "faults" / f"{file.stem}-{seed}", suites)
        if not is_caught:
            missed.add(file)
        took = time.monotonic() - begun
        print(f"{'caught' if is_caught else 'MISSED'} {file.stem}, seed {seed} ({took:.1f} s): {what}", flush=True)

    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(check, jobs))
    print(f"{len(files) - len(missed)} caught, {len(missed)} missed")
    sys.exit(1 if missed or not files else 0)


if __name__ == "__main__":
    main()
