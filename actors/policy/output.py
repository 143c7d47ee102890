"""What sequences got since it was last sent on: columns for plain tokens, rows for what is more than a token."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from actors.messages import NewTokens, SequenceTokens, StepResult, TopLogprobs
from actors.policy.sequence import Sequence


@dataclass(slots=True)
class Output:
    """NOTE: an end is always a row, and rows are read after the columns: nothing may follow it."""
    accepted: list[str] = field(default_factory=list)
    entered: list[tuple[str, int, str, float, float]] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    rows: list[SequenceTokens] = field(default_factory=list)

    def add_prompt_logprobs(self, result: StepResult, sequences: Mapping[int, Sequence]) -> None:
        """Of the sequences in these slots; those that come again after preemption are known already."""
        rows: dict[str, list[tuple[int, float, TopLogprobs]]] = {}
        for slot, position, logprob, top_logprobs in zip(
                result.prompt_slots, result.prompt_positions, result.prompt_logprobs, result.prompt_top_logprobs,
                strict=True):
            sequence = sequences[slot]
            if sequence.is_alive and position >= sequence.num_prompt_logprobs:
                sequence.num_prompt_logprobs = position + 1
                rows.setdefault(sequence.request_id, []).append((position, logprob, top_logprobs))
        for request_id, prompt_logprobs in rows.items():
            self.rows.append(SequenceTokens(request_id, prompt_logprobs=tuple(prompt_logprobs)))

    def take(self, step_id: int) -> NewTokens | None:
        """All of it, as one message; None if there is nothing new."""
        if not (self.accepted or self.token_ids or self.rows):
            return None
        message = NewTokens(step_id, tuple(self.accepted), tuple(self.entered), tuple(self.request_ids),
                            tuple(self.token_ids), tuple(self.rows))
        self.accepted, self.entered, self.request_ids, self.token_ids, self.rows = [], [], [], [], []
        return message
