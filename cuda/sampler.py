"""From logits to tokens: penalties, masks, temperature, filters, one random draw a row.

The order, for each row on its own:
  1. The raw logits are checked: a row with NaN or +inf, or without a finite entry, fails; -inf entries are masked.
  2. Reported logprobs are the log-softmax of the raw logits, before everything below (vLLM's `raw_logprobs`).
  3. Repetition penalty over prompt and output, then frequency and presence penalty over the output.
  4. logit_bias is added; stop ids are masked until `min_tokens` tokens are out.
  5. Temperature 0: the largest logit, the lowest id among equals. Else: divide by the temperature, filter by min_p,
     top_k, top_p (each on what the one before left), draw by the inverse of the cumulative distribution.
Order and meaning are vLLM's and OpenAI's, except that vLLM adds logit_bias before the penalties.

A row's result depends on its own logits and its own sequence alone, bit for bit.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda import philox
from cuda.ops import Ints

Floats32 = NDArray[np.float32]
Floats64 = NDArray[np.float64]
Row = NDArray[np.floating[Any]]                                 # [V]
Ids = NDArray[np.int64]
TopLogprobs = tuple[tuple[int, float], ...]                     # (token id, logprob), best first

GREEDY_BELOW = 1e-5                     # temperatures under it are greedy, as in vLLM


@dataclass(frozen=True, slots=True)
class SlotSampling:
    """What the sampler must know of a sequence. Names and meanings as in SamplingParams."""
    temperature: float
    top_k: int                          # < 1, or the whole vocabulary: off
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    min_tokens: int
    stop_ids: tuple[int, ...]           # masked until min_tokens output tokens exist
    seed: int                           # 64 bits, signed or not
    choice: int
    logprobs: int | None                # None: not reported; n: the chosen token's and the n best tokens'

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """One entry a row. A failed row has token id 0 (an id that can be fed on), nan and no top logprobs."""
    token_ids: Ints                                             # [R]
    logprobs: Floats32                                          # [R] of the chosen tokens; nan where not asked for
    top_logprobs: tuple[TopLogprobs, ...]                       # [R] () where not asked for; never a masked token
    failed: tuple[tuple[int, str], ...]                         # (row, reason)


class Sampler:
    """Samples for the sequences in `max_num_seqs` slots; holds what penalties must know of each of them."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._slots: list[_Slot | None] = [None] * max_num_seqs

    def start(self, slot: int, sampling: SlotSampling, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """A sequence enters a slot. token_ids: all that are known; a resumed sequence brings its earlier output.

        Raises: ValueError for an id in logit_bias or (with a repetition penalty) token_ids outside the vocabulary.
        """
        assert self._slots[slot] is None, f"slot {slot} is in use"
        self._slots[slot] = _Slot(sampling, token_ids, num_prompt_tokens, self.vocab_size)

    def end(self, slot: int) -> None:
        """The sequence is over or preempted, or could not enter: the slot is free."""
        self._slots[slot] = None

    def sample(self, logits: Floats32, slots: Ints, positions: Ints) -> Sampled:
        """One token a row; counts it for the row's penalties.

        logits [R, V], C-contiguous, not written to; slots [R], no slot twice; positions [R]: the index in its
        sequence that the new token will have.
        """
        num_rows = len(logits)
        assert logits.shape[1] == self.vocab_size, f"{logits.shape[1]} logits for a vocabulary of {self.vocab_size}"
        states = [self._state(slot) for slot in slots.tolist()]
        draws = _draws(states, positions)
        token_ids = np.zeros(num_rows, dtype=np.int32)
        logprobs = np.full(num_rows, np.nan, dtype=np.float32)
        top_logprobs: list[TopLogprobs] = [()] * num_rows
        failed = []
        # argmax answers the first NaN where there is one, so one pass finds the greedy token and everything unusable.
        best_ids = logits.argmax(axis=1)
        best_logits = logits[np.arange(num_rows), best_ids]
        for row, state in enumerate(states):
            if not np.isfinite(best_logits[row]):
                failed.append((row, _reason(best_logits[row])))
                continue
            raw = logits[row]
            num_output_tokens = int(positions[row]) - state.num_prompt_tokens
            token_id = int(best_ids[row])
            if state.changes_logits(num_output_tokens):
                scores: Row = state.change_logits(raw, num_output_tokens)
                token_id = int(scores.argmax())
                if scores[token_id] == -np.inf:
                    failed.append((row, "every token is masked"))
                    continue
            else:
                scores = raw
            if not state.sampling.greedy:
                token_id = _draw(scores, float(scores[token_id]), state.sampling, float(draws[row]))
            token_ids[row] = token_id
            state.count(token_id)
            if state.sampling.logprobs is not None:
                logprobs[row], top_logprobs[row] = _logprobs(raw, float(best_logits[row]), token_id,
                                                             state.sampling.logprobs)
        return Sampled(token_ids, logprobs, tuple(top_logprobs), tuple(failed))

    @staticmethod
    def prompt_logprobs(logits: Floats32, targets: Ints, num_top: int) -> tuple[Floats32, tuple[TopLogprobs, ...]]:
        """Logprob of each row's target token and the num_top best tokens, of the raw logits.

        logits [R, V], targets [R] -> [R], [R]; a row that `sample` would fail gets nan and ().
        """
        logprobs = np.full(len(logits), np.nan, dtype=np.float32)
        top_logprobs: list[TopLogprobs] = [()] * len(logits)
        for row, raw in enumerate(logits):
            best = float(raw[raw.argmax()])
            if np.isfinite(best):
                logprobs[row], top_logprobs[row] = _logprobs(raw, best, int(targets[row]), num_top)
        return logprobs, tuple(top_logprobs)

    def _state(self, slot: int) -> _Slot:
        state = self._slots[slot]
        assert state is not None, f"slot {slot} is not in use"
        return state


class _Slot:
    """A sequence's sampling parameters as arrays, and what is done to its logits."""

    def __init__(
        self, sampling: SlotSampling, token_ids: Sequence[int], num_prompt_tokens: int, vocab_size: int
    ) -> None:
        self.sampling = sampling
        self.num_prompt_tokens = num_prompt_tokens
        self.bias_ids = np.array([token_id for token_id, _ in sampling.logit_bias], dtype=np.int64)
        self.biases = np.array([bias for _, bias in sampling.logit_bias], dtype=np.float64)
        _check_vocab("logit_bias", self.bias_ids, vocab_size)
        # A stop id outside the vocabulary can never be sampled: there is nothing to mask.
        self.stop_ids = np.array([stop_id for stop_id in sampling.stop_ids if 0 <= stop_id < vocab_size],
                                 dtype=np.int64)
        self.penalties: _Penalties | None = None
        if sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0:
            _check_vocab("token_ids", np.asarray(token_ids, dtype=np.int64), vocab_size)
            self.penalties = _Penalties(sampling, token_ids, num_prompt_tokens)

    def count(self, token_id: int) -> None:
        """token_id is out."""
        if self.penalties is not None:
            self.penalties.count(token_id)

    def changes_logits(self, num_output_tokens: int) -> bool:
        return self.penalties is not None or len(self.biases) > 0 or self._masks_stop_ids(num_output_tokens)

    def change_logits(self, raw: Floats32, num_output_tokens: int) -> Floats64:
        """Penalties, biases and masks on a copy. float64, so that nothing overflows; -inf stays -inf. [V] -> [V]"""
        logits = raw.astype(np.float64)
        if self.penalties is not None:
            self.penalties.apply(logits)
        np.add.at(logits, self.bias_ids, self.biases)
        if self._masks_stop_ids(num_output_tokens):
            logits[self.stop_ids] = -np.inf
        return logits

    def _masks_stop_ids(self, num_output_tokens: int) -> bool:
        return num_output_tokens < self.sampling.min_tokens and len(self.stop_ids) > 0


class _Penalties:
    """The penalties of a sequence and the tokens they are about: those seen, not the whole vocabulary."""

    def __init__(self, sampling: SlotSampling, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        self.sampling = sampling
        self.places: dict[int, int] = {}                        # token id -> its index in the arrays below
        self.seen_ids = np.zeros(16, dtype=np.int64)            # in the order first seen; the rest is room to grow
        self.num_outputs = np.zeros(16, dtype=np.int64)         # how often each is in the output
        if sampling.repetition_penalty != 1.0:                  # the others do not look at the prompt
            for token_id in token_ids[:num_prompt_tokens]:
                self._place(token_id)
        for token_id in token_ids[num_prompt_tokens:]:
            self.count(token_id)

    def count(self, token_id: int) -> None:
        place = self._place(token_id)
        self.num_outputs[place] += 1

    def apply(self, logits: Floats64) -> None:
        """In place. logits [V]"""
        sampling = self.sampling
        ids = self.seen_ids[:len(self.places)]
        num_outputs = self.num_outputs[:len(self.places)]
        seen = logits[ids]
        seen = np.where(seen > 0.0, seen / sampling.repetition_penalty, seen * sampling.repetition_penalty)
        seen -= sampling.frequency_penalty * num_outputs + sampling.presence_penalty * (num_outputs > 0)
        logits[ids] = seen

    def _place(self, token_id: int) -> int:
        place = self.places.setdefault(token_id, len(self.places))
        if place == len(self.seen_ids):
            self.seen_ids = np.concatenate((self.seen_ids, np.zeros_like(self.seen_ids)))
            self.num_outputs = np.concatenate((self.num_outputs, np.zeros_like(self.num_outputs)))
        self.seen_ids[place] = token_id
        return place


def _check_vocab(field: str, ids: Ids, vocab_size: int) -> None:
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        raise ValueError(f"{field}: token id {outside[0]} is not in the vocabulary of {vocab_size}")


def _reason(best_logit: np.float32) -> str:
    if np.isnan(best_logit):
        return "logits are not finite: NaN"
    return "logits are not finite: +inf" if best_logit > 0 else "logits are not finite: every one is -inf"


def _draws(states: Sequence[_Slot], positions: Ints) -> Floats64:
    """A uniform number for every row that is not greedy; 0 for the others. -> [R]"""
    draws = np.zeros(len(states))
    rows = [row for row, state in enumerate(states) if not state.sampling.greedy]
    if rows:
        samplings = [states[row].sampling for row in rows]
        draws[rows] = philox.uniforms([sampling.seed for sampling in samplings],
                                      [sampling.choice for sampling in samplings],
                                      positions[rows].tolist(), philox.SAMPLE)
    return draws


def _draw(logits: Row, best_logit: float, sampling: SlotSampling, uniform: float) -> int:
    """A token id of the filtered distribution. logits [V] with largest entry best_logit; 0 <= uniform < 1."""
    ids = None                                                  # None: the whole vocabulary
    if 0 < sampling.top_k < len(logits):
        # NOTE: top_k before min_p keeps the same tokens as vLLM's order, both being prefixes of the sorted row, and
        # spares the exponentials of the rest. top_p comes last: its share is of what the others left.
        ids = _best_ids(logits, sampling.top_k)
        logits = logits[ids]
    weights = np.subtract(logits, best_logit, dtype=np.float64)
    weights /= sampling.temperature
    np.exp(weights, out=weights)                                # probabilities times a constant; the best token's is 1
    if sampling.min_p > 0.0:
        kept = np.flatnonzero(weights >= sampling.min_p)
        ids, weights = kept if ids is None else ids[kept], weights[kept]
    if sampling.top_p < 1.0:
        kept = _nucleus(weights, sampling.top_p)
        ids, weights = kept if ids is None else ids[kept], weights[kept]
    cumulative = weights.cumsum()
    # The first entry above the target: never one of weight 0, and never past the end because uniform < 1.
    place = int(cumulative.searchsorted(uniform * cumulative[-1], side="right"))
    return place if ids is None else int(ids[place])


def _best_ids(values: Row, num: int) -> Ids:
    """Indices of the `num` largest values, ascending; among equals the lower index. 1 <= num <= len(values)"""
    # At least num values reach the num-th largest of the maxima of disjoint groups, and hardly more where there are
    # many groups: two passes that vectorise, instead of a selection over the whole row.
    num_groups = len(values) // 16
    if num < num_groups // 4:
        maxima = values[:16 * num_groups].reshape(16, num_groups).max(axis=0)
        candidates = np.flatnonzero(values >= _nth_largest(maxima, num))
    else:
        candidates = np.arange(len(values))
    values = values[candidates]
    return candidates[_first(values, num, _nth_largest(values, num))]


def _nth_largest(values: Row, num: int) -> Any:
    return np.partition(values, len(values) - num)[len(values) - num]


def _nucleus(weights: Floats64, top_p: float) -> Ids:
    """Indices, ascending, of the fewest largest weights whose share of the sum reaches top_p."""
    total = weights.sum()
    # What lies below this bound adds up to less than 1 - top_p: none of it is needed.
    candidates = np.flatnonzero(weights >= (1.0 - top_p) * total / len(weights))
    weights = weights[candidates]
    ordered = np.sort(weights)[::-1]
    num = min(int(ordered.cumsum().searchsorted(top_p * total)) + 1, len(ordered))
    return candidates[_first(weights, num, ordered[num - 1])]


def _first(values: Row, num: int, threshold: Any) -> Ids:
    """Indices, ascending, of the `num` largest values, of which `threshold` is the smallest; the lower index first."""
    kept = values > threshold
    ties = np.flatnonzero(values == threshold)
    kept[ties[:num - np.count_nonzero(kept)]] = True
    return np.flatnonzero(kept)


def _logprobs(raw: Floats32, best_logit: float, token_id: int, num_top: int) -> tuple[np.float32, TopLogprobs]:
    """log-softmax of token_id and of the num_top best tokens, masked ones left out. raw [V], largest best_logit"""
    shifted = np.subtract(raw, best_logit, dtype=np.float64)
    log_sum = np.log(np.exp(shifted).sum())
    top: TopLogprobs = ()
    if num_top > 0:
        ids = _best_ids(raw, min(num_top, len(raw)))
        ids = ids[raw[ids] > -np.inf]
        ids = ids[np.argsort(-raw[ids], kind="stable")]
        top = tuple(zip(ids.tolist(), (shifted[ids] - log_sum).astype(np.float32).tolist(), strict=True))
    return np.float32(shifted[token_id] - log_sum), top
