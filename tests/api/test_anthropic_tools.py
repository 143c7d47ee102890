"""Tools and thoughts in Anthropic's dialect, by its client: what reaches the engine, and what blocks an answer has."""
from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import anthropic
import pytest

from tests.api.fake_engine import INFO, FakeEngine
from tests.api.serving import Server
from tests.api.test_anthropic import HI, TOOL, events_of, post, refused, text

TEMPLATE = "{{ tools }}<tool_call><think></think>"
CALLED = ('<think>\nlet me see\n</think>\n\nI look.\n'
          '<tool_call>\n{"name": "f", "arguments": {"x": "é", "n": [1, 2]}}\n</tool_call>\n'
          '<tool_call>{"name": "f", "arguments": {}}</tool_call>')
INPUT = {"x": "é", "n": [1, 2]}
USED = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"x": "y"}}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(replace(INFO, knows_tools=True, chat_template=TEMPLATE))


def create(server: Server, stream: bool, **fields: Any) -> anthropic.types.Message:
    given: Any = {"model": "fake", "max_tokens": 2000, "messages": HI, "tools": [TOOL], **fields}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        if not stream:
            whole: anthropic.types.Message = client.messages.create(**given)
            return whole
        with client.messages.stream(**given) as events:
            return events.get_final_message()


def blocks(message: anthropic.types.Message) -> list[dict[str, Any]]:
    return [block.to_dict() for block in message.content]


# Answers


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_text_and_calls_are_blocks(server: Server, engine: FakeEngine, stream: bool) -> None:
    engine.says = CALLED
    message = create(server, stream)
    assert message.stop_reason == "tool_use"
    found = blocks(message)
    assert [block["type"] for block in found] == ["thinking", "text", "tool_use", "tool_use"]
    assert found[0]["thinking"] == "let me see"
    assert found[1]["text"] == "I look."
    assert [(block["name"], block["input"]) for block in found[2:]] == [("f", INPUT), ("f", {})]
    assert len({block["id"] for block in found[2:]}) == 2
    assert message.usage.output_tokens == len(CALLED.encode()) + 1


def test_the_events_of_calls(server: Server, engine: FakeEngine) -> None:
    engine.says = CALLED
    events = [event for _, event in events_of(post(server, stream=True, max_tokens=2000, tools=[TOOL]))]
    open_block: int | None = None
    inputs: dict[int, str] = {}
    for event in events:
        kind = event["type"]
        if kind == "content_block_start":
            assert open_block is None, "one block at a time"
            assert event["index"] == (max(inputs, default=-1) + 1), "in order"
            open_block = event["index"]
            inputs[open_block] = ""
            if event["content_block"]["type"] == "tool_use":
                assert event["content_block"]["input"] == {}
        elif kind == "content_block_delta":
            assert event["index"] == open_block
            assert event["delta"]["type"] in ("thinking_delta", "text_delta", "input_json_delta")
            inputs[open_block or 0] += event["delta"].get("partial_json", "")
        elif kind == "content_block_stop":
            assert event["index"] == open_block
            open_block = None
    assert open_block is None
    assert [json.loads(inputs[number]) for number in (2, 3)] == [INPUT, {}]
    assert sum(event["type"] == "content_block_delta" and event["index"] == 2 for event in events) > 1, "in pieces"


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_short_is_text(server: Server, engine: FakeEngine, stream: bool) -> None:
    engine.says = 'Well <tool_call>{"name": "f", "arguments": {"x": "long'
    message = create(server, stream)
    assert message.stop_reason == "end_turn"
    texts = [block["text"] for block in blocks(message) if block["type"] == "text"]
    assert "".join(texts) == engine.says
    assert stream or all(block["type"] == "text" for block in blocks(message))
    assert create(server, stream, max_tokens=20).stop_reason == "max_tokens"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{"tools": []}, {"tool_choice": {"type": "none"}}])
def test_without_tools_no_calls_are_looked_for(server: Server, engine: FakeEngine, stream: bool,
                                               fields: dict[str, Any]) -> None:
    engine.says = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    message = create(server, stream, **fields)
    assert blocks(message) == [text(engine.says)]
    assert message.stop_reason == "end_turn"
    assert engine.calls[0].tools == ()


def test_what_cannot_be_enforced_is_named_as_it_was_sent(server: Server) -> None:
    tools = [{**TOOL, "input_schema": {"type": "string"}}]
    message = refused(post(server, tools=tools, tool_choice={"type": "any"}))
    assert message.startswith("tools[0].input_schema.type: ")
    form = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    message = refused(post(server, tools=[TOOL], tool_choice={"type": "any"}, output_config=form))
    assert message.startswith("tool_choice: ")


def test_one_call_where_several_are_not_wanted(server: Server, engine: FakeEngine) -> None:
    engine.says = CALLED
    message = create(server, False, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block["type"] for block in blocks(message)].count("tool_use") == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("thinking", "kwargs", "shown"), [
    (None, {}, True), ({"type": "adaptive"}, {"enable_thinking": True}, True),
    ({"type": "adaptive", "display": "omitted"}, {"enable_thinking": True}, False),
    ({"type": "disabled"}, {"enable_thinking": False}, False)])
def test_thinking(server: Server, engine: FakeEngine, stream: bool, thinking: Any, kwargs: Any, shown: bool) -> None:
    engine.says = "<think>hm</think>Yes."
    message = create(server, stream, **({} if thinking is None else {"thinking": thinking}))
    assert [block["type"] for block in blocks(message)] == (["thinking"] if shown else []) + ["text"]
    assert blocks(message)[-1]["text"] == "Yes."
    assert engine.calls[0].template == (True, False, kwargs)


# What reaches the engine


def test_tools_reach_the_template(server: Server, engine: FakeEngine) -> None:
    bare: dict[str, Any] = {"name": "g", "input_schema": {"type": "object"}, "type": "custom",
                            "cache_control": {"type": "ephemeral"}}
    create(server, False, tools=[TOOL, bare])
    assert engine.calls[0].tools == [
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": TOOL["input_schema"]}},
        {"type": "function", "function": {"name": "g", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize(("turns", "expected"), [
    ([("assistant", [text("a"), USED]), ("user", [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "z"}])],
     [{"role": "assistant", "content": "a", "tool_calls": [
         {"id": "toolu_1", "type": "function", "function": {"name": "f", "arguments": {"x": "y"}}}]},
      {"role": "tool", "content": "z", "tool_call_id": "toolu_1"}]),
    ([("assistant", [{"type": "thinking", "thinking": "t", "signature": "s"}, USED]),
      ("user", [{"type": "tool_result", "tool_use_id": "toolu_1", "is_error": True, "content": [text("z")]},
                text("and?")])],
     [{"role": "assistant", "content": "", "reasoning_content": "t", "tool_calls": [
         {"id": "toolu_1", "type": "function", "function": {"name": "f", "arguments": {"x": "y"}}}]},
      {"role": "tool", "content": [text("Error: "), text("z")], "tool_call_id": "toolu_1"},
      {"role": "user", "content": "and?"}]),
    ([("user", [text("b"), {"type": "tool_result", "tool_use_id": "u"}]), ("user", "c")],
     [{"role": "user", "content": "b"}, {"role": "tool", "content": "", "tool_call_id": "u"},
      {"role": "user", "content": "c"}]),
])
def test_calls_and_results_of_the_history(server: Server, engine: FakeEngine, turns: Any, expected: Any) -> None:
    history = [*([] if turns[0][0] == "user" else HI), *({"role": role, "content": content} for role, content in turns)]
    answer = post(server, messages=history, tools=[TOOL])
    assert answer.status == 200, answer.body
    prompt: Any = engine.calls[0].prompt
    assert prompt[-len(expected):] == expected
    assert "warning" not in answer.headers


def test_what_an_answer_said_may_be_sent_back(server: Server, engine: FakeEngine) -> None:
    engine.says = CALLED
    message = create(server, False)
    ids = [block["id"] for block in blocks(message) if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call_id, "content": "z"} for call_id in ids]
    engine.says = "Done."
    last = create(server, True, messages=[*HI, message.to_param(), {"role": "user", "content": results}])
    assert blocks(last) == [text("Done.")]
    prompt: Any = engine.calls[-1].prompt
    assert [call["id"] for call in prompt[1]["tool_calls"]] == ids == [said["tool_call_id"] for said in prompt[2:]]
    assert prompt[1]["reasoning_content"] == "let me see"


def test_unknown_fields_of_blocks_are_named(server: Server) -> None:
    turns = [*HI, {"role": "assistant", "content": [{**USED, "y": 1}]},
             {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "a", "z": 2}]}]
    answer = post(server, messages=turns, tools=[{**TOOL, "w": 1, "strict": True}])
    assert answer.status == 200, answer.body
    for name in ("tools[0].w, tools[0].strict", "messages[1].content[0].y", "messages[2].content[0].z"):
        assert name in answer.headers["warning"]


def test_tools_are_counted_as_the_prompt_has_them(server: Server, engine: FakeEngine) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        tools: Any = [TOOL]
        assert client.messages.count_tokens(model="fake", messages=HI, tools=tools).input_tokens == 4
    assert engine.calls == []


def test_a_model_that_knows_no_tools(server: Server) -> None:
    server.use(FakeEngine())
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        assert refused(post(server, path, tools=[TOOL])).startswith("tools: ")
    assert post(server, tools=[TOOL], tool_choice={"type": "none"}).status == 200
