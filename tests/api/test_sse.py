"""Several streams delivered as one: in batches, with nothing read ahead, and all of them closed whatever ends it."""
from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from api.sse import deliver_merged


class Source:
    """Counts what is taken of it."""

    def __init__(self, num_items: int, fails: bool = False) -> None:
        self.num_items = num_items
        self.fails = fails
        self.num_taken = 0
        self.closed = False

    async def items(self) -> AsyncIterator[int]:
        try:
            while self.num_taken < self.num_items:
                self.num_taken += 1
                yield self.num_taken
            if self.fails:
                raise ValueError("the source failed")
        finally:
            self.closed = True


def deliver_all(sources: list[Source]) -> list[list[tuple[int, int]]]:
    batches: list[list[tuple[int, int]]] = []

    async def deliver(batch: list[tuple[int, int]]) -> None:
        batches.append(batch)

    asyncio.run(deliver_merged([source.items() for source in sources], deliver))
    return batches


@pytest.mark.parametrize("counts", [[3], [0], [3, 3], [0, 2, 5], [1] * 50, [0, 0]])
def test_every_item_once_in_its_order(counts: list[int]) -> None:
    sources = [Source(count) for count in counts]
    batches = deliver_all(sources)
    for index, count in enumerate(counts):
        assert [item for batch in batches for source, item in batch if source == index] == list(range(1, count + 1))
    assert all(source.closed for source in sources)


def test_what_is_ready_at_once_is_one_batch() -> None:
    assert deliver_all([Source(2), Source(2), Source(2)]) == [[(0, 1), (1, 1), (2, 1)], [(0, 2), (1, 2), (2, 2)]]


@pytest.mark.parametrize("num_sources", [1, 3])
def test_nothing_is_read_ahead_of_a_slow_reader(num_sources: int) -> None:
    sources = [Source(100) for _ in range(num_sources)]

    async def run() -> None:
        reading = asyncio.Event()
        stalled = asyncio.Event()

        async def deliver(batch: list[tuple[int, int]]) -> None:
            reading.set()
            await stalled.wait()

        delivering = asyncio.create_task(deliver_merged([source.items() for source in sources], deliver))
        await reading.wait()
        for _ in range(100):
            await asyncio.sleep(0)
        assert [source.num_taken for source in sources] == [1] * num_sources
        delivering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await delivering

    asyncio.run(run())
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("num_others", [0, 2])
def test_a_source_that_fails_ends_all(num_others: int) -> None:
    sources = [Source(3, fails=True), *(Source(10**6) for _ in range(num_others))]
    with pytest.raises(ValueError, match="the source failed"):
        deliver_all(sources)
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("num_sources", [1, 2])
def test_a_reader_that_fails_ends_all(num_sources: int) -> None:
    sources = [Source(10) for _ in range(num_sources)]

    async def deliver(batch: list[tuple[int, int]]) -> None:
        raise OSError("the reader is gone")

    with pytest.raises(OSError, match="the reader is gone"):
        asyncio.run(deliver_merged([source.items() for source in sources], deliver))
    assert all(source.closed for source in sources)
