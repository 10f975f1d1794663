from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import specee_pc
from specee_pc import _native, cli, model_files


def run(*arguments: object, **settings: Any) -> Result:
    return CliRunner().invoke(cli.main, [str(a) for a in arguments], **settings)


def test_help_is_light() -> None:
    heavy = "{'torch', 'onnxruntime', 'llama_cpp', 'numpy', 'gguf', 'rich'}"
    code = (
        "import sys\nfrom specee_pc.cli import main\n"
        "for verb in ([], ['chat'], ['bench'], ['fit'], ['models'], ['lib-path']):\n"
        "    main([*verb, '--help'], standalone_mode=False)\n"
        f"loaded = {heavy} & set(sys.modules)\nassert not loaded, loaded"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for verb in ("chat", "bench", "fit", "models", "lib-path"):
        assert verb in done.stdout


def test_version_is_the_package_version() -> None:
    pyproject = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert f'version = "{specee_pc.__version__}"' in pyproject
    assert specee_pc.__version__ in run("--version").output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["chat", "none.gguf", "-p", "x"], "error: none.gguf: no such model file"),
        (["chat", "-p", "x", "--threads", "0"], "error: threads must be a whole number, 1 to 512"),
        (["chat", "-p", "x", "--ctx", "-5"], "error: ctx must be"),
        (["chat", "-p", "x", "--temp", "nan"], "error: temp must be"),
        (["chat", "-p", "  "], "error: the prompt is empty"),
        (["chat", "-p", "x"], "error: no MODEL was given"),
        (["bench", "--modes", "exact,warp"], "error: mode must be one of"),
        (["bench", "--repeats", "0"], "error: repeats must be"),
        (["fit", "m.gguf", "--fidelity", "2"], "error: fidelity must be"),
        (["models", "get", "nothing"], "error: unknown model 'nothing'"),
    ],
)
def test_failures_are_one_line(user: Path, arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith(message) and result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_usage_errors_exit_2() -> None:
    assert run("chat", "--threads", "two").exit_code == 2
    assert run("chat", "--mode", "fast").exit_code == 2
    assert run("nothing").exit_code == 2


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "\n"),
        (MemoryError(), 1, "error: out of memory\n"),
        (OSError(28, "No space left on device", "/x"), 1, "error: /x: No space left on device\n"),
        (specee_pc.SpeceeError("two\nlines"), 1, "error: two lines\n"),
    ],
)
def test_what_else_can_end_a_command(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, message: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(model_files, "get", fail)
    result = run("models", "get", "smollm2")
    assert (result.exit_code, result.stderr) == (code, message)


def test_models_list(user: Path) -> None:
    assert "not here: specee-pc models get smollm2" in run("models", "list").stdout
    model_files.DEFAULT.path.parent.mkdir(parents=True)
    model_files.DEFAULT.path.write_bytes(b"")
    assert str(model_files.DEFAULT.path) in run("models", "list").stdout


def test_lib_path_names_the_folder_of_the_library() -> None:
    assert run("lib-path").stdout.strip() == str(_native.library_dir())


def test_lib_path_without_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECEE_PC_LIB_PATH", str(tmp_path))
    result = run("lib-path")
    assert result.exit_code == 1 and "the native library is missing" in result.stderr
