"""How sequences end: by a token, a fault, an abort, or refused on arrival."""
from __future__ import annotations

import pytest

from actors.messages import Grant, NewSequence, Reserved, SequenceTokens, StepResult, Usage
from actors.policy.kv_group import Group
from actors.policy.scheduler import SchedulerConfig, SchedulerPolicy
from tests.actors.scripted import SyncEngine, check_answer, request


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 3])
def test_no_stop_before_min_tokens(min_tokens: int) -> None:
    policy = SchedulerPolicy(SchedulerConfig(4, 64, 100, (Group(8),)))
    policy.apply([request("a", 3, max_tokens=4, stop_ids=(9,), min_tokens=min_tokens)])
    rows: list[SequenceTokens] = []
    token_ids: list[int] = []
    for step in range(10):
        policy.wants()
        policy.plan(Reserved(step, (Grant("a", 0, 3, ((0,),)),) if step == 0 else (), ()))
        policy.apply([StepResult(step, (0,), (3 + step,), (9,), (0.0,), ((),))])
        output = policy.take_output()
        assert output is not None
        rows += output.rows
        token_ids += output.token_ids
        if policy.stats.num_running == 0:
            break
    assert token_ids == [9] * min_tokens
    assert len(rows) == 1
    assert rows[-1].finish == "stop"                        # also as the last token that max_tokens allows
    assert rows[-1].token_ids == (9,)
    assert rows[-1].usage == Usage(3, min_tokens + 1)


@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("budget", [4, 29, 64])
def test_max_tokens_0_delivers_prompt_logprobs_alone(overlap: int, budget: int) -> None:
    engine = SyncEngine(max_num_batched_tokens=budget, overlap=overlap)
    for name, length, miss in (("a", 1, ""), ("b", 30, "off")):
        sequence = request(name, length, max_tokens=0, prompt_logprobs=1)
        engine.add(sequence)
        engine.drain()
        answer = engine.answers[name]
        assert (answer.token_ids, answer.finish, answer.usage) == ([], "length", Usage(length, 0, 0, miss))
        check_answer(sequence, answer)
    assert engine.device.num_rows == 31
    assert engine.policy.stats.generation_tokens == 0


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_prompt_logprobs_come_once_in_spite_of_recomputation(overlap: int) -> None:
    engine = SyncEngine((Group(5),), max_num_batched_tokens=8, overlap=overlap)
    a = request("a", 14, max_tokens=50)
    b = request("b", 30, max_tokens=20, prompt_logprobs=1, logprobs=1)
    engine.add(a, b)
    engine.drain()
    assert engine.policy.stats.num_preemptions > 0
    check_answer(a, engine.answers["a"])
    check_answer(b, engine.answers["b"])


@pytest.mark.parametrize("error", ["", "MemoryError"])
def test_what_comes_after_the_end_is_dropped(error: str) -> None:
    engine = SyncEngine(overlap=1)
    engine.add(request("a", 3, max_tokens=9, prompt_logprobs=1), request("b", 3, max_tokens=0, prompt_logprobs=1))
    engine.plan(error=error, failed=("a",))
    for name in "ab":
        engine.abort(name)
    engine.drain()
    for name in "ab":
        answer = engine.answers[name]
        assert (answer.finish, answer.token_ids, answer.prompt_logprobs) == ("aborted", [], [])


def test_a_row_counts_only_at_the_next_unknown_position() -> None:
    policy = SchedulerPolicy(SchedulerConfig(4, 64, 100, (Group(8),)))
    policy.apply([request("a", 3)])
    policy.wants()
    policy.plan(Reserved(0, (Grant("a", 0, 3, ((0,),)),), ()))
    policy.apply([StepResult(0, (0, 0, 0), (2, 4, 3), (7, 8, 9), (0.0,) * 3, ((),) * 3)])
    output = policy.take_output()
    assert output is not None
    assert (output.request_ids, output.token_ids, output.rows) == (("a",), (9,), ())


def test_a_failed_step_fails_its_sequences_and_no_others() -> None:
    engine = SyncEngine(max_num_seqs=2)
    a, b, c = (request(name, 5, max_tokens=5) for name in "abc")
    engine.add(a, b, c)
    engine.step()
    engine.plan(error="MemoryError in step 1")
    engine.deliver()
    for name in "ab":
        assert engine.answers[name].finish == "failed"
        assert engine.answers[name].error == "MemoryError in step 1"
        assert len(engine.answers[name].token_ids) == 1
    engine.drain()
    check_answer(c, engine.answers["c"])
    assert engine.answers["c"].finish == "length"


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_a_failed_row_fails_its_sequence_alone(overlap: int) -> None:
    engine = SyncEngine(overlap=overlap)
    a, b = request("a", 5, max_tokens=9), request("b", 5, max_tokens=9)
    engine.add(a, b)
    engine.step()
    engine.plan(failed=("a",))
    engine.drain()
    assert engine.answers["a"].finish == "failed"
    assert engine.answers["a"].error == "logits are not finite"
    check_answer(b, engine.answers["b"])
    assert engine.answers["b"].finish == "length"


# Aborts

def test_queued_requests_of_a_gone_client_are_never_prefilled() -> None:
    engine = SyncEngine(max_num_seqs=1)
    busy = request("busy", 10, max_tokens=20)
    engine.add(busy)
    engine.step()
    engine.add(*(request(f"p{i}", 30) for i in range(8)))
    assert engine.policy.stats.num_waiting == 8
    for i in range(8):
        engine.abort(f"p{i}")
        assert engine.answers[f"p{i}"].finish == "aborted"
        assert engine.answers[f"p{i}"].usage == Usage(30, 0)
    assert engine.policy.stats.num_waiting == 0
    plans = engine.drain()
    assert not any(plan.started for plan in plans)
    assert engine.policy.stats.prompt_tokens == 10
    check_answer(busy, engine.answers["busy"])


@pytest.mark.parametrize("reason", ["aborted", "stop"])
def test_an_abort_frees_slot_and_blocks_with_the_next_step(reason: str) -> None:
    engine = SyncEngine()
    a, b = request("a", 40, max_tokens=20), request("b", 3, max_tokens=20)
    engine.add(a, b)
    engine.step()
    engine.abort("a", "stop" if reason == "stop" else "aborted")
    assert engine.answers["a"].finish == (None if reason == "stop" else "aborted")
    (plan,) = engine.step()
    assert plan.ended == (0,)
    assert engine.pool.num_free == (63,)
    engine.drain()
    check_answer(b, engine.answers["b"])


def test_an_abort_frees_the_blocks_when_nothing_else_runs() -> None:
    engine = SyncEngine()
    engine.add(request("a", 40))
    engine.step()
    engine.abort("a")
    assert engine.policy.has_work()
    assert engine.plan() is None
    engine.check_drained()


def test_an_abort_of_someone_gone_or_unknown_is_harmless() -> None:
    engine = SyncEngine()
    engine.abort("nobody")
    a = request("a", 3, max_tokens=1)
    engine.add(a)
    engine.drain()
    engine.abort("a")
    check_answer(a, engine.answers["a"])
    assert engine.answers["a"].finish == "length"
    assert "nobody" not in engine.answers.by_id


# Refusals

def refuse(sequence: NewSequence, groups: tuple[Group, ...] = (Group(64),), max_model_len: int = 100) -> str:
    engine = SyncEngine(groups, max_model_len=max_model_len)
    engine.add(sequence)
    answer = engine.answers[sequence.request_id]
    engine.check_drained()
    assert answer.finish == "rejected"
    assert "-" not in answer.error, "a negative number"
    return answer.error


def test_a_prompt_that_leaves_no_room_is_refused_with_length_and_limit() -> None:
    error = refuse(request("a", 200, max_tokens=10))
    assert "200" in error
    assert "100" in error
    error = refuse(request("a", 100, max_tokens=10))
    assert error == "the prompt of 100 tokens leaves no room for an answer, the model's context is 100 tokens"
    assert "leaves no room" in refuse(request("a", 100, max_tokens=10, prompt_logprobs=1))
    assert "empty" in refuse(request("a", 0, max_tokens=10))


def test_one_token_of_room_gives_one_token() -> None:
    engine = SyncEngine(max_model_len=100)
    engine.add(request("a", 99, max_tokens=10))
    engine.drain()
    assert len(engine.answers["a"].token_ids) == 1
    assert engine.answers["a"].finish == "length"


def test_prompt_logprobs_may_fill_the_context() -> None:
    engine = SyncEngine(max_model_len=40)
    engine.add(request("a", 40, max_tokens=0, prompt_logprobs=0))
    engine.drain()
    assert len(engine.answers["a"].prompt_logprobs) == 39


def test_what_can_never_fit_the_cache_is_refused() -> None:
    groups = (Group(3), Group(100))
    error = refuse(request("a", 40, max_tokens=10), groups)
    assert error == ("a prompt of 40 tokens with max_tokens 10 needs 4 KV cache blocks of 16 tokens, "
                     "the cache has 3")
    engine = SyncEngine(groups)
    a = request("a", 40, max_tokens=9)      # the last token needs no place
    engine.add(a)
    engine.drain()
    check_answer(a, engine.answers["a"])
    assert "needs 3 KV cache blocks" in refuse(request("a", 40, max_tokens=30), (Group(100), Group(2, window=32)))
