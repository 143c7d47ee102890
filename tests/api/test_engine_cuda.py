"""The engine whole on the CUDA back end, its kernels run by the emulator: the same tests as of the other back ends.

Launched one step ahead and replayed as graphs, as on a GPU, where a test does not say otherwise.
"""
from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors import system
from api.engine import Engine, EngineDead, SamplingParams
from api.metrics import Metrics
from cuda.device_runner import DeviceRunner
from cuda.devices import Gpu
from cuda.launcher import DeviceLost
from tests.api import (
    test_engine,
    test_engine_cache,
    test_engine_parameters,
    test_engine_pooling,
    test_engine_structured,
    test_engine_thoughts,
)
from tests.api.test_engine import BLOCK_BYTES, GREEDY, MODELS, SEEDED, facts, idle, prompts, run, tiny
from tests.api.test_engine_cache import ids
from tests.cuda.test_golden_models import quantized
from tests.cuda_emulator.build import unavailable
from tests.cuda_emulator.launcher import EmulatorLauncher
from weights.load import ModelFile

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "usable_gpu", lambda: Gpu("emulator", 90, 13000))
    monkeypatch.setattr(system, "make_launcher", EmulatorLauncher)


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8", "fp8"])
def test_batched_chunked_and_preempted_all_equal_alone(kv_dtype: str) -> None:
    test_engine.test_batched_chunked_and_preempted_all_equal_alone("cuda", SEEDED, kv_dtype)


@pytest.mark.parametrize(("model", "overlap", "tier"), [("gemma3", 1, 1 << 20), ("llama", 0, 0)])
def test_evicted_swapped_and_preempted_equal_undisturbed(model: str, overlap: int, tier: int) -> None:
    test_engine_cache.test_evicted_swapped_and_preempted_equal_undisturbed("cuda", model, overlap, tier)


@pytest.mark.parametrize("test", [
    test_engine.test_a_batch_mate_changes_nothing,
    test_engine.test_a_fault_at_a_sequence_s_start_is_its_own,
    test_engine_cache.test_a_burst_computes_its_prefix_once,
    test_engine_cache.test_a_row_that_fails_leaves_its_batch_mates_of_the_same_prompt_alone,
    test_engine_cache.test_a_fault_in_a_step_leaves_nothing_to_be_found,
], ids=lambda test: test.__name__)
def test_as_on_the_other_back_ends(test: Callable[[str], None]) -> None:
    test("cuda")


@pytest.mark.parametrize("sampling", [test_engine_pooling.MEAN, test_engine_pooling.LAST], ids=["mean", "last"])
def test_pooled_states_have_the_same_bits(sampling: SamplingParams) -> None:
    test_engine_pooling.check_equal_alone("cuda", sampling)


def test_pooled_states_are_the_golden_ones() -> None:
    test_engine_pooling.check_golden("cuda", 0.03)


def test_masks_and_bad_words(tmp_path: Path) -> None:
    """The device forbids a word's last token before anybody has read the one before it."""
    test_engine_parameters.check_masks("cuda")
    folder = test_engine_parameters.byte_model(tmp_path)
    test_engine_parameters.check_bad_words("cuda", folder)
    test_engine_parameters.check_bad_words_survive_preemption("cuda", folder)


def test_structured_outputs(tmp_path: Path) -> None:
    """A step's masks are filled between its forward pass and its sampling, by the tokens of the step before."""
    folder = test_engine_parameters.byte_model(tmp_path)
    test_engine_structured.check_every_kind("cuda", folder)
    test_engine_structured.check_preempted_equals_undisturbed("cuda", folder)


def test_thoughts_within_budgets(tmp_path: Path) -> None:
    folder = test_engine_parameters.byte_model(tmp_path)
    test_engine_thoughts.check_budgets("cuda", folder)
    test_engine_thoughts.check_preempted_equals_undisturbed("cuda", folder)


def test_a_fault_in_a_structured_output_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = test_engine_parameters.byte_model(tmp_path)
    test_engine_structured.check_a_fault_is_its_own("cuda", folder, monkeypatch)


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_hits_and_choices(model: str) -> None:
    test_engine_cache.test_a_hit_equals_a_cold_start("cuda", model)
    test_engine_cache.test_choices_equal_each_alone("cuda", model, 20)


def test_the_device_s_table_has_what_the_pool_finds() -> None:
    """After a burst, in a cache that the prompts fill many times over: of who comes alone nothing changes between its
    look-up and its entering, so each hint is right. A block is found by its tokens and by what was before it."""
    async def main() -> None:
        base = ids(48)
        prompts = [base[:16 * (i % 4)] + ids(20 + 3 * i, i) for i in range(8)]
        async with tiny("cuda", kv_cache_memory=16 * BLOCK_BYTES // 2, max_model_len=128) as engine:
            await asyncio.gather(*(engine.complete(prompt, SEEDED) for prompt in prompts))
            burst = engine.stats()
            assert burst.device_prefix_lookups == len(prompts)
            for prompt in [*prompts, *prompts]:
                await engine.complete(prompt[:40], SEEDED)
            stats = engine.stats()
            assert stats.device_prefix_lookups - burst.device_prefix_lookups == 16
            assert stats.device_prefix_lookups_agreeing - burst.device_prefix_lookups_agreeing == 16
            assert stats.prefix_cache_hits - burst.prefix_cache_hits > 100

            await idle(engine)
            system = engine._system
            (blocks,) = system.pool.pool.blocks
            assert len(blocks.evicted) > 20
            runner, index = system.runner, blocks.index
            assert isinstance(runner, DeviceRunner)
            assert runner.prefix_table is not None
            assert index.changes is not None
            changes = [*system.scheduler.policy._device_index.changes, *index.changes.values()]
            runner.change_index(changes)            # what no plan has told yet
            found = [(parent, [key], index._continuations[parent][block_id])
                     for block_id, (parent, key) in enumerate(zip(index._parent_of, index.key_of, strict=True))
                     if parent is not None and key is not None]
            assert runner.look_up(found)() == [1] * len(found)
            assert runner.prefix_table._findable == {block_id for block_id, key in enumerate(index.key_of) if key}
            assert not any(runner.look_up([(parent, keys, (*token_ids[:-1], token_ids[-1] ^ 1))
                                           for parent, keys, token_ids in found])())
            assert not any(runner.look_up([(parent[::-1], keys, token_ids) for parent, keys, token_ids in found])())

    run(main)


def test_hints_are_counted_where_metrics_are_read() -> None:
    async def main() -> None:
        for device, caches in (("cuda", True), ("cuda", False), ("reference", True)):
            async with tiny(device, enable_prefix_caching=caches) as engine:
                for _ in range(3):
                    await engine.complete(ids(40), GREEDY)
                await engine.complete(ids(16), GREEDY)      # whose last token is computed in any case
                text = Metrics(engine).text().decode()
                num_lookups = 3 if caches else 0
                for name in ("device_prefix_lookups_total", "device_prefix_lookups_agreeing_total"):
                    line = f'troupe:{name}{{engine="0",model_name="llama"}} {float(num_lookups)}\n'
                    assert (line in text) == (name in text) == (device == "cuda")

    run(main)


def test_greedy_tokens_are_the_golden_ones() -> None:
    test_engine.test_greedy_tokens_are_the_golden_ones("cuda", "llama")


@pytest.mark.parametrize("fault", [np.nan, np.inf, -np.inf])
def test_a_row_without_usable_logits_fails_alone(fault: float) -> None:
    test_engine.test_a_row_without_usable_logits_fails_alone("cuda", fault)


def test_a_lost_device_ends_the_engine() -> None:
    async def main() -> None:
        async with Engine.start(str(MODELS / "llama"), device="cuda", kv_cache_memory=1 << 20) as engine:
            def lose(*_: object) -> None:
                raise DeviceLost("an illegal memory access was encountered")

            engine._system.runner.on_logits = lose
            done = await asyncio.gather(*(engine.complete(prompt, GREEDY) for prompt in prompts(3)),
                                        return_exceptions=True)
            assert [type(error) for error in done] == [EngineDead] * 3
            assert "illegal memory access" in str(done[0])
            with pytest.raises(EngineDead, match="illegal memory access"):
                await engine.complete([5], GREEDY)

    run(main)


@pytest.mark.parametrize(("config", "message"), [
    ({"dtype": "float32"}, "dtype float32: on CUDA activations are bfloat16 or float16"),
    ({"kv_dtype": "float32"}, "kv_dtype float32: the cuda back end has bf16, int8, fp8"),
    ({"kv_dtype": "bf16", "dtype": "float16"}, "kv_dtype bf16: the cuda back end has fp16, int8, fp8"),
])
def test_settings_that_it_does_not_have_are_refused(config: dict[str, Any], message: str) -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match=message):
            async with tiny("cuda", **config):
                pass

    run(main)


def test_what_runs_beside_is_not_seen_without_deterministic_either() -> None:
    """In the default mode a row may differ in its last bits, so that only tokens with a clear lead are compared."""
    async def main() -> None:
        async with tiny("cuda", deterministic=False) as engine:
            assert engine.info.device == "cuda"
            sampling = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=2)
            alone = [await engine.complete(prompt, sampling) for prompt in prompts(4)]
            together = await asyncio.gather(*(engine.complete(prompt, sampling) for prompt in prompts(4)))
            for one, other in zip(alone, together, strict=True):
                for first, second in zip(one.logprobs, other.logprobs, strict=True):
                    if first.top[0].logprob - first.top[1].logprob < 0.05:
                        break
                    assert first.token_id == second.token_id
            assert facts(alone[0])[0]

    run(main)


REFERENCE_CASES = [
    # (model, weights of several quantized formats, KV cache, logprobs that bfloat16 may move by twice as much)
    ("llama", False, "bf16", 0.3), ("llama", True, "bf16", 0.3), ("gemma3", True, "bf16", 1.9),
    ("mistral-window", False, "bf16", 0.3), ("llama-tied-rope3", False, "int8", 1.3),
    ("gemma3", False, "fp8", 1.9), ("qwen2", True, "bf16", 1.3),
]


@pytest.mark.parametrize(("model", "is_quantized", "kv_dtype", "gap"), REFERENCE_CASES)
def test_greedy_tokens_are_the_references_in_any_company(model: str, is_quantized: bool, kv_dtype: str, gap: float,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """Through tokenizer, scheduler, pool and executor on both sides: several chunks, mixed steps, preemption, every KV
    dtype, every kind of weight. Answers may part where the reference's two likeliest tokens are closer than `gap`."""
    if is_quantized:
        stored = ModelFile.weights
        monkeypatch.setattr(ModelFile, "weights", lambda file: quantized(stored(file)))
    sampling = SamplingParams(max_tokens=28, temperature=0, ignore_eos=True, logprobs=2)
    asked = prompts(6, seed=3)

    async def main() -> None:
        async with tiny("reference", model, kv_cache_memory=1 << 24,
                        kv_dtype="float32" if kv_dtype == "bf16" else kv_dtype) as engine:
            expected = [await engine.complete(prompt, sampling) for prompt in asked]
        async with tiny("cuda", model, kv_dtype=kv_dtype, kv_cache_memory=1 << 24) as engine:
            runner = engine._system.runner
            little = 10 * sum(runner.ops.kv_block_bytes(group, kv_dtype) for group in runner.groups)
        async with tiny("cuda", model, kv_dtype=kv_dtype, kv_cache_memory=little, max_model_len=96,
                        max_num_batched_tokens=24) as engine:
            got = await asyncio.gather(*(engine.complete(prompt, sampling) for prompt in asked))
            # Those that take more tokens than their window do not hold: the others wait.
            assert engine.stats().num_preemptions > 0 or model in ("gemma3", "mistral-window")
        num_equal = 0
        for one, other in zip(expected, got, strict=True):
            for wanted, token_id in zip(one.logprobs, other.token_ids, strict=True):
                if token_id != wanted.token_id:
                    assert wanted.top[0].logprob - wanted.top[1].logprob < gap
                    break
                num_equal += 1
        assert num_equal >= 60, f"only {num_equal} of 168 tokens to compare"

    run(main)
