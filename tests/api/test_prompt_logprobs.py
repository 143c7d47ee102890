"""prompt_logprobs over HTTP, as vLLM has them: in the choices of completions, beside those of a chat."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from tests.api.fake_engine import FakeEngine
from tests.api.serving import Server
from tests.api.test_anthropic import with_template
from tests.api.test_door import FORCED, serve


def entry(text: str, logprob: float, rank: int | None) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": text}


def test_of_completions(client: openai.OpenAI, engine: FakeEngine) -> None:
    answer = client.completions.create(model="fake", prompt=["ab", "c"], n=2, max_tokens=1,
                                       extra_body={"prompt_logprobs": 2})
    choices = [choice.model_dump() for choice in answer.choices]
    expected = [None, {"98": entry("b", -1.0, 1), "99": entry("c", -2.0, 2)}]
    assert [choice["prompt_logprobs"] for choice in choices] == [expected, expected, [None], [None]]
    assert [choice["logprobs"] for choice in choices] == [None] * 4
    assert [choice["text"] for choice in choices] == ["r"] * 4
    assert [call.sampling.prompt_logprobs for call in engine.calls] == [2, None, 2, None], "once a prompt"


def test_of_a_chat(client: openai.OpenAI, engine: FakeEngine) -> None:
    answer = client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "ab"}], n=2,
                                            max_tokens=1, extra_body={"prompt_logprobs": 0}).model_dump()
    assert answer["prompt_logprobs"] == [None, {"97": entry("a", -1.0, None)}, {"98": entry("b", -1.0, None)}]
    assert len(answer["choices"]) == 2
    assert [call.sampling.prompt_logprobs for call in engine.calls] == [0, None]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_nothing_is_said_unasked(server: Server, path: str) -> None:
    body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    assert b"prompt_logprobs" not in server.request("POST", path, body).body
    assert b"prompt_logprobs" not in server.request("POST", path, {**body, "prompt_logprobs": None}).body


@pytest.mark.parametrize(("logprobs", "prompt_logprobs"), [(0, 3), (3, 0), (2, 2), (1, None), (None, 1)])
def test_echo_has_as_many_as_it_asks_for(server: Server, logprobs: int | None, prompt_logprobs: int | None) -> None:
    fields = {name: num for name, num in (("logprobs", logprobs), ("prompt_logprobs", prompt_logprobs))
              if num is not None}
    choice = server.complete(prompt="abc", echo=True, max_tokens=1, **fields).json["choices"][0]
    assert choice["text"] == "abcr"
    if logprobs is None:
        assert choice["logprobs"] is None
    else:
        tops = choice["logprobs"]["top_logprobs"]
        assert tops[0] is None
        assert [len(top) for top in tops[1:]] == [max(logprobs, 1)] * 3
    if prompt_logprobs is None:
        assert "prompt_logprobs" not in choice
    else:
        assert choice["prompt_logprobs"][0] is None
        assert [len(token) for token in choice["prompt_logprobs"][1:]] == [max(prompt_logprobs, 1)] * 2


def test_they_are_the_engine_s(server: Server, tmp_path: Path) -> None:
    """Those that echo has of the same prompt, whatever the prefix cache has of it."""
    prompt = "hi " * 12

    def ask() -> None:
        for _ in range(2):
            echoed = server.complete(prompt=prompt, echo=True, logprobs=2, max_tokens=0).json["choices"][0]
            choice = server.complete(prompt=prompt, prompt_logprobs=2, max_tokens=1, n=2, **FORCED).json["choices"][1]
            ids = server.request("POST", "/tokenize", {"prompt": prompt}).json["tokens"]
            told = choice["prompt_logprobs"]
            assert told[0] is None
            assert len(told) == len(ids)
            for token_id, token, logprob, text in zip(ids, told, echoed["logprobs"]["token_logprobs"],
                                                      echoed["logprobs"]["tokens"], strict=True):
                if token is None:
                    assert logprob is None
                    continue
                assert token[str(token_id)]["logprob"] == logprob
                assert token[str(token_id)]["decoded_token"] == text
                best = sorted((other["logprob"] for other in token.values() if other["rank"]), reverse=True)
                assert [other["logprob"] for rank in (1, 2) for other in token.values()
                        if other["rank"] == rank] == best
                assert len(best) == 2
                assert len(token) in (2, 3)
        chat = server.chat("hi", prompt_logprobs=1, max_tokens=1, return_token_ids=True, **FORCED).json
        assert len(chat["prompt_logprobs"]) == len(chat["prompt_token_ids"])
        assert all(str(token_id) in token for token_id, token in zip(
            chat["prompt_token_ids"][1:], chat["prompt_logprobs"][1:], strict=True))

    serve(server, with_template(tmp_path), ask)
