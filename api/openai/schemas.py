"""Request bodies of OpenAI's dialect, with vLLM's additions."""
from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeAlias

from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from actors.sampling_params import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_PRIORITY,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
)
from api.openai.tool_schemas import Calls, NamedTool, Tool, ToolCall, ToolChoice, Tools, check_names
from api.schemas import MAX_SHOWN_CHARS, FieldFault, ParsedModel, shown

MAX_GENERATIONS = 1024                      # prompts × n
MAX_CHOICES = 16
MAX_MESSAGES = 4096
MAX_STOP_TOKEN_IDS = 1024
MAX_VOCAB = 1 << 19                         # of allowed_token_ids; the model's own is the limit
MAX_TEMPLATE_KWARGS = 64
MAX_NAME_CHARS = 1024                       # of user and cache_salt

# Fields that ask for something not supported, with the values that do not ask. None never asks.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "structural_tag": (), "json_schema": (), "grammar": ("",), "guided_whitespace_pattern": (),
    "use_beam_search": (False,), "beam_width": (1,), "length_penalty": (1,), "early_stopping": (False,),
    "suffix": ("",), "audio": (), "modalities": (["text"],), "prediction": (), "web_search_options": (),
    "store": (False,), "prompt_embeds": (), "documents": ([],), "mm_processor_kwargs": ({},),
    "reasoning_effort": ("none",), "verbosity": ("medium",), "include_reasoning": (True,),
    "thinking_token_budget": (), "chat_template": (),
    "spaces_between_special_tokens": (True,), "logits_processors": ([],), "vllm_xargs": ({},),
    "kv_transfer_params": (), "typical_p": (1,), "top_a": (0,), "tfs": (1,), "mirostat": (0,), "mirostat_mode": (0,),
    "dry_multiplier": (0,), "xtc_probability": (0,), "dynatemp_range": (0,), "top_n_sigma": (0, -1),
    "smoothing_factor": (0,),
}


TOKEN_ID_PATTERN = "^(0|-?[1-9][0-9]{0,18})$"
TokenId: TypeAlias = Annotated[int, Field(ge=0, le=2**31 - 1)]


class TextPart(ParsedModel):
    """Of a message's content."""
    type: Literal["text"]
    text: str


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
        if not re.fullmatch(TOKEN_ID_PATTERN, key):
            raise FieldFault(f"[{key[:MAX_SHOWN_CHARS]}]", "the key must be a token id")
    return {int(key): bias for key, bias in value.items()}


def _content(value: Any) -> str | list[dict[str, str]] | None:
    """A message's content: text, or text parts, which the chat template's renderer joins."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise FieldFault("", f"must be a string or a list of text parts, got {shown(value)}")
    for number, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise FieldFault(f"[{number}].type", f"only text is supported, got {shown(kind)}")
        if not isinstance(part.get("text"), str):
            raise FieldFault(f"[{number}].text", "must be a string")
    return [{"type": "text", "text": part["text"]} for part in value]


class NamedPrompt(NamedTuple):
    field: str                              # as errors call it: "prompt", or "prompt[3]" where there is a list
    value: str | list[int]


def _prompts(value: Any) -> list[NamedPrompt]:
    return prompt_list(value, "prompt")


def prompt_list(value: Any, field: str) -> list[NamedPrompt]:
    """Any of the four forms of `prompt` (text, token ids, lists of both) → one entry a prompt.

    NOTE: [] is one prompt without tokens; the engine starts it, as it does "", from a beginning-of-text token.
    """
    if isinstance(value, str):
        return [NamedPrompt(field, value)]
    if not isinstance(value, list):
        raise FieldFault("", "must be a string, a list of token ids, or a list of these")
    if not value or type(value[0]) is int:
        return [NamedPrompt(field, _token_ids("", value))]
    if len(value) > MAX_GENERATIONS:
        raise FieldFault("", f"at most {MAX_GENERATIONS} prompts, got {len(value)}")
    return [NamedPrompt(f"{field}[{number}]", prompt if isinstance(prompt, str) else _token_ids(f"[{number}]", prompt))
            for number, prompt in enumerate(value)]


def _token_ids(where: str, value: Any) -> list[int]:
    if not isinstance(value, list):
        raise FieldFault(where, f"must be a string or a list of token ids, got {shown(value)}")
    for number, token_id in enumerate(value):
        if type(token_id) is not int or token_id < 0:
            raise FieldFault(f"{where}[{number}]", f"must be a token id, got {shown(token_id)}")
    return value


StopTokenIds: TypeAlias = Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)]
StopString: TypeAlias = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopStrings: TypeAlias = Annotated[list[str] | None, BeforeValidator(
    _stop_strings,
    json_schema_input_type=StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None)]
LogitBias: TypeAlias = Annotated[dict[int, float] | None, BeforeValidator(
    _logit_bias, json_schema_input_type=Annotated[
        dict[Annotated[str, Field(pattern=TOKEN_ID_PATTERN)], Annotated[float, Field(ge=-100, le=100)]],
        Field(max_length=MAX_LOGIT_BIAS)] | None)]
Content: TypeAlias = Annotated[str | list[dict[str, str]] | None, PlainValidator(
    _content, json_schema_input_type=str | Annotated[list[TextPart], Field(min_length=1)] | None)]
Prompts: TypeAlias = Annotated[list[NamedPrompt], PlainValidator(
    _prompts, json_schema_input_type=str | Annotated[list[TokenId], Field(min_length=1)] | Annotated[
        list[str | Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=MAX_GENERATIONS)])]


# Checked where it is made a form: what is no schema has no better name than the field.
JsonSchema: TypeAlias = Annotated[Any, PlainValidator(
    lambda value: value, json_schema_input_type=dict[str, Any] | str | bool)]


class StreamOptions(ParsedModel):
    include_usage: bool | None = None           # a last chunk has the whole request's
    continuous_usage_stats: bool | None = None  # every chunk has its choice's so far


class JsonSchemaFormat(ParsedModel):
    """`strict` or not: the answer follows the schema."""
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    json_schema: Annotated[JsonSchema, Field(alias="schema")]


class ResponseFormat(ParsedModel):
    parts = {"json_schema": JsonSchemaFormat}

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise FieldFault("json_schema", "is required")
        if self.type != "json_schema" and self.json_schema is not None:
            raise FieldFault("json_schema", "only with type json_schema")
        return self


class StructuredOutputsObject(ParsedModel):
    """vLLM's. One of the first five."""
    unsupported = {"disable_additional_properties": (False,), "whitespace_pattern": (), "structural_tag": ()}

    json_schema: Annotated[JsonSchema | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool | None = None
    disable_fallback: bool | None = None        # there is none


class GenerationRequest(ParsedModel):
    """What chat and completions have in common. None: the request is silent."""
    parts = {"stream_options": StreamOptions, "response_format": ResponseFormat,
             "structured_outputs": StructuredOutputsObject}

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    best_of: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**63 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-2**63, le=2**63 - 1)] | None = None
    stop: StopStrings = None
    stop_token_ids: StopTokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    logit_bias: LogitBias = None
    allowed_token_ids: Annotated[list[int], Field(min_length=1, max_length=MAX_VOCAB, fail_fast=True)] | None = None
    bad_words: Annotated[list[str], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsObject | None = None
    guided_json: JsonSchema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    echo: bool | None = None
    user: Annotated[str, Field(max_length=MAX_NAME_CHARS)] | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    return_token_ids: bool | None = None
    return_metrics: bool | None = None          # how long the answer took

    @model_validator(mode="after")
    def _consistent(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise FieldFault("stream_options", "only with stream true")
        if self.prompt_logprobs is not None and self.stream:
            raise FieldFault("prompt_logprobs", "not with stream")
        if self.best_of not in (None, self.num_choices):
            raise FieldFault("best_of", f"only as many as n, which is {self.num_choices}, are supported")
        return self

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


class Message(ParsedModel):
    unsupported = {"function_call": (), "audio": (), "refusal": ("",)}
    parts = {"tool_calls": ToolCall}

    role: Annotated[str, Field(min_length=1)]
    content: Content = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Calls | None = None             # of an assistant
    reasoning_content: str | None = None        # likewise

    @model_validator(mode="after")
    def _consistent(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise FieldFault("content", "must be a string or a list of text parts")
        for name in ("tool_calls", "reasoning_content"):
            if getattr(self, name) and self.role != "assistant":
                raise FieldFault(name, "only an assistant has some")
        return self

    def text(self) -> str:
        """The content, its parts joined."""
        return self.content or "" if not isinstance(self.content, list) else "".join(
            part["text"] for part in self.content)

    def plain(self) -> dict[str, Any]:
        """As a chat template gets it."""
        fields = {"role": self.role, "content": self.content or "", "name": self.name,
                  "tool_call_id": self.tool_call_id,
                  "tool_calls": [call.plain() for call in self.tool_calls or ()] or None,
                  "reasoning_content": self.reasoning_content or None}
        return {key: value for key, value in fields.items() if value is not None}


Messages: TypeAlias = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class TemplateOptions(ParsedModel):
    """What a chat template is told beside the messages."""
    add_generation_prompt: bool | None = None   # None: unless the last message is continued
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=MAX_TEMPLATE_KWARGS)] | None = None
    tools: Tools | None = None

    @model_validator(mode="after")
    def _consistent_template(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise FieldFault("continue_final_message", "not with add_generation_prompt: the prompt ends with the last "
                             "message, or with the beginning of the next one")
        check_names(self.tools)
        return self

    def template(self) -> dict[str, Any]:
        """As the engine takes it."""
        begins_answer = not self.continue_final_message if self.add_generation_prompt is None else (
            self.add_generation_prompt)
        tools = {"tools": [tool.plain() for tool in self.tools]} if self.tools else {}
        return {"add_generation_prompt": begins_answer, "continue_final_message": bool(self.continue_final_message),
                "chat_template_kwargs": self.chat_template_kwargs or {}, **tools}


_OF_CHAT_ALONE = ("tools", "tool_choice", "include_reasoning", "reasoning_effort", "thinking_token_budget")


class ChatRequest(GenerationRequest, TemplateOptions):
    unsupported = {**{name: values for name, values in _UNSUPPORTED.items() if name not in _OF_CHAT_ALONE},
                   "add_special_tokens": (False,)}
    parts = {**GenerationRequest.parts, "messages": Message, "tools": Tool}

    messages: Messages
    tool_choice: ToolChoice = None              # None: auto, where there are tools
    parallel_tool_calls: bool | None = None     # None: an answer may have several calls, where its history may
    include_reasoning: bool | None = None       # None: thoughts are in the reply
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None   # None: a thought may have any
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _consistent_chat(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise FieldFault("top_logprobs", "only with logprobs true")
        if self.max_completion_tokens is not None and self.max_tokens not in (None, self.max_completion_tokens):
            raise FieldFault("max_completion_tokens", f"{self.max_completion_tokens} contradicts max_tokens "
                                 f"{self.max_tokens}")
        self._check_tool_choice()
        return self

    @classmethod
    def unknown_fields(cls, values: Mapping[str, Any]) -> list[str]:
        """NOTE: a call that is enforced is strict."""
        found = super().unknown_fields(values)
        if values.get("tool_choice") in (None, "auto", "none"):
            return found
        return [path for path in found if not re.fullmatch(r"tools\[\d+\]\.function\.strict", path)]

    def _check_tool_choice(self) -> None:
        choice = self.tool_choice
        if choice in (None, "none", "auto"):
            return
        if not self.tools:
            raise FieldFault("tool_choice", "there are no tools to call")
        if isinstance(choice, NamedTool) and choice.function.name not in [tool.function.name for tool in self.tools]:
            raise FieldFault("tool_choice.function.name", "no tool has this name")


class CompletionRequest(GenerationRequest):
    unsupported = {**_UNSUPPORTED, "add_special_tokens": (True,)}

    prompt: Prompts
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _consistent_completion(self) -> CompletionRequest:
        if len(self.prompt) * self.num_choices > MAX_GENERATIONS:
            raise FieldFault("prompt", f"at most {MAX_GENERATIONS} prompts × n, got {len(self.prompt)} × {self.n}")
        if self.max_tokens == 0 and not self.echo:
            raise FieldFault("max_tokens", "must be at least 1 (0 only with echo)")
        if self.echo and self.truncate_prompt_tokens is not None:
            raise FieldFault("truncate_prompt_tokens", "not with echo")
        return self
