"""mlx-lm as the engine: reads a request, writes the logits that mlx-lm computes.

    python engine_mlx.py REQUEST.json RESPONSE.json

The protocol of all engines here. The request is {"runs": [{"folder", "dtype", "prompt", "forced"}]}: a Hugging Face
folder, "float32" or "native" (the type that the weights are stored in), the prompt's token ids, and the tokens that
are appended after it one by one. The answer is {"engine", "runs": [{"logits"} or {"error"}]}; logits[t] are those
after the prompt and forced[:t], through the engine's own cache, for every t up to len(forced) - 1.
"""

import json
import sys
from pathlib import Path

import mlx.core as mx
import mlx_lm
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

mx.set_default_device(mx.cpu)


def answer(run):
    model, _ = load_model(Path(run["folder"]))
    if run["dtype"] == "float32":
        model.set_dtype(mx.float32)
    cache = make_prompt_cache(model)
    rows = []
    given = run["prompt"]
    for token in run["forced"]:
        logits = model(mx.array([given]), cache=cache)[0, -1]
        rows.append(logits.astype(mx.float32).tolist())
        given = [token]
    return {"logits": rows}


def main():
    request = json.loads(Path(sys.argv[1]).read_text())
    runs = []
    for run in request["runs"]:
        try:
            runs.append(answer(run))
        except Exception as error:  # What the engine refuses is a result.
            runs.append({"error": f"{type(error).__name__}: {error}"})
    engine = f"mlx-lm {mlx_lm.__version__}"
    Path(sys.argv[2]).write_text(json.dumps({"engine": engine, "runs": runs}))


main()
