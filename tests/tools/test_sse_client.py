from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tools.scripted_server import EVENTS_HEAD, Exchange, scripted_server
from tools.sse_client import BodyDecoder, EventParser, ServerError, get_json, post_events, server_root


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(place % (len(data) + 1) for place in cuts)})
    return [data[start:end] for start, end in zip(places, places[1:], strict=False)]


# --- the event parser


@given(st.sampled_from([b"\n", b"\r\n", b"\r"]), st.lists(st.integers(0, 10_000)))
def test_events_do_not_depend_on_how_the_bytes_are_cut(newline: bytes, cuts: list[int]) -> None:
    lines = [b": a comment", b"", b"event: x", b"id: 1", b"data: one", b"", b"data:two", b"data:  lines", b"data", b"",
             b"", "data: zwölf 日本".encode(), b"retry: 5", b"", b"datax: no", b"", b"data: unfinished"]
    stream = newline.join(lines)
    parser = EventParser()
    events = [event for part in cut(stream, cuts) for event in parser.feed(part)]
    assert events == ["one", "two\n lines\n", "zwölf 日本"]


def test_an_event_comes_with_its_last_byte() -> None:
    parser = EventParser()
    assert parser.feed(b"data: a\r\n\r") == ["a"]
    assert parser.feed(b"\n") == []
    assert parser.feed(b"data: b\n\n") == ["b"]
    assert parser.feed(b"") == []


def test_unicode_line_separators_and_bad_utf8_stay_inside_an_event() -> None:
    assert EventParser().feed("data: a\u2028b\x85c\x0bd\n\n".encode()) == ["a\u2028b\x85c\x0bd"]
    assert EventParser().feed(b"data: \xff\xfe\n\n") == ["\ufffd\ufffd"]


# --- framing


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.lists(st.integers(0, 10_000)))
def test_chunks_do_not_depend_on_how_the_bytes_are_cut(chunks: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(b"%X;ext=1\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\nTrailer: x\r\n\r\n"
    decoder = BodyDecoder({"transfer-encoding": "chunked"})
    parts = cut(stream, cuts)
    body = b""
    for number, part in enumerate(parts):
        assert not decoder.complete, number
        body += decoder.feed(part)
    assert body == b"".join(chunks)
    assert decoder.complete
    decoder.end()


@pytest.mark.parametrize("stream", [b"xyz\r\n", b"\r\n", b"-1\r\nx", b"+5\r\n", b"0x5\r\n", b"1_0\r\n",
                                    b"f" * 16 + b"\r\n", b"3\r\nabcd\r\n", b"1" * 70_000])
def test_malformed_chunks_are_refused(stream: bytes) -> None:
    with pytest.raises(ServerError, match="chunk"):
        BodyDecoder({"transfer-encoding": "chunked"}).feed(stream)


@pytest.mark.parametrize("length", ["-1", "1e3", "", "5, 5", "9" * 30])
def test_malformed_lengths_are_refused(length: str) -> None:
    with pytest.raises(ServerError, match="content-length"):
        BodyDecoder({"content-length": length})


def test_a_body_ends_with_its_length_or_the_connection() -> None:
    fixed = BodyDecoder({"content-length": "5"})
    assert fixed.feed(b"abc") == b"abc"
    assert not fixed.complete
    with pytest.raises(ServerError, match="before the answer was complete"):
        fixed.end()
    assert fixed.feed(b"defgh") == b"de"
    assert fixed.complete
    assert BodyDecoder({"content-length": "0"}).complete
    open_end = BodyDecoder({})
    assert open_end.feed(b"abc") == b"abc"
    assert not open_end.complete
    open_end.end()
    assert open_end.complete


# --- URLs


@pytest.mark.parametrize(("url", "root"), [
    ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
    ("http://127.0.0.1:8000/", "http://127.0.0.1:8000"),
    ("http://localhost:8000/v1", "http://localhost:8000"),
    ("https://host/prefix/v1/", "https://host/prefix"),
    ("http://[::1]:8000/v1", "http://[::1]:8000"),
])
def test_roots(url: str, root: str) -> None:
    assert server_root(url) == root


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://host", "http://", "http://host:port", "http://host:0",
                                 "http://host:99999", "http://host/?a=b", "http://host/#x", "http://ho st", "http://[::1",
                                 "http://host/\r\nX-Evil: 1", "http://höst"])
def test_what_is_no_server_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="--url"):
        server_root(url)


# --- against a socket


def collect(handle: Callable[[Exchange], Awaitable[None]], body: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    async def run() -> list[dict[str, Any]]:
        async with scripted_server(handle) as root:
            return [event async for event in post_events(root + "/v1/completions", body or {"prompt": "x"})]
    return asyncio.run(run())


def answers(data: bytes) -> Callable[[Exchange], Awaitable[None]]:
    async def handle(exchange: Exchange) -> None:
        exchange.writer.write(data)
    return handle


def test_a_stream_and_what_the_server_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "key-1")
    seen: list[Exchange] = []

    async def handle(exchange: Exchange) -> None:
        seen.append(exchange)
        exchange.writer.write(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n")
        exchange.begin_events()
        for byte in b'data: {"a": "\xe6\x97\xa5"}\r\n\r\n: ping\n\ndata: {"b": 2}\n\n':
            exchange.chunk(bytes([byte]))
        exchange.chunk(b"data: [DONE]\n\n")
        await exchange.wait_until_left()        # [DONE] is enough: the client does not wait for the last chunk

    assert collect(handle, {"prompt": [1, 2]}) == [{"a": "日"}, {"b": 2}]
    assert (seen[0].method, seen[0].path, seen[0].body) == ("POST", "/v1/completions", {"prompt": [1, 2]})
    assert seen[0].headers["authorization"] == "Bearer key-1"
    assert seen[0].headers["host"].startswith("127.0.0.1:")


def test_a_key_that_is_no_header_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a\r\nX-Evil: 1")
    with pytest.raises(ServerError, match="OPENAI_API_KEY"):
        collect(answers(b""))


@pytest.mark.parametrize("framing", [b"Connection: close\r\n\r\n", b"Content-Length: 15\r\n\r\n"])
def test_streams_without_chunks(framing: bytes) -> None:
    assert collect(answers(EVENTS_HEAD + framing + b'data: {"a":1}\n\n')) == [{"a": 1}]


@pytest.mark.parametrize(("data", "message"), [
    (EVENTS_HEAD + b'Transfer-Encoding: chunked\r\n\r\nf\r\ndata: {"a":1}\n\n', "before the answer was complete"),
    (EVENTS_HEAD + b"Content-Length: 99\r\n\r\ndata: x", "before the answer was complete"),
    (EVENTS_HEAD, "before the answer was complete"),
    (b"", "before the answer was complete"),
    (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "does not speak HTTP"),
    (b"HTTP/2 200\r\n\r\n", "does not speak HTTP"),
    (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000 + b"\r\n\r\n", "too long"),
    (b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<html>", "answered text/html"),
    (b"HTTP/1.1 200 OK\r\n\r\n", "answered no content type"),
    (EVENTS_HEAD + b"\r\ndata: {not json\n\n", "not JSON"),
    (EVENTS_HEAD + b"\r\ndata: [1]\n\n", "not a JSON object"),
    (EVENTS_HEAD + b'\r\ndata: {"error": {"message": "out of\\nmemory", "code": 500}}\n\n', "^out of memory$"),
    (EVENTS_HEAD + b'\r\ndata: {"error": "gone"}\n\n', "^gone$"),
])
def test_broken_answers_are_one_clear_line(data: bytes, message: str) -> None:
    with pytest.raises(ServerError, match=message) as caught:
        collect(answers(data))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("document", "message", "code"), [
    ({"error": {"message": "no such\nmodel", "code": "model_not_found"}}, "HTTP 404: no such model", "model_not_found"),
    ({"error": "no"}, "HTTP 404: no", ""),
    ({"object": "error", "message": "nope"}, "HTTP 404: nope", ""),
    ({"detail": "Not Found"}, "HTTP 404: Not Found", ""),
    (["x"], "HTTP 404: ['x']", ""),
])
def test_refusals_show_the_servers_words(document: Any, message: str, code: str) -> None:
    async def handle(exchange: Exchange) -> None:
        exchange.answer_json(404, document)
    with pytest.raises(ServerError) as caught:
        collect(handle)
    assert (str(caught.value), caught.value.status, caught.value.code) == (message, 404, code)


def test_refusals_that_are_no_json() -> None:
    with pytest.raises(ServerError, match="^HTTP 502: <h1>Bad Gateway</h1>$"):
        collect(answers(b"HTTP/1.0 502 Bad Gateway\r\n\r\n<h1>Bad\n Gateway</h1>"))
    with pytest.raises(ServerError, match="^HTTP 307: http://127.0.0.1:[0-9]+/v1/completions$"):
        collect(answers(b"HTTP/1.1 307 Temporary Redirect\r\nLocation: /\r\nContent-Length: 0\r\n\r\n"))


def test_leaving_early_closes_the_connection() -> None:
    left = asyncio.Event()

    async def handle(exchange: Exchange) -> None:
        exchange.begin_events()
        exchange.event({"a": 1})
        await exchange.wait_until_left()
        left.set()

    async def run() -> None:
        async with scripted_server(handle) as root:
            async with aclosing(post_events(root, {})) as events:
                async for _ in events:
                    break
            await left.wait()

    asyncio.run(asyncio.wait_for(run(), 20))


def test_cancelling_closes_the_connection() -> None:
    begun, left = asyncio.Event(), asyncio.Event()

    async def handle(exchange: Exchange) -> None:
        begun.set()
        await exchange.wait_until_left()
        left.set()

    async def run() -> None:
        async with scripted_server(handle) as root:
            async def read() -> None:
                async for _ in post_events(root, {}):
                    raise AssertionError("nothing was sent")
            task = asyncio.create_task(read())
            await begun.wait()
            task.cancel()
            await left.wait()

    asyncio.run(asyncio.wait_for(run(), 20))


def test_nobody_there() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ServerError, match=f"cannot reach http://127.0.0.1:{port}: ") as caught:
        asyncio.run(get_json(f"http://user:secret@127.0.0.1:{port}/v1/models"))
    assert "secret" not in str(caught.value)
    assert caught.value.status is None


def test_a_server_that_does_not_greet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.sse_client.CONNECT_TIMEOUT_S", 0.01)

    async def run() -> None:
        async with scripted_server(answers(b"")) as root:       # it waits for a request that TLS does not send
            await get_json(root.replace("http:", "https:"))
    with pytest.raises(ServerError, match="cannot reach https://127.0.0.1:[0-9]+: no connection within 0.01 s"):
        asyncio.run(run())


def test_documents() -> None:
    async def handle(exchange: Exchange) -> None:
        if exchange.path == "/json":
            exchange.answer_json(200, {"a": [1]})
        elif exchange.path == "/text":
            exchange.writer.write(b"HTTP/1.1 200 OK\r\n\r\nhello")
        else:
            exchange.answer_json(500, {"error": {"message": "no"}})

    async def run() -> None:
        async with scripted_server(handle) as root:
            assert await get_json(root + "/json") == {"a": [1]}
            with pytest.raises(ServerError, match="not JSON"):
                await get_json(root + "/text")
            with pytest.raises(ServerError, match="HTTP 500: no"):
                await get_json(root + "/other")

    asyncio.run(run())
