"""Calls that have to be made: what reaches the engine, and what a model without any sense of it makes of that."""
from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from actors.sampling_params import Thought
from tests.api.fake_engine import INFO, FakeEngine
from tests.api.serving import TIMEOUT_S, Server
from tests.api.test_door import door
from tests.api.test_engine import MODELS
from tests.api.test_engine_parameters import TOKENIZER
from tests.api.test_tools import HI, NOW, QWEN, TOOLS, WEATHER, ask, chat, streamed, whole
from tests.weights.tiny_tokenizers import CHATML, write_folder

NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
CALLS = '[{"name": "get_weather", "arguments": {"city":"Oslo"}}, {"name": "now", "arguments": {}}]'


@pytest.fixture
def qwen(server: Server) -> FakeEngine:
    engine = FakeEngine(QWEN)
    server.use(engine)
    return engine


@pytest.fixture(autouse=True)
def _plain_again(server: Server, engine: FakeEngine) -> Any:
    yield
    server.use(engine)


def form(engine: FakeEngine) -> dict[str, Any]:
    wanted = engine.calls[-1].sampling.structured_outputs
    assert wanted is not None
    assert (wanted.kind, wanted.name) == ("calls", "tools")
    return dict(json.loads(wanted.text))


@pytest.mark.parametrize("stream", [False, True])
def test_required_calls_have_a_form_and_are_read(client: openai.OpenAI, qwen: FakeEngine, stream: bool) -> None:
    qwen.says = CALLS
    said = ask(client, stream, tool_choice="required")
    assert said.calls == [("get_weather", '{"city":"Oslo"}'), ("now", "{}")]
    assert (said.content or "", said.finish_reason) == ("", "tool_calls")
    assert [name for name, _ in form(qwen)["functions"]] == ["get_weather", "a", "b", "now"]
    assert form(qwen)["functions"][0][1] == WEATHER["function"]["parameters"]
    assert form(qwen)["functions"][3][1] == {"type": "object", "properties": {}, "additionalProperties": False}
    assert form(qwen)["parallel"]
    ask(client, stream, tool_choice="required", parallel_tool_calls=False)
    assert not form(qwen)["parallel"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_tool_is_the_only_one(client: openai.OpenAI, qwen: FakeEngine, stream: bool) -> None:
    qwen.says = '[{"name": "get_weather", "arguments": {"city":"Oslo"}}]'
    said = ask(client, stream, tool_choice=NAMED)
    assert said.calls == [("get_weather", '{"city":"Oslo"}')]
    assert said.finish_reason == "tool_calls"
    assert [name for name, _ in form(qwen)["functions"]] == ["get_weather"]
    assert not form(qwen)["parallel"]
    assert len(qwen.calls[-1].tools) == 4, "the model is told of all"


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_come_before(client: openai.OpenAI, qwen: FakeEngine, stream: bool) -> None:
    qwen.says = f"<think>\nhm\n</think>\n\n{CALLS}"
    said = ask(client, stream, tool_choice="required")
    assert (said.reasoning, len(said.calls), said.finish_reason) == ("hm", 2, "tool_calls")
    assert qwen.calls[-1].sampling.thought == Thought("<think>", "</think>")


def test_a_format_of_the_model_s_own_is_not_needed(client: openai.OpenAI, server: Server) -> None:
    engine = FakeEngine(replace(INFO, knows_tools=True, chat_template="{{ tools }}"))
    engine.says = CALLS
    server.use(engine)
    assert len(ask(client, False, tool_choice="required").calls) == 2
    assert engine.calls[-1].sampling.thought is None


def test_the_answer_has_one_form(server: Server, qwen: FakeEngine) -> None:
    answer = chat(server, HI, tools=[NOW], tool_choice="required", response_format={"type": "json_object"})
    assert (answer.status, answer.error["param"]) == (400, "tool_choice")


@pytest.mark.parametrize(("parameters", "param"), [
    ({"type": "string"}, "tools[0].function.parameters.type"), ({"x-guidance": {}}, "tools[0].function.parameters")])
def test_parameters_that_cannot_be_enforced_are_named(server: Server, qwen: FakeEngine, parameters: dict[str, Any],
                                                      param: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    answer = chat(server, HI, tools=[tool], tool_choice="required")
    assert (answer.status, answer.error["param"]) == (400, param)
    assert chat(server, HI, tools=[tool]).status == 200


def test_strict_is_what_they_are(server: Server, qwen: FakeEngine) -> None:
    tool = {"type": "function", "function": {"name": "f", "strict": True, "surprise": 1}}
    answer = chat(server, HI, tools=[tool], tool_choice="required")
    assert "surprise" in answer.headers["warning"]
    assert "strict" not in answer.headers["warning"]


def test_anthropic_s_any_and_tool_are_enforced_too(server: Server, qwen: FakeEngine) -> None:
    qwen.says = '[{"name": "now", "arguments": {}}]'
    tool: Any = {"name": "now", "input_schema": {"type": "object"}}
    choices: Any = [{"type": "any"}, {"type": "tool", "name": "now"}]
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        for choice in choices:
            answer = client.messages.create(model="fake", max_tokens=99, messages=HI, tools=[tool], tool_choice=choice)
            assert answer.stop_reason == "tool_use"
            assert [block.type for block in answer.content] == ["tool_use"]
            assert form(qwen)["parallel"] == (choice["type"] == "any")


# Through the whole engine

CITIES = ["Oslo", "Zürich"]
SMALL: Any = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {
        "type": "object", "required": ["city"], "additionalProperties": False,
        "properties": {"city": {"$ref": "#/$defs/city"}}, "$defs": {"city": {"enum": CITIES}}}}},
    {"type": "function", "function": {"name": "now"}}]


def test_a_random_model_makes_valid_calls(server: Server, tmp_path: Path) -> None:
    """FAULTS F01: and none that is cut passes for one."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(MODELS / "llama" / name, tmp_path)
    template = "{% if tools %}<tool_call>{% endif %}" + CHATML
    folder = write_folder(tmp_path, TOKENIZER, tokenizer_config={"chat_template": template, "eos_token": "<|im_end|>"})

    def check(said: Any, names: tuple[str, ...]) -> None:
        if said.finish_reason == "length":
            return
        assert said.finish_reason == "tool_calls"
        assert said.calls
        for name, arguments in said.calls:
            assert name in names
            assert json.loads(arguments) in ([{"city": city} for city in CITIES] if name == "get_weather" else [{}])

    def ask_all() -> None:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S) as client:
            create: Any = client.chat.completions.create
            fields: Any = {"messages": HI, "tools": SMALL, "temperature": 1.5, "seed": 3, "model": "fake"}
            finishes = []
            for max_tokens in (1, 5, 20, 40, 60, 80, 150):
                for choice, names in (("required", ("get_weather", "now")), (NAMED, ("get_weather",))):
                    options = {**fields, "max_tokens": max_tokens, "tool_choice": choice, "parallel_tool_calls": False}
                    answer, stream = whole(create(**options).choices[0]), streamed(create(stream=True, **options))
                    check(answer, names)
                    check(stream, names)
                    assert answer.finish_reason == stream.finish_reason
                    if answer.finish_reason == "tool_calls":
                        assert answer.calls == stream.calls
                    finishes.append(answer.finish_reason)
            assert {"length", "tool_calls"} == set(finishes)
            refused = chat(server, HI, tools=[{"type": "function", "function": {
                "name": "f", "parameters": {"properties": {"x": {"type": "string", "pattern": "(?=a)"}}}}}],
                tool_choice="required")
            assert (refused.status, refused.error["param"]) == (400, "tools")

    async def main() -> None:
        async with asyncio.timeout(60), door(server, folder, max_model_len=256):
            await asyncio.to_thread(ask_all)

    asyncio.run(main())


def test_tools_of_the_request_are_all_that_is_called(client: openai.OpenAI, qwen: FakeEngine) -> None:
    qwen.says = '[{"name": "now", "arguments": {}}]'
    said = ask(client, False, tools=TOOLS, tool_choice=NAMED)
    assert (said.content, said.calls, said.finish_reason) == (qwen.says, [], "stop")
