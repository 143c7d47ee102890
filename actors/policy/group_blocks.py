"""The blocks of one KV group: how often each is held, which are free, what can be found in them.

    plain  ──┐                                     ┌──▶ plain    free, nothing to be found in it: used first
             ├──take──▶ held (references >= 1) ──give_back──┤
    cached ──┘                                     └──▶ cached   free and findable: used least recently used first
    cached or held ──hold──▶ held

A block is *unproven* while a step in flight fills it, or fills what it was computed from.
"""
from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence

from actors.policy.host_tier import HostTier
from actors.policy.kv_group import BLOCK_SIZE, Group
from actors.policy.prefix_index import PrefixIndex

NUM_REMEMBERED_KEYS = 4096                  # of evicted blocks, to say why a prompt was not found

Steps = frozenset[int]
NO_STEPS: Steps = frozenset()


class GroupBlocks:
    def __init__(self, number: int, group: Group, *, poison: bool = False) -> None:
        """poison: say in each plan which blocks hold nothing that anybody may read."""
        self.number = number
        self.group = group
        self.index = PrefixIndex(group.num_blocks)
        self.tier = HostTier(group.num_tier_blocks)
        self.references = [0] * group.num_blocks
        self.unproven: dict[int, Steps] = {}                       # block → the steps in flight that must succeed
        self.plain: deque[int] = deque(range(group.num_blocks))
        self.cached: OrderedDict[int, None] = OrderedDict()
        self.evicted: OrderedDict[bytes, None] = OrderedDict()      # keys, the oldest first
        self.step_id = -1                                          # of the plan in the making
        self.copies: list[tuple[int, int, int]] = []               # of this plan, as the next three
        self.tier_out: list[tuple[int, int, int]] = []
        self.tier_in: list[tuple[int, int, int]] = []
        self.poisoned: dict[int, None] = {}
        self._poisons = poison

    @property
    def num_free(self) -> int:
        return len(self.plain) + len(self.cached)

    def begin(self, step_id: int) -> None:
        """Decisions from now on go into the plan of `step_id`; its second Reserve begins it once more."""
        if step_id != self.step_id:
            self.step_id = step_id
            self.tier.begin()
        self.copies, self.tier_out, self.tier_in, self.poisoned = [], [], [], {}

    def settle(self, reported_step_id: int, failed_steps: tuple[int, ...]) -> None:
        """Steps have reported: what they filled is proven, or void."""
        if failed_steps:
            failed = frozenset(failed_steps)
            self.forget_blocks([block_id for block_id, steps in self.unproven.items() if steps & failed])
        if self.unproven:
            self.unproven = {block_id: steps for block_id, steps in self.unproven.items()
                             if max(steps) > reported_step_id}
        self.tier.settle(reported_step_id, failed_steps)

    # Finding

    def has(self, key: bytes) -> bool:
        return key in self.index.block_of or key in self.tier

    def count_leading(self, keys: Sequence[bytes]) -> int:
        """How many of `keys` are here or in the tier, up to the first that is not."""
        count = self.index.count_leading(keys)
        if len(self.tier):
            while count < len(keys) and self.has(keys[count]):
                count += 1
        return count

    def count_in_window(self, keys: Sequence[bytes]) -> int:
        """How many of `keys`, so that the row behind them finds all that its window sees."""
        count = len(keys)
        while count > 0:
            first = self.group.first_visible_block(count * BLOCK_SIZE)
            missing = next((i for i in range(count - 1, first - 1, -1) if not self.has(keys[i])), None)
            if missing is None:
                break
            count = missing
        return count

    def record(self, block_id: int, parent: bytes, key: bytes, token_ids: tuple[int, ...], steps: Steps) -> None:
        """A held block is full, once `steps` have succeeded."""
        if self.index.add(block_id, parent, key, token_ids):
            self._set_unproven(block_id, steps)

    def record_part(self, block_id: int, parent: bytes, token_ids: tuple[int, ...], steps: Steps) -> None:
        """The first positions of a held block are filled, once `steps` have succeeded."""
        if self.index.add_part(block_id, parent, token_ids):
            self._set_unproven(block_id, steps)

    def _set_unproven(self, block_id: int, steps: Steps) -> None:
        if steps:
            self.unproven[block_id] = steps
        else:
            self.unproven.pop(block_id, None)

    def forget_keys(self, keys: Iterable[bytes]) -> None:
        """Nothing that these keys name may be found again."""
        found = [self.index.block_of[key] for key in keys if key in self.index.block_of]
        self.forget_blocks(found)
        for key in keys:
            self.tier.forget(key)

    def forget_blocks(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            self.index.remove(block_id)
            self.unproven.pop(block_id, None)
            if block_id in self.cached:
                del self.cached[block_id]
                self._give_to_plain(block_id)

    # Holding

    def count_shared(self, found: Sequence[int | None]) -> int:
        """How many of the blocks found are held already, and so take no free one."""
        references = self.references
        return len([block_id for block_id in found if block_id is not None and references[block_id]])

    def hold(self, block_ids: Iterable[int]) -> None:
        """One more owner each, of blocks that were found."""
        references, cached = self.references, self.cached
        for block_id in block_ids:
            if references[block_id] == 0:
                del cached[block_id]
            references[block_id] += 1

    def take(self, count: int) -> list[int]:
        """Free blocks, to be written."""
        taken = []
        for _ in range(count):
            block_id = self.plain.popleft() if self.plain else self._evict()
            self.references[block_id] = 1
            taken.append(block_id)
        if self._poisons:
            self.poisoned.update(dict.fromkeys(taken))
        return taken

    def _evict(self) -> int:
        """The cached block that was not used for longest; what is in it goes to the tier, if that has room."""
        block_id, _ = self.cached.popitem(last=False)
        key = self.index.key_of[block_id]
        if key is not None:
            if self.tier.num_slots and block_id not in self.unproven:
                slot = self.tier.write(key, self.step_id)
                if slot is not None:
                    self.tier_out.append((self.number, block_id, slot))
            self.evicted[key] = None
            if len(self.evicted) > NUM_REMEMBERED_KEYS:
                self.evicted.popitem(last=False)
        self.index.remove(block_id)
        self.unproven.pop(block_id, None)
        return block_id

    def give_back(self, block_ids: Sequence[int]) -> None:
        """One owner less each; they continue each other, so the last of them is reused before the first."""
        references, is_findable, cached = self.references, self.index.is_findable, self.cached
        for block_id in reversed(block_ids):
            references[block_id] -= 1
            assert references[block_id] >= 0, f"KV group {self.number}: block {block_id} given back twice"
            if references[block_id] == 0:
                if is_findable(block_id):
                    cached[block_id] = None
                else:
                    self._give_to_plain(block_id)

    def _give_to_plain(self, block_id: int) -> None:
        self.plain.append(block_id)
        if self._poisons:
            self.poisoned[block_id] = None

    # Moves

    def copy(self, source: int, destination: int) -> None:
        self.copies.append((self.number, source, destination))
        self.poisoned.pop(destination, None)

    def fetch(self, slot: int, step_id: int | None, parent: bytes, key: bytes,
              token_ids: tuple[int, ...]) -> tuple[int, Steps]:
        """A block to copy in from a slot of the tier, which `step_id` fills, and the steps that must succeed for it."""
        (block_id,) = self.take(1)
        self.tier_in.append((self.number, slot, block_id))
        self.poisoned.pop(block_id, None)
        steps = frozenset([self.step_id] if step_id is None else [self.step_id, step_id])
        self.record(block_id, parent, key, token_ids, steps)
        return block_id, steps

    def check_integrity(self, held: Counter[int]) -> None:
        """Every block is free once or held, as often as its references say; free and findable is cached.

        held: how many sequences hold each block. Raises: AssertionError, naming group and block.
        """
        name = f"KV group {self.number}"
        free_ids = {*self.plain, *self.cached}
        assert len(free_ids) == self.num_free, f"{name}: a block is in the free list twice"
        assert free_ids.isdisjoint(held), f"{name}: blocks {sorted(free_ids & held.keys())} free and held"
        assert self.num_free + len(held) == self.group.num_blocks, (
            f"{name}: {self.num_free} blocks free + {len(held)} held, not {self.group.num_blocks}")
        assert sum(self.references) == held.total(), f"{name}: references without an owner"
        for block_id, num_owners in held.items():
            assert self.references[block_id] == num_owners, (
                f"{name}: block {block_id} has {num_owners} owners, {self.references[block_id]} references")
        lost = [block_id for block_id in self.plain if self.index.is_findable(block_id)]
        assert not lost, f"{name}: blocks {lost} are findable, but not cached"
        lost = [block_id for block_id in (*self.cached, *self.unproven) if not self.index.is_findable(block_id)]
        assert not lost, f"{name}: blocks {lost} are cached or unproven, but not findable"
        self.index.check_integrity(name)
        self.tier.check_integrity(name)
