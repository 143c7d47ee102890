"""How actors of one event loop hand each other messages: a list and someone waiting for it."""
from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class Outbox(Protocol[T_contra]):
    """Where an actor may send messages of a kind: a mailbox, or the executor."""

    def send(self, message: T_contra, /) -> None: ...


class Mailbox(Generic[T]):
    """Any number of senders, one reader. Belongs to the event loop in which it is made; unbounded, in order."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._messages: deque[T] = deque()
        self._arrival: asyncio.Future[None] | None = None       # of the waiting reader

    def __len__(self) -> int:
        return len(self._messages)

    def send(self, message: T, /) -> None:
        """From the mailbox's own event loop."""
        self._messages.append(message)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def send_threadsafe(self, message: T, /) -> None:
        """From any thread. Raises: RuntimeError once the event loop is closed."""
        self._loop.call_soon_threadsafe(self.send, message)

    async def get(self) -> T:
        """The oldest message; waits for one."""
        await self._wait()
        return self._messages.popleft()

    async def drain(self) -> list[T]:
        """All messages, at least one; waits for it."""
        await self._wait()
        messages = list(self._messages)
        self._messages.clear()
        return messages

    async def _wait(self) -> None:
        while not self._messages:
            assert self._arrival is None, "a mailbox has one reader"
            self._arrival = self._loop.create_future()
            try:
                await self._arrival
            finally:                        # cancelled: the messages stay
                self._arrival = None
