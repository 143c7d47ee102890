"""The contract of `cuda.ops` by CUDA kernels. Every op queues its launches at once; nothing waits.

The arrays of a step live in a workspace at fixed addresses, so that the launches of a step can be captured as a graph.
Activations are 16-bit, the residual stream and the logits float32.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda.kernels import block_copy, decode_attention, prefill_attention
from cuda.kernels.embed import embed
from cuda.kernels.gated import gated
from cuda.kernels.gemm import SKINNY_ROWS, linear
from cuda.kernels.packing import DeviceDense, DeviceLinear, pack_linear, pack_weight, packed_bytes, packed_linear_bytes
from cuda.kernels.rms_norm import MAX_COLUMNS, rms_norm
from cuda.kernels.rope_store_kv import rope_store_kv
from cuda.kernels.slot_sampling import DeviceSampling
from cuda.kernels.take_rows import take_rows
from cuda.kernels.types import BF16
from cuda.launcher import DeviceArray, Launcher
from cuda.memory import available_host_bytes
from cuda.ops import BLOCK_SIZE, Forward, Ints, KVDtype, KVGroupSpec
from weights.load import LayerWeights, ModelWeights
from weights.spec import ModelSpec, RopeSpec

RING = 3                                    # arrays of one width that live at once: an op's inputs and its output
LOGITS_ROWS = 64                            # rows of logits at a time
FLOAT32 = np.dtype(np.float32)
MAX_ITEMS = 2048                            # of a launch of decode_attention: a million tokens' splits
LARGEST_HEAD_DIM = 256                      # of attention


@dataclass(frozen=True, slots=True, eq=False)
class DeviceBatch:
    """`cuda.ops.Batch` on the device; row T - 1 and those before it may be padding (position and slots < 0)."""
    token_ids: DeviceArray                  # int32 [T]
    positions: DeviceArray                  # int32 [T]
    block_tables: tuple[DeviceArray, ...]   # one int32 [slots, M] a KV group
    slot_mapping: tuple[DeviceArray, ...]   # one int32 [T] a KV group
    decode_work: tuple[tuple[DeviceArray, ...], ...]    # int32 [W, 8] of each KV group, as decode_attention.cut
    prefill_work: tuple[DeviceArray | None, ...]    # one int32 [W, 4] a KV group, as prefill_attention.plan made it

    @property
    def num_tokens(self) -> int:
        return int(self.positions.shape[0])


@dataclass(frozen=True, slots=True, eq=False)
class DeviceKVCache:
    """Of a group, on the device or in pinned host memory."""
    keys: DeviceArray                       # [layers, N, G, B, D]
    values: DeviceArray                     # likewise
    key_scales: DeviceArray | None          # float32 [layers, N, G, B] of 8-bit keys
    value_scales: DeviceArray | None

    @property
    def arrays(self) -> tuple[DeviceArray, ...]:
        scales = () if self.key_scales is None else (self.key_scales, self.value_scales)
        return self.keys, self.values, *scales


@dataclass(frozen=True, slots=True, eq=False)
class PostNormed:
    """RMSNorm of an array that only joins the residual stream: the kernel of the norm that adds it computes both."""
    x: DeviceArray
    weight: DeviceArray


class KernelOps:
    """See `cuda.ops.Ops`. Used by the device thread."""

    name = "cuda"
    default_kv_share = 0.9                  # the rest: what the driver, cuBLAS and graphs take

    def __init__(self, launcher: Launcher, dtype: np.dtype[Any] = BF16, deterministic: bool = False) -> None:
        """dtype: of activations and dense weights. deterministic: a row's bits depend on its own sequence alone."""
        self.launcher, self.dtype, self.deterministic = launcher, np.dtype(dtype), deterministic
        self.kv_dtypes: tuple[KVDtype, ...] = ("bf16" if self.dtype == BF16 else "fp16", "int8", "fp8")
        self._stored = {self.kv_dtypes[0]: self.dtype, "int8": np.dtype(np.int8), "fp8": np.dtype(np.uint8)}
        self._workspace: dict[tuple[int, Any], list[DeviceArray]] = {}      # by columns and type: a ring
        self._next: dict[tuple[int, Any], int] = {}
        self._rope_tables: dict[RopeSpec, DeviceArray] = {}
        self._partials: DeviceArray | None = None               # results of split sequences, to be merged
        self._counters: DeviceArray | None = None               # how many of them have arrived
        self._logits: DeviceArray | None = None
        self._work: dict[int, list[Any]] = {}            # of this step: work lists by their block table

    # ---- Start

    def available_bytes(self) -> int:
        return self.launcher.free_bytes()

    def tier_memory_bytes(self) -> int | None:
        return available_host_bytes()

    def prepared_bytes(self, spec: ModelSpec, weights: ModelWeights, max_tokens: int, max_position: int,
                       max_num_seqs: int) -> int:
        projections = [projection for layer in weights.layers for projection in
                       (layer.qkv, layer.o, layer.gate_up, layer.down)]
        if weights.head.parts[0] is not weights.embed:
            projections.append(weights.head)
        stored = packed_bytes(weights.embed) + sum(map(packed_linear_bytes, projections))
        widths = (spec.hidden_size, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim,
                  spec.num_heads * spec.head_dim, spec.ffn_size, 2 * spec.ffn_size)
        workspace = max_tokens * (RING * sum(set(widths)) * self.dtype.itemsize + 3 * spec.hidden_size * 4)
        tables = max_position * sum(rope.rotary_dim * 4 for rope in {layer.rope for layer in spec.layers} if rope)
        slots = DeviceSampling.state_bytes(max_num_seqs, spec.vocab_size) + 8 * max_num_seqs * max_position
        merges = 4 * decode_attention.partials_size(MAX_ITEMS, spec.num_heads, spec.num_kv_heads, spec.head_dim)
        return stored + workspace + tables + slots + merges + LOGITS_ROWS * spec.vocab_size * 4

    def prepare(self, spec: ModelSpec, weights: ModelWeights, max_tokens: int, max_position: int) -> ModelWeights:
        check_supported(spec)
        self.spec, self.max_tokens = spec, max_tokens
        shape = MAX_ITEMS, spec.num_heads, spec.num_kv_heads
        self._partials = self.launcher.empty(decode_attention.partials_size(*shape, spec.head_dim), np.float32)
        self._counters = self.launcher.zeros(decode_attention.counters_size(*shape), np.int32)
        for layer in spec.layers:
            if layer.rope is not None and layer.rope not in self._rope_tables:
                self._rope_tables[layer.rope] = self.launcher.upload(rope_table(layer.rope, max_position))

        def vector(weight: NDArray[np.float32] | None) -> Any:
            return None if weight is None else self.launcher.upload(np.ascontiguousarray(weight, np.float32))

        def project(projection: Any, gated: str | None = None) -> Any:
            return pack_linear(self.launcher, projection, self.dtype, gated)

        def block(layer: LayerWeights) -> LayerWeights:
            return LayerWeights(
                attn_norm=vector(layer.attn_norm), qkv=project(layer.qkv), o=project(layer.o),
                ffn_norm=vector(layer.ffn_norm), gate_up=project(layer.gate_up, spec.activation),
                down=project(layer.down), q_norm=vector(layer.q_norm), k_norm=vector(layer.k_norm),
                attn_post_norm=vector(layer.attn_post_norm), ffn_post_norm=vector(layer.ffn_post_norm),
                sinks=vector(layer.sinks))

        embedding: Any = pack_weight(self.launcher, weights.embed, self.dtype)
        tied = weights.head.parts[0] is weights.embed
        head: Any = DeviceLinear.of(embedding, vector(weights.head.bias)) if tied else project(weights.head)
        return ModelWeights(embedding, tuple(block(layer) for layer in weights.layers), vector(weights.norm), head)

    def kv_block_bytes(self, group: KVGroupSpec, dtype: KVDtype) -> int:
        stored, rows = self._stored[dtype], len(group.layers) * group.kv_heads * BLOCK_SIZE
        return rows * ((group.k_dim + group.v_dim) * stored.itemsize + (8 if stored.itemsize == 1 else 0))

    def allocate_kv(self, group: KVGroupSpec, num_blocks: int, dtype: KVDtype) -> DeviceKVCache:
        return self._allocate(self.launcher.zeros, group, num_blocks, dtype)

    def allocate_tier(self, group: KVGroupSpec, num_blocks: int, dtype: KVDtype) -> DeviceKVCache:
        return self._allocate(self.launcher.empty_pinned, group, num_blocks, dtype)

    def _allocate(self, new: Any, group: KVGroupSpec, num_blocks: int, dtype: KVDtype) -> DeviceKVCache:
        rows, stored = (len(group.layers), num_blocks, group.kv_heads, BLOCK_SIZE), self._stored[dtype]
        scales = [new(rows, np.float32) if stored.itemsize == 1 else None for _ in range(2)]
        return DeviceKVCache(new((*rows, group.k_dim), stored), new((*rows, group.v_dim), stored), *scales)

    # ---- A step

    def begin(self, batch: Any) -> None:
        """batch: a DeviceBatch."""
        self.batch: DeviceBatch | None = batch
        # The work lists of a group are found by its block table, which `attend` is given.
        self._work = {id(table): work for table, *work in
                      zip(batch.block_tables, batch.decode_work, batch.prefill_work, strict=True)}
        self._next.clear()

    def _new(self, rows: int, columns: int, dtype: Any) -> DeviceArray:
        """The next array of the ring of this width."""
        key = columns, dtype
        ring = self._workspace.setdefault(key, [])
        turn = self._next.get(key, 0)
        if len(ring) <= turn:
            ring.append(self.launcher.empty((self.max_tokens, columns), dtype))
        self._next[key] = (turn + 1) % RING
        return ring[turn][:rows]

    def embed(self, token_ids: DeviceArray, table: Any, scale: float) -> DeviceArray:
        x = self._new(token_ids.shape[0], self.spec.hidden_size, FLOAT32)
        embed(self.launcher, x, token_ids, table, scale)
        return x

    def rms_norm(self, x: DeviceArray, weight: DeviceArray, eps: float, add: Any = None) -> Any:
        if x.dtype == self.dtype:           # not the residual stream: what joins it next
            assert add is None, "only the residual stream has something added"
            return PostNormed(x, weight)
        out = self._new(x.shape[0], x.shape[1], self.dtype)
        added, post = (add.x, add.weight) if isinstance(add, PostNormed) else (add, None)
        rms_norm(self.launcher, out, x, weight, eps, added, post)
        return out

    def linear(self, x: DeviceArray, weight: Any) -> DeviceArray:
        out = self._new(x.shape[0], weight.out_columns, self.dtype)
        if weight.gated is not None and not self.deterministic and x.shape[0] > SKINNY_ROWS and is_plain(weight):
            both = self._new(x.shape[0], weight.num_rows, self.dtype)
            self.launcher.matmul(x, weight.parts[0].data, both)
            gated(self.launcher, out, both, weight.gated)
        else:
            linear(self.launcher, out, x, weight, self.deterministic)
        return out

    def rope(self, qkv: DeviceArray, positions: DeviceArray, rope: RopeSpec | None, q_norm: DeviceArray | None,
             k_norm: DeviceArray | None, eps: float) -> None:
        # One kernel rotates and stores: `store_kv`, which always comes next, launches it.
        self._rope: Any = None if rope is None else self._rope_tables[rope], q_norm, k_norm, eps

    def store_kv(self, qkv: DeviceArray, cache: DeviceKVCache, layer: int, slot_mapping: DeviceArray) -> None:
        assert self.batch is not None, "begin comes first"
        table, q_norm, k_norm, eps = self._rope
        rope_store_kv(self.launcher, qkv, *self._layer(cache, layer), self.batch.positions, slot_mapping, table, q_norm,
                      k_norm, eps, self.spec.num_heads, self.spec.num_kv_heads)

    def attend(self, qkv: DeviceArray, cache: DeviceKVCache, layer: int, block_table: DeviceArray, scale: float,
               window: int | None, softcap: float | None, sinks: DeviceArray | None) -> DeviceArray:
        out = self._new(qkv.shape[0], self.spec.num_heads * self.spec.head_dim, self.dtype)
        decode_work, prefill_work = self._work[id(block_table)]
        arrays = self._layer(cache, layer)
        for work in decode_work:
            decode_attention.decode_attention(self.launcher, out, qkv, *arrays, block_table, work, self._partials,
                                              self._counters, self.spec.num_heads, scale, window, softcap, sinks)
        if prefill_work is not None and prefill_work.shape[0]:
            prefill_attention.prefill_attention(self.launcher, out, qkv, *arrays, block_table, prefill_work,
                                                self.spec.num_heads, scale, window, softcap, sinks)
        return out

    def gated(self, gate_up: DeviceArray, activation: str) -> DeviceArray:
        return gate_up                      # the projection's epilogue has done it

    def take_rows(self, x: Any, rows: DeviceArray) -> Any:
        if isinstance(x, PostNormed):
            return PostNormed(self.take_rows(x.x, rows), x.weight)
        taken = self._new(rows.shape[0], x.shape[1], x.dtype)
        take_rows(self.launcher, taken, x, rows)
        return taken

    def logits(self, x: DeviceArray, head: Any, softcap: float | None) -> DeviceArray:
        if self._logits is None:
            self._logits = self.launcher.empty((LOGITS_ROWS, self.spec.vocab_size), np.float32)
        assert x.shape[0] <= LOGITS_ROWS, f"{x.shape[0]} rows of logits, at most {LOGITS_ROWS} at a time"
        out = self._logits[:x.shape[0]]
        linear(self.launcher, out, x, head, self.deterministic, softcap)
        return out

    def all_reduce(self, x: DeviceArray) -> DeviceArray:
        return x

    def finish(self) -> None:
        """Nothing is ever held back here; `Launcher.download` waits."""

    def run(self, batch: Any, rows: Any, forward: Forward) -> Any:
        self.begin(batch)
        result = forward(batch, rows)
        self.finish()
        return result

    def close(self) -> None:
        self._workspace, self._rope_tables = {}, {}
        self._partials = self._counters = self._logits = self._rope = self.batch = None
        self._work = {}
        self.launcher.close()

    # ---- Blocks

    def copy_blocks(self, source: DeviceKVCache, destination: DeviceKVCache, pairs: Ints) -> None:
        for wave in waves(pairs):
            for old, new in zip(source.arrays, destination.arrays, strict=True):
                block_copy.copy_blocks(self.launcher, new, old, self.launcher.upload(wave))

    def poison_blocks(self, cache: DeviceKVCache, block_ids: Ints) -> None:
        ids = self.launcher.upload(np.ascontiguousarray(block_ids, np.int32))
        for array in cache.arrays:
            block_copy.poison_blocks(self.launcher, array, ids)

    def _layer(self, cache: DeviceKVCache, layer: int) -> tuple[Any, Any, Any, Any]:
        if cache.key_scales is None:
            return cache.keys[layer], cache.values[layer], None, None
        keys, values, key_scales, value_scales = (array[layer] for array in cache.arrays)
        return keys, values, key_scales, value_scales


def check_supported(spec: ModelSpec) -> None:
    """Raises: ValueError for a model that the kernels cannot compute."""
    if spec.head_dim % 8 or spec.head_dim > LARGEST_HEAD_DIM:
        raise ValueError(f"heads of {spec.head_dim}: on CUDA they must be a multiple of 8 and at most "
                         f"{LARGEST_HEAD_DIM}")
    if spec.hidden_size > MAX_COLUMNS:
        raise ValueError(f"hidden states of {spec.hidden_size}: on CUDA they may have at most {MAX_COLUMNS} numbers")


def is_plain(weight: DeviceLinear) -> bool:
    """cuBLAS can multiply by it."""
    return len(weight.parts) == 1 and isinstance(weight.parts[0], DeviceDense) and weight.bias is None


def rope_table(rope: RopeSpec, num_positions: int) -> NDArray[np.float32]:
    """[P, rotary_dim]: cosines, then sines."""
    angles = np.arange(num_positions)[:, None] * np.asarray(rope.inv_freq, np.float64)
    both = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * rope.attention_factor
    return both.astype(np.float32)


def waves(pairs: Ints) -> Sequence[Ints]:
    """`pairs` cut so that the copies of a part may run in any order."""
    parts: list[list[tuple[int, int]]] = []
    touched: set[int] = set()
    read: set[int] = set()
    for old, new in pairs.tolist():
        if not parts or old in touched or new in touched or new in read:
            parts.append([])
            touched, read = set(), set()
        parts[-1].append((old, new))
        touched.add(new)
        read.add(old)
    return [np.array(part, np.int32) for part in parts]
