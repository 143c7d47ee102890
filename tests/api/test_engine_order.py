"""Scheduling policies and the queue's limits through the whole engine."""
from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from api.engine import Completion, Engine, EngineBusy, ParameterError, SamplingParams
from tests.api.test_engine import BLOCK_BYTES, GREEDY, MODELS, facts, prompts, run, tiny

LONG = SamplingParams(max_tokens=150, temperature=0, ignore_eos=True)


@pytest.mark.parametrize("settings", [
    {"scheduling_policy": "priority"}, {"scheduling_policy": "lpm"}, {"scheduling_policy": "fair"},
    {"scheduling_policy": "deadline", "ttft_target_s": 0.05, "itl_target_s": 0.002},
], ids=lambda settings: settings["scheduling_policy"])
def test_no_policy_changes_an_answer(settings: dict[str, Any]) -> None:
    async def main() -> None:
        async with tiny("reference") as engine:
            expected = [facts(await engine.complete(prompt, GREEDY)) for prompt in prompts()]
        async with tiny("reference", kv_cache_memory=14 * BLOCK_BYTES, max_model_len=128, **settings) as engine:
            priorities = (0, 1, 2) if settings["scheduling_policy"] == "priority" else (0,)
            done = await asyncio.gather(*(
                engine.complete(prompt, GREEDY, priority=priorities[i % len(priorities)], tenant=f"t{i % 2}")
                for i, prompt in enumerate(prompts())))
            assert [facts(completion) for completion in done] == expected

    run(main)


def test_who_matters_more_overtakes_and_preempts() -> None:
    async def main() -> None:
        async with tiny("reference", max_num_seqs=1, scheduling_policy="priority") as engine:
            expected = facts(await engine.complete([5, 6], LONG))
            ended: list[str] = []

            async def ask(name: str, sampling: SamplingParams, priority: int) -> tuple[Any, ...]:
                completion = await engine.complete([5, 6], sampling, priority=priority)
                ended.append(name)
                return facts(completion)

            low = asyncio.create_task(ask("low", LONG, 1))
            while not engine.stats().num_requests_running:
                await asyncio.sleep(0.001)
            await ask("high", GREEDY, 0)
            assert await low == expected
            assert ended == ["high", "low"]
            assert engine.stats().num_preemptions == 1

    run(main)


def test_users_of_one_tenant_share_fairly() -> None:
    async def main() -> None:
        async with tiny("reference", max_num_seqs=1, scheduling_policy="fair") as engine:
            ended: list[str] = []

            async def ask(user: str, sampling: SamplingParams) -> None:
                await engine.complete([5, 6], sampling, tenant="key", user=user)
                ended.append(user)

            asking = [asyncio.create_task(ask("flood", LONG))]
            while not engine.stats().num_requests_running:
                await asyncio.sleep(0.001)
            asking += [asyncio.create_task(ask("flood", GREEDY)) for _ in range(3)]
            while engine.stats().num_requests_waiting < 3:
                await asyncio.sleep(0.001)
            await asyncio.gather(ask("modest", GREEDY), *asking)
            assert ended[:2] == ["flood", "modest"]

    run(main)


def test_a_full_queue_refuses_before_the_first_delta() -> None:
    async def main() -> None:
        async with tiny("reference", max_num_seqs=1, max_queued_requests=1) as engine:
            running = asyncio.create_task(engine.complete([5], LONG))
            while not engine.stats().num_requests_running:
                await asyncio.sleep(0.001)
            waiting = asyncio.create_task(engine.complete([6], GREEDY))
            while not engine.stats().num_requests_waiting:
                await asyncio.sleep(0.001)
            with pytest.raises(EngineBusy, match="1 requests are queued, this would add 1, at most 1 may") as busy:
                await anext(engine.generate([7], GREEDY))
            assert busy.value.retry_after_s >= 1
            assert (await running).finish == (await waiting).finish == "length"
            assert (await engine.complete([7], GREEDY)).finish == "length"

    run(main)


@pytest.mark.parametrize(("prompts", "n"), [([[7], [8], [9]], 1), ([[7]], 3)], ids=["three prompts", "n = 3"])
def test_a_request_of_several_completions_is_taken_whole_or_not_at_all(prompts: list[list[int]], n: int) -> None:
    async def main() -> None:
        async with tiny("reference", max_num_seqs=2, max_queued_requests=2) as engine:
            async def ask(parent_id: str) -> list[Completion | BaseException]:
                return await asyncio.gather(*(
                    engine.complete(prompt, GREEDY, choice=choice, parent_id=parent_id, num_children=3)
                    for prompt in prompts for choice in range(n)), return_exceptions=True)

            running = asyncio.create_task(engine.complete([5], LONG))
            while not engine.stats().num_requests_running:
                await asyncio.sleep(0.001)
            first, second = await asyncio.gather(ask("a"), ask("b"))
            assert all(isinstance(answer, Completion) for answer in first)
            assert all(isinstance(answer, EngineBusy) and answer.limit == "max_queued_requests" for answer in second)
            assert (await running).finish == "length"
            assert all(isinstance(answer, Completion) for answer in await ask("c"))

    run(main)


def test_what_waits_for_one_that_is_refused_can_be_left() -> None:
    """A prompt with an id that the model does not have: the other prompt of its request never runs."""
    async def main() -> None:
        async with tiny("reference", max_queued_requests=2) as engine:
            family: dict[str, Any] = {"parent_id": "p", "num_children": 2}
            other = asyncio.create_task(engine.complete([5], GREEDY, **family))
            with pytest.raises(ParameterError, match="vocabulary"):
                await engine.complete([10**6], GREEDY, **family)
            other.cancel()
            with pytest.raises(asyncio.CancelledError):
                await other
            assert engine.stats().num_steps == 0

    run(main)


@pytest.mark.parametrize(("options", "field"), [
    ({"priority": "high"}, "priority"), ({"priority": 2**31}, "priority"), ({"priority": None}, "priority"),
    ({"user": 5}, "user"), ({"cache_salt": b"x"}, "cache_salt"), ({"tenant": None}, "tenant"),
    ({"parent_id": 1}, "parent_id"), ({"num_children": 0}, "num_children"), ({"num_children": 2}, "num_children")])
def test_options_are_checked(options: dict[str, Any], field: str) -> None:
    async def main() -> None:
        async with tiny("reference") as engine:
            with pytest.raises(ParameterError) as refusal:
                await engine.complete([5], GREEDY, **options)
            assert refusal.value.field == field
            assert (await engine.complete([5], GREEDY, user="\ud800", cache_salt="\0")).finish == "length"

    run(main)


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "fair", "deadline", "priority"])
def test_a_priority_is_refused_where_nobody_looks_at_it(policy: str) -> None:
    async def main() -> None:
        target: dict[str, Any] = {"ttft_target_s": 1.0} if policy == "deadline" else {}
        async with tiny("reference", scheduling_policy=policy, **target) as engine:
            assert (await engine.complete([5], GREEDY, priority=0)).finish == "length"
            for priority in (-3, 1):
                if policy == "priority":
                    assert (await engine.complete([5], GREEDY, priority=priority)).finish == "length"
                    continue
                with pytest.raises(ParameterError, match=f"is for scheduling_policy priority, here it is {policy}") as (
                        refusal):
                    await engine.complete([5], GREEDY, priority=priority)
                assert refusal.value.field == "priority"

    run(main)


@pytest.mark.parametrize(("config", "message"), [
    ({"scheduling_policy": "sjf"}, "scheduling_policy must be one of"),
    ({"scheduling_policy": "deadline"}, "needs ttft_target_s or itl_target_s"),
    ({"itl_target_s": 0.1}, "itl_target_s is for scheduling_policy deadline"),
    ({"max_queued_requests": -1}, "max_queued_requests"),
    ({"max_queued_tokens": 1.5}, "max_queued_tokens"),
    ({"cache_scope": "user"}, "cache_scope must be all or key"),
    ({"kv_tier_memory": -1}, "kv_tier_memory"),
    ({"kv_tier_memory": BLOCK_BYTES - 1}, "kv_tier_memory 12.00 KiB does not hold one block of 16 tokens, which takes"),
    ({"kv_tier_memory": 1 << 60}, "kv_tier_memory 1073741824.00 GiB is too much: of the .* the weights of .* leave"),
    ({"kv_tier_memory": 1 << 60, "kv_cache_memory": None}, "kv_tier_memory 1073741824.00 GiB is too much: of the"),
    ({"kv_tier_memory": 1 << 60, "kv_cache_memory": None, "gpu_memory_utilization": 0.5}, "kv_tier_memory .* too much"),
    ({"kv_tier_memory": 1 << 20, "enable_prefix_caching": False}, "kv_tier_memory does nothing without prefix caching"),
    ({"cache_scope": "key", "enable_prefix_caching": False}, "cache_scope key .* --no-enable-prefix-caching"),
    ({"scheduling_policy": "lpm", "enable_prefix_caching": False}, "scheduling_policy lpm does nothing without prefix"),
    ({"gpu_memory_utilization": 0.5}, "kv_cache_memory and gpu_memory_utilization both say how large"),
])
def test_settings_that_cannot_be_served_are_refused(config: dict[str, Any], message: str) -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match=message) as refusal:
            async with Engine.start(str(MODELS / "llama"), device="reference",
                                    **{"kv_cache_memory": 1 << 20, **config}):
                pass
        assert re.search(r"-[0-9.]+ .iB|\n", str(refusal.value)) is None, "no negative sizes, one line"

    run(main)


def test_sizes_are_told() -> None:
    async def main() -> None:
        async with tiny("reference", kv_cache_memory=40 * BLOCK_BYTES, max_model_len=256,
                        kv_tier_memory=10 * BLOCK_BYTES) as engine:
            info = engine.info
            assert (info.num_full_requests, info.kv_capacity_tokens, info.kv_tier_tokens) == (2.5, 640, 160)
            assert info.kv_bytes == 40 * BLOCK_BYTES
            assert info.kv_bytes_per_token == BLOCK_BYTES / 16
        async with tiny("reference", kv_cache_memory=19 * BLOCK_BYTES, max_model_len=100) as engine:
            assert engine.info.num_full_requests == 19 / 7
            assert engine.info.kv_capacity_tokens == 19 * 16

    run(main)


@pytest.mark.parametrize("model", ["mistral-window", "gemma3"])
def test_the_capacity_of_windows_is_told_in_whole_requests(model: str) -> None:
    """A window takes few blocks of a long request: what is left of them holds no shorter ones in their place."""
    async def main() -> None:
        async with tiny("reference", model, max_model_len=200, kv_cache_memory=600 << 10) as engine:
            info = engine.info
            parts = [group.num_blocks / group.num_blocks_for(200) for group in engine._system.pool.pool.groups]
            assert info.num_full_requests == min(parts)
            assert info.kv_capacity_tokens == pytest.approx(200 * min(parts), rel=0.05)
            assert info.kv_capacity_tokens % 200 != 0

    run(main)
