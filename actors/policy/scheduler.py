"""Who runs in the next step, and how many tokens of whom. Synchronous: the actor around it moves the messages.

A round is `wants` → the KV pool's answer → maybe `preempt` → its answer → `plan`. Counts are fixed in `plan` alone:
only then is it known what the pool granted.

NOTE: there is no prefill phase and no decode phase. A sequence has tokens known and tokens planned, and each step
plans some of those between (see `Sequence`). Order is by arrival. Running sequences precede waiting ones in it, so
that the tail of `running` is the one to preempt and the head of `waiting` the place to put it back.
"""
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from actors.messages import (
    Abort,
    Finish,
    Grant,
    NewSequence,
    NewTokens,
    Reserve,
    Reserved,
    SequenceTokens,
    StartedSequence,
    StepPlan,
    StepResult,
    TopLogprobs,
    Want,
)
from actors.policy.block_pool import BLOCK_SIZE, Group
from actors.policy.sequence import Sequence
from actors.policy.stopping import find_finish, find_refusal

SchedulerMessage: TypeAlias = NewSequence | Abort | StepResult


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What the policy must know of the engine.

    Raises: ValueError naming the field.
    """
    max_num_seqs: int                       # slots
    max_num_batched_tokens: int             # rows of a step
    max_model_len: int                      # prompt and answer together
    groups: tuple[Group, ...]               # of the KV pool
    overlap: int = 0                        # steps launched before the results of the one before them are read

    def __post_init__(self) -> None:
        for name, low in (("max_num_seqs", 1), ("max_model_len", 1), ("overlap", 0)):
            if getattr(self, name) < low:
                raise ValueError(f"{name} must be at least {low}, got {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:     # every decoding sequence must find room in a step
            raise ValueError(f"max_num_batched_tokens must be at least max_num_seqs = {self.max_num_seqs}, "
                             f"got {self.max_num_batched_tokens}")


@dataclass(slots=True)
class SchedulerStats:
    """Counters since start and gauges of now: plain numbers that another thread may read."""
    num_running: int = 0
    num_waiting: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0                  # planned in chunks: prompts, and what is recomputed after preemption
    generation_tokens: int = 0
    num_steps: int = 0                      # reported
    step_s: float = 0.0                     # in forward passes and sampling


@dataclass(slots=True, eq=False)
class _Round:
    """A step in the making."""
    token_budget: int                       # for the wants
    ready: list[Sequence]                   # decode one token in blocks that they hold
    chunks: list[tuple[Sequence, int]]      # (sequence, end) likewise
    resting: list[Sequence]                 # all planned, results outstanding
    wants: dict[str, Want]
    grants: tuple[Grant, ...] = ()          # of the first answer, where there was a second one
    copies: tuple[tuple[int, int, int], ...] = ()
    has_preempted: bool = False


@dataclass(slots=True, eq=False)
class _Step:
    """A step in flight. Results name slots; whose they were is remembered here, as slots are given on meanwhile."""
    rows: dict[int, Sequence] = field(default_factory=dict)             # by slot
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)    # (sequence, end)


class SchedulerPolicy:
    """See the module's docstring."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.stats = SchedulerStats()
        self.running: dict[str, Sequence] = {}                          # in order of arrival
        self.waiting: OrderedDict[str, Sequence] = OrderedDict()        # in order of arrival
        self._free_slots = list(range(config.max_num_seqs))[::-1]
        self._releases: list[str] = []                                  # for the next Reserve
        self._ended: list[int] = []                                     # for the next StepPlan
        self._round: _Round | None = None
        self._next_step_id = 0
        self._steps: dict[int, _Step] = {}                              # in flight, in the order sent
        self._output: list[SequenceTokens] = []

    @property
    def num_in_flight(self) -> int:
        """Steps sent and not yet reported."""
        return len(self._steps)

    @property
    def is_idle(self) -> bool:
        """Nothing to plan, to wait for or to give back."""
        return not (self.running or self.waiting or self._steps or self._releases)

    def has_work(self) -> bool:
        """Whether a round is worth while now."""
        if self.num_in_flight > self.config.overlap:
            return False
        return bool(self._releases or self.waiting) or any(
            sequence.num_planned_tokens < sequence.num_final_tokens for sequence in self.running.values())

    # What came in

    def apply(self, messages: Iterable[SchedulerMessage]) -> None:
        """Take note of what happened."""
        for message in messages:
            if isinstance(message, StepResult):
                self._apply_result(message)
            elif isinstance(message, NewSequence):
                self._arrive(message)
            else:
                self._abort(message)
        self._count()

    def take_output(self) -> NewTokens | None:
        """What sequences got since the last call, in order. A sequence may have several rows, `finish` in its last."""
        if not self._output:
            return None
        rows, self._output = tuple(self._output), []
        return NewTokens(self._next_step_id - self.num_in_flight - 1, rows)

    def _arrive(self, request: NewSequence) -> None:
        is_known = request.request_id in self.running or request.request_id in self.waiting
        assert not is_known, f"request {request.request_id} is here already"
        room = max(0, self.config.max_model_len - len(request.token_ids))
        sequence = Sequence(request, min(request.max_tokens, room))
        refusal = find_refusal(sequence, self.config.max_model_len, self.config.groups)
        if refusal:
            self._output.append(SequenceTokens(
                request.request_id, finish="rejected", error=refusal, usage=sequence.usage()))
        else:
            self.waiting[request.request_id] = sequence

    def _abort(self, abort: Abort) -> None:
        sequence = self.running.get(abort.request_id) or self.waiting.get(abort.request_id)
        if sequence is None:                # ended meanwhile, or refused
            return
        self._remove(sequence)
        if abort.reason == "aborted":       # with "stop" the tokenizer has told the caller already
            self._finish(sequence, "aborted")

    def _apply_result(self, result: StepResult) -> None:
        """Rule 3: a row counts iff its sequence is alive and its position is the next unknown one."""
        assert self._steps, f"result of step {result.step_id}, but no step is in flight"
        step_id, step = next(iter(self._steps.items()))
        # A result out of order would lose tokens: the next unknown position would never come again.
        assert step_id == result.step_id, f"result of step {result.step_id} came before that of step {step_id}"
        del self._steps[step_id]
        self.stats.num_steps += 1
        self.stats.step_s += result.elapsed_s
        if result.error:
            for sequence in step.rows.values():
                self._fail(sequence, result.error)
            return
        for slot, reason in result.failed:
            self._fail(step.rows[slot], reason)
        if result.prompt_slots:
            self._take_prompt_logprobs(result, step)
        for sequence, end in step.chunks:
            if not sequence.is_alive:
                continue
            if sequence.slot >= 0:
                sequence.num_computed_tokens = end
            if sequence.max_tokens == 0 and end == sequence.num_prompt_tokens:
                self._remove(sequence)
                self._finish(sequence, "length")
        self._take_tokens(result, step)

    def _take_prompt_logprobs(self, result: StepResult, step: _Step) -> None:
        """Pass them on; those that come again after preemption are known already."""
        rows: dict[str, list[tuple[int, float, TopLogprobs]]] = {}
        for slot, position, logprob, top_logprobs in zip(
                result.prompt_slots, result.prompt_positions, result.prompt_logprobs, result.prompt_top_logprobs,
                strict=True):
            sequence = step.rows[slot]
            if sequence.is_alive and position >= sequence.num_prompt_logprobs:
                sequence.num_prompt_logprobs = position + 1
                rows.setdefault(sequence.request_id, []).append((position, logprob, top_logprobs))
        for request_id, prompt_logprobs in rows.items():
            self._output.append(SequenceTokens(request_id, prompt_logprobs=tuple(prompt_logprobs)))

    def _take_tokens(self, result: StepResult, step: _Step) -> None:
        num_taken = 0
        for index, (slot, position, token_id) in enumerate(
                zip(result.slots, result.positions, result.token_ids, strict=True)):
            sequence = step.rows[slot]
            if not sequence.is_alive or position != sequence.num_known_tokens:
                continue
            num_taken += 1
            sequence.output_ids.append(token_id)
            sequence.num_known_tokens = position + 1
            if sequence.slot >= 0:
                sequence.num_computed_tokens = position
            logprobs: tuple[float, ...] = ()
            top_logprobs: tuple[TopLogprobs, ...] = ()
            if sequence.request.sampling.logprobs is not None:
                logprobs, top_logprobs = (result.logprobs[index],), (result.top_logprobs[index],)
            finish = find_finish(sequence, token_id)
            if finish is None:
                self._output.append(SequenceTokens(sequence.request_id, (token_id,), logprobs, top_logprobs))
            else:
                self._remove(sequence)
                self._finish(sequence, finish, (token_id,), logprobs, top_logprobs)
        self.stats.generation_tokens += num_taken

    # What goes out

    def wants(self) -> Reserve:
        """Begin a round: what the next step would like, running sequences first, each token of an answer before any
        chunk. Whoever needs no block is not in it; its tokens are off the budget."""
        assert self._round is None, "a round is under way"
        ready: list[Sequence] = []
        chunks: list[tuple[Sequence, int]] = []
        resting: list[Sequence] = []
        wants: dict[str, Want] = {}
        unfinished: list[Sequence] = []     # prefilling
        for sequence in self.running.values():
            num_planned = sequence.num_planned_tokens
            if num_planned < sequence.num_started_tokens:
                unfinished.append(sequence)
            elif num_planned >= sequence.num_final_tokens:
                resting.append(sequence)
            elif num_planned < sequence.num_reserved_tokens:
                ready.append(sequence)
            else:
                wants[sequence.request_id] = Want(sequence.request_id, num_planned, num_planned + 1)
        token_budget = self.config.max_num_batched_tokens - len(ready)
        num_left = token_budget - len(wants)
        for sequence in unfinished:
            start = sequence.num_planned_tokens
            end = min(sequence.num_started_tokens, start + num_left)
            if end == start:
                break
            num_left -= end - start
            if end <= sequence.num_reserved_tokens:
                chunks.append((sequence, end))
                token_budget -= end - start
            else:
                wants[sequence.request_id] = Want(sequence.request_id, start, end)
        num_slots = len(self._free_slots)
        for sequence in self.waiting.values():
            # A preempted sequence comes back with all its tokens known, else the device would choose some again.
            if num_left <= 0 or num_slots == 0 or sequence.last_step_id in self._steps:
                break
            wants[sequence.request_id] = Want(sequence.request_id, 0, sequence.num_known_tokens)
            num_left -= sequence.num_known_tokens
            num_slots -= 1
        self._round = _Round(token_budget, ready, chunks, resting, wants)
        releases, self._releases = tuple(self._releases), []
        return Reserve(self._next_step_id, releases, token_budget, tuple(wants.values()))

    def preempt(self, reserved: Reserved) -> Reserve | None:
        """If running sequences starve, take the blocks of those at the tail and ask once more; None if none must yield.

        What the first answer granted holds, but for the preempted. Nobody yields to a waiting sequence, or to one
        behind it: what starves at the tail itself sits the step out with its blocks.
        """
        this = self._current_round(reserved)
        if not reserved.starved:
            return None
        starved = [request_id for request_id in self.running if request_id in reserved.starved]
        preempted: set[str] = set()
        num_freed = 0                       # an estimate: blocks may be shared, or given back by a window
        while num_freed < len(starved):
            sequence = next(reversed(self.running.values()))
            if sequence.request_id == starved[-1]:
                if len(starved) == 1:
                    break
                starved.pop()
            num_freed += sequence.num_reserved_tokens // BLOCK_SIZE
            preempted.add(sequence.request_id)
            self._preempt(sequence)
        if not preempted:
            return None
        this.has_preempted = True
        this.ready = [sequence for sequence in this.ready if sequence.slot >= 0]
        this.chunks = [(sequence, end) for sequence, end in this.chunks if sequence.slot >= 0]
        this.resting = [sequence for sequence in this.resting if sequence.slot >= 0]
        this.grants = tuple(grant for grant in reserved.grants if grant.request_id not in preempted)
        this.copies = reserved.copies
        token_budget = this.token_budget - sum(grant.num_new_tokens for grant in this.grants)
        releases, self._releases = tuple(self._releases), []
        return Reserve(reserved.step_id, releases, token_budget, tuple(this.wants[name] for name in starved))

    def plan(self, reserved: Reserved) -> StepPlan | None:
        """End the round: fix the counts. None if no row can run until a result comes."""
        this = self._current_round(reserved)
        self._round = None
        started: list[StartedSequence] = []
        new_blocks: list[tuple[int, int, tuple[int, ...]]] = []
        for grant in (*this.grants, *reserved.grants):
            del this.wants[grant.request_id]
            sequence = self.running.get(grant.request_id)
            if sequence is None:
                sequence = self._admit(grant)
                started.append(sequence.describe(grant.new_block_ids))
            else:
                new_blocks += [(sequence.slot, group, ids) for group, ids in enumerate(grant.new_block_ids) if ids]
            sequence.num_reserved_tokens += len(grant.new_block_ids[0]) * BLOCK_SIZE
            if sequence.num_planned_tokens < sequence.num_started_tokens:
                this.chunks.append((sequence, sequence.num_planned_tokens + grant.num_new_tokens))
            else:
                this.ready.append(sequence)
        for request_id in this.wants:       # starved
            sequence = self.running.get(request_id)
            if sequence is not None and sequence.num_planned_tokens >= sequence.num_started_tokens:
                this.resting.append(sequence)

        step = _Step(chunks=this.chunks)
        for sequence in this.ready:
            sequence.num_planned_tokens += 1
            step.rows[sequence.slot] = sequence
        chunks: list[tuple[int, int, int]] = []
        num_chunk_tokens = 0
        for sequence, end in this.chunks:
            start, sequence.num_planned_tokens = sequence.num_planned_tokens, end
            step.rows[sequence.slot] = sequence
            chunks.append((sequence.slot, start, end))
            num_chunk_tokens += end - start
        self._count()
        if not step.rows:
            assert self._steps or this.has_preempted or not (self.running or self.waiting), (
                "no step is in flight and the head of the line does not fit")
            return None
        num_tokens = len(this.ready) + num_chunk_tokens
        assert num_tokens <= self.config.max_num_batched_tokens, f"{num_tokens} rows are over the budget"
        self.stats.prompt_tokens += num_chunk_tokens
        plan = StepPlan(
            step_id=self._next_step_id, ended=tuple(self._ended), started=tuple(started), new_blocks=tuple(new_blocks),
            copies=this.copies + reserved.copies, chunks=tuple(chunks),
            resting=tuple(sequence.slot for sequence in this.resting), num_tokens=num_tokens)
        self._steps[self._next_step_id] = step
        self._next_step_id += 1
        self._ended = []
        return plan

    def _current_round(self, reserved: Reserved) -> _Round:
        assert self._round is not None, "no round is under way"
        assert reserved.step_id == self._next_step_id, f"the pool answered step {reserved.step_id}"
        return self._round

    # Where sequences go

    def _admit(self, grant: Grant) -> Sequence:
        """From waiting into a slot."""
        sequence = self.waiting.pop(grant.request_id)
        sequence.start(self._free_slots.pop(), grant.num_cached_tokens)
        self.running[sequence.request_id] = sequence
        return sequence

    def _preempt(self, sequence: Sequence) -> None:
        """From the tail of running to the head of waiting. Tokens of steps in flight still count when they come."""
        self._vacate(sequence)
        sequence.last_step_id = self._next_step_id - 1
        self.waiting[sequence.request_id] = sequence
        self.waiting.move_to_end(sequence.request_id, last=False)
        self.stats.num_preemptions += 1

    def _remove(self, sequence: Sequence) -> None:
        """Out of the engine. Tokens that are still to come are dropped."""
        sequence.is_alive = False
        if sequence.slot >= 0:
            self._vacate(sequence)
        else:
            del self.waiting[sequence.request_id]

    def _vacate(self, sequence: Sequence) -> None:
        """Out of running: blocks go back with the next Reserve, the slot with the next StepPlan."""
        del self.running[sequence.request_id]
        self._releases.append(sequence.request_id)
        slot = sequence.stop()
        self._ended.append(slot)
        self._free_slots.append(slot)

    def _fail(self, sequence: Sequence, error: str) -> None:
        if sequence.is_alive:
            self._remove(sequence)
            self._finish(sequence, "failed", error=error)

    def _finish(self, sequence: Sequence, finish: Finish, token_ids: tuple[int, ...] = (),
                logprobs: tuple[float, ...] = (), top_logprobs: tuple[TopLogprobs, ...] = (), error: str = "") -> None:
        self._output.append(SequenceTokens(
            sequence.request_id, token_ids, logprobs, top_logprobs, finish=finish, error=error, usage=sequence.usage()))

    def _count(self) -> None:
        self.stats.num_running = len(self.running)
        self.stats.num_waiting = len(self.waiting)
