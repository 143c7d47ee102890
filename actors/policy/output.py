"""What sequences got since it was last sent on: columns for plain tokens, rows for what is more than a token."""
from __future__ import annotations

from dataclasses import dataclass, field

from actors.messages import NewTokens, SequenceTokens


@dataclass(slots=True)
class Output:
    """NOTE: an end is always a row, and rows are read after the columns: nothing may follow it."""
    accepted: list[str] = field(default_factory=list)
    entered: list[tuple[str, int, str]] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    rows: list[SequenceTokens] = field(default_factory=list)

    def take(self, step_id: int) -> NewTokens | None:
        """All of it, as one message; None if there is nothing new."""
        if not (self.accepted or self.token_ids or self.rows):
            return None
        message = NewTokens(step_id, tuple(self.accepted), tuple(self.entered), tuple(self.request_ids),
                            tuple(self.token_ids), tuple(self.rows))
        self.accepted, self.entered, self.request_ids, self.token_ids, self.rows = [], [], [], [], []
        return message
