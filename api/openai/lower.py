"""What chat and completions have in common on the way down: a request's fields become sampling parameters."""
from __future__ import annotations

import hashlib
from typing import Any

from starlette.requests import Request

from actors.sampling_params import ParameterError, SamplingParams
from api.engine import Engine
from api.errors import bad_parameter
from api.exchange import Asker
from api.schemas import GenerationRequest

_SAMPLING_FIELDS = ("min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop",
                    "stop_token_ids", "ignore_eos", "skip_special_tokens", "presence_penalty", "frequency_penalty",
                    "repetition_penalty")


def asker(http: Request, request: GenerationRequest) -> Asker:
    """NOTE: a key is known by its hash alone: what names a tenant may show in --debug, a key may not."""
    key = http.headers.get("authorization", "")
    return Asker(priority=request.priority or 0, user=request.user or "", cache_salt=request.cache_salt or "",
                 tenant=hashlib.sha256(key.encode()).hexdigest()[:32] if key else "")


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
