"""Every kind of JSON schema: what an answer can say is what jsonschema takes, and what cannot be held to is refused.

Instances carry no verdict: jsonschema has it. Objects are written in the order that the schema names their properties
in, which is the one that can be said.
"""
from __future__ import annotations

import datetime as dt
import json
import random
from typing import Any

import jsonschema
import pytest

from actors.grammars import Grammars
from actors.sampling_params import ParameterError
from tests.actors.test_grammars import EOS, allowed, says, start, wants
from tests.weights.tiny_tokenizers import byte_level, load_folder

NUM_WALKS, WALK_TOKENS = 4, 120
OF_ALL_TYPES: list[Any] = [None, True, False, 0, 1, -7, 2.5, "", "a", [], [1], {}, {"a": 1}]
OPEN: Any = {"type": "object"}
CLOSED: Any = {"type": "object", "additionalProperties": False}

KINDS: dict[str, list[tuple[Any, list[Any]]]] = {
    "type": [
        *(({"type": name}, OF_ALL_TYPES) for name in
          ("null", "boolean", "integer", "number", "string", "array", "object")),
        ({"type": ["integer", "string"]}, OF_ALL_TYPES), ({"type": ["null", "object", "boolean"]}, OF_ALL_TYPES),
        ({"type": ["array"]}, OF_ALL_TYPES), ({}, OF_ALL_TYPES)],
    "enum": [
        ({"enum": [1, "a", None, [2, {"b": False}], {"c": []}]}, [
            1, "a", None, [2, {"b": False}], {"c": []}, 2, "b", True, [2], {"c": [1]}, {}]),
        ({"enum": ["", "a", "ab", "abc"]}, ["", "a", "ab", "abc", "abcd", "b"]),
        ({"enum": ["\"", "\\", "\n", "é", "\U0001f600"]}, ["\"", "\\", "\n", "é", "\U0001f600", "/", "e"]),
        ({"enum": [1, "1", True], "type": "string"}, [1, "1", True]), ({"enum": [False]}, [False, 0, None])],
    "const": [
        ({"const": value}, [value, *OF_ALL_TYPES])
        for value in (None, False, 7, "x", ["a", [1]], {"a": {"b": [None]}})],
    "required": [
        ({"required": ["a"]}, [{}, {"a": 1}, {"a": None, "z": 1}, {"b": 1}, 5, "a"]),
        ({**OPEN, "properties": {"a": {}, "b": {"type": "null"}, "c": {}}, "required": ["c", "a"]}, [
            {"a": 1, "c": 2}, {"a": 1, "b": None, "c": 3}, {"a": 1}, {"c": 1}, {"a": 1, "b": 1, "c": 1}, {}])],
    "properties": [
        ({"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}, [
            {}, {"a": 1}, {"a": 1, "b": ""}, {"a": ""}, {"b": 1}, {"a": 1, "z": [1]}, 5, []]),
        ({**OPEN, "properties": {"a": {**OPEN, "properties": {"b": {"type": "null"}}}}}, [
            {"a": {"b": None}}, {"a": {"b": 1}}, {"a": {}}, {"a": 1}]),
        ({**OPEN, "properties": {"a b\"c": {"type": "null"}, "é": {}}}, [{"a b\"c": None, "é": 1}, {"a b\"c": 1}]),
        ({**OPEN, "properties": {"a": True, "b": False}}, [{"a": 1}, {"b": 1}, {}])],
    "additionalProperties": [
        (CLOSED, [{}, {"a": 1}, []]),
        ({**CLOSED, "properties": {"a": {}, "ab": {}}}, [{"a": 1}, {"a": 1, "ab": 2}, {"ab": 1}, {"abc": 1}, {"": 1}]),
        ({**OPEN, "additionalProperties": {"type": "integer"}, "properties": {"a": {"type": "string"}}}, [
            {"a": "x"}, {"a": 1}, {"a": "x", "b": 1}, {"b": 2}, {"b": "x"}, {"a": "", "b": 1, "c": 2}]),
        ({**OPEN, "patternProperties": {"^n_": {"type": "integer"}}, "additionalProperties": {"type": "null"}}, [
            {"n_a": 1}, {"n_a": None}, {"x": None}, {"x": 1}, {"n_a": 1, "x": None}, {}])],
    "items": [
        ({"items": {"type": "integer"}}, [[], [1], [1, 2, 3], ["a"], [1, None], 5, {"0": 1}]),
        ({"type": "array", "items": {"type": "array", "items": {"type": "boolean"}}}, [
            [], [[]], [[True], [False, True]], [[1]], [True]]),
        ({"type": "array", "items": False}, [[], [1]]), ({"type": "array", "items": True}, [[], [1, "a"]])],
    "prefixItems": [
        ({"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}]}, [
            [], ["a"], ["a", 1], ["a", 1, None], [1], ["a", "b"]]),
        ({"type": "array", "prefixItems": [{"const": 1}], "items": {"type": "null"}}, [
            [1], [1, None], [1, None, None], [1, 1], [None], []]),
        ({"type": "array", "prefixItems": [{}, {}], "items": False, "minItems": 2}, [[1, 2], [1], [1, 2, 3], []])],
    "minItems and maxItems": [
        ({"type": "array", "minItems": 2}, [[], [1], [1, 2], [1, 2, 3, 4]]),
        ({"type": "array", "maxItems": 2}, [[], [1], [1, 2], [1, 2, 3]]),
        ({"type": "array", "minItems": 1, "maxItems": 1, "items": {"type": "null"}}, [[], [None], [None, None], [1]]),
        ({"type": "array", "maxItems": 0}, [[], [1]])],
    "minProperties and maxProperties": [
        ({**OPEN, "minProperties": 1}, [{}, {"a": 1}, {"a": 1, "b": 2}]),
        ({**OPEN, "maxProperties": 1}, [{}, {"a": 1}, {"a": 1, "b": 2}])],
    "pattern": [
        ({"type": "string", "pattern": "^[a-c]{2,3}$"}, ["ab", "abc", "a", "abcd", "xy", ""]),
        ({"type": "string", "pattern": "b"}, ["b", "abc", "a", ""]),
        ({"type": "string", "pattern": "^a"}, ["a", "ab", "ba"]),
        ({"type": "string", "pattern": "a$"}, ["a", "ba", "ab"]), ({"pattern": "^x$"}, ["x", "y", 5, None, []]),
        ({"type": "string", "pattern": "^(yes|no)$"}, ["yes", "no", "maybe", "yesno"]),
        ({"type": "string", "pattern": "^\\d{2}-[^x]$"}, ["12-a", "12-x", "1-a"]),
        ({"type": "string", "pattern": "^\"[\\\\]$"}, ["\"\\", "\""])],
    "format": [
        # NOTE: 29 February can be said of any year.
        ({"type": "string", "format": "date"}, ["2024-02-29", "1999-12-31", "2024-02-30", "2024-13-01", "2024-1-1"]),
        ({"type": "string", "format": "time"}, ["12:00:00Z", "25:00:00Z", "x"]),
        ({"type": "string", "format": "date-time"}, ["2024-02-28T12:00:00Z", "2024-02-28", "x"]),
        ({"type": "string", "format": "ipv4"}, ["127.0.0.1", "256.0.0.1", "1.2.3", "x"]),
        ({"type": "string", "format": "ipv6"}, ["::1", "2001:db8::1", "g::1", "x"]),
        ({"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000", "123e4567", "x"]),
        ({"type": "string", "format": "email"}, ["a@example.org", "a", ""]),
        ({"type": "integer", "format": "int32"}, [5, "5"])],
    "minLength and maxLength": [
        ({"type": "string", "minLength": 2}, ["", "a", "ab", "abcdef"]),
        ({"type": "string", "maxLength": 2}, ["", "a", "ab", "abc"]),
        ({"type": "string", "minLength": 1, "maxLength": 1}, ["", "é", "\U0001f600", "\n", "\"", "ab"]),
        ({"minLength": 2}, ["a", "ab", 5, None]),
        ({"type": "string", "minLength": 2, "maxLength": 3, "pattern": "^a*$"}, ["a", "aa", "aaa", "aaaa", "ab"])],
    "minimum and maximum": [
        ({"type": "integer", "minimum": -12, "maximum": 105}, [-13, -12, -1, 0, 9, 10, 99, 105, 106, 1000]),
        ({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3}, [0, 1, 2, 3]),
        ({"type": "integer", "minimum": 1000}, [999, 1000, 123456789, -1000]),
        ({"type": "integer", "maximum": -10}, [-9, -10, -11, -100, 0, 10]),
        ({"type": "number", "minimum": 0.5, "maximum": 2}, [0.4, 0.49, 0.5, 0.51, 1, 1.999, 2, 2.0001, 20, -1]),
        ({"type": "number", "exclusiveMinimum": -1, "exclusiveMaximum": 1}, [-1, -0.99, 0, 0.25, 1, 1.1]),
        ({"minimum": 5}, [4, 5, 6.5, "4", None])],
    "multipleOf": [
        ({"type": "integer", "multipleOf": 7}, [0, 7, 14, 700, 1, 8, 71]),
        ({"type": "integer", "multipleOf": 1}, [0, 3]),
        ({"type": "number", "multipleOf": 0.5}, [0, 0.5, 1, 1.5, 2.5, 0.25, 0.75]),
        ({"type": "integer", "multipleOf": 5, "minimum": 10, "maximum": 20}, [5, 10, 12, 15, 20, 25])],
    "anyOf": [
        ({"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 1}]}, [1, "", "a", "ab", None, 1.5]),
        ({"anyOf": [{**OPEN, "required": ["a"]}, {"type": "array", "maxItems": 1}]}, [{"a": 1}, {}, [], [1], [1, 2]]),
        ({"type": "integer", "anyOf": [{"maximum": 2}, {"minimum": 5}]}, [2, 3, 4, 5]),
        ({"anyOf": [{"const": 1}, {}]}, OF_ALL_TYPES)],
    "oneOf": [
        ({"oneOf": [{"type": "integer"}, {"type": "null"}, {"type": "array", "items": {"type": "null"}}]}, [
            1, None, [], [None], [1], "a"]),
        ({"oneOf": [{**CLOSED, "properties": {"kind": {"const": kind}, kind: {"type": "integer"}},
                     "required": ["kind", kind]} for kind in ("a", "b")]}, [
            {"kind": "a", "a": 1}, {"kind": "b", "b": 1}, {"kind": "a", "b": 1}, {"kind": "c"}])],
    "allOf": [
        ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, [2, 3, 5, 6, "3"]),
        ({"allOf": [{**OPEN, "properties": {"a": {"type": "integer"}}, "required": ["a"]},
                    {"properties": {"b": {"type": "null"}}, "required": ["b"]}]}, [
            {"a": 1, "b": None}, {"a": 1}, {"b": None}, {"a": "x", "b": None}]),
        ({"type": "string", "allOf": [{"minLength": 2}, {"maxLength": 3}, {"pattern": "^a"}]}, [
            "a", "aa", "abc", "abcd", "ba"]),
        ({"allOf": [{"enum": [1, 2, 3]}, {"enum": [2, 3, 4]}]}, [1, 2, 3, 4])],
    "$ref and $defs": [
        ({"$defs": {"a": {"type": "integer"}}, "$ref": "#/$defs/a"}, [1, "a"]),
        ({"definitions": {"a": {"type": "null"}}, "type": "array", "items": {"$ref": "#/definitions/a"}}, [
            [], [None], [1]]),
        ({"$defs": {"a/b~c": {"type": "null"}}, "$ref": "#/$defs/a~1b~0c"}, [None, 1]),
        ({"properties": {"a": {"type": "integer"}, "b": {"$ref": "#/properties/a"}}}, [{"a": 1, "b": 2}, {"b": "x"}]),
        ({"$defs": {"a": {"type": "string"}}, "$ref": "#/$defs/a", "maxLength": 1}, ["", "a", "ab", 5]),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"enum": [1]}}, "items": {"$ref": "#/$defs/a"}, "type": "array"}, [
            [1, 1], [2]])],
    "recursion": [
        ({"$defs": {"list": {**CLOSED, "properties": {"head": {"type": "integer"}, "tail": {"anyOf": [
            {"type": "null"}, {"$ref": "#/$defs/list"}]}}, "required": ["head", "tail"]}}, "$ref": "#/$defs/list"}, [
            {"head": 1, "tail": None}, {"head": 1, "tail": {"head": 2, "tail": None}}, {"head": 1},
            {"head": 1, "tail": {}}]),
        ({**CLOSED, "properties": {"v": {"type": "boolean"}, "in": {"type": "array", "items": {"$ref": "#"}}},
          "required": ["v"]}, [{"v": True}, {"v": True, "in": [{"v": False, "in": []}]}, {"v": True, "in": [{}]}]),
        ({"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/b"}},
                    "b": {**CLOSED, "properties": {"x": {"$ref": "#/$defs/a"}}}}, "$ref": "#/$defs/a"}, [
            [], [{}], [{"x": [{}, {"x": []}]}], [[]], [{"x": {}}]])],
    "what says nothing": [
        ({"type": "null", "title": "t", "description": "d", "default": 5, "examples": [1], "deprecated": True,
          "readOnly": True, "$comment": "c", "$schema": "https://json-schema.org/draft/2020-12/schema"}, [None, 5])],
}
SAMPLES = [pytest.param(schema, instances, id=f"{kind} {number}")
           for kind, samples in KINDS.items() for number, (schema, instances) in enumerate(samples)]

# NOTE: what means something else where it is ignored, or cannot be met.
REFUSED: list[Any] = [
    {"not": {"type": "string"}}, {"if": {"type": "string"}, "then": {"maxLength": 1}}, {"uniqueItems": True},
    {"contains": {"const": 1}}, {"minContains": 1}, {"dependentRequired": {"a": ["b"]}},
    {"dependentSchemas": {"a": {"required": ["b"]}}}, {"propertyNames": {"maxLength": 2}},
    {"unevaluatedProperties": False}, {"unevaluatedItems": False}, {"$dynamicRef": "#x"},
    {"oneOf": [{"type": "integer"}, {"minimum": 2}]}, {"oneOf": [{}, {}]}, {"type": "string", "format": "no-such"},
    {"type": "string", "pattern": "\\bfoo"}, {"type": "string", "pattern": "(?=a)b"},
    {"type": "string", "pattern": "("}, {"type": "string", "pattern": "(a)\\1"},
    {"enum": []}, {"type": []}, {"anyOf": []}, {"const": "a", "type": "integer"},
    {"allOf": [{"type": "string"}, {"type": "integer"}]}, {"type": "array", "minItems": 3, "maxItems": 2},
    {"type": "integer", "minimum": 2, "maximum": 1}, {"type": "thing"}, {"type": 5}, {"properties": []},
    {"required": "a"}, {"minLength": -1, "type": "string"}, {"maxLength": "3", "type": "string"}, {"minimum": "5"},
    {"items": 5}, {"enum": 5}, {"allOf": {}}, {"pattern": 5, "type": "string"},
    {"$ref": "#/$defs/nowhere"}, {"$ref": "other.json"}, {"$ref": "https://example.com/schema"}, {"$ref": 5},
    {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}]


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    vocab = load_folder(tmp_path_factory.mktemp("vocab"), byte_level(), tokenizer_config={"eos_token": EOS})
    return Grammars(vocab, vocab.size)


FORMATS = jsonschema.FormatChecker()            # NOTE: which of them jsonschema knows hangs on what else is installed


@FORMATS.checks("time", ValueError)
def is_time(text: object) -> bool:
    return not isinstance(text, str) or dt.time.fromisoformat(as_python_has_it(text)).tzinfo is not None


@FORMATS.checks("date-time", ValueError)
def is_date_time(text: object) -> bool:
    return not isinstance(text, str) or dt.datetime.fromisoformat(as_python_has_it(text)).tzinfo is not None


def as_python_has_it(text: str) -> str:
    """RFC 3339 has leap seconds and small letters."""
    return text.upper().replace(":60", ":59")


def checker(schema: Any) -> jsonschema.protocols.Validator:
    return jsonschema.Draft202012Validator(schema, format_checker=FORMATS)


@pytest.mark.parametrize(("schema", "instances"), SAMPLES)
def test_what_can_be_said_is_what_is_valid(grammars: Grammars, schema: Any, instances: list[Any]) -> None:
    valid = checker(schema)
    wanted = wants(json=schema)
    for instance in instances:
        text = json.dumps(instance, ensure_ascii=False)
        assert says(grammars, start(grammars, wanted), text) == valid.is_valid(instance), text


@pytest.mark.parametrize(("schema", "instances"), SAMPLES)
def test_what_a_random_model_says_is_valid(grammars: Grammars, schema: Any, instances: list[Any]) -> None:
    """It takes any token that is allowed, and ends where it may."""
    valid, wanted, draw = checker(schema), wants(json=schema), random.Random(3)
    for _ in range(NUM_WALKS):
        matcher, said = start(grammars, wanted), b""
        for _ in range(WALK_TOKENS):
            ids = allowed(grammars, matcher)
            assert ids, "there is always a way on"
            if grammars.vocab.stop_ids & set(ids):
                valid.validate(json.loads(said))
                break
            matcher.advance(token_id := draw.choice(ids))
            said += grammars.vocab.token_bytes(token_id)


@pytest.mark.parametrize("schema", REFUSED, ids=json.dumps)
def test_what_cannot_be_held_to_is_refused(grammars: Grammars, schema: Any) -> None:
    """FAULTS G03. Alone, and within another schema."""
    for whole in (schema, {"type": "object", "properties": {"x": schema}, "required": ["x"]}):
        with pytest.raises(ParameterError):
            grammars.check(wants(json=whole))


def test_properties_come_in_the_schema_s_order(grammars: Grammars) -> None:
    wanted = wants(json={**CLOSED, "properties": {"b": {}, "a": {}}})
    assert says(grammars, start(grammars, wanted), '{"b": 1, "a": 2}')
    assert not says(grammars, start(grammars, wanted), '{"a": 1, "b": 2}')
