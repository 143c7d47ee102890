"""Request bodies of the OpenAI dialect: parsed from JSON, checked strictly, errors naming the field.

A field that is unknown here is ignored. One that is known but not supported is refused by name unless it has the value
that asks for nothing: no request is answered as if a part of it had not been there.
"""
from __future__ import annotations

import json
import re
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError, model_validator

from actors.sampling_params import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_PRIORITY, MAX_STOP_STRINGS
from api.errors import ApiError

MAX_CONTAINERS = 500_000                    # JSON lists and objects in a body: each costs some 60 bytes and 0.1 µs
MAX_GENERATIONS = 1024                      # prompts × n
MAX_CHOICES = 16
MAX_MESSAGES = 4096
MAX_STOP_TOKEN_IDS = 1024
MAX_NAME_CHARS = 1024                       # of user and cache_salt
MAX_SEARCHED_BYTES = 1 << 20                # bodies past this get no field path for characters that are no text
MAX_SHOWN_CHARS = 80                        # of a client's value or key inside an error

# Fields that ask for something not supported yet, with the values that do not ask. None never asks.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "structured_outputs": (), "guided_json": (), "guided_regex": (),
    "guided_choice": (), "guided_grammar": (), "structural_tag": (), "json_schema": (), "grammar": ("",),
    "best_of": (1,), "use_beam_search": (False,), "beam_width": (1,), "length_penalty": (1,),
    "early_stopping": (False,), "suffix": ("",),
    "audio": (), "modalities": (["text"],), "prediction": (), "web_search_options": (), "store": (False,),
    "prompt_embeds": (), "documents": ([],), "mm_processor_kwargs": ({},),
    "reasoning_effort": ("none",), "verbosity": ("medium",), "include_reasoning": (True,),
    "thinking_token_budget": (),
    "chat_template": (), "chat_template_kwargs": ({},), "continue_final_message": (False,),
    "allowed_token_ids": (), "bad_words": ([],), "include_stop_str_in_output": (False,), "prompt_logprobs": (),
    "truncate_prompt_tokens": (), "spaces_between_special_tokens": (True,), 
    "logits_processors": ([],), "vllm_xargs": ({},), "kv_transfer_params": (),
    "typical_p": (1,), "top_a": (0,), "tfs": (1,), "mirostat": (0,), "mirostat_mode": (0,), "dry_multiplier": (0,),
    "xtc_probability": (0,), "dynatemp_range": (0,), "top_n_sigma": (0, -1), "smoothing_factor": (0,),
}
UNSUPPORTED_OF_MESSAGE: dict[str, tuple[Any, ...]] = {
    "tool_calls": ([],), "function_call": (), "audio": (), "refusal": ("",)}


class FieldFault(ValueError):
    """What a validator below found. `where` is the path from the validated value to the fault: "[2].text", or ""."""

    def __init__(self, where: str, message: str) -> None:
        super().__init__(message)
        self.where = where
        self.message = message


class ParsedModel(BaseModel):
    """Strict: no string becomes a number, no fraction an integer."""
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


def _refuse_unsupported(values: Any, unsupported: dict[str, tuple[Any, ...]]) -> Any:
    if isinstance(values, dict):
        for name, value in values.items():
            if name in unsupported and value is not None and value not in unsupported[name]:
                raise FieldFault(name, "not supported yet")
    return values


def _stop_strings(value: Any) -> Any:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and len(value) > MAX_STOP_STRINGS:
        raise FieldFault("", f"at most {MAX_STOP_STRINGS} strings, got {len(value)}")
    return value


def _logit_bias(value: Any) -> Any:
    """JSON object keys are strings: {"17": -100} → {17: -100}."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_LOGIT_BIAS:
        raise FieldFault("", f"at most {MAX_LOGIT_BIAS} entries, got {len(value)}")
    for key in value:
        if not re.fullmatch(r"0|-?[1-9][0-9]{0,18}", key):
            raise FieldFault(f"[{key[:MAX_SHOWN_CHARS]}]", "the key must be a token id")
    return {int(key): bias for key, bias in value.items()}


def _content(value: Any) -> str | list[dict[str, str]] | None:
    """A message's content: text, or text parts, which the chat template's renderer joins."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise FieldFault("", f"must be a string or a list of text parts, got {_shown(value)}")
    for number, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise FieldFault(f"[{number}].type", f"only text is supported, got {_shown(kind)}")
        if not isinstance(part.get("text"), str):
            raise FieldFault(f"[{number}].text", "must be a string")
    return [{"type": "text", "text": part["text"]} for part in value]


class NamedPrompt(NamedTuple):
    field: str                              # as errors call it: "prompt", or "prompt[3]" where there is a list
    value: str | list[int]


def _prompt_list(value: Any) -> list[NamedPrompt]:
    """Any of the four forms of `prompt` (text, token ids, lists of both) → one entry a prompt.

    NOTE: [] is one prompt without tokens; the engine starts it, as it does "", from a beginning-of-text token.
    """
    if isinstance(value, str):
        return [NamedPrompt("prompt", value)]
    if not isinstance(value, list):
        raise FieldFault("", "must be a string, a list of token ids, or a list of these")
    if not value or type(value[0]) is int:
        return [NamedPrompt("prompt", _token_ids("", value))]
    if len(value) > MAX_GENERATIONS:
        raise FieldFault("", f"at most {MAX_GENERATIONS} prompts, got {len(value)}")
    return [NamedPrompt(f"prompt[{number}]", prompt if isinstance(prompt, str) else _token_ids(f"[{number}]", prompt))
            for number, prompt in enumerate(value)]


def _token_ids(where: str, value: Any) -> list[int]:
    if not isinstance(value, list):
        raise FieldFault(where, f"must be a string or a list of token ids, got {_shown(value)}")
    for number, token_id in enumerate(value):
        if type(token_id) is not int or token_id < 0:
            raise FieldFault(f"{where}[{number}]", f"must be a token id, got {_shown(token_id)}")
    return value


TokenIds: TypeAlias = Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)]


class StreamOptions(ParsedModel):
    include_usage: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, values: Any) -> Any:
        return _refuse_unsupported(values, {"continuous_usage_stats": (False,)})


class GenerationRequest(ParsedModel):
    """What chat and completions have in common. None: the request is silent."""
    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Annotated[list[str] | None, BeforeValidator(_stop_strings)] = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[int, float] | None, BeforeValidator(_logit_bias)] = None
    user: Annotated[str, Field(max_length=MAX_NAME_CHARS)] | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)] | None = None
    return_token_ids: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, values: Any) -> Any:
        return _refuse_unsupported(values, UNSUPPORTED)

    @model_validator(mode="after")
    def _consistent(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise FieldFault("stream_options", "only with stream true")
        return self

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class Message(ParsedModel):
    role: Annotated[str, Field(min_length=1)]
    content: Annotated[str | list[dict[str, str]] | None, PlainValidator(_content)] = None
    name: str | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, values: Any) -> Any:
        return _refuse_unsupported(values, UNSUPPORTED_OF_MESSAGE)

    @model_validator(mode="after")
    def _consistent(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise FieldFault("content", "must be a string or a list of text parts")
        return self

    def plain(self) -> dict[str, Any]:
        """As a chat template gets it."""
        fields = {"role": self.role, "content": self.content or "", "name": self.name,
                  "tool_call_id": self.tool_call_id}
        return {key: value for key, value in fields.items() if value is not None}


class ChatRequest(GenerationRequest):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _no_echo(cls, values: Any) -> Any:
        return _refuse_unsupported(values, {"echo": (False,)})

    @model_validator(mode="after")
    def _consistent_chat(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise FieldFault("top_logprobs", "only with logprobs true")
        if self.max_completion_tokens is not None and self.max_tokens not in (None, self.max_completion_tokens):
            raise FieldFault("max_completion_tokens", f"{self.max_completion_tokens} contradicts max_tokens "
                                 f"{self.max_tokens}")
        return self


class CompletionRequest(GenerationRequest):
    prompt: Annotated[list[NamedPrompt], PlainValidator(_prompt_list)]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _consistent_completion(self) -> CompletionRequest:
        if len(self.prompt) * self.num_choices > MAX_GENERATIONS:
            raise FieldFault("prompt", f"at most {MAX_GENERATIONS} prompts × n, got {len(self.prompt)} × {self.n}")
        if self.max_tokens == 0 and not self.echo:
            raise FieldFault("max_tokens", "must be at least 1 (0 only with echo)")
        return self


Request = TypeVar("Request", bound=ParsedModel)


def parse(body: bytes, schema: type[Request]) -> Request:
    """Raises: ApiError (400) naming the field."""
    if body.count(b"[") + body.count(b"{") > MAX_CONTAINERS:
        raise ApiError(400, f"The body holds more than {MAX_CONTAINERS} lists and objects.")
    try:
        values = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        path = _path_of_bad_text(body) if len(body) <= MAX_SEARCHED_BYTES else None
        if path is not None:
            raise _bad_field(path, "holds a lone surrogate or bytes that are not UTF-8") from None
        raise ApiError(400, f"The body is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ApiError(400, "The body must be a JSON object.")
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
    path, cause = _path(fault["loc"]), fault.get("ctx", {}).get("error")
    if isinstance(cause, FieldFault):
        separator = "." if path and cause.where[:1] not in ("", "[") else ""
        raise _bad_field(path + separator + cause.where, cause.message)
    if fault["type"] == "missing":
        raise _bad_field(path, "is required")
    raise _bad_field(path, f"{fault['msg']}, got {_shown(fault['input'])}")


def _bad_field(path: str, message: str) -> ApiError:
    return ApiError(400, f"{path}: {message}", param=path)


def _path(keys: tuple[str | int, ...]) -> str:
    """("messages", 0, "content") → "messages[0].content"."""
    path = ""
    for key in keys:
        if isinstance(key, int):
            path += f"[{key}]"
        else:
            path += f".{key[:MAX_SHOWN_CHARS]}" if path else key[:MAX_SHOWN_CHARS]
    return path


def _shown(value: Any) -> str:
    """A short form of a client's value; never the inside of a list or object."""
    if isinstance(value, (list, dict)):
        return f"a list of {len(value)}" if isinstance(value, list) else "an object"
    text = repr(value[:MAX_SHOWN_CHARS] if isinstance(value, str) else value)
    return text[:MAX_SHOWN_CHARS]


def _path_of_bad_text(body: bytes) -> str | None:
    """Where a body that is JSON but for its characters holds one that UTF-8 cannot carry."""
    try:
        values = json.loads(body.decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError):
        return None
    todo: list[tuple[tuple[str | int, ...], Any]] = [((), values)]
    while todo:
        keys, value = todo.pop()
        if isinstance(value, str):
            if not _is_text(value):
                return _path(keys)
        elif isinstance(value, list):
            todo += [((*keys, number), item) for number, item in enumerate(value)]
        elif isinstance(value, dict):
            for key, item in value.items():
                if not _is_text(key):
                    return _path((*keys, key.encode("utf-8", "replace").decode()))
                todo.append(((*keys, key), item))
    return None


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
