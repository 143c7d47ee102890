"""When a sequence ends by the token that it got."""
from __future__ import annotations

from actors.messages import Finish
from actors.policy.sequence import Sequence


def find_finish(sequence: Sequence, token_id: int) -> Finish | None:
    """Why `sequence` ends with `token_id`, its newest, or None. The stop token counts as output, as in vLLM.

    An answer in a form of its own gets a stop token before min_tokens only where the form has no other way on.
    """
    num_output, sampling = len(sequence.output_ids), sequence.request.sampling
    if token_id in sequence.stop_ids and (num_output > sampling.min_tokens or sampling.structured_outputs is not None):
        return "stop"
    if num_output >= sequence.max_tokens:
        return "length"
    return None
