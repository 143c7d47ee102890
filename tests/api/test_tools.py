"""Tools and thoughts over HTTP, as the openai client has them: an engine that answers given texts, streamed and not."""
from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import openai
import pytest

from api.service import DoorConfig
from tests.api.fake_engine import INFO, FakeEngine
from tests.api.serving import TIMEOUT_S, Answer, Server

QWEN = replace(INFO, knows_tools=True, chat_template="{% if tools %}<tool_call>{% endif %}<think>")
MISTRAL = replace(INFO, knows_tools=True, chat_template="{{ tools }}[TOOL_CALLS]",
                  control_tokens=frozenset({"[TOOL_CALLS]", "</s>"}))

WEATHER: Any = {"type": "function", "function": {
    "name": "get_weather", "description": "Tells the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
NOW: Any = {"type": "function", "function": {"name": "now"}}
TOOLS: Any = [WEATHER, {"type": "function", "function": {"name": "a"}}, {"type": "function", "function": {"name": "b"}},
              NOW]
HI: Any = [{"role": "user", "content": "hi"}]

ONE = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
TWO = f'I look.\n{ONE}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'


@dataclass
class Said:
    """A choice, however it came."""
    content: str | None
    finish_reason: str
    calls: list[tuple[str, str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    reasoning: str = ""


@pytest.fixture
def qwen(server: Server) -> FakeEngine:
    engine = FakeEngine(QWEN)
    server.use(engine)
    return engine


@pytest.fixture
def mistral(server: Server) -> FakeEngine:
    engine = FakeEngine(MISTRAL)
    server.use(engine)
    return engine


@pytest.fixture(autouse=True)
def _plain_again(server: Server, engine: FakeEngine) -> Iterator[None]:
    """The server's own check after a test asks a plain engine."""
    yield
    server.use(engine)


def ask(client: openai.OpenAI, stream: bool, **fields: Any) -> Said:
    create: Any = client.chat.completions.create
    fields = {"model": "fake", "messages": HI, "tools": TOOLS, **fields}
    return streamed(create(stream=True, **fields)) if stream else whole(create(**fields).choices[0])


def whole(choice: Any) -> Said:
    calls = choice.message.tool_calls or []
    assert {call.type for call in calls} <= {"function"}
    return Said(choice.message.content, choice.finish_reason,
                [(call.function.name, call.function.arguments) for call in calls], [call.id for call in calls],
                getattr(choice.message, "reasoning_content", ""))


def streamed(chunks: Any, index: int = 0) -> Said:
    """Checks the shape: index in order, id, type and name in the first fragment of a call and nowhere else."""
    said = Said("", "")
    for chunk in chunks:
        choice = chunk.choices[0]
        if choice.index != index:
            continue
        assert said.finish_reason == "", "nothing comes after the end"
        delta = choice.delta
        said.content = (said.content or "") + (delta.content or "")
        said.reasoning += getattr(delta, "reasoning_content", None) or ""
        for call in delta.tool_calls or ():
            if call.index == len(said.calls):
                assert (call.type, call.function.arguments) == ("function", "")
                said.calls.append((call.function.name, ""))
                said.ids.append(call.id)
            else:
                assert call.index == len(said.calls) - 1, "one after the other"
                assert (call.id, call.type, call.function.name) == (None, None, None)
                name, arguments = said.calls[-1]
                said.calls[-1] = name, arguments + call.function.arguments
        said.finish_reason = choice.finish_reason or ""
    return said


@pytest.mark.parametrize("stream", [False, True])
def test_a_call(client: openai.OpenAI, qwen: FakeEngine, stream: bool) -> None:
    qwen.says = ONE
    said = ask(client, stream)
    assert said.calls == [("get_weather", '{"city": "Zürich"}')]
    assert said.finish_reason == "tool_calls"
    assert not said.content
    assert [call.tools for call in qwen.calls] == [[
        WEATHER, *({"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
                   for name in ("a", "b", "now"))]]


@pytest.mark.parametrize("stream", [False, True])
def test_calls_in_parallel(client: openai.OpenAI, qwen: FakeEngine, stream: bool) -> None:
    """FAULTS F03."""
    qwen.says = TWO
    said = ask(client, stream)
    assert (said.content, said.finish_reason) == ("I look.", "tool_calls")
    assert said.calls == [("get_weather", '{"city": "Zürich"}'), ("now", "{}")]
    assert len(set(said.ids)) == 2
    assert all(one.startswith("call_") for one in said.ids)
    one = ask(client, stream, parallel_tool_calls=False)
    assert (len(one.calls), one.finish_reason) == (1, "tool_calls")
    assert one.content == 'I look.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def test_the_client_s_own_sum_of_a_stream(client: openai.OpenAI, qwen: FakeEngine) -> None:
    qwen.says = TWO
    with client.chat.completions.stream(model="fake", messages=HI, tools=TOOLS) as stream:
        choice = stream.get_final_completion().choices[0]
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
    assert [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()] == [
        ("get_weather", '{"city": "Zürich"}'), ("now", "{}")]


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_template_that_refuses_parallel_calls_has_none_in_its_history(client: openai.OpenAI, server: Server,
                                                                        choice: str) -> None:
    engine = FakeEngine(replace(QWEN, chat_template="{{ tools }}<|start_header_id|>{{ raise_exception("
                                "'This model only supports single tool-calls at once!') }}"))
    engine.says = '{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}'
    server.use(engine)
    said = ask(client, False, tool_choice=choice)
    assert (len(said.calls), said.content) == (1, '; {"name": "now", "parameters": {}}')
    assert len(ask(client, False, parallel_tool_calls=True).calls) == 2


def test_every_choice_has_its_own_calls(client: openai.OpenAI, qwen: FakeEngine) -> None:
    qwen.says = ONE
    create: Any = client.chat.completions.create
    answer = create(model="fake", messages=HI, tools=TOOLS, n=2)
    ids = [choice.message.tool_calls[0].id for choice in answer.choices]
    chunks = list(create(model="fake", messages=HI, tools=TOOLS, n=2, stream=True))
    for index in (0, 1):
        said = streamed(chunks, index)
        assert (said.calls, said.finish_reason) == ([("get_weather", '{"city": "Zürich"}')], "tool_calls")
        ids += said.ids
    assert len(set(ids)) == 4


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_is_none(client: openai.OpenAI, qwen: FakeEngine, stream: bool) -> None:
    """FAULTS F01."""
    qwen.says = ONE
    for max_tokens in range(1, len(ONE.encode()) + 2):
        said = ask(client, stream, max_tokens=max_tokens)
        if max_tokens <= len(ONE.encode()):
            assert said.finish_reason == "length"
        else:
            assert said.finish_reason == "tool_calls"
            assert json.loads(said.calls[0][1]) == {"city": "Zürich"}
        if not stream and said.finish_reason == "length":
            kept = ONE.encode()[:max_tokens].decode("utf-8", "replace")
            assert said.content == kept or said.calls == [("get_weather", '{"city": "Zürich"}')]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("says", ['<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>',
                                  '<tool_call>\n{"name": "now", "arguments": {oops}}\n</tool_call>', "no call at all",
                                  "a <tool_c", '{"name": "now", "arguments": {}}'])
def test_what_is_no_call_is_content(client: openai.OpenAI, qwen: FakeEngine, says: str, stream: bool) -> None:
    qwen.says = says
    said = ask(client, stream)
    assert (said.content, said.finish_reason) == (says, "stop")
    assert not said.calls or stream


@pytest.mark.parametrize("stream", [False, True])
def test_without_tools_nothing_is_a_call(client: openai.OpenAI, qwen: FakeEngine, stream: bool) -> None:
    qwen.says = ONE
    choices: list[dict[str, Any]] = [{"tool_choice": "none"}, {"tools": []}, {"tools": openai.NOT_GIVEN}]
    for fields in choices:
        said = ask(client, stream, **fields)
        assert (said.content, said.calls, said.finish_reason) == (ONE, [], "stop")
    assert all(not call.tools for call in qwen.calls), "the model is not told of them either"


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts(client: openai.OpenAI, qwen: FakeEngine, stream: bool) -> None:
    qwen.says = f"<think>\nhm, Zürich\n</think>\n\n{ONE}"
    said = ask(client, stream)
    assert (said.reasoning, said.content or "") == ("hm, Zürich", "")
    assert (len(said.calls), said.finish_reason) == (1, "tool_calls")
    qwen.says = "<think>\nhm\n</think>\n\nYes."
    said = ask(client, stream, tools=openai.NOT_GIVEN)
    assert (said.reasoning, said.content, said.finish_reason) == ("hm", "Yes.", "stop")
    said = ask(client, stream, tools=openai.NOT_GIVEN, extra_body={"include_reasoning": False})
    assert (said.reasoning, said.content) == ("", "Yes.")
    said = ask(client, stream, tools=openai.NOT_GIVEN, max_tokens=9)
    assert (said.reasoning, said.content, said.finish_reason) == ("h", "", "length")


@pytest.mark.parametrize("stream", [False, True])
def test_a_thought_that_the_prompt_begins(client: openai.OpenAI, qwen: FakeEngine, stream: bool) -> None:
    qwen.says = "hm</think>Yes."
    begun: Any = [*HI, {"role": "assistant", "content": "<think>\n"}]
    said = ask(client, stream, messages=begun)
    assert (said.reasoning, said.content) == ("hm", "Yes.")
    said = ask(client, stream)
    assert (said.reasoning, said.content) == ("", "hm</think>Yes.")


@pytest.mark.parametrize("stream", [False, True])
def test_marks_that_are_control_tokens_are_in_the_text(client: openai.OpenAI, mistral: FakeEngine,
                                                       stream: bool) -> None:
    mistral.says = '[TOOL_CALLS][{"name": "now", "arguments": {"x": 1}}]'
    said = ask(client, stream)
    assert said.calls == [("now", '{"x": 1}')]
    assert len(said.ids[0]) == 9, "its template refuses others"
    ask(client, stream, tool_choice="none")
    assert [call.sampling.skip_special_tokens for call in mistral.calls] == [False, True]


def test_token_ids_and_logprobs_stand_beside_calls(client: openai.OpenAI, qwen: FakeEngine) -> None:
    qwen.says = ONE
    create: Any = client.chat.completions.create
    fields: Any = {"model": "fake", "messages": HI, "tools": TOOLS, "logprobs": True,
                   "extra_body": {"return_token_ids": True}}
    choice = create(**fields).choices[0]
    ids: list[int] = []
    num_logprobs = 0
    for chunk in create(stream=True, **fields):
        ids += chunk.choices[0].model_dump().get("token_ids") or []
        if chunk.choices[0].logprobs is not None:
            num_logprobs += len(chunk.choices[0].logprobs.content)
    assert ids == choice.model_dump()["token_ids"]
    assert num_logprobs == len(choice.logprobs.content) == len(ids)


# The history


def history(*turns: dict[str, Any]) -> list[dict[str, Any]]:
    return [*HI, *turns]


def call(arguments: Any = "{}", **fields: Any) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": arguments}, **fields}


@pytest.mark.parametrize(("arguments", "read"), [
    ('{"a": 1}', {"a": 1}), ("", {}), (None, {}), (" ", {}), ("null", {}), ({"a": [1]}, {"a": [1]})])
def test_calls_of_the_history_reach_the_template_as_objects(server: Server, qwen: FakeEngine, arguments: Any,
                                                            read: Any) -> None:
    """FAULTS F04."""
    answer = chat(server, history(
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call(arguments, index=0)]},
        {"role": "tool", "tool_call_id": "nobody's", "content": "noon"}))
    assert answer.status == 200, answer.body
    assert "warning" not in answer.headers
    assert qwen.calls[0].prompt[1:] == [
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": read}}]},
        {"role": "tool", "content": "noon", "tool_call_id": "nobody's"}]


def test_arguments_may_be_absent(server: Server, qwen: FakeEngine) -> None:
    answer = chat(server, history({"role": "assistant", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "now"}}]}))
    assert answer.status == 200, answer.body


@pytest.mark.parametrize("arguments", ['{"a": "', '"x"', "[1]", "5", [1], 5, "x", True])
def test_arguments_that_are_no_object_are_named(server: Server, qwen: FakeEngine, arguments: Any) -> None:
    """FAULTS F04."""
    answer = chat(server, history({"role": "assistant", "tool_calls": [call(), call(arguments)]}))
    assert (answer.status, answer.error["param"]) == (400, "messages[1].tool_calls[1].function.arguments")


@pytest.mark.parametrize(("turn", "param"), [
    ({"role": "user", "content": "a", "tool_calls": [call()]}, "messages[1].tool_calls"),
    ({"role": "assistant", "tool_calls": {}}, "messages[1].tool_calls"),
    ({"role": "assistant", "tool_calls": [5]}, "messages[1].tool_calls[0]"),
    ({"role": "assistant", "tool_calls": [{"type": "custom"}]}, "messages[1].tool_calls[0].type"),
    ({"role": "assistant", "tool_calls": [{"function": {}}]}, "messages[1].tool_calls[0].function.name"),
    ({"role": "assistant", "tool_calls": [call(id=5)]}, "messages[1].tool_calls[0].id"),
    ({"role": "tool", "tool_call_id": "x"}, "messages[1].content"),
    ({"role": "user", "content": "a", "reasoning_content": "b"}, "messages[1].reasoning_content")])
def test_bad_turns_are_named(server: Server, qwen: FakeEngine, turn: dict[str, Any], param: str) -> None:
    answer = chat(server, history(turn))
    assert (answer.status, answer.error["param"]) == (400, param)


def chat(server: Server, messages: Any, **fields: Any) -> Answer:
    return server.request("POST", "/v1/chat/completions", {"messages": messages, **fields})


# Refusals


@pytest.mark.parametrize(("fields", "param"), [
    ({"tools": {}}, "tools"), ({"tools": [5]}, "tools[0]"), ({"tools": [{}]}, "tools[0].type"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"), ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "tools[0].function.parameters"),
    ({"tools": [NOW, NOW]}, "tools[1].function.name"), ({"tools": [NOW] * 513}, "tools"),
    ({"tools": [NOW], "tool_choice": "sometimes"}, "tool_choice"), ({"tools": [NOW], "tool_choice": 5}, "tool_choice"),
    ({"tools": [NOW], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"tools": [NOW], "tool_choice": {"type": "function"}}, "tool_choice.function.name"),
    ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name"),
    ({"tool_choice": "required"}, "tool_choice"), ({"tools": [NOW], "parallel_tool_calls": 1}, "parallel_tool_calls"),
    *(({"thinking_token_budget": value}, "thinking_token_budget") for value in (-1, 1.5, "5", True, 2**31)),
    ({"functions": [NOW]}, "functions")])
def test_bad_fields_are_named(server: Server, qwen: FakeEngine, fields: dict[str, Any], param: str) -> None:
    answer = chat(server, HI, **fields)
    assert (answer.status, answer.error["param"]) == (400, param), answer.body


def test_a_model_that_knows_no_tools_says_so(server: Server, engine: FakeEngine) -> None:
    answer = chat(server, HI, tools=[NOW])
    assert (answer.status, answer.error["param"]) == (400, "tools")
    assert "chat template knows no tools" in answer.error["message"]
    assert chat(server, HI, tools=[NOW], tool_choice="none").status == 200


def test_a_model_whose_calls_are_of_no_known_format_says_so(server: Server) -> None:
    server.use(FakeEngine(replace(INFO, knows_tools=True, chat_template="{{ tools }}")))
    answer = chat(server, HI, tools=[NOW])
    assert (answer.status, answer.error["param"]) == (400, "tools")
    assert "--tool-call-parser" in answer.error["message"]


def test_strict_is_told_of_where_nothing_comes_of_it(server: Server, qwen: FakeEngine) -> None:
    def warning(strict: bool) -> str | None:
        tool = {"type": "function", "function": {"name": "now", "strict": strict}}
        return chat(server, HI, tools=[tool]).headers["warning"]

    assert "tools[0].function.strict" in (warning(True) or "")
    assert warning(False) is None


def test_effort_is_for_templates_that_look_at_it(server: Server, engine: FakeEngine) -> None:
    answer = chat(server, HI, reasoning_effort="high")
    assert (answer.status, answer.error["param"]) == (400, "reasoning_effort")
    assert chat(server, HI, reasoning_effort="none").status == 200
    assert chat(server, HI, reasoning_effort="lots").error["param"] == "reasoning_effort"
    thinker = FakeEngine(replace(INFO, chat_template="{{ reasoning_effort }}"))
    server.use(thinker)
    assert chat(server, HI, reasoning_effort="high", chat_template_kwargs={"a": 1}).status == 200
    assert chat(server, HI, reasoning_effort="high", chat_template_kwargs={"reasoning_effort": "low"}).status == 200
    assert chat(server, HI, reasoning_effort="none").status == 200
    assert [call.template[2] for call in thinker.calls] == [
        {"reasoning_effort": "high", "a": 1}, {"reasoning_effort": "low"}, {"reasoning_effort": "none"}]


# The server's flags


@pytest.mark.parametrize(("config", "says", "said"), [
    (DoorConfig(tool_call_parser="none"), ONE, Said(ONE, "stop")),
    (DoorConfig(tool_call_parser="llama3_json"), '{"name": "now", "parameters": {}}',
     Said(None, "tool_calls", [("now", "{}")])),
    (DoorConfig(reasoning_parser="none"), "<think>a</think>b", Said("<think>a</think>b", "stop")),
    (DoorConfig(reasoning_parser="mistral"), "[THINK]a[/THINK]b", Said("b", "stop", reasoning="a"))])
def test_parsers_can_be_chosen(config: DoorConfig, says: str, said: Said) -> None:
    engine = FakeEngine(QWEN)
    engine.says = says
    with Server(config) as server:
        server.use(engine)
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S) as client:
            answer = ask(client, stream=False)
    assert replace(answer, ids=[]) == said
    assert len(engine.calls[0].tools) == 4


# Without an answer


def test_prompts_with_tools_are_shown(server: Server, qwen: FakeEngine) -> None:
    body = {"messages": HI, "tools": [NOW]}
    prompt = server.request("POST", "/apply_template", body).json["prompt"]
    assert "'tools': [{'type': 'function', 'function': {'name': 'now'," in prompt
    assert server.request("POST", "/tokenize", body).status == 200
