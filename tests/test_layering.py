"""The laws that a reader relies on: imports go one way, `cuda/` is a namespace, policy is plain Python."""
from __future__ import annotations

import ast
import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ORDER = ["weights", "cuda", "actors", "api", "tools"]           # each may import what stands before it
DEVICE_IMPORTERS = {"actors/executor.py", "actors/system.py"}   # the only actors that know of cuda/
TOP_LEVEL = {"pyproject.toml", "README.md", "LICENSE", "actors", "cuda", "weights", "api", "tests", "tools"}
RESERVED_IN_CUDA = {"core", "bindings", "pathfinder", "cccl", "compute", "coop", "tile", "cudart", "nvrtc", "driver"}


def python_files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported_modules(path: Path) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            modules.add(node.module or "")
    return modules


@pytest.mark.parametrize("package", ORDER)
def test_imports_go_one_way(package: str) -> None:
    allowed = ORDER[:ORDER.index(package) + 1]
    for path in python_files(package):
        roots = {module.split(".")[0] for module in imported_modules(path)}
        wrong = (roots & {*ORDER, "tests"}) - set(allowed)
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


def test_only_executor_and_system_import_cuda() -> None:
    for path in python_files("actors"):
        name = path.relative_to(ROOT).as_posix()
        if any(module.split(".")[0] == "cuda" for module in imported_modules(path)):
            assert name in DEVICE_IMPORTERS, f"{name} imports cuda"


def test_policy_uses_the_standard_library_only() -> None:
    for path in python_files("actors/policy"):
        for module in imported_modules(path):
            root = module.split(".")[0]
            assert root != "asyncio", f"{path}: policy is synchronous"
            assert root in sys.stdlib_module_names or module in ("actors.messages", "actors.sampling_params") \
                or module.startswith("actors.policy"), f"{path} imports {module}"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_top_level_is_exactly_the_layout() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    names = {line.split("/")[0] for line in listed.stdout.splitlines()}
    assert {name for name in names if not name.startswith(".")} == TOP_LEVEL


def test_cuda_is_a_namespace_package_that_lives_beside_nvidias() -> None:
    """CuPy imports `cuda.pathfinder` from the namespace package `cuda`; a regular package of that name breaks it."""
    assert not (ROOT / "cuda" / "__init__.py").exists()
    taken = {path.stem for path in (ROOT / "cuda").iterdir()} & RESERVED_IN_CUDA
    assert not taken, f"cuda/ must not shadow NVIDIA's modules: {taken}"
    assert importlib.import_module("cuda.ops")


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="cupy has no wheel for this platform")
def test_cupy_and_our_cuda_import_together() -> None:
    code = ("import warnings; warnings.simplefilter('ignore'); "
            "import cupy, cuda.pathfinder, cuda.ops, cuda.model; print(cupy.__version__)")
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_every_package_but_cuda_has_an_empty_init() -> None:
    for package in ("actors", "actors/policy", "api", "api/answers", "api/anthropic", "api/native", "api/openai",
                    "tools", "weights", "cuda/host", "cuda/kernels"):
        path = ROOT / package / "__init__.py"
        assert path.exists(), f"{path} is missing"
        assert path.read_text() == "", f"{path} is not empty"


def test_no_file_grows_past_reading() -> None:
    long = [(path.relative_to(ROOT).as_posix(), lines) for package in ORDER for path in python_files(package)
            if (lines := len(path.read_text(encoding="utf-8").splitlines())) > 500]
    assert not long, f"past 500 lines: {long}"
