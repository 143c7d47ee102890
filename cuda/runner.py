"""State per slot and the step: from plan columns to a batch, through the model, to sampled tokens.

A slot holds one sequence: its tokens, its block tables, its sampling state. The runner is told only what changes;
decode rows go on by themselves, each feeding on the token that it sampled last.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from cuda.kv_cache import kv_groups
from cuda.model import Transformer
from cuda.ops import BLOCK_SIZE, Array, Batch, Ints, KVDtype, Ops
from cuda.sampler import Sampled, Sampler, SlotSampling, TopLogprobs
from weights.load import ModelWeights
from weights.spec import ModelSpec

Move: TypeAlias = tuple[int, int, int]      # (group, from, to)

LOGITS_ROWS = 64                            # rows of logits in memory at a time: prompts with logprobs are long


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """Columns of what a step produced; see `StepResult`."""
    slots: Ints
    positions: Ints
    sampled: Sampled
    prompt_slots: Ints
    prompt_positions: Ints
    prompt_logprobs: NDArray[np.float32]
    prompt_top_logprobs: tuple[TopLogprobs, ...]


class Runner:
    """Owns the model, the KV cache and the slots. Used by one thread."""

    def __init__(self, spec: ModelSpec, weights: ModelWeights, ops: Ops, num_blocks: Sequence[int],
                 max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int,
                 num_tier_blocks: Sequence[int] | None = None, kv_dtype: KVDtype = "float32") -> None:
        """num_blocks, num_tier_blocks: on the device and in host memory, one count a KV group each."""
        self.spec, self.ops = spec, ops
        self.groups = kv_groups(spec)
        # A step can hold a row of every decoding slot beside its chunks' budget.
        prepared = ops.prepare(spec, weights, max(max_num_batched_tokens, max_num_seqs), max_model_len)
        self.model = Transformer(spec, prepared, ops, self.groups)
        self.caches = [ops.allocate_kv(group, n, kv_dtype) for group, n in zip(self.groups, num_blocks, strict=True)]
        self.tiers = [ops.allocate_tier(group, n, kv_dtype) if n else None
                      for group, n in zip(self.groups, num_tier_blocks or [0] * len(self.groups), strict=True)]
        self.sampler = Sampler(max_num_seqs, spec.vocab_size)
        self.max_num_tokens = max(max_num_batched_tokens, max_num_seqs)

        table_width = -(-max_model_len // BLOCK_SIZE)
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self.num_known = np.zeros(max_num_seqs, np.int32)
        self.num_prompt = np.zeros(max_num_seqs, np.int32)
        self.block_tables = [np.zeros((max_num_seqs, table_width), np.int32) for _ in self.groups]
        self.num_table_entries = np.zeros((len(self.groups), max_num_seqs), np.int32)
        self.decoding = np.zeros(max_num_seqs, np.bool_)
        self.wants_token = np.zeros(max_num_seqs, np.bool_)
        self.prompt_logprobs: dict[int, int] = {}          # slot -> number of alternatives
        self.forward_s = 0.0                               # in forward passes, head included, since the start
        self.on_logits: Callable[[NDArray[np.float32], Ints], None] | None = None   # tests inject faults here

    def start(self, slot: int, token_ids: Sequence[int], num_prompt_tokens: int, sampling: SlotSampling,
              block_ids: Sequence[Sequence[int]], wants_token: bool, prompt_logprobs: int | None) -> None:
        """A sequence enters `slot`; nothing of it is computed yet."""
        self.token_ids[slot, :len(token_ids)] = token_ids
        self.num_known[slot] = len(token_ids)
        self.num_prompt[slot] = num_prompt_tokens
        self.num_table_entries[:, slot] = 0
        for group, ids in enumerate(block_ids):
            self.append_blocks(slot, group, ids)
        self.decoding[slot] = False
        self.wants_token[slot] = wants_token
        self.prompt_logprobs.pop(slot, None)
        if prompt_logprobs is not None:
            self.prompt_logprobs[slot] = prompt_logprobs
        self.sampler.start(slot, sampling, token_ids, num_prompt_tokens)

    def end(self, slot: int) -> None:
        """The sequence in `slot` is over or preempted."""
        self.decoding[slot] = False
        self.prompt_logprobs.pop(slot, None)
        self.sampler.end(slot)

    def append_blocks(self, slot: int, group: int, block_ids: Sequence[int]) -> None:
        """`block_ids` continue the slot's table of `group`."""
        start = self.num_table_entries[group, slot]
        self.block_tables[group][slot, start:start + len(block_ids)] = block_ids
        self.num_table_entries[group, slot] = start + len(block_ids)

    def move_blocks(self, tier_out: Sequence[Move], copies: Sequence[Move], poisoned: Sequence[tuple[int, int]],
                    tier_in: Sequence[Move]) -> None:
        """As in `StepPlan`, in this order, before the next step's forward pass."""
        self._copy_blocks(tier_out, self.caches, self.tiers)
        self._copy_blocks(copies, self.caches, self.caches)
        for group, cache in enumerate(self.caches):
            block_ids = [block_id for g, block_id in poisoned if g == group]
            if block_ids:
                self.ops.poison_blocks(cache, np.array(block_ids, np.int32))
        self._copy_blocks(tier_in, self.tiers, self.caches)

    def _copy_blocks(self, moves: Sequence[Move], sources: Sequence[Array], destinations: Sequence[Array]) -> None:
        if moves:
            for group, (source, destination) in enumerate(zip(sources, destinations, strict=True)):
                pairs = [(old, new) for g, old, new in moves if g == group]
                if pairs:
                    self.ops.copy_blocks(source, destination, np.array(pairs, np.int32))

    def step(self, chunks: Sequence[tuple[int, int, int]], resting: Sequence[int],
             num_tokens: int | None = None) -> StepOutput:
        """Runs `chunks` (slot, from, to) and one row of every decoding slot that is not `resting`.

        num_tokens: the rows that the planner counts on; None where it cannot know.
        """
        runs = self.decoding.copy()
        runs[list(resting)] = False
        decode_slots = np.flatnonzero(runs).astype(np.int32)
        ends = self.num_known[decode_slots]                         # a decode row is [known - 1, known)
        slots = np.concatenate([np.array([c[0] for c in chunks], np.int32), decode_slots])      # [S]
        starts = np.concatenate([np.array([c[1] for c in chunks], np.int32), ends - 1])
        ends = np.concatenate([np.array([c[2] for c in chunks], np.int32), ends])
        if not len(slots):
            nothing = np.zeros(0, np.int32)
            return StepOutput(nothing, nothing, Sampled(nothing, np.zeros(0, np.float32), (), ()), nothing, nothing,
                              np.zeros(0, np.float32), ())
        batch = self._batch(slots, starts, ends)
        assert num_tokens in (None, batch.num_tokens), f"{batch.num_tokens} rows, the plan has {num_tokens}"

        last_rows = batch.query_start_loc[1:] - 1                                               # [S]
        samples = (ends == self.num_known[slots]) & self.wants_token[slots]
        self.decoding[slots] |= samples
        sample_rows, sample_slots = last_rows[samples], slots[samples]
        prompt_rows, prompt_slots = self._prompt_rows(slots, starts, ends, batch.query_start_loc)

        rows = np.concatenate([sample_rows, prompt_rows]).astype(np.int32)
        begin_s = time.perf_counter()
        self.ops.begin(batch)
        hidden = self.model.forward(batch, self.caches, rows)
        self.ops.finish()
        self.forward_s += time.perf_counter() - begin_s
        positions = ends[samples]
        sampled = self._sample(hidden[:len(sample_rows)], sample_slots, positions)
        self.token_ids[sample_slots, positions] = sampled.token_ids
        self.num_known[sample_slots] = positions + 1
        prompt_positions = batch.positions[prompt_rows] + 1
        logprobs, tops = self._prompt_logprobs(hidden[len(sample_rows):], prompt_slots, prompt_positions)
        return StepOutput(sample_slots, positions, sampled, prompt_slots, prompt_positions, logprobs, tops)

    def _batch(self, slots: Ints, starts: Ints, ends: Ints) -> Batch:
        lengths = ends - starts
        query_start_loc = np.zeros(len(slots) + 1, np.int32)
        np.cumsum(lengths, out=query_start_loc[1:])
        num_tokens = int(query_start_loc[-1])
        assert 0 < num_tokens <= self.max_num_tokens, f"a step of {num_tokens} tokens, at most {self.max_num_tokens}"
        row_slots = np.repeat(slots, lengths)                                                   # [T]
        positions = np.arange(num_tokens, dtype=np.int32) + np.repeat(starts - query_start_loc[:-1], lengths)
        block_index, offset = positions // BLOCK_SIZE, positions % BLOCK_SIZE
        width = int(ends.max() + BLOCK_SIZE - 1) // BLOCK_SIZE
        for group in range(len(self.groups)):
            entries = self.num_table_entries[group, slots]
            assert (entries * BLOCK_SIZE >= ends).all(), "a row has no block to write its keys to"
        return Batch(
            token_ids=self.token_ids[row_slots, positions],
            positions=positions.astype(np.int32),
            query_start_loc=query_start_loc,
            seq_lens=ends.astype(np.int32),
            block_tables=tuple(np.ascontiguousarray(table[slots, :width]) for table in self.block_tables),
            slot_mapping=tuple(table[row_slots, block_index] * BLOCK_SIZE + offset for table in self.block_tables),
        )

    def _prompt_rows(self, slots: Ints, starts: Ints, ends: Ints, query_start_loc: Ints) -> tuple[Ints, Ints]:
        """Rows whose next token is a prompt token with its logprob asked for, and their slots."""
        rows: list[Ints] = [np.zeros(0, np.int32)]
        row_slots: list[Ints] = [np.zeros(0, np.int32)]
        if self.prompt_logprobs:
            for s, slot in enumerate(slots):
                count = min(int(ends[s]), int(self.num_prompt[slot]) - 1) - int(starts[s])
                if int(slot) in self.prompt_logprobs and count > 0:
                    rows.append(query_start_loc[s] + np.arange(count, dtype=np.int32))
                    row_slots.append(np.full(count, slot, np.int32))
        return np.concatenate(rows), np.concatenate(row_slots)

    def _sample(self, hidden: NDArray[np.float32], slots: Ints, positions: Ints) -> Sampled:
        parts = []
        for start in range(0, len(slots), LOGITS_ROWS):
            part = slice(start, start + LOGITS_ROWS)
            logits = self._logits(hidden[part], slots[part])
            parts.append((start, self.sampler.sample(logits, slots[part], positions[part])))
        return Sampled(
            token_ids=np.concatenate([np.zeros(0, np.int32), *(part.token_ids for _, part in parts)]),
            logprobs=np.concatenate([np.zeros(0, np.float32), *(part.logprobs for _, part in parts)]),
            top_logprobs=tuple(top for _, part in parts for top in part.top_logprobs),
            failed=tuple((start + row, reason) for start, part in parts for row, reason in part.failed),
        )

    def _prompt_logprobs(self, hidden: NDArray[np.float32], slots: Ints,
                         positions: Ints) -> tuple[NDArray[np.float32], tuple[TopLogprobs, ...]]:
        logprobs, tops = [np.zeros(0, np.float32)], []
        for start in range(0, len(slots), LOGITS_ROWS):
            part = slice(start, start + LOGITS_ROWS)
            logits = self._logits(hidden[part], slots[part])
            targets = self.token_ids[slots[part], positions[part]]
            num_top = max(self.prompt_logprobs[int(slot)] for slot in slots[part])
            values, best = self.sampler.prompt_logprobs(logits, targets, num_top)
            logprobs.append(values)
            tops += [top[:self.prompt_logprobs[int(slot)]] for slot, top in zip(slots[part], best, strict=True)]
        return np.concatenate(logprobs), tuple(tops)

    def _logits(self, hidden: NDArray[np.float32], slots: Ints) -> NDArray[np.float32]:
        begin_s = time.perf_counter()
        logits: NDArray[np.float32] = self.model.logits(hidden)
        self.ops.finish()
        self.forward_s += time.perf_counter() - begin_s
        if self.on_logits is not None:
            self.on_logits(logits, slots)
        return logits
