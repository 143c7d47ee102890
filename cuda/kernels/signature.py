"""A kernel's parameter types, read from its C++ source: CuPy passes whatever it is given, at whatever size that has."""
from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from cuda.kernels.kernel_spec import source_text

_TYPES: dict[str, np.dtype[Any]] = {name: np.dtype(dtype) for names, dtype in (
    ("bool", np.bool_),
    ("int8_t|signed char", np.int8), ("uint8_t|unsigned char", np.uint8),
    ("int16_t|short", np.int16), ("uint16_t|unsigned short", np.uint16),
    ("int32_t|int", np.int32), ("uint32_t|unsigned|unsigned int", np.uint32),
    ("int64_t|long long", np.int64), ("uint64_t|unsigned long long|size_t", np.uint64),
    ("__half|half", np.float16), ("__nv_bfloat16", ml_dtypes.bfloat16), ("float", np.float32), ("double", np.float64),
) for name in names.split("|")}
_QUALIFIERS = re.compile(r"\b(?:const|volatile|__restrict__|__restrict|__grid_constant__)\b")
_COMMENTS = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    is_pointer: bool
    dtype: np.dtype[Any] | None             # of the value, or of what it points to; None: anything

    @property
    def scalar_type(self) -> type | None:
        return None if self.dtype is None else self.dtype.type

    def __str__(self) -> str:
        return f"{self.name} ({'any' if self.dtype is None else self.dtype}{'*' if self.is_pointer else ''})"


@cache
def signature(source: str, entry: str) -> tuple[Parameter, ...]:
    """Of the instance `entry`, such as "rms_norm<__nv_bfloat16, 128>", of a file of this folder."""
    return parse_signature(source_text(source), entry)


def parse_signature(text: str, entry: str) -> tuple[Parameter, ...]:
    """Raises: ValueError where the kernel is not there, or takes something by value that is no number."""
    text = _COMMENTS.sub(" ", text)
    name, _, given = entry.partition("<")
    for kernel in re.finditer(r"__global__", text):
        start = _after_attributes(text, kernel.end())
        opening = re.compile(rf"\s*{re.escape(name.strip())}\s*\(").match(text, start)
        if opening is None:
            continue
        values = dict(zip(_template_parameters(text[:kernel.start()]),
                          _split(given.rpartition(">")[0]), strict=False))
        end = _closing(text, opening.end() - 1)
        return tuple(_parameter(part, values, entry) for part in _split(text[opening.end():end]))
    raise ValueError(f"no kernel {name} in the source")


def check_arguments(source: str, entry: str, arguments: Sequence[Any], array_types: Any) -> None:
    """Raises: TypeError where their number differs from the parameters', or the type of one. array_types: a tuple."""
    parameters = signature(source, entry)
    if len(arguments) != len(parameters):
        raise TypeError(f"{entry} takes {len(parameters)} arguments, {len(arguments)} given")
    for argument, parameter in zip(arguments, parameters, strict=True):
        if not parameter.is_pointer:
            if type(argument) is not parameter.scalar_type:
                raise TypeError(f"{entry}: {parameter} is given {type(argument).__name__} {argument!r}")
        elif argument is not None and not (isinstance(argument, array_types) and argument.flags.c_contiguous
                                           and (parameter.dtype is None or argument.dtype == parameter.dtype)):
            given = f"{argument.dtype}{list(argument.shape)} with strides {list(argument.strides)}" \
                if isinstance(argument, array_types) else type(argument).__name__
            raise TypeError(f"{entry}: {parameter} is given {given}")


def _after_attributes(text: str, start: int) -> int:
    """Behind `void` and `__launch_bounds__(...)`, in whichever order they stand."""
    while match := re.compile(r"\s*(void\b|__launch_bounds__\s*\()").match(text, start):
        start = match.end() if match[1] == "void" else _closing(text, match.end() - 1) + 1
    return start


def _template_parameters(before: str) -> list[str]:
    """Names, in order, of the template that ends right there."""
    match = re.search(r"template\s*<([^{};]*)>\s*$", before)
    if match is None:
        return []
    return [part.partition("=")[0].split()[-1] for part in _split(match[1])]


def _parameter(text: str, values: dict[str, str], entry: str) -> Parameter:
    words = _QUALIFIERS.sub(" ", text).replace("*", " * ").split()
    name, is_pointer = words[-1], "*" in words
    type_name = " ".join(word for word in words[:-1] if word != "*")
    dtype = _TYPES.get(values.get(type_name, type_name))
    if dtype is None and not is_pointer:
        raise ValueError(f"{entry}: parameter {' '.join(text.split())} is neither a pointer nor a number")
    return Parameter(name, is_pointer, dtype)


def _closing(text: str, start: int) -> int:
    """Where the parenthesis that opens at `start` closes."""
    depth = 0
    for index in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index
    raise ValueError("a parenthesis is not closed")


def _split(text: str) -> list[str]:
    """At commas outside of brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += {"(": 1, "<": 1, ")": -1, ">": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]
