"""The in-process API: an engine on its own thread, used from any asyncio program.

    async with Engine.start(model="smollm2") as engine:
        async for delta in engine.generate("Once upon a time", SamplingParams(max_tokens=32)):
            print(delta.text, end="")
"""
from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from actors.policy.kv_group import BLOCK_SIZE
from actors.policy.stats import Histograms
from actors.sampling_params import ParameterError, SamplingParams, Thought
from actors.system import EngineConfig, System
from api.surface import (
    Completion,
    EngineBusy,
    EngineDead,
    EngineInfo,
    EngineSurface,
    PromptInput,
    RequestFailed,
)

__all__ = ["Completion", "Engine", "EngineBusy", "EngineDead", "EngineInfo", "EngineStats", "ParameterError",
           "PromptInput", "RequestFailed", "SamplingParams", "Thought"]


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


class Engine(EngineSurface):
    """See the module's docstring. May be used from any event loop; a request belongs to the loop it began in."""

    def __init__(self, system: System) -> None:
        """Use `Engine.start`."""
        super().__init__(system, system.vocab, _info(system))
        self._system = system

    @property
    def system(self) -> System:
        """Its actors, for who sends them messages of his own."""
        return self._system

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
                engine.close()
        finally:
            if system.ready.done():             # while it still loads its thread, a daemon, is left to itself
                if system.ready.exception() is None:
                    system.stop()
                await asyncio.shield(asyncio.to_thread(system.join))

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
        try:
            return await asyncio.wrap_future(self._system.call(self._system.pool.pool.describe))
        except RuntimeError as cause:
            raise EngineDead(str(cause)) from cause


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
        chat_template=vocab.chat_template, knows_tools=vocab.knows_tools, control_tokens=vocab.control_tokens,
        scheduling_policy=config.scheduling_policy)
