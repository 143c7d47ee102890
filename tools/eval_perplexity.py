"""Perplexity as llama.cpp defines it: windows of a text, what of them is scored, and the figure with its error."""
from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LEAST_WINDOW = 4                            # tokens: two are context, one is scored


@dataclass(slots=True)
class Perplexity:
    """e to the mean of what was added: negative log-probabilities of tokens, in nats."""
    num_scored: int = 0
    total: float = 0.0
    total_squares: float = 0.0

    def add(self, losses: Iterable[float]) -> None:
        for loss in losses:
            self.num_scored += 1
            self.total += loss
            self.total_squares += loss * loss

    @property
    def value(self) -> float:
        mean = self.total / self.num_scored
        return math.exp(mean) if mean < 700 else math.inf

    @property
    def error(self) -> float:
        """The standard error of the mean, carried through the exponential."""
        if self.num_scored < 2:
            return 0.0
        mean = self.total / self.num_scored
        variance = max(0.0, self.total_squares / self.num_scored - mean * mean)
        return math.sqrt(variance / (self.num_scored - 1)) * self.value


def text_windows(token_ids: Sequence[int], prefix_ids: Sequence[int], size: int) -> list[list[int]]:
    """Windows of `size` tokens one after the other; what is left over at the end is dropped.

    prefix_ids: what this model's prompts begin with, usually its beginning-of-text token or nothing. In every window it
    replaces the first tokens, so that no window is longer than another.
    Raises: ValueError where the text does not fill one window.
    """
    if len(token_ids) < size:
        raise ValueError(f"the text has {len(token_ids)} tokens, a window {size} (--ctx-size)")
    return [[*prefix_ids, *token_ids[start + len(prefix_ids):start + size]]
            for start in range(0, len(token_ids) - size + 1, size)]


def scored_positions(size: int) -> range:
    """The tokens of a window that count: those that have at least half of it before them."""
    return range(size // 2 + 1, size)
