"""Calling the xtrain binary."""

import json
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Xtrain:
    """The binary at `path`, run from the root of the repository."""

    def __init__(self, path):
        self.path = Path(path).resolve()

    def run(self, *arguments):
        """Runs a command and returns its standard output; a failure ends the test with what it said."""
        return self.finished(*arguments).stdout

    def warnings(self, *arguments):
        """Runs a command and returns what it said on standard error."""
        return self.finished(*arguments).stderr

    def finished(self, *arguments):
        command = [str(self.path), *map(str, arguments)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done

    def generate(self, folder, tokens, count, vocab_size, precision="fp32", may_end=False):
        """Greedy tokens after `tokens`, and the logits [count, vocab_size] that they were chosen from."""
        flags = ["--temperature", 0, "--max-tokens", count, "--precision", precision, "--json", "--logprobs", vocab_size]
        told = json.loads(self.run("generate", folder, "--tokens", ",".join(map(str, tokens)), *flags))
        if len(told["tokens"]) != count and not may_end:
            raise SystemExit(
                f"{folder}: generation stopped after {len(told['tokens'])} of {count} tokens "
                f"({told['finish_reason']}); give the model another seed or prompt"
            )
        rows = [[0.0] * vocab_size for _ in told["steps"]]
        for row, step in zip(rows, told["steps"]):
            for entry in step["top"]:
                row[entry["token"]] = entry["logit"]
        return told["tokens"], rows
