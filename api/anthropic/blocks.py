"""Content blocks of Anthropic's dialect, as requests hold them."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, PlainValidator, ValidationError

from api.schemas import FieldFault, ParsedModel, first_fault, shown

MAX_ID_CHARS = 256


class CacheControl(ParsedModel):
    """Where a prefix should be kept. NOTE: every prefix is, so that it asks for nothing more."""
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(ParsedModel):
    unsupported = {"citations": ([],)}
    parts = {"cache_control": CacheControl}

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class ThinkingBlock(ParsedModel):
    """Of an assistant. signature: there are none here, so that none is checked."""
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(ParsedModel):
    """A call that an assistant made."""
    unsupported = {"toolset_name": (), "caller": ({"type": "direct"},)}
    parts = {"cache_control": CacheControl}

    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]
    name: Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]
    input: dict[str, Any]
    cache_control: CacheControl | None = None


def _texts(value: Any) -> list[TextBlock]:
    return _read(value, {"text": TextBlock})


Texts: TypeAlias = Annotated[list[TextBlock], PlainValidator(_texts, json_schema_input_type=str | list[TextBlock])]


class ToolResultBlock(ParsedModel):
    """What came of a call."""
    unsupported = {"toolset_name": ()}
    parts = {"cache_control": CacheControl, "content": TextBlock}

    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]
    content: Texts | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


Block: TypeAlias = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock

_KINDS: dict[str, type[ParsedModel]] = {
    "text": TextBlock, "thinking": ThinkingBlock, "tool_use": ToolUseBlock, "tool_result": ToolResultBlock}


class AnyBlock(ParsedModel):
    """Stands for all of them where fields are looked through that nobody knows."""

    @classmethod
    def unknown_fields(cls, values: Mapping[str, Any]) -> list[str]:
        return _KINDS[values["type"]].unknown_fields(values)


def _blocks(value: Any) -> Any:
    return _read(value, _KINDS)


def _read(value: Any, kinds: Mapping[str, type[ParsedModel]]) -> list[Any]:
    """A text is short for one block of it. What is not supported is named by its type before more is looked at."""
    if isinstance(value, str):
        return [TextBlock(type="text", text=value)]
    if not isinstance(value, list):
        raise FieldFault("", f"must be a string or a list of blocks, got {shown(value)}")
    blocks = []
    for number, block in enumerate(value):
        kind = block.get("type") if isinstance(block, dict) else None
        schema = kinds.get(kind) if isinstance(kind, str) else None
        if schema is None:
            raise FieldFault(f"[{number}].type", f"only {', '.join(kinds)} is supported here, got {shown(kind)}")
        try:
            blocks.append(schema.model_validate(block))
        except ValidationError as error:
            fault = first_fault(error)
            raise FieldFault(f"[{number}].{fault.where}", fault.message) from None
    return blocks


Blocks: TypeAlias = Annotated[list[Block], PlainValidator(_blocks, json_schema_input_type=str | list[Annotated[
    Block, Field(discriminator="type")]])]
