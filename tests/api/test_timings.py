"""What an answer took, told to who asks: the metrics object and the Server-Timing header."""
from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from api.service import DoorConfig
from api.timings import Timings
from tests.api.fake_engine import FakeEngine
from tests.api.serving import Answer, Server
from tests.api.test_anthropic import with_template
from tests.api.test_door import FORCED, serve
from tests.api.test_patience import PERIOD_S, read_until

NAMES = {"time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second"}
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/messages")
ASK: dict[str, Any] = {"return_metrics": True}


def ask(server: Server, path: str, content: str = "hi", **fields: Any) -> Answer:
    prompt = {"prompt": content} if path == "/v1/completions" else {"messages": [{"role": "user", "content": content}]}
    answer = server.request("POST", path, {"model": "fake", "max_tokens": 4, **prompt, **fields})
    assert answer.status == 200, answer.body
    return answer


def header(answer: Answer) -> dict[str, float]:
    """Source: W3C, "Server Timing"."""
    told = answer.headers.get("server-timing", "")
    assert re.fullmatch(r"(\w+;dur=[0-9.]+(, \w+;dur=[0-9.]+)*)?", told)
    return {name: float(dur) for name, dur in re.findall(r"(\w+);dur=([0-9.]+)", told)}


def data(answer: Answer) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in answer.body.decode().splitlines()
            if line.startswith("data: {")]


# What the numbers are


def test_the_spans_of_a_completion() -> None:
    timings = Timings(arrival_s=10.0)
    assert timings.header(10.25, is_over=True) == "total;dur=250.0"
    assert set(timings.metrics()) == NAMES
    assert set(timings.metrics().values()) == {None}
    timings.queued_s, timings.entered_s, timings.first_s = 10.1, 10.2, 10.5
    assert timings.header(10.5, is_over=False) == "queue;dur=100.0, prefill;dur=300.0"
    timings.last_s, timings.num_tokens = 11.0, 6
    assert timings.metrics() == {"time_to_first_token_ms": 300.0, "generation_time_ms": 500.0, "queue_time_ms": 100.0,
                                 "mean_itl_ms": 100.0, "tokens_per_second": 7.5}
    assert timings.header(11.25, is_over=True) == (
        "queue;dur=100.0, prefill;dur=300.0, decode;dur=500.0, total;dur=1250.0")


def test_one_token_has_no_gaps() -> None:
    metrics = Timings(1.0, 1.0, 1.0, 1.5, 1.5, 1).metrics()
    assert (metrics["mean_itl_ms"], metrics["generation_time_ms"], metrics["tokens_per_second"]) == (None, 0.0, 2.0)


# Who is told


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{}, {"return_metrics": False}, {"return_metrics": None}])
def test_who_does_not_ask_is_not_told(server: Server, path: str, stream: bool, fields: dict[str, Any]) -> None:
    answer = ask(server, path, stream=stream, **fields)
    assert b"metrics" not in answer.body
    assert "server-timing" not in answer.headers


@pytest.mark.parametrize("path", PATHS)
def test_the_metrics_of_the_whole_engine(server: Server, tmp_path: Path, path: str) -> None:
    def check() -> None:
        answer = ask(server, path, **ASK, temperature=0)
        metrics, spans = answer.json["metrics"], header(answer)
        assert set(metrics) == NAMES
        assert set(spans) == {"queue", "prefill", "decode", "total"}
        assert spans["queue"] == metrics["queue_time_ms"]
        assert spans["prefill"] == metrics["time_to_first_token_ms"] > 0
        assert spans["decode"] == metrics["generation_time_ms"]
        assert spans["total"] >= spans["queue"] + spans["prefill"] + spans["decode"] - 0.01
        streamed = ask(server, path, **ASK, temperature=0, stream=True)
        assert set(header(streamed)) == {"queue", "prefill"}
        told = [event["metrics"] for event in data(streamed) if "metrics" in event]
        assert len(told) == 1, "at the end"
        assert "metrics" in data(streamed)[-1]
        assert set(told[0]) == NAMES
        assert header(streamed)["prefill"] == told[0]["time_to_first_token_ms"]
        scored = server.complete(prompt="hi", echo=True, logprobs=0, max_tokens=0, **FORCED, **ASK).json["metrics"]
        assert scored.pop("queue_time_ms") is not None
        assert set(scored.values()) == {None}, "it has no token"

    serve(server, with_template(tmp_path), check)


@pytest.mark.parametrize("fields", [{"n": 2}, {"n": 2, "stream": True}])
@pytest.mark.parametrize("path", PATHS[:2])
def test_several_completions_have_no_times_in_common(server: Server, path: str, fields: dict[str, Any]) -> None:
    answer = ask(server, path, **ASK, **fields)
    assert "server-timing" not in answer.headers
    documents = data(answer) if "stream" in fields else [answer.json]
    assert [document["metrics"] for document in documents if "metrics" in document] == [None]
    assert ask(server, "/v1/completions", **{**ASK, "prompt": ["a", "b"]}).json["metrics"] is None


@pytest.mark.parametrize("include_usage", [False, True])
def test_a_stream_tells_it_with_its_usage(client: openai.OpenAI, include_usage: bool) -> None:
    chunks = list(client.completions.create(model="fake", prompt="a", stream=True, extra_body=ASK,
                                            stream_options={"include_usage": include_usage}))
    assert [bool(chunk.choices) for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert (chunks[-1].usage is not None) == include_usage
    assert set(chunks[-1].model_dump()["metrics"]) == NAMES


def test_by_the_clients(client: openai.OpenAI, server: Server) -> None:
    answer = client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "a"}], extra_body=ASK)
    assert set(answer.model_dump()["metrics"]) == NAMES
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as other:
        message = other.messages.create(model="fake", max_tokens=5, messages=[{"role": "user", "content": "a"}],
                                        extra_body=ASK)
        assert set(message.to_dict()["metrics"]) == NAMES  # type: ignore[call-overload]


@pytest.mark.parametrize("path", PATHS)
def test_the_ask_is_checked(server: Server, path: str) -> None:
    body = {"model": "fake", "max_tokens": 4, "prompt": "a", "messages": [{"role": "user", "content": "a"}],
            "return_metrics": 1}
    answer = server.request("POST", path, body)
    assert answer.status == 400
    assert answer.json["error"]["message"].startswith("return_metrics: ")


# By the server's own will


@pytest.fixture(scope="module")
def telling() -> Iterator[Server]:
    with Server(DoorConfig(per_request_metrics=True, keep_alive_s=PERIOD_S)) as server:
        server.use(FakeEngine())
        yield server


@pytest.mark.parametrize("path", PATHS)
def test_a_server_may_tell_all(telling: Server, path: str) -> None:
    answer = ask(telling, path)
    assert set(answer.json["metrics"]) == NAMES
    assert "total" in header(answer)


def test_who_did_not_ask_has_no_chunk_more(telling: Server) -> None:
    chunks = data(ask(telling, "/v1/completions", stream=True))
    assert all(chunk["choices"] for chunk in chunks)
    assert not any("metrics" in chunk for chunk in chunks)
    last = data(ask(telling, "/v1/completions", stream=True, stream_options={"include_usage": True}))[-1]
    assert set(last["metrics"]) == NAMES


def test_a_stream_whose_first_sign_is_a_comment_knows_nothing_yet(telling: Server) -> None:
    telling.use(engine := FakeEngine())
    body = {"prompt": "HOLD", "stream": True, **ASK}
    with telling.post("/v1/completions", body) as connection:
        begin = read_until(connection, b": keep-alive\n\n")
        assert b"server-timing" not in begin
        engine.release()
        assert b'"metrics":{' in read_until(connection, b"data: [DONE]\n\n")
