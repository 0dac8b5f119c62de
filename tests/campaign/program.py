"""The program under attack: runs it under limits, and judges how it ends."""

import dataclasses
import os
import pathlib
import re
import signal
import subprocess
import threading
import time

# Seconds after which a command hangs; none of the campaigns' commands takes nearly as long.
HANG = 120
# Bytes of memory that no command of the campaigns needs.
LARGE = 1 << 30
# Addresses that a command may use, so that a configuration of a large model is refused and the machine survives it.
ADDRESSES = 4 << 30
STRANGE = re.compile(r"panicked|RUST_BACKTRACE|internal error|fault of xtrain|Os \{|Some\(|Err\(|memory allocation of|\x1b")


class Failure(Exception):
    """A promise that was broken."""


@dataclasses.dataclass
class Ended:
    """A command that has ended."""

    command: str
    # Exit code, or minus the signal.
    code: int
    out: str
    err: str
    seconds: float
    # Peak of resident memory.
    bytes: int
    # True if the campaign killed it.
    is_killed: bool
    hangs: bool

    def lines(self):
        """Lines of standard error that are not of the log."""
        return [line for line in self.err.splitlines() if not re.match(r"\s*(WARN|INFO) ", line)]

    def judge(self):
        """Returns whether it succeeded.

        Fails unless it succeeded, or refused with exit code 2 and a line that begins with `error: `. Several lines are for a run file
        only, which may have several errors.
        """
        shown = f"`{self.command}`: exit code {self.code} after {self.seconds:.1f} s, {self.bytes >> 20} MiB\n{self.err[-4000:]}"
        if self.hangs:
            raise Failure(f"hangs: {shown}")
        if self.code not in (0, 2):
            raise Failure(f"ends badly: {shown}")
        if strange := STRANGE.search(self.err):
            raise Failure(f"says {strange.group()!r}: {shown}")
        if self.bytes > LARGE:
            raise Failure(f"takes much memory: {shown}")
        lines = self.lines()
        if self.code == 2:
            of_run_file = all(re.match(r"(error: )?\S*\.toml(:\d+)?: ", line) for line in lines)
            if not lines or not lines[0].startswith("error: ") or not (len(lines) == 1 or of_run_file):
                raise Failure(f"no readable error: {shown}")
        return self.code == 0

    def succeeds(self):
        """Itself, which must have succeeded."""
        if not self.judge():
            raise Failure(f"refused: `{self.command}`: {self.err[-2000:]}")
        return self

    def refuses(self):
        """Itself, which must have refused."""
        if self.judge():
            raise Failure(f"accepted: `{self.command}`: {self.out[-1000:]}{self.err[-2000:]}")
        return self


class Program:
    """xtrain, at a path."""

    def __init__(self, path):
        self.path = pathlib.Path(path).absolute()

    def run(self, folder, command, kill_after=None, limits="", env=(), **options):
        """Runs a command (words, or a text that spaces separate) in a folder, to its end or for `kill_after` seconds.

        `limits` are arguments of the shell's `ulimit`. Other options are those of `subprocess.Popen`.
        """
        words = command.split() if isinstance(command, str) else [str(word) for word in command]
        line = [str(self.path), *words]
        limits = f"-v {ADDRESSES >> 10} {limits}" if "-v" not in limits else limits
        settings = "; ".join(f"ulimit {one}" for one in re.findall(r"-\w \d+", limits))
        # No core files. A command that prints nothing but errors still has a place for them.
        line = ["/bin/sh", "-c", f'ulimit -c 0; {settings}; exec "$0" "$@"', *line]
        variables = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
        variables |= {"XTRAIN_CACHE": str(folder / "kernels"), **dict(env)}
        # Pipes, as a limit on file sizes applies to files.
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        begun = time.monotonic()
        process = subprocess.Popen(line, cwd=folder, env=variables, start_new_session=True, **options)
        timer = threading.Timer(HANG if kill_after is None else kill_after, kill, [process.pid])
        timer.start()
        out, err = Reader(process.stdout), Reader(process.stderr)
        _, status, usage = os.wait4(process.pid, 0)
        timer.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        is_killed = process.returncode == -signal.SIGKILL
        return Ended(
            command=" ".join(words),
            code=process.returncode,
            out=out.text(),
            err=err.text(),
            seconds=time.monotonic() - begun,
            bytes=usage.ru_maxrss << 10,
            is_killed=is_killed and kill_after is not None,
            hangs=is_killed and kill_after is None,
        )


class Reader(threading.Thread):
    """Reads a pipe to its end, if there is one."""

    def __init__(self, pipe):
        super().__init__()
        self.pipe, self.content = pipe, b""
        self.start()

    def run(self):
        if self.pipe is not None:
            with self.pipe:
                self.content = self.pipe.read()

    def text(self):
        self.join()
        return self.content.decode(errors="replace")


def kill(pid):
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
