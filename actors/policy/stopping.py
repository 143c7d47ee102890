"""When a sequence ends by the token that it got."""
from __future__ import annotations

from actors.messages import Finish
from actors.policy.sequence import Sequence


def find_finish(sequence: Sequence, token_id: int) -> Finish | None:
    """Why `sequence` ends with `token_id`, its newest, or None. The stop token counts as output, as in vLLM."""
    num_output = len(sequence.output_ids)
    if token_id in sequence.stop_ids and num_output > sequence.request.sampling.min_tokens:
        return "stop"
    if num_output >= sequence.max_tokens:
        return "length"
    return None
