"""POST /v1/messages/count_tokens.

Source: Anthropic API reference, "Count tokens in a Message".
"""
from __future__ import annotations

import orjson
from starlette.requests import Request
from starlette.responses import Response

from actors.sampling_params import ParameterError
from api.anthropic.errors import ANTHROPIC
from api.anthropic.lower import chat, tools
from api.anthropic.schemas import CountTokensRequest
from api.errors import bad_parameter
from api.exchange import parse_body
from api.openai.tools import tool_use
from api.routes import Endpoint
from api.service import service_of


async def count_tokens(request: Request) -> Response:
    """How many tokens the prompt of a conversation has, in Anthropic's dialect."""
    service = service_of(request)
    engine = service.ready_engine()
    body = await parse_body(request, CountTokensRequest)
    service.check_model(body.model)
    prompt, template = chat(body)
    if shown := tool_use(service, engine.info, tools(body)).shown:
        template["tools"] = shown
    try:
        token_ids = await engine.tokenize(prompt, **template)
    except ParameterError as error:
        raise bad_parameter(error) from None
    return Response(orjson.dumps({"input_tokens": len(token_ids)}), media_type="application/json")


routes = [Endpoint("POST", "/v1/messages/count_tokens", count_tokens, CountTokensRequest, dialect=ANTHROPIC)]
