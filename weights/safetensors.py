"""Checkpoints in safetensors: one file, or an index and its shards, read over memory maps.

A file is: the header's length (8 bytes), the header (JSON: a name to dtype, shape and byte range), the data. The
reader is our own because its checks and messages are the point: a damaged file must be refused, by name and cause,
before anything is allocated for it; and NumPy knows no bfloat16.

Source: the safetensors format (README of the safetensors library).
"""
from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weights.files import map_file, parse_json_object, read_json
from weights.quant import Dense, Weight, dequantize

# Weights of every dtype that can be loaded: NumPy's type for the raw bits. Of the others the size is known, so that a
# file that also holds such a tensor can be checked.
_LOADABLE = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}
_MAX_HEADER_BYTES = 16 << 20                # a header of 100,000 tensors; parsing more would cost seconds and memory

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, eq=False)
class _Tensor:
    path: Path
    data: mmap.mmap
    dtype: str
    shape: tuple[int, ...]
    position: int


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
        self.nbytes = sum(_num_bytes(tensor.dtype, tensor.shape) for tensor in self._tensors.values())

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


def _num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * _ITEM_BYTES[dtype]


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
    header = parse_json_object(text, path)
    header.pop("__metadata__", None)
    spans = sorted((*_checked_entry(path, name, entry), name) for name, entry in header.items())
    # The format leaves no gaps, so one pass in the order of the data finds overlaps, gaps, cuts and trailing bytes.
    expected = 0
    for begin, end, name in spans:
        if begin != expected:
            raise ValueError(f"{path}: tensor {name} begins at offset {begin}, {expected} was expected: "
                             f"{'overlapping tensors' if begin < expected else 'a gap before it'}")
        expected = end
    data_start = 8 + header_bytes
    if expected > size - data_start:
        raise ValueError(f"{path}: truncated: tensors need {expected} bytes after the header, "
                         f"{size - data_start} are there")
    if expected < size - data_start:
        raise ValueError(f"{path}: {size - data_start - expected} bytes follow the last tensor")
    return {name: _Tensor(path, data, header[name]["dtype"], tuple(header[name]["shape"]), data_start + begin)
            for begin, _, name in spans}


def _checked_entry(path: Path, name: str, entry: Any) -> tuple[int, int]:
    """Begin and end of a tensor's data, once its header entry is found consistent.

    Raises: ValueError naming the file, the tensor and the cause.
    """
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{path}: tensor {name}: its header entry needs dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise ValueError(f"{path}: tensor {name} has unknown dtype {dtype!r}")
    if not _are_counts(shape):
        raise ValueError(f"{path}: tensor {name} has a bad shape {shape!r}")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"{path}: tensor {name} has bad data_offsets {offsets!r}")
    begin, end = offsets
    num_bytes = _num_bytes(dtype, tuple(shape))
    if end - begin != num_bytes:
        raise ValueError(f"{path}: tensor {name}: data_offsets {begin} to {end} hold {end - begin} bytes, "
                         f"{dtype} of shape {shape} needs {num_bytes}")
    return begin, end


def _are_counts(values: Any) -> bool:
    """Whether this is a list of few integers that a file could hold. (JSON's true is not an integer here.)"""
    return isinstance(values, list) and len(values) <= 16 and all(type(v) is int and 0 <= v < 1 << 63 for v in values)
