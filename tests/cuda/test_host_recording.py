"""Steps that run what an earlier step of the same shapes recorded: the same bits as a step recorded anew."""
from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from cuda.host import ops as host_ops
from cuda.host.ops import HostOps
from cuda.kv_cache import blocks_for
from cuda.ops import BLOCK_SIZE
from tests.cuda.test_golden_models import (
    NUM_BLOCKS,
    Logits,
    PagedModel,
    Piece,
    assert_same_bits,
    blocks_in_order,
    make_batch,
    paged_model,
    sequence,
    tiny_model,
)
from weights.spec import ModelSpec

LENGTH = 300                                    # more than one split of attention


def random_steps(spec: ModelSpec, seed: int, num_groups: int, num_steps: int) -> list[list[Piece]]:
    """Three sequences that grow by a token, by a few or by many, each alone or with others, and begin anew."""
    rng = np.random.default_rng(seed)
    num_blocks = blocks_for(LENGTH)
    ids = [sequence(spec, seed + s, LENGTH) for s in range(3)]
    blocks = [tuple(rng.permutation(NUM_BLOCKS - 1).astype(np.int32)[:3 * num_blocks].reshape(3, -1)[s]
                    for _ in range(num_groups)) for s in range(3)]
    lengths = [0, 0, 0]
    steps = []
    for _ in range(num_steps):
        pieces = []
        for s in np.flatnonzero(rng.random(3) < 0.7):
            start = lengths[s] if lengths[s] < LENGTH - 45 else 0
            lengths[s] = start + int(rng.choice([1, 1, 1, 5, 40]))
            pieces.append(Piece(ids[s], start, lengths[s], blocks[s]))
        if pieces:
            steps.append(pieces)
    return steps


def run_all(model: PagedModel, steps: Sequence[Sequence[Piece]]) -> list[list[Logits]]:
    return [model.run(*pieces) for pieces in steps]


@pytest.mark.parametrize(("name", "backend"), [("llama-quantized", "host"), ("gemma3", "host"), ("qwen3", "host"),
                                               ("llama-quantized", "host-int16")])
def test_a_recorded_step_has_the_bits_of_a_fresh_one(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among steps of many shapes, longer and shorter ones, while the workspace grows."""
    if backend == "host-int16" and not host_ops.HAS_PAIRS:
        pytest.skip("16-bit products need AVX2")
    spec, weights = tiny_model(name)
    with paged_model(backend, spec, weights, max_position=LENGTH) as model:
        steps = random_steps(spec, 0, len(model.groups), 100)
        recorded = run_all(model, steps)
        assert model.num_forwards < 0.7 * len(steps)
        num_forwards = model.num_forwards
        again = run_all(model, steps)
        assert model.num_forwards < num_forwards + 10       # those of the largest steps, while the workspace grew
    monkeypatch.setattr(host_ops, "MAX_RECORDINGS", 0)
    with paged_model(backend, spec, weights, max_position=LENGTH) as model:
        fresh = run_all(model, steps)
        assert model.num_forwards == len(steps)
    for expected, first, second in zip(fresh, recorded, again, strict=True):
        for logits, one, other in zip(expected, first, second, strict=True):
            assert_same_bits(one, logits)
            assert_same_bits(other, logits)


def test_numbers_of_a_recorded_step_are_checked_too() -> None:
    spec, weights = tiny_model("llama")
    with paged_model("host", spec, weights) as model:
        ids = sequence(spec, 1, 60)
        pieces = [Piece(ids, start, start + 1, blocks_in_order(model, 60)) for start in range(40)]
        expected = [model.run(piece)[0] for piece in pieces]
        assert model.num_forwards == 1
        batch = make_batch(pieces[30:31], model.groups)
        rows = np.zeros(1, np.int32)
        outside = [
            (dataclasses.replace(batch, token_ids=np.array([spec.vocab_size], np.int32)), rows, "token ids"),
            (dataclasses.replace(batch, token_ids=np.array([-1], np.int32)), rows, "token ids"),
            (dataclasses.replace(batch, positions=np.array([255 + 1], np.int32)), rows, "keys in"),
            (dataclasses.replace(batch, positions=np.array([-2], np.int32)), rows, "positions"),
            (dataclasses.replace(batch, slot_mapping=(np.array([NUM_BLOCKS * BLOCK_SIZE], np.int32),)), rows, "slots"),
            (dataclasses.replace(batch, block_tables=(np.full((1, 2), NUM_BLOCKS, np.int32),)), rows, "block ids"),
            (batch, np.ones(1, np.int32), "rows"),
        ]
        for bad_batch, bad_rows, message in outside:
            with pytest.raises(AssertionError, match=message):
                model.ops.run(bad_batch, bad_rows, model.forward)
            [logits] = model.run(pieces[30])
            assert_same_bits(logits, expected[30])


def test_a_step_may_only_record_what_later_steps_can_change() -> None:
    spec, weights = tiny_model("llama")
    with paged_model("host", spec, weights) as model:
        ids = sequence(spec, 1, 4)
        batch = make_batch([Piece(ids, 0, 4, blocks_in_order(model, 4))], model.groups)
        rows = np.arange(4, dtype=np.int32)
        embed = model.model.weights.embed
        with pytest.raises(AssertionError, match="not an array of the batch"):
            model.ops.run(batch, rows, lambda batch, rows: model.ops.embed(batch.token_ids + 0, embed, 1.0))
        own = np.zeros((4, spec.hidden_size), np.float32)
        with pytest.raises(AssertionError, match="what ops returned"):
            model.ops.run(batch, rows, lambda batch, rows: model.ops.take_rows(own, rows))
        assert model.run(Piece(ids, 0, 4, blocks_in_order(model, 4)))[0].shape == (4, spec.vocab_size)


def test_recordings_are_few_and_those_in_use_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_ops, "MAX_RECORDINGS", 3)
    spec, weights = tiny_model("llama")
    with paged_model("host", spec, weights) as model:
        assert isinstance(model.ops, HostOps)
        ids = sequence(spec, 1, 60)
        blocks = blocks_in_order(model, 60)
        model.run(Piece(ids, 0, 30, blocks))                # the workspace is as large as it will be
        for end in range(1, 30):
            model.run(Piece(ids, 30, 31, blocks))           # the one in use
            model.run(Piece(ids, 0, end, blocks))
            assert len(model.ops._recordings) <= 3
        num_forwards = model.num_forwards
        model.run(Piece(ids, 30, 31, blocks))
        assert model.num_forwards == num_forwards


def test_times_of_a_recorded_step() -> None:
    spec, weights = tiny_model("llama")
    with paged_model("host", spec, weights) as model:
        assert isinstance(model.ops, HostOps)
        ids = sequence(spec, 1, 60)
        traces = []
        for start in range(3):
            model.ops.trace = []
            model.run(Piece(ids, start, start + 1, blocks_in_order(model, 60)))
            traces.append([name for name, _ in model.ops.trace])
            model.ops.trace = None
        assert model.num_forwards == 1
        assert traces[0] == traces[1] == traces[2]
        assert {"embed", "attend"} <= {name.split("_float32")[0] for name in traces[0]}
