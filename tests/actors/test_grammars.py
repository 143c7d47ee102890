"""Grammars by themselves: what is in a form can be said and nothing else, masks, bounds, what is compiled and when."""
from __future__ import annotations

import json
import pickle
import random
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from actors.grammars import MAX_DIGITS, Grammars, Matcher
from actors.sampling_params import (
    MAX_SCHEMA_KEYS,
    ParameterError,
    SamplingParams,
    StructuredOutputs,
    structured_outputs,
)
from tests.weights.tiny_tokenizers import byte_level, load_folder, sentencepiece
from weights.vocab import Vocab

ROOT = Path(__file__).parents[2]
EOS = "<|im_end|>"


@pytest.fixture(scope="module")
def vocab(tmp_path_factory: pytest.TempPathFactory) -> Vocab:
    return load_folder(tmp_path_factory.mktemp("vocab"), byte_level(), tokenizer_config={"eos_token": EOS})


@pytest.fixture(scope="module")
def grammars(vocab: Vocab) -> Grammars:
    return Grammars(vocab, vocab.size)


def start(grammars: Grammars, wanted: StructuredOutputs, output: str = "", min_tokens: int = 0,
          ignore_eos: bool = False, stop_ids: tuple[int, ...] = ()) -> Matcher:
    vocab = grammars.vocab
    grammars.check(wanted)
    return grammars.matcher(wanted, (*sorted(vocab.stop_ids), *stop_ids), min_tokens, ignore_eos,
                            vocab.encode(output, add_special=False))


def allowed(grammars: Grammars, matcher: Matcher, num_output_tokens: int = 0) -> list[int]:
    """Ids, in order."""
    mask = np.full(-(-grammars.vocab_size // 32), 0xFFFFFFFF, np.uint32)
    matcher.fill(mask, num_output_tokens)
    ids: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    return ids


def says(grammars: Grammars, matcher: Matcher, text: str) -> bool:
    """Whether an answer can be exactly `text`, token by token."""
    for token_id in grammars.vocab.encode(text, add_special=False):
        if token_id not in allowed(grammars, matcher):
            return False
        matcher.advance(token_id)
    return bool(grammars.vocab.stop_ids & set(allowed(grammars, matcher)))


def wants(**wanted: Any) -> StructuredOutputs:
    return structured_outputs(wanted)


# Kinds as JSON-Schema-Test-Suite has them: a schema, instances that it takes, instances that it does not.
SCHEMAS: list[tuple[Any, list[Any], list[Any]]] = [
    ({"type": "integer"}, [0, -5, 123456], [1.5, "a", None, []]),
    ({"type": "number"}, [0, -0.5, 1e5, 12.25], ["1", True, {}]),
    ({"type": "string"}, ["", "a\"b\\c\n", "é月😀", "\u0001"], [5, None]),
    ({"type": "boolean"}, [True, False], [0, "true"]),
    ({"type": "null"}, [None], [False, 0, ""]),
    ({"type": ["string", "null"]}, ["a", None], [1, []]),
    ({"enum": [1, "a", [2, {"b": None}]]}, [1, "a", [2, {"b": None}]], [2, "b", [2]]),
    ({"const": {"a": [1]}}, [{"a": [1]}], [{"a": [2]}, {}]),
    ({"minimum": -3, "maximum": 10, "type": "integer"}, [-3, 0, 10], [-4, 11, 100]),
    ({"exclusiveMinimum": 0, "exclusiveMaximum": 1, "type": "number"}, [0.5, 0.01], [0, 1, 1.5, -0.5]),
    ({"type": "integer", "multipleOf": 5}, [0, 5, 35], [3, 12]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "é月😀"], ["a", "abcd"]),
    ({"type": "string", "pattern": "^a+b$"}, ["ab", "aab"], ["b", "abc"]),
    ({"type": "string", "format": "date"}, ["2024-02-29"], ["2024-13-01", "x"]),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3}, [[1], [1, 2, 3]],
     [[], ["a"], [1, 2, 3, 4]]),
    ({"type": "array", "prefixItems": [{"type": "string"}, {"type": "null"}], "items": False}, [["a", None], ["a"]],
     [[1], ["a", None, 1]]),
    ({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["b"],
      "additionalProperties": False}, [{"b": ""}, {"a": 1, "b": "x"}], [{}, {"a": 1}, {"b": 1}, {"b": "", "c": 1}]),
    ({"type": "object", "additionalProperties": {"type": "boolean"}}, [{}, {"x": True}], [{"x": 1}]),
    ({"anyOf": [{"type": "integer"}, {"type": "object", "properties": {"k": {"const": 1}}, "required": ["k"],
                                      "additionalProperties": False}]}, [7, {"k": 1}], ["7", {"k": 2}, {}]),
    ({"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
                {"properties": {"b": {"type": "null"}}, "required": ["b"]}]}, [{"a": 1, "b": None}],
     [{"a": 1}, {"b": None}]),
    ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, ["a", 1], [None, 1.5]),
    ({"$defs": {"tree": {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/tree"}},
                         "required": ["v"], "additionalProperties": False}}, "$ref": "#/$defs/tree"},
     [{"v": 1}, {"v": 1, "next": {"v": 2, "next": {"v": 3}}}], [{}, {"v": 1, "next": {}}]),
    ({}, [1, "a", None, [], {"a": [{}]}], []),
]


@pytest.mark.parametrize(("schema", "valid", "invalid"), SCHEMAS, ids=lambda value: json.dumps(value)[:40])
def test_valid_instances_can_be_said_and_others_not(grammars: Grammars, schema: Any, valid: list[Any],
                                                    invalid: list[Any]) -> None:
    wanted = wants(json=schema)
    for instance in valid:
        jsonschema.validate(instance, schema)
        for separators in ((", ", ": "), (",", ":")):
            text = json.dumps(instance, ensure_ascii=False, separators=separators)
            assert says(grammars, start(grammars, wanted), text), text
    for instance in invalid:
        assert not says(grammars, start(grammars, wanted), json.dumps(instance)), instance


@pytest.mark.parametrize(("schema", "valid", "invalid"), SCHEMAS, ids=lambda value: json.dumps(value)[:40])
def test_whatever_is_drawn_is_valid(grammars: Grammars, schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    """Walks that take any token that is allowed, the end of the answer first."""
    draw, wanted, num_ended = random.Random(1), wants(json=schema), 0
    checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker(["date"]))
    for _ in range(30):
        matcher, said = start(grammars, wanted), b""
        for _ in range(200):
            ids = allowed(grammars, matcher)
            assert ids, "there is always a way on"
            if grammars.vocab.stop_ids & set(ids):
                checker.validate(json.loads(said))
                num_ended += 1
                break
            text = [token_id for token_id in ids if grammars.vocab.token_bytes(token_id) not in b"\t\n\r "] or ids
            token_id = draw.choice(text)
            matcher.advance(token_id)
            said += grammars.vocab.token_bytes(token_id)
    assert num_ended > 0


def test_a_matcher_made_from_an_output_is_where_the_one_that_saw_it_is(grammars: Grammars) -> None:
    wanted, text = wants(json={"type": "array"}), '[12, "a\\"1", {"b": ' + "7" * MAX_DIGITS
    ids = grammars.vocab.encode(text, add_special=False)
    for length in range(len(ids)):
        stepwise = start(grammars, wanted)
        for token_id in ids[:length]:
            stepwise.advance(token_id)
        rebuilt = grammars.matcher(wanted, (), 0, False, ids[:length])
        assert allowed(grammars, stepwise) == allowed(grammars, rebuilt)


def test_digits_are_counted_outside_of_strings_and_end_where_they_may(grammars: Grammars) -> None:
    many = "1" * (MAX_DIGITS + 1)
    any_json = wants(json={})
    for text, is_said in ((many, False), (many[1:], True), (f"[{many[1:]}, {many[1:]}.5]", True), (f"1.{many}", False),
                          (f'"{many}"', True), (f'{{"{many}":1}}', True), (f'["\\"", {many}]', False)):
        assert says(grammars, start(grammars, any_json), text) == is_said, text
    assert says(grammars, start(grammars, wants(regex="[0-9]*")), many), "only in JSON"


def test_white_space_has_a_bound_and_can_be_had_without(grammars: Grammars) -> None:
    for length, is_said in ((0, True), (32, True), (33, False)):
        assert says(grammars, start(grammars, wants(json={})), "[" + " " * length + "]") == is_said
    bare = wants(json={}, disable_any_whitespace=True)
    assert says(grammars, start(grammars, bare), "[1,2]")
    assert not says(grammars, start(grammars, bare), "[1, 2]")


def test_ends_are_masked_while_there_is_another_way(grammars: Grammars, vocab: Vocab) -> None:
    (eos,), (a,) = vocab.stop_ids, vocab.encode("a")
    wanted = wants(regex="a{0,3}")
    assert allowed(grammars, start(grammars, wanted)) == [a, eos]
    assert allowed(grammars, start(grammars, wanted, min_tokens=1)) == [a]
    assert allowed(grammars, start(grammars, wanted, "a", min_tokens=1), 1) == [a, eos]
    assert allowed(grammars, start(grammars, wanted, "a", min_tokens=5, stop_ids=(a,)), 1) == [a, eos], "both or none"
    assert allowed(grammars, start(grammars, wanted, "aaa", min_tokens=5), 3) == [eos]
    assert allowed(grammars, start(grammars, wanted, "a", ignore_eos=True), 9) == [a]
    over = start(grammars, wanted, "aaa", ignore_eos=True)
    assert allowed(grammars, over, 3) == [eos]
    for _ in range(3):                          # rows that were launched before the end was known
        over.advance(eos)
        assert allowed(grammars, over, 4) == [eos]


def test_a_token_that_is_not_allowed_leaves_nothing(grammars: Grammars, vocab: Vocab,
                                                    caplog: pytest.LogCaptureFixture) -> None:
    matcher = start(grammars, wants(regex="secret"))
    matcher.advance(vocab.encode("x")[0])
    assert allowed(grammars, matcher) == []
    assert "a grammar can be followed no further" in caplog.text
    assert "secret" not in caplog.text


def test_control_tokens_and_ids_without_a_token_are_never_allowed(vocab: Vocab, tmp_path: Path) -> None:
    wide = Grammars(vocab, vocab.size + 70)     # a model's embedding is often padded
    ids = allowed(wide, start(wide, wants(regex="(.|\\n)+")))
    assert ids
    assert not set(ids) & (vocab.special_ids | set(range(vocab.size, vocab.size + 70)))
    narrow = Grammars(vocab, vocab.size - 1)
    assert max(allowed(narrow, start(narrow, wants(regex="(.|\\n)*")))) < vocab.size - 1


def test_sentencepiece_vocabularies_spell_the_same(tmp_path: Path) -> None:
    vocab = load_folder(tmp_path, sentencepiece(), tokenizer_config={"eos_token": "</s>"})
    grammars = Grammars(vocab, vocab.size)
    for text in ("a b é月", " a", "</s>", "\n\n x"):
        matcher, said = start(grammars, wants(choice=[text])), b""
        while not vocab.stop_ids & set(ids := allowed(grammars, matcher)):
            matcher.advance(ids[0])
            said += vocab.token_bytes(ids[0])
        assert said.decode() == text


def test_what_spells_a_control_token_is_said_as_text(grammars: Grammars, vocab: Vocab) -> None:
    matcher, said = start(grammars, wants(choice=["a<|im_start|>b"])), []
    while not vocab.stop_ids & set(ids := allowed(grammars, matcher)):
        said.append(ids[0])
        matcher.advance(ids[0])
    assert b"".join(map(vocab.token_bytes, said)) == b"a<|im_start|>b"
    assert not vocab.special_ids & set(said)


@pytest.mark.parametrize("wanted", [
    {"regex": "((a*)*)*"}, {"regex": "(a|a)*b"}, {"regex": "a{1,1000000}"}, {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    {"regex": "(" * 30000 + ")" * 30000}, {"regex": "(.*a){500}"}, {"regex": "|".join(f"w{i}" for i in range(9000))},
    {"json": {"type": "array", "items": {"type": "string", "maxLength": 5000}, "maxItems": 5000}},
    {"json": {"enum": [f"member {i}" for i in range(5000)]}},
    {"json": {"properties": {f"p{i}": True for i in range(MAX_SCHEMA_KEYS - 1)}}},
    {"json": {"$defs": {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(1300)}, "$ref": "#/$defs/d0"}},
    {"json": {"allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(30)]}},
    {"grammar": "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(2000)) + '\nr2000: "a"'},
    {"grammar": "start: " + "(" * 30000 + '"a"' + ")" * 30000}, {"grammar": "root ::= " + "(" * 9000},
    {"choice": [f"choice {i}" for i in range(4000)]},
], ids=lambda wanted: str(wanted)[:40])
def test_what_is_costly_is_done_or_refused(grammars: Grammars, wanted: dict[str, Any]) -> None:
    """FAULTS G07: in bounded time, and the process lives."""
    with suppress(ParameterError):
        assert allowed(grammars, start(grammars, wants(**wanted)))


def test_a_schema_in_any_spelling_is_one_grammar(grammars: Grammars) -> None:
    assert wants(json='{"type":  "string"}') == wants(json={"type": "string"})
    assert wants(json=True).text == "{}"
    assert wants(json_object=True) == wants(json={"type": "object"})
    sampling = SamplingParams(structured_outputs={"regex": "a"})        # type: ignore[arg-type]
    assert sampling.structured_outputs == wants(regex="a")
    assert pickle.loads(pickle.dumps(sampling)) == sampling


@pytest.mark.parametrize(("wanted", "message"), [
    ({}, "structured_outputs: must have one of json, json_object, regex, choice, grammar, got none"),
    ({"regex": "a", "choice": ["b"]}, "got regex and choice"), ({"jsn": {}}, "'jsn' is not known"),
    ({"json_object": 1.5}, "json_object: must be true or false"), ({"regex": 5}, "regex: must be a non-empty string"),
    ({"regex": "\ud800"}, "is not Unicode text"), ({"json": {"a": float("nan")}}, "is no JSON"),
    ({"json": {"a": {1, 2}}}, "is no JSON"), ({"json": {"const": "\ud800"}}, "is no JSON"),
    ({"json": 5}, "must be a JSON schema, which is an object, got int"), ({"json": False}, "false allows nothing"),
    ({"json": "[" * 100000}, "is no JSON"), ({"choice": ["a"] * 5000}, "has 5000 strings, at most 4096"),
    ({"json": {"x-guidance": {}}}, "x-guidance is not the caller's to set"),
    ({"json": {"enum": ["x" * 300000]}}, "has 300013 characters, at most 262144"),
])
def test_what_is_no_form_is_refused(wanted: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        wants(**wanted)


def test_only_who_uses_it_imports_llguidance() -> None:
    code = "import sys, api.engine, tools.serve; print('llguidance' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout.strip() == "False", result.stderr


def test_a_grammar_that_many_have_used_up_is_made_anew(vocab: Vocab, monkeypatch: pytest.MonkeyPatch,
                                                       caplog: pytest.LogCaptureFixture) -> None:
    """Its lexer has a state for each of the last 12 letters' 4,096 possibilities; an answer meets some hundreds."""
    monkeypatch.setattr("actors.grammars.MAX_LEXER_STATES", 2000)
    grammars, wanted, draw = Grammars(vocab, vocab.size), wants(regex="(a|b)*a(a|b){12}"), random.Random(4)
    (a,), (b,) = vocab.encode("a"), vocab.encode("b")
    compiled = set()
    for _ in range(12):
        matcher = start(grammars, wanted)
        for _ in range(300):
            assert {a, b} <= set(allowed(grammars, matcher))
            matcher.advance(draw.choice((a, b)))
        compiled.add(id(matcher._compiled))
        assert says(grammars, matcher, "a" * 13)
    assert 1 < len(compiled) < 12
    assert caplog.text == ""
