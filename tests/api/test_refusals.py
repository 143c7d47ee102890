"""Bad input is refused with the field's name, in one shape, and the server goes on."""
from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.engine import ParameterError, SamplingParams
from api.schemas import is_nested_deeper
from tests.api.fake_engine import MAX_MODEL_LEN, VOCAB_SIZE, FakeEngine
from tests.api.serving import Answer, Server


def refused(answer: Answer, param: str | None, status: int = 400) -> str:
    assert answer.status == status, answer.body
    assert answer.error["param"] == param
    assert answer.error["type"] == "invalid_request_error"
    message: str = answer.error["message"]
    for inner in ("Traceback", ".py", "Error", "pydantic", "object at 0x"):
        assert inner not in message
    return message


@pytest.mark.parametrize(("fields", "param"), [
    # FAULTS A01
    ({"logit_bias": {"999999": 5}}, "logit_bias"),
    ({"logit_bias": {"-1": 5}}, "logit_bias"),
    ({"logit_bias": {"abc": 1}}, "logit_bias[abc]"),
    ({"logit_bias": {"1_0": 1}}, "logit_bias[1_0]"),
    ({"logit_bias": {"٣": 1}}, "logit_bias[٣]"),
    ({"logit_bias": {"5": 1e9}}, "logit_bias[5]"),
    ({"logit_bias": {"5": "x"}}, "logit_bias[5]"),
    ({"logit_bias": {str(i): 0 for i in range(5000)}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"stop_token_ids": [VOCAB_SIZE + 5], "min_tokens": 2}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": list(range(5000))}, "stop_token_ids"),
    # FAULTS A07, A08
    ({"top_k": 0.01}, "top_k"), ({"top_k": 1.0}, "top_k"), ({"top_k": "5"}, "top_k"), ({"top_k": True}, "top_k"),
    ({"top_k": -2}, "top_k"), ({"top_k": 2**63}, "top_k"), ({"top_k": 2**64}, "top_k"),
    ({"seed": 2**64}, "seed"), ({"seed": 2**63}, "seed"), ({"seed": -2**63 - 1}, "seed"), ({"seed": 1.5}, "seed"),
    # FAULTS A12
    ({"stop": ["a"] * 500_000}, "stop"), ({"stop": "a" * 1_000_000}, "stop"), ({"stop": ""}, "stop"),
    ({"stop": [""]}, "stop"), ({"stop": [5]}, "stop[0]"), ({"stop": {"a": 1}}, "stop"), ({"stop": [1] * 65}, "stop"),
    # ranges and types
    ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": -1}, "max_tokens"), ({"max_tokens": "9"}, "max_tokens"),
    ({"min_tokens": 9, "max_tokens": 4}, "min_tokens"),
    ({"top_p": 0}, "top_p"), ({"top_p": 1.1}, "top_p"), ({"min_p": -0.1}, "min_p"),
    ({"temperature": -1}, "temperature"), ({"temperature": "hot"}, "temperature"), ({"temperature": []}, "temperature"),
    ({"presence_penalty": 3}, "presence_penalty"), ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"n": 0}, "n"), ({"n": 17}, "n"), ({"n": 1.5}, "n"), ({"n": True}, "n"),
    ({"logprobs": 21}, "logprobs"), ({"logprobs": -1}, "logprobs"), ({"logprobs": True}, "logprobs"),
    ({"stream": 1}, "stream"), ({"stream": "true"}, "stream"), ({"echo": "yes"}, "echo"), ({"user": 5}, "user"),
    ({"ignore_eos": 1}, "ignore_eos"), ({"model": 5}, "model"),
    ({"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": 5}, "stream_options"),
    # known, not supported
    ({"best_of": 2}, "best_of"), ({"suffix": "x"}, "suffix"), ({"use_beam_search": True}, "use_beam_search"),
    ({"tools": [{}]}, "tools"), ({"modalities": ["audio"]}, "modalities"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"), ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": True}, "prompt_logprobs"), ({"prompt_logprobs": VOCAB_SIZE}, "prompt_logprobs"),
    ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"), ({"mirostat": 2}, "mirostat"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": 1}}, "stream_options.continuous_usage_stats"),
    ({"best_of": 3, "n": 2}, "best_of"), ({"best_of": 1, "n": 2}, "best_of"), ({"mirostat_mode": 1}, "mirostat_mode"),
    ({"dry_multiplier": 0.8}, "dry_multiplier"), ({"xtc_probability": 0.5}, "xtc_probability"),
    ({"typical_p": 0.5}, "typical_p"),
    ({"allowed_token_ids": []}, "allowed_token_ids"), ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
    ({"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids"), ({"allowed_token_ids": [1.5]}, "allowed_token_ids[0]"),
    ({"allowed_token_ids": [0] * 2**20}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words"), ({"bad_words": ["a"] * 129}, "bad_words"), ({"bad_words": "a"}, "bad_words"),
    ({"bad_words": ["a" * 257]}, "bad_words"), ({"bad_words": [5]}, "bad_words[0]"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 5, "echo": True}, "truncate_prompt_tokens"),
    ({"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
])
@pytest.mark.parametrize("stream", [False, True])
def test_bad_field_is_named(server: Server, fields: dict[str, Any], param: str, stream: bool) -> None:
    message = refused(server.complete(**{"prompt": "a", "stream": stream, **fields}), param)
    assert param in message


@pytest.mark.parametrize("fields", [
    {"logit_bias": {str(VOCAB_SIZE - 1): 5}}, {"stop_token_ids": [VOCAB_SIZE - 1]}, {"top_k": 0}, {"top_k": -1},
    {"top_k": VOCAB_SIZE + 1}, {"top_k": 2**31 - 1}, {"seed": 0}, {"seed": -1}, {"seed": 2**63 - 1},
    {"seed": -2**63}, {"stop": ["a" * 1024] * 64}, {"tools": [], "tool_choice": "auto", "best_of": 1},
    {"n": 2, "best_of": 2}, {"allowed_token_ids": [0, VOCAB_SIZE - 1]}, {"bad_words": []},
    {"truncate_prompt_tokens": -1},
    {"temperature": None, "n": None, "stop": None, "logit_bias": None, "stream_options": None, "tools": None},
    {"response_format": {"type": "text"}}, {"something_unknown": {"a": [1]}}, {"user": "x" * 1000},
])
def test_what_asks_for_nothing_or_is_in_range_is_served(server: Server, fields: dict[str, Any]) -> None:
    assert server.complete(prompt="a", **fields).json["choices"][0]["text"] == "re a"


@pytest.mark.parametrize(("prompt", "param"), [
    ("", "prompt"), ([""], "prompt[0]"), ([], "prompt"), ([[]], "prompt[0]"), (["a", []], "prompt[1]"),    # FAULTS A03
    (None, "prompt"), (5, "prompt"), ({}, "prompt"), ([None], "prompt[0]"), ([1, "a"], "prompt[1]"),
    ([["a"]], "prompt[0][0]"), ([[1, -1]], "prompt[0][1]"), ([1.5], "prompt[0]"), ([True], "prompt[0]"),
    ([VOCAB_SIZE], "prompt"), ([[65, 2**40]], "prompt[0]"), (["a"] * 2000, "prompt"),
    (["a", [65] * MAX_MODEL_LEN], "prompt[1]"), (["a", [65] * (MAX_MODEL_LEN + 1)], "prompt[1]"),
])
@pytest.mark.parametrize("stream", [False, True])
def test_bad_prompt(server: Server, prompt: Any, param: str, stream: bool) -> None:
    message = refused(server.complete(prompt=prompt, stream=stream), param)
    assert message.startswith(f"{param}: ")


def test_a_limit_of_no_tokens_is_refused_in_the_words_of_the_endpoint(server: Server) -> None:
    assert "0 only with echo" in refused(server.complete(prompt="a", max_tokens=0), "max_tokens")
    for answer in (server.complete(prompt="a", max_tokens=0), server.chat(max_tokens=0)):
        assert "prompt_logprobs" not in refused(answer, "max_tokens")
    with pytest.raises(ParameterError, match="0 only with prompt_logprobs"):
        SamplingParams(max_tokens=0)


def test_prompts_times_n_is_bounded(server: Server) -> None:
    assert "1024" in refused(server.complete(prompt=["a"] * 100, n=16), "prompt")


def test_missing_prompt_and_messages(server: Server) -> None:
    refused(server.complete(), "prompt")
    refused(server.request("POST", "/v1/chat/completions", {"model": "fake"}), "messages")


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("too_many", [0, 100])
def test_prompt_that_fills_the_context(server: Server, ids: bool, too_many: int) -> None:
    """FAULTS A05: the error is about the prompt and has no negative number."""
    length = MAX_MODEL_LEN + too_many
    message = refused(server.complete(prompt=[65] * length if ids else "A" * length), "prompt")
    assert str(length) in message
    assert str(MAX_MODEL_LEN) in message
    assert "-" not in message


def test_prompt_one_short_of_the_context_gets_one_token(server: Server) -> None:
    answer = server.complete(prompt=[65] * (MAX_MODEL_LEN - 1)).json
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 1


def test_huge_id_prompt_is_refused_at_the_door(server: Server, engine: FakeEngine) -> None:
    refused(server.complete(prompt=[0] * 200_000), "prompt")
    assert engine.calls == []


@pytest.mark.parametrize(("messages", "param"), [
    ([], "messages"), ("hi", "messages"), ([5], "messages[0]"), ([{}], "messages[0].role"),
    ([{"role": "", "content": "a"}], "messages[0].role"), ([{"role": 5, "content": "a"}], "messages[0].role"),
    ([{"role": "user"}], "messages[0].content"), ([{"role": "user", "content": None}], "messages[0].content"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "image_url"}]}],
     "messages[1].content[0].type"),
    ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text"}]}], "messages[0].content[1].text"),
    ([{"role": "user", "content": ["a"]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": []}], "messages[0].content"),
    ([{"role": "assistant", "content": None, "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
    ([{"role": "user", "content": "a"}] * 5000, "messages"),
    ([{"role": "refused", "content": "a"}], "messages"),
])
@pytest.mark.parametrize("stream", [False, True])
def test_bad_messages(server: Server, messages: Any, param: str, stream: bool) -> None:
    """FAULTS A03, C01, C04."""
    refused(server.request("POST", "/v1/chat/completions", {"messages": messages, "stream": stream}), param)


def test_template_message_is_told(server: Server) -> None:
    """FAULTS C01."""
    answer = server.request("POST", "/v1/chat/completions", {"messages": [{"role": "refused", "content": "a"}]})
    assert "roles must alternate" in refused(answer, "messages")


def test_content_forms(server: Server, engine: FakeEngine) -> None:
    """FAULTS C03, C04: text parts go on as parts, so that the engine's one rule joins them, over HTTP and without."""
    parts = [{"type": "text", "text": "B"}, {"type": "text", "text": "C"}]
    messages = [
        {"role": "system", "content": "s"}, {"role": "user", "content": "A"},
        {"role": "assistant", "content": ""}, {"role": "assistant", "content": None}, {"role": "assistant"},
        {"role": "tool", "content": [{**part, "cache_control": 1} for part in parts], "tool_call_id": "c1"},
        {"role": "user", "content": parts, "name": "N"}]
    answer = server.request("POST", "/v1/chat/completions", {"messages": messages})
    assert answer.status == 200
    assert engine.calls[0].prompt == [
        {"role": "system", "content": "s"}, {"role": "user", "content": "A"}, {"role": "assistant", "content": ""},
        {"role": "assistant", "content": ""}, {"role": "assistant", "content": ""},
        {"role": "tool", "content": parts, "tool_call_id": "c1"}, {"role": "user", "content": parts, "name": "N"}]


@pytest.mark.parametrize(("fields", "param"), [
    ({"top_logprobs": 2}, "top_logprobs"), ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 1}, "logprobs"), ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 2**40}, "max_completion_tokens"),
    ({"max_completion_tokens": 5, "max_tokens": 4}, "max_completion_tokens"), ({"echo": 1}, "echo"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"), ({"chat_template": "x"}, "chat_template"),
    ({"chat_template_kwargs": {str(i): i for i in range(65)}}, "chat_template_kwargs"),
    ({"reasoning_effort": "high"}, "reasoning_effort"), ({"audio": {}}, "audio"),
])
def test_bad_field_of_chat(server: Server, fields: dict[str, Any], param: str) -> None:
    refused(server.chat(**fields), param)


SURROGATE = "\ud800"


@pytest.mark.parametrize(("body", "param"), [
    ({"messages": [{"role": "user", "content": SURROGATE}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a" + SURROGATE}]}]},
     "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": "a", "name": SURROGATE}]}, "messages[0].name"),
    ({"messages": [{"role": "user", "content": "a"}], "stop": ["x", SURROGATE], "stream": True}, "stop[1]"),
    ({"messages": [{"role": "user", "content": "a"}], SURROGATE: 1}, "?"),
])
def test_lone_surrogates(server: Server, body: dict[str, Any], param: str) -> None:
    """FAULTS T06."""
    refused(server.request("POST", "/v1/chat/completions", body), param)
    raw = json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")
    answer = server.request("POST", "/v1/chat/completions", raw)
    assert answer.status == 400
    assert answer.error["message"]


def test_surrogate_pair_is_a_character(server: Server) -> None:
    answer = server.request("POST", "/v1/completions", b'{"prompt": "\\ud83d\\ude00"}')
    assert answer.json["choices"][0]["text"] == "re \U0001f600"


@pytest.mark.parametrize("body", [
    b"", b"{", b"[]", b"null", b'"a"', b'{"prompt": NaN}', b'{"prompt": "a", "temperature": 1e999}',
    b'{"prompt": "\xff"}', b"\x00", b"[" * 10_000 + b"]" * 10_000,
    b'{"prompt": "a", "x": ' + b"[" * 130 + b"]" * 130 + b"}",
    b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", b'{"prompt": [' + b"[]," * 600_000 + b"[]]}",
])
def test_bodies_that_are_no_request(server: Server, body: bytes) -> None:
    """FAULTS A14, T06."""
    answer = server.request("POST", "/v1/completions", body)
    assert answer.status == 400
    assert answer.error["message"]


@pytest.mark.parametrize(("body", "is_deeper"), [
    (b"[" * 4 + b"]" * 4, False), (b"[" * 5 + b"]" * 5, True), (b'{"a": [{"b": [1]}]}', False),
    (b'{"a": [{"b": [{}]}]}', True), (b"[" + b"[]," * 1000 + b"[]]", False), (b"[[],{},[[]]]", False),
    (b'["[[[[[[", "{{{{{{", "]"]', False), (rb'["\\", [[[["]]]]"]]]]]', True), (rb'["\"[[[[[[\\\"", [1]]', False),
    (b"[" * 1000, True), (b"]" * 1000, False), (b"[{" * 500 + b"}]" * 500, True),
])
def test_nesting_is_counted_before_parsing(body: bytes, is_deeper: bool) -> None:
    """FAULTS A14."""
    assert is_nested_deeper(body, 4) == is_deeper


texts = st.text(alphabet='[]{}"\\a', max_size=4)
values = st.recursive(texts | st.none(), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
    texts, inner, max_size=3), max_leaves=12)


@given(values)
def test_nesting_is_counted_right(value: Any) -> None:
    def depth(value: Any) -> int:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
        return 0 if inner is None else 1 + max(map(depth, inner), default=0)

    body = json.dumps(value).encode()
    assert [is_nested_deeper(body, limit) for limit in range(12)] == [depth(value) > limit for limit in range(12)]


@pytest.mark.parametrize("name", ["../../etc", "/etc/passwd", "a%2f..", "fake\0", "x" * 10_240, "", "FAKE", "fake/"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_unknown_model(server: Server, name: str, path: str) -> None:
    """FAULTS O10."""
    body = {"model": name, "prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    answer = server.request("POST", path, body)
    refused(answer, "model", 404)
    assert answer.error["code"] == "model_not_found"
    assert b"etc" not in answer.body
    assert b"/models/" not in answer.body


def test_model_may_be_left_out_or_be_an_alias(server: Server) -> None:
    assert server.request("POST", "/v1/completions", {"prompt": "a"}).json["model"] == "fake"
    assert server.complete(model="fake-alias", prompt="a").json["model"] == "fake"


@pytest.mark.parametrize(("method", "path", "status"), [
    ("GET", "/", 404), ("GET", "/v1/models/", 404), ("POST", "/v1/nothing", 404), ("GET", "/v1/completions", 405),
    ("POST", "/health", 405), ("DELETE", "/v1/models", 405), ("GET", "/v1/../../etc/passwd", 404),
    ("GET", "/%00", 404),
])
def test_wrong_path_or_method(server: Server, method: str, path: str, status: int) -> None:
    answer = server.request(method, path)
    assert answer.status == status
    assert answer.error["message"]
    assert b"etc" not in answer.body
    if status == 405:
        assert "allow" in answer.headers
