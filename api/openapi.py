"""The document at /openapi.json, made of the routes and of the schemas that their bodies are checked with.

Source: OpenAPI Specification 3.1.0.
"""
from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import orjson
from starlette.routing import BaseRoute

from api.guard import PUBLIC_PATHS
from api.routes import EVENTS, Endpoint

REF = "#/components/schemas/{model}"
ERROR = {"type": "object", "required": ["error"], "properties": {"error": {
    "type": "object", "required": ["message", "type", "param", "code"], "properties": {
        "message": {"type": "string"}, "type": {"type": "string"}, "param": {"type": ["string", "null"]},
        "code": {"type": ["string", "null"]}}}}}
REFUSALS = {"400": "The request is not valid; param names the field.", "401": "An API key is needed.",
            "404": "There is no such model.", "408": "The body did not come.", "413": "The body is too long.",
            "429": "The queue is full; Retry-After says when to come back.", "499": "The request was aborted.",
            "500": "The server failed.", "503": "The server does not take requests.",
            "504": "The answer took too long."}
OF_GETS = ("401", "404", "500", "503")


def document(routes: Sequence[BaseRoute], version: str) -> bytes:
    """JSON. routes: those that are no Endpoint are left out."""
    from pydantic.json_schema import models_json_schema  # only whoever asks pays for it

    endpoints = [route for route in routes if isinstance(route, Endpoint)]
    bodies = sorted({endpoint.body for endpoint in endpoints if endpoint.body}, key=lambda model: model.__name__)
    _, schemas = models_json_schema([(body, "validation") for body in bodies], ref_template=REF)
    errors = dict(endpoint.dialect.error_schema for endpoint in endpoints if endpoint.dialect)
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        path = re.sub(r":\w+}", "}", endpoint.path)
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint, path)
    return orjson.dumps({
        "openapi": "3.1.0", "info": {"title": "Troupe", "version": version}, "paths": paths,
        "components": {"schemas": {**schemas.get("$defs", {}), "Error": ERROR, **errors},
                       "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}]})         # a server without keys asks for none


def _operation(endpoint: Endpoint, path: str) -> dict[str, Any]:
    answer: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if endpoint.answer == EVENTS:
        answer[EVENTS] = {"schema": {"type": "string"}}
    elif endpoint.answer != "application/json":
        answer = {endpoint.answer: {"schema": {"type": "string"}}}
    error = endpoint.dialect.error_schema[0] if endpoint.dialect else "Error"
    refused = {"application/json": {"schema": {"$ref": REF.format(model=error)}}}
    if path in PUBLIC_PATHS:                    # it says more of why not than an error would
        refusals = {"503": {"description": REFUSALS["503"], "content": answer}}
    else:
        statuses = REFUSALS if endpoint.body else OF_GETS
        refusals = {status: {"description": REFUSALS[status], "content": refused} for status in statuses}
    operation: dict[str, Any] = {
        "summary": endpoint.summary, "operationId": endpoint.name,
        "responses": {"200": {"description": "The answer.", "content": answer}, **refusals}}
    if names := re.findall(r"{(\w+)}", path):
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                                   for name in names]
    if endpoint.body:
        operation["requestBody"] = {"required": True, "content": {"application/json": {
            "schema": {"$ref": REF.format(model=endpoint.body.__name__)}}}}
    if path in PUBLIC_PATHS:
        operation["security"] = []
    return operation
