from __future__ import annotations

import asyncio
from typing import Any

import pytest

from actors.messages import Usage
from tests.tools.scripted_server import Exchange, scripted_server
from tools.openai_stream import Chunk, first_model, parse_chunk, stream_completion
from tools.sse_client import ServerError


def choice(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, **fields}]}


@pytest.mark.parametrize(("event", "chunk"), [
    # completions
    (choice(text="a", finish_reason=None), Chunk(True, True, "a")),
    (choice(text="", finish_reason=None), Chunk(True, True)),                   # half a character
    (choice(text="", finish_reason="stop"), Chunk(True, False, "", "stop")),    # the end alone
    (choice(text="a", finish_reason="length"), Chunk(True, True, "a", "length")),
    # chat
    (choice(delta={"role": "assistant", "content": ""}), Chunk(True, False)),
    (choice(delta={"role": "assistant", "content": None}), Chunk(True, False)),
    (choice(delta={"role": "assistant", "content": "a"}), Chunk(True, True, "a")),
    (choice(delta={"content": "a"}), Chunk(True, True, "a")),
    (choice(delta={"content": ""}), Chunk(True, True)),
    (choice(delta={"reasoning_content": "hm"}), Chunk(True, True)),
    (choice(delta={"tool_calls": [{}]}), Chunk(True, True)),
    (choice(delta={}, finish_reason="stop"), Chunk(True, False, "", "stop")),
    # usage
    ({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}}, Chunk(False, False, usage=Usage(3, 5))),
    ({"usage": {"prompt_tokens": 3, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 2}}},
     Chunk(False, False, usage=Usage(3, 5, 2))),
    ({"usage": None}, Chunk(False, False)),
    ({}, Chunk(False, False)),
])
def test_chunks(event: dict[str, Any], chunk: Chunk) -> None:
    assert parse_chunk(event) == chunk


@pytest.mark.parametrize("event", [{"choices": 5}, {"choices": [None]}, {"choices": {"a": 1}}, choice(delta=[1]),
                                   {"usage": {"completion_tokens": 1}}, {"usage": {"prompt_tokens": "many"}}])
def test_what_is_no_chunk(event: dict[str, Any]) -> None:
    with pytest.raises(ServerError, match="no completion chunk"):
        parse_chunk(event)


def test_the_endpoint_follows_the_body_and_a_stream_must_finish() -> None:
    seen: list[tuple[str, dict[str, Any]]] = []

    async def handle(exchange: Exchange) -> None:
        seen.append((exchange.path, exchange.body))
        exchange.begin_events()
        exchange.event(choice(text="a", finish_reason="stop" if exchange.path == "/v1/completions" else None))
        exchange.end_events()

    async def run() -> None:
        async with scripted_server(handle) as root:
            assert [chunk.text async for chunk in stream_completion(root, {"prompt": "x"})] == ["a"]
            with pytest.raises(ServerError, match="without a finish_reason"):
                assert [chunk async for chunk in stream_completion(root, {"messages": []})]

    asyncio.run(run())
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    assert seen == [("/v1/completions", {"prompt": "x", **streamed}),
                    ("/v1/chat/completions", {"messages": [], **streamed})]


@pytest.mark.parametrize(("listing", "name"), [
    ({"data": [{"id": "m"}, {"id": "n"}]}, "m"), ({"data": []}, None), ([], None)])
def test_the_first_model(listing: Any, name: str | None) -> None:
    async def handle(exchange: Exchange) -> None:
        exchange.answer_json(200, listing)

    async def run() -> str:
        async with scripted_server(handle) as root:
            return await first_model(root)

    if name is None:
        with pytest.raises(ServerError, match="lists no model"):
            asyncio.run(run())
    else:
        assert asyncio.run(run()) == name
