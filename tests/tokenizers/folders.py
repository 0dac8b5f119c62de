"""Folders whose files disagree: ids of xtrain beside those of AutoTokenizer.

    python tests/tokenizers/folders.py --xtrain target/debug/xtrain [NAME ...]

Tokens that only side files name, classes that build the pipeline themselves, and keys of tokenizer_config.json that change ids. For
each folder the documents that xtrain writes must have the ids of transformers, with special tokens as plain text; and both
transformers and `tokenizers` alone must give the saved tokenizer the same vocabulary, flags and ids, with special tokens.
"""
import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TRANSFORMERS_VERBOSITY="error")

from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

import documents
import shapes
from library import shards

CHAT = ["Hello <|im_start|>user<|im_end|> x", "<think> x</think>", "a <mask>  b", " leading", "  two", "the cat<s>the", "tie\u0302\u0301ng Việt e\u0301", "中 \u4e2d文 Mixed CASE", "▁a ▁ b"]


def token(content, special=True, **flags):
    return {"content": content, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": special, **flags}


def typed(content, **flags):
    return {"__type": "AddedToken", **token(content, **flags)}


def byte_level():
    return shapes.end(shapes.byte_bpe(pre_tokenizers.ByteLevel(add_prefix_space=False)))


def qwen():
    return shapes.end(shapes.byte_bpe(shapes.byte_split(shapes.QWEN), normalizers.NFC()))


def no_end():
    return shapes.byte_bpe(shapes.byte_split(shapes.QWEN))


def in_vocabulary():
    """Tokens in the vocabulary that are no added tokens."""
    t = shapes.byte_bpe(shapes.byte_split(shapes.QWEN))
    content = json.loads(t.to_str())
    for name in ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]:
        content["model"]["vocab"][name] = len(content["model"]["vocab"])
    return Tokenizer.from_str(json.dumps(content))


def added():
    t = qwen()
    t.add_tokens([AddedToken("<think>", normalized=False), AddedToken("cat", lstrip=True)])
    return t


def gap():
    """An added token with an id that the library does not give it."""
    content = json.loads(qwen().to_str())
    content["added_tokens"].append({"id": 900, **token("<|im_end|>")})
    return content


def ignoring_merges():
    content = json.loads(qwen().to_str())
    content["model"]["ignore_merges"] = True
    return content


def llama2():
    return shapes.spaced_bpe(norm=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]))


def with_template(t, begin, after=None):
    ids = [(begin, t.token_to_id(begin))] + ([(after, t.token_to_id(after))] if after else [])
    t.post_processor = processors.TemplateProcessing(single=f"{begin} $A" + (f" {after}" if after else ""), special_tokens=ids)
    return t


def wide():
    """More than 100,000 tokens, of a Mistral model."""
    content = json.loads(qwen().to_str())
    vocab = content["model"]["vocab"]
    for number in range(100_000):
        vocab[f"unused{number}"] = len(vocab)
    content["added_tokens"] = []
    return content


GPT2 = {"tokenizer_class": "GPT2Tokenizer"}
QWEN = {"tokenizer_class": "Qwen2Tokenizer"}
LLAMA = {"tokenizer_class": "LlamaTokenizer"}
FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
END = {"eos_token": "<|endoftext|>"}
DECODER = lambda start, *tokens: {"added_tokens_decoder": {str(start + i): t for i, t in enumerate(tokens)}}
CHAT_TOKENS = (token("<|endoftext|>"), token("<|im_start|>"), token("<|im_end|>", lstrip=True), token("<think>", False), token("cat", False, single_word=True, normalized=True))


def size(make):
    t = make()
    return Tokenizer.from_str(json.dumps(t)).get_vocab_size() if isinstance(t, dict) else t.get_vocab_size()


def cases():
    """Name: tokenizer, tokenizer_config.json, other files."""
    last = size(qwen) - 1
    m = lambda model, **keys: {"config.json": {"model_type": model, **keys}}
    s = lambda **keys: {"special_tokens_map.json": keys}
    a = lambda **keys: {"added_tokens.json": keys}
    found = {
        "decoder_qwen": (qwen, QWEN | {"eos_token": "<|im_end|>"} | DECODER(last, *CHAT_TOKENS), {}),
        "decoder_fast": (qwen, FAST | {"eos_token": "<|im_end|>"} | DECODER(last, *CHAT_TOKENS), {}),
        "decoder_no_class": (qwen, END | DECODER(last, *CHAT_TOKENS), {}),
        "decoder_gap": (qwen, FAST | END | DECODER(last + 7, *CHAT_TOKENS[1:]), {}),
        "decoder_far": (qwen, QWEN | END | DECODER(100_000, *CHAT_TOKENS[1:]), {}),
        "decoder_other_id": (qwen, FAST | END | DECODER(3, *CHAT_TOKENS), {}),
        "decoder_other_flags": (added, FAST | END | DECODER(last, token("<|endoftext|>", rstrip=True), token("<think>", True, lstrip=True), token("cat", False)), {}),
        "decoder_drops": (added, QWEN | END | DECODER(last, token("<|endoftext|>")), {}),
        "decoder_empty": (added, QWEN | END | {"added_tokens_decoder": {}}, {}),
        "decoder_over_map": (qwen, FAST | END | DECODER(last, token("<|endoftext|>")), s(eos_token="<|im_end|>", pad_token="<pad>")),
        "decoder_names_flags": (qwen, FAST | {"eos_token": "<|im_end|>", "pad_token": "<pad>"} | DECODER(last, token("<|endoftext|>"), token("<|im_end|>", False, lstrip=True)), {}),
        "map_only": (qwen, FAST, s(eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>", "<|im_end|>"])),
        "map_over_config": (qwen, FAST | END, s(eos_token="<|im_end|>")),
        "map_dicts": (qwen, FAST, s(eos_token=token("<|im_end|>", lstrip=True), bos_token=token("<s>", normalized=True))),
        "map_extra": (qwen, FAST | END | {"extra_special_tokens": ["<a>"]}, s(extra_special_tokens=["<a>", "<b>", {"content": "<c>", "rstrip": True}])),
        "map_extra_dict": (qwen, FAST | END, s(extra_special_tokens={"image_token": "<image>", "end_token": "<end>"})),
        "map_and_config_extra": (qwen, FAST | END | {"extra_special_tokens": ["<a>"]}, s(additional_special_tokens=["<b>"])),
        "map_own": (qwen, FAST | END, s(image_token="<image>")),
        "added_json": (qwen, FAST | END, a(**{"<|im_start|>": last + 1, "<think>": last + 2, "tiếng": last + 3})),
        "added_json_special": (qwen, FAST | END | {"additional_special_tokens": ["<|im_start|>"]}, a(**{"<|im_start|>": last + 2, "<think>": last + 1})),
        "added_json_conflict": (added, FAST | END, a(**{"<other>": last, "<think>": last + 9})),
        "additional": (qwen, FAST | END | {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}, {}),
        "additional_typed": (qwen, FAST | END | {"additional_special_tokens": [typed("<|im_start|>", lstrip=True), "<|im_end|>"]}, {}),
        "additional_empty_extra": (qwen, FAST | END | {"additional_special_tokens": ["<a>"], "extra_special_tokens": []}, {}),
        "extra_list": (qwen, FAST | END | {"extra_special_tokens": ["<|im_start|>", typed("<mask>", lstrip=True)]}, {}),
        "extra_dict": (qwen, FAST | END | {"extra_special_tokens": {"image_token": "<image>", "mask2_token": typed("<mask>", rstrip=True)}}, {}),
        "extra_and_additional": (qwen, FAST | END | {"extra_special_tokens": ["<a>"], "additional_special_tokens": ["<b>"]}, {}),
        "model_specific": (qwen, FAST | END | {"model_specific_special_tokens": {"image_token": "<image>", "x": "<x>"}}, {}),
        "own_name": (qwen, FAST | END | {"image_token": "<image>", "video_token": "<video>"}, {}),
        "own_name_and_specific": (qwen, FAST | END | {"image_token": "<image>", "model_specific_special_tokens": {"x": "<x>"}}, {}),
        "own_name_typed": (qwen, FAST | END | {"image_token": typed("<image>", rstrip=True)}, {}),
        "names": (qwen, FAST | {k + "_token": f"<{k}>" for k in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}, {}),
        "names_equal": (qwen, FAST | {"eos_token": "<e>", "pad_token": "<e>", "bos_token": "<e>"}, {}),
        "names_typed": (qwen, FAST | {"eos_token": typed("<e>", lstrip=True, special=False), "pad_token": "<e>"}, {}),
        "names_null": (qwen, QWEN | {"eos_token": None, "pad_token": None, "unk_token": None}, {}),
        "in_vocabulary": (in_vocabulary, FAST | {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}, {}),
        "in_vocabulary_qwen": (in_vocabulary, QWEN, {}),
        "no_end_gpt2": (no_end, GPT2, {}),
        "no_end_qwen": (no_end, QWEN | DECODER(size(no_end), token("<think>", False)), {}),
        "gap_in_file": (gap, FAST | END, {}),
        "gap_in_file_qwen": (gap, QWEN | END, {}),
        "split_special": (qwen, FAST | END | {"split_special_tokens": True, "additional_special_tokens": ["<|im_start|>"]}, {}),
        "gpt2": (byte_level, GPT2 | END, {}),
        "gpt2_prefix": (byte_level, GPT2 | END | {"add_prefix_space": True}, {}),
        "gpt2_prefix_null": (byte_level, GPT2 | END | {"pad_token": "<pad>"}, {}),
        "gpt2_over_qwen": (qwen, GPT2 | END, {}),
        "gpt2_of_model": (qwen, END, m("gpt2")),
        "fast_prefix": (byte_level, FAST | END | {"add_prefix_space": True}, {}),
        "qwen": (qwen, QWEN | END, {}),
        "qwen_fast": (no_end, {"tokenizer_class": "Qwen2TokenizerFast"} | END, {}),
        "qwen_prefix": (qwen, QWEN | END | {"add_prefix_space": True}, {}),
        "qwen_ignoring_merges": (ignoring_merges, QWEN | END, {}),
        "qwen_of_model": (no_end, END, m("qwen3")),
        "qwen_llama_class": (no_end, {"tokenizer_class": "LlamaTokenizerFast"} | END, m("qwen2")),
        "qwen35": (qwen, {"tokenizer_class": "Qwen3_5Tokenizer"} | END, {}),
        "neox": (byte_level, {"tokenizer_class": "GPTNeoXTokenizer"} | END, {}),
        "neox_prefix": (qwen, {"tokenizer_class": "GPTNeoXTokenizerFast", "add_prefix_space": True} | END, {}),
        "cohere": (qwen, {"tokenizer_class": "CohereTokenizer"} | END, {}),
        "cohere_flags": (qwen, {"tokenizer_class": "CohereTokenizer"} | END | DECODER(last, token("<|endoftext|>", lstrip=True), token("<MASK_TOKEN>", lstrip=True)), {}),
        "roberta": (byte_level, {"tokenizer_class": "RobertaTokenizer", "add_prefix_space": True}, {}),
        "bart": (byte_level, {"tokenizer_class": "BartTokenizerFast"}, {}),
        "llama": (llama2, LLAMA, {}),
        "llama_legacy": (llama2, LLAMA | {"legacy": True}, {}),
        "llama_not_legacy": (llama2, LLAMA | {"legacy": False}, m("llama")),
        "llama_null_legacy": (llama2, LLAMA | {"legacy": None, "add_prefix_space": None}, {}),
        "llama_no_prefix": (llama2, LLAMA | {"add_prefix_space": False}, {}),
        "llama_added": (llama2, LLAMA | DECODER(0, token("<unk>"), token("<s>"), token("</s>")) | {"pad_token": "<pad>"}, {}),
        "llama_added_words": (llama2, LLAMA, a(**{"tiếng": 505, "<think>": 506})),
        "llama_bytes": (qwen, LLAMA | END, m("llama")),
        "llama_template": (lambda: with_template(llama2(), "<s>"), LLAMA | {"add_bos_token": False}, {}),
        "mistral": (llama2, LLAMA | {"legacy": True}, m("mistral")),
        "mixtral": (llama2, LLAMA, m("mixtral")),
        "code_llama": (llama2, {"tokenizer_class": "CodeLlamaTokenizer"}, {}),
        "gemma": (lambda: shapes.spaced_bpe(pre_tokenizers.Split(" ", "merged_with_previous"), normalizers.Replace(" ", "▁")), {"tokenizer_class": "GemmaTokenizer"}, {}),
        "gemma_over_llama": (llama2, {"tokenizer_class": "GemmaTokenizerFast"}, {}),
        "bert": (lambda: shapes.word_piece(pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer()), {"tokenizer_class": "BertTokenizer"}, {}),
        "bert_cased": (lambda: shapes.word_piece(pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer()), {"tokenizer_class": "BertTokenizer", "do_lower_case": False}, {}),
        "bert_options": (lambda: shapes.word_piece(pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer()),
                         {"tokenizer_class": "DistilBertTokenizerFast", "tokenize_chinese_chars": False, "strip_accents": False}, {}),
        "t5": (lambda: shapes.unigram(pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])), {"tokenizer_class": "T5Tokenizer"}, {}),
        "t5_few": (lambda: shapes.unigram(pre_tokenizers.Metaspace(), normalizers.NFKC()), {"tokenizer_class": "T5Tokenizer", "extra_ids": 3}, {}),
        "t5_named": (lambda: shapes.unigram(pre_tokenizers.Metaspace()), {"tokenizer_class": "T5Tokenizer", "additional_special_tokens": ["<extra_id_0>", "<a>"]}, {}),
        "electra": (lambda: shapes.word_piece(pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer(lowercase=False)), {"tokenizer_class": "ElectraTokenizerFast"}, {}),
        "layoutlm": (lambda: shapes.word_piece(pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer(lowercase=False)), {"tokenizer_class": "LayoutLMTokenizer"}, {}),
        "longformer_prefix": (qwen, {"tokenizer_class": "LongformerTokenizerFast", "add_prefix_space": True} | END, {}),
        "led_prefix": (qwen, {"tokenizer_class": "LEDTokenizer", "add_prefix_space": True} | END, {}),
        "phi3": (llama2, LLAMA | {"tokenizer_class": "Phi3Tokenizer", "add_prefix_space": False}, {}),
        "xlm_roberta": (lambda: shapes.unigram(pre_tokenizers.Metaspace()), {"tokenizer_class": "XLMRobertaTokenizer"}, {}),
        "xlm_no_prefix": (lambda: shapes.unigram(pre_tokenizers.Metaspace()), {"tokenizer_class": "XLMRobertaTokenizer", "add_prefix_space": False}, {}),
        "mistral_regex": (wide, FAST | END | {"fix_mistral_regex": True}, m("mistral", transformers_version="4.50.0")),
        "mistral_regex_new": (wide, FAST | END | {"fix_mistral_regex": True}, m("mistral", transformers_version="5.1.0")),
        "mistral_regex_llama": (wide, FAST | END | {"fix_mistral_regex": True}, m("llama")),
        "unknown_class": (qwen, {"tokenizer_class": "FooTokenizer"} | END, {}),
        "bloom": (qwen, {"tokenizer_class": "BloomTokenizerFast"} | END, {}),
    }
    # Sentinels of T5 over lists of further tokens, in tokenizer_config.json and in special_tokens_map.json.
    keys = ["extra_special_tokens", "additional_special_tokens"]
    for extra, additional in itertools.product([(), None, [], {}, ["<x>"], {"x_token": "<x>"}], [(), None, [], ["<x>"]]):
        lists = {key: value for key, value in zip(keys, [extra, additional]) if value != ()}
        t5 = lambda: shapes.unigram(pre_tokenizers.Metaspace())
        found[f"t5_lists {json.dumps(lists)}"] = (t5, {"tokenizer_class": "T5Tokenizer"} | lists, {})
        found[f"t5_map {json.dumps(lists)}"] = (t5, {"tokenizer_class": "T5Tokenizer"}, {"special_tokens_map.json": lists})
    return found


# Classes that are not reproduced: xtrain must name them.
NAMED = {
    "named_albert": (lambda: shapes.unigram(pre_tokenizers.Metaspace()), {"tokenizer_class": "AlbertTokenizer", "eos_token": "</s>"}, {}, "AlbertTokenizer"),
    "named_python": (qwen, {"tokenizer_class": "CTRLTokenizer"} | END, {}, "CTRLTokenizer"),
    "named_qwen2": (no_end, FAST | END, {"config.json": {"model_type": "qwen2"}}, "Qwen2Tokenizer"),
    "named_code": (qwen, FAST | END | {"auto_map": {"AutoTokenizer": ["x.Y", None]}}, {}, "auto_map"),
}


def write(folder, tokenizer, config, files):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if isinstance(tokenizer, dict):
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    else:
        tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in (files | {"tokenizer_config.json": config}).items():
        (folder / name).write_text(json.dumps(content))


def flags(tokenizer):
    return {i: (str(t), t.lstrip, t.rstrip, t.single_word, t.normalized, t.special) for i, t in tokenizer.get_added_tokens_decoder().items()}


def plain(tokenizer, texts):
    """Ids with special tokens as plain text."""
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.no_truncation()
    copy.encode_special_tokens = True
    return [copy.encode(text, add_special_tokens=False).ids for text in texts]


def compare(name, case, options):
    make, config, files = case[:3]
    folder, out = Path(options.work) / name, Path(options.work) / f"{name}.shards"
    write(folder, make(), config, files)
    shutil.rmtree(out, ignore_errors=True)
    texts = CHAT + documents.documents(options.documents, ["<|im_start|>", "<think>", "cat", "tiếng", "<pad>", "</s>"], 3)
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    command = [options.xtrain, "tokenize", folder / "texts.jsonl", "--tokenizer", folder, "--out", out]
    run = subprocess.run(command, capture_output=True, text=True)
    if "no token ends a document" in run.stderr:
        run = subprocess.run(command + ["--end-of-document", "a"], capture_output=True, text=True)
    (folder / "texts.jsonl").unlink()
    if run.returncode != 0:
        return [f"exit {run.returncode}: {run.stderr.strip()}"], run.stderr
    found = []
    if len(case) == 4:
        return ([] if case[3] in run.stderr else [f"{case[3]} is not named: {run.stderr}"]), run.stderr
    hf = AutoTokenizer.from_pretrained(folder)
    backend = hf._tokenizer
    # Documents may begin with tokens of a template.
    begin = len(shards(out)[0]) - len(plain(backend, texts[:1])[0])
    right, given = plain(backend, texts), [ids[begin:] for ids in shards(out)]
    for text, wanted, got in zip(texts, right, given):
        if wanted != got:
            found.append(f"{text!a}\n    right  {wanted}\n    xtrain {got}")
            break
    vocabulary = json.loads((out / "dataset.json").read_text())["vocab_size"]
    if vocabulary != max(hf.get_vocab().values()) + 1:
        found.append(f"vocabulary: right {max(hf.get_vocab().values()) + 1}, xtrain {vocabulary}")
    saved = {"tokenizers": Tokenizer.from_file(str(out / "tokenizer.json")), "transformers": AutoTokenizer.from_pretrained(out)._tokenizer}
    if files.get("config.json"):
        (out / "config.json").write_text(json.dumps(files["config.json"]))
        saved["transformers, beside the model"] = AutoTokenizer.from_pretrained(out)._tokenizer
        (out / "config.json").write_text(json.dumps({"model_type": "llama"}))
        saved["transformers, beside a Llama"] = AutoTokenizer.from_pretrained(out)._tokenizer
    # Special tokens of a text are tokens for these.
    texts = CHAT + texts[:30]
    split = config.get("split_special_tokens", False)
    right = hf(texts, add_special_tokens=False)["input_ids"]
    for engine, tokenizer in saved.items():
        if tokenizer.get_vocab() != backend.get_vocab():
            found.append(f"saved, {engine}: {set(tokenizer.get_vocab().items()) ^ set(backend.get_vocab().items())}")
        if flags(tokenizer) != flags(backend):
            found.append(f"saved, {engine}: flags {set(flags(tokenizer).items()) ^ set(flags(backend).items())}")
        tokenizer.encode_special_tokens = split
        tokenizer.no_truncation()
        for text, wanted in zip(texts, right):
            got = tokenizer.encode(text, add_special_tokens=False).ids
            if got != wanted:
                found.append(f"saved, {engine}: {text!a}\n    right  {wanted}\n    given  {got}")
                break
    return found, run.stderr


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--xtrain", required=True)
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--work", default="/tmp/xtrain-tokenizers")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    failed, begun, made_of = 0, time.time(), cases() | NAMED
    for name in options.names or made_of:
        found, messages = compare(name, made_of[name], options)
        print(name, "same" if not found else "OTHER", *found, sep=" " if not found else "\n  ", flush=True)
        if options.verbose:
            print("   ", messages.strip())
        failed += bool(found)
    print(f"{len(options.names or made_of)} folders, {failed} with other ids, {time.time() - begun:.0f} s")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
