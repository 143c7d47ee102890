"""What tools.gpu_check writes: a table, row by row as they come, and the same rows as JSON."""
from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

from cuda.launcher import DeviceLost

Figure = float | int | str

# How figures are printed, by their name in the JSON document.
_FORMATS = {
    "error": "error {:.2g}", "tolerance": "of {:.2g}", "message": "{}", "tokens": "{} tokens", "ties": "{} ties",
    "us": "{:.2f} us", "ms": "{:.3f} ms", "s": "{:.1f} s", "gb_per_s": "{:.0f} GB/s", "tflops": "{:.0f} TFLOP/s",
    "mb": "{:.1f} MB", "floor_ms": "floor {:.3f} ms", "target_ms": "(wanted: {:g} ms)", "per_s": "{:.0f} a second",
    "share_percent": "{:.0f} %", "target_percent": "(wanted: {:.0f} %)",
}


@dataclass(frozen=True, slots=True)
class Row:
    part: str                               # "decode attention"
    what: str                               # "batch 32, context 4096, bf16"
    verdict: str                            # "", "ok", "MISMATCH", "FAILED", "below target", "not measured"
    at_s: float                             # since the start
    figures: dict[str, Figure]

    @property
    def is_wrong(self) -> bool:
        return self.verdict in ("MISMATCH", "FAILED")


class Report:
    """Rows, and the time that is left for more of them."""

    def __init__(self, minutes: float, out: TextIO | None = None) -> None:
        self.rows: list[Row] = []
        self._begin_s, self._limit_s = time.perf_counter(), 60 * minutes
        self._out = out or sys.stdout

    @property
    def is_over(self) -> bool:
        return time.perf_counter() - self._begin_s >= self._limit_s

    @property
    def num_wrong(self) -> int:
        return sum(row.is_wrong for row in self.rows)

    def add(self, part: str, what: str, verdict: str = "", **figures: Figure) -> None:
        if not self.rows or part != self.rows[-1].part:
            print(f"\n{part}", file=self._out)
        at_s = round(time.perf_counter() - self._begin_s, 3)
        self.rows.append(Row(part, what, verdict, at_s, figures))
        numbers = "  ".join(_FORMATS[name].format(value) for name, value in figures.items())
        print(f"  {what:<64} {verdict:<12} {numbers}".rstrip(), file=self._out, flush=True)

    def add_share(self, part: str, what: str, share: float, target: float | None, **figures: Figure) -> None:
        """A figure with its share of what the device could do. A missed target is told; it makes nothing wrong."""
        if target is None:
            self.add(part, what, "", **figures, share_percent=100 * share)
        else:
            self.add(part, what, "ok" if share >= target else "below target", **figures, share_percent=100 * share,
                     target_percent=100 * target)

    def attempt(self, part: str, what: str, measure: Callable[[], None]) -> None:
        """Runs `measure`, which adds the rows, where there is time; what it raises is a row too.

        Raises: DeviceLost, after which nothing can be measured.
        """
        if self.is_over:
            self.add(part, what, "not measured", message="the minutes are over")
            return
        try:
            measure()
        except DeviceLost as error:
            self.add(part, what, "FAILED", message=_one_line(error))
            raise
        except MemoryError as error:        # a small GPU is no wrong one
            self.add(part, what, "not measured", message=_one_line(error))
        except AssertionError as error:
            self.add(part, what, "MISMATCH", message=_one_line(error))
        except Exception as error:
            self.add(part, what, "FAILED", message=f"{type(error).__name__}: {_one_line(error)}")

    def document(self) -> list[dict[str, Any]]:
        """The rows for JSON."""
        return [{"part": row.part, "what": row.what, "verdict": row.verdict, "at_s": row.at_s, **row.figures}
                for row in self.rows]


def _one_line(error: BaseException) -> str:
    return " ".join(f"{error}".split())[:300]
