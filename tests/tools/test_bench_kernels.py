"""tools.bench_kernels on a tiny model: every operation and step is there, figures belong together."""
from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest

from tools import bench_kernels

LLAMA = str(Path(__file__).parent.parent / "golden" / "models" / "llama")
GEMMA = str(Path(__file__).parent.parent / "golden" / "models" / "gemma3")


@pytest.mark.parametrize("model", [LLAMA, GEMMA])
def test_all_operations_and_steps_with_their_shares(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_kernels, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(bench_kernels, "PRODUCT_SIZE", 64)
    report = tmp_path / "report.json"
    arguments = ["--model", model, "--rows", "1,3,20", "--max-seqs", "4", "--context", "40", "--repeats", "2",
                 "--threads", "2", "--json", str(report)]
    assert bench_kernels.run(arguments) == 0
    document = json.loads(report.read_text())
    operations = [row["operation"] for row in document["operations"]]
    assert [operations.count(name) for name in ("qkv", "o", "gate_up", "down")] == [3] * 4
    assert operations.count("head") == 2
    assert set(operations) == {"qkv", "o", "gate_up", "down", "head", "attend", "embed", "rms_norm", "rope",
                               "store_kv", "gated"}
    for row in document["operations"]:
        assert row["us"] > 0
        assert row["gb_per_s"] > 0
    assert [step["step"] for step in document["steps"]] == ["decode 1 at 40 tokens", "decode 3 at 40 tokens",
                                                            "prompt of 20"]
    for step in document["steps"]:
        assert sum(step["shares"].values()) == pytest.approx(1)
        assert step["share_of_limit"] == pytest.approx(step["floor_ms"] / step["ms"])
    assert "GFLOP/s" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "message"), [
    (["--rows", "1,0"], "--rows"), (["--rows", "x"], "--rows"), (["--repeats", "0"], "--repeats"),
    (["--json", "/no/such/folder/x.json"], "--json"), (["--model", "/no/such/model"], "/no/such/model"),
])
def test_arguments_that_cannot_be_used(arguments: list[str], message: str,
                                       capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):              # argparse's way
        assert bench_kernels.run(arguments) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
