"""Rows of a known number of tokens, cut out of this repository's pages."""

from pathlib import Path

from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[2]


def pages():
    return "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))


def tokenizer_of(model):
    return Tokenizer.from_file(str(model / "tokenizer.json"))


def cut(tokenizer, ids, context):
    """The texts of the first `context` tokens and of the others; `None` if as a task's row they would have other tokens."""
    texts = [tokenizer.decode(part, skip_special_tokens=False) for part in (ids[:context], ids[context:])]
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    is_same = encode("".join(texts)) == list(ids) and encode(texts[0]) == list(ids[:context])
    # White space at the end of a context moves to the continuation.
    return texts if is_same and texts[0] == texts[0].rstrip() else None


def rows(tokenizer, count, context, continuation):
    """So many rows of so many tokens, as pairs of texts."""
    ids = tokenizer.encode(pages(), add_special_tokens=False).ids
    found, length = [], context + continuation
    for first in range(0, len(ids) - length, length):
        # A cut inside of a word may be moved by a few tokens.
        moved = (cut(tokenizer, ids[first + by : first + by + length], context) for by in range(8))
        found += [pair for pair in moved if pair][:1]
        if len(found) == count:
            return found
    raise SystemExit(f"the pages have only {len(found)} rows of {length} tokens, {count} are needed")
