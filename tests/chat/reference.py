"""Renderings of transformers, with spans in bytes."""

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
