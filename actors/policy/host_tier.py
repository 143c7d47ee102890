"""Host memory for blocks of one KV group that had to leave the device: which key lies in which slot.

Slots are reused least recently used first. A block that comes back keeps its slot, so that it need not be copied out
again. Copies run with the plan of the step in whose Reserve they are decided (`StepPlan`).
"""
from __future__ import annotations

from collections import OrderedDict


class HostTier:
    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()     # least recently used first
        self._free = list(range(num_slots))[::-1]
        self._read: set[bytes] = set()                             # by the plan in the making: not to be overwritten
        self._unproven: dict[bytes, int] = {}                      # key → the step in flight that copies it out

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, key: bytes) -> bool:
        return key in self._slot_of

    def begin(self) -> None:
        """A new plan."""
        self._read.clear()

    def settle(self, reported_step_id: int, failed_steps: tuple[int, ...]) -> None:
        """Steps have reported: what they copied out is there, or not to be trusted."""
        for key, step_id in list(self._unproven.items()):
            if step_id in failed_steps:
                self.forget(key)
            elif step_id <= reported_step_id:
                del self._unproven[key]

    def write(self, key: bytes, step_id: int) -> int | None:
        """The slot to copy a block to; None if it is there already, or no slot can be had now."""
        if key in self._slot_of:
            self._slot_of.move_to_end(key)
            return None
        if self._free:
            slot = self._free.pop()
        else:
            oldest = next((key for key in self._slot_of if key not in self._read), None)
            if oldest is None:
                return None
            slot = self._slot_of.pop(oldest)
            self._unproven.pop(oldest, None)
        self._slot_of[key] = slot
        self._unproven[key] = step_id
        return slot

    def read(self, key: bytes) -> tuple[int, int | None]:
        """The slot to copy a block from, and the step in flight that fills it, if one does."""
        self._slot_of.move_to_end(key)
        self._read.add(key)
        return self._slot_of[key], self._unproven.get(key)

    def forget(self, key: bytes) -> None:
        """Not to be found any more, if it could be."""
        slot = self._slot_of.pop(key, None)
        if slot is not None:
            self._unproven.pop(key, None)
            self._free.append(slot)

    def check_integrity(self, name: str) -> None:
        """Raises: AssertionError where a slot is lost or taken twice."""
        slots = sorted([*self._slot_of.values(), *self._free])
        assert slots == list(range(self.num_slots)), f"{name}: slots of the host tier do not add up"
        assert self._unproven.keys() <= self._slot_of.keys(), f"{name}: the tier waits for a block that it lost"
