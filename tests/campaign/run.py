#!/usr/bin/env python3
"""Attacks the command line with kills, damaged files, random configurations and faults of the environment.

Every try has its own random numbers, from the seed, the campaign and its number; README.md says what must hold.
"""

import argparse
import collections
import concurrent.futures
import os
import pathlib
import random
import shutil
import sys
import tempfile
import time
import traceback

import chats
import configurations
import environment
import flips
import kills
import launchers
import limits
import log_commands
import mutations
import names
import ranks
import secrets_of_runs
from program import Failure, Program

CAMPAIGNS = {
    "kills": kills,
    "mutations": mutations,
    "chats": chats,
    "configurations": configurations,
    "environment": environment,
    "ranks": ranks,
    "limits": limits,
    "launchers": launchers,
    "secrets": secrets_of_runs,
    "flips": flips,
    "log_commands": log_commands,
    "names": names,
}


class Campaign:
    """One campaign: its prepared folder, and the counts of its tries."""

    def __init__(self, name, arguments, program, work):
        self.name, self.module, self.arguments, self.program = name, CAMPAIGNS[name], arguments, program
        self.work, self.count, self.failures = work / name, collections.Counter(), 0

    def run(self):
        base = self.work / "base"
        prepared = self.module.prepare(base, self.program)
        first, tries = self.arguments.first, self.arguments.tries or self.module.SHORT
        numbers = [self.arguments.trial] if self.arguments.trial is not None else range(first, first + tries)
        begun, done = time.monotonic(), 0
        with concurrent.futures.ThreadPoolExecutor(self.arguments.jobs) as pool:
            for was_tried in pool.map(lambda n: self.is_in_time() and self.one(n, prepared, base), numbers):
                done += was_tried
                if was_tried and done % 500 == 0:
                    print(f"{self.name}: {done} tries after {time.monotonic() - begun:.0f} s, {self.failures} failed", flush=True)
        shutil.rmtree(base)
        counts = ", ".join(f"{count} {what}" for what, count in sorted(self.count.items()))
        ended = "" if done == len(numbers) else f", the time is over: go on with --from {numbers[done]}"
        print(f"{self.name}: {done} tries in {time.monotonic() - begun:.0f} s, {self.failures} failed: {counts}{ended}", flush=True)

    def is_in_time(self):
        return self.arguments.seconds is None or time.monotonic() < self.arguments.begun + self.arguments.seconds

    def one(self, number, prepared, base):
        """Makes one try, counts how it ended, and returns True."""
        folder = self.work / str(number)
        folder.mkdir()
        dice = random.Random(f"{self.arguments.seed} {self.name} {number}")
        try:
            self.count[self.module.trial(prepared, base, folder, self.program, dice, self.count)] += 1
        except Exception as error:
            self.failures += 1
            text = str(error) if isinstance(error, Failure) else traceback.format_exc()
            again = f"tests/campaign/run.py --seed {self.arguments.seed} --only {self.name} --trial {number}"
            kept = f"; its folder is kept: {folder}" if self.arguments.work else ""
            print(f"FAILED {self.name} {number}: {text}\n  to try it again: {again}{kept}", flush=True)
            if self.arguments.work:
                return True
        shutil.rmtree(folder, ignore_errors=True)
        return True


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="the random numbers; by default others each time")
    parser.add_argument("--tries", type=int, help="the number of tries of each campaign; by default a minute's")
    parser.add_argument("--from", type=int, default=0, dest="first", metavar="N", help="the number of the first try, to go on with a seed")
    parser.add_argument("--seconds", type=float, help="begin no try after so long")
    parser.add_argument("--only", choices=CAMPAIGNS, help="run this campaign only")
    parser.add_argument("--trial", type=int, help="run this try only")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="tries at a time")
    parser.add_argument("--work", type=pathlib.Path, help="work in this folder, and keep the folders of failed tries")
    built = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", "target")) / "debug/xtrain"
    parser.add_argument("--xtrain", type=pathlib.Path, default=os.environ.get("XTRAIN", built), help="the binary")
    arguments = parser.parse_args()
    arguments.begun = time.monotonic()
    if arguments.seed is None:
        arguments.seed = random.SystemRandom().randrange(1 << 32)
    if not pathlib.Path(arguments.xtrain).exists():
        sys.exit(f"{arguments.xtrain}: no such program; build it with `cargo build`, or name it with --xtrain")
    print(f"campaign with --seed {arguments.seed}", flush=True)
    failures = 0
    with tempfile.TemporaryDirectory() as temporary:
        work = (arguments.work or pathlib.Path(temporary)).absolute()
        for name in [arguments.only] if arguments.only else CAMPAIGNS:
            (work / name).mkdir(parents=True)
            campaign = Campaign(name, arguments, Program(arguments.xtrain), work)
            campaign.run()
            failures += campaign.failures
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
