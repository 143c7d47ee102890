"""A prompt's hidden states, pooled: those of the golden logits, and the same bits however the prompt is computed."""
from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from api.engine import Completion, Engine, ParameterError, RequestFailed, SamplingParams
from tests.api.test_engine import BLOCK_BYTES, GREEDY, MODELS, devices, golden, prompts, run, tiny
from weights.load import open_model
from weights.quant import dequantize

MEAN = SamplingParams(max_tokens=0, pooling="mean")
LAST = replace(MEAN, pooling="last")
LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
both = pytest.mark.parametrize("sampling", [MEAN, LAST], ids=["mean", "last"])


def golden_states() -> tuple[list[int], NDArray[np.float64]]:
    """A prompt, and the final hidden states of its tokens [T, C], out of the logits that PyTorch made of them."""
    expected = golden("llama")
    (weight,) = open_model(MODELS / "llama").weights().head.parts
    head = dequantize(weight).astype(np.float64)            # [V, C]
    states = np.linalg.lstsq(head, expected["logits"][0].astype(np.float64).T, rcond=None)[0].T
    return expected["input_ids"][0].tolist(), states


async def pooled(engine: Engine, prompt: list[int], sampling: SamplingParams) -> tuple[float, ...]:
    completion = await engine.complete(prompt, sampling)
    assert (completion.text, completion.token_ids, completion.finish) == ("", (), "length")
    assert completion.usage.num_prompt_tokens == len(prompt)
    return completion.pooled


def check_golden(device: str, tolerance: float) -> None:
    ids, states = golden_states()

    async def main() -> None:
        # A budget below the prompt's length: the states come from several chunks.
        async with tiny(device, max_num_batched_tokens=8) as engine:
            assert engine.info.hidden_size == states.shape[1]
            for sampling, want in ((MEAN, states.mean(0)), (LAST, states[-1])):
                got = np.array(await pooled(engine, ids, sampling))
                assert np.abs(got - want).max() < tolerance * np.abs(want).max()

    run(main)


@devices
def test_they_are_the_golden_ones(device: str) -> None:
    check_golden(device, 1e-4)


@devices
@both
def test_the_same_bits_alone_batched_chunked_cached_and_preempted(device: str, sampling: SamplingParams) -> None:
    check_equal_alone(device, sampling)


def check_equal_alone(device: str, sampling: SamplingParams) -> None:
    """Beside answers, with a prompt that others have computed, and with too few blocks for all at once."""
    inputs = [*prompts(6), prompts(6)[0], [*prompts(1)[0], 7, 8]]

    async def main() -> None:
        async with tiny(device, enable_prefix_caching=False) as engine:
            alone = [await pooled(engine, prompt, sampling) for prompt in inputs]
        async with tiny(device, max_num_batched_tokens=8, max_model_len=80, kv_cache_memory=8 * BLOCK_BYTES) as engine:
            for _ in range(2):
                answers = [asyncio.create_task(engine.complete(prompt[:9], LONG)) for prompt in prompts(3, seed=1)]
                await asyncio.sleep(0)
                assert list(await asyncio.gather(*(pooled(engine, prompt, sampling) for prompt in inputs))) == alone
                await asyncio.gather(*answers)
            if device != "cuda":
                assert engine.stats().num_preemptions > 0

    run(main)


def test_the_last_state_needs_no_more_than_the_cache_lacks_and_the_mean_all() -> None:
    async def main() -> None:
        async with tiny("reference") as engine:
            prompt = list(range(3, 60))
            await engine.complete(prompt, GREEDY)
            cached = []
            for sampling in (MEAN, LAST):
                completion = await engine.complete(prompt, sampling)
                cached.append(completion.usage.num_cached_tokens)
            assert cached == [0, len(prompt) - 1]

    run(main)


def test_states_that_are_not_finite_fail_their_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with tiny("reference") as engine:
            runner = engine._system.runner
            forward, poisoned = runner.model.forward, [True]

            def nan_once(*args: object) -> NDArray[np.float32]:
                hidden: NDArray[np.float32] = forward(*args)  # type: ignore[arg-type]
                if poisoned.pop() if poisoned else False:
                    hidden = hidden.copy()
                    hidden[-1] = np.nan
                return hidden

            monkeypatch.setattr(runner.model, "forward", nan_once)
            with pytest.raises(RequestFailed, match="not finite"):
                await engine.complete([5, 6, 7], MEAN)
            assert all(np.isfinite(await pooled(engine, [5, 6, 7], MEAN)))

    run(main)


@pytest.mark.parametrize("fields", [{"max_tokens": 1}, {"max_tokens": None}, {"pooling": "max"},
                                    {"prompt_logprobs": 1}])
def test_what_cannot_be_pooled(fields: dict[str, object]) -> None:
    with pytest.raises(ParameterError, match="^pooling: "):
        replace(MEAN, **fields)  # type: ignore[arg-type]


def test_other_answers_have_none() -> None:
    async def main() -> None:
        async with tiny("reference") as engine:
            completion: Completion = await engine.complete([5, 6], GREEDY)
            assert completion.pooled == ()

    run(main)
