"""What the device is told of the pool's index, what it is asked about who arrives, and what becomes of its answers."""
from __future__ import annotations

from dataclasses import replace

import pytest

from actors.messages import NewSequence, StepPlan, StepResult
from actors.policy.device_index import MAX_LOOKUP_BLOCKS
from actors.policy.kv_group import BLOCK_SIZE, Group
from tests.actors.scripted import ROOT, SyncEngine, check_answer, request, solo


def run(engine: SyncEngine, *sequences: NewSequence) -> list[StepPlan]:
    """To their ends."""
    engine.add(*sequences)
    plans = engine.drain()
    for sequence in sequences:
        check_answer(sequence, engine.answers[sequence.request_id])
    engine.check_told()
    return plans


def counted(engine: SyncEngine) -> tuple[int, int]:
    """(sequences with a hint, those where it was right)"""
    stats = engine.policy.stats
    return stats.device_prefix_lookups, stats.device_prefix_lookups_agreeing


def again(sequence: NewSequence, request_id: str, max_tokens: int = 4) -> NewSequence:
    return request(request_id, len(sequence.token_ids), max_tokens, prompt=sequence.token_ids)


def test_a_plan_tells_what_earlier_plans_have_filled() -> None:
    engine = SyncEngine(asks_device=True)
    a = request("a", 40, max_tokens=9)
    plans = run(engine, a)
    tokens = a.token_ids + solo(a)[0]
    assert plans[0].index_changes == ()
    assert plans[1].index_changes == ((0, a.keys[0], ROOT, tokens[:16]), (1, a.keys[1], a.keys[0], tokens[16:32]))
    assert all(plan.index_changes == () for plan in plans[2:])
    plans = run(engine, request("b", 5, max_tokens=1))
    ((block_id, _, parent, token_ids),) = plans[0].index_changes    # of the answer, told when a had ended
    assert (block_id, parent, token_ids) == (2, a.keys[1], tokens[32:48])


def test_what_is_reused_or_forgotten_is_told() -> None:
    engine = SyncEngine((Group(4),), asks_device=True)
    a = request("a", 40, max_tokens=1)
    run(engine, a)
    run(engine, request("flood", 33, max_tokens=1))
    engine.pool.blocks[0].forget_keys(a.keys[:1])
    run(engine, request("b", 3, max_tokens=1))
    assert a.keys[1] not in {key for key, _, _ in engine.device.index.values()}
    assert a.keys[0] not in {key for key, _, _ in engine.device.index.values()}


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_of_who_comes_alone_the_device_has_what_the_pool_finds(overlap: int) -> None:
    """The same prompt, its next turns, and others between them that use its blocks up."""
    engine = SyncEngine((Group(12),), overlap=overlap, asks_device=True)
    prompt, num_hits = request("p", 50).token_ids, 0
    for number in range(30):
        if number % 7 == 6:
            sequence = request(f"r{number}", 120)
        else:
            sequence = request(f"r{number}", len(prompt) + number % 3, max_tokens=3 + 5 * (number % 4), prompt=prompt)
            prompt = (sequence.token_ids + solo(sequence)[0])[:50 + 11 * (number % 5)]
        run(engine, sequence)
        usage = engine.answers[sequence.request_id].usage
        assert usage is not None
        num_hits += usage.num_cached_tokens >= BLOCK_SIZE
    assert 20 < num_hits < 30
    assert counted(engine) == (30, 30)


def test_who_waits_is_looked_up_when_it_comes() -> None:
    """So its hint is right where nothing has changed by the time that it enters, and wrong where something has."""
    engine = SyncEngine((Group(8),), max_num_seqs=1, asks_device=True)
    a = request("a", 40, max_tokens=1)
    run(engine, a)
    assert counted(engine) == (1, 1)
    runs = request("runs", 20, max_tokens=20)
    engine.add(runs, again(a, "same"))
    plans = engine.step()
    assert [lookup[0] for lookup in plans[0].lookups] == ["runs", "same"]
    assert counted(engine) == (2, 2), "same has not entered"
    engine.drain()
    assert counted(engine) == (3, 3)

    engine.add(request("flood", 110, max_tokens=4), again(a, "evicted"))
    engine.drain()
    assert counted(engine) == (5, 4)
    engine.add(request("first", 35, max_tokens=4), request("second", 35, prompt=request("first", 35).token_ids))
    engine.drain()
    assert counted(engine) == (7, 5), "the second one found what the first one left"


def test_of_a_burst_in_one_step_the_device_has_nothing_yet() -> None:
    engine = SyncEngine((Group(64),), max_num_seqs=8, max_num_batched_tokens=512, asks_device=True)
    first = request("r0", 40)
    run(engine, first, *(again(first, f"r{i}") for i in range(1, 8)))
    assert engine.policy.stats.prefix_cache_hits == 7 * 32
    assert counted(engine) == (8, 1)


@pytest.mark.parametrize(("num_prompt", "num_blocks"), [(1, 0), (16, 0), (17, 1), (32, 1), (33, 2)])
def test_as_many_blocks_are_looked_up_as_the_pool_looks_for(num_prompt: int, num_blocks: int) -> None:
    engine = SyncEngine(asks_device=True)
    sequence = request("a", num_prompt)
    lookups = run(engine, sequence)[0].lookups
    keys, token_ids = sequence.keys[:num_blocks], sequence.token_ids[:num_blocks * BLOCK_SIZE]
    assert lookups == ((("a", ROOT, keys, token_ids),) if num_blocks else ())
    assert counted(engine) == (num_blocks > 0,) * 2


def test_what_the_pool_does_not_look_for_is_not_looked_up() -> None:
    engine = SyncEngine(asks_device=True)
    engine.add(request("not cached", 40, root=b""), request("prompt logprobs", 40, prompt_logprobs=1),
               request("too long", 2000))
    assert all(plan.lookups == () for plan in engine.drain())


def test_a_flood_is_looked_up_as_far_as_a_plan_goes() -> None:
    engine = SyncEngine(asks_device=True)
    prompt = request("long", 990).token_ids
    num_asked = -(-MAX_LOOKUP_BLOCKS // (990 // BLOCK_SIZE))
    engine.add(*(request(f"r{i}", 990, max_tokens=1, prompt=prompt) for i in range(num_asked + 10)))
    plans = engine.drain()
    assert [len(plan.lookups) for plan in plans[:2]] == [num_asked, 0]
    run(engine, request("later", 40))
    assert counted(engine)[0] == num_asked + 1


def test_what_comes_while_nothing_can_be_planned_waits_for_the_next_plan() -> None:
    engine = SyncEngine((Group(3),), overlap=2, asks_device=True)
    a = request("a", 33, max_tokens=2)
    engine.add(a)
    assert engine.plan() is not None
    assert engine.plan() is not None
    engine.add(again(a, "b"), request("c", 40))
    assert engine.plan() is None            # all blocks are a's, which has nothing to do but wait
    lookups = [[lookup[0] for lookup in plan.lookups] for plan in engine.drain()]
    assert lookups[0] == ["b", "c"]
    assert not any(lookups[1:])
    assert counted(engine) == (3, 3)


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_failed_step_has_no_hints_and_its_changes_are_told(overlap: int) -> None:
    engine = SyncEngine(overlap=overlap, asks_device=True)
    a = request("a", 40, max_tokens=1)
    run(engine, a)
    engine.add(again(a, "fails"))
    plan = engine.plan(error="MemoryError")
    assert plan is not None
    assert len(plan.index_changes) == 2
    assert len(plan.lookups) == 1
    engine.drain()
    engine.check_told()
    assert counted(engine) == (1, 1)
    run(engine, again(a, "b"))
    assert counted(engine) == (2, 2)


def test_hints_change_no_plan() -> None:
    """Whatever the device says: right, wrong, nothing, or about who is not there."""
    def plans(say: str) -> list[StepPlan]:
        engine = SyncEngine((Group(12),), max_num_seqs=3, overlap=1, scheduling_policy="lpm", asks_device=say != "none")
        made, base = [], request("base", 60)
        for number in range(12):
            prompt = base.token_ids[:16 * (number % 4)] if number % 3 else ()
            engine.add(request(f"r{number}", 50 + number, max_tokens=9, prompt=prompt))
            made += engine.plan_all()
            if engine.results and say == "wrong":
                result: StepResult = engine.results[-1]
                engine.results[-1] = replace(result, prefix_hints=(
                    *((request_id, 3 - num_blocks) for request_id, num_blocks in result.prefix_hints), ("nobody", 2)))
            engine.deliver()
        made += engine.drain()
        assert (counted(engine)[0] > 0) == (say != "none")
        return [replace(plan, index_changes=(), lookups=()) for plan in made]

    assert plans("right") == plans("wrong") == plans("none")


def test_nothing_is_told_or_asked_where_nobody_wants_it() -> None:
    engine = SyncEngine()
    a = request("a", 40)
    plans = [*run(engine, a), *run(engine, again(a, "b"))]
    assert all((plan.index_changes, plan.lookups) == ((), ()) for plan in plans)
    assert engine.pool.blocks[0].index.changes is None
    assert counted(engine) == (0, 0)
