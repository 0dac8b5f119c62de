#!/usr/bin/env python3
"""Writes continuations.jsonl.gz: 1,000 pieces of this project's sources that snapshot.txt.gz does not hold, each with
its true continuation and three pieces from elsewhere in them. The file is committed; run this only to renew it:

    python3 examples/data/continuations.py
"""
import gzip
import json
import pathlib
import random
import subprocess

FOLDER = pathlib.Path(__file__).parent
ROWS, CONTEXT, CONTINUATION = 1000, 120, 40


def new_texts():
    """The sources whose names are new since the snapshot, and whose lines are long enough."""
    snapshot = gzip.open(FOLDER / "snapshot.txt.gz", "rt").read()
    listed = subprocess.run(["git", "ls-files", "crates/*.rs"], capture_output=True, text=True, check=True)
    paths = [path for path in listed.stdout.split() if f"// {path}\n" not in snapshot]
    known = {line for line in snapshot.splitlines() if len(line.strip()) > 20}
    texts = {}
    for path in paths:
        lines = pathlib.Path(path).read_text().splitlines()
        # Code that has moved is not new.
        if sum(line in known for line in lines) < 0.05 * len(lines):
            texts[path] = "\n".join(lines)
    return texts


def begins_of_words(text):
    """Positions at which a word begins after another word and a space, with a row's text around them."""
    places = range(CONTEXT, len(text) - CONTINUATION)
    return [at for at in places if text[at].isalpha() and text[at - 1] == " " and not text[at - 2].isspace()]


def piece(text, at):
    """The continuation at a position: whole words of one line."""
    line = text[at : at + CONTINUATION].split("\n")[0]
    return line if len(line) < CONTINUATION else line.rsplit(" ", 1)[0]


def main():
    rng = random.Random(1)
    texts = new_texts()
    places = [(path, at) for path, text in sorted(texts.items()) for at in begins_of_words(text)]
    places = [place for place in places if len(piece(texts[place[0]], place[1])) >= CONTINUATION // 2]
    rows = []
    for path, at in rng.sample(places, ROWS):
        choices = [piece(texts[path], at)]
        while len(choices) < 4:
            other = piece(texts[(place := rng.choice(places))[0]], place[1])
            if other not in choices:
                choices.append(other)
        right = choices[0]
        rng.shuffle(choices)
        # The delimiter of the task is the space before a choice.
        query = texts[path][at - CONTEXT : at - 1]
        rows.append({"query": query, "choices": choices, "gold": choices.index(right), "cluster": path})
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    with gzip.GzipFile(FOLDER / "continuations.jsonl.gz", "wb", mtime=0) as file:
        file.write(text.encode())
    print(f"{ROWS} rows of {len({place for place, _ in places})} files")


main()
