from __future__ import annotations

import argparse
import dataclasses

import pytest

from actors.system import EngineConfig
from cuda.ops import KV_DTYPES
from tools.client_args import reject_engine_args
from tools.engine_args import add_engine_args, engine_config, memory_size


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_engine_args(parser)
    return parser.parse_args(argv)


def test_what_is_not_given_is_left_to_the_engine() -> None:
    assert engine_config(parse()) == {}


def test_every_flag_is_a_setting_of_the_engine() -> None:
    settings = {"device": "cpu", "max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 64,
                "kv_cache_memory": 1 << 20, "kv_dtype": "int8", "seed": 3, "generation_config": "none", "threads": 2,
                "host_math": "exact"}
    argv = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert engine_config(parse(*argv)) == settings
    config = EngineConfig(**engine_config(parse(*argv)))
    assert settings.items() <= dataclasses.asdict(config).items()


def test_the_share_of_memory_is_a_setting_too() -> None:
    """Not beside --kv-cache-memory: both say how large the KV cache is."""
    settings = engine_config(parse("--gpu-memory-utilization", "0.5"))
    assert EngineConfig(**settings).gpu_memory_utilization == 0.5
    with pytest.raises(ValueError, match="kv_cache_memory and gpu_memory_utilization"):
        EngineConfig(**settings, kv_cache_memory=1 << 20)


@pytest.mark.parametrize("dtype", ["auto", *KV_DTYPES])
def test_every_kv_dtype_can_be_asked_for(dtype: str) -> None:
    assert EngineConfig(**engine_config(parse("--kv-dtype", dtype))).kv_dtype == dtype


@pytest.mark.parametrize(("text", "num_bytes"), [("0", 0), ("123", 123), ("1K", 1024), ("512M", 1 << 29),
                                                 ("2G", 1 << 31)])
def test_memory_sizes(text: str, num_bytes: int) -> None:
    assert memory_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "-1", "1.5G", "2g", "2GB", "G", "1e9", "９"])
def test_what_is_no_memory_size(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a number of bytes"):
        memory_size(text)


@pytest.mark.parametrize("argv", [["--device", "cpu"], ["--threads", "2"], ["--max-model-len", "9"],
                                  ["--log-level", "info"]])
def test_flags_of_the_engine_are_refused_beside_a_server(argv: list[str]) -> None:
    with pytest.raises(ValueError, match=f"^{argv[0]} is a setting of the engine"):
        reject_engine_args(parse(*argv), allowed=("model", "seed"))


def test_what_a_server_takes_too_is_allowed() -> None:
    reject_engine_args(parse("--model", "m", "--seed", "3"), allowed=("model", "seed"))
