"""A device that plays a script: token = f(seed, position). It holds every plan against the contract of `StepPlan`.

Its KV memory remembers what was written where: a position, and a hash of all tokens up to it. A row that would read
anything but its own sequence's tokens, in order, is an assertion: so equal outputs mean that the plans were right, not
that nobody looked. What a failed step was to write is void: who reads it goes on, and his tokens are garbage, which
must never be delivered. What a failed row writes is not finite: who reads it fails with his next token.

It keeps a table of what it is told can be found, and answers look-ups from that.
"""
from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from actors.mailbox import Mailbox
from actors.messages import (
    Abort,
    Finish,
    IndexChange,
    NewSequence,
    NewTokens,
    SequenceTokens,
    StartedSequence,
    StepPlan,
    StepResult,
    TopLogprobs,
    Usage,
)
from actors.policy.block_keys import block_keys, root_key
from actors.policy.block_pool import BlockPool
from actors.policy.kv_group import BLOCK_SIZE, Group
from actors.policy.scheduler import SchedulerConfig, SchedulerMessage, SchedulerPolicy
from actors.sampling_params import SamplingParams

VOCAB_SIZE = 100
GARBAGE = -7                                # the token of rows whose step or row failed; must never be delivered
ROOT = root_key(model="scripted", adapter="", salt="", scope="")

Entry: TypeAlias = tuple[int, int] | Literal["void", "nan"] | None      # (position, hash of the tokens up to it)


def request(request_id: str, num_prompt_tokens: int, max_tokens: int = 4, *, stop_ids: tuple[int, ...] = (),
            min_tokens: int = 0, prompt_logprobs: int | None = None, logprobs: int | None = None,
            seed: int | None = None, prompt: tuple[int, ...] = (), root: bytes = ROOT, priority: int = 0,
            tenant: str = "", user: str = "", arrival_s: float = 0.0, parent_id: str = "",
            num_children: int = 1) -> NewSequence:
    """A prompt of its own, behind the first tokens that `prompt` gives. root: b"" for one that is not cached."""
    seed = zlib.crc32(request_id.encode()) if seed is None else seed
    sampling = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, prompt_logprobs=prompt_logprobs,
                              logprobs=logprobs, seed=seed)
    own = tuple(scripted_token(seed + 1, position) for position in range(len(prompt), num_prompt_tokens))
    prompt = prompt[:num_prompt_tokens] + own
    return NewSequence(request_id, prompt, sampling, max_tokens, stop_ids, seed, 0, arrival_s, root,
                       block_keys(root, prompt) if root else (), priority, tenant, user, parent_id, num_children)


def scripted_token(seed: int, position: int, masked: tuple[int, ...] = ()) -> int:
    token_id = zlib.crc32(f"{seed}:{position}".encode()) % VOCAB_SIZE
    while token_id in masked:
        token_id = (token_id + 1) % VOCAB_SIZE
    return token_id


def scripted_logprob(seed: int, position: int) -> float:
    return -(zlib.crc32(f"{seed}:{position}:logprob".encode()) % 1000) / 100


def solo(sequence: NewSequence) -> tuple[tuple[int, ...], Finish]:
    """The tokens that `sequence` gets when nothing disturbs it, and how it ends."""
    token_ids: list[int] = []
    while len(token_ids) < sequence.max_tokens:
        masked = sequence.stop_ids if len(token_ids) < sequence.sampling.min_tokens else ()
        token_ids.append(scripted_token(sequence.seed, len(sequence.token_ids) + len(token_ids), masked))
        if token_ids[-1] in sequence.stop_ids:
            return tuple(token_ids), "stop"
    return tuple(token_ids), "length"


def token_hashes(root: bytes, token_ids: list[int], known: list[int]) -> list[int]:
    """For each position a hash of root and all tokens up to it; the first of them are `known`."""
    hashes = list(known)
    for token_id in token_ids[len(known):]:
        hashes.append(hash((hashes[-1] if hashes else root, token_id)))
    return hashes


def change_index(index: dict[int, tuple[bytes, bytes, tuple[int, ...]]], changes: Iterable[IndexChange]) -> None:
    for block_id, key, parent, token_ids in changes:
        if key:
            index[block_id] = key, parent, token_ids
        else:
            index.pop(block_id, None)


@dataclass
class _Slot:
    started: StartedSequence
    root: bytes
    token_ids: list[int]
    block_tables: list[list[int]]
    hashes: list[int] = field(default_factory=list)     # see token_hashes
    num_computed: int | None = None         # None before its first chunk
    is_decoding: bool = False
    fault: Literal["void", "nan"] | None = None         # what it has read or done: what follows is garbage

    @property
    def num_known_at_start(self) -> int:
        return len(self.started.token_ids)

    def entry(self, position: int) -> Entry:
        """What it writes."""
        self.hashes = token_hashes(self.root, self.token_ids, self.hashes)
        return self.fault or (position, self.hashes[position])


class ScriptedDevice:
    """Runs plans. Raises: AssertionError where one breaks the contract."""

    def __init__(self, groups: tuple[Group, ...], max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.groups = groups
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.slots: dict[int, _Slot] = {}
        self.roots: dict[str, bytes] = {}   # of requests, where it is not ROOT: the device does not know of roots
        self.memory: list[list[list[Entry]]] = [[[None] * BLOCK_SIZE for _ in range(group.num_blocks)]
                                                for group in groups]
        self.tier: list[list[list[Entry]]] = [[[None] * BLOCK_SIZE for _ in range(group.num_tier_blocks)]
                                              for group in groups]
        self.index: dict[int, tuple[bytes, bytes, tuple[int, ...]]] = {}    # block → its key, the one before, its ids
        self.num_rows = self.num_copies = self.num_tier_out = self.num_tier_in = 0
        self.last_step_id = -1

    def run(self, plan: StepPlan, *, error: str = "", failed: tuple[str, ...] = (),
            pool: BlockPool | None = None) -> StepResult:
        """`error`: the step fails. `failed`: the rows of these requests do. `pool`: check who owns the blocks."""
        assert plan.step_id > self.last_step_id, "step ids go up"
        self.last_step_id = plan.step_id
        self._apply_changes(plan)
        hints = tuple((request_id, self.count_leading(root, keys, token_ids))
                      for request_id, root, keys, token_ids in plan.lookups)
        self._move_blocks(plan, is_failed=bool(error))
        rows = self._rows(plan)
        num_rows = sum(end - start for start, end in rows.values())
        assert num_rows == plan.num_tokens, f"plan says {plan.num_tokens} rows, it has {num_rows}"
        assert 0 < num_rows <= self.max_num_batched_tokens
        self.num_rows += num_rows
        if pool is not None:
            self._check_owners(plan, rows, pool)
        for slot_id in rows:
            slot = self.slots[slot_id]
            if error:
                slot.fault = "void"
            elif slot.started.request_id in failed:
                slot.fault = slot.fault or "nan"
        self._check_writers(rows)
        self._compute(rows)
        columns: list[tuple[int, int, int, float, TopLogprobs]] = []
        prompt: list[tuple[int, int, float, TopLogprobs]] = []
        failures = []
        for slot_id, (start, end) in rows.items():
            slot = self.slots[slot_id]
            started = slot.started
            is_last = slot.is_decoding or end == slot.num_known_at_start
            if slot.is_decoding:
                assert len(slot.token_ids) == end, "a decode row feeds on the token sampled last"
            slot.num_computed = end
            if started.sampling.prompt_logprobs is not None:
                for position in range(start + 1, min(end, started.num_prompt_tokens - 1) + 1):
                    prompt.append((slot_id, position, scripted_logprob(started.seed, position), ((position, -1.0),)))
            if is_last and started.sampling.max_tokens != 0:
                slot.is_decoding = True
                is_masked = end - started.num_prompt_tokens < started.sampling.min_tokens
                token_id = scripted_token(started.seed, end, started.stop_ids if is_masked else ())
                slot.token_ids.append(GARBAGE if slot.fault else token_id)
                logprob = scripted_logprob(started.seed, end)
                columns.append((slot_id, end, slot.token_ids[-1], logprob, ((token_id, logprob),)))
                if slot.fault == "nan":
                    failures.append((slot_id, "logits are not finite"))
        if error:
            return StepResult(plan.step_id, error=error, elapsed_s=0.5)
        slots, positions, token_ids, logprobs, tops = zip(*columns, strict=True) if columns else ((),) * 5
        prompt_slots, prompt_positions, prompt_logprobs, prompt_tops = (
            zip(*prompt, strict=True) if prompt else ((),) * 4)
        return StepResult(plan.step_id, slots, positions, token_ids, logprobs, tops, prompt_slots,
                          prompt_positions, prompt_logprobs, prompt_tops, tuple(failures), 0.5, hints)

    def count_leading(self, root: bytes, keys: tuple[bytes, ...], token_ids: tuple[int, ...]) -> int:
        assert keys == block_keys(root, token_ids)
        assert keys, "there is something to look for"
        assert len(keys) * BLOCK_SIZE == len(token_ids)
        known, parents = set(self.index.values()), (root, *keys)
        blocks = [(key, parents[i], token_ids[i * BLOCK_SIZE:(i + 1) * BLOCK_SIZE]) for i, key in enumerate(keys)]
        return next((i for i, block in enumerate(blocks) if block not in known), len(blocks))

    def _apply_changes(self, plan: StepPlan) -> None:
        change_index(self.index, plan.index_changes)
        for slot_id in plan.ended:
            del self.slots[slot_id]
        for started in plan.started:
            assert started.slot not in self.slots, f"slot {started.slot} is taken"
            assert 0 <= started.slot < self.max_num_seqs
            assert len({len(ids) for ids in started.block_ids}) == 1, "block tables grow alike in every group"
            self.slots[started.slot] = _Slot(started, self.roots.get(started.request_id, ROOT),
                                             list(started.token_ids), [list(ids) for ids in started.block_ids])
        for slot_id, group, block_ids in plan.new_blocks:
            assert block_ids
            self.slots[slot_id].block_tables[group] += block_ids

    def _move_blocks(self, plan: StepPlan, is_failed: bool) -> None:
        """A failed step may have moved nothing."""
        void: list[Entry] = ["void"] * BLOCK_SIZE
        for group, block_id, tier_slot in plan.tier_out:
            self.tier[group][tier_slot] = void if is_failed else list(self.memory[group][block_id])
        for group, source, destination in plan.copies:
            self.memory[group][destination] = void[:] if is_failed else list(self.memory[group][source])
        for group, block_id in plan.poisoned:
            self.memory[group][block_id] = [None] * BLOCK_SIZE
        for group, tier_slot, block_id in plan.tier_in:
            self.memory[group][block_id] = void[:] if is_failed else list(self.tier[group][tier_slot])
        self.num_copies += len(plan.copies)
        self.num_tier_out += len(plan.tier_out)
        self.num_tier_in += len(plan.tier_in)

    def _rows(self, plan: StepPlan) -> dict[int, tuple[int, int]]:
        """Slot → half-open range of positions to compute."""
        rows: dict[int, tuple[int, int]] = {}
        for slot_id, start, end in plan.chunks:
            slot = self.slots[slot_id]
            assert slot_id not in rows, "one chunk a slot"
            assert not slot.is_decoding, "a decoding slot has no chunks"
            assert slot.num_computed is None or start == slot.num_computed, "positions are computed in order, once"
            assert start < end <= slot.num_known_at_start, "a chunk holds known tokens"
            rows[slot_id] = (start, end)
        assert all(slot.is_decoding or slot_id in rows for slot_id, slot in self.slots.items()
                   if slot.num_computed is None), "a slot starts with a chunk"
        for slot_id in plan.resting:
            slot = self.slots[slot_id]
            assert slot.is_decoding or slot.started.sampling.max_tokens == 0, "only slots that are through rest"
        for slot_id, slot in self.slots.items():
            if slot.is_decoding and slot_id not in plan.resting:
                assert slot.num_computed is not None
                rows[slot_id] = (slot.num_computed, slot.num_computed + 1)
        return rows

    def _check_writers(self, rows: dict[int, tuple[int, int]]) -> None:
        for group in range(len(self.groups)):
            writers: dict[int, int] = {}
            for slot_id, (start, end) in rows.items():
                for entry in range(start // BLOCK_SIZE, (end - 1) // BLOCK_SIZE + 1):
                    block_id = self.slots[slot_id].block_tables[group][entry]
                    assert writers.setdefault(block_id, slot_id) == slot_id, f"block {block_id} has two writers"

    def _compute(self, rows: dict[int, tuple[int, int]]) -> None:
        """Every row writes before any reads, layer by layer: who reads a fault has it, and so do those who read him."""
        faults: list[object] = []
        while True:
            for slot_id, (start, end) in rows.items():
                slot = self.slots[slot_id]
                for memory, block_table in zip(self.memory, slot.block_tables, strict=True):
                    for position in range(start, end):
                        block = memory[block_table[position // BLOCK_SIZE]]
                        block[position % BLOCK_SIZE] = slot.entry(position)
            for slot_id, (start, end) in rows.items():
                self._read(self.slots[slot_id], start, end)
            before, faults = faults, [slot.fault for slot in self.slots.values()]
            if before == faults:
                return

    def _read(self, slot: _Slot, start: int, end: int) -> None:
        """What rows [start, end) read is what their sequence wrote, or would have."""
        if slot.fault is not None:
            return
        for memory, position, block_id in self._visible(slot, start, end):
            entry = memory[block_id][position % BLOCK_SIZE]
            if entry == "void" or entry == "nan":
                slot.fault = entry
                return
            assert entry == slot.entry(position), f"a row at {start} reads {entry} for {slot.entry(position)}"

    def _visible(self, slot: _Slot, start: int, end: int) -> Iterator[tuple[list[list[Entry]], int, int]]:
        for group, memory, block_table in zip(self.groups, self.memory, slot.block_tables, strict=True):
            first = 0 if group.window is None else max(0, start - group.window + 1)
            for position in range(first, end):
                yield memory, position, block_table[position // BLOCK_SIZE]

    def _check_owners(self, plan: StepPlan, rows: dict[int, tuple[int, int]], pool: BlockPool) -> None:
        """Rows read what their sequence holds; they write where no other reads, but for those that start with them."""
        starting = {started.request_id for started in plan.started}
        for group, owners in enumerate(pool.owners()):
            for slot_id, (start, end) in rows.items():
                slot = self.slots[slot_id]
                request_id = slot.started.request_id
                window = self.groups[group].window
                first = 0 if window is None else max(0, start - window + 1)
                for entry in range(first // BLOCK_SIZE, (end - 1) // BLOCK_SIZE + 1):
                    block_id = slot.block_tables[group][entry]
                    assert request_id in owners.get(block_id, ()), f"block {block_id} is not its own"
                    if entry >= start // BLOCK_SIZE:
                        assert set(owners[block_id]) - starting <= {request_id}, f"block {block_id} is others' too"


@dataclass
class Answer:
    """What one request has received."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, float, TopLogprobs]] = field(default_factory=list)
    finish: Finish | None = None
    error: str = ""
    error_field: str = ""
    usage: Usage | None = None
    retry_after_s: float | None = None


class Answers:
    """The tokenizer's place: takes NewTokens and sees that each request ends once."""

    def __init__(self) -> None:
        self.by_id: dict[str, Answer] = {}
        self.num_messages = 0

    def __getitem__(self, request_id: str) -> Answer:
        return self.by_id.setdefault(request_id, Answer())

    def send(self, message: NewTokens, /) -> None:
        assert message.accepted or message.rows or message.token_ids, "no empty messages"
        self.num_messages += bool(message.rows or message.token_ids)
        for request_id, token_id in zip(message.request_ids, message.token_ids, strict=True):
            self._take(SequenceTokens(request_id, (token_id,)))
        for row in message.rows:
            self._take(row)

    def _take(self, row: SequenceTokens) -> None:
        answer = self[row.request_id]
        assert answer.finish is None, f"{row.request_id} got something after its end"
        assert GARBAGE not in row.token_ids, "a failed row's token was delivered"
        assert row.token_ids or row.prompt_logprobs or row.finish, "an empty row"
        answer.token_ids += row.token_ids
        answer.logprobs += row.logprobs
        answer.prompt_logprobs += row.prompt_logprobs
        answer.finish, answer.error, answer.usage = row.finish, row.error, row.usage
        answer.error_field, answer.retry_after_s = row.error_field, row.retry_after_s
        assert (row.usage is not None) == (row.finish is not None), "usage comes with finish"
        assert bool(row.error) == (row.finish in ("rejected", "failed")), "errors come with a text"
        if row.usage is not None:
            assert row.usage.num_output_tokens == len(answer.token_ids)


def check_answer(sequence: NewSequence, answer: Answer) -> None:
    """A finished answer is the undisturbed one; one cut short is its beginning."""
    token_ids, finish = solo(sequence)
    got = tuple(answer.token_ids)
    if answer.finish in ("stop", "length"):
        assert (got, answer.finish) == (token_ids, finish)
        if sequence.sampling.prompt_logprobs is not None:
            expected = [(position, scripted_logprob(sequence.seed, position), ((position, -1.0),))
                        for position in range(1, len(sequence.token_ids))]
            assert answer.prompt_logprobs == expected
        if sequence.sampling.logprobs is not None:
            num_prompt = len(sequence.token_ids)
            assert answer.logprobs == [scripted_logprob(sequence.seed, num_prompt + i) for i in range(len(got))]
    else:
        assert got == token_ids[:len(got)]
    if sequence.sampling.logprobs is None:
        assert answer.logprobs == []


class ScriptedExecutor:
    """The executor's place beside the real actors: runs a plan when it comes, gives its result when told to."""

    def __init__(self, device: ScriptedDevice, scheduler: Mailbox[SchedulerMessage],
                 errors: dict[int, str] | None = None) -> None:
        """errors: step id → what that step fails with."""
        self.device = device
        self.scheduler = scheduler
        self.errors = errors or {}
        self.results: deque[StepResult] = deque()
        self.plans: list[StepPlan] = []

    def send(self, plan: StepPlan, /) -> None:
        self.plans.append(plan)
        self.results.append(self.device.run(plan, error=self.errors.get(plan.step_id, "")))

    def deliver(self) -> None:
        """The oldest result."""
        self.scheduler.send(self.results.popleft())


class SyncEngine:
    """Policy, pool and device without actors: each exchange is a call, results come when `deliver` is called."""

    def __init__(self, groups: tuple[Group, ...] = (Group(64),), *, max_num_seqs: int = 4,
                 max_num_batched_tokens: int = 64, max_model_len: int = 1000, overlap: int = 0,
                 poison: bool = False, asks_device: bool = False, **config: Any) -> None:
        """config: the other fields of SchedulerConfig."""
        self.now_s = 0.0
        self.policy = SchedulerPolicy(SchedulerConfig(
            max_num_seqs, max_num_batched_tokens, max_model_len, groups, overlap, asks_device=asks_device, **config),
            lambda: self.now_s)
        first_full = next((number for number, group in enumerate(groups) if group.window is None), 0)
        self.pool = BlockPool(groups, poison=poison, told_group=first_full if asks_device else None)
        self.device = ScriptedDevice(groups, max_num_seqs, max_num_batched_tokens)
        self.results: deque[StepResult] = deque()
        self.answers = Answers()

    def add(self, *sequences: NewSequence) -> None:
        self.device.roots.update((sequence.request_id, sequence.root) for sequence in sequences)
        self.policy.apply(sequences)
        self._take_output()

    def abort(self, request_id: str, reason: Literal["aborted", "stop"] = "aborted") -> None:
        self.policy.apply([Abort(request_id, reason)])
        self._take_output()

    def plan(self, *, error: str = "", failed: tuple[str, ...] = ()) -> StepPlan | None:
        """One round. The device runs the plan at once; its result waits."""
        reserved = self.pool.reserve(self.policy.wants())
        again = self.policy.preempt(reserved)
        if again is not None:
            assert again.releases, "asking again without giving anything is pointless"
            reserved = self.pool.reserve(again)
        plan = self.policy.plan(reserved)
        self.pool.check_integrity()
        if plan is not None:
            self.results.append(self.device.run(plan, error=error, failed=failed, pool=self.pool))
        return plan

    def plan_all(self) -> list[StepPlan]:
        """As many steps as the overlap allows, as the actor does."""
        plans = []
        while self.policy.has_work():
            plan = self.plan()
            if plan is not None:
                plans.append(plan)
            elif self.policy.num_in_flight:
                break
        return plans

    def deliver(self) -> None:
        """The oldest result."""
        self.policy.apply([self.results.popleft()])
        self._take_output()

    def step(self) -> list[StepPlan]:
        plans = self.plan_all()
        if self.results:
            self.deliver()
        return plans

    def drain(self) -> list[StepPlan]:
        """Until nothing is left. All blocks must be free then, and nothing remembered."""
        plans: list[StepPlan] = []
        while not self.policy.is_idle:
            assert len(plans) < 10_000, "no end in sight"
            plans += self.step()
        self.check_drained()
        return plans

    def check_drained(self) -> None:
        assert self.policy.is_idle
        assert len(self.policy.running) == len(self.policy.waiting) == 0
        assert self.policy.num_in_flight == len(self.results) == len(self.policy.arrivals) == 0
        assert self.policy.stats.num_running == self.policy.stats.num_waiting == 0
        assert self.pool.num_sequences == 0
        assert self.pool.num_free == tuple(group.num_blocks for group in self.pool.groups)
        self.pool.check_integrity()

    def check_told(self) -> None:
        """What the device was told of and what is still to be told are, together, what can be found."""
        for blocks in self.pool.blocks:
            index, known = blocks.index, dict(self.device.index)
            if index.changes is None:
                continue
            change_index(known, (*self.policy._device_index.changes, *index.changes.values()))
            assert known == {block_id: (key, parent, index._continuations[parent][block_id])
                             for block_id, (key, parent) in enumerate(zip(index.key_of, index._parent_of, strict=True))
                             if key is not None and parent is not None}

    def _take_output(self) -> None:
        output = self.policy.take_output()
        if output is not None:
            self.answers.send(output)
