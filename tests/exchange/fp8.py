"""FP8 exports: every byte and scale computed again from the fp32 export, and what readers are told.

E4M3 is taken from its definition (arXiv 2209.05433, table 1) and numbers are looked up among all that it has, in float64:
nothing is shared with xtrain's casts.
"""

import json

import numpy as np
from transformers import FineGrainedFP8Config

import weights

BLOCK = 128
LARGEST = 448.0


def e4m3_values():
    """The values of the patterns 0 to 126, which are the numbers from 0 on; the next one is a NaN."""
    patterns = np.arange(127)
    exponent, mantissa = patterns >> 3, patterns & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7.0)
    return np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)


VALUES = e4m3_values()


def e4m3(values):
    """The bytes of float64 numbers, each the nearest one; of two equally near the one with an even pattern."""
    size = np.minimum(np.abs(values), LARGEST)
    below = np.searchsorted(VALUES, size, side="right") - 1
    above = np.minimum(below + 1, len(VALUES) - 1)
    to_below, to_above = size - VALUES[below], VALUES[above] - size
    up = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0) & (above != below))
    return (np.where(up, above, below) | (np.signbit(values) << 7)).astype(np.uint8)


def blocks_of(tensor):
    """E4M3 and scale_inv of an fp32 matrix, as bytes and as fp32 [rows / 128, columns / 128]."""
    x = np.frombuffer(tensor.data, np.float32).astype(np.float64).reshape(tensor.shape)
    down, across = (size // BLOCK for size in tensor.shape)
    blocks = x.reshape(down, BLOCK, across, BLOCK)
    largest = np.abs(blocks).max(axis=(1, 3))
    scale = 2.0 ** np.floor(np.log2(LARGEST / largest))
    return e4m3(blocks * scale[:, None, :, None]).reshape(tensor.shape), (1 / scale).astype(np.float32)


def faults(export, exact, in_bf16):
    """What is wrong with the FP8 folder `export` of which `exact` is the fp32 one; `in_bf16` names the layers without FP8."""
    given, found = weights.read(exact), weights.read(export)
    told = json.loads((export / "config.json").read_text())["quantization_config"]
    read = FineGrainedFP8Config(**told)
    if (read.quant_method, tuple(read.weight_block_size), read.activation_scheme) != ("fp8", (BLOCK, BLOCK), "dynamic"):
        yield f"transformers reads {read.to_dict()}"
    if told["fmt"] != "e4m3" or read.modules_to_not_convert != ["lm_head", *in_bf16]:
        yield f"wrong quantization_config: {told}"
    for name, tensor in given.items():
        now, scales = found.pop(name), found.pop(f"{name}_scale_inv", None)
        module = name.removesuffix(".weight")
        if not module.endswith("_proj") or module in in_bf16:
            if now != weights.rounded(tensor, "BF16") or scales:
                yield f"{name} is not bf16"
            continue
        numbers, inverse = blocks_of(tensor)
        if now != weights.Tensor("F8_E4M3", tensor.shape, numbers.tobytes()):
            yield f"{name} has other numbers"
        if scales != weights.Tensor("F32", inverse.shape, inverse.tobytes()):
            yield f"{name} has other scales"
    if found:
        yield f"tensors out of nowhere: {sorted(found)}"
