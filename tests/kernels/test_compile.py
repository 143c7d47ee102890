"""Every kernel instance on every architecture: it compiles, spills nothing and stays within its budget."""
from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor

import pytest

from cuda.kernels.kernel_spec import Instance, KernelSpec
from cuda.kernels.registry import KERNELS
from tests.kernels import nvrtc
from tests.kernels.nvrtc import Usage

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
MOST_SHARED_BYTES = 99 << 10                # of a block on sm_86, 89 and 120; the others have more
REGISTER_FILE = 65536                       # of a multiprocessor, on all of them

pytestmark = pytest.mark.skipif(nvrtc.unavailable() is not None, reason=str(nvrtc.unavailable()))

Compiled = dict[tuple[str, str], Future[dict[str, Usage]]]


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> Iterator[Compiled]:
    """What the tests of this run will ask for, all under way at once.

    NOTE: by processes: NVRTC's threads wait for each other. The longest come first, so that no core is left alone.
    """
    wanted = [(parameters["spec"], parameters["arch"]) for item in request.session.items
              if (parameters := getattr(getattr(item, "callspec", None), "params", {})).keys() == {"spec", "arch"}]
    wanted.sort(key=lambda job: -len(job[0].instances))
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        yield {(spec.name, arch): pool.submit(nvrtc.compile_kernels, spec.source,
                                              [instance.entry for instance in spec.instances], arch)
               for spec, arch in wanted}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_instances_compile_within_their_budgets(compiled: Compiled, spec: KernelSpec, arch: str) -> None:
    usages = compiled[spec.name, arch].result()
    over = [f"{instance.entry}: {usage}" for instance in spec.instances
            if not within(instance, usage := usages[instance.entry])]
    assert not over, "\n".join(over)


def within(instance: Instance, usage: Usage) -> bool:
    # Registers are given to warps in units of 8 a thread.
    given = -(-usage.registers // 8) * 8
    return (usage.spill_bytes == 0 and usage.registers <= instance.registers
            and usage.shared_bytes <= instance.shared_bytes and given * instance.threads <= REGISTER_FILE)


@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_budgets_fit_every_architecture(spec: KernelSpec) -> None:
    for instance in spec.instances:
        assert instance.shared_bytes <= MOST_SHARED_BYTES, f"{instance.entry}: {instance.shared_bytes}"
        assert instance.threads <= 1024, f"{instance.entry}: {instance.threads} threads"


def test_the_compiler_knows_the_newest_architecture() -> None:
    assert nvrtc.version() >= (12, 8), "sm_100 and sm_120 came with 12.8"


def test_what_breaks_a_budget_is_told() -> None:
    instance = Instance("scale", 512, 64, 1024)
    assert within(instance, Usage(64, 1024, 0, 0))
    for usage in (Usage(65, 0, 0, 0), Usage(64, 1025, 0, 0), Usage(64, 0, 4, 4)):
        assert not within(instance, usage)
    assert not within(Instance("scale", 1024, 128), Usage(65, 0, 0, 0)), "72 registers of 1024 threads"


def test_a_report_of_ptxas_is_read() -> None:
    log = """ptxas info    : 77 bytes gmem
ptxas info    : Compiling entry function '_Z5scaleIfLi8EEvPT_' for 'sm_90a'
ptxas info    : Function properties for _Z5scaleIfLi8EEvPT_
    16 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 16 bytes cumulative stack size, 8192 bytes smem
ptxas info    : Compile time = 3.010 ms
ptxas info    : Compiling entry function 'plain' for 'sm_90a'
ptxas info    : Function properties for plain
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
"""
    assert nvrtc.parse_report(log) == {"_Z5scaleIfLi8EEvPT_": Usage(40, 8192, 32, 16), "plain": Usage(8, 0, 0, 0)}


def test_what_does_not_compile_raises_the_compilers_words(monkeypatch: pytest.MonkeyPatch,
                                                          tmp_path: object) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(nvrtc, "source_text", lambda name: "__global__ void broken() { undeclared(); }")
    with pytest.raises(RuntimeError, match="undeclared"):
        nvrtc.compile_kernels("broken.cu", ["broken"], "sm_90a")


def test_an_answer_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(nvrtc, "source_text", lambda name: "__global__ void fill(int* x) { *x = 1; }")
    first = nvrtc.compile_kernels("fill.cu", ["fill"], "sm_90a")
    monkeypatch.setattr(nvrtc, "_compile", None)
    assert nvrtc.compile_kernels("fill.cu", ["fill"], "sm_90a") == first
    assert 0 < first["fill"].registers < 32
