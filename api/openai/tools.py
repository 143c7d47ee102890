"""Tools and thoughts in OpenAI's words: what a request asks for on the way down, what an answer says on the way up.

Source: OpenAI API reference, "Function calling"; reasoning_content as DeepSeek's API and vLLM have it.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from actors.call_grammar import Callee, enforced_calls
from actors.sampling_params import ParameterError, SamplingParams, Thought
from api.answers.choice import AnswerFormats
from api.answers.formats import NONE, TOOL_PARSERS, ToolFormat
from api.answers.parser import AnswerParser, Call
from api.answers.tool_calls import CallArguments, CallBegin, Content, Piece, Reasoning, Tools
from api.errors import ApiError, bad_parameter
from api.openai.schemas import ChatRequest
from api.openai.tool_schemas import NamedTool
from api.service import Service
from api.surface import EngineInfo


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What comes of a request's tools."""
    shown: list[dict[str, Any]]             # to the chat template
    callable: Tools | None                  # what calls are looked for; None: none are
    form: ToolFormat | None = None          # how they are written, if not as the model does
    enforced: Sequence[Callee] = ()         # one of them has to be called


def tool_use(service: Service, info: EngineInfo, request: ChatRequest) -> ToolUse:
    """Raises: ApiError (400) where the model cannot be told of tools, or its calls cannot be read."""
    if not request.tools or request.tool_choice == "none":
        return ToolUse([], None)
    if not info.knows_tools:
        raise ApiError(400, "tools: this model's chat template knows no tools", param="tools")
    shown = [tool.plain() for tool in request.tools]
    if request.tool_choice not in (None, "auto"):
        return _enforced(shown, service, request)
    if service.config.tool_call_parser == NONE:
        return ToolUse(shown, None)
    if service.answers.tools is None:
        raise ApiError(400, "tools: how this model writes calls is not known; the server's --tool-call-parser names a "
                       "format, or none to get calls as text", param="tools")
    return ToolUse(shown, Tools({tool.function.name: tool.function.parameter_names for tool in request.tools},
                                _parallel(service, request)))


def with_effort(info: EngineInfo, request: ChatRequest, template: Mapping[str, Any]) -> dict[str, Any]:
    """What the engine is told of the template, with the effort to think for templates that look at it; none asks for
    nothing. Raises: ApiError (400) where the model's does not."""
    effort, name = request.reasoning_effort, "reasoning_effort"
    if effort is None or (effort == "none" and name not in (info.chat_template or "")):
        return dict(template)
    if name not in (info.chat_template or ""):
        raise ApiError(400, f"{name}: this model's chat template knows none", param=name)
    return {**template, "chat_template_kwargs": {name: effort, **template["chat_template_kwargs"]}}


def _parallel(service: Service, request: ChatRequest) -> bool:
    return service.answers.parallel if request.parallel_tool_calls is None else request.parallel_tool_calls


def _enforced(shown: list[dict[str, Any]], service: Service, request: ChatRequest) -> ToolUse:
    """NOTE: it is written as JSON, whatever the model is used to: see `actors.call_grammar`."""
    choice, tools = request.tool_choice, request.tools or ()
    wanted = [(number, tool.function) for number, tool in enumerate(tools)
              if not isinstance(choice, NamedTool) or tool.function.name == choice.function.name]
    parallel = _parallel(service, request) and not isinstance(choice, NamedTool)
    return ToolUse(shown, Tools({function.name: function.parameter_names for _, function in wanted}, parallel),
                   TOOL_PARSERS["json"],
                   [Callee(function.name, function.parameters or {"properties": {}, "additionalProperties": False},
                           f"tools[{number}].function.parameters") for number, function in wanted])


def enforced(use: ToolUse, sampling: SamplingParams) -> SamplingParams:
    """With the form that calls have, where one has to be made. Raises: ApiError (400)."""
    if not use.enforced:
        return sampling
    if sampling.structured_outputs is not None:
        raise ApiError(400, "tool_choice: not with a form that the answer has to have", param="tool_choice")
    assert use.callable is not None, "calls are looked for"
    try:
        return replace(sampling, structured_outputs=enforced_calls(use.enforced, "tools", use.callable.parallel))
    except ParameterError as error:
        raise bad_parameter(error) from None


def with_thought(answers: AnswerFormats, sampling: SamplingParams, budget: int | None,
                 field: str = "thinking_token_budget") -> SamplingParams:
    """With what the model's thoughts look like. budget: tokens that one may have, which came by `field`; None: any.

    Raises: ApiError (400) where there are none to have a budget.
    """
    if answers.reasoning is not None:
        return replace(sampling, thought=Thought(answers.reasoning.begin, answers.reasoning.end, budget, field))
    if budget is not None:
        raise ApiError(400, f"{field}: this model's chat template has no thoughts; if it thinks all the same the "
                       "server's --reasoning-parser says how", param=field)
    return sampling


def delta_of(piece: Piece, with_reasoning: bool) -> dict[str, Any] | None:
    """A chunk's delta; None where it says nothing."""
    if isinstance(piece, Content):
        return {"content": piece.text}
    if isinstance(piece, Reasoning):
        return {"reasoning_content": piece.text} if with_reasoning else None
    if isinstance(piece, CallBegin):
        return {"tool_calls": [{"index": piece.number, "id": piece.id, "type": "function",
                                "function": {"name": piece.name, "arguments": ""}}]}
    if isinstance(piece, CallArguments):
        return {"tool_calls": [{"index": piece.number, "function": {"arguments": piece.text}}]}
    return None


def message_of(parser: AnswerParser, pieces: Iterable[Piece], before: str, with_reasoning: bool) -> dict[str, Any]:
    """The message of a whole answer. before: that its content begins with."""
    content, reasoning = before, ""
    for piece in pieces:
        if isinstance(piece, Content):
            content += piece.text
        elif isinstance(piece, Reasoning):
            reasoning += piece.text
    calls = parser.complete_calls()
    message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
    if reasoning and with_reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [_shown(call) for call in calls]
    return message


def _shown(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
