"""Server-sent events out, and the two things a stream needs: several sources in one, and an end when the client goes.

Source: WHATWG HTML, "Server-sent events"; ASGI 3.0, HTTP connection scope.
"""
from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar, cast

import orjson
from starlette.types import Receive

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"              # a comment: readers skip it


class ClientGone(Exception):
    """The client closed its connection before the answer was complete."""


def event(value: Any) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def named_event(name: str, value: Any) -> bytes:
    return b"event: " + name.encode() + b"\n" + event(value)


async def until_client_goes(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """`work`'s result; `work` is cancelled when the client disconnects, whether or not anything is being sent.

    Raises: ClientGone.
    """
    working = asyncio.create_task(work)
    listening = asyncio.create_task(_client_gone(receive))
    try:
        await asyncio.wait((working, listening), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        working.cancel()
        listening.cancel()
        await asyncio.gather(working, listening, return_exceptions=True)


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def deliver_merged(streams: Sequence[AsyncIterator[T]],
                         deliver: Callable[[list[tuple[int, T]]], Awaitable[None]]) -> None:
    """Give `deliver` the items of all `streams` as they come, with their stream's index, all that are ready at once.

    One item of a stream waits at most while `deliver` runs: what comes meanwhile is merged by its source.
    Every stream is closed at the end, whatever ends it. Raises: what a stream or `deliver` raises.
    """
    if len(streams) == 1:
        async with _closing(streams[0]) as stream:
            async for item in stream:
                await deliver([(0, item)])
        return

    ready: list[tuple[int, T]] = []
    changed = asyncio.Event()                   # an item is ready, or a stream is over
    room = asyncio.Event()                      # pulsed when the ready items were taken

    async def pump(index: int, source: AsyncIterator[T]) -> None:
        async with _closing(source) as stream:
            async for item in stream:
                ready.append((index, item))
                changed.set()
                await room.wait()

    over: list[asyncio.Task[None]] = []

    def note_end(pumping: asyncio.Task[None]) -> None:
        over.append(pumping)
        changed.set()

    pumps = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    for pumping in pumps:
        pumping.add_done_callback(note_end)
    num_seen = 0
    try:
        while num_seen < len(pumps) or ready:
            await changed.wait()
            changed.clear()
            while num_seen < len(over):
                over[num_seen].result()
                num_seen += 1
            if ready:
                items, ready = ready, []
                await deliver(items)
                room.set()
                room.clear()
    finally:
        for pumping in pumps:
            pumping.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


def _closing(stream: AsyncIterator[T]) -> aclosing[AsyncGenerator[T, None]]:
    # An engine's stream is an async generator, though its type says less.
    return aclosing(cast("AsyncGenerator[T, None]", stream))
