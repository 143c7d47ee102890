"""How long a step will take, from how long steps took.

A step of `rows` decode rows and `tokens` prompt tokens takes about  base + per_row * rows + per_token * tokens.
Steps without prompt tokens say the first two, by least squares; the others say what a prompt token adds.
"""
from __future__ import annotations

DECAY = 0.98                                # of a step's weight with each later one of its kind


class StepTime:
    def __init__(self) -> None:
        self._weight = self._rows = self._rows_squared = self._seconds = self._rows_seconds = 0.0     # weighted sums
        self._prompt_tokens = self._prompt_seconds = 0.0

    def observe(self, num_rows: int, num_prompt_tokens: int, elapsed_s: float) -> None:
        """A step is over."""
        if num_prompt_tokens == 0:
            self._weight = DECAY * self._weight + 1.0
            self._rows = DECAY * self._rows + num_rows
            self._rows_squared = DECAY * self._rows_squared + num_rows * num_rows
            self._seconds = DECAY * self._seconds + elapsed_s
            self._rows_seconds = DECAY * self._rows_seconds + num_rows * elapsed_s
        else:
            self._prompt_tokens = DECAY * self._prompt_tokens + num_prompt_tokens
            self._prompt_seconds = DECAY * self._prompt_seconds + max(0.0, elapsed_s - self.decode_s(num_rows))

    def decode_s(self, num_rows: int) -> float:
        """Of a step without prompt tokens."""
        if num_rows == 0 or self._weight == 0.0:
            return 0.0
        mean_rows, mean_s = self._rows / self._weight, self._seconds / self._weight
        variance = self._rows_squared / self._weight - mean_rows * mean_rows
        covariance = self._rows_seconds / self._weight - mean_rows * mean_s
        # With steps of one size the slope is anybody's guess: of what a step takes, nothing then is due to its rows.
        per_row = covariance / variance if variance > 1e-6 * mean_rows * mean_rows else 0.0
        per_row = min(max(per_row, 0.0), mean_s / mean_rows)
        return mean_s + per_row * (num_rows - mean_rows)

    @property
    def per_prompt_token_s(self) -> float:
        """0 before any was measured."""
        return self._prompt_seconds / self._prompt_tokens if self._prompt_tokens else 0.0
