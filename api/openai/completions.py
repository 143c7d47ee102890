"""POST /v1/completions.

Source: OpenAI API reference, "Completions" (legacy); return_token_ids and stop_reason as vLLM has them.
"""
from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.routing import Route

from actors.messages import TextDelta, TokenLogprob
from actors.output import merge
from api.engine import Engine
from api.errors import ApiError
from api.exchange import Generation, Reply, parse_body
from api.openai.lower import sampling_params
from api.openai.write import AnswerWriter, shown_logprob, shown_token
from api.schemas import CompletionRequest
from api.service import service_of

DEFAULT_MAX_TOKENS = 16                         # OpenAI's


async def completions(request: Request) -> Reply:
    service = service_of(request)
    engine = service.ready_engine()
    body = await parse_body(request, CompletionRequest)
    service.check_model(body.model)
    _check_lengths(engine, body.prompt)
    max_tokens = body.max_tokens
    if max_tokens is None:
        max_tokens = engine.info.default_sampling.get("max_tokens", max(DEFAULT_MAX_TOKENS, body.min_tokens or 0))
    # Scoring without an answer asks for the prompt's logprobs, shown or not: there is nothing else to compute.
    scores_prompt = body.echo and (body.logprobs is not None or max_tokens == 0)
    sampling = sampling_params(engine, body, max_tokens=max_tokens, logprobs=body.logprobs,
                               prompt_logprobs=(body.logprobs or 0) if scores_prompt else None)
    generations = [Generation(prompt, sampling, choice) for prompt in body.prompt
                   for choice in range(body.num_choices)]
    return Reply(service, engine, generations, CompletionWriter(body, engine), bool(body.stream))


def _check_lengths(engine: Engine, prompts: Sequence[str | list[int]]) -> None:
    """Millions of ids are refused here, before each is looked at again. Raises: ApiError (400)."""
    for number, prompt in enumerate(prompts):
        if not isinstance(prompt, str) and len(prompt) > engine.info.max_model_len:
            raise ApiError(400, f"prompt[{number}]: has {len(prompt)} tokens; this model's context is "
                           f"{engine.info.max_model_len}", param="prompt")


class CompletionWriter(AnswerWriter):
    """Deltas → text_completion events, or one text_completion document."""

    def __init__(self, request: CompletionRequest, engine: Engine) -> None:
        super().__init__(request, engine.info.model, "cmpl", "text_completion", "text_completion")
        self._prompts = request.prompt
        self._echo = bool(request.echo)
        self._num_top = request.logprobs        # None: no logprobs in the answer
        self._decode = engine.decode
        self._texts = [_Text() for _ in range(len(self._prompts) * request.num_choices)]

    def events(self, index: int, delta: TextDelta) -> bytes:
        text = self._texts[index]
        if self._echo and not text.begun:
            # The prompt goes first, with its logprobs, which may come in several deltas before the first token.
            text.held.append(delta)
            if not delta.token_ids and delta.finish is None:
                return b""
            delta = merge(text.held)
        content = self._content(index, delta)
        events = b""
        if content["text"] or content["logprobs"] or content.get("token_ids") or "prompt_token_ids" in content:
            events += self.chunk({**content, "finish_reason": None})
        if delta.finish is not None:
            self.add_usage(index, delta)
            events += self.chunk({"index": index, "text": "", "logprobs": None, "finish_reason": delta.finish,
                                  "stop_reason": delta.stop_reason})
        return events

    def document(self, completions: Sequence[TextDelta]) -> bytes:
        choices = []
        for index, completion in enumerate(completions):
            self.add_usage(index, completion)
            choices.append({**self._content(index, completion), "finish_reason": completion.finish,
                            "stop_reason": completion.stop_reason})
        return self.answer(choices)

    def _content(self, index: int, delta: TextDelta) -> dict[str, Any]:
        """What a choice says about `delta`; the first time with the prompt, where it is echoed."""
        text, shown, tokens = self._texts[index], delta.text, delta.logprobs
        details: dict[str, Any] = {"token_ids": delta.token_ids} if self.with_token_ids else {}
        if not text.begun:
            text.begun = True
            if self.with_token_ids:
                details["prompt_token_ids"] = delta.prompt_token_ids
            if self._echo:
                shown, tokens = self._prompt_text(index) + shown, delta.prompt_logprobs + tokens
        logprobs = text.logprobs(tokens, self._num_top) if self._num_top is not None and tokens else None
        return {"index": index, "text": shown, "logprobs": logprobs, **details}

    def _prompt_text(self, index: int) -> str:
        prompt = self._prompts[index // self.num_choices]
        return prompt if isinstance(prompt, str) else self._decode(prompt)


class _Text:
    """How far one choice is."""

    def __init__(self) -> None:
        self.begun = False
        self.held: list[TextDelta] = []
        self._num_chars = 0
        # Tokens may end inside a character; it counts from the token that completes it.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def logprobs(self, tokens: Sequence[TokenLogprob], num_top: int) -> dict[str, Any]:
        """Columns, one entry a token. The token itself is always among its `top_logprobs`."""
        offsets: list[int] = []
        tops: list[dict[str, float | None] | None] = []
        for token in tokens:
            offsets.append(self._num_chars)
            self._num_chars += len(self._decoder.decode(token.raw))
            logprob = shown_logprob(token.logprob)
            if num_top == 0 or logprob is None:
                tops.append(None)
            else:
                top = {shown_token(other): shown_logprob(other.logprob) for other in token.top}
                tops.append({shown_token(token): logprob, **top})
        return {"tokens": [shown_token(token) for token in tokens],
                "token_logprobs": [shown_logprob(token.logprob) for token in tokens],
                "top_logprobs": tops, "text_offset": offsets}


routes = [Route("/v1/completions", completions, methods=["POST"])]
