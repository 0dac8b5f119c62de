"""The secret of a run, while ranks are killed as they join: in containers of their own, where process ids repeat.

Only the user can read its file, at every moment; no line, argument or other file shows it; and no leftover of a killed rank keeps the
next start from joining.
"""

import shutil
import stat
import subprocess
import threading
import time

import launched
import place
import ranks
from program import Failure

SHORT = 2


def prepare(folder, program):
    place.texts(folder)
    program.run(folder, [*launched.COMMAND, "--out", "alone"]).succeeds()
    own = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
    return own if shutil.which("unshare") and subprocess.run([*own, "true"], capture_output=True).returncode == 0 else []


class Watch(threading.Thread):
    """Looks at the secret's file again and again."""

    def __init__(self, folder):
        super().__init__(daemon=True)
        self.folder, self.seen, self.wrong, self.ends = folder, set(), None, False

    def run(self):
        while not self.ends:
            for path in self.folder.glob(".run.secret*"):
                try:
                    mode = stat.S_IMODE(path.stat().st_mode)
                    content = path.read_text()
                except OSError:
                    continue
                if mode & 0o077:
                    self.wrong = f"{path.name} has mode {mode:o}"
                if len(content) >= 32:
                    self.seen.add(content)
            time.sleep(0.0005)


def trial(container, base, folder, program, dice, count):
    place.texts(folder)
    # Leftovers of processes with the numbers that ranks have in containers.
    for number in dice.sample(range(1, 6), 2):
        (folder / f".run.secret.tmp-{number}").write_text("half")
        (folder / f".run.secret.tmp-{number}").chmod(0o600)
    watch = Watch(folder)
    watch.start()
    words = [*launched.COMMAND, "--out", "run"]
    for life in range(dice.randint(2, 5)):
        port = launched.free_port()
        soon = [*words, "--set", "parallel.start_timeout=6s"]
        started = [launched.Rank(program, folder, soon, launched.torchrun(rank, 2, port), container) for rank in range(2)]
        time.sleep(dice.uniform(0, 0.6))
        for rank in dice.sample(started, dice.choice([1, 2])):
            rank.kill()
        launched.all_end(started, 100, codes=(-9, 0, 1, 2, 137))
        count["lives"] += 1
    port = launched.free_port()
    launched.all_end([launched.Rank(program, folder, words, launched.torchrun(rank, 2, port), container) for rank in range(2)], 100, codes=(0,))
    watch.ends = True
    watch.join()
    launched.none_is_left(folder, ranks.BAR)
    left = [path.name for path in folder.glob(".run.secret*")]
    if watch.wrong or left:
        raise Failure(watch.wrong or f"left behind: {left}")
    for path in folder.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        if shown := [secret for secret in watch.seen if secret.encode() in content]:
            raise Failure(f"{path.relative_to(folder)} shows the secret {shown}")
    launched.same_as_alone(base, folder, "a run whose ranks were killed as they joined")
    return "in containers" if container else "skipped: no containers"
