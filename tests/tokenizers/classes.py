"""Writes crates/data/src/tokenizer/transformers/classes.json from the installed transformers.

    python tests/tokenizers/classes.py            # writes the file
    python tests/tokenizers/classes.py --check    # fails if transformers has changed

The file says which class of transformers reads the tokenizer of a model, and which classes build the pipeline themselves instead of
reading it from tokenizer.json.
"""
import json
import sys
from pathlib import Path

from transformers.models.auto import tokenization_auto as auto
from transformers.tokenization_utils_tokenizers import TokenizersBackend
import transformers

FILE = Path(__file__).parents[2] / "crates/data/src/tokenizer/transformers/classes.json"
GENERIC = ("TokenizersBackend", "PreTrainedTokenizer", "PreTrainedTokenizerBase", "AutoTokenizer", "MistralCommonBackend")


def short(name):
    return name.removesuffix("Fast")


def reads_the_file(name):
    """True if the class takes normalizer and pre-tokenizer from tokenizer.json."""
    if name in GENERIC or name == "PreTrainedTokenizerFast":
        return True
    found = auto.tokenizer_class_from_name(name)
    if found is None:
        return True
    if not (isinstance(found, type) and issubclass(found, TokenizersBackend)):
        return False
    return "__init__" not in found.__dict__ and not any("__init__" in base.__dict__ and base is not TokenizersBackend
                                                        for base in found.__mro__[1:found.__mro__.index(TokenizersBackend)])


def tables():
    models = {model: name for model, name in auto.TOKENIZER_MAPPING_NAMES.items() if name is not None}
    names = set(models.values()) | {name for name in dir(transformers) if name.endswith(("Tokenizer", "TokenizerFast"))}
    names = {name for name in names if not name.startswith("Auto") and "Model" not in name and "Config" not in name}
    return {
        "models": dict(sorted(models.items())),
        "ignores_named_class": sorted(auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS),
        "own_pipeline": sorted({short(name) for name in names if not reads_the_file(name)}),
    }


if __name__ == "__main__":
    text = json.dumps(tables(), indent=1) + "\n"
    if sys.argv[1:] == ["--check"]:
        if FILE.read_text() != text:
            sys.exit(f"{FILE} is not that of transformers {transformers.__version__}; run this script without --check")
    else:
        FILE.write_text(text)
