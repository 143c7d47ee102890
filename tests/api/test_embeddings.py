"""/v1/embeddings by the `openai` client: forms of input and output, refusals, and the numbers of a whole engine."""
from __future__ import annotations

import base64
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from tests.api.fake_engine import INFO, MAX_MODEL_LEN, VOCAB_SIZE, FakeEngine
from tests.api.serving import Answer, Server
from tests.api.test_door import serve, with_tokenizer
from tests.api.test_engine_pooling import golden_states


def embed(server: Server, **fields: Any) -> Answer:
    return server.request("POST", "/v1/embeddings", {"model": "fake", "input": "ab", **fields})


def unit(*values: float) -> Any:
    return pytest.approx([value / math.hypot(*values) for value in values])


def test_by_the_client(client: openai.OpenAI, engine: FakeEngine) -> None:
    """It asks for base64 unless it is told otherwise."""
    for options in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        given: Any = options
        answer = client.embeddings.create(model="fake", input=["a" * 12, "bc"], user="someone", **given)
        assert (answer.object, answer.model) == ("list", "fake")
        assert [item.index for item in answer.data] == [0, 1]
        assert {item.object for item in answer.data} == {"embedding"}
        vectors: list[Any] = [item.embedding for item in answer.data]
        if options.get("encoding_format") == "base64":
            vectors = [np.frombuffer(base64.b64decode(vector), "<f4").tolist() for vector in vectors]
        assert vectors == [unit(3, 4, 0, 12), unit(3, 4, 0, 2)]
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (14, 14)
    call = engine.calls[0]
    assert (call.sampling.max_tokens, call.sampling.pooling, call.asker["user"]) == (0, "last", "someone")


@pytest.mark.parametrize("text", ["hi", [104, 105], ["hi"], [[104, 105]]])
def test_forms_of_input(server: Server, engine: FakeEngine, text: Any) -> None:
    assert [item["embedding"] for item in embed(server, input=text).json["data"]] == [unit(3, 4, 0, 2)]
    assert engine.calls[0].prompt in ("hi", [104, 105])


@pytest.mark.parametrize(("dimensions", "values"), [(1, (3,)), (2, (3, 4)), (3, (3, 4, 0)), (4, (3, 4, 0, 2))])
def test_fewer_dimensions_have_length_1_too(server: Server, dimensions: int, values: tuple[float, ...]) -> None:
    assert embed(server, dimensions=dimensions).json["data"][0]["embedding"] == unit(*values)


def test_what_reaches_the_engine(server: Server, engine: FakeEngine) -> None:
    assert embed(server, pooling="mean", truncate_prompt_tokens=-1, priority=3, cache_salt="s").status == 200
    call = engine.calls[0]
    assert (call.sampling.pooling, call.sampling.truncate_prompt_tokens) == ("mean", -1)
    assert (call.asker["priority"], call.asker["cache_salt"]) == (3, "s")


def test_how_long_it_took(server: Server) -> None:
    answer = embed(server, return_metrics=True)
    assert answer.json["metrics"]["time_to_first_token_ms"] is None
    assert answer.headers["server-timing"].startswith("total;dur=")
    assert "metrics" not in embed(server).json


@pytest.mark.parametrize(("fields", "param"), [
    ({"input": None}, "input"), ({"input": 5}, "input"), ({"input": [None]}, "input[0]"),
    ({"input": ["a", []]}, "input[1]"), ({"input": ["a"] * 2000}, "input"), ({"input": [[1, -1]]}, "input[0][1]"),
    ({"input": [0] * (MAX_MODEL_LEN + 1)}, "input"), ({"input": ["a", "b" * MAX_MODEL_LEN]}, "input[1]"),
    ({"input": [VOCAB_SIZE]}, "input"), ({"input": [{"text": "a"}]}, "input[0]"),
    ({"dimensions": 0}, "dimensions"), ({"dimensions": 5}, "dimensions"), ({"dimensions": 1.5}, "dimensions"),
    ({"encoding_format": "hex"}, "encoding_format"), ({"pooling": "max"}, "pooling"), ({"user": 5}, "user"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"), ({"messages": [{}]}, "messages"),
    ({"normalize": False}, "normalize"), ({"embed_dtype": "int8"}, "embed_dtype"), ({"priority": "1"}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
])
def test_a_bad_field_is_named(server: Server, fields: dict[str, Any], param: str) -> None:
    answer = embed(server, **fields)
    assert answer.status == 400, answer.body
    assert answer.error["param"] == param
    assert answer.error["message"].startswith(f"{param}: ")


def test_other_refusals(server: Server) -> None:
    assert embed(server, model="nobody").error["code"] == "model_not_found"
    assert embed(server, input="BUSY").status == 429
    assert "stream" in embed(server, stream=True).headers["warning"]
    few = FakeEngine(replace(INFO, max_queued_requests=2))
    server.use(few)
    assert embed(server, input=["a"] * 7).error["param"] == "input"
    assert few.calls == []


# With the whole engine


def test_they_are_the_golden_states(server: Server, tmp_path: Path) -> None:
    ids, states = golden_states()

    def ask() -> None:
        for pooling, state in (("last", states[-1]), ("mean", states.mean(0))):
            answer = embed(server, input=[ids, ids[:5]], pooling=pooling).json
            got = np.array(answer["data"][0]["embedding"])
            assert np.abs(got - state / np.linalg.norm(state)).max() < 1e-4
            shorter = np.array(embed(server, input=ids, pooling=pooling, dimensions=8).json["data"][0]["embedding"])
            assert np.abs(shorter - state[:8] / np.linalg.norm(state[:8])).max() < 1e-4
            assert answer["usage"] == {"prompt_tokens": len(ids) + 5, "total_tokens": len(ids) + 5}
        # As many tokens as the context holds: nothing is to be said after them.
        assert embed(server, input=[5] * 64).status == 200
        assert embed(server, input=[5] * 65).error["param"] == "input"
        cut = embed(server, input=[9, *[5] * 64], truncate_prompt_tokens=64).json
        assert cut["data"] == embed(server, input=[5] * 64).json["data"]

    serve(server, with_tokenizer(tmp_path, "byte_level"), ask, max_model_len=64)


def test_texts_beside_answers_and_one_another(server: Server, tmp_path: Path) -> None:
    def ask() -> None:
        texts = ["hi", "the sea", "hi hi hi " * 9, "a"]
        alone = [embed(server, input=text).json["data"][0]["embedding"] for text in texts]
        together = embed(server, input=texts).json["data"]
        assert [item["embedding"] for item in together] == alone
        with server.post("/v1/completions", {"prompt": "x", "max_tokens": 200, "stream": True, "ignore_eos": True}):
            again = embed(server, input=texts * 8).json["data"]
        assert [item["embedding"] for item in again] == alone * 8

    serve(server, with_tokenizer(tmp_path, "byte_level"), ask)
