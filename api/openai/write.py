"""What chat and completions have in common on the way up: an answer's frame, usage, and how a token shows itself."""
from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

import orjson

from actors.messages import TextDelta, TokenLogprob
from api.errors import ApiError
from api.openai.schemas import GenerationRequest
from api.sse import DONE, KEEP_ALIVE, event
from api.surface import EngineInfo
from api.timings import Times

LOWEST_LOGPROB = -9999.0                        # JSON has no -inf
TRUNCATED = "num_truncated_prompt_tokens"       # of a choice whose request allowed it


class AnswerWriter:
    """The frame round the choices of one answer. Usage counts a prompt once, whatever n is, and all completions."""
    keep_alive = KEEP_ALIVE
    metrics: Times | None = None

    def __init__(self, request: GenerationRequest, info: EngineInfo, id_prefix: str, chunk_kind: str,
                 document_kind: str, num_completions: int, has_thoughts: bool = False) -> None:
        """has_thoughts: answers may; usage tells of them."""
        # NOTE: nothing inside is keyed by this id, nor by one that a client sent: two requests never share a key.
        self.answer_id: str = f"{id_prefix}-{uuid.uuid4().hex}"
        head = {"id": self.answer_id, "created": int(time.time()), "model": info.model}
        self._chunk_head = {**head, "object": chunk_kind}
        self._document_head = {**head, "object": document_kind}
        self.num_choices = request.num_choices
        self._with_usage = request.include_usage
        # Every chunk of a stream begins and ends alike: only its choice is written anew.
        self._before = b"data: " + orjson.dumps(self._chunk_head)[:-1] + b',"choices":['
        self._after = b'],"usage":null}\n\n' if self._with_usage else b"]}\n\n"
        self._continuous = request.continuous_usage
        self._counts = [[0, 0] for _ in range(num_completions)] if self._continuous else []     # prompt, answer
        self._with_truncation = request.truncate_prompt_tokens is not None
        self._num_prompt_tokens = self._num_cached_tokens = self._num_output_tokens = 0
        self._num_reasoning_tokens = 0 if has_thoughts else None
        self._cache_misses: list[str] | None = [] if info.debug else None
        self.with_token_ids = bool(request.return_token_ids)
        self.wants_metrics = bool(request.return_metrics)
        self.num_prompt_logprobs = request.prompt_logprobs

    def add_usage(self, index: int, completion: TextDelta) -> None:
        """`index` counts prompts × choices; `completion` is its last delta, or all of it."""
        usage = completion.usage
        assert usage is not None, "the engine gives usage with a completion's end"
        self._num_output_tokens += usage.num_output_tokens
        if self._num_reasoning_tokens is not None:
            self._num_reasoning_tokens += usage.num_reasoning_tokens
        if index % self.num_choices == 0:
            self._num_prompt_tokens += usage.num_prompt_tokens
            self._num_cached_tokens += usage.num_cached_tokens
            if self._cache_misses is not None:
                self._cache_misses.append(usage.cache_miss)

    def count(self, index: int, delta: TextDelta) -> None:
        """What chunks of this choice say of usage from now on, where they do."""
        if self._continuous:
            counts = self._counts[index]
            counts[0] += len(delta.prompt_token_ids)
            counts[1] += len(delta.token_ids)

    def prompt_details(self, first: TextDelta) -> dict[str, Any]:
        """What a choice says beside its text when it begins."""
        return {TRUNCATED: first.num_truncated_tokens} if self._with_truncation else {}

    def chunk(self, choice: dict[str, Any]) -> bytes:
        if not self._continuous:
            return self._before + orjson.dumps(choice) + self._after
        num_prompt_tokens, num_output_tokens = self._counts[choice["index"]]
        usage = {"prompt_tokens": num_prompt_tokens, "completion_tokens": num_output_tokens,
                 "total_tokens": num_prompt_tokens + num_output_tokens}
        return self._before + orjson.dumps(choice) + b'],"usage":' + orjson.dumps(usage) + b"}\n\n"

    def last_events(self) -> bytes:
        """NOTE: a chunk without choices comes for who asks for it only: not all clients expect one."""
        if not self._with_usage and not self.wants_metrics:
            return DONE
        usage = {"usage": self._usage()} if self._with_usage else {}
        return event({**self._chunk_head, "choices": [], **usage, **self._metrics()}) + DONE

    def error_event(self, error: ApiError) -> bytes:
        return b"data: " + error.body() + b"\n\n"

    def answer(self, choices: list[dict[str, Any]], **extra: Any) -> bytes:
        return orjson.dumps({**self._document_head, "choices": choices, "usage": self._usage(), **self._metrics(),
                             **extra})

    def _metrics(self) -> dict[str, Any]:
        return {"metrics": self.metrics} if self.wants_metrics or self.metrics is not None else {}

    def _usage(self) -> dict[str, Any]:
        details: dict[str, Any] = {"cached_tokens": self._num_cached_tokens}
        if self._cache_misses is not None:      # with --debug: why no more of each prompt was found
            details["cache_miss"] = self._cache_misses
        return {"prompt_tokens": self._num_prompt_tokens, "completion_tokens": self._num_output_tokens,
                "total_tokens": self._num_prompt_tokens + self._num_output_tokens,
                "prompt_tokens_details": details, **self._output_details()}

    def _output_details(self) -> dict[str, Any]:
        return {} if self._num_reasoning_tokens is None else {
            "completion_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens}}


def shown_logprob(logprob: float) -> float | None:
    """None for nan: a prompt's first token has none."""
    return None if logprob != logprob else max(logprob, LOWEST_LOGPROB)


def shown_prompt(tokens: Sequence[TokenLogprob], num_top: int) -> list[dict[str, Any] | None]:
    """A prompt's tokens, as vLLM shows them: by their ids, each with the best `num_top` in its place; the first has
    none. NOTE: the rank of a token that is not among these is not known.
    """
    shown: list[dict[str, Any] | None] = []
    for token in tokens:
        if token.logprob != token.logprob:
            shown.append(None)
            continue
        ranks = {other.token_id: rank for rank, other in enumerate(token.top[:num_top], 1)}
        shown.append({str(one.token_id): {"logprob": shown_logprob(one.logprob), "rank": ranks.get(one.token_id),
                                          "decoded_token": one.text} for one in (token, *token.top[:num_top])})
    return shown


def shown_token(token: TokenLogprob) -> str:
    r"""The token's text; "bytes:\xe2\x82" where it is no text by itself, so that two such tokens stay two."""
    if "\ufffd" in token.text and token.text.encode() != token.raw:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.raw)
    return token.text
