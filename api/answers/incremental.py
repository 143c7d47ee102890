"""Text read as it comes: parsers written as if all of it were there, that wait where it is not."""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import Generic, TypeAlias, TypeVar

T = TypeVar("T")
Piece = TypeVar("Piece")

Reading: TypeAlias = Generator[None, None, T]   # yields where it needs more text


class Incremental(ABC, Generic[Piece]):
    """A subclass's `_run` reads from `_text` and appends to `_pieces`; where it needs more it yields.

    NOTE: whatever it decides it must decide on text that no more text can change: then the pieces say the same however
    the text was cut.
    """

    def __init__(self) -> None:
        self._text = ""                         # that is not read yet
        self._is_last = False                   # nothing comes after it
        self._pieces: list[Piece] = []
        self._reading: Reading[None] | None = None

    def push(self, text: str) -> list[Piece]:
        """What this text settles."""
        self._text += text
        return self._read_on()

    def finish(self) -> list[Piece]:
        """What the end of the text settles: all that is left."""
        self._is_last = True
        return self._read_on()

    @abstractmethod
    def _run(self) -> Reading[None]:
        """Reads the text to its end."""

    def _read_on(self) -> list[Piece]:
        if self._reading is None:
            self._reading = self._run()
        next(self._reading, None)
        pieces, self._pieces = self._pieces, []
        return pieces

    def _more(self) -> Reading[bool]:
        """Waits for more text; False: there is none."""
        if self._is_last:
            return False
        yield
        return True

    def _peek(self) -> Reading[str]:
        """The next character; "" at the end."""
        while not self._text:
            if not (yield from self._more()):
                return ""
        return self._text[0]

    def _next_of(self, literals: Sequence[str]) -> Reading[str]:
        """Which of `literals` comes next, the longest of them; "" if none does. It is not read yet."""
        while True:
            text = self._text
            may_be_longer = any(len(literal) > len(text) and literal.startswith(text) for literal in literals)
            if not may_be_longer or not (yield from self._more()):
                return max((literal for literal in literals if self._text.startswith(literal)), key=len, default="")


def find_first(text: str, literals: Sequence[str]) -> tuple[int, str]:
    """Where the first of `literals` is in `text`, and which; (-1, "") where there is none."""
    found = [(text.find(literal), literal) for literal in literals]
    return min(((at, literal) for at, literal in found if at >= 0), default=(-1, ""), key=lambda pair: pair[0])


def num_begun(text: str, literals: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of one of `literals`."""
    longest = min(len(text), max(map(len, literals), default=1) - 1)
    for length in range(longest, 0, -1):
        if any(literal.startswith(text[-length:]) for literal in literals if len(literal) > length):
            return length
    return 0
