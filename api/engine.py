"""The in-process API: an engine on its own thread, used from any asyncio program.

    async with Engine.start(model="smollm2") as engine:
        async for delta in engine.generate("Once upon a time", SamplingParams(max_tokens=32)):
            print(delta.text, end="")
"""
from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import orjson

from actors.messages import ChatPrompt, Finish, Generate, Prompt, TextDelta, TokenLogprob, Usage
from actors.output import OutputStream, merge
from actors.policy.kv_group import BLOCK_SIZE, Group
from actors.policy.stats import Histograms
from actors.prompts import encode_prompt, prompt_field, render_chat
from actors.sampling_params import MAX_PRIORITY, ParameterError, SamplingParams
from actors.system import EngineConfig, System

__all__ = ["Completion", "Engine", "EngineBusy", "EngineDead", "EngineInfo", "ParameterError", "RequestFailed",
           "SamplingParams"]

T = TypeVar("T")

TEXT_THREADS = 2

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


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since start and gauges of now, for /metrics."""
    num_requests_running: int
    num_requests_waiting: int
    kv_cache_usage: float                   # 0..1
    num_preemptions: int
    prompt_tokens: int                      # computed in chunks: prompts, and what is computed again after preemption
    generation_tokens: int
    num_steps: int
    forward_s: float                        # inside forward passes
    busy_s: float                           # with sequences running: forward passes and all else
    prefix_cache_queries: int = 0           # prompt tokens of requests that have begun to run, if they were looked for
    prefix_cache_hits: int = 0              # of these, found in the prefix cache
    device_prefix_lookups: int = 0          # requests that have begun to run and that the device's table was asked of
    device_prefix_lookups_agreeing: int = 0     # of these, where it had as many blocks as were found then
    histograms: Histograms = field(default_factory=Histograms)


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


class Engine:
    """See the module's docstring. May be used from any event loop; a request belongs to the loop it began in."""

    def __init__(self, system: System) -> None:
        """Use `Engine.start`."""
        self._system = system
        self._next_id = itertools.count()
        # Long texts wait for one another here, not for the threads that parse requests.
        self._threads = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="troupe-text")
        self.info = _info(system)

    @classmethod
    @asynccontextmanager
    async def start(cls, model: str = "smollm2", progress: Callable[[str], None] | None = None,
                    **config: Any) -> AsyncIterator[Engine]:
        """Load `model` and serve until the block ends; `progress` gets a line a start-up stage.

        config: the fields of `actors.system.EngineConfig`.
        Raises: ValueError for a model or setting that cannot be served.
        """
        system = System(EngineConfig(model=model, **config), progress)
        system.start()
        try:
            await asyncio.shield(asyncio.wrap_future(system.ready))
            engine = cls(system)
            try:
                yield engine
            finally:
                engine._threads.shutdown(wait=False, cancel_futures=True)
        finally:
            if system.ready.done():             # while it still loads its thread, a daemon, is left to itself
                if system.ready.exception() is None:
                    system.stop()
                await asyncio.shield(asyncio.to_thread(system.join))

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
        Raises: ParameterError before the first delta where the request cannot be served, EngineBusy where the queue is
        full; RequestFailed; EngineDead.
        """
        if not isinstance(priority, int) or not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
            raise ParameterError("priority", f"must be an integer of at most {MAX_PRIORITY}, got {priority!r}")
        for name, value in (("user", user), ("cache_salt", cache_salt), ("tenant", tenant), ("parent_id", parent_id)):
            if not isinstance(value, str):
                raise ParameterError(name, f"must be text, got {value!r}")
        if not isinstance(num_children, int) or num_children < 1 or (num_children > 1 and not parent_id):
            raise ParameterError("num_children", f"must be 1, or more with a parent_id, got {num_children!r}")
        policy = self._system.config.scheduling_policy
        if priority and policy != "priority":
            raise ParameterError("priority", f"is for scheduling_policy priority, here it is {policy}")
        request_id = f"r{next(self._next_id)}"
        stream = OutputStream(request_id, self._system.abort, on_delta)
        encodable = _prompt(prompt, add_generation_prompt, continue_final_message, chat_template_kwargs, tools)
        request = Generate(request_id, encodable, sampling or self.default_sampling(), choice,
                           time.monotonic(), priority, user, cache_salt, tenant, parent_id, num_children)
        self._open(stream)
        try:
            self._system.post(request)
            while True:
                delta = await self._next(stream)
                if delta.retry_after_s is not None:
                    raise EngineBusy(delta.error, delta.retry_after_s, delta.error_field)
                if delta.finish == "rejected":
                    raise ParameterError(delta.error_field or "prompt", _without_field(delta))
                if delta.finish == "failed":
                    raise RequestFailed(delta.error)
                yield delta
                if delta.finish is not None:
                    return
        finally:
            # NOTE: nothing is awaited here: the generator may be closed by the garbage collector. After a terminal
            # delta the engine has forgotten the request, and this abort finds nothing.
            self._system.abort(request_id)

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
        vocab, vocab_size = self._system.vocab, self.info.vocab_size
        return await self._find_out(encodable, lambda: encode_prompt(vocab, encodable, vocab_size,
                                                                     add_special=add_special_tokens))

    async def render(self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True,
                     continue_final_message: bool = False, chat_template_kwargs: Mapping[str, Any] | None = None,
                     tools: Sequence[dict[str, Any]] = ()) -> str:
        """The prompt that the chat template makes of `messages`, as text. Raises: ParameterError."""
        encodable = _prompt(messages, add_generation_prompt, continue_final_message, chat_template_kwargs, tools)
        if not isinstance(encodable, ChatPrompt):
            raise ParameterError("messages", "must be a list of at least one message")
        vocab = self._system.vocab
        return await self._find_out(encodable, lambda: render_chat(vocab, encodable))

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """What `decode` returns, found in another thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.decode, token_ids)

    def encode(self, text: str) -> list[int]:
        """The ids of a raw prompt, in the caller's thread. Raises: ValueError for text that has none."""
        return self._system.vocab.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Token ids as text, control tokens included: what an echoed prompt reads."""
        return self._system.vocab.decode(token_ids)

    def token_name(self, token_id: int) -> str:
        """What the vocabulary calls a token, e.g. "\\u0120hello"; "" for an id without one."""
        return self._system.vocab.token_name(token_id)

    def stats(self) -> EngineStats:
        """May be called from any thread."""
        system = self._system
        scheduler, executor = system.scheduler.policy.stats, system.executor
        return EngineStats(
            num_requests_running=scheduler.num_running, num_requests_waiting=scheduler.num_waiting,
            kv_cache_usage=system.pool.pool.usage, num_preemptions=scheduler.num_preemptions,
            prompt_tokens=scheduler.prompt_tokens, generation_tokens=scheduler.generation_tokens,
            num_steps=scheduler.num_steps, forward_s=executor.forward_s, busy_s=system.scheduler.busy_s,
            prefix_cache_queries=scheduler.prefix_cache_queries, prefix_cache_hits=scheduler.prefix_cache_hits,
            device_prefix_lookups=scheduler.device_prefix_lookups,
            device_prefix_lookups_agreeing=scheduler.device_prefix_lookups_agreeing,
            histograms=scheduler.histograms.copy())

    async def debug_kv(self) -> dict[str, Any]:
        """Every KV block with its owners and what can be found in it, as plain data of one moment.

        Raises: EngineDead.
        """
        try:
            return await asyncio.wrap_future(self._system.call(self._system.pool.pool.describe))
        except RuntimeError as cause:
            raise EngineDead(str(cause)) from cause

    @property
    def dead(self) -> BaseException | None:
        """Why the engine ended, or None while it lives."""
        return self._system.output.dead

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
            self._system.output.open(stream)
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


def _without_field(delta: TextDelta) -> str:
    return delta.error.removeprefix(f"{delta.error_field}: ")


def _info(system: System) -> EngineInfo:
    config, vocab = system.config, system.vocab
    stop_ids = tuple(sorted(vocab.stop_ids))
    return EngineInfo(
        model=(config.served_model_name or (system.model_name,))[0],
        model_names=config.served_model_name or (system.model_name,), model_path=str(system.model_path),
        architecture=system.spec.architecture, vocab_size=system.spec.vocab_size,
        hidden_size=system.spec.hidden_size,
        max_model_len=system.sizes.max_model_len,
        kv_capacity_tokens=system.sizes.kv_capacity_tokens, kv_bytes=system.sizes.kv_bytes,
        kv_dtype=system.sizes.kv_dtype, file_bytes=system.file_bytes, weight_bytes=system.weight_bytes,
        max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens,
        device=system.device, device_reason=system.device_reason,
        stop_token_ids=stop_ids, stop_tokens=tuple(vocab.token_text(i) for i in stop_ids),
        has_chat_template=vocab.has_chat_template,
        default_sampling=dict(system.sampling_defaults),
        startup_s=tuple(system.start_up.stages),
        debug=config.debug, kv_bytes_per_token=system.sizes.kv_bytes_per_token,
        num_full_requests=system.sizes.num_full_sequences, max_queued_requests=config.max_queued_requests,
        kv_tier_tokens=system.sizes.num_tier_blocks[0] * BLOCK_SIZE, kv_groups=system.pool.pool.groups,
        chat_template=vocab.chat_template, knows_tools=vocab.knows_tools, control_tokens=vocab.control_tokens)
