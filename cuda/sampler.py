"""From logits to tokens: penalties, masks, temperature, filters, one random draw a row.

The order, for each row on its own:
  1. The raw logits are checked: a row with NaN or +inf, or without a finite entry, fails; -inf entries are masked.
  2. Reported logprobs are the log-softmax of the raw logits, before everything below (vLLM's `raw_logprobs`).
  3. Repetition penalty over prompt and output, then frequency and presence penalty over the output.
  4. logit_bias is added. Masked are: stop ids until `min_tokens` tokens are out, what is not allowed, bad words of one
     token, and the last token of longer ones while the output ends with those before it; what the constraint forbids.
  5. Temperature 0: the largest logit, the lowest id among equals. Else: divide by the temperature, filter by min_p,
     top_k, top_p (each on what the one before left), draw by the inverse of the cumulative distribution.
Order and meaning are vLLM's and OpenAI's, except that vLLM adds logit_bias before the penalties.

A row's result depends on its own logits and its own sequence alone, bit for bit.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cuda import philox
from cuda.ops import Ints
from cuda.softmax import LARGEST_LOGIT, Floats32, Floats64, Ids, Softmax, TopLogprobs

__all__ = ["Constraint", "Sampled", "Sampler", "SlotSampling", "TopLogprobs"]

GREEDY_BELOW = 1e-5                     # temperatures under it are greedy, as in vLLM


class Constraint(Protocol):
    """What tokens may come next, by those that came before: a grammar's state. Used by the device thread.

    Neither method raises: a constraint that cannot go on allows nothing, and so its row fails.
    """

    def fill(self, allowed: NDArray[np.uint32], num_output_tokens: int) -> None:
        """allowed [V / 32]: a bit for each token, bit i % 32 of word i / 32. num_output_tokens: that are out."""
        ...

    def advance(self, token_id: int) -> None:
        """token_id is out."""
        ...


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
    allowed_ids: tuple[int, ...] | None = None      # all others are masked; None: none is
    bad_words: tuple[tuple[int, ...], ...] = ()     # tokens that must not follow one another in the output
    # It has seen what is out. NOTE: where there is one, min_tokens is for it to see to.
    constraint: Constraint | None = field(default=None, compare=False)

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
        self._scores = np.zeros(vocab_size, dtype=np.float32)   # of the row at hand, where they are not its logits
        # Compiles now what the first step would wait for.
        self._segments = Softmax(self._scores, 1.0).segments

    def start(self, slot: int, sampling: SlotSampling, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """A sequence enters a slot. token_ids: all that are known; a resumed sequence brings its earlier output.

        Raises: ValueError for an id in logit_bias, allowed_ids, bad_words or (with a penalty) token_ids outside the
        vocabulary.
        """
        assert self._slots[slot] is None, f"slot {slot} is in use"
        self._slots[slot] = _Slot(sampling, token_ids, num_prompt_tokens, self.vocab_size)

    def end(self, slot: int) -> None:
        """The sequence is over or preempted, or could not enter: the slot is free."""
        self._slots[slot] = None

    def has_constraints(self, slots: Ints) -> bool:
        """Whether there is something to fill for one of these slots."""
        return any(self._state(slot).sampling.constraint is not None for slot in slots.tolist())

    def fill_masks(self, slots: Ints, positions: Ints) -> None:
        """What constraints allow where `sample` will be asked for these rows: it asks for nothing but tokens that are
        out, so another thread may do it while their logits are computed."""
        for slot, position in zip(slots.tolist(), positions.tolist(), strict=True):
            state = self._state(slot)
            if state.sampling.constraint is not None:
                state.fill_mask(position - state.num_prompt_tokens)

    def sample(self, logits: Floats32, slots: Ints, positions: Ints) -> Sampled:
        """One token a row; counts it for the row's penalties.

        logits [R, V], C-contiguous, not written to; slots [R], no slot twice; positions [R]: the index in its
        sequence that the new token will have.
        """
        num_rows = len(logits)
        assert logits.shape[1] == self.vocab_size, f"{logits.shape[1]} logits for a vocabulary of {self.vocab_size}"
        states = [self._state(slot) for slot in slots.tolist()]
        draws = _draws(states, positions).tolist()
        token_ids = np.zeros(num_rows, dtype=np.int32)
        logprobs = np.full(num_rows, np.nan, dtype=np.float32)
        top_logprobs: list[TopLogprobs] = [()] * num_rows
        failed = []
        for row, (state, raw) in enumerate(zip(states, logits, strict=True)):
            sampling = state.sampling
            reported = None if sampling.logprobs is None else Softmax(raw, 1.0)
            scores, finite = raw, True
            num_output_tokens = int(positions[row]) - state.num_prompt_tokens
            if state.changes_logits(num_output_tokens):
                scores = self._scores
                state.change_logits(raw, num_output_tokens, scores)
                if sampling.constraint is not None:
                    state.fill_mask(num_output_tokens)
                    self._segments.mask(scores, state.allowed)
                finite = math.isfinite(raw.max() if reported is None else reported.best)    # a mask can hide a NaN
            if sampling.greedy:
                token_id = int(scores.argmax())                 # of the first NaN where there is one
                finite &= math.isfinite(scores[token_id])
            else:
                shared = reported if scores is raw and sampling.temperature == 1.0 else None
                softmax = shared or Softmax(scores, sampling.temperature)
                finite &= math.isfinite(softmax.best)
                token_id = _draw(softmax, sampling, draws[row]) if finite else 0
            if not finite:
                failed.append((row, _reason(raw)))
                continue
            token_ids[row] = token_id
            state.count(token_id)
            if sampling.constraint is not None:
                sampling.constraint.advance(token_id)
            if reported is not None and sampling.logprobs is not None:
                logprobs[row] = float(raw[token_id]) - reported.log_total
                top_logprobs[row] = reported.top_logprobs(sampling.logprobs)
        return Sampled(token_ids, logprobs, tuple(top_logprobs), tuple(failed))

    @staticmethod
    def prompt_logprobs(logits: Floats32, targets: Ints, num_top: int) -> tuple[Floats32, tuple[TopLogprobs, ...]]:
        """Logprob of each row's target token and the num_top best tokens, of the raw logits.

        logits [R, V], targets [R] -> [R], [R]; a row that `sample` would fail gets nan and ().
        """
        logprobs = np.full(len(logits), np.nan, dtype=np.float32)
        top_logprobs: list[TopLogprobs] = [()] * len(logits)
        for row, raw in enumerate(logits):
            softmax = Softmax(raw, 1.0)
            if math.isfinite(softmax.best):
                logprobs[row] = float(raw[targets[row]]) - softmax.log_total
                top_logprobs[row] = softmax.top_logprobs(num_top)
        return logprobs, tuple(top_logprobs)

    def _state(self, slot: int) -> _Slot:
        state = self._slots[slot]
        assert state is not None, f"slot {slot} is not in use"
        return state


class _Slot:
    """A sequence's sampling parameters, and what is done to its logits."""

    def __init__(
        self, sampling: SlotSampling, token_ids: Sequence[int], num_prompt_tokens: int, vocab_size: int
    ) -> None:
        self.sampling = sampling
        self.num_prompt_tokens = num_prompt_tokens
        # A stop id outside the vocabulary can never be sampled: there is nothing to mask.
        self.stop_ids = np.array([stop_id for stop_id in sampling.stop_ids if 0 <= stop_id < vocab_size],
                                 dtype=np.int64)
        self.penalized = (sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0
                          or sampling.frequency_penalty != 0.0)
        _check_vocab("logit_bias", np.array([token_id for token_id, _ in sampling.logit_bias], np.int64), vocab_size)
        if self.penalized:
            _check_vocab("token_ids", np.asarray(token_ids, dtype=np.int64), vocab_size)
        self.changes = _Changes(sampling)
        self.masks = _Masks(sampling, vocab_size)
        self.allowed = np.zeros(-(-vocab_size // 32) if sampling.constraint is not None else 0, np.uint32)
        self._filled_for = -1                                   # output tokens
        if sampling.repetition_penalty != 1.0:                  # the others do not look at the prompt
            for token_id in set(token_ids[:num_prompt_tokens]):
                self.changes.see(token_id)
        for token_id in token_ids[num_prompt_tokens:]:
            self.count(token_id)

    def count(self, token_id: int) -> None:
        """token_id is out."""
        if self.penalized:
            self.changes.count(token_id)
        if self.masks.words:
            self.masks.output.append(token_id)

    def fill_mask(self, num_output_tokens: int) -> None:
        """`allowed` becomes what the constraint allows behind so many tokens, once."""
        if self._filled_for != num_output_tokens and self.sampling.constraint is not None:
            self.sampling.constraint.fill(self.allowed, num_output_tokens)
            self._filled_for = num_output_tokens

    def changes_logits(self, num_output_tokens: int) -> bool:
        return (len(self.changes.places) > 0 or self.masks.are_there or self.sampling.constraint is not None
                or self._masks_stop_ids(num_output_tokens))

    def change_logits(self, raw: Floats32, num_output_tokens: int, scores: Floats32) -> None:
        """scores [V] = raw [V] with penalties, biases and masks."""
        np.copyto(scores, raw)
        self.changes.apply(scores)
        self.masks.apply(scores)
        if self._masks_stop_ids(num_output_tokens):
            scores[self.stop_ids] = -np.inf

    def _masks_stop_ids(self, num_output_tokens: int) -> bool:
        return num_output_tokens < self.sampling.min_tokens and len(self.stop_ids) > 0


class _Masks:
    """The tokens that are not to be sampled, for ever or now."""

    def __init__(self, sampling: SlotSampling, vocab_size: int) -> None:
        """Raises: ValueError for an id outside the vocabulary."""
        self.words = [word for word in sampling.bad_words if len(word) > 1]
        self.output: list[int] = []                             # where there are such words
        self.never: NDArray[np.bool_] | None = None             # [V] where it is not the same for all
        if sampling.allowed_ids is not None:
            allowed = np.array(sampling.allowed_ids, np.int64)
            _check_vocab("allowed_ids", allowed, vocab_size)
            self.never = np.ones(vocab_size, np.bool_)
            self.never[allowed] = False
        for word in sampling.bad_words:
            _check_vocab("bad_words", np.array(word, np.int64), vocab_size)
        single = [word[0] for word in sampling.bad_words if len(word) == 1]
        if single:
            self.never = np.zeros(vocab_size, np.bool_) if self.never is None else self.never
            self.never[single] = True
        self.are_there = self.never is not None or len(self.words) > 0

    def apply(self, logits: Floats32) -> None:
        """In place. logits [V]"""
        if self.never is not None:
            np.putmask(logits, self.never, np.float32(-np.inf))
        for *first, last in self.words:
            if self.output[-len(first):] == first:
                logits[last] = -np.inf


class _Changes:
    """The tokens whose logits penalties and biases change, and how: those alone, not the whole vocabulary."""

    def __init__(self, sampling: SlotSampling) -> None:
        self.sampling = sampling
        self.places: dict[int, int] = {}                        # token id -> its index in the arrays below
        self.ids = np.zeros(16, dtype=np.int64)                 # in the order of the first change; the rest is room
        self.repetition = np.ones(16)                           # the repetition penalty of those seen, 1 of others
        self.offsets = np.zeros(16)                             # biases, frequency and presence penalties
        self.output: set[int] = set()
        for token_id, bias in sampling.logit_bias:
            place = self._place(token_id)                       # NOTE: first: it can replace the arrays by longer ones
            self.offsets[place] += bias

    def see(self, token_id: int) -> int:
        """The token is in the prompt or in the output. Returns its index."""
        place = self._place(token_id)
        self.repetition[place] = self.sampling.repetition_penalty
        return place

    def count(self, token_id: int) -> None:
        """The token is in the output, once more."""
        place = self.see(token_id)
        self.offsets[place] -= self.sampling.frequency_penalty
        if token_id not in self.output:
            self.output.add(token_id)
            self.offsets[place] -= self.sampling.presence_penalty

    def apply(self, logits: Floats32) -> None:
        """In place, by float64. logits [V]"""
        num = len(self.places)
        if num == 0:
            return
        ids, repetition = self.ids[:num], self.repetition[:num]
        changed = logits[ids].astype(np.float64)
        changed = np.where(changed > 0.0, changed / repetition, changed * repetition)
        changed += self.offsets[:num]
        np.clip(changed, -LARGEST_LOGIT, LARGEST_LOGIT, out=changed, where=changed > -np.inf)
        logits[ids] = changed

    def _place(self, token_id: int) -> int:
        place = self.places.setdefault(token_id, len(self.places))
        if place == len(self.ids):
            self.ids = np.concatenate((self.ids, np.zeros_like(self.ids)))
            self.repetition = np.concatenate((self.repetition, np.ones_like(self.repetition)))
            self.offsets = np.concatenate((self.offsets, np.zeros_like(self.offsets)))
        self.ids[place] = token_id
        return place


def _check_vocab(field: str, ids: Ids, vocab_size: int) -> None:
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        raise ValueError(f"{field}: token id {outside[0]} is not in the vocabulary of {vocab_size}")


def _reason(raw: Floats32) -> str:
    """Why nothing can be sampled."""
    best = float(raw.max())
    if math.isnan(best):
        return "logits are not finite: NaN"
    if math.isinf(best):
        return "logits are not finite: +inf" if best > 0.0 else "logits are not finite: every one is -inf"
    return "every token is masked"


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


def _draw(softmax: Softmax, sampling: SlotSampling, uniform: float) -> int:
    """A token id of the filtered distribution. 0 <= uniform < 1"""
    # NOTE: top_k before min_p keeps the same tokens as vLLM's order, both being prefixes of the sorted row.
    # top_p comes last: its share is of what the others left.
    if 0 < sampling.top_k < len(softmax.logits):
        ids = softmax.best_ids(sampling.top_k)
    elif sampling.min_p > 0.0:
        ids = softmax.likely_ids(sampling.min_p)
    elif sampling.top_p < 1.0:
        return softmax.draw_from_nucleus(sampling.top_p, uniform)
    else:
        return softmax.draw(uniform)
    weights = softmax.weights(ids)
    if sampling.min_p > 0.0:
        kept = np.flatnonzero(weights >= sampling.min_p)
        ids, weights = ids[kept], weights[kept]
    goal = sampling.top_p * float(weights.sum()) if sampling.top_p < 1.0 else math.inf
    return softmax.draw_from(ids, weights, goal, uniform)
