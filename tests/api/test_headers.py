"""What answers say beside their bodies: which fields were unknown, which web pages may read them; and failures."""
from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest
from starlette.requests import Request
from starlette.routing import Route

from api.guard import ApiKeys
from api.service import DoorConfig
from tests.api.fake_engine import FakeEngine
from tests.api.serving import Answer, Server

PAGE = "https://page.example"
PREFLIGHT = {"Origin": PAGE, "Access-Control-Request-Method": "POST",
             "Access-Control-Request-Headers": "authorization,content-type"}


# Unknown fields


def named(answer: Answer) -> list[str]:
    warning = answer.headers.get("warning", "")
    found = re.fullmatch(r'299 troupe "unknown fields ignored: ([^"]*)"', warning)
    return found[1].split(", ") if found else []


@pytest.mark.parametrize("stream", [False, True])
def test_unknown_fields_are_named(server: Server, stream: bool) -> None:
    fields: dict[str, Any] = {"stream": stream, "top_q": 1, "Temperature": 0, "xtc_threshold": 0.1, "best_of": 1}
    if stream:
        fields["stream_options"] = {"include_usage": True, "obfuscation": False}
    answer = server.complete(prompt="a", **fields)
    assert answer.status == 200
    assert named(answer) == ["top_q", "Temperature", "xtc_threshold", *(["stream_options.obfuscation"] * stream)]


def test_unknown_fields_of_messages_are_named(server: Server) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b", "colour": 1, "name": "n"}]
    answer = server.request("POST", "/v1/chat/completions", {"messages": messages})
    assert named(answer) == ["messages[1].colour"]


def test_what_is_known_is_not_warned_of(server: Server) -> None:
    for answer in (server.complete(prompt="a", tools=[], tool_choice="auto", logit_bias={}, suffix=None),
                   server.chat("a", response_format={"type": "text"}, chat_template_kwargs={"own": 1}),
                   server.request("POST", "/tokenize", {"prompt": "a"}), server.request("GET", "/v1/models")):
        assert answer.status == 200
        assert "warning" not in answer.headers


def test_the_warning_is_short_and_plain(server: Server) -> None:
    """Whatever names a client makes up, none of them writes a header of its own."""
    fields: dict[str, Any] = {'a"b\\c': 1, "x\r\nSet-Cookie: y": 1, "\u00fc\u4e00": 1, "z" * 5000: 1}
    answer = server.complete(prompt="a", **fields)
    assert named(answer) == ["a?b?c", "x??Set-Cookie: y", "??", "z" * 80]
    assert "set-cookie" not in answer.headers
    many = named(server.complete(prompt="a", **{f"f{number}": 1 for number in range(5000)}))
    assert many == [*(f"f{number}" for number in range(16)), "and more"]
    messages = [{"role": "user", "content": "a", "b": 1}] * 4000
    assert len(named(server.request("POST", "/v1/chat/completions", {"messages": messages}))) == 17


def test_a_strict_server_refuses_them() -> None:
    with Server(DoorConfig(strict=True)) as server:
        server.use(FakeEngine())
        assert server.complete(prompt="a", tools=[]).status == 200
        for answer, param in ((server.complete(prompt="a", top_q=1), "top_q"),
                              (server.chat("a", messages=[{"role": "user", "content": "a", "b": 1}]), "messages[0].b"),
                              (server.request("POST", "/detokenize", {"tokens": [], "n": 1}), "n")):
            assert (answer.status, answer.error["param"]) == (400, param)
            assert "warning" not in answer.headers


# Web pages


@pytest.fixture(scope="module")
def open_to_page() -> Iterator[Server]:
    with Server(DoorConfig(ApiKeys(["sk"]), allow_origins=(PAGE, "http://localhost:3000"))) as server:
        server.use(FakeEngine())
        yield server


def test_a_page_that_may_ask(open_to_page: Server) -> None:
    preflight = open_to_page.request("OPTIONS", "/v1/chat/completions", headers=PREFLIGHT)
    assert preflight.status == 200, "a browser sends no key with it"
    assert preflight.headers["access-control-allow-origin"] == PAGE
    assert preflight.headers["access-control-allow-headers"] == "authorization,content-type"
    headers = {"Origin": PAGE, "Authorization": "Bearer sk"}
    answer = open_to_page.request("POST", "/v1/completions", {"prompt": "a"}, headers)
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, PAGE)
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}])
def test_a_page_reads_why_it_is_refused(open_to_page: Server, headers: dict[str, str]) -> None:
    answer = open_to_page.request("GET", "/v1/models", headers={"Origin": PAGE, **headers})
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (401, PAGE)


@pytest.mark.parametrize("origin", ["https://other.example", "http://page.example", "null", PAGE + ".evil.example"])
def test_a_page_that_may_not(open_to_page: Server, origin: str) -> None:
    assert open_to_page.request("OPTIONS", "/v1/completions", headers={**PREFLIGHT, "Origin": origin}).status == 400
    answer = open_to_page.request("GET", "/health", headers={"Origin": origin})
    assert "access-control-allow-origin" not in answer.headers


def test_without_the_flag_no_page_may(server: Server) -> None:
    answer = server.request("GET", "/health", headers={"Origin": PAGE})
    assert "access-control-allow-origin" not in answer.headers
    assert server.request("OPTIONS", "/v1/completions", headers=PREFLIGHT).status == 405


def test_a_star_lets_all_pages_ask() -> None:
    with Server(DoorConfig(allow_origins=("*",))) as server:
        assert server.request("GET", "/version", headers={"Origin": PAGE}).headers["access-control-allow-origin"] == "*"


# Failures


def test_a_fault_of_ours_is_a_plain_500(open_to_page: Server, caplog: pytest.LogCaptureFixture) -> None:
    """With its id, readable for pages, logged with its traceback, and without any of it in the answer."""
    def fail(request: Request) -> NoReturn:
        raise ZeroDivisionError("in /secret/place.py")

    open_to_page.app.router.routes.append(Route("/fail", fail))
    with caplog.at_level(logging.ERROR, "troupe.api"):
        answer = open_to_page.request("GET", "/fail", headers={"Origin": PAGE, "x-api-key": "sk",
                                                               "x-request-id": "mine"})
    assert (answer.status, answer.error["code"]) == (500, "internal_error")
    assert answer.headers["x-request-id"] == "mine"
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert b"secret" not in answer.body
    assert b"ZeroDivision" not in answer.body
    assert "ZeroDivisionError" in caplog.text
