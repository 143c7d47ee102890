"""rope_store_kv beyond its cases: rows by themselves, numbers that are not finite, what is refused."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cuda.kernels import rope_store_kv
from cuda.kernels.kernel_spec import Case
from cuda.kernels.types import BF16
from tests.cuda_emulator import build
from tests.cuda_emulator.launcher import EmulatorLauncher

SPEC = rope_store_kv.SPEC
CASES = {case.name: case for case in SPEC.cases}

pytestmark = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))


@pytest.fixture(scope="module")
def launcher() -> EmulatorLauncher:
    return EmulatorLauncher(specs=[SPEC])


def arguments_of(case: Case) -> dict[str, Any]:
    return case.make(np.random.default_rng(1))


def run(launcher: EmulatorLauncher, arguments: dict[str, Any]) -> dict[str, Any]:
    given = {name: launcher.upload(value) if isinstance(value, np.ndarray) else value
             for name, value in arguments.items()}
    SPEC.run(launcher, **given)
    return given


@pytest.mark.parametrize("name", ["bf16, norms", "bf16 to int8", "bf16 to fp8"])
def test_a_row_alone_has_the_bits_it_has_among_others(launcher: EmulatorLauncher, name: str) -> None:
    arguments = arguments_of(CASES[name])
    together = run(launcher, arguments)
    row = slice(1, 2)
    of_row = {part: arguments[part][row] for part in ("qkv", "positions", "slot_mapping")}
    alone = run(launcher, {**arguments, **of_row})
    assert alone["qkv"].tobytes() == together["qkv"][row].tobytes()
    block, place = divmod(int(arguments["slot_mapping"][1]), 16)
    for part in ("k_cache", "v_cache", "k_scale", "v_scale"):
        if arguments[part] is not None:
            assert alone[part][block, :, place].tobytes() == together[part][block, :, place].tobytes()


def test_keys_and_values_of_the_activations_stay_as_they_are(launcher: EmulatorLauncher) -> None:
    arguments = arguments_of(CASES["bf16, norms"])
    result = run(launcher, arguments)["qkv"]
    assert result[:, 256:].tobytes() == arguments["qkv"][:, 256:].tobytes()
    assert result[:, :256].tobytes() != arguments["qkv"][:, :256].tobytes()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["bf16 to int8", "bf16 to fp8"])
def test_a_number_that_is_not_finite_shows_in_the_scale(launcher: EmulatorLauncher, name: str, bad: float) -> None:
    arguments = arguments_of(CASES[name])
    arguments["qkv"][0, -3] = bad                               # of the last value head
    result = run(launcher, arguments)
    block, place = divmod(int(arguments["slot_mapping"][0]), 16)
    assert np.isnan(result["v_scale"][block, -1, place])
    assert not result["v_cache"][block, -1, place].any()
    assert np.isfinite(result["v_scale"][block, 0, place])


@pytest.mark.parametrize("name", ["bf16 to int8", "bf16 to fp8"])
def test_a_head_of_zeros_is_stored_as_zeros(launcher: EmulatorLauncher, name: str) -> None:
    arguments = arguments_of(CASES[name])
    arguments["qkv"][0] = 0
    result = run(launcher, arguments)
    block, place = divmod(int(arguments["slot_mapping"][0]), 16)
    for part in ("k_cache", "v_cache", "k_scale", "v_scale"):
        assert not result[part][block, :, place].any()


@pytest.mark.parametrize(("change", "message"), [
    ({"num_kv_heads": 2}, "the KV cache has 1 heads, not 2"),
    ({"k_norm": np.zeros(64, np.float32)}, r"k_norm must be float32\[128\], not float32\[64\]"),
    ({"positions": np.zeros(2, np.int64)}, r"positions must be int32\[2\], not int64\[2\]"),
    ({"k_scale": np.zeros((3, 1, 16), np.float32)}, "k_scale is not used with a KV cache of bfloat16"),
    ({"cos_sin": np.zeros((4, 130), np.float32)}, "130 of a head's 128 dimensions cannot rotate"),
    ({"v_cache": np.zeros((3, 1, 16, 64), BF16)}, r"v_cache must be bfloat16\[3, 1, 16, 128\]"),
    ({"k_cache": np.zeros((3, 1, 16, 128), np.float32)}, "the KV cache must be bfloat16, int8 or uint8"),
])
def test_what_does_not_fit_is_refused(launcher: EmulatorLauncher, change: dict[str, Any], message: str) -> None:
    arguments = arguments_of(CASES["bf16, norms"])
    with pytest.raises(ValueError, match=message):
        run(launcher, {**arguments, **change})
