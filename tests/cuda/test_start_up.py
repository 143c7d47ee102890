"""Who waits for a start hears of every stage, and of steps only while a stage takes long."""
from __future__ import annotations

import pytest

from cuda import start_up
from cuda.host.compilation import Kernel
from cuda.host.ops import HostOps
from cuda.start_up import StartUp
from tests.cuda.host_support import make_spec, prepare


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(start_up, "time", made)
    return made


def test_steps_are_told_once_a_second_of_silence(clock: Clock) -> None:
    lines: list[str] = []
    told = StartUp(lines.append, _told_s=clock.now)
    for number in range(40):
        told.step(f"step {number}")
        clock.now += 0.25
    assert lines == [f"step {number}" for number in range(4, 40, 4)]
    told.stage("all", begin_s=100.0)
    told.step("too soon")
    assert lines[-1] == "all: 10.00 s"
    assert told.stages == [("all", 10.0)]


def test_a_slow_compiler_is_heard_of(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    compiled = vars(Kernel)["address"].func

    def slowly(kernel: Kernel) -> int:
        clock.now += 3
        address: int = compiled(kernel)
        return address

    ops = HostOps(1, start_up=StartUp(lines.append, _told_s=clock.now))
    try:
        monkeypatch.setattr(Kernel, "address", property(slowly))
        prepare(ops, make_spec())
    finally:
        ops.close()
    steps = [line for line in lines if line.startswith("compiling for this processor, once: ")]
    assert len(steps) == len(lines) - 1 >= 5
    assert steps[-1].split()[-3] == steps[-1].split()[-1]
    assert lines[0].startswith("weights: ")
