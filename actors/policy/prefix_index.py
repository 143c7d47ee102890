"""What can be found in the blocks of one KV group, and where.

    key    ──▶ block        a full block of known tokens, whose whole past the key names
    parent ──▶ {block: ids} all findable blocks that continue `parent`, those among them that are filled in part only

A block is *findable* when it is in here. Of several blocks with the same content one is; the others are just held.
"""
from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import islice

from actors.messages import IndexChange

MAX_CONTINUATIONS = 16                      # looked at, the newest first, for one whose first tokens can be copied


class PrefixIndex:
    def __init__(self, num_blocks: int) -> None:
        self.block_of: dict[bytes, int] = {}
        self.key_of: list[bytes | None] = [None] * num_blocks
        self._parent_of: list[bytes | None] = [None] * num_blocks
        self._continuations: dict[bytes, dict[int, tuple[int, ...]]] = {}
        # Full blocks that became findable or ceased to be since these were last taken, the last change of each; None:
        # nobody asks.
        self.changes: dict[int, IndexChange] | None = None

    def __len__(self) -> int:
        """Findable blocks."""
        return sum(map(len, self._continuations.values()))

    def is_findable(self, block_id: int) -> bool:
        return self._parent_of[block_id] is not None

    def count_leading(self, keys: Sequence[bytes]) -> int:
        """How many of `keys` are here, up to the first that is not."""
        found = list(map(self.block_of.get, keys))
        return found.index(None) if None in found else len(found)

    def add(self, block_id: int, parent: bytes, key: bytes, token_ids: tuple[int, ...]) -> bool:
        """A full block. False, and nothing is kept, if another block is known to hold the same."""
        if key in self.block_of:
            if self.block_of[key] != block_id:
                self.remove(block_id)       # it may be here as filled in part
            return False
        self.block_of[key] = block_id
        self.key_of[block_id] = key
        self._parent_of[block_id] = parent
        self._continuations.setdefault(parent, {})[block_id] = token_ids
        if self.changes is not None:
            self.changes[block_id] = block_id, key, parent, token_ids
        return True

    def add_part(self, block_id: int, parent: bytes, token_ids: tuple[int, ...]) -> bool:
        """A block whose first positions hold `token_ids`. False if that much can be found already."""
        assert self.key_of[block_id] is None, f"block {block_id} is full"
        num_known = self.find_part(parent, token_ids, ())[1]
        if num_known == len(token_ids):
            return False
        self._parent_of[block_id] = parent
        self._continuations.setdefault(parent, {})[block_id] = token_ids
        return True

    def find_part(self, parent: bytes, token_ids: Sequence[int], excluded: Container[int]) -> tuple[int, int]:
        """The block after `parent` that begins with the most of `token_ids`, and how many; (-1, 0) if none does."""
        best, best_length = -1, 0
        continuations = self._continuations.get(parent, {})
        for block_id, ids in islice(reversed(continuations.items()), MAX_CONTINUATIONS):
            if ids[0] == token_ids[0] and block_id not in excluded:
                length = _common_length(ids, token_ids)
                if length > best_length:
                    best, best_length = block_id, length
        return best, best_length

    def remove(self, block_id: int) -> None:
        """It cannot be found any more, if it could."""
        parent, key = self._parent_of[block_id], self.key_of[block_id]
        if parent is None:
            return
        siblings = self._continuations[parent]
        del siblings[block_id]
        if not siblings:
            del self._continuations[parent]
        self._parent_of[block_id] = None
        if key is not None:
            del self.block_of[key]
            self.key_of[block_id] = None
            if self.changes is not None:
                self.changes[block_id] = block_id, b"", b"", ()

    def take_changes(self) -> tuple[IndexChange, ...]:
        """Since the last time, each block once; () where nobody asks."""
        if not self.changes:
            return ()
        changes = tuple(self.changes.values())
        self.changes.clear()
        return changes

    def check_integrity(self, name: str) -> None:
        """Raises: AssertionError where the two directions disagree."""
        assert {key: block_id for block_id, key in enumerate(self.key_of) if key is not None} == self.block_of, (
            f"{name}: keys of blocks and blocks of keys differ")
        listed = {block_id: parent for parent, blocks in self._continuations.items() for block_id in blocks}
        assert listed == {block_id: parent for block_id, parent in enumerate(self._parent_of) if parent is not None}, (
            f"{name}: parents of blocks and continuations of parents differ")
        assert self.block_of.keys() <= {self.key_of[block_id] for block_id in listed}, f"{name}: a key without parent"
        assert len(self) == len(listed), f"{name}: a block continues two parents"


def _common_length(a: Sequence[int], b: Sequence[int]) -> int:
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length
