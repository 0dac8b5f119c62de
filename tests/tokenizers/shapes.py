"""Tokenizers of all kinds: models, pre-tokenizers, normalizers, expressions in which engines differ, added tokens with all flags."""
from itertools import product

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXT = ["In 2024, 1234567 people; naïve café, tiếng Việt. Straße und Wörter, привет мир, 東京タワー、中文。", "  two spaces\n   three\n\tend\r\n",
        "Hello <|im_start|>user<|im_end|> §5 — “x” ®", "by the cat, by the dog, in the end", "don't I'LL we've x's can't", "한국어 हिन्दी भाषा ไทย مرحبا"] * 30

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
QWEN35 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CL100K = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
O200K = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
         r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
         r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
DEEPSEEK = (r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
CLIP = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
# Spellings that other engines than Oniguruma read differently, or refuse.
SPELLINGS = [r"\w{2}+|\W", r"\d{1,2}+|\D+", r"^[ \t]+|\n|[^\n]", r"\w+$|\s|\W", r"(?m).+|x", r"[[:alpha:]]+|[[:punct:]]+", r"[[:space:]]+|[[:^space:]]", r"\R|[^\r\n]+",
             r"\X", r"\h+|\H", r"\w+\Z|.|\n", r"(?<=[a-z])[A-Z]|.|\n", r"\b\w+\b|\W", r"(?i)straße|ss|.|\n", r"[a-z&&[^aeiou]]+|.|\n", r"(\w)\1|.|\n", r"(?>a+)b|.|\n",
             r"\p{^L}+|\p{L}", r"[\p{Han}]+|\p{Greek}|.|\n", r"\x{e9}|\u00e8|.|\n", r"a{,2}b|.|\n", r"(?~the)|.|\n", r"\K.|\n", r"[^\S\n]+|\S+|\n", r"\p{Emoji}|.|\n"]

FLAGS = [dict(zip(("lstrip", "rstrip", "single_word", "normalized"), flags)) for flags in product([False, True], repeat=4)]
NAMES = ["tiếng", "Việt", "the", "<think>", "  ", "cat", "Straße", "İ", "12", "हिन्दी", "각", "en", "\n\n", "<x>", "ab", "e\u0301"]


def split(regex, behavior="isolated", invert=False):
    return pre_tokenizers.Split(Regex(regex), behavior, invert)


def byte_split(*regexes):
    steps = [split(regex) for regex in regexes]
    return pre_tokenizers.Sequence(steps + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def byte_bpe(pre, norm=None, size=500):
    t = Tokenizer(models.BPE())
    t.pre_tokenizer, t.decoder = pre, decoders.ByteLevel()
    if norm:
        t.normalizer = norm
    t.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=size, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False))
    return t


def spaced_bpe(pre=None, norm=None):
    """Characters with marked spaces, bytes for unknown ones."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    alphabet = [c for c in sorted(set("".join(TEXT))) if c not in "\n東"]
    trained.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)],
                                                          limit_alphabet=len(alphabet), show_progress=False))
    import json
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in model["merges"]]
    vocab = dict(model["vocab"])
    for token in ["▁", "▁▁", "▁▁▁▁"]:
        vocab.setdefault(token, len(vocab))
    merges += [("▁", "▁"), ("▁▁", "▁▁")]
    t = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if pre:
        t.pre_tokenizer = pre
    if norm:
        t.normalizer = norm
    t.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    t.add_special_tokens(["<unk>", "<s>", "</s>"])
    return t


def unigram(pre, norm=None):
    t = Tokenizer(models.Unigram())
    t.pre_tokenizer, t.decoder = pre, decoders.Metaspace()
    if norm:
        t.normalizer = norm
    t.train_from_iterator(TEXT, trainers.UnigramTrainer(vocab_size=300, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False))
    return t


def word_piece(pre, norm=None):
    t = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    t.pre_tokenizer, t.decoder = pre, decoders.WordPiece()
    if norm:
        t.normalizer = norm
    t.train_from_iterator(TEXT, trainers.WordPieceTrainer(vocab_size=400, special_tokens=["[UNK]", "[SEP]"], show_progress=False))
    return t


def word_level(pre, norm=None):
    t = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    t.pre_tokenizer = pre
    if norm:
        t.normalizer = norm
    t.train_from_iterator(TEXT, trainers.WordLevelTrainer(vocab_size=400, special_tokens=["[UNK]", "[SEP]"], show_progress=False))
    return t


def with_added(t, flags, special=False, names=NAMES):
    t.add_tokens([AddedToken(name, special=special, **flags) for name in names])
    return t


def all_flags(t, first=0):
    """Another combination of flags for each name."""
    t.add_tokens([AddedToken(name, **FLAGS[(first + 5 * i) % len(FLAGS)]) for i, name in enumerate(NAMES)])
    return t


def tokenizers():
    """Pairs of a name and a function that makes the tokenizer."""
    n, p = normalizers, pre_tokenizers
    meta = lambda scheme, cut: p.Metaspace(prepend_scheme=scheme, split=cut)
    prepend = lambda: n.Sequence([n.Prepend("▁"), n.Replace(" ", "▁")])
    found = {
        "gpt2": lambda: byte_bpe(p.ByteLevel(add_prefix_space=False)),
        "gpt2_prefix": lambda: byte_bpe(p.ByteLevel(add_prefix_space=True)),
        "gpt2_nfc": lambda: byte_bpe(p.ByteLevel(add_prefix_space=False), n.NFC()),
        "gpt2_split": lambda: byte_bpe(byte_split(GPT2)),
        "digits": lambda: byte_bpe(p.Sequence([p.Digits(True), p.ByteLevel(add_prefix_space=False)])),
        "digits_together": lambda: byte_bpe(p.Sequence([p.Digits(False), p.ByteLevel(add_prefix_space=False)])),
        "qwen": lambda: byte_bpe(byte_split(QWEN)),
        "qwen_nfc": lambda: byte_bpe(byte_split(QWEN), n.NFC()),
        "qwen_nfd": lambda: byte_bpe(byte_split(QWEN), n.NFD()),
        "qwen35_nfc": lambda: byte_bpe(byte_split(QWEN35), n.NFC()),
        "llama3": lambda: byte_bpe(byte_split(LLAMA3)),
        "cl100k": lambda: byte_bpe(byte_split(CL100K)),
        "o200k": lambda: byte_bpe(byte_split(O200K)),
        "o200k_nfkc": lambda: byte_bpe(byte_split(O200K), n.NFKC()),
        "deepseek": lambda: byte_bpe(byte_split(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK)),
        "bloom": lambda: byte_bpe(byte_split(BLOOM)),
        "falcon": lambda: byte_bpe(p.Sequence([p.Punctuation("contiguous"), p.ByteLevel(add_prefix_space=False), p.Digits(False), split("[0-9][0-9][0-9]")])),
        "clip": lambda: byte_bpe(p.Sequence([split(CLIP, "removed", True), p.ByteLevel(add_prefix_space=False)]), n.Sequence([n.NFC(), n.Replace(Regex(r"\s+"), " "), n.Lowercase()])),
        "bytes_only": lambda: byte_bpe(p.ByteLevel(add_prefix_space=False, use_regex=False), size=256),
        "bytes_nfc": lambda: byte_bpe(p.ByteLevel(add_prefix_space=False, use_regex=False), n.NFC(), size=256),
        "llama2": lambda: spaced_bpe(norm=prepend()),
        "metaspace_first": lambda: spaced_bpe(meta("first", False)),
        "metaspace_always": lambda: spaced_bpe(meta("always", False)),
        "metaspace_never": lambda: spaced_bpe(meta("never", True)),
        "metaspace_split": lambda: spaced_bpe(meta("first", True)),
        "gemma": lambda: spaced_bpe(p.Split(" ", "merged_with_previous"), n.Replace(" ", "▁")),
        "t5": lambda: unigram(p.Sequence([p.WhitespaceSplit(), meta("always", True)]), n.Sequence([n.Nmt(), n.NFKC(), n.Replace(Regex(" {2,}"), " ")])),
        "unigram_metaspace": lambda: unigram(meta("always", True), n.NFKC()),
        "unigram_never": lambda: unigram(p.Sequence([p.WhitespaceSplit(), meta("never", True)])),
        "albert": lambda: unigram(p.Sequence([p.WhitespaceSplit(), meta("always", True)]),
                                  n.Sequence([n.Replace("``", '"'), n.Replace("''", '"'), n.NFKD(), n.StripAccents(), n.Lowercase()])),
        "bert": lambda: word_piece(p.BertPreTokenizer(), n.BertNormalizer()),
        "bert_cased": lambda: word_piece(p.BertPreTokenizer(), n.BertNormalizer(lowercase=False, strip_accents=False)),
        "whitespace": lambda: word_level(p.Whitespace()),
        "whitespace_split": lambda: word_level(p.WhitespaceSplit(), n.Lowercase()),
        "punctuation": lambda: word_piece(p.Sequence([p.WhitespaceSplit(), p.Punctuation("merged_with_next")])),
        "scripts": lambda: word_level(p.Sequence([p.UnicodeScripts(), p.Whitespace()])),
        "delimiter": lambda: word_level(p.CharDelimiterSplit(" ")),
        "fixed_length": lambda: byte_bpe(p.Sequence([p.FixedLength(5), p.ByteLevel(add_prefix_space=False, use_regex=False)])),
        "byte_normalizer": lambda: byte_bpe(split("Ġ?[a-z]+|."), n.ByteLevel()),
        "strip": lambda: word_level(p.Whitespace(), n.Sequence([n.Strip(), n.StripAccents()])),
        "replace": lambda: byte_bpe(byte_split(QWEN), n.Sequence([n.Replace(Regex(r"(?i)the|\d{2}+"), "§"), n.Replace("ß", "ss"), n.NFC()])),
        "merged_next": lambda: byte_bpe(p.Sequence([split(" ", "merged_with_next"), p.ByteLevel(add_prefix_space=False, use_regex=False)])),
        "merged_previous": lambda: byte_bpe(p.Sequence([split(r"\n|\. ", "merged_with_previous"), p.ByteLevel(add_prefix_space=False, use_regex=False)])),
        "contiguous": lambda: byte_bpe(p.Sequence([split(r"\w", "contiguous"), p.ByteLevel(add_prefix_space=False, use_regex=False)])),
        "string": lambda: byte_bpe(p.Sequence([p.Split("the", "isolated"), p.ByteLevel(add_prefix_space=True)])),
        "added_qwen": lambda: all_flags(byte_bpe(byte_split(QWEN), n.NFC())),
        "added_qwen_1": lambda: all_flags(byte_bpe(byte_split(QWEN), n.NFC()), 1),
        "added_gpt2": lambda: all_flags(byte_bpe(p.ByteLevel(add_prefix_space=False)), 2),
        "added_o200k": lambda: all_flags(byte_bpe(byte_split(O200K), n.NFKC()), 3),
        "added_lowercase": lambda: all_flags(byte_bpe(byte_split(LLAMA3), n.Sequence([n.NFD(), n.Lowercase()])), 4),
        "added_llama2": lambda: all_flags(spaced_bpe(norm=prepend()), 1),
        "added_metaspace": lambda: all_flags(spaced_bpe(meta("first", False)), 3),
        "added_always": lambda: all_flags(spaced_bpe(meta("always", True)), 2),
        "added_t5": lambda: all_flags(unigram(p.Sequence([p.WhitespaceSplit(), meta("always", True)]), n.NFKC()), 1),
        "added_bert": lambda: all_flags(word_piece(p.BertPreTokenizer(), n.BertNormalizer()), 4),
        "added_plain": lambda: with_added(byte_bpe(byte_split(QWEN), n.NFC()), FLAGS[0]),
        "added_normalized": lambda: with_added(byte_bpe(byte_split(QWEN), n.NFC()), FLAGS[1]),
        "added_words": lambda: with_added(byte_bpe(byte_split(LLAMA3)), dict(single_word=True, normalized=True), names=["tiếng", "the", "cat", "Straße", "ab"]),
        "added_masks": lambda: with_added(byte_bpe(byte_split(LLAMA3)), dict(lstrip=True, rstrip=True), names=["<mask>", "<x>", "<think>"]),
        "added_overlapping": lambda: with_added(with_added(byte_bpe(byte_split(QWEN)), FLAGS[0], True, ["<x>y", "thecat", "ab"]), FLAGS[0], names=["y", "cat", "the", "b<"]),
    }
    for number, regex in enumerate(SPELLINGS):
        found[f"spelling_{number}"] = lambda regex=regex: byte_bpe(byte_split(regex))
    return found


def end(t):
    """Adds the token that ends documents."""
    t.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    return t
