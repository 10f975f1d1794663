"""A worker seen from bench: started, asked, and surely ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from specee_pc import errors
from specee_pc.bench.output import Output
from specee_pc.bench.quality import Judgement
from specee_pc.errors import SpeceeError

# Not -m: it looks into the current folder first, and would find a source checkout there.
PROGRAM = "import sys; del sys.path[0]; from specee_pc.bench.worker import main; main()"
COMMAND = (sys.executable, "-c", PROGRAM)


class WorkerError(SpeceeError):
    """A worker ended or answered nonsense: which one, and how."""


class WorkerProcess:
    """One worker. Leaving it as a context ends it, whatever it is doing."""

    def __init__(self, mode: str, command: Sequence[str] = COMMAND) -> None:
        """mode: "stock", or the candidate's. Raises WorkerError when it cannot be started."""
        self.mode = mode
        self.cpu_s = 0.0  # CPU seconds that it had used at its last answer
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        root = str(Path(__file__).absolute().parent.parent.parent)
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                # Ctrl-C is for bench alone, which then ends its workers.
                start_new_session=sys.platform != "win32",
                creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
            )
        except OSError as e:
            self._stderr.close()
            raise WorkerError(f"the {mode} worker cannot be started: {e.strerror or e}") from None

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def close(self) -> None:
        """End it; it has nothing to save."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdout.close()
        with suppress(OSError):  # a command that it did not read
            self._process.stdin.close()
        self._stderr.close()

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Send a command and wait for its answer.

        Raises what the worker raised, or WorkerError when there is no answer.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self._ended() from None
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise self._ended()
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise WorkerError(f"the {self.mode} worker answered {line[:80]!r}")
        if "error" in answer:
            raise _exception(answer)
        self.cpu_s = answer.get("cpu_s", self.cpu_s)
        return answer

    def generate(self, prompt: Sequence[int], max_tokens: int) -> tuple[Output, int]:
        """Greedy tokens after a prompt, and the worker's peak resident bytes so far."""
        answer = self.ask("generate", prompt=prompt, max_tokens=max_tokens)
        made = answer["output"]
        tokens, histogram = tuple(made.pop("tokens")), tuple(made.pop("histogram"))
        return Output(tokens, histogram=histogram, **made), answer["peak_rss_bytes"]

    def judge(self, prompt: Sequence[int], emitted: Sequence[int], start: int) -> Judgement:
        """Stock's verdict on emitted[start:], as StockEngine.judge."""
        answer = self.ask("judge", prompt=prompt, emitted=emitted, start=start)["judgement"]
        return Judgement(tuple(answer["greedy"]), answer["top1_logit"], answer["emitted_logit"])

    def _ended(self) -> WorkerError:
        status = self._process.wait()
        how = f"exit code {status}"
        if status < 0:
            how = f"signal {signal.Signals(-status).name}"
            if -status == signal.SIGKILL:
                how += ", perhaps by lack of memory"
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - 4096))
        lines = self._stderr.read().decode("utf-8", "replace").split("\n")
        said = [" ".join(line.split()) for line in lines if line.strip()]
        reason = f": {said[-1]}" if said else ""
        return WorkerError(f"the {self.mode} worker ended ({how}){reason}")


def _exception(answer: dict[str, Any]) -> SpeceeError:
    """The exception that a worker raised; one of bench's own is a WorkerError."""
    kind = getattr(errors, str(answer["error"]), None)
    if not (isinstance(kind, type) and issubclass(kind, SpeceeError)):
        kind = WorkerError
    return kind(str(answer.get("message", "no reason given")))
