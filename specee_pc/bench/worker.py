"""The process that computes for bench: one model, one library, one mode. `python -m` runs it.

Speaks JSON lines: a command on standard input, {"do": ..., ...}, gets one line back, the answer or
{"error": exception name, "message": one line}. It waits without spinning, and ends as soon as its
standard input does, also amid a computation, so that a killed bench leaves no worker behind.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specee_pc import _native
from specee_pc.bench import machine
from specee_pc.bench.engine import Model, SessionEngine, StockEngine
from specee_pc.errors import InternalError, OutOfMemory, SpeceeError

WARM_UP_TOKENS = 16

Message = dict[str, Any]


class Worker:
    """Answers the commands, which come in the order load, prompt_tokens, open, generate, judge."""

    def __init__(self) -> None:
        self._settings: Message = {}
        self._model: Model | None = None
        self._engine: StockEngine | SessionEngine | None = None

    def answer(self, command: Message) -> Message:
        """Do what a command says. Raises SpeceeError."""
        commands: dict[str, Callable[..., Message]] = {
            "load": self._load,
            "prompt_tokens": self._prompt_tokens,
            "open": self._open,
            "generate": self._generate,
            "judge": self._judge,
        }
        what = command.pop("do", None)
        if what not in commands:
            raise InternalError(f"unknown command {what!r}")
        return commands[what](**command)

    def _load(self, model: str, mode: str, bundle: str | None, threads: int) -> Message:
        """Load the model: mode "stock" in the unpatched library, else in the patched one."""
        stock = mode == "stock"
        llama_cpp = _native.load_llama_cpp(_native.stock_dir() if stock else None)
        build = None if stock else _native.build_info()
        self._settings = {"mode": mode, "bundle": bundle, "path": Path(model)}
        self._model = Model(llama_cpp, Path(model), threads)
        return {"build": build}

    def _prompt_tokens(self, text: str) -> Message:
        return {"tokens": self._loaded().prompt_tokens(text)}

    def _open(self, n_ctx: int, warm_up: list[int]) -> Message:
        """Make the context and decode a little, so that no run pays for page faults."""
        model = self._loaded()
        model.open(n_ctx)
        mode, bundle, path = (self._settings[key] for key in ("mode", "bundle", "path"))
        if mode == "stock":
            self._engine = StockEngine(model)
            exits = False
        else:
            self._engine = SessionEngine(model, mode, Path(bundle) if bundle else None, path)
            exits = self._engine.exits
        self._engine.generate(warm_up, WARM_UP_TOKENS)
        return {
            "exits": exits,
            "notice": self._engine.notice,
            "settings": model.settings(),
            "cpu_s": time.process_time(),
        }

    def _generate(self, prompt: list[int], max_tokens: int) -> Message:
        assert self._engine is not None, "open comes first"
        output = self._engine.generate(prompt, max_tokens)
        usage = {"peak_rss_bytes": machine.peak_rss_bytes(), "cpu_s": time.process_time()}
        return {"output": asdict(output), **usage}

    def _judge(self, prompt: list[int], emitted: list[int], start: int) -> Message:
        assert isinstance(self._engine, StockEngine), "only stock judges"
        judgement = self._engine.judge(prompt, emitted, start)
        return {"judgement": asdict(judgement), "cpu_s": time.process_time()}

    def _loaded(self) -> Model:
        assert self._model is not None, "load comes first"
        return self._model


def respond(worker: Worker, line: str) -> str:
    """The answer to a line of input, without the newline; failures become an error line."""
    try:
        return json.dumps(worker.answer(json.loads(line)))
    except SpeceeError as e:
        error, message = type(e).__name__, str(e)
    except MemoryError:
        error, message = OutOfMemory.__name__, "out of memory"
    except Exception as e:  # a fault of ours: bench shows it as one line, too
        error, message = InternalError.__name__, f"{type(e).__name__}: {e}"
    return json.dumps({"error": error, "message": " ".join(message.split())})


def main() -> None:
    """Serve until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints must not come between the answers
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)  # its default is everything
    worker = Worker()
    while True:
        line = respond(worker, lines.get())
        try:
            print(line, file=answers, flush=True)
        except OSError:
            os._exit(1)  # bench is gone


if __name__ == "__main__":
    main()
