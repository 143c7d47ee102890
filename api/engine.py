"""The in-process API: an engine on its own thread, used from any asyncio program.

    async with Engine.start(model="smollm2") as engine:
        async for delta in engine.generate("Once upon a time", SamplingParams(max_tokens=32)):
            print(delta.text, end="")
"""
from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from actors.messages import Finish, TextDelta, TokenLogprob, Usage
from actors.sampling_params import ParameterError, SamplingParams

__all__ = ["Completion", "Engine", "EngineDead", "EngineInfo", "ParameterError", "RequestFailed", "SamplingParams"]

PromptInput: TypeAlias = str | Sequence[int] | Sequence[dict[str, Any]]     # text, token ids, or chat messages


class EngineDead(RuntimeError):
    """The engine has ended; str() says why. Every open request gets it."""


class RequestFailed(RuntimeError):
    """This request ended by a fault of the engine (not of the caller); others go on."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a started engine is."""
    model: str                              # the served name
    model_path: str
    architecture: str
    vocab_size: int
    max_model_len: int                      # tokens a request may have, prompt and output together
    kv_capacity_tokens: int
    max_num_seqs: int
    device: str                             # "cpu" or "cuda:0 NVIDIA …"
    device_reason: str
    stop_token_ids: tuple[int, ...]
    stop_tokens: tuple[str, ...]
    has_chat_template: bool
    default_sampling: dict[str, Any]        # from generation_config.json
    startup_s: tuple[tuple[str, float], ...]    # (stage, seconds)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since start and gauges of now, for /metrics."""
    num_requests_running: int
    num_requests_waiting: int
    kv_cache_usage: float                   # 0..1
    num_preemptions: int
    prompt_tokens: int                      # computed by the forward pass
    generation_tokens: int
    num_steps: int
    step_s: float                           # time inside forward passes and sampling
    busy_s: float                           # time with work in the scheduler


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


class Engine:
    """See the module's docstring. Methods may be called from any event loop; one loop a request."""

    info: EngineInfo

    @classmethod
    @asynccontextmanager
    async def start(cls, model: str = "smollm2", **config: Any) -> AsyncIterator[Engine]:
        """Load `model` and serve until the block ends. `config`: the fields of `EngineConfig`.

        Raises: ValueError for a model or setting that cannot be served; EngineDead.
        """
        raise RuntimeError
        yield

    def generate(self, prompt: PromptInput, sampling: SamplingParams | None = None, *, choice: int = 0,
                 add_generation_prompt: bool = True) -> AsyncIterator[TextDelta]:
        """Stream one completion. Leaving the iterator (break, cancel, aclose) aborts the request.

        Raises: ParameterError before the first delta where the request cannot be served; RequestFailed; EngineDead.
        """
        raise RuntimeError

    async def complete(self, prompt: PromptInput, sampling: SamplingParams | None = None, *, choice: int = 0,
                       add_generation_prompt: bool = True) -> Completion:
        """The same, whole."""
        raise RuntimeError

    def stats(self) -> EngineStats:
        """May be called from any thread."""
        raise RuntimeError

    @property
    def dead(self) -> BaseException | None:
        """Why the engine ended, or None while it lives."""
        raise RuntimeError
