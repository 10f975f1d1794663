"""The patch series: it applies, comes back byte for byte, stays small, and only adds symbols."""

from __future__ import annotations

import difflib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from specee_pc import _native

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def patches() -> ModuleType:
    """scripts/patches.py"""
    spec = importlib.util.spec_from_file_location("patches", ROOT / "scripts" / "patches.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def pin(patches: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pinned source, unpacked; not to be changed."""
    tree = tmp_path_factory.mktemp("pin")
    patches.pristine(tree)
    return tree


def write_patch(folder: Path, name: str, before: str, after: str) -> None:
    """The only patch in folder, which turns the text `before` of a file into `after`."""
    lines = difflib.unified_diff(
        before.splitlines(keepends=True),
        after.splitlines(keepends=True),
        f"a/{name}" if before else "/dev/null",
        f"b/{name}",
    )
    (folder / "0001-test.patch").write_text("".join(lines), newline="\n")


def test_series_is_sound(patches: ModuleType) -> None:
    """It applies without fuzz, export gives the same bytes, the README's table and budget hold."""
    assert patches.series()
    patches.check()


def test_applies_inside_another_repository(patches: ModuleType, pin: Path, tmp_path: Path) -> None:
    """git apply below another repository would change nothing and say that all is well."""
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    (tmp_path / ".gitignore").write_text("*\n")
    tree = tmp_path / "build" / "tree"
    shutil.copytree(pin, tree)
    patches.apply_series(tree)
    for patch in patches.series():
        for name in patches.touched(patch):
            before = (pin / name).read_bytes() if (pin / name).is_file() else None
            assert (tree / name).read_bytes() != before


def test_refuses_what_does_not_apply(
    patches: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, folder = tmp_path / "tree", tmp_path / "patches"
    (tree / "src").mkdir(parents=True)
    folder.mkdir()
    (tree / "src" / "a.cpp").write_text("one\n")
    monkeypatch.setattr(patches, "PATCHES", folder)
    write_patch(folder, "src/a.cpp", "two\n", "three\n")
    with pytest.raises(patches.PatchError, match="0001-test.patch does not apply"):
        patches.apply_series(tree)
    write_patch(folder, "ggml/a.c", "one\n", "two\n")
    with pytest.raises(patches.PatchError, match="changes ggml/a.c"):
        patches.apply_series(tree)


def test_budget(patches: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "PATCHES", tmp_path)
    write_patch(tmp_path, "src/models/x.cpp", "", "line\n" * 10)
    with pytest.raises(patches.PatchError, match="src/models/x.cpp: 10 changed lines"):
        patches.check_budget()
    monkeypatch.setattr(patches, "BUDGET", 5)
    with pytest.raises(patches.PatchError, match="the series changes 10 lines"):
        patches.check_budget()


def test_refuses_another_source(
    patches: ModuleType, pin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(patches.PatchError, match="not an unpacked llama.cpp"):
        patches.pristine(tmp_path / "a", source=tmp_path)
    tree = tmp_path / "tree"
    shutil.copytree(pin, tree)
    (tree / "src" / "llama.cpp").write_text("// another\n")
    with pytest.raises(patches.PatchError, match="not the pinned llama.cpp"):
        patches.pristine(tmp_path / "b", source=tree)
    sdist = tmp_path / "sdist.tar.gz"
    sdist.write_bytes(b"not it")
    monkeypatch.setenv("SPECEE_LLAMA_CPP_SDIST", str(sdist))
    with pytest.raises(patches.PatchError, match="the pinned sdist has"):
        patches.fetch()


def test_prepare_rewrites_only_what_differs(
    patches: ModuleType, pin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build tree keeps its time stamps, so that a changed patch compiles little."""
    out, folder = tmp_path / "out", tmp_path / "patches"
    folder.mkdir()
    monkeypatch.setattr(patches, "PATCHES", folder)
    stock = (pin / "src" / "llama.cpp").read_text()
    write_patch(folder, "src/llama.cpp", stock, "// one\n" + stock)
    patches.prepare(out, pin)
    target, other = out / "patched" / "src" / "llama.cpp", out / "patched" / "src" / "unicode.cpp"
    assert target.read_text() == "// one\n" + stock
    assert (out / "stock" / "src" / "llama.cpp").read_text() == stock
    for path in (target, other):
        os.utime(path, (1, 1))
    (folder / "0001-test.patch").unlink()
    patches.prepare(out, pin)
    assert target.read_text() == stock
    assert target.stat().st_mtime > 1
    assert other.stat().st_mtime == 1


def symbols(library: Path) -> set[str]:
    """The symbols that a library exports."""
    flags = ["-gU"] if sys.platform == "darwin" else ["-D", "--defined-only"]
    done = subprocess.run(["nm", *flags, str(library)], capture_output=True, text=True, check=True)
    return {line.split()[-1] for line in done.stdout.splitlines() if line}


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm is not here to list symbols")
def test_patched_library_exports_all_of_stock() -> None:
    stock = symbols(_native.library_file(_native.stock_dir()))
    patched = symbols(_native.library_file(_native.library_dir()))
    assert "llama_decode" in stock and "ggml_mul_mat" in stock
    # What a patch gives another C++ signature is private; the C functions are the promise.
    missing = {name for name in stock - patched if not name.startswith("_Z")}
    assert not missing
    assert "specee_session_next" in patched
