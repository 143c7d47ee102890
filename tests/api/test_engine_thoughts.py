"""Thoughts within their budgets through the whole engine, and what else a request may ask for beside them."""
from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from api.engine import Completion, Engine, ParameterError, SamplingParams, Thought
from tests.api.test_engine import BLOCK_BYTES, run, tiny
from tests.api.test_engine_parameters import byte_model, token_id

THOUGHT = Thought("<think>", "</think>", 7)
HOT = SamplingParams(temperature=2.0, max_tokens=40, thought=THOUGHT, ignore_eos=True, skip_special_tokens=False)
OPEN, CLOSED = "x<think>\n", "x"
WILLING = ((token_id("<think>"), 90.0),)                # biases of who begins to think, and does so again and again
END_LENGTH = len("</think>")                            # a token each


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_model(tmp_path_factory.mktemp("model"))


def within(budget: int | None, changes: SamplingParams = HOT, /, **more: Any) -> SamplingParams:
    return replace(changes, thought=replace(THOUGHT, budget=budget), **more)


def check_ended(one: Completion, budget: int, opened: bool) -> None:
    """Random tokens end no thought by themselves."""
    thought, mark, _ = one.text.partition("</think>")
    assert mark, one.text
    assert opened or thought.startswith("<think>")
    assert one.token_ids[budget + (not opened):][:END_LENGTH] == tuple(map(token_id, "</think>"))
    assert one.usage.num_reasoning_tokens == budget


def check_budgets(device: str, folder: Path) -> None:
    """Alone and together, beside answers without one, greedy and not: each is what it is alone."""
    async def main() -> None:
        wanted = [(OPEN, within(0)), (OPEN, within(5)), (CLOSED, within(0, logit_bias=WILLING)),
                  (CLOSED, within(6, logit_bias=WILLING)), (OPEN, within(9, temperature=0.0)),
                  (OPEN, within(None)), (CLOSED, within(3)), (OPEN, replace(HOT, thought=None))]
        async with tiny(device, str(folder), kv_cache_memory=None, max_model_len=128) as engine:
            alone = [await engine.complete(prompt, replace(sampling, seed=number))
                     for number, (prompt, sampling) in enumerate(wanted)]
            together = await asyncio.gather(*(engine.complete(prompt, replace(sampling, seed=number))
                                              for number, (prompt, sampling) in enumerate(wanted)))
            streamed = [[delta async for delta in engine.generate(prompt, replace(sampling, seed=number))]
                        for number, (prompt, sampling) in enumerate(wanted)]
        assert [one.token_ids for one in together] == [one.token_ids for one in alone]
        assert ["".join(delta.text for delta in deltas) for deltas in streamed] == [one.text for one in alone]
        for number, budget in ((0, 0), (1, 5), (2, 0), (3, 6), (4, 9)):
            check_ended(together[number], budget, opened=number not in (2, 3))
        assert [one.usage.num_reasoning_tokens for one in together[5:]] == [40, 0, 0]
        assert all(one.finish == "length" and len(one.token_ids) == 40 for one in together)

    run(main)


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_a_thought_keeps_to_its_budget_alone_and_in_a_batch(device: str, folder: Path) -> None:
    check_budgets(device, folder)


def check_preempted_equals_undisturbed(device: str, folder: Path) -> None:
    """In the thought, in its end and in the form behind it."""
    async def main() -> None:
        sampling = within(17, max_tokens=60, structured_outputs={"regex": "([a-f]{7}-){9}"})
        prompts = [text * 10 + "<think>" for text in "xyz"]
        async with tiny(device, str(folder)) as engine:
            alone = [await engine.complete(prompt, replace(sampling, seed=3)) for prompt in prompts]
        memory = 9 * BLOCK_BYTES // (2 if device == "cuda" else 1)
        async with tiny(device, str(folder), kv_cache_memory=memory, max_model_len=96, max_num_seqs=3) as engine:
            together = await asyncio.gather(*(engine.complete(prompt, replace(sampling, seed=3))
                                              for prompt in prompts))
            assert engine.stats().num_preemptions > 0
        assert [one.text for one in together] == [one.text for one in alone]
        assert [one.usage.num_reasoning_tokens for one in together] == [17] * 3
        assert all("-" in one.text.partition("</think>")[2] for one in alone)

    run(main)


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_preempted_equals_undisturbed(device: str, folder: Path) -> None:
    check_preempted_equals_undisturbed(device, folder)


async def answers(engine: Engine, prompt: str, sampling: SamplingParams, number: int = 6) -> list[Completion]:
    return await asyncio.gather(*(engine.complete(prompt, replace(sampling, seed=seed)) for seed in range(number)))


def test_a_form_comes_behind_the_thought(folder: Path) -> None:
    forms: list[Mapping[str, Any]] = [{"choice": ["yes", "no"]}, {"json": {"type": "array", "maxItems": 0}}]

    async def main() -> None:
        async with tiny("reference", str(folder), kv_cache_memory=None) as engine:
            for form in forms:
                sampling = within(6, structured_outputs=form, ignore_eos=False)
                for one in [*await answers(engine, OPEN, sampling),
                            *await answers(engine, CLOSED, replace(sampling, logit_bias=WILLING))]:
                    thought, mark, rest = one.text.partition("</think>")
                    assert mark
                    assert one.finish == "stop"
                    assert one.usage.num_reasoning_tokens == 6
                    assert "<|" not in thought, "no control token is in a text that a form follows"
                    said = rest.strip(" \n")
                    assert said in ("yes", "no") if "choice" in form else json.loads(said) == []
                unwilling = [(token_id("<think>"), -90.0)]
                for one in await answers(engine, CLOSED, replace(sampling, logit_bias=tuple(unwilling))):
                    assert one.text in ("yes", "no") if "choice" in form else json.loads(one.text) == []
                    assert one.usage.num_reasoning_tokens == 0

    run(main)


def test_choices_and_cache_hits_equal_a_cold_start(folder: Path) -> None:
    async def main() -> None:
        prompt = "long " * 8 + "<think>"

        async def choices(engine: Engine) -> list[Completion]:
            return await asyncio.gather(*(engine.complete(
                prompt, replace(HOT, seed=1), choice=choice, parent_id="p", num_children=3) for choice in range(3)))

        async with tiny("reference", str(folder), enable_prefix_caching=False) as engine:
            cold = await choices(engine)
        async with tiny("reference", str(folder)) as engine:
            await engine.complete(prompt, SamplingParams(max_tokens=1))
            warm = await choices(engine)
            assert min(one.usage.num_cached_tokens for one in warm) >= 16
        assert [one.text for one in warm] == [one.text for one in cold]
        for one in cold:
            check_ended(one, 7, opened=True)

    run(main)


def test_logprobs_are_the_model_s_own(folder: Path) -> None:
    """Of forced tokens too: masks change what is said, not what the model thought of it."""
    async def main() -> None:
        async with tiny("reference", str(folder)) as engine:
            one = await engine.complete(OPEN, within(3, logprobs=2, seed=5))
            assert len(one.logprobs) == len(one.token_ids)
            forced = one.logprobs[3:3 + END_LENGTH]
            assert "".join(token.text for token in forced) == "</think>"
            assert all(token.logprob < -1.0 for token in forced)
            assert any(token.token_id != token.top[0].token_id for token in forced)
            plain = await engine.complete(list(one.prompt_token_ids + one.token_ids[:4]),
                                          SamplingParams(max_tokens=1, logprobs=0, allowed_token_ids=(token_id("/"),)))
            assert plain.logprobs[0].logprob == pytest.approx(forced[1].logprob, abs=1e-5)

    run(main)


def test_min_tokens_and_stops_give_way_to_the_mark_alone(folder: Path) -> None:
    async def main() -> None:
        async with tiny("reference", str(folder)) as engine:
            slash = token_id("/")
            one = await engine.complete(OPEN, within(3, seed=1, min_tokens=40, stop_token_ids=(slash,)))
            check_ended(one, 3, opened=True)
            assert (one.finish, one.token_ids.count(slash)) == ("length", 1), "no stop before min_tokens"
            one = await engine.complete(OPEN, within(3, seed=1, stop_token_ids=(slash,)))
            assert (one.finish, one.stop_reason, len(one.token_ids)) == ("stop", slash, 5)
            one = await engine.complete(OPEN, within(3, seed=1, min_tokens=30, ignore_eos=False))
            assert len(one.token_ids) >= 30
            check_ended(one, 3, opened=True)
            one = await engine.complete(OPEN, within(3, seed=1, stop=("</think>",)))
            assert (one.finish, one.stop_reason, one.usage.num_output_tokens) == ("stop", "</think>", 11)
            one = await engine.complete(OPEN, within(30, seed=1, max_tokens=9))
            assert (one.finish, one.usage.num_reasoning_tokens) == ("length", 9)

    run(main)


@pytest.mark.parametrize(("changes", "field"), [
    ({"allowed_token_ids": (5, 6)}, "allowed_token_ids"), ({"bad_words": ("</think>",)}, "bad_words"),
    ({"bad_words": ("q", "k>")}, "bad_words"),
    ({"thought": Thought("a", "\ud800", 3)}, "thinking_token_budget")])
def test_an_end_that_could_not_be_forced_is_refused(folder: Path, changes: dict[str, Any], field: str) -> None:
    async def main() -> None:
        async with tiny("reference", str(folder)) as engine:
            with pytest.raises(ParameterError) as error:
                await engine.complete(OPEN, replace(HOT, **changes))
            assert error.value.field == field

    run(main)
