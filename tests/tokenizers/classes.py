"""Writes crates/data/src/tokenizer/transformers/classes.json from the installed transformers.

    python tests/tokenizers/classes.py            # writes the file
    python tests/tokenizers/classes.py --check    # fails if transformers has changed

The file says which class of transformers reads the tokenizer of a model, which classes build the pipeline themselves instead of reading
it from tokenizer.json, and which other names these classes have.
"""
import json
import sys
from pathlib import Path

from transformers.convert_slow_tokenizer import SLOW_TO_FAST_CONVERTERS
from transformers.models.auto import tokenization_auto as auto
from transformers.tokenization_utils_tokenizers import TokenizersBackend
import transformers

FILE = Path(__file__).parents[2] / "crates/data/src/tokenizer/transformers/classes.json"
GENERIC = ("TokenizersBackend", "PreTrainedTokenizer", "PreTrainedTokenizerBase", "AutoTokenizer", "MistralCommonBackend")


def short(name):
    return name.removesuffix("Fast")


def builder(name):
    """The class that builds the pipeline of the class `name`; None if that reads tokenizer.json, or is none of transformers."""
    found = auto.tokenizer_class_from_name(name)
    if not (isinstance(found, type) and issubclass(found, TokenizersBackend)):
        # In Python alone, or a class whose dependencies are not installed.
        return found and short(name)
    base = next(base for base in found.__mro__ if "__init__" in base.__dict__)
    return None if base is TokenizersBackend else short(base.__name__)


def builders():
    """The classes that build a pipeline, by all names under which transformers knows them; `Fast` is left out unless it matters."""
    # Names without a class of their own stand for the class with the same converter.
    names = {name for name in dir(transformers) if name.endswith(("Tokenizer", "TokenizerFast"))} | set(SLOW_TO_FAST_CONVERTERS)
    names |= {name for name in auto.TOKENIZER_MAPPING_NAMES.values() if name is not None}
    names = {short(name) for name in names if not name.startswith("Auto") and "Model" not in name and "Config" not in name}
    found = {}
    for name in sorted(names - set(GENERIC)):
        slow, fast = builder(name), builder(name + "Fast")
        if slow or fast:
            found[name] = slow or fast
        # Only some classes in Python alone have a `Fast` one that is another.
        if slow and fast and fast != slow:
            found[name + "Fast"] = fast
    return found


def tables():
    models = {model: name for model, name in auto.TOKENIZER_MAPPING_NAMES.items() if name is not None}
    own = builders()
    return {
        "models": dict(sorted(models.items())),
        "ignores_named_class": sorted(auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS),
        "own_pipeline": sorted(set(own.values())),
        "aliases": {name: real for name, real in own.items() if name != real},
    }


if __name__ == "__main__":
    text = json.dumps(tables(), indent=1) + "\n"
    if sys.argv[1:] == ["--check"]:
        if FILE.read_text() != text:
            sys.exit(f"{FILE} is not that of transformers {transformers.__version__}; run this script without --check")
    else:
        FILE.write_text(text)
