"""Budgets of thoughts over HTTP, in both dialects: what reaches the engine, what usage says, and what is refused."""
from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from actors.sampling_params import SamplingParams, Thought
from tests.api.fake_engine import INFO, FakeEngine
from tests.api.serving import TIMEOUT_S, Answer, Server
from tests.api.test_door import serve
from tests.api.test_engine import MODELS
from tests.api.test_engine_parameters import TOKENIZER
from tests.weights.tiny_tokenizers import CHATML, write_folder

SWITCH = replace(INFO, chat_template="{% if enable_thinking %}<think>{% endif %}</think>")
THINKS = replace(INFO, chat_template="<think>")
PLAIN = INFO
HI: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(autouse=True)
def _plain_again(server: Server, engine: FakeEngine) -> Any:
    yield
    server.use(engine)


def post(server: Server, info: Any, path: str, **fields: Any) -> tuple[Answer, SamplingParams | None]:
    engine = FakeEngine(info)
    server.use(engine)
    answer = server.request("POST", path, {"model": "fake", "max_tokens": 50, "messages": HI, **fields})
    return answer, engine.calls[-1].sampling if engine.calls else None


def chat(server: Server, info: Any, **fields: Any) -> tuple[Answer, SamplingParams | None]:
    return post(server, info, "/v1/chat/completions", **fields)


def message(server: Server, info: Any, thinking: Any, **fields: Any) -> tuple[Answer, SamplingParams | None]:
    return post(server, info, "/v1/messages", thinking=thinking, **fields)


@pytest.mark.parametrize("budget", [None, 0, 7])
def test_a_budget_reaches_the_engine(server: Server, budget: int | None) -> None:
    answer, sampling = chat(server, THINKS, thinking_token_budget=budget, n=2)
    assert answer.status == 200
    assert sampling is not None
    assert sampling.thought == Thought("<think>", "</think>", budget)
    answer, sampling = chat(server, PLAIN)
    assert sampling is not None
    assert sampling.thought is None
    assert "completion_tokens_details" not in answer.json["usage"]


def test_a_model_without_thoughts_has_no_budget(server: Server) -> None:
    answer, sampling = chat(server, PLAIN, thinking_token_budget=5)
    assert (answer.status, answer.error["param"], sampling) == (400, "thinking_token_budget", None)
    assert "--reasoning-parser" in answer.error["message"]
    answer, sampling = message(server, PLAIN, {"type": "enabled", "budget_tokens": 5})
    assert (answer.status, sampling) == (400, None)
    assert answer.json["error"]["message"].startswith("thinking.budget_tokens: ")
    for kind in ("adaptive", "disabled"):
        answer, sampling = message(server, PLAIN, {"type": kind})
        assert answer.status == 200
        assert sampling is not None
        assert sampling.thought is None


def test_completions_have_no_thoughts(server: Server) -> None:
    server.use(FakeEngine(THINKS))
    answer = server.request("POST", "/v1/completions", {"prompt": "a", "thinking_token_budget": 5})
    assert (answer.status, answer.error["param"]) == (400, "thinking_token_budget")


@pytest.mark.parametrize(("info", "thinking", "budget", "kwargs"), [
    (SWITCH, None, None, {}), (SWITCH, {"type": "adaptive"}, None, {"enable_thinking": True}),
    (SWITCH, {"type": "enabled", "budget_tokens": 9}, 9, {"enable_thinking": True}),
    (SWITCH, {"type": "disabled"}, None, {"enable_thinking": False}),
    (THINKS, {"type": "disabled"}, 0, {"enable_thinking": False}),
    (THINKS, {"type": "enabled", "budget_tokens": 0}, 0, {"enable_thinking": True}),
    (THINKS, {"type": "adaptive", "display": "omitted"}, None, {"enable_thinking": True})])
def test_anthropic_s_thinking(server: Server, info: Any, thinking: Any, budget: int | None, kwargs: Any) -> None:
    engine = FakeEngine(info)
    server.use(engine)
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        create: Any = client.messages.create
        create(model="fake", max_tokens=50, messages=HI, **({} if thinking is None else {"thinking": thinking}))
        counted: Any = client.messages.count_tokens
        counted(model="fake", messages=HI, **({} if thinking is None else {"thinking": thinking}))
    assert engine.calls[0].sampling.thought == Thought("<think>", "</think>", budget)
    assert engine.calls[0].template[2] == kwargs


def test_a_form_and_calls_come_behind_thoughts_of_their_budget(server: Server) -> None:
    answer, sampling = chat(server, THINKS, thinking_token_budget=3, response_format={"type": "json_object"})
    assert answer.status == 200
    assert sampling is not None
    assert sampling.structured_outputs is not None
    assert sampling.thought == Thought("<think>", "</think>", 3)


# Through the whole engine

TEMPLATE = ("{% if tools %}<tool_call>{% endif %}" + CHATML
            + "{% if add_generation_prompt %}{{ '<think>\n' }}{% endif %}")
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {
    "type": "object", "required": ["x"], "properties": {"x": {"enum": ["a", "b"]}}, "additionalProperties": False}}}


def test_a_random_model_thinks_no_longer_than_it_may(server: Server, tmp_path: Path) -> None:
    """And answers in its form then, streamed and not, with as many tokens as usage says."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(MODELS / "llama" / name, tmp_path)
    folder = write_folder(tmp_path, TOKENIZER, tokenizer_config={"chat_template": TEMPLATE, "eos_token": "<|im_end|>"})

    def ask() -> None:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S) as client:
            create: Any = client.chat.completions.create
            fields: Any = {"model": "fake", "messages": HI, "temperature": 1.5, "seed": 4, "max_tokens": 120, "n": 2,
                           "extra_body": {"thinking_token_budget": 6}}
            for form in ({"response_format": {"type": "json_schema", "json_schema": {
                    "name": "a", "schema": {"enum": ["yes", "no"]}}}}, {"tools": [TOOL], "tool_choice": "required",
                                                                         "parallel_tool_calls": False}):
                whole = create(**fields, **form)
                assert whole.usage.completion_tokens_details.reasoning_tokens == 12
                for choice in whole.choices:
                    assert len(choice.message.reasoning_content or "") <= 6
                    assert choice.finish_reason == ("tool_calls" if "tools" in form else "stop")
                    assert choice.message.content in (None, '"yes"', '"no"')
                chunks = list(create(**fields, **form, stream=True, stream_options={"include_usage": True}))
                for name in ("completion_tokens", "completion_tokens_details"):
                    assert getattr(chunks[-1].usage, name) == getattr(whole.usage, name)
                for choice in whole.choices:
                    deltas = [one.delta for chunk in chunks for one in chunk.choices if one.index == choice.index]
                    thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
                    assert thought == (getattr(choice.message, "reasoning_content", None) or "")
                    assert "".join(delta.content or "" for delta in deltas) == (choice.message.content or "")
        with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=TIMEOUT_S) as claude:
            answer: Any = claude.messages.create
            for thinking, most in (({"type": "enabled", "budget_tokens": 4}, 4), ({"type": "disabled"}, 0)):
                said = answer(model="fake", max_tokens=40, messages=HI, thinking=thinking)
                assert said.usage.output_tokens_details.thinking_tokens == most
                thoughts = [block.thinking for block in said.content if block.type == "thinking"]
                assert sum(map(len, thoughts)) <= most

    serve(server, folder, ask, max_model_len=256)
