"""On the way down: a conversation becomes chat messages, and a request's fields sampling parameters."""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from actors.sampling_params import ParameterError, SamplingParams, structured_output
from api.anthropic.blocks import Block, TextBlock, ThinkingBlock, ToolResultBlock, ToolUseBlock
from api.anthropic.schemas import CountTokensRequest, MessagesRequest, Thinking
from api.errors import ApiError, bad_parameter
from api.openai.schemas import ChatRequest
from api.openai.tool_schemas import FunctionDefinition, NamedTool, Tool, ToolNamed
from api.openai.tools import with_thought
from api.service import Service
from api.surface import EngineInfo, EngineSurface

BETWEEN_TURNS = TextBlock(type="text", text="\n\n")
THINKING_SWITCH = "enable_thinking"         # the name that most chat templates know; the others look at none
ERROR = "Error: "                           # what a result that is one begins with: templates know no other way


def chat(request: CountTokensRequest) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Messages as the engine takes them, and what its chat template is told of all but tools.

    Turns of one role that follow one another are one turn. An assistant's last turn is not over: the answer goes on
    where it ends, white space too.
    """
    turns: list[tuple[str, list[Block]]] = [("system", list(request.system))] if request.system else []
    for turn in request.messages:
        if turns and turns[-1][0] == turn.role:
            blocks = turns[-1][1]
            if blocks and turn.content and isinstance(blocks[-1], TextBlock) and isinstance(turn.content[0], TextBlock):
                blocks.append(BETWEEN_TURNS)
            blocks += turn.content
        else:
            turns.append((turn.role, list(turn.content)))
    messages: list[dict[str, Any]] = []
    for role, blocks in turns:
        messages += _answers_and_question(blocks) if role == "user" else [_said(role, blocks)]
    goes_on = turns[-1][0] == "assistant"
    template: dict[str, Any] = {"add_generation_prompt": not goes_on, "continue_final_message": goes_on}
    if request.thinking is not None:
        template["chat_template_kwargs"] = {THINKING_SWITCH: request.thinking.type != "disabled"}
    return messages, template


def _said(role: str, blocks: list[Block]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": role, "content": _content(blocks)}
    thoughts = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    if thoughts:
        message["reasoning_content"] = thoughts
    calls = [{"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
             for block in blocks if isinstance(block, ToolUseBlock)]
    if calls:
        message["tool_calls"] = calls
    return message


def _answers_and_question(blocks: list[Block]) -> list[dict[str, Any]]:
    """A user's turn: results of calls are messages of their own, in their places."""
    messages: list[dict[str, Any]] = []
    said: list[Block] = []
    for block in blocks:
        if not isinstance(block, ToolResultBlock):
            said.append(block)
            continue
        if said:
            messages.append(_said("user", said))
            said = []
        texts = block.content or []
        if block.is_error:
            texts = [TextBlock(type="text", text=ERROR), *texts]
        messages.append({"role": "tool", "content": _content(texts), "tool_call_id": block.tool_use_id})
    return messages + ([_said("user", said)] if said or not messages else [])


def _content(blocks: Iterable[Block]) -> str | list[dict[str, str]]:
    """Of several texts all, for the engine to join. NOTE: none says as little as an empty one."""
    texts = [block.text for block in blocks if isinstance(block, TextBlock)] or [""]
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def tools(request: CountTokensRequest) -> ChatRequest:
    """What a request of OpenAI's dialect would say of the same tools, all else left out."""
    choice = request.tool_choice
    return ChatRequest.model_construct(
        tools=[Tool.model_construct(type="function", function=FunctionDefinition.model_construct(
            name=tool.name, description=tool.description, parameters=tool.input_schema))
            for tool in request.tools or ()],
        tool_choice=None if choice is None else "required" if choice.type == "any" else choice.type
        if choice.type != "tool" else NamedTool.model_construct(
            type="function", function=ToolNamed.model_construct(name=choice.name)),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None)


def with_thinking(service: Service, info: EngineInfo, thinking: Thinking | None,
                  sampling: SamplingParams) -> SamplingParams:
    """Thoughts within their budget, which is 0 where the chat template cannot be told that none are wanted.

    Raises: ApiError (400) for a budget where the model has no thoughts.
    """
    budget = None if thinking is None else thinking.budget_tokens
    if thinking is not None and thinking.type == "disabled" and service.answers.reasoning is not None and (
            THINKING_SWITCH not in (info.chat_template or "")):
        budget = 0
    return with_thought(service.answers, sampling, budget, "thinking.budget_tokens")


def own_words(error: ApiError) -> ApiError:
    """What is found out about a tool as OpenAI's dialect has it, by the field's name in this one."""
    theirs, own = ".function.parameters", ".input_schema"
    return ApiError(error.status, error.message.replace(theirs, own, 1), param=(error.param or "").replace(theirs, own),
                    code=error.code)


def sampling_params(engine: EngineSurface, request: MessagesRequest) -> SamplingParams:
    """The request's own values, then the model's defaults. Raises: ApiError (400)."""
    values: dict[str, Any] = {
        "max_tokens": request.max_tokens, "temperature": request.temperature, "top_p": request.top_p,
        "top_k": request.top_k, "stop": None if request.stop_sequences is None else tuple(request.stop_sequences)}
    form = request.output_config.format if request.output_config else None
    try:
        if form is not None:
            values["structured_outputs"] = structured_output("json", form.json_schema, "output_config.format.schema")
        return engine.default_sampling(**{name: value for name, value in values.items() if value is not None})
    except ParameterError as error:
        raise bad_parameter(error) from None
