"""vLLM's additions to requests, over HTTP: what they change in the reply, and that they reach the engine."""
from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.api.fake_engine import FakeEngine
from tests.api.serving import Server
from tests.api.test_door import door
from tests.api.test_engine_parameters import byte_model, token_id

HI: Any = [{"role": "user", "content": "hi"}]


def test_they_reach_the_engine(client: openai.OpenAI, engine: FakeEngine) -> None:
    client.completions.create(model="fake", prompt="a", extra_body={
        "allowed_token_ids": [1, 2], "bad_words": ["x", "y z"], "include_stop_str_in_output": True,
        "truncate_prompt_tokens": 7})
    sampling = engine.calls[0].sampling
    assert (sampling.allowed_token_ids, sampling.bad_words) == ((1, 2), ("x", "y z"))
    assert sampling.include_stop_str_in_output
    assert sampling.truncate_prompt_tokens == 7


@pytest.mark.parametrize(("fields", "template"), [
    ({}, (True, False, {})), ({"add_generation_prompt": False}, (False, False, {})),
    ({"continue_final_message": True}, (False, True, {})), ({"continue_final_message": False}, (True, False, {})),
    ({"add_generation_prompt": False, "continue_final_message": True}, (False, True, {})),
    ({"chat_template_kwargs": {"enable_thinking": False, "x": [1, {"y": None}]}},
     (True, False, {"enable_thinking": False, "x": [1, {"y": None}]}))])
def test_what_the_template_is_told_reaches_the_engine(server: Server, engine: FakeEngine, fields: dict[str, Any],
                                                      template: Any) -> None:
    assert server.chat("a", n=2, **fields).status == 200
    assert [call.template for call in engine.calls] == [template] * 2


# Usage


@pytest.mark.parametrize("include_usage", [False, True])
def test_every_chunk_has_the_usage_so_far(client: openai.OpenAI, include_usage: bool) -> None:
    options: Any = {"include_usage": include_usage, "continuous_usage_stats": True}
    chunks = list(client.completions.create(model="fake", prompt="abc", max_tokens=3, stream=True,
                                            stream_options=options))
    if include_usage:
        assert chunks[-1].choices == []
        last = chunks.pop().usage
        assert last is not None
        assert last.prompt_tokens_details is not None
    assert all(chunk.choices for chunk in chunks)
    counts = [(chunk.usage.prompt_tokens, chunk.usage.completion_tokens, chunk.usage.total_tokens)
              for chunk in chunks if chunk.usage is not None]
    assert counts == [(3, 1, 4), (3, 2, 5), (3, 3, 6), (3, 3, 6)]


def test_usage_so_far_is_each_choice_s_own(client: openai.OpenAI) -> None:
    create: Any = client.chat.completions.create
    totals: dict[int, int] = {}
    for chunk in create(model="fake", messages=HI, stream=True, n=2, max_tokens=4,
                        stream_options={"include_usage": True, "continuous_usage_stats": True}):
        if not chunk.choices:
            assert (chunk.usage.prompt_tokens, chunk.usage.completion_tokens) == (3, 8)
            continue
        index = chunk.choices[0].index
        assert chunk.usage.prompt_tokens == 3
        assert chunk.usage.completion_tokens >= totals.get(index, 0)
        totals[index] = chunk.usage.completion_tokens
    assert totals == {0: 4, 1: 4}


# Echo


@pytest.mark.parametrize("stream", [False, True])
def test_echo_of_a_chat_is_the_turn_that_goes_on(server: Server, stream: bool) -> None:
    def text(role: str, content: Any) -> str:
        messages = [*HI, {"role": role, "content": content}]
        answer = server.request("POST", "/v1/chat/completions", {
            "messages": messages, "echo": True, "stream": stream, "continue_final_message": True, "max_tokens": 2})
        if not stream:
            return str(answer.json["choices"][0]["message"]["content"])
        return "".join(json.loads(event)["choices"][0]["delta"].get("content", "") for event in answer.events[:-1])

    assert text("assistant", "So ") == "So re"
    assert text("assistant", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]) == "abre"
    assert text("assistant", None) == "re"
    assert text("user", "So ") == "re", "it is another's turn"


# Through the whole engine


@pytest.mark.parametrize("stream", [False, True])
def test_a_cut_prompt_is_told_of(server: Server, tmp_path: Path, stream: bool) -> None:
    folder = byte_model(tmp_path)

    def told(path: str, **fields: Any) -> list[int | None]:
        body = {"prompt": ["a" * 500, "b"], "messages": [{"role": "user", "content": "a" * 500}], "max_tokens": 2,
                "stream": stream, "temperature": 0, "ignore_eos": True, **fields}
        answer = server.request("POST", path, body)
        assert answer.status == 200, answer.body
        if not stream:
            return [choice.get("num_truncated_prompt_tokens") for choice in answer.json["choices"]]
        choices = [json.loads(event)["choices"][0] for event in answer.events[:-1]]
        found: dict[int, int | None] = {}
        for choice in choices:
            if "num_truncated_prompt_tokens" in choice:
                assert choice["index"] not in found, "once"
                found[choice["index"]] = choice["num_truncated_prompt_tokens"]
        return [found.get(index) for index in range(1 + max(choice["index"] for choice in choices))]

    def ask() -> None:
        assert told("/v1/completions", truncate_prompt_tokens=20) == [480, 0]
        assert told("/v1/completions", prompt="b") == [None]
        chat = told("/v1/chat/completions", truncate_prompt_tokens=-1, n=2)
        assert chat[0] is not None
        assert chat[0] > 250
        assert chat[1] == chat[0]
        answer = server.complete(prompt="a" * 500)
        assert (answer.status, answer.error["param"]) == (400, "prompt")
        answer = server.complete(prompt="a" * 500, truncate_prompt_tokens=257)
        assert (answer.status, answer.error["param"]) == (400, "truncate_prompt_tokens")

    async def main() -> None:
        async with asyncio.timeout(60), door(server, folder, max_model_len=256):
            await asyncio.to_thread(ask)

    asyncio.run(main())


def test_masks_stops_and_templates_over_http(server: Server, tmp_path: Path) -> None:
    folder = byte_model(tmp_path)

    def ask() -> None:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            only_h = {"allowed_token_ids": [token_id("h")], "ignore_eos": True}
            answer = client.completions.create(model="fake", prompt="x", max_tokens=5, extra_body=only_h)
            assert answer.choices[0].text == "hhhhh"
            answer = client.completions.create(model="fake", prompt="x", max_tokens=9, stop="hhh", extra_body={
                **only_h, "include_stop_str_in_output": True})
            assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("hhh", "stop")
            a_or_b = {"allowed_token_ids": [token_id("a"), token_id("b")], "ignore_eos": True,
                      "bad_words": ["ab", "bb"]}
            answer = client.completions.create(model="fake", prompt="x", max_tokens=30, extra_body=a_or_b, seed=5)
            assert answer.choices[0].text.lstrip("b") == "a" * (30 - answer.choices[0].text.startswith("b"))
            with pytest.raises(openai.BadRequestError) as too_many:
                client.completions.create(model="fake", prompt="x", extra_body={
                    "bad_words": ["\u00fc" * length for length in range(250, 256)]})
            assert too_many.value.param == "bad_words"
            create: Any = client.chat.completions.create
            chat = create(model="fake", messages=HI, max_tokens=1, extra_body={
                "chat_template_kwargs": {"shout": "x"}, "return_token_ids": True})
            ids = chat.model_dump()["prompt_token_ids"]
            told = server.request("POST", "/detokenize", {"tokens": ids}).json["prompt"]
            assert told.startswith("LOUD x\n")
            with pytest.raises(openai.BadRequestError) as reserved:
                create(model="fake", messages=HI, extra_body={"chat_template_kwargs": {"messages": []}})
            assert reserved.value.param == "chat_template_kwargs"

    async def main() -> None:
        async with asyncio.timeout(60), door(server, folder, max_model_len=256):
            await asyncio.to_thread(ask)

    asyncio.run(main())


def test_an_answer_that_no_token_is_left_for(server: Server, tmp_path: Path) -> None:
    """Refused, before it runs where that can be known; the engine goes on."""
    folder = byte_model(tmp_path)

    def ask() -> None:
        answer = server.complete(prompt="x", allowed_token_ids=[token_id("h")], bad_words=["h", "i"])
        assert (answer.status, answer.error["param"]) == (400, "allowed_token_ids")
        answer = server.complete(prompt="x", allowed_token_ids=[token_id("i")], bad_words=["ii"])
        assert (answer.status, answer.error["param"]) == (400, "allowed_token_ids")
        assert server.complete(prompt="x", max_tokens=2).status == 200

    async def main() -> None:
        async with asyncio.timeout(60), door(server, folder, max_model_len=256):
            await asyncio.to_thread(ask)

    asyncio.run(main())
