"""What users have: the `openai` client, plain and streaming, sync and async, against a real socket."""
from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import openai
import pytest

from tests.api.fake_engine import EOS, INFO, SPECIAL, FakeEngine
from tests.api.serving import Server

MESSAGES: Any = [{"role": "system", "content": "s"}, {"role": "user", "content": "hé"}]


def test_chat_plain(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=MESSAGES)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "fake"
    assert [choice.index for choice in answer.choices] == [0]
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "re s|hé"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is None
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (6, 9, 15)


def test_chat_stream(client: openai.OpenAI) -> None:
    create: Any = client.chat.completions.create
    chunks = list(create(model="fake", messages=MESSAGES, stream=True, stream_options={"include_usage": True}))
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "re s|hé"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == 15
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_chat_async_n(server: Server) -> None:
    async def run() -> tuple[dict[int, str], dict[int, int]]:
        texts: dict[int, str] = {}
        ends: dict[int, int] = {}
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            create: Any = client.chat.completions.create
            stream = await create(model="fake-alias", messages=MESSAGES, stream=True, n=3)
            async for chunk in stream:
                choice = chunk.choices[0]
                assert choice.index not in ends, "nothing comes for a choice after its end"
                texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
                if choice.finish_reason is not None:
                    ends[choice.index] = ends.get(choice.index, 0) + 1
        return texts, ends

    texts, ends = asyncio.run(run())
    assert texts == {0: "re s|hé", 1: "re s|hé", 2: "re s|hé"}
    assert ends == {0: 1, 1: 1, 2: 1}


def test_completions_plain_and_stream_agree(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="fake", prompt="abc", max_tokens=4)
    assert whole.object == "text_completion"
    assert whole.choices[0].text == "re a"
    assert whole.choices[0].finish_reason == "length"
    chunks = list(client.completions.create(model="fake", prompt="abc", max_tokens=4, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "re a"
    assert chunks[-1].choices[0].finish_reason == "length"


def test_completions_prompts_times_n(client: openai.OpenAI, engine: FakeEngine) -> None:
    answer = client.completions.create(model="fake", prompt=["a", "bb"], n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == ["re a", "re a", "re bb", "re bb"]
    assert [(call.prompt, call.choice) for call in engine.calls] == [("a", 0), ("a", 1), ("bb", 0), ("bb", 1)]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3, "a prompt counts once, whatever n is"
    assert answer.usage.completion_tokens == 2 * 5 + 2 * 6


@pytest.mark.parametrize("prompt", ["hi", [104, 105], ["hi"], [[104, 105]]])
def test_completions_prompt_forms(client: openai.OpenAI, prompt: str) -> None:
    assert client.completions.create(model="fake", prompt=prompt).choices[0].text == "re hi"


def test_completions_many_prompts_stream(client: openai.OpenAI) -> None:
    prompts = [f"p{number}" for number in range(20)]
    texts = dict.fromkeys(range(20), "")
    for chunk in client.completions.create(model="fake", prompt=prompts, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {number: f"re p{number}" for number in range(20)}


def test_chat_logprobs(client: openai.OpenAI) -> None:
    create: Any = client.chat.completions.create
    whole = create(model="fake", messages=MESSAGES, logprobs=True, top_logprobs=2, max_tokens=2)
    assert whole.choices[0].logprobs is not None
    content = whole.choices[0].logprobs.content
    assert content is not None
    assert [token.token for token in content] == ["r", "e"]
    assert [token.bytes for token in content] == [[114], [101]]
    assert [len(token.top_logprobs) for token in content] == [2, 2]
    streamed: list[Any] = []
    for chunk in create(model="fake", messages=MESSAGES, logprobs=True, top_logprobs=2, max_tokens=2, stream=True):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content
    assert [token.model_dump() for token in streamed] == [token.model_dump() for token in content]


def test_completions_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="é", logprobs=1, max_tokens=5)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["r", "e", " ", "bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs.token_logprobs == [-0.5] * 5
    assert logprobs.text_offset == [0, 1, 2, 3, 3]
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] == {"r": -0.5}
    none: Any = client.completions.create(model="fake", prompt="é", logprobs=0, max_tokens=1).choices[0].logprobs
    assert none.top_logprobs == [{"r": -0.5}]


def test_echo_with_logprobs_scores_the_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="abc", echo=True, logprobs=1, max_tokens=0)
    choice = answer.choices[0]
    assert choice.text == "abc"
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["a", "b", "c"]
    assert choice.logprobs.token_logprobs == [None, -1.0, -1.0]
    assert choice.logprobs.top_logprobs is not None
    assert choice.logprobs.top_logprobs[0] is None
    assert choice.logprobs.text_offset == [0, 1, 2]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 0)


@pytest.mark.parametrize("prompt", ["abc", [97, 98, 99]])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_echo_stream_is_plain(client: openai.OpenAI, prompt: str, logprobs: int | None) -> None:
    whole = client.completions.create(model="fake", prompt=prompt, echo=True, max_tokens=2, logprobs=logprobs)
    assert whole.choices[0].text == "abcre"
    text, tokens = "", []
    for chunk in client.completions.create(model="fake", prompt=prompt, echo=True, max_tokens=2, logprobs=logprobs,
                                           stream=True):
        text += chunk.choices[0].text
        if chunk.choices[0].logprobs is not None:
            tokens += list(zip(chunk.choices[0].logprobs.tokens or (), chunk.choices[0].logprobs.text_offset or (),
                               strict=True))
    assert text == "abcre"
    assert tokens == ([] if logprobs is None else list(zip("abcre", range(5), strict=True)))


def test_token_ids(client: openai.OpenAI) -> None:
    extra = {"return_token_ids": True}
    answer = client.chat.completions.create(model="fake", messages=MESSAGES[1:], extra_body=extra)
    document = answer.model_dump()
    assert document["prompt_token_ids"] == [SPECIAL, *"hé".encode()]
    assert document["choices"][0]["token_ids"] == [*"re hé".encode(), EOS]
    ids: list[int] = []
    prompt_ids: list[int] = []
    for chunk in client.completions.create(model="fake", prompt="ab", stream=True, extra_body=extra):
        choice = chunk.choices[0].model_dump()
        ids += choice.get("token_ids") or []
        prompt_ids += choice.get("prompt_token_ids") or []
    assert ids == [*b"re ab", EOS]
    assert prompt_ids == [97, 98]


def test_sampling_reaches_the_engine(client: openai.OpenAI, engine: FakeEngine) -> None:
    client.completions.create(
        model="fake", prompt="a", max_tokens=3, top_p=0.5, seed=-1, stop="x", presence_penalty=1, frequency_penalty=-1,
        logit_bias={"257": -100, "0": 1}, user="someone",
        extra_body={"top_k": 2**31, "min_p": 0.1, "min_tokens": 1, "stop_token_ids": [7], "ignore_eos": True,
                    "skip_special_tokens": False, "repetition_penalty": 1.5})
    sampling = engine.calls[0].sampling
    assert (sampling.max_tokens, sampling.top_p, sampling.seed, sampling.stop) == (3, 0.5, -1, ("x",))
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1, 1.5)
    assert sampling.logit_bias == ((257, -100), (0, 1))
    assert (sampling.top_k, sampling.min_p, sampling.min_tokens, sampling.stop_token_ids) == (2**31, 0.1, 1, (7,))
    assert sampling.ignore_eos
    assert not sampling.skip_special_tokens
    assert sampling.temperature == 0.5, "the model's default, where the request is silent"


def test_defaults(client: openai.OpenAI, engine: FakeEngine) -> None:
    client.completions.create(model="fake", prompt="a")
    client.chat.completions.create(model="fake", messages=MESSAGES, temperature=0, stop=[])
    client.chat.completions.create(model="fake", messages=MESSAGES, max_completion_tokens=7)
    client.completions.create(model="fake", prompt="a", extra_body={"min_tokens": 20})
    assert [call.sampling.max_tokens for call in engine.calls] == [16, None, 7, 20]
    assert engine.calls[1].sampling.temperature == 0


def test_the_models_own_max_tokens(client: openai.OpenAI, server: Server) -> None:
    """It holds where a request is silent, and gives way to what a request says."""
    engine = FakeEngine(replace(INFO, default_sampling={"max_tokens": 5}))
    server.use(engine)
    client.completions.create(model="fake", prompt="a")
    client.chat.completions.create(model="fake", messages=MESSAGES)
    client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=9)
    client.chat.completions.create(model="fake", messages=MESSAGES, extra_body={"min_tokens": 20})
    client.completions.create(model="fake", prompt="a", max_tokens=0, echo=True)
    assert [call.sampling.max_tokens for call in engine.calls] == [5, 5, 9, 20, 0]


def test_models(client: openai.OpenAI) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == ["fake", "fake-alias"]
    assert {model.object for model in models} == {"model"}
    assert models[0].model_dump()["max_model_len"] == 4096


def test_errors_are_the_clients_own(client: openai.OpenAI, server: Server) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="nobody", prompt="a")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="fake", prompt="a", top_p=2)
    assert bad.value.param == "top_p"
    with pytest.raises(openai.InternalServerError):
        client.completions.create(model="fake", prompt="FAIL")
    stream = client.completions.create(model="fake", prompt="FAIL", stream=True)
    with pytest.raises(openai.APIError):
        list(stream)
