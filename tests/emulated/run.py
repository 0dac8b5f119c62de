"""Runs the GPU tests on an emulated GPU, each in its own process, and checks that every kernel variant is launched.

A seed selects the sample: XTRAIN_TEST_SEED, or else the hash of the files that can change the results of the tests of kernels and engine
(`tests/passed.py`). So a change of other files leaves the sample as it is. Run it through `run.sh`.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import passed  # noqa: E402

# Packages and their test binaries.
SUITES = [
    ("xtrain-cuda", "card"),
    ("xtrain-ops", "card"),
    ("xtrain-ops", "attention"),
    ("xtrain-ops", "executor"),
    ("xtrain-ops", "fused"),
    ("xtrain-ops", "accumulation"),
    ("xtrain-ops", "grouped"),
    ("xtrain-train", "card"),
    ("xtrain-step", "fp8"),
    ("xtrain-step", "fp8_head"),
    ("xtrain-step", "lockstep"),
    ("xtrain-step", "scoring"),
    ("xtrain", "emulated"),
]
# The architecture of most tests, and the architectures of a few more.
MAIN, OTHERS = "sm_90a", ["sm_80", "sm_89"]
# The keys of the following tables are patterns of test names; the first match counts.
# Tests that the emulator does not run, with the reasons.
SKIPPED = {
    "cuda/card cudnn": "there is no cuDNN",
    "ops/card .*_in_any_order": "there is no cuDNN, and other kernels do the same as for the deterministic op",
}
# Architectures of tests that need FP8 GEMMs or block scales, and of tests that set the architecture themselves.
NEEDS = {
    "ops/(accumulation a_gpu|grouped|attention)": [MAIN],
    "cuda/card block_scaled_": [MAIN],
    "xtrain/": [MAIN],
    "step/(fp8|lockstep .*(row|block)|scoring a_(score|step))": [MAIN],
    "step/lockstep .*fp8": [MAIN, "sm_89"],
    "train/card reference_segments_change_no_bit": [MAIN, "sm_89"],
    "train/card what_a_run_left_in_bf16_it_leaves_where_it_goes_on": [MAIN, "sm_89"],
}
# Emulated GPUs of tests that need several; 1 for others.
DEVICES = {"ops/executor .*by_(nccl|copies)": 4, "step/lockstep .*by_(nccl|copies)": 4}
# Tests that a sample always contains: the cheapest that launched every variant when `--cover` wrote the file. If kernels or names of tests have
# changed since, the sample still launches every variant, at the price of more tests.
COVER = pathlib.Path(__file__).with_name("cover.txt")
# The share of other tests in a sample: on the main architecture, and on each other one.
SHARES = {
    # Stages that are used again, and blocks with several tiles.
    "cuda/card block_scaled_gemms_.*_(272x400x656|2320x4368x16)_e4m3_e4m3": 1.0,
    "cuda/card (block_scaled_)?gemms_": 0.15,
    "ops/card .*_small_": 0.18,
    "train/card ": 0.03,  # up to a minute each
    "((step|train)/|ops/(fused |card (scaled_matmul|attention(_grad)?)_card_))": 0.07,
    "ops/card .*_card_": 0.09,
    "ops/attention ": 0.4,
    "": 1.0,
}
OTHERS_SHARE = 0.02
# With --small, a share of what cover.txt lists of these suites runs. tests/passed.py says when: if no file has changed that could change their
# results. Then the seed is that with which they have passed. The other suites run as ever.
SMALL_SUITES, SMALL_SHARE = "(cuda|ops)/", 0.15
# Seconds of the longest test that `run.sh races` may run, without the search for races, and tests that it always runs if they have run.
RACES_SECONDS = 8
RACES_ALSO = "cuda/card block_scaled_gemms_.*_272x400x656_e4m3_e4m3|ops/grouped runs_of_(fprop_in_bf16|wgrad_in_fp8)"
# Tests that always run on other architectures, too: FP8 casts and GEMMs, which these refuse or compute otherwise, and attention in f32, for
# which a smaller shared memory selects other kernel variants.
ALSO = {
    "ops/card (swiglu_quantize|quantize|scaled_matmul|scaled_linear_cross_entropy)_small_.*f32": OTHERS,
    "ops/card attention_(grad_)?card_.*f32": ["sm_89"],
}
# Seconds of a test of each suite, if no earlier run has recorded its own; 1 for others.
SECONDS = {"train/card": 25, "step/fp8": 10, "(step|train)/": 5, "ops/(fused|accumulation)": 3, "ops/card attention_(grad_)?card_.*bf16": 4}
TIMEOUT = 600


@dataclasses.dataclass(frozen=True)
class Test:
    suite: str
    binary: str
    test: str
    arch: str

    def __str__(self):
        return f"{self.suite} {self.test} {self.arch}"

    def log(self, out):
        """The file in which the emulator logs the kernels that the test loads and launches."""
        return out / "kernels" / re.sub("[ /]", "-", str(self))


def output(*command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def may_match(suite, only):
    """True if tests of the suite may have `only` in suite and name. Names of tests contain no slash."""
    return "/" not in only or (suite.endswith(only.split()[0]) if " " in only else only in suite)


def binaries(only=""):
    """The test binaries of the suites that `only` allows, by suite, e.g. `ops/card`."""
    suites = {f"{package.removeprefix('xtrain-')}/{test}": test for package, test in SUITES}
    suites = {suite: test for suite, test in suites.items() if may_match(suite, only)}
    if not suites:
        return {}
    wanted = {}
    # All packages, as `cargo test --workspace`: a part of them would need other features of dependencies and compile these again.
    command = ["cargo", "test", "--workspace", "--no-run", "--message-format=json-render-diagnostics"]
    for test in dict.fromkeys(suites.values()):
        command += ["--test", test]
    for line in output(*command).splitlines():
        message = json.loads(line)
        if message.get("executable"):
            folder = re.search(r"crates/(\w+)", message["manifest_path"]).group(1)
            wanted[f"{folder}/{message['target']['name']}"] = message["executable"]
    return {suite: wanted[suite] for suite in suites}


def seed_of_sample():
    """XTRAIN_TEST_SEED, the first if it is a list, or else the hash of the files of these tests."""
    seed = os.environ.get("XTRAIN_TEST_SEED", "").split(",")[0]
    return int(seed) if seed else int(passed.current("gpu")[:8], 16)


def draw(seed, *what):
    """A random number in [0, 1) for this seed and purpose."""
    digest = hashlib.sha256(" ".join([str(seed), *what]).encode()).digest()
    return int.from_bytes(digest[:8], "little") / 2**64


def first(table, name):
    """The value of the first pattern that matches the name, or None."""
    return next((value for pattern, value in table.items() if re.match(pattern, name)), None)


def chance(full, arch, main, cover, small):
    """The share of samples that contain a test on an architecture, of which `main` counts as the main one."""
    if small and re.match(SMALL_SUITES, full):
        return SMALL_SHARE if full in cover and arch == MAIN else 0.0
    if arch in (first(ALSO, full) or []):
        return 1.0
    if arch not in (MAIN, main):
        return OTHERS_SHARE
    return 1.0 if full in cover else first(SHARES, full)


def choose(seed, only, arch, is_all, small=False):
    """The tests to run, the tests of the main architecture that the sample leaves out, and the skipped ones with their reasons."""
    chosen, left_out, skipped = [], [], []
    cover = set(COVER.read_text().splitlines())
    for suite, binary in binaries(only).items():
        for line in output(binary, "--list").splitlines():
            name = line.removesuffix(": test")
            full = f"{suite} {name}"
            # `cargo test` runs the tests of the CPU kernels.
            if name == line or only not in full or name.startswith("cpu_"):
                continue
            if reason := first(SKIPPED, full):
                skipped.append(f"{full}: {reason}")
                continue
            for one in first(NEEDS, full) or [MAIN, *OTHERS]:
                is_main = one in (MAIN, arch)
                share = 1.0 if is_all or (only and is_main) else chance(full, one, arch, cover, small)
                drawn = draw(seed, full, one) < share
                if arch in (None, one) and (drawn or is_main):
                    (chosen if drawn else left_out).append(Test(suite, binary, name, one))
    return chosen, left_out, skipped


def past_seconds(out):
    """The processor time of each test in earlier runs."""
    try:
        return json.loads((out / "seconds.json").read_text())
    except (OSError, ValueError):
        return {}


def seconds(test, past):
    """The expected processor time of a test."""
    return past.get(str(test)) or first(SECONDS, f"{test.suite} {test.test}") or 1


def launched_by(tests, logs):
    """The variants and the kernels that each test has launched."""
    kernels = {test: logged([test.log(logs)], "launched") for test in tests}
    return {test: without_kernels(kernels[test]) | without_defines(kernels[test]) for test in tests}


def cheapest(launches, past, chosen=()):
    """Few and cheap tests that together launch all that these launch; `chosen` are among them."""
    chosen = list(chosen)
    left = set().union(*launches.values()) - set().union(*(launches[test] for test in chosen))
    while left:
        best = max(launches, key=lambda test: (len(launches[test] & left) / (seconds(test, past) + 0.1), str(test)))
        chosen.append(best)
        left -= launches[best]
    return chosen


def for_races(tests, logs):
    """The cheapest tests that launch every variant and every kernel that an earlier run launched, and what only long tests launch."""
    past = past_seconds(logs)
    all_launches = launched_by(tests, logs)
    launches = {test: launched for test, launched in all_launches.items() if seconds(test, past) <= RACES_SECONDS}
    left_out = set().union(*all_launches.values()) - set().union(*launches.values())
    always = [test for test in launches if launches[test] and re.match(RACES_ALSO, f"{test.suite} {test.test}")]
    chosen = cheapest(launches, past, always)
    return chosen, [f"{what}: only tests of more than {RACES_SECONDS} s launch it" for what in sorted(left_out)]


def write_cover(tests, logs):
    """Writes the cheapest tests on the main architecture that launch every variant and every kernel."""
    launches = launched_by([test for test in tests if test.arch == MAIN], logs)
    names = sorted(f"{test.suite} {test.test}" for test in cheapest(launches, past_seconds(logs)))
    COVER.write_text("\n".join(names) + "\n")


def run(test, seed, out, settings=(), cache=None):
    """Runs one test. Returns whether it passed, its seconds of processor time and its output."""
    devices = first(DEVICES, f"{test.suite} {test.test}") or 1
    ptx = pathlib.Path(os.environ["XTRAIN_CUDA_LIBRARIES"]).parent / "ptx"
    # Stages have programs of their own, with other places.
    settings = [f"places={int('stage' not in test.test)}", *settings]
    settings = [f"arch={test.arch}", f"devices={devices}", f"seed={seed}", f"log={test.log(out)}", f"ptx={ptx}", *settings]
    environment = {"XTRAIN_TEST_SAMPLE": "1"} | os.environ | {
        "XTRAIN_EMULATOR": "\n".join(settings),
        "XTRAIN_TEST_DEVICE": "cuda",
        "XTRAIN_TEST_SEED": str(seed),
        "XTRAIN_CACHE": str(cache or os.environ["XTRAIN_CACHE"]),
    }
    with tempfile.TemporaryFile() as written:
        command = [test.binary, "--exact", test.test, "--test-threads=1", "--nocapture"]
        folder = pathlib.Path("crates") / test.suite.split("/")[0]
        started = subprocess.Popen(command, cwd=folder, env=environment, stdout=written, stderr=subprocess.STDOUT)
        timer = threading.Timer(TIMEOUT, started.kill)
        timer.start()
        _, status, used = os.wait4(started.pid, 0)
        timer.cancel()
        started.returncode = code = os.waitstatus_to_exitcode(status)
        written.seek(0)
        text = written.read().decode(errors="replace")
    if code == -signal.SIGKILL:
        text += f"\nkilled, probably by the limit of {TIMEOUT} s"
    counts = re.search(r"(\d+) passed; (\d+) failed; (\d+) ignored", text)
    has_run = counts is not None and counts.group(1) == "1"
    # A report fails the test even if no call returns its error, as in a destructor.
    report = re.search("emulated GPU: .*", text)
    if code == 0 and not has_run:
        text += "\nthe test did not run: it was ignored or does not exist"
    elif code == 0 and report:
        text += f"\nthe test passed, but the emulated GPU reported: {report.group(0)}"
    return code == 0 and has_run and not report, used.ru_utime + used.ru_stime, text


def processor_seconds():
    """Processor time of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Results:
    """Runs tests and collects the results."""

    def __init__(self, seed, out, jobs, settings):
        self.seed, self.out, self.jobs, self.settings = seed, out, jobs, settings
        self.seconds, self.failures, self.passed = {}, [], 0
        self.begun, self.used = time.monotonic(), processor_seconds()
        self.past = past_seconds(out)

    def run(self, tests):
        # The longest tests start first; the seed orders tests of unknown duration.
        tests = sorted(tests, key=lambda test: (-seconds(test, self.past), draw(self.seed, str(test))))
        with concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:
            futures = {pool.submit(run, test, self.seed, self.out, self.settings): test for test in tests}
            for done in concurrent.futures.as_completed(futures):
                test, (has_passed, took, text) = futures[done], done.result()
                self.passed += has_passed
                self.seconds[str(test)] = round(took, 2)
                if not has_passed:
                    self.failures.append(str(test))
                    print(f"FAILED {test} with XTRAIN_TEST_SEED={self.seed} ({took:.1f} s)\n{text}", flush=True)
                if len(self.seconds) % 100 == 0:
                    print(f"{len(self.seconds)} tests after {time.monotonic() - self.begun:.0f} s", flush=True)
        (self.out / "seconds.json").write_text(json.dumps(self.past | self.seconds, indent=0))

    def report(self):
        by_suite = collections.Counter()
        for name, took in self.seconds.items():
            by_suite[name.split()[0]] += took
        for suite, took in by_suite.items():
            print(f"{suite}: {took:.0f} s")
        for name, took in sorted(self.seconds.items(), key=lambda item: -item[1])[:8]:
            print(f"  {name}: {took:.1f} s")
        launched, idle = launched_kernels(list(self.out.glob("kernels/*")))
        print(f"{len(launched)} kernels ran, {len(idle)} were loaded and did not")
        print(f"{time.monotonic() - self.begun:.0f} s, with {processor_seconds() - self.used:.0f} s of processor time")


@functools.cache
def parsed(log):
    """What follows each first word of the lines of a log; of a test that has ended."""
    found = {}
    for line in log.read_text().splitlines() if log.exists() else []:
        word, rest = line.split(" ", 1)
        found.setdefault(word, set()).add(rest)
    return found


def logged(logs, what):
    """What follows the word `what` in lines of these logs."""
    return set().union(*(parsed(log).get(what, ()) for log in logs))


def launched_kernels(logs):
    """The launched kernels, and the kernels that were only loaded, as `source defines kernel`."""
    launched = logged(logs, "launched")
    return launched, logged(logs, "loaded") - launched


def unlisted_forms(logs):
    """The instruction forms of the loaded kernels that the emulator's tests do not execute."""
    listed = pathlib.Path("crates/emulator/tests/forms.txt").read_text().splitlines()
    return {form for forms in logged(logs, "forms") for form in forms.split()} - set(listed)


def without_kernels(kernels):
    """The variants of these kernels: `source defines`."""
    return {kernel.rsplit(" ", 1)[0].rstrip() for kernel in kernels}


def without_defines(kernels):
    """The same kernels without their defines: `source kernel`."""
    return {f"{words[0]} {words[-1]}" for words in map(str.split, kernels)}


def variants():
    """All variants that the kernel test compiles for the main architecture, as `source defines`."""
    built = output("cargo", "test", "--workspace", "--no-run", "--test", "kernels", "--message-format=json")
    path = next(m["executable"] for m in map(json.loads, built.splitlines()) if m.get("executable"))
    names = [line.rsplit(": ", 1)[0] for line in output(path, "--list").splitlines()]
    names = [re.sub(f" {MAIN} ?", " ", name).rstrip() for name in names if f" {MAIN}" in name]
    return set(names)


def missing_kernels(tests, out, all_variants):
    """The variants that no test launches, and the kernels that are loaded and that no test launches."""
    # Tests that the seed adds on other architectures do not count.
    always = [test.log(out) for test in tests if test.arch in (MAIN, *(first(ALSO, f"{test.suite} {test.test}") or []))]
    launched, idle = launched_kernels(always)
    # A kernel function may be idle in some variants, but not in all.
    functions = without_defines(idle) - without_defines(launched)
    return functions | all_variants - without_kernels(launched)


def complete(results, chosen, left_out, all_variants):
    """Runs tests that the sample has left out until each variant has been launched: first those of ops that launch the same sources, or of
    which nothing has run, then the others."""
    group = lambda test: re.sub("_[0-9].*", "", test.test)
    left_out = sorted(left_out, key=lambda test: draw(results.seed, str(test), "left out"))
    while left_out and (missing := missing_kernels(chosen, results.out, all_variants)):
        sources = {kernel.split()[0] for kernel in missing}
        launches = lambda test: sources & {kernel.split()[0] for kernel in logged([test.log(results.out)], "launched")}
        near = {group(test) for test in chosen if launches(test)} | {group(test) for test in left_out} - {group(test) for test in chosen}
        more = [test for test in left_out if test.suite == "ops/card" and group(test) in near] or left_out
        more = more[:4 * results.jobs]
        results.run(more)
        chosen += more
        left_out = [test for test in left_out if test not in more]
    return missing_kernels(chosen, results.out, all_variants)


def main():
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--all", action="store_true", help="run every test on every architecture")
    arguments.add_argument("--only", default="", help="run all tests whose suite and name contain this text")
    arguments.add_argument("--small", action="store_true", help="run a small part of the suites of kernels and of the engine")
    arguments.add_argument("--arch", help="run on this architecture only")
    arguments.add_argument("--races", action="store_true", help="find data races; without --only in the cheapest tests that launch every variant")
    arguments.add_argument("--cover", action="store_true", help="afterwards, write the cheapest tests that launch every variant to cover.txt")
    arguments.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments.add_argument("--out", type=pathlib.Path, required=True)
    arguments = arguments.parse_args()
    if arguments.cover and (arguments.only or arguments.arch or arguments.races):
        sys.exit("--cover needs the tests of all suites: leave out --only, --arch and --races")
    if arguments.small and (arguments.all or arguments.only or arguments.arch or arguments.cover):
        sys.exit("--small is a sample of its own: leave out --all, --only, --arch and --cover")
    if arguments.all:
        os.environ["XTRAIN_TEST_SAMPLE"] = "0"
    seed = seed_of_sample()
    print(f"emulated GPU tests with XTRAIN_TEST_SEED={seed}", flush=True)

    out, settings = (arguments.out / "races", ["races=1"]) if arguments.races else (arguments.out, [])
    (out / "kernels").mkdir(parents=True, exist_ok=True)
    for log in (out / "kernels").iterdir():
        log.unlink()
    # Keeps compiled kernels. Drops recorded choices of algorithms, so that the tests try every candidate.
    for kept in pathlib.Path(os.environ["XTRAIN_CACHE"]).glob("kernels/*"):
        if kept.suffix != ".cubin":
            kept.unlink()

    chosen, left_out, skipped = choose(seed, arguments.only, arguments.arch, arguments.all, arguments.small)
    if not chosen:
        sys.exit(f"no test has `{arguments.only}` in its suite and name")
    if arguments.races and not arguments.only:
        chosen, skipped = for_races(chosen + left_out, arguments.out)
        if not chosen:
            sys.exit("`run.sh races` chooses among the tests of a run before it: `run.sh`")
    results = Results(seed, out, arguments.jobs, settings)
    results.run(chosen)
    if not (arguments.only or arguments.races or arguments.small) and arguments.arch is None:
        missing = complete(results, chosen, left_out, variants())
        results.failures += [f"no test launches {what}" for what in sorted(missing)]
        if arguments.cover and not results.failures:
            write_cover(chosen, out)
    forms = sorted(unlisted_forms([test.log(out) for test in chosen]))
    results.failures += [f"{form} is not in crates/emulator/tests/forms.txt, whose forms the emulator's tests execute" for form in forms]
    for name in skipped:
        print(f"skipped {name}")
    results.report()
    for failure in results.failures:
        print(f"FAILED {failure}")
    print(f"{results.passed} passed, {len(results.failures)} failed, {len(skipped)} skipped")
    sys.exit(1 if results.failures else 0)


if __name__ == "__main__":
    main()
