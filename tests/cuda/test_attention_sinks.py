"""Attention sinks: every back end against a softmax in float64, and a row's bits whatever is around it."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cuda.host.attention import SPLIT_KEYS
from cuda.host.ops import HostOps
from cuda.kernels import decode_attention, prefill_attention
from cuda.kernels.ops import DeviceBatch, KernelOps
from cuda.kernels.types import BF16
from cuda.ops import KVDtype, Ops
from cuda.reference import ReferenceOps
from tests.cuda.host_support import Floats, assert_same_bits, host_ops, make_batch
from tests.cuda.test_device_runner import GAPS, assert_same_greedy_tokens, runner
from tests.cuda.test_golden_models import (
    TOLERANCE,
    Piece,
    blocks_in_order,
    largest_error,
    paged_model,
    sequence,
    tiny_model,
)
from tests.cuda.test_host_attention import LENGTHS, Attention, LongAttention, assert_all_same_bits
from tests.cuda_emulator.build import unavailable
from tests.cuda_emulator.launcher import EmulatorLauncher
from tests.weights.model_files import GOLDEN_MODELS, QType, golden_as_gguf, golden_config, read_folder, write_folder
from tests.weights.test_load import logits as float64_logits
from weights.load import open_model

LARGEST = float(np.finfo(np.float32).max)
Rows = list[Floats]

dtypes = pytest.mark.parametrize("dtype", HostOps.kv_dtypes)
emulated = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))


@contextmanager
def reference_ops() -> Iterator[Ops]:
    yield ReferenceOps()


BACKENDS: dict[str, Callable[[], Any]] = {"reference": reference_ops, "host, 1 thread": partial(host_ops, 1),
                                          "host, 3 threads": partial(host_ops, 3)}
backends = pytest.mark.parametrize("backend", BACKENDS)


def random_sinks(heads: int, seed: int = 0) -> Floats:
    """From next to nothing to all that there is."""
    return (np.random.default_rng(seed).standard_normal(heads) * 4).astype(np.float32)


def softmax_with_sinks(attention: Attention, start: int = 0) -> Rows:
    """What `attention.whole()` should be: float64, a matrix of scores a head with the sink as one more column, in rows
    from `start` on."""
    spec, results = attention.spec, []
    sinks = attention.sinks
    assert sinks is not None
    for qkv in attention.qkv:
        heads = qkv.astype(np.float64).reshape(len(qkv), -1, spec.head_dim)
        q, k, v = np.split(heads, [spec.num_heads, spec.num_heads + spec.num_kv_heads], axis=1)
        k, v = (np.repeat(part, spec.num_heads // spec.num_kv_heads, axis=1) for part in (k, v))
        scores = np.einsum("ihd,jhd->hij", q[start:], k) * spec.attention_scale
        if attention.softcap is not None:
            scores = attention.softcap * np.tanh(scores / attention.softcap)
        distance = np.arange(start, len(qkv))[:, None] - np.arange(len(qkv))
        scores = np.where((distance >= 0) & (distance < (attention.window or len(qkv))), scores, -np.inf)
        column = np.broadcast_to(sinks.astype(np.float64)[:, None, None], (*scores.shape[:2], 1))
        scores = np.concatenate([scores, column], axis=2)                                       # [H, T, T + 1]
        shares = np.exp(scores - scores.max(axis=2, keepdims=True))
        shares /= shares.sum(axis=2, keepdims=True)
        rows = np.einsum("hij,jhd->ihd", shares[..., :-1], v).reshape(len(qkv) - start, -1)
        results.append(rows.astype(np.float32))
    return results


def assert_close(results: Rows, expected: Rows, tolerance: float = 1e-4) -> None:
    for result, wanted in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, wanted, rtol=tolerance, atol=tolerance)


# ---- Numbers

@backends
def test_shares_by_hand(backend: str) -> None:
    """Queries of zeros: n keys of score 0 beside a sink of ln w share n / (n + w); the values are all 1."""
    weights = np.array([1, 3, 16, 0.25], np.float32)
    with BACKENDS[backend]() as ops:
        attention = Attention(ops, 4, 2, 16, sinks=np.log(weights))
        for qkv in attention.qkv:
            qkv[:, :4 * 16], qkv[:, 6 * 16:] = 0, 1
        for result in attention.whole():
            num_keys = np.arange(1, len(result) + 1, dtype=np.float32)[:, None]
            expected = np.repeat(num_keys / (num_keys + weights), 16, axis=1)
            np.testing.assert_allclose(result, expected, rtol=2e-6)


@backends
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "window", "softcap"), [
    (1, 1, 16, None, None), (9, 3, 64, None, None), (4, 2, 16, 12, None), (3, 1, 24, 1, None), (2, 1, 256, 17, None),
    (13, 1, 16, None, None), (5, 1, 40, 16, 5.0)])
def test_against_a_softmax_in_float64(backend: str, heads: int, kv_heads: int, head_dim: int, window: int | None,
                                      softcap: float | None) -> None:
    with BACKENDS[backend]() as ops:
        attention = Attention(ops, heads, kv_heads, head_dim, window, softcap, sinks=random_sinks(heads))
        assert_close(attention.whole(), softmax_with_sinks(attention))


@settings(max_examples=30, deadline=None)
@given(sinks=st.lists(st.floats(-120, 120, width=32), min_size=3, max_size=3), window=st.none() | st.integers(1, 40),
       size=st.floats(0, 40), piece=st.integers(0, len(LENGTHS) - 1))
def test_any_sinks_beside_scores_of_any_size(sinks: list[float], window: int | None, size: float, piece: int) -> None:
    with host_ops(1) as ops:
        attention = Attention(ops, 3, 1, 24, window, sinks=np.array(sinks, np.float32))
        attention.qkv = [qkv * np.float32([size] * 72 + [1] * 48) for qkv in attention.qkv]
        [result] = attention.run([(piece, 0, LENGTHS[piece])])
        # Scores of thousands are known to 1e-7 of their size, and so are their exponentials' exponents.
        assert_close([result], [softmax_with_sinks(attention)[piece]], 1e-4 + 2e-5 * size)


@dtypes
@pytest.mark.parametrize("window", [None, SPLIT_KEYS + 30, 40])
def test_long_contexts(dtype: KVDtype, window: int | None) -> None:
    """Sinks as large as what two splits of keys weigh together, so that to count one twice would show."""
    sinks = np.array([6.0, 8.0, -2.0, 7.0], np.float32)
    expected = LongAttention(ReferenceOps(), 4, 2, 16, window, dtype, sinks)
    piece = 0, 2 * SPLIT_KEYS + 40, expected.LENGTH
    expected.run([(0, 0, piece[1])])
    [wanted] = expected.run([piece])
    if dtype == "float32":
        assert_close([wanted], softmax_with_sinks(expected, piece[1]))
    for num_threads in (1, 3):
        with host_ops(num_threads) as ops:
            attention = LongAttention(ops, 4, 2, 16, window, dtype, sinks)
            attention.run([(0, 0, piece[1])])
            assert_close(attention.run([piece]), [wanted])


@backends
@pytest.mark.parametrize("sink", [-np.inf, -LARGEST, -1e4])
def test_a_sink_of_no_weight_leaves_the_bits_alone(backend: str, sink: float) -> None:
    with BACKENDS[backend]() as ops:
        expected = Attention(ops, 9, 3, 64, 17).whole()
        assert_all_same_bits(Attention(ops, 9, 3, 64, 17, sinks=np.full(9, sink, np.float32)).whole(), expected)


@backends
@pytest.mark.parametrize("sink", [1e4, 1e30, LARGEST])
def test_a_sink_of_all_weight_leaves_nothing(backend: str, sink: float) -> None:
    with BACKENDS[backend]() as ops:
        for result in Attention(ops, 9, 3, 64, 17, sinks=np.full(9, sink, np.float32)).whole():
            assert (result == 0).all()


@backends
def test_a_sink_is_its_own_heads_alone(backend: str) -> None:
    """Not even one that is not a number reaches another head, and all of its own rows show it."""
    sinks = random_sinks(9)
    with BACKENDS[backend]() as ops:
        expected = Attention(ops, 9, 3, 64, sinks=sinks).whole()
        for head, value in ((0, 50.0), (4, np.nan), (8, -np.inf)):
            changed = sinks.copy()
            changed[head] = value
            for result, before in zip(Attention(ops, 9, 3, 64, sinks=changed).whole(), expected, strict=True):
                own = np.arange(9 * 64) // 64 == head
                assert_same_bits(result[:, ~own], before[:, ~own])
                assert np.isnan(result[:, own]).all() if np.isnan(value) else np.isfinite(result[:, own]).all()


@dtypes
def test_what_is_not_a_number_is_not_hidden_by_a_sink(dtype: KVDtype) -> None:
    with host_ops() as ops:
        attention = LongAttention(ops, 2, 1, 16, dtype=dtype, sinks=np.array([-3, 40], np.float32))
        attention.qkv[0][300, 2 * 16:] = np.nan             # a key and a value of the second split
        [result] = attention.run([(0, 0, attention.LENGTH)])
        assert np.isfinite(result[:300]).all()
        assert np.isnan(result[300:]).all()


def test_sinks_of_other_shapes_are_refused() -> None:
    with host_ops() as ops, pytest.raises(AssertionError, match=r"sinks of shape \(3,\)"):
        Attention(ops, 4, 2, 16, sinks=random_sinks(3)).whole()


# ---- Bits

@dtypes
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "window"), [(9, 3, 64, None), (4, 2, 16, 12)])
def test_bits_for_any_chunks_company_and_threads(heads: int, kv_heads: int, head_dim: int, window: int | None,
                                                 dtype: KVDtype) -> None:
    sinks = random_sinks(heads)
    with host_ops(1) as ops:
        expected = Attention(ops, heads, kv_heads, head_dim, window, dtype=dtype, sinks=sinks).whole()
    for num_threads, step in ((1, 1), (2, 5), (3, 16)):
        with host_ops(num_threads) as ops:
            new = partial(Attention, ops, heads, kv_heads, head_dim, window, dtype=dtype, sinks=sinks)
            assert_all_same_bits(new().whole(), expected)
            attention = new()
            alone = [np.concatenate([attention.run([(s, start, min(length, start + step))])[0]
                                     for start in range(0, length, step)]) for s, length in enumerate(LENGTHS)]
            assert_all_same_bits(alone, expected)


@dtypes
@pytest.mark.parametrize("window", [None, SPLIT_KEYS + 30, 40])
def test_bits_for_any_number_of_splits(window: int | None, dtype: KVDtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """An item folds all splits of its rows, or each is an item and another command folds them."""
    sinks, length = random_sinks(4), LongAttention.LENGTH
    with host_ops(1) as ops:
        [expected] = LongAttention(ops, 4, 2, 16, window, dtype, sinks).run([(0, 0, length)])
    for items_a_thread in (0, 1 << 20):
        monkeypatch.setattr("cuda.host.ops.ITEMS_A_THREAD", items_a_thread)
        for num_threads in (1, 2, 5):
            with host_ops(num_threads) as ops:
                attention = LongAttention(ops, 4, 2, 16, window, dtype, sinks)
                assert_same_bits(attention.run([(0, 0, length)])[0], expected)
                for start, end in ((length - 1, length), (SPLIT_KEYS, SPLIT_KEYS + 1),
                                   (2 * SPLIT_KEYS - 2, 2 * SPLIT_KEYS + 3), (300, 337)):
                    assert_same_bits(attention.run([(0, start, end)])[0], expected[start:end])


# ---- CUDA's kernels

class DeviceAttention(Attention):
    """The same rows, bfloat16, by the kernels: row by row or in tiles."""

    def __init__(self, launcher: EmulatorLauncher, in_tiles: bool, heads: int, kv_heads: int, head_dim: int,
                 window: int | None, sinks: Floats | None, dtype: KVDtype = "bf16") -> None:
        super().__init__(KernelOps(launcher), heads, kv_heads, head_dim, window, dtype=dtype, sinks=sinks)
        self.launcher, self.in_tiles = launcher, in_tiles

    def run(self, pieces: Sequence[tuple[int, int, int]], tables: NDArray[np.int32] | None = None) -> Rows:
        upload, spec, ops = self.launcher.upload, self.spec, self.ops
        batch = make_batch([(start, end) for _, start, end in pieces], np.ascontiguousarray(self.tables))
        starts, group_size = batch.query_start_loc, spec.num_heads // spec.num_kv_heads
        runs = np.array([(starts[i], end - start, start, i) for i, (_, start, end) in enumerate(pieces)], np.int32)
        nothing = runs[:0]
        decode = decode_attention.plan(nothing if self.in_tiles else runs, group_size, self.window)
        prefill = prefill_attention.plan(runs if self.in_tiles else nothing, group_size)
        table, slots = upload(batch.block_tables[0]), upload(batch.slot_mapping[0])
        qkv = upload(np.concatenate([self.qkv[s][start:end] for s, start, end in pieces]).astype(BF16))
        ops.begin(DeviceBatch(upload(batch.token_ids), upload(batch.positions), (table,), (slots,),
                              ((upload(decode),) if len(decode) else (),), (upload(prefill),)))
        ops.rope(qkv, upload(batch.positions), None, None, None, 1e-6)
        ops.store_kv(qkv, self.cache, 1, slots)
        sinks = None if self.sinks is None else upload(self.sinks)
        out = ops.attend(qkv, self.cache, 1, table, spec.attention_scale, self.window, None, sinks)
        rows = self.launcher.download(out).astype(np.float32)
        return np.split(rows, starts[1:-1])


@pytest.fixture(scope="module")
def launcher() -> EmulatorLauncher:
    return EmulatorLauncher(order=3)


@emulated
@pytest.mark.parametrize("in_tiles", [False, True])
@pytest.mark.parametrize(("kv_heads", "window", "dtype"), [(2, None, "bf16"), (1, 12, "bf16"), (2, 40, "int8")])
def test_kernels_are_the_reference(launcher: EmulatorLauncher, in_tiles: bool, kv_heads: int, window: int | None,
                                   dtype: KVDtype) -> None:
    sinks = np.array([-np.inf, 1.0, 5.0, 1e30], np.float32)
    attention = DeviceAttention(launcher, in_tiles, 4, kv_heads, 32, window, sinks, dtype)
    expected = Attention(ReferenceOps(), 4, kv_heads, 32, window, dtype=dtype, sinks=sinks)
    expected.qkv = [qkv.astype(BF16).astype(np.float32) for qkv in attention.qkv]
    results, wanted = attention.whole(), expected.whole()
    for result, rows in zip(results, wanted, strict=True):
        assert (result[:, 3 * 32:] == 0).all()
        # As the kernels' own cases: of the largest value, because weights and results have 8 bits.
        assert np.abs(result - rows).max() <= 0.01 * np.abs(rows).max()
    without = DeviceAttention(launcher, in_tiles, 4, kv_heads, 32, window, None, dtype).whole()
    assert_all_same_bits([result[:, :32] for result in results], [result[:, :32] for result in without])


@emulated
def test_greedy_tokens_of_the_kernels_are_the_references() -> None:
    """A whole model, its decode steps as graphs."""
    assert_same_greedy_tokens(runner("mistral-window-sinks"), "mistral-window-sinks", GAPS[BF16])


# ---- From the file to the logits

@pytest.mark.parametrize("file", ["folder", "gguf"])
def test_a_file_with_sinks(tmp_path: Path, file: str) -> None:
    """Logits of the host and of the reference against a forward pass in float64."""
    name = "mistral-window"
    config, tensors = golden_config(name), read_folder(GOLDEN_MODELS / name)
    heads, num_layers = config["num_attention_heads"], config["num_hidden_layers"]
    sinks = [random_sinks(heads, seed) for seed in range(num_layers)]
    if file == "folder":
        path = write_folder(tmp_path / "folder", config, tensors | {
            f"model.layers.{layer}.self_attn.sinks": sinks[layer] for layer in range(num_layers)})
    else:
        path = golden_as_gguf(name, tmp_path / "model.gguf", more_tensors={
            f"blk.{layer}.attn_sinks.weight": (sinks[layer], QType.F32) for layer in range(num_layers)})
    model_file = open_model(path)
    weights = model_file.weights()
    ids = sequence(model_file.spec, 3, 37)
    expected = float64_logits(model_file.spec, weights, ids)
    plain = dataclasses.replace(weights, layers=tuple(dataclasses.replace(layer, sinks=None)
                                                      for layer in weights.layers))
    assert np.abs(float64_logits(model_file.spec, plain, ids) - expected).max() > 0.1, "they should matter"
    for backend in ("host", "reference"):
        with paged_model(backend, model_file.spec, weights) as model:
            blocks = blocks_in_order(model, len(ids))
            parts = [model.run(Piece(ids, start, end, blocks))[0] for start, end in ((0, 20), (20, 36), (36, 37))]
        assert largest_error(np.concatenate(parts), expected.astype(np.float32)) <= TOLERANCE


def test_tiny_models_with_sinks_are_others() -> None:
    """What the tests of `NAME-sinks` here and elsewhere stand on."""
    for name in ("gemma3", "mistral-window"):
        (_, weights), (_, plain) = tiny_model(f"{name}-sinks"), tiny_model(name)
        assert all(layer.sinks is not None for layer in weights.layers)
        assert all(layer.sinks is None for layer in plain.layers)
