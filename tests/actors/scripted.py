"""A device that plays a script: token = f(seed, position). It holds every plan against the contract of `StepPlan`.

Its KV memory remembers which token of whom was written where. A row that would read anything but its own sequence's
tokens, in order, is an assertion: so equal outputs mean that the plans were right, not that nobody looked.
"""
from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from actors.mailbox import Mailbox
from actors.messages import (
    Abort,
    Finish,
    NewSequence,
    NewTokens,
    SequenceTokens,
    StartedSequence,
    StepPlan,
    StepResult,
    TopLogprobs,
    Usage,
)
from actors.policy.block_pool import BLOCK_SIZE, BlockPool, Group
from actors.policy.scheduler import SchedulerConfig, SchedulerMessage, SchedulerPolicy
from actors.sampling_params import SamplingParams

VOCAB_SIZE = 100
GARBAGE = -7                                # the token of rows whose step or row failed; must never be delivered


def request(request_id: str, num_prompt_tokens: int, max_tokens: int = 4, *, stop_ids: tuple[int, ...] = (),
            min_tokens: int = 0, prompt_logprobs: int | None = None, logprobs: int | None = None,
            seed: int | None = None) -> NewSequence:
    seed = zlib.crc32(request_id.encode()) if seed is None else seed
    sampling = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, prompt_logprobs=prompt_logprobs,
                              logprobs=logprobs, seed=seed)
    prompt = tuple((seed + 3 * position) % VOCAB_SIZE for position in range(num_prompt_tokens))
    return NewSequence(request_id, prompt, sampling, max_tokens, stop_ids, seed, 0, 0.0)


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


@dataclass
class _Slot:
    started: StartedSequence
    token_ids: list[int]
    block_tables: list[list[int]]
    num_computed: int | None = None         # None before its first chunk
    is_decoding: bool = False
    is_tainted: bool = False                # a step or row failed: what follows is garbage

    @property
    def num_known_at_start(self) -> int:
        return len(self.started.token_ids)


class ScriptedDevice:
    """Runs plans. Raises: AssertionError where one breaks the contract."""

    def __init__(self, groups: tuple[Group, ...], max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.groups = groups
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.slots: dict[int, _Slot] = {}
        self.memory: list[list[object]] = [[None] * (group.num_blocks * BLOCK_SIZE) for group in groups]
        self.num_rows = 0
        self.last_step_id = -1

    def run(self, plan: StepPlan, *, error: str = "", failed: tuple[str, ...] = (),
            pool: BlockPool | None = None) -> StepResult:
        """`error`: the step fails. `failed`: the rows of these requests do. `pool`: check who owns the blocks."""
        assert plan.step_id > self.last_step_id, "step ids go up"
        self.last_step_id = plan.step_id
        self._apply_changes(plan)
        rows = self._rows(plan)
        num_rows = sum(end - start for start, end in rows.values())
        assert num_rows == plan.num_tokens, f"plan says {plan.num_tokens} rows, it has {num_rows}"
        assert 0 < num_rows <= self.max_num_batched_tokens
        self.num_rows += num_rows
        self._store(rows, is_failed=bool(error))
        if pool is not None:
            self._check_owners(rows, pool)
        columns: list[tuple[int, int, int, float, TopLogprobs]] = []
        prompt: list[tuple[int, int, float, TopLogprobs]] = []
        failures = []
        for slot_id, (start, end) in rows.items():
            slot = self.slots[slot_id]
            started = slot.started
            is_last = slot.is_decoding or end == slot.num_known_at_start
            if slot.is_decoding:
                assert len(slot.token_ids) == end, "a decode row feeds on the token sampled last"
            if error or started.request_id in failed:
                slot.is_tainted = True
                failures.append((slot_id, "logits are not finite"))
            else:
                self._check_visible(slot, start, end)
            slot.num_computed = end
            if started.sampling.prompt_logprobs is not None:
                for position in range(start + 1, min(end, started.num_prompt_tokens - 1) + 1):
                    prompt.append((slot_id, position, scripted_logprob(started.seed, position), ((position, -1.0),)))
            if is_last:
                slot.is_decoding = True
                is_masked = end - started.num_prompt_tokens < started.sampling.min_tokens
                token_id = scripted_token(started.seed, end, started.stop_ids if is_masked else ())
                slot.token_ids.append(GARBAGE if slot.is_tainted else token_id)
                logprob = scripted_logprob(started.seed, end)
                columns.append((slot_id, end, slot.token_ids[-1], logprob, ((token_id, logprob),)))
        if error:
            return StepResult(plan.step_id, error=error, elapsed_s=0.5)
        slots, positions, token_ids, logprobs, tops = zip(*columns, strict=True) if columns else ((),) * 5
        prompt_slots, prompt_positions, prompt_logprobs, prompt_tops = (
            zip(*prompt, strict=True) if prompt else ((),) * 4)
        return StepResult(plan.step_id, slots, positions, token_ids, logprobs, tops, prompt_slots,
                          prompt_positions, prompt_logprobs, prompt_tops, tuple(failures), 0.5)

    def _apply_changes(self, plan: StepPlan) -> None:
        for slot_id in plan.ended:
            del self.slots[slot_id]
        for started in plan.started:
            assert started.slot not in self.slots, f"slot {started.slot} is taken"
            assert 0 <= started.slot < self.max_num_seqs
            assert len({len(ids) for ids in started.block_ids}) == 1, "block tables grow alike in every group"
            self.slots[started.slot] = _Slot(started, list(started.token_ids), [list(ids) for ids in started.block_ids])
        for slot_id, group, block_ids in plan.new_blocks:
            assert block_ids
            self.slots[slot_id].block_tables[group] += block_ids

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
            assert self.slots[slot_id].is_decoding, "only decoding slots rest"
        for slot_id, slot in self.slots.items():
            if slot.is_decoding and slot_id not in plan.resting:
                assert slot.num_computed is not None
                rows[slot_id] = (slot.num_computed, slot.num_computed + 1)
        return rows

    def _store(self, rows: dict[int, tuple[int, int]], is_failed: bool) -> None:
        for group, memory in enumerate(self.memory):
            writers: dict[int, int] = {}
            for slot_id, (start, end) in rows.items():
                slot = self.slots[slot_id]
                for position in range(start, end):
                    block_id = slot.block_tables[group][position // BLOCK_SIZE]
                    assert writers.setdefault(block_id, slot_id) == slot_id, f"block {block_id} has two writers"
                    entry = None if is_failed else (slot.started.request_id, position, slot.token_ids[position])
                    memory[block_id * BLOCK_SIZE + position % BLOCK_SIZE] = entry

    def _check_visible(self, slot: _Slot, start: int, end: int) -> None:
        """What rows [start, end) read is what their sequence wrote."""
        if slot.is_tainted:
            return
        for group, memory, block_table in zip(self.groups, self.memory, slot.block_tables, strict=True):
            first = 0 if group.window is None else max(0, start - group.window + 1)
            for position in range(first, end):
                block_id = block_table[position // BLOCK_SIZE]
                entry = memory[block_id * BLOCK_SIZE + position % BLOCK_SIZE]
                expected = (slot.started.request_id, position, slot.token_ids[position])
                assert entry == expected, f"a row at {start} reads {entry} for {expected}"

    def _check_owners(self, rows: dict[int, tuple[int, int]], pool: BlockPool) -> None:
        for group, owners in enumerate(pool.owners()):
            for slot_id, (start, end) in rows.items():
                slot = self.slots[slot_id]
                window = self.groups[group].window
                first = 0 if window is None else max(0, start - window + 1)
                for entry in range(first // BLOCK_SIZE, (end - 1) // BLOCK_SIZE + 1):
                    block_id = slot.block_tables[group][entry]
                    assert owners.get(block_id) == (slot.started.request_id,), f"block {block_id} is not its own"


@dataclass
class Answer:
    """What one request has received."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, float, TopLogprobs]] = field(default_factory=list)
    finish: Finish | None = None
    error: str = ""
    usage: Usage | None = None


class Answers:
    """The tokenizer's place: takes NewTokens and sees that each request ends once."""

    def __init__(self) -> None:
        self.by_id: dict[str, Answer] = {}
        self.num_messages = 0

    def __getitem__(self, request_id: str) -> Answer:
        return self.by_id.setdefault(request_id, Answer())

    def send(self, message: NewTokens, /) -> None:
        assert message.rows, "no empty messages"
        self.num_messages += 1
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
                 max_num_batched_tokens: int = 64, max_model_len: int = 1000, overlap: int = 0) -> None:
        self.policy = SchedulerPolicy(SchedulerConfig(
            max_num_seqs, max_num_batched_tokens, max_model_len, groups, overlap))
        self.pool = BlockPool(groups)
        self.device = ScriptedDevice(groups, max_num_seqs, max_num_batched_tokens)
        self.results: deque[StepResult] = deque()
        self.answers = Answers()

    def add(self, *sequences: NewSequence) -> None:
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
        assert self.policy.num_in_flight == len(self.results) == 0
        assert self.policy.stats.num_running == self.policy.stats.num_waiting == 0
        assert self.pool.num_sequences == 0
        assert self.pool.num_free == tuple(group.num_blocks for group in self.pool.groups)
        self.pool.check_integrity()

    def _take_output(self) -> None:
        output = self.policy.take_output()
        if output is not None:
            self.answers.send(output)
