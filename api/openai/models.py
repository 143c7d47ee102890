"""GET /v1/models: what this server serves, under all its names; and one of them.

Source: OpenAI API reference, "Models"; max_model_len and root as vLLM has them.
"""
from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from api.routes import Endpoint
from api.service import Service, service_of


async def list_models(request: Request) -> Response:
    """The models that are served."""
    service = service_of(request)
    cards = [_card(service, name) for name in service.ready_engine().info.model_names]
    return Response(orjson.dumps({"object": "list", "data": cards}), media_type="application/json")


async def model(request: Request) -> Response:
    """One model, by one of its names."""
    service = service_of(request)
    name = request.path_params["name"]
    service.check_model(name)
    return Response(orjson.dumps(_card(service, name)), media_type="application/json")


def _card(service: Service, name: str) -> dict[str, Any]:
    info = service.ready_engine().info
    return {"id": name, "object": "model", "created": service.created_s, "owned_by": "troupe", "root": info.model,
            "parent": None, "max_model_len": info.max_model_len, "kv_capacity_tokens": info.kv_capacity_tokens,
            "num_full_requests": info.num_full_requests, "kv_bytes_per_token": info.kv_bytes_per_token,
            "max_num_seqs": info.max_num_seqs}


# NOTE: a name may have slashes in it.
routes = [Endpoint("GET", "/v1/models", list_models), Endpoint("GET", "/v1/models/{name:path}", model)]
