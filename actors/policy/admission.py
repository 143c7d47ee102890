"""Who is let into the queue: what can ever run, while there is room."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from actors.policy.kv_group import BLOCK_SIZE, Group
from actors.policy.sequence import Sequence

MAX_RETRY_AFTER_S = 60.0


def find_refusal(sequence: Sequence, max_model_len: int, groups: tuple[Group, ...]) -> str:
    """Why `sequence` can never run, or "".

    One that passes fits when it runs alone: that is what lets the head of the line always go on.
    """
    num_prompt = sequence.num_prompt_tokens
    context = f"the model's context is {max_model_len} tokens"
    if num_prompt == 0:
        return "the prompt is empty"
    if num_prompt > max_model_len:
        return f"the prompt has {num_prompt} tokens, {context}"
    sampling = sequence.request.sampling
    asks_for_tokens = sequence.request.max_tokens > 0 or (sampling.prompt_logprobs is None and sampling.pooling is None)
    if sequence.max_tokens == 0 and asks_for_tokens:
        return f"the prompt of {num_prompt} tokens leaves no room for an answer, {context}"
    for group in groups:
        num_blocks = group.num_blocks_for(sequence.num_final_tokens)
        if num_blocks > group.num_blocks:
            return (f"a prompt of {num_prompt} tokens with max_tokens {sequence.max_tokens} needs {num_blocks} "
                    f"KV cache blocks of {BLOCK_SIZE} tokens, the cache has {group.num_blocks}")
    return ""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why sequences are not let into the queue."""
    error: str
    field: str                              # the parameter that asks for too much, or the limit that is reached
    retry_after_s: float | None = None      # None: it would be the same at any other time


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How much may be queued; None: any amount.

    Queued is who waits beyond those for whom there is room: the first in the line, as many as there are free slots, or
    none of them where the last plan passed somebody over for want of blocks.
    Raises: ValueError naming the field.
    """
    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None    # known tokens of those that are queued

    def __post_init__(self) -> None:
        for name in ("max_queued_requests", "max_queued_tokens"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} must be at least 0, got {value}")

    @property
    def are_set(self) -> bool:
        return self.max_queued_requests is not None or self.max_queued_tokens is not None

    def find_refusal(self, new: list[Sequence], waiting: Iterable[Sequence], room: int, max_num_seqs: int,
                     seconds_per_token: float) -> Refusal | None:
        """Why `new`, which come together, cannot all go behind those `waiting`; None: they can.

        room: so many of the first in the line are not queued. max_num_seqs: what that is at most, in an idle engine.
        """
        if not self.are_set:
            return None
        excess = self._find_excess([sequence.num_known_tokens for sequence in new], max_num_seqs)
        if excess:
            has_one_prompt = all(sequence.request.token_ids == new[0].request.token_ids for sequence in new)
            return Refusal(excess, "n" if has_one_prompt else "prompt")
        num_tokens = [sequence.num_known_tokens for sequence in waiting]
        queued = num_tokens[room:]
        added = [*num_tokens, *(sequence.num_known_tokens for sequence in new)][room + len(queued):]
        wait_s = min(MAX_RETRY_AFTER_S, max(1.0, float(round(sum(num_tokens) * seconds_per_token))))
        for limit, what, num_queued, num_added in (
                ("max_queued_requests", "requests", len(queued), len(added)),
                ("max_queued_tokens", "tokens", sum(queued), sum(added))):
            most = getattr(self, limit)
            if most is not None and num_queued + num_added > most:
                return Refusal(f"{num_queued} {what} are queued, this would add {num_added}, at most {most} may be",
                               limit, wait_s)
        return None

    def _find_excess(self, num_tokens: list[int], max_num_seqs: int) -> str:
        """Why sequences of these lengths could not be let in together even by an idle engine, or ""."""
        queued = num_tokens[max_num_seqs:]
        if self.max_queued_requests is not None and len(queued) > self.max_queued_requests:
            return too_many_at_once(len(num_tokens), max_num_seqs, self.max_queued_requests)
        if self.max_queued_tokens is not None and sum(queued) > self.max_queued_tokens:
            return (f"asks for {len(num_tokens)} completions at once, {max_num_seqs} can run: the others have "
                    f"{sum(queued)} tokens, at most {self.max_queued_tokens} may be queued")
        return ""


def too_many_at_once(num_sequences: int, max_num_seqs: int, max_queued_requests: int) -> str:
    return (f"asks for {num_sequences} completions at once, {max_num_seqs} can run and {max_queued_requests} more may "
            f"be queued")


class Arrivals:
    """Children of one parent wait for each other here, to be let into the queue together or not at all.

    NOTE: where one of them never comes (its prompt cannot be served), the others stay until they are aborted.
    """

    def __init__(self) -> None:
        self._children: dict[str, dict[str, Sequence]] = {}     # by parent

    def __len__(self) -> int:
        return sum(map(len, self._children.values()))

    def add(self, sequence: Sequence) -> list[Sequence]:
        """All children of its parent, once the last of them is here; before that none."""
        request = sequence.request
        if request.num_children == 1:
            return [sequence]
        children = self._children.setdefault(request.parent_id, {})
        children[request.request_id] = sequence
        return list(self._children.pop(request.parent_id).values()) if len(children) == request.num_children else []

    def remove(self, request_id: str) -> Sequence | None:
        """It, if it is here."""
        for parent_id, children in self._children.items():
            if request_id in children:
                sequence = children.pop(request_id)
                if not children:
                    del self._children[parent_id]
                return sequence
        return None
