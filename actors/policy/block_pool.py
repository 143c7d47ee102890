"""Who holds which KV block.

A KV group has its own id space 0 .. num_blocks - 1. Every block is in exactly one place:

    free list (references 0)  ──reserve──▶  block tables of sequences (references >= 1)  ──release──▶  free list

A sequence's block tables grow by the same number of blocks in every group; entry i holds positions
[i * BLOCK_SIZE, (i + 1) * BLOCK_SIZE). In a group with a window the leading entries are given back once no row that
is still to be planned can see them. Plans run in the order sent, so a block may be handed on at once (rule 1).
"""
from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from actors.messages import Grant, Reserve, Reserved

BLOCK_SIZE = 16                             # tokens in a block


@dataclass(frozen=True, slots=True)
class Group:
    """A KV group as the pool sees it."""
    num_blocks: int
    window: int | None = None               # a row sees this many positions, its own included; None: all

    def __post_init__(self) -> None:
        if self.num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {self.num_blocks}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1, got {self.window}")

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


def count_blocks(num_tokens: int) -> int:
    return (num_tokens + BLOCK_SIZE - 1) // BLOCK_SIZE


@dataclass(slots=True, eq=False)
class _BlockTables:
    """What one sequence holds."""
    length: int                             # entries, those given back included; the same in every group
    block_ids: list[list[int]]              # per group, the entries still held: the last ones


class BlockPool:
    """Blocks, references and the free lists. `reserve` is the only way in and out."""

    def __init__(self, groups: tuple[Group, ...]) -> None:
        if not groups:
            raise ValueError("a KV cache needs at least one group")
        self.groups = groups
        self._windowed = [(index, group) for index, group in enumerate(groups) if group.window is not None]
        # Least recently used first: what was given back last is handed out last.
        self._free = [deque(range(group.num_blocks)) for group in groups]
        self._num_references = [[0] * group.num_blocks for group in groups]
        self._tables: dict[str, _BlockTables] = {}

    @property
    def num_sequences(self) -> int:
        """Sequences that hold blocks."""
        return len(self._tables)

    @property
    def num_free(self) -> tuple[int, ...]:
        """Free blocks per group."""
        return tuple(len(free) for free in self._free)

    @property
    def usage(self) -> float:
        """Share of blocks held in the fullest group, 0..1."""
        return max(1.0 - len(free) / group.num_blocks for free, group in zip(self._free, self.groups, strict=True))

    def reserve(self, request: Reserve) -> Reserved:
        """Apply the releases, give back what left a window, then grant in order until budget or blocks run out.

        A sequence that holds blocks gets as many of its tokens as the free blocks carry. A new one is let in only if
        all its tokens fit now, and only if nobody before it starved: a newcomer neither overtakes nor lives on
        blocks that the ones before it need next.
        """
        for request_id in request.releases:
            self._release(request_id)
        if self._windowed:
            for want in request.wants:
                self._release_unseen(want.request_id, want.start)
        grants = []
        starved: list[str] = []
        budget = request.token_budget
        for want in request.wants:
            if budget == 0:
                break
            is_new = want.request_id not in self._tables
            if is_new and (starved or not self._can_enter(want.end)):
                starved.append(want.request_id)
                continue
            grant = self._grant(want.request_id, want.start, min(want.end, want.start + budget))
            if grant is None:
                starved.append(want.request_id)
                continue
            budget -= grant.num_new_tokens
            grants.append(grant)
        return Reserved(request.step_id, tuple(grants), tuple(starved))

    def owners(self) -> tuple[dict[int, tuple[str, ...]], ...]:
        """Per group, each held block and the sequences that hold it."""
        owners: tuple[dict[int, tuple[str, ...]], ...] = tuple({} for _ in self.groups)
        for request_id, tables in self._tables.items():
            for owned, block_ids in zip(owners, tables.block_ids, strict=True):
                for block_id in block_ids:
                    owned[block_id] = (*owned.get(block_id, ()), request_id)
        return owners

    def check_integrity(self) -> None:
        """Every block is free once or held, as often as its references say.

        Raises: AssertionError, naming group and block.
        """
        for index, (group, free, references) in enumerate(
                zip(self.groups, self._free, self._num_references, strict=True)):
            held = Counter(block_id for tables in self._tables.values() for block_id in tables.block_ids[index])
            free_ids = set(free)
            assert len(free_ids) == len(free), f"KV group {index}: a block is in the free list twice"
            assert free_ids.isdisjoint(held), f"KV group {index}: blocks {sorted(free_ids & held.keys())} free and held"
            assert len(free) + len(held) == group.num_blocks, (
                f"KV group {index}: {len(free)} blocks free + {len(held)} held, not {group.num_blocks}")
            assert sum(references) == held.total(), f"KV group {index}: references without an owner"
            for block_id, num_owners in held.items():
                assert references[block_id] == num_owners, (
                    f"KV group {index}: block {block_id} has {num_owners} owners, {references[block_id]} references")

    def _can_enter(self, num_tokens: int) -> bool:
        return all(group.num_blocks_for(num_tokens) <= len(free)
                   for group, free in zip(self.groups, self._free, strict=True))

    def _grant(self, request_id: str, start: int, end: int) -> Grant | None:
        """Blocks for tokens [start, end) or as many of them as the free blocks carry; None if that is no token."""
        tables = self._tables.get(request_id)
        length = tables.length if tables is not None else 0
        num_new = max(0, count_blocks(end) - length)
        for free in self._free:
            num_new = min(num_new, len(free))
        end = min(end, (length + num_new) * BLOCK_SIZE)
        if end <= start:
            return None
        if tables is None:
            tables = self._tables[request_id] = _BlockTables(0, [[] for _ in self.groups])
        new_block_ids = []
        for free, references, block_ids in zip(self._free, self._num_references, tables.block_ids, strict=True):
            new = [free.popleft() for _ in range(num_new)]
            for block_id in new:
                references[block_id] += 1
            block_ids += new
            new_block_ids.append(tuple(new))
        tables.length += num_new
        return Grant(request_id, 0, end - start, tuple(new_block_ids))

    def _release(self, request_id: str) -> None:
        tables = self._tables.pop(request_id)
        for index, block_ids in enumerate(tables.block_ids):
            self._release_blocks(index, block_ids)

    def _release_unseen(self, request_id: str, start: int) -> None:
        """Give back what left the window of every row from `start` on."""
        tables = self._tables.get(request_id)
        if tables is None:
            return
        for index, group in self._windowed:
            block_ids = tables.block_ids[index]
            num_given_back = tables.length - len(block_ids)
            num_unseen = group.first_visible_block(start) - num_given_back
            if num_unseen > 0:
                self._release_blocks(index, block_ids[:num_unseen])
                del block_ids[:num_unseen]

    def _release_blocks(self, index: int, block_ids: list[int]) -> None:
        free, references = self._free[index], self._num_references[index]
        for block_id in reversed(block_ids):        # the end of a sequence is reused before its beginning
            references[block_id] -= 1
            assert references[block_id] >= 0, f"KV group {index}: block {block_id} given back twice"
            if references[block_id] == 0:
                free.append(block_id)
