"""How fast copies, launches and kernels are on a GPU, each beside what the device could do."""
from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda.kernels import decode_attention, prefill_attention, prefix_lookup
from cuda.kernels.gemm import skinny_gemm
from cuda.kernels.packing import DeviceDense, DeviceWeight, pack_weight
from cuda.kernels.prefix_lookup import BLOCK_WORDS, KEY_BYTES, PrefixTable, Query
from cuda.kernels.rms_norm import rms_norm
from cuda.kernels.slot_sampling import DeviceSampling
from cuda.kernels.types import BF16
from cuda.launcher import DeviceArray, Launcher
from cuda.ops import BLOCK_SIZE
from cuda.sampler import SlotSampling
from tools.gpu_report import Report
from weights.quant import Affine, Dense, Weight

Call = Callable[[], None]

GREEDY = SlotSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, presence_penalty=0.0, frequency_penalty=0.0,
                      repetition_penalty=1.0, logit_bias=(), min_tokens=0, stop_ids=(), seed=0, choice=0, logprobs=None)

DECODE_ATTENTION_TARGET = 0.80              # of the copy bandwidth, from this many bytes of KV on
DECODE_ATTENTION_MB = 32
PREFILL_ATTENTION_TARGET = 0.45             # of the matrix rate
SKINNY_TARGETS = {"bf16": 0.85, "8 bit": None, "4 bit": 0.75}   # of the copy bandwidth
NUM_RANDOM = (1 << 20) - 3                  # numbers that are drawn, and then repeated: a prime, so that no two rows of
                                            # a weight are alike


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured. The defaults are for a GPU; tests take little ones."""
    target_s: float = 0.03                  # of one timed run
    num_launches: int = 1000
    graph_nodes: int = 224                  # kernels of a decode step of 32 layers at 7 each
    copy_bytes: int = 1 << 30
    bus_bytes: int = 1 << 28
    cache_bytes: int = 1 << 28              # buffers are taken in turn until they are this large: beyond any L2
    matrix: int = 8192
    heads: tuple[int, int, int] = (32, 8, 128)      # H, G, D of Llama-3-8B
    batches: tuple[int, ...] = (1, 8, 32, 128)
    contexts: tuple[int, ...] = (512, 1024, 4096, 16384)
    most_kv_bytes: int = 5 << 29            # of a layer: what is larger is left out
    prefills: tuple[int, ...] = (512, 4096)
    projections: tuple[tuple[int, int], ...] = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    cublas_rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    vocab: int = 128256
    sampled_rows: tuple[int, ...] = (1, 32, 128)
    lookups: tuple[int, ...] = (1, 32, 128)         # requests that arrive at once,
    lookup_tokens: int = 4096                       # of so many tokens each


@dataclass(slots=True)
class Ceilings:
    """What the device was seen to do."""
    bytes_per_s: float = 0.0                # read and written together, in a copy on the device
    flops_per_s: float = 0.0                # of a large bfloat16 product


def seconds_per_call(launcher: Launcher, calls: Sequence[Call], target_s: float, in_graph: bool = True) -> float:
    """Of one of `calls`, which run one after the other, over and over: the median of three runs of `target_s`.

    in_graph: without the cost of launching them, which cuBLAS does not allow.
    """
    def run_all() -> None:
        for call in calls:
            call()

    run_all()                               # compiles and loads
    launcher.synchronize()
    run: Call = run_all
    if in_graph:
        launcher.begin_capture()
        run_all()
        run = launcher.end_capture().launch

    def timed(count: int) -> float:
        begin_s = time.perf_counter()
        for _ in range(count):
            run()
        launcher.synchronize()
        return time.perf_counter() - begin_s

    timed(1)
    count = max(1, int(target_s / timed(1)))
    return statistics.median(timed(count) for _ in range(3)) / count / len(calls)


def _random(launcher: Launcher, shape: tuple[int, ...], dtype: Any = BF16) -> DeviceArray:
    """Normal numbers, or codes; a million of them, over and over. Not zeros: a device is faster on those."""
    array = launcher.empty(shape, dtype)
    flat = array.reshape(-1)
    done, random = min(flat.shape[0], 1 << 20), np.random.default_rng(len(shape))
    if array.dtype.itemsize == 1:
        some: NDArray[Any] = random.integers(0, 126, done, np.uint8).view(dtype)        # no NaN as fp8
    else:
        some = random.standard_normal(done, np.float32).astype(dtype)
    launcher.write(flat[:done], some)
    while done < flat.shape[0]:
        more = min(done, flat.shape[0] - done)
        launcher.copy(flat[done:done + more], flat[:more])
        done += more
    return array


# ---- Overheads and ceilings

def measure_launches(launcher: Launcher, sizes: Sizes, report: Report) -> None:
    part = "launches"
    x, weight = launcher.zeros((1, 64), BF16), launcher.zeros(64, np.float32)
    out = launcher.empty((1, 64), BF16)

    def kernel() -> None:
        rms_norm(launcher, out, x, weight, 1e-5)

    kernel()
    launcher.synchronize()
    begin_s = time.perf_counter()
    for _ in range(sizes.num_launches):
        kernel()
    queued_s = time.perf_counter() - begin_s
    launcher.synchronize()
    done_s = time.perf_counter() - begin_s
    report.add(part, "a small kernel of 6 arguments, until it is queued", us=1e6 * queued_s / sizes.num_launches)
    report.add(part, "a small kernel of 6 arguments, one after the other", us=1e6 * done_s / sizes.num_launches)
    node_s = seconds_per_call(launcher, [kernel] * sizes.graph_nodes, sizes.target_s)
    report.add(part, f"the same in a graph of {sizes.graph_nodes}", us=1e6 * node_s)

    launcher.begin_capture()
    for _ in range(sizes.graph_nodes):
        kernel()
    graph = launcher.end_capture()
    graph.launch()
    launcher.synchronize()
    begin_s = time.perf_counter()
    graph.launch()
    report.add(part, f"a graph of {sizes.graph_nodes}, until it is queued", us=1e6 * (time.perf_counter() - begin_s))
    launcher.synchronize()

    host, device = np.zeros(128, np.int32), launcher.zeros(128, np.int32)
    for what, call in (("512 bytes to the device, until they are queued", lambda: launcher.write(device, host)),
                       ("an event, recorded and waited for", lambda: launcher.record().wait()),
                       ("512 bytes to the host, waited for", lambda: launcher.download_async(device).get())):
        call()
        launcher.synchronize()
        report.add(part, what, us=1e6 * _median_s(call))


def measure_ceilings(launcher: Launcher, sizes: Sizes, report: Report, ceilings: Ceilings) -> None:
    part = "ceilings"
    source = _random(launcher, (sizes.copy_bytes,), np.uint8)
    destination = launcher.empty(sizes.copy_bytes, np.uint8)
    copy_s = seconds_per_call(launcher, [lambda: launcher.copy(destination, source)], sizes.target_s)
    ceilings.bytes_per_s = 2 * sizes.copy_bytes / copy_s
    report.add(part, f"copy of {sizes.copy_bytes >> 20} MiB on the device, read + written", ms=1e3 * copy_s,
               gb_per_s=ceilings.bytes_per_s / 1e9)
    pinned = launcher.empty_pinned(sizes.bus_bytes, np.uint8)
    pinned[:] = 1
    for what, to, origin in (("from pinned memory", destination[:sizes.bus_bytes], pinned),
                             ("into pinned memory", pinned, source[:sizes.bus_bytes])):
        def copy(to: Any = to, origin: Any = origin) -> None:
            launcher.copy(to, origin)

        bus_s = seconds_per_call(launcher, [copy], sizes.target_s)
        report.add(part, f"copy of {sizes.bus_bytes >> 20} MiB {what}", ms=1e3 * bus_s,
                   gb_per_s=sizes.bus_bytes / bus_s / 1e9)
    n = sizes.matrix
    x, weight, out = (_random(launcher, (n, n)) for _ in range(3))
    product_s = seconds_per_call(launcher, [lambda: launcher.matmul(x, weight, out)], sizes.target_s, in_graph=False)
    ceilings.flops_per_s = 2 * n**3 / product_s
    report.add(part, f"cuBLAS, {n} x {n} x {n}, bfloat16", ms=1e3 * product_s, tflops=ceilings.flops_per_s / 1e12)


# ---- Attention

@dataclass(frozen=True, slots=True, eq=False)
class _Cache:
    """One layer's, of `batch` sequences of `context` tokens, whose blocks lie in any order."""
    keys: DeviceArray
    values: DeviceArray
    key_scales: DeviceArray | None
    value_scales: DeviceArray | None

    @property
    def nbytes(self) -> int:
        return sum(int(array.nbytes) for array in (self.keys, self.values, self.key_scales, self.value_scales)
                   if array is not None)


def _caches(launcher: Launcher, sizes: Sizes, num_blocks: int, stored: Any) -> list[_Cache]:
    _, kv_heads, head_dim = sizes.heads
    shape = (num_blocks, kv_heads, BLOCK_SIZE, head_dim)
    layer_bytes = 2 * num_blocks * kv_heads * BLOCK_SIZE * head_dim * np.dtype(stored).itemsize
    scaled = np.dtype(stored).itemsize == 1
    return [_Cache(_random(launcher, shape, stored), _random(launcher, shape, stored),
                   _random(launcher, shape[:-1], np.float32) if scaled else None,
                   _random(launcher, shape[:-1], np.float32) if scaled else None)
            for _ in range(max(1, -(-sizes.cache_bytes // layer_bytes)))]


def _block_table(launcher: Launcher, batch: int, context: int) -> tuple[DeviceArray, int]:
    """[batch, M] of blocks all over the cache, and how many there are."""
    width = -(-context // BLOCK_SIZE)
    ids = np.random.default_rng(0).permutation(batch * width).astype(np.int32)
    return launcher.upload(ids.reshape(batch, width)), batch * width


def measure_decode_attention(launcher: Launcher, sizes: Sizes, report: Report, ceilings: Ceilings, batch: int,
                             context: int, kv: str, stored: Any) -> None:
    heads, kv_heads, head_dim = sizes.heads
    table, num_blocks = _block_table(launcher, batch, context)
    caches = _caches(launcher, sizes, num_blocks, stored)
    qkv = _random(launcher, (batch, (heads + 2 * kv_heads) * head_dim))
    out = launcher.empty((batch, heads * head_dim), BF16)
    runs = np.array([(row, 1, context - 1, row) for row in range(batch)], np.int32)
    plan = decode_attention.plan(runs, heads // kv_heads)
    work = launcher.upload(plan)
    partials = launcher.empty(decode_attention.partials_size(len(plan), heads, kv_heads, head_dim), np.float32)
    counters = launcher.zeros(decode_attention.counters_size(len(plan), heads, kv_heads), np.int32)

    def call(cache: _Cache) -> Call:
        return lambda: decode_attention.decode_attention(
            launcher, out, qkv, cache.keys, cache.values, cache.key_scales, cache.value_scales, table, work, partials,
            counters, heads, head_dim**-0.5)

    seconds = seconds_per_call(launcher, [call(cache) for cache in caches], sizes.target_s)
    size = caches[0].nbytes
    report.add_share("decode attention", f"batch {batch}, context {context}, {kv}",
                     size / seconds / ceilings.bytes_per_s,
                     DECODE_ATTENTION_TARGET if size >= DECODE_ATTENTION_MB * 1e6 else None,
                     mb=size / 1e6, us=1e6 * seconds, gb_per_s=size / seconds / 1e9)


def measure_prefill_attention(launcher: Launcher, sizes: Sizes, report: Report, ceilings: Ceilings,
                              num_tokens: int) -> None:
    heads, kv_heads, head_dim = sizes.heads
    table, num_blocks = _block_table(launcher, 1, num_tokens)
    cache = _caches(launcher, sizes, num_blocks, BF16)[0]
    qkv = _random(launcher, (num_tokens, (heads + 2 * kv_heads) * head_dim))
    out = launcher.empty((num_tokens, heads * head_dim), BF16)
    work = launcher.upload(prefill_attention.plan(np.array([(0, num_tokens, 0, 0)], np.int32), heads // kv_heads))

    def call() -> None:
        prefill_attention.prefill_attention(launcher, out, qkv, cache.keys, cache.values, cache.key_scales,
                                            cache.value_scales, table, work, heads, head_dim**-0.5)

    seconds = seconds_per_call(launcher, [call], sizes.target_s)
    flops = 4 * heads * head_dim * num_tokens * (num_tokens + 1) / 2            # what the mask leaves
    report.add_share("prefill attention", f"{num_tokens} tokens, bf16", flops / seconds / ceilings.flops_per_s,
                     PREFILL_ATTENTION_TARGET if num_tokens >= 4096 else None, us=1e6 * seconds,
                     tflops=flops / seconds / 1e12)


# ---- Matrix products

def random_weight(kind: str, num_rows: int, inputs: int, seed: int = 0) -> Weight:
    """bf16, "8 bit" or "4 bit", the latter in groups of 32 and with offsets, as Q4_1 has them."""
    random = np.random.default_rng(seed)
    if kind == "bf16":
        some = (random.standard_normal(NUM_RANDOM, np.float32) / np.float32(inputs**0.5)).astype(BF16).view(np.uint16)
        return Dense(np.resize(some, (num_rows, inputs)), is_bf16=True)
    bits = 8 if kind == "8 bit" else 4
    codes = np.resize(random.integers(0, 256, NUM_RANDOM, np.uint8), (num_rows, inputs * bits // 8))
    scale = np.full((num_rows, inputs // 32), 1 / (inputs**0.5 * 2 ** (bits - 2)), np.float32)
    return Affine(codes, scale, np.float32(-(2 ** (bits - 1)) + 0.5) * scale, bits, 32)


def measure_skinny_gemm(launcher: Launcher, sizes: Sizes, report: Report, ceilings: Ceilings, kind: str,
                        shape: tuple[int, int]) -> None:
    num_rows, inputs = shape
    weight: Any = pack_weight(launcher, random_weight(kind, num_rows, inputs), BF16)
    weights = [weight] + [_copied(launcher, weight) for _ in range(-(-sizes.cache_bytes // weight.nbytes) - 1)]
    for count in sizes.rows:
        x, out = _random(launcher, (count, inputs)), launcher.empty((count, num_rows), BF16)

        def call(weight: Any, x: DeviceArray = x, out: DeviceArray = out) -> Call:
            if kind == "bf16":
                return lambda: skinny_gemm(launcher, out, x, weight.data)
            return lambda: skinny_gemm(launcher, out, x, weight.codes, weight.scales, weight.offsets, bits=weight.bits,
                                       group=weight.group, scale_unit=weight.scale_unit)

        seconds = seconds_per_call(launcher, [call(weight) for weight in weights], sizes.target_s)
        report.add_share("skinny GEMM", f"M {count}, N {num_rows}, K {inputs}, {kind}",
                         weight.nbytes / seconds / ceilings.bytes_per_s, SKINNY_TARGETS[kind], mb=weight.nbytes / 1e6,
                         us=1e6 * seconds, gb_per_s=weight.nbytes / seconds / 1e9)


def measure_cublas(launcher: Launcher, sizes: Sizes, report: Report, ceilings: Ceilings,
                   shape: tuple[int, int]) -> None:
    num_rows, inputs = shape
    size = 2 * num_rows * inputs
    weights = [_random(launcher, (num_rows, inputs)) for _ in range(max(1, -(-sizes.cache_bytes // size)))]
    for count in sizes.cublas_rows:
        x, out = _random(launcher, (count, inputs)), launcher.empty((count, num_rows), BF16)

        def call(weight: DeviceArray, x: DeviceArray = x, out: DeviceArray = out) -> Call:
            return lambda: launcher.matmul(x, weight, out)

        seconds = seconds_per_call(launcher, [call(weight) for weight in weights], sizes.target_s, in_graph=False)
        report.add_share("cuBLAS", f"M {count}, N {num_rows}, K {inputs}, bf16", size / seconds / ceilings.bytes_per_s,
                         None, us=1e6 * seconds, gb_per_s=size / seconds / 1e9)


# ---- Beside the forward pass

def measure_sampling(launcher: Launcher, sizes: Sizes, report: Report, ceilings: Ceilings, num_rows: int) -> None:
    logits = _random(launcher, (num_rows, sizes.vocab), np.float32)
    tokens = launcher.zeros((num_rows, 2), np.int32)
    slots = launcher.upload(np.arange(num_rows, dtype=np.int32))
    positions = launcher.upload(np.ones(num_rows, np.int32))
    filtered = replace(GREEDY, temperature=1.0, top_k=50, top_p=0.9)
    penalized = replace(GREEDY, repetition_penalty=1.1, logprobs=5)
    for what, sampling in (("greedy", GREEDY), ("temperature 1, top-k 50, top-p 0.9", filtered),
                           ("a penalty and 5 logprobs", penalized)):
        sampler = DeviceSampling(launcher, num_rows, sizes.vocab)
        for slot in range(num_rows):
            sampler.start(slot, sampling, [1], 1)
        sampler.flush()

        def call(sampler: DeviceSampling = sampler) -> None:
            sampler.sample(tokens, logits, slots, positions)

        seconds = seconds_per_call(launcher, [call], sizes.target_s)
        size = 4 * num_rows * sizes.vocab
        report.add_share("sampling", f"{num_rows} rows of {sizes.vocab}, {what}", size / seconds / ceilings.bytes_per_s,
                         None, mb=size / 1e6, us=1e6 * seconds)


def measure_prefix_lookup(launcher: Launcher, sizes: Sizes, report: Report, num_requests: int) -> None:
    """All blocks of all requests found, in a table that holds as many requests as are ever asked for: the longest that
    it takes. Beside it the KV pool's own map, asked for the same keys."""
    from actors.policy.prefix_index import PrefixIndex  # the rest of the check runs without the actors

    num_each = sizes.lookup_tokens // BLOCK_SIZE
    num_blocks = max(sizes.lookups) * num_each
    random = np.random.default_rng(0)
    root = bytes(KEY_BYTES)
    token_ids = random.integers(0, 1 << 17, (num_blocks, BLOCK_SIZE)).tolist()
    keys = [random.bytes(KEY_BYTES) for _ in range(num_blocks)]
    chains = [range(begin, begin + num_each) for begin in range(0, num_requests * num_each, num_each)]
    parents = [root if block % num_each == 0 else keys[block - 1] for block in range(num_blocks)]
    table = PrefixTable(launcher, num_blocks)
    table.insert(keys, parents, range(num_blocks), token_ids)
    queries = [Query(root, tuple(keys[chain.start:chain.stop]),
                     [token_id for block in chain for token_id in token_ids[block]]) for chain in chains]
    answers = table.look_up(queries)()
    assert answers == [tuple(chain) for chain in chains], "a block that is in the table is not found"
    pool_index = PrefixIndex(num_blocks)
    for block_id, parent, key, ids in zip(range(num_blocks), parents, keys, token_ids, strict=True):
        pool_index.add(block_id, parent, key, tuple(ids))

    def on_host() -> list[int]:
        return [pool_index.count_leading(query.keys) for query in queries]

    assert on_host() == [num_each] * num_requests, "the pool's map has them all"
    places = launcher.upload(np.full(num_blocks, -1, np.int32))
    blocks = launcher.empty((num_blocks, BLOCK_WORDS), np.int32)
    entries = launcher.empty(prefix_lookup.capacity_for(num_blocks), np.int32)
    changes = prefix_lookup.change_rows({block_id: (key + parent, ids) for block_id, (key, parent, ids) in enumerate(
        zip(keys, parents, token_ids, strict=True))}, ())
    prefix_lookup.clear_table(launcher, entries)
    prefix_lookup.apply_changes(launcher, entries, places, blocks, launcher.upload(changes), 0)
    starts, roots, lines = map(launcher.upload, prefix_lookup.query_rows(queries))
    hits, found = launcher.empty(num_requests, np.int32), launcher.empty(lines.shape[0], np.int32)
    kernel_s = seconds_per_call(launcher, [lambda: prefix_lookup.look_up(
        launcher, hits, found, entries, blocks, starts, roots, lines, 0)], sizes.target_s)
    what = f"{num_requests} of {sizes.lookup_tokens} tokens, {num_blocks} blocks in the table"
    for how, seconds in (("the kernel", kernel_s), ("until it is queued", _median_s(lambda: table.look_up(queries))),
                         ("answered", _median_s(lambda: table.look_up(queries)())), ("the map", _median_s(on_host))):
        report.add("prefix lookup", f"{what}: {how}", us=1e6 * seconds)


def _median_s(call: Callable[[], object]) -> float:
    times, results = [], []
    for _ in range(20):
        begin_s = time.perf_counter()
        results.append(call())              # kept: a download that is dropped is waited for
        times.append(time.perf_counter() - begin_s)
    return statistics.median(times)


def _copied(launcher: Launcher, weight: DeviceWeight) -> DeviceWeight:
    """The same numbers at another place."""
    def copied(array: DeviceArray | None) -> DeviceArray | None:
        if array is None:
            return None
        copy = launcher.empty(array.shape, array.dtype)
        launcher.copy(copy, array)
        return copy

    if isinstance(weight, DeviceDense):
        return DeviceDense(copied(weight.data))
    return replace(weight, codes=copied(weight.codes), scales=copied(weight.scales),
                               offsets=copied(weight.offsets))
