"""JSON objects read as their text comes, however it is cut.

Source: RFC 8259.
"""
from __future__ import annotations

import json
import re
from collections.abc import Callable

MAX_DEPTH = 128

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_ATOM_CHARACTERS = re.compile(r"[A-Za-z0-9+.-]*")
_ATOM = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
_SPACE = re.compile(r"[ \t\n\r]*")
_HEX = frozenset("0123456789abcdefABCDEF")


class JsonObject:
    """One JSON object. Read on with `read` until `is_complete` or `is_broken`.

    text: what was read of it.
    members: of the object itself: where in `text` the values that are complete begin and end.
    """

    def __init__(self, accept: Callable[[str, str | None], bool] = lambda key, value: True) -> None:
        """accept(key, value): whether the object may have such a member; value: its JSON text, None as long as only the
        key is read. If it may not the object is broken there."""
        self.text = ""
        self.members: dict[str, tuple[int, int]] = {}
        self.value_start: int | None = None     # of the member that is being read, once its value has begun
        self.key: str | None = None
        self.is_complete = self.is_broken = False
        self._accept = accept
        self._stack: list[str] = []             # what closes the lists and objects that are open
        self._state = self._value
        self._part_start = 0                    # where the string or atom that is being read begins
        self._is_key = False
        self._num_hex = 0

    def read(self, text: str) -> int:
        """Returns how much of `text` it read: all, up to the object's end, or up to what cannot stand there."""
        begin = len(self.text)
        self.text += text
        position = begin
        while position < len(self.text) and not self.is_complete:
            following = self._state(position)
            if following is None:
                self.is_broken = True
                break
            position = following
        self.text = self.text[:position]
        return position - begin

    # Each state reads from a position on and returns where it stopped; None: this cannot stand there.

    def _value(self, position: int) -> int | None:
        character = self.text[position]
        if character in " \t\n\r":
            return self._space(position)
        if not self._stack and character != "{":
            return None
        is_member = len(self._stack) == 1
        if character in "{[":
            if len(self._stack) == MAX_DEPTH:
                return None
            self._stack.append("}" if character == "{" else "]")
            self._state = self._first_key if character == "{" else self._first_item
        elif character == '"':
            self._part_start, self._is_key, self._state = position, False, self._string
        elif character in "-0123456789tfn":
            self._part_start, self._state = position, self._atom
        else:
            return None
        if is_member:
            self.value_start = position
        return position + 1

    def _first_item(self, position: int) -> int | None:
        if self.text[position] in " \t\n\r":
            return self._space(position)
        if self.text[position] == "]":
            return self._close(position)
        self._state = self._value
        return position

    def _first_key(self, position: int) -> int | None:
        return self._close(position) if self.text[position] == "}" else self._key(position)

    def _key(self, position: int) -> int | None:
        if self.text[position] in " \t\n\r":
            return self._space(position)
        if self.text[position] != '"':
            return None
        self._part_start, self._is_key, self._state = position, True, self._string
        return position + 1

    def _colon(self, position: int) -> int | None:
        if self.text[position] in " \t\n\r":
            return self._space(position)
        self._state = self._value
        return position + 1 if self.text[position] == ":" else None

    def _after(self, position: int) -> int | None:
        """Behind a value."""
        character = self.text[position]
        if character in " \t\n\r":
            return self._space(position)
        if character == ",":
            self._state = self._key if self._stack[-1] == "}" else self._value
            return position + 1
        return self._close(position) if character == self._stack[-1] else None

    def _string(self, position: int) -> int | None:
        found = _PLAIN.match(self.text, position)
        assert found is not None, "it may match nothing"
        if found.end() > position:
            return found.end()
        if self.text[position] == "\\":
            self._state = self._escape
            return position + 1
        if self.text[position] != '"':
            return None                         # a control character
        if not self._is_key:
            return self._ended(position + 1)
        self._state = self._colon
        if len(self._stack) == 1:
            self.key = str(json.loads(self.text[self._part_start:position + 1]))
            self.value_start = None
            if not self._accept(self.key, None):
                return None
        return position + 1

    def _escape(self, position: int) -> int | None:
        if self.text[position] == "u":
            self._num_hex, self._state = 0, self._hex
        elif self.text[position] in '"\\/bfnrt':
            self._state = self._string
        else:
            return None
        return position + 1

    def _hex(self, position: int) -> int | None:
        if self.text[position] not in _HEX:
            return None
        self._num_hex += 1
        if self._num_hex == 4:
            self._state = self._string
        return position + 1

    def _atom(self, position: int) -> int | None:
        """A number, true, false or null: it ends where something else begins."""
        found = _ATOM_CHARACTERS.match(self.text, position)
        assert found is not None, "it may match nothing"
        if found.end() > position:
            return found.end()
        return self._ended(position) if _ATOM.fullmatch(self.text, self._part_start, position) else None

    def _space(self, position: int) -> int:
        found = _SPACE.match(self.text, position)
        assert found is not None, "it may match nothing"
        return found.end()

    def _close(self, position: int) -> int | None:
        self._stack.pop()
        if not self._stack:
            self.is_complete = True
            return position + 1
        return self._ended(position + 1)

    def _ended(self, end: int) -> int | None:
        """A value ends before `end`."""
        self._state = self._after
        if len(self._stack) == 1:
            assert self.key is not None, "values of an object have keys"
            assert self.value_start is not None, "and it has begun"
            if not self._accept(self.key, self.text[self.value_start:end]):
                return None
            self.members[self.key] = self.value_start, end
            self.value_start = None
        return end
