"""The policy and the pool under every order of events that hypothesis can think of. Each answer must be the
undisturbed one, every plan legal (the scripted device sees to that), every block accounted for after each step."""
from __future__ import annotations

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
from actors.policy.sequence import Sequence
from tests.actors.scripted import VOCAB_SIZE, SyncEngine, check_answer, request

GROUPS = (
    (Group(7),),
    (Group(12), Group(5)),
    (Group(8), Group(4, window=20)),
    (Group(4, window=16), Group(7), Group(3, window=5)),
    (Group(3, window=1),),
    (Group(60),),
)


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.sequences: dict[str, NewSequence] = {}
        self.stopped: set[str] = set()      # aborted by a stop string: nothing more is said about them
        self.num_preemptions = 0

    @initialize(groups=st.sampled_from(GROUPS), max_num_seqs=st.integers(1, 5), budget=st.integers(1, 40),
                overlap=st.integers(0, 2))
    def start(self, groups: tuple[Group, ...], max_num_seqs: int, budget: int, overlap: int) -> None:
        self.engine = SyncEngine(groups, max_num_seqs=max_num_seqs, max_num_batched_tokens=max(budget, max_num_seqs),
                                 max_model_len=150, overlap=overlap)

    @rule(num_prompt=st.one_of(st.integers(1, 60), st.sampled_from([15, 16, 17, 32, 33, 149, 150, 200])),
          max_tokens=st.integers(0, 50), stops_early=st.booleans(), min_tokens=st.integers(0, 3),
          prompt_logprobs=st.booleans(), logprobs=st.booleans())
    def arrive(self, num_prompt: int, max_tokens: int, stops_early: bool, min_tokens: int, prompt_logprobs: bool,
               logprobs: bool) -> None:
        request_id = f"r{len(self.sequences)}"
        stop_ids = tuple(range(0, VOCAB_SIZE, 10)) if stops_early else ()
        sequence = request(
            request_id, num_prompt, max_tokens, stop_ids=stop_ids, min_tokens=min(min_tokens, max_tokens),
            prompt_logprobs=1 if prompt_logprobs or max_tokens == 0 else None, logprobs=2 if logprobs else None)
        self.sequences[request_id] = sequence
        self.engine.add(sequence)

    @precondition(lambda self: self.engine.policy.has_work())
    @rule()
    def plan(self) -> None:
        self.engine.plan()

    @precondition(lambda self: self.engine.policy.has_work())
    @rule(kind=st.sampled_from(["step", "row"]), which=st.integers(0, 4))
    def plan_with_a_fault(self, kind: str, which: int) -> None:
        running = list(self.engine.policy.running)
        if kind == "step":
            self.engine.plan(error="OutOfMemory in a step")
        elif running:
            self.engine.plan(failed=(running[which % len(running)],))

    @precondition(lambda self: self.engine.results)
    @rule()
    def deliver(self) -> None:
        self.engine.deliver()

    @rule(num_steps=st.integers(1, 30))
    def go_on(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.engine.step()

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 100), reason=st.sampled_from(["aborted", "stop"]))
    def abort(self, which: int, reason: Literal["aborted", "stop"]) -> None:
        here = [*self.engine.policy.running, *self.engine.policy.waiting, *self.sequences]
        request_id = here[which % len(here)]
        is_alive = request_id in self.engine.policy.running or request_id in self.engine.policy.waiting
        if reason == "stop" and is_alive:
            self.stopped.add(request_id)
        self.engine.abort(request_id, reason)

    @invariant()
    def counts_hold(self) -> None:
        if not hasattr(self, "engine"):
            return
        policy, pool = self.engine.policy, self.engine.pool
        pool.check_integrity()
        running: list[Sequence] = list(policy.running.values())
        waiting: list[Sequence] = list(policy.waiting.values())
        arrival = {request_id: index for index, request_id in enumerate(self.sequences)}
        order = [arrival[sequence.request_id] for sequence in running + waiting]
        assert order == sorted(order), "order is by arrival"
        slots = [sequence.slot for sequence in running]
        assert sorted(slots + policy._free_slots) == list(range(policy.config.max_num_seqs))
        for sequence in running:
            assert 0 <= sequence.num_computed_tokens <= sequence.num_planned_tokens
            assert sequence.num_planned_tokens <= min(sequence.num_final_tokens, sequence.num_reserved_tokens)
            ahead = sequence.num_planned_tokens - sequence.num_known_tokens
            assert ahead < max(1, policy.num_in_flight + 1)
        for sequence in waiting:
            assert sequence.slot == -1
            assert sequence.num_planned_tokens == sequence.num_computed_tokens == sequence.num_reserved_tokens == 0
        assert policy.num_in_flight == len(self.engine.results) <= policy.config.overlap + 1

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.drain()
        for request_id, sequence in self.sequences.items():
            answer = self.engine.answers[request_id]
            if request_id in self.stopped:
                assert answer.finish is None
            else:
                assert answer.finish is not None, f"{request_id} has no end"
            if answer.finish != "rejected":
                check_answer(cut(sequence, self.engine.policy.config.max_model_len), answer)


def cut(sequence: NewSequence, max_model_len: int) -> NewSequence:
    """`sequence` with what the context leaves of max_tokens."""
    max_tokens = min(sequence.max_tokens, max_model_len - len(sequence.token_ids))
    return NewSequence(sequence.request_id, sequence.token_ids, sequence.sampling, max_tokens, sequence.stop_ids,
                       sequence.seed, sequence.choice, sequence.arrival_s)


def run(max_examples: int, stateful_step_count: int, derandomize: bool) -> None:
    run_state_machine_as_test(SchedulerMachine, settings=settings(
        max_examples=max_examples, stateful_step_count=stateful_step_count, deadline=None, database=None,
        derandomize=derandomize, suppress_health_check=list(HealthCheck)))


def test_any_order_of_events() -> None:
    run(80, 30, derandomize=True)


@pytest.mark.slow
def test_any_order_of_events_for_long() -> None:
    run(3000, 60, derandomize=False)
