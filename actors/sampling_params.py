"""How a request wants its tokens chosen. Names and meanings are vLLM's and OpenAI's."""
from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
MAX_BAD_WORD_IDS = 1024                     # tokens of them all, in every spelling
MAX_PRIORITY = 2**31 - 1
MAX_SCHEMA_CHARS = 1 << 18
MAX_SCHEMA_KEYS = 4096                      # of a JSON schema and all in it: to compile 4,096 properties takes a second
MAX_GRAMMAR_CHARS = 1 << 16                 # of a regular expression or grammar
MAX_GRAMMAR_COLONS = 2048                   # no grammar has more rules than colons
MAX_CHOICES = 4096


class ParameterError(ValueError):
    """A request's parameter is out of range. `field` names it as the caller wrote it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


GrammarKind: TypeAlias = Literal["json", "regex", "choice", "grammar", "calls"]


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """The form that an answer has to have, as plain text. See `structured_outputs`.

    kind, text: "json" and a JSON schema, "regex" and a regular expression, "choice" and a JSON list of strings,
    "grammar" and a grammar in the Lark or GBNF notation, "calls" and what `actors.call_grammar` made.
    """
    kind: GrammarKind
    text: str
    name: str = field(default="structured_outputs", compare=False)      # the field that it came by, for errors
    any_whitespace: bool = True             # between the parts of JSON, up to a bound; else none


def structured_outputs(wanted: Mapping[str, Any], field: str = "structured_outputs") -> StructuredOutputs:
    """From vLLM's object: one of json (a JSON schema, or its text), json_object, regex, choice, grammar; and
    disable_any_whitespace, disable_fallback (there is none).

    Raises: ParameterError.
    """
    known = ("json", "json_object", "regex", "choice", "grammar")
    for name in wanted.keys() - {*known, "disable_any_whitespace", "disable_fallback"}:
        raise ParameterError(field, f"{name!r:.80} is not known")
    for name in ("json_object", "disable_any_whitespace", "disable_fallback"):
        if wanted.get(name) not in (None, True, False):
            raise ParameterError(f"{field}.{name}", "must be true or false")
    given = [name for name in known if wanted.get(name) is not None and (name, wanted[name]) != ("json_object", False)]
    if len(given) != 1:
        raise ParameterError(field, f"must have one of {', '.join(known)}, got {' and '.join(given) or 'none'}")
    kind, where, any_whitespace = given[0], f"{field}.{given[0]}", not wanted.get("disable_any_whitespace")
    if kind == "json_object":
        return StructuredOutputs("json", '{"type":"object"}', where, any_whitespace)
    return structured_output(kind, wanted[kind], where, any_whitespace)


def structured_output(kind: str, value: object, field: str, any_whitespace: bool = True) -> StructuredOutputs:
    """kind: a `GrammarKind`. value: of json an object or boolean, or JSON text of one, of choice a list; else text.

    Raises: ParameterError naming `field`.
    """
    if kind == "json":
        return _json_schema(value, field, any_whitespace)
    if kind == "choice":
        return _choice(value, field)
    return _pattern("regex" if kind == "regex" else "grammar", value, field)


def _json_schema(schema: object, field: str, any_whitespace: bool) -> StructuredOutputs:
    if isinstance(schema, str):
        if len(schema) > MAX_SCHEMA_CHARS:
            raise ParameterError(field, f"has {len(schema)} characters, at most {MAX_SCHEMA_CHARS}")
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ParameterError(field, f"is no JSON: {error}") from None
    if isinstance(schema, bool):
        if not schema:
            raise ParameterError(field, "false allows nothing")
        schema = {}
    if not isinstance(schema, Mapping):
        raise ParameterError(field, f"must be a JSON schema, which is an object, got {type(schema).__name__}")
    if "x-guidance" in schema:
        raise ParameterError(field, "x-guidance is not the caller's to set")
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ParameterError(field, f"is no JSON: {error}") from None
    if len(text) > MAX_SCHEMA_CHARS:
        raise ParameterError(field, f"has {len(text)} characters, at most {MAX_SCHEMA_CHARS}")
    num_keys = _num_keys(schema)
    if num_keys > MAX_SCHEMA_KEYS:
        raise ParameterError(field, f"has {num_keys} keys, at most {MAX_SCHEMA_KEYS}")
    return StructuredOutputs("json", text, field, any_whitespace)


def _num_keys(schema: object) -> int:
    """In all objects. It bounds how deep definitions can refer to one another, too."""
    num_keys, pending = 0, [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, Mapping):
            num_keys += len(value)
            pending += value.values()
        elif isinstance(value, (list, tuple)):
            pending += value
    return num_keys


def _choice(choices: object, field: str) -> StructuredOutputs:
    if not isinstance(choices, (list, tuple)) or not choices or not all(isinstance(one, str) for one in choices):
        raise ParameterError(field, "must be a list of at least one string")
    if len(choices) > MAX_CHOICES:
        raise ParameterError(field, f"has {len(choices)} strings, at most {MAX_CHOICES}")
    if not all(choices):
        raise ParameterError(field, "must be non-empty strings")
    return _pattern("choice", json.dumps(choices, ensure_ascii=False), field)


def _pattern(kind: GrammarKind, text: object, field: str) -> StructuredOutputs:
    if not isinstance(text, str) or not text:
        raise ParameterError(field, "must be a non-empty string")
    if len(text) > MAX_GRAMMAR_CHARS:
        raise ParameterError(field, f"has {len(text)} characters, at most {MAX_GRAMMAR_CHARS}")
    if kind == "grammar" and text.count(":") > MAX_GRAMMAR_COLONS:
        raise ParameterError(field, f"has {text.count(':')} rules, at most {MAX_GRAMMAR_COLONS}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ParameterError(field, "is not Unicode text") from None
    return StructuredOutputs(kind, text, field)


@dataclass(frozen=True, slots=True)
class Thought:
    """That an answer may begin with, or that its prompt has begun; a form that the answer has to have comes behind it.

    begin, end: the marks round it. budget: tokens that it may have before its end is forced; None: any number.

    Raises: ParameterError.
    """
    begin: str
    end: str
    budget: int | None = None
    name: str = field(default="thinking_token_budget", compare=False)       # the field that the budget came by

    def __post_init__(self) -> None:
        for mark in (self.begin, self.end):
            if not isinstance(mark, str) or not mark.strip():
                raise ParameterError("thought", f"has marks round it, got {mark!r:.80}")
        _int(self.name, self.budget, 0, 2**31 - 1, optional=True)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Everything that decides the tokens of one completion, and what is reported about them.

    As in vLLM, `stop` may be one string, `logit_bias` a dictionary, and lists do for tuples; None stands for nothing.
    `structured_outputs` may be a dictionary, see the function of that name.

    Raises: ParameterError, naming the field.
    """
    max_tokens: int | None = None           # None: as many as the context holds; 0 only with prompt_logprobs
    min_tokens: int = 0                     # no end of sequence and no stop id before
    temperature: float = 1.0                # 0 is greedy
    top_k: int = 0                          # 0 and -1: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None                 # None: drawn by the engine
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0           # of tokens generated so far
    frequency_penalty: float = 0.0          # of tokens generated so far
    repetition_penalty: float = 1.0         # of prompt and generated tokens
    logit_bias: tuple[tuple[int, float], ...] = ()      # (token id, added to its logit)
    logprobs: int | None = None             # report each token's log-probability and this many alternatives
    prompt_logprobs: int | None = None      # likewise for the prompt
    skip_special_tokens: bool = True        # leave control tokens out of the text
    include_stop_str_in_output: bool = False    # the text ends with the stop string or token that ended it
    allowed_token_ids: tuple[int, ...] | None = None    # no other token is sampled; None: any is
    bad_words: tuple[str, ...] = ()         # texts whose tokens do not follow one another in the answer
    structured_outputs: StructuredOutputs | None = None     # what form the answer has; None: any
    thought: Thought | None = None          # what thoughts look like; None: they are not told apart
    truncate_prompt_tokens: int | None = None   # cut a prompt's beginning off past so many; -1: so that it fits
    # With max_tokens 0: report the final hidden states of the prompt's tokens, their mean or the last one.
    pooling: Literal["mean", "last"] | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        biases = tuple(self.logit_bias.items()) if isinstance(self.logit_bias, Mapping) else self.logit_bias
        for name, value in (("stop", stop), ("stop_token_ids", self.stop_token_ids), ("logit_bias", biases),
                            ("bad_words", self.bad_words)):
            if not isinstance(value, (tuple, list, type(None))):
                raise ParameterError(name, f"must be a list, got {value!r}")
            object.__setattr__(self, name, tuple(value or ()))
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise ParameterError(name, f"must be true or false, got {getattr(self, name)!r}")
        _int("max_tokens", self.max_tokens, 0, 2**31 - 1, optional=True)
        if self.pooling not in (None, "mean", "last"):
            raise ParameterError("pooling", f"must be mean or last, got {self.pooling!r:.80}")
        if self.pooling is not None and (self.max_tokens != 0 or self.prompt_logprobs is not None):
            raise ParameterError("pooling", "is for max_tokens 0, without prompt_logprobs")
        if self.max_tokens == 0 and self.prompt_logprobs is None and self.pooling is None:
            raise ParameterError("max_tokens", "must be at least 1 (0 only with prompt_logprobs)")
        _int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParameterError("min_tokens", f"{self.min_tokens} is more than max_tokens {self.max_tokens}")
        _float("temperature", self.temperature, 0.0, 100.0)
        _int("top_k", self.top_k, -1, 2**63 - 1)
        _float("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise ParameterError("top_p", "must be in (0, 1], got 0")
        _float("min_p", self.min_p, 0.0, 1.0)
        _int("seed", self.seed, -(2**63), 2**63 - 1, optional=True)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ParameterError("stop", f"at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ParameterError("stop", "must be non-empty strings")
            if len(text) > MAX_STOP_CHARS:
                raise ParameterError("stop", f"a stop string has {len(text)} characters, at most {MAX_STOP_CHARS}")
        for token_id in self.stop_token_ids:
            _int("stop_token_ids", token_id, 0, 2**31 - 1)
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise ParameterError("allowed_token_ids", "must hold at least one token id")
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise ParameterError("bad_words", f"at most {MAX_BAD_WORDS} words, got {len(self.bad_words)}")
        for word in self.bad_words:
            if not isinstance(word, str) or not word.strip():
                raise ParameterError("bad_words", "must be non-empty strings")
            if len(word) > MAX_BAD_WORD_CHARS:
                raise ParameterError("bad_words", f"a word has {len(word)} characters, at most {MAX_BAD_WORD_CHARS}")
        if isinstance(self.structured_outputs, Mapping):
            object.__setattr__(self, "structured_outputs", structured_outputs(self.structured_outputs))
        if not isinstance(self.structured_outputs, (StructuredOutputs, type(None))):
            raise ParameterError("structured_outputs", f"must be an object, got {self.structured_outputs!r:.80}")
        if not isinstance(self.thought, (Thought, type(None))):
            raise ParameterError("thought", f"must be a Thought, got {self.thought!r:.80}")
        _int("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, 2**31 - 1, optional=True)
        if self.truncate_prompt_tokens == 0:
            raise ParameterError("truncate_prompt_tokens", "must be at least 1, or -1")
        _float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _float("repetition_penalty", self.repetition_penalty, 0.0, 100.0)
        if self.repetition_penalty == 0.0:
            raise ParameterError("repetition_penalty", "must be greater than 0")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise ParameterError("logit_bias", f"at most {MAX_LOGIT_BIAS} entries, got {len(self.logit_bias)}")
        for entry in self.logit_bias:
            if not isinstance(entry, (tuple, list)) or len(entry) != 2:
                raise ParameterError("logit_bias", f"must be pairs of token id and bias, got {entry!r}")
            token_id, bias = entry
            _int("logit_bias", token_id, 0, 2**31 - 1)
            _float(f"logit_bias[{token_id}]", bias, -100.0, 100.0)
        _int("logprobs", self.logprobs, 0, MAX_LOGPROBS, optional=True)
        _int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS, optional=True)

    def check_vocab(self, vocab_size: int) -> None:
        """Raises: ParameterError where a token id is not in the vocabulary."""
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("allowed_token_ids", self.allowed_token_ids or ()),
                          ("logit_bias", tuple(token_id for token_id, _ in self.logit_bias))):
            for token_id in ids:
                if token_id >= vocab_size:
                    raise ParameterError(name, f"token id {token_id} is not in the vocabulary of {vocab_size}")


def _token_ids(field: str, value: object) -> tuple[int, ...]:
    """Perhaps as many as the vocabulary has."""
    if not isinstance(value, (tuple, list)):
        raise ParameterError(field, f"must be a list, got {value!r}")
    for token_id in value:
        if type(token_id) is not int or token_id < 0:
            raise ParameterError(field, f"must be token ids, got {token_id!r:.80}")
    return tuple(value)


def _int(field: str, value: object, low: int, high: int, optional: bool = False) -> None:
    if value is None and optional:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise ParameterError(field, f"must be an integer, got {value!r}")
    if not low <= value <= high:
        raise ParameterError(field, f"must be in [{low}, {high}], got {value}")


def _float(field: str, value: object, low: float, high: float) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise ParameterError(field, f"must be a finite number, got {value!r}")
    if not low <= value <= high:
        raise ParameterError(field, f"must be in [{low:g}, {high:g}], got {value:g}")
