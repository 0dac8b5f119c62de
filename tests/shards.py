"""Documents of a folder of token shards: docs/data-format.md, "Shard"."""

import dataclasses
import pathlib
import struct

BITS = [[byte >> bit & 1 for bit in range(8)] for byte in range(256)]


@dataclasses.dataclass
class Document:
    ids: list  # with the token that ends the document, if any
    trained: list  # 0 or 1 for each token; that of the first says something else. Empty in shards of version 1


def aligned(size):
    """The next multiple of 8 bytes."""
    return (size + 7) // 8 * 8


def read(folder):
    """All documents in their order. One that continues in the next shard is one document."""
    documents, ids, trained = [], [], []
    for path in sorted(pathlib.Path(folder).glob("shard-*.tokens")):
        content = path.read_bytes()
        version, width = struct.unpack_from("<2I", content, 8)
        tokens, count = struct.unpack_from("<2Q", content, 64)
        start, at = len(ids), 256
        ids.extend(struct.unpack_from(f"<{tokens}{'H' if width == 2 else 'I'}", content, at))
        at += aligned(tokens * width)
        if version == 2:
            size = (tokens + 7) // 8
            trained.extend([bit for byte in content[at : at + size] for bit in BITS[byte]][:tokens])
            at += aligned(size)
        begin = 0
        for end in struct.unpack_from(f"<{count}Q", content, at):
            documents.append(Document(ids[begin : start + end], trained[begin : start + end]))
            begin = start + end
        ids, trained = ids[begin:], trained[begin:]
    return documents
