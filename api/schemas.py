"""Request bodies: parsed from JSON, bounded, checked strictly, errors naming the field.

A field that is unknown is ignored and named in the answer's Warning header, or refused where the server is strict. One
that is known but not supported is refused by name unless it has the value that asks for nothing: no request is answered
as if a part of it had not been there.
"""
from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from api.errors import ApiError

MAX_CONTAINERS = 500_000                    # JSON lists and objects in a body: each costs some 60 bytes and 0.1 µs
MAX_NESTING = 128                           # of them within one another
MAX_SEARCHED_BYTES = 1 << 20                # bodies past this get no field path for characters that are no text
MAX_SHOWN_CHARS = 80                        # of a client's value or key inside an error
MAX_SHOWN_FIELDS = 16                       # unknown ones, that are named

_ONLY_BRACKETS_AND_QUOTES = bytes(sorted(set(range(256)) - set(b'[]{}"')))
_ROUND = bytes.maketrans(b"{}", b"[]")


class FieldFault(ValueError):
    """What a validator below found. `where` is the path from the validated value to the fault: "[2].text", or ""."""

    def __init__(self, where: str, message: str) -> None:
        super().__init__(message)
        self.where = where
        self.message = message


class ParsedModel(BaseModel):
    """Strict: no string becomes a number, no fraction an integer."""
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}   # fields, with the values that ask for nothing; None too
    parts: ClassVar[Mapping[str, type[ParsedModel]]] = {}       # fields that are objects, or lists of them

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, values: Any) -> Any:
        if isinstance(values, dict):
            for name, value in values.items():
                if name in cls.unsupported and value is not None and value not in cls.unsupported[name]:
                    raise FieldFault(name, "not supported yet")
        return values

    @classmethod
    def unknown_fields(cls, values: Mapping[str, Any]) -> list[str]:
        """Of a body that is valid: paths of what is neither read nor refused; at most `MAX_SHOWN_FIELDS` + 1."""
        known = {field.alias or name for name, field in cls.model_fields.items()}
        found = [name for name in values if name not in known and name not in cls.unsupported]
        for name, part in cls.parts.items():
            value = values.get(name)
            for number, inner in enumerate(value if isinstance(value, list) else ()):
                found += [f"{name}[{number}].{key}" for key in part.unknown_fields(inner)]
                if len(found) > MAX_SHOWN_FIELDS:
                    break
            if isinstance(value, dict):
                found += [f"{name}.{key}" for key in part.unknown_fields(value)]
        return found[:MAX_SHOWN_FIELDS + 1]


Request = TypeVar("Request", bound=ParsedModel)


def parse(body: bytes, schema: type[Request], strict: bool = False) -> tuple[Request, list[str]]:
    """The request, and the names of its unknown fields. Raises: ApiError (400) naming the field."""
    if body.count(b"[") + body.count(b"{") > MAX_CONTAINERS:
        raise ApiError(400, f"The body holds more than {MAX_CONTAINERS} lists and objects.")
    if is_nested_deeper(body, MAX_NESTING):
        raise ApiError(400, f"The body nests lists and objects deeper than {MAX_NESTING}.")
    try:
        values = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        path = _path_of_bad_text(body) if len(body) <= MAX_SEARCHED_BYTES else None
        if path is not None:
            raise bad_field(path, "holds a lone surrogate or bytes that are not UTF-8") from None
        raise ApiError(400, f"The body is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ApiError(400, "The body must be a JSON object.")
    try:
        request = schema.model_validate(values)
    except ValidationError as error:
        raise _refused(error) from None
    unknown = schema.unknown_fields(values)
    if strict and unknown:
        path = unknown[0][:MAX_SHOWN_CHARS]
        raise bad_field(path, "is not known here, and this server is strict")
    return request, unknown


def is_nested_deeper(body: bytes, depth: int) -> bool:
    """Whether JSON nests deeper; of what is no JSON either may be said. Before anything is made of it."""
    if body.count(b"[") + body.count(b"{") <= depth:
        return False
    # Escapes go, then all but quotes and brackets; what lies between quotes is every second piece.
    body = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(_ROUND, _ONLY_BRACKETS_AND_QUOTES)
    brackets = b"".join(body.split(b'"')[::2])
    for _ in range(depth):
        if not brackets:
            return False
        brackets = brackets.replace(b"[]", b"")         # the innermost ones, all at once
    return bool(brackets)


def _refused(error: ValidationError) -> ApiError:
    fault = first_fault(error)
    return bad_field(fault.where, fault.message)


def first_fault(error: ValidationError) -> FieldFault:
    """What a body, or a part of it, is refused for."""
    fault = error.errors(include_url=False)[0]
    path, cause = _path(fault["loc"]), fault.get("ctx", {}).get("error")
    if isinstance(cause, FieldFault):
        separator = "." if path and cause.where[:1] not in ("", "[") else ""
        return FieldFault(path + separator + cause.where, cause.message)
    if fault["type"] == "missing":
        return FieldFault(path, "is required")
    return FieldFault(path, f"{fault['msg']}, got {shown(fault['input'])}")


def bad_field(path: str, message: str) -> ApiError:
    return ApiError(400, f"{path}: {message}", param=path)


def _path(keys: tuple[str | int, ...]) -> str:
    """("messages", 0, "content") → "messages[0].content"."""
    path = ""
    for key in keys:
        if isinstance(key, int):
            path += f"[{key}]"
        else:
            path += f".{key[:MAX_SHOWN_CHARS]}" if path else key[:MAX_SHOWN_CHARS]
    return path


def shown(value: Any) -> str:
    """A short form of a client's value; never the inside of a list or object."""
    if isinstance(value, (list, dict)):
        return f"a list of {len(value)}" if isinstance(value, list) else "an object"
    text = repr(value[:MAX_SHOWN_CHARS] if isinstance(value, str) else value)
    return text[:MAX_SHOWN_CHARS]


def _path_of_bad_text(body: bytes) -> str | None:
    """Where a body that is JSON but for its characters holds one that UTF-8 cannot carry."""
    try:
        values = json.loads(body.decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError):
        return None
    pending: list[tuple[tuple[str | int, ...], Any]] = [((), values)]
    while pending:
        keys, value = pending.pop()
        if isinstance(value, str):
            if not _is_text(value):
                return _path(keys)
        elif isinstance(value, list):
            pending += [((*keys, number), item) for number, item in enumerate(value)]
        elif isinstance(value, dict):
            for key, item in value.items():
                if not _is_text(key):
                    return _path((*keys, key.encode("utf-8", "replace").decode()))
                pending.append(((*keys, key), item))
    return None


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
