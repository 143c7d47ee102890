"""What is known of the sequences in the slots: how many tokens, which blocks, and so the rows of the next step.

A slot holds one sequence. Only changes are told; decode rows go on by themselves, each feeding on the token that was
sampled for it last.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cuda.ops import BLOCK_SIZE, Ints


@dataclass(frozen=True, slots=True, eq=False)
class StepRows:
    """The ragged rows of one step: sequence s owns rows query_start_loc[s] .. query_start_loc[s + 1]."""
    slots: Ints                             # [S]
    query_start_loc: Ints                   # [S + 1]
    seq_lens: Ints                          # [S] tokens computed after this step
    row_slots: Ints                         # [T]
    positions: Ints                         # [T]
    sample_rows: Ints                       # [R] rows that get a token
    sample_slots: Ints                      # [R]
    sample_positions: Ints                  # [R] where that token goes
    prompt_rows: Ints                       # [P] rows whose next token is a prompt token with its logprob asked for
    prompt_slots: Ints                      # [P]
    hidden_rows: Ints                       # [H] rows whose hidden state is pooled
    hidden_slots: Ints                      # [H]
    pooled_slots: Ints                      # of them, those whose prompt ends in this step

    @property
    def num_tokens(self) -> int:
        return len(self.positions)


class Slots:
    """Counters and block tables of `max_num_seqs` sequences."""

    def __init__(self, max_num_seqs: int, max_model_len: int, num_groups: int) -> None:
        table_width = -(-max_model_len // BLOCK_SIZE)
        self.num_known = np.zeros(max_num_seqs, np.int32)
        self.num_prompt = np.zeros(max_num_seqs, np.int32)
        self.block_tables = [np.zeros((max_num_seqs, table_width), np.int32) for _ in range(num_groups)]
        self.num_table_entries = np.zeros((num_groups, max_num_seqs), np.int32)
        self.decoding = np.zeros(max_num_seqs, np.bool_)
        self.wants_token = np.zeros(max_num_seqs, np.bool_)
        self.prompt_logprobs: dict[int, int] = {}          # slot -> number of alternatives
        self.pooling: dict[int, str] = {}                  # slot -> "mean" or "last"

    def start(self, slot: int, num_tokens: int, num_prompt_tokens: int, wants_token: bool,
              prompt_logprobs: int | None, pooling: str | None = None) -> None:
        """A sequence enters `slot` with empty block tables; nothing of it is computed yet."""
        self.num_known[slot] = num_tokens
        self.num_prompt[slot] = num_prompt_tokens
        self.num_table_entries[:, slot] = 0
        self.decoding[slot] = False
        self.wants_token[slot] = wants_token
        self.prompt_logprobs.pop(slot, None)
        if prompt_logprobs is not None:
            self.prompt_logprobs[slot] = prompt_logprobs
        self.pooling.pop(slot, None)
        if pooling is not None:
            self.pooling[slot] = pooling

    def end(self, slot: int) -> None:
        self.decoding[slot] = False
        self.prompt_logprobs.pop(slot, None)
        self.pooling.pop(slot, None)

    def append_blocks(self, slot: int, group: int, block_ids: Sequence[int]) -> int:
        """`block_ids` continue the slot's table of `group`. Returns the index of the first."""
        start = int(self.num_table_entries[group, slot])
        self.block_tables[group][slot, start:start + len(block_ids)] = block_ids
        self.num_table_entries[group, slot] = start + len(block_ids)
        return start

    def rows(self, chunks: Sequence[tuple[int, int, int]], resting: Sequence[int]) -> StepRows | None:
        """Rows of `chunks` (slot, from, to) and one of every decoding slot that is not `resting`; None without any.

        Counts the tokens that the step will sample as known: their rows of the next step may be planned at once.
        """
        runs = self.decoding.copy()
        runs[list(resting)] = False
        decode_slots = np.flatnonzero(runs).astype(np.int32)
        ends = self.num_known[decode_slots]                         # a decode row is [known - 1, known)
        slots = np.concatenate([np.array([c[0] for c in chunks], np.int32), decode_slots])      # [S]
        starts = np.concatenate([np.array([c[1] for c in chunks], np.int32), ends - 1])
        ends = np.concatenate([np.array([c[2] for c in chunks], np.int32), ends])
        if not len(slots):
            return None
        for group in range(len(self.block_tables)):
            entries = self.num_table_entries[group, slots]
            assert (entries * BLOCK_SIZE >= ends).all(), "a row has no block to write its keys to"
        lengths = ends - starts
        query_start_loc = np.zeros(len(slots) + 1, np.int32)
        np.cumsum(lengths, out=query_start_loc[1:])
        num_tokens = int(query_start_loc[-1])
        positions = np.arange(num_tokens, dtype=np.int32) + np.repeat(starts - query_start_loc[:-1], lengths)

        samples = (ends == self.num_known[slots]) & self.wants_token[slots]
        sample_slots, sample_positions = slots[samples], ends[samples]
        prompt_rows, prompt_slots = self._prompt_rows(slots, starts, ends, query_start_loc)
        hidden = self._hidden_rows(slots, starts, ends, query_start_loc)
        self.decoding[sample_slots] = True
        self.num_known[sample_slots] = sample_positions + 1
        return StepRows(slots, query_start_loc, ends.astype(np.int32), np.repeat(slots, lengths),
                        positions.astype(np.int32), (query_start_loc[1:] - 1)[samples], sample_slots, sample_positions,
                        prompt_rows, prompt_slots, *hidden)

    def _prompt_rows(self, slots: Ints, starts: Ints, ends: Ints, query_start_loc: Ints) -> tuple[Ints, Ints]:
        rows: list[Ints] = [np.zeros(0, np.int32)]
        row_slots: list[Ints] = [np.zeros(0, np.int32)]
        if self.prompt_logprobs:
            for s, slot in enumerate(slots):
                count = min(int(ends[s]), int(self.num_prompt[slot]) - 1) - int(starts[s])
                if int(slot) in self.prompt_logprobs and count > 0:
                    rows.append(query_start_loc[s] + np.arange(count, dtype=np.int32))
                    row_slots.append(np.full(count, slot, np.int32))
        return np.concatenate(rows), np.concatenate(row_slots)

    def _hidden_rows(self, slots: Ints, starts: Ints, ends: Ints, query_start_loc: Ints) -> tuple[Ints, Ints, Ints]:
        rows: list[Ints] = [np.zeros(0, np.int32)]
        row_slots: list[Ints] = [np.zeros(0, np.int32)]
        pooled: list[int] = []
        if self.pooling:
            for s, slot in enumerate(slots.tolist()):
                if slot not in self.pooling:
                    continue
                is_end = int(ends[s]) == int(self.num_prompt[slot])
                count = int(ends[s]) - int(starts[s]) if self.pooling[slot] == "mean" else int(is_end)
                rows.append(query_start_loc[s + 1] - count + np.arange(count, dtype=np.int32))
                row_slots.append(np.full(count, slot, np.int32))
                pooled += [slot] * is_end
        return np.concatenate(rows), np.concatenate(row_slots), np.array(pooled, np.int32)
