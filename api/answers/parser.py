"""An answer's text to thoughts, content and tool calls: as it comes, and whole."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from api.answers.formats import ReasoningFormat
from api.answers.incremental import Incremental, Reading, num_begun
from api.answers.tool_calls import (
    CallArguments,
    CallBegin,
    CallBroken,
    CallEnd,
    Content,
    Piece,
    Reasoning,
    ToolCallParser,
)


@dataclass(slots=True)
class Call:
    id: str
    name: str
    arguments: str = ""                         # a JSON object, once it is complete
    is_complete: bool = False


class ReasoningParser(Incremental[Piece]):
    """Thoughts at an answer's beginning, and what follows them. White space round them belongs to neither."""

    def __init__(self, form: ReasoningFormat, inside: bool) -> None:
        """inside: the prompt has begun the thought."""
        super().__init__()
        self._form = form
        self._inside = inside

    def _run(self) -> Reading[None]:
        space = yield from self._skip_space()
        begins = (yield from self._next_of((self._form.begin,))) != ""
        if begins:
            self._text = self._text[len(self._form.begin):]
        if begins or self._inside:
            yield from self._thought()
        else:
            self._text = space + self._text
        while True:
            if self._text:
                self._pieces.append(Content(self._text))
                self._text = ""
            if not (yield from self._more()):
                return

    def _thought(self) -> Reading[None]:
        """Up to its end and the content's beginning."""
        end = (self._form.end,)
        yield from self._skip_space()
        while (at := self._text.find(self._form.end)) < 0:
            sure = self._text[:len(self._text) - num_begun(self._text, end)].rstrip()
            self._say(sure)
            self._text = self._text[len(sure):]
            if not (yield from self._more()):
                self._say(self._text.rstrip())
                self._text = ""
                return
        self._say(self._text[:at].rstrip())
        self._text = self._text[at + len(self._form.end):]
        yield from self._skip_space()

    def _say(self, text: str) -> None:
        if text:
            self._pieces.append(Reasoning(text))

    def _skip_space(self) -> Reading[str]:
        """Returns what it skipped."""
        space = ""
        while True:
            rest = self._text.lstrip()
            space += self._text[:len(self._text) - len(rest)]
            self._text = rest
            if rest or not (yield from self._more()):
                return space


class AnswerParser:
    """One answer. Calls that were begun and broke stay in `calls`, incomplete; their text is in the content too."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolCallParser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self.calls: list[Call] = []
        self.has_broken_call = False

    def push(self, text: str) -> list[Piece]:
        return self._note(self._read([Content(text)] if self._reasoning is None else self._reasoning.push(text)))

    def finish(self) -> list[Piece]:
        """What the answer's end settles."""
        pieces = [] if self._reasoning is None else self._reasoning.finish()
        return self._note([*self._read(pieces), *([] if self._tools is None else self._tools.finish())])

    def is_calling(self, finish: str | None) -> bool:
        """Whether an answer that ended so asks for its calls to be made: all that it began are complete."""
        return finish == "stop" and bool(self.calls) and not self.has_broken_call

    def complete_calls(self) -> list[Call]:
        return [call for call in self.calls if call.is_complete]

    def _read(self, pieces: Iterable[Piece]) -> list[Piece]:
        """With the calls found in content."""
        read: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, Content) and self._tools is not None:
                read += self._tools.push(piece.text)
            elif not isinstance(piece, Content) or piece.text:
                read.append(piece)
        return read

    def _note(self, pieces: list[Piece]) -> list[Piece]:
        for piece in pieces:
            if isinstance(piece, CallBegin):
                self.calls.append(Call(piece.id, piece.name))
            elif isinstance(piece, CallArguments):
                self.calls[piece.number].arguments += piece.text
            elif isinstance(piece, CallEnd):
                self.calls[piece.number].is_complete = True
            elif isinstance(piece, CallBroken):
                self.has_broken_call = True
        return pieces
