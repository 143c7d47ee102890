"""How fast the host back end's operations are, beside what this machine can do at most.

  python -m tools.bench_kernels --model smollm2 --rows 1,8,32,512

First the limits: memory read by all threads, and float32 products of large matrices by NumPy's BLAS. Then every
projection of the model for each number of rows, attention over the context, and the small operations; at last whole
steps, with the operations' shares of them and the roofline: the sum over operations of the longer of bytes at the
memory's limit and flops at the products'. Figures are medians of --repeats runs.
"""
from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from actors.system import EngineConfig, make_ops
from cuda.kv_cache import blocks_for, kv_groups
from cuda.model import Transformer
from cuda.ops import BLOCK_SIZE, Batch
from tools.engine_args import DEFAULT_MODEL
from tools.json_report import check_report_path, write_report
from weights.hub import resolve
from weights.load import open_model
from weights.quant import Dense, Linear, Weight

READ_BYTES = 256 << 20                      # of each thread: far more than caches hold
PRODUCT_SIZE = 2048
LIMIT_TRIES = 5                             # the best of them
SETTLE_S = 0.3                              # BLAS threads spin for a while after their work


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine can do at most, measured."""
    read_gb_per_s: float
    gflops: float

    def floor_s(self, num_bytes: float, flops: float) -> float:
        return max(num_bytes / (self.read_gb_per_s * 1e9), flops / (self.gflops * 1e9))


@dataclass(frozen=True, slots=True)
class Figure:
    """One measurement."""
    operation: str
    shape: str
    seconds: float
    num_bytes: float                        # that must be read, each once
    flops: float

    def row(self, limits: Limits) -> dict[str, Any]:
        return {"operation": self.operation, "shape": self.shape, "us": self.seconds * 1e6,
                "gb_per_s": self.num_bytes / self.seconds / 1e9, "gflops": self.flops / self.seconds / 1e9,
                "share_of_limit": limits.floor_s(self.num_bytes, self.flops) / self.seconds}


class Bench:
    """A model on the host back end, and a KV cache for `num_seqs` sequences of `context` tokens."""

    def __init__(self, config: EngineConfig, num_seqs: int, context: int, max_rows: int, repeats: int) -> None:
        model = open_model(resolve(config.model, lambda line: print(line, file=sys.stderr)).path)
        self.spec, self.repeats = model.spec, repeats
        self.context = min(context, model.spec.max_position - 1)
        self.weights = model.weights()
        self.ops: Any = make_ops("cpu", config)
        self.groups = kv_groups(self.spec)
        self.blocks_per_seq = blocks_for(self.context + 1)
        self.kv_dtype = self.ops.kv_dtypes[0] if config.kv_dtype == "auto" else config.kv_dtype
        self.prepared = self.ops.prepare(self.spec, self.weights, max(max_rows, num_seqs), self.spec.max_position)
        self.caches = [self.ops.allocate_kv(group, max(num_seqs * self.blocks_per_seq, blocks_for(max_rows)),
                                            self.kv_dtype) for group in self.groups]
        self.model = Transformer(self.spec, self.prepared, self.ops, self.groups)

    def close(self) -> None:
        self.ops.close()

    def batch(self, num_seqs: int, start: int, length: int) -> Batch:
        """`num_seqs` sequences that compute `length` tokens from position `start` on."""
        num_rows, width = num_seqs * length, blocks_for(start + length)
        positions = np.tile(np.arange(start, start + length, dtype=np.int32), num_seqs)
        table = np.arange(num_seqs * width, dtype=np.int32).reshape(num_seqs, width)
        block_ids = table[np.repeat(np.arange(num_seqs), length), positions // BLOCK_SIZE]
        slots = block_ids * BLOCK_SIZE + positions % BLOCK_SIZE
        tokens = np.random.default_rng(0).integers(0, self.spec.vocab_size, num_rows).astype(np.int32)
        groups = len(self.groups)
        return Batch(tokens, positions, np.arange(0, num_rows + 1, length, dtype=np.int32),
                     np.full(num_seqs, start + length, np.int32), (table,) * groups, (slots.astype(np.int32),) * groups)

    def time(self, batch: Batch, work: Callable[[], Any], before: Callable[[], Any] = lambda: None) -> float:
        """Median seconds of the commands that `work` adds; `before` adds what it needs."""
        seconds = []
        for _ in range(self.repeats + 1):
            self.ops.begin(batch)
            before()
            self.ops.finish()
            begin_s = time.perf_counter()
            work()
            self.ops.finish()
            seconds.append(time.perf_counter() - begin_s)
        return statistics.median(seconds[1:])

    def projections(self) -> list[tuple[str, Linear, list[Any]]]:
        """(name, as the first layer stores it, as all layers have it packed), and the head."""
        layer, packed = self.weights.layers[0], self.prepared.layers
        found = [(name, getattr(layer, name), [getattr(block, name) for block in packed])
                 for name in ("qkv", "o", "gate_up", "down")]
        return [*found, ("head", self.weights.head, [self.prepared.head])]

    def linear(self, name: str, stored: Linear, packed: Sequence[Any], rows: int) -> Figure:
        """NOTE: of all layers in turn, so that weights come from memory as in a step, and not from a cache."""
        x = np.random.default_rng(0).standard_normal((rows, stored.in_features), np.float32)

        def work() -> None:
            for weight in packed:
                if name == "head":
                    self.ops.logits(x, weight, None)
                else:
                    self.ops.linear(x, weight)

        seconds = self.time(self.batch(1, 0, 1), work) / len(packed)
        kinds = "+".join(sorted({_kind(part) for part in stored.parts}))
        shape = f"{rows} x {stored.out_features} x {stored.in_features} {kinds}"
        return Figure(name, shape, seconds, sum(part.nbytes for part in stored.parts),
                      2.0 * rows * stored.out_features * stored.in_features)

    def attention(self, num_seqs: int, context: int, length: int) -> Figure:
        """Of all layers like the first in turn, so that keys come from memory as in a step, and not from a cache."""
        spec, layer = self.spec, self.spec.layers[0]
        batch = self.batch(num_seqs, context - length, length)
        group = next(index for index, group in enumerate(self.groups) if 0 in group.layers)
        width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        qkv = np.random.default_rng(0).standard_normal((num_seqs * length, width), np.float32)
        num_layers = len(self.groups[group].layers)

        def work() -> None:
            for index in range(num_layers):
                self.ops.attend(qkv, self.caches[group], index, batch.block_tables[group], spec.attention_scale,
                                layer.window, spec.attention_softcap, self.prepared.layers[0].sinks)

        seconds = self.time(batch, work) / num_layers
        keys = context if layer.window is None else min(context, layer.window + length)
        block_bytes = self.ops.kv_block_bytes(self.groups[group], self.kv_dtype) / num_layers
        return Figure("attend", f"{num_seqs} sequences, {length} of {context} tokens, {self.kv_dtype}", seconds,
                      num_seqs * keys * block_bytes / BLOCK_SIZE,
                      4.0 * num_seqs * length * (keys - (length - 1) / 2) * spec.num_heads * spec.head_dim)

    def small(self, rows: int) -> list[Figure]:
        """What moves rows and computes little."""
        spec, random = self.spec, np.random.default_rng(0)
        layer, batch = self.prepared.layers[0], self.batch(1, 0, rows)
        x = random.standard_normal((rows, spec.hidden_size), np.float32)
        qkv = random.standard_normal((rows, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim), np.float32)
        both = random.standard_normal((rows, 2 * spec.ffn_size), np.float32)
        works = {
            "embed": (lambda: self.ops.embed(batch.token_ids, self.prepared.embed, 1.0), x.nbytes),
            "rms_norm": (lambda: self.ops.rms_norm(x, layer.attn_norm, spec.norm_eps), 2 * x.nbytes),
            "rope": (lambda: self.ops.rope(qkv, batch.positions, spec.layers[0].rope, layer.q_norm, layer.k_norm,
                                           spec.norm_eps), 2 * qkv.nbytes),
            "store_kv": (lambda: self.ops.store_kv(qkv, self.caches[0], 0, batch.slot_mapping[0]), qkv.nbytes),
            "gated": (lambda: self.ops.gated(both, spec.activation), both.nbytes * 3 // 2)}
        return [Figure(name, f"{rows} rows", self.time(batch, work), num_bytes, 0.0)
                for name, (work, num_bytes) in works.items()]

    def step(self, num_seqs: int, start: int, length: int) -> tuple[float, Counter[str]]:
        """Median seconds of a whole step with one row of logits a sequence, and the seconds of each kernel."""
        batch = self.batch(num_seqs, start, length)
        rows = batch.query_start_loc[1:] - 1

        def work() -> None:
            hidden = self.model.forward(batch, self.caches, rows.astype(np.int32))
            self.model.logits(hidden)

        seconds = self.time(batch, work)
        self.ops.begin(batch)
        self.ops.trace = []
        work()
        self.ops.finish()
        shares: Counter[str] = Counter()
        for name, kernel_s in self.ops.trace:
            shares[name] += kernel_s
        self.ops.trace = None
        return seconds, shares


def measure_limits(num_threads: int) -> Limits:
    """NOTE: the products first: what follows waits until BLAS's threads are quiet."""
    a = np.random.default_rng(0).standard_normal((PRODUCT_SIZE, PRODUCT_SIZE), np.float32)
    gflops = max(2.0 * PRODUCT_SIZE**3 / _seconds(lambda: a @ a) / 1e9 for _ in range(LIMIT_TRIES))
    time.sleep(SETTLE_S)
    arrays = [np.ones(READ_BYTES // 8) for _ in range(num_threads)]      # float64: the widest steps that NumPy takes
    with ThreadPoolExecutor(num_threads) as pool:
        read = max(num_threads * READ_BYTES / _seconds(lambda: list(pool.map(np.max, arrays))) / 1e9
                   for _ in range(LIMIT_TRIES))
    return Limits(read, gflops)


def _seconds(work: Callable[[], Any]) -> float:
    begin_s = time.perf_counter()
    work()
    return time.perf_counter() - begin_s


def _kind(part: Weight) -> str:
    if isinstance(part, Dense):
        return "bf16" if part.is_bf16 else str(part.data.dtype)
    return f"{part.bits}bit/{part.group}"


def _steps(bench: Bench, limits: Limits, rows: Sequence[int], prompts: Sequence[int]) -> list[dict[str, Any]]:
    """Whole steps: decoding `rows` sequences at the context, and prompts from nothing."""
    found = []
    shapes = [(f"decode {n} at {bench.context} tokens", n, bench.context, 1) for n in rows]
    shapes += [(f"prompt of {n}", 1, 0, n) for n in prompts]
    for name, num_seqs, start, length in shapes:
        seconds, shares = bench.step(num_seqs, start, length)
        num_rows = num_seqs * length
        floor_s = 0.0
        for operation, stored, packed in bench.projections():
            head_rows = num_seqs if operation == "head" else num_rows
            floor_s += len(packed) * limits.floor_s(sum(part.nbytes for part in stored.parts),
                                              2.0 * head_rows * stored.out_features * stored.in_features)
        for index, group in enumerate(bench.groups):
            keys = start + length
            kept = keys if group.window is None else min(keys, group.window + length)
            block_bytes = bench.ops.kv_block_bytes(bench.groups[index], bench.kv_dtype)
            flops = 4.0 * num_rows * (kept - (length - 1) / 2) * bench.spec.num_heads * bench.spec.head_dim
            floor_s += limits.floor_s(num_seqs * kept * block_bytes / BLOCK_SIZE, flops * len(group.layers))
        total = sum(shares.values())
        found.append({"step": name, "ms": seconds * 1e3, "floor_ms": floor_s * 1e3, "share_of_limit": floor_s / seconds,
                      "tokens_per_s": num_rows / seconds,
                      "shares": {kernel: kernel_s / total for kernel, kernel_s in shares.most_common()}})
    return found


def run(arguments: Sequence[str]) -> int:
    args = _arguments(arguments)
    try:
        check_report_path(args.json)
        config = EngineConfig(model=args.model, device="cpu", threads=args.threads, kv_dtype=args.kv_dtype,
                              host_math=args.host_math)
        rows = [int(text) for text in args.rows.split(",")]
        bench = Bench(config, max(min(n, args.max_seqs) for n in rows), args.context, max(rows), args.repeats)
    except ValueError as error:
        print(f"bench_kernels: {error}", file=sys.stderr)
        return 2
    try:
        limits = measure_limits(bench.ops.num_threads)
        print(f"{args.model}, {bench.ops.num_threads} threads, {bench.ops.math} arithmetic; limits: "
              f"memory {limits.read_gb_per_s:.1f} GB/s, products {limits.gflops:.0f} GFLOP/s")
        print(f"\n{'operation':10} {'shape':44} {'us':>10} {'GB/s':>7} {'GFLOP/s':>8} {'of limit':>8}")
        figures = []
        for n in rows:
            for name, stored, packed in bench.projections():
                if name != "head" or n <= args.max_seqs:
                    figures.append(_show(bench.linear(name, stored, packed, n), limits))
        for n in sorted({min(n, args.max_seqs) for n in rows}):
            figures.append(_show(bench.attention(n, bench.context, 1), limits))
        figures.append(_show(bench.attention(1, max(rows), max(rows)), limits))
        for n in (min(rows), max(rows)):
            figures += [_show(figure, limits) for figure in bench.small(n)]
        print(f"\n{'step':34} {'ms':>9} {'floor ms':>9} {'of limit':>8} {'tokens/s':>9}  shares")
        decode = [n for n in rows if n <= args.max_seqs]
        steps = _steps(bench, limits, decode, [n for n in rows if n > args.max_seqs])
        for step in steps:
            shares = ", ".join(f"{name} {share:.0%}" for name, share in list(step["shares"].items())[:5])
            print(f"{step['step']:34} {step['ms']:9.2f} {step['floor_ms']:9.2f} {step['share_of_limit']:8.0%} "
                  f"{step['tokens_per_s']:9.0f}  {shares}")
    finally:
        bench.close()
    if args.json is not None:
        write_report(args.json, "bench_kernels", arguments, {
            "model_id": args.model, "threads": bench.ops.num_threads, "host_math": bench.ops.math,
            "read_gb_per_s": limits.read_gb_per_s, "gflops": limits.gflops, "operations": figures, "steps": steps})
    return 0


def _show(figure: Figure, limits: Limits) -> dict[str, Any]:
    row = figure.row(limits)
    print(f"{row['operation']:10} {row['shape']:44} {row['us']:10.1f} {row['gb_per_s']:7.1f} {row['gflops']:8.1f} "
          f"{row['share_of_limit']:8.0%}", flush=True)
    return row


def _arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("bench_kernels", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help=f"as of the other tools (default: {DEFAULT_MODEL})")
    parser.add_argument("--threads", type=int, metavar="N", help="(default: the physical cores)")
    parser.add_argument("--host-math", choices=("auto", "exact", "int16"), default="auto", help="(default: auto)")
    parser.add_argument("--kv-dtype", choices=("auto", "float32", "bf16", "int8"), default="auto",
                        help="(default: auto)")
    parser.add_argument("--rows", default="1,8,32,512", metavar="N,N,…",
                        help="rows of a step; those above --max-seqs are prompts (default: 1,8,32,512)")
    parser.add_argument("--max-seqs", type=int, default=64, metavar="N", help="(default: 64)")
    parser.add_argument("--context", type=int, default=512, metavar="N",
                        help="tokens that decoding sequences have behind them (default: 512)")
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="(default: 7)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_args(arguments)
    for name, value in (("--rows", args.rows), *((f"--{n}", str(getattr(args, n.replace('-', '_'))))
                                                  for n in ("max-seqs", "context", "repeats"))):
        if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in value.split(",")):
            parser.error(f"argument {name}: must be positive, not {value!r}")
    return args


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
