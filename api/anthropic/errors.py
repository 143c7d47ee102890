"""Errors in Anthropic's shape.

Source: Anthropic API reference, "Errors".
"""
from __future__ import annotations

import orjson

from api.dialect import Dialect
from api.errors import MAX_MESSAGE_CHARS, ApiError

# NOTE: a server that cannot answer at all is what its clients know as overloaded; the status stays the one that
# proxies know, and both their clients and OpenAI's try it again.
TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
         429: "rate_limit_error", 499: "api_error", 500: "api_error", 503: "overloaded_error", 504: "timeout_error"}


def error_body(error: ApiError, request_id: str) -> bytes:
    return orjson.dumps({"type": "error", "request_id": request_id, "error": {
        "type": TYPES.get(error.status, "invalid_request_error"), "message": error.message[:MAX_MESSAGE_CHARS]}})


ANTHROPIC = Dialect(path="/v1/messages", error_body=error_body, request_id_header="request-id", error_schema=(
    "AnthropicError", {"type": "object", "required": ["type", "error", "request_id"], "properties": {
        "type": {"const": "error"}, "request_id": {"type": "string"}, "error": {
            "type": "object", "required": ["type", "message"], "properties": {
                "type": {"type": "string"}, "message": {"type": "string"}}}}}))
