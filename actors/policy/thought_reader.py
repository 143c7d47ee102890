"""Where an answer is in the thought that it begins with, by its tokens as they come."""
from __future__ import annotations

import codecs
import re
from typing import Literal, TypeAlias

PROMPT_END_TOKENS = 16                      # of a prompt, that show whether it begins a thought

Place: TypeAlias = Literal["before", "inside", "behind", "none"]


def is_open(begin: str, prompt_end: str) -> bool:
    """Whether a prompt that ends so leaves a thought open, as templates of models that always think do."""
    return re.search(re.escape(begin) + r"\s*\Z", prompt_end) is not None


class ThoughtReader:
    """Reads an answer as far as its thought goes.

    place: "before" as long as only white space or a part of the beginning mark came, "none" once something else did.
    num_tokens: inside; those that a mark is of, whole or in part, do not count once it is complete.
    tail: the last bytes of the thought, fewer than the end mark has.
    rest: what followed the end mark in the token that completed it.
    """

    def __init__(self, begin: str, end: str, is_inside: bool) -> None:
        """begin, end: the marks. is_inside: the prompt has begun the thought."""
        self.place: Place = "inside" if is_inside else "before"
        self.num_tokens = 0
        self.tail = self.rest = b""
        self._begin, self._end = begin, end.encode()
        self._head = b""                    # read before the thought has begun
        self._sizes: list[int] = []         # of the tokens that the tail is of; the first may have begun before it

    def push(self, token: bytes) -> None:
        """The next token's bytes."""
        if self.place == "inside":
            self.num_tokens += 1
            self._sizes.append(len(token))
            self._think(token)
        elif self.place == "before":
            self._head += token
            text, num_decoded = codecs.utf_8_decode(self._head, "replace", False)
            text = text.lstrip()
            if text.startswith(self._begin):
                self.place = "inside"
                mark = self._begin.encode()
                self._think(self._head[self._head.index(mark) + len(mark):])
            elif not self._begin.startswith(text):
                self.place = "none"
            elif not text:
                self._head = self._head[num_decoded:]

    def _think(self, data: bytes) -> None:
        self.tail += data
        at = self.tail.find(self._end)
        if at >= 0:
            self.place, self.rest = "behind", self.tail[at + len(self._end):]
            num_behind = len(self.tail) - at
            for size in reversed(self._sizes):
                if num_behind <= 0:
                    break
                num_behind -= size
                self.num_tokens -= 1
            return
        self.tail = self.tail[max(0, len(self.tail) - len(self._end) + 1):]
        while len(self._sizes) > 1 and sum(self._sizes[1:]) >= len(self.tail):
            del self._sizes[0]
