"""The door's side of the prefix cache, the order of requests, and a queue that is full."""
from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any, cast

import pytest

from api.engine import Engine
from tests.api.fake_engine import FakeEngine
from tests.api.serving import Server

MODEL = Path(__file__).parent.parent / "golden" / "models" / "llama"
PROMPT = list(range(5, 45))


def test_who_asks_reaches_the_engine(server: Server, engine: FakeEngine) -> None:
    server.request("POST", "/v1/completions", {"prompt": "a", "priority": -3, "user": "u", "cache_salt": "s"},
                   {"Authorization": "Bearer sk-secret"})
    tenant = hashlib.sha256(b"Bearer sk-secret").hexdigest()[:32]
    assert engine.calls[-1].asker == {"priority": -3, "user": "u", "cache_salt": "s", "tenant": tenant}
    server.chat("a")
    assert engine.calls[-1].asker == {"priority": 0, "user": "", "cache_salt": "", "tenant": ""}


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
    assert "7 requests are waiting" in answer.error["message"]


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
