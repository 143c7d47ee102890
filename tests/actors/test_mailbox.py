from __future__ import annotations

import asyncio
import threading

import pytest

from actors.mailbox import Mailbox


def test_messages_come_in_order_one_by_one_or_all_at_once() -> None:
    async def main() -> None:
        mailbox: Mailbox[int] = Mailbox()
        for i in range(5):
            mailbox.send(i)
        assert len(mailbox) == 5
        assert await mailbox.get() == 0
        assert await mailbox.drain() == [1, 2, 3, 4]
        assert len(mailbox) == 0

    asyncio.run(main())


def test_a_reader_waits_for_the_first_message() -> None:
    async def main() -> None:
        mailbox: Mailbox[int] = Mailbox()
        reader = asyncio.create_task(mailbox.drain())
        await asyncio.sleep(0)
        assert not reader.done()
        mailbox.send(1)
        mailbox.send(2)
        assert await reader == [1, 2]

    asyncio.run(main())


def test_a_cancelled_reader_takes_nothing_along() -> None:
    async def main() -> None:
        mailbox: Mailbox[int] = Mailbox()
        reader = asyncio.create_task(mailbox.get())
        await asyncio.sleep(0)
        mailbox.send(1)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert await mailbox.get() == 1

    asyncio.run(main())


def test_a_mailbox_has_one_reader() -> None:
    async def main() -> None:
        mailbox: Mailbox[int] = Mailbox()
        first = asyncio.create_task(mailbox.get())
        await asyncio.sleep(0)
        with pytest.raises(AssertionError, match="one reader"):
            await mailbox.get()
        mailbox.send(7)
        assert await first == 7

    asyncio.run(main())


def test_other_threads_send_in_order() -> None:
    async def main() -> None:
        mailbox: Mailbox[tuple[int, int]] = Mailbox()

        def sender(name: int) -> None:
            for i in range(100):
                mailbox.send_threadsafe((name, i))

        threads = [threading.Thread(target=sender, args=(name,)) for name in range(3)]
        for thread in threads:
            thread.start()
        received: list[tuple[int, int]] = []
        while len(received) < 300:
            received += await mailbox.drain()
        for thread in threads:
            thread.join()
        for name in range(3):
            assert [i for sender, i in received if sender == name] == list(range(100))

    asyncio.run(main())


def test_a_closed_loop_refuses() -> None:
    async def main() -> Mailbox[int]:
        return Mailbox()

    with pytest.raises(RuntimeError):
        asyncio.run(main()).send_threadsafe(1)
