"""Runs GPU tests on an emulated GPU, each in a process of its own, and says which kernels ran.

The sample is drawn by a seed: the commit's hash, or XTRAIN_TEST_SEED. `run.sh` prepares what this needs.
"""

import argparse
import collections
import concurrent.futures
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import time

# Packages with their test binaries.
SUITES = [
    ("xtrain-cuda", "card"),
    ("xtrain-ops", "card"),
    ("xtrain-ops", "fused"),
    ("xtrain-ops", "accumulation"),
    ("xtrain-train", "card"),
    ("xtrain-train", "fp8"),
    ("xtrain-train", "fp8_head"),
]
# Tests that cannot run here, and why.
SKIPPED = {
    "cuda/card promoted_products_are_those_of_a_plain_loop": "wgmma, mbarriers and tensor copies are not emulated",
    "cuda/card cudnn_finds_the_known_results": "there is no cuDNN",
}
# The architecture that every test runs on, and those that a sample runs on.
MAIN, OTHERS = "sm_90a", ["sm_80", "sm_89"]
# Kernels of sources with Hopper's own instructions.
HOPPER = {"gemm/promoted.cu"}
TIMEOUT = 600


def output(*command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def binaries():
    """Test binaries by name: `ops/card`."""
    wanted = {suite: None for suite in SUITES}
    command = ["cargo", "test", "--no-run", "--message-format=json-render-diagnostics"]
    for package in dict.fromkeys(package for package, _ in SUITES):
        command += ["--package", package]
    for test in dict.fromkeys(test for _, test in SUITES):
        command += ["--test", test]
    for line in output(*command).splitlines():
        message = json.loads(line)
        if message.get("executable"):
            package = re.search(r"crates/(\w+)", message["manifest_path"]).group(1)
            wanted[f"xtrain-{package}", message["target"]["name"]] = message["executable"]
    return {f"{package[7:]}/{test}": wanted[package, test] for package, test in SUITES}


def draw(seed, *what):
    """A number in [0, 1) that depends on the seed and on what it is drawn for."""
    digest = hashlib.sha256(" ".join([str(seed), *what]).encode()).digest()
    return int.from_bytes(digest[:8], "little") / 2**64


def run(binary, suite, test, arch, seed, out):
    """Runs one test; returns its result, seconds and output."""
    log = out / "kernels" / hashlib.sha256(f"{suite} {test} {arch}".encode()).hexdigest()[:16]
    settings = f"arch={arch} seed={seed} log={log}"
    environment = os.environ | {"XTRAIN_EMULATOR": settings, "XTRAIN_TEST_DEVICE": "cuda"}
    folder = pathlib.Path("crates") / suite.split("/")[0]
    begun = time.monotonic()
    try:
        done = subprocess.run(
            [binary, "--exact", test, "--test-threads=1", "--nocapture"],
            cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            timeout=TIMEOUT,
        )
        text, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as late:
        text, code = (late.stdout or b"").decode(errors="replace") + f"\nno end after {TIMEOUT} s", 1
    counts = re.search(r"(\d+) passed; (\d+) failed; (\d+) ignored", text)
    result = "failed"
    if code == 0 and counts:
        result = "passed" if counts.group(1) == "1" else "skipped"
    return result, time.monotonic() - begun, text


def kernels(out):
    """Variants of kernels that were launched, and kernels that were loaded and not."""
    launched, loaded = set(), set()
    for log in (out / "kernels").iterdir():
        for line in log.read_text().splitlines():
            what, source = line.split(" ", 1)
            (launched if what == "launched" else loaded).add(source)
    return launched, loaded - launched


def variants():
    """All variants that the kernel test compiles for the main architecture: `source defines`."""
    binary = output("cargo", "test", "--no-run", "--package", "xtrain-ops", "--test", "kernels", "--message-format=json")
    path = next(m["executable"] for m in map(json.loads, binary.splitlines()) if m.get("executable"))
    listed = [line.rsplit(": ", 1)[0] for line in output(path, "--list").splitlines()]
    return {re.sub(f" {MAIN} ?", " ", name) for name in listed if f" {MAIN}" in name and name.split()[0] not in HOPPER}


def main():
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--all", action="store_true", help="every test on every architecture")
    arguments.add_argument("--only", default="", help="tests whose suite and name contain this")
    arguments.add_argument("--arch", help="this architecture alone")
    arguments.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments.add_argument("--out", type=pathlib.Path, required=True)
    arguments = arguments.parse_args()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], stdout=subprocess.PIPE, text=True).stdout.strip()
    seed = int(os.environ.get("XTRAIN_TEST_SEED") or int(commit[:8] or "0", 16))
    print(f"emulated GPU tests with XTRAIN_TEST_SEED={seed}", flush=True)

    out = arguments.out
    (out / "kernels").mkdir(parents=True, exist_ok=True)
    for log in (out / "kernels").iterdir():
        log.unlink()
    try:
        past = json.loads((out / "seconds.json").read_text())
    except (OSError, ValueError):
        past = {}

    jobs, skipped = [], []
    for suite, binary in binaries().items():
        for line in output(binary, "--list").splitlines():
            test = line.removesuffix(": test")
            name = f"{suite} {test}"
            if test == line or arguments.only not in name:
                continue
            if name in SKIPPED:
                skipped.append(f"{name}: {SKIPPED[name]}")
                continue
            for arch in [MAIN, *OTHERS]:
                wanted = arguments.all or arch == MAIN or draw(seed, name, arch) < 0.05
                if wanted and arguments.arch in (None, arch):
                    jobs.append((suite, binary, test, arch))
    # The longest first, so that none is left for the end; the seed orders those that are not known.
    jobs.sort(key=lambda job: (-past.get(f"{job[0]} {job[2]} {job[3]}", 1), draw(seed, *job)))

    counts, seconds, failures = collections.Counter(skipped=len(skipped)), {}, []
    begun = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        futures = {pool.submit(run, job[1], job[0], job[2], job[3], seed, out): job for job in jobs}
        for done in concurrent.futures.as_completed(futures):
            suite, _, test, arch = futures[done]
            result, took, text = done.result()
            name = f"{suite} {test} {arch}"
            counts[result] += 1
            seconds[name] = round(took, 2)
            if result == "failed":
                failures.append(name)
                print(f"FAILED {name} ({took:.1f} s)\n{text}", flush=True)
            if sum(counts.values()) % 200 == 0:
                print(f"{sum(counts.values())} of {len(jobs)} after {time.monotonic() - begun:.0f} s", flush=True)
    (out / "seconds.json").write_text(json.dumps(past | seconds, indent=0))

    for name in skipped:
        print(f"skipped {name}")
    by_suite = collections.Counter()
    for name, took in seconds.items():
        by_suite[name.split()[0]] += took
    for suite, took in by_suite.items():
        print(f"{suite}: {took:.0f} s of processor time")
    for name, took in sorted(seconds.items(), key=lambda item: -item[1])[:8]:
        print(f"  {name}: {took:.1f} s")
    launched, idle = kernels(out)
    print(f"{len(launched)} kernels ran, {len(idle)} were loaded and did not, in {time.monotonic() - begun:.0f} s")
    missing = variants() - {source.rsplit(" ", 1)[0].rstrip() for source in launched}
    if missing and not arguments.only and arguments.arch in (None, MAIN):
        failures += [f"no test launches {variant}" for variant in sorted(missing)]
    for failure in failures:
        print(f"FAILED {failure}")
    # The form in which test runners are read.
    print(f"{counts['passed']} passed, {len(failures)} failed, {counts['skipped']} skipped")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
