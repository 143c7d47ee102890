"""Reading files that others wrote: mapped bytes and JSON objects, with errors that name the file."""
from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any

_MAX_JSON_BYTES = 64 << 20                  # far beyond any index or configuration


def map_file(path: Path) -> mmap.mmap:
    """The file's bytes, mapped read-only. Arrays over them keep the mapping alive.

    Raises: ValueError naming the path if it is missing, empty, unreadable or not a regular file.
    """
    try:
        if not path.is_file():                  # NOTE: opening a pipe would block for ever
            raise ValueError(f"{path}: no such file")
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise ValueError(f"{path}: the file is empty")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises: ValueError naming the path if it is missing, unreadable, too large, not JSON or not an object.
    """
    try:
        if not path.is_file():
            raise ValueError(f"{path}: no such file")
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ValueError(f"{path}: {path.stat().st_size} bytes of JSON, at most {_MAX_JSON_BYTES} are read")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8: {error}") from error
    return parse_json_object(text, path)


def parse_json_object(text: str, path: Path) -> dict[str, Any]:
    """The JSON object in `text`, which came from `path`.

    Raises: ValueError naming the path if the text is not JSON, not an object, or names a key twice.
    """
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise ValueError(f"key {name!r} appears twice")
            found[name] = value
        return found

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: bad JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: bad JSON: an object was expected, not {type(value).__name__}")
    return value
