"""API keys: who gets in, by which header, what he is told else, and that no key is shown anywhere."""
from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from api.guard import ApiKeys, read_keys
from api.server import create_app
from api.service import DoorConfig, Service
from tests.api.fake_engine import FakeEngine
from tests.api.serving import Answer, Server

KEYS = ("sk-first", "sk-second-1234567890")
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND")
PATHS = sorted({route.path for route in create_app(Service()).routes if isinstance(route, Route)})


@pytest.fixture(scope="module")
def locked() -> Iterator[Server]:
    with Server(DoorConfig(ApiKeys(KEYS))) as server:
        yield server


@pytest.fixture
def engine(locked: Server) -> FakeEngine:
    engine = FakeEngine()
    locked.use(engine)
    return engine


def refused(answer: Answer) -> bool:
    return answer.status == 401 and answer.headers["www-authenticate"] == "Bearer"


def spellings(path: str) -> list[str]:
    concrete = path.replace("{name:path}", "fake")
    return [concrete, concrete + "/", "/" + concrete, concrete.upper(), concrete.replace("/", "//"), concrete + "?a=1",
            concrete + "%2f", concrete + ";x", "/." + concrete, "/x/.." + concrete]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer sk-wrong"}], ids=["none", "wrong"])
def test_every_route_asks_for_a_key_by_every_method_and_spelling(locked: Server, engine: FakeEngine, path: str,
                                                                 headers: dict[str, str]) -> None:
    """FAULTS O01."""
    for method in METHODS:
        for spelled in spellings(path):
            answer = locked.request(method, spelled, headers=headers)
            is_public = spelled.partition("?")[0] == "/health"
            assert refused(answer) != is_public, (method, spelled, answer.status)
    assert engine.calls == []


def test_what_is_no_route_is_not_told_apart(locked: Server, engine: FakeEngine) -> None:
    assert refused(locked.request("GET", "/v1/nothing"))
    assert locked.request("GET", "/v1/nothing", headers={"x-api-key": KEYS[0]}).status == 404


def test_a_route_that_is_added_later_is_guarded(locked: Server, engine: FakeEngine) -> None:
    locked.app.router.routes.append(Route("/new", lambda request: PlainTextResponse("here")))
    assert refused(locked.request("GET", "/new"))
    assert locked.request("GET", "/new", headers={"x-api-key": KEYS[0]}).body == b"here"


@pytest.mark.parametrize("path", ["/v1/completions", "/health"])
def test_websockets_are_closed(locked: Server, path: str) -> None:
    """None of the routes is one, so there is nothing to have a key for."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    scope = {"type": "websocket", "path": path, "headers": [(b"x-api-key", KEYS[0].encode())]}
    asyncio.run(locked.app(scope, receive, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_health_is_public(locked: Server, engine: FakeEngine) -> None:
    assert locked.request("GET", "/health").json == {"status": "ready"}
    assert locked.request("HEAD", "/health").status == 200


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("header", ["Authorization", "x-api-key", "api-key"])
def test_each_key_opens_by_each_header(locked: Server, engine: FakeEngine, key: str, header: str) -> None:
    value = f"Bearer {key}" if header == "Authorization" else key
    answer = locked.request("POST", "/v1/completions", {"prompt": "a"}, {header: value})
    assert answer.json["choices"][0]["text"] == "re a"
    assert engine.calls[-1].asker["tenant"] == hashlib.sha256(key.encode()).hexdigest()[:32]


@pytest.mark.parametrize("headers", [
    {"Authorization": "Bearer "}, {"Authorization": "Bearer sk-firs"}, {"Authorization": "Bearer sk-first1"},
    {"Authorization": "Bearer SK-FIRST"}, {"Authorization": "Basic sk-first"}, {"x-api-key": "sk-first,sk-first"},
    {"Authorization": "Bearer sk-wrong", "x-api-key": "sk-first"}, {"Cookie": "api-key=sk-first"},
    {"x-api-key": "s" * 30_000}])
def test_nothing_else_opens(locked: Server, engine: FakeEngine, headers: dict[str, str]) -> None:
    answer = locked.request("POST", "/v1/completions", {"prompt": "a"}, headers)
    assert refused(answer)
    assert (answer.error["type"], answer.error["code"], answer.error["param"]) == (
        "invalid_request_error", "invalid_api_key", None)
    assert b"sk-" not in answer.body
    assert refused(locked.request("POST", "/v1/completions?api_key=sk-first", {"prompt": "a"}))
    assert engine.calls == []


def test_the_body_of_a_stranger_is_not_looked_at(locked: Server, engine: FakeEngine) -> None:
    """He learns of his key before the body has come, and the connection lives on."""
    with locked.connect() as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000\r\n\r\n{")
        assert connection.recv(4096).startswith(b"HTTP/1.1 401")
    assert refused(locked.request("POST", "/v1/completions", b"no json"))


def test_openai_client(locked: Server, engine: FakeEngine) -> None:
    with openai.OpenAI(base_url=f"{locked.url}/v1", api_key=KEYS[1], max_retries=0) as client:
        assert client.completions.create(model="fake", prompt="a").choices[0].text == "re a"
    with openai.OpenAI(base_url=f"{locked.url}/v1", api_key="sk-other", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as wrong:
            client.models.list()
        assert wrong.value.code == "invalid_api_key"


def test_keys_are_compared_in_constant_time_and_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append((len(left), len(right)))
        return left == right

    monkeypatch.setattr(hmac, "compare_digest", compare)
    keys = ApiKeys(KEYS)
    for key in (*KEYS, "", "sk", "x" * 10_000):
        compared.clear()
        assert keys.has(key) == (key in KEYS)
        assert compared == [(32, 32)] * 2


def test_a_key_cannot_be_read_back() -> None:
    """What a debugger, a log of an object or a crash report would show."""
    keys = ApiKeys(KEYS)
    assert len(keys) == 2
    for shown in (repr(keys), str(vars(keys)), json.dumps(vars(keys), default=str), repr(DoorConfig(keys))):
        assert "sk-" not in shown


@pytest.mark.parametrize("bad", ["", " ", "a b", "schl\u00fcssel", "a\n", "x" * 513])
def test_a_key_that_no_header_can_carry_is_refused_without_being_shown(bad: str) -> None:
    with pytest.raises(ValueError, match="^API key 2 must be 1 to 512 printable ASCII characters without spaces$"):
        ApiKeys(["good", bad])


def test_lines_of_a_key_file() -> None:
    assert read_keys("# those of May\nsk-1\n\n  sk-2 \r\n#sk-3\nsk-4") == ["sk-1", "sk-2", "sk-4"]
    assert read_keys("# none\n\n") == []


def test_without_keys_the_door_is_open(server: Server) -> None:
    assert server.request("GET", "/v1/models").status == 200
    bad: Any = {"Authorization": "Bearer anything"}
    assert server.request("GET", "/v1/models", headers=bad).status == 200
