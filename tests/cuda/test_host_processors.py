"""The same bits on other processors: older ones, as far as this one can stand in for them."""
from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cuda.host.register_tile import MAX_INT16_ROWS, MAX_ROWS
from cuda.host.simd_int16 import HAS_PAIRS, PAIRS_BY
from tests.cuda.host_support import (
    Floats,
    assert_same_bits,
    host_ops,
    make_spec,
    needs_pairs,
    prepare,
    random_affine,
    random_floats,
)
from tests.cuda.test_golden_models import LENGTH, Piece, blocks_in_order, paged_model, sequence, tiny_model
from weights.quant import Linear

ROOT = Path(__file__).parent.parent.parent

# Name and features, as LLVM has them.
OLDER = {"AVX2": ("haswell", "+avx2,+fma,+f16c,+bmi2"), "": ("nehalem", "+sse4.2")}

pytestmark = pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="for x86 alone")


def results() -> dict[str, Floats]:
    """Products of every format and a small model's logits, in both arithmetics where this processor has them."""
    found = {"processor": np.array([MAX_ROWS, MAX_INT16_ROWS], np.float32)}
    for math in ("exact", "int16") if HAS_PAIRS else ("exact",):
        with host_ops(math=math) as ops:                        # type: ignore[arg-type]
            for bits in (4, 8):
                for group in (16, 32, 64):
                    head = Linear((random_affine(0, 40, 128, bits, group),), random_floats(1, 40))
                    packed = prepare(ops, make_spec(128), head).head
                    for rows in (1, 5, 26):
                        y = ops.linear(random_floats(2, rows, 128), packed)
                        ops.finish()
                        found[f"{math} {bits} {group} {rows}"] = np.array(y)
        spec, weights = tiny_model("gemma3-quantized")
        ids = sequence(spec, 6, LENGTH)
        with paged_model("host" if math == "exact" else "host-int16", spec, weights) as model:
            [found[f"{math} model"]] = model.run(Piece(ids, 0, LENGTH, blocks_in_order(model, LENGTH)))
    return found


@pytest.mark.parametrize("older", [pytest.param("AVX2", marks=needs_pairs), ""], ids=["AVX2", "SSE"])
def test_an_older_processor_computes_the_same_bits(older: str, tmp_path: Path) -> None:
    name, features = OLDER[older]
    path = tmp_path / "results.npz"
    program = ("import sys, numpy\n"
               "from tests.cuda import test_host_processors as here\n"
               "print(repr(here.PAIRS_BY))\n"
               "numpy.savez(sys.argv[1], **here.results())\n")
    done = subprocess.run([sys.executable, "-c", program, str(path)], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, "NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features})
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == repr(older)
    here = results()
    with np.load(path) as there:
        names = set(there.files)
        assert names == {n for n in here if older or not n.startswith("int16")}
        if PAIRS_BY.startswith("AVX-512"):                      # tiles of another height
            assert (there["processor"] < here["processor"]).all()
        for each in names - {"processor"}:
            assert_same_bits(there[each], here[each])
