"""What can be asked of an engine, whether it runs in this process or in another one."""
from __future__ import annotations

import asyncio
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

import orjson

from actors.messages import ChatPrompt, Finish, Generate, Prompt, TextDelta, TokenLogprob, Usage
from actors.output import OutputRouter, OutputStream, merge
from actors.policy.kv_group import Group
from actors.prompts import encode_prompt, prompt_field, render_chat
from actors.sampling_params import MAX_PRIORITY, ParameterError, SamplingParams
from weights.vocab import Vocab

T = TypeVar("T")

TEXT_THREADS = 2
EVERY_TOKEN_MASKED = "every token is masked"        # as the samplers say it

PromptInput: TypeAlias = str | Sequence[int] | Sequence[dict[str, Any]]     # text, token ids, or chat messages


class EngineDead(RuntimeError):
    """The engine has ended; str() says why. Every open request gets it."""


class EngineBusy(RuntimeError):
    """The queue is full: this request was not taken. It may be tried again after `retry_after_s` seconds.

    limit: of `EngineConfig`, that refused it: "max_queued_requests" or "max_queued_tokens".
    """

    def __init__(self, message: str, retry_after_s: float, limit: str) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.limit = limit


class RequestFailed(RuntimeError):
    """This request ended by a fault of the engine (not of the caller); others go on."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a started engine is."""
    model: str                              # the served name, as replies say it
    model_names: tuple[str, ...]            # all names that requests may use
    model_path: str
    architecture: str
    vocab_size: int
    max_model_len: int                      # tokens a request may have, prompt and output together
    kv_capacity_tokens: int
    kv_bytes: int
    kv_dtype: str                           # what keys and values are stored as
    file_bytes: int                         # of the weights in their file
    weight_bytes: int                       # and in memory
    max_num_seqs: int
    max_num_batched_tokens: int             # of one step: no running answer waits longer for a token than it takes
    device: str                             # "cpu" or "cuda:0 NVIDIA …"
    device_reason: str
    stop_token_ids: tuple[int, ...]
    stop_tokens: tuple[str, ...]
    has_chat_template: bool
    default_sampling: dict[str, Any]        # from generation_config.json
    startup_s: tuple[tuple[str, float], ...]    # (stage, seconds)
    kv_bytes_per_token: float = 0.0         # of a request of max_model_len tokens
    num_full_requests: float = 0.0          # of max_model_len tokens that fit at once, with the part of one left over
    debug: bool = False                     # the KV pool is audited at every step and may be looked at
    kv_tier_tokens: int = 0                 # room in host memory for what leaves the KV cache
    max_queued_requests: int | None = None  # that wait without room for them; None: any number
    kv_groups: tuple[Group, ...] = ()       # layers of like KV geometry: their blocks and windows
    hidden_size: int = 0                    # of its hidden states, and so of embeddings
    chat_template: str | None = None        # its source
    knows_tools: bool = False               # the chat template tells the model of tools
    control_tokens: frozenset[str] = frozenset()    # how they are spelled
    scheduling_policy: str = "fcfs"         # who comes first


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer."""
    text: str
    token_ids: tuple[int, ...]
    finish: Finish
    stop_reason: str | int | None
    usage: Usage
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob, ...]
    prompt_token_ids: tuple[int, ...]
    num_truncated_tokens: int = 0           # of the prompt, that were cut off
    pooled: tuple[float, ...] = ()          # the prompt's hidden state [C], where `SamplingParams.pooling` asks for it


class Requests(Protocol):
    """The way to the tokenizer actor and back. `post` and `abort` may be called from any thread."""

    @property
    def output(self) -> OutputRouter: ...

    def post(self, message: Generate, /) -> None: ...

    def abort(self, request_id: str, /) -> None: ...


class EngineSurface(ABC):
    """See `api.engine.Engine`. May be used from any event loop; a request belongs to the loop it began in."""

    def __init__(self, requests: Requests, vocab: Vocab, info: EngineInfo, id_prefix: str = "") -> None:
        """id_prefix: of the ids of its requests, where several such surfaces ask one engine."""
        self.info = info
        self._requests = requests
        self._vocab = vocab
        self._id_prefix = id_prefix
        self._next_id = itertools.count()
        # Long texts wait for one another here, not for the threads that parse requests.
        self._threads = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="troupe-text")

    def close(self) -> None:
        """Its threads end after what they are at."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    @abstractmethod
    async def debug_kv(self) -> dict[str, Any]:
        """Every KV block with its owners and what can be found in it, as plain data of one moment.

        Raises: EngineDead.
        """

    async def generate(self, prompt: PromptInput, sampling: SamplingParams | None = None, *, choice: int = 0,
                       add_generation_prompt: bool = True, continue_final_message: bool = False,
                       chat_template_kwargs: Mapping[str, Any] | None = None,
                       tools: Sequence[dict[str, Any]] = (), priority: int = 0, user: str = "", cache_salt: str = "",
                       tenant: str = "", parent_id: str = "", num_children: int = 1,
                       on_delta: Callable[[TextDelta], bool] | None = None) -> AsyncIterator[TextDelta]:
        """Stream one completion. Leaving the iterator (break, cancel, aclose) aborts the request.

        The first delta comes when the request is admitted, before it runs: it has the prompt's ids and no tokens.

        sampling: None takes the model's own defaults. add_generation_prompt, continue_final_message,
        chat_template_kwargs, tools: of chat messages, see `tokenize`.
        priority: lower comes first; only under scheduling policy "priority".
        tenant, user: who asks, as the door knows him, and for whom, by his own word; a fair share is the tenant's, and
        within it the user's; cache scope "key" looks at the tenant alone.
        cache_salt: requests of different salts find nothing of one another in the cache.
        parent_id, num_children: an id that was never used before, and how many calls have it: they are let into the
        queue together or not at all. If one of them raises, the others must be left.
        on_delta: is called in this loop with a delta that comes while the iterator is waited for, and must not raise;
        where it returns True the iterator does not yield that one, and nobody is woken up. Last deltas are yielded.
        Raises: ParameterError before the first delta where the request cannot be served, and later where its own limits
        leave no token to go on with; EngineBusy where the queue is full; RequestFailed; EngineDead.
        """
        if not isinstance(priority, int) or not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
            raise ParameterError("priority", f"must be an integer of at most {MAX_PRIORITY}, got {priority!r}")
        for name, value in (("user", user), ("cache_salt", cache_salt), ("tenant", tenant), ("parent_id", parent_id)):
            if not isinstance(value, str):
                raise ParameterError(name, f"must be text, got {value!r}")
        if not isinstance(num_children, int) or num_children < 1 or (num_children > 1 and not parent_id):
            raise ParameterError("num_children", f"must be 1, or more with a parent_id, got {num_children!r}")
        policy = self.info.scheduling_policy
        if priority and policy != "priority":
            raise ParameterError("priority", f"is for scheduling_policy priority, here it is {policy}")
        request_id = f"{self._id_prefix}r{next(self._next_id)}"
        stream = OutputStream(request_id, self._requests.abort, on_delta)
        encodable = _prompt(prompt, add_generation_prompt, continue_final_message, chat_template_kwargs, tools)
        request = Generate(request_id, encodable, sampling or self.default_sampling(), choice,
                           time.monotonic(), priority, user, cache_salt, tenant, parent_id, num_children)
        self._open(stream)
        try:
            self._requests.post(request)
            while True:
                delta = await self._next(stream)
                if delta.retry_after_s is not None:
                    raise EngineBusy(delta.error, delta.retry_after_s, delta.error_field)
                if delta.finish == "rejected":
                    raise ParameterError(delta.error_field or "prompt", _without_field(delta))
                if delta.finish == "failed":
                    raise _failure(delta.error, request.sampling)
                yield delta
                if delta.finish is not None:
                    return
        finally:
            # NOTE: nothing is awaited here: the generator may be closed by the garbage collector. After a terminal
            # delta the engine has forgotten the request, and this abort finds nothing.
            self._requests.abort(request_id)

    async def complete(self, prompt: PromptInput, sampling: SamplingParams | None = None,
                       **options: Any) -> Completion:
        """The same, whole. options: those of `generate`."""
        deltas = [delta async for delta in self.generate(prompt, sampling, **options)]
        whole = merge(deltas)
        assert whole.finish is not None, "the last delta ends the request"
        assert whole.usage is not None, "a finished request has its usage"
        return Completion(whole.text, whole.token_ids, whole.finish, whole.stop_reason, whole.usage, whole.logprobs,
                          whole.prompt_logprobs, whole.prompt_token_ids, whole.num_truncated_tokens, whole.pooled)

    def default_sampling(self, **changes: Any) -> SamplingParams:
        """The model's own sampling defaults, with `changes`."""
        return SamplingParams(**{**self.info.default_sampling, **changes})

    async def tokenize(self, prompt: PromptInput, *, add_special_tokens: bool = True,
                       add_generation_prompt: bool = True, continue_final_message: bool = False,
                       chat_template_kwargs: Mapping[str, Any] | None = None,
                       tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """The ids that `generate` makes of a prompt, of any length. An empty prompt has none.

        add_special_tokens: of text: begin as the model's texts begin. Of chat messages: add_generation_prompt: the
        prompt ends with the beginning of an answer; continue_final_message: with the last message's content, as it is;
        chat_template_kwargs: what else the template is given, plain data; tools: as OpenAI's API has them.
        Raises: ParameterError.
        """
        encodable = _prompt(prompt, add_generation_prompt, continue_final_message, chat_template_kwargs, tools)
        vocab, vocab_size = self._vocab, self.info.vocab_size
        return await self._find_out(encodable, lambda: encode_prompt(vocab, encodable, vocab_size,
                                                                     add_special=add_special_tokens))

    async def render(self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True,
                     continue_final_message: bool = False, chat_template_kwargs: Mapping[str, Any] | None = None,
                     tools: Sequence[dict[str, Any]] = ()) -> str:
        """The prompt that the chat template makes of `messages`, as text. Raises: ParameterError."""
        encodable = _prompt(messages, add_generation_prompt, continue_final_message, chat_template_kwargs, tools)
        if not isinstance(encodable, ChatPrompt):
            raise ParameterError("messages", "must be a list of at least one message")
        vocab = self._vocab
        return await self._find_out(encodable, lambda: render_chat(vocab, encodable))

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """What `decode` returns, found in another thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.decode, token_ids)

    def encode(self, text: str) -> list[int]:
        """The ids of a raw prompt, in the caller's thread. Raises: ValueError for text that has none."""
        return self._vocab.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Token ids as text, control tokens included: what an echoed prompt reads."""
        return self._vocab.decode(token_ids)

    def token_name(self, token_id: int) -> str:
        """What the vocabulary calls a token, e.g. "\\u0120hello"; "" for an id without one."""
        return self._vocab.token_name(token_id)

    @property
    def token_roles(self) -> dict[str, str]:
        """The texts of the vocabulary's bos_token, eos_token and the like, of those that it has."""
        return dict(self._vocab.roles)

    @property
    def dead(self) -> BaseException | None:
        """Why the engine ended, or None while it lives."""
        return self._requests.output.dead

    async def _find_out(self, prompt: Prompt, work: Callable[[], T]) -> T:
        """What `work` makes of `prompt`, in another thread. Raises: ParameterError."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except ParameterError:
            raise
        except ValueError as error:
            field = prompt_field(prompt)
            raise ParameterError(field, str(error).removeprefix(f"{field}: ")) from None

    def _open(self, stream: OutputStream) -> None:
        try:
            self._requests.output.open(stream)
        except Exception as cause:
            raise EngineDead(str(cause)) from cause

    async def _next(self, stream: OutputStream) -> TextDelta:
        try:
            return await stream.next()
        except asyncio.CancelledError:
            raise
        except Exception as cause:
            raise EngineDead(str(cause)) from cause


def _prompt(prompt: PromptInput, add_generation_prompt: bool, continue_final_message: bool,
            chat_template_kwargs: Mapping[str, Any] | None, tools: Sequence[dict[str, Any]]) -> Prompt:
    """Raises: ParameterError."""
    if not isinstance(prompt, (str, Sequence)) or isinstance(prompt, bytes):
        raise ParameterError("prompt", f"must be text, token ids, or chat messages, got {type(prompt).__name__}")
    items = [] if isinstance(prompt, str) else list(prompt)
    is_chat = bool(items) and all(isinstance(item, dict) for item in items)
    if continue_final_message and not is_chat:
        raise ParameterError("continue_final_message", "is for chat messages")
    if continue_final_message and add_generation_prompt:
        raise ParameterError("continue_final_message", "excludes add_generation_prompt: the prompt ends with one or "
                             "the other")
    if chat_template_kwargs and not is_chat:
        raise ParameterError("chat_template_kwargs", "are for chat messages")
    if tools and not is_chat:
        raise ParameterError("tools", "are for chat messages")
    if isinstance(prompt, str):
        return prompt
    if is_chat:
        return ChatPrompt(_json("messages", items), add_generation_prompt, continue_final_message,
                          _json("chat_template_kwargs", dict(chat_template_kwargs or {})),
                          _json("tools", list(tools)))
    ids = tuple(item for item in items if isinstance(item, int) and not isinstance(item, bool))
    if len(ids) < len(items):
        raise ParameterError("prompt", "must be text, token ids, or chat messages (a list of objects)")
    return ids


def _json(field: str, value: object) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError as error:                  # not JSON, or text that is not valid Unicode
        raise ParameterError(field, str(error)) from None


def _failure(error: str, sampling: SamplingParams) -> Exception:
    """What a request ends with. Tokens that are allowed and tokens that are wanted may have none in common."""
    if error == EVERY_TOKEN_MASKED:
        for name, limit in (("allowed_token_ids", sampling.allowed_token_ids), ("bad_words", sampling.bad_words)):
            if limit:
                return ParameterError(name, "leaves no token to go on with, beside what else is asked for")
    return RequestFailed(error)


def _without_field(delta: TextDelta) -> str:
    return delta.error.removeprefix(f"{delta.error_field}: ")
