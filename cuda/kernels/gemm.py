"""Matrix products with packed weights: which kernel computes them, and what both promise.

Row-invariance: a row of the output has the same bits from either kernel, for any number of rows. cuBLAS, which is used
for many rows of dense weights where that need not hold, promises no such thing.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda.kernels.kernel_spec import Case, Instance, KernelSpec, launch
from cuda.kernels.packing import (
    ACTIVATIONS,
    GATE_TURN,
    SCALE_CHUNK,
    UNIT_BYTES,
    DeviceAffine,
    DeviceDense,
    DeviceLinear,
    pack_codes,
    unit_inputs,
    units_and_chunks,
    unpack_weight,
)
from cuda.kernels.types import ACTIVATION_TYPES, BF16, C_TYPES, FP16
from cuda.launcher import DeviceArray, Launcher

SOURCE = "gemm.cu"
SKINNY_ROWS = 32                                # tokens up to which weights are streamed past them
TOKEN_TILES = (1, 2, 4)                         # of 8 tokens, in a block of the skinny kernel
TILE_ROWS, TILE_TOKENS, STAGES = 128, 64, 3     # of a block of the tile kernel
MAX_K, MAX_N = 1 << 24, 1 << 19


def linear(launcher: Launcher, out: DeviceArray, x: DeviceArray, weight: DeviceLinear, deterministic: bool,
           softcap: float | None = None) -> None:
    """out [M, N] = x [M, K] W^T + bias, or with `weight.gated` [M, N / 2] = activation(gate) * up.

    out: of x's type T, or float32 (logits), then softcap * tanh(y / softcap) where it is given.
    deterministic: no cuBLAS, so that a row's bits depend on nothing but the row.

    Raises: ValueError naming shapes or types.
    """
    num_tokens = x.shape[0]
    if weight.in_columns != x.shape[1] or tuple(out.shape) != (num_tokens, weight.out_columns):
        raise ValueError(f"out {list(out.shape)} is not x {list(x.shape)} by weights of {weight.in_columns} inputs and "
                         f"{weight.out_columns} outputs")
    only = weight.parts[0]
    if (num_tokens > SKINNY_ROWS and not deterministic and weight.gated is None and out.dtype == x.dtype
            and len(weight.parts) == 1 and isinstance(only, DeviceDense)):
        launcher.matmul(x, only.data, out)
        if weight.bias is not None:
            add_bias(launcher, out, out, weight.bias)
        return
    multiply = skinny_gemm if num_tokens <= SKINNY_ROWS else tile_gemm
    first = 0
    for part in weight.parts:
        if isinstance(part, DeviceAffine):
            multiply(launcher, out, x, part.codes, part.scales, part.offsets, weight.bias, bits=part.bits,
                     group=part.group, scale_unit=part.scale_unit, first=first, gated=weight.gated, softcap=softcap)
        else:
            multiply(launcher, out, x, part.data, bias=weight.bias, first=first, gated=weight.gated, softcap=softcap)
        first += part.shape[0]


def skinny_gemm(launcher: Launcher, out: DeviceArray, x: DeviceArray, weight: DeviceArray,
                scales: DeviceArray | None = None, offsets: DeviceArray | None = None, bias: DeviceArray | None = None,
                *, bits: int = 16, group: int = 0, scale_unit: float = 1.0, first: int = 0, gated: str | None = None,
                softcap: float | None = None) -> None:
    """Columns first .. first + N of out, for any number of tokens; made for few.

    x [M, K] of type T. weight: [N, K] of T, or with bits 4 or 8 the arrays of `packing.DeviceAffine`. bias: float32, of
    all columns (of rows, where gated). out: T or, as logits, float32.

    Raises: ValueError naming shapes or types.
    """
    arguments = _arguments(out, x, weight, scales, offsets, bias, bits, group, scale_unit, first, gated, softcap)
    num_tokens, num_rows = x.shape[0], weight.shape[0]
    tiles = next((tiles for tiles in TOKEN_TILES if num_tokens <= tiles * 8), TOKEN_TILES[-1])
    grid = (-(-num_tokens // (tiles * 8)), -(-num_rows // (16 * _row_tiles(tiles))))
    entry = _skinny_entry(x.dtype, bits, _span(group), offsets is not None, tiles)
    launch(launcher, SOURCE, entry, grid, 128, arguments, _skinny_shared_bytes(bits))


def tile_gemm(launcher: Launcher, out: DeviceArray, x: DeviceArray, weight: DeviceArray,
              scales: DeviceArray | None = None, offsets: DeviceArray | None = None, bias: DeviceArray | None = None,
              *, bits: int = 16, group: int = 0, scale_unit: float = 1.0, first: int = 0, gated: str | None = None,
              softcap: float | None = None) -> None:
    """As `skinny_gemm`, to the same bits; made for many tokens."""
    arguments = _arguments(out, x, weight, scales, offsets, bias, bits, group, scale_unit, first, gated, softcap)
    grid = (-(-x.shape[0] // TILE_TOKENS), -(-weight.shape[0] // TILE_ROWS))
    entry = _tile_entry(x.dtype, bits, _span(group), offsets is not None)
    launch(launcher, SOURCE, entry, grid, 256, arguments, _tile_shared_bytes(bits))


def add_bias(launcher: Launcher, out: DeviceArray, x: DeviceArray, bias: DeviceArray) -> None:
    """out [M, N] = x [M, N] + bias [N], which is float32; out and x: of one 16-bit type, or the same array.

    Raises: ValueError naming shapes or types.
    """
    num_tokens, columns = x.shape
    if x.dtype not in ACTIVATION_TYPES or out.dtype != x.dtype or tuple(out.shape) != (num_tokens, columns):
        raise ValueError(f"out {out.dtype}{list(out.shape)} and x {x.dtype}{list(x.shape)} are not alike, of 16 bits")
    if bias.dtype != np.float32 or tuple(bias.shape) != (columns,):
        raise ValueError(f"bias {bias.dtype}{list(bias.shape)} is not float32[{columns}]")
    launch(launcher, SOURCE, f"add_bias<{C_TYPES[x.dtype]}>", (num_tokens, -(-columns // 256)), 256,
           (out, x, bias, np.int32(columns)))


def _arguments(out: DeviceArray, x: DeviceArray, weight: DeviceArray, scales: DeviceArray | None,
               offsets: DeviceArray | None, bias: DeviceArray | None, bits: int, group: int, scale_unit: float,
               first: int, gated: str | None, softcap: float | None) -> tuple[Any, ...]:
    """Both kernels' arguments, checked."""
    num_tokens, inputs = x.shape
    num_rows, columns = weight.shape[0], out.shape[1]
    is_logits = out.dtype == np.float32
    if x.dtype not in ACTIVATION_TYPES or not (is_logits or out.dtype == x.dtype):
        raise ValueError(f"x {x.dtype}, out {out.dtype}: a 16-bit type, that or float32")
    if bits == 16:
        if weight.dtype != x.dtype or tuple(weight.shape) != (num_rows, inputs) or inputs % 8:
            raise ValueError(f"weight {weight.dtype}{list(weight.shape)} is not {x.dtype}[N, {inputs}], or {inputs} no "
                             "multiple of 8")
    elif bits not in (4, 8) or group not in (16, 32, 64, 128) or inputs % group:
        raise ValueError(f"codes of {bits} bits in groups of {group} of {inputs} inputs: 4 or 8; 16, 32, 64 or 128")
    else:
        units, chunks = units_and_chunks(inputs, bits, group)
        if weight.dtype != np.uint8 or tuple(weight.shape) != (num_rows, units * UNIT_BYTES):
            raise ValueError(f"codes {weight.dtype}{list(weight.shape)} are not uint8[N, {units * UNIT_BYTES}]")
        for name, array in (("scales", scales), ("offsets", offsets)):
            if (array is None and name == "scales") or (array is not None and (
                    array.dtype != np.float16 or tuple(array.shape) != (num_rows, chunks * SCALE_CHUNK))):
                raise ValueError(f"{name} are not float16[{num_rows}, {chunks * SCALE_CHUNK}]")
    if gated not in ACTIVATIONS or (gated is not None and (num_rows % 16 or first or is_logits)):
        raise ValueError(f"gated={gated!r} with {num_rows} rows at column {first} of {out.dtype}: one of "
                         f"{ACTIVATIONS}, all rows in one launch, in sixteens")
    if softcap is not None and (not is_logits or softcap <= 0):
        raise ValueError(f"softcap={softcap} with out {out.dtype}: above 0, and for float32")
    all_rows = columns * (1 if gated is None else 2)
    if out.shape[0] != num_tokens or first < 0 or first + num_rows > all_rows or (gated and num_rows != all_rows):
        raise ValueError(f"out {list(out.shape)} has no room for {num_tokens} tokens and {num_rows} rows at {first}")
    if bias is not None and (bias.dtype != np.float32 or tuple(bias.shape) != (all_rows,)):
        raise ValueError(f"bias {bias.dtype}{list(bias.shape)} is not float32[{all_rows}]")
    if inputs > MAX_K or num_rows > MAX_N:
        raise ValueError(f"a weight of {num_rows} x {inputs}, at most {MAX_N} x {MAX_K}")
    return (None if is_logits else out, out if is_logits else None, x, weight, scales, offsets, bias,
            np.int32(num_tokens), np.int32(num_rows), np.int32(inputs), np.int32(max(group, 1).bit_length() - 1),
            np.float32(scale_unit), np.int32(first), np.int32(columns), np.int32(ACTIVATIONS.index(gated)),
            np.float32(softcap or 0.0))


def _span(group: int) -> int:
    """Inputs whose products with codes are summed before they are scaled."""
    return 16 if group == 16 else 32


def _row_tiles(token_tiles: int) -> int:
    return 1 if token_tiles == 1 else 2


def _skinny_entry(dtype: np.dtype[Any], bits: int, span: int, offsets: bool, token_tiles: int) -> str:
    return f"skinny_gemm<{C_TYPES[np.dtype(dtype)]}, {bits}, {span}, {str(offsets).lower()}, {token_tiles}>"


def _tile_entry(dtype: np.dtype[Any], bits: int, span: int, offsets: bool) -> str:
    return f"tile_gemm<{C_TYPES[np.dtype(dtype)]}, {bits}, {span}, {str(offsets).lower()}>"


def _skinny_shared_bytes(bits: int) -> int:
    """Four warps' rings: eight units of 16 rows, or four of 32, and the scales and offsets to them."""
    return 4 * 8 * 16 * (UNIT_BYTES + (0 if bits == 16 else 2 * SCALE_CHUNK * 2))


def _skinny_registers(bits: int, token_tiles: int) -> int:
    """So that a multiprocessor holds six, three and two blocks; of dense weights eight, five and four."""
    dense, codes = {1: (64, 80), 2: (96, 160), 4: (128, 216)}[token_tiles]
    return dense if bits == 16 else codes


def _tile_shared_bytes(bits: int) -> int:
    scales = 0 if bits == 16 else TILE_ROWS * 2 * SCALE_CHUNK * 2
    return STAGES * (TILE_ROWS * UNIT_BYTES + TILE_TOKENS * unit_inputs(bits) * 2 + scales)


def _reference(out: NDArray[Any], x: NDArray[Any], weight: NDArray[Any] | None = None,
               scales: NDArray[Any] | None = None, offsets: NDArray[Any] | None = None,
               bias: NDArray[np.float32] | None = None, *, kernel: str = "skinny", bits: int = 16, group: int = 0,
               scale_unit: float = 1.0, gated: str | None = None,
               softcap: float | None = None) -> dict[str, NDArray[Any]]:
    if weight is None:
        assert bias is not None, "a product or a bias"
        return {"out": (x.astype(np.float32) + bias).astype(out.dtype)}
    inputs = x.shape[1]
    matrix = unpack_weight(DeviceDense(weight) if bits == 16 else DeviceAffine(
        weight, scales, offsets, (len(weight), inputs), bits, group, scale_unit))
    y = x.astype(np.float64) @ matrix.T                                                             # [M, N]
    if bias is not None:
        y += bias
    if gated is not None:
        turns = y.reshape(len(y), -1, 2, GATE_TURN)                                                 # [M, N / 16, 2, 8]
        gate, up = turns[:, :, 0].reshape(len(y), -1), turns[:, :, 1].reshape(len(y), -1)
        active = gate / (1 + np.exp(-gate)) if gated == "silu" else \
            0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        y = active * up
    if softcap is not None:
        y = softcap * np.tanh(y / softcap)
    return {"out": y.astype(np.float32).astype(out.dtype)}


def _run(launcher: Launcher, kernel: str, **arguments: Any) -> None:
    wrappers: dict[str, Callable[..., None]] = {"skinny": skinny_gemm, "tile": tile_gemm, "bias": add_bias}
    wrappers[kernel](launcher, **arguments)


def _case(kernel: str, num_tokens: int, num_rows: int, inputs: int, dtype: Any = BF16, bits: int = 16, group: int = 0,
          offsets: bool = False, bias: bool = False, gated: str | None = None, logits: bool = False,
          softcap: float | None = None, large: bool = False) -> Case:
    def make(random: np.random.Generator) -> dict[str, Any]:
        x = random.standard_normal((num_tokens, inputs), np.float32)
        x[:, random.integers(0, inputs)] *= 50.0                # an outlier, as models have
        arguments: dict[str, Any] = {
            "kernel": kernel, "x": x.astype(dtype), "gated": gated, "softcap": softcap,
            "out": np.zeros((num_tokens, num_rows // (1 if gated is None else 2)), np.float32 if logits else dtype),
            "bias": random.standard_normal(num_rows, np.float32) if bias else None}
        if bits == 16:
            return arguments | {"weight": random.standard_normal((num_rows, inputs), np.float32).astype(dtype)}
        _, chunks = units_and_chunks(inputs, bits, group)
        shape, groups = (num_rows, chunks * SCALE_CHUNK), inputs // group
        scales = np.where(np.arange(shape[1]) < groups, random.uniform(-9, 9, shape), 0).astype(np.float16)
        codes = random.integers(0, 256, (num_rows, inputs * bits // 8), np.uint8)
        return arguments | {"weight": pack_codes(codes, bits, group), "scales": scales, "bits": bits, "group": group,
                            "offsets": scales[::-1].copy() if offsets else None, "scale_unit": 2.0**-7}

    name = (f"{kernel} {num_tokens} x {num_rows} x {inputs}, {np.dtype(dtype)}, {bits} bits"
            f"{f' in {group}' if group else ''}{' with offsets' if offsets else ''}{' and bias' if bias else ''}"
            f"{f', {gated}' if gated else ''}{', logits' if logits else ''}{f' below {softcap}' if softcap else ''}")
    return Case(name, make, large)


def _bias_case(num_tokens: int, columns: int, dtype: Any, large: bool = False) -> Case:
    def make(random: np.random.Generator) -> dict[str, Any]:
        return {"kernel": "bias", "out": np.zeros((num_tokens, columns), dtype),
                "x": random.standard_normal((num_tokens, columns), np.float32).astype(dtype),
                "bias": random.standard_normal(columns, np.float32)}

    return Case(f"bias {num_tokens} x {columns}, {np.dtype(dtype)}", make, large)


# Bits, span, whether there are offsets.
_FORMATS = [(16, 32, False),
            *((bits, span, offsets) for bits in (8, 4) for span in (32, 16) for offsets in (False, True))]

SPEC = KernelSpec(
    name="gemm",
    source=SOURCE,
    instances=(
        *(Instance(_skinny_entry(dtype, bits, span, offsets, tiles), 128, _skinny_registers(bits, tiles),
                   _skinny_shared_bytes(bits))
          for dtype in ACTIVATION_TYPES for bits, span, offsets in _FORMATS for tiles in TOKEN_TILES),
        *(Instance(_tile_entry(dtype, bits, span, offsets), 256, 144 if bits == 16 else 232, _tile_shared_bytes(bits))
          for dtype in ACTIVATION_TYPES for bits, span, offsets in _FORMATS),
        *(Instance(f"add_bias<{C_TYPES[dtype]}>", 256, 32) for dtype in ACTIVATION_TYPES),
    ),
    run=_run,
    reference=_reference,
    outputs=("out",),
    cases=(
        _case("skinny", 1, 40, 264, bias=True),
        _case("skinny", 9, 24, 96, FP16, logits=True, softcap=30.0),
        _case("skinny", 20, 48, 320, gated="silu", bias=True),
        _case("skinny", 3, 40, 576, FP16, 4, 32),
        _case("skinny", 17, 32, 384, BF16, 4, 32, offsets=True, gated="gelu_tanh"),
        _case("skinny", 1, 16, 640, BF16, 4, 16, offsets=True, bias=True),
        _case("skinny", 12, 20, 1024, FP16, 4, 128, offsets=True),
        _case("skinny", 5, 24, 336, BF16, 8, 16),
        _case("skinny", 33, 48, 224, FP16, 8, 32, offsets=True),
        _case("skinny", 2, 16, 640, BF16, 8, 64, offsets=True, logits=True),
        _case("tile", 70, 40, 104, bias=True),
        _case("tile", 33, 144, 64, FP16, gated="silu"),
        _case("tile", 40, 24, 320, BF16, 4, 32, offsets=True, bias=True),
        _case("tile", 65, 16, 256, FP16, 4, 64, gated="gelu_tanh"),
        _case("tile", 7, 130, 144, BF16, 8, 16, offsets=True),
        _case("tile", 3, 20, 224, FP16, 8, 32, logits=True, softcap=20.0),
        _bias_case(3, 300, BF16), _bias_case(2, 64, FP16), _bias_case(512, 6144, BF16, large=True),
        *(_case("skinny", num_tokens, 4096, 4096, BF16, bits, group, offsets=bits == 4, large=True)
          for num_tokens in (1, 8, 32) for bits, group in ((16, 0), (8, 16), (4, 32))),
        *(_case("tile", num_tokens, 4096, 4096, BF16, bits, group, offsets=bits == 4, large=True)
          for num_tokens in (64, 300) for bits, group in ((16, 0), (8, 16), (4, 32))),
    ),
    tolerance=4e-3,                             # one step of bfloat16 at the largest number
)
