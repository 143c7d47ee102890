"""Answers that have to be calls: what can be said and what cannot, by the grammar itself."""
from __future__ import annotations

from typing import Any

import pytest

from actors.call_grammar import Callee, enforced_calls
from actors.grammars import MAX_DIGITS, Grammars
from actors.sampling_params import MAX_SCHEMA_KEYS, ParameterError, StructuredOutputs
from tests.actors.test_grammars import EOS, allowed, says, start
from tests.weights.tiny_tokenizers import byte_level, load_folder

F: dict[str, Any] = {"type": "object", "properties": {"x": {"$ref": "#/$defs/X"}}, "required": ["x"],
                     "additionalProperties": False, "$defs": {"X": {"type": "integer"}}}
G: dict[str, Any] = {"properties": {"y": {"enum": ["a", "b"]}}, "additionalProperties": False}
F1, G1 = '{"name": "f", "arguments": {"x":1}}', '{"name": "g.h", "arguments": {"y":"b"}}'


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    vocab = load_folder(tmp_path_factory.mktemp("vocab"), byte_level(), tokenizer_config={"eos_token": EOS})
    return Grammars(vocab, vocab.size)


def form(parallel: bool = True) -> StructuredOutputs:
    return enforced_calls([Callee("f", F, "tools[0]"), Callee("g.h", G, "tools[1]")], "tools", parallel)


def can_say(grammars: Grammars, wanted: StructuredOutputs, text: str) -> bool:
    """Whether an answer can be exactly `text` and end there."""
    matcher = start(grammars, wanted)
    ends = grammars.vocab.stop_ids
    return says(grammars, matcher, text) and not ends.isdisjoint(allowed(grammars, matcher))


@pytest.mark.parametrize("text", [f"[{F1}]", f"[{G1}]", f"[{F1}, {G1},{F1}]", '[{"name": "g.h", "arguments": {}}]',
                                  '[{"name": "f", "arguments": { "x" : 12\n}}]'])
def test_calls_of_the_tools_can_be_said(grammars: Grammars, text: str) -> None:
    assert can_say(grammars, form(), text)


@pytest.mark.parametrize("text", [
    "", "[]", "hi", F1, f" [{F1}]", '[{"name": "h", "arguments": {}}]', '[{"name": "f", "arguments": {}}]',
    '[{"name": "f", "arguments": {"x":"1"}}]', '[{"name": "g.h", "arguments": {"y":"c"}}]', f"[{F1}] and",
    '[{"name": "g.h", "arguments": []}]', f"[{F1} {G1}]"])
def test_nothing_else_can(grammars: Grammars, text: str) -> None:
    assert not can_say(grammars, form(), text)


def test_one_call_is_one(grammars: Grammars) -> None:
    assert can_say(grammars, form(parallel=False), f"[{F1}]")
    assert not can_say(grammars, form(parallel=False), f"[{F1}, {F1}]")


def test_digits_are_bounded_as_in_all_json(grammars: Grammars) -> None:
    matcher = start(grammars, form(), '[{"name": "f", "arguments": {"x":' + "1" * MAX_DIGITS)
    assert not any(grammars.vocab.token_text(token_id).isdigit() for token_id in allowed(grammars, matcher))


@pytest.mark.parametrize(("parameters", "field"), [
    ({"type": "array"}, "tools[0].type"), ({"x-guidance": {}}, "tools[0]"),
    ({"properties": {str(number): {} for number in range(MAX_SCHEMA_KEYS)}}, "tools[0]"),
    ({"title": "\ud800"}, "tools[0]")])
def test_parameters_that_cannot_be_enforced_are_named(parameters: dict[str, Any], field: str) -> None:
    with pytest.raises(ParameterError) as error:
        enforced_calls([Callee("f", parameters, "tools[0]")], "tools")
    assert error.value.field == field


def test_all_tools_together_are_bounded() -> None:
    half: dict[str, Any] = {"properties": {str(number): {} for number in range(MAX_SCHEMA_KEYS // 2)}}
    with pytest.raises(ParameterError) as error:
        enforced_calls([Callee(name, half, name) for name in ("f", "g")], "tool_choice")
    assert error.value.field == "tool_choice"


def test_a_schema_that_cannot_be_followed_is_refused(grammars: Grammars) -> None:
    """FAULTS G03."""
    wanted = enforced_calls([Callee("f", {"properties": {"x": {"type": "string", "pattern": "(?=a)"}}}, "f")], "tools")
    with pytest.raises(ParameterError) as error:
        grammars.check(wanted)
    assert error.value.field == "tools"
