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
    asks_for_tokens = sequence.request.max_tokens > 0 or sequence.request.sampling.prompt_logprobs is None
    if sequence.max_tokens == 0 and asks_for_tokens:
        return f"the prompt of {num_prompt} tokens leaves no room for an answer, {context}"
    for group in groups:
        num_blocks = group.num_blocks_for(sequence.num_final_tokens)
        if num_blocks > group.num_blocks:
            return (f"a prompt of {num_prompt} tokens with max_tokens {sequence.max_tokens} needs {num_blocks} "
                    f"KV cache blocks of {BLOCK_SIZE} tokens, the cache has {group.num_blocks}")
    return ""


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How much may wait; None: any amount.

    Raises: ValueError naming the field.
    """
    max_queued_requests: int | None = None  # beyond those for whom there are slots
    max_queued_tokens: int | None = None    # known tokens; a prompt that waits alone is taken whatever its length

    def __post_init__(self) -> None:
        for name in ("max_queued_requests", "max_queued_tokens"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} must be at least 0, got {value}")

    def find_overload(self, sequence: Sequence, waiting: Iterable[Sequence], num_free_slots: int) -> str:
        """Why `sequence` cannot wait too, or ""."""
        if self.max_queued_requests is None and self.max_queued_tokens is None:
            return ""
        num_tokens = [other.num_known_tokens for other in waiting]
        if self.max_queued_requests is not None and len(num_tokens) - num_free_slots >= self.max_queued_requests:
            return f"{len(num_tokens)} requests are waiting, at most {self.max_queued_requests} may"
        if self.max_queued_tokens is not None and num_tokens:
            if sum(num_tokens) + sequence.num_prompt_tokens > self.max_queued_tokens:
                return (f"{sum(num_tokens)} tokens are waiting, at most {self.max_queued_tokens} may, the prompt has "
                        f"{sequence.num_prompt_tokens}")
        return ""


def retry_after_s(waiting: Iterable[Sequence], seconds_per_token: float) -> float:
    """How long those that wait will probably take, in whole seconds."""
    expected_s = sum(sequence.num_known_tokens for sequence in waiting) * seconds_per_token
    return min(MAX_RETRY_AFTER_S, max(1.0, float(round(expected_s))))
