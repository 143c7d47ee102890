"""Parameters that change what is sampled, where an answer ends, and what a prompt becomes, through the whole engine."""
from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from api.engine import Completion, Engine, ParameterError, SamplingParams
from tests.api.test_engine import BLOCK_BYTES, GREEDY, MODELS, SEEDED, facts, run, tiny
from tests.weights.tiny_tokenizers import CHATML, byte_level, sentencepiece, write_folder

TOKENIZER = byte_level()
PROMPT = list(range(5, 25))
USER = {"role": "user", "content": "hi"}


def token_id(text: str) -> int:
    found = TOKENIZER.token_to_id(text)
    assert isinstance(found, int)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_model(tmp_path_factory.mktemp("model"))


def byte_model(folder: Path) -> Path:
    """The tiny model with bytes for tokens, and ChatML with a switch."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(MODELS / "llama" / name, folder)
    template = "{% if shout %}LOUD {{ shout }}\n{% endif %}" + CHATML
    return write_folder(folder, TOKENIZER, tokenizer_config={"chat_template": template, "eos_token": "<|im_end|>"})


@asynccontextmanager
async def texts(folder: Path, **config: Any) -> AsyncIterator[Engine]:
    async with tiny("reference", str(folder), **config) as engine:
        yield engine


def only(*tokens: str, **changes: Any) -> SamplingParams:
    """Sampling that can say these tokens alone."""
    return SamplingParams(**{"temperature": 0, "max_tokens": 8, "ignore_eos": True,
                             "allowed_token_ids": tuple(map(token_id, tokens)), **changes})


# What is sampled


def check_masks(device: str) -> None:
    """No token but the allowed ones, no bad word, alone and in a batch; others are as they were."""
    async def main() -> None:
        allowed = tuple(range(3, 200, 7))
        choosy = replace(SEEDED, allowed_token_ids=allowed)
        async with tiny(device) as engine:
            free = await engine.complete(PROMPT, SEEDED)
            alone = await engine.complete(PROMPT, choosy)
            assert set(alone.token_ids) <= set(allowed)
            both = await asyncio.gather(engine.complete(PROMPT, choosy), engine.complete(PROMPT, SEEDED))
            assert [facts(one) for one in both] == [facts(alone), facts(free)]
            only_two = await engine.complete(PROMPT, replace(GREEDY, allowed_token_ids=(7, 9), logprobs=5))
            assert set(only_two.token_ids) <= {7, 9}
            assert any(top.token_id not in (7, 9) for logprob in only_two.logprobs for top in logprob.top), \
                "what is reported is the model's own"

    run(main)


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_only_allowed_tokens_are_sampled(device: str) -> None:
    check_masks(device)


def check_bad_words(device: str, folder: Path) -> None:
    """Answers that hold a word do no more once it is bad, and differ from there on; preempted ones too."""
    async def main() -> None:
        sampling = replace(SEEDED, allowed_token_ids=tuple(map(token_id, "abc")), repetition_penalty=1.0,
                           frequency_penalty=0.0, max_tokens=40, logprobs=None)
        bad = replace(sampling, bad_words=("ab", "ccc", "ba"))
        async with tiny(device, str(folder), max_num_seqs=4, kv_cache_memory=None) as engine:
            free, kept = [await engine.complete("x", params) for params in (sampling, bad)]
            assert set(free.text) == set("abc")
            assert "ab" in free.text
            assert not any(word in kept.text for word in bad.bad_words)
            assert set(kept.text) == set("abc")
            assert await engine.complete("x", replace(sampling, bad_words=("xyz",))) == free
            begin = next(index for index in range(40) if free.text[index:index + 2] in ("ab", "ba"))
            ends = min(begin + 1, free.text.find("ccc") + 2 if "ccc" in free.text else 40)
            assert kept.text[:ends] == free.text[:ends]
            many = await asyncio.gather(*(engine.complete("x", params) for params in (bad, sampling, bad)))
            assert [one.text for one in many] == [kept.text, free.text, kept.text]
            never = await engine.complete("ab", replace(bad, bad_words=("c",)))
            assert set(never.text) <= set("ab"), "a word of one token"

    run(main)


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_bad_words_are_not_in_the_answer(device: str, folder: Path) -> None:
    check_bad_words(device, folder)


def check_bad_words_survive_preemption(device: str, folder: Path) -> None:
    async def main() -> None:
        sampling = replace(SEEDED, allowed_token_ids=tuple(map(token_id, "abc")), bad_words=("ab", "bc", "aa"),
                           max_tokens=60, logprobs=None)
        prompts = [text * 20 for text in "xyz"]
        async with tiny(device, str(folder)) as engine:
            alone = [(await engine.complete(prompt, sampling)).text for prompt in prompts]
            assert len(set(alone)) == 3
        memory = 9 * BLOCK_BYTES // (2 if device == "cuda" else 1)      # there a number has two bytes
        async with tiny(device, str(folder), kv_cache_memory=memory, max_model_len=96, max_num_seqs=3) as engine:
            together = await asyncio.gather(*(engine.complete(prompt, sampling) for prompt in prompts))
            assert engine.stats().num_preemptions > 0
        assert [one.text for one in together] == alone

    run(main)


def test_bad_words_survive_preemption(folder: Path) -> None:
    check_bad_words_survive_preemption("reference", folder)


def test_a_word_is_bad_with_and_without_a_space_before_it(folder: Path) -> None:
    """As in vLLM: the second spelling only where it is as many other tokens."""
    async def main() -> None:
        async with texts(folder) as engine:
            for word in ("w", " w"):
                answer = await engine.complete("x", only("w", "\u0120w", "a", bad_words=(word,)))
                assert answer.text == "a" * 8
            answer = await engine.complete("x", only("h", "\u0120", bad_words=("h",)))
            assert "h" not in answer.text
            with pytest.raises(ParameterError, match="bad_words: have .* tokens together, at most 1024"):
                await engine.complete("x", SamplingParams(bad_words=("~" * 200,) * 1 + tuple(
                    chr(65 + i) * 200 for i in range(10))))

    run(main)


@pytest.mark.parametrize(("changes", "field"), [
    ({"allowed_token_ids": ()}, "allowed_token_ids"), ({"allowed_token_ids": 5}, "allowed_token_ids"),
    ({"allowed_token_ids": (True,)}, "allowed_token_ids"), ({"bad_words": "abc"}, "bad_words"),
    ({"bad_words": (" ",)}, "bad_words"), ({"bad_words": (5,)}, "bad_words"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 1.0}, "truncate_prompt_tokens"),
    ({"include_stop_str_in_output": None}, "include_stop_str_in_output")])
def test_what_is_wrong_is_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ParameterError) as error:
        SamplingParams(**changes)
    assert error.value.field == field


# Where an answer ends


def stopped(folder: Path, ask: Callable[[bool], SamplingParams]) -> list[Completion]:
    """Without and with the stop in the output."""
    answers: list[Completion] = []

    async def main() -> None:
        async with texts(folder) as engine:
            answers.extend([await engine.complete("x", ask(include)) for include in (False, True)])
            for include, answer in zip((False, True), answers, strict=True):
                deltas = [delta.text async for delta in engine.generate("x", ask(include))]
                assert "".join(deltas) == answer.text

    run(main)
    assert [answer.finish for answer in answers] == ["stop", "stop"]
    assert answers[0].token_ids == answers[1].token_ids
    return answers


def test_a_stop_string_in_the_output(folder: Path) -> None:
    without, with_stop = stopped(folder, lambda include: only("h", stop=("hhh",), include_stop_str_in_output=include))
    assert (without.text, with_stop.text, with_stop.stop_reason) == ("", "hhh", "hhh")


def test_what_follows_a_stop_string_in_its_token_is_not_in_the_output(folder: Path) -> None:
    """The token "hel" holds the stop "he" and more."""
    without, with_stop = stopped(folder, lambda include: only("hel", stop=("elh",), include_stop_str_in_output=include))
    assert (without.text, with_stop.text) == ("h", "helh")


def test_a_stop_token_in_the_output(folder: Path) -> None:
    """Its text, and what was held back before it; a control token's only where they are shown."""
    stop_id = token_id("<think>")
    without, with_stop = stopped(folder, lambda include: only(
        "<think>", stop_token_ids=(stop_id,), include_stop_str_in_output=include))
    assert (without.text, with_stop.text, with_stop.stop_reason) == ("", "<think>", stop_id)
    for skip, text in ((True, ""), (False, "<|im_end|>")):
        without, with_stop = stopped(folder, lambda include, skip=skip: only(  # type: ignore[misc]
            "<|im_end|>", ignore_eos=False, include_stop_str_in_output=include, skip_special_tokens=skip))
        assert (without.text, with_stop.text, with_stop.stop_reason) == ("", text, None)


def test_a_control_token_that_is_spelled_as_a_stop_string_in_the_output(folder: Path) -> None:
    without, with_stop = stopped(folder, lambda include: only(
        "<|im_start|>", stop=("<|im_start|>",), include_stop_str_in_output=include))
    assert (without.text, with_stop.text, with_stop.stop_reason) == ("", "<|im_start|>", "<|im_start|>")


# What a prompt becomes


def test_a_prompt_is_cut_only_where_its_caller_allows_it(folder: Path) -> None:
    async def main() -> None:
        async with texts(folder, max_model_len=64) as engine:
            one = SamplingParams(max_tokens=1, temperature=0)
            long = "abcdefghij" * 20
            with pytest.raises(ParameterError, match="^prompt: "):
                await engine.complete(long, one)
            cut = await engine.complete(long, replace(one, truncate_prompt_tokens=5))
            assert cut.prompt_token_ids == tuple(TOKENIZER.encode("fghij").ids)
            assert cut.num_truncated_tokens == 195
            assert cut.usage.num_prompt_tokens == 5
            short = await engine.complete("fghij", replace(one, truncate_prompt_tokens=5))
            assert (short.num_truncated_tokens, short.text) == (0, cut.text)
            by_ids = await engine.complete(list(range(5, 105)), replace(one, truncate_prompt_tokens=3))
            assert (by_ids.prompt_token_ids, by_ids.num_truncated_tokens) == ((102, 103, 104), 97)
            for max_tokens, num_kept in ((None, 63), (1, 63), (10, 54), (63, 1)):
                fits = await engine.complete(long, replace(one, truncate_prompt_tokens=-1, max_tokens=max_tokens))
                assert len(fits.prompt_token_ids) == num_kept
            chat = await engine.complete([{"role": "user", "content": long}], replace(one, truncate_prompt_tokens=30))
            assert engine.decode(chat.prompt_token_ids).endswith("<|im_start|>assistant\n")
            for keep, max_tokens in ((65, 1), (-1, 64)):
                with pytest.raises(ParameterError, match="^truncate_prompt_tokens: "):
                    await engine.complete(long, replace(one, truncate_prompt_tokens=keep, max_tokens=max_tokens))

    run(main)


def test_a_text_that_is_cut_still_begins_as_texts_do(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(MODELS / "llama" / name, tmp_path)
    tokenizer = sentencepiece()
    write_folder(tmp_path, tokenizer, tokenizer_config={"bos_token": "<s>", "add_bos_token": True})

    async def main() -> None:
        async with texts(tmp_path) as engine:
            cut = SamplingParams(max_tokens=1, truncate_prompt_tokens=3, prompt_logprobs=0)
            answer = await engine.complete("hi hi hi hi hi", cut)
            hi = tokenizer.token_to_id("\u2581hi")
            assert answer.prompt_token_ids == (tokenizer.token_to_id("<s>"), hi, hi)
            assert len(answer.prompt_logprobs) == 3
            assert (await engine.complete("hi hi", replace(cut, truncate_prompt_tokens=1))).prompt_token_ids == (hi,)

    run(main)


@pytest.mark.parametrize("content", ["OK!\n", "OK! ", "", " OK", "\n\n", "a<|im_end|>b", "{{ x }}"])
def test_the_last_message_is_continued_as_it_is(folder: Path, content: str) -> None:
    """FAULTS C08: no end of turn behind it, and its white space kept."""
    messages = [USER, {"role": "assistant", "content": content}]
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}

    async def main() -> None:
        async with texts(folder) as engine:
            rendered = await engine.render(messages, **options)
            assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n" + content
            ids = await engine.tokenize(messages, **options)
            assert engine.decode(ids) == rendered
            assert ids.count(token_id("<|im_end|>")) == 1, "what the content spells is text"
            answer = await engine.complete(messages, only("h"), **options)
            assert list(answer.prompt_token_ids) == ids
            with pytest.raises(ParameterError, match="^continue_final_message: "):
                await engine.complete(messages, continue_final_message=True)
            with pytest.raises(ParameterError, match="^continue_final_message: "):
                await engine.complete("text", add_generation_prompt=False, continue_final_message=True)

    run(main)


def test_a_template_gets_what_its_caller_has_for_it(folder: Path) -> None:
    async def main() -> None:
        async with texts(folder) as engine:
            rendered = await engine.render([USER], chat_template_kwargs={"shout": "<|im_end|>", "unused": [1]})
            assert rendered.startswith("LOUD <|im_end|>\n<|im_start|>user")
            ids = await engine.tokenize([USER], chat_template_kwargs={"shout": "<|im_end|>"})
            assert ids.count(token_id("<|im_end|>")) == 1, "control tokens are the template's own"
            for name in ("messages", "tools", "add_generation_prompt", "eos_token", "raise_exception"):
                for ask in (engine.complete, engine.tokenize, engine.render):
                    with pytest.raises(ParameterError, match=f"^chat_template_kwargs: {name} is not"):
                        await ask([USER], chat_template_kwargs={name: "x"})
            for bad in ({"a": object()}, {"a": "\ud800"}):
                with pytest.raises(ParameterError, match="^chat_template_kwargs: "):
                    await engine.render([USER], chat_template_kwargs=bad)
            with pytest.raises(ParameterError, match="^chat_template_kwargs: "):
                await engine.complete("text", chat_template_kwargs={"shout": 1})

    run(main)


def test_a_template_that_leaves_the_last_message_out_cannot_continue_it(folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(folder / name, tmp_path)
    write_folder(tmp_path, TOKENIZER, tokenizer_config={"chat_template": "{{ messages[0].content }}"})

    async def main() -> None:
        async with texts(tmp_path) as engine:
            with pytest.raises(ParameterError, match="messages: the chat template leaves the last message out"):
                await engine.render([USER, USER], add_generation_prompt=False, continue_final_message=True)

    run(main)
