"""The sampler's device side: what is kept of every slot, and results on their way back."""
from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from cuda.kernels.sampling import MAX_VOCAB, REASONS, RESULT_FLOATS, RESULT_INTS, sample
from cuda.kernels.sampling_state import (
    join_records,
    make_record,
    num_words,
    start_slots,
    state_shapes,
)
from cuda.launcher import DeviceArray, Download, Launcher
from cuda.ops import Ints
from cuda.sampler import Constraint, Sampled, SlotSampling, TopLogprobs

ROW_MULTIPLE = 32                           # steps are padded to numbers of rows up to the next multiple


class DeviceSampling:
    """`cuda.sampler.Sampler` on the device, for the sequences in `max_num_seqs` slots.

    Used by the device thread; what `results` returns may be called on another.
    """

    def __init__(self, launcher: Launcher, max_num_seqs: int, vocab_size: int) -> None:
        """Raises: ValueError for a vocabulary that the kernel cannot hold; MemoryError."""
        if vocab_size > MAX_VOCAB:
            raise ValueError(f"a vocabulary of {vocab_size}, at most {MAX_VOCAB}")
        self.launcher, self.vocab_size = launcher, vocab_size
        self._in_use = [False] * max_num_seqs
        self._started: dict[int, Ints] = {}                     # by slot: records to be sent
        self._state = {name: launcher.zeros(shape, dtype)
                       for name, (shape, dtype) in state_shapes(max_num_seqs, vocab_size).items()}
        self._constraints: dict[int, tuple[Constraint, int]] = {}   # by slot, with the length of the prompt
        self._unread: tuple[_Results, list[tuple[int, Constraint]]] | None = None   # whose tokens rows of it wait for
        # The rows' numbers and their logprobs lie behind each other, to come down as one.
        self.max_rows = -(-max_num_seqs // ROW_MULTIPLE) * ROW_MULTIPLE
        num_ints = self.max_rows * RESULT_INTS
        self._packed = launcher.zeros(num_ints + self.max_rows * RESULT_FLOATS, np.int32)
        self.masks = launcher.zeros((self.max_rows, num_words(vocab_size)), np.uint32)
        self._results = self._packed[:num_ints].reshape(self.max_rows, RESULT_INTS)
        self._logprobs = self._packed[num_ints:].view(np.float32).reshape(self.max_rows, RESULT_FLOATS)

    @staticmethod
    def state_bytes(max_num_seqs: int, vocab_size: int) -> int:
        """Device memory that is kept of the slots; results are small beside it."""
        masks = 4 * (-(-max_num_seqs // ROW_MULTIPLE) * ROW_MULTIPLE) * num_words(vocab_size)
        return masks + sum(int(np.prod(shape)) * int(np.dtype(dtype).itemsize)
                           for shape, dtype in state_shapes(max_num_seqs, vocab_size).values())

    def start(self, slot: int, sampling: SlotSampling, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """A sequence enters a slot. token_ids: all that are known; a resumed sequence brings its earlier output.

        Raises: ValueError as `Sampler.start`, or for more biases or logprobs than the kernel holds.
        """
        assert not self._in_use[slot], f"slot {slot} is in use"
        self._started[slot] = make_record(slot, sampling, token_ids, num_prompt_tokens, self.vocab_size)
        self._in_use[slot] = True
        if sampling.constraint is not None:
            self._constraints[slot] = sampling.constraint, num_prompt_tokens

    def end(self, slot: int) -> None:
        """The sequence is over or preempted, or could not enter: the slot is free."""
        self._in_use[slot] = False
        self._started.pop(slot, None)
        self._constraints.pop(slot, None)

    def flush(self) -> None:
        """Tells the device of the sequences that entered since the last time. Not in a capture."""
        if self._started:
            records = list(self._started.values())
            start_slots(self.launcher, **self._state, records=self.launcher.upload(join_records(records)),
                        num_records=len(records))
            self._started.clear()           # NOTE: not before: should memory be short, the next step sends them

    def mask_rows(self, slots: Ints) -> Ints | None:
        """For each row its place among those with a constraint, -1 for the others; None where there are none. [R]"""
        if not any(slot in self._constraints for slot in slots.tolist()):
            return None
        has_mask = np.array([slot in self._constraints for slot in slots.tolist()], np.bool_)
        return np.where(has_mask, np.cumsum(has_mask) - 1, -1).astype(np.int32)

    def fill_masks(self, slots: Ints, positions: Ints) -> None:
        """The masks of the rows that have a constraint, in the order of `mask_rows`, before they are sampled.

        Waits for the results of the step before: what is allowed depends on its tokens. So it comes between the
        launches of forward pass and sampling; the device works meanwhile.
        """
        self._advance()
        held = [(*self._constraints[slot], position) for slot, position in
                zip(slots.tolist(), positions.tolist(), strict=True) if slot in self._constraints]
        masks = np.zeros((len(held), self.masks.shape[1]), np.uint32)
        for allowed, (constraint, num_prompt_tokens, position) in zip(masks, held, strict=True):
            constraint.fill(allowed, position - num_prompt_tokens)
        self.launcher.write(self.masks[:len(held)], masks)

    def _advance(self) -> None:
        if self._unread is None:
            return
        (results, constraints), self._unread = self._unread, None
        sampled = results()
        failed = {row for row, _ in sampled.failed}
        for row, constraint in constraints:
            if row not in failed:
                constraint.advance(int(sampled.token_ids[row]))

    def sample(self, tokens: DeviceArray, logits: DeviceArray, slots: DeviceArray, positions: DeviceArray,
               first_row: int = 0, mask_rows: DeviceArray | None = None) -> None:
        """One launch, after `flush`: a token a row of logits [R, V] into tokens [slots, W], and the results of rows
        first_row .. first_row + R. See `sampling.sample` for the arrays; slots [R]: below 0 where there is no row.
        mask_rows [R]: as the function of that name says."""
        end = first_row + logits.shape[0]
        assert end <= self.max_rows, f"rows up to {end}, at most {self.max_rows}"
        sample(self.launcher, self._results[first_row:end], self._logprobs[first_row:end], tokens,
               logits=logits, slots=slots, positions=positions,
               allowed=None if mask_rows is None else self.masks, allowed_rows=mask_rows, **self._state)

    def results(self, slots: Sequence[int] | Ints) -> Callable[[], Sampled]:
        """Of the rows from 0 on, one for each of `slots`, as they are at this place in the queue. What it returns
        waits for them."""
        assert len(slots) <= self.max_rows, f"{len(slots)} rows, at most {self.max_rows}"
        results = _Results(self.launcher.download_async(self._packed), self.max_rows, len(slots))
        constraints = [(row, self._constraints[slot][0]) for row, slot in enumerate(map(int, slots))
                       if slot in self._constraints]
        if constraints:
            assert self._unread is None, "fill_masks comes before"
            self._unread = results, constraints
        return results


class _Results:
    """Of a step's rows. Called by any thread, and by several."""

    def __init__(self, download: Download, max_rows: int, num_rows: int) -> None:
        self._download: Download | None = download
        self._max_rows, self._num_rows = max_rows, num_rows
        self._lock = threading.Lock()
        self._sampled: Sampled | None = None

    def __call__(self) -> Sampled:
        with self._lock:
            if self._sampled is None:
                assert self._download is not None
                packed, num_ints = self._download.get(), self._max_rows * RESULT_INTS
                self._sampled = decode(packed[:num_ints].reshape(self._max_rows, -1)[:self._num_rows],
                                       packed[num_ints:].view(np.float32).reshape(self._max_rows, -1)[:self._num_rows])
                self._download = None
            return self._sampled


def decode(results: Ints, logprobs: NDArray[np.float32]) -> Sampled:
    """Rows of results as `sampling.sample` leaves them: results [R, 24], logprobs [R, 21]."""
    token_ids, status, num_top = (np.ascontiguousarray(column) for column in results[:, :3].T)
    reported = (status == 0) & (num_top >= 0)
    tops: list[TopLogprobs] = [()] * len(results)
    for row in np.flatnonzero(reported & (num_top > 0)).tolist():
        count = num_top[row]
        tops[row] = tuple(zip(results[row, 4:4 + count].tolist(), logprobs[row, 1:1 + count].tolist(), strict=True))
    return Sampled(
        token_ids=token_ids,
        logprobs=np.where(reported, logprobs[:, 0], np.float32(np.nan)),
        top_logprobs=tuple(tops),
        failed=tuple((row, REASONS[status[row]]) for row in np.flatnonzero(status).tolist()))
