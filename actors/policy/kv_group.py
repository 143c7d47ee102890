"""The geometry of a KV group as policy sees it: how many blocks, and what a window lets a row see."""
from __future__ import annotations

from dataclasses import dataclass

BLOCK_SIZE = 16                             # tokens in a block


def count_blocks(num_tokens: int) -> int:
    return (num_tokens + BLOCK_SIZE - 1) // BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class Group:
    """A KV group as the pool sees it."""
    num_blocks: int
    window: int | None = None               # a row sees this many positions, its own included; None: all
    num_tier_blocks: int = 0                # room for evicted blocks in host memory

    def __post_init__(self) -> None:
        if self.num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {self.num_blocks}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1, got {self.window}")
        if self.num_tier_blocks < 0:
            raise ValueError(f"num_tier_blocks must be at least 0, got {self.num_tier_blocks}")

    def first_visible_block(self, position: int) -> int:
        """The first entry of a block table that the row at `position`, or a later one, can see."""
        if self.window is None:
            return 0
        return max(0, position - self.window + 1) // BLOCK_SIZE

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks with which a sequence can reach `num_tokens` tokens, be it by single tokens."""
        num_blocks = count_blocks(num_tokens)
        if self.window is not None:         # a window may begin at the last position of a block
            num_blocks = min(num_blocks, count_blocks(self.window - 1) + 1)
        return num_blocks
