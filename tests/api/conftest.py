"""One running server for all tests, with a fresh FakeEngine for each."""
from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.api.fake_engine import FakeEngine
from tests.api.serving import TIMEOUT_S, Server


@pytest.fixture(scope="session")
def running_server() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def server(running_server: Server, engine: FakeEngine) -> Iterator[Server]:
    """After each test: nothing runs or waits, and a plain request is served."""
    running_server.use(engine)
    yield running_server
    engine.release()
    engine.wait_for(lambda: not {"running", "waiting"} & set(engine.states))
    running_server.use(FakeEngine())
    assert running_server.request("GET", "/health").status == 200
    assert running_server.complete(prompt="after").json["choices"][0]["text"] == "re after"


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S) as client:
        yield client
