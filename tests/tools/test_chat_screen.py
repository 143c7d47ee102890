from __future__ import annotations

import asyncio
import io

import pyte
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from rich.console import Console

from tools.chat_screen import MarkdownAnswer, PlainAnswer, clean, split_blocks, split_finished

COLUMNS, LINES = 50, 10

DOCUMENT = """\

# Title

A paragraph that is long enough for two lines of the screen, with 日本語のテキスト and e\u0301 in it.
#tag goes on

* one
- two

  more of two

1. x
2. y

```python
def f():
""" + "".join(f"    line({number})\n" for number in range(30)) + """\
```
after the code

> quoted

| a | b |
|---|---|
| 1 | 2 |

***

[link](http://example.org) and the end"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def draw(pieces: list[str]) -> tuple[list[str], int]:
    """All lines of the terminal after the pieces came one by one, each drawn at once; the most lines ever redrawn."""
    file = io.StringIO()
    console = Console(file=file, width=COLUMNS, height=LINES, force_terminal=True, color_system=None,
                      legacy_windows=False)

    async def run() -> None:
        with MarkdownAnswer(console) as answer:
            for piece in pieces:
                answer.write(piece)
                answer._next_draw_s = 0.0
                await asyncio.sleep(0)
                await asyncio.sleep(0)

    asyncio.run(run())
    written = file.getvalue()
    screen = pyte.HistoryScreen(COLUMNS, LINES, history=10_000, ratio=0.5)
    pyte.Stream(screen).feed(written.replace("\n", "\r\n"))
    above = ["".join(line[column].data for column in range(COLUMNS)).rstrip() for line in screen.history.top]
    lines = above + [line.rstrip() for line in screen.display]
    while lines and not lines[-1]:
        lines.pop()
    return lines, max((part.count("\x1b[1A") for part in written.split("\n")), default=0)


def test_what_stays_does_not_depend_on_how_the_text_came() -> None:
    whole, _ = draw([DOCUMENT])
    assert sum("line(" in line for line in whole) == 30
    for size in (1, 2, 3, 7, 40):
        pieces = [DOCUMENT[start:start + size] for start in range(0, len(DOCUMENT), size)]
        lines, num_redrawn = draw(pieces)
        assert lines == whole
        assert num_redrawn < LINES              # more could not be taken back once it has left the screen


def test_the_end_of_a_long_unfinished_block_is_in_sight() -> None:
    file = io.StringIO()
    console = Console(file=file, width=COLUMNS, height=LINES, force_terminal=True, color_system=None)
    screen = pyte.Screen(COLUMNS, LINES)

    async def run() -> None:
        with MarkdownAnswer(console) as answer:
            answer.write("```\n" + "".join(f"number {number}\n" for number in range(100)))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            pyte.Stream(screen).feed(file.getvalue().replace("\n", "\r\n"))

    asyncio.run(run())
    assert "number 99" in "\n".join(screen.display)


def test_nothing_and_text_that_renders_to_nothing() -> None:
    assert draw([])[0] == []
    assert draw(["", "\n", "  \n"])[0] == []
    assert draw(["[a]: http://example.org\n"])[0] == []


BLOCKS = st.lists(st.sampled_from(["text", "more *text*", "# head", "#", "#tag", "- item", "-", "  - sub", "1. one",
                                   "> q", "```", "    code", "***", "===", "---", "| a | b |", "|---|---|", "", "\t",
                                   "<div>", "`x", "**b", "a\u2028b", "c\x0bd"]), max_size=14).map("\n".join)


@given(BLOCKS, st.lists(st.integers(0, 200), max_size=8))
@settings(max_examples=150, deadline=None)
def test_finished_blocks_are_final(text: str, cuts: list[int]) -> None:
    assert "".join(split_blocks(text)) == text
    parser = MarkdownIt().enable("strikethrough").enable("table")
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    blocks: list[str] = []
    pending = ""
    for start, end in zip(places, places[1:], strict=False):
        finished, pending = split_finished(pending + text[start:end])
        blocks += finished
    blocks += split_blocks(pending)
    assert "".join(blocks) == text
    assert "".join(map(parser.render, blocks)) == parser.render(text)


def test_control_characters_of_a_model_do_not_reach_the_terminal() -> None:
    lines, _ = draw(["a\x1b[2Jb\x07\x9b31m\x08c\x7f\r\u009dd"])
    assert lines == ["a[2Jb31mcd"]
    terminal = Terminal()
    with PlainAnswer(terminal) as answer:
        answer.write("a\x1b[2Jb\tc\n\x9b0m")
    assert terminal.getvalue() == "a[2Jb\tc\n0m\n"


def test_plain_text_is_left_alone_in_a_pipe_and_ends_with_one_newline() -> None:
    for text, written in (("a\x1b[1mb", "a\x1b[1mb\n"), ("a\n", "a\n"), ("", ""), ("\n", "\n")):
        stream = io.StringIO()
        with PlainAnswer(stream) as answer:
            for char in text:
                answer.write(char)
        assert stream.getvalue() == written


def test_links_show_where_they_lead() -> None:
    lines, _ = draw(["[safe](http://other.example)"])
    assert lines == ["safe (http://other.example)"]


@pytest.mark.parametrize(("text", "cleaned"), [
    ("plain 日本 👩‍🚀", "plain 日本 👩‍🚀"),
    ("a\udce6\udc97\udca5b", "a日b"),           # bytes that an ASCII locale could not decode
    ("a\udcffb", "a\ufffdb"),
    ("a\ud800b\udcff", "a\ufffdb\ufffd"),
    ("\ud83d\ude80", "🚀"),                     # both halves of a pair
])
def test_lone_surrogates_are_replaced(text: str, cleaned: str) -> None:
    assert clean(text) == cleaned
