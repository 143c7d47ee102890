"""Answers of a wanted form over HTTP: by OpenAI's and vLLM's names, through the openai client, and what is refused."""
from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import jsonschema
import openai
import pytest

from api.engine import Engine
from tests.api.serving import TIMEOUT_S, Server
from tests.api.test_engine import tiny
from tests.api.test_engine_parameters import byte_model

SCHEMA: dict[str, Any] = {"type": "object", "required": ["ok", "id"], "additionalProperties": False,
                          "properties": {"ok": {"type": "boolean"}, "id": {"enum": ["a", "bc", 7]}}}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA}}
HI: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = byte_model(tmp_path_factory.mktemp("model"))
    started: Future[Engine] = Future()
    stop: Future[None] = Future()

    async def serve() -> None:
        async with tiny("reference", str(folder), kv_cache_memory=None, max_model_len=256,
                        served_model_name=("fake",)) as engine:
            started.set_result(engine)
            await asyncio.wrap_future(stop)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    with Server() as server:
        server.service.serve(started.result(TIMEOUT_S))
        yield server
    stop.set_result(None)
    thread.join(TIMEOUT_S)


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_response_format_json_schema(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=HI, response_format=FORMAT, temperature=2, n=5,
                                            max_tokens=200, seed=1)
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 5
    for choice in answer.choices:
        jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)
    assert len({choice.message.content for choice in answer.choices}) > 1


def test_response_format_streams_what_it_says_whole(client: openai.OpenAI) -> None:
    asked: Any = {"model": "fake", "messages": HI, "response_format": FORMAT, "temperature": 2, "max_tokens": 200,
                  "seed": 5, "n": 3}
    create: Any = client.chat.completions.create
    whole = create(**asked)
    texts, ends = [""] * 3, [None] * 3
    for chunk in create(**asked, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        ends[choice.index] = choice.finish_reason or ends[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices] == ["stop"] * 3


def test_a_parsed_answer(client: openai.OpenAI) -> None:
    """What the client makes of a Pydantic model."""
    from pydantic import BaseModel

    class Pair(BaseModel):
        left: bool
        right: bool

    answer = client.chat.completions.parse(model="fake", messages=HI, response_format=Pair, max_tokens=250, seed=2)
    assert isinstance(answer.choices[0].message.parsed, Pair)


def test_an_answer_that_is_cut_begins_as_the_form_does(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=HI, response_format={"type": "json_object"},
                                            temperature=0, max_tokens=3)
    assert answer.choices[0].finish_reason == "length"
    assert (answer.choices[0].message.content or "").startswith("{")


@pytest.mark.parametrize(("fields", "pattern"), [
    ({"structured_outputs": {"regex": "[ab]{2,3}"}}, "[ab]{2,3}"), ({"guided_regex": "x[0-9]"}, "x[0-9]"),
    ({"structured_outputs": {"choice": ["yes", "no"], "disable_fallback": True}}, "yes|no"),
    ({"guided_choice": ["yes", "no"]}, "yes|no"),
    ({"structured_outputs": {"grammar": 'start: "a" | "b"'}}, "a|b"), ({"guided_grammar": 'root ::= "c"'}, "c"),
    ({"structured_outputs": {"json": {"const": 5}, "regex": None}}, "5"), ({"guided_json": '{"const":[]}'}, r"\[\s*\]"),
    ({"structured_outputs": {"json": {"enum": [[1, 2]]}, "disable_any_whitespace": True}}, r"\[1,2\]"),
    ({"guided_json": {"type": "null"}}, "null"), ({"response_format": {"type": "text"}}, "(?s).*"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [True]}}}}, "true"),
])
@pytest.mark.parametrize("stream", [False, True])
def test_the_form_by_each_of_its_names(server: Server, fields: dict[str, Any], pattern: str, stream: bool) -> None:
    answer = server.complete(prompt="a", temperature=2, max_tokens=200, stream=stream, **fields)
    assert answer.status == 200, answer.body
    assert "warning" not in answer.headers
    chunks = [json.loads(event) for event in answer.events[:-1]] if stream else [answer.json]
    assert re.fullmatch(pattern, "".join(chunk["choices"][0]["text"] for chunk in chunks))


@pytest.mark.parametrize(("fields", "param"), [
    # FAULTS G01
    ({"response_format": {}}, "response_format.type"), ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "text", "json_schema": {"name": "x", "schema": {}}}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": False}}},
     "response_format.json_schema.schema"),
    *[({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
       "response_format.json_schema.schema") for schema in ("", [], 5, None)],
    ({"guided_json": []}, "guided_json"), ({"structured_outputs": {"json": [1]}}, "structured_outputs.json"),
    ({"structured_outputs": 5}, "structured_outputs"), ({"structured_outputs": {"regex": 5}},
                                                        "structured_outputs.regex"),
    ({"structured_outputs": {}}, "structured_outputs"), ({"structured_outputs": {"json_object": False}},
                                                         "structured_outputs"),
    ({"structured_outputs": {"json": ""}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": False}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": [5]}}, "structured_outputs.choice[0]"),
    ({"structured_outputs": {"choice": ["a"], "regex": "b"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": " *"}}, "structured_outputs.whitespace_pattern"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    # FAULTS G03
    ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"grammar": "start: nowhere"}}, "structured_outputs.grammar"),
    ({"guided_json": {"not": {}}}, "guided_json"),
    ({"n": 3, "guided_regex": "("}, "guided_regex"),
    ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json"),
    ({"guided_json": {"x-guidance": {"lenient": True}, "not": {}}}, "guided_json"),
    ({"guided_json": {"$ref": "https://example.com/schema"}}, "guided_json"),
    ({"guided_json": {"type": "integer", "minimum": 2, "maximum": 1}}, "guided_json"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "thing"}}}},
     "response_format.json_schema.schema"),
    # FAULTS G07
    ({"structured_outputs": {"regex": "(" * 10000 + ")" * 10000}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "a" * 70000}}, "structured_outputs.regex"),
    ({"guided_json": {"description": "x" * (1 << 20)}}, "guided_json"),
    ({"guided_json": {"properties": {f"p{i}": True for i in range(5000)}}}, "guided_json"),
    ({"structured_outputs": {"grammar": "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(5000))}},
     "structured_outputs.grammar"),
])
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_held_to_is_refused_by_name(server: Server, fields: dict[str, Any], param: str,
                                                   stream: bool) -> None:
    answer = server.complete(prompt="a", stream=stream, **fields)
    assert answer.status == 400, answer.body
    assert answer.error["param"] == param
    assert answer.error["message"].startswith(param)


def test_unknown_fields_inside_are_named(server: Server) -> None:
    answer = server.complete(prompt="a", max_tokens=1, structured_outputs={"regex": "a", "jsn": 1},
                             response_format={"type": "text", "x": 1})
    assert answer.status == 200
    assert "structured_outputs.jsn" in answer.headers["warning"]
    assert "response_format.x" in answer.headers["warning"]
