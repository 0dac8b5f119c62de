"""safetensors files by hand: a reader of its own, so that no library's view of a type stands between file and comparison."""

import json
import struct
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Tensor:
    """A tensor as it lies in a file."""

    dtype: str
    shape: tuple
    data: bytes

    def as_fp32(self):
        """The values widened, which is exact, as the bits of fp32."""
        if self.dtype == "F32":
            return np.frombuffer(self.data, np.uint32)
        if self.dtype == "BF16":
            return np.frombuffer(self.data, np.uint16).astype(np.uint32) << 16
        if self.dtype == "F16":
            return np.frombuffer(self.data, np.float16).astype(np.float32).view(np.uint32)
        raise ValueError(f"element type {self.dtype}")


def of_floats(values):
    return Tensor("F32", (len(values),), np.asarray(values, np.float32).tobytes())


def widened(tensor):
    return Tensor("F32", tensor.shape, tensor.as_fp32().tobytes())


def rounded(tensor, dtype):
    """The same tensor in another element type, rounded to nearest even."""
    if dtype == tensor.dtype:
        return tensor
    bits = tensor.as_fp32()
    if dtype == "BF16":
        data = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    elif dtype == "F16":
        data = bits.view(np.float32).astype(np.float16)
    else:
        raise ValueError(f"element type {dtype}")
    return Tensor(dtype, tensor.shape, data.tobytes())


def read(path):
    """Every tensor of a file, or of a folder's files: those that its index names, or the single one."""
    if path.is_dir():
        index = path / "model.safetensors.index.json"
        if not index.exists():
            return read(path / "model.safetensors")
        where = json.loads(index.read_text())["weight_map"]
        files = {name: read(path / name) for name in set(where.values())}
        held = {name for file in files.values() for name in file}
        if held != set(where):
            raise ValueError(f"{index} and the shards differ: {sorted(held ^ set(where))}")
        return {name: files[file][name] for name, file in where.items()}
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    tensors = {}
    for name, info in header.items():
        start, end = (8 + length + offset for offset in info["data_offsets"])
        tensors[name] = Tensor(info["dtype"], tuple(info["shape"]), raw[start:end])
    return tensors


def write(folder, tensors, shards):
    """Writes `tensors` in that many files, with an index if there are several."""
    names = sorted(tensors)
    cut = [names[at::shards] for at in range(shards)]
    if shards == 1:
        write_file(folder / "model.safetensors", tensors)
        return
    where = {}
    for at, part in enumerate(cut):
        file = f"model-{at + 1:05}-of-{shards:05}.safetensors"
        write_file(folder / file, {name: tensors[name] for name in part})
        where.update({name: file for name in part})
    total = sum(len(tensor.data) for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def write_file(path, tensors):
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [at, at + len(tensor.data)]}
        at += len(tensor.data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(t.data for t in tensors.values()))
