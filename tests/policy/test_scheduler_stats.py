"""What the scheduler counts and times of its sequences, by a clock that the test sets."""
from __future__ import annotations

import pytest

from actors.policy.kv_group import Group
from actors.policy.stats import Histogram
from tests.actors.scripted import SyncEngine, request


def observed(histogram: Histogram) -> tuple[int, float]:
    """(values, their sum)"""
    return histogram.num_values, histogram.total


def test_a_value_on_a_bound_is_below_it() -> None:
    histogram = Histogram((1.0, 5.0))
    for value in (0.0, 1.0, 1.5, 5.0, 5.1):
        histogram.observe(value)
    histogram.observe(3.0, times=2)
    assert histogram.counts == (2, 4, 1)
    assert observed(histogram) == (7, 18.6)
    before = histogram.copy()
    histogram.observe(2.0)
    assert observed(before) == (7, 18.6), "a copy stays"


def test_the_times_of_a_request_that_waits_prefills_and_decodes() -> None:
    engine = SyncEngine(max_num_seqs=1, max_num_batched_tokens=16)
    times = engine.policy.stats.histograms
    engine.now_s = 100.0
    engine.add(request("first", 16, max_tokens=2), request("second", 20, max_tokens=3))
    engine.now_s = 101.0
    engine.plan_all()                           # first enters
    assert observed(times.queue_s) == (1, 1.0), "told as soon as it is known"
    engine.now_s = 103.0
    engine.deliver()                            # its first token
    assert observed(times.prefill_s) == (1, 2.0)
    engine.plan_all()
    engine.now_s = 104.0
    engine.deliver()                            # its last
    assert observed(times.decode_s) == (1, 1.0)
    assert observed(times.inference_s) == (1, 3.0)

    engine.now_s = 110.0
    engine.step()                               # second enters, and needs two steps for its prompt
    assert observed(times.queue_s) == (2, 1.0 + 10.0)
    assert observed(times.prefill_s) == (1, 2.0)
    engine.now_s = 115.0
    engine.step()
    assert observed(times.prefill_s) == (2, 2.0 + 5.0)
    engine.now_s = 122.0
    engine.drain()
    assert observed(times.decode_s) == (2, 1.0 + 7.0)
    assert observed(times.inference_s) == (2, 3.0 + 12.0)
    assert times.queue_s.counts[:8] == (0, 0, 0, 1, 0, 0, 0, 0)
    assert observed(times.num_preemptions) == (2, 0.0)


def test_the_tokens_of_each_step_are_counted() -> None:
    engine = SyncEngine(max_num_batched_tokens=16)
    engine.add(request("a", 20, max_tokens=3), request("b", 4, max_tokens=2))
    plans = engine.drain()
    steps = engine.policy.stats.histograms.step_tokens
    assert observed(steps) == (len(plans), sum(plan.num_tokens for plan in plans)) == (4, 20 + 4 + 2 + 1)
    assert [plan.num_tokens for plan in plans] == [16, 8, 2, 1]
    assert steps.counts[:3] == (1, 2, 1), "at most 1, 8, 16"


def test_an_abort_ends_the_times_where_it_comes() -> None:
    engine = SyncEngine(max_num_seqs=1)
    times = engine.policy.stats.histograms
    engine.add(request("runs", 8, max_tokens=9), request("waits", 8))
    engine.step()
    engine.now_s = 1.0
    engine.abort("waits")
    assert observed(times.num_preemptions) == (0, 0.0), "it never ran"
    engine.abort("runs")
    engine.drain()
    assert observed(times.queue_s) == observed(times.prefill_s) == observed(times.num_preemptions) == (1, 0.0)
    assert observed(times.decode_s) == observed(times.inference_s) == (0, 0.0)


def test_a_stop_string_is_a_natural_end() -> None:
    engine = SyncEngine()
    times = engine.policy.stats.histograms
    engine.add(request("a", 8, max_tokens=9))
    engine.step()
    engine.now_s = 3.0
    engine.step()
    engine.abort("a", "stop")
    engine.drain()
    assert observed(times.decode_s) == observed(times.inference_s) == (1, 3.0)


def test_a_failed_request_has_no_time_of_computing() -> None:
    engine = SyncEngine()
    times = engine.policy.stats.histograms
    engine.add(request("step", 8), request("row", 8))
    engine.plan(failed=("row",))
    engine.deliver()
    engine.plan(error="MemoryError")
    engine.deliver()
    engine.drain()
    assert observed(times.queue_s) == observed(times.num_preemptions) == (2, 0.0)
    assert observed(times.prefill_s) == (1, 0.0)
    assert times.decode_s.num_values == times.inference_s.num_values == 0
    assert times.step_tokens.num_values == engine.policy.stats.num_steps == 2


def test_a_request_for_logprobs_of_its_prompt_is_prefill_alone() -> None:
    engine = SyncEngine()
    times = engine.policy.stats.histograms
    engine.add(request("a", 8, max_tokens=0, prompt_logprobs=1))
    engine.plan()
    engine.now_s = 2.0
    engine.deliver()
    engine.drain()
    assert observed(times.prefill_s) == observed(times.inference_s) == (1, 2.0)
    assert observed(times.decode_s) == (1, 0.0)


@pytest.mark.parametrize("overlap", [0, 1])
def test_preemption_starts_no_time_anew(overlap: int) -> None:
    """The last of two comes to lack blocks, waits for the first one's end, and computes its prompt again."""
    engine = SyncEngine((Group(6),), overlap=overlap)
    times, stats = engine.policy.stats.histograms, engine.policy.stats
    sequences = [request(name, 32, max_tokens=40, root=b"") for name in ("first", "last")]
    engine.add(*sequences)
    while not engine.policy.is_idle:
        engine.step()
        engine.now_s += 1.0
    engine.check_drained()
    assert stats.num_preemptions >= 1
    assert observed(times.num_preemptions) == (2, stats.num_preemptions)
    assert times.num_preemptions.counts[0] == 1, "one was never preempted"
    assert observed(times.queue_s) == (2, 0.0)
    assert times.prefill_s.num_values == times.decode_s.num_values == times.inference_s.num_values == 2
    assert times.inference_s.total == times.prefill_s.total + times.decode_s.total
    assert stats.prompt_tokens > 64, "it was computed again"


def test_hits_are_of_what_enters_for_the_first_time_and_is_looked_for() -> None:
    engine = SyncEngine((Group(6),))
    stats = engine.policy.stats
    tokens = request("a", 40).token_ids
    engine.add(request("a", 40, max_tokens=1, prompt=tokens))
    engine.drain()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (40, 0)
    engine.add(request("b", 40, max_tokens=1, prompt=tokens))
    engine.drain()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (80, 39)
    engine.add(request("off", 40, max_tokens=1, prompt=tokens, root=b""))
    engine.drain()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (80, 39)

    engine.add(request("first", 32, max_tokens=40), request("last", 32, max_tokens=40))
    engine.drain()
    assert stats.num_preemptions >= 1
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (80 + 64, 39), "what is found of one's own is none"
