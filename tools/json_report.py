"""The JSON documents that tools write: their figures, with the command, the machine and the versions."""
from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

DATE_FORMAT = "%Y%m%d-%H%M%S"


def check_report_path(path: Path | None) -> None:
    """Before the work. Raises: ValueError where no file can be made there."""
    if path is not None and not path.parent.is_dir():
        raise ValueError(f"--json: {path.parent} is not a directory")


def write_report(path: Path, tool: str, command: Sequence[str], figures: Mapping[str, Any]) -> None:
    """`tool` and `command`: what ran, and its arguments. The file is there whole or not at all."""
    document = {"date": time.strftime(DATE_FORMAT), **figures,
                "command": shlex.join(["python", "-m", f"tools.{tool}", *command]),
                "machine": _machine(), "versions": _versions()}
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def _machine() -> dict[str, Any]:
    processor = platform.processor() or platform.machine()
    try:
        names = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                 if line.startswith("model name")]
    except OSError:                         # not Linux
        names = []
    return {"platform": platform.platform(), "processor": names[0] if names else processor, "cpus": os.cpu_count()}


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("troupe", "numpy", "numba"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:     # run from a source tree that is not installed
            versions[package] = None
    return versions
