"""Clients that are slow, answers that take too long, streams that are silent, requests that are taken back.

Time-outs are short here; nothing asserts how long anything took.
"""
from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import openai
import pytest

from api.exchange import PROGRESS_BYTES
from api.service import DoorConfig
from tests.api.fake_engine import FakeEngine
from tests.api.serving import TIMEOUT_S, Answer, Server

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
PERIOD_S = 0.05


def everything(connection: socket.socket) -> bytes:
    """What comes until the server closes."""
    data = b""
    try:
        while part := connection.recv(4096):
            data += part
    except ConnectionError:
        pass
    return data


def read_until(connection: socket.socket, text: bytes, count: int = 1) -> bytes:
    data = b""
    while data.count(text) < count:
        part = connection.recv(4096)
        assert part, data
        data += part
    return data


def pass_time(server: Server, num_periods: int = 4) -> None:
    """As long as another stream takes to have so many comments."""
    with server.post("/v1/completions", {"prompt": "HOLD", "stream": True}) as connection:
        read_until(connection, b": keep-alive\n\n", num_periods)


@pytest.fixture(scope="module")
def impatient() -> Iterator[Server]:
    with Server(DoorConfig(idle_timeout_s=0.3, keep_alive_s=PERIOD_S)) as server:
        server.use(FakeEngine())
        yield server


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", HEAD[:40]])
def test_a_head_that_does_not_come_ends_the_connection(impatient: Server, sent: bytes) -> None:
    with impatient.connect() as connection:
        connection.sendall(sent)
        assert everything(connection) == b""


def test_the_head_of_a_second_request_has_its_time_too(impatient: Server) -> None:
    with impatient.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        read_until(connection, b"ready")
        connection.sendall(b"GET /health HT")
        assert everything(connection) == b""


@pytest.mark.parametrize("sent", [b"", b'{"prompt"', b"x" * (PROGRESS_BYTES + 1)])
def test_a_body_that_does_not_come_is_408(impatient: Server, sent: bytes) -> None:
    with impatient.connect() as connection:
        connection.sendall(HEAD % 100_000 + sent)
        head, _, body = everything(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408")
    assert json.loads(body)["error"]["code"] == "body_too_slow"


def test_a_body_that_comes_drop_by_drop_is_408(impatient: Server) -> None:
    """However short the gaps are."""
    with impatient.connect() as connection:
        connection.sendall(HEAD % 10_000)
        connection.setblocking(False)
        while True:
            try:
                assert connection.recv(4096).startswith(b"HTTP/1.1 408")
                return
            except BlockingIOError:
                with suppress(ConnectionError):     # it may close just now
                    connection.sendall(b" ")
                assert impatient.request("GET", "/health").status == 200


def test_a_long_body_that_comes_steadily_is_read(impatient: Server) -> None:
    body = b'{"prompt": "a"}'.ljust(20 * PROGRESS_BYTES)
    with impatient.connect() as connection:
        connection.sendall(HEAD % len(body))
        for start in range(0, len(body), PROGRESS_BYTES):
            pass_time(impatient, num_periods=1)     # together more than a sender has that brings nothing
            connection.sendall(body[start:start + PROGRESS_BYTES])
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")


def test_a_reader_that_takes_nothing_is_dropped(impatient: Server) -> None:
    """FAULTS: one client costs a bounded buffer for a bounded time. What runs for him is aborted."""
    engine = FakeEngine(token_size=1 << 16)
    impatient.use(engine)
    with impatient.post("/v1/completions", {"prompt": "ENDLESS", "stream": True}, receive_bytes=4096):
        engine.wait_for(lambda: engine.states == ["aborted"])
    impatient.wait_until_idle()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["HOLD", "ENDLESS"])
def test_an_answer_that_takes_too_long(prompt: str, stream: bool) -> None:
    with Server(DoorConfig(request_timeout_s=0.3)) as server:
        server.use(engine := FakeEngine())
        answer = server.complete(prompt=prompt, stream=stream)
        if stream and prompt == "ENDLESS":
            assert answer.status == 200
            error = json.loads(answer.events[-1])["error"]
        else:
            assert answer.status == 504
            error = answer.error
        assert error == {"message": "The answer was not complete after 0.3 s, which is this server's limit.",
                         "type": "server_error", "param": None, "code": "timeout"}
        assert engine.states == ["aborted"]
        assert server.complete(prompt="quick").status == 200


@pytest.fixture(scope="module")
def talkative() -> Iterator[Server]:
    with Server(DoorConfig(keep_alive_s=PERIOD_S)) as server:
        yield server


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_silent_stream_has_comments(talkative: Server, path: str) -> None:
    """Before the first token, while others have theirs, and no more than that."""
    talkative.use(engine := FakeEngine())
    body = {"prompt": "HOLD", "messages": [{"role": "user", "content": "HOLD"}], "stream": True}
    with talkative.post(path, body) as connection:
        begin = read_until(connection, b": keep-alive\n\n")
        assert begin.startswith(b"HTTP/1.1 200")
        assert b"data:" not in begin
        read_until(connection, b": keep-alive\n\n")
        engine.release()
        assert b"event:" not in read_until(connection, b"data: [DONE]\n\n")


def test_a_stream_says_nothing_before_its_status_is_known(talkative: Server) -> None:
    talkative.use(engine := FakeEngine())
    answers: list[Answer] = []
    thread = threading.Thread(target=lambda: answers.append(
        talkative.complete(prompt=["HOLD", "REFUSE"], stream=True)))
    thread.start()
    engine.wait_for(lambda: engine.states == ["running", "waiting"])
    pass_time(talkative)
    engine.release()
    thread.join(TIMEOUT_S)
    assert answers[0].status == 400


def test_a_plain_answer_has_no_comments(talkative: Server) -> None:
    talkative.use(engine := FakeEngine())
    with talkative.post("/v1/completions", {"prompt": "HOLD"}) as connection:
        engine.wait_for(lambda: engine.states == ["running"])
        pass_time(talkative)
        engine.release()
        assert b"keep-alive" not in read_until(connection, b"re HOLD")


def test_the_client_does_not_see_comments(talkative: Server) -> None:
    talkative.use(engine := FakeEngine())
    with openai.OpenAI(base_url=f"{talkative.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(model="fake", prompt="HOLD", stream=True)
        pass_time(talkative)
        engine.release()
        assert "".join(chunk.choices[0].text for chunk in stream) == "re HOLD"


def test_a_fault_after_the_first_comment_is_an_event(talkative: Server) -> None:
    talkative.use(engine := FakeEngine())
    with talkative.post("/v1/completions", {"prompt": "HOLD", "stream": True}) as connection:
        read_until(connection, b": keep-alive\n\n")
        engine.kill()
        assert b"engine_dead" in read_until(connection, b'"code"')
