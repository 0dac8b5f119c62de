"""Documents that reach the corners of tokenizers: marks and their composed forms, all white space, digits, cases, names of added tokens."""
import random
import unicodedata

WORDS = ["the", "cat", "don't", "I'LL", "we've", "x's", "Việt", "tiếng", "naïve", "café", "Straße", "ſtraſſe", "İstanbul", "ǅ", "ﬁne", "ﬀ",
         "привет", "мир", "हिन्दी", "भाषा", "한국어", "각", "東京タワー", "中文", "ｶﾞｷﾞ", "مرحبا", "שלום", "ไทย", "กำ", "ລາວ", "camelCase", "HTTPServer",
         "snake_case", "e.g.", "U.S.A.", "can't", "’s", "'S", "'ſ", "KELVIN", "Ω", "ŀl", "ﹰ", "ﷺ", "½", "²", "Ⅷ", "٣٤", "१२", "𝟙𝟚", "12", "1234567", "3.14",
         "www.x.y/z?a=b#c", "a@b.c", "/usr/bin", "C:\\x", "\\n", "{}", "[]", "()", "<>", "<x", "->", "==", "#!", "``", "''", "\"", "®", "§5", "—", "…", "“x”",
         "。", "、", "「", "」", "！", "👍🏽", "👨‍👩‍👧", "🇩🇪", "😀😁", "e\u0301", "o\u0308\u0304", "\u0344", "\u0301a", "q\u0323\u0307", "q\u0307\u0323", "\u1100\u1161\u11a8",
         "\u0958", "\ufb1d", "\u212b", "\u2126", "\u1e9b\u0323", "▁", "▁▁", "▁a", "Ġ", "Ċ", "\ufffd", "\ue000", "\U0010ffff", "\u0378", "\u00ad", "\u200d", "\u200b",
         "\ufeff", "\u202e", "\x00", "\x01", "\x7f", "\x85", "aaaaaaaaaaaaaaaaaaaaaaaa", "ababababababab", "=" * 30, "^^^", "~", "%", "&amp;", "$1,000.00"]
SPACES = [" "] * 40 + ["\n"] * 14 + ["  ", "   ", "\t", "\n\n", "\r\n", "\r", " \n", "\n ", "\n\t", "\u00a0", "\u3000", "\u2028", "\u2029", "\u1680", "\u2003",
                                    "\x0b", "\x0c", "\x1c", "\x85", " \u0301", "\u202f", " " * 17, "\n" * 5, ""]
RANGES = [(0x20, 0x7e), (0xa0, 0x24f), (0x250, 0x52f), (0x590, 0x6ff), (0x900, 0xdff), (0xe00, 0xeff), (0x1100, 0x11ff), (0x1e00, 0x1fff), (0x2000, 0x2bff),
          (0x3000, 0x30ff), (0x4e00, 0x4eff), (0xac00, 0xacff), (0xf900, 0xfdff), (0xfe00, 0xffff), (0x10000, 0x107ff), (0x1d400, 0x1d7ff), (0x1f300, 0x1faff)]


def character(rng):
    while True:
        low, high = rng.choice(RANGES)
        c = chr(rng.randint(low, high))
        if not 0xd800 <= ord(c) < 0xe000:
            return c


def part(rng, names):
    kind = rng.random()
    if kind < 0.62:
        word = rng.choice(WORDS)
    elif kind < 0.74 and names:
        name = rng.choice(names)
        word = rng.choice([name, name, name, name.upper(), name[:-1], name + rng.choice(["s", "_", "1", "\u0301"]), "x" + name,
                           unicodedata.normalize("NFD", name), unicodedata.normalize("NFC", name)])
    elif kind < 0.9:
        word = "".join(character(rng) for _ in range(rng.randint(1, 4)))
    else:
        word = "".join(rng.choice("abcdeABCDE0123456789 .,'\n") for _ in range(rng.randint(1, 12)))
    if rng.random() < 0.25:
        word = unicodedata.normalize(rng.choice(["NFC", "NFD", "NFKC", "NFKD"]), word)
    return word


def document(rng, names):
    """One document, of up to some 600 characters."""
    parts = []
    for _ in range(rng.choice([1, 2, 3, 8, 20, 40, 60])):
        parts.append(part(rng, names))
        # Two words in six have nothing between them.
        parts.append(rng.choice(SPACES) if rng.random() < 0.85 else "")
    return "".join(parts)


def documents(count, names, seed):
    """Documents that are not empty, the same for the same seed."""
    rng = random.Random(seed)
    found = []
    while len(found) < count:
        text = document(rng, names)
        if text:
            found.append(text)
    return found


def long_documents(size, texts):
    """Documents of about `size` bytes: `texts` among words, and shapes without a place where tokenizers may cut."""
    parts = [" and words\nhere, ".join(texts), "".join(f"第{n}章、東京タワー。ti\u1ebfng中文\n\n" for n in range(997)),
             "".join(f"{n},{n * n},-0.{n}\n" for n in range(997)), "aB'll 12\t\tx=\"é\"; "]
    return [(part * (1 + size // len(part.encode()))).encode()[:size].decode(errors="ignore") for part in parts]
