"""What chat and completions have in common on the way down: a request's fields become sampling parameters."""
from __future__ import annotations

from typing import Any

from starlette.requests import Request

from actors.policy.admission import too_many_at_once
from actors.sampling_params import ParameterError, SamplingParams
from api.engine import Engine
from api.errors import ApiError, bad_parameter
from api.exchange import Asker
from api.guard import tenant_of
from api.openai.schemas import GenerationRequest

_SAMPLING_FIELDS = ("min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop",
                    "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens",
                    "presence_penalty", "frequency_penalty", "repetition_penalty", "allowed_token_ids", "bad_words",
                    "truncate_prompt_tokens")


def asker(http: Request, request: GenerationRequest) -> Asker:
    """NOTE: a key is known by its hash alone: what names a tenant may show in --debug, a key may not."""
    return Asker(priority=request.priority or 0, user=request.user or "", cache_salt=request.cache_salt or "",
                 tenant=tenant_of(http))


def check_num_generations(engine: Engine, num_prompts: int, num_choices: int) -> None:
    """More than can ever be let in together are refused before they are looked at. Raises: ApiError (400)."""
    info, num_generations = engine.info, num_prompts * num_choices
    if info.max_queued_requests is not None and num_generations > info.max_num_seqs + info.max_queued_requests:
        field = "n" if num_prompts == 1 else "prompt"
        message = too_many_at_once(num_generations, info.max_num_seqs, info.max_queued_requests)
        raise ApiError(400, f"{field}: {message}", param=field)


def sampling_params(engine: Engine, request: GenerationRequest, max_tokens: int | None,
                    default_max_tokens: int | None = None, **given: Any) -> SamplingParams:
    """The request's own values, then the model's defaults, then OpenAI's.

    max_tokens, given: what the endpoint has found out itself; None stays silent. Raises: ApiError (400).
    """
    if max_tokens is None:
        max_tokens = engine.info.default_sampling.get("max_tokens", default_max_tokens)
        if max_tokens is not None:              # a limit that the caller did not set gives way to one that he did
            max_tokens = max(max_tokens, request.min_tokens or 0)
    values = {name: getattr(request, name) for name in _SAMPLING_FIELDS} | given | {"max_tokens": max_tokens}
    if request.logit_bias is not None:
        values["logit_bias"] = tuple(request.logit_bias.items())
    values = {name: tuple(value) if isinstance(value, list) else value
              for name, value in values.items() if value is not None}
    try:
        return engine.default_sampling(**values)
    except ParameterError as error:
        raise bad_parameter(error) from None
