"""Renderings of transformers, with spans in bytes; and what of a span is trained."""

import datetime

from transformers.utils import chat_template_utils as utils

TODAY = "2026-11-28"

# Variables that a tokenizer would give.
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}


class FixedDate(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(*map(int, TODAY.split("-")))


utils.datetime = FixedDate


def render(source, messages, tools, prompt, kwargs):
    """`{"text", "spans"}`, or `{"error"}` if transformers refuses."""
    try:
        messages = utils._normalize_chat_messages(normalise(messages))
        texts, spans = utils.render_jinja_template(
            conversations=[messages],
            tools=tools,
            documents=None,
            chat_template=source,
            return_assistant_tokens_mask=True,
            add_generation_prompt=prompt,
            **kwargs,
        )
    except Exception as error:  # Jinja2's errors, and Python's errors inside templates.
        return {"error": f"{type(error).__name__}: {error}"}
    text = texts[0]
    in_bytes = lambda at: len(text[:at].encode())
    return {"text": text, "spans": [[in_bytes(start), in_bytes(end)] for start, end in spans[0]]}


def cut_spans(spans, prompts, end_of_stop):
    """The trained part of each span that `{% generation %}` marks: without what the generation prompt supplies, and
    without what follows the first stop token.

    `prompts` are lengths of the texts up to an answer, with the generation prompt; `end_of_stop(start, end)` is the
    position after the first stop token between two positions, or None. Returns the parts, how much was removed before
    and after them, and the number of spans without a stop token. All positions are bytes, or all are tokens.
    """
    parts, before, after, endless = [], 0, 0, 0
    for start, end in spans:
        if start == end:
            continue
        begin = max((place for place in prompts if start <= place < end), default=start)
        cut = end_of_stop(begin, end)
        endless += cut is None
        cut = end if cut is None else cut
        before, after = before + begin - start, after + end - cut
        parts.append([begin, cut])
    return parts, before, after, endless


def normalise(messages):
    """Arguments in a string of JSON become the object, as servers do before they render."""
    import copy
    import json

    messages = copy.deepcopy(messages)
    for message in messages:
        for call in message.get("tool_calls") or []:
            function = call.get("function") or call
            if isinstance(function.get("arguments"), str):
                try:
                    value = json.loads(function["arguments"])
                except ValueError:
                    continue
                if isinstance(value, dict):
                    function["arguments"] = value
    return messages
