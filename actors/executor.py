"""The executor actor: the device and all state per slot. One thread of its own launches plans in the order they come.

Plans go in by a queue, results come out by `send_threadsafe`; nothing polls. With overlap a second thread waits for the
results, so that the first can launch the next plan meanwhile. A fault inside a step fails that step's sequences and the
engine goes on; a fault outside of steps, or the loss of the device, ends the engine.
"""
from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from actors.constraints import Constraints, is_constrained
from actors.mailbox import Mailbox
from actors.messages import StartedSequence, StepPlan, StepResult
from actors.policy.kv_group import BLOCK_SIZE
from actors.policy.scheduler import SchedulerMessage
from cuda.launcher import DeviceLost
from cuda.runner import BaseRunner, StepOutput
from cuda.sampler import SlotSampling

log = logging.getLogger("troupe.executor")

WATCHDOG_PERIOD_S = 5.0

Hints: TypeAlias = tuple[tuple[str, int], ...]      # see `StepResult`


class DeviceStuck(RuntimeError):
    """A step takes longer than any step can."""


class Executor:
    """Runs on two threads: `send`, `load` and `run` on the engine's loop, everything else on the device thread."""

    def __init__(self, results: Mailbox[SchedulerMessage], overlap: int = 0, stall_timeout_s: float = 300.0) -> None:
        """overlap: steps that may be launched before the results of the one before them are read.
        stall_timeout_s: a step's chunks are bounded by the token budget, so a longer one is a stuck device."""
        self.results = results
        self.overlap = overlap
        self.stall_timeout_s = stall_timeout_s
        self._running_since: deque[float] = deque()     # of each step that is launched and not read
        self._launched: queue.SimpleQueue[Callable[[], StepResult] | None] = queue.SimpleQueue()
        self._last_end_s = 0.0
        self._broken: dict[int, str] = {}           # slots whose sequence could not enter, until it ends: why
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._runner: BaseRunner | None = None
        self.constraints: Constraints | None = None     # set before the first plan; the vocabulary loads meanwhile

    @property
    def forward_s(self) -> float:
        """Inside forward passes, since the start."""
        return self._runner.forward_s if self._runner else 0.0

    def send(self, plan: StepPlan) -> None:
        self._plans.put(plan)

    async def load(self, make_runner: Callable[[], BaseRunner]) -> BaseRunner:
        """Builds the runner on the device thread (a device's context belongs to the thread that uses it)."""
        loop = asyncio.get_running_loop()
        loaded: asyncio.Future[BaseRunner] = loop.create_future()
        self._ended: asyncio.Future[None] = loop.create_future()

        def device_thread() -> None:
            nonlocal make_runner
            try:
                runner = self._runner = make_runner()
            except BaseException as error:
                _settle(loop, loaded, error)
                return
            finally:
                del make_runner                 # this thread stays, and would keep the model's files mapped
            _settle(loop, loaded, runner)
            self._until_fault(loop, lambda: self._run_plans(runner))

        def results_thread() -> None:
            self._until_fault(loop, self._read_results)

        self._thread = threading.Thread(target=device_thread, name="troupe-device", daemon=True)
        self._thread.start()
        if self.overlap:
            threading.Thread(target=results_thread, name="troupe-results", daemon=True).start()
        return await loaded

    def close(self) -> None:
        """The device thread ends after the plans that it has."""
        self._plans.put(None)

    def join(self, timeout_s: float = 10.0) -> None:
        """After `close`: waits for the step that is still running."""
        self._thread.join(timeout_s)

    async def run(self) -> None:
        """Watches the device thread until cancelled.

        Raises: whatever ended the thread; DeviceStuck.
        """
        try:
            while True:
                await asyncio.wait([self._ended], timeout=WATCHDOG_PERIOD_S)
                if self._ended.done():
                    self._ended.result()
                running = tuple(self._running_since)
                if running and time.monotonic() - running[0] > self.stall_timeout_s:
                    raise DeviceStuck(f"a step has been running for over {self.stall_timeout_s:.0f} s")
        finally:
            self.close()

    def _until_fault(self, loop: asyncio.AbstractEventLoop, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            _settle(loop, self._ended, error)

    def _run_plans(self, runner: BaseRunner) -> None:
        while True:
            plan = self._plans.get()
            if plan is None:
                self._launched.put(None)
                runner.close()
                return
            self._running_since.append(time.monotonic())
            result = self._launch(runner, plan)
            if self.overlap:
                self._launched.put(result)
            else:
                self._deliver(result)

    def _read_results(self) -> None:
        while (result := self._launched.get()) is not None:
            self._deliver(result)

    def _deliver(self, result: Callable[[], StepResult]) -> None:
        done = result()
        self._running_since.popleft()
        self.results.send_threadsafe(done)

    def _launch(self, runner: BaseRunner, plan: StepPlan) -> Callable[[], StepResult]:
        """What it returns waits for the step's results."""
        begin_s = time.perf_counter()
        self._apply(runner, plan)
        chunks = [chunk for chunk in plan.chunks if chunk[0] not in self._broken]
        # NOTE: outside of what may fail: a step that fails has moved the counters on all the same, as its plan did.
        rows = runner.rows(chunks, plan.resting, None if self._broken else plan.num_tokens)
        failed = tuple((slot, self._broken[slot]) for slot, _, _ in plan.chunks if slot in self._broken)
        try:
            hints = self._look_up(runner, plan)
            runner.move_blocks(plan.tier_out, plan.copies, plan.poisoned + self._unfilled(plan), plan.tier_in)
            output = runner.launch(rows)
        except DeviceLost:
            raise
        except Exception as error:  # NOTE: MemoryError too: this step's requests fail, the engine goes on
            # NOTE: bound now: the name `error` is gone when the result is asked for.
            return partial(self._failed, plan.step_id, error, begin_s)
        return partial(self._result, plan.step_id, output, hints, failed, begin_s)

    def _result(self, step_id: int, output: Callable[[], StepOutput], hints: Callable[[], Hints],
                failed: tuple[tuple[int, str], ...], begin_s: float) -> StepResult:
        try:
            done, prefix_hints = output(), hints()
        except DeviceLost:
            raise
        except Exception as error:
            return self._failed(step_id, error, begin_s)
        return _result(step_id, done, prefix_hints, failed, self._elapsed_s(begin_s))

    def _failed(self, step_id: int, error: Exception, begin_s: float) -> StepResult:
        log.error("step %d failed", step_id, exc_info=error)
        return StepResult(step_id, error=f"{type(error).__name__} in step {step_id}",
                          elapsed_s=self._elapsed_s(begin_s))

    def _elapsed_s(self, begin_s: float) -> float:
        """Since the step was begun, or since the device was done with the one before it."""
        begin_s, self._last_end_s = max(begin_s, self._last_end_s), time.perf_counter()
        return self._last_end_s - begin_s

    def _apply(self, runner: BaseRunner, plan: StepPlan) -> None:
        """NOTE: must not stop half-way: what it leaves out no later plan says again."""
        if plan.index_changes:
            runner.change_index(plan.index_changes)
        for slot in plan.ended:
            runner.end(slot)
            self._broken.pop(slot, None)
        for started in plan.started:
            try:
                runner.start(started.slot, started.token_ids, started.num_prompt_tokens, self._slot_sampling(started),
                             started.block_ids, wants_token=started.sampling.max_tokens != 0,
                             prompt_logprobs=started.sampling.prompt_logprobs,
                             pooling=started.sampling.pooling)
            except DeviceLost:
                raise
            except Exception as error:
                log.exception("request %s could not enter slot %d", started.request_id, started.slot)
                runner.end(started.slot)
                self._broken[started.slot] = f"{type(error).__name__} at its start"
        for slot, group, block_ids in plan.new_blocks:
            if slot not in self._broken:
                runner.append_blocks(slot, group, block_ids)

    def _slot_sampling(self, started: StartedSequence) -> SlotSampling:
        """Raises: ValueError."""
        plain = _slot_sampling(started)
        if not is_constrained(started.sampling):
            return plain
        assert self.constraints is not None, "they come before plans"
        # NOTE: stop ids are the constraint's to mask: where there is no other way on, min_tokens gives way.
        return replace(plain, min_tokens=0, constraint=self.constraints.of(started))

    def _look_up(self, runner: BaseRunner, plan: StepPlan) -> Callable[[], Hints]:
        if not plan.lookups:
            return tuple
        counts = runner.look_up([(root, keys, token_ids) for _, root, keys, token_ids in plan.lookups])
        return lambda: tuple(zip([request_id for request_id, *_ in plan.lookups], counts(), strict=True))

    def _unfilled(self, plan: StepPlan) -> tuple[tuple[int, int], ...]:
        """(group, block) that a broken slot would fill. Who shares one must not take what lies in it for an answer."""
        if not self._broken:
            return ()
        starts = {slot: start // BLOCK_SIZE for slot, start, _ in plan.chunks}
        blocks = [(group, block_id) for started in plan.started if started.slot in self._broken
                  for group, block_ids in enumerate(started.block_ids) for block_id in block_ids[starts[started.slot]:]]
        return (*blocks, *((group, block_id) for slot, group, block_ids in plan.new_blocks if slot in self._broken
                           for block_id in block_ids))


def _settle(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], outcome: object) -> None:
    """From another thread, where `future` may be cancelled or `loop` closed: then nobody wants to know any more."""
    def settle() -> None:
        if future.done():
            return
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    with suppress(RuntimeError):
        loop.call_soon_threadsafe(settle)


def _slot_sampling(started: StartedSequence) -> SlotSampling:
    sampling = started.sampling
    return SlotSampling(
        temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty, frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty, logit_bias=sampling.logit_bias,
        min_tokens=sampling.min_tokens, stop_ids=started.stop_ids, seed=started.seed, choice=started.choice,
        logprobs=sampling.logprobs, allowed_ids=sampling.allowed_token_ids, bad_words=started.bad_word_ids)


def _result(step_id: int, output: StepOutput, prefix_hints: Hints, failed: tuple[tuple[int, str], ...],
            elapsed_s: float) -> StepResult:
    sampled = output.sampled
    slots = output.slots.tolist()
    pooled = tuple((slot, tuple(state.tolist())) for slot, state in output.pooled)
    return StepResult(
        step_id=step_id, slots=tuple(slots), positions=tuple(output.positions.tolist()),
        token_ids=tuple(sampled.token_ids.tolist()), logprobs=tuple(sampled.logprobs.tolist()),
        top_logprobs=sampled.top_logprobs,
        prompt_slots=tuple(output.prompt_slots.tolist()), prompt_positions=tuple(output.prompt_positions.tolist()),
        prompt_logprobs=tuple(output.prompt_logprobs.tolist()), prompt_top_logprobs=output.prompt_top_logprobs,
        pooled=pooled,
        failed=failed + tuple((slots[row], reason) for row, reason in sampled.failed) + tuple(
            (slot, "hidden states are not finite") for slot, state in pooled if not all(map(math.isfinite, state))),
        elapsed_s=elapsed_s, prefix_hints=prefix_hints)
