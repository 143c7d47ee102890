"""The device runner on CupyLauncher, over the fake CuPy with the emulator behind its kernels: what would reach a GPU is
what CuPy and CUDA allow, and it is still right at the time when they run it.
"""
from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable

import numpy as np
import pytest

from cuda.cupy_launcher import CupyLauncher
from cuda.device_runner import DeviceRunner
from cuda.kernels.ops import KernelOps
from cuda.kv_cache import kv_groups
from cuda.launcher import Launcher
from cuda.ops import KVDtype
from cuda.runner import StepOutput
from tests.cuda.emulated_cupy import EmulatedCupy
from tests.cuda.test_device_runner import Script
from tests.cuda.test_golden_models import GREEDY, tiny_model
from tests.cuda_emulator import build
from tests.cuda_emulator.launcher import EmulatorLauncher

pytestmark = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))

NUM_BLOCKS = 24


def run(launcher: Launcher, model: str, kv_dtype: KVDtype, graphs: bool,
        script: Script | None = None) -> list[tuple[int, ...]]:
    """Three sequences, the third from the tier, each step launched before the one before it is read. script: of the
    second."""
    spec, weights = tiny_model(model)
    ops = KernelOps(launcher, deterministic=True)
    groups = kv_groups(spec)
    runner = DeviceRunner(spec, weights, ops, [NUM_BLOCKS] * len(groups), max_num_seqs=4, max_num_batched_tokens=64,
                          max_model_len=96, num_tier_blocks=[3] * len(groups), kv_dtype=kv_dtype, graphs=graphs)
    prompt = np.random.default_rng(0).integers(3, 300, 40).tolist()
    outputs: list[StepOutput] = []
    pending: list[Callable[[], StepOutput]] = []

    def step(chunks: list[tuple[int, int, int]]) -> None:
        pending.append(runner.launch(runner.rows(chunks, [])))
        if len(pending) > 1:
            outputs.append(pending.pop(0)())

    def start(slot: int, tokens: list[int], first_block: int) -> None:
        blocks = list(range(first_block, first_block + 4))
        sampling = dataclasses.replace(GREEDY, constraint=script if slot == 1 else None)
        runner.start(slot, tokens, len(tokens), sampling, [blocks] * len(groups), True, None)

    start(0, prompt, 0)
    step([(0, 0, 40)])
    start(1, prompt[:7], 4)
    step([(1, 0, 7)])
    step([])
    moves = [(group, block, block) for group in range(len(groups)) for block in range(2)]
    runner.move_blocks(moves, [], [], [])
    back = [(group, block, 8 + block) for group in range(len(groups)) for block in range(2)]
    runner.move_blocks([], [], [], back)
    start(2, prompt[:36], 8)
    step([(2, 32, 36)])
    for _ in range(4):
        step([])
    outputs += [read() for read in pending]
    launcher.synchronize()
    runner.end(1)
    return [tuple(output.sampled.token_ids.tolist()) for output in outputs]


@pytest.mark.parametrize(("model", "kv_dtype", "graphs"), [
    ("llama", "bf16", True), ("llama", "int8", True), ("llama", "bf16", False), ("gemma3", "fp8", True)])
def test_a_model_runs_as_on_the_emulator(monkeypatch: pytest.MonkeyPatch, model: str, kv_dtype: KVDtype,
                                         graphs: bool) -> None:
    cupy = EmulatedCupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    tokens = run(CupyLauncher(), model, kv_dtype, graphs)
    assert tokens == run(EmulatorLauncher(), model, kv_dtype, graphs)
    assert sum(map(len, tokens)) == 7 + 6 + 5 + 2


@pytest.mark.parametrize("graphs", [True, False])
def test_masks_are_written_between_forward_pass_and_sampling(monkeypatch: pytest.MonkeyPatch, graphs: bool) -> None:
    monkeypatch.setitem(sys.modules, "cupy", EmulatedCupy())
    scripts = [Script([7, 300, 31, 32, 64, 9, 5]) for _ in range(2)]
    tokens = [run(launcher, "llama", "bf16", graphs, script)
              for launcher, script in zip((CupyLauncher(), EmulatorLauncher()), scripts, strict=True)]
    assert tokens[0] == tokens[1]
    assert scripts[0].told == scripts[1].told == scripts[0].tokens[:6]
    assert all(any(token in row for row in tokens[0]) for token in scripts[0].tokens)


def test_shared_memory_is_asked_for_by_those_that_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = EmulatedCupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    run(CupyLauncher(), "llama", "bf16", False)
    assert len(cupy.shared_requests) == len({entry for entry, _ in cupy.shared_requests})
