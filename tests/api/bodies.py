"""Request bodies at random: made of the schemas in /openapi.json, right ones and spoiled ones."""
from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

MAX_DEPTH = 5
REF = "#/components/schemas/"

TEXTS = ["hi", "a", "", " ", "hé\u20ac\U0001f600", "<|im_end|>", "<|im_start|>system\nx", "<tool_call>", "</think>",
         "\x00\x1b", "a\n\nb", "\u202e\u0301\ufeff", "{{ 7 * 7 }}", "../../etc/passwd", '{"a": 1}',
         "9" * 400, "x" * 3000, "null"]
NAMES = ["f", "get_weather", "a.b-c_d", "x" * 64]
NUMBERS = [0, 1, -1, 2, 0.5, 20, 1e-9, 100, 2**31 - 1, 2**31, 2**53 + 1, -2**63, 2**63, 2**64, 1e308, -0.0, 10**400]
SCHEMAS: list[Any] = [
    {}, {"type": "object"}, {"type": "string", "maxLength": 3}, {"enum": [1, "a", None]}, {"const": {"a": [1]}},
    {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"enum": ["a", "b"]}}, "required": ["x"],
     "additionalProperties": False},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}, {"$ref": "#"}, {"$ref": "#/$defs/nowhere"},
    {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, {"type": "thing"}, {"not": {}}, {"pattern": "("},
    {"type": "string", "pattern": "(?=a)b"}, {"oneOf": [{}, {}]}, {"type": "string", "format": "date"},
    {"minItems": -1}, {"anyOf": []}, {"properties": 5}, {"required": "x"},
    {"type": "integer", "minimum": 5, "maximum": 4}, {"type": "string", "minLength": 2**40},
    {"additionalProperties": {"$ref": "http://127.0.0.1/x"}}, {"if": {}}]
REGEXES = ["a*b", "[0-9]{2,3}", "(", "(?=a)b", "a{1,100000000}", "\\d+\\b", "(a|b)*c", "\\p{L}+", "[^\n]*"]
GRAMMARS = ['start: "a" | "b"', 'root ::= "c"', "start: start", "root ::= root root | \"a\"", "start: /(/", "%%", "x"]
WILD: list[Any] = [None, True, False, [], {}, [[]], [None], {"": {}}, "", "x", [1, "a", None], {"a": {"b": [{}]}},
                   "\ud83d\ude00", [0] * 300, ["a"] * 100, [[["a"]]], {"type": "object"}, *NUMBERS]
NASTY = [b"", b"null", b"[]", b"{", b"}", b'{"model":', b"\xff\xfe", b'{"a":NaN}', b'{"a":1e999}', b'{"a":"\\ud800"}',
         b'{"a":"\xed\xa0\x80"}', b"[" * 5000, b'{"a":' * 200 + b"1" + b"}" * 200, b'{"prompt":"a","prompt":["b"]}',
         b"\xef\xbb\xbf{}", b"{}{}", b'{"prompt":"a",}', b"'" * 50, b"\x00" * 64, b"0" * 5000]


GENERATING = ["/v1/chat/completions", "/v1/completions", "/v1/messages"]
EITHER = [("prompt", "messages"), ("request_id", "request_ids"), ("max_tokens", "max_completion_tokens")]


class Bodies:
    """The same ones for the same seed."""

    def __init__(self, document: dict[str, Any], seed: int) -> None:
        """document: OpenAPI's; only what has a body is asked for."""
        self._random = random.Random(seed)
        self._schemas = document["components"]["schemas"]
        self._bodies = {path: operations["post"]["requestBody"]["content"]["application/json"]["schema"]
                        for path, operations in document["paths"].items() if "post" in operations}
        self._hints: dict[str, Callable[[], Any]] = {
            "model": lambda: self._one_of(["fake"] * 30 + ["nobody", ""]),
            "max_tokens": self._num_tokens, "max_completion_tokens": self._num_tokens,
            "dimensions": lambda: self._one_of([1, 3, 64, 65]), "priority": lambda: self._one_of([0] * 9 + [1]),
            "schema": self._schema, "json": self._schema, "guided_json": self._schema, "parameters": self._schema,
            "input_schema": self._schema, "regex": lambda: self._one_of(REGEXES), "n": lambda: self._one_of([1, 2, 3]),
            "guided_regex": lambda: self._one_of(REGEXES), "grammar": lambda: self._one_of(GRAMMARS),
            "guided_grammar": lambda: self._one_of(GRAMMARS), "name": lambda: self._one_of(NAMES),
            "arguments": lambda: self._one_of(["{}", '{"x": 1}', "", None, {"x": [1]}, '{"x": ', "[]"]),
            "prompt": self._prompt}

    def next(self) -> tuple[str, bytes]:
        """A path and a body for it."""
        path = self._one_of([*sorted(self._bodies), *GENERATING * 2])
        kind = self._random.random()
        if kind < 0.03:
            return path, self._one_of(NASTY)
        value = self._value(self._bodies[path], 0)
        if kind > 0.6:
            value = self._spoiled(value, 0.97)
        body = json.dumps(value, ensure_ascii=self._random.random() < 0.5).encode("utf-8", "surrogatepass")
        return path, self._cut(body) if kind < 0.08 else body

    def _one_of(self, values: list[Any]) -> Any:
        return values[self._random.randrange(len(values))]

    def _num_tokens(self) -> int:
        return int(self._one_of([1, 1, 2, 3, 5, 12]))

    def _schema(self) -> Any:
        schema = self._one_of(SCHEMAS)
        if self._random.random() < 0.2:
            return {"type": "object", "properties": {"a": schema, "b": self._one_of(SCHEMAS)}, "required": ["a"]}
        return schema

    def _prompt(self) -> Any:
        ids = [self._random.randrange(60) for _ in range(self._random.randrange(1, 9))]
        return self._one_of(["hi", self._one_of(TEXTS), ids, [ids, ids[:1]], ["a", self._one_of(TEXTS)], [300_000]])

    def _value(self, schema: dict[str, Any], depth: int, name: str = "") -> Any:
        """That the schema takes, mostly."""
        hint = self._hints.get("prompt" if name == "input" and "anyOf" in schema else name)
        if hint is not None and self._random.random() < 0.95:
            return hint()
        if "$ref" in schema:
            return self._value(self._schemas[schema["$ref"].removeprefix(REF)], depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self._one_of(schema["enum"])
        if kinds := schema.get("anyOf") or schema.get("oneOf"):
            others = [kind for kind in kinds if kind.get("type") != "null"]
            return self._value(self._one_of(others if self._random.random() < 0.95 else kinds), depth, name)
        kind = schema.get("type")
        if kind == "object":
            return self._object(schema, depth)
        if kind == "array":
            num_items = self._random.randrange(schema.get("minItems", 0), 4) if depth < MAX_DEPTH else 1
            return [self._value(schema.get("items", {}), depth + 1, name) for _ in range(num_items)]
        if kind in ("integer", "number"):
            return self._number(schema)
        if kind == "boolean":
            return self._random.random() < 0.5
        if kind == "null":
            return None
        if name == "role":
            return self._one_of(["user"] * 6 + ["assistant", "system", "tool", "nobody"])
        if kind == "string":
            return self._text(schema)
        return self._one_of(WILD)

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        properties = schema.get("properties", {})
        required = schema.get("required", ())
        chance = min(0.4 if depth == 0 else 0.1, 3 / (len(properties) or 1))
        value = {name: self._value(inner, depth + 1, name) for name, inner in properties.items()
                 if name in required or name == "content" or self._random.random() < chance}
        for one, other in EITHER:
            if one in properties and other in properties and self._random.random() < 0.95:
                value.pop(one, None)
                value.setdefault(other, self._value(properties[other], depth + 1, other))
        if "max_tokens" in properties and "max_completion_tokens" not in value:
            value["max_tokens"] = self._num_tokens()
        if "additionalProperties" in schema or "patternProperties" in schema:
            keys = ["0", "5", "59"] if "patternProperties" in schema else ["a", "enable_thinking", "\u20ac"]
            inner = next(iter(schema.get("patternProperties", {}).values()), {"anyOf": [{"type": "string"}, {}]})
            value |= {self._one_of(keys): self._value(inner, depth + 1) for _ in range(self._random.randrange(3))}
        return value

    def _number(self, schema: dict[str, Any]) -> Any:
        low, high = schema.get("minimum", schema.get("exclusiveMinimum", -100)), schema.get("maximum", 100)
        fits = [number for number in NUMBERS if low <= number <= high
                and (schema["type"] == "number" or isinstance(number, int))]
        return self._one_of(fits or [low])

    def _text(self, schema: dict[str, Any]) -> str:
        texts = [text[:schema.get("maxLength", None)] for text in TEXTS if len(text) >= schema.get("minLength", 0)]
        if "pattern" in schema:
            texts = [text for text in NAMES if re.search(schema["pattern"], text)] or texts
        return str(self._one_of(texts))

    def _spoiled(self, value: Any, is_inside: float = 0.7) -> Any:
        """The same with one thing in it changed. is_inside: the chance that it is not the whole."""
        if isinstance(value, dict) and value and self._random.random() < is_inside:
            key = self._one_of(list(value))
            changed = dict(value)
            what = self._random.random()
            if what < 0.15:
                del changed[key]
            elif what < 0.3:
                changed[self._one_of(["surprise", "", "\x00", "n" * 300, key.upper()])] = self._one_of(WILD)
            else:
                changed[key] = self._spoiled(value[key])
            return changed
        if isinstance(value, list) and value and self._random.random() < is_inside:
            at = self._random.randrange(len(value))
            if self._random.random() < 0.2:
                return value + value[at:] * self._random.randrange(40)
            return [*value[:at], self._spoiled(value[at]), *value[at + 1:]]
        return self._one_of(WILD)

    def _cut(self, body: bytes) -> bytes:
        at = self._random.randrange(len(body))
        return self._one_of([body[:at], body[:at] + b"\xff" + body[at:], body[:at] + b"[" * 150 + body[at:],
                             body[:at] + bytes([body[at] ^ 1 << self._random.randrange(8)]) + body[at + 1:]])
