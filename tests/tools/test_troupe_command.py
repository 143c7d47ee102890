"""The console script `troupe`."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def troupe(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "tools", *args], cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("args", [[], ["--help"]])
def test_lists_the_tools(args: list[str]) -> None:
    result = troupe(*args)
    assert result.returncode == 0
    for name in ("serve", "chat", "bench"):
        assert f"\n  {name} " in result.stdout
    for helper in ("engine_args", "sse_client", "__main__"):
        assert helper not in result.stdout


def test_unknown_tool() -> None:
    result = troupe("nothing")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("troupe: there is no tool 'nothing'\n")


def test_runs_a_tool_with_its_arguments_and_exit_code() -> None:
    result = troupe("serve", "--port", "x")
    assert result.returncode == 2
    assert "'x' is not a port" in result.stderr
