"""Streams: how they begin and end, what a fault does to one, and what a client that leaves or stalls does."""
from __future__ import annotations

import asyncio
import gc
import http.client
import json
import threading
from dataclasses import replace
from typing import Any, cast

import pytest

from actors.messages import TextDelta
from api.connections import Connection
from api.engine import Engine
from api.exchange import Reply
from api.openai.completions import CompletionWriter
from api.server import create_app
from api.service import Service
from tests.api.fake_engine import INFO, FakeEngine
from tests.api.serving import Answer, Server

CHAT = [{"role": "user", "content": "hi"}]


def test_events_of_a_chat(server: Server) -> None:
    events = server.chat(stream=True, max_tokens=2).events
    assert events.pop() == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""}, {"content": "r"}, {"content": "e"}, {}]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "length"]


def test_each_choice_ends_once(server: Server) -> None:
    """FAULTS S07."""
    events = server.complete(prompt=["a", "bbbb", "cc"], n=3, stream=True).events
    assert events.pop() == "[DONE]"
    ended: dict[int, str] = {}
    for event in events:
        choice = json.loads(event)["choices"][0]
        assert choice["index"] not in ended
        if choice["finish_reason"] is not None:
            ended[choice["index"]] = choice["finish_reason"]
    assert ended == dict.fromkeys(range(9), "stop")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_answer_cut_inside_a_character(server: Server, path: str) -> None:
    """FAULTS S05: valid JSON in UTF-8, both modes alike, and logprobs carry the token's own bytes."""
    body: dict[str, Any] = {"prompt": "BYTES", "messages": [{"role": "user", "content": "BYTES"}], "max_tokens": 2}
    body["logprobs"] = True if "chat" in path else 1
    choice = server.request("POST", path, body).json["choices"][0]
    text = choice["message"]["content"] if "chat" in path else choice["text"]
    assert text == "\ufffd"
    assert choice["finish_reason"] == "length"
    if "chat" in path:
        assert [token["bytes"] for token in choice["logprobs"]["content"]] == [[0xe2], [0x82]]
    else:
        assert choice["logprobs"]["tokens"] == ["bytes:\\xe2", "bytes:\\x82"]
    streamed = ""
    for event in server.request("POST", path, {**body, "stream": True}).events[:-1]:
        part = json.loads(event)["choices"][0]
        streamed += part["delta"].get("content", "") if "chat" in path else part["text"]
    assert streamed == text


def test_fault_after_the_headers_is_one_event(server: Server, engine: FakeEngine) -> None:
    """FAULTS S09: the stream says so and ends; what it says holds nothing from inside; others go on."""
    other = threading.Thread(target=lambda: others.append(server.complete(prompt="HOLD", stream=True).events))
    others: list[list[str]] = []
    other.start()
    engine.wait_for(lambda: engine.states == ["running"])
    events = server.complete(prompt="FAIL", stream=True).events
    engine.release()
    other.join()
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == "re "
    error = json.loads(events[-1])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "server_error"
    for inner in ("secret", "ZeroDivision", ".py", "Traceback"):
        assert inner not in events[-1]
    assert others[0][-1] == "[DONE]"
    assert len(others[0]) == len("re HOLD") + 2


def test_fault_of_a_plain_answer(server: Server) -> None:
    """FAULTS O09: that request gets a 5xx that holds nothing from inside; the next is served."""
    answer = server.complete(prompt=["ok", "FAIL"])
    assert answer.status == 500
    assert answer.error["type"] == "server_error"
    assert b"secret" not in answer.body
    assert b"ZeroDivision" not in answer.body


def test_fault_of_one_completion_ends_the_others(server: Server, engine: FakeEngine) -> None:
    events = server.complete(prompt=["HOLD", "FAIL"], stream=True).events
    assert "error" in json.loads(events[-1])
    engine.wait_for(lambda: engine.states == ["aborted", "aborted"])


@pytest.mark.parametrize("stream", [False, True])
def test_rejected_prompt_among_good_ones(server: Server, engine: FakeEngine, stream: bool) -> None:
    """It is named, with a status, whatever the others have done already."""
    answers: list[Answer] = []
    prompts = ["quick", "HOLD", "REFUSE"]
    thread = threading.Thread(target=lambda: answers.append(server.complete(prompt=prompts, n=2, stream=stream)))
    thread.start()
    engine.wait_for(lambda: engine.states == ["finished"] * 2 + ["running"] * 2 + ["waiting"] * 2)
    engine.release()
    thread.join()
    answers.append(server.complete(prompt=["a", "b", "c", ""], stream=stream))
    for answer, message in zip(answers, ["prompt[2]: is refused", "prompt[3]: is empty"], strict=True):
        assert answer.status == 400
        assert (answer.error["param"], answer.error["message"]) == (message.partition(":")[0], message)
    assert set(engine.states) <= {"finished", "aborted"}


def test_a_stream_does_not_wait_for_prompts_that_wait_for_their_turn(server: Server, engine: FakeEngine) -> None:
    with server.post("/v1/completions", {"prompt": ["HOLD", "quick"], "stream": True}) as connection:
        data = b""
        while b"finish_reason\":\"stop" not in data:
            data += connection.recv(4096)
        assert data.startswith(b"HTTP/1.1 200")
        assert engine.states == ["running", "finished"]
        engine.release()


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_aborts_all_its_completions(server: Server, stream: bool) -> None:
    """FAULTS S14: those that wait in the queue too, before any is computed."""
    engine = FakeEngine(replace(INFO, max_num_seqs=1))
    server.use(engine)
    busy = server.post("/v1/completions", {"prompt": "HOLD"})
    engine.wait_for(lambda: engine.states == ["running"])
    num_prompt_tokens = engine.num_prompt_tokens
    with server.post("/v1/completions", {"prompt": [f"p{i}" for i in range(8)], "stream": stream}):
        engine.wait_for(lambda: engine.states == ["running", *["waiting"] * 8])
    engine.wait_for(lambda: engine.states == ["running", *["aborted"] * 8])
    assert engine.num_prompt_tokens == num_prompt_tokens
    engine.release()
    assert busy.recv(1024).startswith(b"HTTP/1.1 200")
    busy.close()


@pytest.mark.parametrize("body", [{"prompt": "ENDLESS"}, {"prompt": ["ENDLESS", "ENDLESS b"], "n": 2}])
@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_aborts_what_runs(server: Server, engine: FakeEngine, body: Any, stream: bool) -> None:
    with server.post("/v1/completions", {**body, "stream": stream}) as connection:
        if stream:
            assert connection.recv(1024)
        engine.wait_for(lambda: all(call.num_deltas > 3 for call in engine.calls) and engine.calls != [])
    engine.wait_for(lambda: set(engine.states) == {"aborted"})


def test_events_are_written_where_they_come(server: Server, engine: FakeEngine,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the first and the last; a client of HTTP/1.0, for whom chunks have no form, gets the same bytes."""
    num_written = 0
    write_chunk = Connection.write_chunk

    def counted(connection: Connection, data: bytes) -> None:
        nonlocal num_written
        num_written += 1
        write_chunk(connection, data)

    monkeypatch.setattr(Connection, "write_chunk", counted)
    body = json.dumps({"model": "fake", "prompt": "abcdef", "stream": True})
    texts, counts = [], []
    for version in ("1.1", "1.0"):
        num_written = 0
        with server.connect() as connection:
            connection.sendall(f"POST /v1/completions HTTP/{version}\r\nHost: x\r\nConnection: close\r\n"
                               f"Content-Length: {len(body)}\r\n\r\n{body}".encode())
            response = http.client.HTTPResponse(connection)
            response.begin()
            lines = response.read().decode().splitlines()
        assert lines.count("data: [DONE]") == 1
        texts.append([json.loads(line[6:])["choices"][0]["text"] for line in lines if line.startswith("data: {")])
        counts.append(num_written)
    assert texts == [[*"re abcdef", ""]] * 2
    assert counts == [len("re abcdef") - 1, 0]


def test_a_fault_in_writing_ends_its_own_stream(server: Server, engine: FakeEngine,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the engine's deltas arrive, which is no request's own task."""
    events = CompletionWriter.events

    def broken(writer: CompletionWriter, index: int, delta: TextDelta) -> bytes:
        if delta.text == "!":
            raise ZeroDivisionError("in /secret/writer.py")
        return events(writer, index, delta)

    monkeypatch.setattr(CompletionWriter, "events", broken)
    shown = server.complete(prompt="ab!cd", stream=True).events
    assert "".join(json.loads(event)["choices"][0]["text"] for event in shown[:-1]) == "re ab"
    assert json.loads(shown[-1])["error"]["type"] == "server_error"
    assert "secret" not in shown[-1]
    engine.wait_for(lambda: engine.states == ["aborted"])
    assert server.complete(prompt="abcd", stream=True).events[-1] == "[DONE]"


def test_client_that_stalls_stops_the_reading(server: Server, engine: FakeEngine) -> None:
    """Law 8: nothing is read ahead for a slow client (the engine merges); others are served meanwhile."""
    slow = FakeEngine(token_size=1 << 16)
    server.use(slow)
    with server.post("/v1/completions", {"prompt": "ENDLESS", "stream": True}, receive_bytes=4096):
        slow.wait_for(lambda: slow.calls != [] and slow.calls[0].num_deltas > 3)
        for _ in range(50):
            assert server.complete(prompt="quick").status == 200
        # What sockets buffer is some megabytes; unread text would be 64 KiB for every turn of the server's loop.
        assert slow.calls[0].num_deltas < 400
        assert slow.states[0] == "running"
    slow.wait_for(lambda: slow.states[0] == "aborted")


def test_engine_that_dies(server: Server, engine: FakeEngine) -> None:
    """NOTE: a stream says nothing before its first token. So it is no event here, but a status, that tells."""
    answers: list[Any] = []
    threads = [threading.Thread(target=lambda stream=stream, ask=ask: answers.append(ask("HOLD", stream)))
               for stream in (False, True)
               for ask in (lambda text, stream: server.complete(prompt=text, stream=stream),
                           lambda text, stream: server.chat(text, stream=stream))]
    for thread in threads:
        thread.start()
    engine.wait_for(lambda: engine.states == ["running"] * 4)
    engine.kill()
    for thread in threads:
        thread.join()
    answers += [server.complete(prompt="a"), server.chat(), server.request("GET", "/v1/models")]
    for answer in answers:
        assert answer.status == 503
        assert answer.error["code"] == "engine_dead"
        assert b"secret" not in answer.body
    health = server.request("GET", "/health")
    assert health.status == 503
    assert health.json["status"] == "dead"
    assert b"secret" not in health.body


def test_nothing_is_kept_of_requests_that_ended(server: Server, engine: FakeEngine) -> None:
    """FAULTS O07."""
    for number in range(60):
        if number % 3 == 0:
            server.post("/v1/completions", {"prompt": f"ENDLESS {number}", "stream": number % 2 == 0}).close()
        else:
            server.complete(prompt=f"unique {number}", n=1 + number % 2, top_p=2 if number % 5 == 0 else 1)
    engine.wait_for(lambda: not {"running", "waiting"} & set(engine.states))
    server.wait_until_idle()
    gc.collect()
    assert not any(type(thing) is Reply for thing in gc.get_objects())


async def call_app(engine: FakeEngine, spec_version: str, body: dict[str, Any], leave_by: str) -> None:
    """One request to the application as a server of `spec_version` makes it; the client goes as `leave_by` says."""
    service = Service()
    service.serve(cast("Engine", engine))
    gone = asyncio.Event()
    incoming = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> dict[str, Any]:
        if incoming:
            return incoming.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if leave_by == "send" and message["type"] == "http.response.body":
            raise OSError("the connection is closed")
        if leave_by == "receive":
            gone.set()

    scope: dict[str, Any] = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": spec_version}, "http_version": "1.1",
        "method": "POST", "path": "/v1/completions", "raw_path": b"", "root_path": "", "scheme": "http",
        "query_string": b"", "headers": [], "client": None, "server": None, "state": {}}
    if leave_by == "queue":
        gone.set()
    async with asyncio.timeout(20):
        await create_app(service)(scope, receive, send)
    assert service.num_open == 0


@pytest.mark.parametrize("spec_version", ["2.3", "2.4"])
@pytest.mark.parametrize("leave_by", ["send", "receive", "queue"])
def test_both_ways_of_asgi_to_say_that_the_client_is_gone(spec_version: str, leave_by: str) -> None:
    """Before 2.4 `receive` tells, from 2.4 on `send` raises OSError; a request that sends nothing needs `receive`."""
    engine = FakeEngine()
    word = "HOLD" if leave_by == "queue" else "ENDLESS"
    body = {"prompt": [f"{word} a", f"{word} b"], "stream": True}
    asyncio.run(call_app(engine, spec_version, body, leave_by))
    assert set(engine.states) == {"aborted"}
