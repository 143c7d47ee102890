"""The HTTP application: routes, errors in one shape, health and metrics. Dialects bring their own routes."""
from __future__ import annotations

import math
import re
import uuid

import orjson
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import ApiError, internal_error
from api.openai import chat, completions, models
from api.service import Service, service_of


def create_app(service: Service) -> Starlette:
    app = Starlette(
        routes=[Route("/health", health, methods=["GET"]), Route("/metrics", metrics, methods=["GET"]),
                Route("/debug/kv", debug_kv, methods=["GET"]),
                *models.routes, *chat.routes, *completions.routes],
        middleware=[Middleware(RequestIds)],
        exception_handlers={ApiError: _refusal, HTTPException: _http_refusal, ClientDisconnect: _nobody,
                            Exception: _failure})
    app.router.redirect_slashes = False
    app.state.service = service
    return app


async def health(request: Request) -> Response:
    """200 while requests are taken. NOTE: it waits for nothing, so that a probe is answered whatever the load."""
    service = service_of(request)
    try:
        service.ready_engine()
    except ApiError as error:
        content = orjson.dumps({"status": service.status, "reason": error.message})
        return Response(content, error.status, media_type="application/json")
    return Response(orjson.dumps({"status": service.status}), media_type="application/json")


async def metrics(request: Request) -> Response:
    return Response(service_of(request).metrics.text(), media_type="text/plain; version=0.0.4")


async def debug_kv(request: Request) -> Response:
    """Every KV block and its owner. Only with --debug: request ids and keys of others' prompts are in it."""
    engine = service_of(request).ready_engine()
    if not engine.info.debug:
        raise ApiError(404, "There is nothing at this path without --debug.", code="not_found")
    return Response(orjson.dumps(await engine.debug_kv()), media_type="application/json")


class RequestIds:
    """Every answer has an x-request-id: the client's own where it is short and plain, else a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")
        request_id = sent if re.fullmatch(r"[A-Za-z0-9_.:-]{1,128}", sent) else uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


async def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError), "registered for it"
    response = Response(error.body(), error.status, media_type="application/json")
    if error.retry_after_s is not None:
        response.headers["retry-after"] = str(math.ceil(error.retry_after_s))
    if error.status == 413:
        response.headers["connection"] = "close"        # the rest of the body is not read
    return response


async def _http_refusal(request: Request, error: Exception) -> Response:
    """The router's own: no such path, no such method."""
    assert isinstance(error, HTTPException), "registered for it"
    if error.status_code == 404:
        told = ApiError(404, "There is nothing at this path.", code="not_found")
    else:
        told = ApiError(error.status_code, str(error.detail), code="method_not_allowed")
    return Response(told.body(), told.status, error.headers, media_type="application/json")


async def _nobody(request: Request, error: Exception) -> Response:
    """The client left while sending its request: what is answered here reaches nobody."""
    return Response(status_code=499)


async def _failure(request: Request, error: Exception) -> Response:
    return Response(internal_error().body(), 500, media_type="application/json")
