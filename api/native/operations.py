"""What whoever runs the server asks it: is it well, what does it do, and let go of this."""
from __future__ import annotations

import asyncio
from functools import cache
from importlib import metadata

import orjson
from starlette.requests import Request
from starlette.responses import Response

from api.errors import ApiError
from api.exchange import parse_body
from api.guard import tenant_of
from api.native.schemas import AbortRequest
from api.openapi import document
from api.routes import Endpoint
from api.service import service_of

NO_VERSION = "unknown"                          # of a checkout that is not installed


async def health(request: Request) -> Response:
    """Whether requests are taken; needs no key.

    NOTE: it waits for nothing, so that a probe is answered whatever the load.
    """
    service = service_of(request)
    try:
        service.ready_engine()
    except ApiError as error:
        return _json({"status": service.status, "reason": error.message}, error.status)
    return _json({"status": service.status})


async def ready(request: Request) -> Response:
    """Whether requests are taken, which model answers them, and how many run and wait."""
    service = service_of(request)
    engine = service.ready_engine()
    num_running, num_waiting = await service.doors.num_requests()
    return _json({"status": service.status, "model": engine.info.model, "num_requests_running": num_running,
                  "num_requests_waiting": num_waiting})


async def metrics(request: Request) -> Response:
    """Prometheus metrics, under vLLM's names with our prefix."""
    return Response(await service_of(request).doors.metrics(), media_type="text/plain; version=0.0.4")


async def version(request: Request) -> Response:
    """The server's version."""
    return _json({"version": _version()})


async def abort(request: Request) -> Response:
    """Ends requests of the same API key; answers with the names of those that were open."""
    body = await parse_body(request, AbortRequest)
    return _json({"aborted": await service_of(request).doors.abort(tenant_of(request), body.names)})


async def debug_kv(request: Request) -> Response:
    """Every KV block and its owner, only with --debug."""
    engine = service_of(request).ready_engine()
    if not engine.info.debug:                   # request ids and keys of others' prompts are in it
        raise ApiError(404, "There is nothing at this path without --debug.", code="not_found")
    return _json(await engine.debug_kv())


async def openapi(request: Request) -> Response:
    """This API in OpenAPI's words."""
    state = request.app.state
    if not hasattr(state, "openapi"):
        state.openapi = await asyncio.to_thread(document, request.app.routes, _version())
    return Response(state.openapi, media_type="application/json")


@cache
def _version() -> str:
    try:
        return metadata.version("troupe")
    except metadata.PackageNotFoundError:
        return NO_VERSION


def _json(value: object, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


routes = [Endpoint("GET", "/health", health), Endpoint("GET", "/ready", ready),
          Endpoint("GET", "/metrics", metrics, answer="text/plain"), Endpoint("GET", "/version", version),
          Endpoint("POST", "/abort", abort, AbortRequest), Endpoint("GET", "/debug/kv", debug_kv),
          Endpoint("GET", "/openapi.json", openapi)]
