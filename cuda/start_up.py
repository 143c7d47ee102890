"""How a start goes: for who waits for it, and for the record."""
from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

STEP_S = 1.0


def _tell_nobody(line: str) -> None:
    pass


@dataclass(slots=True)
class StartUp:
    """Lines go to `tell` as they come."""
    tell: Callable[[str], None] = _tell_nobody
    stages: list[tuple[str, float]] = field(default_factory=list)       # with their seconds; some overlap
    _told_s: float = field(default_factory=time.perf_counter)

    def stage(self, name: str, begin_s: float) -> None:
        """A stage that began at `begin_s` (of `time.perf_counter`) is over."""
        elapsed_s = time.perf_counter() - begin_s
        self.stages.append((name, elapsed_s))
        self._told_s = time.perf_counter()
        self.tell(f"{name}: {elapsed_s:.2f} s")

    def step(self, line: str) -> None:
        """What begins now; told where nothing was for STEP_S seconds."""
        if time.perf_counter() - self._told_s >= STEP_S:
            self._told_s = time.perf_counter()
            self.tell(line)
