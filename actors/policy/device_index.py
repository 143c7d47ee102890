"""What the next plan tells the device's table of findable blocks, and asks it about who arrived."""
from __future__ import annotations

from actors.messages import IndexChange, Lookup
from actors.policy.sequence import Sequence

MAX_LOOKUP_BLOCKS = 8192                    # of one plan: a flood's would cost a step tens of milliseconds


class DeviceIndex:
    """The table's answers are hints: they are counted (see `SchedulerStats`); the KV pool alone says what is found."""

    def __init__(self, asks: bool) -> None:
        """asks: there is such a table."""
        self.asks = asks
        self.changes: list[IndexChange] = []    # as the pool told them
        self._lookups: list[Lookup] = []
        self._num_blocks = 0

    def ask(self, sequence: Sequence) -> None:
        """One has arrived. Who comes behind too many others is not asked about."""
        if not self.asks or self._num_blocks >= MAX_LOOKUP_BLOCKS:
            return
        lookup = sequence.lookup()
        if lookup is not None:
            self._lookups.append(lookup)
            self._num_blocks += len(lookup[2])

    def take(self) -> tuple[tuple[IndexChange, ...], tuple[Lookup, ...]]:
        """All of it, into a plan."""
        news = tuple(self.changes), tuple(self._lookups)
        self.changes, self._lookups, self._num_blocks = [], [], 0
        return news
