"""How many threads pay off on this machine."""
from __future__ import annotations

import os
import sys
from pathlib import Path


def num_physical_cores() -> int:
    """Cores that this process may use, hyper-threads counted once where the system tells (Linux), within the control
    group's share of processor time."""
    if sys.platform != "linux":
        return os.cpu_count() or 1
    allowed = os.sched_getaffinity(0)
    siblings = {_siblings(cpu) for cpu in allowed}
    return max(1, min(len(siblings), cgroup_cpus(Path("/sys/fs/cgroup/cpu.max"))))


def _siblings(cpu: int) -> str:
    """The hyper-threads of a core, as one name; the processor's own number where that is not told."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(cpu)


def cgroup_cpus(path: Path) -> int:
    """Whole processors that a version-2 control group's quota pays for, at least one."""
    try:
        quota, period = path.read_text().split()
    except (OSError, ValueError):
        return sys.maxsize
    return sys.maxsize if quota == "max" else max(1, int(quota) // int(period))
