"""What tools share that talk either to a server (`--url`) or to an engine of their own."""
from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, TypeAlias

from tools.engine_args import add_engine_args

if TYPE_CHECKING:
    from api.engine import Engine

EngineFactory: TypeAlias = Callable[..., AbstractAsyncContextManager["Engine"]]      # Engine.start

# Seconds. At Python's default of 5 ms the engine's thread would wait that long, each step, for a busy loop here.
SWITCH_INTERVAL_S = 2e-4


def reject_engine_args(args: argparse.Namespace, allowed: Collection[str],
                       reason: str = "is a setting of the engine and cannot be used with --url") -> None:
    """Raises: ValueError where a flag of the engine, but those `allowed`, was given."""
    parser = argparse.ArgumentParser(add_help=False)
    add_engine_args(parser)
    for action in parser._actions:
        if action.dest not in allowed and getattr(args, action.dest) != action.default:
            raise ValueError(f"{action.option_strings[-1]} {reason}")
