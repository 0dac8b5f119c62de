"""A bit that flips in the control connection between two ranks, at a random moment.

Both ranks end soon, each with an error line, or the run has the bits of one process; it then goes on.
"""

import random
import select
import socket
import threading
import time

import launched
import place
import ranks
from program import Failure

SHORT = 3
# Bytes that pass in one direction before a short run ends, about.
BYTES = 30_000


class Proxy(threading.Thread):
    """Passes connections on to a port, and flips one bit."""

    def __init__(self, to, dice):
        super().__init__(daemon=True)
        self.to, self.dice = to, dice
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.at, self.side = int(BYTES ** dice.random()), dice.randrange(2)
        self.passed, self.flipped = [0, 0], None

    def run(self):
        while True:
            try:
                caller, _ = self.listener.accept()
            except OSError:
                return
            try:
                root = socket.create_connection(("127.0.0.1", self.to))
            except OSError:
                caller.close()
                continue
            threading.Thread(target=self.pass_on, args=(caller, root), daemon=True).start()

    def pass_on(self, caller, root):
        sockets = [caller, root]
        try:
            while True:
                for ready in select.select(sockets, [], [])[0]:
                    side = sockets.index(ready)
                    data = bytearray(ready.recv(65536))
                    if not data:
                        return
                    at = self.at - self.passed[side]
                    if side == self.side and 0 <= at < len(data):
                        data[at] ^= 1 << self.dice.randrange(8)
                        self.flipped = time.monotonic()
                    self.passed[side] += len(data)
                    sockets[1 - side].sendall(data)
        except OSError:
            pass
        finally:
            for one in sockets:
                one.close()


def prepare(folder, program):
    place.texts(folder)
    program.run(folder, [*launched.COMMAND, "--out", "alone"]).succeeds()


def trial(prepared, base, folder, program, dice, count):
    place.texts(folder)
    port = launched.free_port()
    proxy = Proxy(port, random.Random(dice.random()))
    proxy.start()
    words = [*launched.COMMAND, "--out", "run", "--set", "parallel.start_timeout=30s"]
    secret = {"XTRAIN_SECRET": launched.SECRET}
    started = [
        launched.Rank(program, folder, words, launched.torchrun(0, 2, port) | secret),
        launched.Rank(program, folder, words, launched.torchrun(1, 2, proxy.port) | secret),
    ]
    codes = launched.all_end(started, 100)
    proxy.listener.close()
    ended = time.monotonic()
    where = f"bit at byte {proxy.at} of side {proxy.side}"
    # A rank that is refused as it joins tries again.
    if proxy.flipped and ended - proxy.flipped > ranks.BAR and any(codes):
        raise Failure(f"{where}: ended {ended - proxy.flipped:.1f} s after it: {[rank.said()[-500:] for rank in started]}")
    if proxy.flipped and proxy.at > 200 and not any(codes) and ended - proxy.flipped > 3:
        raise Failure(f"{where}: nobody noticed")
    launched.none_is_left(folder, ranks.BAR)
    place.check_whole(folder)
    program.run(folder, [*launched.COMMAND, "--out", "run"]).succeeds()
    launched.same_as_alone(base, folder, f"a run after a flipped {where}")
    return "not flipped" if not proxy.flipped else "noticed" if any(codes) else "while joining or leaving"
