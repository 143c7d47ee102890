"""The operations that a transformer needs, and their contract. `reference`, `host` and the CUDA kernels provide it.

Letters, used by every docstring below `cuda/`:
  T tokens of this step (all sequences' rows one after the other)   S sequences (chunks) of this step
  R rows that want logits   H query heads   G kv heads   D head dim   B block size (16)   N blocks   M block-table width
  C hidden   F ffn   V vocab   K a projection's inputs

Rules of the contract:
- An op may run later than it is called: results may be read only after `finish()`. Eager back ends do nothing there.
- Arrays that ops return live until the next `begin(batch)`; an op's input may be overwritten only where its docstring
  says so. The caller never writes into them.
- Row-invariance: each output row depends on its own row alone, bit for bit, whatever T, S, R and the row's place are.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from weights.load import ModelWeights
from weights.quant import Linear, Weight
from weights.spec import ModelSpec, RopeSpec

BLOCK_SIZE = 16                             # B: tokens in a KV block

Array = Any                                 # the back end's own array type; NumPy on reference and host
Ints = NDArray[np.int32]

# What keys and values are stored as, all rounded to nearest, ties to even. int8, fp8: each token's k and v of each kv
# head have a float32 scale, the largest size in it / 127 (448 of fp8, which is e4m3: 4 bits of exponent, 3 of mantissa,
# no infinity); scale times code is what attention reads.
KVDtype: TypeAlias = Literal["float32", "bf16", "fp16", "int8", "fp8"]
KV_DTYPES: tuple[KVDtype, ...] = get_args(KVDtype)

# The host back end's products with quantized weights: of float32 numbers, or of 16-bit integers with scales.
HostMath: TypeAlias = Literal["exact", "int16"]


@dataclass(frozen=True, slots=True)
class KVGroupSpec:
    """Layers whose KV cache has the same geometry; they share one block table and one id space."""
    layers: tuple[int, ...]                 # model layer indices
    kv_heads: int                           # G
    k_dim: int
    v_dim: int
    window: int | None                      # blocks that left it are freed; None keeps all


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The ragged rows of one step. Sequence s owns rows query_start_loc[s] .. query_start_loc[s + 1]."""
    token_ids: Ints                         # [T]
    positions: Ints                         # [T]
    query_start_loc: Ints                   # [S + 1]
    seq_lens: Ints                          # [S] tokens in the KV cache after this step's store_kv
    block_tables: tuple[Ints, ...]          # one [S, M] a KV group: block ids, unused entries 0
    slot_mapping: tuple[Ints, ...]          # one [T] a KV group: block_id * B + offset, where each row's k and v go

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


Forward: TypeAlias = Callable[[Batch, Ints], Array]     # a batch and the rows wanted -> what the ops make of them


class Ops(Protocol):
    """See the module's docstring for letters and rules."""

    name: str                               # "reference", "host", "cuda"
    kv_dtypes: tuple[KVDtype, ...]          # that it can store; the first is the choice of who names none

    default_kv_share: float                 # of the memory that weights leave, for KV blocks

    def available_bytes(self) -> int:
        """Memory for weights, workspace and KV blocks that may still be taken."""
        ...

    def tier_memory_bytes(self) -> int | None:
        """Memory for the tier; None where it is the same that `available_bytes` counts."""
        ...

    def prepared_bytes(self, spec: ModelSpec, weights: ModelWeights, max_tokens: int, max_position: int,
                       max_num_seqs: int) -> int:
        """Memory that weights, the workspace of a step and the state of `max_num_seqs` slots will take, where these are
        worth a word."""
        ...

    def prepare(self, spec: ModelSpec, weights: ModelWeights, max_tokens: int, max_position: int) -> ModelWeights:
        """Weights in this back end's own layout (packed, aligned, uploaded); same structure, own weight types.
        Also sizes the workspace for steps of up to `max_tokens` tokens and tables of up to `max_position` positions."""
        ...

    def kv_block_bytes(self, group: KVGroupSpec, dtype: KVDtype) -> int:
        """Memory that `allocate_kv` takes for each block of the group, all its layers together."""
        ...

    def allocate_kv(self, group: KVGroupSpec, num_blocks: int, dtype: KVDtype) -> Array:
        """Zeroed KV cache of a group, opaque to the caller; passed back to store_kv, attend and the block ops."""
        ...

    def allocate_tier(self, group: KVGroupSpec, num_blocks: int, dtype: KVDtype) -> Array:
        """Host memory for blocks of a group, only for copy_blocks; bytes come back as they went."""
        ...

    def begin(self, batch: Batch) -> None:
        """Start of a step: earlier results are no longer valid."""
        ...

    def embed(self, token_ids: Ints, table: Weight, scale: float) -> Array:
        """Rows of the embedding, times `scale`. [T] -> [T, C]"""
        ...

    def rms_norm(self, x: Array, weight: Array, eps: float, add: Array | None = None) -> Array:
        """x [T, C] * weight / rms(x). With `add` [T, C], x += add comes first and stays in x (the residual stream)."""
        ...

    def linear(self, x: Array, weight: Linear) -> Array:
        """x [T, K] W^T + bias -> [T, N]"""
        ...

    def rope(self, qkv: Array, positions: Ints, rope: RopeSpec | None,
             q_norm: Array | None, k_norm: Array | None, eps: float) -> None:
        """In place on the q and k heads of qkv [T, (H + 2G) D]: RMSNorm of each head (where given), then rotation."""
        ...

    def store_kv(self, qkv: Array, cache: Array, layer: int, slot_mapping: Ints) -> None:
        """k and v of qkv into the cache; `layer` counts within the group."""
        ...

    def attend(self, qkv: Array, cache: Array, layer: int, block_table: Ints, scale: float,
               window: int | None, softcap: float | None, sinks: Array | None) -> Array:
        """Causal attention of each row i over its own sequence's cached keys j, 0 <= i - j (< window). -> [T, H D]

        softcap: scores become cap * tanh(score / cap). sinks float32 [H]: of each head one more score that takes part
        in the softmax, neither scaled nor capped, and has no key and no value; a head may thus look at nothing.
        Source: OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card" (arXiv 2508.10925), on the architecture.
        """
        ...

    def gated(self, gate_up: Array, activation: str) -> Array:
        """activation(gate) * up. [T, 2F] -> [T, F]"""
        ...

    def take_rows(self, x: Array, rows: Ints) -> Array:
        """x[rows]. [T, C] -> [R, C]"""
        ...

    def logits(self, x: Array, head: Linear, softcap: float | None) -> Array:
        """x [R, C] W^T -> [R, V], then cap * tanh(y / cap) where `softcap` is given.

        NOTE: the result lives only until the next call of `logits` or `begin`: V is wide, so its buffer is reused.
        The caller calls `finish()` and reads one slice of rows before it asks for the next."""
        ...

    def all_reduce(self, x: Array) -> Array:
        """Sum over tensor-parallel ranks; x itself on one device."""
        ...

    def finish(self) -> None:
        """Run what is still outstanding; afterwards every result of this step may be read."""
        ...

    def run(self, batch: Batch, rows: Ints, forward: Forward) -> Array:
        """A whole step: `begin`, `forward(batch, rows)`, `finish`; returns what `forward` does, which may be read.

        `forward` must depend on the numbers in `batch` and `rows` only through the ops that it calls: a back end may
        run what it recorded of the same `forward` at a step of the same shapes, without another call."""
        ...

    def copy_blocks(self, source: Array, destination: Array, pairs: Ints) -> None:
        """Whole blocks [P, 2] (from, to) of every layer, before the step's forward pass and in order: a block may be a
        later pair's source. `source` and `destination`: a group's cache and its tier, in any combination."""
        ...

    def poison_blocks(self, cache: Array, block_ids: Ints) -> None:
        """For debugging: fill blocks [P] so that no result survives what is read of them, before the forward pass."""
        ...

    def close(self) -> None:
        """Give threads and device memory back; no op may follow."""
        ...
