"""Whose words refusals are in: OpenAI's, but on the paths of another dialect its own. So are those of what fails before
a route is found or for want of a key.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Scope

from api.errors import ApiError

# What a request's scope holds of ours.
REQUEST_ID = "troupe.request_id"            # what the answer's x-request-id says
DIALECT = "troupe.dialect"                  # whose path it is; None: everybody's

CLOSING_STATUSES = (408, 413)               # the rest of the body is not waited for


@dataclass(frozen=True, slots=True)
class Dialect:
    """What the answers on its paths have in common."""
    path: str                               # it, and all below it
    error_body: Callable[[ApiError, str], bytes]    # of an error and the request's id
    error_schema: tuple[str, dict[str, Any]]        # of that, for /openapi.json: its name, and it
    request_id_header: str                  # that has the id too, beside x-request-id

    def has(self, path: str) -> bool:
        return path == self.path or path.startswith(f"{self.path}/")


def choose(scope: Scope, dialects: Sequence[Dialect]) -> Dialect | None:
    """The one that `refusal` will speak."""
    dialect = next((dialect for dialect in dialects if dialect.has(scope["path"])), None)
    scope[DIALECT] = dialect
    return dialect


def refusal(error: ApiError, scope: Scope, headers: Mapping[str, str] | None = None) -> Response:
    """The whole answer that tells of it."""
    dialect: Dialect | None = scope[DIALECT]
    body = error.body() if dialect is None else dialect.error_body(error, scope[REQUEST_ID])
    response = Response(body, error.status, headers, media_type="application/json")
    if error.retry_after_s is not None:
        response.headers["retry-after"] = str(math.ceil(error.retry_after_s))
    if error.status == 401:
        response.headers["www-authenticate"] = "Bearer"
    if error.status in CLOSING_STATUSES:
        response.headers["connection"] = "close"
    return response
