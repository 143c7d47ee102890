"""The HTTP application: who stands before the routes, and errors in one shape. Packages bring their routes."""
from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.anthropic import count, messages
from api.anthropic.errors import ANTHROPIC
from api.dialect import REQUEST_ID, Dialect, choose, refusal
from api.errors import ApiError, internal_error
from api.guard import Guard
from api.native import operations, tokens
from api.openai import chat, completions, embeddings, models
from api.schemas import MAX_SHOWN_CHARS, MAX_SHOWN_FIELDS
from api.service import UNKNOWN_FIELDS, Service

log = logging.getLogger("troupe.api")


def create_app(service: Service) -> Starlette:
    app = Starlette(
        routes=[*operations.routes, *tokens.routes, *models.routes, *chat.routes, *completions.routes,
                *embeddings.routes, *messages.routes, *count.routes],
        middleware=[Middleware(RequestIds, (ANTHROPIC,)), *_cors(service.config.allow_origins), Middleware(Failures),
                    Middleware(Guard, service.config.keys)],
        exception_handlers={ApiError: _refusal, HTTPException: _http_refusal, ClientDisconnect: _nobody})
    app.router.redirect_slashes = False
    app.state.service = service
    return app


def _cors(origins: Sequence[str]) -> list[Middleware]:
    """NOTE: before the guard: a browser asks whether it may ask without the page's key."""
    if not origins:
        return []
    return [Middleware(CORSMiddleware, allow_origins=origins, allow_methods=("GET", "POST"), allow_headers=("*",),
                       expose_headers=("x-request-id", ANTHROPIC.request_id_header, "retry-after", "warning",
                                      "server-timing"))]


class Failures:
    """What fails unforeseen is logged and answered here, behind those who add headers: browsers show it then."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except Exception:
            log.exception("a request failed")
            if started or scope["type"] != "http":
                raise                       # the server ends the connection
            await refusal(internal_error(), scope)(scope, receive, send)


class RequestIds:
    """Every answer has an x-request-id: the client's own where it is short and plain, else a new one. Beside it stand
    the fields of the request that nothing came of."""

    def __init__(self, app: ASGIApp, dialects: Sequence[Dialect]) -> None:
        self._app = app
        self._dialects = dialects

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")
        request_id = sent if re.fullmatch(r"[A-Za-z0-9_.:-]{1,128}", sent) else uuid.uuid4().hex
        scope[REQUEST_ID] = request_id
        dialect = choose(scope, self._dialects)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                if dialect is not None:
                    headers[dialect.request_id_header] = request_id
                if unknown := scope.get(UNKNOWN_FIELDS):
                    headers["warning"] = _warning(unknown)
            await send(message)

        await self._app(scope, receive, send_with_headers)


def _warning(unknown: Sequence[str]) -> str:
    """Source: RFC 7234, section 5.5, code 299."""
    names = [re.sub(r"[^ !#-\[\]-~]", "?", name)[:MAX_SHOWN_CHARS] for name in unknown[:MAX_SHOWN_FIELDS]]
    more = ", and more" if len(unknown) > MAX_SHOWN_FIELDS else ""
    return f'299 troupe "unknown fields ignored: {", ".join(names)}{more}"'


async def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError), "registered for it"
    return refusal(error, request.scope)


async def _http_refusal(request: Request, error: Exception) -> Response:
    """The router's own: no such path, no such method."""
    assert isinstance(error, HTTPException), "registered for it"
    if error.status_code == 404:
        told = ApiError(404, "There is nothing at this path.", code="not_found")
    else:
        told = ApiError(error.status_code, str(error.detail), code="method_not_allowed")
    return refusal(told, request.scope, error.headers)


async def _nobody(request: Request, error: Exception) -> Response:
    """The client left while sending its request: what is answered here reaches nobody."""
    return Response(status_code=499)
