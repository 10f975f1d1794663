from __future__ import annotations

import ctypes  # noqa: TID251
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specee_pc import _native, errors

HEADER = Path(__file__).parent.parent / "native" / "include" / "specee.h"
STRUCTS = {
    "specee_session_params": _native.SessionParams,
    "specee_event": _native.Event,
    "specee_stats": _native.SessionStats,
    "specee_record_params": _native.RecordParams,
}


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter; a variable set to "" is removed."""
    merged = {k: v for k, v in {**os.environ, **env}.items() if v}
    return subprocess.run(
        [sys.executable, "-c", code], env=merged, capture_output=True, text=True, timeout=60
    )


def test_structs_are_laid_out_as_in_the_header(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    expected, prints = {}, ""
    for name, struct in STRUCTS.items():
        expected[name] = ctypes.sizeof(struct)
        prints += f'printf("{name} %zu\\n", sizeof({name}));\n'
        for field, *_ in struct._fields_:
            expected[f"{name}.{field}"] = getattr(struct, field).offset
            prints += f'printf("{name}.{field} %zu\\n", offsetof({name}, {field}));\n'
    source = tmp_path / "layout.c"
    source.write_text(f"#include <specee.h>\n#include <stdio.h>\nint main(void) {{\n{prints}}}\n")
    program = tmp_path / "layout"
    subprocess.run([compiler, f"-I{HEADER.parent}", source, "-o", program], check=True)
    out = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    assert {k: int(v) for k, v in (line.split() for line in out.splitlines())} == expected


def test_codes_are_those_of_the_header() -> None:
    text = HEADER.read_text()
    statuses = {int(n): name for name, n in re.findall(r"SPECEE_ERR_(\w+)\s*= (\d+)", text)}
    assert sorted(statuses) == sorted(errors.BY_STATUS)
    assert errors.BY_STATUS[3] is errors.BundleModelMismatch and statuses[3] == "BUNDLE_MODEL"
    assert errors.BY_STATUS[6] is errors.ContextFull and statuses[6] == "CONTEXT_FULL"
    modes = {name.lower(): int(n) for name, n in re.findall(r"SPECEE_MODE_(\w+)\s*= (\d+)", text)}
    assert modes == _native.MODES
    version = re.search(r"#define SPECEE_ABI_VERSION (\d+)", text)
    assert version is not None and int(version[1]) == _native.ABI_VERSION
    functions = set(re.findall(r"(specee_\w+)\(", "".join(re.findall(r"SPECEE_API[^;]*;", text))))
    assert functions and all(hasattr(_native._library(), name) for name in functions)


def test_errors_are_also_what_llama_cpp_raises() -> None:
    assert issubclass(errors.ModelFileError, ValueError)
    assert issubclass(errors.PromptTooLong, ValueError)
    assert issubclass(errors.NativeLibraryError, ImportError)
    assert all(issubclass(e, errors.SpeceeError) for e in errors.BY_STATUS.values())


def test_a_missing_library_is_told(tmp_path: Path) -> None:
    done = run_python(
        "from specee_pc.errors import NativeLibraryError\n"
        "try: from specee_pc import Llama\n"
        "except NativeLibraryError as e: print(e)",
        SPECEE_PC_LIB_PATH=str(tmp_path),
    )
    assert "the native library is missing" in done.stdout and str(tmp_path) in done.stdout


def test_a_damaged_library_is_told(tmp_path: Path) -> None:
    (tmp_path / _native.library_file(_native.library_dir()).name).write_bytes(b"nonsense")
    done = run_python(
        "from specee_pc.errors import NativeLibraryError\n"
        "try: from specee_pc import Llama\n"
        "except NativeLibraryError as e: print(e)",
        SPECEE_PC_LIB_PATH=str(tmp_path),
    )
    assert "cannot be loaded" in done.stdout, done.stderr


def test_the_stock_library_is_not_ours() -> None:
    done = run_python(
        "from specee_pc import _native, errors\n"
        "assert _native.load_llama_cpp()\n"
        "try: _native.build_info()\n"
        "except errors.NativeLibraryError as e: print(e)",
        SPECEE_PC_LIB_PATH=str(_native.stock_dir()),
    )
    assert "not our library" in done.stdout, done.stderr


def test_llama_cpp_first_with_another_library_is_told(tmp_path: Path) -> None:
    ours = _native.library_file(_native.library_dir())
    shutil.copy(ours, tmp_path / ours.name)
    code = (
        "import llama_cpp\n"
        "from specee_pc.errors import LlamaCppAlreadyLoaded\n"
        "try: from specee_pc import Llama; print('loaded')\n"
        "except LlamaCppAlreadyLoaded as e: print(e)"
    )
    done = run_python(code, LLAMA_CPP_LIB_PATH=str(tmp_path))
    assert "put `from specee_pc import Llama` before" in done.stdout, done.stderr
    assert "specee-pc lib-path" in done.stdout
    done = run_python(code, LLAMA_CPP_LIB_PATH=str(ours.parent))  # the cure
    assert done.stdout == "loaded\n", done.stderr


def test_the_environment_is_left_as_it_was(tmp_path: Path) -> None:
    code = "import os, specee_pc; specee_pc.Llama; print(os.environ.get('LLAMA_CPP_LIB_PATH'))"
    assert run_python(code, LLAMA_CPP_LIB_PATH="").stdout == "None\n"
    assert run_python(code, LLAMA_CPP_LIB_PATH=str(tmp_path)).stdout == f"{tmp_path}\n"


def test_another_llama_cpp_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1.0")
    with pytest.raises(errors.NativeLibraryError, match=r"0\.1\.0 is installed.*pip install"):
        _native._check_llama_cpp_version()

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(errors.NativeLibraryError, match="is not installed"):
        _native._check_llama_cpp_version()


def test_onnxruntime_is_found_without_importing_it() -> None:
    done = run_python(
        "import sys; from specee_pc import _native; print(_native.onnxruntime_file());"
        "assert 'onnxruntime' not in sys.modules"
    )
    assert Path(done.stdout.strip()).is_file(), done.stderr


def test_build_info_names_its_sources() -> None:
    info = _native.build_info()
    assert re.fullmatch("[0-9a-f]{40}", info["llama_cpp_commit"])
    assert {"patch_series", "flags", "version"} <= set(info)


def test_the_first_error_line_is_the_reason() -> None:
    _native.clear_llama_errors()
    assert _native.llama_error() is None
    _native._log.lines += ["load: error loading model: no", " tensor x\n", "failed to load\n"]
    assert _native.llama_error() == "no tensor x"
    _native.clear_llama_errors()
