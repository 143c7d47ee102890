"""The request body of /v1/embeddings."""
from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, PlainValidator

from actors.sampling_params import MAX_PRIORITY
from api.openai.schemas import MAX_GENERATIONS, MAX_NAME_CHARS, NamedPrompt, TokenId, prompt_list
from api.schemas import ParsedModel


def _inputs(value: Any) -> list[NamedPrompt]:
    return prompt_list(value, "input")


Inputs: TypeAlias = Annotated[list[NamedPrompt], PlainValidator(
    _inputs, json_schema_input_type=str | Annotated[list[TokenId], Field(min_length=1)] | Annotated[
        list[str | Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=MAX_GENERATIONS)])]


class EmbeddingRequest(ParsedModel):
    """pooling, truncate_prompt_tokens, priority, cache_salt, return_metrics: as elsewhere, not OpenAI's."""
    unsupported = {"messages": (), "add_special_tokens": (True,), "embed_dtype": ("float32",), "endianness": (
        "native", "little"), "normalize": (True,), "use_activation": (True,)}

    input: Inputs
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    pooling: Literal["last", "mean"] | None = None      # None: last
    user: Annotated[str, Field(max_length=MAX_NAME_CHARS)] | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    return_metrics: bool | None = None
