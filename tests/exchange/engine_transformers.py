"""transformers as the engine, in any Python that has it with torch; engine_mlx.py describes the protocol.

    python engine_transformers.py REQUEST.json RESPONSE.json
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM


@torch.no_grad()
def answer(run):
    # Widened when all is read: asked to read FP8 in another type, transformers 5.23 leaves what is not FP8 in bf16.
    # torch's grouped products of experts refuse rows that are no multiple of 16 bytes.
    model = AutoModelForCausalLM.from_pretrained(
        run["folder"], dtype="auto", attn_implementation="eager", experts_implementation="eager"
    )
    if run["dtype"] == "float32":
        model = model.float()
    cache, rows = None, []
    given = run["prompt"]
    for token in run["forced"]:
        out = model(torch.tensor([given]), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        rows.append(out.logits[0, -1].float().tolist())
        given = [token]
    return {"logits": rows}


def main():
    torch.set_num_threads(2)
    transformers.utils.logging.set_verbosity_error()
    request = json.loads(Path(sys.argv[1]).read_text())
    runs = []
    for run in request["runs"]:
        try:
            runs.append(answer(run))
        except Exception as error:  # What the engine refuses is a result.
            runs.append({"error": f"{type(error).__name__}: {error}"})
    engine = f"transformers {transformers.__version__}"
    Path(sys.argv[2]).write_text(json.dumps({"engine": engine, "runs": runs}))


main()
