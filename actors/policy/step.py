"""A step of the scheduler: first in the making, then in flight."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from actors.messages import Grant, Reserved, Want
from actors.policy.sequence import Sequence


@dataclass(slots=True, eq=False)
class Round:
    """A step in the making."""
    token_budget: int                       # for the wants
    ready: list[Sequence]                   # decode one token in blocks that they hold
    resting: list[Sequence]                 # all planned, results outstanding
    wants: dict[str, Want]
    victims: list[Sequence]                 # would yield to the first who waits, the first of them first
    asks_for_waiting: bool                  # some who wait could enter, if there are blocks
    grants: tuple[Grant, ...] = ()          # of the first answer, where there was a second one
    poisoned: tuple[tuple[int, int], ...] = ()      # likewise
    has_starved: bool = False               # somebody, at the first answer
    has_preempted: bool = False


@dataclass(slots=True, eq=False)
class Step:
    """A step in flight. Results name slots; whose they were is remembered here, as slots are given on meanwhile."""
    num_decoding: int
    num_chunk_tokens: int
    rows: dict[int, Sequence] = field(default_factory=dict)             # by slot
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)    # (sequence, end)


def count_granted(grants: Iterable[Grant]) -> int:
    """Tokens of the step."""
    return sum(grant.num_new_tokens for grant in grants)


def find_poisoned(this: Round, reserved: Reserved) -> tuple[tuple[int, int], ...]:
    """Blocks that nobody may read before they are written, after both answers: what the second one copies to a block
    that the first one named is not to be lost."""
    written = {(group, destination) for group, _, destination in reserved.copies}
    return tuple(block for block in this.poisoned if block not in written) + reserved.poisoned
