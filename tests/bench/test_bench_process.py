from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from specee_pc.bench.process import WorkerError, WorkerProcess
from specee_pc.errors import ModelFileError, SpeceeError

FAKE = Path(__file__).parent / "fake_worker.py"


def fake(tmp_path: Path, mode: str = "exact", **settings: Any) -> WorkerProcess:
    arguments = [mode, json.dumps({mode: settings}), str(tmp_path / "log")]
    return WorkerProcess(mode, [sys.executable, str(FAKE), *arguments])


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] == "Z")


def gone(pid: int, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while alive(pid):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def test_an_answer_comes_back_typed(tmp_path: Path) -> None:
    with fake(tmp_path, tokens=[1, 2, 3], greedy=[2, 4]) as worker:
        output, peak = worker.generate([5, 6], 3)
        assert output.tokens == (1, 2, 3)
        assert output.histogram == (0, 0, 0, 2, 1)
        assert output.decode_tok_s == pytest.approx(10.0)
        assert peak == 1 << 20
        if sys.platform != "win32":
            assert os.getsid(worker.pid) != os.getsid(0)  # Ctrl-C does not reach it
        assert worker.judge([5, 6], [1, 9, 9], 1).greedy == (2, 4)
    assert gone(worker.pid)


def test_a_workers_exception_keeps_its_type(tmp_path: Path) -> None:
    with fake(tmp_path, fail={"load": "ModelFileError"}) as worker:
        with pytest.raises(ModelFileError, match=r"^the reason$"):
            worker.ask("load")
        assert worker.ask("prompt_tokens", text="a") == {"tokens": [97]}


@pytest.mark.parametrize("error", ["ChatTemplateErr", "sys", "annotations"])
def test_an_unknown_exception_is_a_workers_error(tmp_path: Path, error: str) -> None:
    with (
        fake(tmp_path, fail={"load": error}) as worker,
        pytest.raises(WorkerError, match=r"^the reason$"),
    ):
        worker.ask("load")


def test_a_worker_that_dies_is_told_with_its_last_words(tmp_path: Path) -> None:
    with fake(tmp_path, fail={"load": "die"}) as worker:
        with pytest.raises(WorkerError, match=r"exact worker ended \(exit code 3\): GGML_ASSERT"):
            worker.ask("load")
        with pytest.raises(WorkerError, match="exact worker ended"):
            worker.ask("load")


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_killed_worker_is_told(tmp_path: Path) -> None:
    with fake(tmp_path, fail={"load": "hang"}) as worker:
        worker.ask("prompt_tokens", text="a")
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match=r"signal SIGKILL, perhaps by lack of memory"):
            worker.ask("load")


def test_nonsense_is_told(tmp_path: Path) -> None:
    with (
        fake(tmp_path, fail={"load": "garbage"}) as worker,
        pytest.raises(WorkerError, match="answered b'llama says hello"),
    ):
        worker.ask("load")


def test_a_worker_that_cannot_start(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="stock worker cannot be started"):
        WorkerProcess("stock", [str(tmp_path / "none")])


def test_leaving_ends_a_worker_that_hangs(tmp_path: Path) -> None:
    with fake(tmp_path, fail={"load": "hang"}) as worker:
        worker.ask("prompt_tokens", text="a")
        assert worker._process.stdin is not None
        worker._process.stdin.write(b'{"do": "load"}\n')
        worker._process.stdin.flush()
        assert alive(worker.pid)
    assert gone(worker.pid)


# ---- the real worker, without a model ----


def test_the_real_worker_answers_each_line_and_survives_mistakes() -> None:
    with WorkerProcess("exact") as worker:
        for command in ("sing", "generate"):
            with pytest.raises(Exception, match=r"sing|open comes first") as caught:
                worker.ask(command, prompt=[1], max_tokens=1)
            assert type(caught.value).__name__ in ("InternalError", "InvalidOption")


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_killed_bench_leaves_no_worker() -> None:
    """The worker notices by the end of its input, which the system closes for the killed."""
    program = (
        "import time\n"
        "from specee_pc.bench.process import WorkerProcess\n"
        "worker = WorkerProcess('exact')\n"
        "print(worker.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(FAKE.parent.parent.parent)}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment
    ) as bench:
        assert bench.stdout is not None
        pid = int(bench.stdout.readline())
        assert alive(pid)
        bench.kill()
    assert gone(pid, 30.0)


def test_the_worker_is_of_the_same_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bench is also run in a folder that holds another specee_pc, such as a source checkout."""
    other = tmp_path / "specee_pc"
    other.mkdir()
    (other / "__init__.py").write_text("raise SystemExit('the wrong specee_pc')")
    monkeypatch.chdir(tmp_path)
    with WorkerProcess("stock") as worker, pytest.raises(SpeceeError, match="unknown command"):
        worker.ask("no such thing")
