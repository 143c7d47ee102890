"""The contract in NumPy, as plainly as it can be said: specification and oracle, not speed.

Rows are computed one by one, each by the same calls on the same shapes, so that a row's bits depend on nothing else:
a matrix product over all rows at once would not do (BLAS picks its kernel, and so its order of sums, by the row count).
"""
from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda.memory import available_host_bytes
from cuda.ops import BLOCK_SIZE, KV_DTYPES, Batch, Forward, Ints, KVDtype, KVGroupSpec
from weights.load import LayerWeights, ModelWeights
from weights.quant import Dense, Linear, Weight, dequantize
from weights.spec import ModelSpec, RopeSpec

Floats = NDArray[np.float32]

_STORED: dict[KVDtype, type[np.generic]] = {
    "float32": np.float32, "bf16": np.uint16, "fp16": np.float16, "int8": np.int8, "fp8": np.uint8}
_SCALED: tuple[KVDtype, ...] = ("int8", "fp8")

# What the codes 0 .. 126 of e4m3 stand for; 127 is NaN and 128 the sign.
# Source: Micikevicius et al. 2022, "FP8 formats for deep learning", table 1.
FP8_VALUES = np.array([(8 + code % 8 if code > 7 else code) * 2.0 ** (max(code // 8, 1) - 10) for code in range(127)])
FP8_LARGEST = 448


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ReferenceKVCache:
    """Of a group. 2: keys, values."""
    dtype: KVDtype
    data: NDArray[Any]                      # [layers, 2, N, G, B, D]; bfloat16 and fp8 as their bits
    scales: Floats                          # [layers, 2, N, G, B], where int8 or fp8

    def write(self, index: tuple[Any, ...], x: Floats) -> None:
        """Rows x [..., D] at `index` of all dimensions but the last."""
        if self.dtype == "int8":
            self.data[index], self.scales[index] = to_int8(x)
        elif self.dtype == "fp8":
            self.data[index], self.scales[index] = to_fp8(x)
        else:
            self.data[index] = to_bf16(x) if self.dtype == "bf16" else x

    def read(self, index: tuple[Any, ...]) -> NDArray[np.float64]:
        data = self.data[index]
        if self.dtype == "bf16":
            data = (data.astype(np.uint32) << 16).view(np.float32)
        elif self.dtype == "fp8":
            data = np.where(data < 128, 1, -1) * FP8_VALUES[np.minimum(data & 127, 126)]
        wide: NDArray[np.float64] = data.astype(np.float64)
        return wide * self.scales[index][..., None] if self.dtype in _SCALED else wide


def to_bf16(x: Floats) -> NDArray[np.uint16]:
    """The bits of the nearest bfloat16, of the even one where two are; a NaN stays one."""
    bits = x.view(np.uint32)
    rounded = np.where(np.isnan(x), bits | 0x400000, bits + 0x7FFF + (bits >> 16 & 1))
    return (rounded >> 16).astype(np.uint16)


def to_int8(x: Floats) -> tuple[NDArray[np.int8], Floats]:
    """Codes -127..127 and the scale of each row [..., D]; the scale is NaN where a number of the row is not finite."""
    scaled, scale = _scaled(x, 127)
    return np.clip(np.rint(scaled), -127, 127).astype(np.int8), scale


def to_fp8(x: Floats) -> tuple[NDArray[np.uint8], Floats]:
    """Bits of e4m3 and the scale of each row [..., D]; the scale is NaN where a number of the row is not finite."""
    scaled, scale = _scaled(x, FP8_LARGEST)
    size = np.abs(scaled)
    _, exponent = np.frexp(size)
    step = np.ldexp(1.0, np.maximum(exponent - 1, -6) - 3)          # between two codes here; subnormal under 2^-6
    code = np.searchsorted(FP8_VALUES, np.minimum(np.rint(size / step) * step, FP8_LARGEST))
    return (code | np.where(np.signbit(scaled), 128, 0)).astype(np.uint8), scale


def _scaled(x: Floats, limit: int) -> tuple[Floats, Floats]:
    """The rows [..., D] over their scale, so that no number is larger than `limit`, and the scale."""
    largest = np.abs(x).max(axis=-1)
    scale = np.where(np.isfinite(largest), largest / np.float32(limit), np.float32(np.nan))
    # Nothing to divide by where all are zero, or so small that the scale is.
    usable = scale > 0
    scaled = np.where(usable[..., None], x, 0) / np.where(usable, scale, 1)[..., None]
    return scaled.astype(np.float32, copy=False), scale


class ReferenceOps:
    """See `cuda.ops.Ops`. Weights are dequantized to float32 once."""

    name = "reference"
    kv_dtypes: tuple[KVDtype, ...] = KV_DTYPES

    default_kv_share = 0.25                 # the rest belongs to whoever else uses the machine

    def available_bytes(self) -> int:
        return available_host_bytes()

    def tier_memory_bytes(self) -> int | None:
        return None

    def prepared_bytes(self, spec: ModelSpec, weights: ModelWeights, max_tokens: int, max_position: int,
                       max_num_seqs: int) -> int:
        return weights.nbytes

    def prepare(self, spec: ModelSpec, weights: ModelWeights, max_tokens: int, max_position: int) -> ModelWeights:
        self.spec = spec

        def dense(weight: Weight) -> Dense:
            return Dense(dequantize(weight))

        def linear(projection: Linear) -> Linear:
            stacked = np.concatenate([dequantize(part) for part in projection.parts])
            return Linear((Dense(stacked),), projection.bias)

        def layer(block: LayerWeights) -> LayerWeights:
            return dataclasses.replace(block, qkv=linear(block.qkv), o=linear(block.o),
                                       gate_up=linear(block.gate_up), down=linear(block.down))

        embed = dense(weights.embed)
        tied = weights.head.parts[0] is weights.embed
        head = Linear((embed,), weights.head.bias) if tied else linear(weights.head)
        return ModelWeights(embed, tuple(layer(block) for block in weights.layers), weights.norm, head)

    def kv_block_bytes(self, group: KVGroupSpec, dtype: KVDtype) -> int:
        block = self.allocate_kv(group, 1, dtype)
        return block.data.nbytes + block.scales.nbytes

    def allocate_kv(self, group: KVGroupSpec, num_blocks: int, dtype: KVDtype) -> ReferenceKVCache:
        assert group.k_dim == group.v_dim, "k and v share one array here"
        rows = (len(group.layers), 2, num_blocks, group.kv_heads, BLOCK_SIZE)
        return ReferenceKVCache(dtype, np.zeros((*rows, group.k_dim), _STORED[dtype]),
                                np.zeros(rows if dtype in _SCALED else 0, np.float32))

    def allocate_tier(self, group: KVGroupSpec, num_blocks: int, dtype: KVDtype) -> ReferenceKVCache:
        return self.allocate_kv(group, num_blocks, dtype)

    def begin(self, batch: Batch) -> None:
        self.batch = batch

    def embed(self, token_ids: Ints, table: Weight, scale: float) -> Floats:
        assert isinstance(table, Dense)
        rows: Floats = table.data[token_ids].astype(np.float32) * np.float32(scale)             # [T, C]
        return rows

    def rms_norm(self, x: Floats, weight: Floats, eps: float, add: Floats | None = None) -> Floats:
        if add is not None:
            x += add
        mean_square = np.mean(np.square(x, dtype=np.float64), axis=-1, keepdims=True)           # [T, 1]
        normed: Floats = (x / np.sqrt(mean_square + eps) * weight).astype(np.float32)
        return normed

    def linear(self, x: Floats, weight: Linear) -> Floats:
        matrix = weight.parts[0].data if isinstance(weight.parts[0], Dense) else dequantize(weight.parts[0])
        y = np.empty((len(x), matrix.shape[0]), np.float32)                                     # [T, N]
        for i, row in enumerate(x):
            np.matmul(matrix, row, out=y[i])
        return y if weight.bias is None else y + weight.bias

    def rope(self, qkv: Floats, positions: Ints, rope: RopeSpec | None,
             q_norm: Floats | None, k_norm: Floats | None, eps: float) -> None:
        spec = self.spec
        heads = qkv.reshape(len(qkv), -1, spec.head_dim)                                        # [T, H + 2G, D]
        q, k = heads[:, :spec.num_heads], heads[:, spec.num_heads:spec.num_heads + spec.num_kv_heads]
        if q_norm is not None:
            q[:] = self.rms_norm(q, q_norm, eps)
        if k_norm is not None:
            k[:] = self.rms_norm(k, k_norm, eps)
        if rope is None:
            return
        angles = positions[:, None].astype(np.float64) * np.asarray(rope.inv_freq)              # [T, rotary_dim / 2]
        cos = (np.cos(angles) * rope.attention_factor).astype(np.float32)[:, None]              # [T, 1, rotary_dim / 2]
        sin = (np.sin(angles) * rope.attention_factor).astype(np.float32)[:, None]
        half = rope.rotary_dim // 2
        for part in (q, k):
            low, high = part[..., :half].copy(), part[..., half:2 * half].copy()
            part[..., :half] = low * cos - high * sin
            part[..., half:2 * half] = high * cos + low * sin

    def store_kv(self, qkv: Floats, cache: ReferenceKVCache, layer: int, slot_mapping: Ints) -> None:
        spec = self.spec
        heads = qkv.reshape(len(qkv), -1, spec.head_dim)
        k, v = heads[:, spec.num_heads:-spec.num_kv_heads], heads[:, -spec.num_kv_heads:]       # [T, G, D]
        block, offset = slot_mapping // BLOCK_SIZE, slot_mapping % BLOCK_SIZE
        cache.write((layer, 0, block, slice(None), offset), k)
        cache.write((layer, 1, block, slice(None), offset), v)

    def attend(self, qkv: Floats, cache: ReferenceKVCache, layer: int, block_table: Ints, scale: float,
               window: int | None, softcap: float | None, sinks: Floats | None) -> Floats:
        spec, batch = self.spec, self.batch
        group_size = spec.num_heads // spec.num_kv_heads
        out = np.empty((len(qkv), spec.num_heads, spec.head_dim), np.float32)                   # [T, H, D]
        queries = qkv.reshape(len(qkv), -1, spec.head_dim)
        for s, table in enumerate(block_table):
            for row in range(batch.query_start_loc[s], batch.query_start_loc[s + 1]):
                end = int(batch.positions[row]) + 1
                start = 0 if window is None else max(0, end - window)
                positions = np.arange(start, end)
                blocks, offsets = table[positions // BLOCK_SIZE], positions % BLOCK_SIZE
                keys = cache.read((layer, 0, blocks, slice(None), offsets))                     # [keys, G, D]
                values = cache.read((layer, 1, blocks, slice(None), offsets))
                for head in range(spec.num_heads):
                    kv_head = head // group_size
                    scores = np.ascontiguousarray(keys[:, kv_head]) @ queries[row, head].astype(np.float64) * scale
                    if softcap is not None:
                        scores = softcap * np.tanh(scores / softcap)
                    largest = scores.max() if sinks is None else max(scores.max(), float(sinks[head]))
                    weights = np.exp(scores - largest)
                    total = weights.sum() if sinks is None else weights.sum() + np.exp(float(sinks[head]) - largest)
                    out[row, head] = weights / total @ np.ascontiguousarray(values[:, kv_head])
        return out.reshape(len(qkv), -1)                                                        # [T, H D]

    def gated(self, gate_up: Floats, activation: str) -> Floats:
        gate, up = np.split(gate_up, 2, axis=-1)                                                # [T, F] each
        wide = gate.astype(np.float64)
        with np.errstate(over="ignore"):
            if activation == "silu":
                active = wide / (1 + np.exp(-wide))
            else:
                assert activation == "gelu_tanh", activation
                active = 0.5 * wide * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))
        product: Floats = (active * up).astype(np.float32)
        return product

    def take_rows(self, x: Floats, rows: Ints) -> Floats:
        taken: Floats = x[rows]
        return taken

    def logits(self, x: Floats, head: Linear, softcap: float | None) -> Floats:
        y = self.linear(x, head)
        return y if softcap is None else np.float32(softcap) * np.tanh(y / np.float32(softcap))

    def all_reduce(self, x: Floats) -> Floats:
        return x

    def finish(self) -> None:
        """Nothing is ever outstanding here."""

    def run(self, batch: Batch, rows: Ints, forward: Forward) -> Any:
        self.begin(batch)
        result = forward(batch, rows)
        self.finish()
        return result

    def close(self) -> None:
        """Nothing to give back."""

    def copy_blocks(self, source: ReferenceKVCache, destination: ReferenceKVCache, pairs: Ints) -> None:
        # NOTE: one by one and in order: a destination may be a later pair's source.
        for old, new in pairs:
            destination.data[:, :, new] = source.data[:, :, old]
            if source.dtype in _SCALED:
                destination.scales[:, :, new] = source.scales[:, :, old]

    def poison_blocks(self, cache: ReferenceKVCache, block_ids: Ints) -> None:
        layers, kv_heads, head_dim = cache.data.shape[0], cache.data.shape[3], cache.data.shape[-1]
        nothing = np.full((layers, 2, len(block_ids), kv_heads, BLOCK_SIZE, head_dim), np.nan, np.float32)
        cache.write((slice(None), slice(None), block_ids), nothing)
