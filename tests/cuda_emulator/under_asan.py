"""Calls a function in a process that has libasan preloaded, as kernels built for `build.MEMORY` need.

One process for many launches: it takes a second to start.
"""
from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.cuda_emulator import build

_ROOT = Path(__file__).parent.parent.parent
_MARK = "result of the child: "
# A report goes to the emulator, which turns it into an exception of the launch; the process goes on.
_OPTIONS = ("halt_on_error=0", "suppress_equal_pcs=0", "detect_leaks=0", "detect_stack_use_after_return=0")


def unavailable() -> str | None:
    """Why there is no ASan here, None where there is."""
    return build.unavailable() or (None if build.asan_library() else "g++ comes without libasan")


def call(module: str, function: str, timeout_s: float) -> Any:
    """What `function` of `module`, called without arguments, returns: anything that JSON can carry."""
    environment = {**os.environ, "LD_PRELOAD": str(build.asan_library()), "ASAN_OPTIONS": ":".join(_OPTIONS)}
    child = subprocess.run([sys.executable, "-m", __name__, module, function], cwd=_ROOT, env=environment,
                           capture_output=True, text=True, timeout=timeout_s, check=False)
    *before, last = child.stdout.splitlines() or [""]
    if child.returncode or not last.startswith(_MARK):
        raise RuntimeError(f"{module}.{function} ended with {child.returncode}\n{child.stdout[-4000:]}\n"
                           f"{child.stderr[-8000:]}")
    return json.loads(last.removeprefix(_MARK))


if __name__ == "__main__":
    print(_MARK + json.dumps(getattr(importlib.import_module(sys.argv[1]), sys.argv[2])()))
