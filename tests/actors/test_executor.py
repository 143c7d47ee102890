"""The executor with a real runner, told plans by hand: what a step that fails leaves to those after it."""
from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from actors.executor import Executor
from actors.mailbox import Mailbox
from actors.messages import StartedSequence, StepPlan, StepResult
from actors.policy.block_keys import block_keys
from actors.policy.scheduler import SchedulerMessage
from actors.sampling_params import SamplingParams
from cuda.device_runner import DeviceRunner
from cuda.kernels.ops import KernelOps
from cuda.kernels.types import BF16
from cuda.launcher import DeviceLost
from cuda.reference import ReferenceOps
from cuda.runner import BaseRunner, Runner
from tests.cuda_emulator.build import unavailable
from tests.cuda_emulator.launcher import EmulatorLauncher
from weights.load import open_model

MODEL = Path(__file__).parent.parent / "golden" / "models" / "llama"


def make_runner() -> Runner:
    model = open_model(MODEL)
    return Runner(model.spec, model.weights(), ReferenceOps(), (8,), max_num_seqs=4, max_num_batched_tokens=64,
                  max_model_len=64)


def started(slot: int, token_ids: tuple[int, ...], *block_ids: int) -> StartedSequence:
    sampling = SamplingParams(max_tokens=9, temperature=0, logprobs=0)
    return StartedSequence(slot, f"r{slot}", token_ids, len(token_ids), sampling, (), 0, 0, (block_ids,))


async def run(plans: Sequence[StepPlan], overlap: int, prepare: Any = lambda runner: None,
              make: Callable[[], BaseRunner] = make_runner) -> list[StepResult]:
    """All plans are sent before any result is read. prepare: gets the runner before the first of them."""
    inbox: Mailbox[SchedulerMessage] = Mailbox()
    executor = Executor(inbox, overlap)
    prepare(await executor.load(make))
    watching = asyncio.create_task(executor.run())
    for plan in plans:
        executor.send(plan)
    results: list[StepResult] = []
    async with asyncio.timeout(60):
        while len(results) < len(plans):
            reading = asyncio.create_task(inbox.drain())
            await asyncio.wait((reading, watching), return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                await watching              # raises what ended the executor
            results += [message for message in await reading if isinstance(message, StepResult)]
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching
    executor.join()
    return results


@pytest.mark.parametrize("overlap", [0, 1])
def test_blocks_that_cannot_be_moved_fail_their_step_and_no_stranger_in_the_next(
        overlap: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next plan left before the failure was known: it counts on the rows of all who were in the failed step."""
    stranger = started(2, tuple(range(50, 70)), 3, 4)
    plans = [
        StepPlan(0, started=(started(0, (5, 6, 7), 0),), chunks=((0, 0, 3),), num_tokens=3),
        StepPlan(1, started=(started(1, tuple(range(9, 29)), 1, 2),), copies=((0, 0, 1),), chunks=((1, 0, 20),),
                 num_tokens=21),
        StepPlan(2, started=(stranger,), chunks=((2, 0, 20),), num_tokens=22),
        StepPlan(3, ended=(0, 1), num_tokens=1),
    ]

    def fail_once(runner: BaseRunner) -> None:
        move_blocks = runner.move_blocks

        def fail(tier_out: Any, copies: Any, poisoned: Any, tier_in: Any) -> None:
            if copies:
                raise MemoryError
            move_blocks(tier_out, copies, poisoned, tier_in)

        monkeypatch.setattr(runner, "move_blocks", fail)

    async def main() -> None:
        results = await run(plans, overlap, fail_once)
        assert [result.error for result in results] == ["", "MemoryError in step 1", "", ""]
        alone = await run([StepPlan(0, started=(stranger,), chunks=((2, 0, 20),), num_tokens=20),
                           StepPlan(1, num_tokens=1)], overlap)
        for together, expected in zip(results[2:], alone, strict=True):
            row = together.slots.index(2)
            assert (together.positions[row], together.token_ids[row], together.logprobs[row]) == (
                expected.positions[0], expected.token_ids[0], expected.logprobs[0])

    asyncio.run(main())


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_device_that_is_lost_while_a_sequence_enters_ends_the_executor(overlap: int,
                                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no fault of that sequence, which alone would fail."""
    def lose(runner: BaseRunner) -> None:
        def start(*_: Any, **__: Any) -> None:
            raise DeviceLost("an illegal memory access was encountered")

        monkeypatch.setattr(runner, "start", start)

    with pytest.raises(DeviceLost, match="illegal memory access"):
        asyncio.run(run([StepPlan(0, started=(started(0, (5, 6, 7), 0),), chunks=((0, 0, 3),), num_tokens=3)], overlap,
                        lose))


# ---- The device's table of blocks that can be found

def make_device_runner() -> BaseRunner:
    model = open_model(MODEL)
    ops = KernelOps(EmulatorLauncher(), BF16, deterministic=True)
    runner = DeviceRunner(model.spec, model.weights(), ops, (8,), max_num_seqs=4, max_num_batched_tokens=64,
                          max_model_len=64, kv_dtype="bf16")
    runner.keep_index(8)
    return runner


@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("fails", ["move_blocks", "look_up", "launch"])
def test_changes_of_the_index_outlive_the_step_that_brings_them(fails: str, overlap: int,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """A look-up sees what its own plan tells and plans before it, failed ones too; and only the failed have no answer.
    """
    root, token_ids = bytes(16), tuple(range(5, 45))
    keys = block_keys(root, token_ids)
    first, second = (0, keys[0], root, token_ids[:16]), (1, keys[1], keys[0], token_ids[16:32])
    fillers = tuple((block_id, key, root, token_ids[:16]) for block_id, key in
                    zip(range(3, 8), block_keys(b"others", range(80)), strict=True))
    lookup = ("waits", root, keys, token_ids[:32])
    plans = [
        StepPlan(0, started=(started(0, token_ids, 0, 1, 2),), chunks=((0, 0, 40),), num_tokens=40,
                 lookups=(("r0", root, keys, token_ids[:32]),)),
        StepPlan(1, num_tokens=1, index_changes=(first, second), lookups=(lookup,)),
        StepPlan(2, ended=(0,), started=(started(1, (7, 8), 4),), chunks=((1, 0, 2),), num_tokens=2,
                 lookups=(lookup, ("other root", bytes(15) + b"x", keys[:1], token_ids[:16]))),
        StepPlan(3, num_tokens=1, index_changes=(*fillers, (1, b"", b"", ()), (0, b"", b"", ()), first)),
        StepPlan(4, num_tokens=1, lookups=(lookup,)),
    ]

    def fail_once(runner: BaseRunner) -> None:
        method, calls = getattr(runner, fails), iter(range(len(plans)))

        def fail(*arguments: Any) -> Any:
            if next(calls) == 1:
                raise MemoryError
            return method(*arguments)

        monkeypatch.setattr(runner, fails, fail)

    results = asyncio.run(run(plans, overlap, fail_once, make_device_runner))
    assert [result.error for result in results] == ["", "MemoryError in step 1", "", "", ""]
    assert [result.prefix_hints for result in results] == [
        (("r0", 0),), (), (("waits", 2), ("other root", 0)), (), (("waits", 1),)]


def test_what_the_runner_was_made_of_is_let_go() -> None:
    """Its thread lives as long as the engine, and would keep the files of the model mapped."""
    class File:
        pass

    async def load() -> weakref.ref[File]:
        file = File()
        executor = Executor(Mailbox(), 0)

        def make() -> Runner:
            assert file
            return make_runner()

        await executor.load(make)
        executor.close()
        return weakref.ref(file)

    gc.disable()                            # by references alone, at once
    try:
        assert asyncio.run(load())() is None
    finally:
        gc.enable()
