"""From plan columns to a batch, through the model, to sampled tokens: what all back ends share, and the step of those
whose results can be read at once."""
from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cuda.kv_cache import kv_groups
from cuda.model import Transformer
from cuda.ops import BLOCK_SIZE, Array, Batch, Ints, KVDtype, Ops
from cuda.sampler import Sampled, Sampler, SlotSampling, TopLogprobs
from cuda.slots import Slots, StepRows
from weights.load import ModelWeights
from weights.spec import ModelSpec

Move: TypeAlias = tuple[int, int, int]      # (group, from, to)
BlockChange: TypeAlias = tuple[int, bytes, bytes, Sequence[int]]    # (block, its key, the key before it, its ids)
Question: TypeAlias = tuple[bytes, Sequence[bytes], Sequence[int]]  # (the key before the first block, keys, ids)

Pooled: TypeAlias = tuple[int, NDArray[np.float32]]                 # (slot, its prompt's pooled hidden state [C])

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
    pooled: tuple[Pooled, ...] = ()


_NOTHING, _NO_LOGPROBS = np.zeros(0, np.int32), np.zeros(0, np.float32)
NO_OUTPUT = StepOutput(_NOTHING, _NOTHING, Sampled(_NOTHING, _NO_LOGPROBS, (), ()), _NOTHING, _NOTHING, _NO_LOGPROBS,
                       ())


class BaseRunner(ABC):
    """Owns the model, the KV cache and the slots. Used by one thread."""

    def __init__(self, spec: ModelSpec, weights: ModelWeights, ops: Ops, num_blocks: Sequence[int],
                 max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int,
                 num_tier_blocks: Sequence[int] | None = None, kv_dtype: KVDtype = "float32") -> None:
        """num_blocks, num_tier_blocks: on the device and in host memory, one count a KV group each."""
        self.spec, self.ops = spec, ops
        self.groups = kv_groups(spec)
        # A step can hold a row of every decoding slot beside its chunks' budget.
        self.max_num_tokens = max(max_num_batched_tokens, max_num_seqs)
        prepared = ops.prepare(spec, weights, self.max_num_tokens, max_model_len)
        self.model = Transformer(spec, prepared, ops, self.groups)
        self.caches = [ops.allocate_kv(group, n, kv_dtype) for group, n in zip(self.groups, num_blocks, strict=True)]
        self.tiers = [ops.allocate_tier(group, n, kv_dtype) if n else None
                      for group, n in zip(self.groups, num_tier_blocks or [0] * len(self.groups), strict=True)]
        self.slots = Slots(max_num_seqs, max_model_len, len(self.groups))
        self._hidden_sums: dict[int, NDArray[np.float64]] = {}
        self.forward_s = 0.0                               # in forward passes, head included, since the start
        self.on_logits: Callable[[Array, Ints], None] | None = None     # tests inject faults here

    def start(self, slot: int, token_ids: Sequence[int], num_prompt_tokens: int, sampling: SlotSampling,
              block_ids: Sequence[Sequence[int]], wants_token: bool, prompt_logprobs: int | None,
              pooling: str | None = None) -> None:
        """A sequence enters `slot`; nothing of it is computed yet. pooling: of its prompt's final hidden states, "mean"
        (then all of them must be computed) or "last"."""
        self._hidden_sums.pop(slot, None)
        self.slots.start(slot, len(token_ids), num_prompt_tokens, wants_token, prompt_logprobs, pooling)
        for group, ids in enumerate(block_ids):
            self.append_blocks(slot, group, ids)

    def end(self, slot: int) -> None:
        """The sequence in `slot` is over or preempted."""
        self._hidden_sums.pop(slot, None)
        self.slots.end(slot)

    def append_blocks(self, slot: int, group: int, block_ids: Sequence[int]) -> None:
        """`block_ids` continue the slot's table of `group`."""
        self.slots.append_blocks(slot, group, block_ids)

    def close(self) -> None:
        """Memory and threads go back; nothing may follow but what waits for results."""
        self.ops.close()

    @abstractmethod
    def launch(self, rows: StepRows | None) -> Callable[[], StepOutput]:
        """Runs them. What it returns waits for the results, on any thread, in the order of the launches."""

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

    # Which blocks can be found, kept on the device too: by `DeviceRunner`, and only where it is asked to.

    def keep_index(self, num_blocks: int) -> None:
        """Of one KV group, from now on."""
        raise ValueError(f"the {self.ops.name} back end keeps no index of blocks")

    def change_index(self, changes: Sequence[BlockChange]) -> None:
        """In this order: full blocks can be found, or cannot any more (no key). Noted on the host, which cannot fail;
        the device hears of it before the next look-up."""
        assert not changes, "no index is kept"

    def look_up(self, questions: Sequence[Question]) -> Callable[[], list[int]]:
        """Of each how many leading blocks can be found, as of now. What it returns waits for it, on any thread."""
        assert not questions, "no index is kept"
        return list

    def _copy_blocks(self, moves: Sequence[Move], sources: Sequence[Array], destinations: Sequence[Array]) -> None:
        if moves:
            for group, (source, destination) in enumerate(zip(sources, destinations, strict=True)):
                pairs = [(old, new) for g, old, new in moves if g == group]
                if pairs:
                    self.ops.copy_blocks(source, destination, np.array(pairs, np.int32))

    def rows(self, chunks: Sequence[tuple[int, int, int]], resting: Sequence[int],
             num_tokens: int | None = None) -> StepRows | None:
        """Rows of the next step, which must be run: `chunks` (slot, from, to) and one row of every decoding slot that
        is not `resting`.

        num_tokens: the rows that the planner counts on; None where it cannot know.
        """
        rows = self.slots.rows(chunks, resting)
        assert num_tokens in (None, rows.num_tokens if rows else 0), f"{rows} planned as {num_tokens} rows"
        return rows


    def _pool(self, hidden: NDArray[Any], rows: StepRows) -> tuple[Pooled, ...]:
        """hidden: of `rows.hidden_rows` [H, C].

        NOTE: row by row, so that a sum does not depend on how its prompt was cut.
        """
        for slot, state in zip(rows.hidden_slots.tolist(), hidden, strict=True):
            total = self._hidden_sums.setdefault(slot, np.zeros(self.spec.hidden_size))
            total += state.astype(np.float64)
        pooled = []
        for slot in rows.pooled_slots.tolist():
            count = int(self.slots.num_prompt[slot]) if self.slots.pooling[slot] == "mean" else 1
            pooled.append((slot, (self._hidden_sums.pop(slot) / count).astype(np.float32)))
        return tuple(pooled)


class Runner(BaseRunner):
    """Where results can be read at once, and the host samples."""

    def __init__(self, spec: ModelSpec, weights: ModelWeights, ops: Ops, num_blocks: Sequence[int],
                 max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int,
                 num_tier_blocks: Sequence[int] | None = None, kv_dtype: KVDtype = "float32") -> None:
        super().__init__(spec, weights, ops, num_blocks, max_num_seqs, max_num_batched_tokens, max_model_len,
                         num_tier_blocks, kv_dtype)
        self.sampler = Sampler(max_num_seqs, spec.vocab_size)
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self._masks = ThreadPoolExecutor(1, "troupe-masks")     # of constraints, while the forward pass runs
        self._forward = lambda batch, rows: self.model.forward(batch, self.caches, rows)    # one object: see `Ops.run`

    def start(self, slot: int, token_ids: Sequence[int], num_prompt_tokens: int, sampling: SlotSampling,
              block_ids: Sequence[Sequence[int]], wants_token: bool, prompt_logprobs: int | None,
              pooling: str | None = None) -> None:
        super().start(slot, token_ids, num_prompt_tokens, sampling, block_ids, wants_token, prompt_logprobs, pooling)
        self.token_ids[slot, :len(token_ids)] = token_ids
        self.sampler.start(slot, sampling, token_ids, num_prompt_tokens)

    def end(self, slot: int) -> None:
        super().end(slot)
        self.sampler.end(slot)

    def close(self) -> None:
        self._masks.shutdown()
        super().close()

    def launch(self, rows: StepRows | None) -> Callable[[], StepOutput]:
        output = self._step(rows)
        return lambda: output

    def _step(self, rows: StepRows | None) -> StepOutput:
        if rows is None:
            return NO_OUTPUT
        batch = self._batch(rows)

        filling = (self._masks.submit(self.sampler.fill_masks, rows.sample_slots, rows.sample_positions)
                   if self.sampler.has_constraints(rows.sample_slots) else None)
        begin_s = time.perf_counter()
        hidden = self.ops.run(batch, np.concatenate([rows.sample_rows, rows.prompt_rows, rows.hidden_rows]),
                              self._forward)
        self.forward_s += time.perf_counter() - begin_s
        num_samples, num_prompt = len(rows.sample_rows), len(rows.prompt_rows)
        # NOTE: before logits are computed: they may be where hidden states were.
        pooled = self._pool(hidden[num_samples + num_prompt:], rows)
        if filling is not None:
            filling.result()
        sampled = self._sample(hidden[:num_samples], rows.sample_slots, rows.sample_positions)
        self.token_ids[rows.sample_slots, rows.sample_positions] = sampled.token_ids
        prompt_positions = batch.positions[rows.prompt_rows] + 1
        logprobs, tops = self._prompt_logprobs(hidden[num_samples:num_samples + num_prompt], rows.prompt_slots,
                                               prompt_positions)
        return StepOutput(rows.sample_slots, rows.sample_positions, sampled, rows.prompt_slots, prompt_positions,
                          logprobs, tops, pooled)

    def _batch(self, rows: StepRows) -> Batch:
        assert 0 < rows.num_tokens <= self.max_num_tokens, f"{rows.num_tokens} tokens, at most {self.max_num_tokens}"
        block_index, offset = rows.positions // BLOCK_SIZE, rows.positions % BLOCK_SIZE
        width = int(rows.seq_lens.max() + BLOCK_SIZE - 1) // BLOCK_SIZE
        tables = self.slots.block_tables
        return Batch(
            token_ids=self.token_ids[rows.row_slots, rows.positions],
            positions=rows.positions,
            query_start_loc=rows.query_start_loc,
            seq_lens=rows.seq_lens,
            block_tables=tuple(np.ascontiguousarray(table[rows.slots, :width]) for table in tables),
            slot_mapping=tuple(table[rows.row_slots, block_index] * BLOCK_SIZE + offset for table in tables),
        )

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
            num_top = max(self.slots.prompt_logprobs[int(slot)] for slot in slots[part])
            values, best = self.sampler.prompt_logprobs(logits, targets, num_top)
            logprobs.append(values)
            tops += [top[:self.slots.prompt_logprobs[int(slot)]] for slot, top in zip(slots[part], best, strict=True)]
        return np.concatenate(logprobs), tuple(tops)

    def _logits(self, hidden: NDArray[np.float32], slots: Ints) -> NDArray[np.float32]:
        begin_s = time.perf_counter()
        logits: NDArray[np.float32] = self.model.logits(hidden)
        self.ops.finish()
        self.forward_s += time.perf_counter() - begin_s
        if self.on_logits is not None:
            self.on_logits(logits, slots)
        return logits
