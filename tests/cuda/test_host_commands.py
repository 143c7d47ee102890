"""The command list: every item once, in order, by threads that may come late; and the memory it works in."""
from __future__ import annotations

import gc
import logging
import os
import platform
import subprocess
import sys
import threading
from pathlib import Path

import numba
import numpy as np
import pytest

from cuda.host import compilation, cores
from cuda.host.commands import CommandList, Team
from cuda.host.compilation import Kernel
from cuda.host.ops import HostOps
from cuda.host.workspace import address_of, allocate, new_buffer, row_bytes
from tests.cuda.host_kernels import CHAIN, COUNT, USE_SCRATCH, count_items
from tests.cuda.host_support import GUARD, host_ops, memory_of, random_floats

ROOT = Path(__file__).parent.parent.parent


def num_workers() -> int:
    return sum(thread.name.startswith("host-") for thread in threading.enumerate())


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_every_item_of_every_command_once(num_threads: int) -> None:
    commands, team = CommandList(), Team(num_threads)
    counts = np.zeros((3000, 40), np.int64)                 # more commands than the list has room for at first
    for command in range(len(counts)):
        items, share = command % 41, 1 + command % 7
        commands.add(COUNT, items, share, address_of(counts[command]), 1)
    assert len(commands) == len(counts)
    for repeat in range(3):
        team.run(commands)
        expected = (np.arange(40) < (np.arange(len(counts)) % 41)[:, None]) * (repeat + 1)
        np.testing.assert_array_equal(counts, expected)
    team.close()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_times_of_commands_on_request(num_threads: int) -> None:
    commands, team = CommandList(), Team(num_threads)
    counts = np.zeros(40, np.int64)
    team.trace = []
    for items in (40, 0, 7):
        commands.add(COUNT, items, 1, address_of(counts), 1)
    for _ in range(2):
        team.run(commands)
    assert [name for name, _ in team.trace] == [COUNT.name] * 6
    assert all(seconds >= 0 for _, seconds in team.trace)
    assert 0 < sum(seconds for _, seconds in team.trace) < 10
    team.trace = None
    team.run(commands)
    assert counts.tolist() == [6] * 7 + [3] * 33
    team.close()


@pytest.mark.parametrize("num_threads", [1, 2, 6])
def test_a_command_sees_all_of_the_one_before(num_threads: int) -> None:
    team = Team(num_threads)
    columns = 13
    for _ in range(20):
        commands = CommandList()
        rows = np.zeros((16, columns), np.int64)
        for before, row in zip(rows, rows[1:], strict=False):
            commands.add(CHAIN, columns, 1, address_of(before), address_of(row), columns)
        team.run(commands)
        expected = [0]
        for _ in rows[1:]:
            expected.append(expected[-1] * columns + 1)
        np.testing.assert_array_equal(rows, np.repeat(np.array(expected, np.int64)[:, None], columns, axis=1))
    team.close()


def test_scratch_is_a_thread_s_own_and_grows() -> None:
    commands, team = CommandList(), Team(4)
    errors = np.zeros(1, np.int64)
    commands.add(USE_SCRATCH, 500, 1, address_of(errors))
    for num_bytes in (8, 5000, 100):
        team.want_scratch(num_bytes)
        team.run(commands)
    assert errors[0] == 0
    team.close()


def test_forgotten_commands_do_not_run() -> None:
    commands, team = CommandList(), Team(2)
    counts = np.zeros(4, np.int64)
    commands.add(COUNT, 4, 1, address_of(counts), 1)
    commands.clear()
    team.run(commands)
    assert not counts.any()
    commands.add(COUNT, 2, 1, address_of(counts), 5)
    team.run(commands)
    assert counts.tolist() == [5, 5, 0, 0]
    team.close()


def test_nobody_waits_for_a_thread_that_does_not_come() -> None:
    """As in a forked process, or on a machine that gives the workers no time."""
    before = num_workers()
    commands, team = CommandList(), Team(3)
    assert num_workers() == before + 2
    team.close()
    assert num_workers() == before
    counts = np.zeros(100, np.int64)
    commands.add(COUNT, 100, 3, address_of(counts), 1)
    team.run(commands)
    assert (counts == 1).all()


def test_lists_of_several_threads_work_side_by_side() -> None:
    def work(results: list[bool]) -> None:
        commands, team = CommandList(), Team(2)
        counts = np.zeros((50, 20), np.int64)
        for row in counts:
            commands.add(COUNT, 20, 1, address_of(row), 1)
        for _ in range(10):
            team.run(commands)
        team.close()
        results.append(bool((counts == 10).all()))

    results: list[bool] = []
    threads = [threading.Thread(target=work, args=(results,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 3


def test_threads_end_by_close_and_by_being_forgotten() -> None:
    before = num_workers()
    ops = HostOps(3)
    assert num_workers() == before + 2
    ops.close()
    ops.close()
    assert num_workers() == before
    forgotten = HostOps(4)
    assert num_workers() == before + 3
    del forgotten
    gc.collect()
    assert num_workers() == before


def test_number_of_threads() -> None:
    before = num_workers()
    with host_ops(1):
        assert num_workers() == before
    with pytest.raises(ValueError, match="num_threads must be at least 1, not 0"):
        HostOps(0)
    ops = HostOps()
    assert 1 <= ops.num_threads <= (os.cpu_count() or 1)
    ops.close()


@pytest.mark.parametrize(("text", "cpus"), [("max 100000\n", sys.maxsize), ("400000 100000\n", 4),
                                            ("150000 100000\n", 1), ("50000 100000\n", 1), ("nonsense", sys.maxsize)])
def test_control_group_s_share(tmp_path: Path, text: str, cpus: int) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert cores.cgroup_cpus(tmp_path / "cpu.max") == cpus
    assert cores.cgroup_cpus(tmp_path / "missing") == sys.maxsize


# The workspace

def test_row_bytes() -> None:
    for columns in range(1, 3000):
        num_bytes = row_bytes(columns)
        assert num_bytes % 64 == 0
        assert num_bytes % 1024 != 0
        assert 4 * (columns + 31) <= num_bytes <= 4 * columns + 256


def test_memory_is_zeroed_and_aligned() -> None:
    for num_bytes in (0, 1, 5000, 3 << 20):
        memory = allocate(num_bytes)
        assert address_of(memory) % 64 == 0
        assert not any(memory[:num_bytes])


def test_a_buffer_is_in_use_while_anybody_holds_a_part_of_it() -> None:
    buffer = new_buffer(4, 10)
    assert not buffer.in_use()
    held = buffer.view
    assert buffer.in_use()
    held = held[1:3, 2:].T
    assert buffer.in_use()
    del held
    assert not buffer.in_use()


def test_results_are_reused_only_when_let_go_of() -> None:
    weight = np.ones(40, np.float32)
    x = random_floats(0, 3, 40)
    with host_ops() as ops:
        kept = [ops.rms_norm(x, weight, 1e-6) for _ in range(4)]
        assert len({array.__array_interface__["data"][0] for array in kept}) == 4
        part = kept.pop()[1:]
        address = part.__array_interface__["data"][0]
        again = ops.rms_norm(x, weight, 1e-6)
        assert again.__array_interface__["data"][0] + again.strides[0] != address
        del part
        assert ops.rms_norm(x, weight, 1e-6)[1:].__array_interface__["data"][0] == address


def test_results_of_steps_that_grow_and_shrink() -> None:
    weight = np.ones(24, np.float32)
    with host_ops() as ops:
        for rows in (1, 3, 64, 2, 65, 1, 7):
            x = random_floats(rows, rows, 24)
            y = ops.rms_norm(x, weight, 0.0)
            memory = memory_of(y)
            memory[:] = GUARD
            ops.finish()
            assert y.shape == (rows, 24)
            np.testing.assert_allclose(y, x / np.sqrt(np.mean(x * x, axis=1, keepdims=True)), rtol=1e-5)
            assert (memory[rows * y.strides[0] // 4:] == GUARD).all()


# Machine code

def test_machine_code_is_kept_per_version_of_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compilation, "_cache_folder", compilation._cache_folder.__wrapped__)
    counts = np.zeros(2, np.int64)
    commands, team = CommandList(), Team(1)
    for expected_hits in (0, 1):
        kernel = Kernel(count_items, "qq")
        commands.clear()
        commands.add(kernel, 2, 1, address_of(counts), 1)
        team.run(commands)
        assert kernel.compiled.cache_hits == expected_hits
    assert counts.tolist() == [2, 2]
    [folder] = tmp_path.iterdir()
    assert folder.name.startswith("kernels-")
    assert str(tmp_path) == numba.config.CACHE_DIR
    team.close()


def test_without_a_writable_folder_code_is_compiled_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                         caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(compilation, "_cache_folder", compilation._cache_folder.__wrapped__)
    with caplog.at_level(logging.WARNING, "troupe.host"):
        kernel = Kernel(count_items, "qq")
        counts = np.zeros(2, np.int64)
        commands, team = CommandList(), Team(1)
        commands.add(kernel, 2, 1, address_of(counts), 1)
        team.run(commands)
        team.close()
    assert counts.tolist() == [1, 1]
    assert "set NUMBA_CACHE_DIR to a writable folder" in caplog.text


PROCESSOR_SCRIPT = """
import hashlib
import numpy as np
from tests.cuda.host_kernels import CHAIN, COUNT, USE_SCRATCH, count_items
from tests.cuda.host_support import host_ops, make_spec, prepare, random_affine, random_floats
from tests.cuda.test_host_attention import Attention
from weights.quant import Linear

digest = hashlib.sha256()
with host_ops() as ops:
    for bits in (4, 8):
        prepared = prepare(ops, make_spec(128), Linear((random_affine(0, 90, 128, bits, 32),)))
        for rows in (1, 5, 30):
            logits = ops.logits(random_floats(1, rows, 128), prepared.head, 7.0)
            ops.finish()
            digest.update(np.ascontiguousarray(logits))
    for gate in ("silu", "gelu_tanh"):
        gated = ops.gated(random_floats(2, 9, 200), gate)
        ops.finish()
        digest.update(np.ascontiguousarray(gated))
    for rows in Attention(ops, 9, 3, 24, window=20, softcap=5.0).whole():
        digest.update(np.ascontiguousarray(rows))
print(digest.hexdigest())
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="names x86 processors")
def test_the_same_bits_on_every_processor(tmp_path: Path) -> None:
    """As LLVM compiles for this machine, for AVX2 and for the first x86-64."""
    targets = [{}, {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,-avx512f"},
               {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}]
    digests = [subprocess.run([sys.executable, "-c", PROCESSOR_SCRIPT], cwd=ROOT, check=True, text=True,
                              stdout=subprocess.PIPE,
                              env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / str(i)), **target}).stdout
               for i, target in enumerate(targets)]
    assert digests[1:] == digests[:1] * 2
