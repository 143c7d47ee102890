"""GGUF files: metadata and tensors, read over a memory map, nothing believed before it is checked.

A file is: a header (magic, version, counts), key-value metadata, tensor infos, padding, tensor data. Opening walks the
first three; values are decoded when asked for, so that a vocabulary of 262,144 strings costs nothing until then.

Source: the GGUF specification (`docs/gguf.md` of the GGML library), versions 2 and 3, little-endian.
"""
from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from weights.files import map_file
from weights.ggml import TYPES, UNSUPPORTED, GgmlType, weight_from_bytes
from weights.quant import Dense, Weight, dequantize

_T = TypeVar("_T", str, int, float, bool)

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

# Value types of the metadata: number in the file -> NumPy type.
_NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}
_BOOL, _STRING, _ARRAY = 7, 8, 9

# Bounds that no real file comes near; they keep the time spent on a hostile one below a second.
_MAX_KEYS = 1 << 16
_MAX_TENSORS = 1 << 16
_MAX_STRINGS = 1 << 22                      # in all string arrays together
_MAX_KEY_BYTES = 65535
_MAX_NAME_BYTES = 64
_MAX_DIMS = 4


@dataclass(frozen=True, slots=True)
class _Value:
    """Where a metadata value lies. Of an array, `kind` is the elements' type and `count` their number."""
    kind: int
    position: int
    count: int | None                       # None: not an array


@dataclass(frozen=True, slots=True)
class _Tensor:
    kind: GgmlType
    shape: tuple[int, ...]                  # outermost first: [N, K]; the file has it reversed
    position: int
    nbytes: int


class Gguf:
    """An open GGUF file."""

    def __init__(self, path: Path) -> None:
        """Raises: ValueError naming the file and the cause if it is unreadable, truncated, padded or inconsistent."""
        self.path = path
        self._map = map_file(path)
        self._position = 0
        self._num_strings = 0
        self._values: dict[str, _Value] = {}
        self._tensors: dict[str, _Tensor] = {}
        num_tensors, num_keys = self._read_header()
        for _ in range(num_keys):
            self._read_key()
        self._read_tensors(num_tensors)
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self.nbytes = sum(tensor.nbytes for tensor in self._tensors.values())

    # Metadata

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def keys(self) -> list[str]:
        """The metadata keys, in the file's order."""
        return list(self._values)

    def get(self, key: str, kind: type[_T]) -> _T | None:
        """The value of a key that holds a single `kind`, None if the file has no such key.

        `int` takes every integer width, `float` both float widths.

        Raises: ValueError if the value is of another type or damaged.
        """
        value = self._values.get(key)
        if value is None:
            return None
        found: object = None
        if value.count is None and value.kind == _STRING:
            found = self._string_at(value.position, key)[0]
        elif value.count is None and value.kind == _BOOL:
            byte = self._map[value.position]
            if byte > 1:
                raise self._error(f"metadata key {key} holds {byte}, a bool is 0 or 1")
            found = byte == 1
        elif value.count is None:
            found = np.frombuffer(self._map, _NUMBERS[value.kind], 1, value.position)[0].item()
        if type(found) is not kind:         # NOTE: not isinstance, a bool is no integer here
            raise self._error(f"metadata key {key} is not a single {kind.__name__}")
        return found

    def require(self, key: str, kind: type[_T]) -> _T:
        """As `get`. Raises: ValueError also if the file has no such key."""
        value = self.get(key, kind)
        if value is None:
            raise self._error(f"metadata key {key} is missing")
        return value

    def get_strings(self, key: str) -> list[str] | None:
        """An array of strings, None if the file has no such key.

        Raises: ValueError if the value is not an array of strings, or not UTF-8.
        """
        value = self._values.get(key)
        if value is None:
            return None
        if value.count is None or value.kind != _STRING:
            raise self._error(f"metadata key {key} is not an array of strings")
        strings, position = [], value.position
        for _ in range(value.count):
            text, position = self._string_at(position, key)
            strings.append(text)
        return strings

    def get_numbers(self, key: str) -> NDArray[np.generic] | None:
        """An array of numbers in the file's own width, None if the file has no such key.

        Raises: ValueError if the value is not an array of numbers.
        """
        value = self._values.get(key)
        if value is None:
            return None
        if value.count is None or value.kind not in _NUMBERS:
            raise self._error(f"metadata key {key} is not an array of numbers")
        return np.frombuffer(self._map, _NUMBERS[value.kind], value.count, value.position).copy()

    # Tensors

    def weight(self, name: str) -> Weight:
        """A two-dimensional tensor [N, K]: a read-only view of the mapped file.

        Raises: ValueError if there is no such tensor or it is not two-dimensional.
        """
        tensor = self._tensor(name, 2)
        raw = np.frombuffer(self._map, np.uint8, tensor.nbytes, tensor.position)
        return weight_from_bytes(tensor.kind, raw, tensor.shape[0], f"{self.path}: tensor {name}")

    def vector(self, name: str) -> NDArray[np.float32]:
        """A one-dimensional tensor [N] as float32, copied.

        Raises: ValueError if there is no such tensor, it is not one-dimensional, or is quantised.
        """
        tensor = self._tensor(name, 1)
        raw = np.frombuffer(self._map, np.uint8, tensor.nbytes, tensor.position)
        if tensor.kind.weights_per_block > 1:
            raise self._error(f"tensor {name}: a vector of type {tensor.kind.name} is not supported")
        row = weight_from_bytes(tensor.kind, raw, 1, name)
        assert isinstance(row, Dense), "an unquantised type became something else"
        return dequantize(row).flatten()

    def _tensor(self, name: str, num_dims: int) -> _Tensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise self._error(f"tensor {name} is missing")
        if len(tensor.shape) != num_dims:
            raise self._error(f"tensor {name} has shape {tensor.shape}, {num_dims} dimensions were expected")
        return tensor

    # Walking the file. `_position` is the next unread byte; it never passes the end.

    def _error(self, cause: str) -> ValueError:
        return ValueError(f"{self.path}: {cause}")

    def _take(self, num_bytes: int, what: str) -> int:
        """Step over `num_bytes` and return where they begin."""
        start = self._position
        if num_bytes > len(self._map) - start:
            raise self._error(f"truncated: {what} at byte {start} needs {num_bytes} bytes, "
                              f"{len(self._map) - start} are left")
        self._position += num_bytes
        return start

    def _take_u32(self, what: str) -> int:
        return cast(int, _U32.unpack_from(self._map, self._take(4, what))[0])

    def _take_u64(self, what: str) -> int:
        return cast(int, _U64.unpack_from(self._map, self._take(8, what))[0])

    def _take_name(self, max_bytes: int, what: str) -> str:
        start = self._position
        length = self._take_u64(f"the length of {what}")
        if not 0 < length <= max_bytes:
            raise self._error(f"{what} at byte {start} is {length} bytes long, 1 to {max_bytes} are allowed")
        self._take(length, what)
        return self._string_at(start, what)[0]

    def _string_at(self, position: int, what: str) -> tuple[str, int]:
        """The string whose length field is at `position` (walked before, so inside the file), and where it ends."""
        start = position + 8
        end = start + _U64.unpack_from(self._map, position)[0]
        try:
            return self._map[start:end].decode(), end
        except UnicodeDecodeError as error:
            raise self._error(f"{what}: not UTF-8: {error}") from None

    def _read_header(self) -> tuple[int, int]:
        magic = self._map[self._take(4, "the magic"):4]
        if magic != b"GGUF":
            raise self._error(f"not a GGUF file: it begins with {magic!r}")
        version = self._take_u32("the version")
        if version not in (2, 3):
            raise self._error(f"GGUF version {version} is not supported (2 and 3 are; big-endian files are not)")
        num_tensors = self._take_u64("the number of tensors")
        num_keys = self._take_u64("the number of metadata keys")
        if num_tensors > _MAX_TENSORS:
            raise self._error(f"{num_tensors} tensors, at most {_MAX_TENSORS} are allowed")
        if num_keys > _MAX_KEYS:
            raise self._error(f"{num_keys} metadata keys, at most {_MAX_KEYS} are allowed")
        return num_tensors, num_keys

    def _read_key(self) -> None:
        key = self._take_name(_MAX_KEY_BYTES, "a metadata key")
        if key in self._values:
            raise self._error(f"metadata key {key} appears twice")
        what = f"metadata key {key}"
        kind = self._take_u32(what)
        count = None
        if kind == _ARRAY:
            kind = self._take_u32(what)
            count = self._take_u64(what)
        start = self._position
        if kind == _STRING:
            self._skip_strings(1 if count is None else count, what)
        elif kind == _BOOL or kind in _NUMBERS:
            width = 1 if kind == _BOOL else np.dtype(_NUMBERS[kind]).itemsize
            self._take(width * (1 if count is None else count), what)
        else:
            raise self._error(f"{what}: value type {kind} is not supported here")
        self._values[key] = _Value(kind, start, count)

    def _skip_strings(self, count: int, what: str) -> None:
        self._num_strings += count
        if self._num_strings > _MAX_STRINGS:
            raise self._error(f"{what}: more than {_MAX_STRINGS} strings in the metadata")
        # The one hot loop of opening a file (every token and merge), hence without `_take`.
        data, position, last = self._map, self._position, len(self._map) - 8
        for _ in range(count):
            if position > last:
                raise self._error(f"truncated: the strings of {what} pass the end of the file")
            position += 8 + _U64.unpack_from(data, position)[0]
        self._take(position - self._position, what)

    def _read_tensors(self, num_tensors: int) -> None:
        infos = [self._read_tensor_info() for _ in range(num_tensors)]
        alignment = self.get("general.alignment", int)
        if alignment is None:
            alignment = 32
        if alignment < 8 or alignment.bit_count() != 1:
            raise self._error(f"general.alignment {alignment} is not a power of two from 8 on")
        size = len(self._map)
        data_start = self._position + -self._position % alignment       # may lie past the end, if no tensor follows
        # Tensors lie one after the other in the order of their infos, each padded: so none overlaps another, and every
        # byte of the file belongs to one.
        expected = 0
        for name, kind, shape, offset in infos:
            if name in self._tensors:
                raise self._error(f"tensor {name} appears twice")
            nbytes = math.prod(shape) // kind.weights_per_block * kind.block_bytes
            if offset != expected:
                raise self._error(f"tensor {name} is at offset {offset}, {expected} was expected")
            if nbytes > size - data_start - offset:
                raise self._error(f"truncated: tensor {name} ends at byte {data_start + offset + nbytes}, "
                                  f"the file has {size}")
            self._tensors[name] = _Tensor(kind, shape, data_start + offset, nbytes)
            expected += nbytes + -nbytes % alignment
        if size > data_start + expected:
            raise self._error(f"{size - data_start - expected} bytes follow the last tensor")

    def _read_tensor_info(self) -> tuple[str, GgmlType, tuple[int, ...], int]:
        name = self._take_name(_MAX_NAME_BYTES, "a tensor name")
        what = f"tensor {name}"
        num_dims = self._take_u32(what)
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self._error(f"{what} has {num_dims} dimensions, 1 to {_MAX_DIMS} are allowed")
        shape = tuple(self._take_u64(what) for _ in range(num_dims))[::-1]
        if min(shape) < 1:
            raise self._error(f"{what} has an empty shape {shape}")
        number = self._take_u32(what)
        if number not in TYPES:
            raise self._error(f"{what} has type {UNSUPPORTED.get(number, number)}, which is not supported "
                              f"({', '.join(kind.name for kind in TYPES.values())} are)")
        kind = TYPES[number]
        if shape[-1] % kind.weights_per_block:
            raise self._error(f"{what} of type {kind.name} has rows of {shape[-1]} weights, "
                              f"not a multiple of its block of {kind.weights_per_block}")
        return name, kind, shape, self._take_u64(what)
