#!/usr/bin/env python3
"""Compares renderings and spans with transformers: all templates of a folder x conversations.

Run by hand; CI reads the golden files of make.py instead.

    pip install transformers==5.24.0 jinja2==3.1.6 tokenizers && pip install --no-deps trl==1.16.0
    cargo build --release -p xtrain-chat --example render
    tests/chat/compare.py --render target/release/examples/render [--templates FOLDER]

Without --templates, those of TRL. Prints each difference, and counts. Exit code 1 if there is any.
"""

import argparse
import json
import pathlib
import subprocess
import sys

from conversations import CONVERSATIONS
from packages import trl_templates
from reference import TODAY, VARIABLES, render


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--render", required=True)
    options.add_argument("--templates")
    options.add_argument("--verbose", action="store_true")
    given = options.parse_args()
    folder = pathlib.Path(given.templates) if given.templates else trl_templates()
    requests, expected = [], []
    for path in sorted(folder.glob("*.jinja")):
        source = path.read_text()
        thinking = [None, True, False] if "enable_thinking" in source else [None]
        for conversation in CONVERSATIONS:
            for value in thinking:
                kwargs = dict(VARIABLES) | ({} if value is None else {"enable_thinking": value})
                prompt = conversation.get("prompt", False)
                request = {
                    "template": str(path),
                    "messages": conversation["messages"],
                    "tools": conversation.get("tools"),
                    "kwargs": kwargs,
                    "prompt": prompt,
                    "today": TODAY,
                }
                requests.append(request | {"name": conversation["name"]})
                expected.append(render(source, request["messages"], request["tools"], prompt, kwargs))
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    output = subprocess.run([given.render], input=lines, capture_output=True, text=True, check=True).stdout
    counts = {"equal": 0, "refused by both": 0, "different": 0}
    for request, wanted, line in zip(requests, expected, output.rstrip("\n").split("\n"), strict=True):
        found = json.loads(line)
        if "error" in wanted and "error" in found:
            kind = "refused by both"
            if given.verbose:
                print(f"{pathlib.Path(request['template']).name}, {request['name']}: {wanted['error']!r} | {found['error']!r}")
        elif wanted == found:
            kind = "equal"
        else:
            kind = "different"
            name = pathlib.Path(request["template"]).name
            print(f"{name}, {request['name']}, {request['kwargs'].get('enable_thinking')}:")
            print(f"  transformers: {json.dumps(wanted)[:1500]}\n  xtrain:       {json.dumps(found)[:1500]}")
        counts[kind] += 1
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    return 1 if counts["different"] else 0


if __name__ == "__main__":
    sys.exit(main())
