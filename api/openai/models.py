"""GET /v1/models: what this server serves, under all its names.

Source: OpenAI API reference, "Models"; max_model_len and root as vLLM has them.
"""
from __future__ import annotations

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from api.service import service_of


async def models(request: Request) -> Response:
    service = service_of(request)
    info = service.ready_engine().info
    cards = [{"id": name, "object": "model", "created": service.created_s, "owned_by": "troupe", "root": info.model,
              "parent": None, "max_model_len": info.max_model_len, "kv_capacity_tokens": info.kv_capacity_tokens,
              "num_full_requests": info.num_full_requests,
              "kv_bytes_per_token": info.kv_bytes_per_token, "max_num_seqs": info.max_num_seqs}
             for name in info.model_names]
    return Response(orjson.dumps({"object": "list", "data": cards}), media_type="application/json")


routes = [Route("/v1/models", models, methods=["GET"])]
