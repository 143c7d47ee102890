"""A small HTTP/1.1 client over asyncio streams for OpenAI-compatible servers: JSON and server-sent events.

One connection a request, closed when the answer is over or the caller leaves: that is how a server sees an abort.
Redirects, proxies and compression are not handled.
Source: RFC 9112 (HTTP/1.1); WHATWG HTML, "Server-sent events".
"""
from __future__ import annotations

import asyncio
import json
import os
import re
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

CONNECT_TIMEOUT_S = 10.0
MAX_LINE_BYTES = 64 * 1024                  # of a header or a chunk's size
MAX_DOCUMENT_BYTES = 16 * 1024 * 1024       # of an answer that is no event stream
READ_BYTES = 64 * 1024


class ServerError(RuntimeError):
    """The server could not be reached, refused, or broke off; str() is one line. `status` is None without an answer."""

    def __init__(self, message: str, status: int | None = None, code: str = "") -> None:
        super().__init__(" ".join(message.split()))
        self.status = status
        self.code = code                    # OpenAI's error.code, e.g. "context_length_exceeded"


def server_root(url: str) -> str:
    """`http://host:port` or `http://host:port/v1`, checked, without a trailing slash and /v1.

    Raises: ValueError for anything that is not such a URL.
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:                      # a port that is no number, brackets that do not close
        usable = False
    if not usable or parts.query or parts.fragment or not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError(f"--url: {url!r} is not of the form http://HOST:PORT")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


async def get_json(url: str) -> Any:
    """The JSON document at `url`. Raises: ServerError."""
    async with _exchange("GET", url, b"") as answer:
        content = await answer.read_all()
    if answer.status != 200:
        raise _refusal(answer, content)
    try:
        return json.loads(content)
    except ValueError:
        raise ServerError(f"{url} answered something that is not JSON") from None


async def post_events(url: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
    """Post `body` as JSON and yield the JSON objects of the event stream that comes back, up to `[DONE]`.

    Close the generator (contextlib.aclosing) to leave early. Raises: ServerError.
    """
    async with _exchange("POST", url, json.dumps(body).encode()) as answer:
        if answer.status != 200:
            raise _refusal(answer, await answer.read_all())
        content_type = answer.headers.get("content-type", "")
        if not content_type.lower().startswith("text/event-stream"):
            raise ServerError(f"{url} answered {content_type or 'no content type'} where an event stream was due")
        parser = EventParser()
        while data := await answer.read():
            for payload in parser.feed(data):
                if payload == "[DONE]":
                    return
                yield _event(payload)


class EventParser:
    """Bytes of an event stream in, the data of whole events out, however the bytes are cut."""

    def __init__(self) -> None:
        self._line = b""                    # the unfinished line
        self._after_return = False          # a "\n" that comes next belongs to the "\r" before
        self._data: list[bytes] = []        # data lines of the unfinished event

    def feed(self, data: bytes) -> list[str]:
        if self._after_return and data:
            data = data.removeprefix(b"\n")
            self._after_return = False
        if not data:
            return []
        self._after_return = data.endswith(b"\r")
        lines = (self._line + data).splitlines(keepends=True)       # bytes: at \n, \r and \r\n only
        self._line = b"" if lines[-1].endswith((b"\n", b"\r")) else lines.pop()
        events = []
        for line in lines:
            line = line.rstrip(b"\r\n")
            if line == b"data" or line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data).decode("utf-8", "replace"))
                self._data = []
        return events                       # comments and the fields event, id and retry mean nothing here


class BodyDecoder:
    """The bytes of a message body out of what the connection brings: chunks, a length, or up to the end.

    Raises: ServerError for a malformed length or chunk.
    """

    def __init__(self, headers: dict[str, str]) -> None:
        self.complete = False
        self._chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        self._remaining: int | None = None  # bytes left of the body or the chunk; None: up to the connection's end
        self._part = "size"                 # of a chunk: size, data, end, trailer
        self._buffer = b""
        if self._chunked:
            self._remaining = 0
        elif (length := headers.get("content-length")) is not None:
            if not re.fullmatch(r"[0-9]{1,18}", length):
                raise ServerError(f"the server sent a malformed content-length {length[:40]!r}")
            self._remaining = int(length)
            self.complete = self._remaining == 0

    def feed(self, data: bytes) -> bytes:
        if self._chunked:
            return self._feed_chunks(data)
        if self._remaining is not None:
            data = data[:self._remaining]
            self._remaining -= len(data)
            self.complete = self._remaining == 0
        return data

    def end(self) -> None:
        """The connection ended. Raises: ServerError where the body had not."""
        if self._remaining is not None and not self.complete:
            raise ServerError("the server closed the connection before the answer was complete")
        self.complete = True

    def _feed_chunks(self, data: bytes) -> bytes:
        assert self._remaining is not None, "a chunk has a size"
        self._buffer += data
        body = b""
        while not self.complete:
            if self._part == "data":
                part = self._buffer[:self._remaining]
                if not part:
                    break
                body += part
                self._buffer = self._buffer[len(part):]
                self._remaining -= len(part)
                if self._remaining == 0:
                    self._part = "end"
                continue
            line, newline, rest = self._buffer.partition(b"\n")
            if len(line) > MAX_LINE_BYTES:
                raise ServerError("the server sent a chunk size or trailer that is too long")
            if not newline:
                break
            self._buffer = rest
            line = line.removesuffix(b"\r")
            if self._part == "size":
                size = line.partition(b";")[0].strip()
                if not re.fullmatch(rb"[0-9a-fA-F]{1,15}", size):
                    raise ServerError(f"the server sent a malformed chunk size {size[:40]!r}")
                self._remaining = int(size, 16)
                self._part = "data" if self._remaining else "trailer"
            elif self._part == "end":
                if line:
                    raise ServerError("the server sent a chunk that is longer than its size says")
                self._part = "size"
            elif not line:                  # the empty line after the trailers
                self.complete = True
        return body


class _Answer:
    def __init__(self, url: str, status: int, headers: dict[str, str], reader: asyncio.StreamReader) -> None:
        self.url = url
        self.status = status
        self.headers = headers              # names in lower case
        self._reader = reader
        self._decoder = BodyDecoder(headers)

    async def read(self) -> bytes:
        """The next bytes of the body; b"" at its end."""
        while not self._decoder.complete:
            data = await self._reader.read(READ_BYTES)
            if not data:
                self._decoder.end()
            elif body := self._decoder.feed(data):
                return body
        return b""

    async def read_all(self) -> bytes:
        content = b""
        while data := await self.read():
            content += data
            if len(content) > MAX_DOCUMENT_BYTES:
                raise ServerError(f"{self.url} answered more than {MAX_DOCUMENT_BYTES} bytes", self.status)
        return content


@asynccontextmanager
async def _exchange(method: str, url: str, content: bytes) -> AsyncIterator[_Answer]:
    """Send one request and give the answer's head; its body is read inside the block, which ends the connection."""
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    origin = f"{parts.scheme}://{_authority(url)}"
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(
                parts.hostname, parts.port or (443 if secure else 80),
                ssl=ssl.create_default_context() if secure else None, limit=MAX_LINE_BYTES)
    except TimeoutError:
        raise ServerError(f"cannot reach {origin}: no connection within {CONNECT_TIMEOUT_S:g} s") from None
    except OSError as error:
        raise ServerError(f"cannot reach {origin}: {error.strerror or error}") from None
    try:
        writer.write(_request_head(method, url, len(content)) + content)
        await writer.drain()
        status, headers = await _read_head(reader)
        yield _Answer(url, status, headers, reader)
    except (asyncio.IncompleteReadError, ConnectionError):
        raise ServerError(f"{origin} closed the connection before the answer was complete") from None
    finally:
        writer.transport.abort()            # awaits nothing, so that a cancelled caller leaves at once


def _authority(url: str) -> str:
    return urlsplit(url).netloc.rpartition("@")[2]


def _request_head(method: str, url: str, num_bytes: int) -> bytes:
    lines = [f"{method} {urlsplit(url).path} HTTP/1.1", f"Host: {_authority(url)}",
             "Accept: text/event-stream, application/json", "Connection: close"]
    if method == "POST":
        lines += ["Content-Type: application/json", f"Content-Length: {num_bytes}"]
    if key := os.environ.get("OPENAI_API_KEY"):
        if not key.isascii() or not key.isprintable():
            raise ServerError("OPENAI_API_KEY has characters that an HTTP header cannot carry")
        lines.append(f"Authorization: Bearer {key}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii")


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    try:
        while True:
            line = await reader.readuntil(b"\n")
            match = re.match(rb"HTTP/1\.[01] (\d{3})(?: |\r?\n)", line)
            if match is None:
                raise ServerError(f"the server does not speak HTTP/1.1: {line[:80]!r}")
            headers: dict[str, str] = {}
            while line := (await reader.readuntil(b"\n")).strip():
                name, _, value = line.decode("latin-1").partition(":")
                headers[name.strip().lower()] = value.strip()
            status = int(match[1])
            if status >= 200:               # 1xx are announcements before the answer
                return status, headers
    except asyncio.LimitOverrunError:
        raise ServerError("the server does not speak HTTP/1.1: a line of its answer is too long") from None


def _event(payload: str) -> dict[str, Any]:
    try:
        event = json.loads(payload)
    except ValueError:
        raise ServerError(f"the server sent an event that is not JSON: {payload[:80]!r}") from None
    if not isinstance(event, dict):
        raise ServerError(f"the server sent an event that is not a JSON object: {payload[:80]!r}")
    if event.get("error"):
        message, code = _error_fields(event)
        raise ServerError(message, code=code)
    return event


def _refusal(answer: _Answer, content: bytes) -> ServerError:
    try:
        message, code = _error_fields(json.loads(content))
    except ValueError:
        message, code = content[:300].decode("utf-8", "replace"), ""
    return ServerError(f"HTTP {answer.status}: {message or answer.url}", answer.status, code)


def _error_fields(document: Any) -> tuple[str, str]:
    """(message, code) of an error document: OpenAI's form, FastAPI's `detail`, or a plain `error` or `message`."""
    if not isinstance(document, dict):
        return str(document)[:300], ""
    error = document.get("error")
    if isinstance(error, dict):
        return str(error.get("message") or error)[:300], str(error.get("code") or "")
    return str(error or document.get("message") or document.get("detail") or document)[:300], ""
