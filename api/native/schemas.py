"""Request bodies of the routes that are no one's dialect; those about tokens have vLLM's shapes."""
from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from api.openai.schemas import Message, Messages, TemplateOptions, TokenId
from api.openai.tool_schemas import Tool
from api.schemas import FieldFault, ParsedModel

MAX_TOKENS = 1 << 20
MAX_ABORTS = 1024


class TokenizeRequest(TemplateOptions):
    """Text or messages."""
    unsupported = {"chat_template": (), "documents": ([],), "mm_processor_kwargs": ({},)}
    parts = {"messages": Message, "tools": Tool}

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None      # of text: begin as the model's texts begin (default: true)
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _consistent(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise FieldFault("prompt", "either prompt or messages")
        if self.messages is not None and self.add_special_tokens:
            raise FieldFault("add_special_tokens", "not with messages: the chat template has them")
        for name in ("continue_final_message", "chat_template_kwargs", "tools"):
            if self.prompt is not None and getattr(self, name):
                raise FieldFault(name, "only with messages")
        return self


class DetokenizeRequest(ParsedModel):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKENS, fail_fast=True)]


class ApplyTemplateRequest(TemplateOptions):
    unsupported = {"chat_template": (), "documents": ([],)}
    parts = {"messages": Message, "tools": Tool}

    model: str | None = None
    messages: Messages


RequestName = Annotated[str, Field(min_length=1, max_length=128)]


class AbortRequest(ParsedModel):
    """Names of requests: their x-request-id, or the id that their answers say."""
    request_id: RequestName | None = None
    request_ids: Annotated[list[RequestName], Field(max_length=MAX_ABORTS, fail_fast=True)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> AbortRequest:
        if self.request_id is None and self.request_ids is None:
            raise FieldFault("request_ids", "is required")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        return (*([] if self.request_id is None else [self.request_id]), *(self.request_ids or ()))


