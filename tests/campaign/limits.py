"""Ranks of which one or all have a limit on open files or memory.

All end soon, or the run has the bits of one without limits. If all have too few open files, a line names the limit. Without limits the run
then goes on.
"""

import launched
import place
import ranks
from program import Failure

SHORT = 3


def prepare(folder, program):
    place.texts(folder)
    program.run(folder, [*launched.COMMAND, "--out", "alone"]).succeeds()


def trial(prepared, base, folder, program, dice, count):
    place.texts(folder)
    size = dice.choice([2, 2, 4, 8])
    words = [*launched.COMMAND, "--out", "run"]
    what = dice.choice(["open files", "open files", "memory"])
    limit = {"open files": f"-n {dice.randint(6, 70)}", "memory": f"-v {int(45_000 * 5 ** dice.random())}"}[what]
    if dice.random() < 0.5:
        # All ranks, and the process that starts them.
        ended = program.run(folder, [*words, "--ranks", str(size)], limits=limit)
        # Below some 40 MB the system's loader cannot start the program; with ranks, any of them may be the one.
        is_loader = ended.code == 127 or "loading shared libraries" in ended.err
        if ended.code not in (0, 1, 2) and not is_loader or "panicked" in ended.err or "fault of xtrain" in ended.err or ended.hangs:
            raise Failure(f"{size} ranks under {limit}: exit code {ended.code}: {ended.err[-2000:]}")
        said, code, seconds = ended.err, ended.code, ended.seconds
        if what == "open files" and code == 2 and "open files" not in said:
            raise Failure(f"{size} ranks under {limit}: the limit is not named: {said[-2000:]}")
        if what == "open files" and code and seconds > ranks.BAR:
            raise Failure(f"{size} ranks under {limit}: ended after {seconds:.0f} s: {said[-2000:]}")
    else:
        one_of(program, folder, [*words, "--set", "parallel.start_timeout=12s"], limit, dice)
    launched.none_is_left(folder, ranks.BAR)
    place.check_whole(folder)
    program.run(folder, [*words, "--ranks", "2"]).succeeds()
    launched.same_as_alone(base, folder, f"a run after {limit}")
    return what


def one_of(program, folder, words, limit, dice):
    """One rank of two has a limit. The other learns why, or that it did not come."""
    port, limited = launched.free_port(), dice.randrange(2)
    started = []
    for rank in range(2):
        before = ["sh", "-c", f'ulimit {limit}; exec "$0" "$@"'] if rank == limited else []
        started.append(launched.Rank(program, folder, words, launched.torchrun(rank, 2, port), before))
    launched.all_end(started, 60, codes=(0, 1, 2, 127))
