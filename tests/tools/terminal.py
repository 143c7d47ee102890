"""A program in a pseudo-terminal whose screen can be read. Waiting is for text on the screen, never for time."""
from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType

import pexpect  # type: ignore[import-untyped]
import pyte

TIMEOUT_S = 20.0                            # far beyond what a busy machine needs: a hang must end


class _Screen(pyte.HistoryScreen):
    """Answers the queries that a line editor sends to its terminal."""

    child: pexpect.spawn

    def write_process_input(self, data: str) -> None:
        self.child.send(data)


class Terminal:
    """`with Terminal([...]) as terminal:` runs `python ARGS` on a screen of the given size."""

    def __init__(self, args: Sequence[str], env: Mapping[str, str], columns: int = 80, lines: int = 24) -> None:
        self._screen = _Screen(columns, lines, history=10_000, ratio=0.5)
        self._stream = pyte.ByteStream(self._screen)
        self.child = pexpect.spawn(sys.executable, list(args), env={**os.environ, "TERM": "xterm-256color", **env},
                                   dimensions=(lines, columns), timeout=TIMEOUT_S, echo=True)
        self.child.delaybeforesend = None
        self._screen.child = self.child

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self.child.close(force=True)

    def type(self, text: str) -> None:
        self.child.send(text)

    def paste(self, text: str) -> None:
        """As a terminal sends it when the program has asked for bracketed paste."""
        self.child.send("\x1b[200~" + text + "\x1b[201~")

    def wait_for(self, *texts: str) -> list[str]:
        """Read output until all `texts` are on the screen or above it; all lines then."""
        while not all(text in self.text() for text in texts):
            try:
                self.read()
            except (pexpect.TIMEOUT, pexpect.EOF) as error:
                raise AssertionError(f"{type(error).__name__} before {texts!r}; the screen:\n{self.text()}") from None
        return self.lines()

    def read(self) -> None:
        """Wait for output and put it on the screen."""
        self._stream.feed(self.child.read_nonblocking(65536, timeout=TIMEOUT_S))

    def wait_for_exit(self) -> int:
        """Read output to its end; the exit code."""
        while True:
            try:
                self.read()
            except pexpect.EOF:
                break
        self.child.wait()
        assert self.child.exitstatus is not None, f"ended by signal {self.child.signalstatus}"
        return int(self.child.exitstatus)

    def lines(self) -> list[str]:
        """What has scrolled away and what is on the screen, without trailing blanks."""
        above = ["".join(line[column].data for column in range(self._screen.columns)).rstrip()
                 for line in self._screen.history.top]
        lines = above + [line.rstrip() for line in self._screen.display]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def text(self) -> str:
        return "\n".join(self.lines())

    def wait_for_cursor(self, line: int, column: int) -> None:
        """Read output until the cursor is there, counted from 0 at the upper left."""
        while (self._screen.cursor.y, self._screen.cursor.x) != (line, column):
            try:
                self.read()
            except (pexpect.TIMEOUT, pexpect.EOF) as error:
                place = self._screen.cursor.y, self._screen.cursor.x
                raise AssertionError(f"{type(error).__name__}: the cursor is at {place}; the screen:\n{self.text()}"
                                     ) from None
