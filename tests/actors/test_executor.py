"""The executor with a real runner, told plans by hand: what a step that fails leaves to those after it."""
from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from actors.executor import Executor
from actors.mailbox import Mailbox
from actors.messages import StartedSequence, StepPlan, StepResult
from actors.policy.scheduler import SchedulerMessage
from actors.sampling_params import SamplingParams
from cuda.reference import ReferenceOps
from cuda.runner import BaseRunner, Runner
from weights.load import open_model

MODEL = Path(__file__).parent.parent / "golden" / "models" / "llama"


def make_runner() -> Runner:
    model = open_model(MODEL)
    return Runner(model.spec, model.weights(), ReferenceOps(), (8,), max_num_seqs=4, max_num_batched_tokens=64,
                  max_model_len=64)


def started(slot: int, token_ids: tuple[int, ...], *block_ids: int) -> StartedSequence:
    sampling = SamplingParams(max_tokens=9, temperature=0, logprobs=0)
    return StartedSequence(slot, f"r{slot}", token_ids, len(token_ids), sampling, (), 0, 0, (block_ids,))


async def run(plans: Sequence[StepPlan], overlap: int, prepare: Any = lambda runner: None) -> list[StepResult]:
    """All plans are sent before any result is read. prepare: gets the runner before the first of them."""
    inbox: Mailbox[SchedulerMessage] = Mailbox()
    executor = Executor(inbox, overlap)
    prepare(await executor.load(make_runner))
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
