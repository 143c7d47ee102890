"""Who is let into the queue: how much may be queued, what is let in together, and what never can be."""
from __future__ import annotations

import pytest

from actors.messages import Abort, Grant, NewSequence, Reserved, StepResult
from actors.policy.admission import QueueLimits
from actors.policy.kv_group import Group
from actors.policy.scheduler import SchedulerConfig, SchedulerPolicy
from tests.actors.scripted import SyncEngine, check_answer, request


def family(name: str, size: int, num_prompt: int = 10, max_tokens: int = 5, *,
           prompt: tuple[int, ...] = ()) -> list[NewSequence]:
    """Children of one parent. prompt: the same for all of them."""
    return [request(f"{name}{i}", num_prompt, max_tokens, prompt=prompt, parent_id=name, num_children=size)
            for i in range(size)]


def finishes(engine: SyncEngine, sequences: list[NewSequence]) -> list[str | None]:
    return [engine.answers[sequence.request_id].finish for sequence in sequences]


def check_all(engine: SyncEngine, sequences: list[NewSequence]) -> None:
    engine.drain()
    for sequence in sequences:
        check_answer(sequence, engine.answers[sequence.request_id])
        assert engine.answers[sequence.request_id].finish == "length"


# What counts

def test_requests_beyond_the_queue_are_refused_at_once_with_a_time_to_come_back() -> None:
    engine = SyncEngine(max_num_seqs=2, queue=QueueLimits(max_queued_requests=3))
    sequences = [request(f"r{i}", 10, 5) for i in range(8)]
    engine.add(*sequences)
    assert finishes(engine, sequences) == [None] * 5 + ["rejected"] * 3
    answer = engine.answers["r7"]
    assert answer.retry_after_s == 1.0
    assert answer.error == "3 requests are queued, this would add 1, at most 3 may be"
    assert answer.error_field == "max_queued_requests"
    check_all(engine, sequences[:5])
    again = request("again", 10, 5)
    engine.add(again)
    check_all(engine, [again])


def test_a_free_slot_without_blocks_is_no_room() -> None:
    """Two run in a cache for two; the other six slots let nobody wait for nothing."""
    engine = SyncEngine((Group(8),), max_num_seqs=8, queue=QueueLimits(max_queued_requests=2))
    running = [request(f"running{i}", 60, 4) for i in range(2)]
    engine.add(*running)
    engine.step()
    queued = [request(f"queued{i}", 60, 4) for i in range(4)]
    engine.add(queued[0])
    engine.step()
    engine.add(*queued[1:])
    assert finishes(engine, queued) == [None, None, "rejected", "rejected"]
    assert engine.answers["queued2"].error == "2 requests are queued, this would add 1, at most 2 may be"
    check_all(engine, [*running, *queued[:2]])
    sequences = [request(f"later{i}", 5) for i in range(8)]
    engine.add(*sequences)
    check_all(engine, sequences)


def test_an_engine_that_has_just_become_idle_has_room() -> None:
    """All that it had ends with the messages before the new ones: no plan has said so yet."""
    engine = SyncEngine((Group(8),), max_num_seqs=4, queue=QueueLimits(max_queued_requests=0))
    engine.add(request("last", 100, 1), request("starved", 60))
    engine.step()
    engine.plan_all()
    assert [*engine.policy.running] == ["last"]
    sequences = [request(f"r{i}", 5) for i in range(4)]
    engine.policy.apply([Abort("starved", "aborted"), engine.results.popleft(), *sequences])
    assert [*engine.policy.waiting] == ["r0", "r1", "r2", "r3"]
    engine.drain()


def test_what_was_preempted_for_want_of_blocks_leaves_no_room_either() -> None:
    engine = SyncEngine((Group(8),), max_num_seqs=8, queue=QueueLimits(max_queued_requests=1))
    growing = [request(f"growing{i}", 50, 60) for i in range(2)]
    engine.add(*growing)
    while not engine.policy.stats.num_preemptions:
        engine.step()
    engine.add(request("queued", 5))
    assert engine.answers["queued"].error == "1 requests are queued, this would add 1, at most 1 may be"
    check_all(engine, growing)


def test_a_plan_that_asks_for_nobody_who_waits_says_nothing_about_blocks() -> None:
    """A long prompt takes a whole step: what was known of the blocks before it stays."""
    policy = SchedulerPolicy(SchedulerConfig(8, 16, 500, (Group(32),), overlap=1, queue=QueueLimits(1)))
    policy.apply([request("long", 100), request("queued", 5)])
    policy.wants()
    policy.plan(Reserved(0, (Grant("long", 0, 16, ((0,),)),), ()))
    policy.wants()
    policy.plan(Reserved(1, (), ("long",)))
    policy.apply([StepResult(0)])
    assert [want.request_id for want in policy.wants().wants] == ["long"]
    policy.plan(Reserved(1, (Grant("long", 0, 16, ((1,),)),), ()))
    policy.apply([request("refused", 5)])
    assert [*policy.waiting] == ["queued"]


def test_tokens_are_counted_beyond_those_for_whom_there_is_room() -> None:
    engine = SyncEngine((Group(200),), max_num_seqs=2, queue=QueueLimits(max_queued_tokens=100))
    first = [request("long", 300, 5), request("longer", 400, 5)]
    engine.add(*first)
    assert finishes(engine, first) == [None, None], "an idle engine has room for prompts of any length"
    queued = [request("60", 60), request("50", 50), request("40", 40)]
    engine.add(*queued)
    assert finishes(engine, queued) == [None, "rejected", None]
    assert engine.answers["50"].error == "60 tokens are queued, this would add 50, at most 100 may be"
    assert engine.answers["50"].error_field == "max_queued_tokens"
    check_all(engine, [*first, queued[0], queued[2]])


def test_a_prompt_longer_than_the_queue_waits_for_nobody() -> None:
    engine = SyncEngine((Group(64),), max_num_seqs=1, queue=QueueLimits(max_queued_tokens=100))
    running, long = request("running", 10, 5), request("long", 101, 5)
    engine.add(running)
    engine.step()
    engine.add(long)
    assert engine.answers["long"].finish == "rejected"
    assert engine.answers["long"].retry_after_s is not None
    engine.drain()
    engine.answers.by_id.clear()
    engine.add(long)
    check_all(engine, [long])


def test_the_time_to_come_back_is_what_the_queue_takes() -> None:
    engine = SyncEngine((Group(300),), max_num_seqs=1, queue=QueueLimits(max_queued_requests=1))
    engine.add(request("first", 63, 2))     # two steps of half a second: 65 tokens in one second
    engine.drain()
    engine.add(request("running", 64, 50))
    engine.step()
    engine.add(request("waiting", 650, 2), request("refused", 5))
    assert engine.answers["refused"].retry_after_s == pytest.approx(8, abs=3)


def test_without_a_queue_those_with_a_slot_are_served() -> None:
    engine = SyncEngine(max_num_seqs=3, queue=QueueLimits(max_queued_requests=0))
    sequences = [request(f"r{i}", 10) for i in range(4)]
    engine.add(*sequences)
    assert engine.answers["r3"].finish == "rejected"
    check_all(engine, sequences[:3])


@pytest.mark.parametrize("field", ["max_queued_requests", "max_queued_tokens"])
def test_limits_are_checked(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be at least 0, got -1"):
        QueueLimits(**{field: -1})


# Together or not at all

def test_children_of_one_parent_are_let_in_together_or_not_at_all() -> None:
    engine = SyncEngine(max_num_seqs=2, queue=QueueLimits(max_queued_requests=3))
    first, second, third = family("a", 3), family("b", 3), family("c", 2)
    engine.add(*first, *second, *third)
    assert finishes(engine, first) == [None] * 3
    assert finishes(engine, second) == ["rejected"] * 3
    assert {engine.answers[f"b{i}"].error for i in range(3)} == {
        "1 requests are queued, this would add 3, at most 3 may be"}
    assert finishes(engine, third) == [None] * 2
    check_all(engine, [*first, *third])


def test_children_wait_for_the_last_of_them() -> None:
    """Others go past them meanwhile: they hold no place."""
    engine = SyncEngine(max_num_seqs=4, queue=QueueLimits(max_queued_requests=0))
    children, others = family("a", 4), [request(f"r{i}", 10, 5) for i in range(2)]
    engine.add(*children[:3])
    engine.add(others[0])
    while not engine.answers["r0"].finish:
        engine.step()
    engine.add(children[3])
    assert [*engine.policy.waiting] == ["a0", "a1", "a2", "a3"]
    engine.add(others[1])
    assert engine.answers["r1"].finish == "rejected"
    check_all(engine, [*children, others[0]])


def test_children_can_be_aborted_before_they_are_complete() -> None:
    engine = SyncEngine(max_num_seqs=4, queue=QueueLimits(max_queued_requests=5))
    children, cut = family("a", 3), family("b", 2)
    engine.add(*children[:2], request("a2", 2000, parent_id="a", num_children=3), cut[0])
    assert engine.answers["a2"].finish == "rejected", "its prompt is too long for the context"
    for sequence in (*children[:2], cut[0]):
        engine.abort(sequence.request_id)
    assert finishes(engine, [children[0], children[1], cut[0]]) == ["aborted"] * 3
    engine.drain()


def test_without_limits_children_do_not_wait() -> None:
    engine = SyncEngine(max_num_seqs=4)
    children = family("a", 3)
    engine.add(children[0])
    engine.drain()
    engine.add(*children[1:])
    check_all(engine, children)


@pytest.mark.parametrize(("limits", "size", "num_prompt", "is_let_in"), [
    (QueueLimits(3, None), 5, 10, True), (QueueLimits(3, None), 6, 10, False), (QueueLimits(0, None), 2, 10, True),
    (QueueLimits(None, 30), 5, 10, True), (QueueLimits(None, 30), 5, 11, False), (QueueLimits(None, 30), 2, 99, True)])
def test_what_even_an_idle_engine_cannot_take_is_refused_for_good(limits: QueueLimits, size: int, num_prompt: int,
                                                                  is_let_in: bool) -> None:
    engine = SyncEngine(max_num_seqs=2, queue=limits)
    own = family("own", size, num_prompt)
    engine.add(*own)
    assert finishes(engine, own) == [None if is_let_in else "rejected"] * size
    engine.drain()
    equal = family("equal", size, num_prompt, prompt=own[0].token_ids)
    engine.add(*equal)
    assert finishes(engine, equal) == [None if is_let_in else "rejected"] * size
    engine.drain()
    if not is_let_in:
        answer = engine.answers["own0"]
        assert answer.retry_after_s is None, "trying again is no use"
        assert f"asks for {size} completions at once, 2 can run" in answer.error
        assert (answer.error_field, engine.answers["equal0"].error_field) == ("prompt", "n")
