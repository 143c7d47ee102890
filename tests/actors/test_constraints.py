"""Thoughts within their budgets and forms behind them, by masks alone: what may come next, token by token."""
from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from actors.call_grammar import Callee, enforced_calls
from actors.constraints import MAX_GAP, MAX_MARKS, Constraints, check_thought, is_constrained, mark_ids
from actors.grammars import Grammars
from actors.messages import StartedSequence
from actors.sampling_params import ParameterError, SamplingParams, StructuredOutputs, Thought, structured_outputs
from tests.weights.tiny_tokenizers import byte_level, load_folder, sentencepiece, special
from weights.vocab import Vocab

EOS = "<|im_end|>"
THINK, MISTRAL = ("<think>", "</think>"), ("[THINK]", "[/THINK]")
MERGES = (("<", "/"), ("Ċ", "Ċ"), ("h", "e"))


@pytest.fixture(scope="module")
def vocab(tmp_path_factory: pytest.TempPathFactory) -> Vocab:
    """<think> is a token of its own, </think> is seven, [THINK] and [/THINK] are control tokens."""
    tokenizer = byte_level(MERGES)
    tokenizer.add_tokens([special("[THINK]"), special("[/THINK]"),
                          *(AddedToken(text, special=False) for text in ("◁think▷", ">a", ">\n"))])
    return load_folder(tmp_path_factory.mktemp("vocab"), tokenizer, tokenizer_config={"eos_token": EOS})


@pytest.fixture(scope="module")
def constraints(vocab: Vocab) -> Constraints:
    return Constraints(Grammars(vocab, vocab.size + 5))


def started(vocab: Vocab, sampling: SamplingParams, prompt: str = "x",
            output_ids: Sequence[int] = ()) -> StartedSequence:
    prompt_ids = vocab.encode(prompt, add_special=False)
    return StartedSequence(0, "r", (*prompt_ids, *output_ids), len(prompt_ids), sampling,
                           (*sorted(vocab.stop_ids), *sampling.stop_token_ids), 0, 0, ((),))


class Walk:
    """An answer, and at every step whether one that comes back from preemption there may say the same."""

    def __init__(self, constraints: Constraints, sampling: SamplingParams, prompt: str = "x") -> None:
        assert is_constrained(sampling)
        self.constraints, self.sampling, self.prompt = constraints, sampling, prompt
        self.vocab = constraints.grammars.vocab
        self.live = constraints.of(started(self.vocab, sampling, prompt))
        self.ids: list[int] = []

    def allowed(self) -> list[int]:
        again = self.constraints.of(started(self.vocab, self.sampling, self.prompt, self.ids))
        masks = np.full((2, -(-self.constraints.grammars.vocab_size // 32)), 0xAAAAAAAA, np.uint32)
        self.live.fill(masks[0], len(self.ids))
        again.fill(masks[1], len(self.ids))
        assert (masks[0] == masks[1]).all()
        ids: list[int] = np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little")).tolist()
        return ids

    def say(self, token_id: int) -> None:
        self.ids.append(token_id)
        self.live.advance(token_id)

    def can_say(self, text: str) -> bool:
        """Token by token; whether all of it could be said."""
        for token_id in self.vocab.encode(text, add_special=False):
            if token_id not in self.allowed():
                return False
            self.say(token_id)
        return True

    def can_end(self) -> bool:
        return not self.vocab.stop_ids.isdisjoint(self.allowed())

    @property
    def text(self) -> str:
        return self.vocab.decode(self.ids)


def thinking(budget: int | None, marks: tuple[str, str] = THINK, form: StructuredOutputs | None = None,
             **changes: Any) -> SamplingParams:
    return SamplingParams(thought=Thought(*marks, budget), structured_outputs=form, **changes)


# The budget


@pytest.mark.parametrize("marks", [THINK, MISTRAL])
@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("budget", [0, 1, 2, 5])
def test_what_is_spent_ends_with_the_mark(constraints: Constraints, marks: tuple[str, str], opened: bool,
                                          budget: int) -> None:
    begin, end = marks
    walk = Walk(constraints, thinking(budget, marks), f"x{begin}\n" if opened else "x")
    everything = list(range(constraints.grammars.vocab_size))
    if not opened:
        assert walk.allowed() == everything
        assert walk.can_say(f" \n{begin}")
    for _ in range(budget):
        assert walk.allowed() == everything
        walk.say(walk.vocab.encode("i", add_special=False)[0])
    for end_id in mark_ids(walk.vocab, end):
        assert walk.allowed() == [end_id]
        walk.say(end_id)
    assert walk.text.endswith("i" * budget + end)
    assert walk.allowed() == everything
    assert walk.can_say(f"so {begin} {'long ' * 20}")
    assert walk.allowed() == everything, "another one is none"


def test_who_does_not_think_has_no_budget(constraints: Constraints) -> None:
    walk = Walk(constraints, thinking(0), "<think>\n\n</think>\n\n")
    assert walk.can_say("No. <think> and so on" * 5)
    assert len(walk.allowed()) == constraints.grammars.vocab_size


def test_what_has_been_said_of_the_mark_is_not_said_again(constraints: Constraints) -> None:
    walk = Walk(constraints, thinking(4), "<think>")
    assert walk.can_say("a</th")
    assert len(walk.ids) == 4, "the budget, the last three tokens of which begin the end"
    assert walk.allowed() == walk.vocab.encode("i", add_special=False)
    for token_id in walk.vocab.encode("ink>", add_special=False):
        walk.say(token_id)
    assert walk.text == "a</think>"
    assert len(walk.allowed()) == constraints.grammars.vocab_size


def test_a_thought_may_end_before(constraints: Constraints) -> None:
    walk = Walk(constraints, thinking(5), "<think>")
    assert walk.can_say("a</think>bcdefghi")
    walk = Walk(constraints, thinking(9), "<think>")
    assert walk.can_say("a</think>" + "b" * 20), "the mark's tokens are not all of the thought"


def test_stop_ids_wait_for_min_tokens_but_no_mark_does(constraints: Constraints) -> None:
    """Not even where the mark is one of them."""
    end_id, = mark_ids(constraints.grammars.vocab, MISTRAL[1])
    stops = constraints.grammars.vocab.stop_ids
    walk = Walk(constraints, thinking(2, MISTRAL, min_tokens=9, stop_token_ids=(end_id,)), MISTRAL[0])
    assert not ({end_id} | stops) & set(walk.allowed())
    walk.can_say("ab")
    assert walk.allowed() == [end_id]
    walk.say(end_id)
    assert walk.can_say("cde")
    assert not ({end_id} | stops) & set(walk.allowed())
    assert walk.can_say("fgh")
    assert {end_id} | stops <= set(walk.allowed())


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 12), st.sampled_from([THINK, MISTRAL, ("◁think▷", "◁/think▷")]), st.booleans(), st.booleans(),
       st.integers())
@example(3, THINK, True, True, 1)
def test_no_thought_is_longer_than_its_budget(constraints: Constraints, budget: int, marks: tuple[str, str],
                                              opened: bool, formed: bool, seed: int) -> None:
    """A model without any sense, that likes pieces of the marks."""
    draw, vocab = random.Random(seed), constraints.grammars.vocab
    form = structured_outputs({"regex": "[ab]{2}"}) if formed else None
    walk = Walk(constraints, thinking(budget, marks, form), f"x{marks[0]}" if opened else "x")
    liked = [*mark_ids(vocab, marks[1]), *mark_ids(vocab, marks[0]), *vocab.encode("a\n</>", add_special=False)]
    for _ in range(45):
        allowed = walk.allowed()
        if not allowed:
            pytest.fail("nothing is allowed")
        preferred = [token_id for token_id in liked if token_id in allowed]
        token_id = draw.choice(preferred if preferred and draw.random() < 0.8 else allowed)
        if token_id in vocab.stop_ids:
            break
        walk.say(token_id)
    tokens = [marks[0].encode()] * opened + list(map(vocab.token_bytes, walk.ids))
    answer = b"".join(tokens)
    if answer.decode(errors="replace").lstrip().startswith(marks[0]):
        start = answer.index(marks[0].encode()) + len(marks[0].encode())
        end = answer.find(marks[1].encode(), start)
        ends = list(itertools.accumulate(map(len, tokens)))
        inside = [stop for stop, token in zip(ends, tokens, strict=True)
                  if stop - len(token) >= start and (end < 0 or stop <= end)]
        assert len(inside) <= budget + (0 if end >= 0 else len(mark_ids(vocab, marks[1])) - 1)
        answer = b"" if end < 0 else answer[end + len(marks[1].encode()):]
    if formed:
        assert re.fullmatch(rb"[ \n]{0,4}[ab]{0,2}", answer)


# The form behind it

CHOICE = structured_outputs({"choice": ["yes", "no"]})
JSON = structured_outputs({"json": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"],
                                    "additionalProperties": False}})
CALLS = enforced_calls([Callee("f", json.loads(JSON.text), "tools[0]")], "tools", parallel=False)
ANSWERS = [(CHOICE, "yes"), (JSON, '{"x":5}'), (CALLS, '[{"name": "f", "arguments": {"x":1}}]')]


@pytest.mark.parametrize(("form", "answer"), ANSWERS)
@pytest.mark.parametrize("marks", [THINK, MISTRAL])
@pytest.mark.parametrize("budget", [None, 40])
def test_a_form_follows_a_thought(constraints: Constraints, form: StructuredOutputs, answer: str,
                                  marks: tuple[str, str], budget: int | None) -> None:
    begin, end = marks
    sampling = thinking(budget, marks, form)
    for text in (f'{begin}\n[hm] "{end}\n\n{answer}', f"{begin}{end}{answer}", answer, f"{begin}a{end} {answer}"):
        walk = Walk(constraints, sampling)
        assert walk.can_say(text), text
        assert walk.can_end()
    for text in (f"hm{answer}", f"{begin}a{end}hm", f"{begin}a{end}{begin}", f"\n{begin}", EOS, f"{begin}a{EOS}",
                 f"{begin}a{end}{EOS}", f"{begin}{answer}{EOS}", f"{begin}<|im_start|>",
                 f"{begin}{end}" + "\n" * (MAX_GAP + 1)):
        assert not Walk(constraints, sampling).can_say(text), text
    opened = f"x{begin}\n"
    assert Walk(constraints, sampling, opened).can_say(f'hm, [ "{end}\n{answer}')
    for text in (EOS, f"hm{EOS}", f"hm{end} so", f"{answer}{EOS}"):
        assert not Walk(constraints, sampling, opened).can_say(text), text


def test_what_is_spent_is_followed_by_the_form(constraints: Constraints) -> None:
    walk = Walk(constraints, thinking(3, THINK, CHOICE), "<think>")
    assert all(map(walk.can_say, ("abc</think>", "\n", "yes")))
    assert walk.can_end()
    assert not Walk(constraints, thinking(3, THINK, CHOICE), "<think>").can_say("abcd")


def test_no_token_ends_the_thought_and_goes_on_with_something_else(constraints: Constraints) -> None:
    """">a" would bring the form a letter that its grammar was never asked about; ">\n" is as good as ">"."""
    walk, vocab = Walk(constraints, thinking(None, THINK, CHOICE), "<think>"), constraints.grammars.vocab
    letter, line = (vocab.encode(text, add_special=False) for text in (">a", ">\n"))
    assert len(letter) == len(line) == 1
    assert letter[0] in walk.allowed()
    assert walk.can_say("</think")
    assert letter[0] not in walk.allowed()
    assert line[0] in walk.allowed()
    walk.say(line[0])
    assert walk.can_say("\n\n\nno")


def test_a_mark_of_several_tokens_and_a_form_may_begin_alike(constraints: Constraints) -> None:
    """Which of them it is shows later."""
    form = structured_outputs({"regex": "<b>x|</th>"})
    marks = ("</thought>", "</end>")
    for text in ("<b>x", "</th>", "</thought>hm</end><b>x", "</thought>hm</end></th>"):
        walk = Walk(constraints, thinking(9, marks, form))
        assert walk.can_say(text), text
        assert walk.can_end()
    assert not Walk(constraints, thinking(9, marks, form)).can_say("</tho>")


def test_white_space_that_a_form_begins_with_is_its_own(constraints: Constraints) -> None:
    walk = Walk(constraints, thinking(0, THINK, structured_outputs({"regex": " {6}a"})), "<think>")
    assert walk.can_say("</think>" + " " * 6 + "a")
    assert walk.can_end()


def test_a_grammar_that_fails_allows_nothing_behind_the_thought(constraints: Constraints,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    walk = Walk(constraints, thinking(0, THINK, CHOICE), "<think>")
    assert walk.can_say("</think>y")
    assert walk.live._form is not None              # type: ignore[union-attr]
    monkeypatch.setattr(walk.live._form, "_has_failed", True)       # type: ignore[union-attr]
    mask = np.ones(-(-constraints.grammars.vocab_size // 32), np.uint32)
    walk.live.fill(mask, 9)
    assert not mask.any()


# What is refused


def test_a_budget_is_a_number() -> None:
    for budget in (-1, 1.5, "5", True, 2**31):
        with pytest.raises(ParameterError) as error:
            Thought(*THINK, budget)                 # type: ignore[arg-type]
        assert error.value.field == "thinking_token_budget"
    for marks in (("", "</think>"), ("<think>", " "), (5, "x")):
        with pytest.raises(ParameterError) as error:
            Thought(*marks)                         # type: ignore[arg-type]
        assert error.value.field == "thought"
    with pytest.raises(ParameterError) as error:
        SamplingParams(thought={"begin": "a"})      # type: ignore[arg-type]
    assert error.value.field == "thought"


def test_an_end_that_could_not_be_said_is_refused(vocab: Vocab, tmp_path: Path) -> None:
    def field(sampling: SamplingParams, *bad_words: str) -> str | None:
        try:
            check_thought(vocab, vocab.size, sampling,
                          [tuple(vocab.encode(word, add_special=False)) for word in bad_words])
        except ParameterError as error:
            return error.field
        return None

    end_ids = tuple(mark_ids(vocab, THINK[1]))
    assert field(thinking(5)) is None
    assert field(thinking(5, allowed_token_ids=(1, 2))) == "allowed_token_ids"
    assert field(thinking(5, allowed_token_ids=(1, *end_ids))) is None
    assert field(thinking(None, allowed_token_ids=(1, 2))) is None
    for word in ("</think>", "</", "think", "k>", "xy</", "ab</thi"):
        assert field(thinking(5), word) == "bad_words", word
    for word in ("xt", "think!", "q>", "</x"):
        assert field(thinking(5), word) is None, word
    assert field(thinking(None), "</think>") is None
    with pytest.raises(ParameterError, match="has no tokens for '</think>'"):
        check_thought(vocab, 5, thinking(5), [])
    words = load_folder(tmp_path, sentencepiece())
    assert mark_ids(words, THINK[1]), "bytes, behind a space"
    check_thought(words, words.size, thinking(5), [])


def test_marks_are_kept_for_a_while(constraints: Constraints, vocab: Vocab) -> None:
    made = Constraints(constraints.grammars)
    for number in range(3 * MAX_MARKS):
        made.of(started(vocab, replace(thinking(5), thought=Thought(f"<{number}>", "</>", 5))))
        assert len(made._marks) <= MAX_MARKS
    first = made._marks_of(Thought("<a>", "</a>", 1))
    assert made._marks_of(Thought("<a>", "</a>", 2)) is first
