"""Where the engine's thread hands deltas to its callers' event loops.

The engine never waits for a reader. A step's deltas cross with one `call_soon_threadsafe` a loop; in the caller's loop
each request has one slot, where deltas that were not read yet are merged. A slot past its bound aborts its request.
"""
from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from actors.messages import TextDelta

MAX_UNREAD_TOKENS = 65_536


class OutputStream:
    """One request's slot. Used in the loop that made it."""

    def __init__(self, request_id: str, abort: Callable[[str], None],
                 on_delta: Callable[[TextDelta], bool] | None = None) -> None:
        """on_delta: is offered what comes while `next` waits, except a last delta; what it returns True for is done
        with. It must not raise."""
        self.request_id = request_id
        self.loop = asyncio.get_running_loop()
        self._abort = abort
        self._on_delta = on_delta
        self._is_awaited = False
        self._unread: list[TextDelta] = []
        self._num_unread_tokens = 0
        self._error: BaseException | None = None
        self._arrived = asyncio.Event()
        self._overflowed = False

    async def next(self) -> TextDelta:
        """Everything that came since the last call, as one delta; waits for at least one.

        Raises: the engine's death.
        """
        self._is_awaited = True
        try:
            await self._arrived.wait()
        finally:
            self._is_awaited = False
        if not self._unread and self._error is not None:
            raise self._error
        merged, self._unread, self._num_unread_tokens = merge(self._unread), [], 0
        if self._error is None:
            self._arrived.clear()               # after a death every later call must raise, not wait
        return merged

    def put(self, delta: TextDelta) -> None:
        if self._overflowed:
            return
        if (self._on_delta is not None and self._is_awaited and not self._arrived.is_set() and delta.finish is None
                and self._on_delta(delta)):
            return
        self._num_unread_tokens += len(delta.token_ids)
        if self._num_unread_tokens > MAX_UNREAD_TOKENS and delta.finish is None:
            self._overflowed = True
            self._abort(self.request_id)
            delta = replace(delta, finish="aborted", error=f"the reader left {MAX_UNREAD_TOKENS} tokens unread")
        self._unread.append(delta)
        self._arrived.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._arrived.set()


class OutputRouter:
    """Open requests and their loops; used from the engine's thread and from the callers'."""

    def __init__(self) -> None:
        self._streams: dict[str, OutputStream] = {}
        self._lock = threading.Lock()
        self.dead: BaseException | None = None

    def open(self, stream: OutputStream) -> None:
        """Raises: the engine's death, if it came first."""
        with self._lock:
            if self.dead is not None:
                raise self.dead
            self._streams[stream.request_id] = stream

    def close(self, request_id: str) -> bool:
        """Forget a request. False if it was closed before."""
        with self._lock:
            return self._streams.pop(request_id, None) is not None

    def __len__(self) -> int:
        return len(self._streams)

    def deliver(self, deltas: Sequence[TextDelta]) -> None:
        """From the engine's thread: one wake-up a loop, whatever the number of deltas."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[OutputStream, TextDelta]]] = {}
        with self._lock:
            for delta in deltas:
                stream = self._streams.get(delta.request_id)
                if stream is not None:
                    by_loop.setdefault(stream.loop, []).append((stream, delta))
        for loop, items in by_loop.items():
            _call_in(loop, partial(_put_all, items))

    def fail_all(self, error: BaseException) -> None:
        """The engine is dead: every open request gets `error`, and every later one."""
        with self._lock:
            self.dead = error
            streams = list(self._streams.values())
        for stream in streams:
            _call_in(stream.loop, partial(stream.fail, error))


def _put_all(items: Sequence[tuple[OutputStream, TextDelta]]) -> None:
    for stream, delta in items:
        stream.put(delta)


def _call_in(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        # The caller's loop is closed: nobody is left to read. Its requests were aborted when their generators ended.
        pass


def merge(deltas: Sequence[TextDelta]) -> TextDelta:
    """Several deltas of one request, in order, as one."""
    if len(deltas) == 1:
        return deltas[0]
    last = deltas[-1]
    return TextDelta(
        request_id=last.request_id,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        logprobs=tuple(logprob for delta in deltas for logprob in delta.logprobs),
        prompt_logprobs=tuple(logprob for delta in deltas for logprob in delta.prompt_logprobs),
        prompt_token_ids=next((delta.prompt_token_ids for delta in deltas if delta.prompt_token_ids), ()),
        finish=last.finish, stop_reason=last.stop_reason, error=last.error, error_field=last.error_field,
        usage=last.usage, retry_after_s=last.retry_after_s,
        num_cached_tokens=next((num for delta in deltas if (num := delta.num_cached_tokens) is not None), None),
        pooled=last.pooled,
        num_truncated_tokens=max(delta.num_truncated_tokens for delta in deltas),
        queued_entered_s=next((delta.queued_entered_s for delta in deltas if delta.queued_entered_s), None))
