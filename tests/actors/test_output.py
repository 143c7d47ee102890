from __future__ import annotations

import asyncio
import threading

import pytest

from actors import output
from actors.messages import TextDelta, TokenLogprob, Usage
from actors.output import OutputRouter, OutputStream, merge


def test_unread_deltas_are_merged_into_one() -> None:
    async def main() -> None:
        stream = OutputStream("r", lambda request_id: None)
        stream.put(TextDelta("r", "Hel", (1,), prompt_token_ids=(7, 8)))
        stream.put(TextDelta("r", "lo", (2, 3), (TokenLogprob(2, "l", b"l", -1.0),)))
        stream.put(TextDelta("r", "!", (4,), finish="stop", stop_reason="x", usage=Usage(2, 4)))
        assert await stream.next() == TextDelta(
            "r", "Hello!", (1, 2, 3, 4), (TokenLogprob(2, "l", b"l", -1.0),), prompt_token_ids=(7, 8),
            finish="stop", stop_reason="x", usage=Usage(2, 4))

    asyncio.run(main())


def test_next_waits_for_a_delta_and_takes_each_once() -> None:
    async def main() -> None:
        stream = OutputStream("r", lambda request_id: None)
        reader = asyncio.create_task(stream.next())
        await asyncio.sleep(0)
        assert not reader.done()
        stream.put(TextDelta("r", "a"))
        assert (await reader).text == "a"
        stream.put(TextDelta("r", "b"))
        assert (await stream.next()).text == "b"

    asyncio.run(main())


def test_a_reader_that_waits_is_offered_deltas_where_they_come() -> None:
    """In order: none is offered while an earlier one is unread, nor before or after `next` waits, nor the last."""
    offered: list[str] = []

    def take(delta: TextDelta) -> bool:
        offered.append(delta.text)
        return delta.text != "no"

    async def main() -> None:
        stream = OutputStream("r", lambda request_id: None, take)
        stream.put(TextDelta("r", "early"))
        assert (await stream.next()).text == "early"
        stream.put(TextDelta("r", "between"))
        assert (await stream.next()).text == "between"
        reader = asyncio.create_task(stream.next())
        await asyncio.sleep(0)
        for text in ("a", "b", "no", "after no", "c"):
            stream.put(TextDelta("r", text))
        assert (await reader).text == "noafter noc"
        reader = asyncio.create_task(stream.next())
        await asyncio.sleep(0)
        stream.put(TextDelta("r", "d"))
        stream.put(TextDelta("r", "end", finish="stop"))
        assert (await reader).text == "end"
        reader = asyncio.create_task(stream.next())
        await asyncio.sleep(0)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        stream.put(TextDelta("r", "late"))
        assert offered == ["a", "b", "no", "d"]

    asyncio.run(main())


def test_a_reader_that_never_reads_costs_a_bounded_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "MAX_UNREAD_TOKENS", 10)
    aborted: list[str] = []

    async def main() -> None:
        stream = OutputStream("r", aborted.append)
        for i in range(100):
            stream.put(TextDelta("r", "x", (i,)))
        assert aborted == ["r"]
        merged = await stream.next()
        assert merged.finish == "aborted"
        assert "unread" in merged.error
        assert len(merged.token_ids) == 11

    asyncio.run(main())


def test_death_reaches_open_streams_after_what_they_already_got_and_later_ones_at_once() -> None:
    async def main() -> None:
        router = OutputRouter()
        stream = OutputStream("r", lambda request_id: None)
        router.open(stream)
        router.deliver([TextDelta("r", "last words")])
        router.fail_all(RuntimeError("device lost"))
        assert (await stream.next()).text == "last words"
        with pytest.raises(RuntimeError, match="device lost"):
            await stream.next()
        with pytest.raises(RuntimeError, match="device lost"):
            await stream.next()
        with pytest.raises(RuntimeError, match="device lost"):
            router.open(OutputStream("late", lambda request_id: None))

    asyncio.run(main())


def test_a_step_crosses_with_one_wakeup_a_loop() -> None:
    async def main() -> None:
        router, loop = OutputRouter(), asyncio.get_running_loop()
        streams = [OutputStream(f"r{i}", lambda request_id: None) for i in range(5)]
        for stream in streams:
            router.open(stream)
        calls = 0
        original = loop.call_soon_threadsafe

        def counted(*args: object, **kwargs: object) -> object:
            nonlocal calls
            calls += 1
            return original(*args, **kwargs)  # type: ignore[arg-type]

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign,assignment]
        deltas = [TextDelta(f"r{i}", str(i)) for i in range(5)] + [TextDelta("unknown", "?")]
        thread = threading.Thread(target=router.deliver, args=(deltas,))
        thread.start()
        assert [(await stream.next()).text for stream in streams] == list("01234")
        thread.join()
        assert calls == 1

    asyncio.run(main())


def test_a_closed_loop_loses_only_its_own() -> None:
    router = OutputRouter()

    async def left_open() -> None:
        router.open(OutputStream("gone", lambda request_id: None))

    async def main() -> None:
        stream = OutputStream("here", lambda request_id: None)
        router.open(stream)
        router.deliver([TextDelta("gone", "x"), TextDelta("here", "y")])
        assert (await stream.next()).text == "y"

    asyncio.run(left_open())
    asyncio.run(main())


def test_closing_forgets() -> None:
    async def main() -> None:
        router = OutputRouter()
        router.open(OutputStream("r", lambda request_id: None))
        assert router.close("r")
        assert not router.close("r")
        assert len(router) == 0

    asyncio.run(main())


def test_merge_of_one_is_itself() -> None:
    delta = TextDelta("r", "a")
    assert merge([delta]) is delta


def test_what_the_first_token_told_of_the_cache_stays() -> None:
    deltas = [TextDelta("r", prompt_token_ids=(1, 2)), TextDelta("r", "a", (3,), num_cached_tokens=0),
              TextDelta("r", "b", (4,))]
    assert merge(deltas).num_cached_tokens == 0
    assert merge([deltas[0], deltas[2]]).num_cached_tokens is None
