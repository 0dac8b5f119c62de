"""A writer of small parquet files with one column of strings, in the encodings that readers must bound.

Structures are in Thrift's compact protocol: `{field: (type, value)}`.
"""

import struct

I32, I64, BINARY, LIST, STRUCT = 5, 6, 8, 9, 12
BYTE_ARRAY, UTF8, REQUIRED, UNCOMPRESSED, DATA_PAGE, RLE = 6, 0, 0, 0, 0, 3
PLAIN, DELTA_LENGTH, DELTA = 0, 6, 7


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


def write(path, texts, encoding):
    """Writes the texts as the column `text` of one row group with one page."""
    texts = [text.encode() for text in texts]
    values = page(texts, encoding)
    counts = {1: (I32, len(texts)), 2: (I32, encoding), 3: (I32, RLE), 4: (I32, RLE)}
    header = encode(STRUCT, {1: (I32, DATA_PAGE), 2: (I32, len(values)), 3: (I32, len(values)), 5: (STRUCT, counts)})
    size = len(header) + len(values)
    column = {
        1: (I32, BYTE_ARRAY),
        2: (LIST, (I32, [encoding, RLE])),
        3: (LIST, (BINARY, [b"text"])),
        4: (I32, UNCOMPRESSED),
        5: (I64, len(texts)),
        6: (I64, size),
        7: (I64, size),
        9: (I64, 4),
    }
    group = {1: (LIST, (STRUCT, [{2: (I64, 4), 3: (STRUCT, column)}])), 2: (I64, size), 3: (I64, len(texts))}
    root = {4: (BINARY, b"schema"), 5: (I32, 1)}
    leaf = {1: (I32, BYTE_ARRAY), 3: (I32, REQUIRED), 4: (BINARY, b"text"), 6: (I32, UTF8)}
    schema = (LIST, (STRUCT, [root, leaf]))
    footer = encode(STRUCT, {1: (I32, 1), 2: schema, 3: (I64, len(texts)), 4: (LIST, (STRUCT, [group]))})
    path.write_bytes(b"PAR1" + header + values + footer + struct.pack("<I", len(footer)) + b"PAR1")
