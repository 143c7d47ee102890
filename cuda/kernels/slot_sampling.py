"""The sampler's device side: what is kept of every slot, and results on their way back."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from cuda.kernels.sampling import MAX_VOCAB, REASONS, RESULT_FLOATS, RESULT_INTS, sample
from cuda.kernels.sampling_state import join_records, make_record, start_slots, state_shapes
from cuda.launcher import DeviceArray, Download, Launcher
from cuda.ops import Ints
from cuda.sampler import Sampled, SlotSampling, TopLogprobs

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
        # The rows' numbers and their logprobs lie behind each other, to come down as one.
        self.max_rows = -(-max_num_seqs // ROW_MULTIPLE) * ROW_MULTIPLE
        num_ints = self.max_rows * RESULT_INTS
        self._packed = launcher.zeros(num_ints + self.max_rows * RESULT_FLOATS, np.int32)
        self._results = self._packed[:num_ints].reshape(self.max_rows, RESULT_INTS)
        self._logprobs = self._packed[num_ints:].view(np.float32).reshape(self.max_rows, RESULT_FLOATS)

    @staticmethod
    def state_bytes(max_num_seqs: int, vocab_size: int) -> int:
        """Device memory that is kept of the slots; results are small beside it."""
        return sum(int(np.prod(shape)) * np.dtype(dtype).itemsize
                   for shape, dtype in state_shapes(max_num_seqs, vocab_size).values())

    def start(self, slot: int, sampling: SlotSampling, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """A sequence enters a slot. token_ids: all that are known; a resumed sequence brings its earlier output.

        Raises: ValueError as `Sampler.start`, or for more biases or logprobs than the kernel holds.
        """
        assert not self._in_use[slot], f"slot {slot} is in use"
        self._started[slot] = make_record(slot, sampling, token_ids, num_prompt_tokens, self.vocab_size)
        self._in_use[slot] = True

    def end(self, slot: int) -> None:
        """The sequence is over or preempted, or could not enter: the slot is free."""
        self._in_use[slot] = False
        self._started.pop(slot, None)

    def flush(self) -> None:
        """Tells the device of the sequences that entered since the last time. Not in a capture."""
        if self._started:
            records = list(self._started.values())
            self._started.clear()
            start_slots(self.launcher, **self._state,
                                records=self.launcher.upload(join_records(records)), num_records=len(records))

    def sample(self, tokens: DeviceArray, logits: DeviceArray, slots: DeviceArray, positions: DeviceArray,
               first_row: int = 0, allowed: DeviceArray | None = None, allowed_rows: DeviceArray | None = None) -> None:
        """One launch, after `flush`: a token a row of logits [R, V] into tokens [slots, W], and the results of rows
        first_row .. first_row + R. See `sampling.sample` for the arrays; slots [R]: below 0 where there is no row."""
        end = first_row + logits.shape[0]
        assert end <= self.max_rows, f"rows up to {end}, at most {self.max_rows}"
        sample(self.launcher, self._results[first_row:end], self._logprobs[first_row:end], tokens,
               logits=logits, slots=slots, positions=positions, allowed=allowed, allowed_rows=allowed_rows,
               **self._state)

    def results(self, slots: Sequence[int] | Ints) -> Callable[[], Sampled]:
        """Of the rows from 0 on, one for each of `slots`, as they are at this place in the queue. What it returns
        waits for them."""
        assert len(slots) <= self.max_rows, f"{len(slots)} rows, at most {self.max_rows}"
        return partial(_read, self.launcher.download_async(self._packed), self.max_rows, len(slots))


def _read(download: Download, max_rows: int, num_rows: int) -> Sampled:
    packed = download.get()
    num_ints = max_rows * RESULT_INTS
    return decode(packed[:num_ints].reshape(max_rows, -1)[:num_rows],
                  packed[num_ints:].view(np.float32).reshape(max_rows, -1)[:num_rows])


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
