"""The engine whole, in process, on tiny models: the equivalences, and what happens when something goes wrong."""
from __future__ import annotations

import asyncio
import gc
import json
import shutil
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.messages import TextDelta
from api.engine import Completion, Engine, EngineDead, ParameterError, RequestFailed, SamplingParams

MODELS = Path(__file__).parent.parent / "golden" / "models"
BLOCK_BYTES = 3 * 2 * 16 * 32 * 4           # of the tiny llama: layers, kv heads, tokens, k and v, float32
BLOCK_BYTES_OF = {"float32": BLOCK_BYTES, "bf16": BLOCK_BYTES // 2, "int8": BLOCK_BYTES // 4 + 3 * 2 * 16 * 2 * 4,
                  "fp8": BLOCK_BYTES // 4 + 3 * 2 * 16 * 2 * 4}
GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, logprobs=2)
SEEDED = SamplingParams(max_tokens=24, temperature=1.5, top_p=0.95, seed=7, ignore_eos=True, logprobs=0,
                        repetition_penalty=1.2, frequency_penalty=0.5)

devices = pytest.mark.parametrize("device", ["reference", "cpu"])


@asynccontextmanager
async def tiny(device: str, model: str = "llama", **config: Any) -> AsyncIterator[Engine]:
    if device == "cuda":                        # by the emulator: tests/api/test_engine_cuda.py
        config.setdefault("deterministic", True)
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "kv_cache_memory": 256 * BLOCK_BYTES,
                "debug": True, "threads": 2 if device == "cpu" else None, **config}
    async with Engine.start(str(MODELS / model), device=device, **settings) as engine:
        yield engine
        await idle(engine)
        pool = engine._system.pool.pool
        pool.check_integrity()
        assert pool.num_sequences == 0
        assert engine._system.tokenizer.num_open == 0
        assert len(engine._system.output) == 0


async def idle(engine: Engine) -> None:
    """Until the engine's thread has seen every abort and given every block back."""
    system = engine._system
    while system.tokenizer.num_open or not system.scheduler.policy.is_idle:
        await asyncio.sleep(0.001)


async def first_token(stream: AsyncIterator[TextDelta]) -> None:
    """Read on until it computes."""
    while not (await anext(stream)).token_ids:
        pass


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(120):
            await main()

    asyncio.run(bounded())


def golden(model: str) -> dict[str, np.ndarray[Any, Any]]:
    return dict(np.load(MODELS / model / "golden.npz"))


def prompts(count: int = 8, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 320, size=int(rng.integers(1, 60))).tolist() for _ in range(count)]


def facts(completion: Completion) -> tuple[Any, ...]:
    """What must not depend on anything but the request, bit for bit."""
    return (completion.text, completion.token_ids, completion.finish,
            [(logprob.logprob, [(top.token_id, top.logprob) for top in logprob.top])
             for logprob in completion.logprobs])


@devices
@pytest.mark.parametrize("model", ["llama", "qwen2", "gemma3", "mistral-window", "gemma2"])
def test_greedy_tokens_are_the_golden_ones(device: str, model: str) -> None:
    expected = golden(model)
    close = [i for i, gap in enumerate(expected["greedy_gap"]) if gap < 0.05]
    reach = close[0] if close else len(expected["greedy"])

    async def main() -> None:
        async with tiny(device, model, kv_cache_memory=1 << 24) as engine:
            completion = await engine.complete(expected["prompt"].tolist(), GREEDY)
            assert list(completion.token_ids[:reach]) == expected["greedy"].tolist()[:reach]
            assert completion.text.split() == [f"w{i}" for i in completion.token_ids if i > 2]

    run(main)


@devices
def test_prompt_logprobs_are_the_golden_ones(device: str) -> None:
    expected = golden("llama")
    ids, logits = expected["input_ids"][0], expected["logits"][0].astype(np.float64)
    want = logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    async def main() -> None:
        # A budget below the prompt's length: logprobs come from several chunks.
        async with tiny(device, max_num_batched_tokens=8) as engine:
            completion = await engine.complete(ids.tolist(), SamplingParams(max_tokens=0, prompt_logprobs=3))
            assert completion.token_ids == ()
            assert completion.finish == "length"
            assert [entry.token_id for entry in completion.prompt_logprobs] == ids.tolist()
            assert np.isnan(completion.prompt_logprobs[0].logprob)
            for position, entry in enumerate(completion.prompt_logprobs[1:]):
                assert abs(entry.logprob - want[position, ids[position + 1]]) < 2e-4
                assert [top.token_id for top in entry.top] == np.argsort(-want[position])[:3].tolist()

    run(main)


@devices
@pytest.mark.parametrize("kv_dtype", ["float32", "bf16", "int8"])
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_batched_chunked_and_preempted_all_equal_alone(device: str, sampling: SamplingParams, kv_dtype: str) -> None:
    few_blocks = 14 * BLOCK_BYTES_OF[kv_dtype]

    async def alone() -> list[tuple[Any, ...]]:
        async with tiny(device, kv_dtype=kv_dtype) as engine:
            assert engine.info.kv_dtype == kv_dtype
            return [facts(await engine.complete(prompt, sampling)) for prompt in prompts()]

    async def together(**config: Any) -> tuple[list[tuple[Any, ...]], int]:
        async with tiny(device, kv_dtype=kv_dtype, **config) as engine:
            done = await asyncio.gather(*(engine.complete(prompt, sampling) for prompt in prompts()))
            return [facts(completion) for completion in done], engine.stats().num_preemptions

    async def main() -> None:
        expected = await alone()
        assert (await together())[0] == expected, "batched"
        assert (await together(max_num_batched_tokens=8))[0] == expected, "chunked"
        # 14 blocks hold two or three of the eight sequences: the others wait, and some are preempted.
        preempted, num_preemptions = await together(kv_cache_memory=few_blocks, max_model_len=128)
        assert num_preemptions > 0
        assert preempted == expected, "preempted"
        for overlap in (1, 2):
            assert (await together(overlap=overlap))[0] == expected, "launched before the last step is read"
            preempted, num_preemptions = await together(kv_cache_memory=few_blocks, max_model_len=128,
                                                        overlap=overlap)
            assert num_preemptions > 0
            assert preempted == expected, "launched ahead and preempted"

    run(main)


@devices
def test_a_batch_mate_changes_nothing(device: str) -> None:
    """FAULTS N02, N03, N05: masks, penalties and seeds of one row must not reach another."""
    odd = SamplingParams(max_tokens=20, temperature=1.9, logit_bias=((5, -100.0), (6, 50.0)), presence_penalty=2.0,
                         repetition_penalty=2.0, min_tokens=10)

    async def main() -> None:
        async with tiny(device) as engine:
            prompt = prompts()[0]
            for sampling in (GREEDY, SEEDED):
                alone = facts(await engine.complete(prompt, sampling))
                mates = [asyncio.create_task(engine.complete(other, odd)) for other in prompts()[1:5]]
                assert facts(await engine.complete(prompt, sampling)) == alone
                await asyncio.gather(*mates)

    run(main)


def test_seeds() -> None:
    """FAULTS A08: 0, -1 and the ends of the range are seeds; choices of one seed differ."""
    async def main() -> None:
        async with tiny("reference") as engine:
            for seed in (0, -1, 2**63 - 1, -(2**63)):
                sampling = SamplingParams(max_tokens=12, temperature=2.0, seed=seed, ignore_eos=True)
                first, second = [await engine.complete([5, 6, 7], sampling) for _ in range(2)]
                other = await engine.complete([5, 6, 7], sampling, choice=1)
                assert first.token_ids == second.token_ids
                assert first.token_ids != other.token_ids

    run(main)


def test_engine_seed_repeats_requests_without_one() -> None:
    async def tokens(seed: int | None) -> list[tuple[int, ...]]:
        async with tiny("reference", seed=seed) as engine:
            sampling = SamplingParams(max_tokens=12, temperature=2.0, ignore_eos=True)
            return [(await engine.complete([5, 6, 7], sampling)).token_ids for _ in range(2)]

    async def main() -> None:
        first = await tokens(3)
        assert first[0] != first[1]
        assert first == await tokens(3)
        assert first != await tokens(4)
        assert await tokens(None) != await tokens(None)

    run(main)


def test_leaving_the_iterator_aborts_in_every_way() -> None:
    long = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)

    async def main() -> None:
        async with tiny("reference") as engine:
            async for _ in engine.generate([5, 6], long):
                break
            gc.collect()
            await idle(engine)

            stream = engine.generate([5, 6], long)
            await first_token(stream)
            await stream.aclose()
            await idle(engine)

            task = asyncio.create_task(engine.complete([5, 6], long))
            while not engine.stats().num_requests_running:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await idle(engine)
            assert engine.stats().kv_cache_usage == 0

    run(main)


def test_queued_requests_of_a_gone_caller_are_never_computed() -> None:
    """FAULTS S14."""
    async def main() -> None:
        async with tiny("reference", max_num_seqs=1) as engine:
            running = engine.generate([5], SamplingParams(max_tokens=300, temperature=0, ignore_eos=True))
            await first_token(running)
            computed = engine.stats().prompt_tokens
            queued = [asyncio.create_task(engine.complete(prompt, GREEDY)) for prompt in prompts()]
            while engine.stats().num_requests_waiting < len(queued):
                await asyncio.sleep(0.001)
            for task in queued:
                task.cancel()
            await asyncio.gather(*queued, return_exceptions=True)
            while engine.stats().num_requests_waiting:
                await asyncio.sleep(0.001)
            await running.aclose()
            await idle(engine)
            assert engine.stats().prompt_tokens == computed

    run(main)


def test_a_prompt_that_leaves_no_room_is_refused_with_both_lengths() -> None:
    """FAULTS A05."""
    async def main() -> None:
        async with tiny("reference", max_model_len=64) as engine:
            for length in (64, 164):
                with pytest.raises(ParameterError, match=rf"{length} tokens.*64") as refusal:
                    await engine.complete([5] * length, GREEDY)
                assert "-" not in str(refusal.value)
            last = await engine.complete([5] * 63, SamplingParams(temperature=0, ignore_eos=True))
            assert (len(last.token_ids), last.finish) == (1, "length")

    run(main)


@pytest.mark.parametrize(("prompt", "field"), [
    ([320], "prompt"), ([-1], "prompt"), ([1.5], "prompt"), ([True], "prompt"),
    ([{"role": "user", "content": "w5"}], "messages"),          # these models have no chat template
])
def test_prompts_that_cannot_be_served(prompt: Any, field: str) -> None:
    async def main() -> None:
        async with tiny("reference") as engine:
            with pytest.raises(ParameterError) as refusal:
                await engine.complete(prompt, GREEDY)
            assert refusal.value.field == field
            assert (await engine.complete([5], GREEDY)).finish == "length"

    run(main)


def test_an_empty_prompt_starts_from_the_beginning_of_text_token() -> None:
    """FAULTS A03."""
    async def main() -> None:
        async with tiny("reference") as engine:
            bos = await engine.complete([1], GREEDY)
            assert facts(await engine.complete("", GREEDY)) == facts(bos)
            assert facts(await engine.complete([], GREEDY)) == facts(bos)

    run(main)


@pytest.mark.parametrize(("changes", "field"), [
    ({"stop_token_ids": (320,)}, "stop_token_ids"), ({"logit_bias": ((999_999, 5.0),)}, "logit_bias"),
])
def test_ids_outside_of_the_vocabulary(changes: dict[str, Any], field: str) -> None:
    """FAULTS A01."""
    async def main() -> None:
        async with tiny("reference") as engine:
            with pytest.raises(ParameterError) as refusal:
                await engine.complete([5], SamplingParams(max_tokens=4, min_tokens=2, **changes))
            assert refusal.value.field == field
            last = SamplingParams(max_tokens=4, temperature=0, min_tokens=2, logit_bias=((319, 100.0),),
                                  stop_token_ids=(319,))
            completion = await engine.complete([5], last)
            assert completion.finish == "stop"
            assert completion.stop_reason == 319
            assert len(completion.token_ids) == 3, "the stop id is masked until two tokens are out"
            assert "w319" not in completion.text

    run(main)


@devices
@pytest.mark.parametrize("fault", [np.nan, np.inf, -np.inf])
def test_a_row_without_usable_logits_fails_alone(device: str, fault: float) -> None:
    """FAULTS N07."""
    async def main() -> None:
        async with tiny(device) as engine:
            expected = [facts(await engine.complete(prompt, GREEDY)) for prompt in prompts(4)]
            system = engine._system
            victim: list[int] = []

            def poison(logits: np.ndarray[Any, Any], slots: np.ndarray[Any, Any]) -> None:
                running = {sequence.request_id: sequence.slot for sequence in system.scheduler.policy.running.values()}
                for row, slot in enumerate(slots):
                    if victim and running.get(f"r{victim[0]}") == slot:
                        logits[row] = fault

            victim.append(next(engine._next_id) + 2)
            system.runner.on_logits = poison
            results = await asyncio.gather(*(engine.complete(prompt, GREEDY) for prompt in prompts(4)),
                                           return_exceptions=True)
            system.runner.on_logits = None
            failed = [i for i, result in enumerate(results) if isinstance(result, BaseException)]
            assert failed == [1]
            assert isinstance(results[1], RequestFailed)
            assert [facts(r) for r in results if isinstance(r, Completion)] == [expected[0], *expected[2:]]

    run(main)


@devices
@pytest.mark.parametrize("error", [MemoryError("no memory"), RuntimeError("kernel fault")])
def test_a_fault_in_one_step_fails_its_requests_and_the_engine_goes_on(device: str, error: Exception) -> None:
    """FAULTS O09."""
    async def main() -> None:
        async with tiny(device) as engine:
            expected = facts(await engine.complete([5, 6, 7], GREEDY))
            steps = 0

            def fail(logits: np.ndarray[Any, Any], slots: np.ndarray[Any, Any]) -> None:
                nonlocal steps
                steps += 1
                if steps == 3:
                    raise error

            engine._system.runner.on_logits = fail
            results = await asyncio.gather(*(engine.complete(p, GREEDY) for p in prompts(3)), return_exceptions=True)
            assert all(isinstance(result, RequestFailed) for result in results)
            assert facts(await engine.complete([5, 6, 7], GREEDY)) == expected

    run(main)


@devices
def test_a_fault_at_a_sequence_s_start_is_its_own(device: str) -> None:
    """FAULTS O09: what a plan says is not said again, so a fault half-way through it must not lose the rest."""
    async def main() -> None:
        async with tiny(device) as engine:
            expected = [facts(await engine.complete(prompt, GREEDY)) for prompt in prompts(3)]
            sampler = engine._system.runner.sampler
            start, calls = sampler.start, 0

            def fail_once(*args: Any) -> None:
                nonlocal calls
                calls += 1
                if calls == 2:
                    raise MemoryError("no memory")
                start(*args)

            sampler.start = fail_once  # type: ignore[method-assign]
            results = await asyncio.gather(*(engine.complete(p, GREEDY) for p in prompts(3)), return_exceptions=True)
            failed = [i for i, result in enumerate(results) if isinstance(result, RequestFailed)]
            assert len(failed) == 1
            assert [facts(r) for r in results if isinstance(r, Completion)] == \
                [facts_of for i, facts_of in enumerate(expected) if i not in failed]
            assert [facts(await engine.complete(prompt, GREEDY)) for prompt in prompts(3)] == expected

    run(main)


def test_a_tokenizer_with_more_ids_than_the_model_has_rows(tmp_path: Path) -> None:
    """Checkpoints have such ids, for images. They are refused, in a prompt's text too, and hurt nobody else."""
    model = tmp_path / "model"
    shutil.copytree(MODELS / "llama", model)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 320, "content": "<image>"})
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))

    async def main() -> None:
        async with Engine.start(str(model), device="reference", kv_cache_memory=1 << 22) as engine:
            assert engine.info.vocab_size == 320
            for prompt, sampling, field in (([5, 320], GREEDY, "prompt"), ("w5 <image> w6", GREEDY, "prompt"),
                                            ([5], SamplingParams(logit_bias=((320, 1.0),)), "logit_bias")):
                with pytest.raises(ParameterError, match="320") as refusal:
                    await engine.complete(prompt, sampling)
                assert refusal.value.field == field
            assert (await engine.complete([5], GREEDY)).finish == "length"

    run(main)


def test_a_model_whose_layers_all_have_a_window_needs_blocks_for_the_window_alone() -> None:
    async def main() -> None:
        async with tiny("reference", "mistral-window", max_num_seqs=1, max_num_batched_tokens=32,
                        kv_cache_memory=1 << 22) as engine:
            assert engine.info.max_model_len == 256
            assert engine.info.kv_capacity_tokens >= 256
            assert engine._system.sizes.num_blocks[0] < 16
            completion = await engine.complete([5] * 100, SamplingParams(temperature=0, ignore_eos=True))
            assert len(completion.token_ids) == 156

    run(main)


def test_a_start_that_fails_leaves_no_thread_behind(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODELS / "llama", model)
    (model / "tokenizer_config.json").write_text("[]")
    before = set(threading.enumerate())

    async def main() -> None:
        with pytest.raises(ValueError, match="tokenizer_config"):
            async with Engine.start(str(model), device="cpu"):
                pass

    run(main)
    for thread in set(threading.enumerate()) - before:
        if thread.is_alive():               # not in its very start: the device thread waits for those
            thread.join(60)
    assert not {thread.name for thread in set(threading.enumerate()) - before}


def test_sampling_parameters_take_vllms_forms_and_name_what_is_wrong() -> None:
    same = SamplingParams(stop="wonder", logit_bias={5: 1.0}, stop_token_ids=[7])  # type: ignore[arg-type]
    assert same == SamplingParams(stop=("wonder",), logit_bias=((5, 1.0),), stop_token_ids=(7,))
    assert SamplingParams(stop=None) == SamplingParams()  # type: ignore[arg-type]
    for name, value in (("stop", 5), ("stop_token_ids", 5), ("logit_bias", 5), ("logit_bias", (5,)),
                        ("ignore_eos", "no"), ("skip_special_tokens", 1), ("stop", [""]), ("stop", [5])):
        with pytest.raises(ParameterError) as refusal:
            SamplingParams(**{name: value})
        assert refusal.value.field == name


@pytest.mark.parametrize("prompt", [None, b"abc", 5, {"role": "user"}])
def test_prompts_of_another_kind(prompt: Any) -> None:
    async def main() -> None:
        async with tiny("reference") as engine:
            with pytest.raises(ParameterError, match="prompt"):
                await engine.complete(prompt, GREEDY)

    run(main)


def test_when_an_actor_dies_every_caller_hears_why() -> None:
    async def main() -> None:
        async with Engine.start(str(MODELS / "llama"), device="reference", kv_cache_memory=1 << 20) as engine:
            stream = engine.generate([5], SamplingParams(max_tokens=100, temperature=0, ignore_eos=True))
            await first_token(stream)

            def broken(*_: object) -> None:
                raise ZeroDivisionError("injected")

            engine._system.scheduler.policy.wants = broken  # type: ignore[assignment]
            with pytest.raises(EngineDead, match="injected"):
                async for _ in stream:
                    pass
            assert engine.dead is not None
            with pytest.raises(EngineDead, match="injected"):
                await engine.complete([5], GREEDY)

    run(main)


def test_leaving_the_engine_ends_open_requests_and_its_threads() -> None:
    async def main() -> None:
        async with Engine.start(str(MODELS / "llama"), device="reference", kv_cache_memory=1 << 20) as engine:
            stream = engine.generate([5], SamplingParams(max_tokens=100, temperature=0, ignore_eos=True))
            await first_token(stream)
        with pytest.raises(EngineDead, match="stopped"):
            async for _ in stream:
                pass
        assert not engine._system._thread.is_alive()

    run(main)


@pytest.mark.parametrize(("config", "message"), [
    ({"model": "no-such-model"}, "no-such-model"),
    ({"device": "cuda"}, "cuda"),
    ({"device": "tpu"}, "tpu"),
    ({"max_num_seqs": 0}, "max_num_seqs"),
    ({"max_num_seqs": 1000}, "max_num_batched_tokens"),
    ({"max_model_len": 256, "kv_cache_memory": 15 * BLOCK_BYTES}, "256 tokens needs .* which holds 240"),
    ({"kv_cache_memory": 15 * BLOCK_BYTES}, "256 tokens needs .* which holds 240"),
    ({"max_model_len": 257}, "257 is more than the 256 positions"),
    ({"kv_cache_memory": 1 << 60}, "memory that are free"),
    ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
    ({"generation_config": "vllm"}, "generation_config"),
    ({"kv_dtype": "fp4"}, "kv_dtype must be auto, float32, bf16, fp16, int8, fp8, got 'fp4'"),
    ({"kv_dtype": "fp8", "device": "cpu"}, "kv_dtype fp8: the host back end has float32, bf16, int8"),
    ({"kv_dtype": "int8", "kv_cache_memory": 15 * BLOCK_BYTES_OF["int8"]}, "256 tokens needs .* which holds 240"),
    ({"host_math": "int16"}, "host_math int16 is for device cpu: device reference has one arithmetic only"),
])
def test_settings_that_cannot_be_served_are_refused(config: dict[str, Any], message: str) -> None:
    settings = {"model": str(MODELS / "llama"), "device": "reference", **config}

    async def main() -> None:
        with pytest.raises(ValueError, match=message):
            async with Engine.start(**settings):
                pass

    run(main)


def test_the_start_says_which_arithmetic_and_why() -> None:
    async def main() -> None:
        async with tiny("cpu", host_math="exact") as engine:
            assert engine.info.device_reason == "as asked; exact arithmetic (as asked)"

    run(main)


def test_requests_from_two_loops_at_once() -> None:
    """Callers live on their own loops; the engine serves them all."""
    async def main() -> None:
        async with tiny("reference") as engine:
            expected = facts(await engine.complete([5, 6], GREEDY))

            def elsewhere() -> tuple[Any, ...]:
                return facts(asyncio.run(engine.complete([5, 6], GREEDY)))

            results = await asyncio.gather(*(asyncio.to_thread(elsewhere) for _ in range(3)),
                                           engine.complete([5, 6], GREEDY))
            assert results[:3] == [expected] * 3
            assert facts(results[3]) == expected

    run(main)
