"""POST /v1/chat/completions.

Source: OpenAI API reference, "Chat completions" and "Streaming"; return_token_ids and stop_reason as vLLM has them.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from actors.messages import TextDelta, TokenLogprob
from api.engine import EngineInfo
from api.exchange import Generation, Reply, parse_body
from api.openai.lower import asker, check_num_generations, sampling_params
from api.openai.schemas import ChatRequest
from api.openai.write import AnswerWriter, shown_logprob
from api.routes import EVENTS, Endpoint
from api.service import service_of


async def chat_completions(request: Request) -> Reply:
    """Answers a conversation."""
    service = service_of(request)
    engine = service.ready_engine()
    body = await parse_body(request, ChatRequest)
    service.check_model(body.model)
    check_num_generations(engine, 1, body.num_choices)
    sampling = sampling_params(
        engine, body, max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None)
    messages = [message.plain() for message in body.messages]
    template, who = body.template(), asker(request, body)
    generations = [Generation("messages", messages, sampling, choice, template, who)
                   for choice in range(body.num_choices)]
    return Reply(service, engine, generations, ChatWriter(body, engine.info), bool(body.stream))


class ChatWriter(AnswerWriter):
    """Deltas → chat.completion.chunk events, or one chat.completion document."""

    def __init__(self, request: ChatRequest, info: EngineInfo) -> None:
        super().__init__(request, info, "chatcmpl", "chat.completion.chunk", "chat.completion", request.num_choices)
        self._with_logprobs = bool(request.logprobs)
        self._echoed = _echoed(request)
        self._begun: set[int] = set()           # completions whose role is out

    def events(self, index: int, delta: TextDelta) -> bytes:
        events = b""
        self.count(index, delta)
        if index not in self._begun:
            self._begun.add(index)
            prompt = {"prompt_token_ids": delta.prompt_token_ids} if self.with_token_ids else {}
            events += self.chunk({**_choice(index, {"role": "assistant", "content": self._echoed}), **prompt,
                                  **self.prompt_details(delta)})
        if delta.text or delta.logprobs or (self.with_token_ids and delta.token_ids):
            events += self.chunk({**_choice(index, {"content": delta.text}), **self._details(delta)})
        if delta.finish is not None:
            self.add_usage(index, delta)
            events += self.chunk(_choice(index, {}, delta))
        return events

    def document(self, completions: Sequence[TextDelta]) -> bytes:
        choices = []
        for index, completion in enumerate(completions):
            self.add_usage(index, completion)
            choices.append({
                "index": index, "message": {"role": "assistant", "content": self._echoed + completion.text},
                "finish_reason": completion.finish, "stop_reason": completion.stop_reason, "logprobs": None,
                **self._details(completion), **self.prompt_details(completion)})
        prompt = {"prompt_token_ids": completions[0].prompt_token_ids} if self.with_token_ids else {}
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


def _choice(index: int, delta: dict[str, str], last: TextDelta | None = None) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
    return choice if last is None else {**choice, "finish_reason": last.finish, "stop_reason": last.stop_reason}


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {**_alternative(token), "top_logprobs": [_alternative(other) for other in token.top]}


def _alternative(token: TokenLogprob) -> dict[str, Any]:
    # `token` may be U+FFFD; `bytes` carry what the token is.
    return {"token": token.text, "logprob": shown_logprob(token.logprob), "bytes": list(token.raw)}


routes = [Endpoint("POST", "/v1/chat/completions", chat_completions, ChatRequest, EVENTS)]
