"""The prefix cache through the whole engine: what it finds changes no bit of an answer, whatever back end and model."""
from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from api.engine import Completion, RequestFailed, SamplingParams
from tests.api.test_engine import BLOCK_BYTES, GREEDY, SEEDED, devices, facts, run, tiny

models = pytest.mark.parametrize("model", ["llama", "mistral-window", "gemma3"])    # windows: none, all layers, most
LOGPROBS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=5)


def ids(num_tokens: int, seed: int = 0) -> list[int]:
    drawn: list[int] = np.random.default_rng(seed).integers(3, 320, size=num_tokens).tolist()
    return drawn


async def alone(device: str, model: str, prompts: list[list[int]], sampling: SamplingParams = LOGPROBS,
                **options: Any) -> list[tuple[Any, ...]]:
    """Answers of an engine that keeps nothing."""
    async with tiny(device, model, enable_prefix_caching=False) as engine:
        done = [await engine.complete(prompt, sampling, **options) for prompt in prompts]
        assert {(cached(completion), completion.usage.cache_miss) for completion in done} == {(0, "off")}
        return [facts(completion) for completion in done]


def cached(completion: Completion) -> int:
    return completion.usage.num_cached_tokens


@devices
@models
def test_a_hit_equals_a_cold_start(device: str, model: str) -> None:
    """FAULTS K07, K15: whole prompts of any length about a block, and what is found of the next turn."""
    async def main() -> None:
        prompts = [ids(length, length) for length in (1, 15, 16, 17, 32, 33, 64, 90)]
        expected = await alone(device, model, prompts)
        async with tiny(device, model) as engine:
            for prompt, answer in zip(prompts, expected, strict=True):
                first, second = [await engine.complete(prompt, LOGPROBS) for _ in range(2)]
                assert facts(first) == facts(second) == answer
                assert cached(first) < 3, "equal by chance"
                assert cached(second) == len(prompt) - 1
            turn = prompts[-1] + list(first.token_ids) + ids(30, 99)
            (answer,) = await alone(device, model, [turn])
            completion = await engine.complete(turn, LOGPROBS)
            assert facts(completion) == answer
            assert cached(completion) == 90 + 12 - 1

    run(main)


@devices
@models
def test_a_copied_part_of_a_block_equals_a_cold_start(device: str, model: str) -> None:
    async def main() -> None:
        base = ids(60)
        prompts = [base[:shared] + ids(25, shared) for shared in (3, 16, 23, 40, 47, 59)]
        expected = await alone(device, model, prompts)
        async with tiny(device, model) as engine:
            await engine.complete(base, LOGPROBS)
            for prompt, shared, answer in zip(prompts, (3, 16, 23, 40, 47, 59), expected, strict=True):
                completion = await engine.complete(prompt, LOGPROBS)
                assert facts(completion) == answer
                assert cached(completion) >= shared

    run(main)


@devices
@models
@pytest.mark.parametrize("num_prompt", [20, 32])
def test_choices_equal_each_alone(device: str, model: str, num_prompt: int) -> None:
    sampling = SamplingParams(max_tokens=20, temperature=20.0, seed=7, ignore_eos=True, logprobs=0)

    async def main() -> None:
        prompt = ids(num_prompt)
        expected = [(await alone(device, model, [prompt], sampling, choice=choice))[0] for choice in range(4)]
        async with tiny(device, model) as engine:
            done = await asyncio.gather(*(engine.complete(prompt, sampling, choice=choice) for choice in range(4)))
            assert [facts(completion) for completion in done] == expected
            assert engine.stats().prompt_tokens <= num_prompt + 3 * 16
        assert len({answer[1] for answer in expected}) == 4, "choices differ"

    run(main)


@devices
def test_without_a_prefix_cache_choices_share_their_prompt_with_nobody_else(device: str) -> None:
    async def main() -> None:
        prompt, sampling = ids(70), SamplingParams(max_tokens=8, temperature=5.0, seed=7, ignore_eos=True, logprobs=0)
        async with tiny(device, enable_prefix_caching=False) as engine:
            async def choices(parent_id: str) -> list[Completion]:
                return await asyncio.gather(*(engine.complete(
                    prompt, sampling, choice=choice, parent_id=parent_id, num_children=4) for choice in range(4)))

            alone = [await engine.complete(prompt, sampling, choice=choice) for choice in range(4)]
            assert {(cached(completion), completion.usage.cache_miss) for completion in alone} == {(0, "off")}
            for parent_id in ("first", "second"):
                before = engine.stats().prompt_tokens
                done = await choices(parent_id)
                assert [facts(completion) for completion in done] == [facts(completion) for completion in alone]
                assert 70 <= engine.stats().prompt_tokens - before <= 70 + 3 * 16, "the prompt is computed once"
            assert cached(await engine.complete(prompt, sampling)) == 0

    run(main)


@devices
@models
@pytest.mark.parametrize(("overlap", "tier"), [(0, 0), (0, 1 << 20), (1, 1 << 20)])
def test_evicted_swapped_and_preempted_equal_undisturbed(device: str, model: str, overlap: int, tier: int) -> None:
    """A cache of a few sequences, more prompts than it holds, each asked for twice."""
    async def main() -> None:
        base = ids(48)
        prompts = [base[:16 * (i % 4)] + ids(20 + 3 * i, i) for i in range(8)]
        expected = await alone(device, model, prompts, SEEDED)
        block_bytes = BLOCK_BYTES if model == "llama" else 7 * 2 * 2 * 16 * 24 * 4 if model == "gemma3" else (
            3 * 2 * 2 * 16 * 24 * 4)
        if device == "cuda":                    # bf16
            block_bytes //= 2
        async with tiny(device, model, kv_cache_memory=16 * block_bytes, max_model_len=128, overlap=overlap,
                        kv_tier_memory=tier) as engine:
            for _ in range(2):
                done = await asyncio.gather(*(engine.complete(prompt, SEEDED) for prompt in prompts))
                assert [facts(completion) for completion in done] == expected
            for prompt, answer in zip(prompts, expected, strict=True):
                assert facts(await engine.complete(prompt, SEEDED)) == answer
            pools = engine._system.pool.pool.blocks
            assert any(blocks.evicted for blocks in pools)
            assert any(len(blocks.tier) for blocks in pools) == (tier > 0)

    run(main)


@devices
@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
def test_keys_and_values_of_fewer_bits_are_found_copied_and_moved_as_they_are(device: str, kv_dtype: str) -> None:
    async def main() -> None:
        base = ids(48)
        prompts = [base[:16 * (i % 4) + i % 3] + ids(20 + 3 * i, i) for i in range(8)]
        async with tiny(device, "gemma3", enable_prefix_caching=False, max_model_len=128, kv_dtype=kv_dtype) as engine:
            expected = [facts(await engine.complete(prompt, SEEDED)) for prompt in prompts]
            little = int(4 * 128 * engine.info.kv_bytes_per_token)
        async with tiny(device, "gemma3", kv_cache_memory=little, max_model_len=128, kv_tier_memory=1 << 20,
                        kv_dtype=kv_dtype) as engine:
            for _ in range(2):
                done = await asyncio.gather(*(engine.complete(prompt, SEEDED) for prompt in prompts))
                assert [facts(completion) for completion in done] == expected
            for prompt, answer in zip(prompts, expected, strict=True):
                assert facts(await engine.complete(prompt, SEEDED)) == answer
            pools = engine._system.pool.pool.blocks
            assert all(blocks.evicted for blocks in pools)
            assert all(len(blocks.tier) for blocks in pools)
            assert engine.stats().prefix_cache_hits > 0

    run(main)


@devices
def test_a_burst_computes_its_prefix_once(device: str) -> None:
    async def main() -> None:
        prefix = ids(96)
        prompts = [prefix + ids(10, i) for i in range(16)]
        expected = await alone(device, "llama", prompts, GREEDY)
        async with tiny(device, max_num_seqs=16) as engine:
            done = await asyncio.gather(*(engine.complete(prompt, GREEDY) for prompt in prompts))
            assert [facts(completion) for completion in done] == expected
            assert engine.stats().prompt_tokens <= 96 + 16 * 10
            assert engine.stats().prefix_cache_hits >= 15 * 96
            assert engine.stats().prefix_cache_queries == 16 * 106

    run(main)


def test_salts_and_tenants_keep_to_themselves() -> None:
    async def main() -> None:
        prompt = ids(50)
        for scope, found_by_other_tenant in (("all", 49), ("key", 0)):
            async with tiny("reference", cache_scope=scope) as engine:
                await engine.complete(prompt, GREEDY, tenant="x")
                assert cached(await engine.complete(prompt, GREEDY, tenant="x")) == 49
                assert cached(await engine.complete(prompt, GREEDY, tenant="y")) == found_by_other_tenant
                assert cached(await engine.complete(prompt, GREEDY, tenant="x", cache_salt="x")) == 0
                assert cached(await engine.complete(prompt, GREEDY, tenant="x", cache_salt="x")) == 49
                assert cached(await engine.complete(prompt, GREEDY, tenant="x", user="u")) == 49

    run(main)


def test_the_end_by_a_stop_string_says_what_was_found_too() -> None:
    async def main() -> None:
        async with tiny("reference") as engine:
            prompt = ids(40)
            first = await engine.complete(prompt, GREEDY)
            word = first.text.split()[2]
            stopped = await engine.complete(prompt, SamplingParams(max_tokens=16, temperature=0, stop=(word,)))
            assert stopped.finish == "stop"
            assert stopped.usage.num_cached_tokens == 39

    run(main)


@devices
def test_a_row_that_fails_leaves_its_batch_mates_of_the_same_prompt_alone(device: str) -> None:
    """FAULTS N07: four choices of one prompt share its blocks; the logits of one are not finite."""
    async def main() -> None:
        prompt = ids(50)
        (expected,) = await alone(device, "llama", [prompt], GREEDY)
        async with tiny(device) as engine:
            system = engine._system
            victim = next(engine._next_id) + 2

            def poison(logits: np.ndarray[Any, Any], slots: np.ndarray[Any, Any]) -> None:
                running = {sequence.request_id: sequence.slot for sequence in system.scheduler.policy.running.values()}
                for row, slot in enumerate(slots):
                    if running.get(f"r{victim}") == slot:
                        logits[row] = np.nan

            system.runner.on_logits = poison
            done = await asyncio.gather(*(engine.complete(prompt, GREEDY) for _ in range(4)), return_exceptions=True)
            system.runner.on_logits = None
            assert [isinstance(result, RequestFailed) for result in done] == [False, True, False, False]
            assert [facts(result) for result in done if isinstance(result, Completion)] == [expected] * 3
            assert facts(await engine.complete(prompt, GREEDY)) == expected

    run(main)


@devices
def test_a_fault_in_a_step_leaves_nothing_to_be_found(device: str) -> None:
    async def main() -> None:
        prompt = ids(50)
        (expected,) = await alone(device, "llama", [prompt], GREEDY)
        async with tiny(device) as engine:
            def fail(*_: object) -> None:
                raise MemoryError

            engine._system.runner.on_logits = fail
            with pytest.raises(RequestFailed):
                await engine.complete(prompt, GREEDY)
            engine._system.runner.on_logits = None
            again = await engine.complete(prompt, GREEDY)
            assert facts(again) == expected
            assert cached(again) == 0

    run(main)


def test_a_sequence_that_cannot_enter_fails_those_that_found_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool gave its blocks out as filled by this step, which leaves them empty."""
    async def main() -> None:
        prompt = ids(50)
        (expected,) = await alone("reference", "llama", [prompt], GREEDY)
        async with tiny("reference") as engine:
            runner, first = engine._system.runner, True
            start = runner.start

            def fail_once(*args: Any, **options: Any) -> None:
                nonlocal first
                if first:
                    first = False
                    raise MemoryError
                start(*args, **options)

            monkeypatch.setattr(runner, "start", fail_once)
            done = await asyncio.gather(*(engine.complete(prompt, GREEDY) for _ in range(3)), return_exceptions=True)
            for result in done:
                assert isinstance(result, RequestFailed) or facts(result) == expected  # type: ignore[arg-type]
            assert isinstance(done[0], RequestFailed)
            assert facts(await engine.complete(prompt, GREEDY)) == expected

    run(main)


def test_the_blocks_of_a_cache_can_be_looked_at() -> None:
    async def main() -> None:
        async with tiny("reference", "gemma3", kv_cache_memory=1 << 21) as engine:
            assert (await engine.debug_kv())["num_sequences"] == 0
            held: dict[str, Any] = {}
            async for delta in engine.generate(ids(40), SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)):
                if delta.token_ids and not held:
                    held = await engine.debug_kv()
            assert held["num_sequences"] == 1
            full, windowed = held["groups"]
            assert [row["owners"] for row in full["blocks"] if row["owners"]] == [["r0"]] * full["num_held"]
            assert full["num_held"] >= 3 > windowed["num_held"] - 1
            assert sum(row["key"] is not None for row in full["blocks"]) >= 2
            for group in held["groups"]:
                assert group["num_held"] + group["num_cached"] + group["num_free"] == group["num_blocks"]

    run(main)
