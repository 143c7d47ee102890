"""What is said of machines with and without a usable GPU: one line, about the one thing that is missing."""
from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from actors import system
from actors.system import choose_device
from cuda import devices
from cuda.devices import NoGpu, usable_gpu


class FakeDriver:
    """libcuda with one GPU."""

    def __init__(self, init: int = 0, version: int = 12080, capability: tuple[int, int] = (9, 0),
                 attribute_status: int = 0) -> None:
        self.init, self.version, self.capability, self.attribute_status = init, version, capability, attribute_status

    def cuInit(self, flags: int) -> int:
        return self.init

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = self.version
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = ordinal
        return 0

    def cuDeviceGetName(self, name: Any, size: int, device: ctypes.c_int) -> int:
        name.value = b"NVIDIA H200"
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: ctypes.c_int) -> int:
        value._obj.value = self.capability[{75: 0, 76: 1}[attribute]]
        return self.attribute_status


class Libraries:
    """cupy_backends.cuda.libs: what is missing raises when it is named."""

    def __init__(self, *missing: str) -> None:
        self.missing = missing

    def __getattr__(self, name: str) -> object:
        if name in self.missing:
            raise ImportError(f'Failure finding "lib{name}.so.12"\nNo such file')
        return object()


def modules(missing: str = "", broken: str = "", runtime: int = 12090, libraries: Libraries | None = None) -> Any:
    def import_module(name: str) -> Any:
        if name == missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if name == broken:
            raise ImportError("libstdc++.so.6: version\nnot found")
        if name == "cupy_backends.cuda.libs":
            return libraries or Libraries()
        return SimpleNamespace(cuda=SimpleNamespace(runtime=SimpleNamespace(runtimeGetVersion=lambda: runtime)))

    return import_module


def reason(driver: Any, import_module: Any = None) -> str:
    with pytest.raises(NoGpu) as raised:
        usable_gpu(lambda: driver, import_module or modules())
    assert "\n" not in f"{raised.value}"
    return f"{raised.value}"


def no_driver() -> Any:
    raise OSError("libcuda.so.1: cannot open shared object file")


def test_a_gpu_that_has_all_it_needs() -> None:
    gpu = usable_gpu(FakeDriver, modules())
    assert f"{gpu}" == "NVIDIA H200, sm_90, driver of CUDA 12.8"


def test_without_a_driver_nothing_else_is_asked_for() -> None:
    with pytest.raises(NoGpu, match="no NVIDIA driver is installed"):
        usable_gpu(no_driver, modules(missing="cupy"))


def test_a_driver_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert reason(FakeDriver(init=100)) == "the driver sees no GPU"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert reason(FakeDriver(init=100)) == "the driver sees no GPU (CUDA_VISIBLE_DEVICES is '')"


def test_drivers_that_do_not_start() -> None:
    assert "restart the machine" in reason(FakeDriver(init=803))
    assert "nvidia-fabricmanager" in reason(FakeDriver(init=802))
    assert reason(FakeDriver(init=999)) == "the driver does not start: cuInit returns 999"
    assert reason(FakeDriver(attribute_status=101)) == "the driver does not describe its GPU: error 101"


def test_a_driver_that_is_too_old() -> None:
    assert reason(FakeDriver(version=11040)) == \
        "the driver knows CUDA 11.4, 12.0 or newer is needed: update the driver"


def test_an_architecture_that_is_too_old() -> None:
    assert reason(FakeDriver(capability=(7, 5)), modules(missing="cupy")) == \
        "NVIDIA H200 is sm_75, sm_80 or newer is needed"


@pytest.mark.parametrize(("version", "extra"), [(12080, "cuda12"), (13000, "cuda13"), (14010, "cuda13")])
@pytest.mark.parametrize("package", ["cupy", "ml_dtypes"])
def test_a_missing_package_names_the_extra_for_the_driver(package: str, version: int, extra: str) -> None:
    assert reason(FakeDriver(version=version), modules(missing=package)) == \
        f'{package} is not installed: pip install "troupe[{extra}]"'


def test_a_broken_package() -> None:
    assert reason(FakeDriver(), modules(broken="cupy")) == "cupy cannot be imported: libstdc++.so.6: version not found"


def test_a_package_that_was_built_for_another_numpy() -> None:
    def import_module(name: str) -> Any:
        raise ValueError("numpy.dtype size changed, may indicate\nbinary incompatibility")

    assert reason(FakeDriver(), import_module) == \
        "cupy cannot be imported: numpy.dtype size changed, may indicate binary incompatibility"


def test_a_package_that_misses_another_one() -> None:
    def import_module(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'fastrlock'", name="fastrlock")

    assert reason(FakeDriver(), import_module) == "cupy cannot be imported: No module named 'fastrlock'"


def test_a_cupy_that_is_too_new_for_the_driver() -> None:
    assert reason(FakeDriver(version=12080), modules(runtime=13000)) == \
        'the installed CuPy is for CUDA 13, the driver knows CUDA 12.8: update the driver, or ' \
        'pip install "troupe[cuda12]"'
    assert usable_gpu(lambda: FakeDriver(version=13000), modules(runtime=12090))


@pytest.mark.parametrize("library", ["nvrtc", "cublas"])
def test_a_library_of_cuda_that_is_missing(library: str) -> None:
    assert reason(FakeDriver(), modules(libraries=Libraries(library))) == \
        f'CUDA\'s {library} cannot be loaded: pip install "troupe[cuda12]"'


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="cupy has no wheel for this platform")
def test_the_installed_cupy_answers_like_the_fake_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "LIBRARIES", ("nvrtc",))       # the tests need no cuBLAS
    assert usable_gpu(FakeDriver).architecture == 90


@pytest.mark.skipif(sys.platform not in ("linux", "win32"), reason="NVIDIA has no driver for this system")
def test_what_this_machine_is_found_to_have_fits_one_line() -> None:
    try:
        found = f"{usable_gpu()}"
    except NoGpu as missing:
        found = f"{missing}"
    assert found
    assert "\n" not in found


# ---- What the engine does with it

def unusable() -> Any:
    raise NoGpu("the driver sees no GPU")


def test_cuda_that_is_asked_for_and_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "usable_gpu", unusable)
    with pytest.raises(ValueError, match="^device cuda: the driver sees no GPU$"):
        choose_device("cuda")


def test_auto_says_what_it_chose_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "usable_gpu", unusable)
    assert choose_device("auto") == ("cpu", "auto: the driver sees no GPU")
    monkeypatch.setattr(system, "usable_gpu", lambda: usable_gpu(FakeDriver, modules()))
    assert choose_device("auto") == ("cuda", "auto: NVIDIA H200, sm_90, driver of CUDA 12.8")
    assert choose_device("cuda") == ("cuda", "as asked: NVIDIA H200, sm_90, driver of CUDA 12.8")


def test_who_asks_for_the_processor_gets_it_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "usable_gpu", None)
    assert choose_device("cpu") == ("cpu", "as asked")
    with pytest.raises(ValueError, match="device must be auto, cpu or cuda, got 'tpu'"):
        choose_device("tpu")


def test_a_tool_that_is_asked_for_cuda_ends_with_one_line() -> None:
    result = subprocess.run([sys.executable, "-m", "tools.chat", "--device", "cuda", "hello"], capture_output=True,
                            text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert result.returncode != 0
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("chat: device cuda: ")
