"""Who runs in the next step, and how many tokens of whom. Synchronous: the actor around it moves the messages.

A round is `wants` → the KV pool's answer → maybe `preempt` → its answer → `plan`. Counts are fixed in `plan` alone:
only then is it known what the pool granted.

NOTE: there is no prefill phase and no decode phase. A sequence has tokens known and tokens planned, and each step
plans some of those between (see `Sequence`). Who comes first is the order's matter; running sequences precede waiting
ones in any, so that the tail of `running` is the one to preempt and the head of `waiting` the place to put it back.
"""
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import monotonic
from typing import TypeAlias

from actors.messages import (
    Abort,
    Finish,
    Grant,
    NewSequence,
    NewTokens,
    Release,
    Reserve,
    Reserved,
    SequenceTokens,
    StartedSequence,
    StepPlan,
    StepResult,
    TopLogprobs,
    Want,
)
from actors.policy.admission import Arrivals, QueueLimits, find_refusal
from actors.policy.device_index import DeviceIndex
from actors.policy.kv_group import BLOCK_SIZE, Group
from actors.policy.order import check_policy, make_order
from actors.policy.output import Output
from actors.policy.sequence import Sequence
from actors.policy.stats import SchedulerStats
from actors.policy.step import Round, Step, count_granted, find_poisoned
from actors.policy.stopping import find_finish

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
    scheduling_policy: str = "fcfs"         # see actors/policy/order.py
    ttft_target_s: float | None = None      # of policy deadline: arrival to first token
    itl_target_s: float | None = None       # likewise: between two tokens
    queue: QueueLimits = QueueLimits()
    asks_device: bool = False               # who arrives is looked up in the device's table of findable blocks too

    def __post_init__(self) -> None:
        for name, low in (("max_num_seqs", 1), ("max_model_len", 1), ("overlap", 0)):
            if getattr(self, name) < low:
                raise ValueError(f"{name} must be at least {low}, got {getattr(self, name)}")
        check_policy(self.scheduling_policy, self.ttft_target_s, self.itl_target_s)
        if self.max_num_batched_tokens < self.max_num_seqs:     # every decoding sequence must find room in a step
            raise ValueError(f"max_num_batched_tokens must be at least max_num_seqs = {self.max_num_seqs}, "
                             f"got {self.max_num_batched_tokens}")


class SchedulerPolicy:
    """See the module's docstring."""

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float] = monotonic) -> None:
        self.config = config
        self.clock = clock
        self.stats = SchedulerStats()
        self._now_s = clock()                                           # when it was last looked at
        self.running: dict[str, Sequence] = {}                          # the last one yields first
        self.waiting: OrderedDict[str, Sequence] = OrderedDict()        # in order of arrival, the preempted first
        self.order = make_order(config.scheduling_policy, config.ttft_target_s, config.itl_target_s, self.running,
                                self.waiting)
        self.arrivals = Arrivals()
        self._lacks_blocks = False                                      # the last plan passed somebody over
        self._num_arrivals = 0
        self._free_slots = list(range(config.max_num_seqs))[::-1]
        self._releases: list[Release] = []                              # for the next Reserve, as the next two
        self._failed_steps: list[int] = []
        self._forgotten: list[tuple[bytes, ...]] = []
        self._tier_out: list[tuple[int, int, int]] = []                 # for the next StepPlan, as the next one
        self._ended: list[int] = []                                     # for the next StepPlan, as the next one
        self._device_index = DeviceIndex(config.asks_device)
        self._round: Round | None = None
        self._next_step_id = 0
        self._steps: dict[int, Step] = {}                              # in flight, in the order sent
        self._output = Output()

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
        self._now_s = self.clock()
        for message in messages:
            if isinstance(message, StepResult):
                self._apply_result(message)
            elif isinstance(message, NewSequence):
                self._arrive(message)
            else:
                self._abort(message)
        self._count()

    def take_output(self) -> NewTokens | None:
        """What sequences got since the last call. A sequence may have several entries, `finish` in its last."""
        return self._output.take(self._next_step_id - self.num_in_flight - 1)

    def _arrive(self, request: NewSequence) -> None:
        is_known = request.request_id in self.running or request.request_id in self.waiting
        assert not is_known, f"request {request.request_id} is here already"
        room = max(0, self.config.max_model_len - len(request.token_ids))
        sequence = Sequence(request, min(request.max_tokens, room), self._num_arrivals)
        sequence.queued_s = self._now_s
        self._num_arrivals += 1
        refusal = find_refusal(sequence, self.config.max_model_len, self.config.groups)
        if refusal:
            self._finish(sequence, "rejected", error=refusal)
            return
        together = self.arrivals.add(sequence) if self.config.queue.are_set else [sequence]
        if together:
            self._let_in(together)

    def _let_in(self, sequences: list[Sequence]) -> None:
        """Into the queue, all of them or none."""
        if not (self.running or self.waiting):
            self._lacks_blocks = False
        seconds_per_token = self.stats.step_s / max(1, self.stats.prompt_tokens + self.stats.generation_tokens)
        refusal = self.config.queue.find_refusal(
            sequences, self.waiting.values(), 0 if self._lacks_blocks else len(self._free_slots),
            self.config.max_num_seqs, seconds_per_token)
        for sequence in sequences:
            if refusal is not None:
                self._finish(sequence, "rejected", error=refusal.error, error_field=refusal.field,
                             retry_after_s=refusal.retry_after_s)
                continue
            self.order.arrive(sequence)
            self.waiting[sequence.request_id] = sequence
            self._output.accepted.append(sequence.request_id)
            self._device_index.ask(sequence)

    def _abort(self, abort: Abort) -> None:
        sequence = self.running.get(abort.request_id) or self.waiting.get(abort.request_id)
        if sequence is not None:
            self._remove(sequence, is_complete=abort.reason == "stop")
        else:
            sequence = self.arrivals.remove(abort.request_id)
            if sequence is None:            # ended meanwhile, or refused
                return
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
        self.stats.histograms.step_tokens.observe(step.num_decoding + step.num_chunk_tokens)
        self.order.observe(step.num_decoding, step.num_chunk_tokens, result.elapsed_s)
        if result.error:
            self._failed_steps.append(step_id)
            sharing = [sequence for sequence in (*self.running.values(), *self.waiting.values())
                       if step_id in sequence.depends]
            for sequence in (*step.rows.values(), *sharing):
                self._fail(sequence, result.error)
            return
        self._take_hints(result)
        for slot, reason in result.failed:
            # NOTE: the fault may come from any token before, in blocks of earlier steps. Who shares one that is not
            # finite sees it in his own logits.
            self._forgotten.append(tuple(step.rows[slot].keys))
            self._fail(step.rows[slot], reason, forget=True)
        if result.prompt_slots:
            self._output.add_prompt_logprobs(result, step.rows)
        pooled = {step.rows[slot].request_id: state for slot, state in result.pooled}
        for sequence, end in step.chunks:
            if not sequence.is_alive:
                continue
            if sequence.slot >= 0:
                sequence.num_computed_tokens = end
            if sequence.max_tokens == 0 and end == sequence.num_prompt_tokens:
                self.stats.end_prefill(sequence, self._now_s)
                self._remove(sequence, is_complete=True)
                self._finish(sequence, "length", pooled=pooled.get(sequence.request_id, ()))
        self._take_tokens(result, step)

    def _take_hints(self, result: StepResult) -> None:
        """NOTE: counted and nothing else. What the device's table had may be gone, or more be there by now."""
        for request_id, num_blocks in result.prefix_hints:
            sequence = self.running.get(request_id) or self.waiting.get(request_id)
            if sequence is not None:
                self.stats.take_hint(sequence, num_blocks)

    def _take_tokens(self, result: StepResult, step: Step) -> None:
        rows, output = step.rows, self._output
        num_taken = 0
        for index, (slot, position, token_id) in enumerate(
                zip(result.slots, result.positions, result.token_ids, strict=True)):
            sequence = rows[slot]
            if position != sequence.num_known_tokens or not sequence.is_alive:
                continue
            num_taken += 1
            sequence.output_ids.append(token_id)
            sequence.num_known_tokens = position + 1
            if position == sequence.num_prompt_tokens:
                self.stats.end_prefill(sequence, self._now_s)
            if sequence.slot >= 0:
                sequence.num_computed_tokens = position
            finish = find_finish(sequence, token_id)
            if finish is None and sequence.is_plain:
                output.request_ids.append(sequence.request_id)
                output.token_ids.append(token_id)
                continue
            logprobs: tuple[float, ...] = ()
            top_logprobs: tuple[TopLogprobs, ...] = ()
            if sequence.request.sampling.logprobs is not None:
                logprobs, top_logprobs = (result.logprobs[index],), (result.top_logprobs[index],)
            if finish is None:
                output.rows.append(SequenceTokens(sequence.request_id, (token_id,), logprobs, top_logprobs))
            else:
                self._remove(sequence, is_complete=True)
                self._finish(sequence, finish, (token_id,), logprobs, top_logprobs)
        self.stats.generation_tokens += num_taken

    # What goes out

    def wants(self) -> Reserve:
        """Begin a round: what the next step would like, running sequences first, each token of an answer before any
        chunk. Answers that need no block are not in it; their tokens are off the budget."""
        assert self._round is None, "a round is under way"
        now_s = self._now_s = self.clock()
        ready: list[Sequence] = []
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
                wants[sequence.request_id] = sequence.next_want(num_planned, num_planned + 1)
        num_decoding = len(ready) + len(wants)
        num_left = self.order.limit_prefill(num_decoding, self.config.max_num_batched_tokens - num_decoding)
        token_budget = len(wants) + num_left
        for sequence in unfinished:
            start = sequence.num_planned_tokens
            end = min(sequence.num_started_tokens, start + num_left)
            if end == start:
                break
            num_left -= end - start
            wants[sequence.request_id] = sequence.next_want(start, end)
        num_in_order = len(wants)
        # As many as there are slots for: how few tokens are left of their prompts the pool alone knows. Or one, to hear
        # who must yield to it.
        victims = self.order.find_victims(now_s)
        num_waiting_wanted = len(self._free_slots) if num_left > 0 else 0
        if self.waiting and (num_waiting_wanted or victims):
            picked, num_picked_in_order = self.order.pick(max(1, num_waiting_wanted), now_s)
            num_in_order += num_picked_in_order
            for sequence in picked:
                # A preempted sequence comes back with all its tokens known, else the device would choose some again.
                if sequence.last_step_id in self._steps:
                    break
                wants[sequence.request_id] = sequence.first_want()
        self._round = Round(token_budget, ready, resting, wants, victims, asks_for_waiting=num_waiting_wanted > 0)
        return self._reserve(token_budget, tuple(wants.values()), num_in_order,
                             tuple([victim.request_id for victim in victims]))

    def _reserve(self, token_budget: int, wants: tuple[Want, ...], num_in_order: int,
                 yielding: tuple[str, ...] = ()) -> Reserve:
        reserve = Reserve(
            self._next_step_id, tuple(self._releases), token_budget, wants,
            reported_step_id=next(iter(self._steps), self._next_step_id) - 1,
            failed_steps=tuple(self._failed_steps), forgotten=tuple(self._forgotten), num_in_order=num_in_order,
            num_slots=len(self._free_slots), yielding=yielding)
        self._releases, self._failed_steps, self._forgotten = [], [], []
        return reserve

    def preempt(self, reserved: Reserved) -> Reserve | None:
        """If running sequences starve, take the blocks of those at the tail and ask once more; None if none must yield.
        If none does, those yield whom the order's policy gives up for the first who waits, where that lets it enter.

        What the first answer granted holds, but for the preempted.
        """
        this = self._current_round(reserved)
        this.has_starved = bool(reserved.starved)
        wants = self._yield_to_starved(reserved) or self._yield_to_waiting(reserved)
        if not wants:
            return None
        this.has_preempted = True
        # Who waits starved, or there was no slot: nobody entered, and what was granted moves no block but out.
        assert reserved.copies == reserved.tier_in == (), "a newcomer got blocks that a running sequence lacks"
        this.grants = tuple(grant for grant in reserved.grants if grant.request_id in self.running)
        num_ready = len(this.ready)
        this.ready = [sequence for sequence in this.ready if sequence.slot >= 0]
        this.resting = [sequence for sequence in this.resting if sequence.slot >= 0]
        self._tier_out += reserved.tier_out
        self._device_index.changes += reserved.index_changes
        this.poisoned = reserved.poisoned
        token_budget = this.token_budget + num_ready - len(this.ready) - count_granted(this.grants)
        return self._reserve(token_budget, tuple(wants), len(wants))

    def _yield_to_starved(self, reserved: Reserved) -> list[Want]:
        """Preempt from the tail, if running sequences starve. Returns what is wanted then; [] if nobody yields.

        Nobody yields to one behind it: what starves at the tail itself sits the step out with its blocks.
        """
        this = self._current_round(reserved)
        starved = [request_id for request_id in self.running if request_id in reserved.starved]
        has_preempted = False
        num_freed = 0                       # an estimate: blocks may be shared, or given back by a window
        while num_freed < len(starved):
            sequence = next(reversed(self.running.values()))
            if sequence.request_id == starved[-1]:
                if len(starved) == 1:
                    break
                starved.pop()
            num_freed += sequence.num_reserved_tokens // BLOCK_SIZE
            self._preempt(sequence)
            has_preempted = True
        return [] if not has_preempted else [         # the pool remembers what they told
            Want(request_id, this.wants[request_id].start, this.wants[request_id].end) for request_id in starved]

    def _yield_to_waiting(self, reserved: Reserved) -> list[Want]:
        """Preempt those who must yield to the first who waits, if this step has a token left for it. Returns what it
        wants; [] if nobody yields."""
        this = self._current_round(reserved)
        victims = this.victims[:reserved.num_yielding]
        wants = [want for request_id, want in this.wants.items() if request_id in self.waiting][:1]
        num_free_tokens = this.token_budget + len([victim for victim in victims if victim in this.ready])
        ids = {victim.request_id for victim in victims}
        if num_free_tokens <= count_granted(grant for grant in reserved.grants if grant.request_id not in ids):
            return []
        for victim in victims:
            self._preempt(victim)
        return wants if victims else []

    def plan(self, reserved: Reserved) -> StepPlan | None:
        """End the round: fix the counts. None if no row can run until a result comes."""
        this = self._current_round(reserved)
        self._round = None
        self._tier_out += reserved.tier_out
        self._device_index.changes += reserved.index_changes
        started: list[StartedSequence] = []
        new_blocks: list[tuple[int, int, tuple[int, ...]]] = []
        chunks: list[tuple[Sequence, int]] = []
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
                chunks.append((sequence, sequence.num_planned_tokens + grant.num_new_tokens))
            else:
                this.ready.append(sequence)
        if this.has_starved or reserved.starved:
            self._lacks_blocks = True
        elif this.asks_for_waiting or not self.waiting:     # else it says nothing about them
            self._lacks_blocks = False
        for request_id in this.wants:       # starved
            sequence = self.running.get(request_id)
            if sequence is not None and sequence.num_planned_tokens >= sequence.num_started_tokens:
                this.resting.append(sequence)

        step = Step(len(this.ready), sum(end - sequence.num_planned_tokens for sequence, end in chunks), chunks=chunks)
        for sequence in this.ready:
            sequence.num_planned_tokens += 1
            step.rows[sequence.slot] = sequence
        chunk_rows: list[tuple[int, int, int]] = []
        for sequence, end in chunks:
            start, sequence.num_planned_tokens = sequence.num_planned_tokens, end
            step.rows[sequence.slot] = sequence
            chunk_rows.append((sequence.slot, start, end))
        self._count()
        if not step.rows:
            assert self._steps or this.has_preempted or not (self.running or self.waiting), (
                "no step is in flight and the head of the line does not fit")
            return None
        num_tokens = step.num_decoding + step.num_chunk_tokens
        assert num_tokens <= self.config.max_num_batched_tokens, f"{num_tokens} rows are over the budget"
        self.stats.prompt_tokens += step.num_chunk_tokens
        index_changes, lookups = self._device_index.take()
        plan = StepPlan(
            step_id=self._next_step_id, ended=tuple(self._ended), started=tuple(started), new_blocks=tuple(new_blocks),
            tier_out=tuple(self._tier_out), copies=reserved.copies, poisoned=find_poisoned(this, reserved),
            tier_in=reserved.tier_in, chunks=tuple(chunk_rows),
            resting=tuple([sequence.slot for sequence in this.resting]), num_tokens=num_tokens,
            index_changes=index_changes, lookups=lookups)
        self._steps[self._next_step_id] = step
        self._next_step_id += 1
        self._ended, self._tier_out = [], []
        return plan

    def _current_round(self, reserved: Reserved) -> Round:
        assert self._round is not None, "no round is under way"
        assert reserved.step_id == self._next_step_id, f"the pool answered step {reserved.step_id}"
        return self._round

    # Where sequences go

    def _admit(self, grant: Grant) -> Sequence:
        """From waiting into a slot."""
        sequence = self.waiting.pop(grant.request_id)
        if not sequence.has_started:
            self.stats.enter(sequence, grant.num_cached_tokens, self._now_s)
            self._output.entered.append((sequence.request_id, grant.num_cached_tokens, grant.cache_miss,
                                         sequence.queued_s, sequence.entered_s))
        sequence.start(self._free_slots.pop(), grant)
        self.order.enter(sequence)
        return sequence

    def _preempt(self, sequence: Sequence) -> None:
        """From the tail of running to the head of waiting. Tokens of steps in flight still count when they come."""
        self._vacate(sequence)
        sequence.last_step_id = self._next_step_id - 1
        self.waiting[sequence.request_id] = sequence
        self.waiting.move_to_end(sequence.request_id, last=False)
        self.stats.preempt(sequence)

    def _remove(self, sequence: Sequence, forget: bool = False, is_complete: bool = False) -> None:
        """Out of the engine. Tokens that are still to come are dropped. is_complete: by a natural end."""
        sequence.is_alive = False
        self.stats.end(sequence, is_complete, self._now_s)
        if sequence.slot >= 0:
            self._vacate(sequence, forget)
        else:
            del self.waiting[sequence.request_id]
        self.order.leave(sequence)

    def _vacate(self, sequence: Sequence, forget: bool = False) -> None:
        """Out of running: blocks go back with the next Reserve, the slot with the next StepPlan."""
        del self.running[sequence.request_id]
        self._releases.append(sequence.release(forget))
        slot = sequence.stop()
        self._ended.append(slot)
        self._free_slots.append(slot)

    def _fail(self, sequence: Sequence, error: str, forget: bool = False) -> None:
        if sequence.is_alive:
            self._remove(sequence, forget)
            self._finish(sequence, "failed", error=error)

    def _finish(self, sequence: Sequence, finish: Finish, token_ids: tuple[int, ...] = (),
                logprobs: tuple[float, ...] = (), top_logprobs: tuple[TopLogprobs, ...] = (), error: str = "",
                error_field: str = "", retry_after_s: float | None = None, pooled: tuple[float, ...] = ()) -> None:
        self._output.rows.append(SequenceTokens(
            sequence.request_id, token_ids, logprobs, top_logprobs, pooled=pooled, finish=finish, error=error,
            error_field=error_field, usage=sequence.usage(), retry_after_s=retry_after_s))

    def _count(self) -> None:
        self.stats.num_running = len(self.running)
        self.stats.num_waiting = len(self.waiting)
