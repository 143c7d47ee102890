"""The safetensors reader: single files, shards, and what is refused."""
from __future__ import annotations

import json
import struct
import tracemalloc
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from tests.weights.model_files import GOLDEN_MODELS, read_folder, refusal, write_folder
from weights.quant import Dense, dequantize
from weights.safetensors import Checkpoint

MATRIX = np.arange(12, dtype=np.float32).reshape(3, 4)


def test_bfloat16_of_a_golden_model() -> None:
    checkpoint = Checkpoint(GOLDEN_MODELS / "llama")
    expected = read_folder(GOLDEN_MODELS / "llama")
    assert checkpoint.shapes == {name: data.shape for name, data in expected.items()}
    assert checkpoint.nbytes == sum(data.nbytes for data in expected.values()) // 2
    for name, data in expected.items():
        if data.ndim == 1:
            np.testing.assert_array_equal(checkpoint.vector(name), data)
        else:
            weight = checkpoint.weight(name)
            assert isinstance(weight, Dense)
            assert weight.is_bf16
            assert weight.data.dtype == np.uint16
            np.testing.assert_array_equal(dequantize(weight), data)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_floats(tmp_path: Path, dtype: str) -> None:
    data = MATRIX.astype(dtype)
    save_file({"m": data, "v": data.reshape(-1)}, tmp_path / "model.safetensors", {"format": "pt"})
    checkpoint = Checkpoint(tmp_path)
    weight = checkpoint.weight("m")
    assert isinstance(weight, Dense)
    assert weight.data.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(weight.data, data)
    np.testing.assert_array_equal(checkpoint.vector("v"), MATRIX.reshape(-1))


def test_tensors_asked_for_wrongly(tmp_path: Path) -> None:
    save_file({"m": MATRIX, "ids": np.zeros((1, 1), np.int64)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(ValueError, match="tensor x is missing"):
        checkpoint.weight("x")
    with pytest.raises(ValueError, match=r"tensor m has shape \(3, 4\), 1 dim"):
        checkpoint.vector("m")
    with pytest.raises(ValueError, match="tensor ids has dtype I64"):
        checkpoint.weight("ids")


# Hand-made files, for what no writer would write.

Entry = dict[str, Any]


def entry(begin: int = 0, end: int = 48, shape: Any = (3, 4), dtype: Any = "F32") -> Entry:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def image(header: Any, data: bytes = MATRIX.tobytes(), length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


GOOD = image({"a": entry()})
BAD = {
    "empty": (b"", "empty"),
    "seven bytes": (bytes(7), "truncated"),
    "header length 0": (struct.pack("<Q", 0) + bytes(100), "bad JSON"),
    "header length 2**60": (image({"a": entry()}, length=1 << 60), "header of 1152921504606846976 bytes"),
    "header longer than the file": (image({"a": entry()}, length=1 << 20), "truncated"),
    "not JSON": (image(b"{oh no}"), "bad JSON"),
    "not an object": (image([1, 2]), "object was expected"),
    "deep nesting": (image(b"[" * 100_000), "bad JSON"),
    "not UTF-8": (image(b'{"\xff": 1}'), "not UTF-8"),
    "duplicate keys": (image(b'{"a": %b, "a": %b}' % ((json.dumps(entry()).encode(),) * 2)), "'a' appears twice"),
    "entry": (image({"a": [1]}), "damaged"),
    "missing dtype": (image({"a": {"shape": [3, 4], "data_offsets": [0, 48]}}), "damaged"),
    "unknown dtype": (image({"a": entry(dtype="F99")}), "damaged"),
    "dtype that is a list": (image({"a": entry(dtype=["F32"])}), "damaged"),
    "negative shape": (image({"a": entry(shape=[-3, -4])}), "damaged"),
    "fractional shape": (image({"a": entry(shape=[3.0, 4])}), "damaged"),
    "shape true": (image({"a": entry(shape=[12, True])}), "damaged"),
    "shape that is a number": (image({"a": entry(shape=12)}), "damaged"),
    "huge shape": (image({"a": entry(shape=[1 << 62, 1 << 62])}), "damaged"),
    "endless shape": (image({"a": entry(shape=[2] * 1000)}), "damaged"),
    "three offsets": (image({"a": entry() | {"data_offsets": [0, 48, 48]}}), "damaged"),
    "negative offsets": (image({"a": entry(-48, 0)}), "damaged"),
    "reversed offsets": (image({"a": entry(48, 0)}), "damaged"),
    "offsets that do not fit the shape": (image({"a": entry(0, 44)}), "damaged"),
    "offsets past the end": (image({"a": entry(), "b": entry(48, 96)}), "damaged"),
    "offsets far past the end": (image({"a": entry(1 << 60, (1 << 60) + 48)}), "damaged"),
    "overlap": (image({"a": entry(), "b": entry(24, 72)}, bytes(96)), "damaged"),
    "the same place twice": (image({"a": entry(), "b": entry()}), "damaged"),
    "gap": (image({"a": entry(), "b": entry(52, 100)}, bytes(100)), "damaged"),
    "one byte cut off": (GOOD[:-1], "damaged"),
    "a kilobyte cut off": (image({"a": entry(0, 4096, [1024])}, bytes(4096 - 1024)), "damaged"),
    "trailing bytes": (GOOD + bytes(8), "damaged"),
}


@pytest.mark.parametrize("name", BAD)
def test_malformed_files_are_refused(tmp_path: Path, name: str) -> None:
    raw, cause = BAD[name]
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=cause) as caught:
            Checkpoint(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()
    assert str(caught.value).startswith(str(path))


def test_a_header_of_200_megabytes_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 200_000_000))
    with path.open("r+b") as file:
        file.truncate(200_000_100)
    with pytest.raises(ValueError, match="a header of 200000000 bytes"):
        Checkpoint(tmp_path)


def test_data_that_is_not_aligned_is_copied(tmp_path: Path) -> None:
    text = json.dumps({"a": entry()}).encode()
    (tmp_path / "model.safetensors").write_bytes(image(text + b" " * (len(text) % 2 + 1)))
    weight = Checkpoint(tmp_path).weight("a")
    assert isinstance(weight, Dense)
    assert weight.data.flags.aligned
    np.testing.assert_array_equal(weight.data, MATRIX)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_raises_only_value_errors(tmp_path: Path, data: st.DataObject) -> None:
    damaged = bytearray(image({"a": entry(), "b": entry(48, 56, [4], "F16")}, bytes(56)))
    for _ in range(data.draw(st.integers(0, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "model.safetensors").write_bytes(damaged[:data.draw(st.integers(1, len(damaged)))])
    causes = [refusal(lambda: Checkpoint(tmp_path))]
    if causes == [None]:
        checkpoint = Checkpoint(tmp_path)
        causes = [refusal(partial(read, name)) for name in checkpoint.shapes
                  for read in (checkpoint.weight, checkpoint.vector)]
    assert all(cause is None or cause.startswith(str(tmp_path)) for cause in causes)


# Shards

def sharded(folder: Path, weight_map: dict[str, Any]) -> Path:
    """Three shards that hold a; b and c; d."""
    for number, names in enumerate(("a", "bc", "d"), 1):
        write_folder(folder, {}, dict.fromkeys(names, MATRIX), f"model-{number:05}-of-00003.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 1},
                                                                     "weight_map": weight_map}))
    return folder


SHARD = "model-{:05}-of-00003.safetensors".format
PLACES = {"a": SHARD(1), "b": SHARD(2), "c": SHARD(2), "d": SHARD(3)}


def test_shards(tmp_path: Path) -> None:
    checkpoint = Checkpoint(sharded(tmp_path / "m", PLACES))
    assert checkpoint.shapes == dict.fromkeys("abcd", (3, 4))
    assert checkpoint.nbytes == 4 * MATRIX.nbytes
    for name in "abcd":
        np.testing.assert_array_equal(dequantize(checkpoint.weight(name)), MATRIX)


@pytest.mark.parametrize(("weight_map", "cause"), [
    (PLACES | {"e": SHARD(3)}, "tensors that their shard does not hold: e"),
    (PLACES | {"e": "model-00004-of-00003.safetensors"}, "1 of 4 shards are missing: model-00004"),
    ({"a": SHARD(1), "b": SHARD(2), "d": SHARD(3)}, r"00002-of-00003\.safetensors: tensors that .* not place there: c"),
    (PLACES | {"a": SHARD(3)}, "tensors that their shard does not hold: a"),
    (PLACES | {"a": "../" + SHARD(1)}, "not a file name"),
    (PLACES | {"a": ".."}, "missing"),
    (PLACES | {"a": 7}, "not a file name"),
    ({}, "no weight_map"),
])
def test_an_index_that_disagrees_with_its_shards_is_refused(tmp_path: Path, weight_map: dict[str, Any],
                                                           cause: str) -> None:
    with pytest.raises(ValueError, match=cause):
        Checkpoint(sharded(tmp_path / "m", weight_map))


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m", PLACES)
    write_folder(folder, {}, {"a": MATRIX, "d": MATRIX}, SHARD(3))
    with pytest.raises(ValueError, match="not place there: a"):
        Checkpoint(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m", PLACES)
    (folder / SHARD(2)).unlink()
    with pytest.raises(ValueError, match=f"1 of 3 shards are missing: {SHARD(2)}"):
        Checkpoint(folder)


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m", PLACES)
    path = folder / SHARD(2)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"{SHARD(2)}: damaged"):
        Checkpoint(folder)


@pytest.mark.parametrize("index", [b"", b"{", b"[]", b"\xff", b'{"weight_map": [1]}', b'{"weight_map": {"a": []}}'])
def test_a_damaged_index_is_refused(tmp_path: Path, index: bytes) -> None:
    folder = sharded(tmp_path / "m", PLACES)
    (folder / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json: "):
        Checkpoint(folder)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        Checkpoint(tmp_path)
