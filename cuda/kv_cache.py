"""KV groups of a model, what their blocks cost, and how many fit."""
from __future__ import annotations

from collections.abc import Sequence

from cuda.ops import BLOCK_SIZE, KVGroupSpec
from weights.spec import ModelSpec


def kv_groups(spec: ModelSpec) -> tuple[KVGroupSpec, ...]:
    """Layers of like geometry, full attention first. Llama has one group, Gemma one with a window and one without."""
    by_window: dict[int | None, list[int]] = {}
    for index, layer in enumerate(spec.layers):
        by_window.setdefault(layer.window, []).append(index)
    windows = sorted(by_window, key=lambda window: (window is not None, window))
    return tuple(KVGroupSpec(tuple(by_window[window]), spec.num_kv_heads, spec.head_dim, spec.head_dim, window)
                 for window in windows)


def blocks_for(num_tokens: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // BLOCK_SIZE)


def size_kv_cache(groups: Sequence[KVGroupSpec], block_bytes: Sequence[int], kv_bytes: int, max_num_seqs: int,
                  max_model_len: int, max_num_batched_tokens: int) -> tuple[int, ...]:
    """Blocks of each group: as many as `kv_bytes` hold, not more than `max_num_seqs` full-length sequences can use.

    block_bytes: of each group, as `Ops.kv_block_bytes` says them.
    A sequence holds in a group with a window no more than the window and one step's tokens.
    """
    def useful(group: KVGroupSpec) -> int:
        longest = blocks_for(max_model_len)
        if group.window is not None:
            longest = min(longest, blocks_for(group.window) + blocks_for(max_num_batched_tokens) + 1)
        return longest * max_num_seqs

    def counts(n: int) -> tuple[int, ...]:
        return tuple(min(n, useful(group)) for group in groups)

    def cost(n: int) -> int:
        return sum(count * num_bytes for count, num_bytes in zip(counts(n), block_bytes, strict=True))

    low, high = 0, max(useful(group) for group in groups)
    while low < high:                       # the largest n whose cost fits
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cost(middle) <= kv_bytes else (low, middle - 1)
    return counts(low)
