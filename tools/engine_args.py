"""The command-line flags that every tool with an engine of its own shares, under vLLM's names."""
from __future__ import annotations

import argparse
from typing import Any


def add_engine_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument("--model", default="smollm2")
    group.add_argument("--seed", type=int)


def engine_config(args: argparse.Namespace) -> dict[str, Any]:
    return {"seed": args.seed}
