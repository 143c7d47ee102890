"""A server on a loopback socket that answers with exactly the bytes a test wants."""
from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

EVENTS_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


@dataclass
class Exchange:
    """One request and the connection it came on."""
    method: str
    path: str
    headers: dict[str, str]
    content: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def body(self) -> dict[str, Any]:
        document = json.loads(self.content)
        assert isinstance(document, dict)
        return document

    def chunk(self, data: bytes) -> None:
        """One chunk of a chunked body; empty: its end."""
        self.writer.write(b"%x\r\n%b\r\n" % (len(data), data))

    def begin_events(self) -> None:
        self.writer.write(EVENTS_HEAD + b"Transfer-Encoding: chunked\r\n\r\n")

    def event(self, document: Any) -> None:
        self.chunk(b"data: " + json.dumps(document).encode() + b"\n\n")

    def end_events(self) -> None:
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")

    def answer_json(self, status: int, document: Any) -> None:
        content = json.dumps(document).encode()
        self.writer.write(b"HTTP/1.1 %d Whatever\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
                          % (status, len(content), content))

    async def wait_until_left(self) -> None:
        """Until the client has closed the connection."""
        try:
            while await self.reader.read(1024):
                pass
        except ConnectionError:
            pass


@asynccontextmanager
async def scripted_server(handle: Callable[[Exchange], Awaitable[None]]) -> AsyncIterator[str]:
    """The root URL of a server that reads one request per connection, lets `handle` answer, and closes.

    A failure of `handle` fails the test.
    """
    failures: list[BaseException] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            method, path, _ = (await reader.readuntil(b"\r\n")).decode().split(" ")
            headers = {}
            while line := (await reader.readuntil(b"\r\n")).decode().strip():
                name, _, value = line.partition(": ")
                headers[name.lower()] = value
            content = await reader.readexactly(int(headers.get("content-length", "0")))
            await handle(Exchange(method, path, headers, content, reader, writer))
            await writer.drain()
        except ConnectionError:
            pass                            # the client left, as some tests have it
        except Exception as error:
            failures.append(error)
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    assert not failures, failures
