"""How an answer reaches the terminal while it streams."""
from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.segment import Segment

REDRAW_INTERVAL_S = 0.05

# Control characters could move the cursor, change colours or answer the terminal's queries: a model's text must not.
_CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def clean(text: str) -> str:
    """`text` without lone surrogates, which no encoding can carry.

    Bytes that the locale could not decode (Python keeps them as U+DC80..U+DCFF) are read as UTF-8.
    """
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    except UnicodeEncodeError:              # other halves of pairs
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


class OutputLost(Exception):
    """What is written reaches nobody; str() is one line for the user."""


class Answer(Protocol):
    """The place on the screen for one answer; leaving the block ends its last line."""

    def __enter__(self) -> Answer: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None: ...

    def write(self, text: str) -> None: ...


class PlainAnswer:
    """Text as it comes, for pipes and for those who want no Markdown."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._on_terminal = stream.isatty()
        self._line_open = False

    def __enter__(self) -> PlainAnswer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        if self._line_open and not isinstance(error, (BrokenPipeError, OutputLost)):
            self._put("\n")

    def write(self, text: str) -> None:
        if self._on_terminal:
            text = text.translate(_CONTROLS)
        if text:
            self._put(text)
            self._line_open = not text.endswith("\n")

    def _put(self, text: str) -> None:
        """Raises: BrokenPipeError where the reader is gone; OutputLost, such as for a full disk."""
        try:
            self._stream.write(text)
            self._stream.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputLost(f"standard output: {error.strerror or error}") from None


class MarkdownAnswer:
    """Rendered Markdown that grows. Blocks that are finished are printed for good and scroll away as any output does;
    only the block that is still being written is redrawn, at most one screen of its last lines. So nothing that has
    left the screen is ever drawn again, however long the answer is.
    """

    def __init__(self, console: Console) -> None:
        from rich.live import Live
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False,
                          redirect_stderr=False, vertical_overflow="crop")
        self._text = ""                     # not yet printed for good
        self._num_printed = 0               # blocks
        self._draw_due: asyncio.TimerHandle | None = None
        self._next_draw_s = 0.0

    def __enter__(self) -> MarkdownAnswer:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        if self._draw_due is not None:
            self._draw_due.cancel()
        with self._console:                 # one write: what is taken away and what replaces it appear together
            self._live.update("", refresh=True)
            self._print(split_blocks(self._text))
            self._live.stop()

    def write(self, text: str) -> None:
        self._text += text.translate(_CONTROLS)
        if self._draw_due is None:
            delay_s = max(0.0, self._next_draw_s - time.monotonic())
            self._draw_due = asyncio.get_running_loop().call_later(delay_s, self._draw)

    def _draw(self) -> None:
        self._draw_due = None
        start_s = time.monotonic()
        finished, self._text = split_finished(self._text)
        with self._console:
            self._live.update("", refresh=True)
            self._print(finished)
            self._live.update(_LastLines(self._text, after_block=self._num_printed > 0), refresh=True)
        end_s = time.monotonic()            # a long block of code takes long to colour: draw it less often
        self._next_draw_s = end_s + max(REDRAW_INTERVAL_S, 4 * (end_s - start_s))

    def _print(self, blocks: list[str]) -> None:
        for block in blocks:
            self._console.print(_Block(block, after_block=self._num_printed > 0), end="")
            self._num_printed += 1


def split_blocks(text: str) -> list[str]:
    """Markdown text as its top-level blocks; together they are the text."""
    from rich.markdown import Markdown
    lines = re.findall(r"[^\n]*\n|[^\n]+", text)       # str.splitlines knows line ends that Markdown does not
    starts = sorted({token.map[0] for token in Markdown(text).parsed if token.level == 0 and token.map})
    if not starts:
        return [text] if text else []
    starts[0] = 0
    return ["".join(lines[start:end]) for start, end in zip(starts, [*starts[1:], len(lines)], strict=True)]


def split_finished(text: str) -> tuple[list[str], str]:
    """The blocks of a growing Markdown text that no continuation can change, and the rest.

    The last block may go on. NOTE: an unfinished line is left out of the decision: "#" after a paragraph looks like a
    heading until it has become "#tag", which belongs to the paragraph.
    """
    whole_lines = text[:text.rfind("\n") + 1]
    blocks = split_blocks(whole_lines)
    finished = blocks[:-1]
    return finished, text[sum(map(len, finished)):]


class _Block:
    """One Markdown block without the blank lines round it, and one blank line before it where another stands above.

    Rich puts them before some kinds of block, after others and between, for documents that are rendered whole.
    """

    def __init__(self, text: str, after_block: bool) -> None:
        self._text = text
        self._after_block = after_block

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.segment import Segment
        for line in self.lines(console, options):
            yield from line
            yield Segment.line()

    def lines(self, console: Console, options: ConsoleOptions) -> list[list[Segment]]:
        from rich.markdown import Markdown
        # Links keep their address in sight: a model may write any address under any name.
        lines = console.render_lines(Markdown(self._text, hyperlinks=False), options, pad=False)
        while lines and not any(segment.text for segment in lines[0]):
            lines.pop(0)
        while lines and not any(segment.text for segment in lines[-1]):
            lines.pop()
        return [[], *lines] if lines and self._after_block else lines


class _LastLines(_Block):
    """As many of the last lines of an unfinished block as the screen holds."""

    def lines(self, console: Console, options: ConsoleOptions) -> list[list[Segment]]:
        return super().lines(console, options)[-(options.size.height - 1):]


@contextmanager
def typing_waits() -> Iterator[None]:
    """What is typed while no prompt is open does not show among the answers, but waits for the next prompt.

    Ctrl-C still interrupts, and what was typed before it is not thrown away, as a terminal would.
    """
    if sys.platform == "win32":
        yield
        return
    import termios
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    waiting = termios.tcgetattr(fd)
    waiting[0] &= ~termios.ICRNL            # keys arrive as the line editor knows them, Ctrl-D and Enter included
    waiting[3] &= ~(termios.ECHO | termios.ICANON | termios.IEXTEN)
    waiting[3] |= termios.NOFLSH
    termios.tcsetattr(fd, termios.TCSADRAIN, waiting)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
