"""When a sequence ends: before it starts, because it can never fit, or by the token that it got."""
from __future__ import annotations

from actors.messages import Finish
from actors.policy.block_pool import BLOCK_SIZE, Group
from actors.policy.sequence import Sequence


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


def find_finish(sequence: Sequence, token_id: int) -> Finish | None:
    """Why `sequence` ends with `token_id`, its newest, or None. The stop token counts as output, as in vLLM."""
    num_output = len(sequence.output_ids)
    if token_id in sequence.stop_ids and num_output > sequence.request.sampling.min_tokens:
        return "stop"
    if num_output >= sequence.max_tokens:
        return "length"
    return None
