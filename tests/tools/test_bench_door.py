"""tools.bench_door over an engine that needs no model: its figures belong together, and it leaves nothing behind."""
from __future__ import annotations

import json
import multiprocessing
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.tools.scripted_engine import ScriptedEngine
from tools import bench_door


@asynccontextmanager
async def engine(model: str, **config: Any) -> AsyncIterator[Any]:
    assert config["max_num_seqs"] >= bench_door.GRAMMAR_ROWS
    yield ScriptedEngine()


def test_the_door_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_door, "PACE_S", 0.01)
    monkeypatch.setattr(bench_door, "SENDS", 20)
    report = tmp_path / "door.json"
    assert bench_door.run(["--only", "paced", "--streams", "3", "--tokens", "20", "--json", str(report)], engine) == 0
    assert not multiprocessing.active_children()
    assert "bench-pace" not in {thread.name for thread in threading.enumerate()}
    figures = json.loads(report.read_text())
    assert figures["paced_streams"] == 3
    assert figures["paced_tokens_per_stream"] == 20
    for name in ("output_throughput", "health_ms", "send_cpu_us"):
        assert figures[f"paced_{name}"] > 0
    assert figures["paced_health_max_ms"] >= figures["paced_health_ms"]
    assert "a token of 3 streams at an even pace" in capsys.readouterr().out


@pytest.mark.parametrize(("argv", "message"), [
    (["--streams", "0"], "--streams must be at least 1"), (["--tokens", "1"], "--tokens at least 2"),
    (["--json", "/no/such/folder/x.json"], "--json: /no/such/folder is not a directory"),
])
def test_bad_arguments_are_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_door.run(argv, engine) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("bench_door: ")
    assert message in err
    assert err.count("\n") == 1
