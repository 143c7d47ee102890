"""Routes that are no one's dialect: tokens, templates, versions, aborts, and the document that tells of all routes."""
from __future__ import annotations

import asyncio
import json
import re
import threading
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import openai
import pytest

from api.guard import ApiKeys
from api.routes import Endpoint
from api.service import DoorConfig
from tests.api.fake_engine import EOS, INFO, SPECIAL, VOCAB_SIZE, FakeEngine
from tests.api.serving import TIMEOUT_S, Answer, Server
from tests.api.test_door import door
from tests.weights.tiny_tokenizers import CHATML, byte_level, write_folder

LLAMA = Path(__file__).parents[1] / "golden" / "models" / "llama"
TOOL = {"type": "function", "function": {"name": "f"}}
HI = [{"role": "user", "content": "hi"}]


# Models


def test_one_model_by_each_of_its_names(client: openai.OpenAI, server: Server) -> None:
    assert client.models.retrieve("fake").id == "fake"
    assert client.models.retrieve("fake-alias").model_dump()["root"] == "fake"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.models.retrieve("nobody")
    assert unknown.value.code == "model_not_found"


@pytest.mark.parametrize("name", ["", "fake/", "FAKE", "a/b", "..%2f..%2fetc", "%2fetc%2fpasswd", "fake%00",
                                  "x" * 9000])
def test_names_of_models_reach_nothing_else(server: Server, name: str) -> None:
    """FAULTS O10."""
    answer = server.request("GET", f"/v1/models/{name}")
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")
    assert b"etc" not in answer.body


# Tokens


def test_tokenize_text(server: Server) -> None:
    answer = server.request("POST", "/tokenize", {"model": "fake", "prompt": "hé"}).json
    assert answer == {"count": 4, "max_model_len": 4096, "tokens": [EOS, *"hé".encode()], "token_strs": None}
    bare = server.request("POST", "/tokenize", {"prompt": "a", "add_special_tokens": False, "return_token_strs": True})
    assert (bare.json["tokens"], bare.json["token_strs"]) == ([97], ["<97>"])
    assert server.request("POST", "/tokenize", {"prompt": ""}).json["count"] == 0


def test_tokenize_messages(server: Server) -> None:
    answer = server.request("POST", "/tokenize", {"messages": HI}).json
    assert answer["tokens"] == [SPECIAL, *b"hi"]


def test_detokenize(server: Server) -> None:
    assert server.request("POST", "/detokenize", {"tokens": [104, 105]}).json == {"prompt": "hi"}
    assert server.request("POST", "/detokenize", {"tokens": []}).json == {"prompt": ""}


def test_roles_of_tokens(server: Server, engine: FakeEngine) -> None:
    """What lm-eval asks for before it sends token ids."""
    assert server.request("GET", "/tokenizer_info").json == {
        "bos_token": None, "eos_token": "<eos>", "chat_template": None}
    server.use(FakeEngine(replace(INFO, chat_template="{{ '\ud800' }}")))
    assert server.request("GET", "/tokenizer_info").json["chat_template"] == "{{ '\ud800' }}"
    server.use(engine)


def test_apply_template(server: Server) -> None:
    answer = server.request("POST", "/apply_template", {
        "messages": HI, "continue_final_message": True, "chat_template_kwargs": {"a": [1]}}).json
    assert answer["prompt"] == f"hi {dict(add_generation_prompt=False, continue_final_message=True)}"[:-1] \
        + ", 'chat_template_kwargs': {'a': [1]}}"


@pytest.mark.parametrize(("path", "body", "param"), [
    ("/tokenize", {}, "prompt"), ("/tokenize", {"prompt": "a", "messages": HI}, "prompt"),
    ("/tokenize", {"prompt": 5}, "prompt"), ("/tokenize", {"messages": []}, "messages"),
    ("/tokenize", {"messages": HI, "add_special_tokens": True}, "add_special_tokens"),
    ("/tokenize", {"messages": HI, "tools": [{}]}, "tools[0].type"),
    ("/tokenize", {"prompt": "a", "tools": [TOOL]}, "tools"),
    ("/tokenize", {"prompt": "a", "continue_final_message": True}, "continue_final_message"),
    ("/tokenize", {"messages": [{"role": "refused", "content": "a"}]}, "messages"),
    ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content"),
    ("/detokenize", {}, "tokens"), ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
    ("/detokenize", {"tokens": "a"}, "tokens"),
    ("/detokenize", {"tokens": [5, VOCAB_SIZE]}, "tokens"), ("/detokenize", {"tokens": [1.0]}, "tokens[0]"),
    ("/detokenize", {"tokens": [0] * (2**20 + 1)}, "tokens"),
    ("/apply_template", {}, "messages"), ("/apply_template", {"messages": HI, "chat_template": "x"}, "chat_template"),
    ("/abort", {}, "request_ids"), ("/abort", {"request_ids": ["a" * 129]}, "request_ids[0]"),
    ("/abort", {"request_ids": ["a"] * 1025}, "request_ids"), ("/abort", {"request_id": ""}, "request_id"),
])
def test_bad_fields_are_named(server: Server, path: str, body: dict[str, Any], param: str) -> None:
    answer = server.request("POST", path, body)
    assert (answer.status, answer.error["param"]) == (400, param)


def test_a_wrong_model_is_404(server: Server) -> None:
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": []}),
                       ("/apply_template", {"messages": HI})):
        assert server.request("POST", path, {"model": "nobody", **body}).status == 404


def test_the_real_engine_tokenizes_as_it_generates(server: Server, tmp_path: Path) -> None:
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).symlink_to(LLAMA / file)
    tokenizer = byte_level()
    write_folder(tmp_path, tokenizer, tokenizer_config={"chat_template": CHATML})
    text = "hello <|im_end|> é"

    def post(path: str, **body: Any) -> Any:
        answer = server.request("POST", path, body)
        assert answer.status == 200, answer.body
        return answer.json

    def ask() -> None:
        ids = post("/tokenize", prompt=text, return_token_strs=True)
        assert ids["tokens"] == tokenizer.encode(text).ids
        assert ids["token_strs"] == tokenizer.encode(text).tokens
        assert post("/detokenize", tokens=ids["tokens"])["prompt"] == text
        for options in ({}, {"add_generation_prompt": False}, {"continue_final_message": True}):
            chat = {"messages": [*HI, {"role": "assistant", "content": "so "}], **options}
            rendered = post("/apply_template", **chat)["prompt"]
            chat_ids = post("/tokenize", **chat)["tokens"]
            assert post("/detokenize", tokens=chat_ids)["prompt"] == rendered
            answer = post("/v1/chat/completions", **chat, max_tokens=1, return_token_ids=True)
            assert answer["prompt_token_ids"] == chat_ids
        assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nso "
        spelled = post("/tokenize", messages=[{"role": "user", "content": text}])
        assert spelled["tokens"].count(tokenizer.token_to_id("<|im_end|>")) == 1, "the template's own"
        assert post("/tokenize", prompt="a" * 10_000)["count"] == 10_000, "longer than the context: to be counted"
        surrogate = server.request("POST", "/tokenize", b'{"prompt": "\\ud800"}')
        assert (surrogate.status, surrogate.error["param"]) == (400, "prompt")

    async def main() -> None:
        async with asyncio.timeout(60), door(server, tmp_path, max_model_len=256):
            await asyncio.to_thread(ask)

    asyncio.run(main())


# Operations


def test_ready_says_what_is_under_way(server: Server, engine: FakeEngine) -> None:
    with server.post("/v1/completions", {"prompt": "HOLD"}):
        engine.wait_for(lambda: engine.states == ["running"])
        assert server.request("GET", "/ready").json == {
            "status": "ready", "model": "fake", "num_requests_running": 1, "num_requests_waiting": 0}
    engine.kill()
    assert server.request("GET", "/ready").error["code"] == "engine_dead"


def test_not_ready_before_there_is_a_model() -> None:
    with Server() as server:
        answer = server.request("GET", "/ready")
        assert (answer.status, answer.error["code"]) == (503, "starting")
        assert server.request("GET", "/version").status == 200


def test_version(server: Server) -> None:
    assert server.request("GET", "/version").json == {"version": metadata.version("troupe")}


def in_thread(ask: Any) -> tuple[threading.Thread, list[Answer]]:
    answers: list[Answer] = []
    thread = threading.Thread(target=lambda: answers.append(ask()))
    thread.start()
    return thread, answers


@pytest.mark.parametrize("stream", [False, True])
def test_abort_by_request_id(server: Server, engine: FakeEngine, stream: bool) -> None:
    thread, answers = in_thread(lambda: server.request(
        "POST", "/v1/completions", {"prompt": ["HOLD", "HOLD"], "stream": stream}, {"X-Request-Id": "mine"}))
    other, others = in_thread(lambda: server.complete(prompt="HOLD"))
    engine.wait_for(lambda: engine.states == ["running"] * 3)
    assert server.request("POST", "/abort", {"request_ids": ["mine", "other", "mine"]}).json == {"aborted": ["mine"]}
    thread.join(TIMEOUT_S)
    assert (answers[0].status, answers[0].error["code"]) == (499, "aborted")
    assert sorted(engine.states) == ["aborted", "aborted", "running"]
    engine.release()
    other.join(TIMEOUT_S)
    assert others[0].status == 200
    assert server.request("POST", "/abort", {"request_id": "mine"}).json == {"aborted": []}


def test_abort_by_the_answers_id(server: Server, engine: FakeEngine) -> None:
    """The way of who reads a stream; it ends with an error."""
    with server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "ENDLESS"}], "stream": True},
                     ) as connection:
        data = b""
        while not (found := re.search(rb'"id":"(chatcmpl-[0-9a-f]+)"', data)):
            data += connection.recv(4096)
        assert server.request("POST", "/abort", {"request_id": found[1].decode()}).json["aborted"] != []
        while b'"code":"aborted"' not in data:
            part = connection.recv(65536)
            assert part, "the stream says why it ends"
            data = data[-100:] + part
    engine.wait_for(lambda: engine.states == ["aborted"])


def test_nobody_aborts_what_another_key_asked() -> None:
    with Server(DoorConfig(ApiKeys(["sk-a", "sk-b"]))) as server:
        server.use(engine := FakeEngine())
        thread, answers = in_thread(lambda: server.request(
            "POST", "/v1/completions", {"prompt": "HOLD"}, {"x-api-key": "sk-a", "x-request-id": "one"}))
        engine.wait_for(lambda: engine.states == ["running"])
        body = {"request_id": "one"}
        assert server.request("POST", "/abort", body, {"x-api-key": "sk-b"}).json == {"aborted": []}
        assert engine.states == ["running"]
        assert server.request("POST", "/abort", body, {"x-api-key": "sk-a"}).json == {"aborted": ["one"]}
        thread.join(TIMEOUT_S)
        assert answers[0].status == 499


def test_names_are_forgotten_with_their_requests(server: Server, engine: FakeEngine) -> None:
    for number in range(20):
        server.request("POST", "/v1/completions", {"prompt": "a"}, {"x-request-id": f"r{number % 3}"})
    server.wait_until_idle()
    assert server.service._aborts == {}


# The document


def references(value: Any) -> set[str]:
    if isinstance(value, dict):
        return {inner for key, inner in value.items() if key == "$ref"}.union(*map(references, value.values()))
    return set().union(*map(references, value)) if isinstance(value, list) else set()


def test_openapi_tells_of_every_route_and_of_nothing_else(server: Server) -> None:
    document = server.request("GET", "/openapi.json").json
    assert document["openapi"] == "3.1.0"
    assert document["info"]["version"] == metadata.version("troupe")
    told = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    routes = {(route.method, route.path.replace(":path", "")) for route in server.app.routes
              if isinstance(route, Endpoint)}
    assert told == routes
    assert len(routes) == len(server.app.routes)
    for reference in references(document):
        assert reference.removeprefix("#/components/schemas/") in document["components"]["schemas"], reference
    operations = [operation for methods in document["paths"].values() for operation in methods.values()]
    assert all(operation["summary"] for operation in operations)
    assert len({operation["operationId"] for operation in operations}) == len(operations)


def test_openapi_says_what_a_body_may_hold(server: Server) -> None:
    schemas = server.request("GET", "/openapi.json").json["components"]["schemas"]
    completion = schemas["CompletionRequest"]["properties"]
    assert completion["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 100}
    kinds = {kind.get("type") for kind in completion["prompt"]["anyOf"]}
    assert kinds == {"string", "array"}
    assert {"string", "array", "null"} == {kind.get("type") for kind in completion["stop"]["anyOf"]}
    assert schemas["ChatRequest"]["required"] == ["messages"]
    assert {"string", "array", "null"} == {kind.get("type")
                                           for kind in schemas["Message"]["properties"]["content"]["anyOf"]}
    assert json.dumps(schemas).count("prompt") > 2
