"""What chat and completions have in common on the way down: a request's fields become sampling parameters."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from actors.policy.admission import too_many_at_once
from actors.sampling_params import (
    ParameterError,
    SamplingParams,
    StructuredOutputs,
    structured_output,
    structured_outputs,
)
from api.errors import ApiError, bad_parameter
from api.exchange import Asker
from api.guard import tenant_of
from api.openai.schemas import GenerationRequest, NamedPrompt
from api.surface import EngineSurface

_SAMPLING_FIELDS = ("min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop",
                    "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens",
                    "presence_penalty", "frequency_penalty", "repetition_penalty", "allowed_token_ids", "bad_words",
                    "truncate_prompt_tokens")


def asker(http: Request, request: GenerationRequest) -> Asker:
    """NOTE: a key is known by its hash alone: what names a tenant may show in --debug, a key may not."""
    return Asker(priority=request.priority or 0, user=request.user or "", cache_salt=request.cache_salt or "",
                 tenant=tenant_of(http))


def check_lengths(engine: EngineSurface, prompts: Sequence[NamedPrompt]) -> None:
    """Millions of ids are refused here, before each is looked at again. Raises: ApiError (400)."""
    for field, prompt in prompts:
        if not isinstance(prompt, str) and len(prompt) > engine.info.max_model_len:
            raise ApiError(400, f"{field}: has {len(prompt)} tokens; this model's context is "
                           f"{engine.info.max_model_len}", param=field)


def check_num_generations(engine: EngineSurface, num_prompts: int, num_choices: int, prompts: str = "prompt") -> None:
    """More than can ever be let in together are refused before they are looked at. Raises: ApiError (400)."""
    info, num_generations = engine.info, num_prompts * num_choices
    if info.max_queued_requests is not None and num_generations > info.max_num_seqs + info.max_queued_requests:
        field = "n" if num_choices > 1 and num_prompts == 1 else prompts
        message = too_many_at_once(num_generations, info.max_num_seqs, info.max_queued_requests)
        raise ApiError(400, f"{field}: {message}", param=field)


def of_choice(sampling: SamplingParams, choice: int) -> SamplingParams:
    """A prompt's log-probabilities are computed once, with its first choice: the others may find it in the cache."""
    return replace(sampling, prompt_logprobs=None) if choice else sampling


def sampling_params(engine: EngineSurface, request: GenerationRequest, max_tokens: int | None,
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
        values["structured_outputs"] = wanted_form(request)
        return engine.default_sampling(**values)
    except ParameterError as error:
        raise bad_parameter(error) from None


def wanted_form(request: GenerationRequest) -> StructuredOutputs | None:
    """From response_format, structured_outputs, or vLLM's older guided_json and its like; at most one of them.

    Raises: ParameterError.
    """
    found: dict[str, StructuredOutputs] = {}
    form = request.response_format
    if form is not None and form.json_schema is not None:
        found["response_format"] = structured_output("json", form.json_schema.json_schema,
                                                     "response_format.json_schema.schema")
    elif form is not None and form.type == "json_object":
        found["response_format"] = structured_output("json", {"type": "object"}, "response_format")
    if request.structured_outputs is not None:
        found["structured_outputs"] = structured_outputs(request.structured_outputs.model_dump(by_alias=True))
    for kind in ("json", "regex", "choice", "grammar"):
        value = getattr(request, f"guided_{kind}")
        if value is not None:
            found[f"guided_{kind}"] = structured_output(kind, value, f"guided_{kind}")
    if len(found) > 1:
        raise ParameterError(list(found)[1], f"not with {list(found)[0]}: an answer has one form")
    return next(iter(found.values()), None)
