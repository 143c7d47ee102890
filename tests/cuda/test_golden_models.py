"""Tiny models of every family against transformers, and the equivalences: a row's bits depend on its sequence alone.

tests/golden/README.md says where the numbers come from.
"""
from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cuda.host.ops import HostOps
from cuda.kv_cache import blocks_for, kv_groups
from cuda.model import Transformer
from cuda.ops import BLOCK_SIZE, Batch, HostMath, KVDtype, KVGroupSpec, Ops
from cuda.reference import ReferenceOps
from cuda.runner import Runner
from cuda.sampler import SlotSampling
from tests.cuda.host_support import needs_pairs
from weights import hub
from weights.load import LayerWeights, ModelWeights, open_model
from weights.quant import Affine, Linear, Weight, dequantize
from weights.spec import ModelSpec

GOLDEN = Path(__file__).parent.parent / "golden"
NAMES = ("llama", "llama-tied-rope3", "llama-linear", "llama-yarn", "mistral-window", "qwen2", "qwen3", "gemma2",
         "gemma3")
NUM_BLOCKS = 64
GREEDY = SlotSampling(
    temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0,
    logit_bias=(), min_tokens=0, stop_ids=(), seed=0, choice=0, logprobs=None)

Ids = NDArray[np.int32]
Logits = NDArray[np.float32]
Arrays = dict[str, NDArray[Any]]


BACKENDS: dict[str, Callable[[], Ops]] = {"reference": ReferenceOps, "host": HostOps}
INT16 = pytest.param("host-int16", marks=needs_pairs)   # differs where weights are quantized
ALL_BACKENDS: dict[str, Callable[[], Ops]] = {**BACKENDS, "host-int16": partial(HostOps, math="int16")}
# Both compute in float32 and come within 2e-6 of transformers; a wrong epsilon or window edge does not.
TOLERANCE = 1e-5                            # of logits, relative to the largest if that is above 1
REAL_TOLERANCE = 1e-3                       # of the real models' logprobs
INT16_TOLERANCE = 1e-2                      # of logprobs with 16-bit activations
KV_TOLERANCES: dict[KVDtype, float] = {"bf16": 0.01, "int8": 0.025}      # likewise; 1.5 times what they reach
GAP = 1e-3                                  # greedy tokens must be equal where the two best logits are further apart

backends = pytest.mark.parametrize("backend", BACKENDS)
kv_dtypes = pytest.mark.parametrize("kv_dtype", HostOps.kv_dtypes)


@cache
def golden_model(name: str) -> tuple[ModelSpec, ModelWeights, Arrays]:
    model = open_model(GOLDEN / "models" / name)
    with np.load(GOLDEN / "models" / name / "golden.npz") as golden:
        return model.spec, model.weights(), dict(golden)


@cache
def tiny_model(name: str) -> tuple[ModelSpec, ModelWeights]:
    """A golden model; `NAME-quantized`: with projections and embedding rounded to a mixture of formats; `NAME-sinks`:
    with attention sinks, which none of them has."""
    if name.endswith("-sinks"):
        spec, weights = tiny_model(name.removesuffix("-sinks"))
        sinks = np.random.default_rng(0).standard_normal((spec.num_layers, spec.num_heads)).astype(np.float32) * 3
        return spec, dataclasses.replace(weights, layers=tuple(
            dataclasses.replace(layer, sinks=own) for layer, own in zip(weights.layers, sinks, strict=True)))
    spec, weights, _ = golden_model(name.removesuffix("-quantized"))
    return spec, quantized(weights) if name.endswith("-quantized") else weights


def quantized(weights: ModelWeights) -> ModelWeights:
    def linear(projection: Linear, bits: Sequence[int]) -> Linear:
        parts = tuple(affine(part, b) for part, b in zip(projection.parts, bits, strict=True))
        return Linear(parts, projection.bias)

    def layer(block: LayerWeights) -> LayerWeights:
        return dataclasses.replace(block, qkv=linear(block.qkv, (4, 4, 8)), o=linear(block.o, (4,)),
                                   gate_up=linear(block.gate_up, (4, 8)), down=linear(block.down, (8,)))

    embed = affine(weights.embed, 8)
    head = Linear((embed,)) if weights.head.parts[0] is weights.embed else linear(weights.head, (4,))
    return ModelWeights(embed, tuple(layer(block) for block in weights.layers), weights.norm, head)


def affine(weight: Weight, bits: int) -> Affine:
    values = dequantize(weight)
    group = 32 if values.shape[1] % 32 == 0 else 16
    grouped = values.reshape(len(values), -1, group)                                        # [N, K/g, g]
    low, high = grouped.min(axis=2), grouped.max(axis=2)
    scale = (high - low) / np.float32(2**bits - 1)
    codes = np.rint((grouped - low[..., None]) / scale[..., None]).astype(np.uint8).reshape(values.shape)
    if bits == 4:
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    return Affine(codes, scale, low, bits, group)


@dataclass(frozen=True)
class Piece:
    """Tokens [start, end) of a sequence, to be computed in one step."""
    token_ids: Ids                          # the whole sequence
    start: int
    end: int
    block_ids: tuple[Ids, ...]              # per KV group, enough for the whole sequence


class PagedModel:
    """A model with its KV cache that runs any mixture of pieces of sequences and answers all their logits."""

    def __init__(self, backend: str, spec: ModelSpec, weights: ModelWeights, max_tokens: int = 160,
                 max_position: int = 256, kv_dtype: KVDtype = "float32") -> None:
        self.spec = spec
        self.ops = ALL_BACKENDS[backend]()
        self.groups = kv_groups(spec)
        prepared = self.ops.prepare(spec, weights, max_tokens, max_position)
        self.model = Transformer(spec, prepared, self.ops, self.groups)
        self.caches = [self.ops.allocate_kv(group, NUM_BLOCKS, kv_dtype) for group in self.groups]
        self.num_forwards = 0                               # more steps than these: the rest were recorded ones
        self.forward = self._forward                        # one object: see `Ops.run`

    def _forward(self, batch: Batch, rows: Ids) -> Any:
        self.num_forwards += 1
        return self.model.forward(batch, self.caches, rows)

    def close(self) -> None:
        self.ops.close()

    def run(self, *pieces: Piece) -> list[Logits]:
        """One step. -> logits [end - start, V] of each piece"""
        batch = make_batch(pieces, self.groups)
        hidden = self.ops.run(batch, np.arange(batch.num_tokens, dtype=np.int32), self.forward)
        logits = []
        for start in range(0, batch.num_tokens, 32):        # what `logits` returns lives until its next call
            part = self.model.logits(hidden[start:start + 32])
            self.ops.finish()
            logits.append(np.array(part))
        return np.split(np.concatenate(logits), batch.query_start_loc[1:-1])


@contextmanager
def paged_model(backend: str, spec: ModelSpec, weights: ModelWeights, max_tokens: int = 160,
                max_position: int = 256, kv_dtype: KVDtype = "float32") -> Iterator[PagedModel]:
    model = PagedModel(backend, spec, weights, max_tokens, max_position, kv_dtype)
    try:
        yield model
    finally:
        model.close()


def make_batch(pieces: Sequence[Piece], groups: Sequence[KVGroupSpec]) -> Batch:
    width = max(blocks_for(piece.end) for piece in pieces)
    tables, slot_mapping = [], []
    for g, group in enumerate(groups):
        table = np.zeros((len(pieces), width), np.int32)
        slots = []
        for s, piece in enumerate(pieces):
            num_blocks = blocks_for(piece.end)
            positions = np.arange(piece.start, piece.end)
            table[s, :num_blocks] = piece.block_ids[g][:num_blocks]
            slots.append(table[s, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE)
            if group.window is not None:                    # blocks that have left the window may be anybody's by now
                first_seen = max(0, piece.start - group.window + 1)
                table[s, :first_seen // BLOCK_SIZE] = NUM_BLOCKS - 1
        tables.append(table)
        slot_mapping.append(np.concatenate(slots).astype(np.int32))
    lengths = [piece.end - piece.start for piece in pieces]
    return Batch(
        token_ids=np.concatenate([piece.token_ids[piece.start:piece.end] for piece in pieces]).astype(np.int32),
        positions=np.concatenate([np.arange(piece.start, piece.end, dtype=np.int32) for piece in pieces]),
        query_start_loc=np.cumsum([0, *lengths]).astype(np.int32),
        seq_lens=np.array([piece.end for piece in pieces], np.int32),
        block_tables=tuple(tables),
        slot_mapping=tuple(slot_mapping),
    )


def blocks_in_order(model: PagedModel, num_tokens: int) -> tuple[Ids, ...]:
    return tuple(np.arange(blocks_for(num_tokens), dtype=np.int32) for _ in model.groups)


def largest_error(logits: Logits, golden: Logits) -> float:
    return float(np.abs(logits - golden).max() / max(1.0, float(np.abs(golden).max())))


def assert_same_bits(logits: Logits, expected: Logits) -> None:
    np.testing.assert_array_equal(logits.view(np.uint32), expected.view(np.uint32))


# Against transformers

@backends
@pytest.mark.parametrize("name", NAMES)
def test_logits_of_one_pass(name: str, backend: str) -> None:
    spec, weights, golden = golden_model(name)
    ids = golden["input_ids"][0].astype(np.int32)
    with paged_model(backend, spec, weights) as model:
        [logits] = model.run(Piece(ids, 0, len(ids), blocks_in_order(model, len(ids))))
    assert largest_error(logits, golden["logits"][0]) <= TOLERANCE


@backends
@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_one_at_a_time(name: str, backend: str) -> None:
    """Along the golden continuation, so that one narrow choice does not end the comparison."""
    spec, weights, golden = golden_model(name)
    prompt, greedy, gaps = golden["prompt"], golden["greedy"], golden["greedy_gap"]
    ids = np.concatenate([prompt, greedy]).astype(np.int32)
    with paged_model(backend, spec, weights) as model:
        blocks = blocks_in_order(model, len(ids))
        [logits] = model.run(Piece(ids, 0, len(prompt), blocks))
        for step, (token_id, gap) in enumerate(zip(greedy, gaps, strict=True)):
            if gap > GAP:
                assert logits[-1].argmax() == token_id
            position = len(prompt) + step
            [logits] = model.run(Piece(ids, position, position + 1, blocks))


@backends
@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_of_the_runner(name: str, backend: str) -> None:
    """Its own tokens, up to the first narrow choice; the prompt in two chunks, another sequence beside it."""
    spec, weights, golden = golden_model(name)
    prompt, greedy, gaps = golden["prompt"].tolist(), golden["greedy"].tolist(), golden["greedy_gap"]
    narrow = np.flatnonzero(gaps <= GAP)
    num_certain = int(narrow[0]) if len(narrow) else len(greedy)
    ops = BACKENDS[backend]()
    try:
        runner = Runner(spec, weights, ops, [NUM_BLOCKS] * len(kv_groups(spec)), max_num_seqs=2,
                        max_num_batched_tokens=32, max_model_len=64)
        for slot, block_ids in enumerate(([9, 2, 30], [1, 7, 8])):
            runner.start(slot, prompt, len(prompt), GREEDY, [block_ids] * len(runner.groups), True, None)
        outputs = [runner.launch(runner.rows(chunks, []))()
                   for chunks in ([(0, 0, 17), (1, 0, 5)], [(0, 17, 24), (1, 5, 24)])]
        outputs += [runner.launch(runner.rows([], [1] if step == 3 else []))() for step in range(len(greedy) - 1)]
    finally:
        ops.close()
    for slot in (0, 1):
        tokens = [int(token_id) for output in outputs
                  for token_id in output.sampled.token_ids[output.slots == slot]]
        assert len(tokens) == len(greedy) - slot            # slot 1 rested once
        assert tokens[:num_certain] == greedy[:len(tokens)][:num_certain]


@pytest.mark.parametrize("kv_dtype", KV_TOLERANCES)
@backends
@pytest.mark.parametrize("name", NAMES)
def test_keys_and_values_of_fewer_bits(name: str, backend: str, kv_dtype: KVDtype) -> None:
    spec, weights, golden = golden_model(name)
    tolerance = KV_TOLERANCES[kv_dtype]
    ids = golden["input_ids"][0].astype(np.int32)
    with paged_model(backend, spec, weights, kv_dtype=kv_dtype) as model:
        [logits] = model.run(Piece(ids, 0, len(ids), blocks_in_order(model, len(ids))))
        assert TOLERANCE < largest_error(logits, golden["logits"][0]) <= tolerance

        prompt, greedy = golden["prompt"], golden["greedy"]
        ids = np.concatenate([prompt, greedy[:-1]]).astype(np.int32)
        [logits] = model.run(Piece(ids, 0, len(ids), blocks_in_order(model, len(ids))))
    answers = logits[len(prompt) - 1:]
    certain = golden["greedy_gap"] > 2 * tolerance * max(1.0, float(np.abs(answers).max()))
    np.testing.assert_array_equal(answers.argmax(axis=1)[certain], greedy[certain])


@pytest.mark.parametrize("name", ["llama-quantized", "qwen2-quantized", "gemma2-quantized", "gemma3-quantized"])
def test_host_is_the_reference_on_quantized_weights(name: str) -> None:
    spec, weights = tiny_model(name)
    ids = sequence(spec, 5, LENGTH)
    logits = {}
    for backend in BACKENDS:
        with paged_model(backend, spec, weights) as model:
            [logits[backend]] = model.run(Piece(ids, 0, LENGTH, blocks_in_order(model, LENGTH)))
    assert largest_error(logits["host"], logits["reference"]) <= TOLERANCE


@needs_pairs
@pytest.mark.parametrize("name", ["llama-quantized", "qwen2-quantized", "gemma2-quantized", "gemma3-quantized"])
def test_16_bit_activations_change_little(name: str) -> None:
    spec, weights = tiny_model(name)
    ids = sequence(spec, 5, LENGTH)
    logprobs = {}
    for backend in ("host", "host-int16"):
        with paged_model(backend, spec, weights) as model:
            [logits] = model.run(Piece(ids, 0, LENGTH, blocks_in_order(model, LENGTH)))
            logprobs[backend] = log_softmax(logits)
    error = np.abs(logprobs["host-int16"] - logprobs["host"])
    assert 0 < error.max() <= INT16_TOLERANCE
    best = np.sort(logprobs["host"], axis=1)
    certain = best[:, -1] - best[:, -2] > 2 * INT16_TOLERANCE
    np.testing.assert_array_equal(logprobs["host-int16"].argmax(axis=1)[certain],
                                  logprobs["host"].argmax(axis=1)[certain])


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.parametrize("backend", [*BACKENDS, INT16])
@pytest.mark.parametrize(("alias", "golden_name"), [("smollm2", "smollm2-135m-instruct-q4_1"),
                                                   ("gemma3", "gemma-3-270m-q4_k_m")])
def test_real_model(alias: str, golden_name: str, backend: str) -> None:
    """Logprobs of every prompt and its greedy continuation, each in one pass over both."""
    model_file = open_model(hub.resolve(alias, print).path)
    tolerance = INT16_TOLERANCE if backend == "host-int16" else REAL_TOLERANCE
    prompts = json.loads((GOLDEN / "logits" / f"{golden_name}.json").read_text())
    with np.load(GOLDEN / "logits" / f"{golden_name}.npz") as file:
        golden = dict(file)
    with paged_model(backend, model_file.spec, model_file.weights(), max_tokens=256) as model:
        for index, prompt in enumerate(prompts):
            num_prompt, greedy = len(prompt["ids"]), np.array(prompt["greedy"])
            ids = np.array(prompt["ids"] + prompt["greedy"][:-1], np.int32)
            [logits] = model.run(Piece(ids, 0, len(ids), blocks_in_order(model, len(ids))))
            logprobs = log_softmax(logits[:num_prompt])
            top_ids = golden[f"top_ids_{index}"]
            np.testing.assert_allclose(np.take_along_axis(logprobs, top_ids, axis=1), golden[f"top_logprobs_{index}"],
                                       rtol=0, atol=tolerance)
            np.testing.assert_allclose(logprobs[np.arange(num_prompt - 1), ids[1:num_prompt]],
                                       golden[f"prompt_logprobs_{index}"], rtol=0, atol=tolerance)
            certain = np.array(prompt["greedy_gap"]) > GAP
            np.testing.assert_array_equal(logits[num_prompt - 1:].argmax(axis=1)[certain], greedy[certain])


def log_softmax(logits: Logits) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


# Equivalences, bit by bit

TINY = pytest.mark.parametrize(("name", "backend"), [
    *((name, backend) for name in ("llama", "qwen2", "gemma2", "gemma3", "llama-quantized", "gemma3-quantized")
      for backend in BACKENDS),
    ("gemma3-sinks", "host"),
    *(pytest.param(name, "host-int16", marks=needs_pairs) for name in ("llama-quantized", "gemma3-quantized"))])
LENGTH = 37                                 # two block edges; longer than the windows (12) of gemma3


def sequence(spec: ModelSpec, seed: int, length: int) -> Ids:
    return np.random.default_rng(seed).integers(0, spec.vocab_size, length).astype(np.int32)


@kv_dtypes
@TINY
def test_chunked_is_whole(name: str, backend: str, kv_dtype: KVDtype) -> None:
    """Every split into two, one token at a time, and threes."""
    spec, weights = tiny_model(name)
    ids = sequence(spec, 0, LENGTH)
    with paged_model(backend, spec, weights, kv_dtype=kv_dtype) as model:
        blocks = blocks_in_order(model, LENGTH)
        [whole] = model.run(Piece(ids, 0, LENGTH, blocks))
        splits = [[0, cut, LENGTH] for cut in range(1, LENGTH)]
        splits += [list(range(LENGTH + 1)), [*range(0, LENGTH, 3), LENGTH]]
        for edges in splits:
            chunks = [model.run(Piece(ids, start, end, blocks))[0]
                      for start, end in zip(edges, edges[1:], strict=False)]
            assert_same_bits(np.concatenate(chunks), whole)


@kv_dtypes
@TINY
def test_batched_is_alone_wherever_the_blocks_are(name: str, backend: str, kv_dtype: KVDtype) -> None:
    """Sequences of all lengths advance by random steps in a random order, their blocks strewn over the cache."""
    spec, weights = tiny_model(name)
    random = np.random.default_rng(1)
    lengths = [1, 2, 15, 16, 17, 31, 33, LENGTH]
    sequences = [sequence(spec, 10 + index, length) for index, length in enumerate(lengths)]
    with paged_model(backend, spec, weights, kv_dtype=kv_dtype) as model:
        alone = [model.run(Piece(ids, 0, len(ids), blocks_in_order(model, len(ids))))[0] for ids in sequences]
    with paged_model(backend, spec, weights, kv_dtype=kv_dtype) as model:
        # The last block belongs to nobody: it stands in tables for what has left a window.
        free = [iter(random.permutation(NUM_BLOCKS - 1).astype(np.int32)) for _ in model.groups]
        blocks = [tuple(np.array([next(ids) for _ in range(blocks_for(length))], np.int32) for ids in free)
                  for length in lengths]
        computed = [0] * len(lengths)
        together: list[list[Logits]] = [[] for _ in lengths]
        while waiting := [index for index, length in enumerate(lengths) if computed[index] < length]:
            chosen = [int(index) for index in random.permutation(waiting)[:random.integers(1, len(waiting) + 1)]]
            ends = [min(lengths[index], computed[index] + int(random.choice([1, 1, 3, 8, 20]))) for index in chosen]
            parts = model.run(*(Piece(sequences[index], computed[index], end, blocks[index])
                                for index, end in zip(chosen, ends, strict=True)))
            for index, end, part in zip(chosen, ends, parts, strict=True):
                together[index].append(part)
                computed[index] = end
    for index in range(len(lengths)):
        assert_same_bits(np.concatenate(together[index]), alone[index])


@kv_dtypes
@TINY
def test_copied_blocks_serve_as_well(name: str, backend: str, kv_dtype: KVDtype) -> None:
    """A second sequence shares the first one's full block and owns a copy of its partial one."""
    spec, weights = tiny_model(name)
    ids = sequence(spec, 2, LENGTH)
    other = ids.copy()
    other[20:] = sequence(spec, 3, LENGTH)[20:]
    with paged_model(backend, spec, weights, kv_dtype=kv_dtype) as model:
        blocks = blocks_in_order(model, LENGTH)
        [expected] = model.run(Piece(other, 0, LENGTH, blocks))
        model.run(Piece(ids, 0, 20, blocks))
        copies = tuple(np.array([0, 5, 6], np.int32) for _ in model.groups)
        for kv_cache in model.caches:
            model.ops.copy_blocks(kv_cache, kv_cache, np.array([[1, 5]], np.int32))
        model.run(Piece(ids, 20, LENGTH, blocks))
        [logits] = model.run(Piece(other, 20, LENGTH, copies))
    assert_same_bits(logits, expected[20:])


@pytest.mark.parametrize("backend", ["host", INT16])
@pytest.mark.parametrize("num_threads", [2, 5])
def test_host_threads_do_not_change_bits(num_threads: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, weights = tiny_model("gemma3-quantized")
    ids = sequence(spec, 6, LENGTH)
    math: HostMath = "int16" if backend == "host-int16" else "exact"
    logits = []
    for threads in (1, num_threads):
        monkeypatch.setitem(ALL_BACKENDS, backend, partial(HostOps, threads, math))
        with paged_model(backend, spec, weights) as model:
            logits += model.run(Piece(ids, 0, LENGTH, blocks_in_order(model, LENGTH)))
    assert_same_bits(logits[1], logits[0])


@backends
def test_reserved_workspace_is_enough(backend: str) -> None:
    """A step of exactly max_tokens tokens up to exactly max_position."""
    spec, weights = tiny_model("llama")
    ids = sequence(spec, 4, 48)
    with paged_model(backend, spec, weights, max_tokens=48, max_position=48) as model:
        [logits] = model.run(Piece(ids, 0, 48, blocks_in_order(model, 48)))
    assert np.isfinite(logits).all()
