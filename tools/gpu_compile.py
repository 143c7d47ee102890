"""Compiles kernels beside each other on a machine with a GPU; what is compiled waits in CuPy's cache on the disk."""
from __future__ import annotations

import logging
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from cuda.kernels.registry import KERNELS
from cuda.launcher import Launcher

log = logging.getLogger("troupe.compile")

_launcher: Launcher | None = None           # of a worker


def all_instances() -> list[tuple[str, str]]:
    """Source and entry of each."""
    return [(spec.source, instance.entry) for spec in KERNELS for instance in spec.instances]


def compile_instances(instances: Sequence[tuple[str, str]], num_workers: int) -> int:
    """By processes: the compiler's threads wait for each other. Returns how many."""
    with ProcessPoolExecutor(num_workers, multiprocessing.get_context("spawn")) as pool:
        tasks = {pool.submit(_compile, *instance): instance for instance in instances}
        for done, task in enumerate(as_completed(tasks), start=1):
            log.info("%d of %d: %s, %.2f s", done, len(tasks), tasks[task][1], task.result())
    return len(instances)


def _compile(source: str, entry: str) -> float:
    """In a worker. Seconds."""
    global _launcher
    if _launcher is None:
        from cuda.cupy_launcher import CupyLauncher
        _launcher = CupyLauncher()
    begin_s = time.perf_counter()
    _launcher.compile(source, [entry])
    return time.perf_counter() - begin_s
