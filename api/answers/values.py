"""Calls that are not written as JSON: their values as JSON."""
from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from api.answers.formats import NAME

MAX_CHARS = 1 << 16                             # of a call: the compiler's memory goes by it
MAX_DEPTH = 64

_MAPPING_CALL = re.compile(rf"\s*(call:)?{NAME}\s*(?={{)")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = {"true": True, "false": False, "null": None, "none": None, "None": None, "True": True, "False": False}


class CallText(NamedTuple):
    name: str
    arguments: str                              # a JSON object


def python_call(text: str, names: Mapping[str, Sequence[str]]) -> CallText | None:
    """name(1, key=[2, "three"]). names: of functions, with the names of their parameters; None: it is no such call."""
    if len(text) > MAX_CHARS:
        return None
    name, _, inside = text.partition("(")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")     # the compiler's about escapes in a stranger's text
            call = ast.parse("f(" + inside, mode="eval").body
        if not isinstance(call, ast.Call) or any(keyword.arg is None for keyword in call.keywords):
            return None
        parameters = names[name]
        if len(call.args) > len(parameters):
            return None
        values = {parameter: ast.literal_eval(value) for parameter, value in zip(parameters, call.args, strict=False)}
        for keyword in call.keywords:
            if keyword.arg in values:
                return None
            values[str(keyword.arg)] = ast.literal_eval(keyword.value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return _call(name, values)


def _call(name: str, values: dict[str, Any]) -> CallText | None:
    """None where JSON, or UTF-8, has no words for them."""
    try:
        arguments = json.dumps(values, ensure_ascii=False, allow_nan=False)
        arguments.encode()
    except (ValueError, TypeError, RecursionError):
        return None
    return CallText(name, arguments)


class _Fault(ValueError):
    """The text is no mapping."""


def mapping_call(text: str, quote: str) -> CallText | None:
    """call:name{key:<quote>text<quote>,other:[1,true,{inner:2}]}; None: it is no such call."""
    found = _MAPPING_CALL.match(text)
    if found is None:
        return None
    reader = _MappingReader(text, found.end(), quote)
    try:
        values = reader.mapping(0)
    except _Fault:
        return None
    return _call(found["name"], values) if not text[reader.position:].strip() else None


class _MappingReader:
    def __init__(self, text: str, position: int, quote: str) -> None:
        self.position = position
        self._text = text
        self._quote = quote

    def mapping(self, depth: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        self._skip("{")
        while not self._skips("}"):
            if values:
                self._skip(",")
            key = self._quoted() if self._comes(self._quote) else self._word(":").strip("\"'")
            self._skip(":")
            if not key or key in values:
                raise _Fault
            values[key] = self._value(depth + 1)
        return values

    def _value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise _Fault
        if self._comes(self._quote):
            return self._quoted()
        if self._comes("{"):
            return self.mapping(depth)
        if not self._skips("["):
            return _scalar(self._word(",]}"))
        items: list[Any] = []
        while not self._skips("]"):
            if items:
                self._skip(",")
            items.append(self._value(depth + 1))
        return items

    def _quoted(self) -> str:
        self._skip(self._quote)
        end = self._text.find(self._quote, self.position)
        if end < 0:
            raise _Fault
        text, self.position = self._text[self.position:end], end + len(self._quote)
        return text

    def _word(self, ends: str) -> str:
        """What stands before one of `ends`."""
        found = re.compile(f"[^{re.escape(ends)}]*").match(self._text, self.position)
        assert found is not None, "it may match nothing"
        self.position = found.end()
        return found[0].strip()

    def _comes(self, literal: str) -> bool:
        rest = re.compile(r"\s*").match(self._text, self.position)
        assert rest is not None, "it may match nothing"
        self.position = rest.end()
        return self._text.startswith(literal, self.position)

    def _skips(self, literal: str) -> bool:
        comes = self._comes(literal)
        self.position += len(literal) if comes else 0
        return comes

    def _skip(self, literal: str) -> None:
        if not self._skips(literal):
            raise _Fault


def _scalar(word: str) -> Any:
    if not word:
        raise _Fault
    if word in _WORDS:
        return _WORDS[word]
    if _NUMBER.fullmatch(word):
        try:
            return json.loads(word)
        except ValueError:                      # more digits than Python converts
            return word
    return word[1:-1] if len(word) > 1 and word[0] == word[-1] == '"' else word
