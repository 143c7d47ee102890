"""Who comes first: one class a scheduling policy. The scheduler's loop is the same for all of them.

Whatever the order, running sequences precede waiting ones, a preempted one comes before its equals, and the tail of
`running` yields first: its head always gets on, so everybody ends.
"""
from __future__ import annotations

from collections import OrderedDict, deque
from heapq import heapify, heappop, heappush, nsmallest
from itertools import islice, takewhile
from math import inf
from typing import TypeAlias

from actors.policy.kv_group import BLOCK_SIZE
from actors.policy.sequence import Sequence
from actors.policy.step_time import StepTime

POLICIES = ("fcfs", "priority", "lpm", "fair", "deadline")

AGEING_S = 60.0                             # so long a wait is worth one step of priority
MAX_OVERTAKEN_S = 5.0                       # lpm: who has waited for so long is not overtaken any more
NUM_LOOKED_AT = 64                          # lpm: waiting sequences among which the longest prefix is looked for


class Order:
    """First come, first served."""

    def __init__(self, running: dict[str, Sequence], waiting: OrderedDict[str, Sequence]) -> None:
        """The scheduler's own. Who waits is in order of arrival, the preempted before all others."""
        self.running, self.waiting = running, waiting

    def pick(self, count: int, now_s: float) -> tuple[list[Sequence], int]:
        """Who may enter, in order, where there are `count` slots; and how many of them keep their place. The others
        enter by how much of them the prefix cache holds."""
        picked = list(islice(self.waiting.values(), count))
        return picked, len(picked)

    def arrive(self, sequence: Sequence) -> None:
        """It is about to wait."""

    def enter(self, sequence: Sequence) -> None:
        """Into `running`, at its place: the last one yields first."""
        self.running[sequence.request_id] = sequence

    def leave(self, sequence: Sequence) -> None:
        """It is out of the engine."""

    def find_victims(self, now_s: float) -> list[Sequence]:
        """Running sequences that would yield to the first who waits, the first of them first."""
        return []

    def limit_prefill(self, num_decoding: int, num_tokens: int) -> int:
        """How many prompt tokens a step may take, where there is room for `num_tokens` beside `num_decoding` rows."""
        return num_tokens

    def observe(self, num_decoding: int, num_prompt_tokens: int, elapsed_s: float) -> None:
        """A step has reported."""


class PriorityOrder(Order):
    """The lower `priority` first. It also takes the place of running sequences of a higher one, if there is no other
    and theirs is enough.

    A wait of AGEING_S counts as one step of priority, so that nobody waits for ever. It takes no running sequence's
    place, but who got in by it keeps his.
    """
    _now_s = 0.0                            # of the latest pick

    def pick(self, count: int, now_s: float) -> tuple[list[Sequence], int]:
        self._now_s = now_s
        picked = nsmallest(count, self.waiting.values(), key=self._aged_priority)
        return picked, len(picked)

    def _aged_priority(self, sequence: Sequence) -> int:
        return sequence.request.priority - int((self._now_s - sequence.request.arrival_s) // AGEING_S)

    def enter(self, sequence: Sequence) -> None:
        sequence.rank = self._aged_priority(sequence)
        super().enter(sequence)
        ordered = sorted(self.running.items(), key=lambda item: (item[1].rank, item[1].number))
        self.running.clear()
        self.running.update(ordered)

    def find_victims(self, now_s: float) -> list[Sequence]:
        if not (self.waiting and self.running):
            return []
        (first,), _ = self.pick(1, now_s)
        priority, rank = first.request.priority, self._aged_priority(first)
        return list(takewhile(lambda last: priority < last.request.priority and rank < last.rank,
                              reversed(self.running.values())))


class LongestPrefixOrder(Order):
    """Whose prompt is cached the most comes first, so that it is used before it is evicted; nobody is overtaken for
    longer than MAX_OVERTAKEN_S, nor after he ran once.

    Source: Zheng et al. 2024, SGLang, section 3 (longest prefix match first).
    """

    def pick(self, count: int, now_s: float) -> tuple[list[Sequence], int]:
        looked_at = list(islice(self.waiting.values(), max(count, NUM_LOOKED_AT)))
        first: list[Sequence] = []
        others: list[Sequence] = []
        for sequence in looked_at:
            is_due = sequence.has_started or now_s - sequence.request.arrival_s > MAX_OVERTAKEN_S
            (first if is_due else others).append(sequence)
        return first + others, len(first)


Name: TypeAlias = tuple[str, ...]           # of who shares: (tenant,), or (tenant, user)


class FairOrder(Order):
    """The tenant who got the fewest tokens comes first, and among his users the one who got the fewest: those computed
    of their prompts and those of their answers, in all. So a tenant gets no more for naming many users.

    Who was away does not save up: he comes back with no less than the one who got the fewest meanwhile.
    Source: Sheng et al. 2024, "Fairness in Serving Large Language Models" (virtual token counter).
    """

    def __init__(self, running: dict[str, Sequence], waiting: OrderedDict[str, Sequence]) -> None:
        super().__init__(running, waiting)
        self._got: dict[Name, int] = {}     # in sequences that have left

    def _all_got(self) -> dict[Name, int]:
        """Of those who have sequences in the engine."""
        got: dict[Name, int] = {}
        for sequence in (*self.running.values(), *self.waiting.values()):
            num_got = _num_got(sequence)
            for name in _names(sequence):
                got[name] = got.get(name, self._got.get(name, 0)) + num_got
        return got

    def arrive(self, sequence: Sequence) -> None:
        got = self._all_got()
        least = _least(got)
        for name in _names(sequence):
            if name not in got and name[:-1] in least:
                self._got[name] = max(self._got.get(name, 0), least[name[:-1]])

    def leave(self, sequence: Sequence) -> None:
        for name in _names(sequence):
            self._got[name] = self._got.get(name, 0) + _num_got(sequence)
        # Who is away and has not got more than the least is raised to that when he comes: no need to remember him.
        got = self._all_got()
        least = _least(got)
        self._got = {name: num for name, num in self._got.items() if name in got or num > least.get(name[:-1], inf)}

    def pick(self, count: int, now_s: float) -> tuple[list[Sequence], int]:
        got = self._all_got()
        queues: dict[Name, deque[Sequence]] = {}
        users: dict[Name, list[tuple[int, int, Name]]] = {}     # by tenant, as a heap
        for sequence in self.waiting.values():
            tenant, user = _names(sequence)
            if user not in queues:
                users.setdefault(tenant, []).append((got[user], len(queues), user))
                queues[user] = deque()
            queues[user].append(sequence)
        tenants = [(got[tenant], place, tenant) for place, tenant in enumerate(users)]
        for heap in (tenants, *users.values()):
            heapify(heap)
        picked: list[Sequence] = []
        while tenants and len(picked) < count:
            num_tenant_got, tenant_place, tenant = heappop(tenants)
            num_user_got, user_place, user = heappop(users[tenant])
            sequence = queues[user].popleft()
            picked.append(sequence)
            if queues[user]:
                heappush(users[tenant], (num_user_got + sequence.num_known_tokens, user_place, user))
            if users[tenant]:
                heappush(tenants, (num_tenant_got + sequence.num_known_tokens, tenant_place, tenant))
        return picked, len(picked)


def _names(sequence: Sequence) -> tuple[Name, Name]:
    tenant, user = sequence.request.tenant, sequence.request.user
    return (tenant,), (tenant, user)


def _least(got: dict[Name, int]) -> dict[Name, int]:
    """The least that anybody got, among all tenants and among each one's users: by what their names begin with."""
    least: dict[Name, int] = {}
    for name, num in got.items():
        least[name[:-1]] = min(num, least.get(name[:-1], num))
    return least


def _num_got(sequence: Sequence) -> int:
    if not sequence.has_started:
        return 0
    return sequence.num_prompt_tokens - sequence.num_cached_tokens + len(sequence.output_ids)


class DeadlineOrder(Order):
    """Whose first token is due soonest comes first, his prompt's own time taken off; and while answers are under way a
    step takes only so many prompt tokens that it probably keeps the target between two of their tokens.

    Source: Agrawal et al. 2024, Sarathi-Serve (chunks by a latency target).
    """

    def __init__(self, running: dict[str, Sequence], waiting: OrderedDict[str, Sequence],
                 ttft_target_s: float | None, itl_target_s: float | None) -> None:
        """Targets from arrival to first token, and between two tokens; None: there is none."""
        super().__init__(running, waiting)
        self.ttft_target_s, self.itl_target_s = ttft_target_s, itl_target_s
        self.step_time = StepTime()

    def pick(self, count: int, now_s: float) -> tuple[list[Sequence], int]:
        picked = nsmallest(count, self.waiting.values(), key=self._due_s)
        return picked, len(picked)

    def _due_s(self, sequence: Sequence) -> float:
        """When its prompt must begin."""
        if sequence.output_ids:             # preempted: its next token is late already
            return -inf
        prompt_s = sequence.num_known_tokens * self.step_time.per_prompt_token_s
        return sequence.request.arrival_s + (0.0 if self.ttft_target_s is None else self.ttft_target_s - prompt_s)

    def limit_prefill(self, num_decoding: int, num_tokens: int) -> int:
        per_token_s = self.step_time.per_prompt_token_s
        if self.itl_target_s is None or num_decoding == 0 or per_token_s == 0.0:
            return num_tokens
        room = int((self.itl_target_s - self.step_time.decode_s(num_decoding)) / per_token_s)
        return min(num_tokens, max(room, BLOCK_SIZE))           # a prompt gets on whatever the target

    def observe(self, num_decoding: int, num_prompt_tokens: int, elapsed_s: float) -> None:
        self.step_time.observe(num_decoding, num_prompt_tokens, elapsed_s)


def check_policy(policy: str, ttft_target_s: float | None, itl_target_s: float | None) -> None:
    """Raises: ValueError naming the setting."""
    if policy not in POLICIES:
        raise ValueError(f"scheduling_policy must be one of {', '.join(POLICIES)}, got {policy!r}")
    for name, value in (("ttft_target_s", ttft_target_s), ("itl_target_s", itl_target_s)):
        if value is not None and not 0 < value < inf:
            raise ValueError(f"{name} must be greater than 0 seconds, got {value!r}")
        if value is not None and policy != "deadline":
            raise ValueError(f"{name} is for scheduling_policy deadline, not {policy}")
    if policy == "deadline" and ttft_target_s is None and itl_target_s is None:
        raise ValueError("scheduling_policy deadline needs ttft_target_s or itl_target_s")


def make_order(policy: str, ttft_target_s: float | None, itl_target_s: float | None, running: dict[str, Sequence],
               waiting: OrderedDict[str, Sequence]) -> Order:
    """Of a policy that was checked."""
    if policy == "deadline":
        return DeadlineOrder(running, waiting, ttft_target_s, itl_target_s)
    orders = {"fcfs": Order, "priority": PriorityOrder, "lpm": LongestPrefixOrder, "fair": FairOrder}
    return orders[policy](running, waiting)
