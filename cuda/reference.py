"""The contract in NumPy, as plainly as it can be said: specification and oracle, not speed.

Rows are computed one by one, each by the same calls on the same shapes, so that a row's bits depend on nothing else:
a matrix product over all rows at once would not do (BLAS picks its kernel, and so its order of sums, by the row count).
"""
from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from cuda.ops import BLOCK_SIZE, Batch, Ints, KVGroupSpec
from weights.load import LayerWeights, ModelWeights
from weights.quant import Dense, Linear, Weight, dequantize
from weights.spec import ModelSpec, RopeSpec

Floats = NDArray[np.float32]


class ReferenceOps:
    """See `cuda.ops.Ops`. Weights are dequantized to float32 once; the KV cache is float32 [layers, 2, N, G, B, D]."""

    name = "reference"

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

    def allocate_kv(self, group: KVGroupSpec, num_blocks: int) -> Floats:
        assert group.k_dim == group.v_dim, "k and v share one array here"
        return np.zeros((len(group.layers), 2, num_blocks, group.kv_heads, BLOCK_SIZE, group.k_dim), np.float32)

    def allocate_tier(self, group: KVGroupSpec, num_blocks: int) -> Floats:
        return self.allocate_kv(group, num_blocks)

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

    def store_kv(self, qkv: Floats, cache: Floats, layer: int, slot_mapping: Ints) -> None:
        spec = self.spec
        heads = qkv.reshape(len(qkv), -1, spec.head_dim)
        k, v = heads[:, spec.num_heads:-spec.num_kv_heads], heads[:, -spec.num_kv_heads:]       # [T, G, D]
        block, offset = slot_mapping // BLOCK_SIZE, slot_mapping % BLOCK_SIZE
        cache[layer, 0, block, :, offset] = k
        cache[layer, 1, block, :, offset] = v

    def attend(self, qkv: Floats, cache: Floats, layer: int, block_table: Ints, scale: float,
               window: int | None, softcap: float | None) -> Floats:
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
                keys = cache[layer, 0, blocks, :, offsets].astype(np.float64)                   # [keys, G, D]
                values = cache[layer, 1, blocks, :, offsets].astype(np.float64)
                for head in range(spec.num_heads):
                    kv_head = head // group_size
                    scores = np.ascontiguousarray(keys[:, kv_head]) @ queries[row, head].astype(np.float64) * scale
                    if softcap is not None:
                        scores = softcap * np.tanh(scores / softcap)
                    weights = np.exp(scores - scores.max())
                    out[row, head] = weights / weights.sum() @ np.ascontiguousarray(values[:, kv_head])
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

    def close(self) -> None:
        """Nothing to give back."""

    def copy_blocks(self, source: Floats, destination: Floats, pairs: Ints) -> None:
        # NOTE: one by one and in order: a destination may be a later pair's source.
        for old, new in pairs:
            destination[:, :, new] = source[:, :, old]

    def poison_blocks(self, cache: Floats, block_ids: Ints) -> None:
        cache[:, :, block_ids] = np.nan
