"""Puts faults into kernels, one at a time, and checks that the tests on the emulated GPU notice them.

A file of `faults` is a fault. Its first lines are `source:`, the program that it is in, `test:`, a suite and a pattern for names of tests, and
`message:`, a regular expression for the output of a test that notices it. Below an empty line stands what changes in the program, as in a diff.
A fault is caught if one of the first tests of these names fails with it and says that, and passes without. `run.sh` prepares what this needs.
"""

import argparse
import concurrent.futures
import fnmatch
import pathlib
import re
import sys
import tempfile
import time

from run import MAIN, Test, binaries, output, run

FOLDER = pathlib.Path(__file__).parent / "faults"
# Tests that are tried for a fault: numbers in their names change with the samples of the ops.
MOST = 12


def head(file):
    """The lines above the first empty one, by key."""
    lines = file.read_text().split("\n\n", 1)[0].splitlines()
    return dict(line.split(": ", 1) for line in lines)


def find(file, seed, out, suites):
    """Whether the fault is caught, and by what or why not."""
    keys = head(file)
    suite, pattern = keys["test"].split(" ", 1)
    names = [line.removesuffix(": test") for line in output(suites[suite], "--list").splitlines() if line.endswith(": test")]
    tests = [Test(suite, suites[suite], name, MAIN) for name in fnmatch.filter(names, pattern)[:MOST]]
    (out / "kernels").mkdir(parents=True, exist_ok=True)
    # Compiled kernels are kept by the text that they had without the fault.
    with tempfile.TemporaryDirectory() as cache:
        for test in tests:
            result, _, text = run(test, seed, out, f"patch={file.resolve()}", cache)
            if "does not compile" in text:
                return False, text
            found = re.search(f".*({keys['message']}).*", text)
            if result != "failed" or found is None:
                continue
            result, _, without = run(test, seed, out)
            if result != "passed":
                return False, f"{test} does not pass without it: {result}\n{without}"
            line = found.group(0).removeprefix(f"test {test.test} ... ").removeprefix("test panicked: ")
            line = line if len(line) <= 240 else f"{line[:80]} ... {line[-160:]}"
            return True, f"{test}: {line}"
    return False, f"none of {len(tests)} tests {keys['test']} fails with `{keys['message']}`"


def main():
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--only", default="", help="faults whose names contain this")
    arguments.add_argument("--seeds", default="1", help="numbers separated by commas; a fault has to be caught with each")
    arguments.add_argument("--jobs", type=int, default=2)
    arguments.add_argument("--out", type=pathlib.Path, required=True)
    arguments = arguments.parse_args()

    suites = binaries()
    files = sorted(file for file in FOLDER.glob("*.txt") if arguments.only in file.stem)
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
