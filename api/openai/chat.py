"""POST /v1/chat/completions.

Source: OpenAI API reference, "Chat completions" and "Streaming"; return_token_ids and stop_reason as vLLM has them.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from actors.messages import TextDelta, TokenLogprob
from actors.policy.thought_reader import PROMPT_END_TOKENS
from api.answers.parser import AnswerParser
from api.answers.tool_calls import Piece
from api.exchange import Generation, Reply, parse_body
from api.openai.lower import asker, check_num_generations, of_choice, sampling_params
from api.openai.schemas import ChatRequest
from api.openai.tools import delta_of, enforced, message_of, tool_use, with_effort, with_thought
from api.openai.write import AnswerWriter, shown_logprob, shown_prompt
from api.routes import EVENTS, Endpoint
from api.service import service_of
from api.surface import EngineInfo


async def chat_completions(request: Request) -> Reply:
    """Answers a conversation."""
    service = service_of(request)
    engine = service.ready_engine()
    body = await parse_body(request, ChatRequest)
    service.check_model(body.model)
    check_num_generations(engine, 1, body.num_choices)
    sampling = sampling_params(
        engine, body, max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None, prompt_logprobs=body.prompt_logprobs)
    use = tool_use(service, engine.info, body)
    answers = service.answers
    if answers.shows_control_tokens(use.callable is not None):
        sampling = replace(sampling, skip_special_tokens=False)
    messages = [message.plain() for message in body.messages]
    template = with_effort(engine.info, body, {**body.template(), "tools": use.shown})
    who = asker(request, body)
    sampling = with_thought(answers, enforced(use, sampling), body.thinking_token_budget)
    generations = [Generation("messages", messages, of_choice(sampling, choice), choice, template, who)
                   for choice in range(body.num_choices)]

    def parser(prompt: TextDelta) -> AnswerParser:
        """prompt: the delta that has its ids."""
        end = "" if answers.reasoning is None else engine.decode(prompt.prompt_token_ids[-PROMPT_END_TOKENS:])
        return answers.parser(end, use.callable, use.form)

    has_thoughts = answers.reasoning is not None
    writer = ChatWriter(body, engine.info, parser if has_thoughts or use.callable is not None else None, has_thoughts)
    return Reply(service, engine, generations, writer, bool(body.stream))


class ChatWriter(AnswerWriter):
    """Deltas → chat.completion.chunk events, or one chat.completion document."""

    def __init__(self, request: ChatRequest, info: EngineInfo,
                 parser: Callable[[TextDelta], AnswerParser] | None, has_thoughts: bool) -> None:
        """parser: of an answer, by its first delta; None: its text is content as it is."""
        super().__init__(request, info, "chatcmpl", "chat.completion.chunk", "chat.completion", request.num_choices,
                         has_thoughts)
        self._with_logprobs = bool(request.logprobs)
        self._echoed = _echoed(request)
        self._with_reasoning = request.include_reasoning is not False
        self._begun: set[int] = set()           # completions whose role is out
        self._new_parser = parser
        self._parsers: dict[int, AnswerParser] = {}

    def events(self, index: int, delta: TextDelta) -> bytes:
        events = b""
        self.count(index, delta)
        if index not in self._begun:
            self._begun.add(index)
            prompt = {"prompt_token_ids": delta.prompt_token_ids} if self.with_token_ids else {}
            events += self.chunk({**_choice(index, {"role": "assistant", "content": self._echoed}), **prompt,
                                  **self.prompt_details(delta)})
        has_details = bool(delta.logprobs) or (self.with_token_ids and bool(delta.token_ids))
        shown: list[dict[str, Any]] = []
        if self._new_parser is None:
            shown = [{"content": delta.text}] if delta.text or has_details else []
        else:
            shown = [said for piece in self._pieces(index, delta)
                     if (said := delta_of(piece, self._with_reasoning)) is not None] or [{}] * has_details
        for number, said in enumerate(shown):
            events += self.chunk({**_choice(index, said), **(self._details(delta) if number == 0 else {})})
        if delta.finish is not None:
            self.add_usage(index, delta)
            events += self.chunk(_choice(index, {}, delta, self._finish_reason(index, delta)))
        return events

    def _pieces(self, index: int, delta: TextDelta) -> list[Piece]:
        """What the parser makes of a choice's next text."""
        parser = self._parsers.get(index)
        if parser is None:
            assert self._new_parser is not None, "or nothing is parsed"
            parser = self._parsers[index] = self._new_parser(delta)
        pieces = parser.push(delta.text)
        return pieces if delta.finish is None else pieces + parser.finish()

    def _finish_reason(self, index: int, delta: TextDelta) -> str | None:
        parser = self._parsers.get(index)
        return "tool_calls" if parser is not None and parser.is_calling(delta.finish) else delta.finish

    def document(self, completions: Sequence[TextDelta]) -> bytes:
        choices = []
        for index, completion in enumerate(completions):
            self.add_usage(index, completion)
            if self._new_parser is None:
                message = {"role": "assistant", "content": self._echoed + completion.text}
            else:
                pieces = self._pieces(index, completion)
                message = message_of(self._parsers[index], pieces, self._echoed, self._with_reasoning)
            choices.append({
                "index": index, "message": message,
                "finish_reason": self._finish_reason(index, completion), "stop_reason": completion.stop_reason,
                "logprobs": None, **self._details(completion), **self.prompt_details(completion)})
        prompt: dict[str, Any] = {}
        if self.with_token_ids:
            prompt["prompt_token_ids"] = completions[0].prompt_token_ids
        if self.num_prompt_logprobs is not None:
            prompt["prompt_logprobs"] = shown_prompt(completions[0].prompt_logprobs, self.num_prompt_logprobs)
        return self.answer(choices, **prompt)

    def _details(self, delta: TextDelta) -> dict[str, Any]:
        details: dict[str, Any] = {}
        if self._with_logprobs:
            details["logprobs"] = {"content": [_token(token) for token in delta.logprobs]}
        if self.with_token_ids:
            details["token_ids"] = delta.token_ids
        return details


def _echoed(request: ChatRequest) -> str:
    """As in vLLM: the last message, where the answer has its role."""
    last = request.messages[-1]
    return last.text() if request.echo and last.role == "assistant" else ""


def _choice(index: int, delta: dict[str, Any], last: TextDelta | None = None,
            finish_reason: str | None = None) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    return choice if last is None else {**choice, "stop_reason": last.stop_reason}


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {**_alternative(token), "top_logprobs": [_alternative(other) for other in token.top]}


def _alternative(token: TokenLogprob) -> dict[str, Any]:
    # `token` may be U+FFFD; `bytes` carry what the token is.
    return {"token": token.text, "logprob": shown_logprob(token.logprob), "bytes": list(token.raw)}


routes = [Endpoint("POST", "/v1/chat/completions", chat_completions, ChatRequest, EVENTS)]
