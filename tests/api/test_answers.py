"""Answers read: every format, whole and in pieces, and what is no call."""
from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from api.answers.formats import (
    AUTO,
    NONE,
    REASONING_PARSERS,
    TOOL_FORMATS,
    TOOL_PARSERS,
    reasoning_format,
    tool_format,
)
from api.answers.json_text import MAX_DEPTH, JsonObject
from api.answers.parser import AnswerParser, ReasoningParser
from api.answers.tool_calls import (
    CallArguments,
    CallBegin,
    CallBroken,
    CallEnd,
    Content,
    Piece,
    Reasoning,
    ToolCallParser,
    Tools,
)

TOOLS = Tools({"f": ["a", "b"], "get_weather": ["city", "unit"], "now": []})


@dataclass
class Answer:
    reasoning: str
    content: str
    calls: list[tuple[str, Any]]            # complete ones: name and arguments
    begun: list[tuple[str, str, bool]]      # all that were told of: name, what came of the arguments, complete
    pieces: list[Piece]
    finish: bool                            # the answer asks for its calls


def joined(pieces: list[Piece], kind: type[Content] | type[Reasoning]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, kind))


def read(text: str, form: str | None = "hermes", cuts: tuple[int, ...] = (), *, tools: Tools = TOOLS,
         thought: str | None = None, inside: bool = False) -> Answer:
    """`text`, cut at `cuts`."""
    numbers = itertools.count()
    parser = AnswerParser(
        None if thought is None else ReasoningParser(REASONING_PARSERS[thought], inside),
        None if form is None else ToolCallParser(TOOL_PARSERS[form], tools, lambda: f"id{next(numbers)}"))
    pieces: list[Piece] = []
    bounds = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    for begin, end in itertools.pairwise(bounds):
        pieces += parser.push(text[begin:end])
    pieces += parser.finish()
    return Answer(joined(pieces, Reasoning), joined(pieces, Content),
                  [(call.name, json.loads(call.arguments)) for call in parser.complete_calls()],
                  [(call.name, call.arguments, call.is_complete) for call in parser.calls], pieces,
                  parser.is_calling("stop"))


F1, F2 = ("f", {"a": 1}), ("get_weather", {"city": "Zürich, \"CH\"", "unit": None})
J1, J2 = '{"a": 1}', '{"city": "Zürich, \\"CH\\"", "unit": null}'
DS = [f"<｜{name}｜>" for name in (
    "tool▁calls▁begin", "tool▁call▁begin", "tool▁sep", "tool▁call▁end", "tool▁calls▁end")]

# format, text, content, calls
ANSWERS: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    ("hermes", f'<tool_call>\n{{"name": "f", "arguments": {J1}}}\n</tool_call>', "", [F1]),
    ("hermes", f'I look.\n\n<tool_call>\n{{"name": "f", "arguments": {J1}}}\n</tool_call>\n<tool_call>\n'
               f'{{"name": "get_weather", "arguments": {J2}}}\n</tool_call>\n', "I look.", [F1, F2]),
    ("hermes", f'<tool_call>{{"arguments": {J1}, "name": "f"}}</tool_call> Done.', "Done.", [F1]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [("now", {})]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [("now", {})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [F1]),
    ("hermes", f'<tool_call>[{{"name": "f", "arguments": {J1}}}, {{"name": "get_weather", "arguments": {J2}}}]'
               '</tool_call>', "", [F1, F2]),
    ("hermes", f'<tool_call>{{"name": "f", "arguments": {J1}}}', "", [F1]),
    ("phi4", f'<|tool_call|>[{{"type": "function", "name": "f", "arguments": {J1}}}]<|/tool_call|>', "", [F1]),
    ("llama3_json", f'{{"name": "f", "parameters": {J1}}}', "", [F1]),
    ("llama3_json", f' {{"name": "f", "parameters": {J1}}}; {{"name": "get_weather", "parameters": {J2}}}', "",
     [F1, F2]),
    ("llama3_json", f'<|python_tag|>{{"name": "f", "parameters": {J1}}}', "", [F1]),
    ("pythonic", "[f(a=1)]", "", [F1]),
    ("pythonic", "[f(a=1), get_weather(city='Zürich, \"CH\"', unit=None)]", "", [F1, F2]),
    ("pythonic", '<|python_tag|>[f(1), f(a=[1, {"x": (True, 2.5)}], b="q)\\"\\\\")]', "",
     [F1, ("f", {"a": [1, {"x": [True, 2.5]}], "b": 'q)"\\'})]),
    ("mistral", f'[TOOL_CALLS] [{{"name": "f", "arguments": {J1}, "id": "123456789"}}]', "", [F1]),
    ("mistral", f'[TOOL_CALLS][{{"name": "f", "arguments": {J1}}}, {{"name": "get_weather", "arguments": {J2}}}]', "",
     [F1, F2]),
    ("mistral", f"Well.[TOOL_CALLS]f[ARGS]{J1}[TOOL_CALLS]get_weather[CALL_ID]abc123def[ARGS]{J2}", "Well.", [F1, F2]),
    ("mistral", f"[TOOL_CALLS]f{J1}", "", [F1]),
    ("deepseek", f"{DS[0]}{DS[1]}function{DS[2]}f\n```json\n{J1}\n```{DS[3]}\n{DS[1]}function{DS[2]}get_weather\n"
                 f"```json\n{J2}\n```{DS[3]}{DS[4]}", "", [F1, F2]),
    ("deepseek", f"So:\n{DS[0]}{DS[1]}f{DS[2]}{J1}{DS[3]}{DS[1]}get_weather{DS[2]}{J2}{DS[3]}{DS[4]}", "So:", [F1, F2]),
    ("gemma", "<start_function_call>call:f{a:1}<end_function_call>", "", [F1]),
    ("gemma", '<start_function_call>call:get_weather{city:<escape>Zürich, "CH"<escape>,unit:null}<end_function_call>'
              "<start_function_call>call:f{a:[1,{x:true}],b:{}}<end_function_call>", "",
     [F2, ("f", {"a": [1, {"x": True}], "b": {}})]),
    ("gemma4", '<|tool_call>call:f{a:<|"|>x}, y<|"|>,b:-1.5}<tool_call|>', "", [("f", {"a": "x}, y", "b": -1.5})]),
    ("gemma3", "Let me see.\n```tool_code\nf(a=1)\n```", "Let me see.", [F1]),
    ("gemma3", "```tool_code\n[f(a=1), now()]\n```", "", [F1, ("now", {})]),
    ("json", f'{{"name": "f", "arguments": {J1}}}', "", [F1]),
    ("json", f'```json\n[{{"name": "f", "parameters": {J1}}},\n{{"name": "get_weather", "arguments": {J2}}}]\n```', "",
     [F1, F2]),
]


def test_every_format_has_an_answer() -> None:
    assert {form for form, *_ in ANSWERS} == set(TOOL_PARSERS)


@pytest.mark.parametrize(("form", "text", "content", "calls"), ANSWERS)
def test_calls_are_found_in_every_format(form: str, text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    answer = read(text, form)
    assert (answer.content, answer.calls, answer.finish) == (content, calls, True)
    assert [(call[0], json.loads(call[1])) for call in answer.begun] == calls


BROKEN = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1'), ("hermes", "<tool_call>"), ("hermes", "a <tool_c"),
    ("hermes", '<tool_call>{"name": "g", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": True}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "x"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": 5}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "name": "f", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, "parameters": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": ' + "9" * 5000 + ', "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": null, "\\ud800": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>'),
    ("pythonic", "[f(a=" + "9" * 5000 + ")]"), ("pythonic", "[f(a=" + "-" * 60_000 + "1)]"),
    ("pythonic", "[f(a=1" + "+1" * 30_000 + ")]"), ("pythonic", "[f(a='" + "x" * 70_000 + "')]"),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'), ("hermes", "<tool_call>f(a=1)</tool_call>"),
    ("hermes", '{"name": "f", "arguments": {}}'), ("hermes", '<tool_call>{"f": {}}</tool_call>'),
    ("llama3_json", '{"city": "Zürich"}'), ("llama3_json", "Say {} twice"), ("llama3_json", '<|python_tag|>print("x")'),
    ("llama3_json", 'Sure: {"name": "f", "parameters": {}}'),
    ("pythonic", "[1, 2, 3]"), ("pythonic", "[f(a=1"), ("pythonic", "[f(a=open('x'))]"), ("pythonic", "[f(a=1]"),
    ("pythonic", "[f(**{})]"), ("pythonic", "[f(1, a=1)]"), ("pythonic", "[f(a={1, 2})]"), ("pythonic", "[f(a=b'x')]"),
    ("pythonic", "[f(a=1e999)]"), ("pythonic", "[f(a='\\ud800')]"), ("pythonic", "[now(1)]"), ("pythonic", "f(a=1)"),
    ("pythonic", "[f(a=(1])]"), ("pythonic", "[f(a=" + "[" * 500 + "]" * 500 + ")]"),
    ("mistral", "[TOOL_CALLS]"), ("mistral", "[TOOL_CALLS]f"), ("mistral", "[TOOL_CALLS]f[ARGS]5"),
    ("mistral", "[TOOL_CALLS]g{}"), ("mistral", "[TOOL_CALLS]" + "f" * 300 + "{}"),
    ("mistral", "[TOOL_CALLS]f{'a': 1}"),
    ("deepseek", f"{DS[0]}f{DS[2]}{{}}"), ("deepseek", f"{DS[0]}{DS[1]}f{DS[2]}none{DS[3]}{DS[4]}"),
    ("gemma", "<start_function_call>call:g{a:1}<end_function_call>"),
    ("gemma", "<start_function_call>call:f{a:1<end_function_call>"),
    ("gemma", "<start_function_call>call:f{a:<escape>x}<end_function_call>"),
    ("gemma", "<start_function_call>call:f{a:}<end_function_call>"),
    ("gemma", "<start_function_call>call:f{a:1,a:2}<end_function_call>"),
    ("gemma", "<start_function_call>call:f{a:" + "[" * 100 + "]" * 100 + "}<end_function_call>"),
    ("gemma", "<start_function_call>call:f{} and more<end_function_call>"),
    ("json", '[{"name": "g", "arguments": {}}]'), ("json", "```json\n[1]\n```"), ("json", "```\ncode\n```"),
    ("json", "{"), ("json", "[]"), ("phi4", "<|tool_call|>[]<|/tool_call|>"),
]


@pytest.mark.parametrize(("form", "text"), BROKEN)
def test_what_is_no_call_is_content_to_the_letter(form: str, text: str) -> None:
    answer = read(text, form)
    assert (answer.content, answer.calls, answer.finish) == (text, [], False)
    assert all(not complete for *_, complete in answer.begun)


@pytest.mark.parametrize("text", ["", " ", "\n\n", "plain", "  plain \n", "a < b", "a <tool_cal l>", "<<tool_call"])
@pytest.mark.parametrize("form", TOOL_PARSERS)
def test_plain_text_stays_as_it_is(form: str, text: str) -> None:
    assert read(text, form).content == text


def test_what_stands_beside_broken_calls_is_read() -> None:
    good = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    answer = read(f"<tool_call>{{oops {good}")
    assert (answer.content, answer.calls) == ("<tool_call>{oops", [F1])
    answer = read(f'{good}\n<tool_call>{{"name": "f", "arguments": {{"a": ')
    assert answer.calls == [F1]
    assert answer.content == '<tool_call>{"name": "f", "arguments": {"a": '
    assert not answer.finish, "a call that was begun is not complete"
    assert CallBroken(1) in answer.pieces


def test_content_between_calls_keeps_its_distance() -> None:
    call = '<tool_call>{"name": "now"}</tool_call>'
    assert read(f"One\n{call}\nTwo\n{call}\n").content == "One\nTwo"
    assert read(f"\n{call}\nTwo").content == "Two"


@pytest.mark.parametrize(("form", "text", "content"), [
    ("hermes", '<tool_call>{"name": "now"}</tool_call><tool_call>{"name": "now"}</tool_call>',
     '<tool_call>{"name": "now"}</tool_call>'),
    ("mistral", '[TOOL_CALLS][{"name": "now"}, {"name": "now"}]', ', {"name": "now"}]'),
    ("llama3_json", '{"name": "now"}; {"name": "now"}', '; {"name": "now"}')])
def test_a_request_for_one_call_gets_one(form: str, text: str, content: str) -> None:
    answer = read(text, form, tools=Tools(TOOLS.names, parallel=False))
    assert (answer.calls, answer.content, answer.finish) == ([("now", {})], content, True)


def test_arguments_come_in_pieces_and_the_name_once() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "one two"}}</tool_call>'
    pieces = read(text, cuts=tuple(range(len(text)))).pieces
    assert pieces[0] == CallBegin(0, "id0", "f")
    assert pieces[-1] == CallEnd(0)
    arguments = [piece.text for piece in pieces[1:-1] if isinstance(piece, CallArguments)]
    assert len(arguments) == len(pieces) - 2
    assert all(len(argument) == 1 for argument in arguments)
    assert "".join(arguments) == '{"a": "one two"}'


def test_a_call_is_told_of_before_it_is_complete() -> None:
    parser = ToolCallParser(TOOL_PARSERS["hermes"], TOOLS, lambda: "id")
    assert parser.push('Hi <tool_call>{"name": "f"') == [Content("Hi")]
    assert parser.push(', "arguments": {') == [CallBegin(0, "id", "f"), CallArguments(0, "{")]
    assert parser.push('"a": ') == [CallArguments(0, '"a": ')]


def test_ids_are_unique_and_short_where_templates_ask_for_it() -> None:
    text = '[TOOL_CALLS][{"name": "now"}, {"name": "now"}]'
    ids = []
    for _ in range(20):
        parser = ToolCallParser(TOOL_PARSERS["mistral"], TOOLS)
        ids += [piece.id for piece in parser.push(text) + parser.finish() if isinstance(piece, CallBegin)]
    assert len(set(ids)) == 40
    assert all(len(one) == 9 and one.isalnum() for one in ids)


# Thoughts


@pytest.mark.parametrize(("text", "inside", "reasoning", "content"), [
    ("<think>\nhm, <b>\n</think>\n\nYes.", False, "hm, <b>", "Yes."), ("hm\n</think>\n\nYes.", True, "hm", "Yes."),
    ("<think>hm</think>Yes", True, "hm", "Yes"), ("<think>cut", False, "cut", ""), ("cut </thi", True, "cut </thi", ""),
    ("Yes <think>no</think>", False, "", "Yes <think>no</think>"), ("\n<think></think>\n", False, "", ""),
    ("<think>a</think> <think>b</think>", False, "a", "<think>b</think>"), ("  plain ", False, "", "  plain "),
    ("<thin", False, "", "<thin"), ("", False, "", ""), ("", True, "", ""), (" ", False, "", " ")])
def test_thoughts_begin_an_answer(text: str, inside: bool, reasoning: str, content: str) -> None:
    for cuts in ((), tuple(range(len(text)))):
        answer = read(text, None, cuts, thought="think", inside=inside)
        assert (answer.reasoning, answer.content) == (reasoning, content)


def test_calls_follow_thoughts_and_are_none_within() -> None:
    call = '<tool_call>{"name": "now"}</tool_call>'
    answer = read(f"<think>I call {call}?</think>\n{call}", thought="think")
    assert (answer.reasoning, answer.content, answer.calls) == (f"I call {call}?", "", [("now", {})])
    answer = read('<think>x</think>\n\n{"name": "now"}', "llama3_json", thought="think")
    assert (answer.content, answer.calls) == ("", [("now", {})])


# Cut anywhere


MARKS = sorted({mark for form in TOOL_FORMATS for mark in (*form.begin, *form.opening, *form.between, *form.after)})
FRAGMENTS = st.sampled_from([
    *MARKS, "<think>", "</think>", '{"name": "f", "arguments": ', '{"name": "now"}', '{"a": 1}', '{"a": "x', "}", "]",
    '"', "\\", "f(a=1)", "f(a='", "now()", ")", "call:f{a:", "<escape>", "1", ",", ";", " ", "\n", "text", "f", "{",
    "[", "null", "é", '{"arguments": {"b": [tru', "[ARGS]", "function", '"name"', ":"])
TEXTS = st.one_of(st.sampled_from([text for _, text, *_ in (*ANSWERS, *BROKEN) if len(text) < 1000]),
                  st.lists(FRAGMENTS, max_size=14).map("".join))
CUTS = st.lists(st.integers(0, 160), max_size=12).map(tuple)


@given(TEXTS, TEXTS, st.sampled_from(sorted(TOOL_PARSERS)), CUTS, st.booleans(), st.booleans())
@example("", "", "hermes", (), True, True)
def test_the_same_is_read_however_the_text_is_cut(first: str, second: str, form: str, cuts: tuple[int, ...],
                                                  parallel: bool, inside: bool) -> None:
    text, tools = first + second, Tools(TOOLS.names, parallel)
    whole = read(text, form, tools=tools, thought="think", inside=inside)
    for some in (cuts, tuple(range(len(text)))):
        cut = read(text, form, some, tools=tools, thought="think", inside=inside)
        assert (cut.reasoning, cut.content, cut.begun, cut.finish) == (
            whole.reasoning, whole.content, whole.begun, whole.finish)


@given(TEXTS, TEXTS, st.sampled_from(sorted(TOOL_PARSERS)))
def test_nothing_is_lost(first: str, second: str, form: str) -> None:
    """Without complete calls all is content; with them their arguments are JSON objects."""
    answer = read(first + second, form)
    if not answer.calls:
        assert answer.content == first + second
    assert all(isinstance(arguments, dict) for _, arguments in answer.calls)


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
                    | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=12)


@given(st.dictionaries(st.text(), JSON), CUTS, st.booleans(), st.sampled_from([None, 1]))
def test_any_json_object_is_read(value: dict[str, Any], cuts: tuple[int, ...], ascii_only: bool,
                                 indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    arguments = read(f'<tool_call>{{"name": "f", "arguments": {text}}}</tool_call>', cuts=cuts).begun
    assert arguments == [("f", text, True)]


@given(st.text('{}[]",:\\ 01-+.eEtrufalsn\n', max_size=30))
def test_a_json_object_is_what_the_library_reads(inner: str) -> None:
    text = "{" + inner
    reader = JsonObject()
    num_read = reader.read(text)
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except ValueError:
        assert not reader.is_complete
    else:
        assert (reader.is_complete, num_read) == (True, end)


def test_json_that_nests_too_deep_is_no_call() -> None:
    text = '{"a": ' + "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1) + "}"
    reader = JsonObject()
    reader.read(text)
    assert reader.is_broken


# By the template


TEMPLATES = [
    ("{{ tools }}<tool_call>\n{\"name\": <function-name>}\n</tool_call>{{ '<think>' }}", "hermes", "think"),
    ("{{ tools }}<tool_call><function=x></tool_call>", None, None),
    ("{{ tools }}[TOOL_CALLS][THINK]", "mistral", "mistral"),
    ("{{ tools }}<｜tool▁calls▁begin｜></think>", "deepseek", "think"), ("<start_function_call>", "gemma", None),
    ("<|tool_call>call:x<tool_call|><|channel>thought", "gemma4", "gemma4"), ("<|tool_call|>", "phi4", None),
    ("```tool_code", "gemma3", None), ("<|start_header_id|>[func_name1(params_name1=x)]", "pythonic", None),
    ("<|start_header_id|><|python_tag|>", "llama3_json", None), ('{"name": x, "parameters": y}', "json", None),
    ("<|START_THINKING|>", None, "cohere"), ("{{ messages }}", None, None)]


@pytest.mark.parametrize(("template", "tools", "thought"), TEMPLATES)
def test_formats_are_chosen_by_the_template(template: str, tools: str | None, thought: str | None) -> None:
    form, reasoning = tool_format(AUTO, template), reasoning_format(AUTO, template)
    assert (form and form.name, reasoning and reasoning.name) == (tools, thought)
    assert tool_format(NONE, template) is None
    assert reasoning_format(NONE, template) is None
    assert tool_format("hermes", template) is TOOL_PARSERS["hermes"]
    assert reasoning_format("think", template) is REASONING_PARSERS["think"]


def test_without_a_template_nothing_is_chosen() -> None:
    assert tool_format(AUTO, None) is None
    assert reasoning_format(AUTO, None) is None
