"""Shows that two commits compute the same bits. Run it through `run.sh`; README.md says what is compared."""

import argparse
import collections
import contextlib
import dataclasses
import fcntl
import fnmatch
import functools
import os
import pathlib
import re
import subprocess
import sys
import typing

import ptx
import record

HERE = pathlib.Path(__file__).parent
PARTS = ["runs", "plans", "kernels"]
# Compiles of a kernel whose PTX differs, on each side, before the difference is reported.
MOST_COMPILES = 8
# Renamed ops in `plan --dump`: old name, new name. Several old names may have the same new name.
OP_NAMES = {}
# Each line: a pattern of differences, a tab, the reason why they are right.
ACCEPTED = HERE / "accepted.tsv"
# Differences of a kind that are printed.
MOST = 8


@dataclasses.dataclass(frozen=True)
class Difference:
    """Something that is not the same. Patterns in accepted.tsv match `name`. A slow detail is a function."""

    name: str
    detail: str | typing.Callable[[], str]


def compared_runs(before, after, _):
    for name in before.keys() - after.keys():
        yield Difference(f"runs {name}", "is missing afterwards")
    for name in (name for name in before if name in after):
        pairs = zip(before[name]["metrics"], after[name]["metrics"])
        lines = [(b, a) for b, a in pairs if b != a]
        if lines:
            old, new = lines[0]
            keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
            words = ", ".join(f"{key} {old.get(key)} -> {new.get(key)}" for key in keys)
            yield Difference(f"runs {name}: metrics", f"step {old.get('step')}: {words}; {len(lines)} lines differ")
        elif len(before[name]["metrics"]) != len(after[name]["metrics"]):
            yield Difference(f"runs {name}: metrics", "one has more lines")
        old, new = before[name]["tensors"], after[name]["tensors"]
        tensors = [tensor for tensor in {**old, **new} if old.get(tensor) != new.get(tensor)]
        if tensors:
            yield Difference(f"runs {name}: checkpoint", f"{tensors[0]}, and {len(tensors) - 1} more tensors of {len(old)}")


def numbers(line):
    """The numbers of a line of a plan, and whether the step fits."""
    return tuple(re.findall(r"\d[\d,.]*(?:e[+-]?\d+)?|\b(?:yes|no):", line))


def compared_plans(before, after, notes):
    for name in before.keys() - after.keys():
        yield Difference(f"plans {name}", "is missing afterwards")
    added = after.keys() - before.keys()
    if added:
        notes.append(f"plans: {len(added)} plans are new, such as {min(added)}")
    words = {}
    for name in (name for name in before if name in after):
        old, new = before[name], after[name]
        gone = collections.Counter(old["plan"]) - collections.Counter(new["plan"])
        come = collections.Counter(new["plan"]) - collections.Counter(old["plan"])
        come = list(come.elements())
        for line in gone.elements():
            same = next((other for other in come if numbers(other) == numbers(line)), None)
            if same is not None:
                come.remove(same)
            if same is None and numbers(line):
                other = next((other for other in come if other.split("  ")[0] == line.split("  ")[0]), "nothing")
                if other in come:
                    come.remove(other)
                yield Difference(f"plans {name}: plan", f"{squeezed(line)} -> {squeezed(other)}")
            elif same is not None:
                words.setdefault(line.split("  ")[0].strip(), same.split("  ")[0].strip())
        for line in come:
            if numbers(line):
                yield Difference(f"plans {name}: plan", f"nothing -> {squeezed(line)}")
        yield from compared_programs(name, old["program"], new["program"])
    if words:
        notes.append(f"plans: {len(words)} lines have other words and the same numbers:")
        notes.extend(f"  {old} -> {new}" for old, new in words.items())


def squeezed(line):
    return " ".join(line.split())


def compared_programs(name, old, new):
    if isinstance(old, str) or isinstance(new, str):
        if old != new and numbers(str(old)) != numbers(str(new)):
            yield Difference(f"plans {name}: program", f"{old} -> {new}")
        return
    for kind in ["ops", "launches", "values"]:
        counts = [renamed(program[kind]) if kind == "ops" else program[kind] for program in (old, new)]
        keys = [key for key in {**counts[0], **counts[1]} if counts[0].get(key) != counts[1].get(key)]
        if keys:
            more = f"; and {len(keys) - 1} more" if len(keys) > 1 else ""
            detail = f"{keys[0]}: {counts[0].get(keys[0], 0)} -> {counts[1].get(keys[0], 0)}{more}"
            yield Difference(f"plans {name}: {kind}", detail)


def renamed(counts):
    result = collections.Counter()
    for op, count in counts.items():
        result[OP_NAMES.get(op, op)] += count
    return result


def by_text(recording):
    """The kernels by what is compared: architecture, options and hash of the text."""
    kernels = collections.defaultdict(list)
    for entry in recording:
        for name, text in entry["kernels"].items():
            kernels[entry["arch"], *entry["options"], text].append((entry, name))
    return kernels


def compared_kernels(before, after, notes, folder, library):
    old, new = by_text(before), by_text(after)
    if len(before) != len(after):
        notes.append(f"kernels: {len(before)} compiles before, {len(after)} after")
    unmatched = {(e["arch"], e["variant"], n): (e, n) for key in new.keys() - old.keys() for e, n in new[key]}
    # A kernel of another variant where the variants' names have changed.
    loosely = {(arch, variant.split()[0], n): found for (arch, variant, n), found in unmatched.items()}
    matched, again = set(), Again(library, folder / "ptx")
    for key in (key for key in old if key not in new):
        entry, name = old[key][0]
        other = unmatched.get((entry["arch"], entry["variant"], name))
        other = other or loosely.get((entry["arch"], entry["variant"].split()[0], name))
        more = f" (and in {len(old[key]) - 1} more variants)" if len(old[key]) > 1 else ""
        if other:
            matched.add((other[0]["arch"], other[0]["kernels"][other[1]]))
            if entry["options"] == other[0]["options"] and again.are_equal((entry, name), other):
                continue
            detail = functools.partial(first_line, folder, (entry, name), other)
        else:
            detail = "its PTX is in no kernel afterwards"
        yield Difference(f"kernels {entry['variant']} {entry['arch']}: {name}{more}", detail)
    for key in (key for key in new if key not in old):
        entry, name = new[key][0]
        if (entry["arch"], entry["kernels"][name]) not in matched:
            yield Difference(f"kernels {entry['variant']} {entry['arch']}: {name}", "is new")
    if again.equal:
        notes.append(f"kernels: {again.equal} are equal after more compiles of the same text; NVRTC's output varies")
    names = {}
    for key in (key for key in old if key in new):
        old_names, new_names = ({name for _, name in kernels[key]} for kernels in (old, new))
        if not old_names & new_names:
            names[min(old_names), min(new_names)] = None
    if names:
        notes.append(f"kernels: {len(names)} have other names and the same PTX:")
        notes.extend(f"  {old} -> {new}" for old, new in names)


class Again:
    """Further compiles of recorded kernels, for those whose PTX NVRTC varies from one process to the next."""

    def __init__(self, library, folder):
        self.library, self.folder = library, folder
        self.outputs = collections.defaultdict(list)
        self.equal = 0

    def are_equal(self, old, new):
        """Compiles both again, until an output of one side is an output of the other."""
        for times in range(MOST_COMPILES + 1):
            texts = [self.texts(*kernel, times) for kernel in (old, new)]
            if texts[0] & texts[1]:
                self.equal += 1
                return True
        return False

    def texts(self, entry, name, times):
        """The texts of a kernel in the recording and in this many further compiles."""
        key = entry["ptx"]
        while len(self.outputs[key]) < times:
            self.outputs[key].append(ptx.compiled_again(self.library, self.folder, key))
        return {ptx.text(self.folder, entry, name)} | {output[name] for output in self.outputs[key][:times]}


def first_line(folder, old, new):
    """The first line that differs between the texts of two kernels."""
    texts = [ptx.text(folder / "ptx", *kernel).splitlines() for kernel in (old, new)]
    number = next((n for n, (a, b) in enumerate(zip(*texts)) if a != b), min(map(len, texts)))
    a, b = ((text[number : number + 1] or ["nothing"])[0] for text in texts)
    if a == b == "nothing":
        return f"options: {old[0]['options']} -> {new[0]['options']}"
    return f"line {number} of {len(texts[0])}: {a[:200]} -> {b[:200]}"


def accepted():
    """The patterns of accepted differences and the reasons."""
    lines = ACCEPTED.read_text().splitlines() if ACCEPTED.exists() else []
    return [tuple(line.split("\t", 1)) for line in lines if line and not line.startswith("#")]


def reported(part, differences, notes, exceptions):
    """Prints the differences of one part, and returns the number of those that are not accepted."""
    groups = collections.defaultdict(list)
    failed = 0
    for difference in differences:
        reason = next((reason for pattern, reason in exceptions if fnmatch.fnmatchcase(difference.name, pattern)), None)
        failed += reason is None
        kind = difference.name.rsplit(": ", 1)[-1] if part != "kernels" else difference.name.split()[1]
        groups[kind, reason].append(difference)
    for (kind, reason), group in groups.items():
        print(f"{part}, {kind}: {len(group)} differ" + (f", which is accepted: {reason}" if reason else ""))
        for difference in group[:MOST]:
            detail = difference.detail() if callable(difference.detail) else difference.detail
            print(f"  {difference.name.split(' ', 1)[1]}\n    {detail}")
        if len(group) > MOST:
            print(f"  and {len(group) - MOST} more")
    for note in notes:
        print(note)
    return failed


def commit(name):
    command = ["git", "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{name} is no commit")
    return done.stdout.strip()


@contextlib.contextmanager
def locked(folder):
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main():
    parser = argparse.ArgumentParser(description="Compares what two commits compute, bit by bit.")
    parser.add_argument("before", type=commit, help="a commit")
    parser.add_argument("after", type=commit, help="a commit")
    parser.add_argument("--only", choices=PARTS, action="append", help="compare this part only; may be repeated")
    parser.add_argument("--folder", type=pathlib.Path, help="the recordings; $CARGO_TARGET_DIR/same_bits by default")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs, plans and compiles at a time")
    arguments = parser.parse_args()
    target = os.environ.get("CARGO_TARGET_DIR", HERE / "../../target")
    folder = (arguments.folder or pathlib.Path(target) / "same_bits").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    library = os.environ["XTRAIN_EMULATOR_NVRTC"]
    recorder = record.Recorder(folder, arguments.jobs)
    compare = {"runs": compared_runs, "plans": compared_plans}
    compare["kernels"] = lambda *pair: compared_kernels(*pair, folder, library)
    parts = arguments.only or PARTS
    with locked(folder):
        before, after = (recorder.recording(c, parts, library) for c in (arguments.before, arguments.after))
    failed = 0
    for part in parts:
        notes = []
        count = reported(part, compare[part](before[part], after[part], notes), notes, accepted())
        failed += count
        what = f"{count} differences" if count else "no difference"
        print(f"{part}: {len(before[part])} compared, {what}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
