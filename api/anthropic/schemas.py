"""Request bodies of Anthropic's dialect."""
from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from actors.sampling_params import MAX_STOP_CHARS, MAX_STOP_STRINGS
from api.anthropic.blocks import AnyBlock, Blocks, CacheControl, TextBlock, Texts, ToolUseBlock
from api.schemas import FieldFault, ParsedModel

MAX_TURNS = 4096
MAX_TOOLS = 512
MAX_NAME_CHARS = 1024                       # of metadata.user_id

_ROLES = {"thinking": "assistant", "tool_use": "assistant", "tool_result": "user"}      # of blocks, whose they are

# Fields that ask for something not supported, with the values that do not ask. None never asks.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "container": (), "mcp_servers": ([],), "context_management": ({},), "output_format": (),
    "service_tier": ("auto", "standard_only"), "inference_geo": (), "speed": ("standard",), "diagnostics": (),
}


class Turn(ParsedModel):
    parts = {"content": AnyBlock}

    role: Literal["user", "assistant", "system"]
    content: Blocks

    @model_validator(mode="after")
    def _consistent(self) -> Turn:
        for number, block in enumerate(self.content):
            if _ROLES.get(block.type, self.role) != self.role:
                raise FieldFault(f"content[{number}].type", f"{block.type} is not for the role {self.role}")
        return self


class ToolDefinition(ParsedModel):
    """Of the caller's own. input_schema: a JSON schema of an object.

    NOTE: `strict` is not known: it is told of with the fields that nothing comes of, as in OpenAI's dialect.
    """
    unsupported = {"defer_loading": (False,), "allowed_callers": (["direct"],)}
    parts = {"cache_control": CacheControl}

    type: Literal["custom"] | None = None   # before all else: what others are is told by it
    name: Annotated[str, Field(pattern="^[A-Za-z0-9_.-]{1,128}$")]
    input_schema: dict[str, Any]
    description: str | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None   # input always comes as it is written


class ToolChoice(ParsedModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise FieldFault("name", "is for type tool, which has to have one")
        return self


class Thinking(ParsedModel):
    """budget_tokens: that a thought may have before it is ended.

    NOTE: "adaptive" lets the model think as it likes, or not at all if it knows no thoughts.
    """
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    display: Literal["summarized", "omitted"] | None = None     # what is shown is the thought itself

    @model_validator(mode="after")
    def _consistent(self) -> Thinking:
        if (self.type == "enabled") != (self.budget_tokens is not None):
            raise FieldFault("budget_tokens", "is for type enabled, which has to have it")
        return self


class JsonFormat(ParsedModel):
    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(ParsedModel):
    unsupported = {"effort": ()}
    parts = {"format": JsonFormat}

    format: JsonFormat | None = None        # what form the answer has; None: any


class CountTokensRequest(ParsedModel):
    """A conversation."""
    unsupported = _UNSUPPORTED
    parts = {"messages": Turn, "system": TextBlock, "cache_control": CacheControl, "tools": ToolDefinition,
             "tool_choice": ToolChoice, "thinking": Thinking, "output_config": OutputConfig}

    model: str
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_TURNS, fail_fast=True)]
    system: Texts | None = None
    cache_control: CacheControl | None = None
    tools: Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    @model_validator(mode="after")
    def _consistent(self) -> CountTokensRequest:
        last = self.messages[-1]
        if any(isinstance(block, ToolUseBlock) for block in last.content):
            raise FieldFault(f"messages[{len(self.messages) - 1}].content", "has a tool_use without its tool_result")
        names: set[str] = set()
        for number, tool in enumerate(self.tools or ()):
            if tool.name in names:
                raise FieldFault(f"tools[{number}].name", "another tool has it")
            names.add(tool.name)
        choice = self.tool_choice
        if choice is not None and choice.type in ("any", "tool") and not names:
            raise FieldFault("tool_choice", "there are no tools to call")
        if choice is not None and choice.name is not None and choice.name not in names:
            raise FieldFault("tool_choice.name", "no tool has this name")
        return self


class Metadata(ParsedModel):
    user_id: Annotated[str, Field(max_length=MAX_NAME_CHARS)] | None = None


def _stop_sequences(value: Any) -> Any:
    if isinstance(value, list) and len(value) > MAX_STOP_STRINGS:
        raise FieldFault("", f"at most {MAX_STOP_STRINGS} strings, got {len(value)}")
    return value


StopSequences: TypeAlias = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]], BeforeValidator(_stop_sequences),
    Field(max_length=MAX_STOP_STRINGS)]


class MessagesRequest(CountTokensRequest):
    """A conversation to go on with."""
    parts = {**CountTokensRequest.parts, "metadata": Metadata}

    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)]
    metadata: Metadata | None = None
    stop_sequences: StopSequences | None = None
    stream: bool | None = None
    return_metrics: bool | None = None      # not Anthropic's: how long the answer took
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**63 - 1)] | None = None

    @model_validator(mode="after")
    def _consistent_budget(self) -> MessagesRequest:
        budget = None if self.thinking is None else self.thinking.budget_tokens
        if budget is not None and budget >= self.max_tokens:
            raise FieldFault("thinking.budget_tokens", f"must be less than max_tokens, which is {self.max_tokens}")
        return self
