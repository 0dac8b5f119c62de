#!/usr/bin/env python3
"""Compares masks with transformers on TRL's templates, and prints the method that each stock template gets.

Run by hand, as compare.py. For each stock template: our mask by prefixes. For each training template: our
mask by spans, against the spans of transformers after removing what the generation prompt supplies and what
follows the first stop token; then, where stock and training template render the same text in one sample, the
mask by prefixes against that by spans.
"""

import argparse
import collections
import json
import subprocess
import sys

from conversations import CONVERSATIONS
from packages import trl_templates
from reference import TODAY, VARIABLES, cut_spans, render

# The first that the name begins with.
STOPS = {
    "cohere": ["<|END_OF_TURN_TOKEN|>"],
    "deepseek": ["<｜end▁of▁sentence｜>"],
    "diffusion_gemma": ["<turn|>"],
    "gemma4": ["<turn|>", "<|tool_response>"],
    "gemma": ["<end_of_turn>"],
    "glm4moe": ["<|user|>", "<|observation|>", "<|endoftext|>"],
    "gptoss": ["<|return|>", "<|call|>", "<|end|>"],
    "idefics3": ["<end_of_utterance>"],
    "llama3": ["<|eot_id|>", "<|eom_id|>"],
    "muse_glimmer": ["<|eot|>", "<|eom|>"],
    "phi3": ["<|end|>"],
    "smolvlm": ["<end_of_utterance>"],
    "": ["<|im_end|>"],
}

ONE = [{"role": "user", "content": "Why is the sky blue?"}, {"role": "assistant", "content": "Air scatters blue light."}]


def stops_of(name):
    return next(stops for prefix, stops in STOPS.items() if name.startswith(prefix))


def reference_mask(source, messages, tools, stops):
    """Text, ranges in bytes, and the bytes removed before and after; or None if transformers refuses."""
    whole = render(source, messages, tools, False, VARIABLES)
    if "error" in whole:
        return None
    text = whole["text"].encode()
    prompts = []
    for at, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = render(source, messages[:at], tools, True, VARIABLES).get("text")
            if prompt is not None and text.startswith(prompt.encode()):
                prompts.append(len(prompt.encode()))

    def end_of_stop(start, end):
        found = [(text.find(stop.encode(), start, end), len(stop.encode())) for stop in stops]
        return min((place + length for place, length in found if place >= 0), default=None)

    ranges, before, after, endless = cut_spans(whole["spans"], prompts, end_of_stop)
    return {"text": whole["text"], "ranges": ranges, "before": before, "after": after, "endless": endless}


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--render", required=True)
    given = options.parse_args()
    conversations = [{"name": "one answer", "messages": ONE}] + CONVERSATIONS
    paths, requests = sorted(trl_templates().glob("*.jinja")), []
    for path in paths:
        for conversation in conversations:
            stops = stops_of(path.name)
            requests.append({
                "template": str(path), "messages": conversation["messages"], "tools": conversation.get("tools"),
                "kwargs": VARIABLES, "today": TODAY, "stops": stops, "special": stops,
            })
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    output = subprocess.run([given.render], input=lines, capture_output=True, text=True, check=True).stdout
    answers = iter(map(json.loads, output.rstrip("\n").split("\n")))
    found = {(path.name, conversation["name"]): next(answers) for path in paths for conversation in conversations}
    counts, removed, wrong = collections.Counter(), collections.Counter(), 0
    for path in paths:
        if not path.stem.endswith("_training"):
            methods = [found[path.name, conversation["name"]] for conversation in conversations[:2]]
            shown = [answer.get("method") or (answer.get("mask_error") or answer.get("error"))[-150:] for answer in methods]
            print(f"{path.stem:32} one: {shown[0]:20} two: {shown[1]}")
            for place, answer in zip(["one", "two"], methods):
                counts[f"{place} answer(s): {answer.get('method', 'refused')}"] += 1
            continue
        for conversation in conversations:
            name = conversation["name"]
            ours = found[path.name, name]
            theirs = reference_mask(path.read_text(), conversation["messages"], conversation.get("tools"), stops_of(path.name))
            if theirs is None or not theirs["ranges"]:
                counts["spans: refused or empty in transformers"] += 1
                continue
            if "samples" not in ours:
                kind = "spans: refused (no stop token)" if theirs["endless"] else "spans: refused"
                counts[kind] += 1
                if not theirs["endless"]:
                    print(f"{path.stem}, {name}: {ours.get('mask_error') or ours.get('error')}")
                continue
            sample = ours["samples"][0]
            if sample["text"] != theirs["text"] or sample["trained"] != theirs["ranges"]:
                wrong += 1
                print(f"{path.stem}, {name}:\n  ours   {sample['trained']}\n  theirs {theirs['ranges']}")
                continue
            counts["spans: equal"] += 1
            removed["before, bytes"] += theirs["before"]
            removed["after, bytes"] += theirs["after"]
            stock = found.get((path.name.replace("_training", ""), name), {})
            if stock.get("method") == "by prefixes" and stock["samples"][0]["text"] == sample["text"]:
                equal = stock["samples"][0]["trained"] == sample["trained"]
                counts["prefixes against spans: " + ("equal" if equal else "different")] += 1
                if not equal:
                    wrong += 1
                    text = sample["text"].encode()
                    show = lambda ranges: [text[start:end].decode() for start, end in ranges]
                    print(f"{path.stem}, {name}:\n  prefixes {show(stock['samples'][0]['trained'])}\n  spans    {show(sample['trained'])}")
    print(json.dumps(counts, indent=2), json.dumps(removed))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
