"""Scheduling policies and the queue's limits through the whole engine."""
from __future__ import annotations

import asyncio
from typing import Any

import pytest

from api.engine import Engine, EngineBusy, ParameterError, SamplingParams
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
            done = await asyncio.gather(*(engine.complete(prompt, GREEDY, priority=i % 3, tenant=f"t{i % 2}")
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


def test_a_full_queue_refuses_before_the_first_delta() -> None:
    async def main() -> None:
        async with tiny("reference", max_num_seqs=1, max_queued_requests=1) as engine:
            running = asyncio.create_task(engine.complete([5], LONG))
            while not engine.stats().num_requests_running:
                await asyncio.sleep(0.001)
            waiting = asyncio.create_task(engine.complete([6], GREEDY))
            while not engine.stats().num_requests_waiting:
                await asyncio.sleep(0.001)
            with pytest.raises(EngineBusy, match="1 requests are waiting, at most 1 may") as busy:
                await anext(engine.generate([7], GREEDY))
            assert busy.value.retry_after_s >= 1
            assert (await running).finish == (await waiting).finish == "length"
            assert (await engine.complete([7], GREEDY)).finish == "length"

    run(main)


@pytest.mark.parametrize(("options", "field"), [
    ({"priority": "high"}, "priority"), ({"priority": 2**31}, "priority"), ({"priority": None}, "priority"),
    ({"user": 5}, "user"), ({"cache_salt": b"x"}, "cache_salt"), ({"tenant": None}, "tenant")])
def test_options_are_checked(options: dict[str, Any], field: str) -> None:
    async def main() -> None:
        async with tiny("reference") as engine:
            with pytest.raises(ParameterError) as refusal:
                await engine.complete([5], GREEDY, **options)
            assert refusal.value.field == field
            assert (await engine.complete([5], GREEDY, priority=-3, user="\ud800", cache_salt="\0")).finish == "length"

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
    ({"kv_tier_memory": 1 << 60}, "kv_tier_memory .* are more than the .* of memory that are free"),
])
def test_settings_that_cannot_be_served_are_refused(config: dict[str, Any], message: str) -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match=message):
            async with Engine.start(str(MODELS / "llama"), device="reference", kv_cache_memory=1 << 20,
                                    **config):
                pass

    run(main)


def test_sizes_are_told() -> None:
    async def main() -> None:
        async with tiny("reference", kv_cache_memory=40 * BLOCK_BYTES, max_model_len=256,
                        kv_tier_memory=10 * BLOCK_BYTES) as engine:
            info = engine.info
            assert (info.num_full_requests, info.kv_capacity_tokens, info.kv_tier_tokens) == (2, 512, 160)
            assert info.kv_bytes == 40 * BLOCK_BYTES
            assert info.kv_bytes_per_token == BLOCK_BYTES / 16

    run(main)
