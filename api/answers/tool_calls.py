"""Tool calls out of an answer's text, as it comes.

A call is told of once its name is one of the request's tools and its arguments have begun; then the arguments come as
they are written. What turns out not to be a call, or is cut short, is content, to the letter.
"""
from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from api.answers.formats import ToolFormat
from api.answers.incremental import Incremental, Reading, find_first, num_begun
from api.answers.json_text import JsonObject
from api.answers.values import CallText, mapping_call, python_call

MAX_HEADER_CHARS = 256                          # before the arguments of a named call

_KEYS = {"name": "name", "arguments": "arguments", "parameters": "arguments", "type": "type", "id": "id"}
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_PYTHON_NAME = re.compile(r"[A-Za-z0-9_.-]*")


class Content(NamedTuple):
    text: str


class Reasoning(NamedTuple):
    text: str


class CallBegin(NamedTuple):
    """The first that is said of a call. number: among the answer's calls, from 0."""
    number: int
    id: str
    name: str


class CallArguments(NamedTuple):
    """A piece of a call's arguments; all of them are one JSON object."""
    number: int
    text: str


class CallEnd(NamedTuple):
    number: int


class CallBroken(NamedTuple):
    """It was none: its text follows as content."""
    number: int


Piece: TypeAlias = Content | Reasoning | CallBegin | CallArguments | CallEnd | CallBroken


@dataclass(frozen=True, slots=True)
class Tools:
    """What an answer may call. names: with their parameters, in order, for calls that leave the names out."""
    names: Mapping[str, Sequence[str]]
    parallel: bool = True                       # else what follows a call is content


def new_call_id(form: ToolFormat) -> str:
    return uuid.uuid4().hex[:9] if form.short_ids else f"call_{uuid.uuid4().hex[:24]}"


class ToolCallParser(Incremental[Piece]):
    """The text of one answer to `Content` and calls.

    White space between calls, and between a call and the content beside it, belongs to neither and is left out.
    """

    def __init__(self, form: ToolFormat, tools: Tools, new_id: Callable[[], str] | None = None) -> None:
        super().__init__()
        self._form = form
        self._tools = tools
        self._new_id = new_id or (lambda: new_call_id(form))
        self._raw = ""                          # read, and perhaps of a call
        self._space = ""                        # before it
        self._num_begun = 0                     # calls that were told of
        self._num_complete = 0
        self._has_content = False
        self._ends_with_call = False            # what was read last

    def _run(self) -> Reading[None]:
        if self._form.bare:
            yield from self._bare()
        while (yield from self._content()):
            yield from self._section()

    # Content

    def _say(self, text: str) -> None:
        """`text` is content. White space waits for what follows it."""
        shown = text.rstrip()
        if not shown:
            self._space += text
            return
        if self._num_complete and not self._has_content:
            self._space, shown = "", shown.lstrip()
        self._pieces.append(Content(self._space + shown))
        self._has_content, self._ends_with_call, self._space = True, False, text[len(text.rstrip()):]

    def _content(self) -> Reading[bool]:
        """Reads up to and with what begins calls; False at the answer's end."""
        markers = self._form.begin if self._may_call() else ()
        while True:
            at, marker = find_first(self._text, markers)
            if at >= 0:
                self._say(self._text[:at])
                self._text = self._text[at:]
                self._take(len(marker))
                return True
            num_shown = len(self._text) - num_begun(self._text, markers)
            self._say(self._text[:num_shown])
            self._text = self._text[num_shown:]
            if not (yield from self._more()):
                break
        self._say(self._text)
        self._text = ""
        if self._space and not self._ends_with_call:
            self._pieces.append(Content(self._space))
        return False

    def _may_call(self) -> bool:
        return self._tools.parallel or self._num_complete == 0

    # What may be calls

    def _take(self, length: int) -> None:
        self._raw += self._text[:length]
        self._text = self._text[length:]

    def _give_back(self) -> None:
        """It was none."""
        raw, self._raw = self._raw, ""
        self._say(raw)

    def _skip_space(self) -> Reading[None]:
        while True:
            self._take(len(self._text) - len(self._text.lstrip()))
            if self._text or not (yield from self._more()):
                return

    def _match(self, literals: Sequence[str]) -> Reading[bool]:
        """Reads white space and one of `literals`, if it comes next."""
        yield from self._skip_space()
        found = yield from self._next_of(literals)
        self._take(len(found))
        return found != ""

    def _bare(self) -> Reading[None]:
        """Calls that an answer begins with, without a mark."""
        yield from self._skip_space()
        first = yield from self._peek()
        if first and first in self._form.bare:
            yield from self._section()
        else:
            self._give_back()

    def _section(self) -> Reading[None]:
        """Calls behind their mark. Stops behind the last one, or where there is none."""
        form, num_opened = self._form, 0
        while (yield from self._match(form.opening)):
            num_opened += 1
        if form.needs_opening and not num_opened:
            self._give_back()
            return
        while True:
            yield from self._skip_space()
            if not (yield from self._call()):
                self._give_back()
                return
            self._num_complete += 1
            self._ends_with_call = True
            while (yield from self._match(form.after)):
                pass
            self._raw = ""
            if not self._may_call() or not (yield from self._match(form.between)):
                self._raw = ""                  # white space
                return

    def _call(self) -> Reading[bool]:
        """Whether a whole call comes, and reads it; where not, some of it may have been read."""
        body = self._form.body
        if body == "json" or (body == "named" and (yield from self._peek()) == "{"):
            return (yield from self._json_call())
        if body == "named":
            return (yield from self._named_call())
        return (yield from (self._python_call() if body == "python" else self._mapping_call()))

    def _begin(self, name: str) -> int:
        index = self._num_begun
        self._num_begun += 1
        self._pieces.append(CallBegin(index, self._new_id(), name))
        return index

    def _say_arguments(self, index: int, text: str) -> None:
        if text:
            self._pieces.append(CallArguments(index, text))

    def _say_call(self, call: CallText) -> None:
        """All of it at once."""
        index = self._begin(call.name)
        self._say_arguments(index, call.arguments)
        self._pieces.append(CallEnd(index))

    def _json_call(self) -> Reading[bool]:
        """{"name": …, "arguments": {…}}, its members in any order."""
        call = _CallObject(self._tools.names)
        index, num_said = -1, 0
        while True:
            self._take(call.json.read(self._text))
            start, end = call.streamed_arguments()
            if end > start and index < 0 and call.name is not None:
                index = self._begin(call.name)
            if end > start and index >= 0:
                self._say_arguments(index, call.json.text[start + num_said:end])
                num_said = end - start
            if call.json.is_complete or call.json.is_broken or not (yield from self._more()):
                break
        if not call.json.is_complete or call.name is None:
            if index >= 0:
                self._pieces.append(CallBroken(index))
            return False
        if index >= 0:
            self._pieces.append(CallEnd(index))
        else:
            self._say_call(CallText(call.name, call.whole_arguments()))
        return True

    def _named_call(self) -> Reading[bool]:
        """A header with the name, then the arguments' object."""
        while (at := self._text.find("{", 0, MAX_HEADER_CHARS + 1)) < 0:
            if len(self._text) > MAX_HEADER_CHARS or not (yield from self._more()):
                return False
        found = re.fullmatch(self._form.header, self._text[:at])
        if found is None or found["name"] not in self._tools.names:
            return False
        self._take(at)
        index = self._begin(found["name"])
        arguments = JsonObject()
        while True:
            num_read = arguments.read(self._text)
            self._say_arguments(index, self._text[:num_read])
            self._take(num_read)
            if arguments.is_complete:
                self._pieces.append(CallEnd(index))
                return True
            if arguments.is_broken or not (yield from self._more()):
                self._pieces.append(CallBroken(index))
                return False

    def _python_call(self) -> Reading[bool]:
        """name(key=value, …), told of when it is whole: its values must be read to be written as JSON."""
        position, quote, open_brackets = 0, "", list[str]()
        while True:
            if position >= len(self._text):
                if not (yield from self._more()):
                    return False
                continue
            character = self._text[position]
            if quote:
                if character == "\\":
                    position += 1
                elif character == quote:
                    quote = ""
            elif character in "([{":
                if not open_brackets and self._text[:position] not in self._tools.names:
                    return False
                open_brackets.append(_CLOSING[character])
            elif not open_brackets:
                if not _PYTHON_NAME.fullmatch(character):
                    return False
            elif character in "\"'":
                quote = character
            elif character in ")]}":
                if character != open_brackets.pop():
                    return False
                if not open_brackets:
                    break
            position += 1
        call = python_call(self._text[:position + 1], self._tools.names)
        if call is None:
            return False
        self._take(position + 1)
        self._say_call(call)
        return True

    def _mapping_call(self) -> Reading[bool]:
        """call:name{key:value, …}, told of when it is whole."""
        end = self._form.after[0]
        while (at := self._text.find(end)) < 0:
            if not (yield from self._more()):
                at = len(self._text)
                break
        call = mapping_call(self._text[:at], self._form.quote)
        if call is None or call.name not in self._tools.names:
            return False
        self._take(at)
        self._say_call(call)
        return True


class _CallObject:
    """The members of a call that is one JSON object."""

    def __init__(self, names: Mapping[str, object]) -> None:
        self.json = JsonObject(self._accept)
        self._names = names
        self._keys: dict[str, str] = {}         # as they are spelled
        self.name: str | None = None

    def _accept(self, key: str, value: str | None) -> bool:
        meaning = _KEYS.get(key)
        if value is None:
            if meaning is None or meaning in self._keys:
                return False
            self._keys[meaning] = key
        elif meaning == "name":
            name = str(json.loads(value)) if value[0] == '"' else None
            if name not in self._names:
                return False
            self.name = name
        elif meaning == "arguments":
            return value[0] == "{" or _inner_object(value) is not None
        return True

    def streamed_arguments(self) -> tuple[int, int]:
        """Where in the JSON is what was read of the arguments, as long as they are an object."""
        key = self._keys.get("arguments")
        if key is None:
            return 0, 0
        start, end = self.json.members.get(key, (self.json.value_start, len(self.json.text)))
        return (0, 0) if start is None or self.json.text[start] != "{" else (start, end)

    def whole_arguments(self) -> str:
        """Of a call whose arguments are no object: some models write it as a text, or leave it out."""
        key = self._keys.get("arguments")
        if key is None:
            return "{}"
        start, end = self.json.members[key]
        return _inner_object(self.json.text[start:end]) or "{}"


def _inner_object(value: str) -> str | None:
    """Of null, or of a text that holds a JSON object: that object."""
    if value == "null":
        return "{}"
    if value[0] != '"':
        return None
    text = str(json.loads(value))
    if not text.strip():
        return "{}"
    text = text.strip()
    inner = JsonObject()
    if inner.read(text) != len(text) or not inner.is_complete or not text.isascii() and not _is_unicode(text):
        return None
    return text


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
