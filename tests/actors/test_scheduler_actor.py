"""The scheduler and the KV pool as actors, with the scripted executor, over every order of small sets of events."""
from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

import pytest

import actors.scheduler
from actors.kv_pool import KVPool
from actors.mailbox import Mailbox
from actors.messages import Abort, NewSequence, NewTokens, Release, Reserve, Reserved, StepPlan, Want
from actors.policy.block_pool import BlockPool
from actors.policy.kv_group import Group
from actors.policy.scheduler import SchedulerConfig, SchedulerMessage, SchedulerPolicy
from actors.scheduler import Scheduler
from tests.actors.scripted import Answers, ScriptedDevice, ScriptedExecutor, check_answer, request, solo

Reason = Literal["aborted", "stop"]
OVERLAPS = (0, 1, 2)
SETTLED = -1
PAUSES = (SETTLED, 0, 1, 2, 3)              # turns of the event loop between two events: they meet the actors mid-round


@dataclass
class Engine:
    """Scheduler and KV pool running; the executor's results come when `executor.deliver` is called."""
    inbox: Mailbox[SchedulerMessage]
    pool: KVPool
    executor: ScriptedExecutor
    answers: Answers
    scheduler: Scheduler

    async def settle(self) -> None:
        """Until the scheduler waits for messages and there are none."""
        for _ in range(10_000):
            await asyncio.sleep(0)
            if len(self.inbox) == 0 and self.inbox._arrival is not None:
                return
        raise AssertionError("the scheduler does not come to rest")

    async def pause(self, num_turns: int) -> None:
        if num_turns == SETTLED:
            await self.settle()
        for _ in range(num_turns):
            await asyncio.sleep(0)

    def check_drained(self) -> None:
        policy, pool = self.scheduler.policy, self.pool.pool
        assert policy.is_idle
        assert len(policy.running) == len(policy.waiting) == policy.num_in_flight == 0
        assert pool.num_sequences == 0
        assert pool.num_free == tuple(group.num_blocks for group in pool.groups)
        assert len(self.inbox) == 0


@asynccontextmanager
async def start(groups: tuple[Group, ...] = (Group(64),), *, max_num_seqs: int = 4, budget: int = 64,
                overlap: int = 0, errors: dict[int, str] | None = None) -> AsyncIterator[Engine]:
    inbox: Mailbox[SchedulerMessage] = Mailbox()
    policy = SchedulerPolicy(SchedulerConfig(max_num_seqs, budget, 200, groups, overlap))
    pool = KVPool(BlockPool(groups), check=True)
    executor = ScriptedExecutor(ScriptedDevice(groups, max_num_seqs, budget), inbox, errors)
    answers = Answers()
    scheduler = Scheduler(policy, inbox, pool, executor, answers)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(pool.run()), group.create_task(scheduler.run())]
        yield Engine(inbox, pool, executor, answers, scheduler)
        for task in tasks:
            task.cancel()


@dataclass
class Scenario:
    """Sequences that are there from the start, and what happens after so and so many delivered results."""
    sequences: tuple[NewSequence, ...]
    events: dict[int, list[SchedulerMessage]] = field(default_factory=dict)
    groups: tuple[Group, ...] = (Group(64),)
    overlap: int = 0
    budget: int = 24
    pause: int = SETTLED
    errors: dict[int, str] = field(default_factory=dict)
    num_delivered: int = 0
    num_preemptions: int = 0

    def all_sequences(self) -> Iterable[NewSequence]:
        yield from self.sequences
        for messages in self.events.values():
            yield from (message for message in messages if isinstance(message, NewSequence))

    async def play(self) -> Answers:
        """Checks all that must hold whatever happens. Returns what the requests got."""
        async with start(self.groups, overlap=self.overlap, budget=self.budget, errors=self.errors) as engine:
            for sequence in self.sequences:
                engine.inbox.send(sequence)
            await engine.pause(self.pause)
            self.num_delivered = 0
            moments = sorted(self.events)
            while True:
                if not engine.executor.results:
                    await engine.settle()
                is_over = not engine.executor.results
                if moments and (moments[0] <= self.num_delivered or is_over):
                    for message in self.events[moments.pop(0)]:
                        engine.inbox.send(message)
                        await engine.pause(self.pause)
                elif is_over:
                    break
                else:
                    engine.executor.deliver()
                    self.num_delivered += 1
                    await engine.pause(self.pause)
            engine.check_drained()
            self.num_preemptions = engine.scheduler.policy.stats.num_preemptions
        for sequence in self.all_sequences():
            check_answer(sequence, engine.answers[sequence.request_id])
        return engine.answers


# a needs its third block while b is in the middle of one: b yields, and comes back when a is done.
TIGHT = (Group(4), Group(3, window=20))
A = request("a", 28, max_tokens=8)
B = request("b", 4, max_tokens=14, logprobs=1)
C = request("c", 18, max_tokens=3, prompt_logprobs=1)


def tight(overlap: int, pause: int = SETTLED, events: dict[int, list[SchedulerMessage]] | None = None,
          errors: dict[int, str] | None = None) -> Scenario:
    return Scenario((A, B, C), events or {}, (Group(3),), overlap, pause=pause, errors=errors or {})


async def count_results(overlap: int) -> int:
    scenario = tight(overlap)
    answers = await scenario.play()
    assert scenario.num_preemptions > 0, "the scenario is to preempt"
    assert all(answers[sequence.request_id].finish == "length" for sequence in scenario.sequences)
    return scenario.num_delivered


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("reason", ["aborted", "stop"])
def test_an_abort_at_every_moment(overlap: int, reason: Reason) -> None:
    async def main() -> None:
        num_results = await count_results(overlap)
        for pause in PAUSES if reason == "aborted" else (SETTLED, 1):
            for index in range(num_results + 1):
                for victim in (A, B, C):
                    abort = Abort(victim.request_id, reason)
                    answers = await tight(overlap, pause, events={index: [abort]}).play()
                    for sequence in (A, B, C):
                        finish = answers[sequence.request_id].finish
                        if sequence is victim:
                            assert finish in ("length", "aborted" if reason == "aborted" else None)
                        else:
                            assert finish == "length"

    asyncio.run(main())


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_failing_step_at_every_moment(overlap: int) -> None:
    async def main() -> None:
        num_results = await count_results(overlap)
        for pause in (SETTLED, 1):
            for index in range(num_results):
                answers = await tight(overlap, pause, errors={index: "MemoryError"}).play()
                finishes = [answers[sequence.request_id].finish for sequence in (A, B, C)]
                assert set(finishes) <= {"length", "failed"}
                assert "failed" in finishes

    asyncio.run(main())


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_an_arrival_at_every_moment_and_an_abort_at_every_other(overlap: int) -> None:
    async def main() -> None:
        late = request("late", 10, max_tokens=5)
        num_results = await count_results(overlap)
        for arrival in range(num_results + 1):
            for abort in range(0, num_results + 1, 3):
                events: dict[int, list[SchedulerMessage]] = {arrival: [late]}
                events.setdefault(abort, []).append(Abort("b", "aborted"))
                answers = await tight(overlap, arrival % 3 - 1, events=events).play()
                assert answers["late"].finish == answers["a"].finish == answers["c"].finish == "length"

    asyncio.run(main())


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_preemption_at_every_place_of_a_block(overlap: int) -> None:
    async def main() -> None:
        num_preemptions = 0
        for length in range(1, 18):
            sequences = (request("a", 20 + length, max_tokens=14), request("b", length, max_tokens=20),
                         request("c", 18 - length, max_tokens=4))
            scenario = Scenario(sequences, groups=TIGHT, overlap=overlap)
            await scenario.play()
            num_preemptions += scenario.num_preemptions
        assert num_preemptions >= 10

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_two_aborts_and_an_arrival_at_every_moment(overlap: int) -> None:
    async def main() -> None:
        late = request("late", 10, max_tokens=5)
        num_results = await count_results(overlap)
        for first in range(num_results + 1):
            for second in range(first, num_results + 1):
                for arrival in range(0, num_results + 1, 2):
                    for pause in (SETTLED, 0, 1):
                        events: dict[int, list[SchedulerMessage]] = {first: [Abort("a", "aborted")]}
                        events.setdefault(second, []).append(Abort("b", "stop"))
                        events.setdefault(arrival, []).append(late)
                        await tight(overlap, pause, events=events).play()

    asyncio.run(main())


# The five rules, as far as the actor keeps them

@pytest.mark.parametrize("overlap", OVERLAPS)
def test_as_many_steps_are_in_flight_as_overlap_allows(overlap: int) -> None:
    async def main() -> None:
        async with start(overlap=overlap) as engine:
            engine.inbox.send(request("a", 3, max_tokens=10))
            await engine.settle()
            for _ in range(10 - overlap - 1):
                assert len(engine.executor.results) == overlap + 1
                engine.executor.deliver()
                await engine.settle()

    asyncio.run(main())


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_the_next_plan_leaves_before_the_tokens(overlap: int) -> None:
    async def main() -> None:
        sent: list[str] = []
        async with start(overlap=overlap) as engine:
            executor, answers = engine.executor, engine.answers

            class Executor:
                def send(self, plan: StepPlan, /) -> None:
                    sent.append(f"plan {plan.step_id}")
                    executor.send(plan)

            class Tokenizer:
                def send(self, message: NewTokens, /) -> None:
                    sent.append(f"tokens {message.step_id}")
                    answers.send(message)

            engine.scheduler.executor, engine.scheduler.tokenizer = Executor(), Tokenizer()
            engine.inbox.send(request("a", 3, max_tokens=6))
            await engine.settle()
            while executor.results:
                executor.deliver()
                await engine.settle()
        assert answers["a"].finish == "length"
        for step in range(5 - overlap):
            assert sent.index(f"plan {step + overlap + 1}") < sent.index(f"tokens {step}")

    asyncio.run(main())


def test_nothing_is_read_between_reserve_and_reserved() -> None:
    async def main() -> None:
        class SlowPool(KVPool):
            asked = asyncio.Event()
            may_answer = asyncio.Event()

            async def ask(self, reserve: Reserve) -> Reserved:
                self.asked.set()
                await self.may_answer.wait()
                return await super().ask(reserve)

        async with start() as engine:
            pool = SlowPool(engine.pool.pool, check=True)
            engine.scheduler.pool = pool
            async with asyncio.TaskGroup() as group:
                answering = group.create_task(pool.run())
                engine.inbox.send(request("a", 3, max_tokens=6))
                await pool.asked.wait()
                engine.inbox.send(Abort("a", "aborted"))
                for _ in range(20):
                    await asyncio.sleep(0)
                assert len(engine.inbox) == 1
                pool.may_answer.set()
                await engine.settle()
                assert engine.answers["a"].finish == "aborted"
                engine.executor.deliver()
                await engine.settle()
                engine.check_drained()
                answering.cancel()

    asyncio.run(main())


def test_an_idle_engine_is_still() -> None:
    async def main() -> None:
        async with start() as engine:
            engine.inbox.send(request("a", 3, max_tokens=2))
            await engine.settle()
            while engine.executor.results:
                engine.executor.deliver()
                await engine.settle()
            num_messages = engine.answers.num_messages
            for _ in range(100):
                await asyncio.sleep(0)
            assert engine.inbox._arrival is not None
            assert len(engine.executor.plans) == num_messages == 2
            engine.check_drained()

    asyncio.run(main())


def test_a_refusal_reaches_the_tokenizer_without_a_step() -> None:
    async def main() -> None:
        async with start() as engine:
            engine.inbox.send(request("long", 500))
            await engine.settle()
            assert engine.answers["long"].finish == "rejected"
            assert engine.executor.plans == []
            engine.check_drained()

    asyncio.run(main())


def test_results_that_come_together_are_taken_together() -> None:
    async def main() -> None:
        async with start(overlap=2) as engine:
            a = request("a", 3, max_tokens=6)
            engine.inbox.send(a)
            await engine.settle()
            for _ in range(3):
                engine.executor.deliver()
            await engine.settle()
            assert engine.answers["a"].token_ids == list(solo(a)[0][:3])
            assert engine.answers.num_messages == 1

    asyncio.run(main())


def test_busy_time_leaves_out_the_idle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        now_s = 0.0

        def monotonic(self) -> float:
            return self.now_s

    async def main() -> None:
        async with start() as engine:
            clock.now_s = 100.0             # idle
            engine.inbox.send(request("a", 3, max_tokens=2))
            await engine.settle()
            while engine.executor.results:
                clock.now_s += 1.0          # a step
                engine.executor.deliver()
                await engine.settle()
            clock.now_s += 100.0
            engine.inbox.send(Abort("nobody", "aborted"))
            await engine.settle()
            assert engine.scheduler.busy_s == 2.0

    clock = Clock()
    monkeypatch.setattr(actors.scheduler, "time", clock)
    asyncio.run(main())


def test_a_lost_block_ends_the_engine() -> None:
    async def main() -> None:
        async with start() as engine:
            engine.pool.pool.blocks[0].plain.pop()
            engine.inbox.send(request("a", 3))
            await engine.settle()
            await asyncio.sleep(0)

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(main())
    assert "KV group 0" in str(caught.value.exceptions[0])


@pytest.mark.parametrize("check", [False, True])
def test_the_pool_is_audited_where_asked_and_never_else(check: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when it is idle either: it takes as long as the pool is large."""
    num_checks = 0

    def count() -> None:
        nonlocal num_checks
        num_checks += 1

    async def main() -> None:
        pool = KVPool(BlockPool((Group(4),)), check=check)
        monkeypatch.setattr(pool.pool, "check_integrity", count)
        running = asyncio.create_task(pool.run())
        await pool.ask(Reserve(0, (), 10, (Want("a", 0, 3),)))
        await pool.ask(Reserve(1, (Release("a"),), 10, ()))
        await asyncio.sleep(0)
        running.cancel()

    asyncio.run(main())
    assert num_checks == (2 if check else 0)
