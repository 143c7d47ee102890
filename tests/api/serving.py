"""A real server on a real socket, in a thread, and plain HTTP to ask it by."""
from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import uvicorn

from api.connections import connections
from api.engine import Engine
from api.server import create_app
from api.service import DoorConfig, Service
from tests.api.fake_engine import FakeEngine

T = TypeVar("T")

TIMEOUT_S = 20.0


@dataclass
class Answer:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object, checked for its shape."""
        assert self.headers["content-type"] == "application/json"
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert len(self.body) < 16_384
        return cast("dict[str, Any]", error)

    @property
    def events(self) -> list[str]:
        """The data of an event stream's events."""
        assert self.headers["content-type"].startswith("text/event-stream")
        events = self.body.decode().split("\n\n")
        assert events.pop() == "", "the last event is complete"
        return [event.removeprefix("data: ") for event in events]


def request(port: int, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
    """`body`: bytes as they are, anything else as JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection.request(method, path, content, headers or {})
        response = connection.getresponse()
        return Answer(response.status, response.headers, response.read())
    finally:
        connection.close()


class Server:
    """`service` behind uvicorn on a free port of the loopback interface."""

    def __init__(self, config: DoorConfig | None = None) -> None:
        self.service = Service(config)
        self.app = create_app(self.service)
        # NOTE: asyncio turns Nagle's algorithm off where a socket says that it is TCP's, which create_server's does
        # not; with it each answer on a kept connection waits 40 ms for the client's system.
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.bind(("127.0.0.1", 0))
        self._socket.listen()
        self.port: int = self._socket.getsockname()[1]
        self._uvicorn = uvicorn.Server(uvicorn.Config(
            self.app, http=connections(self.service.config.idle_timeout_s), log_config=None,
            access_log=False, lifespan="off", timeout_graceful_shutdown=5))
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._uvicorn.serve(sockets=[self._socket])

    def __exit__(self, *error: object) -> None:
        self._uvicorn.should_exit = True
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive(), "the server ends"

    def use(self, engine: FakeEngine) -> None:
        self.service.serve(cast("Engine", engine))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """In the server's own loop, from another thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(TIMEOUT_S)

    def wait_until_idle(self) -> None:
        """All exchanges are over."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while self.service.num_open:
            assert time.monotonic() < deadline_s, "the requests end"
            self.run(asyncio.sleep(0))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def request(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        return request(self.port, method, path, body, headers)

    def complete(self, **fields: Any) -> Answer:
        return self.request("POST", "/v1/completions", {"model": "fake", **fields})

    def chat(self, content: Any = "hi", **fields: Any) -> Answer:
        messages = [{"role": "user", "content": content}]
        return self.request("POST", "/v1/chat/completions", {"model": "fake", "messages": messages, **fields})

    def connect(self, receive_bytes: int | None = None) -> socket.socket:
        connection = socket.socket()
        if receive_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connection.settimeout(TIMEOUT_S)
        connection.connect(("127.0.0.1", self.port))
        return connection

    def post(self, path: str, body: Any, receive_bytes: int | None = None) -> socket.socket:
        """The open connection after sending; nothing is read."""
        connection = self.connect(receive_bytes)
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
        connection.sendall(head.encode() + content)
        return connection
