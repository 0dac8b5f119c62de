"""Ranks that are started by hand, with the variables of a launcher, and the judgement of their ends."""

import os
import signal
import socket
import subprocess
import time

import place
import ranks
from program import Failure

# A secret for ranks that share no file of it.
SECRET = "0123456789abcdef0123456789abcdef"
# Settings of a run whose bits do not depend on the number of ranks.
SETS = [word for setting in [*ranks.SHARED, "train.steps=12", "parallel.start_timeout=60s"] for word in ("--set", setting)]
COMMAND = ["train", "run.toml", "--resume", "--threads", "1", "--quiet", *SETS]


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def torchrun(rank, size, port, address="127.0.0.1"):
    """The variables that torchrun sets on one node."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    return {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": address}


class Rank:
    """A started process of a run."""

    def __init__(self, program, folder, words, variables, before=()):
        """`before` are words of a command that starts it."""
        Rank.count = getattr(Rank, "count", 0) + 1
        self.said_in = folder / f"said-{Rank.count}"
        self.words = words
        self.process = subprocess.Popen(
            [*before, program.path, *words],
            cwd=folder,
            env={"PATH": os.environ["PATH"], "XTRAIN_CACHE": str(folder / "kernels"), **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self.said_in.open("w"),
            start_new_session=True,
        )

    def said(self):
        return self.said_in.read_text(errors="replace")

    def ends(self, limit, codes=(0, 1, 2)):
        """Its exit code, which must come within `limit` seconds and be one of `codes`, with an error line unless it is 0."""
        try:
            code = self.process.wait(limit)
        except subprocess.TimeoutExpired:
            self.kill()
            raise Failure(f"still runs after {limit} s: {self.said()[-2000:]}") from None
        text = self.said()
        errors = [line for line in text.splitlines() if "error: " in line]
        if code not in codes or "panicked" in text or "fault of xtrain" in text or (code in (1, 2) and not errors):
            raise Failure(f"ends badly: exit code {code} of {' '.join(self.words)}: {text[-2000:]}")
        return code

    def kill(self):
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()


def all_end(started, limit, codes=(0, 1, 2)):
    """The exit codes of all, which end within `limit` seconds from now."""
    begun = time.monotonic()
    try:
        return [rank.ends(max(0.1, limit - (time.monotonic() - begun)), codes) for rank in started]
    finally:
        for rank in started:
            rank.kill()


def same_as_alone(base, folder, what):
    """Fails unless the run has the bits of the one of one process, and has left nothing behind."""
    place.same(ranks.lasting(base / "alone"), ranks.lasting(folder / "run"), what)
    place.check_no_leftovers(folder)


def none_is_left(folder, limit):
    """Fails unless all processes that work in the folder end within `limit` seconds."""
    begun = time.monotonic()
    while left := ranks.running(folder):
        if time.monotonic() - begun > limit:
            for process in left:
                os.kill(process, signal.SIGKILL)
            raise Failure(f"{left} still run after {limit} s")
        time.sleep(0.05)
