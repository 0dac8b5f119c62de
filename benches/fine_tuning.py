#!/usr/bin/env python3
"""Full fine-tuning on packed conversations: xtrain beside transformers with Liger, in turns, on one GPU. Builds nothing.

    python3 benches/fine_tuning.py --xtrain target/release/xtrain --wheels wheels --out results

`wheels` holds Liger's wheel (`pip download --no-deps liger-kernel==0.8.5`); torch and transformers are installed. OUT gets `rows.jsonl`, lines as in
benches/results, written anew after every round; `raw.jsonl`, a line for each measurement, at once; and logs.

The model has Llama-3.2-1B's sizes and random weights (benches/configs/llama3.2_1b_chat.toml). The conversations have random words, as frequent as
those of a text (Zipf's law), and the lengths of chitchat-dataset 0.9.0's dialogues with SmolLM2's tokenizer and template:
`chat_lengths.json` has turns, tokens and trained tokens of every 16th of the 3,887 that fit into 4,096 tokens, by length. They have four forms:

  chat     answers are trained, 39% of the tokens as in chitchat
  third    the same documents with 30% of the tokens trained
  whole    the same documents as `chat`, all tokens trained
  text     documents of the same lengths as texts; windows cut them (data.document_mask)

All sides count a step's 8 x 4,096 positions as its tokens; padding is 0.4% of them. The peer's modes are compared first, with few steps; the
fastest is then measured in turns with xtrain: five rounds, of which the medians count. Both sides have new tokens in each step. `card_bytes` of
xtrain and torch's `max_memory_allocated` are memory without the context. Last, as far as time is left (--seconds), come modes of the peer that are
only figures, and plain training steps, which the log compares with the last lines of benches/results.
"""
import argparse
import datetime
import json
import os
import pathlib
import queue
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
CONFIG = "benches/configs/llama3.2_1b_chat.toml"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "user", "assistant", "system"]
GIB = 1 << 30
MODEL = "Llama-3.2-1B bf16, packed chat"
# Modes of the peer (torch_fine_tuning.py) by the process that has them; the first screening decides.
SCREENED = ["compiled_varlen_logits", "liger_varlen_liger", "liger_flex_liger", "compiled_flex_logits", "compiled_varlen_liger"]
# Rounds in which the peer also has other shares of trained tokens.
FIGURES = 2
# The words of a mode, for rows.
PARTS = (
    dict(compiled="layers compiled", liger="Liger's kernels", eager="eager"),
    dict(varlen="varlen_attn", flex="flex_attention"),
    dict(logits="all logits of a compiled head", liger="the head by fused_linear_cross_entropy of Liger"),
)
# Plain training, with the settings of the last results.
PLAIN = {
    "T12 bf16": "benches/configs/t12.toml --set train.recompute=norms --set train.recompute_blocks=5 --steps 60 --repeats 3",
    "LLAMA1B bf16": "benches/configs/llama1b.toml --set train.recompute=norms --set train.recompute_blocks=16 --set train.loss_chunk=16384 "
    "--steps 6 --repeats 3",
    "LLAMA1B fp8-current": "benches/configs/llama1b.toml --set train.loss_chunk=16384 --steps 6 --set train.recompute=none "
    "--set precision.skip_slower=[] --set precision.recipe=fp8-current --repeats 3",
    "LLAMA1B bf16 packed": "benches/configs/llama1b.toml --set train.recompute=norms --set train.recompute_blocks=16 "
    "--set train.loss_chunk=16384 --steps 6 --set data.document_mask=true --repeats 3",
}


# ------------------------------------------------------------------------------------------------ conversations


def write_data(folder, vocabulary, copies, scale):
    """Writes a tokenizer of one token for each word, and rows of each form. Lengths are divided by `scale`."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [f"w{n}" for n in range(len(SPECIAL), vocabulary)]
    is_marker = lambda word: word.startswith("<|")
    (folder / "tokenizer").mkdir(exist_ok=True)
    markers = [
        dict(id=n, content=word, single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
        for n, word in enumerate(SPECIAL)
        if is_marker(word)
    ]
    model = dict(type="WordLevel", vocab={word: n for n, word in enumerate(SPECIAL + words)}, unk_token=SPECIAL[0])
    tokenizer = dict(version="1.0", truncation=None, padding=None, added_tokens=markers, normalizer=None)
    tokenizer |= dict(pre_tokenizer=dict(type="WhitespaceSplit"), post_processor=None, decoder=None, model=model)
    (folder / "tokenizer/tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer/tokenizer_config.json").write_text(json.dumps(dict(tokenizer_class="PreTrainedTokenizerFast", eos_token="<|im_end|>")))
    rng = random.Random(7)

    def text(count):
        """Words by Zipf's law."""
        return " ".join(words[min(int((vocabulary + 1) ** rng.random()) - 1, len(words) - 1)] for _ in range(count))

    def share(count, parts):
        """`count` in parts that differ by one at most; an answer has a word at least."""
        return [max(1, count // parts + (n < count % parts)) for n in range(parts)]

    def conversation(turns, tokens, trained):
        """A turn has three tokens besides its words; of an answer, its words and the end are trained."""
        answers = turns // 2
        asked = tokens - trained - 3 * turns + answers
        counts = [share(asked, turns - answers), share(trained - answers, answers)]
        roles = ("user", "assistant")
        return dict(messages=[dict(role=roles[n % 2], content=text(counts[n % 2][n // 2])) for n in range(turns)])

    lengths = [[max(2, turns // scale), max(12, tokens // scale), max(2, trained // scale)]
               for turns, tokens, trained in json.loads((HERE / "chat_lengths.json").read_text())] * copies
    lengths = [[min(turns, tokens // 5), tokens, min(trained, tokens - 3 * turns)] for turns, tokens, trained in lengths]
    rng.shuffle(lengths)
    with open(folder / "chat.jsonl", "w") as chat, open(folder / "third.jsonl", "w") as third, open(folder / "text.jsonl", "w") as texts:
        for turns, tokens, trained in lengths:
            chat.write(json.dumps(conversation(turns, tokens, trained)) + "\n")
            third.write(json.dumps(conversation(turns, tokens, max(turns, round(0.3 * tokens)))) + "\n")
            texts.write(json.dumps(dict(text=text(tokens - 1))) + "\n")


def tokenize(xtrain, folder, log):
    """Token shards of each form."""
    chat = ["--chat", "--chat-template", "chatml"]
    forms = {"chat": ("chat", chat), "third": ("third", chat), "whole": ("chat", [*chat, "--train-on", "all"]), "text": ("text", [])}
    running = []
    for form, (rows, options) in forms.items():
        command = [xtrain, "tokenize", folder / f"{rows}.jsonl", "--tokenizer", folder / "tokenizer", "--out", folder / form, *options]
        running.append(subprocess.Popen(command, stdout=log, stderr=log))
    for process in running:
        if process.wait() != 0:
            sys.exit(f"xtrain tokenize failed; see {log.name}")
    return {form: folder / form for form in forms}


# ------------------------------------------------------------------------------------------------ sides


class Peer:
    """A process of torch_fine_tuning.py that answers lines of JSON."""

    def __init__(self, kernels, options, log):
        self.name = kernels
        command = [sys.executable, HERE / "torch_fine_tuning.py", "--kernels", kernels.split("-")[0], *options]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        self.lines = queue.Queue()
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def answer(self, seconds):
        try:
            line = self.lines.get(timeout=max(1.0, seconds))
        except queue.Empty:
            line = None
        if line is None:
            self.stop()
            return dict(error=f"{self.name} ended or took more than {seconds:.0f} s")
        return json.loads(line)

    def send(self, **asked):
        try:
            self.process.stdin.write(json.dumps(asked) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # `answer` says that it has ended

    def ask(self, seconds, **asked):
        self.send(**asked)
        return self.answer(seconds)

    def stop(self):
        self.process.kill()
        self.process.wait()


class Bench:
    def __init__(self, args):
        self.args = args
        self.end = time.monotonic() + args.seconds
        self.out = args.out
        self.out.mkdir(parents=True, exist_ok=True)
        self.raw = open(self.out / "raw.jsonl", "a")
        self.log = open(self.out / "xtrain.log", "a")
        self.begun = time.monotonic()
        self.measured = {}  # (side, form) -> results
        self.screened, self.best, self.head_seconds = [], None, None
        self.small = ["--set", "model.dim=32", "--set", "model.layers=2", "--set", "model.heads=4", "--set", "model.kv_heads=2", "--set",
                      "model.head_dim=8", "--set", "model.ffn_dim=48", "--set", f"model.vocab_size={args.tiny}", "--set", "data.seq_len=256", "--set",
                      "train.batch_size=2", "--set", "train.device=cpu"] if args.tiny else []
        self.batch, self.seq_len = (2, 256) if args.tiny else (8, 4096)
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            self.driver = subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0] or "none"
        except OSError:
            self.driver = "none"

    def left(self):
        return self.end - time.monotonic()

    def say(self, text):
        print(f"[{time.monotonic() - self.begun:5.0f} s] {text}", flush=True)

    def record(self, side, form, result):
        """Writes a measurement and keeps it, unless it is an error."""
        self.raw.write(json.dumps(dict(side=side, form=form, at=round(time.monotonic() - self.begun, 1), result=result)) + "\n")
        self.raw.flush()
        speed = result.get("tokens_per_second")
        memory = result.get("peak_gib") or (result.get("card_bytes") or 0) / GIB
        self.say(f"{side} {form}: " + (result.get("error") or f"{speed:,.0f} tok/s, {memory:.2f} GiB, loss {result['loss']:.4f}"))
        if "error" not in result:
            self.measured.setdefault((side, form), []).append(result)
        return result

    # -------------------------------------------------------------------------------------------- xtrain

    def xtrain(self, words, seconds):
        """Lines of JSON that a command of xtrain prints."""
        command = [str(self.args.xtrain), *words, "--json"]
        self.log.write("$ " + " ".join(command) + "\n")
        self.log.flush()
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=self.log, text=True, timeout=max(5.0, seconds), cwd=HERE.parent)
        except subprocess.TimeoutExpired:
            return [dict(error=f"took more than {seconds:.0f} s")]
        if done.returncode != 0:
            return [dict(error=f"exit code {done.returncode}; see xtrain.log")]
        return [json.loads(line) for line in done.stdout.splitlines()]

    def settings(self, form):
        mask = ["--set", "data.document_mask=true"] if form == "text" else []
        return [CONFIG, "--set", f"data.train={self.shards[form].resolve()}", *mask, *self.small]

    def ours(self, form, steps=None):
        length = ["--warmup", "3", "--repeats", "1", "--steps", str(steps or self.args.steps)]
        return self.xtrain(["bench", "step", *self.settings(form), *length], min(90, self.left()))[0]

    # -------------------------------------------------------------------------------------------- peer

    def screen(self, peers):
        """Compares the peer's modes with few steps, and keeps the fastest whose loss is that of the others."""
        losses = {}
        for mode in SCREENED:
            if self.screened and time.monotonic() - self.begun > self.args.screen_until:
                self.say(f"{mode}: no time left to compare it")
                continue
            peer = peers[mode.split("_")[0]]
            result = peer.ask(100, mode=mode, data="chat", check=True)
            if "error" not in result:
                losses[mode] = result["loss"]
                result = peer.ask(60, mode=mode, data="chat", steps=self.args.screen_steps, warmup=2)
            self.record(f"screen {mode}", "chat", result | dict(checked_loss=losses.get(mode)))
            if "error" not in result:
                self.screened.append((result["tokens_per_second"], mode, peer, result))
        if not self.screened:
            self.say("no mode of the peer runs")
            return
        usual = statistics.median(losses.values())
        right = [entry for entry in self.screened if abs(losses[entry[1]] - usual) < 0.01 * usual]
        for entry in self.screened:
            if entry not in right:
                self.say(f"{entry[1]} is left out: its loss of the first batch is {losses[entry[1]]:.4f}, that of others {usual:.4f}")
        _, mode, peer, _ = max(right, key=lambda entry: entry[0])
        self.best = (mode, peer)
        self.say(f"the peer's fastest mode is {mode}")

    def theirs(self, form, mode=None):
        if self.best is None:
            return dict(error="no mode of the peer runs")
        best, peer = self.best
        return peer.ask(min(60, self.left()), mode=mode or best, data=form, steps=self.args.steps, warmup=3)

    # -------------------------------------------------------------------------------------------- rows

    def median(self, side, form, key="tokens_per_second"):
        found = [result[key] for result in self.measured.get((side, form), []) if result.get(key) is not None]
        return statistics.median(found) if found else None

    def rows(self):
        """Lines for benches/results of all that is measured so far."""
        repeats = len(self.measured.get(("xtrain", "chat"), []))
        ours = next((results[0] for (side, _), results in self.measured.items() if side == "xtrain"), None)
        if ours is None:
            return []
        mode = self.best[0] if self.best else None
        peer_result = next((results[0] for (side, _), results in self.measured.items() if side == "peer"), None)
        versions = (peer_result or {}).get("versions", "")
        command = "python3 benches/fine_tuning.py --xtrain XTRAIN --wheels WHEELS --out OUT"
        shared = dict(card=ours["device"], driver=self.driver, command=command)
        last = dict(commit=self.args.commit, date=str(datetime.date.today()))
        rows = []

        def row(work, metric, value, peer, peer_value, digits, note, peer_command=None):
            if value is None or peer_value is None:
                return
            # Without a digit it is a whole number.
            value_as, peer_as = (round(number, digits or None) for number in (value, peer_value))
            line = dict(work=work, metric=metric, value=value_as, peer=peer, peer_value=peer_as)
            line["ratio"] = round(value / peer_value, 4)
            rows.append(line | shared | (dict(peer_command=peer_command) if peer_command else {}) | dict(note=note) | last)

        turns = f"{repeats} rounds in turns, medians"
        screened = "; ".join(f"{mode} {speed:,.0f} tok/s, {result['peak_gib']:.1f} GiB" for speed, mode, _, result in
                             sorted(self.screened, key=lambda entry: -entry[0]) if result.get("peak_gib"))
        words = (mode or "__").split("_")
        parts = [PARTS[0][words[0]], PARTS[1][words[1]], PARTS[2][words[2]]] if mode else []
        peer = f"{versions}, {', '.join(parts)}".replace("Liger", f"Liger {self.args.liger}", 1)
        by = f"python3 benches/torch_fine_tuning.py --kernels {words[0]}, mode {mode}"
        chat = self.median("xtrain", "chat")
        row(MODEL, "tok/s", chat, peer, self.median("peer", "chat"), 0,
            f"{turns}; 39% of the tokens trained, and only these are in the peer's head; the fastest of its modes: {screened}", by)
        memory = self.median("xtrain", "chat", "card_bytes")
        row(MODEL, "peak GiB", memory and memory / GIB, f"{peer}, max_memory_allocated", self.median("peer", "chat", "peak_gib"), 3,
            turns, by)
        row(f"{MODEL} beside packed text", "tok/s", chat, "our own packed text of the same lengths, data.document_mask",
            self.median("xtrain", "text"), 0, turns)
        row(f"{MODEL}, 30% trained", "tok/s", self.median("xtrain", "third"), peer, self.median("peer", "third"), 0,
            f"{turns}; the peer at most {FIGURES} times", by)
        row(f"{MODEL}, all trained", "tok/s", self.median("xtrain", "whole"), peer, self.median("peer", "whole"), 0,
            f"{turns}; the peer at most {FIGURES} times", by)
        whole, third = self.median("xtrain", "whole", "seconds"), self.median("xtrain", "third", "seconds")
        if whole and third and self.head_seconds:
            note = f"{turns}; the step that trains all takes {whole * 1e3:.1f} ms; the head's ops one by one (xtrain bench op)"
            row(f"{MODEL}, saved by training 30% of the tokens", "ms", (whole - third) * 1e3, "the head's time in the step that trains all",
                self.head_seconds * 1e3, 2, note)
        return rows

    def write_rows(self):
        text = "".join(json.dumps(row) + "\n" for row in self.rows())
        (self.out / "rows.jsonl.new").write_text(text)
        os.replace(self.out / "rows.jsonl.new", self.out / "rows.jsonl")

    def measure_plain(self):
        """Plain training steps beside the last lines of benches/results."""
        lines = {}
        for path in sorted((HERE / "results").glob("*-h200-*.jsonl")):
            for line in path.read_text().splitlines():
                line = json.loads(line)
                if line["metric"] == "tok/s":
                    lines[line["work"]] = line
        for n, (work, words) in enumerate([*PLAIN.items()] * 2):
            if self.left() < (15 if n < len(PLAIN) else 30):
                self.say(f"{work}: no time left")
                continue
            found = self.xtrain(["bench", "step", *words.split(), *(self.small if self.args.tiny else [])], min(80, self.left()))[0]
            self.record("xtrain plain", work, found)
            if "error" not in found and work in lines:
                # Of another machine, so it is no row.
                self.say(f"{work}: {found['tokens_per_second'] / lines[work]['value']:.4f} of the last line")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--xtrain", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--wheels", help="folder of wheels that are not installed")
    parser.add_argument("--liger", default="0.8.5", help="version of Liger, for the rows")
    parser.add_argument("--commit", default="unknown", help="commit of the binary, for the rows")
    parser.add_argument("--seconds", type=float, default=525)
    parser.add_argument("--reserve", type=float, default=80, help="seconds kept for plain training")
    parser.add_argument("--screen-until", type=float, default=190, help="seconds after which no mode of the peer begins to be compared")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--screen-steps", type=int, default=6)
    parser.add_argument("--tiny", type=int, metavar="VOCABULARY", help="tiny sizes on the CPU, to try the script")
    args = parser.parse_args()
    args.xtrain = args.xtrain.resolve()
    bench = Bench(args)
    options = (["--wheels", args.wheels] if args.wheels else []) + (["--device", "cpu", "--tiny", str(args.tiny)] if args.tiny else [])
    if args.tiny:
        SCREENED[:] = ["eager_varlen_logits", "compiled_varlen_logits"]
    peers = {kernels: Peer(kernels, options, open(args.out / f"{kernels}.log", "a")) for kernels in {mode.split("_")[0] for mode in SCREENED}}
    extra = None
    try:
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            write_data(folder, args.tiny or 128256, 2 if args.tiny else 8, 16 if args.tiny else 1)
            bench.say("conversations are written")
            bench.shards = tokenize(args.xtrain, folder, bench.log)
            bench.say("and tokenized")
            loads = lambda form: dict(load=str(bench.shards[form]), name=form, seq_len=bench.seq_len, batch=bench.batch)
            # Not a measurement: xtrain compiles kernels and chooses algorithms, while the peers import.
            first = bench.ours("chat", steps=2)
            bench.say(f"xtrain's first steps: {first.get('error') or round(first['first_step_seconds'], 1)}")
            forms = ("chat", "third", "whole")
            for peer in peers.values():
                for form in forms:
                    peer.send(**loads(form))
            for peer in peers.values():
                for _ in forms:
                    bench.say(f"{peer.name}: {peer.answer(90)}")
            bench.screen(peers)
            for peer in peers.values():
                if bench.best is None or peer is not bench.best[1]:
                    peer.stop()
            lasted = 0.0
            for n in range(args.rounds):
                if n and bench.left() < args.reserve + lasted:
                    bench.say(f"{n} rounds; no time left for more")
                    break
                begun = time.monotonic()
                order = [("xtrain", "chat"), ("peer", "chat"), ("xtrain", "text"), ("xtrain", "third"), ("xtrain", "whole")]
                if n < FIGURES:
                    order += [("peer", "third"), ("peer", "whole")]
                for side, form in order:
                    bench.record(side, form, bench.ours(form) if side == "xtrain" else bench.theirs(form))
                lasted = time.monotonic() - begun
                if n == 0:
                    ops = bench.xtrain(["bench", "op", *bench.settings("whole"), "--repeats", "5"], min(60, bench.left()))
                    if "error" in ops[0]:
                        bench.say(f"bench op: {ops[0]['error']}")
                    else:
                        bench.head_seconds = sum(op["seconds"] for op in ops if op["site"] == "lm_head")
                        bench.raw.write("".join(json.dumps(dict(side="xtrain ops", form="whole", result=op)) + "\n" for op in ops))
                        bench.say(f"the head: {bench.head_seconds * 1e3:.2f} ms")
                bench.write_rows()
            # Modes that are only figures.
            if bench.best and bench.left() > args.reserve + 20:
                bench.record("figure", "chat", bench.theirs("chat", f"{bench.best[0]}_plain"))
            if bench.best:
                bench.best[1].stop()
            bench.measure_plain()
            if bench.left() > 75 and not args.tiny:
                extra = Peer("liger-autocast", [*options, "--weights", "autocast"], open(args.out / "autocast.log", "a"))
                bench.say(f"autocast: {extra.ask(60, **loads('chat'))}")
                mode = "liger_varlen_liger"
                bench.record(f"figure autocast {mode}", "chat", extra.ask(bench.left() - 5, mode=mode, data="chat", steps=6, warmup=2))
    finally:
        for peer in [*peers.values(), extra]:
            if peer:
                peer.stop()
        bench.write_rows()
    print((args.out / "rows.jsonl").read_text())


if __name__ == "__main__":
    main()
