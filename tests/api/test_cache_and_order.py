"""The door's side of the prefix cache, the order of requests, and a queue that is full."""
from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from pathlib import Path
from typing import Any, cast

import pytest

from api.engine import Engine
from tests.api.fake_engine import INFO, FakeEngine
from tests.api.serving import Server

MODEL = Path(__file__).parent.parent / "golden" / "models" / "llama"
PROMPT = list(range(5, 45))
TENANT = hashlib.sha256(b"sk-secret").hexdigest()[:32]


def test_who_asks_reaches_the_engine(server: Server, engine: FakeEngine) -> None:
    server.request("POST", "/v1/completions", {"prompt": "a", "priority": -3, "user": "u", "cache_salt": "s"},
                   {"Authorization": "Bearer sk-secret"})
    assert engine.calls[-1].asker == {"priority": -3, "user": "u", "cache_salt": "s", "tenant": TENANT}
    server.chat("a")
    assert engine.calls[-1].asker == {"priority": 0, "user": "", "cache_salt": "", "tenant": ""}


@pytest.mark.parametrize("headers", [
    {"Authorization": "Bearer sk-secret"}, {"authorization": "bearer  sk-secret "}, {"x-api-key": "sk-secret"},
    {"API-Key": "sk-secret"}, {"Authorization": "Bearer ", "X-Api-Key": "sk-secret"},
    {"Authorization": "Bearer sk-secret", "x-api-key": "other"}, {"x-api-key": "sk-secret", "api-key": "other"}])
def test_a_key_is_the_same_by_whatever_header_it_comes(server: Server, engine: FakeEngine,
                                                        headers: dict[str, str]) -> None:
    server.request("POST", "/v1/completions", {"prompt": "a"}, headers)
    assert engine.calls[-1].asker["tenant"] == TENANT


@pytest.mark.parametrize("headers", [{"Authorization": "Bearer other"}, {"Authorization": "Basic c2stc2VjcmV0"},
                                     {"x-api-key": "other"}, {"api-key": "Sk-secret"}])
def test_other_keys_are_other_tenants(server: Server, engine: FakeEngine, headers: dict[str, str]) -> None:
    server.request("POST", "/v1/completions", {"prompt": "a"}, headers)
    assert engine.calls[-1].asker["tenant"] not in ("", TENANT)


@pytest.mark.parametrize(("field", "value"), [
    ("priority", 1.5), ("priority", "high"), ("priority", 2**31), ("cache_salt", ""), ("cache_salt", 5),
    ("cache_salt", "x" * 2000), ("user", "x" * 2000)])
def test_bad_values_are_named(server: Server, field: str, value: Any) -> None:
    answer = server.complete(prompt="a", **{field: value})
    assert answer.status == 400
    assert answer.error["param"] == field


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_429_with_a_time_to_come_back(server: Server, stream: bool) -> None:
    answer = server.complete(prompt="BUSY", stream=stream)
    assert answer.status == 429
    assert answer.headers["retry-after"] == "3"
    assert answer.error["code"] == "queue_full"
    assert answer.error["type"] == "rate_limit_error"
    assert "7 requests are queued" in answer.error["message"]


@pytest.mark.parametrize(("fields", "named"), [
    ({"prompt": "a", "n": 7}, "n"), ({"prompt": ["a"] * 7}, "prompt"), ({"prompt": ["a"] * 3, "n": 3}, "prompt"),
    ({"prompt": "a", "n": 6}, None), ({"prompt": ["a"] * 6}, None), ({"prompt": ["a"] * 3, "n": 2}, None)])
def test_more_completions_than_can_ever_wait_are_400(server: Server, fields: dict[str, Any], named: str | None) -> None:
    """Four run and two wait at most: 429 would send the client round for ever."""
    server.use(engine := FakeEngine(dataclasses.replace(INFO, max_queued_requests=2)))
    answer = server.complete(**fields)
    if named is None:
        assert answer.status == 200
        families = {(call.asker["parent_id"], call.asker["num_children"]) for call in engine.calls}
        assert len(families) == 1, "the engine takes them together"
        assert families.pop()[1] == len(engine.calls) == 6
        return
    assert (answer.status, answer.error["param"]) == (400, named)
    assert "completions at once, 4 can run and 2 more may be queued" in answer.error["message"]
    assert engine.calls == []


def test_more_choices_of_a_chat_than_can_ever_wait_are_400(server: Server) -> None:
    server.use(FakeEngine(dataclasses.replace(INFO, max_queued_requests=2)))
    assert server.chat("a", n=6).status == 200
    answer = server.chat("a", n=7)
    assert (answer.status, answer.error["param"]) == (400, "n")


def test_the_cache_can_be_looked_at_only_with_debug(server: Server) -> None:
    assert server.request("GET", "/debug/kv").status == 404


def test_usage_says_what_was_cached_and_with_debug_why_no_more(server: Server) -> None:
    """Through the whole engine on a tiny model."""
    def complete(**fields: Any) -> Any:
        return server.request("POST", "/v1/completions", {
            "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields}).json

    def ask() -> None:
        cold, warm, salted = complete(), complete(), complete(cache_salt="mine")
        assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert warm["usage"]["prompt_tokens_details"] == {"cached_tokens": 39, "cache_miss": [""]}
        assert warm["choices"][0]["text"] == cold["choices"][0]["text"]
        assert salted["usage"]["prompt_tokens_details"] == {"cached_tokens": 0, "cache_miss": ["root"]}
        kv = server.request("GET", "/debug/kv").json
        assert kv["num_sequences"] == 0
        assert any(row["findable"] for group in kv["groups"] for row in group["blocks"])
        card = server.request("GET", "/v1/models").json["data"][0]
        assert card["kv_capacity_tokens"] >= card["max_model_len"]

    async def main() -> None:
        async with Engine.start(str(MODEL), device="reference", kv_cache_memory=1 << 22, debug=True) as engine:
            server.use(cast("FakeEngine", engine))
            await asyncio.to_thread(ask)

    asyncio.run(main())
