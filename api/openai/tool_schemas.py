"""Tools in request bodies of OpenAI's dialect, and calls of them in the messages."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, PlainValidator, ValidationError, field_validator

from api.schemas import FieldFault, ParsedModel, shown
from weights.chat_template import call_arguments

MAX_TOOLS = 512
MAX_CALLS = 512                             # of one message
MAX_ID_CHARS = 256
TOOL_NAME_PATTERN = "^[A-Za-z0-9_.-]{1,64}$"

ToolName: TypeAlias = Annotated[str, Field(pattern=TOOL_NAME_PATTERN)]


class FunctionDefinition(ParsedModel):
    """parameters: a JSON schema; None: there are none.

    NOTE: `strict` true asks for more than reading calls can give. Most clients set it unasked, so it is not refused but
    told of with the fields that nothing comes of.
    """
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @classmethod
    def unknown_fields(cls, values: Mapping[str, Any]) -> list[str]:
        return [*super().unknown_fields(values), *(["strict"] if values.get("strict") else [])]

    @property
    def parameter_names(self) -> list[str]:
        properties = (self.parameters or {}).get("properties")
        return list(properties) if isinstance(properties, dict) else []


class Tool(ParsedModel):
    parts = {"function": FunctionDefinition}

    type: Literal["function"]
    function: FunctionDefinition

    def plain(self) -> dict[str, Any]:
        """As a chat template gets it."""
        function: dict[str, Any] = {"name": self.function.name}
        if self.function.description is not None:
            function["description"] = self.function.description
        parameters = self.function.parameters
        function["parameters"] = {"type": "object", "properties": {}} if parameters is None else parameters
        return {"type": "function", "function": function}


class ToolNamed(ParsedModel):
    name: ToolName


class NamedTool(ParsedModel):
    """A tool that has to be called."""
    type: Literal["function"]
    function: ToolNamed


def _tool_choice(value: Any) -> Any:
    if value is None or value in ("none", "auto", "required"):
        return value
    if isinstance(value, dict) and value.get("type") == "function":
        try:
            return NamedTool.model_validate(value)
        except ValidationError:
            raise FieldFault("function.name", "must be the name of a tool") from None
    raise FieldFault("", f"must be none, auto, required, or name a function, got {shown(value)}")


ToolChoice: TypeAlias = Annotated[
    Literal["none", "auto", "required"] | NamedTool | None,
    PlainValidator(_tool_choice, json_schema_input_type=Literal["none", "auto", "required"] | NamedTool | None)]
Tools: TypeAlias = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]


def check_names(tools: list[Tool] | None) -> None:
    """Raises: FieldFault where two have one name."""
    names: set[str] = set()
    for number, tool in enumerate(tools or ()):
        if tool.function.name in names:
            raise FieldFault(f"tools[{number}].function.name", "another tool has it")
        names.add(tool.function.name)


class CalledFunction(ParsedModel):
    """arguments: a JSON object, or its text, as `call_arguments` reads it."""
    name: Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]
    arguments: Any = None

    @field_validator("arguments")
    @classmethod
    def _object(cls, value: Any) -> dict[str, Any]:
        try:
            return call_arguments(value)
        except ValueError as error:
            raise FieldFault("", str(error)) from None


class ToolCall(ParsedModel):
    """That an assistant made."""
    parts = {"function": CalledFunction}

    id: Annotated[str, Field(max_length=MAX_ID_CHARS)] | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    @classmethod
    def unknown_fields(cls, values: Mapping[str, Any]) -> list[str]:
        """NOTE: clients send back what they had, with the index that a stream gave it."""
        return [name for name in super().unknown_fields(values) if name != "index"]

    def plain(self) -> dict[str, Any]:
        """As a chat template gets it."""
        named = {} if self.id is None else {"id": self.id}
        return {**named, "type": "function", "function": {"name": self.function.name,
                                                          "arguments": self.function.arguments or {}}}


Calls: TypeAlias = Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)]
