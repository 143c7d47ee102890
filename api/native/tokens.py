"""POST /tokenize, /detokenize and /apply_template, GET /tokenizer_info: what prompts become, without running them.

Source: vLLM's /tokenize, /detokenize and /tokenizer_info; the answer of llama.cpp's /apply-template.
"""
from __future__ import annotations

import json

import orjson
from starlette.requests import Request
from starlette.responses import Response

from actors.sampling_params import ParameterError
from api.errors import ApiError, bad_parameter
from api.exchange import parse_body
from api.native.schemas import ApplyTemplateRequest, DetokenizeRequest, TokenizeRequest
from api.routes import Endpoint
from api.service import service_of


async def tokenize(request: Request) -> Response:
    """The tokens of a text or of chat messages."""
    service = service_of(request)
    engine = service.ready_engine()
    body = await parse_body(request, TokenizeRequest)
    service.check_model(body.model)
    try:
        if body.messages is None:
            special = body.add_special_tokens is not False
            token_ids = await engine.tokenize(body.prompt or "", add_special_tokens=special)
        else:
            token_ids = await engine.tokenize([message.plain() for message in body.messages], **body.template())
    except ParameterError as error:
        raise bad_parameter(error) from None
    names = [engine.token_name(token_id) for token_id in token_ids] if body.return_token_strs else None
    return _json({"count": len(token_ids), "max_model_len": engine.info.max_model_len, "tokens": token_ids,
                  "token_strs": names})


async def detokenize(request: Request) -> Response:
    """The text of tokens, control tokens included."""
    service = service_of(request)
    engine = service.ready_engine()
    body = await parse_body(request, DetokenizeRequest)
    service.check_model(body.model)
    outside = max(body.tokens, default=0)
    if outside >= engine.info.vocab_size:
        raise ApiError(400, f"tokens: token id {outside} is not in the model's vocabulary of {engine.info.vocab_size}",
                       param="tokens")
    return _json({"prompt": await engine.detokenize(body.tokens)})


async def apply_template(request: Request) -> Response:
    """The prompt that the model's chat template makes of messages, as text."""
    service = service_of(request)
    engine = service.ready_engine()
    body = await parse_body(request, ApplyTemplateRequest)
    service.check_model(body.model)
    try:
        prompt = await engine.render([message.plain() for message in body.messages], **body.template())
    except ParameterError as error:
        raise bad_parameter(error) from None
    return _json({"prompt": prompt})


async def tokenizer_info(request: Request) -> Response:
    """The texts of control tokens that have a role, and the chat template."""
    engine = service_of(request).ready_engine()
    roles = {"bos_token": None, "eos_token": None, **engine.token_roles}
    # NOTE: a model's files may hold what is not Unicode text, which orjson refuses.
    return Response(json.dumps({**roles, "chat_template": engine.info.chat_template}), media_type="application/json")


def _json(value: object) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")


routes = [Endpoint("POST", "/tokenize", tokenize, TokenizeRequest),
          Endpoint("GET", "/tokenizer_info", tokenizer_info),
          Endpoint("POST", "/detokenize", detokenize, DetokenizeRequest),
          Endpoint("POST", "/apply_template", apply_template, ApplyTemplateRequest)]
