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
        command = [str(self.path), *map(str, arguments)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout

    def generate(self, folder, tokens, count, vocab_size, precision="fp32"):
        """Greedy tokens after `tokens`, and the logits [count, vocab_size] that they were chosen from."""
        told = self.generate_json(folder, tokens, count, vocab_size, precision)
        rows = [[0.0] * vocab_size for _ in told["steps"]]
        for row, step in zip(rows, told["steps"]):
            for entry in step["top"]:
                row[entry["token"]] = entry["logit"]
        return told["tokens"], rows

    def generate_json(self, folder, tokens, count, logprobs, precision="fp32"):
        ids = ",".join(map(str, tokens))
        greedy = ["--temperature", 0, "--max-tokens", count, "--precision", precision]
        answer = ["--json", "--logprobs", logprobs]
        told = json.loads(self.run("generate", folder, "--tokens", ids, *greedy, *answer))
        if len(told["tokens"]) != count:
            raise SystemExit(
                f"{folder}: generation stopped after {len(told['tokens'])} of {count} tokens "
                f"({told['finish_reason']}); give the model another seed or prompt"
            )
        return told
