"""Checkpoints in safetensors: one file, or an index and its shards, read over memory maps.

A file is: the header's length (8 bytes), the header (JSON: a name to dtype, shape and byte range), the data. The
`safetensors` library checks the header; the data are read here, because NumPy knows no bfloat16.

Source: the safetensors format (README of the safetensors library).
"""
from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from weights.files import map_file, parse_json_object, read_json
from weights.quant import Dense, Weight, dequantize

# Dtypes that can be loaded: NumPy's type for the raw bits.
_LOADABLE = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_MAX_HEADER_BYTES = 8 << 20                 # a header of 50,000 tensors; parsing more would cost seconds and memory

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, eq=False)
class _Tensor:
    path: Path
    data: mmap.mmap
    dtype: str
    shape: tuple[int, ...]
    position: int
    num_bytes: int


class Checkpoint:
    """The tensors of a Hugging Face folder."""

    def __init__(self, folder: Path) -> None:
        """Raises: ValueError naming the file and the cause if a file is missing, damaged or not what the index says."""
        self.path = folder
        index = folder / INDEX_FILE
        if (folder / SINGLE_FILE).exists():
            self._tensors = _read_file(folder / SINGLE_FILE)
        elif index.exists():
            self._tensors = _read_shards(index)
        else:
            raise ValueError(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE} is there (other formats are not read)")
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self.nbytes = sum(tensor.num_bytes for tensor in self._tensors.values())

    def weight(self, name: str) -> Weight:
        """A two-dimensional tensor [N, K]: a read-only view of the mapped file.

        Raises: ValueError if there is no such tensor, it is not two-dimensional, or of a dtype that is not supported.
        """
        return self._dense(name, 2)

    def vector(self, name: str) -> NDArray[np.float32]:
        """A one-dimensional tensor [N] as float32, copied. Raises: as `weight`."""
        return dequantize(self._dense(name, 1)).flatten()

    def _dense(self, name: str, num_dims: int) -> Dense:
        """The tensor as [N, K], a vector as [1, N]."""
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ValueError(f"{self.path}: tensor {name} is missing")
        if len(tensor.shape) != num_dims:
            raise ValueError(f"{tensor.path}: tensor {name} has shape {tensor.shape}, "
                             f"{num_dims} dimensions were expected")
        if tensor.dtype not in _LOADABLE:
            raise ValueError(f"{tensor.path}: tensor {name} has dtype {tensor.dtype}, which is not supported "
                             f"({', '.join(_LOADABLE)} are)")
        flat = np.frombuffer(tensor.data, _LOADABLE[tensor.dtype], math.prod(tensor.shape), tensor.position)
        # NOTE: a header of odd length leaves the data unaligned, which compiled code may not expect.
        flat = np.require(flat, requirements="A")
        return Dense(flat.reshape(-1, tensor.shape[-1]), is_bf16=tensor.dtype == "BF16")


def _read_shards(index: Path) -> dict[str, _Tensor]:
    """The tensors of all shards that an index names.

    Raises: ValueError if a shard is missing, or index and shards disagree about which tensor is where.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: no weight_map")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ValueError(f"{index}: tensor {name} is in {shard!r}, which is not a file name")
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not (index.parent / shard).is_file()]
    if missing:
        raise ValueError(f"{index}: {len(missing)} of {len(shards)} shards are missing: {_some(missing)}")
    tensors: dict[str, _Tensor] = {}
    for shard in shards:
        found = _read_file(index.parent / shard)
        misplaced = sorted(name for name in found if weight_map.get(name) != shard)
        if misplaced:
            raise ValueError(f"{index.parent / shard}: tensors that {index.name} does not place there: "
                             f"{_some(misplaced)}")
        tensors |= found
    absent = sorted(weight_map.keys() - tensors.keys())
    if absent:
        raise ValueError(f"{index}: tensors that their shard does not hold: {_some(absent)}")
    return tensors


def _some(names: list[str]) -> str:
    """The first few names, for a message."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _read_file(path: Path) -> dict[str, _Tensor]:
    """The tensors of one file. Raises: ValueError naming the file and the cause."""
    data = map_file(path)
    size = len(data)
    if size < 8:
        raise ValueError(f"{path}: truncated: {size} bytes cannot hold a header")
    header_bytes = int.from_bytes(data[:8], "little")
    if header_bytes > _MAX_HEADER_BYTES:
        raise ValueError(f"{path}: a header of {header_bytes} bytes, at most {_MAX_HEADER_BYTES} are allowed")
    if header_bytes > size - 8:
        raise ValueError(f"{path}: truncated: a header of {header_bytes} bytes, the file has {size}")
    try:
        text = data[8:8 + header_bytes].decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: the header is not UTF-8: {error}") from None
    header = parse_json_object(text, path)      # the library would let the last of two equal names win
    try:
        with safe_open(path, framework="numpy"):
            pass                                # opening checks every dtype, shape, offset and the file's size
    except SafetensorError as error:
        raise ValueError(f"{path}: damaged: {error}") from None
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = _Tensor(path, data, entry["dtype"], tuple(entry["shape"]),
                                8 + header_bytes + begin, end - begin)
    return tensors
