"""POST /v1/messages.

Source: Anthropic API reference, "Messages".
"""
from __future__ import annotations

from dataclasses import replace

from starlette.requests import Request

from actors.messages import TextDelta
from actors.policy.thought_reader import PROMPT_END_TOKENS
from api.answers.parser import AnswerParser
from api.anthropic.errors import ANTHROPIC
from api.anthropic.lower import chat, own_words, sampling_params, tools, with_thinking
from api.anthropic.schemas import MessagesRequest
from api.anthropic.write import MessageWriter
from api.dialect import REQUEST_ID
from api.errors import ApiError
from api.exchange import Asker, Generation, Reply, parse_body
from api.guard import tenant_of
from api.openai.tools import enforced, tool_use
from api.routes import EVENTS, Endpoint
from api.service import service_of


async def messages(request: Request) -> Reply:
    """Answers a conversation, in Anthropic's dialect."""
    service = service_of(request)
    engine = service.ready_engine()
    body = await parse_body(request, MessagesRequest)
    service.check_model(body.model)
    sampling = sampling_params(engine, body)
    use, answers = tool_use(service, engine.info, tools(body)), service.answers
    if answers.shows_control_tokens(use.callable is not None):
        sampling = replace(sampling, skip_special_tokens=False)
    prompt, template = chat(body)
    if use.shown:
        template["tools"] = use.shown
    try:
        sampling = enforced(use, sampling)
    except ApiError as error:
        raise own_words(error) from None
    sampling = with_thinking(service, engine.info, body.thinking, sampling)
    asker = Asker(user=(body.metadata.user_id if body.metadata else None) or "", tenant=tenant_of(request))

    def parser(first: TextDelta) -> AnswerParser:
        end = "" if answers.reasoning is None else engine.decode(first.prompt_token_ids[-PROMPT_END_TOKENS:])
        return answers.parser(end, use.callable, use.form)

    writer = MessageWriter(body, engine.info, request.scope[REQUEST_ID], parser, answers.reasoning is not None)
    return Reply(service, engine, [Generation("messages", prompt, sampling, template=template, asker=asker)], writer,
                 bool(body.stream))


routes = [Endpoint("POST", "/v1/messages", messages, MessagesRequest, EVENTS, dialect=ANTHROPIC)]
