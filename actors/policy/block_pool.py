"""Who holds which KV block, and which blocks hold the beginning of whose prompt.

A KV group has its own id space 0 .. num_blocks - 1 (`GroupBlocks`). A sequence's block tables grow by the same number
of entries in every group; entry i holds positions [i * BLOCK_SIZE, (i + 1) * BLOCK_SIZE). In a group with a window the
leading entries are given back once no row that is still to be planned can see them. Plans run in the order sent, so a
block may be handed on at once (rule 1).

Prefix cache. A full block is findable from the plan that fills it: within a layer all rows of a step store their keys
and values before any of them reads. So whoever comes in the same step can share it; if that step fails, so does he
(`Grant.depends`). The block after the last shared one is copied, when an earlier step has filled a block with the same
first tokens: nobody ever writes to a block that another one reads.
"""
from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Any

from actors.messages import Grant, Release, Reserve, Reserved, Want
from actors.policy.group_blocks import NO_STEPS, GroupBlocks, Steps
from actors.policy.kv_group import BLOCK_SIZE, Group, count_blocks

NUM_REMEMBERED_BEGINNINGS = 1024            # first blocks of prompts, to say that one is known under another root


@dataclass(slots=True, eq=False)
class _BlockTables:
    """What one sequence holds, and what is known of the tokens in it."""
    length: int                             # entries, those given back included; the same in every group
    block_ids: list[list[int]]              # per group, the entries still held: the last ones
    parent: bytes                           # the root, or the key of the block before `first_told`
    first_told: int                         # the block that keys[0] and token_ids[0] belong to
    keys: tuple[bytes, ...]
    token_ids: tuple[int, ...]
    num_findable: int                       # leading blocks that are in the indices, or were when they were filled
    depends: Steps                          # steps that fill what it found when it entered
    entered_step_id: int
    granted_step_id: int                    # when it last got something


@dataclass(slots=True, eq=False)
class _Hit:
    """What of a new sequence is there already."""
    num_blocks: int                         # whole blocks
    num_copied_tokens: int                  # of the block after them
    sources: list[int]                      # per group, the block to copy these from
    found: list[list[int | None]]           # per group, those of the whole blocks that rows see; None: in the tier

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * BLOCK_SIZE + self.num_copied_tokens


class BlockPool:
    """Blocks, references, indices and the free lists. `reserve` is the only way in and out."""

    def __init__(self, groups: tuple[Group, ...], *, poison: bool = False, told_group: int | None = None) -> None:
        """poison: name in each plan the blocks that nobody may read before they are written. told_group: say in each
        answer what changed in this group's index; None: nobody asks."""
        if not groups:
            raise ValueError("a KV cache needs at least one group")
        self.groups = groups
        self.blocks = [GroupBlocks(number, group, poison=poison) for number, group in enumerate(groups)]
        self._told_index = None if told_group is None else self.blocks[told_group].index
        if self._told_index is not None:
            self._told_index.changes = {}
        self._full = [blocks for blocks in self.blocks if blocks.group.window is None]
        self._windowed = [blocks for blocks in self.blocks if blocks.group.window is not None]
        self._tables: dict[str, _BlockTables] = {}
        self.step_id = -1                   # of the plan in the making
        self._reported_step_id = -1
        self._root_of: OrderedDict[tuple[int, ...], bytes] = OrderedDict()     # by a prompt's first ids

    @property
    def num_sequences(self) -> int:
        """Sequences that hold blocks."""
        return len(self._tables)

    @property
    def num_free(self) -> tuple[int, ...]:
        """Free blocks per group, those that can be found among them."""
        return tuple(blocks.num_free for blocks in self.blocks)

    @property
    def usage(self) -> float:
        """Share of blocks held in the fullest group, 0..1."""
        return max(1.0 - blocks.num_free / blocks.group.num_blocks for blocks in self.blocks)

    def reserve(self, request: Reserve) -> Reserved:
        """Forget what failed, apply the releases, give back what left a window, then grant in order until budget or
        blocks run out.

        A sequence that holds blocks gets as many of its tokens as the free blocks carry. A new one is let in only if
        all its tokens fit now, and only if nobody before it starved: a newcomer neither overtakes nor lives on
        blocks that the ones before it need next.
        """
        self._begin(request)
        for release in request.releases:
            self._release(release)
        for want in request.wants:
            tables = self._tables.get(want.request_id)
            if tables is not None:
                self._take_told(tables, want)
                if self._windowed:
                    self._release_unseen(tables, want.start)
        # As of here, where who enters is looked up: what the grants change is told with the next answer.
        index_changes = self._told_index.take_changes() if self._told_index is not None else ()
        grants = []
        first_new = None if not request.yielding else next(
            (want for want in request.wants if want.request_id not in self._tables), None)
        starved: list[str] = []
        budget = request.token_budget
        num_slots = len(request.wants) if request.num_slots is None else request.num_slots
        for want in self._in_order(request):
            if budget == 0:
                break
            tables = self._tables.get(want.request_id)
            if tables is not None:
                grant = self._grow(tables, want, budget)
            elif starved or num_slots == 0:
                break
            else:
                grant = self._enter(want, budget)
            if grant is None:
                starved.append(want.request_id)
                continue
            budget -= grant.num_new_tokens
            num_slots -= tables is None
            grants.append(grant)
        num_yielding = 0
        if first_new is not None and first_new.request_id not in self._tables:
            num_yielding = self._count_yielding(first_new, request.yielding)
        return Reserved(
            request.step_id, tuple(grants), tuple(starved),
            copies=tuple(copy for blocks in self.blocks for copy in blocks.copies),
            tier_out=tuple(move for blocks in self.blocks for move in blocks.tier_out),
            tier_in=tuple(move for blocks in self.blocks for move in blocks.tier_in),
            poisoned=tuple((blocks.number, block_id) for blocks in self.blocks for block_id in blocks.poisoned),
            num_yielding=num_yielding, index_changes=index_changes)

    def owners(self) -> tuple[dict[int, tuple[str, ...]], ...]:
        """Per group, each held block and the sequences that hold it."""
        owners: tuple[dict[int, tuple[str, ...]], ...] = tuple({} for _ in self.groups)
        for request_id, tables in self._tables.items():
            for owned, block_ids in zip(owners, tables.block_ids, strict=True):
                for block_id in block_ids:
                    owned[block_id] = (*owned.get(block_id, ()), request_id)
        return owners

    def describe(self) -> dict[str, Any]:
        """Every block with its owners, as plain data: what is held, findable, waits for a step, or lies in the tier."""
        groups = []
        for blocks, owners in zip(self.blocks, self.owners(), strict=True):
            rows = []
            for block_id in sorted({*owners, *blocks.cached}):
                key = blocks.index.key_of[block_id]
                rows.append({
                    "block": block_id, "owners": list(owners.get(block_id, ())),
                    "references": blocks.references[block_id], "key": key.hex() if key is not None else None,
                    "findable": blocks.index.is_findable(block_id),
                    "unproven_steps": sorted(blocks.unproven.get(block_id, ()))})
            groups.append({
                "window": blocks.group.window, "num_blocks": blocks.group.num_blocks, "num_held": len(owners),
                "num_cached": len(blocks.cached), "num_free": len(blocks.plain),
                "num_tier_blocks": blocks.group.num_tier_blocks, "num_in_tier": len(blocks.tier), "blocks": rows})
        return {"block_size": BLOCK_SIZE, "num_sequences": self.num_sequences, "groups": groups}

    def check_integrity(self) -> None:
        """Every block is free, cached or held, as often as its references say; what can be found is where it is said.

        Raises: AssertionError, naming group and block.
        """
        for number, blocks in enumerate(self.blocks):
            blocks.check_integrity(Counter(
                block_id for tables in self._tables.values() for block_id in tables.block_ids[number]))

    # What has happened

    def _begin(self, request: Reserve) -> None:
        self.step_id, self._reported_step_id = request.step_id, request.reported_step_id
        for blocks in self.blocks:
            blocks.begin(request.step_id)
            blocks.settle(request.reported_step_id, request.failed_steps)
            for keys in request.forgotten:
                blocks.forget_keys(keys)

    def _take_told(self, tables: _BlockTables, told: Want | Release) -> None:
        """Earlier plans fill the blocks that `told` names; now they can be found."""
        if not told.token_ids:
            return
        if tables.keys:
            tables.parent = tables.keys[-1]
        tables.first_told += len(tables.keys)
        tables.keys, tables.token_ids = told.keys, told.token_ids
        end = tables.first_told * BLOCK_SIZE + len(told.token_ids)
        # What a release tells comes from reported steps alone.
        self._make_findable(tables, end, self._unreported(tables) if isinstance(told, Want) else NO_STEPS)

    def _make_findable(self, tables: _BlockTables, end: int, steps: Steps) -> None:
        """Positions below `end` are filled once `steps` have succeeded: blocks whose ids are known can be found."""
        first, keys = tables.first_told, tables.keys
        stop = min(first + len(keys), end // BLOCK_SIZE)
        for entry in range(tables.num_findable, stop):
            i = entry - first
            parent = keys[i - 1] if i else tables.parent
            token_ids = tables.token_ids[i * BLOCK_SIZE:(i + 1) * BLOCK_SIZE]
            if entry == 0:
                self._remember_beginning(token_ids, parent)
            for blocks, block_id in self._holders(tables, entry):
                blocks.record(block_id, parent, keys[i], token_ids, steps)
        tables.num_findable = max(tables.num_findable, stop)
        part = tables.token_ids[len(keys) * BLOCK_SIZE:]
        if part and end >= first * BLOCK_SIZE + len(tables.token_ids):
            for blocks, block_id in self._holders(tables, first + len(keys)):
                blocks.record_part(block_id, keys[-1] if keys else tables.parent, part, steps)

    def _holders(self, tables: _BlockTables, entry: int) -> list[tuple[GroupBlocks, int]]:
        """The block at `entry` in each group that still holds it."""
        return [(blocks, block_ids[place]) for blocks, block_ids in zip(self.blocks, tables.block_ids, strict=True)
                if (place := entry - tables.length + len(block_ids)) >= 0]

    def _remember_beginning(self, token_ids: tuple[int, ...], root: bytes) -> None:
        self._root_of[token_ids] = root
        if len(self._root_of) > NUM_REMEMBERED_BEGINNINGS:
            self._root_of.popitem(last=False)

    # Giving back

    def _release(self, release: Release) -> None:
        tables = self._tables[release.request_id]
        self._take_told(tables, release)
        del self._tables[release.request_id]
        for blocks, block_ids in zip(self.blocks, tables.block_ids, strict=True):
            if release.has_failed:
                blocks.forget_blocks(block_ids)
            elif tables.granted_step_id == blocks.step_id:      # what this plan was to fill stays empty
                blocks.forget_blocks([block_id for block_id in block_ids
                                      if blocks.step_id in blocks.unproven.get(block_id, NO_STEPS)])
            elif block_ids and blocks.index.key_of[block_ids[-1]] is None and block_ids[-1] in blocks.unproven:
                # NOTE: if its step fails there will be no key to forget it by, and its owner is gone.
                blocks.forget_blocks(block_ids[-1:])
            blocks.give_back(block_ids)

    def _release_unseen(self, tables: _BlockTables, start: int) -> None:
        """Give back what left the window of every row from `start` on."""
        for blocks in self._windowed:
            block_ids = tables.block_ids[blocks.number]
            num_given_back = tables.length - len(block_ids)
            num_unseen = blocks.group.first_visible_block(start) - num_given_back
            if num_unseen > 0:
                blocks.give_back(block_ids[:num_unseen])
                del block_ids[:num_unseen]

    # Granting

    def _grow(self, tables: _BlockTables, want: Want, budget: int) -> Grant | None:
        """Blocks for the tokens wanted or as many of them as the free blocks carry; None if that is no token."""
        end = min(want.end, want.start + budget)
        num_new = max(0, count_blocks(end) - tables.length)
        for blocks in self.blocks:
            num_new = min(num_new, blocks.num_free)
        end = min(end, (tables.length + num_new) * BLOCK_SIZE)
        if end <= want.start:
            return None
        new_block_ids = []
        for blocks, block_ids in zip(self.blocks, tables.block_ids, strict=True):
            new = blocks.take(num_new)
            block_ids += new
            new_block_ids.append(tuple(new))
        self._fill(tables, num_new, end)
        return Grant(want.request_id, 0, end - want.start, tuple(new_block_ids))

    def _fill(self, tables: _BlockTables, num_new: int, end: int) -> None:
        """The plan in the making computes the tokens before `end`."""
        tables.length += num_new
        tables.granted_step_id = self.step_id
        self._make_findable(tables, end, self._unreported(tables) | {tables.granted_step_id})

    def _unreported(self, tables: _BlockTables) -> Steps:
        """Steps in flight that a sequence's blocks come from. NOTE: a block may be filled over several of them, and in
        any case comes from all tokens before it."""
        first = self._reported_step_id + 1
        return frozenset([*range(max(first, tables.entered_step_id), self.step_id),
                          *[step_id for step_id in tables.depends if step_id >= first]])

    def _enter(self, want: Want, budget: int) -> Grant | None:
        """Blocks for a new sequence: those that hold its beginning, and new ones for the tokens that the budget
        carries; None if not all of its tokens would fit."""
        hit = self._look_up(want)
        end = min(want.end, hit.num_tokens + budget)
        num_new = count_blocks(end) - hit.num_blocks
        for blocks, found in zip(self.blocks, hit.found, strict=True):
            num_shared = blocks.count_shared(found)
            if blocks.group.num_blocks_for(want.end) - num_shared > blocks.num_free:
                return None
            num_new = min(num_new, blocks.num_free - (len(found) - num_shared))
        end = min(end, (hit.num_blocks + num_new) * BLOCK_SIZE)
        assert end > hit.num_tokens, "a sequence that fits gets a token"

        depends: set[int] = set()
        held = [self._hold_found(blocks, want, hit, depends) for blocks in self.blocks]
        table_ids = []
        for blocks, block_ids, source in zip(self.blocks, held, hit.sources, strict=True):
            num_unseen = hit.num_blocks - len(block_ids)
            new = blocks.take(num_new)
            if hit.num_copied_tokens:
                blocks.copy(source, new[0])
            block_ids += new
            table_ids.append((0,) * num_unseen + tuple(block_ids))
        tables = self._tables[want.request_id] = _BlockTables(
            hit.num_blocks, held, want.root, 0, want.keys, want.token_ids, hit.num_blocks, frozenset(depends),
            self.step_id, self.step_id)
        cache_miss = self._explain(want, hit)           # as it is before this prompt is known
        self._fill(tables, num_new, end)
        return Grant(want.request_id, hit.num_tokens, end - hit.num_tokens, tuple(table_ids), tuple(depends),
                     cache_miss)

    def _hold_found(self, blocks: GroupBlocks, want: Want, hit: _Hit, depends: set[int]) -> list[int]:
        """Take hold of a group's blocks of `hit`; adds the steps that fill them to `depends`."""
        found = hit.found[blocks.number]
        held = [block_id for block_id in found if block_id is not None]
        blocks.hold(held)
        if blocks.unproven and not blocks.unproven.keys().isdisjoint(held):
            for block_id in held:
                depends.update(blocks.unproven.get(block_id, ()))
        first = hit.num_blocks - len(found)
        in_tier = [(first + i, blocks.tier.read(want.keys[first + i]))      # read first: taking blocks moves others out
                   for i, block_id in enumerate(found) if block_id is None]
        for entry, (slot, step_id) in in_tier:
            parent = want.keys[entry - 1] if entry else want.root
            token_ids = want.token_ids[entry * BLOCK_SIZE:(entry + 1) * BLOCK_SIZE]
            block_id, steps = blocks.fetch(slot, step_id, parent, want.keys[entry], token_ids)
            held.insert(entry - first, block_id)
            depends.update(steps)
        return held

    def _look_up(self, want: Want) -> _Hit:
        """What of a new sequence every group still has."""
        num_blocks = self._count_found(want)
        hit = _Hit(num_blocks, 0, [-1] * len(self.blocks), [])
        begin = num_blocks * BLOCK_SIZE
        token_ids = want.token_ids[begin:min(begin + BLOCK_SIZE, want.max_cached_tokens)]
        if token_ids:
            parent = want.keys[num_blocks - 1] if num_blocks else want.root
            parts = [blocks.index.find_part(parent, token_ids, blocks.unproven) for blocks in self.blocks]
            hit.num_copied_tokens = min(length for _, length in parts)
            hit.sources = [block_id for block_id, _ in parts]
        for blocks in self.blocks:
            first = blocks.group.first_visible_block(hit.num_tokens)
            hit.found.append(list(map(blocks.index.block_of.get, want.keys[first:num_blocks])))
        return hit

    def _count_found(self, want: Want) -> int:
        """Leading blocks of which every group still has what a row behind them can see."""
        count = min(len(want.keys), want.max_cached_tokens // BLOCK_SIZE)
        for blocks in self._full:
            count = blocks.count_leading(want.keys[:count])
        before = -1
        while self._windowed and count != before:
            before = count
            for blocks in self._windowed:
                count = blocks.count_in_window(want.keys[:count])
        return count

    def _count_yielding(self, want: Want, yielding: tuple[str, ...]) -> int:
        """How many of `yielding`, at least one, must give their blocks back so that a new sequence fits; 0: all of them
        are not enough."""
        found = self._look_up(want).found
        lacking = [blocks.group.num_blocks_for(want.end) - blocks.count_shared(shared) - blocks.num_free
                   for blocks, shared in zip(self.blocks, found, strict=True)]
        num_left: list[dict[int, int]] = [{} for _ in self.blocks]      # owners of the blocks that some of them hold
        for count, request_id in enumerate(yielding, start=1):
            for blocks, block_ids in zip(self.blocks, self._tables[request_id].block_ids, strict=True):
                owners = num_left[blocks.number]
                for block_id in block_ids:
                    owners[block_id] = owners.get(block_id, blocks.references[block_id]) - 1
                    # What the new one shares with them it holds itself, then.
                    lacking[blocks.number] -= owners[block_id] == 0 and block_id not in found[blocks.number]
            if max(lacking) <= 0:
                return count
        return 0

    def _in_order(self, request: Reserve) -> tuple[Want, ...]:
        """The wants as given, or with the new ones that have waited for less by what is found of them."""
        wants, num_in_order = request.wants, request.num_in_order
        if num_in_order is None or len(wants) - num_in_order < 2:
            return wants
        return (*wants[:num_in_order], *sorted(wants[num_in_order:], key=self._count_found, reverse=True))

    def _explain(self, want: Want, hit: _Hit) -> str:
        """Why no more of a prompt was found: see `Usage.cache_miss`."""
        if not want.root or want.max_cached_tokens < want.end - 1:
            return "off"
        num_blocks, limit = hit.num_blocks, min(len(want.keys), want.max_cached_tokens // BLOCK_SIZE)
        if hit.num_tokens == want.max_cached_tokens or num_blocks == limit > 0:
            return ""
        if limit == 0:
            return "short"
        if any(want.keys[num_blocks] in blocks.evicted for blocks in self.blocks):
            return "evicted"
        if num_blocks == 0 and self._root_of.get(want.token_ids[:BLOCK_SIZE], want.root) != want.root:
            return "root"
        return f"diverged:{num_blocks}"
