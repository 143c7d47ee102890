from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from actors.messages import NewSequence
from actors.policy.admission import find_refusal
from actors.policy.kv_group import Group
from actors.policy.sequence import Sequence
from actors.sampling_params import SamplingParams
from actors.system import longest_sequence
from cuda.kv_cache import size_kv_cache
from cuda.ops import KVGroupSpec


@given(windows=st.lists(st.sampled_from([None, 1, 16, 17, 100, 512]), min_size=1, max_size=2, unique=True),
       kv_blocks=st.integers(1, 400), max_num_seqs=st.integers(1, 8), max_model_len=st.integers(1, 3000),
       num_batched_tokens=st.integers(8, 600), data=st.data())
def test_the_scheduler_refuses_nothing_that_the_tokenizer_admits(
        windows: list[int | None], kv_blocks: int, max_num_seqs: int, max_model_len: int, num_batched_tokens: int,
        data: st.DataObject) -> None:
    """So a caller who has heard that he is admitted is not refused later: the context that the tokenizer holds prompts
    against is one that the KV cache can hold."""
    groups = [KVGroupSpec((0,), 1, 4, 4, window) for window in windows]
    block_bytes = 16 * 8 * 4
    num_blocks = size_kv_cache(groups, [block_bytes] * len(groups), kv_blocks * block_bytes, max_num_seqs,
                               max_model_len, num_batched_tokens)
    length = min(max_model_len, longest_sequence(groups, num_blocks))
    if length == 0:
        return                              # refused at the start
    max_tokens = data.draw(st.integers(0, length - 1))
    num_prompt = data.draw(st.integers(1, length - max_tokens))
    sampling = SamplingParams(max_tokens=max_tokens, prompt_logprobs=0)
    request = NewSequence("r", (5,) * num_prompt, sampling, max_tokens, (), 0, 0, 0.0)
    pool_groups = tuple(Group(n, window) for n, window in zip(num_blocks, windows, strict=True))
    assert find_refusal(Sequence(request, max_tokens, number=0), length, pool_groups) == ""
