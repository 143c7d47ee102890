"""On the way up: deltas become a message, or the events of one.

Source: Anthropic API reference, "Messages" and "Streaming messages".
"""
from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from actors.messages import TextDelta, Usage
from api.answers.parser import AnswerParser
from api.answers.tool_calls import CallArguments, CallBegin, CallBroken, CallEnd, Content, Piece, Reasoning
from api.anthropic.errors import error_body
from api.anthropic.schemas import MessagesRequest
from api.errors import ApiError
from api.sse import named_event
from api.surface import EngineInfo
from api.timings import Times


class MessageWriter:
    """One completion."""
    keep_alive = named_event("ping", {"type": "ping"})
    metrics: Times | None = None

    def __init__(self, request: MessagesRequest, info: EngineInfo, request_id: str,
                 new_parser: Callable[[TextDelta], AnswerParser], has_thoughts: bool) -> None:
        """new_parser: of the answer, by its first delta. has_thoughts: the model's answers may."""
        self.answer_id = f"msg_{uuid.uuid4().hex}"
        self.wants_metrics = bool(request.return_metrics)
        self._max_tokens = request.max_tokens
        thinking = request.thinking
        self._shows_thoughts = thinking is None or (thinking.type != "disabled" and thinking.display != "omitted")
        self._has_thoughts = has_thoughts
        self._model = info.model
        self._request_id = request_id
        self._new_parser = new_parser
        self._parser: AnswerParser | None = None
        self._blocks: list[_Block] = []
        self._open: _Block | None = None        # the last one, while more of it may come

    def events(self, index: int, delta: TextDelta) -> bytes:
        events = b""
        if self._parser is None:
            usage = self._usage(Usage(len(delta.prompt_token_ids), 0, delta.num_cached_tokens or 0))
            events += _event("message_start", message=self._message([], None, None, usage))
        for piece in self._pieces(delta):
            events += self._add(piece)
        if delta.finish is not None:
            assert delta.usage is not None, "the engine gives usage with a completion's end"
            reason, sequence = self._stop(delta, delta.usage)
            events += self._close() + _event("message_delta", delta={
                "stop_reason": reason, "stop_sequence": sequence}, usage=self._usage(delta.usage))
        return events

    def last_events(self) -> bytes:
        return _event("message_stop", **self._metrics())

    def error_event(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + error_body(error, self._request_id) + b"\n\n"

    def document(self, completions: Sequence[TextDelta]) -> bytes:
        completion, = completions
        assert completion.usage is not None, "the engine gives usage with a completion's end"
        for piece in self._pieces(completion):
            self._add(piece)
        content = [block.whole() for block in self._blocks if not block.is_broken]
        reason, sequence = self._stop(completion, completion.usage)
        message = self._message(content, reason, sequence, self._usage(completion.usage))
        return orjson.dumps({**message, **self._metrics()})

    def _pieces(self, delta: TextDelta) -> list[Piece]:
        if self._parser is None:
            self._parser = self._new_parser(delta)
        pieces = self._parser.push(delta.text)
        return pieces if delta.finish is None else pieces + self._parser.finish()

    # Blocks: each piece belongs to the last one, or begins another

    def _add(self, piece: Piece) -> bytes:
        if isinstance(piece, Content):
            return self._say("text", piece.text)
        if isinstance(piece, Reasoning):
            return self._say("thinking", piece.text) if self._shows_thoughts else b""
        if isinstance(piece, CallBegin):
            return self._close() + self._begin(_Block("tool_use", piece.id, piece.name))
        assert self._open is not None, "a call has begun"
        if isinstance(piece, CallArguments):
            return self._event_of("input_json_delta", "partial_json", piece.text)
        assert isinstance(piece, (CallEnd, CallBroken)), "there are no other pieces"
        self._open.is_broken = isinstance(piece, CallBroken)
        return self._close()

    def _say(self, kind: Literal["text", "thinking"], text: str) -> bytes:
        goes_on = self._open is not None and self._open.kind == kind
        begun = b"" if goes_on else self._close() + self._begin(_Block(kind))
        return begun + self._event_of(f"{kind}_delta", kind, text)

    def _begin(self, block: _Block) -> bytes:
        self._open = block
        self._blocks.append(block)
        return _event("content_block_start", index=len(self._blocks) - 1, content_block=block.whole())

    def _event_of(self, kind: str, field: str, text: str) -> bytes:
        assert self._open is not None, "something has begun"
        self._open.text += text
        return _event("content_block_delta", index=len(self._blocks) - 1, delta={"type": kind, field: text})

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return _event("content_block_stop", index=len(self._blocks) - 1)

    # The frame

    def _message(self, content: list[dict[str, Any]], stop_reason: str | None, stop_sequence: str | None,
                 usage: dict[str, Any]) -> dict[str, Any]:
        return {"id": self.answer_id, "type": "message", "role": "assistant", "model": self._model,
                "content": content, "stop_reason": stop_reason, "stop_sequence": stop_sequence, "usage": usage}

    def _metrics(self) -> dict[str, Any]:
        return {} if self.metrics is None else {"metrics": self.metrics}

    def _usage(self, usage: Usage) -> dict[str, Any]:
        """NOTE: `input_tokens` are those beside the ones read from the cache; what is put there is not counted apart.
        """
        details = {"output_tokens_details": {"thinking_tokens": usage.num_reasoning_tokens}}
        return {"input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens, "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": usage.num_cached_tokens, "output_tokens": usage.num_output_tokens,
                **(details if self._has_thoughts else {})}

    def _stop(self, last: TextDelta, usage: Usage) -> tuple[str, str | None]:
        """Why it ended, and the stop sequence that ended it."""
        if last.finish == "length":             # its own limit, or the model's
            return ("max_tokens" if usage.num_output_tokens >= self._max_tokens else
                    "model_context_window_exceeded"), None
        if isinstance(last.stop_reason, str):
            return "stop_sequence", last.stop_reason
        assert self._parser is not None, "the answer has been read"
        return "tool_use" if self._parser.is_calling(last.finish) else "end_turn", None


@dataclass(slots=True)
class _Block:
    """Of an answer's content. id, name: of a call."""
    kind: Literal["text", "thinking", "tool_use"]
    id: str = ""
    name: str = ""
    text: str = ""                          # so far; of a call its input's
    is_broken: bool = False                 # a call that was none: its text comes again as text

    def whole(self) -> dict[str, Any]:
        """As it is now: a stream's first word of a call has no input yet, and then it is a JSON text."""
        if self.kind == "tool_use":
            return {"type": "tool_use", "id": self.id, "name": self.name,
                    "input": orjson.Fragment(self.text) if self.text else {}}
        signature = {"signature": ""} if self.kind == "thinking" else {}
        return {"type": self.kind, self.kind: self.text, **signature}


def _event(kind: str, **fields: Any) -> bytes:
    return named_event(kind, {"type": kind, **fields})
