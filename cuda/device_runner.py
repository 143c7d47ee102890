"""The step where tokens stay on the device: what a plan changes goes up, launches are queued, results come down later.

A step can be launched before the results of the one before it are read: the tokens that were sampled lie in a table on
the device, where the next step finds them. Decode steps of up to `GRAPH_ROWS` rows are padded to a bucket and replayed
as two graphs, the forward pass and the sampling, from the second step of a kind on. Between the two the masks of rows
with a constraint are filled, once the tokens of the step before are known: the device is at the forward pass meanwhile.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda.kernels import decode_attention, prefill_attention
from cuda.kernels.ops import LOGITS_ROWS, MAX_ITEMS, DeviceBatch, KernelOps
from cuda.kernels.prefix_lookup import PrefixTable, Query
from cuda.kernels.slot_sampling import DeviceSampling
from cuda.kernels.step_rows import step_rows, update_tables
from cuda.launcher import DeviceArray, Graph
from cuda.ops import Array, Ints, KVDtype
from cuda.runner import NO_OUTPUT, BaseRunner, BlockChange, Pooled, Question, StepOutput
from cuda.sampler import Sampled, Sampler, SlotSampling, TopLogprobs
from cuda.slots import StepRows
from weights.load import ModelWeights
from weights.spec import ModelSpec

GRAPH_ROWS = 32
BUCKETS = (1, 2, 4, 8, 16, 24, 32)
ALIGNMENT = 64                              # int32 numbers between the starts of two inputs
INDEX_CHANGES = 256                         # are sent without a look-up, lest the next one had to send far more


@dataclass(frozen=True, slots=True, eq=False)
class _Inputs:
    """What a step reads from the device, all of it int32 and uploaded at once. -1: no row."""
    row_slots: DeviceArray                  # [T]
    positions: DeviceArray                  # [T]
    rows: DeviceArray                       # [R] whose logits are wanted
    slots: DeviceArray                      # [R]
    sample_positions: DeviceArray           # [R] where the token goes
    mask_rows: DeviceArray | None           # [R] whose mask; None: no row has one
    decode_work: tuple[tuple[DeviceArray, ...], ...]    # [W, 8] of each KV group, in parts
    prefill_work: tuple[DeviceArray, ...]   # one [W, 4] a KV group


@dataclass(frozen=True, slots=True, eq=False)
class _OfPrompts:
    """What a step has found out about prompts; see `StepOutput`."""
    logprobs: NDArray[np.float32]
    top_logprobs: list[TopLogprobs]
    pooled: tuple[Pooled, ...] = ()


_NOTHING = _OfPrompts(np.zeros(0, np.float32), [])


@dataclass(slots=True, eq=False)
class _Kind:
    """Steps that one pair of graphs serves."""
    has_run: bool = False                   # eagerly: all that it needs is loaded and allocated
    graphs: tuple[Graph, Graph] | None = None       # the forward pass and the sampling


class DeviceRunner(BaseRunner):
    """See `BaseRunner`. Used by the device thread; what `launch` returns may be called on another."""

    def __init__(self, spec: ModelSpec, weights: ModelWeights, ops: KernelOps, num_blocks: Sequence[int],
                 max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int,
                 num_tier_blocks: Sequence[int] | None = None, kv_dtype: KVDtype = "bf16",
                 graphs: bool = True) -> None:
        super().__init__(spec, weights, ops, num_blocks, max_num_seqs, max_num_batched_tokens, max_model_len,
                         num_tier_blocks, kv_dtype)
        self.kernels, self.launcher, self.graphs = ops, ops.launcher, graphs
        self.max_num_seqs = max_num_seqs
        num_groups, width = len(self.groups), self.slots.block_tables[0].shape[1]
        self.tokens = self.launcher.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self.block_tables = self.launcher.zeros((num_groups, max_num_seqs, width), np.int32)
        self._table_views = tuple(self.block_tables[group] for group in range(num_groups))
        self._token_ids = self.launcher.empty(self.max_num_tokens, np.int32)
        self._slot_mapping = self.launcher.empty(num_groups * self.max_num_tokens, np.int32)
        self._changes: dict[tuple[int, int], int] = {}      # (group * slots + slot, column) -> block id
        self._inputs = self.launcher.empty(0, np.int32)
        self._kinds: dict[tuple[int, ...], _Kind] = {}
        self._last_end_s = 0.0
        self.prefix_table: PrefixTable | None = None
        self.sampler = DeviceSampling(self.launcher, max_num_seqs, spec.vocab_size)
        self._prompt_sampler = Sampler(max_num_seqs, spec.vocab_size)

    def start(self, slot: int, token_ids: Sequence[int], num_prompt_tokens: int, sampling: SlotSampling,
              block_ids: Sequence[Sequence[int]], wants_token: bool, prompt_logprobs: int | None,
              pooling: str | None = None) -> None:
        super().start(slot, token_ids, num_prompt_tokens, sampling, block_ids, wants_token, prompt_logprobs, pooling)
        self.launcher.write(self.tokens[slot, :len(token_ids)], np.array(token_ids, np.int32))
        self.sampler.start(slot, sampling, token_ids, num_prompt_tokens)

    def end(self, slot: int) -> None:
        super().end(slot)
        self.sampler.end(slot)

    def close(self) -> None:
        # What is kept of an engine that is over must not keep the device's memory.
        self._kinds.clear()
        del self.model, self.caches, self.tiers, self.tokens, self.block_tables, self._table_views, self.sampler
        del self._token_ids, self._slot_mapping, self._inputs, self.prefix_table
        super().close()

    def append_blocks(self, slot: int, group: int, block_ids: Sequence[int]) -> None:
        first = self.slots.append_blocks(slot, group, block_ids)
        row = group * self.max_num_seqs + slot
        self._changes.update(((row, first + i), block_id) for i, block_id in enumerate(block_ids))

    def launch(self, rows: StepRows | None) -> Callable[[], StepOutput]:
        self._flush()
        if rows is None:
            return lambda: NO_OUTPUT
        begin_s = time.perf_counter()
        num_rows = len(rows.positions)
        decode_work, prefill_work = self._work(rows)
        is_decode = (num_rows <= GRAPH_ROWS and num_rows == len(rows.slots) == len(rows.sample_rows)
                     and not len(rows.prompt_rows) and self.graphs and self.on_logits is None
                     and all(len(parts) == 1 for parts in decode_work))
        launch = self._launch_decode if is_decode else self._launch_eagerly
        of_prompts = launch(rows, decode_work, prefill_work, self.sampler.mask_rows(rows.sample_slots))
        read = self.sampler.results(rows.sample_slots)
        prompt_positions = rows.positions[rows.prompt_rows] + 1

        def finish() -> StepOutput:
            sampled: Sampled = read()
            # The device was at it since the launch, or since it was done with the step before.
            since_s, self._last_end_s = max(begin_s, self._last_end_s), time.perf_counter()
            self.forward_s += self._last_end_s - since_s
            return StepOutput(rows.sample_slots, rows.sample_positions, sampled, rows.prompt_slots, prompt_positions,
                              of_prompts.logprobs, tuple(of_prompts.top_logprobs), of_prompts.pooled)

        return finish

    # ---- Which blocks can be found

    def keep_index(self, num_blocks: int) -> None:
        self.prefix_table = PrefixTable(self.launcher, num_blocks)

    def change_index(self, changes: Sequence[BlockChange]) -> None:
        assert self.prefix_table is not None, "keep_index comes first"
        for block_id, key, parent, token_ids in changes:
            if key:
                self.prefix_table.insert([key], [parent], [block_id], [token_ids])
            else:
                self.prefix_table.remove([block_id])

    def look_up(self, questions: Sequence[Question]) -> Callable[[], list[int]]:
        assert self.prefix_table is not None, "keep_index comes first"
        found = self.prefix_table.look_up([Query(root, tuple(keys), ids) for root, keys, ids in questions])
        return lambda: [len(block_ids) for block_ids in found()]

    # ---- What goes up

    def _flush(self) -> None:
        """The plan's changes of tables and sampling."""
        if self.prefix_table is not None and self.prefix_table.num_changes >= INDEX_CHANGES:
            self.prefix_table.flush()
        if self._changes:
            width = self.block_tables.shape[2]
            changes = np.array([(row, column, block_id) for (row, column), block_id in self._changes.items()], np.int32)
            update_tables(self.launcher, self.block_tables.reshape(-1, width), self.launcher.upload(changes))
            self._changes.clear()           # NOTE: not before: no later plan says them again
        self.sampler.flush()

    def _work(self, rows: StepRows) -> tuple[list[list[Ints]], list[Ints]]:
        """Work lists of attention of each KV group, those of `decode_attention` in parts."""
        first_rows, lengths = rows.query_start_loc[:-1], np.diff(rows.query_start_loc)
        starts = rows.seq_lens - lengths
        tiles = np.zeros(len(lengths), np.bool_) if self.kernels.deterministic \
            else lengths > decode_attention.MAX_ROWS
        runs = np.stack([first_rows, lengths, starts, rows.slots], axis=1).astype(np.int32)
        short, long = runs[~tiles], runs[tiles]
        decode, prefill = [], []
        for group in self.groups:
            work = decode_attention.plan(short, self.spec.num_heads // group.kv_heads, group.window)
            decode.append(decode_attention.cut(work, MAX_ITEMS) if len(work) else [])
            prefill.append(prefill_attention.plan(long, self.spec.num_heads // group.kv_heads))
        return decode, prefill

    def _upload(self, row_slots: Ints, positions: Ints, sample_rows: Ints, sample_slots: Ints, sample_positions: Ints,
                mask_rows: Ints | None, decode_work: Sequence[Sequence[Ints]], prefill_work: Sequence[Ints]) -> _Inputs:
        parts = [row_slots, positions, sample_rows, sample_slots, sample_positions,
                 np.zeros(0, np.int32) if mask_rows is None else mask_rows, *prefill_work,
                 *(part for group in decode_work for part in group)]
        starts = np.cumsum([0, *(-(-part.size // ALIGNMENT) * ALIGNMENT for part in parts)])
        if self._inputs.shape[0] < starts[-1]:
            self._inputs = self.launcher.empty(int(starts[-1]) * 2, np.int32)      # graphs keep what they read from
            self._kinds.clear()
        packed = np.zeros(starts[-1], np.int32)
        views = []
        for start, part in zip(starts, parts, strict=False):
            packed[start:start + part.size] = part.reshape(-1)
            views.append(self._inputs[start:start + part.size].reshape(part.shape))
        self.launcher.write(self._inputs[:len(packed)], packed)
        first, second, third, fourth, fifth, sixth, *work = views
        prefill, decode = work[:len(self.groups)], iter(work[len(self.groups):])
        return _Inputs(first, second, third, fourth, fifth, None if mask_rows is None else sixth,
                       tuple(tuple(islice(decode, len(group))) for group in decode_work), tuple(prefill))

    # ---- The launches

    def _forward(self, inputs: _Inputs) -> DeviceArray:
        """The hidden state of `inputs.rows`."""
        num_tokens = inputs.positions.shape[0]
        token_ids = self._token_ids[:num_tokens]
        slot_mapping = self._slot_mapping[:len(self.groups) * num_tokens].reshape(len(self.groups), num_tokens)
        step_rows(self.launcher, token_ids, slot_mapping, self.tokens, inputs.row_slots, inputs.positions,
                  self.block_tables)
        batch: Any = DeviceBatch(token_ids, inputs.positions, self._table_views,
                            tuple(slot_mapping[group] for group in range(len(self.groups))),
                            inputs.decode_work, inputs.prefill_work)
        self.ops.begin(batch)
        return self.model.forward(batch, self.caches, inputs.rows)

    def _sample(self, logits: DeviceArray, inputs: _Inputs, part: slice) -> None:
        self.sampler.sample(self.tokens, logits, inputs.slots[part], inputs.sample_positions[part], part.start,
                            None if inputs.mask_rows is None else inputs.mask_rows[part])

    def _fill_masks(self, rows: StepRows, inputs: _Inputs) -> None:
        if inputs.mask_rows is not None:
            self.sampler.fill_masks(rows.sample_slots, rows.sample_positions)

    def _launch_eagerly(self, rows: StepRows, decode_work: Sequence[Sequence[Ints]], prefill_work: Sequence[Ints],
                        mask_rows: Ints | None) -> _OfPrompts:
        """Any step. Prompt logprobs and pooled states are computed on the host, and waited for: few ask for them."""
        num_samples, num_prompt = len(rows.sample_rows), len(rows.prompt_rows)
        wanted = np.concatenate([rows.sample_rows, rows.prompt_rows, rows.hidden_rows])
        inputs = self._upload(rows.row_slots, rows.positions, wanted, rows.sample_slots, rows.sample_positions,
                              mask_rows, decode_work, prefill_work)
        hidden = self._forward(inputs)
        self._fill_masks(rows, inputs)
        for start in range(0, num_samples, LOGITS_ROWS):
            part = slice(start, min(start + LOGITS_ROWS, num_samples))
            logits = self.model.logits(hidden[part])
            if self.on_logits is not None:
                self.on_logits(logits, rows.sample_slots[part])
            self._sample(logits, inputs, part)
        logprobs, tops = self._prompt_logprobs(hidden[num_samples:num_samples + num_prompt], rows)
        if not len(rows.hidden_rows):
            return _OfPrompts(logprobs, tops)
        states = self.launcher.download(hidden[num_samples + num_prompt:])
        return _OfPrompts(logprobs, tops, self._pool(states, rows))

    def _prompt_logprobs(self, hidden: Array, rows: StepRows) -> tuple[NDArray[np.float32], list[TopLogprobs]]:
        logprobs, tops = [np.zeros(0, np.float32)], []
        for start in range(0, len(rows.prompt_rows), LOGITS_ROWS):
            part = slice(start, min(start + LOGITS_ROWS, len(rows.prompt_rows)))
            logits = self.launcher.download(self.model.logits(hidden[part]))
            slots = rows.prompt_slots[part]
            known = {slot: self.launcher.download(self.tokens[slot]) for slot in set(slots.tolist())}
            positions = rows.positions[rows.prompt_rows[part]] + 1
            targets = np.array([known[slot][position] for slot, position in
                                zip(slots.tolist(), positions.tolist(), strict=True)], np.int32)
            wanted = [self.slots.prompt_logprobs[int(slot)] for slot in slots]
            values, best = self._prompt_sampler.prompt_logprobs(logits, targets, max(wanted))
            logprobs.append(values)
            tops += [top[:count] for top, count in zip(best, wanted, strict=True)]
        return np.concatenate(logprobs), tops

    def _launch_decode(self, rows: StepRows, decode_work: Sequence[Sequence[Ints]], prefill_work: Sequence[Ints],
                       mask_rows: Ints | None) -> _OfPrompts:
        """One row a sequence, each with a token to sample, padded to a bucket; no prompt logprobs."""
        num_rows = len(rows.positions)
        # The workspace holds no more rows than a step can have.
        bucket = min(next(bucket for bucket in BUCKETS if bucket >= num_rows), self.max_num_tokens)

        def padded(column: Ints) -> Ints:
            return np.concatenate([column, np.full(bucket - num_rows, -1, np.int32)])

        sizes = tuple(1 << max(len(work) - 1, 0).bit_length() for [work] in decode_work)
        padded_work = [[np.concatenate([work, np.zeros((size - len(work), 8), np.int32)])]
                       for size, [work] in zip(sizes, decode_work, strict=True)]
        row_numbers = np.arange(num_rows, dtype=np.int32)
        inputs = self._upload(padded(rows.row_slots), padded(rows.positions), padded(row_numbers),
                              padded(rows.sample_slots), padded(rows.sample_positions),
                              None if mask_rows is None else padded(mask_rows), padded_work, prefill_work)
        kind = self._kinds.setdefault((bucket, mask_rows is not None, *sizes), _Kind())
        part = slice(0, bucket)
        if not kind.has_run:
            logits = self.model.logits(self._forward(inputs))
            self._fill_masks(rows, inputs)
            self._sample(logits, inputs, part)
            kind.has_run = True
            return _NOTHING
        if kind.graphs is None:
            kind.has_run = False            # should the capture fail, the next step finds out eagerly what was missing
            forward, logits = self._capture(lambda: self.model.logits(self._forward(inputs)))
            sampling, _ = self._capture(lambda: self._sample(logits, inputs, part))
            kind.graphs, kind.has_run = (forward, sampling), True
        forward, sampling = kind.graphs
        forward.launch()
        self._fill_masks(rows, inputs)
        sampling.launch()
        return _NOTHING

    def _capture(self, work: Callable[[], Array]) -> tuple[Graph, Array]:
        """The graph of what `work` launches, and what it returns."""
        self.launcher.begin_capture()
        try:
            result = work()
        except BaseException:
            self.launcher.end_capture()     # else nothing could be done any more
            raise
        return self.launcher.end_capture(), result
