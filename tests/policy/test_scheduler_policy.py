from __future__ import annotations

import pytest

from actors.messages import (
    Grant,
    NewSequence,
    Release,
    Reserved,
    StartedSequence,
    StepPlan,
    StepResult,
    Usage,
    Want,
)
from actors.policy.kv_group import Group
from actors.policy.scheduler import SchedulerConfig, SchedulerPolicy
from tests.actors.scripted import SyncEngine, check_answer, request, scripted_token, solo


def chunk_rows(plan: StepPlan) -> int:
    return sum(end - start for _, start, end in plan.chunks)


def decode_rows(plan: StepPlan) -> int:
    return plan.num_tokens - chunk_rows(plan)


# A plan says only what changed

def test_the_whole_life_of_a_sequence() -> None:
    engine = SyncEngine()
    a = request("a", 20, max_tokens=14)
    engine.add(a)
    plans = engine.drain()
    started = StartedSequence(0, "a", a.token_ids, 20, a.sampling, (), a.seed, 0, ((0, 1),))
    assert plans[0] == StepPlan(0, started=(started,), chunks=((0, 0, 20),), num_tokens=20)
    for step in range(1, 13):
        assert plans[step] == StepPlan(step, num_tokens=1)
    assert plans[13] == StepPlan(13, new_blocks=((0, 0, (2,)),), num_tokens=1)      # writes position 32
    assert len(plans) == 14
    answer = engine.answers["a"]
    assert (tuple(answer.token_ids), answer.finish) == solo(a)
    assert answer.usage == Usage(20, 14, 0, "diverged:0")
    assert engine.policy.stats.prompt_tokens == 20
    assert engine.policy.stats.generation_tokens == 14
    assert engine.policy.stats.num_steps == 14
    assert engine.policy.stats.step_s == 7.0


def test_the_slot_of_an_ended_sequence_is_told_with_the_next_plan() -> None:
    engine = SyncEngine()
    engine.add(request("a", 3, max_tokens=1))
    engine.drain()
    engine.add(request("b", 3, max_tokens=1))
    plan = engine.plan()
    assert plan is not None
    assert plan.ended == (0,)
    assert plan.started[0].slot == 0


@pytest.mark.parametrize("num_prompt", [1, 15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("budget", [1, 7, 16, 64])
def test_lengths_at_block_boundaries(num_prompt: int, budget: int) -> None:
    engine = SyncEngine(max_num_seqs=1, max_num_batched_tokens=budget)
    for name in ("a", "b"):
        sequence = request(name, num_prompt, max_tokens=20)
        engine.add(sequence)
        engine.drain()
        check_answer(sequence, engine.answers[name])
    assert engine.device.num_rows == 2 * (num_prompt + 19)


def test_chunks_fill_the_budget_and_the_answer_begins_after_the_last() -> None:
    engine = SyncEngine(max_num_batched_tokens=8)
    engine.add(request("a", 20, max_tokens=2))
    plans = engine.drain()
    assert [plan.chunks for plan in plans] == [((0, 0, 8),), ((0, 8, 16),), ((0, 16, 20),), ()]


def test_copies_pass_through_to_the_plan() -> None:
    policy = SchedulerPolicy(SchedulerConfig(4, 64, 100, (Group(8),)))
    policy.apply([request("a", 5)])
    policy.wants()
    plan = policy.plan(Reserved(0, (Grant("a", 0, 5, ((3,),)),), (), copies=((0, 1, 3),)))
    assert plan is not None
    assert plan.copies == ((0, 1, 3),)


def test_counts_are_fixed_only_after_the_pool_has_answered() -> None:
    """A prefix hit: the grant starts where the cache ends, and the rest is planned from there."""
    policy = SchedulerPolicy(SchedulerConfig(4, 10, 100, (Group(8),)))
    policy.apply([request("a", 60, max_tokens=2, root=b"")])
    assert policy.wants().wants == (Want("a", 0, 60),)
    plan = policy.plan(Reserved(0, (Grant("a", 48, 10, ((5, 6, 7, 1),), cache_miss="diverged:3"),), ()))
    assert plan is not None
    assert plan.started[0].block_ids == ((5, 6, 7, 1),)
    assert plan.chunks == ((0, 48, 58),)
    policy.apply([StepResult(0)])
    assert policy.wants().wants == (Want("a", 58, 60),)
    plan = policy.plan(Reserved(1, (Grant("a", 0, 2, ((),)),), ()))
    assert plan is not None
    assert plan.chunks == ((0, 58, 60),)
    policy.apply([StepResult(1, (0,), (60,), (9,), (0.0,), ((),))])
    policy.wants()
    policy.plan(Reserved(2, (), ()))
    policy.apply([StepResult(2, (0,), (61,), (9,), (0.0,), ((),))])
    output = policy.take_output()
    assert output is not None
    assert output.rows[-1].usage == Usage(60, 2, 48, "diverged:3")


# Order and fairness

def test_a_long_prompt_neither_freezes_answers_nor_starves_under_short_ones() -> None:
    engine = SyncEngine((Group(600),), max_num_seqs=8, max_num_batched_tokens=32, max_model_len=4000)
    decoding = [request(f"d{i}", 4, max_tokens=400) for i in range(4)]
    engine.add(*decoding)
    engine.step()
    long = [request(f"long{i}", 2000, max_tokens=2) for i in range(2)]
    engine.add(*long)
    num_steps = 0
    while engine.answers["long1"].finish is None:
        engine.add(request(f"short{num_steps}", 3, max_tokens=1))
        (plan,) = engine.step()
        assert decode_rows(plan) >= 4, "a chunk took an answer's place"
        assert plan.num_tokens <= 32
        num_steps += 1
        assert num_steps < 2 * 2000 / 28 + 10, "the long prompts do not get on"
    for sequence in long:
        check_answer(sequence, engine.answers[sequence.request_id])


def test_arrival_order_decides_who_starts() -> None:
    engine = SyncEngine(max_num_seqs=2, max_num_batched_tokens=10)
    engine.add(*(request(name, 6, max_tokens=1) for name in "abcd"))
    plans = engine.drain()
    assert [[s.request_id for s in plan.started] for plan in plans] == [["a", "b"], ["c"], ["d"]]
    assert [plan.chunks for plan in plans] == [((0, 0, 6), (1, 0, 4)), ((1, 4, 6), (0, 0, 6)), ((0, 0, 6),)]


def test_a_newcomer_is_not_let_in_by_preempting() -> None:
    engine = SyncEngine((Group(4),))
    engine.add(request("a", 30, max_tokens=3), request("b", 20, max_tokens=13))
    engine.step()
    engine.add(request("c", 17, max_tokens=2))
    engine.drain()
    assert engine.policy.stats.num_preemptions == 0


def test_nobody_overtakes_the_head_of_the_line() -> None:
    engine = SyncEngine((Group(4),))
    engine.add(request("a", 30, max_tokens=10))
    engine.step()
    engine.add(request("big", 50, max_tokens=2), request("small", 3, max_tokens=2))
    order = [s.request_id for plan in engine.drain() for s in plan.started]
    assert order == ["big", "small"]


# Preemption

@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_the_tail_yields_and_resumes_before_newcomers(overlap: int) -> None:
    engine = SyncEngine((Group(4),), overlap=overlap)
    a, b = request("a", 14, max_tokens=40), request("b", 14, max_tokens=30)
    engine.add(a, b)
    engine.step()
    c = request("c", 40, max_tokens=4)
    engine.add(c)
    plans = engine.drain()
    assert engine.policy.stats.num_preemptions == 1
    assert [s.request_id for plan in plans for s in plan.started] == ["b", "c"]
    for sequence in (a, b, c):
        check_answer(sequence, engine.answers[sequence.request_id])


def test_a_late_token_of_a_preempted_sequence_counts() -> None:
    engine = SyncEngine((Group(3),), overlap=2)
    a, b = request("a", 28, max_tokens=8), request("b", 4, max_tokens=30)
    engine.add(a, b)
    while engine.policy.stats.num_preemptions == 0:
        engine.step()
    sequence = engine.policy.waiting["b"]
    num_known = sequence.num_known_tokens
    num_late = engine.policy.num_in_flight - 1              # the newest step is the one without b
    assert num_late > 0
    reserve = engine.policy.wants()
    assert "b" not in [want.request_id for want in reserve.wants], "resumed before all of its tokens are known"
    plan = engine.policy.plan(engine.pool.reserve(reserve))
    assert plan is not None
    engine.results.append(engine.device.run(plan))
    for i in range(1, num_late + 1):
        engine.deliver()
        assert sequence.num_known_tokens == num_known + i
        assert sequence.num_planned_tokens == sequence.num_computed_tokens == 0
    plans = engine.drain()
    resumed = [s for plan in plans for s in plan.started if s.request_id == "b"]
    assert len(resumed[0].token_ids) == num_known + num_late    # nothing is chosen again
    check_answer(a, engine.answers["a"])
    check_answer(b, engine.answers["b"])


def test_a_preempted_sequence_can_end_by_its_late_tokens() -> None:
    """All of b is planned when a needs its block: b's last tokens come while it waits, and it never runs again."""
    engine = SyncEngine((Group(3),), overlap=2)
    a, b = request("a", 30, max_tokens=8), request("b", 14, max_tokens=3)
    engine.add(a, b)
    engine.plan_all()
    assert len(engine.results) == 3
    assert engine.policy.stats.num_preemptions == 0
    engine.deliver()
    engine.plan_all()
    assert engine.policy.stats.num_preemptions == 1
    assert list(engine.policy.waiting) == ["b"]
    plans = engine.drain()
    assert not any(plan.started for plan in plans)
    check_answer(a, engine.answers["a"])
    check_answer(b, engine.answers["b"])


def test_what_the_first_answer_granted_holds_and_the_preempted_lose_it() -> None:
    policy = SchedulerPolicy(SchedulerConfig(4, 64, 200, (Group(20),)))
    sequences = [request(name, 16, max_tokens=40) for name in "abc"]
    policy.apply(sequences)
    policy.wants()
    policy.plan(Reserved(0, tuple(Grant(name, 0, 16, ((i,),)) for i, name in enumerate("abc")), ()))
    policy.apply([StepResult(0, (0, 1, 2), (16,) * 3, (1,) * 3, (0.0,) * 3, ((),) * 3)])
    assert [want.request_id for want in policy.wants().wants] == ["a", "b", "c"]
    again = policy.preempt(Reserved(1, (Grant("a", 0, 1, ((3,),)), Grant("c", 0, 1, ((4,),))), ("b",)))
    assert again is not None
    assert again.step_id == 1
    assert again.releases == (Release("c"),)
    assert again.wants == (Want("b", 16, 17),)
    assert again.token_budget == 63
    plan = policy.plan(Reserved(1, (Grant("b", 0, 1, ((4,),)),), ()))
    assert plan == StepPlan(1, ended=(2,), new_blocks=((0, 0, (3,)), (1, 0, (4,))), num_tokens=2)


def test_the_preempted_lose_the_chunk_that_needed_no_block() -> None:
    policy = SchedulerPolicy(SchedulerConfig(2, 3, 200, (Group(20),)))
    policy.apply([request("a", 1, max_tokens=40, root=b""), request("b", 60, max_tokens=4, root=b"")])
    for step in range(16):
        policy.wants()
        grants = [Grant("b", 0, 2, ((1, 2, 3, 4) if step == 0 else (),))]
        policy.plan(Reserved(step, (Grant("a", 0, 1, ((0,),)), *grants) if step == 0 else tuple(grants), ()))
        policy.apply([StepResult(step, (0,), (1 + step,), (1,), (0.0,), ((),))])
    reserve = policy.wants()
    assert reserve.wants == (Want("a", 16, 17), Want("b", 32, 34))
    assert reserve.token_budget == 3
    again = policy.preempt(Reserved(16, (Grant("b", 0, 2, ((),)),), ("a",)))
    assert again is not None
    assert again.releases == (Release("b"),)
    assert again.token_budget == 3
    assert policy.plan(Reserved(16, (Grant("a", 0, 1, ((1,),)),), ())) == StepPlan(
        16, ended=(1,), new_blocks=((0, 0, (1,)),), num_tokens=1)


def test_no_more_sequences_yield_than_blocks_are_missing() -> None:
    policy = SchedulerPolicy(SchedulerConfig(4, 64, 200, (Group(20),)))
    policy.apply([request(name, 16, max_tokens=40) for name in "abcd"])
    policy.wants()
    grants = [Grant(name, 0, 16, ((i,),)) for i, name in enumerate("abc")] + [Grant("d", 0, 16, ((3, 4),))]
    policy.plan(Reserved(0, tuple(grants), ()))
    policy.apply([StepResult(0, (0, 1, 2, 3), (16,) * 4, (1,) * 4, (0.0,) * 4, ((),) * 4)])
    policy.wants()
    again = policy.preempt(Reserved(1, (Grant("c", 0, 1, ((5,),)),), ("a", "b")))
    assert again is not None
    assert again.releases == (Release("d"),)


def test_what_still_starves_sits_the_step_out() -> None:
    policy = SchedulerPolicy(SchedulerConfig(4, 64, 200, (Group(20),)))
    policy.apply([request(name, 16, max_tokens=40) for name in "abc"])
    policy.wants()
    policy.plan(Reserved(0, tuple(Grant(name, 0, 16, ((i,),)) for i, name in enumerate("abc")), ()))
    policy.apply([StepResult(0, (0, 1, 2), (16,) * 3, (1,) * 3, (0.0,) * 3, ((),) * 3)])
    policy.wants()
    again = policy.preempt(Reserved(1, (), ("a", "b", "c")))
    assert again is not None
    assert again.releases == (Release("c"), Release("b"))
    assert [want.request_id for want in again.wants] == ["a"]
    plan = policy.plan(Reserved(1, (Grant("a", 0, 1, ((2,),)),), ()))
    assert plan == StepPlan(1, ended=(2, 1), new_blocks=((0, 0, (2,)),), num_tokens=1)


def test_what_starves_at_the_tail_keeps_its_blocks() -> None:
    engine = SyncEngine((Group(3),))
    a, b = request("a", 20, max_tokens=6), request("b", 16, max_tokens=6)
    engine.add(a, b)
    plans = engine.drain()
    assert engine.policy.stats.num_preemptions == 0
    assert plans[1] == StepPlan(1, resting=(1,), num_tokens=1)
    check_answer(b, engine.answers["b"])


def test_an_earlier_chunk_that_starves_takes_from_a_later_answer() -> None:
    """The wants come answers first; the order of arrival still says who yields."""
    policy = SchedulerPolicy(SchedulerConfig(4, 128, 200, (Group(20),)))
    policy.apply([request("chunked", 70, max_tokens=4), request("later", 15, max_tokens=40)])
    policy.wants()
    policy.plan(Reserved(0, (Grant("chunked", 0, 32, ((0, 1),)), Grant("later", 0, 15, ((2,),))), ()))
    policy.apply([StepResult(0, (1,), (15,), (1,), (0.0,), ((),))])
    policy.wants()
    policy.plan(Reserved(1, (), ("chunked",)))
    policy.apply([StepResult(1, (1,), (16,), (1,), (0.0,), ((),))])
    assert [want.request_id for want in policy.wants().wants] == ["later", "chunked"]
    again = policy.preempt(Reserved(2, (), ("later", "chunked")))
    assert again is not None
    assert again.releases == (Release("later"),)
    assert [want.request_id for want in again.wants] == ["chunked"]


def test_nobody_yields_to_a_sequence_that_waits() -> None:
    engine = SyncEngine((Group(2),))
    engine.add(request("a", 14, max_tokens=10))
    engine.step()
    engine.add(request("b", 30, max_tokens=2))
    assert engine.policy.preempt(engine.pool.reserve(engine.policy.wants())) is None


@pytest.mark.parametrize("window", [None, 1, 5, 16, 17, 33])
@pytest.mark.parametrize("overlap", [0, 2])
def test_whoever_passes_on_arrival_gets_to_its_end(window: int | None, overlap: int) -> None:
    """No live-lock: all of them grow at once in a cache that holds just one."""
    num_tokens = 60 + 40 - 1
    groups = (Group(Group(1).num_blocks_for(num_tokens)), Group(Group(1, window).num_blocks_for(num_tokens), window))
    engine = SyncEngine(groups, max_num_batched_tokens=24, overlap=overlap)
    sequences = [request(f"r{i}", (60, 3, 30, 17, 16)[i], max_tokens=(40, 90, 60, 80, 84)[i]) for i in range(5)]
    engine.add(*sequences)
    engine.drain()
    for sequence in sequences:
        check_answer(sequence, engine.answers[sequence.request_id])


# Overlap: what is in flight

@pytest.mark.parametrize("overlap", [1, 2])
def test_rows_stop_when_all_is_planned_and_results_are_outstanding(overlap: int) -> None:
    engine = SyncEngine(overlap=overlap)
    a, b = request("a", 3, max_tokens=2), request("b", 3, max_tokens=8)
    engine.add(a, b)
    plans = engine.drain()
    assert engine.device.num_rows == 3 + 1 + 3 + 7          # not one wasted
    assert plans[2].resting == ((0,) if overlap == 2 else plans[2].resting)
    check_answer(a, engine.answers["a"])
    check_answer(b, engine.answers["b"])


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_a_late_stop_wastes_at_most_overlap_rows(overlap: int) -> None:
    a = request("a", 3, max_tokens=50, seed=1)
    stopping = NewSequence("s", a.token_ids, a.sampling, 50, (scripted_token(1, 7),), 1, 0, 0.0)
    engine = SyncEngine(overlap=overlap)
    engine.add(stopping)
    engine.drain()
    token_ids, finish = solo(stopping)
    assert finish == "stop"
    check_answer(stopping, engine.answers["s"])
    num_needed = 3 + len(token_ids) - 1
    assert num_needed <= engine.device.num_rows <= num_needed + overlap + 1


def test_a_slot_that_is_given_on_keeps_old_rows_and_new_ones_apart() -> None:
    first = NewSequence("a", (1, 2, 3), request("x", 1, max_tokens=50).sampling, 50, (scripted_token(1, 3),), 1, 0, 0.0)
    engine = SyncEngine(max_num_seqs=1, overlap=2)
    b = request("b", 3, max_tokens=5)
    engine.add(first, b)
    engine.plan_all()
    engine.deliver()                        # the first token stops a; two more rows of it are in flight
    assert engine.answers["a"].finish == "stop"
    (plan,) = engine.plan_all()
    assert (plan.ended, plan.started[0].slot) == ((0,), 0)
    engine.drain()
    check_answer(first, engine.answers["a"])
    check_answer(b, engine.answers["b"])


def test_results_out_of_order_are_a_fault() -> None:
    engine = SyncEngine(overlap=1)
    engine.add(request("a", 3))
    engine.plan_all()
    with pytest.raises(AssertionError, match="came before"):
        engine.policy.apply([engine.results[1]])


# Configuration

@pytest.mark.parametrize(("field", "values"), [
    ("max_num_seqs", (0, 64, 100, 0)), ("max_num_batched_tokens", (8, 7, 100, 0)),
    ("max_model_len", (4, 64, 0, 0)), ("overlap", (4, 64, 100, -1))])
def test_the_configuration_is_checked(field: str, values: tuple[int, int, int, int]) -> None:
    max_num_seqs, max_num_batched_tokens, max_model_len, overlap = values
    with pytest.raises(ValueError, match=f"^{field} must be at least"):
        SchedulerConfig(max_num_seqs, max_num_batched_tokens, max_model_len, (Group(8),), overlap)


def test_a_request_id_cannot_be_used_twice_at_once() -> None:
    engine = SyncEngine()
    engine.add(request("a", 3))
    with pytest.raises(AssertionError, match="here already"):
        engine.add(request("a", 3))
