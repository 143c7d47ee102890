"""How much memory there is, without a dependency for it."""
from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path


def available_host_bytes() -> int:
    """Memory that this process may still take: the system's estimate, or the control group's room if that is less."""
    system = _system_available_bytes()
    limit = _cgroup_room_bytes()
    return system if limit is None else min(system, limit)


def _system_available_bytes() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        return _windows_available_bytes()
    # macOS has no cheap figure for what is free to take: half of the memory is the stated rule there.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _cgroup_room_bytes() -> int | None:
    """Room under a version-2 control group's limit; None without one."""
    limit, current = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    try:
        text = limit.read_text().strip()
        return None if text == "max" else max(0, int(text) - int(current.read_text()))
    except (OSError, ValueError):
        return None


def _windows_available_bytes() -> int:
    class MemoryStatus(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ulong), ("load", ctypes.c_ulong),
                    *((name, ctypes.c_ulonglong) for name in ("total", "available", "total_page", "available_page",
                                                              "total_virtual", "available_virtual", "extended"))]

    status = MemoryStatus(length=ctypes.sizeof(MemoryStatus))
    ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))  # type: ignore[attr-defined,unused-ignore]
    return int(status.available)
