"""Stop strings in streamed text: hold back what may be the beginning of one, cut where one is complete."""
from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """One request's matcher. Each stop string keeps its Knuth-Morris-Pratt state, so a character costs O(strings)."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self._failure = [_failure_table(stop) for stop in self.stops]
        self._matched = [0] * len(self.stops)       # characters of each stop that the text so far ends with
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that may be shown now, and the stop string that is complete (nothing may follow it)."""
        if not self.stops:
            return text, None
        self._held += text
        offset = len(self._held) - len(text)
        for index, character in enumerate(text):
            complete = [self.stops[i] for i in range(len(self.stops)) if self._advance(i, character)]
            if complete:
                stop = max(complete, key=len)       # all end here: the longest begins first
                return self._held[:offset + index + 1 - len(stop)], stop
        keep = max(self._matched)
        shown, self._held = self._held[:len(self._held) - keep], self._held[len(self._held) - keep:]
        return shown, None

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self.stops)
        return held

    def _advance(self, i: int, character: str) -> bool:
        stop, failure, matched = self.stops[i], self._failure[i], self._matched[i]
        while matched and stop[matched] != character:
            matched = failure[matched - 1]
        if stop[matched] == character:
            matched += 1
        self._matched[i] = matched
        return matched == len(stop)


def _failure_table(pattern: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = table[length - 1]
        if pattern[i] == pattern[length]:
            length += 1
        table[i] = length
    return table
