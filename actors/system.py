"""Start-up wiring and supervision: from a model's name to four running actors on the engine's own thread."""
from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeVar

from actors.constraints import Constraints
from actors.executor import Executor
from actors.grammars import Grammars
from actors.kv_pool import KVPool
from actors.mailbox import Mailbox
from actors.messages import Abort, Generate
from actors.output import OutputRouter
from actors.policy import kv_group
from actors.policy.admission import QueueLimits
from actors.policy.block_pool import BlockPool
from actors.policy.kv_group import Group
from actors.policy.order import check_policy
from actors.policy.scheduler import SchedulerConfig, SchedulerMessage, SchedulerPolicy
from actors.sampling_params import ParameterError, SamplingParams
from actors.scheduler import Scheduler
from actors.tokenizer import CacheNames, Tokenizer
from cuda.devices import NoGpu, usable_gpu
from cuda.kv_cache import blocks_for, kv_groups, size_kv_cache
from cuda.launcher import Launcher
from cuda.ops import BLOCK_SIZE, KV_DTYPES, HostMath, KVDtype, KVGroupSpec, Ops
from cuda.runner import BaseRunner, Runner
from cuda.start_up import StartUp
from weights.hub import resolve
from weights.load import ModelFile, ModelWeights, open_model
from weights.spec import ModelSpec
from weights.vocab import Vocab

log = logging.getLogger("troupe.system")

T = TypeVar("T")

assert kv_group.BLOCK_SIZE == BLOCK_SIZE, "policy may not import cuda, so the number stands twice"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What can be set. Names and meanings are vLLM's where it has them."""
    model: str = "smollm2"
    device: str = "auto"                    # "auto", "cpu", "cuda", "reference" (NumPy: slow and obvious)
    max_model_len: int | None = None        # None: what the model was trained for, or what the KV cache holds
    max_num_seqs: int = 64                  # sequences that run at once
    max_num_batched_tokens: int = 512       # tokens of one step
    kv_cache_memory: int | None = None      # bytes
    kv_dtype: KVDtype | Literal["auto"] = "auto"    # of stored keys and values; auto: the back end's first
    kv_tier_memory: int = 0                 # bytes of host memory for KV blocks that must leave the device
    gpu_memory_utilization: float | None = None     # share of the device's free memory for weights and KV together
    seed: int | None = None                 # of requests without one of their own; None: drawn anew
    served_model_name: tuple[str, ...] = ()  # the first is what replies say; None given: the model's name
    generation_config: str = "auto"         # "none": ignore the model's sampling defaults
    threads: int | None = None              # of the host back end; None: the physical cores
    host_math: str = "auto"                 # of the host back end: "exact" (float32) or "int16" (activations of 16 bits
                                            # against quantized weights); auto: int16 where the processor has it
    dtype: str = "auto"                     # of activations: float32 on a processor; bfloat16 or float16 on CUDA
    deterministic: bool = False             # on CUDA: a request's bits do not depend on what else runs (a processor's
                                            # never do)
    overlap: int | None = None              # steps launched before the results of the one before them are read; None: 1
                                            # on CUDA, else 0
    enable_prefix_caching: bool = True      # keep KV blocks of prompts and answers until their memory is needed
    scheduling_policy: str = "fcfs"         # who comes first: fcfs, priority, lpm, fair, deadline
    ttft_target_s: float | None = None      # of policy deadline: arrival to first token
    itl_target_s: float | None = None       # likewise: between two tokens of an answer
    max_queued_requests: int | None = None  # that wait beyond the free slots, or for blocks; more are refused at once
    max_queued_tokens: int | None = None    # likewise, of those that wait
    cache_scope: str = "all"                # who may find whose: "all", or "key": each API key its own
    debug: bool = False                     # audit the KV pool after every step, and poison blocks that nobody may read

    def __post_init__(self) -> None:
        for name, low in (("max_model_len", 1), ("max_num_seqs", 1), ("max_num_batched_tokens", 1),
                          ("kv_cache_memory", 1), ("kv_tier_memory", 0), ("threads", 1), ("overlap", 0),
                          ("max_queued_requests", 0), ("max_queued_tokens", 0)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < low):
                raise ValueError(f"{name} must be an integer of at least {low}, got {value!r}")
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ValueError(f"max_num_batched_tokens {self.max_num_batched_tokens} is less than max_num_seqs "
                             f"{self.max_num_seqs}: a step must hold one token of every running sequence")
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share <= 1:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {share!r}")
        if share is not None and self.kv_cache_memory is not None:
            raise ValueError("kv_cache_memory and gpu_memory_utilization both say how large the KV cache is: give one")
        check_policy(self.scheduling_policy, self.ttft_target_s, self.itl_target_s)
        if self.cache_scope not in ("all", "key"):
            raise ValueError(f"cache_scope must be all or key, got {self.cache_scope!r}")
        for name, is_asked in (("kv_tier_memory", self.kv_tier_memory > 0),
                               ("cache_scope key", self.cache_scope == "key"),
                               ("scheduling_policy lpm", self.scheduling_policy == "lpm")):
            if is_asked and not self.enable_prefix_caching:
                raise ValueError(f"{name} does nothing without prefix caching: drop it, or --no-enable-prefix-caching")
        if self.kv_dtype not in ("auto", *KV_DTYPES):
            raise ValueError(f"kv_dtype must be auto, {', '.join(KV_DTYPES)}, got {self.kv_dtype!r}")
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ValueError(f"dtype must be auto, float32, bfloat16 or float16, got {self.dtype!r}")
        if self.host_math not in ("auto", "exact", "int16"):
            raise ValueError(f"host_math must be auto, exact or int16, got {self.host_math!r}")
        if self.generation_config not in ("auto", "none"):
            raise ValueError(f"generation_config must be auto or none, got {self.generation_config!r}")


@dataclass(frozen=True, slots=True)
class Sizes:
    """What was decided at start-up about lengths and memory."""
    max_model_len: int
    num_blocks: tuple[int, ...]             # a KV group
    num_tier_blocks: tuple[int, ...]        # likewise, in host memory
    kv_dtype: KVDtype
    kv_bytes: int
    kv_bytes_per_token: float               # of a sequence of full length
    num_full_sequences: float               # of max_model_len tokens that fit at once, with the part of one left over
    kv_capacity_tokens: int                 # in such sequences; without windows in any


class System:
    """The engine's thread. `start` returns when it is ready; `post` and `abort` may be called from any thread."""

    def __init__(self, config: EngineConfig, progress: Callable[[str], None] | None = None) -> None:
        self.config = config
        self.start_up = StartUp(progress) if progress else StartUp()
        self.output = OutputRouter()
        self.ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run_thread, name="troupe-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, message: Generate | Abort) -> None:
        """To the tokenizer; harmless when the engine is over."""
        with suppress(RuntimeError):            # the loop is closed; the router says why to open requests
            self.tokenizer.inbox.send_threadsafe(message)

    def abort(self, request_id: str) -> None:
        """Its caller is gone."""
        if self.output.close(request_id):
            self.post(Abort(request_id, "aborted"))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """What `function` returns between two messages of the engine's loop. Raises: RuntimeError when that is over."""
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(function())
            except BaseException as error:
                result.set_exception(error)

        self._loop.call_soon_threadsafe(run)
        return result

    def stop(self) -> None:
        """End the thread, once it is ready; open requests hear of it through the router."""
        with suppress(RuntimeError):            # closed already
            self._loop.call_soon_threadsafe(self._stop.set)

    def join(self) -> None:
        """After `stop`."""
        self._thread.join()

    def _run_thread(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            cause = _first_cause(error)
            if not self.ready.done():
                self.ready.set_exception(cause)
            else:
                log.error("the engine ended: %s", cause)
            self.output.fail_all(cause)
        else:
            self.output.fail_all(RuntimeError("the engine was stopped"))

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        try:
            await self._load()
        except BaseException:
            if hasattr(self, "executor"):   # its thread may hold the model
                self.executor.close()
            raise
        self.ready.set_result(None)
        async with asyncio.TaskGroup() as group:
            actors = [group.create_task(actor.run(), name=type(actor).__name__)
                      for actor in (self.tokenizer, self.scheduler, self.pool, self.executor)]
            await self._stop.wait()
            for actor in actors:
                actor.cancel()
        await asyncio.to_thread(self.executor.join)

    async def _load(self) -> None:
        config, start_up = self.config, self.start_up
        begin_s = time.perf_counter()
        self.device, self.device_reason = choose_device(config.device)
        files = await asyncio.to_thread(resolve, config.model, start_up.tell)
        self.model_path, self.model_name = files.path, files.name
        model = await asyncio.to_thread(open_model, files.path)
        self.spec = model.spec
        start_up.stage("model files", begin_s)

        # The tokenizer is built beside the weights: both are mostly outside of Python.
        self.groups = kv_groups(model.spec)
        scheduler_inbox: Mailbox[SchedulerMessage] = Mailbox()
        overlap = config.overlap if config.overlap is not None else 1 if self.device == "cuda" else 0
        self.executor = Executor(scheduler_inbox, overlap)
        self.runner, self.vocab = await asyncio.gather(self.executor.load(lambda: self._make_runner(model)),
                                                       asyncio.to_thread(self._timed_vocab, model))
        pool_groups = tuple(Group(num_blocks, group.window, num_tier_blocks) for group, num_blocks, num_tier_blocks
                            in zip(self.groups, self.sizes.num_blocks, self.sizes.num_tier_blocks, strict=True))
        self.sampling_defaults = self._sampling_defaults()
        told_group = self._told_group()
        self.pool = KVPool(BlockPool(pool_groups, poison=config.debug, told_group=told_group), check=config.debug)
        grammars = Grammars(self.vocab, model.spec.vocab_size)
        self.executor.constraints = Constraints(grammars)
        self.tokenizer = Tokenizer(self.vocab, model.spec.vocab_size, self.sizes.max_model_len, scheduler_inbox,
                                   self.output.deliver, config.seed, self._cache_names(), grammars)
        policy = SchedulerPolicy(SchedulerConfig(
            max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=self.sizes.max_model_len, groups=pool_groups, overlap=overlap,
            scheduling_policy=config.scheduling_policy, ttft_target_s=config.ttft_target_s,
            itl_target_s=config.itl_target_s, queue=QueueLimits(config.max_queued_requests, config.max_queued_tokens),
            asks_device=told_group is not None))
        self.scheduler = Scheduler(policy, scheduler_inbox, self.pool, self.executor, self.tokenizer.inbox)

    def _told_group(self) -> int | None:
        """The KV group whose findable blocks the device has a table of: the first without a window, where there is
        one. None: it has no table."""
        if self.device != "cuda" or not self.config.enable_prefix_caching:
            return None
        return next((number for number, group in enumerate(self.groups) if group.window is None), 0)

    def _cache_names(self) -> CacheNames | None:
        if not self.config.enable_prefix_caching:
            return None
        return CacheNames(f"{self.model_path}", by_tenant=self.config.cache_scope == "key")

    def _sampling_defaults(self) -> dict[str, float]:
        """Of generation_config.json. Raises: ValueError here, not in every request, where they are out of range."""
        if self.config.generation_config == "none":
            return {}
        try:
            SamplingParams(**self.vocab.defaults)  # type: ignore[arg-type]
        except ParameterError as error:
            raise ValueError(f"generation_config.json of {self.model_name}: {error} "
                             f"(generation_config none ignores the file)") from None
        return dict(self.vocab.defaults)

    def _timed_vocab(self, model: ModelFile) -> Vocab:
        begin_s = time.perf_counter()
        vocab = Vocab.load(model)
        self.start_up.stage("tokenizer", begin_s)
        return vocab

    def _make_runner(self, model: ModelFile) -> BaseRunner:
        """On the device thread."""
        config, begin_s = self.config, time.perf_counter()
        ops = make_ops(self.device, config, self.start_up)
        if self.device == "cpu":
            self.device_reason += f"; {choose_host_math(config.host_math)[1]}"
        try:
            available = ops.available_bytes()       # before the weights are there
            weights = model.weights()
            self.file_bytes, self.weight_bytes = model.stored_bytes, weights.nbytes
            self.sizes = choose_sizes(config, model.spec, weights, available, ops)
            runner = runner_class(self.device)(
                model.spec, weights, ops, self.sizes.num_blocks, config.max_num_seqs, config.max_num_batched_tokens,
                self.sizes.max_model_len, self.sizes.num_tier_blocks, self.sizes.kv_dtype)
            told_group = self._told_group()
            if told_group is not None:
                runner.keep_index(self.sizes.num_blocks[told_group])
        except MemoryError as error:
            ops.close()
            raise ValueError(f"not enough memory on {self.device}: {error}") from error
        except BaseException:
            ops.close()
            raise
        self.start_up.stage("back end", begin_s)
        return runner


def choose_device(asked: str) -> tuple[str, str]:
    """The back end and why. Raises: ValueError where it cannot be had."""
    if asked == "reference":
        return "reference", "as asked: NumPy, for comparison"
    if asked == "cpu":
        return "cpu", "as asked"
    if asked not in ("auto", "cuda"):
        raise ValueError(f"device must be auto, cpu or cuda, got {asked!r}")
    try:
        gpu = usable_gpu()
    except NoGpu as missing:
        if asked == "cuda":
            raise ValueError(f"device cuda: {missing}") from None
        return "cpu", f"auto: {missing}"
    return "cuda", f"{'as asked' if asked == 'cuda' else 'auto'}: {gpu}"


def runner_class(device: str) -> type[BaseRunner]:
    if device == "cuda":
        from cuda.device_runner import DeviceRunner
        return DeviceRunner
    return Runner


def make_ops(device: str, config: EngineConfig, start_up: StartUp | None = None) -> Ops:
    """Raises: ValueError for settings that the back end does not have."""
    if device != "cpu" and config.host_math != "auto":
        raise ValueError(f"host_math {config.host_math} is for device cpu: device {device} has one arithmetic only")
    if device == "cuda":
        return make_kernel_ops(config)
    if config.dtype not in ("auto", "float32"):
        raise ValueError(f"dtype {config.dtype}: on a processor activations are float32")
    if device == "reference":
        from cuda.reference import ReferenceOps
        return ReferenceOps()
    # Numba takes a third of a second to import: only who computes with it pays.
    from cuda.host.ops import HostOps
    return HostOps(config.threads, choose_host_math(config.host_math)[0], start_up)


def choose_host_math(asked: str) -> tuple[HostMath, str]:
    """The host back end's arithmetic and why. Raises: ValueError where it cannot be had."""
    from cuda.host.simd_int16 import HAS_PAIRS, PAIRS_BY
    why = "auto" if asked == "auto" else "as asked"
    if asked == "exact":
        return "exact", f"exact arithmetic ({why})"
    if HAS_PAIRS:
        return "int16", f"int16 arithmetic for quantized weights ({why}: {PAIRS_BY})"
    if asked == "int16":
        raise ValueError("host_math int16: this processor has no AVX2, whose instructions it needs")
    return "exact", f"exact arithmetic ({why}: this processor has no AVX2)"


def make_kernel_ops(config: EngineConfig) -> Ops:
    from cuda.kernels.ops import KernelOps
    from cuda.kernels.types import BF16, FP16
    dtypes = {"auto": BF16, "bfloat16": BF16, "float16": FP16}
    if config.dtype not in dtypes:
        raise ValueError(f"dtype {config.dtype}: on CUDA activations are bfloat16 or float16")
    return KernelOps(make_launcher(), dtypes[config.dtype], config.deterministic)


def make_launcher() -> Launcher:
    """Tests put an emulator here."""
    from cuda.cupy_launcher import CupyLauncher
    try:
        return CupyLauncher()
    except RuntimeError as error:           # another process has the GPU to itself, or all of its memory
        raise ValueError(f"device cuda: {error}") from error


def choose_kv_dtype(config: EngineConfig, ops: Ops) -> KVDtype:
    """Raises: ValueError where the back end cannot store it."""
    if config.kv_dtype == "auto":
        return ops.kv_dtypes[0]
    if config.kv_dtype not in ops.kv_dtypes:
        raise ValueError(f"kv_dtype {config.kv_dtype}: the {ops.name} back end has {', '.join(ops.kv_dtypes)}")
    return config.kv_dtype


def choose_sizes(config: EngineConfig, spec: ModelSpec, weights: ModelWeights, available: int, ops: Ops) -> Sizes:
    """Context length and KV blocks, where `available` bytes of the device's memory hold the weights too.

    Raises: ValueError with the arithmetic where something asked for does not fit.
    """
    max_model_len = config.max_model_len or spec.max_position
    if max_model_len > spec.max_position:
        raise ValueError(f"max_model_len {max_model_len} is more than the {spec.max_position} positions that the model "
                         f"was trained for")
    what = "weights and workspace" if ops.name == "cuda" else "weights"
    weight_bytes = ops.prepared_bytes(spec, weights, config.max_num_batched_tokens, max_model_len,
                                      config.max_num_seqs)
    groups, kv_dtype = kv_groups(spec), choose_kv_dtype(config, ops)
    block_bytes = [ops.kv_block_bytes(group, kv_dtype) for group in groups]
    tier_bytes = config.kv_tier_memory
    num_tier_blocks = tier_bytes // sum(block_bytes)
    if tier_bytes and not num_tier_blocks:
        raise ValueError(f"kv_tier_memory {_size(tier_bytes)} does not hold one block of {BLOCK_SIZE} tokens, which "
                         f"takes {_size(sum(block_bytes))}")
    tier_memory = ops.tier_memory_bytes()
    if tier_memory is not None:             # not the device's
        if tier_bytes > tier_memory:
            raise ValueError(f"kv_tier_memory {_size(tier_bytes)} is more than the {_size(tier_memory)} of host memory "
                             f"that are free")
        tier_bytes = 0
    if weight_bytes + tier_bytes >= available:
        left = available - weight_bytes
        raise ValueError(
            f"kv_tier_memory {_size(tier_bytes)} is too much: of the {_size(available)} of memory that are free the "
            f"{what} of {_size(weight_bytes)} leave {_size(left)}" if left > 0 else
            f"the {what} of {_size(weight_bytes)} do not fit in the {_size(available)} of memory that are free")
    tier = f" and kv_tier_memory {_size(tier_bytes)}" if tier_bytes else ""
    # Without a figure from the user, KV blocks take this share of what the weights leave.
    source = f"{ops.default_kv_share:.0%} of the free memory"
    kv_bytes = int((available - weight_bytes - tier_bytes) * ops.default_kv_share)
    if config.kv_cache_memory is not None:
        kv_bytes, source = config.kv_cache_memory, "kv_cache_memory"
        if kv_bytes + tier_bytes + weight_bytes > available:
            raise ValueError(f"kv_cache_memory {_size(kv_bytes)} and {what} of {_size(weight_bytes)}{tier} are more "
                             f"than the {_size(available)} of memory that are free")
    elif config.gpu_memory_utilization is not None:
        share = config.gpu_memory_utilization
        kv_bytes, source = int(available * share) - weight_bytes - tier_bytes, "gpu_memory_utilization"
        if kv_bytes <= 0:
            raise ValueError(f"gpu_memory_utilization {share:g} of {_size(available)} free memory does not hold the "
                             f"{what} of {_size(weight_bytes)}{tier}")
    num_blocks = size_kv_cache(groups, block_bytes, kv_bytes, config.max_num_seqs, max_model_len,
                               config.max_num_batched_tokens)
    fits = longest_sequence(groups, num_blocks)
    if fits < max_model_len:
        # What nobody asked for may be cut, and is said at the start; what was asked for is refused.
        is_asked = config.max_model_len or config.kv_cache_memory or config.gpu_memory_utilization
        if is_asked or not fits:
            need = [size * n for size, n in zip(block_bytes, blocks_of(groups, max_model_len), strict=True)]
            raise ValueError(
                f"a sequence of max_model_len {max_model_len} tokens needs {_size(sum(need))} of KV cache, {source} "
                f"gives {_size(kv_bytes)}, which holds {fits} tokens: lower max_model_len or raise kv_cache_memory")
        max_model_len = fits
    used = sum(size * n for size, n in zip(block_bytes, num_blocks, strict=True))
    needed = blocks_of(groups, max_model_len)
    sequence_bytes = sum(size * n for size, n in zip(block_bytes, needed, strict=True))
    # A sequence without a window holds a block for each BLOCK_SIZE tokens, one with it no more than the window takes.
    tokens_per_block = [BLOCK_SIZE if need == blocks_for(max_model_len) else max_model_len / need for need in needed]
    return Sizes(max_model_len, num_blocks, (num_tier_blocks,) * len(groups), kv_dtype, used,
                 sequence_bytes / max_model_len, min(n / need for n, need in zip(num_blocks, needed, strict=True)),
                 int(min(n * tokens for n, tokens in zip(num_blocks, tokens_per_block, strict=True))))


def blocks_of(groups: Sequence[KVGroupSpec], num_tokens: int) -> tuple[int, ...]:
    """Blocks of each group that a sequence of `num_tokens` tokens holds at most."""
    return tuple(Group(1, group.window).num_blocks_for(num_tokens) for group in groups)


def longest_sequence(groups: Sequence[KVGroupSpec], num_blocks: Sequence[int]) -> int:
    """Tokens of the longest sequence that the blocks hold when it runs alone."""
    longest = sys.maxsize
    for group, n in zip(groups, num_blocks, strict=True):
        if n < Group(1, group.window).num_blocks_for(sys.maxsize):
            longest = min(longest, n * BLOCK_SIZE)
    return longest


def _size(num_bytes: int) -> str:
    power, unit = (30, "GiB") if num_bytes >= 2**30 else (20, "MiB") if num_bytes >= 2**20 else (10, "KiB")
    return f"{num_bytes / 2**power:.2f} {unit}"


def _first_cause(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
