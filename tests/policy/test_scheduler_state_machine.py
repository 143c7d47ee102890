"""The policy and the pool under any order of events: arrive, chunk, hit, fork, finish, abort, preempt, swap, evict,
fail. Each answer must be the undisturbed one, every plan legal (the scripted device sees to that), every block in its
place after each event, everything that is found what its key says, and nothing left at the end.
"""
from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any, Literal, TypeAlias, get_args

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
from actors.policy.admission import QueueLimits
from actors.policy.kv_group import BLOCK_SIZE, Group
from tests.actors.scripted import ROOT, VOCAB_SIZE, Entry, SyncEngine, check_answer, request, solo, token_hashes

MAX_MODEL_LEN = 150
GROUPS = (
    (Group(7),),
    (Group(7, num_tier_blocks=9),),
    (Group(12), Group(6)),
    (Group(8), Group(4, window=20)),
    (Group(8, num_tier_blocks=5), Group(4, window=20, num_tier_blocks=3)),
    (Group(4, window=16), Group(7), Group(3, window=5)),
    (Group(3, window=1),),
    (Group(9, window=33, num_tier_blocks=4),),
    (Group(60),),
)
LENGTHS = (1, 15, 16, 17, 31, 32, 33, 48, MAX_MODEL_LEN - 1, MAX_MODEL_LEN, 200)
POLICY_SETTINGS: tuple[dict[str, Any], ...] = (
    {"scheduling_policy": "fcfs"},
    {"scheduling_policy": "priority"},
    {"scheduling_policy": "lpm"},
    {"scheduling_policy": "fair"},
    {"scheduling_policy": "deadline", "ttft_target_s": 5.0, "itl_target_s": 0.4},
    {"scheduling_policy": "fcfs", "queue": QueueLimits(2, 100)},
)
OTHER_ROOT = b"another tenant's"
Like: TypeAlias = Literal["fresh", "equal", "beginning", "next turn", "other root", "not cached"]
LIKES: tuple[Like, ...] = get_args(Like)
Family: TypeAlias = Literal["strangers", "children", "one missing"]
FAMILIES: tuple[Family, ...] = get_args(Family)


class World:
    """An engine, what was asked of it, and what must hold after each event."""

    def __init__(self, groups: tuple[Group, ...], max_num_seqs: int, budget: int, overlap: int,
                 policy: dict[str, Any]) -> None:
        self.engine = SyncEngine(groups, max_num_seqs=max_num_seqs, max_num_batched_tokens=max(budget, max_num_seqs),
                                 max_model_len=MAX_MODEL_LEN, overlap=overlap, poison=True, asks_device=True, **policy)
        self.policy_name = policy["scheduling_policy"]
        self.sequences: dict[str, NewSequence] = {}
        self.stopped: set[str] = set()      # aborted by a stop string: nothing more is said about them
        self.hashes: dict[bytes, tuple[int, bytes | int]] = {ROOT: (0, ROOT), OTHER_ROOT: (0, OTHER_ROOT)}
        self.has_row_faults = False

    def arrive(self, like: Like, which: int, num_choices: int, num_prompt: int, max_tokens: int, stops_early: bool,
               min_tokens: int, prompt_logprobs: bool, logprobs: bool, family: Family) -> None:
        """Choices of one prompt: a new one, or one that has to do with an earlier one."""
        num_children = 1 if family == "strangers" else num_choices + (family == "one missing")
        parent_id = f"of r{len(self.sequences)}"
        prompt: tuple[int, ...] = ()
        root = ROOT
        if self.sequences and like != "fresh":
            earlier = list(self.sequences.values())[which % len(self.sequences)]
            prompt, root = earlier.token_ids, earlier.root
            if like == "beginning":
                prompt = prompt[:num_prompt // 2]
            elif like == "next turn":
                prompt += solo(earlier)[0]
                num_prompt += len(prompt)
            else:
                num_prompt = len(prompt)
            root = {"other root": OTHER_ROOT, "not cached": b""}.get(like, root)
        for _ in range(num_choices):
            sequence = request(
                f"r{len(self.sequences)}", num_prompt, max_tokens, min_tokens=min(min_tokens, max_tokens),
                stop_ids=tuple(range(0, VOCAB_SIZE, 10)) if stops_early else (),
                prompt_logprobs=1 if prompt_logprobs or max_tokens == 0 else None, logprobs=2 if logprobs else None,
                prompt=prompt, root=root, priority=which % 3, tenant=f"t{which % 2}", user=f"u{which % 3}",
                arrival_s=self.engine.now_s, parent_id=parent_id, num_children=num_children)
            prompt = sequence.token_ids
            self.sequences[sequence.request_id] = sequence
            self._learn_hashes(sequence)
            self.engine.add(sequence)

    def _learn_hashes(self, sequence: NewSequence) -> None:
        """What the blocks that its keys name must hold, its answer's included."""
        if sequence.root:
            token_ids = [*sequence.token_ids, *solo(sequence)[0]]
            whole = request("", len(token_ids), prompt=tuple(token_ids), root=sequence.root)
            hashes = token_hashes(sequence.root, token_ids, [])
            for i, key in enumerate(whole.keys, start=1):
                self.hashes[key] = i * BLOCK_SIZE, hashes[i * BLOCK_SIZE - 1]

    def plan(self, fault: Literal["none", "step", "row"], which: int) -> None:
        self.engine.now_s += 0.5
        running = list(self.engine.policy.running)
        if fault == "step":
            self.engine.plan(error="OutOfMemory in a step")
        else:
            self.has_row_faults |= fault == "row"
            self.engine.plan(failed=(running[which % len(running)],) if fault == "row" and running else ())

    def abort(self, which: int, reason: Literal["aborted", "stop"]) -> None:
        policy = self.engine.policy
        ids = [*policy.running, *policy.waiting, *self.sequences]       # also of those that are gone
        request_id = ids[which % len(ids)]
        if reason == "stop" and (request_id in policy.running or request_id in policy.waiting
                                 or self.is_arriving(request_id)):
            self.stopped.add(request_id)
        self.engine.abort(request_id, reason)

    def is_arriving(self, request_id: str) -> bool:
        return any(request_id in children for children in self.engine.policy.arrivals._children.values())

    def check(self) -> None:
        policy = self.engine.policy
        self.engine.pool.check_integrity()
        self._check_findable()
        self.engine.check_told()
        running, waiting = list(policy.running.values()), list(policy.waiting.values())
        if self.policy_name == "fcfs":
            order = [sequence.number for sequence in running + waiting]
            assert order == sorted(order), "order is by arrival"
        elif self.policy_name == "priority":
            ranks = [(sequence.rank, sequence.number) for sequence in running]
            assert ranks == sorted(ranks), "the tail is the least important"
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

    def _check_findable(self) -> None:
        """Blocks hold what they are found for, once their steps have reported; so does the tier."""
        for number, blocks in enumerate(self.engine.pool.blocks):
            for parent, found in blocks.index._continuations.items():
                for block_id, token_ids in found.items():
                    if block_id not in blocks.unproven:
                        self._check_block(self.engine.device.memory[number][block_id], parent, token_ids)
            for key, slot in blocks.tier._slot_of.items():
                if key not in blocks.tier._unproven and slot not in {s for g, _, s in self.engine.policy._tier_out
                                                                     if g == number}:
                    entry = self.engine.device.tier[number][slot][-1]
                    num_tokens, value = self.hashes[key]
                    assert entry == (num_tokens - 1, value) or self._may_be_lost(entry)

    def _check_block(self, memory: list[Entry], parent: bytes, token_ids: tuple[int, ...]) -> None:
        position, value = self.hashes[parent]
        for entry, token_id in zip(memory, token_ids, strict=False):
            value = hash((value, token_id))
            assert entry == (position, value) or self._may_be_lost(entry), f"{entry} where {(position, value)} is found"
            position += 1

    def _may_be_lost(self, entry: Entry) -> bool:
        """A chunk that samples nothing does not see that its numbers are not finite."""
        return self.has_row_faults and entry == "nan"

    def finish(self) -> Counter[str]:
        """Returns what has happened."""
        for request_id in self.sequences:
            if self.is_arriving(request_id):                    # the last of its family never came
                self.engine.abort(request_id)
        self.engine.drain()
        self.check()
        for request_id, sequence in self.sequences.items():
            answer = self.engine.answers[request_id]
            if request_id in self.stopped:
                assert answer.finish is None
            else:
                assert answer.finish is not None, f"{request_id} has no end"
            if answer.finish != "rejected":
                check_answer(cut(sequence), answer)
        stats, device = self.engine.policy.stats, self.engine.device
        return Counter(steps=stats.num_steps, preemptions=stats.num_preemptions, hits=stats.prefix_cache_hits,
                       hints=stats.device_prefix_lookups, agreeing=stats.device_prefix_lookups_agreeing,
                       copies=device.num_copies, tier_out=device.num_tier_out, tier_in=device.num_tier_in,
                       evicted=sum(len(blocks.evicted) for blocks in self.engine.pool.blocks))


def cut(sequence: NewSequence) -> NewSequence:
    """`sequence` with what the context leaves of max_tokens."""
    return replace(sequence, max_tokens=min(sequence.max_tokens, MAX_MODEL_LEN - len(sequence.token_ids)))


class SchedulerMachine(RuleBasedStateMachine):
    world: World | None = None

    @initialize(groups=st.sampled_from(GROUPS), max_num_seqs=st.integers(1, 5), budget=st.integers(1, 40),
                overlap=st.integers(0, 2), policy=st.sampled_from(POLICY_SETTINGS))
    def start(self, groups: tuple[Group, ...], max_num_seqs: int, budget: int, overlap: int,
              policy: dict[str, Any]) -> None:
        self.world = World(groups, max_num_seqs, budget, overlap, policy)

    def has_work(self) -> bool:
        return self.world is not None and self.world.engine.policy.has_work()

    def has_results(self) -> bool:
        return self.world is not None and bool(self.world.engine.results)

    def has_sequences(self) -> bool:
        return self.world is not None and bool(self.world.sequences)

    @rule(like=st.sampled_from(LIKES), which=st.integers(0, 20), num_choices=st.integers(1, 3),
          num_prompt=st.one_of(st.integers(1, 60), st.sampled_from(LENGTHS)), max_tokens=st.integers(0, 50),
          stops_early=st.booleans(), min_tokens=st.integers(0, 3), prompt_logprobs=st.booleans(),
          logprobs=st.booleans(), family=st.sampled_from(FAMILIES))
    def arrive(self, like: Like, which: int, num_choices: int, num_prompt: int, max_tokens: int, stops_early: bool,
               min_tokens: int, prompt_logprobs: bool, logprobs: bool, family: Family) -> None:
        assert self.world is not None
        self.world.arrive(like, which, num_choices, num_prompt, max_tokens, stops_early, min_tokens, prompt_logprobs,
                          logprobs, family)

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


def soak(seed: int, num_events: int) -> Counter[str]:
    """A crowded engine: it is full most of the time. Returns what has happened."""
    choose = random.Random(seed)
    world = World(choose.choice(GROUPS), choose.randint(2, 6), choose.randint(1, 40), choose.randint(0, 2),
                  choose.choice(POLICY_SETTINGS))
    has_faults = choose.random() < 0.3
    for _ in range(num_events):
        event = choose.random()
        if event < 0.1 and len(world.engine.policy.waiting) < 6:
            num_prompt = choose.choice((choose.randint(1, 60), choose.choice(LENGTHS)))
            world.arrive(choose.choice(LIKES), choose.randrange(100), choose.choice((1, 1, 1, 2, 4)),
                         num_prompt, choose.randint(0, 50), choose.random() < 0.3, choose.randint(0, 3),
                         choose.random() < 0.1, choose.random() < 0.3, choose.choice(FAMILIES))
        elif event < 0.12 and world.sequences:
            world.abort(choose.randrange(100), "aborted" if choose.random() < 0.7 else "stop")
        elif event < 0.55 and world.engine.policy.has_work():
            fault = choose.random() if has_faults else 1.0
            world.plan("step" if fault < 0.01 else "row" if fault < 0.03 else "none", choose.randrange(6))
        elif world.engine.results:
            world.engine.deliver()
        world.check()
    return world.finish()


def test_any_order_of_events() -> None:
    run_machine(60, 30, derandomize=True)


def test_a_crowded_engine() -> None:
    happened = sum((soak(seed, 400) for seed in range(60)), Counter[str]())
    assert happened["steps"] > 10_000
    for event in ("preemptions", "hits", "copies", "evicted", "tier_out", "tier_in", "hints", "agreeing"):
        assert happened[event] > 30, f"{event} hardly ever happens: {happened}"


@pytest.mark.slow
def test_any_order_of_events_for_long() -> None:
    run_machine(2000, 60, derandomize=False)


@pytest.mark.slow
def test_a_crowded_engine_for_a_million_steps() -> None:
    happened = Counter[str]()
    seed = 1000
    while happened["steps"] < 1_000_000:
        happened += soak(seed, 2000)
        seed += 1
