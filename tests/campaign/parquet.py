"""A writer of small parquet files: a column of strings in the encodings that readers must bound, and conversations.

Structures are in Thrift's compact protocol: `{field: (type, value)}`.
"""

import struct

I32, I64, BINARY, LIST, STRUCT = 5, 6, 8, 9, 12
BYTE_ARRAY, UTF8, REQUIRED, UNCOMPRESSED, DATA_PAGE, RLE = 6, 0, 0, 0, 0, 3
PLAIN, DELTA_LENGTH, DELTA = 0, 6, 7
REPEATED, CONVERTED_LIST = 2, 3


def unsigned(number):
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes(out) + bytes([number])


def signed(number):
    return unsigned(number << 1 if number >= 0 else (-number << 1) - 1)


def encode(kind, value):
    if kind in (I32, I64):
        return signed(value)
    if kind == BINARY:
        return unsigned(len(value)) + value
    if kind == LIST:
        of, values = value
        return bytes([len(values) << 4 | of]) + b"".join(encode(of, one) for one in values)
    out, last = b"", 0
    for field, (kind, value) in sorted(value.items()):
        out += bytes([field - last << 4 | kind]) + encode(kind, value)
        last = field
    return out + b"\0"


def numbers(values):
    """DELTA_BINARY_PACKED, with 32 bits for each difference."""
    first = values[0] if values else 0
    out = unsigned(128) + unsigned(4) + unsigned(len(values)) + signed(first)
    deltas = [after - before for before, after in zip(values, values[1:])]
    for block in (deltas[at : at + 128] for at in range(0, len(deltas), 128)):
        least = min(block)
        lists = -(-len(block) // 32)
        out += signed(least) + bytes([32] * lists + [0] * (4 - lists))
        out += b"".join(struct.pack("<I", delta - least) for delta in block) + bytes(4 * (32 * lists - len(block)))
    return out


def page(texts, encoding):
    """The encoded values."""
    if encoding == PLAIN:
        return b"".join(struct.pack("<I", len(text)) + text for text in texts)
    if encoding == DELTA_LENGTH:
        return numbers([len(text) for text in texts]) + b"".join(texts)
    prefixes, suffixes, before = [], [], b""
    for text in texts:
        shared = next((n for n, (a, b) in enumerate(zip(before, text)) if a != b), min(len(before), len(text)))
        prefixes.append(shared)
        suffixes.append(text[shared:])
        before = text
    return numbers(prefixes) + page(suffixes, DELTA_LENGTH)


def levels(values):
    """Levels of repetition or definition that are 0 or 1: bit-packed groups of eight behind their length."""
    groups = -(-len(values) // 8)
    bits = sum(value << at for at, value in enumerate(values))
    packed = unsigned(groups << 1 | 1) + bits.to_bytes(groups, "little")
    return struct.pack("<I", len(packed)) + packed


def chunk(at, path, texts, encoding, repeated=None):
    """A column with one page, for a file in which `at` bytes precede it: its bytes, and its description.

    `repeated` has levels of repetition and of definition, for values in lists.
    """
    texts = [text.encode() for text in texts]
    values = b"".join(levels(level) for level in repeated or []) + page(texts, encoding)
    count = len(repeated[0]) if repeated else len(texts)
    counts = {1: (I32, count), 2: (I32, encoding), 3: (I32, RLE), 4: (I32, RLE)}
    header = encode(STRUCT, {1: (I32, DATA_PAGE), 2: (I32, len(values)), 3: (I32, len(values)), 5: (STRUCT, counts)})
    size = len(header) + len(values)
    column = {
        1: (I32, BYTE_ARRAY),
        2: (LIST, (I32, [encoding, RLE])),
        3: (LIST, (BINARY, [name.encode() for name in path])),
        4: (I32, UNCOMPRESSED),
        5: (I64, count),
        6: (I64, size),
        7: (I64, size),
        9: (I64, at),
    }
    return header + values, {2: (I64, at), 3: (STRUCT, column)}


def leaf(name):
    return {1: (I32, BYTE_ARRAY), 3: (I32, REQUIRED), 4: (BINARY, name.encode()), 6: (I32, UTF8)}


def group(name, repetition, children, converted=None):
    kind = {} if converted is None else {6: (I32, converted)}
    return {3: (I32, repetition), 4: (BINARY, name.encode()), 5: (I32, children), **kind}


def write_file(path, rows, schema, columns):
    """Writes a file with one row group. `columns` have the arguments of `chunk` after the first."""
    content, described = b"PAR1", []
    for column in columns:
        values, description = chunk(len(content), *column)
        content += values
        described.append(description)
    size = len(content) - 4
    groups = {1: (LIST, (STRUCT, described)), 2: (I64, size), 3: (I64, rows)}
    footer = encode(STRUCT, {1: (I32, 1), 2: (LIST, (STRUCT, schema)), 3: (I64, rows), 4: (LIST, (STRUCT, [groups]))})
    path.write_bytes(content + footer + struct.pack("<I", len(footer)) + b"PAR1")


def write(path, texts, encoding):
    """Writes the texts as the column `text` of one row group with one page."""
    root = {4: (BINARY, b"schema"), 5: (I32, 1)}
    write_file(path, len(texts), [root, leaf("text")], [(["text"], texts, encoding)])


def write_conversations(path, rows):
    """Writes rows of `messages`, with `role` and `content`, as lists of structures."""
    root = {4: (BINARY, b"schema"), 5: (I32, 1)}
    schema = [root, group("messages", REQUIRED, 1, CONVERTED_LIST), group("list", REPEATED, 1), group("element", REQUIRED, 2)]
    messages = [message for row in rows for message in row["messages"]]
    repetition = [int(at > 0) for row in rows for at in range(len(row["messages"]))]
    columns = [
        (["messages", "list", "element", name], [message[name] for message in messages], PLAIN, [repetition, [1] * len(messages)])
        for name in ("role", "content")
    ]
    write_file(path, len(rows), [*schema, leaf("role"), leaf("content")], columns)
