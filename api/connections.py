"""uvicorn's connections, with an end for clients that neither finish a request's head nor take what they asked for, and
a short way out for streams."""
from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from starlette.types import Scope

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol as HTTPProtocol
else:
    from uvicorn.protocols.http.auto import AutoHTTPProtocol as HTTPProtocol


_CONNECTION = "troupe.connection"               # in a scope's state


def connections(idle_timeout_s: float | None) -> type[asyncio.Protocol]:
    """For `uvicorn.Config(http=…)`.

    idle_timeout_s: for a request's head to come, and for what is written to be taken up once the socket's buffers are
    full. None: no limit. Bodies are `read_body`'s, and a connection that is idle between requests is uvicorn's own.
    """
    return type("Connection", (Connection,), {"patience_s": idle_timeout_s})


def connection_of(scope: Scope) -> Connection | None:
    """Of a request; None where another server than this one runs the application."""
    connection = scope.get("state", {}).get(_CONNECTION)
    return connection if isinstance(connection, Connection) else None


class Connection(HTTPProtocol):
    patience_s: float | None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.app_state = {**self.app_state, _CONNECTION: self}      # copied into each request's scope
        self._head = _Timer(self)               # runs out if no request comes
        self._reader = _Timer(self)             # runs out if nothing is taken

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head.start()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._head.stop()
        elif not self._head.is_running:     # the next request's head, or what is left of a body that nobody reads
            self._head.start()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reader.start()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._reader.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head.stop()
        self._reader.stop()
        super().connection_lost(exc)


    @property
    def takes_chunks(self) -> bool:
        """Whether `write_chunk` may be called: an answer of unknown length is under way, and its client keeps up."""
        cycle = self.cycle
        return (cycle is not None and cycle.response_started and not cycle.response_complete and not cycle.disconnected
                and cycle.scope["http_version"] == "1.1" and not self.flow.write_paused
                and not self.transport.is_closing())

    def write_chunk(self, data: bytes) -> None:
        """Part of the answer's body, in the one form that HTTP/1.1 has for a body whose length was not said.

        As `send` would write it through all that wraps it, at several times the cost. Source: RFC 9112, section 7.1.
        """
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


class _Timer:
    """Ends its connection when it runs out."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._handle: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        return self._handle is not None

    def start(self) -> None:
        connection = self._connection
        if connection.patience_s is None:
            return
        # NOTE: `abort`, since `close` would wait for the client to take what is written.
        self._handle = connection.loop.call_later(connection.patience_s, connection.transport.abort)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
