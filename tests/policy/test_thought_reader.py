"""Thoughts by their tokens: where they begin and end and how many there are, however an answer's bytes are cut."""
from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from actors.policy.thought_reader import ThoughtReader, is_open
from api.answers.formats import REASONING_PARSERS, ReasoningFormat
from api.answers.parser import ReasoningParser
from api.answers.tool_calls import Content, Reasoning

FORMATS = sorted(REASONING_PARSERS)
PIECES = st.sampled_from(["BEGIN", "END", "<", "</", "thi", "nk>", "[", "/", "]", "◁", "think▷", " ", "\n", "\u3000",
                          "hm", "é", "🙂", "<channel|", ">"])


@pytest.mark.parametrize(("prompt", "inside"), [
    ("<|im_start|>assistant\n<think>\n", True), ("assistant\n<think>", True), ("<think>\n\n</think>\n\n", False),
    ("<think> no", False), ("", False), ("assistant\n", False)])
def test_a_prompt_may_begin_the_thought(prompt: str, inside: bool) -> None:
    assert is_open("<think>", prompt) == inside


def oracle(form: ReasoningFormat, text: str, inside: bool) -> tuple[str, int, int]:
    """The place behind `text`, and where in its bytes the thought is."""
    start = 0
    if not inside:
        bare = text.lstrip()
        if not bare.startswith(form.begin):
            return ("before" if form.begin.startswith(bare) else "none"), 0, 0
        start = len(text[:len(text) - len(bare)].encode()) + len(form.begin.encode())
    end = text.encode().find(form.end.encode(), start)
    return ("inside", start, len(text.encode())) if end < 0 else ("behind", start, end)


@given(st.lists(PIECES, max_size=10), st.sampled_from(FORMATS), st.booleans(),
       st.lists(st.integers(0, 120), max_size=40))
@example(["BEGIN", "hm", "END", "é"], "think", False, list(range(40)))
@example(["</", "</", "END"], "think", True, list(range(40)))
def test_a_thought_is_what_it_is_however_the_answer_is_cut(pieces: list[str], name: str, inside: bool,
                                                           cuts: list[int]) -> None:
    form = REASONING_PARSERS[name]
    text = "".join({"BEGIN": form.begin, "END": form.end}.get(piece, piece) for piece in pieces)
    data = text.encode()
    place, start, end = oracle(form, text, inside)
    bounds = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    reader, num_tokens = ThoughtReader(form.begin, form.end, inside), 0
    for begin, stop in itertools.pairwise(bounds):
        reader.push(data[begin:stop])
        num_tokens += start <= begin and stop <= end        # those that a mark has a part in are the mark's
    assert reader.place == place
    assert reader.num_tokens == num_tokens
    if place == "behind":
        completed = next(stop for stop in bounds if stop >= end + len(form.end.encode()))
        assert reader.rest == data[end + len(form.end.encode()):completed]


@given(st.lists(PIECES, max_size=10), st.sampled_from(FORMATS))
def test_the_answer_s_parser_reads_the_same_thought(pieces: list[str], name: str) -> None:
    form = REASONING_PARSERS[name]
    text = "".join({"BEGIN": form.begin, "END": form.end}.get(piece, piece) for piece in pieces)
    reader = ThoughtReader(form.begin, form.end, is_inside=False)
    reader.push(text.encode())
    parser = ReasoningParser(form, inside=False)
    read = parser.push(text) + parser.finish()
    thought = "".join(piece.text for piece in read if isinstance(piece, Reasoning))
    content = "".join(piece.text for piece in read if isinstance(piece, Content))
    if reader.place in ("before", "none"):
        assert (thought, content) == ("", text)
    elif reader.place == "inside":
        assert (thought, content) == (text.split(form.begin, 1)[1].strip(), "")
    else:
        assert content == reader.rest.decode().lstrip()


def test_a_long_answer_of_white_space_is_not_kept() -> None:
    reader = ThoughtReader("<think>", "</think>", is_inside=False)
    for _ in range(1000):
        reader.push("\u3000 \n".encode())
    assert len(reader._head) == 0
    reader.push(b"<thi")
    reader.push(b"nk>")
    assert reader.place == "inside"
