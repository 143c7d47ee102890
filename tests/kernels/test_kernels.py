"""Every case of every kernel in the emulator: the reference's answer in every order of threads, blocks and copies, the
same bits each time, nothing written beside an array, no race, nothing that ASan or UBSan knows."""
from __future__ import annotations

from pathlib import Path

import pytest

from cuda.kernels.kernel_spec import Case, KernelSpec
from cuda.kernels.registry import KERNELS
from cuda.kernels.run_case import run_case
from cuda.kernels.signature import signature
from tests.cuda_emulator import build, under_asan
from tests.cuda_emulator.build import KERNELS_FOLDER, MEMORY, PLAIN, RACE
from tests.cuda_emulator.launcher import EmulatorError, EmulatorLauncher, parameter_types
from tests.kernels.harness import MODES, instances_of, run_guarded

emulated = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))

SMALL = [(spec, case) for spec in KERNELS for case in spec.cases if not case.large]
LARGE = [(spec, case) for spec in KERNELS for case in spec.cases if case.large]


def name(value: KernelSpec | Case) -> str:
    return value.name


def instances(spec: KernelSpec) -> set[tuple[str, str]]:
    return instances_of(spec, [case for case in spec.cases if not case.large])


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest) -> None:
    """All libraries that the chosen tests will load, by all processors at once."""
    chosen = [getattr(getattr(item, "callspec", None), "params", {}).get("spec") for item in request.session.items
              if item.path == request.path]
    specs = {spec.name: spec for spec in chosen if spec is not None}
    modes = (PLAIN, RACE, *((MEMORY,) if under_asan.unavailable() is None else ()))
    build.build_all((KERNELS_FOLDER / source, entry, sanitize)
                    for spec in specs.values() for source, entry in instances(spec) for sanitize in modes)


@emulated
@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(("spec", "case"), SMALL, ids=name)
def test_every_order_gives_the_references_answer_and_the_same_bits(spec: KernelSpec, case: Case) -> None:
    first = run_guarded(spec, case, *MODES[0])
    for order, lazy in MODES[1:]:
        outputs = run_guarded(spec, case, order, lazy)
        for output, numbers in outputs.items():
            assert numbers.tobytes() == first[output].tobytes(), f"{output} depends on the order ({order}, lazy {lazy})"


@emulated
@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(("spec", "case"), SMALL, ids=name)
def test_no_two_accesses_race_and_none_leaves_its_array(spec: KernelSpec, case: Case) -> None:
    run_case(spec, case, EmulatorLauncher(order=2, sanitize=RACE, specs=[spec]))


def memory_faults() -> dict[str, str]:
    """What ASan, UBSan or the reference say of every small case, in a process with libasan: nothing, if all is well."""
    said = {}
    for spec, case in SMALL:
        try:
            run_case(spec, case, EmulatorLauncher(sanitize=MEMORY, specs=[spec]))
        except (EmulatorError, AssertionError) as error:
            said[f"{spec.name} {case.name}"] = str(error)
    return said


@emulated
@pytest.mark.skipif(under_asan.unavailable() is not None, reason=str(under_asan.unavailable()))
def test_asan_and_ubsan_find_nothing_in_any_kernel() -> None:
    build.build_all((KERNELS_FOLDER / source, entry, MEMORY) for spec in KERNELS for source, entry in instances(spec))
    assert under_asan.call(__name__, "memory_faults", timeout_s=240) == {}


@emulated
@pytest.mark.slow
@pytest.mark.parametrize(("spec", "case"), LARGE, ids=name)
def test_large_cases_give_the_references_answer(spec: KernelSpec, case: Case) -> None:
    run_guarded(spec, case, *MODES[2])


# ---- the registry ----------------------------------------------------------------------------------------------------

def test_every_kernel_file_is_registered() -> None:
    on_disk = {path.name for path in KERNELS_FOLDER.glob("*.cu")}
    assert {spec.source for spec in KERNELS} == on_disk
    assert len({spec.name for spec in KERNELS}) == len(KERNELS) == len(on_disk)


@pytest.mark.parametrize("spec", KERNELS, ids=name)
def test_a_kernel_has_cases_instances_and_a_wrapper_beside_it(spec: KernelSpec) -> None:
    assert any(not case.large for case in spec.cases), "no small case"
    assert len({case.name for case in spec.cases}) == len(spec.cases), "two cases of one name"
    entries = [instance.entry for instance in spec.instances]
    assert len(set(entries)) == len(entries) > 0, "an instance is listed twice, or none is"
    assert (KERNELS_FOLDER / Path(spec.source).with_suffix(".py")).exists()


@emulated
@pytest.mark.parametrize("spec", KERNELS, ids=name)
def test_the_cases_launch_every_kernel_of_the_file(spec: KernelSpec) -> None:
    launched = {entry.partition("<")[0] for _, entry in instances(spec)}
    assert launched == {instance.entry.partition("<")[0] for instance in spec.instances}


@emulated
@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("spec", KERNELS, ids=name)
def test_parameter_types_read_from_the_source_are_the_compilers(spec: KernelSpec) -> None:
    for source, entry in instances(spec):
        read = [(parameter.is_pointer, parameter.dtype) for parameter in signature(source, entry)]
        assert read == parameter_types(KERNELS_FOLDER / source, entry), entry
