"""POST /v1/completions.

Source: OpenAI API reference, "Completions" (legacy); return_token_ids and stop_reason as vLLM has them.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from actors.messages import TextDelta, TokenLogprob
from api.exchange import Generation, Reply, parse_body
from api.openai.lower import asker, check_lengths, check_num_generations, of_choice, sampling_params
from api.openai.schemas import CompletionRequest
from api.openai.write import TRUNCATED, AnswerWriter, shown_logprob, shown_prompt, shown_token
from api.routes import EVENTS, Endpoint
from api.service import service_of
from api.surface import EngineSurface

DEFAULT_MAX_TOKENS = 16                         # OpenAI's


async def completions(request: Request) -> Reply:
    """Continues prompts."""
    service = service_of(request)
    engine = service.ready_engine()
    body = await parse_body(request, CompletionRequest)
    service.check_model(body.model)
    check_lengths(engine, body.prompt)
    check_num_generations(engine, len(body.prompt), body.num_choices)
    # Scoring without an answer asks for the prompt's logprobs, shown or not: there is nothing else to compute.
    scores_prompt = body.echo and (body.logprobs is not None or body.max_tokens == 0)
    nums_top = [num for num in (body.prompt_logprobs, (body.logprobs or 0) if scores_prompt else None)
                if num is not None]
    sampling = sampling_params(engine, body, body.max_tokens, DEFAULT_MAX_TOKENS, logprobs=body.logprobs,
                               prompt_logprobs=max(nums_top, default=None))
    who = asker(request, body)
    generations = [Generation(prompt.field, prompt.value, sampling if scores_prompt else of_choice(sampling, choice),
                              choice, asker=who)
                   for prompt in body.prompt for choice in range(body.num_choices)]
    return Reply(service, engine, generations, CompletionWriter(body, engine), bool(body.stream))


class CompletionWriter(AnswerWriter):
    """Deltas → text_completion events, or one text_completion document."""

    def __init__(self, request: CompletionRequest, engine: EngineSurface) -> None:
        num_completions = len(request.prompt) * request.num_choices
        super().__init__(request, engine.info, "cmpl", "text_completion", "text_completion", num_completions)
        self._prompts = request.prompt
        self._echo = bool(request.echo)
        self._num_logprobs = request.logprobs
        self._decode = engine.decode
        self._texts = [_Text() for _ in range(num_completions)]

    def events(self, index: int, delta: TextDelta) -> bytes:
        self.count(index, delta)
        content = self._content(index, delta)
        events = b""
        if content["text"] or content["logprobs"] or content.get("token_ids") or "prompt_token_ids" in content \
                or TRUNCATED in content:
            events += self.chunk({**content, "finish_reason": None})
        if delta.finish is not None:
            self.add_usage(index, delta)
            events += self.chunk({"index": index, "text": "", "logprobs": None, "finish_reason": delta.finish,
                                  "stop_reason": delta.stop_reason})
        return events

    def document(self, completions: Sequence[TextDelta]) -> bytes:
        choices: list[dict[str, Any]] = []
        scores: list[dict[str, Any] | None] = []
        for index, completion in enumerate(completions):
            self.add_usage(index, completion)
            choices.append({**self._content(index, completion), "finish_reason": completion.finish,
                            "stop_reason": completion.stop_reason})
            if self.num_prompt_logprobs is not None:
                if index % self.num_choices == 0:
                    scores = shown_prompt(completion.prompt_logprobs, self.num_prompt_logprobs)
                choices[-1]["prompt_logprobs"] = scores
        return self.answer(choices)

    def _content(self, index: int, delta: TextDelta) -> dict[str, Any]:
        """What a choice says about `delta`; the first time with the prompt, where it is echoed."""
        text, shown, tokens = self._texts[index], delta.text, delta.logprobs
        details: dict[str, Any] = {"token_ids": delta.token_ids} if self.with_token_ids else {}
        offsets: list[int] = []
        if not text.begun:
            text.begun = True
            details |= self.prompt_details(delta)
            if self.with_token_ids:
                details["prompt_token_ids"] = delta.prompt_token_ids
            if self._echo:
                prompt = self._prompt_text(index)
                shown, tokens = prompt + shown, delta.prompt_logprobs + tokens
                offsets = text.offsets(delta.prompt_logprobs)
                text.num_chars = len(prompt)
        offsets += text.offsets(delta.logprobs)
        logprobs = None if self._num_logprobs is None or not tokens else _columns(tokens, offsets, self._num_logprobs)
        return {"index": index, "text": shown, "logprobs": logprobs, **details}

    def _prompt_text(self, index: int) -> str:
        prompt = self._prompts[index // self.num_choices].value
        return prompt if isinstance(prompt, str) else self._decode(prompt)


class _Text:
    """How far one choice is."""

    def __init__(self) -> None:
        self.begun = False
        self.num_chars = 0                      # before the next token

    def offsets(self, tokens: Sequence[TokenLogprob]) -> list[int]:
        """Where in the choice's text these tokens, its next, begin.

        NOTE: a token that ends inside a character begins where that character does, as the token that completes it.
        """
        offsets = []
        for token in tokens:
            offsets.append(self.num_chars)
            self.num_chars += token.num_chars
        return offsets


def _columns(tokens: Sequence[TokenLogprob], offsets: list[int], num_top: int) -> dict[str, Any]:
    """One entry a token. The token itself is always among its `top_logprobs`, even if no others are asked for."""
    tops: list[dict[str, float | None] | None] = []
    for token in tokens:
        logprob = shown_logprob(token.logprob)
        if logprob is None:
            tops.append(None)
        else:
            others = {shown_token(other): shown_logprob(other.logprob) for other in token.top[:num_top]}
            tops.append({shown_token(token): logprob, **others})
    return {"tokens": [shown_token(token) for token in tokens],
            "token_logprobs": [shown_logprob(token.logprob) for token in tokens],
            "top_logprobs": tops, "text_offset": offsets}


routes = [Endpoint("POST", "/v1/completions", completions, CompletionRequest, EVENTS)]
