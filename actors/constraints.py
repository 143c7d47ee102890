"""What may come next in an answer: a thought within its budget, then a form.

A budget is held by masks, as forms are: behind the last token of it the tokens of the end mark are all that is allowed,
one after the other.
"""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from actors.grammars import Grammars, Matcher, forbid
from actors.messages import StartedSequence
from actors.policy.thought_reader import PROMPT_END_TOKENS, ThoughtReader, is_open
from actors.sampling_params import ParameterError, SamplingParams, StructuredOutputs, Thought
from weights.vocab import Vocab

MAX_GAP = 4                                 # spaces and line breaks between a thought and the form
MAX_MARKS = 8                               # kept: a server has one pair

_GAP = b" \n"


class Constraints:
    """Of one model. Used by one thread, but for `grammars`."""

    def __init__(self, grammars: Grammars) -> None:
        self.grammars = grammars
        self._marks: dict[tuple[str, str], ThoughtMarks] = {}

    def of(self, started: StartedSequence) -> Matcher | ThoughtThenForm:
        """A `cuda.sampler.Constraint` for a sequence that enters a slot and `is_constrained`, where its output is.

        Raises: ParameterError.
        """
        sampling, grammars, num_prompt = started.sampling, self.grammars, started.num_prompt_tokens
        thought, wanted = sampling.thought, sampling.structured_outputs
        output_ids = started.token_ids[num_prompt:]

        def form(wanted: StructuredOutputs, output_ids: Sequence[int] = ()) -> Matcher:
            return grammars.matcher(wanted, started.stop_ids, sampling.min_tokens, sampling.ignore_eos, output_ids)

        if thought is None:
            assert wanted is not None, "it is constrained"
            return form(wanted, output_ids)
        reader = new_reader(grammars.vocab, thought, started.token_ids[:num_prompt])
        at_once, later = (None, None) if wanted is None else (
            form(wanted) if reader.place == "before" else None, form(wanted))
        answer = ThoughtThenForm(grammars.vocab, self._marks_of(thought), thought.budget, reader, at_once, later,
                                 grammars.bits(started.stop_ids), sampling.min_tokens)
        for token_id in output_ids:
            answer.advance(token_id)
        return answer

    def _marks_of(self, thought: Thought) -> ThoughtMarks:
        key = thought.begin, thought.end
        if key not in self._marks:
            if len(self._marks) == MAX_MARKS:
                self._marks.clear()
            self._marks[key] = ThoughtMarks(self.grammars, thought)
        return self._marks[key]


def is_constrained(sampling: SamplingParams) -> bool:
    """Whether some tokens may not come where they would by its other parameters."""
    return sampling.structured_outputs is not None or (
        sampling.thought is not None and sampling.thought.budget is not None)


def new_reader(vocab: Vocab, thought: Thought, prompt_ids: Sequence[int]) -> ThoughtReader:
    """Of an answer to this prompt."""
    return ThoughtReader(thought.begin, thought.end,
                         is_open(thought.begin, vocab.decode(prompt_ids[-PROMPT_END_TOKENS:])))


def check_thought(vocab: Vocab, vocab_size: int, sampling: SamplingParams,
                  bad_word_ids: Sequence[tuple[int, ...]]) -> None:
    """Raises: ParameterError where the end of a thought could not be said when it has to be."""
    thought = sampling.thought
    if thought is None or thought.budget is None:
        return
    end_ids = mark_ids(vocab, thought.end)
    if not end_ids or max(end_ids) >= vocab_size:
        raise ParameterError(thought.name, f"this model has no tokens for {thought.end!r:.80}")
    if sampling.allowed_token_ids is not None and not set(end_ids) <= set(sampling.allowed_token_ids):
        raise ParameterError("allowed_token_ids", f"must hold the tokens that end a thought, {end_ids}")
    for word in bad_word_ids:
        for number, end_id in enumerate(end_ids):
            before = zip(reversed(word[:-1]), reversed(end_ids[:number]), strict=False)
            if word[-1] == end_id and all(one == other for one, other in before):
                raise ParameterError("bad_words", f"would forbid to end a thought with {thought.end!r:.80}")


def mark_ids(vocab: Vocab, mark: str) -> list[int]:
    """How the model spells a mark, perhaps with white space before it; [] if it cannot."""
    try:
        ids = vocab.encode(mark, add_special=False)
    except ValueError:
        return []
    return ids if b"".join(map(vocab.token_bytes, ids)).lstrip() == mark.encode() else []


class ThoughtMarks:
    """Of one model: tokens of the marks, and masks [V / 32] of what a thought must not have where a form follows."""

    def __init__(self, grammars: Grammars, thought: Thought) -> None:
        vocab, self._grammars = grammars.vocab, grammars
        self.begin_ids, self.end_ids = (mark_ids(vocab, mark) for mark in (thought.begin, thought.end))
        self.end = thought.end.encode()
        self._tokens = [vocab.token_bytes(token_id) for token_id in range(min(vocab.size, grammars.vocab_size))]
        self.all_tokens = grammars.bits(range(grammars.vocab_size))
        self.specials = grammars.bits(vocab.special_ids.union(vocab.stop_ids).difference(self.end_ids))
        self.gaps = [(token_id, len(token)) for token_id, token in enumerate(self._tokens)
                     if 0 < len(token) <= MAX_GAP and not token.strip(_GAP)]
        self._wrong_ends: dict[int, NDArray[np.uint32]] = {}

    def wrong_ends(self, num_begun: int) -> NDArray[np.uint32]:
        """Tokens that complete the end mark, of which num_begun bytes are there, and go on with more than a gap."""
        if num_begun not in self._wrong_ends:
            rest = self.end[num_begun:]
            found = [(token_id, token.find(rest)) for token_id, token in enumerate(self._tokens) if rest in token]
            self._wrong_ends[num_begun] = self._grammars.bits(
                token_id for token_id, at in found
                if (at == 0 or num_begun == 0) and self._tokens[token_id][at + len(rest):].strip(_GAP))
        return self._wrong_ends[num_begun]


class ThoughtThenForm:
    """Where one answer is. See `cuda.sampler.Constraint`.

    Before a thought has begun the form may begin instead: then there is no thought.
    """

    def __init__(self, vocab: Vocab, marks: ThoughtMarks, budget: int | None, reader: ThoughtReader,
                 form: Matcher | None, later_form: Matcher | None, stops: NDArray[np.uint32], min_tokens: int) -> None:
        """form: that the answer may begin with; later_form: another one, for behind the thought; both None: anything
        may come there. stops [V / 32]: tokens that end an answer, masked until min_tokens are out while there is
        another way on."""
        self._vocab, self._marks, self._budget, self._reader = vocab, marks, budget, reader
        self._form, self._later_form = form, later_form
        self._stops, self._min_tokens = stops, min_tokens
        self._begin_ids = marks.begin_ids           # of the mark, that may come before a thought has begun
        self._end_ids: list[int] = []               # that have to come, the budget being spent
        self._last_ids: list[int] = []              # of the thought
        self._gap = MAX_GAP                         # bytes of white space that may still come before the form
        self._has_failed = False
        self._end_what_is_spent()

    def fill(self, allowed: NDArray[np.uint32], num_output_tokens: int) -> None:
        marks, place = self._marks, self._reader.place
        if self._has_failed or (place == "inside" and self._end_ids):
            allowed[:] = 0
            if not self._has_failed:
                _allow(allowed, self._end_ids[0])
        elif place == "inside" or self._later_form is None:
            allowed[:] = marks.all_tokens
            if self._later_form is not None:
                allowed &= ~marks.specials
                for num_begun in range(len(marks.end)):
                    if self._reader.tail.endswith(marks.end[:num_begun]):
                        allowed &= ~marks.wrong_ends(num_begun)
            if num_output_tokens < self._min_tokens:
                forbid(allowed, self._stops)
        else:
            allowed[:] = 0
            if self._form is not None:
                self._form.fill(allowed, num_output_tokens)
            if place == "before" and self._begin_ids:
                _allow(allowed, self._begin_ids[0])
            if place == "behind":
                for token_id, size in marks.gaps:
                    if size <= self._gap:
                        _allow(allowed, token_id)

    def advance(self, token_id: int) -> None:
        place, token = self._reader.place, self._vocab.token_bytes(token_id)
        self._reader.push(token)
        if place in ("before", "inside") and self._reader.place in ("inside", "behind"):
            self._think(token_id)
        elif place == "before":
            self._begin(token_id)
        elif self._form is not None:
            if place == "behind" and len(token) <= self._gap and not token.strip(_GAP) and not self._takes(token_id):
                self._gap -= len(token)
            else:
                self._gap = 0
                self._form.advance(token_id)

    def _begin(self, token_id: int) -> None:
        """What has come so far may be of the form, of the mark that begins a thought, or both."""
        self._begin_ids = self._begin_ids[1:] if self._begin_ids[:1] == [token_id] else []
        if self._form is not None and self._takes(token_id):
            self._form.advance(token_id)
        else:
            self._form = None

    def _think(self, token_id: int) -> None:
        """token_id is in the thought, or in a mark of it."""
        if self._budget is not None:
            self._last_ids = [*self._last_ids, token_id][-len(self._marks.end_ids):]
        self._end_ids = self._end_ids[1:]
        if self._reader.place == "behind":
            self._form = self._later_form
            self._gap = max(0, MAX_GAP - len(self._reader.rest))
            self._has_failed = self._form is not None and self._reader.rest.strip(_GAP) != b""
        elif not self._end_ids:
            self._form = None
            self._end_what_is_spent()

    def _end_what_is_spent(self) -> None:
        """What has been said of the end mark need not be said again."""
        if self._reader.place == "inside" and self._budget is not None and self._reader.num_tokens >= self._budget:
            end_ids = self._marks.end_ids
            num_said = max(number for number in range(len(end_ids)) if number == 0
                           or self._last_ids[-number:] == end_ids[:number])
            self._end_ids = end_ids[num_said:]

    def _takes(self, token_id: int) -> bool:
        """Whether the form goes on with it."""
        allowed = np.zeros_like(self._stops)
        assert self._form is not None, "there is one"
        self._form.fill(allowed, self._min_tokens)
        return bool(allowed[token_id // 32] >> (token_id % 32) & 1)


def _allow(allowed: NDArray[np.uint32], token_id: int) -> None:
    allowed[token_id // 32] |= np.uint32(1 << (token_id % 32))
