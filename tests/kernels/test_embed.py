"""The embedding beyond its cases: the very numbers that a tied head multiplies by, and what is refused."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cuda.kernels import embed as embed_module
from cuda.kernels.embed import embed, embed_rows
from cuda.kernels.packing import pack_weight, unpack_weight
from cuda.kernels.types import BF16
from tests.cuda.host_support import random_affine, random_dense
from tests.cuda_emulator import build
from tests.cuda_emulator.launcher import EmulatorLauncher
from weights.quant import Weight

pytestmark = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))


@pytest.fixture(scope="module")
def launcher() -> EmulatorLauncher:
    return EmulatorLauncher(specs=[embed_module.SPEC])


@pytest.mark.parametrize("weight", [
    random_dense(0, 12, 1096, "bf16"), random_affine(0, 12, 576, 4, 32), random_affine(1, 12, 320, 8, 16),
], ids=["dense", "4 bits", "8 bits"])
def test_rows_are_those_of_the_packed_weight_times_the_scale(launcher: EmulatorLauncher, weight: Weight) -> None:
    packed = pack_weight(launcher, weight, BF16)
    ids = np.array([3, 11, -1, 0, 3], np.int32)
    out = launcher.empty((5, weight.shape[1]), np.float32)
    embed(launcher, out, launcher.upload(ids), packed, 24.0)
    np.testing.assert_allclose(out, np.where(ids[:, None] < 0, 0, 24 * unpack_weight(packed)[ids]), rtol=1e-6)
    assert out[0].tobytes() == out[4].tobytes()


OUT = np.zeros((2, 64), np.float32)
IDS = np.zeros(2, np.int32)
TABLE = np.zeros((4, 64), BF16)
CODES = {"table": np.zeros((4, 64), np.uint8), "bits": 8, "group": 32}


@pytest.mark.parametrize(("change", "message"), [
    ({"out": OUT.astype(BF16)}, r"out bfloat16\[2, 64\]"),
    ({"token_ids": IDS.astype(np.int64)}, r"ids int64\[2\]"),
    ({"token_ids": np.zeros(3, np.int32)}, r"ids int32\[3\]"),
    ({"table": np.zeros((4, 32), BF16)}, r"table bfloat16\[4, 32\]"),
    ({"table": TABLE.astype(np.float32)}, r"table float32\[4, 64\]"),
    ({**CODES, "table": np.zeros((4, 32), np.uint8)}, r"codes uint8\[4, 32\] are not uint8\[V, 64\]"),
    (CODES, r"scales are not float16\[4, 8\]"),
    ({**CODES, "scales": np.zeros((4, 8), np.float16), "offsets": np.zeros((3, 8), np.float16)}, "offsets are not"),
])
def test_what_does_not_fit_is_refused(launcher: EmulatorLauncher, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        embed_rows(launcher, **{"out": OUT, "token_ids": IDS, "table": TABLE, **change})
