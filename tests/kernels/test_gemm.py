"""The GEMM kernels beyond their cases: one row's bits in any company, parts in different formats, what is refused."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cuda.kernels import gemm
from cuda.kernels.gemm import linear, skinny_gemm, tile_gemm
from cuda.kernels.packing import DeviceAffine, DeviceDense, DeviceLinear, DeviceWeight, pack_linear, unpack_weight
from cuda.kernels.types import BF16, FP16
from tests.cuda.host_support import random_affine, random_dense, random_floats
from tests.cuda_emulator import build
from tests.cuda_emulator.launcher import EmulatorLauncher
from weights.quant import Affine, Linear, Weight

pytestmark = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))

FORMATS = [(16, 0), *((bits, group) for bits in (4, 8) for group in (16, 32, 64, 128))]
ROWS, INPUTS = 40, 1152                         # no whole tile of rows; units that four quarters do not share evenly
MANY = 70                                       # tokens: two tiles of the tile kernel, blocks of every skinny instance


@pytest.fixture(scope="module")
def launcher() -> EmulatorLauncher:
    return EmulatorLauncher(specs=[gemm.SPEC])


def make_weight(bits: int, group: int, rows: int = ROWS, inputs: int = INPUTS, seed: int = 0) -> Weight:
    return random_dense(seed, rows, inputs, "f4") if bits == 16 else random_affine(seed, rows, inputs, bits, group)


def arguments_of(weight: DeviceWeight) -> dict[str, Any]:
    if isinstance(weight, DeviceDense):
        return {"weight": weight.data}
    return {"weight": weight.codes, "scales": weight.scales, "offsets": weight.offsets, "bits": weight.bits,
            "group": weight.group, "scale_unit": weight.scale_unit}


Kernel = Callable[..., None]


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize(("bits", "group"), FORMATS)
def test_a_row_has_the_same_bits_from_both_kernels_for_any_number_of_rows(
        launcher: EmulatorLauncher, dtype: np.dtype[Any], bits: int, group: int) -> None:
    weight = pack_linear(launcher, Linear((make_weight(bits, group),)), dtype).parts[0]
    x = random_floats(1, MANY, INPUTS).astype(dtype)

    def product(kernel: Kernel, tokens: NDArray[Any]) -> NDArray[np.float32]:
        out = launcher.empty((len(tokens), ROWS), np.float32)
        kernel(launcher, out, launcher.upload(tokens), **arguments_of(weight))
        return launcher.download(out)

    whole = product(tile_gemm, x)
    exact = x.astype(np.float64) @ unpack_weight(weight).T
    bound = np.abs(x.astype(np.float64)) @ np.abs(unpack_weight(weight)).T
    assert (np.abs(whole - exact) <= 2.0**-20 * bound).all()
    for kernel in (skinny_gemm, tile_gemm):
        for num_tokens in (1, 2, 8, 9, 16, 17, 31, 32, 33, 63, 64, 65, MANY):
            first = MANY - num_tokens
            same = product(kernel, x[first:]).tobytes() == whole[first:].tobytes()
            assert same, f"{kernel.__name__}, {num_tokens} rows"


@pytest.mark.parametrize(("bits", "group"), [(16, 0), (4, 32), (8, 16)])
def test_each_row_alone_and_each_number_of_rows(launcher: EmulatorLauncher, bits: int, group: int) -> None:
    rows, inputs = 16, 192
    weight = pack_linear(launcher, Linear((make_weight(bits, group, rows, inputs),), random_floats(2, rows)), BF16)
    x = launcher.upload(random_floats(1, MANY, inputs).astype(BF16))
    whole = launcher.empty((MANY, rows), BF16)
    linear(launcher, whole, x, weight, deterministic=True)
    for row in range(MANY):
        alone = launcher.empty((1, rows), BF16)
        linear(launcher, alone, x[row:row + 1], weight, deterministic=True)
        assert alone.tobytes() == whole[row:row + 1].tobytes()
    for num_tokens in range(1, MANY):
        few = launcher.empty((num_tokens, rows), BF16)
        linear(launcher, few, x[:num_tokens], weight, deterministic=True)
        assert few.tobytes() == whole[:num_tokens].tobytes()


@pytest.mark.parametrize(("bits", "group"), [(16, 0), (4, 32), (8, 16)])
@pytest.mark.parametrize("inputs", [16, 32, 64, 128, 144, 272, 5056])
def test_inputs_that_fill_no_quarter_or_many_units(launcher: EmulatorLauncher, bits: int, group: int,
                                                   inputs: int) -> None:
    if group and inputs % group:
        inputs += group - inputs % group
    weight = pack_linear(launcher, Linear((make_weight(bits, group, 16, inputs),)), FP16).parts[0]
    x = random_floats(3, 3, inputs).astype(FP16)
    exact = x.astype(np.float64) @ unpack_weight(weight).T
    bound = np.abs(x.astype(np.float64)) @ np.abs(unpack_weight(weight)).T
    results = []
    for kernel in (skinny_gemm, tile_gemm):
        out = launcher.empty((3, 16), np.float32)
        kernel(launcher, out, launcher.upload(x), **arguments_of(weight))
        assert (np.abs(out - exact) <= 2.0**-20 * bound).all()
        results.append(out.tobytes())
    assert results[0] == results[1]


@pytest.mark.parametrize("num_tokens", [3, 40])
@pytest.mark.parametrize("has_bias", [False, True])
def test_parts_in_different_formats_fill_columns_beside_each_other(launcher: EmulatorLauncher, num_tokens: int,
                                                                   has_bias: bool) -> None:
    parts = (make_weight(4, 32, 48, 256, 1), make_weight(8, 16, 24, 256, 2), make_weight(16, 0, 24, 256, 3))
    bias = random_floats(4, 96) if has_bias else None
    weight = pack_linear(launcher, Linear(parts, bias), BF16)
    assert len(weight.parts) == 3
    x = random_floats(5, num_tokens, 256).astype(BF16)
    out = launcher.empty((num_tokens, 96), np.float32)
    linear(launcher, out, launcher.upload(x), weight, deterministic=False)
    expected = x.astype(np.float64) @ np.concatenate([unpack_weight(part) for part in weight.parts]).T
    if bias is not None:
        expected += bias
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("gated", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("num_tokens", [5, 40])
@pytest.mark.parametrize(("bits", "group"), [(16, 0), (4, 32)])
def test_a_gated_projection_is_activation_of_gate_times_up(launcher: EmulatorLauncher, gated: str, num_tokens: int,
                                                           bits: int, group: int) -> None:
    gate, up = (make_weight(bits, group, 24, 128, seed) for seed in (1, 2))
    bias = random_floats(3, 48)
    x = (random_floats(4, num_tokens, 128) * np.float32(0.1)).astype(BF16)
    y = []
    for part, part_bias in ((gate, bias[:24]), (up, bias[24:])):
        packed = pack_linear(launcher, Linear((part,), part_bias), BF16)
        y.append(x.astype(np.float64) @ unpack_weight(packed.parts[0]).T + part_bias)
    active = y[0] / (1 + np.exp(-y[0])) if gated == "silu" else \
        0.5 * y[0] * (1 + np.tanh(np.sqrt(2 / np.pi) * (y[0] + 0.044715 * y[0]**3)))
    out = launcher.empty((num_tokens, 24), BF16)
    weight = pack_linear(launcher, Linear((gate, up), bias), BF16, gated)
    linear(launcher, out, launcher.upload(x), weight, deterministic=False)
    np.testing.assert_allclose(out.astype(np.float64), active * y[1], rtol=2**-8, atol=1e-3)


class CountingLauncher(EmulatorLauncher):
    def __init__(self) -> None:
        super().__init__(specs=[gemm.SPEC])
        self.calls: list[str] = []

    def launch(self, source: str, entry: str, *arguments: Any, **more: Any) -> None:
        self.calls.append(entry.partition("<")[0])
        super().launch(source, entry, *arguments, **more)

    def matmul(self, *arguments: Any) -> None:
        self.calls.append("cuBLAS")
        super().matmul(*arguments)


@pytest.mark.parametrize(("bits", "num_tokens", "deterministic", "gated", "out_dtype", "calls"), [
    (16, 32, False, None, BF16, ["skinny_gemm"]),
    (16, 33, False, None, BF16, ["cuBLAS", "add_bias"]),
    (16, 33, True, None, BF16, ["tile_gemm"]),
    (16, 33, False, "silu", BF16, ["tile_gemm"]),
    (16, 33, False, None, np.float32, ["tile_gemm"]),
    (4, 1, False, None, BF16, ["skinny_gemm"]),
    (4, 33, False, None, BF16, ["tile_gemm"]),
    (4, 0, False, None, BF16, []),
])
def test_which_kernel_multiplies(bits: int, num_tokens: int, deterministic: bool, gated: str | None, out_dtype: Any,
                                 calls: list[str]) -> None:
    launcher = CountingLauncher()
    weight = pack_linear(launcher, Linear((make_weight(bits, 32, 32, 64),), random_floats(1, 32)), BF16, gated)
    x = launcher.upload(random_floats(2, num_tokens, 64).astype(BF16))
    out = launcher.empty((num_tokens, weight.out_columns), out_dtype)
    linear(launcher, out, x, weight, deterministic)
    assert launcher.calls == calls
    if gated is None:
        expected = x.astype(np.float64) @ unpack_weight(weight.parts[0]).T + random_floats(1, 32)
        np.testing.assert_allclose(out.astype(np.float64), expected, rtol=0,
                                   atol=2**-7 * np.abs(expected).max(initial=0))


def test_rows_that_are_not_finite_spoil_no_others(launcher: EmulatorLauncher) -> None:
    weight = pack_linear(launcher, Linear((make_weight(4, 32, 16, 256),)), BF16)
    x = random_floats(1, 9, 256).astype(BF16)
    clean, dirty = (launcher.empty((9, 16), BF16) for _ in range(2))
    linear(launcher, clean, launcher.upload(x), weight, True)
    x[4, 7] = np.nan
    linear(launcher, dirty, launcher.upload(x), weight, True)
    assert np.isnan(dirty[4].astype(np.float32)).all()
    others = [row for row in range(9) if row != 4]
    assert dirty[others].tobytes() == clean[others].tobytes()


def test_a_tied_head_multiplies_by_the_embedding_itself(launcher: EmulatorLauncher) -> None:
    table = DeviceDense(launcher.upload(random_floats(1, 40, 64).astype(BF16)))
    x = random_floats(2, 2, 64).astype(BF16)
    out = launcher.empty((2, 40), np.float32)
    linear(launcher, out, launcher.upload(x), DeviceLinear.of(table), True, softcap=30.0)
    expected = 30 * np.tanh(x.astype(np.float64) @ unpack_weight(table).T / 30)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-4)


X = np.zeros((2, 64), BF16)
OUT = np.zeros((2, 16), BF16)
WEIGHT = np.zeros((16, 64), BF16)


@pytest.mark.parametrize(("change", "message"), [
    ({"x": X.astype(np.float32)}, "x float32, out bfloat16"),
    ({"out": OUT.astype(np.float16)}, "x bfloat16, out float16"),
    ({"weight": WEIGHT.astype(np.float16)}, r"weight float16\[16, 64\] is not bfloat16\[N, 64\]"),
    ({"weight": np.zeros((16, 32), BF16)}, r"is not bfloat16\[N, 64\]"),
    ({"x": np.zeros((2, 60), BF16), "weight": np.zeros((16, 60), BF16)}, "60 no multiple of 8"),
    ({"bits": 5, "group": 32}, "codes of 5 bits"),
    ({"bits": 4, "group": 48}, "groups of 48"),
    ({"x": np.zeros((2, 48), BF16), "bits": 4, "group": 32}, "of 48 inputs"),
    ({"bits": 4, "group": 32}, r"are not uint8\[N, 64\]"),
    ({"bits": 4, "group": 32, "weight": np.zeros((16, 64), np.uint8)}, r"scales are not float16\[16, 8\]"),
    ({"bits": 4, "group": 32, "weight": np.zeros((16, 64), np.uint8), "scales": np.zeros((16, 8), np.float16),
      "offsets": np.zeros((16, 2), np.float16)}, r"offsets are not float16\[16, 8\]"),
    ({"first": 8}, "no room for 2 tokens and 16 rows at 8"),
    ({"first": -1}, "no room"),
    ({"out": np.zeros((3, 16), BF16)}, "no room for 2 tokens"),
    ({"gated": "relu"}, "gated='relu'"),
    ({"gated": "silu"}, "no room"),
    ({"bias": np.zeros(8, np.float32)}, r"bias float32\[8\] is not float32\[16\]"),
    ({"softcap": 30.0}, "softcap=30.0 with out bfloat16"),
])
@pytest.mark.parametrize("kernel", [skinny_gemm, tile_gemm])
def test_what_does_not_fit_is_refused(launcher: EmulatorLauncher, kernel: Kernel, change: dict[str, Any],
                                      message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kernel(launcher, **{"out": OUT, "x": X, "weight": WEIGHT, **change})


def test_shapes_of_a_projection_must_agree(launcher: EmulatorLauncher) -> None:
    weight = DeviceLinear((DeviceDense(WEIGHT),))
    with pytest.raises(ValueError, match=r"out \[2, 15\] is not x \[2, 64\] by weights of 64 inputs and 16 outputs"):
        linear(launcher, np.zeros((2, 15), BF16), X, weight, True)
    with pytest.raises(ValueError, match=r"x \[2, 32\]"):
        linear(launcher, OUT, np.zeros((2, 32), BF16), weight, True)


def test_affine_weights_of_files_are_multiplied_as_they_dequantize(launcher: EmulatorLauncher) -> None:
    rng = np.random.default_rng(0)
    scale = rng.uniform(0.001, 0.002, (16, 8)).astype(np.float16).astype(np.float32)
    q4_0 = Affine(rng.integers(0, 256, (16, 128), np.uint8), scale, -8 * scale, 4, 32)
    packed = pack_linear(launcher, Linear((q4_0,)), BF16).parts[0]
    assert isinstance(packed, DeviceAffine)
    x = np.eye(8, 256, dtype=np.float32).astype(BF16)
    out = launcher.empty((8, 16), np.float32)
    skinny_gemm(launcher, out, launcher.upload(x), **arguments_of(packed))
    codes = np.stack([q4_0.codes & 15, q4_0.codes >> 4], axis=-1).reshape(16, 256)[:, :8].astype(np.float32)
    np.testing.assert_array_equal(out.T, (codes - 8) * scale[:, :1])
