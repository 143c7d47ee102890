"""The GGUF reader: what it reads, and what it refuses."""
from __future__ import annotations

import struct
import tracemalloc
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.weights.model_files import QType, refusal, write_gguf
from weights.gguf import Gguf
from weights.quant import Dense, dequantize

KINDS: list[Any] = [str, int, float, bool]
MATRIX = np.arange(96, dtype=np.float32).reshape(3, 32)


def sample(path: Path) -> Path:
    return write_gguf(path, "llama", {
        "llama.block_count": 30, "llama.rope.freq_base": 10000.5, "tokenizer.ggml.add_bos_token": True,
        "general.name": "näme", "tokenizer.ggml.tokens": ["a", "", "Ġb", "日本"],
        "tokenizer.ggml.scores": [0.5, -1.5], "tokenizer.ggml.token_type": [1, 2, 3],
    }, {
        "norm": (np.array([1.0, 2.0, 3.0], np.float32), QType.F32),
        "half": (MATRIX.astype(np.float16), QType.F16),
        "quantised": (gguf.quants.quantize(MATRIX, QType.Q8_0), QType.Q8_0),
        "cube": (np.zeros((2, 3, 4), np.float32), QType.F32),
    })


@pytest.fixture
def opened(tmp_path: Path) -> Gguf:
    return Gguf(sample(tmp_path / "sample.gguf"))


def test_metadata(opened: Gguf) -> None:
    assert opened.get("general.architecture", str) == "llama"
    assert opened.get("llama.block_count", int) == 30
    assert opened.get("llama.rope.freq_base", float) == 10000.5
    assert opened.get("tokenizer.ggml.add_bos_token", bool) is True
    assert opened.require("general.name", str) == "näme"
    assert opened.get_strings("tokenizer.ggml.tokens") == ["a", "", "Ġb", "日本"]
    scores = opened.get_numbers("tokenizer.ggml.scores")
    assert scores is not None
    np.testing.assert_array_equal(scores, np.array([0.5, -1.5], np.float32))
    assert "general.name" in opened
    assert "general.nothing" not in opened
    assert opened.keys()[0] == "general.architecture"


def test_missing_metadata(opened: Gguf) -> None:
    assert opened.get("no.such", int) is None
    assert opened.get_strings("no.such") is None
    assert opened.get_numbers("no.such") is None
    with pytest.raises(ValueError, match=r"sample\.gguf: metadata key no\.such is missing"):
        opened.require("no.such", int)


@pytest.mark.parametrize(("key", "kind"), [
    ("llama.block_count", float), ("llama.block_count", bool), ("llama.rope.freq_base", int), ("general.name", int),
    ("tokenizer.ggml.add_bos_token", int), ("tokenizer.ggml.tokens", str), ("tokenizer.ggml.token_type", int),
])
def test_metadata_of_another_type_is_refused(opened: Gguf, key: str, kind: Any) -> None:
    with pytest.raises(ValueError, match=f"{key} is not a single {kind.__name__}"):
        opened.get(key, kind)


def test_arrays_of_another_type_are_refused(opened: Gguf) -> None:
    with pytest.raises(ValueError, match="not an array of strings"):
        opened.get_strings("tokenizer.ggml.token_type")
    with pytest.raises(ValueError, match="not an array of strings"):
        opened.get_strings("general.name")
    with pytest.raises(ValueError, match="not an array of numbers"):
        opened.get_numbers("tokenizer.ggml.tokens")


@pytest.mark.parametrize(("add", "value"), [
    ("add_uint8", 200), ("add_int8", -100), ("add_uint16", 60000), ("add_int16", -30000), ("add_uint32", 1 << 31),
    ("add_int32", -(1 << 31)), ("add_uint64", (1 << 64) - 1), ("add_int64", -(1 << 63)),
])
def test_every_width_of_integer(tmp_path: Path, add: str, value: int) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    getattr(writer, add)("key", value)
    writer.add_float64("double", 0.1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    opened = Gguf(tmp_path / "x.gguf")
    assert opened.get("key", int) == value
    assert opened.get("double", float) == 0.1


def test_tensors(opened: Gguf) -> None:
    assert opened.shapes == {"norm": (3,), "half": (3, 32), "quantised": (3, 32), "cube": (2, 3, 4)}
    assert opened.nbytes == 12 + 192 + 3 * 34 + 96
    np.testing.assert_array_equal(opened.vector("norm"), np.array([1, 2, 3], np.float32))
    half = opened.weight("half")
    assert isinstance(half, Dense)
    assert half.data.flags.aligned
    np.testing.assert_array_equal(dequantize(half), MATRIX)
    np.testing.assert_array_equal(dequantize(opened.weight("quantised")),
                                  gguf.quants.dequantize(gguf.quants.quantize(MATRIX, QType.Q8_0), QType.Q8_0))


def test_tensors_asked_for_wrongly(opened: Gguf) -> None:
    with pytest.raises(ValueError, match="tensor nothing is missing"):
        opened.weight("nothing")
    with pytest.raises(ValueError, match=r"tensor cube has shape \(2, 3, 4\), 2 dimensions"):
        opened.weight("cube")
    with pytest.raises(ValueError, match="tensor half has shape"):
        opened.vector("half")


def test_version_2_is_read(tmp_path: Path) -> None:
    path = sample(tmp_path / "sample.gguf")
    path.write_bytes(path.read_bytes().replace(b"GGUF\x03", b"GGUF\x02", 1))
    assert Gguf(path).get("llama.block_count", int) == 30


# Hand-made files, for what no writer would write.

def text(value: str | bytes, length: int | None = None) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def array(kind: int, count: int, values: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + values


def info(name: str | bytes = "t", dims: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0,
         num_dims: int | None = None) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims) if num_dims is None else num_dims, *dims, kind,
                                    offset)


def image(keys: tuple[bytes, ...] = (), infos: tuple[bytes, ...] = (), data: bytes = b"", *, version: int = 3,
          num_keys: int | None = None, num_tensors: int | None = None, alignment: int = 32) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(infos) if num_tensors is None else num_tensors,
                                 len(keys) if num_keys is None else num_keys)
    body = head + b"".join(keys) + b"".join(infos)
    return body + bytes(-len(body) % alignment) + data


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


HUGE = (1 << 64) - 1
BAD = {
    "empty": (b"", "empty"),
    "magic": (b"GGML" + bytes(40), "not a GGUF file"),
    "short": (b"GGUF\x03", "truncated"),
    "version 1": (image(version=1), "version 1"),
    "version 4": (image(version=4), "version 4"),
    "big-endian": (image(version=3 << 24), "big-endian"),
    "many keys": (image(num_keys=HUGE), "metadata keys"),
    "keys that are not there": (image(num_keys=5, alignment=1), "truncated"),
    "many tensors": (image(num_tensors=1 << 60), "tensors"),
    "tensors that are not there": (image(num_tensors=1, alignment=1), "truncated"),
    "long key": (image((text("k", HUGE),)), f"{HUGE} bytes long"),
    "key longer than the file": (image((text("k", 60000),)), "needs 60000 bytes"),
    "empty key": (image((key("", 4, u32(1)),)), "0 bytes long"),
    "key that is not UTF-8": (image((text(b"\xff\xfe") + u32(4) + u32(1),)), "not UTF-8"),
    "the same key twice": (image((key("k", 4, u32(1)), key("k", 4, u32(2)))), "k appears twice"),
    "value type": (image((key("k", 13, u32(1)),)), "value type 13"),
    "long string": (image((key("k", 8, text("x", HUGE)),)), "metadata key k"),
    "string one byte too long": (image((key("k", 8, text("x", 2)),), alignment=1), "truncated"),
    "long array": (image((key("k", 9, array(4, 1 << 62)),)), "truncated"),
    "long array of strings": (image((key("k", 9, array(8, HUGE)),)), "strings"),
    "array of strings past the end": (image((key("k", 9, array(8, 1000, text("a"))),)), "truncated"),
    "string in an array past the end": (image((key("k", 9, array(8, 2, text("a", HUGE))),)), "truncated"),
    "nested array": (image((key("k", 9, array(9, 1, array(4, 1, u32(1)))),)), "value type 9"),
    "alignment 0": (image((key("general.alignment", 4, u32(0)),), (info(),), bytes(128)), "general.alignment 0"),
    "alignment 24": (image((key("general.alignment", 4, u32(24)),), (info(),), bytes(128)), "general.alignment 24"),
    "alignment -8": (image((key("general.alignment", 5, struct.pack("<i", -8)),), (info(),), bytes(128)),
                     "general.alignment -8"),
    "alignment 2**31": (image((key("general.alignment", 4, u32(1 << 31)),), (info(),), bytes(128)), "truncated"),
    "alignment as text": (image((key("general.alignment", 8, text("32")),), (info(),), bytes(128)), "not a single int"),
    "long tensor name": (image(infos=(info("n" * 65),), data=bytes(128)), "65 bytes long"),
    "tensor name that is not UTF-8": (image(infos=(info(b"\xff"),), data=bytes(128)), "not UTF-8"),
    "no dimensions": (image(infos=(info(dims=()),), data=bytes(128)), "0 dimensions"),
    "five dimensions": (image(infos=(info(dims=(2, 2, 2, 2, 2)),), data=bytes(128)), "5 dimensions"),
    "2**32 - 1 dimensions": (image(infos=(info(num_dims=(1 << 32) - 1),), data=bytes(128)), "dimensions"),
    "empty dimension": (image(infos=(info(dims=(32, 0)),), data=bytes(128)), "empty shape"),
    "dimensions that overflow": (image(infos=(info(dims=(1 << 63, 1 << 63)),), data=bytes(128)), "truncated"),
    "dimensions that overflow to 0": (image(infos=(info(dims=(1 << 32, 1 << 32)),), data=bytes(128)), "truncated"),
    "type Q2_K": (image(infos=(info(dims=(256,), kind=10),), data=bytes(128)), "tensor t has type Q2_K"),
    "type 4000": (image(infos=(info(kind=4000),), data=bytes(128)), "tensor t has type 4000"),
    "ragged rows": (image(infos=(info(dims=(33, 2), kind=8),), data=bytes(128)), "rows of 33 weights"),
    "offset": (image(infos=(info(offset=32),), data=bytes(256)), "offset 32, 0 was expected"),
    "offset 2**64 - 1": (image(infos=(info(offset=HUGE),), data=bytes(128)), "was expected"),
    "overlap": (image(infos=(info("a"), info("b")), data=bytes(256)), "tensor b is at offset 0, 128 was expected"),
    "gap": (image(infos=(info("a"), info("b", offset=160)), data=bytes(512)), "160, 128 was expected"),
    "the same tensor twice": (image(infos=(info(), info(offset=128)), data=bytes(256)), "t appears twice"),
    "one byte too few": (image(infos=(info(),), data=bytes(127)), "truncated: tensor t"),
    "one gigabyte too few": (image(infos=(info(dims=(1 << 28,)),), data=bytes(128)), "truncated: tensor t"),
    "last tensor one byte too long": (image(infos=(info("a"), info("b", (33,), offset=128)), data=bytes(259)),
                                      "truncated: tensor b"),
    "trailing bytes": (image(infos=(info(),), data=bytes(128 + 8)), "8 bytes follow"),
}


@pytest.mark.parametrize("name", BAD)
def test_malformed_files_are_refused(tmp_path: Path, name: str) -> None:
    raw, cause = BAD[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(raw)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=cause) as caught:
            Gguf(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert str(caught.value).startswith(str(path))


def test_the_hand_made_files_are_otherwise_good(tmp_path: Path) -> None:
    path = tmp_path / "good.gguf"
    path.write_bytes(image((key("k", 9, array(8, 2, text("a") + text("b"))), key("general.alignment", 4, u32(64))),
                           (info("a"), info("b", (33,), offset=128)), bytes(128 + 132), alignment=64))
    opened = Gguf(path)
    assert opened.get_strings("k") == ["a", "b"]
    assert opened.shapes == {"a": (32,), "b": (33,)}


@pytest.mark.parametrize(("raw", "read"), [
    (image((key("k", 7, b"\x02"),)), lambda opened: opened.get("k", bool)),
    (image((key("k", 8, text(b"\xff")),)), lambda opened: opened.get("k", str)),
    (image((key("k", 9, array(8, 1, text(b"\xff"))),)), lambda opened: opened.get_strings("k")),
    (image(infos=(info(dims=(32, 1), kind=8),), data=b"\xff" * 34 + bytes(30)),
     lambda opened: dequantize(opened.weight("t"))),
    (image(infos=(info(kind=8),), data=bytes(64)), lambda opened: opened.vector("t")),
])
def test_damaged_values_are_refused_when_read(tmp_path: Path, raw: bytes, read: Any) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(raw)
    opened = Gguf(path)
    with pytest.raises(ValueError, match=r"bad\.gguf: "):
        read(opened)


def test_what_is_not_a_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(ValueError, match="no such file"):
            Gguf(path)


def read_everything(opened: Gguf) -> list[str | None]:
    """What reading each value and tensor in every way was refused with."""
    causes = []
    for name in opened.keys():
        causes += [refusal(partial(read, name)) for read in (opened.get_strings, opened.get_numbers)]
        causes += [refusal(partial(opened.get, name, kind)) for kind in KINDS]
    for name in opened.shapes:
        causes += [refusal(partial(opened.vector, name)), refusal(partial(read_weight, opened, name))]
    return causes


def read_weight(opened: Gguf, name: str) -> None:
    dequantize(opened.weight(name))


@pytest.fixture(scope="module")
def good_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return sample(tmp_path_factory.mktemp("gguf") / "sample.gguf").read_bytes()


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_raises_only_value_errors(tmp_path: Path, good_bytes: bytes, data: st.DataObject) -> None:
    damaged = bytearray(good_bytes)
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damaged[:data.draw(st.integers(1, len(damaged)))] if data.draw(st.booleans()) else damaged)
    cause = refusal(lambda: Gguf(path))
    causes = [cause] if cause is not None else read_everything(Gguf(path))
    assert all(cause is None or cause.startswith(str(path)) for cause in causes)


def test_every_truncation_is_refused(tmp_path: Path, good_bytes: bytes) -> None:
    path = tmp_path / "cut.gguf"
    # The last tensor's own padding may be missing.
    for length in range(1, len(good_bytes) - 31):
        path.write_bytes(good_bytes[:length])
        with pytest.raises(ValueError, match="truncated|not a GGUF"):
            Gguf(path)
