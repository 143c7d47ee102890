"""The `Ops` contract on the processor: every op appends a command, `finish` runs them all on a few threads."""
from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda.host import elementwise
from cuda.host.attention import (
    ATTEND,
    MERGE_SPLITS,
    NO_WINDOW,
    SPLIT_KEYS,
    attention_scratch_bytes,
    positions_per_run,
    score_stride,
    split_bytes,
)
from cuda.host.commands import CommandList, Team
from cuda.host.compilation import Kernel
from cuda.host.cores import num_physical_cores
from cuda.host.kv_cache import (
    POISON,
    STORE_KV,
    HostKVCache,
    allocate_kv_cache,
    kv_block_bytes,
    store_kv_scratch_bytes,
)
from cuda.host.matmul import LINEAR, LINEAR_INT16, linear_scratch_bytes
from cuda.host.pack import PackedLinear, quantized_block_bytes
from cuda.host.packer import Packer
from cuda.host.recording import Recording, Runs, make_runs
from cuda.host.register_tile import MAX_ROWS
from cuda.host.simd import LANES
from cuda.host.simd_int16 import HAS_PAIRS
from cuda.host.workspace import Buffer, Workspace, address_of, allocate, new_buffer
from cuda.memory import available_host_bytes
from cuda.ops import BLOCK_SIZE, Batch, Forward, HostMath, Ints, KVDtype, KVGroupSpec
from cuda.start_up import StartUp
from weights.load import LayerWeights, ModelWeights
from weights.quant import Linear
from weights.spec import ModelSpec, RopeSpec

log = logging.getLogger("troupe.host")

Floats = NDArray[np.float32]

ROPE_ROWS = 4096                                # of a table made at a time: the angles are float64
STRIP_ROWS = 64                                 # rows times strips in one piece of work, where it may be divided
ITEMS_A_THREAD = 4                              # of attention; with fewer, splits are items
MAX_RECORDINGS = 64                             # each of about 100 KB; decoding needs one a number of sequences
_ACTIVATIONS = {"silu": elementwise.SILU, "gelu_tanh": elementwise.GELU_TANH}


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _RopeTable:
    memory: Any
    address: int
    half: int                                   # angles a position
    padded: int                                 # the same in whole vectors


class HostOps:
    """See `cuda.ops.Ops`. Results do not depend on the number of threads.

    All arithmetic is float32 where `math` is "exact". With "int16" a product with quantized weights first rounds its
    inputs to 16-bit integers, with a scale for 32 neighbours (16 where the weights' groups are as small), and sums
    products as integers; all else is float32.
    """

    name = "host"
    kv_dtypes: tuple[KVDtype, ...] = ("float32", "bf16", "int8")

    def __init__(self, num_threads: int | None = None, math: HostMath = "exact",
                 start_up: StartUp | None = None) -> None:
        """num_threads: by default the physical cores that this process may use. Raises: ValueError."""
        if math == "int16" and not HAS_PAIRS:
            raise ValueError("math int16: this processor has no AVX2, whose instructions it needs")
        self.math, self._start_up = math, start_up or StartUp()
        self.num_threads = num_physical_cores() if num_threads is None else num_threads
        if self.num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, not {num_threads}")
        self._team = Team(self.num_threads)
        self._commands = CommandList()                          # outstanding
        self._workspace = Workspace()
        self._logits: Buffer | None = None
        # Where arrays are, (address, bytes between rows) by `id`: weights, and what else this step was given, which is
        # kept alive with it.
        self._weight_places: dict[int, tuple[int, int]] = {}
        self._step_places: dict[int | tuple[int, int], tuple[int, int, Any]] = {}
        self._weights: list[Floats] = []
        self._rope_tables: dict[int, tuple[RopeSpec, _RopeTable]] = {}      # by id of the spec
        self._recordings: dict[Any, Recording] = {}             # by shapes; the one used last is the last
        self._recording: Recording | None = None                # while the commands go there
        self._runs: Runs | None = None                          # of this step, for attention
        self._num_keys = 0                                      # of its longest sequence

    # ---- Start

    default_kv_share = 0.25                 # the rest belongs to whoever else uses the machine

    def available_bytes(self) -> int:
        return available_host_bytes()

    def tier_memory_bytes(self) -> int | None:
        return None

    def prepared_bytes(self, spec: ModelSpec, weights: ModelWeights, max_tokens: int, max_position: int,
                       max_num_seqs: int) -> int:
        return weights.nbytes

    def prepare(self, spec: ModelSpec, weights: ModelWeights, max_tokens: int, max_position: int) -> ModelWeights:
        # The workspace grows to the largest step seen; only pages that a step touches take memory.
        self.spec, self.max_position = spec, max_position
        for layer in spec.layers:
            if layer.rope is not None:
                self._rope_table(layer.rope)

        begin_s, packer = time.perf_counter(), Packer()
        embed: Any = packer.shared(weights.embed)

        def linear(projection: Linear) -> Any:
            return packer.linear(projection)

        def vector(weight: Floats | None) -> Any:
            return None if weight is None else self._keep(weight)

        def block(layer: LayerWeights) -> LayerWeights:
            return LayerWeights(
                attn_norm=vector(layer.attn_norm), qkv=linear(layer.qkv), o=linear(layer.o),
                ffn_norm=vector(layer.ffn_norm), gate_up=linear(layer.gate_up), down=linear(layer.down),
                q_norm=vector(layer.q_norm), k_norm=vector(layer.k_norm),
                attn_post_norm=vector(layer.attn_post_norm), ffn_post_norm=vector(layer.ffn_post_norm),
                sinks=vector(layer.sinks))

        layers = []
        for number, stored in enumerate(weights.layers):
            self._start_up.step(f"packing weights: layer {number + 1} of {len(weights.layers)}")
            layers.append(block(stored))
            packer.run(self._team)
        prepared = ModelWeights(embed, tuple(layers), vector(weights.norm), linear(weights.head))
        packer.run(self._team)
        self._start_up.stage("weights", begin_s)
        self._compile(_kernels(spec, prepared, self.math))
        widest = max(spec.hidden_size, spec.ffn_size, spec.num_heads * spec.head_dim)
        self._team.want_scratch(max(linear_scratch_bytes(widest), store_kv_scratch_bytes(spec.head_dim)))
        return prepared

    def _compile(self, kernels: Sequence[Kernel]) -> None:
        """Now, not in the first step."""
        begin_s, addresses = time.perf_counter(), {}
        for number, kernel in enumerate(kernels):
            self._start_up.step(f"compiling for this processor, once: {kernel.name}, {number + 1} of {len(kernels)}")
            addresses[kernel.name] = kernel.address
        log.debug("kernels at %s", addresses)
        log.info("%d kernels ready in %.1f s; %d threads", len(kernels), time.perf_counter() - begin_s,
                 self.num_threads)

    def _keep(self, weight: Floats) -> Floats:
        """A copy that stays, its place known."""
        copy = np.array(weight, np.float32, order="C")
        self._weights.append(copy)
        self._weight_places[id(copy)] = address_of(copy), 0
        return copy

    def _rope_table(self, rope: RopeSpec) -> _RopeTable:
        known = self._rope_tables.get(id(rope))
        if known is not None:
            return known[1]
        equal = [table for spec, table in self._rope_tables.values() if spec == rope]
        table = equal[0] if equal else self._new_rope_table(rope)
        self._rope_tables[id(rope)] = rope, table
        return table

    def _new_rope_table(self, rope: RopeSpec) -> _RopeTable:
        half = len(rope.inv_freq)
        padded = -(-half // LANES) * LANES
        memory = allocate(self.max_position * 2 * padded * 4)
        rows = np.frombuffer(memory, np.float32).reshape(self.max_position, 2, padded)
        inv_freq = np.asarray(rope.inv_freq, np.float64)
        for first in range(0, self.max_position, ROPE_ROWS):
            part = rows[first:first + ROPE_ROWS]
            angles = (first + np.arange(len(part)))[:, None] * inv_freq
            part[:, 0, :half] = np.cos(angles) * rope.attention_factor
            part[:, 1, :half] = np.sin(angles) * rope.attention_factor
        return _RopeTable(memory, address_of(memory), half, padded)

    def kv_block_bytes(self, group: KVGroupSpec, dtype: KVDtype) -> int:
        return kv_block_bytes(group, dtype)

    def allocate_kv(self, group: KVGroupSpec, num_blocks: int, dtype: KVDtype) -> HostKVCache:
        assert group.k_dim == group.v_dim == self.spec.head_dim, "k and v are rows of one projection here"
        cache = allocate_kv_cache(group, num_blocks, dtype)
        self._compile([STORE_KV, ATTEND[cache.kind], MERGE_SPLITS])
        self._team.want_scratch(attention_scratch_bytes(self.spec.head_dim))
        return cache

    def allocate_tier(self, group: KVGroupSpec, num_blocks: int, dtype: KVDtype) -> HostKVCache:
        return allocate_kv_cache(group, num_blocks, dtype)

    def close(self) -> None:
        self._team.close()

    @property
    def trace(self) -> list[tuple[str, float]] | None:
        """Set to a list: seconds of every kernel that runs from now on go there; None: off."""
        return self._team.trace

    @trace.setter
    def trace(self, times: list[tuple[str, float]] | None) -> None:
        self._team.trace = times

    # ---- Where things are

    def _place(self, x: Floats) -> tuple[int, int]:
        """Address and bytes between rows."""
        known = self._workspace.places.get(id(x)) or self._weight_places.get(id(x))
        if known is not None:
            return known
        assert self._recording is None, "a recorded step works on weights and on what ops returned"
        other = self._step_places.get(id(x))
        if other is None:
            assert not x.size or (x.dtype.str, x.strides[-1]) == ("<f4", 4), "rows of float32"
            other = self._step_places[id(x)] = x.__array_interface__["data"][0], x.strides[0], x
        return other[0], other[1]

    def _ints(self, numbers: Ints, limit: int, what: str) -> tuple[int, int]:
        """Address and bytes between rows of an array of int32, each checked to be from 0 to `limit` - 1."""
        key = id(numbers), limit
        known = self._step_places.get(key)
        if known is None:
            # NOTE: native code reads and writes at these numbers without looking.
            assert not numbers.size or 0 <= numbers.min() <= numbers.max() < limit, f"{what} outside 0..{limit - 1}"
            array = np.ascontiguousarray(numbers, np.int32)
            if self._recording is not None:
                assert self._recording.holds(array), f"{what}: not an array of the batch"
                self._recording.check(numbers, limit, what)
            address = array.__array_interface__["data"][0]
            known = self._step_places[key] = address, array.strides[0], (numbers, array)
        return known[0], known[1]

    def _new(self, rows: int, columns: int) -> tuple[Floats, int, int]:
        """An array of the workspace [rows, columns] and its place."""
        buffer = self._workspace.new(rows, columns)
        return buffer.view, buffer.address, buffer.stride

    def _positions_per_run(self) -> int:
        return positions_per_run(self.spec.num_heads // self.spec.num_kv_heads)

    def _share(self, items: int) -> int:
        """Items of a row each that a thread takes at a time."""
        return max(1, items // (8 * self.num_threads))

    # ---- A step

    def begin(self, batch: Batch) -> None:
        self._batch = batch
        self._step_places.clear()
        self._commands.clear()
        self._runs = None
        if self._workspace.replaced:            # commands have addresses of what goes now
            self._recordings.clear()
            self._workspace.replaced.clear()

    def finish(self) -> None:
        self._team.run(self._commands)
        self._commands.clear()

    def run(self, batch: Batch, rows: Ints, forward: Forward) -> Floats:
        self.begin(batch)
        runs = make_runs(batch, self._positions_per_run())
        num_blocks = min(table.shape[1] for table in batch.block_tables)
        self._num_keys = int(batch.positions.max(initial=-1)) + 1
        assert self._num_keys <= num_blocks * BLOCK_SIZE, f"{self._num_keys} keys in {num_blocks} blocks"
        num_splits = -(-self._num_keys // SPLIT_KEYS)
        key = forward, batch.num_tokens, len(batch.seq_lens), len(rows), len(runs), num_splits
        recording = self._recordings.pop(key, None)
        if recording is None:
            recording = self._record(Recording(batch, rows, runs, num_splits * SPLIT_KEYS // BLOCK_SIZE), forward)
        else:
            recording.fill(batch, rows, runs)
        self._team.run(recording.commands)
        if not self._workspace.replaced:
            self._recordings[key] = recording   # the one used last is the last
            if len(self._recordings) > MAX_RECORDINGS:
                del self._recordings[next(iter(self._recordings))]
        buffer, (num_rows, columns) = recording.output
        return self._workspace.reshape(buffer, num_rows, columns).view

    def _record(self, recording: Recording, forward: Forward) -> Recording:
        step, self._commands = self._commands, recording.commands
        self._batch, self._runs, self._recording = recording.batch, recording.runs, recording
        try:
            hidden = forward(recording.batch, recording.rows)
        finally:
            self._commands, self._recording = step, None
            self._step_places.clear()
        recording.output = self._workspace.buffer_of(hidden), hidden.shape
        return recording

    def embed(self, token_ids: Ints, table: Any, scale: float) -> Floats:
        num_tokens, columns = len(token_ids), table.shape[1]
        ids, _ = self._ints(token_ids, table.shape[0], "token ids")
        y, address, stride = self._new(num_tokens, columns)
        self._commands.add(elementwise.EMBED, num_tokens, self._share(num_tokens), ids, table.kind,
                           table.group, table.address, table.strip_bytes, columns, address, stride, scale)
        return y

    def rms_norm(self, x: Floats, weight: Floats, eps: float, add: Floats | None = None) -> Floats:
        rows, columns = x.shape
        x_address, x_stride = self._place(x)
        add_address, add_stride = (0, 0) if add is None else self._place(add)
        y, address, stride = self._new(rows, columns)
        self._commands.add(elementwise.RMS_NORM, rows, self._share(rows), x_address, x_stride, add_address,
                           add_stride, address, stride, self._place(weight)[0], columns, eps)
        return y

    def linear(self, x: Floats, weight: Any) -> Floats:
        y, address, stride = self._new(x.shape[0], weight.out_features)
        self._multiply(x, weight, address, stride)
        return y

    def _multiply(self, x: Floats, weight: PackedLinear, y: int, y_stride: int) -> None:
        rows, in_features = x.shape
        assert in_features == weight.in_features, f"{in_features} inputs for a weight of {weight.in_features}"
        block = weight.block if self.math == "int16" else 0
        quantized = self._quantize(x, block) if block else x
        for part, bias in zip(weight.parts, weight.bias_addresses, strict=True):
            strips = part.num_strips if rows else 0
            share = _strips_at_a_time(part.num_strips, rows, self.num_threads)
            arguments = rows, in_features, part.kind, part.group, part.address, part.strip_bytes, bias
            if block and part.group:
                self._commands.add(LINEAR_INT16, strips, share, *self._place(quantized), y, y_stride, *arguments, block)
            else:
                self._commands.add(LINEAR, strips, share, *self._place(x), y, y_stride, *arguments)
            y += 4 * part.shape[0]

    def _quantize(self, x: Floats, block: int) -> Floats:
        """Rows as blocks of `block` 16-bit codes with their scales, in an array of as many bytes."""
        rows, columns = x.shape
        quantized, address, stride = self._new(rows, columns // block * quantized_block_bytes(block) // 4)
        self._commands.add(elementwise.QUANTIZE, rows, self._share(rows), *self._place(x), address, stride, columns,
                           block)
        return quantized

    def rope(self, qkv: Floats, positions: Ints, rope: RopeSpec | None,
             q_norm: Floats | None, k_norm: Floats | None, eps: float) -> None:
        if rope is None and q_norm is None and k_norm is None:
            return
        spec, rows = self.spec, len(qkv)
        address, stride = self._place(qkv)
        table, half, padded = 0, 0, 0
        if rope is not None:
            found = self._rope_table(rope)
            table, half, padded = found.address, found.half, found.padded
        self._commands.add(elementwise.ROPE, rows, self._share(rows), address, stride,
                           self._ints(positions, self.max_position, "positions")[0], table, half, padded,
                           0 if q_norm is None else self._place(q_norm)[0],
                           0 if k_norm is None else self._place(k_norm)[0],
                           spec.num_heads, spec.num_kv_heads, spec.head_dim, eps)

    def store_kv(self, qkv: Floats, cache: HostKVCache, layer: int, slot_mapping: Ints) -> None:
        spec, rows = self.spec, len(qkv)
        address, stride = self._place(qkv)
        slots, _ = self._ints(slot_mapping, cache.num_blocks * BLOCK_SIZE, "slots")
        self._commands.add(STORE_KV, rows, self._share(rows), address, stride, slots, cache.key_addresses[layer],
                           cache.value_addresses[layer], cache.kind, spec.num_heads, spec.num_kv_heads, spec.head_dim,
                           cache.keys.shape[-1], cache.values.shape[-1])

    def attend(self, qkv: Floats, cache: HostKVCache, layer: int, block_table: Ints, scale: float,
               window: int | None, softcap: float | None, sinks: Floats | None) -> Floats:
        spec, batch = self.spec, self._batch
        assert sinks is None or sinks.shape == (spec.num_heads,), f"sinks of shape {sinks.shape}, one a head is needed"
        group_size = spec.num_heads // spec.num_kv_heads
        max_keys = block_table.shape[1] * BLOCK_SIZE
        if self._runs is None:
            self._runs = make_runs(batch, self._positions_per_run())
            self._num_keys = int(batch.positions.max(initial=-1)) + 1
        assert self._num_keys <= max_keys, f"{self._num_keys} keys in {block_table.shape[1]} blocks"
        window = window or NO_WINDOW
        tables, table_stride = self._ints(block_table, cache.num_blocks, "block ids")
        address, stride = self._place(qkv)
        sinks_address = 0 if sinks is None else self._place(sinks)[0]
        y, y_address, y_stride = self._new(len(qkv), spec.num_heads * spec.head_dim)
        runs, items = self._runs, len(self._runs) * spec.num_kv_heads * -(-group_size // MAX_ROWS)
        # Of the window's keys and the run's own positions, wherever the splits lie.
        max_splits = min(-(-max_keys // SPLIT_KEYS), (window + positions_per_run(group_size)) // SPLIT_KEYS + 2)
        if items >= ITEMS_A_THREAD * self.num_threads or self.num_threads == 1:
            max_splits = 1                  # there is enough to do: an item folds its own splits
        partials = 0
        if max_splits > 1:
            _, partials, _ = self._new(items * max_splits, split_bytes(spec.head_dim) // 4)
        self._commands.add(ATTEND[cache.kind], items * max_splits, 1, address, stride, y_address, y_stride,
                           cache.key_addresses[layer], cache.value_addresses[layer], tables, table_stride, runs.address,
                           spec.num_kv_heads, group_size, spec.head_dim, window, score_stride(), cache.keys.shape[-1],
                           cache.values.shape[-1], partials, max_splits, sinks_address, scale, softcap or 0.0)
        if partials:
            self._commands.add(MERGE_SPLITS, items, self._share(items), y_address, y_stride, runs.address,
                               spec.num_kv_heads, group_size, spec.head_dim, window, partials, max_splits,
                               sinks_address)
        return y

    def gated(self, gate_up: Floats, activation: str) -> Floats:
        rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
        address, stride = self._place(gate_up)
        y, y_address, y_stride = self._new(rows, columns)
        items = rows * -(-columns // elementwise.COLUMNS)
        self._commands.add(elementwise.GATED, items, self._share(items), address, stride, y_address, y_stride,
                           columns, _ACTIVATIONS[activation])
        return y

    def take_rows(self, x: Floats, rows: Ints) -> Floats:
        address, stride = self._place(x)
        numbers, _ = self._ints(rows, len(x), "rows")
        y, y_address, y_stride = self._new(len(rows), x.shape[1])
        self._commands.add(elementwise.TAKE_ROWS, len(rows), self._share(len(rows)), address, stride, numbers,
                           y_address, y_stride, x.shape[1])
        return y

    def logits(self, x: Floats, head: Any, softcap: float | None) -> Floats:
        rows, columns = len(x), head.out_features
        buffer = self._logits
        if buffer is None or rows * buffer.stride > len(buffer.memory) or buffer.view.shape[1] != columns:
            buffer = self._logits = new_buffer(rows, columns)
        buffer.resize(rows, columns)
        self._multiply(x, head, buffer.address, buffer.stride)
        if softcap is not None:
            items = rows * -(-columns // elementwise.COLUMNS)
            self._commands.add(elementwise.SOFTCAP, items, self._share(items), buffer.address, buffer.stride,
                               columns, softcap)
        return buffer.view

    def all_reduce(self, x: Floats) -> Floats:
        return x

    def copy_blocks(self, source: HostKVCache, destination: HostKVCache, pairs: Ints) -> None:
        # At once, and in order: a destination may be a later pair's source.
        assert not self._commands, "blocks are copied before a step's operations"
        assert source.kind == destination.kind, "bytes are copied, not numbers"
        for old, new in pairs:
            destination.keys[:, new] = source.keys[:, old]
            destination.values[:, new] = source.values[:, old]

    def poison_blocks(self, cache: HostKVCache, block_ids: Ints) -> None:
        assert not self._commands, "blocks are poisoned before a step's operations"
        cache.keys[:, block_ids] = POISON
        cache.values[:, block_ids] = POISON


def _kernels(spec: ModelSpec, prepared: Any, math: HostMath) -> list[Kernel]:
    """Those that the model's steps use, but for the KV cache's."""
    kernels = [elementwise.EMBED, elementwise.RMS_NORM, elementwise.ROPE, elementwise.GATED, elementwise.TAKE_ROWS]
    if spec.final_softcap is not None:
        kernels.append(elementwise.SOFTCAP)
    linears = [prepared.head]
    for layer in prepared.layers:
        linears += [layer.qkv, layer.o, layer.gate_up, layer.down]
    is_rounded = {math == "int16" and part.group > 0 for linear in linears for part in linear.parts}
    if False in is_rounded:
        kernels.append(LINEAR)
    if True in is_rounded:
        kernels += [elementwise.QUANTIZE, LINEAR_INT16]
    return kernels


@cache
def _strips_at_a_time(num_strips: int, rows: int, num_threads: int) -> int:
    """Strips that a thread takes together: as many as leave the threads about equal shares, in three turns or more.

    Neighbours are read as one run of memory, which for few rows decides; for many rows a strip is work enough.
    """
    each = -(-num_strips // num_threads)
    for share in range(min(each // 3, STRIP_ROWS // max(rows, 1)), 1, -1):
        if -(-num_strips // (share * num_threads)) * share <= each + each // 32:
            return share
    return 1
