"""One request inside the scheduler."""
from __future__ import annotations

from dataclasses import dataclass, field

from actors.messages import NewSequence, StartedSequence, Usage


@dataclass(slots=True, eq=False)
class Sequence:
    """A request and its three counters: tokens known, planned, computed.

        0            num_computed_tokens      num_planned_tokens        num_known_tokens
        |── KV reported ──|── in steps in flight ──|── may be planned ──|

    There are no phases: prefill, chunks, prefix hits and recomputation after preemption are all "known but not yet
    planned". While results are in flight a decoding sequence runs ahead: planned passes known by one token a step,
    because the tokens between are known to the device already.
    """
    request: NewSequence
    max_tokens: int                         # cut to what the context holds
    request_id: str = field(init=False)
    num_prompt_tokens: int = field(init=False)
    num_known_tokens: int = field(init=False)
    num_final_tokens: int = field(init=False)   # ever computed; the answer's last token is not: nothing follows from it
    stop_ids: frozenset[int] = field(init=False)
    output_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0            # since it entered its slot, as the next three
    num_planned_tokens: int = 0
    num_reserved_tokens: int = 0            # what its blocks hold
    num_started_tokens: int = 0             # known when it entered: planned in chunks, what follows one by one
    num_cached_tokens: int = 0              # found in the prefix cache before its first token
    num_prompt_logprobs: int = 0            # prompt positions below have been delivered
    slot: int = -1                          # -1: waiting
    last_step_id: int = -1                  # set when preempted: it resumes once this step has reported
    is_alive: bool = True

    def __post_init__(self) -> None:
        self.request_id = self.request.request_id
        self.num_prompt_tokens = self.num_known_tokens = len(self.request.token_ids)
        self.num_final_tokens = self.num_prompt_tokens + max(self.max_tokens, 1) - 1
        self.stop_ids = frozenset(self.request.stop_ids)

    def start(self, slot: int, num_cached_tokens: int) -> None:
        """Enter `slot`, with the first `num_cached_tokens` already in its blocks."""
        assert self.slot < 0, f"{self.request_id} is in slot {self.slot} already"
        assert num_cached_tokens < self.num_known_tokens, "a sequence needs a token to compute"
        if not self.output_ids:
            self.num_cached_tokens = num_cached_tokens
        self.slot = slot
        self.num_started_tokens = self.num_known_tokens
        self.num_planned_tokens = self.num_computed_tokens = num_cached_tokens

    def stop(self) -> int:
        """Leave the slot and forget what was computed. Returns the slot."""
        assert self.slot >= 0, f"{self.request_id} is in no slot"
        slot, self.slot = self.slot, -1
        self.num_planned_tokens = self.num_computed_tokens = self.num_reserved_tokens = self.num_started_tokens = 0
        return slot

    def describe(self, block_ids: tuple[tuple[int, ...], ...]) -> StartedSequence:
        """What the executor must know."""
        request = self.request
        return StartedSequence(self.slot, request.request_id, request.token_ids + tuple(self.output_ids),
                               self.num_prompt_tokens, request.sampling, request.stop_ids, request.seed,
                               request.choice, block_ids)

    def usage(self) -> Usage:
        return Usage(self.num_prompt_tokens, len(self.output_ids), self.num_cached_tokens)
