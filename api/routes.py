"""Routes that can be told of: /openapi.json is made of them."""
from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.routing import Route

from api.dialect import Dialect
from api.schemas import ParsedModel

EVENTS = "text/event-stream"                # or a document, as the request asks


class Endpoint(Route):
    """A path with one method. The first line of its handler's docstring says what it is for."""

    def __init__(self, method: str, path: str, handler: Callable[[Request], Awaitable[Any]],
                 body: type[ParsedModel] | None = None, answer: str = "application/json",
                 dialect: Dialect | None = None) -> None:
        """body: what it reads; answer: the media type of what it says; dialect: that it is of, where not OpenAI's."""
        super().__init__(path, handler, methods=[method])
        self.method = method
        self.body = body
        self.answer = answer
        self.dialect = dialect
        self.summary = (handler.__doc__ or "").partition("\n")[0].rstrip(".")
