"""Who comes first under each scheduling policy, who yields, and that nobody waits for ever."""
from __future__ import annotations

import random
from typing import Any

import pytest

from actors.messages import NewSequence, StepPlan
from actors.policy.kv_group import Group
from actors.policy.order import AGEING_S, MAX_OVERTAKEN_S
from actors.policy.scheduler import SchedulerConfig
from actors.policy.step_time import StepTime
from tests.actors.scripted import SyncEngine, check_answer, request


def starts(plans: list[StepPlan]) -> list[str]:
    return [started.request_id for plan in plans for started in plan.started]


def check_all(engine: SyncEngine, *sequences: NewSequence) -> None:
    for sequence in sequences:
        check_answer(sequence, engine.answers[sequence.request_id])
        assert engine.answers[sequence.request_id].finish == "length"


# Priority

def test_the_lower_priority_starts_first_and_equals_by_arrival() -> None:
    engine = SyncEngine(max_num_seqs=1, scheduling_policy="priority")
    priorities = {"a": 1, "b": 0, "c": 2, "d": 0, "e": 1, "f": -5}
    engine.add(*(request(name, 5, priority=priority) for name, priority in priorities.items()))
    assert starts(engine.drain()) == ["f", "b", "d", "a", "e", "c"]


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_who_matters_more_takes_the_slot_of_who_matters_least(overlap: int) -> None:
    engine = SyncEngine(max_num_seqs=2, overlap=overlap, scheduling_policy="priority")
    a, b = request("a", 5, 30, priority=1), request("b", 5, 30, priority=2)
    engine.add(a, b)
    engine.step()
    engine.step()
    equal, important = request("equal", 5, priority=2), request("important", 5, priority=0)
    engine.add(equal, important)
    plans = engine.drain()
    assert starts(plans) == ["important", "b", "equal"], "b comes back before its equal (FAULTS K04)"
    assert engine.policy.stats.num_preemptions == 1
    check_all(engine, a, b, equal, important)


def test_who_matters_more_takes_the_blocks_of_those_who_matter_less() -> None:
    engine = SyncEngine((Group(8),), scheduling_policy="priority")
    a, b = request("a", 60, 4, priority=5), request("b", 50, 14, priority=4)
    engine.add(a, b)
    engine.step()
    important = request("important", 100, 4, priority=0)
    engine.add(important)
    plans = engine.drain()
    assert starts(plans)[0] == "important"
    assert engine.policy.stats.num_preemptions == 2
    check_all(engine, a, b, important)


def test_nobody_yields_where_that_is_not_enough() -> None:
    """What an equal holds lets a long prompt not in, whatever the least important gives up."""
    engine = SyncEngine((Group(8),), scheduling_policy="priority")
    equal, low = request("equal", 60, 20, priority=0), request("low", 40, 8, priority=5)
    engine.add(equal, low)
    engine.step()
    long = request("long", 100, 4, priority=0)
    engine.add(long)
    plans = engine.drain()
    assert starts(plans) == ["long"]
    assert engine.policy.stats.num_preemptions == 0
    check_all(engine, equal, low, long)


def test_a_slot_alone_is_not_enough_either() -> None:
    engine = SyncEngine((Group(8),), max_num_seqs=2, scheduling_policy="priority")
    equal, low = request("equal", 60, 20, priority=0), request("low", 40, 8, priority=5)
    engine.add(equal, low)
    engine.step()
    long = request("long", 100, 4, priority=0)
    engine.add(long)
    assert starts(engine.drain()) == ["long"]
    assert engine.policy.stats.num_preemptions == 0


def test_no_more_yield_than_must() -> None:
    engine = SyncEngine((Group(8),), max_num_batched_tokens=200, scheduling_policy="priority")
    lows = [request(f"low{i}", 30, 2, priority=5) for i in range(4)]
    engine.add(*lows)
    engine.step()
    important = request("important", 40, 4, priority=0)
    engine.add(important)
    plan, *_ = engine.step()
    assert starts([plan]) == ["important"], "at once"
    assert engine.policy.stats.num_preemptions == 2
    engine.drain()
    check_all(engine, *lows, important)


def test_blocks_that_others_share_are_not_counted_as_given_up() -> None:
    """Three share six of nine blocks: the least important gives up one, its own."""
    engine = SyncEngine((Group(9),), max_num_seqs=4, max_num_batched_tokens=128, max_model_len=200,
                        scheduling_policy="priority")
    equal = request("equal", 97, 12, priority=0)
    lows = [request(f"low{i}", 97, 12, priority=5, prompt=equal.token_ids[:96]) for i in range(2)]
    engine.add(equal, *lows)
    engine.step()
    assert engine.pool.num_free == (0,)
    fits, does_not = request("fits", 30, 2, priority=0), request("does not", 40, 2, priority=0)
    engine.add(does_not)
    engine.step()
    assert engine.policy.stats.num_preemptions == 0
    engine.abort("does not")
    engine.add(fits)
    (plan,) = engine.step()
    assert starts([plan]) == ["fits"]
    assert engine.policy.stats.num_preemptions == 2
    engine.drain()
    check_all(engine, equal, *lows, fits)


@pytest.mark.parametrize("num_steps", range(5, 15))
@pytest.mark.parametrize("overlap", [0, 1])
def test_who_yields_may_leave_what_the_other_begins_with(num_steps: int, overlap: int) -> None:
    """What is copied for the newcomer may go to the block that the other took in the very step in which it yields."""
    engine = SyncEngine((Group(4),), max_num_seqs=1, poison=True, scheduling_policy="priority", overlap=overlap)
    low = request("low", 40, 20, priority=5)
    engine.add(low)
    for _ in range(num_steps):
        engine.step()
    important = request("important", 60, 4, priority=0, prompt=low.token_ids[:38])
    engine.add(important)
    assert starts(engine.drain()) == ["important", "low"]
    usage = engine.answers["important"].usage
    assert usage is not None
    assert usage.num_cached_tokens >= 32
    check_all(engine, low, important)


def test_nobody_yields_to_an_equal_or_to_less() -> None:
    engine = SyncEngine((Group(8),), max_num_seqs=2, scheduling_policy="priority")
    engine.add(request("a", 60, 60, priority=1))
    engine.step()
    engine.add(request("b", 60, 4, priority=1), request("c", 60, 4, priority=2))
    assert starts(engine.drain()) == ["b", "c"]
    assert engine.policy.stats.num_preemptions == 0


def test_a_long_wait_makes_up_for_priority() -> None:
    engine = SyncEngine(max_num_seqs=1, scheduling_policy="priority")
    engine.add(request("low", 5, priority=2, arrival_s=0.0))
    engine.now_s = 2 * AGEING_S + 1
    engine.add(request("high", 5, priority=1, arrival_s=engine.now_s))
    assert starts(engine.drain()) == ["low", "high"]
    assert engine.policy.stats.num_preemptions == 0, "who got in by waiting stays in"


def test_a_long_wait_takes_nobodys_place() -> None:
    engine = SyncEngine(max_num_seqs=1, scheduling_policy="priority")
    engine.add(request("high", 5, 20, priority=1))
    engine.step()
    engine.add(request("low", 5, priority=2, arrival_s=0.0))
    engine.now_s = 5 * AGEING_S
    assert starts(engine.drain()) == ["low"]
    assert engine.policy.stats.num_preemptions == 0


# Longest prefix

def test_the_longest_cached_prefix_starts_first() -> None:
    engine = SyncEngine((Group(64),), max_num_seqs=1, max_model_len=200, scheduling_policy="lpm")
    known = request("known", 80)
    engine.add(known)
    engine.drain()
    engine.add(*(request(f"cached {n}", 90, prompt=known.token_ids[:n]) for n in (0, 32, 64, 16, 80, 48)))
    assert starts(engine.drain()) == [f"cached {n}" for n in (80, 64, 48, 32, 16, 0)]


def test_nobody_is_overtaken_for_ever() -> None:
    engine = SyncEngine((Group(64),), max_num_seqs=1, scheduling_policy="lpm")
    known = request("known", 80)
    engine.add(known)
    engine.drain()
    engine.add(request("unknown", 90, arrival_s=0.0))
    order: list[str] = []
    for i in range(20):
        engine.now_s = float(i)
        engine.add(request(f"hit {i}", 90, prompt=known.token_ids, arrival_s=engine.now_s))
        engine.add(request(f"hit too {i}", 90, prompt=known.token_ids, arrival_s=engine.now_s))
        for _ in range(4):
            order += starts(engine.step())
    assert order.index("unknown") == MAX_OVERTAKEN_S + 1


def test_no_more_enter_than_there_are_slots() -> None:
    engine = SyncEngine((Group(64),), max_num_seqs=3, scheduling_policy="lpm")
    engine.add(*(request(f"r{i}", 5) for i in range(20)))
    (plan,) = engine.step()
    assert len(plan.started) == 3


# Fair shares

def tokens_of(engine: SyncEngine, tenant: str) -> int:
    return sum(len(answer.token_ids) for request_id, answer in engine.answers.by_id.items()
               if request_id.startswith(tenant))


def test_a_tenant_who_floods_gets_no_more_than_another() -> None:
    engine = SyncEngine((Group(200),), max_num_seqs=4, scheduling_policy="fair")
    engine.add(*(request(f"flood {i}", 20, 20, tenant="flood") for i in range(100)))
    for _ in range(50):
        engine.step()
    engine.add(*(request(f"modest {i}", 20, 20, tenant="modest") for i in range(30)))
    before = tokens_of(engine, "flood")
    for _ in range(250):
        engine.step()
    flood, modest = tokens_of(engine, "flood") - before, tokens_of(engine, "modest")
    assert 0.8 < modest / flood < 1.25
    engine.drain()


def test_users_share_what_their_tenant_gets() -> None:
    """One tenant with a user who floods and a modest one, another with one user: half to each tenant, a quarter to each
    of the first one's users. Many names bring nothing."""
    engine = SyncEngine((Group(200),), max_num_seqs=4, scheduling_policy="fair")
    engine.add(*(request(f"flood {i}", 20, 20, tenant="a", user="flood") for i in range(200)),
               *(request(f"modest {i}", 20, 20, tenant="a", user="modest") for i in range(100)),
               *(request(f"other {i}", 20, 20, tenant="b", user=f"name {i}") for i in range(200)))
    for _ in range(400):
        engine.step()
    flood, modest, other = (tokens_of(engine, name) for name in ("flood", "modest", "other"))
    assert 0.8 < modest / flood < 1.25
    assert 0.8 < other / (flood + modest) < 1.25
    for request_id in [*engine.policy.running, *engine.policy.waiting]:
        engine.abort(request_id)
    engine.drain()


def test_a_user_who_was_away_has_not_saved_up() -> None:
    engine = SyncEngine((Group(200),), max_num_seqs=1, scheduling_policy="fair")
    engine.add(*(request(f"a {i}", 10, 10, tenant="t", user="a") for i in range(40)))
    for _ in range(200):
        engine.step()
    engine.add(*(request(f"b {i}", 10, 10, tenant="t", user="b") for i in range(20)))
    order = starts(engine.drain())[:12]
    assert 5 <= sum(name.startswith("a") for name in order) <= 7


def test_who_was_away_has_not_saved_up() -> None:
    """While one worked, the other rested: then they share alike, and the first is not shut out."""
    engine = SyncEngine((Group(200),), max_num_seqs=1, scheduling_policy="fair")
    engine.add(*(request(f"a {i}", 10, 10, tenant="a") for i in range(40)))
    for _ in range(200):
        engine.step()
    engine.add(*(request(f"b {i}", 10, 10, tenant="b") for i in range(20)))
    order = starts(engine.drain())[:12]
    assert 5 <= sum(name.startswith("a") for name in order) <= 7


def test_short_requests_count_for_what_they_take() -> None:
    engine = SyncEngine((Group(400),), max_num_seqs=1, max_model_len=500, scheduling_policy="fair")
    engine.add(*(request(f"long {i}", 190, 10, tenant="long") for i in range(10)))
    engine.add(*(request(f"short {i}", 10, 10, tenant="short") for i in range(60)))
    order = starts(engine.drain())
    last_long = max(i for i, name in enumerate(order) if name.startswith("long"))
    assert sum(name.startswith("short") for name in order[:last_long]) >= 55


def test_tenants_that_are_gone_are_forgotten() -> None:
    engine = SyncEngine(scheduling_policy="fair")
    for i in range(100):
        engine.add(request(f"r{i}", 5, tenant=f"t{i % 50}", user=f"u{i}"))
        engine.drain()
    assert vars(engine.policy.order)["_got"] == {}


# Deadlines

def test_whose_first_token_is_due_soonest_starts_first() -> None:
    engine = SyncEngine((Group(200),), max_num_seqs=1, max_model_len=900, scheduling_policy="deadline",
                        ttft_target_s=100.0)
    engine.add(request("teach", 64, 2))     # half a second a step: a prompt token takes 1/128 s
    engine.drain()
    engine.add(request("short", 8, arrival_s=0.0), request("long", 800, arrival_s=1.0),
               request("late", 8, arrival_s=-10.0))
    assert starts(engine.drain()) == ["late", "long", "short"]


@pytest.mark.parametrize(("target_s", "at_most"), [(0.3, 16), (0.5, 18), (0.8, 33), (3.0, 143)])
def test_the_prompt_part_of_a_step_is_cut_to_the_target(target_s: float, at_most: int) -> None:
    """A device of 10 ms a row and 20 ms a prompt token, on 100 ms."""
    engine = SyncEngine((Group(400),), max_num_seqs=8, max_num_batched_tokens=256, max_model_len=3000,
                        scheduling_policy="deadline", itl_target_s=target_s)

    def step() -> StepPlan:
        (plan,) = engine.plan_all()
        num_chunk = sum(end - start for _, start, end in plan.chunks)
        result = engine.results[0]
        elapsed_s = 0.1 + 0.01 * (plan.num_tokens - num_chunk) + 0.02 * num_chunk
        engine.results[0] = type(result)(**{
            **{name: getattr(result, name) for name in result.__slots__}, "elapsed_s": elapsed_s})
        engine.deliver()
        return plan

    decoding = [request(f"d{i}", 20, 400) for i in range(4)]
    for sequence in decoding:
        engine.add(sequence)
        step()
        step()
    long = request("long", 2000, 3)
    engine.add(long)
    sizes = []
    while not engine.answers["long"].token_ids:
        plan = step()
        sizes += [end - start for _, start, end in plan.chunks]
    assert max(sizes[:-1]) <= at_most
    assert min(sizes[:-1]) >= max(16, 0.9 * at_most), "no smaller than it must be"


def test_prompts_get_on_where_the_target_cannot_be_kept() -> None:
    engine = SyncEngine(scheduling_policy="deadline", itl_target_s=0.001, ttft_target_s=0.001)
    a, b = request("a", 40, 60), request("b", 200, 3)
    engine.add(a)
    engine.step()
    engine.add(b)
    engine.drain()
    check_all(engine, a, b)


def test_step_times_are_learnt() -> None:
    choose = random.Random(1)
    step_time = StepTime()
    assert step_time.decode_s(5) == step_time.per_prompt_token_s == 0.0
    for _ in range(300):
        num_rows = choose.randint(1, 50)
        num_tokens = choose.choice((0, choose.randint(1, 200)))
        step_time.observe(num_rows, num_tokens, 0.02 + 0.001 * num_rows + 0.003 * num_tokens)
    assert step_time.decode_s(10) == pytest.approx(0.03, rel=1e-3)
    assert step_time.decode_s(50) == pytest.approx(0.07, rel=1e-3)
    assert step_time.per_prompt_token_s == pytest.approx(0.003, rel=0.05)


def test_step_times_of_one_size_say_nothing_about_rows() -> None:
    step_time = StepTime()
    for _ in range(1000):
        step_time.observe(8, 0, 0.05)
    assert step_time.decode_s(8) == step_time.decode_s(9) == pytest.approx(0.05)
    for _ in range(500):                    # it got slower
        step_time.observe(8, 0, 0.10)
    assert step_time.decode_s(8) == pytest.approx(0.10, rel=1e-3)


# Settings, and all policies

@pytest.mark.parametrize(("settings", "message"), [
    ({"scheduling_policy": "shortest"}, "scheduling_policy must be one of fcfs, priority, lpm, fair, deadline"),
    ({"ttft_target_s": 1.0}, "ttft_target_s is for scheduling_policy deadline, not fcfs"),
    ({"scheduling_policy": "deadline"}, "scheduling_policy deadline needs ttft_target_s or itl_target_s"),
    ({"scheduling_policy": "deadline", "itl_target_s": 0.0}, "itl_target_s must be greater than 0"),
    ({"scheduling_policy": "deadline", "ttft_target_s": float("nan")}, "ttft_target_s must be greater than 0"),
])
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SchedulerConfig(4, 64, 100, (Group(8),), **settings)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "lpm", "fair", "deadline"])
@pytest.mark.parametrize("overlap", [0, 2])
def test_under_every_policy_all_get_to_their_end_in_a_cache_of_one(policy: str, overlap: int) -> None:
    """No live-lock: they grow at once where one fits, and come with all priorities."""
    targets: dict[str, Any] = {"ttft_target_s": 1.0, "itl_target_s": 1.0} if policy == "deadline" else {}
    engine = SyncEngine((Group(7),), max_num_batched_tokens=24, overlap=overlap, scheduling_policy=policy, **targets)
    sequences = [request(f"r{i}", (60, 3, 30, 17, 16)[i % 5], (40, 90, 60, 80, 84)[i % 5], priority=(2, 0, 1)[i % 3],
                         tenant=f"t{i % 2}") for i in range(10)]
    for i, sequence in enumerate(sequences):
        engine.add(sequence)
        for _ in range(i):
            engine.step()
    engine.drain()
    check_all(engine, *sequences)
