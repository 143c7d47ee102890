"""Anthropic's dialect, by the `anthropic` client against a real socket: messages, whole and streamed."""
from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from actors.messages import TextDelta, Usage
from api.answers.parser import AnswerParser
from api.anthropic.schemas import MessagesRequest, Turn
from api.anthropic.write import MessageWriter
from api.engine import SamplingParams
from api.guard import ApiKeys
from api.service import DoorConfig
from tests.api.fake_engine import INFO, FakeEngine
from tests.api.serving import TIMEOUT_S, Answer, Server
from tests.api.test_door import serve, with_tokenizer
from tests.api.test_patience import PERIOD_S, everything, read_until

HI: Any = [{"role": "user", "content": "hé"}]


@pytest.fixture
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=TIMEOUT_S) as client:
        yield client


def post(server: Server, path: str = "/v1/messages", **fields: Any) -> Answer:
    return server.request("POST", path, {"model": "fake", "max_tokens": 50, "messages": HI, **fields})


def events_of(answer: Answer) -> list[tuple[str, Any]]:
    """(event, data); every event names its type twice."""
    found = []
    for event in answer.body.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        found.append((value["type"], value))
    return found


# Answers


def test_a_message(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(model="fake", max_tokens=50, system="s", messages=HI)
    assert answer.id.startswith("msg_")
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "fake")
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": "re s|hé"}]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    usage = answer.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (6, 0, 9)


def test_a_streamed_message(client: anthropic.Anthropic) -> None:
    with client.messages.stream(model="fake", max_tokens=50, system="s", messages=HI) as stream:
        assert "".join(stream.text_stream) == "re s|hé"
        message = stream.get_final_message()
    assert [block.to_dict()["text"] for block in message.content] == ["re s|hé"]
    assert message.stop_reason == "end_turn"
    assert (message.usage.input_tokens, message.usage.output_tokens) == (6, 9)


def test_by_the_async_client(server: Server) -> None:
    async def run() -> str:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:
            async with client.messages.stream(model="fake-alias", max_tokens=50, messages=HI) as stream:
                return "".join([text async for text in stream.text_stream])

    assert asyncio.run(run()) == "re hé"


def test_the_events_of_a_stream(server: Server) -> None:
    events = events_of(post(server, stream=True, max_tokens=2))
    assert [name for name, _ in events] == ["message_start", "content_block_start", "content_block_delta",
                                            "content_block_delta", "content_block_stop", "message_delta",
                                            "message_stop"]
    message = events[0][1]["message"]
    assert message["content"] == []
    assert message["stop_reason"] is None
    assert message["usage"] == {"input_tokens": 4, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
                                "output_tokens": 0}
    assert events[1][1]["content_block"] == {"type": "text", "text": ""}
    assert [event["delta"]["text"] for name, event in events if name == "content_block_delta"] == ["r", "e"]
    assert events[-2][1]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2][1]["usage"]["output_tokens"] == 2


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_without_text_has_no_block(server: Server, tmp_path: Path, stream: bool) -> None:
    def ask() -> None:
        answer = post(server, max_tokens=1, messages=[{"role": "user", "content": "hi"}], stop_sequences=["hi"],
                      stream=stream)
        assert answer.status == 200, answer.body
        if stream:
            names = [name for name, _ in events_of(answer)]
            assert ("content_block_start" in names) == ("content_block_delta" in names) == (
                "content_block_stop" in names)
        else:
            assert all(block["text"] for block in answer.json["content"])

    serve(server, with_template(tmp_path), ask)


def with_template(folder: Path) -> Path:
    """A tiny model that can chat."""
    with_tokenizer(folder, "byte_level")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}")
    return folder


def test_why_it_ended() -> None:
    def told(num_tokens: int, **fields: Any) -> tuple[str, str | None]:
        body = MessagesRequest(model="fake", max_tokens=9, messages=[Turn(role="user", content=[])])
        writer = MessageWriter(body, INFO, "id", lambda first: AnswerParser(None, None), False)
        answer = json.loads(writer.document([TextDelta("r", "a", usage=Usage(5, num_tokens), **fields)]))
        return answer["stop_reason"], answer["stop_sequence"]

    assert told(3, finish="stop") == ("end_turn", None)
    assert told(3, finish="stop", stop_reason="\n\nHuman:") == ("stop_sequence", "\n\nHuman:")
    assert told(9, finish="length") == ("max_tokens", None)
    assert told(8, finish="length") == ("model_context_window_exceeded", None)


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_the_cache_are_told_apart(server: Server, tmp_path: Path, stream: bool) -> None:
    """Their sum is the prompt's length."""
    messages = [{"role": "user", "content": "hi " * 40}]

    def usage(**fields: Any) -> dict[str, int]:
        answer = post(server, messages=messages, max_tokens=2, stream=stream, temperature=0, **fields)
        assert answer.status == 200, answer.body
        if not stream:
            return dict(answer.json["usage"])
        events = events_of(answer)
        started, ended = events[0][1]["message"]["usage"], events[-2][1]["usage"]
        assert {**started, "output_tokens": ended["output_tokens"]} == ended
        return dict(ended)

    def ask() -> None:
        length = post(server, "/v1/messages/count_tokens", messages=messages).json["input_tokens"]
        cold, warm = usage(), usage()
        assert (cold["input_tokens"], cold["cache_read_input_tokens"]) == (length, 0)
        assert warm["cache_read_input_tokens"] == length - 1
        assert warm["input_tokens"] + warm["cache_read_input_tokens"] == length
        assert warm["cache_creation_input_tokens"] == 0

    serve(server, with_template(tmp_path), ask)


# What reaches the engine


def test_sampling_reaches_the_engine(client: anthropic.Anthropic, engine: FakeEngine) -> None:
    create: Any = client.messages.create
    # Newer clients have no names for these three any more.
    create(model="fake", max_tokens=7, messages=HI, stop_sequences=["x", "yz"], metadata={"user_id": "someone"},
           extra_body={"temperature": 0.25, "top_p": 0.5, "top_k": 3})
    create(model="fake", max_tokens=8, messages=HI)
    sampling = engine.calls[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (7, 0.25, 0.5, 3)
    assert sampling.stop == ("x", "yz")
    assert [call.asker["user"] for call in engine.calls] == ["someone", ""]
    assert engine.calls[0].asker["tenant"] == engine.calls[1].asker["tenant"] != ""
    assert engine.calls[1].sampling == SamplingParams(max_tokens=8, temperature=0.5), "the model's own defaults"


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


@pytest.mark.parametrize(("system", "messages", "expected"), [
    ("s", [("user", "a")], [("system", ["s"]), ("user", ["a"])]),
    ([text("s"), {**text("t"), "cache_control": {"type": "ephemeral", "ttl": "1h"}}], [("user", [text("a")])],
     [("system", ["s", "t"]), ("user", ["a"])]),
    (None, [("user", [text("a"), text("b")]), ("assistant", "c"), ("user", "d")],
     [("user", ["a", "b"]), ("assistant", ["c"]), ("user", ["d"])]),
    (None, [("user", "a"), ("user", "b"), ("assistant", "c")], [("user", ["a", "\n\n", "b"]), ("assistant", ["c"])]),
    ("", [("user", "a"), ("assistant", "")], [("system", [""]), ("user", ["a"]), ("assistant", [""])]),
    ([], [("user", "a"), ("assistant", [])], [("user", ["a"]), ("assistant", [""])]),
    ("s", [("system", "t"), ("user", "a")], [("system", ["s", "\n\n", "t"]), ("user", ["a"])]),
])
def test_conversations_become_chat_messages(server: Server, engine: FakeEngine, system: Any, messages: Any,
                                            expected: Any) -> None:
    turns = [{"role": role, "content": content} for role, content in messages]
    answer = post(server, messages=turns, **({} if system is None else {"system": system}))
    assert answer.status == 200, answer.body
    assert engine.calls[0].prompt == [
        {"role": role, "content": parts[0] if len(parts) == 1 else [text(part) for part in parts]}
        for role, parts in expected]
    goes_on = messages[-1][0] == "assistant"
    assert engine.calls[0].template == (not goes_on, goes_on, {}), "an assistant's last turn is gone on with"


def test_a_last_turn_of_the_assistant_is_gone_on_with(server: Server, tmp_path: Path) -> None:
    def ask() -> None:
        turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "So "}]
        count = post(server, "/v1/messages/count_tokens", messages=turns).json["input_tokens"]
        prompt = server.request("POST", "/tokenize", {"prompt": "user: hi\nassistant: So ",
                                                      "add_special_tokens": False}).json
        assert count == prompt["count"]
        assert post(server, messages=turns, max_tokens=1).status == 200

    serve(server, with_template(tmp_path), ask)


def test_an_answer_has_the_form_that_was_asked_for(server: Server, engine: FakeEngine, tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
              "required": ["n"], "additionalProperties": False}
    form = {"format": {"type": "json_schema", "schema": schema}}

    def ask() -> None:
        for stream in (False, True):
            answer = post(server, max_tokens=60, temperature=1, output_config=form, stream=stream)
            assert answer.status == 200, answer.body
            said = answer.json["content"][0]["text"] if not stream else "".join(
                event["delta"]["text"] for kind, event in events_of(answer) if kind == "content_block_delta")
            assert json.loads(said)["n"] in range(10)
        message = refused(post(server, output_config={"format": {**form["format"], "schema": {"not": {}}}}))
        assert message.startswith("output_config.format.schema: ")

    serve(server, with_template(tmp_path), ask)


# Counting


def test_tokens_are_counted(client: anthropic.Anthropic, engine: FakeEngine) -> None:
    assert client.messages.count_tokens(model="fake", system="s", messages=HI).input_tokens == 6
    assert client.messages.count_tokens(model="fake", messages=HI).input_tokens == 4
    assert engine.calls == []


def test_a_prompt_past_the_context_is_counted_and_not_answered(server: Server, tmp_path: Path) -> None:
    def ask() -> None:
        turns = [{"role": "user", "content": "x" * 500}]
        assert post(server, "/v1/messages/count_tokens", messages=turns).json["input_tokens"] > 256
        assert refused(post(server, messages=turns)).startswith("messages: ")

    serve(server, with_template(tmp_path), ask, max_model_len=256)


# Refusals


def refused(answer: Answer, status: int = 400, kind: str = "invalid_request_error") -> str:
    assert answer.status == status, answer.body
    assert answer.headers["content-type"] == "application/json"
    told = answer.json
    assert set(told) == {"type", "error", "request_id"}
    assert told["type"] == "error"
    assert told["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    assert set(told["error"]) == {"type", "message"}
    assert told["error"]["type"] == kind
    return str(told["error"]["message"])


TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {"x": {"type": "string"}}}}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"x": "y"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "z"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(("fields", "field"), [
    ({"max_tokens": None}, "max_tokens"), ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": 1.5}, "max_tokens"),
    ({"model": None}, "model"), ({"model": 5}, "model"),
    ({"messages": []}, "messages"), ({"messages": None}, "messages"), ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [text("a"), IMAGE]}]}, "messages[0].content[1].type"),
    ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": "a"}] * 5000}, "messages"),
    ({"messages": [{"role": "user", "content": [CALL]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "assistant", "content": [RESULT]}]}, "messages[0].content[0].type"),
    ({"messages": [*HI, {"role": "assistant", "content": [CALL]}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": [{**RESULT, "content": [IMAGE]}]}]},
     "messages[0].content[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{**RESULT, "tool_use_id": 5}]}]}, "messages[0].content[0].tool_use_id"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name"), ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [TOOL] * 1000}, "tools"), ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
    ({"system": 5}, "system"), ({"system": [IMAGE]}, "system[0].type"),
    ({"temperature": -1}, "temperature"), ({"top_p": 0}, "top_p"), ({"top_k": 1.5}, "top_k"), ({"top_k": -2}, "top_k"),
    ({"stop_sequences": "a"}, "stop_sequences"), ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ({"stop_sequences": ["a"] * 500_000}, "stop_sequences"), ({"stop_sequences": ["a" * 10**6]}, "stop_sequences[0]"),
    ({"metadata": {"user_id": 5}}, "metadata.user_id"), ({"metadata": {"user_id": "x" * 2000}}, "metadata.user_id"),
    ({"metadata": 5}, "metadata"), ({"stream": 1}, "stream"), ({"cache_control": {"type": "x"}}, "cache_control.type"),
    ({"container": "c"}, "container"), ({"service_tier": "priority"}, "service_tier"), ({"speed": "fast"}, "speed"),
    ({"output_config": {"effort": "low"}}, "output_config.effort"), ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"tools": [{"name": "f", "input_schema": {}}]}, "tools"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"output_config": {"format": {"type": "text", "schema": {}}}}, "output_config.format.type"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 4}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1.5}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": True}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "disabled", "budget_tokens": 1}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type"),
])
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_field_is_named(server: Server, engine: FakeEngine, fields: dict[str, Any], field: str,
                              stream: bool) -> None:
    given = {name: value for name, value in {"stream": stream, **fields}.items() if value is not None}
    body = {"model": "fake", "max_tokens": 5, "messages": HI, **given}
    for name, value in fields.items():
        if value is None:
            del body[name]
    message = refused(server.request("POST", "/v1/messages", body))
    assert message.startswith(f"{field}: ")
    assert engine.calls == []


@pytest.mark.parametrize("fields", [
    {"tools": [], "tool_choice": {"type": "auto"}}, {"thinking": {"type": "disabled"}}, {"service_tier": "auto"},
    {"cache_control": {"type": "ephemeral"}}, {"metadata": {}}, {"metadata": {"user_id": None}}, {"system": None},
    {"stop_sequences": []}, {"temperature": None}, {"top_k": 0},
])
def test_what_asks_for_nothing_is_served(server: Server, fields: dict[str, Any]) -> None:
    answer = post(server, **fields)
    assert answer.json["content"] == [text("re hé")]
    assert "warning" not in answer.headers


def test_unknown_fields_are_named(server: Server) -> None:
    answer = post(server, something=1, messages=[{"role": "user", "content": [{**text("a"), "x": 1}], "y": 2}])
    assert answer.status == 200
    assert "something, messages[0].y" in answer.headers["warning"]


def test_errors_are_the_clients_own(client: anthropic.Anthropic, server: Server) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(model="nobody", max_tokens=5, messages=HI)
    assert unknown.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    assert unknown.value.request_id
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(model="fake", max_tokens=5, messages=HI, stop_sequences=[""])
    with pytest.raises(anthropic.InternalServerError):
        client.messages.create(model="fake", max_tokens=50, messages=[{"role": "user", "content": "FAIL"}])
    with pytest.raises(anthropic.APIStatusError) as failed, client.messages.stream(
            model="fake", max_tokens=50, messages=[{"role": "user", "content": "FAIL"}]) as stream:
        stream.until_done()
    assert "secret" not in str(failed.value.body)


def test_a_stream_that_fails_ends_with_one_error(server: Server) -> None:
    """FAULTS S09."""
    answer = post(server, stream=True, messages=[{"role": "user", "content": "FAIL"}])
    assert answer.status == 200
    names = [name for name, _ in events_of(answer)]
    assert names[0] == "message_start"
    assert names.count("error") == 1
    assert names[-1] == "error"
    error = events_of(answer)[-1][1]
    assert error["error"]["type"] == "api_error"
    assert error["request_id"] == answer.headers["request-id"]


def test_a_full_queue(server: Server) -> None:
    answer = post(server, messages=[{"role": "user", "content": "BUSY"}], stream=True)
    refused(answer, 429, "rate_limit_error")
    assert answer.headers["retry-after"] == "3"


def test_what_no_route_sees_is_told_in_its_words_too(server: Server) -> None:
    too_long = {"Content-Length": str(1 << 30)}
    refused(server.request("POST", "/v1/messages", b"{", too_long), 413, "request_too_large")
    refused(server.request("POST", "/v1/messages", b"{"))
    refused(server.request("GET", "/v1/messages"), 405)
    refused(server.request("POST", "/v1/messages/nothing"), 404, "not_found_error")
    assert "POST" in server.request("GET", "/v1/messages").headers["allow"]
    other = server.request("POST", "/v1/messages_of_others")
    assert other.error["code"] == "not_found"
    assert "request-id" not in other.headers


def test_a_prompt_that_is_too_long_is_told_of(server: Server) -> None:
    too_long = [{"role": "user", "content": "a" * INFO.max_model_len}]
    message = refused(post(server, messages=too_long))
    assert str(INFO.max_model_len) in message


def test_a_server_that_answers_no_more_is_overloaded(server: Server, engine: FakeEngine) -> None:
    dead = FakeEngine()
    server.use(dead)
    dead.kill()
    refused(post(server), 503, "overloaded_error")
    server.use(engine)


def test_who_has_no_key_is_told_in_its_words(engine: FakeEngine) -> None:
    with Server(DoorConfig(ApiKeys(["sk-ant"]))) as locked:
        locked.use(engine)
        answer = post(locked)
        refused(answer, 401, "authentication_error")
        assert answer.headers["www-authenticate"] == "Bearer"
        with anthropic.Anthropic(base_url=locked.url, api_key="wrong", max_retries=0) as client:
            with pytest.raises(anthropic.AuthenticationError):
                client.messages.create(model="fake", max_tokens=5, messages=HI)
        with anthropic.Anthropic(base_url=locked.url, api_key="sk-ant", max_retries=0) as client:
            assert client.messages.create(model="fake", max_tokens=1, messages=HI).stop_reason == "max_tokens"
    assert len(engine.calls) == 1


def test_a_silent_stream_has_pings(engine: FakeEngine) -> None:
    with Server(DoorConfig(keep_alive_s=PERIOD_S)) as server:
        server.use(engine)
        body = {"model": "fake", "max_tokens": 50, "messages": [{"role": "user", "content": "HOLD"}], "stream": True}
        with server.post("/v1/messages", body) as connection:
            begin = read_until(connection, b'event: ping\ndata: {"type":"ping"}\n\n')
            assert b"message_start" not in begin
            engine.release()
            assert b": keep-alive" not in read_until(connection, b"message_stop")
        with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
            with client.messages.stream(model="fake", max_tokens=50, messages=HI) as stream:
                assert "".join(stream.text_stream) == "re hé"
        server.wait_until_idle()


def test_an_answer_is_aborted_by_its_id(server: Server, engine: FakeEngine) -> None:
    body = {"model": "fake", "max_tokens": 4000, "stream": True, "messages": [{"role": "user", "content": "ENDLESS"}]}
    with server.post("/v1/messages", body) as connection:
        begin = read_until(connection, b"content_block_delta").decode()
        answer_id = begin.partition('"id":"')[2].partition('"')[0]
        assert server.request("POST", "/abort", {"request_id": answer_id}).json == {"aborted": [answer_id]}
        assert b'"api_error"' in everything(connection).partition(b"event: error")[2]
