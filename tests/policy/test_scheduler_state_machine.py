"""The policy and the pool under any order of events. Each answer must be the undisturbed one, every plan legal (the
scripted device sees to that), every block accounted for after each step, and nothing left at the end."""
from __future__ import annotations

import random
from typing import Literal

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from actors.messages import NewSequence
from actors.policy.block_pool import Group
from tests.actors.scripted import VOCAB_SIZE, SyncEngine, check_answer, request

MAX_MODEL_LEN = 150
GROUPS = (
    (Group(7),),
    (Group(12), Group(6)),
    (Group(8), Group(4, window=20)),
    (Group(4, window=16), Group(7), Group(3, window=5)),
    (Group(3, window=1),),
    (Group(60),),
)
LENGTHS = (1, 15, 16, 17, 31, 32, 33, 48, MAX_MODEL_LEN - 1, MAX_MODEL_LEN, 200)


class World:
    """An engine, what was asked of it, and what must hold after each event."""

    def __init__(self, groups: tuple[Group, ...], max_num_seqs: int, budget: int, overlap: int) -> None:
        self.engine = SyncEngine(groups, max_num_seqs=max_num_seqs, max_num_batched_tokens=max(budget, max_num_seqs),
                                 max_model_len=MAX_MODEL_LEN, overlap=overlap)
        self.sequences: dict[str, NewSequence] = {}
        self.stopped: set[str] = set()      # aborted by a stop string: nothing more is said about them

    def arrive(self, num_prompt: int, max_tokens: int, stops_early: bool, min_tokens: int, prompt_logprobs: bool,
               logprobs: bool) -> None:
        sequence = request(
            f"r{len(self.sequences)}", num_prompt, max_tokens, min_tokens=min(min_tokens, max_tokens),
            stop_ids=tuple(range(0, VOCAB_SIZE, 10)) if stops_early else (),
            prompt_logprobs=1 if prompt_logprobs or max_tokens == 0 else None, logprobs=2 if logprobs else None)
        self.sequences[sequence.request_id] = sequence
        self.engine.add(sequence)

    def plan(self, fault: Literal["none", "step", "row"], which: int) -> None:
        running = list(self.engine.policy.running)
        if fault == "step":
            self.engine.plan(error="OutOfMemory in a step")
        else:
            self.engine.plan(failed=(running[which % len(running)],) if fault == "row" and running else ())

    def abort(self, which: int, reason: Literal["aborted", "stop"]) -> None:
        policy = self.engine.policy
        ids = [*policy.running, *policy.waiting, *self.sequences]       # also of those that are gone
        request_id = ids[which % len(ids)]
        if reason == "stop" and (request_id in policy.running or request_id in policy.waiting):
            self.stopped.add(request_id)
        self.engine.abort(request_id, reason)

    def check(self) -> None:
        policy = self.engine.policy
        self.engine.pool.check_integrity()
        running, waiting = list(policy.running.values()), list(policy.waiting.values())
        arrival = {request_id: index for index, request_id in enumerate(self.sequences)}
        order = [arrival[sequence.request_id] for sequence in running + waiting]
        assert order == sorted(order), "order is by arrival"
        slots = [sequence.slot for sequence in running]
        assert sorted(slots + policy._free_slots) == list(range(policy.config.max_num_seqs))
        for sequence in running:
            assert 0 <= sequence.num_computed_tokens <= sequence.num_planned_tokens
            assert sequence.num_planned_tokens <= min(sequence.num_final_tokens, sequence.num_reserved_tokens)
            assert sequence.num_planned_tokens < sequence.num_known_tokens + policy.num_in_flight + 1
        for sequence in waiting:
            assert sequence.slot == -1
            assert sequence.num_planned_tokens == sequence.num_computed_tokens == sequence.num_reserved_tokens == 0
        assert policy.num_in_flight == len(self.engine.results) <= policy.config.overlap + 1

    def finish(self) -> None:
        self.engine.drain()
        for request_id, sequence in self.sequences.items():
            answer = self.engine.answers[request_id]
            if request_id in self.stopped:
                assert answer.finish is None
            else:
                assert answer.finish is not None, f"{request_id} has no end"
            if answer.finish != "rejected":
                check_answer(cut(sequence), answer)


def cut(sequence: NewSequence) -> NewSequence:
    """`sequence` with what the context leaves of max_tokens."""
    max_tokens = min(sequence.max_tokens, MAX_MODEL_LEN - len(sequence.token_ids))
    return NewSequence(sequence.request_id, sequence.token_ids, sequence.sampling, max_tokens, sequence.stop_ids,
                       sequence.seed, sequence.choice, sequence.arrival_s)


class SchedulerMachine(RuleBasedStateMachine):
    world: World | None = None

    @initialize(groups=st.sampled_from(GROUPS), max_num_seqs=st.integers(1, 5), budget=st.integers(1, 40),
                overlap=st.integers(0, 2))
    def start(self, groups: tuple[Group, ...], max_num_seqs: int, budget: int, overlap: int) -> None:
        self.world = World(groups, max_num_seqs, budget, overlap)

    def has_work(self) -> bool:
        return self.world is not None and self.world.engine.policy.has_work()

    def has_results(self) -> bool:
        return self.world is not None and bool(self.world.engine.results)

    def has_sequences(self) -> bool:
        return self.world is not None and bool(self.world.sequences)

    @rule(num_prompt=st.one_of(st.integers(1, 60), st.sampled_from(LENGTHS)), max_tokens=st.integers(0, 50),
          stops_early=st.booleans(), min_tokens=st.integers(0, 3), prompt_logprobs=st.booleans(),
          logprobs=st.booleans())
    def arrive(self, num_prompt: int, max_tokens: int, stops_early: bool, min_tokens: int, prompt_logprobs: bool,
               logprobs: bool) -> None:
        assert self.world is not None
        self.world.arrive(num_prompt, max_tokens, stops_early, min_tokens, prompt_logprobs, logprobs)

    @precondition(has_work)
    @rule(fault=st.sampled_from(["none", "none", "none", "step", "row"]), which=st.integers(0, 4))
    def plan(self, fault: Literal["none", "step", "row"], which: int) -> None:
        assert self.world is not None
        self.world.plan(fault, which)

    @precondition(has_results)
    @rule()
    def deliver(self) -> None:
        assert self.world is not None
        self.world.engine.deliver()

    @precondition(has_sequences)
    @rule(num_steps=st.integers(1, 30))
    def go_on(self, num_steps: int) -> None:
        assert self.world is not None
        for _ in range(num_steps):
            self.world.engine.step()

    @precondition(has_sequences)
    @rule(which=st.integers(0, 100), reason=st.sampled_from(["aborted", "stop"]))
    def abort(self, which: int, reason: Literal["aborted", "stop"]) -> None:
        assert self.world is not None
        self.world.abort(which, reason)

    @invariant()
    def check(self) -> None:
        if self.world is not None:
            self.world.check()

    def teardown(self) -> None:
        if self.world is not None:
            self.world.finish()


def run_machine(max_examples: int, stateful_step_count: int, derandomize: bool) -> None:
    run_state_machine_as_test(SchedulerMachine, settings=settings(
        max_examples=max_examples, stateful_step_count=stateful_step_count, deadline=None, database=None,
        derandomize=derandomize, suppress_health_check=list(HealthCheck)))


def soak(seed: int, num_events: int) -> int:
    """A crowded engine: it is full most of the time. Returns the number of preemptions."""
    choose = random.Random(seed)
    world = World(choose.choice(GROUPS), choose.randint(2, 6), choose.randint(1, 40), choose.randint(0, 2))
    has_faults = choose.random() < 0.3
    for _ in range(num_events):
        event = choose.random()
        if event < 0.1 and len(world.engine.policy.waiting) < 6:
            num_prompt = choose.choice((choose.randint(1, 60), choose.choice(LENGTHS)))
            world.arrive(num_prompt, choose.randint(0, 50), choose.random() < 0.3, choose.randint(0, 3),
                         choose.random() < 0.3, choose.random() < 0.3)
        elif event < 0.12 and world.sequences:
            world.abort(choose.randrange(100), "aborted" if choose.random() < 0.7 else "stop")
        elif event < 0.55 and world.engine.policy.has_work():
            fault = choose.random() if has_faults else 1.0
            world.plan("step" if fault < 0.01 else "row" if fault < 0.03 else "none", choose.randrange(6))
        elif world.engine.results:
            world.engine.deliver()
        world.check()
    world.finish()
    return world.engine.policy.stats.num_preemptions


def test_any_order_of_events() -> None:
    run_machine(60, 30, derandomize=True)


def test_a_crowded_engine() -> None:
    num_preemptions = sum(soak(seed, 400) for seed in range(60))
    assert num_preemptions > 100


@pytest.mark.slow
def test_any_order_of_events_for_long() -> None:
    run_machine(2000, 60, derandomize=False)


@pytest.mark.slow
def test_a_crowded_engine_for_long() -> None:
    for seed in range(1000, 3000):
        soak(seed, 600)
