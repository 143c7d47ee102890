"""Answers of a wanted form, through the whole engine: every kind, and what else a request may ask for beside it."""
from __future__ import annotations

import asyncio
import json
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from actors import grammars
from api.engine import Completion, Engine, ParameterError, RequestFailed, SamplingParams
from tests.api.test_engine import BLOCK_BYTES, run, tiny
from tests.api.test_engine_parameters import byte_model, texts, token_id

HOT = SamplingParams(temperature=2.0, max_tokens=250)
SCHEMA: dict[str, Any] = {
    "type": "object", "required": ["name", "size", "tags"], "additionalProperties": False,
    "properties": {"name": {"type": "string", "maxLength": 5},
                   "size": {"type": "integer", "minimum": -5, "maximum": 99},
                   "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 3}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_model(tmp_path_factory.mktemp("model"))


def form(changes: SamplingParams = HOT, /, **wanted: Any) -> SamplingParams:
    return replace(changes, structured_outputs=wanted)      # type: ignore[arg-type]


async def answers(engine: Engine, sampling: SamplingParams, number: int = 8, prompt: str = "x") -> list[Completion]:
    return await asyncio.gather(*(engine.complete(prompt, replace(sampling, seed=seed)) for seed in range(number)))


def check_every_kind(device: str, folder: Path) -> None:
    """All at once, beside answers of no form: each ends in its form, and as it does alone."""
    async def main() -> None:
        kinds = [form(json=SCHEMA), form(json=json.dumps(SCHEMA), disable_any_whitespace=True), form(json_object=True),
                 form(regex="[a-c]{3}-[0-9]{1,4}"), form(choice=["yes", "no", "né \"\\ 月"]),
                 form(grammar='root ::= "a" [0-9]? "b"'), form(grammar='start: "<" NUMBER ">"\nNUMBER: /[0-9]{2}/'),
                 replace(HOT, max_tokens=30)]
        async with tiny(device, str(folder), max_num_seqs=8, kv_cache_memory=None, max_model_len=256) as engine:
            alone = [await engine.complete("x", replace(kind, seed=number)) for number, kind in enumerate(kinds)]
            together = await asyncio.gather(*(engine.complete("x", replace(kind, seed=number))
                                              for number, kind in enumerate(kinds)))
            assert [one.token_ids for one in together] == [one.token_ids for one in alone]
            spaced, bare, anything, pattern, choice, gbnf, lark, _ = together
            for answer in (spaced, bare):
                assert answer.finish == "stop"
                jsonschema.validate(json.loads(answer.text), SCHEMA)
            assert not re.search(r"\s", re.sub('"[^"]*"', "", bare.text))
            assert anything.text.startswith("{")
            assert re.fullmatch("[a-c]{3}-[0-9]{1,4}", pattern.text)
            assert choice.text in ("yes", "no", "né \"\\ 月")
            assert re.fullmatch("a[0-9]?b", gbnf.text)
            assert re.fullmatch("<[0-9]{2}>", lark.text)

    run(main)


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_every_kind_is_followed_alone_and_in_a_batch(device: str, folder: Path) -> None:
    check_every_kind(device, folder)


def check_preempted_equals_undisturbed(device: str, folder: Path) -> None:
    """The matcher is made anew from what is known of the answer."""
    async def main() -> None:
        sampling = form(replace(HOT, max_tokens=60), regex="([a-f]{7}-){9}")
        prompts = [text * 20 for text in "xyz"]
        async with tiny(device, str(folder)) as engine:
            alone = [(await engine.complete(prompt, replace(sampling, seed=3))).text for prompt in prompts]
        memory = 9 * BLOCK_BYTES // (2 if device == "cuda" else 1)      # there a number has two bytes
        async with tiny(device, str(folder), kv_cache_memory=memory, max_model_len=96, max_num_seqs=3) as engine:
            together = await asyncio.gather(*(engine.complete(prompt, replace(sampling, seed=3))
                                              for prompt in prompts))
            assert engine.stats().num_preemptions > 0
        assert [one.text for one in together] == alone
        assert all(re.fullmatch("([a-f]{7}-)*[a-f]{0,6}", text) for text in alone)
        assert max(map(len, alone)) > 40

    run(main)


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_preempted_equals_undisturbed(device: str, folder: Path) -> None:
    check_preempted_equals_undisturbed(device, folder)




def test_choices_and_cache_hits_equal_a_cold_start(folder: Path) -> None:
    async def main() -> None:
        sampling = form(json=SCHEMA)
        async with texts(folder, kv_cache_memory=None, max_model_len=256, enable_prefix_caching=False) as engine:
            cold = await answers(engine, sampling, 3, "long " * 8)
        async with texts(folder, kv_cache_memory=None, max_model_len=256) as engine:
            await engine.complete("long " * 8, SamplingParams(max_tokens=1))
            warm = await answers(engine, sampling, 3, "long " * 8)
            assert min(one.usage.num_cached_tokens for one in warm) >= 16
            assert [one.text for one in warm] == [one.text for one in cold]

    run(main)


def test_the_end_comes_where_the_form_is_complete_and_no_other_way_is_left(folder: Path) -> None:
    """min_tokens and ignore_eos hold while the form can go on, and end with it."""
    async def main() -> None:
        async with texts(folder, max_num_seqs=8) as engine:
            free = await answers(engine, form(regex="a{1,9}"))
            assert all(one.finish == "stop" and 1 <= len(one.text) <= 9 for one in free)
            assert min(len(one.text) for one in free) < 7
            for changes in ({"min_tokens": 7}, {"ignore_eos": True}, {"min_tokens": 30}):
                held = await answers(engine, form(replace(HOT, **changes), regex="a{1,9}"))
                least = 7 if changes == {"min_tokens": 7} else 9
                assert all(one.finish == "stop" and least <= len(one.text) <= 9 for one in held)
                assert all(one.stop_reason is None for one in held)
            cut = await engine.complete("x", form(replace(HOT, max_tokens=5, ignore_eos=True), regex="a{1,9}"))
            assert (cut.text, cut.finish) == ("aaaaa", "length")

    run(main)


def test_stop_strings_and_ids_end_an_answer_before_its_form_does(folder: Path) -> None:
    async def main() -> None:
        async with texts(folder) as engine:
            by_string = await engine.complete("x", form(replace(HOT, stop=("-",)), regex="[ab]{4}-[ab]{4}"))
            assert re.fullmatch("[ab]{4}", by_string.text)
            assert (by_string.finish, by_string.stop_reason) == ("stop", "-")
            stop = token_id("-")
            by_id = await engine.complete("x", form(replace(HOT, stop_token_ids=(stop,)), regex="[ab]{4}-[ab]{4}"))
            assert re.fullmatch("[ab]{4}", by_id.text)
            assert (by_id.finish, by_id.stop_reason) == ("stop", stop)

    run(main)


def test_other_parameters_choose_among_what_the_form_allows(folder: Path) -> None:
    async def main() -> None:
        async with texts(folder) as engine:
            biased = form(replace(HOT, logit_bias={token_id("q"): 90}), regex="[a-z]{6}")   # type: ignore[arg-type]
            assert (await engine.complete("x", biased)).text == "qqqqqq"
            allowed = form(replace(HOT, allowed_token_ids=tuple(map(token_id, "bcd")), ignore_eos=True, max_tokens=6),
                           regex="[a-c]*")
            assert re.fullmatch("[bc]{6}", (await engine.complete("x", allowed)).text)
            bad = form(replace(HOT, bad_words=("ab", "ba")), regex="[ab]{9}")
            assert {one.text for one in await answers(engine, bad)} == {"aaaaaaaaa", "bbbbbbbbb"}
            with_logprobs = await engine.complete("x", form(replace(HOT, logprobs=3), choice=["ab"]))
            assert with_logprobs.text == "ab"
            assert any(top.text != one.text for one in with_logprobs.logprobs for top in one.top), "the model's own"

    run(main)


@pytest.mark.parametrize("schema", [{}, {"type": "array"}, {"type": "object", "required": ["a"], "properties": {
    "a": {"type": "number"}}}])
def test_no_run_of_digits_or_white_space_is_endless(folder: Path, schema: dict[str, Any]) -> None:
    """FAULTS G05."""
    async def main() -> None:
        digits = {token_id(digit): 60.0 for digit in "0123456789"}
        spaces = {token_id(space): 60.0 for space in "\u0120\u0109\u010a"}
        async with texts(folder, kv_cache_memory=None, max_model_len=256) as engine:
            for biases in (digits, spaces):
                sampling = form(replace(HOT, logit_bias=biases), json=schema)       # type: ignore[arg-type]
                for one in await answers(engine, sampling, 4):
                    outside = re.sub(r'"([^"\\]|\\.)*("|$)', '""', one.text)
                    assert not re.search(rf"[0-9]{{{grammars.MAX_DIGITS + 1}}}", outside)
                    assert not re.search(rf"\s{{{grammars.MAX_WHITESPACE + 1}}}", outside)

    run(main)


def test_a_form_that_cannot_be_followed_ends_its_own_request_alone(folder: Path, caplog: pytest.LogCaptureFixture,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    check_a_fault_is_its_own("reference", folder, monkeypatch)
    assert "a grammar can be followed no further" in caplog.text
    assert "could not enter slot" in caplog.text


def check_a_fault_is_its_own(device: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A matcher that fails in the middle, one that cannot be made, and masks that leave nothing."""
    consume, make = grammars.Matcher.advance, grammars.Grammars.matcher

    def advance(matcher: grammars.Matcher, token: int) -> None:
        consume(matcher, token_id("\u0120") if token == token_id("!") else token)

    def matcher(self: grammars.Grammars, wanted: Any, *others: Any) -> grammars.Matcher:
        if wanted.text == "none":
            raise RuntimeError("no memory")
        return make(self, wanted, *others)

    async def main() -> None:
        async with tiny(device, str(folder), max_num_seqs=4, kv_cache_memory=None) as engine:
            good = form(replace(HOT, seed=4), regex="[a-d]{12}")
            alone = await engine.complete("x", good)
            monkeypatch.setattr(grammars.Matcher, "advance", advance)
            monkeypatch.setattr(grammars.Grammars, "matcher", matcher)
            nothing = form(replace(HOT, allowed_token_ids=(token_id("z"),)), regex="[ab]")
            all_of_them = await asyncio.gather(
                *(engine.complete("x", one) for one in (form(regex="a!b"), good, form(regex="none"), nothing)),
                return_exceptions=True)
            assert [type(one) for one in all_of_them] == [RequestFailed, Completion, RequestFailed, ParameterError]
            assert all_of_them[1] == alone
            assert (await engine.complete("x", good)).text == alone.text

    run(main)


def test_limits_that_leave_no_token_are_named(folder: Path) -> None:
    """At once or in the middle: it is the request that cannot be answered, not the engine that failed."""
    z, eos = (token_id("z"),), (token_id("<|im_end|>"),)

    async def main() -> None:
        async with texts(folder) as engine:
            for field, sampling in (
                    ("allowed_token_ids", form(replace(HOT, allowed_token_ids=z), regex="[ab]")),
                    ("allowed_token_ids", form(replace(HOT, allowed_token_ids=z), regex="z[ab]")),
                    ("allowed_token_ids", replace(HOT, allowed_token_ids=eos, min_tokens=2)),
                    ("bad_words", form(replace(HOT, bad_words=("ab",)), choice=["ab"]))):
                with pytest.raises(ParameterError, match=f"{field}: leaves no token") as error:
                    await engine.complete("x", sampling)
                assert error.value.field == field

    run(main)


def test_what_is_compiled_is_kept_for_a_while(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off the loop, once for all that come together, and again for who waited longer than it was kept."""
    compiled: list[str] = []
    compile_it = grammars._with_large_stack

    def counted(work: Any) -> Any:
        compiled.append(threading.current_thread().name.split("_")[0])
        return compile_it(work)

    monkeypatch.setattr(grammars, "_with_large_stack", counted)

    async def main() -> None:
        async with texts(folder, max_num_seqs=2) as engine:
            kept = engine._system.tokenizer.grammars
            await answers(engine, form(choice=["ab", "ac"]), 6)
            assert compiled == ["troupe-encode"]
            monkeypatch.setattr(grammars, "MAX_CACHED", 0)
            assert (await engine.complete("x", form(choice=["gone"]))).text == "gone"
            assert compiled == ["troupe-encode", "troupe-encode", "troupe-device"]
            monkeypatch.setattr(grammars, "MAX_CACHED", 2)
            many = await asyncio.gather(*(engine.complete("x", form(choice=[f"w{i}"])) for i in range(12)))
            assert [one.text for one in many] == [f"w{i}" for i in range(12)]
            assert len(kept._compiled) == 2
            assert kept._num_chars == sum(len(wanted.text) for wanted in kept._compiled)
            monkeypatch.setattr(grammars, "MAX_CACHED_CHARS", 5)
            await engine.complete("x", form(choice=["abc"]))
            assert len(kept._compiled) == 1

    run(main)


def test_a_model_without_an_end_of_sequence_is_refused() -> None:
    async def main() -> None:
        async with tiny("reference") as engine:
            engine._system.tokenizer.grammars._eos_ids.clear()
            with pytest.raises(ParameterError, match="regex: this model has no end-of-sequence token"):
                await engine.complete([5, 6], form(regex="a"))

    run(main)
