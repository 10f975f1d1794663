"""`specee-pc bench`: stock and the candidates take turns on every prompt; ratios pair by pair.

Each side is a process of its own, loaded once and kept; only one computes at a time, because
ggml's threads spin and two sides at once would measure each other.
"""

from __future__ import annotations

import shlex
import time
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from specee_pc import __version__, model_files, options
from specee_pc.bench import machine, prompts, report
from specee_pc.bench.output import Output
from specee_pc.bench.process import WorkerProcess
from specee_pc.bench.quality import divergence, fidelity
from specee_pc.bench.report import Measured, Pair
from specee_pc.bench.subject import STOCK, Subject, check_same_build, prepare
from specee_pc.bench.table import Screen, show
from specee_pc.errors import PromptTooLong, SpeceeError

QUICK_PROMPTS, QUICK_TOKENS, QUICK_REPEATS = 4, 64, 1
SPARE_CTX = 64  # tokens that exact mode may run ahead of the text


def run_bench(bench: options.BenchOptions) -> None:
    """Measure a model in each mode against stock llama.cpp: tables on stdout, a report as JSON.

    quick takes the first 4 prompts of each file, at most 64 tokens each, once. Raises
    PromptFileError, ModelFileError, BundleError, FileAccessError and other SpeceeErrors; what can
    be checked is checked before the first run. Ctrl-C ends the workers.
    """
    if bench.quick:
        bench = replace(
            bench,
            limit=min(bench.limit or QUICK_PROMPTS, QUICK_PROMPTS),
            max_tokens=min(bench.max_tokens, QUICK_TOKENS),
            repeats=min(bench.repeats, QUICK_REPEATS),
        )
    with Screen() as screen:
        subject = prepare(bench, screen)
        with ExitStack() as stack:
            turns = Turns(subject, screen, stack)
            measured = turns.run()
    rows = [one.row() for one in measured]
    warnings = turns.warnings(measured)
    show(rows, subject.header.n_layer)
    for line in (*turns.notices, *(describe(d) for d in turns.divergences)):
        screen.note(f"note: {line}")
    for line in warnings:
        screen.note(f"warning: {line}")
    if bench.json is not None:
        report.write(bench.json, full_report(subject, turns, rows, warnings))
        screen.note(f"report: {bench.json}")


# ---- the runs ----


class Turns:
    """The workers, and what they did in turns."""

    def __init__(self, subject: Subject, screen: Screen, stack: ExitStack) -> None:
        """Start the workers and load the model in each; stack ends them."""
        self.subject, self.screen = subject, screen
        self.notices = list(subject.notices)
        self.divergences: list[dict[str, Any]] = []
        self.settings: dict[str, Any] = {}  # of the contexts, as stock made its own
        self._load: machine.Load | None = None
        self._exits: dict[str, bool] = {}
        self._workers: dict[str, WorkerProcess] = {}
        for mode in (STOCK, *subject.bench.modes):
            screen.doing(f"loading the model: {mode}")
            self._workers[mode] = stack.enter_context(start_worker(mode))
            self._load_model(self._workers[mode])

    def _load_model(self, worker: WorkerProcess) -> None:
        subject, stock = self.subject, worker.mode == STOCK
        folder = subject.bundle.path.absolute() if subject.bundle is not None else None
        answer = worker.ask(
            "load",
            model=str(subject.header.path.absolute()),
            mode=worker.mode,
            bundle=None if stock or folder is None else str(folder),
            threads=subject.threads,
        )
        if not stock:  # the library itself says what it is; the file beside it could be stale
            check_same_build(subject.builds[STOCK], answer["build"])

    def run(self) -> list[Measured]:
        """Decode everything; returns per workload stock first, then the candidates."""
        bench, workers = self.subject.bench, self._workers
        tokens = [self._tokenize(workload) for workload in self.subject.workloads]
        n_prompts = sum(map(len, tokens))
        self.screen.expect(n_prompts * bench.repeats * len(workers))
        self._open(tokens)
        meter, own_before = machine.LoadMeter(), self._own_cpu_s()
        measured: list[Measured] = []
        for workload, texts in zip(self.subject.workloads, tokens, strict=True):
            of_mode = {mode: Measured(mode, workload.name, self._draft(mode)) for mode in workers}
            for i, prompt in enumerate(texts):
                self._run_prompt(of_mode, i, prompt, f"{workload.name} {i + 1}/{len(texts)}")
            measured += of_mode.values()
        self._load = meter.load(self._own_cpu_s() - own_before)
        return measured

    def _tokenize(self, workload: prompts.Workload) -> list[list[int]]:
        """The prompts' tokens, made once, by stock, so that all sides get the same."""
        self.screen.doing(f"tokenizing {workload.name}")
        limit, n_new = self.subject.header.n_ctx_train, self.subject.bench.max_tokens
        texts = []
        for prompt in workload.prompts:
            try:
                tokens = self._workers[STOCK].ask("prompt_tokens", text=prompt.text)["tokens"]
            except SpeceeError as e:
                raise type(e)(f"{prompt.where}: {e}") from None
            if limit and len(tokens) + n_new > limit:
                raise PromptTooLong(
                    f"{prompt.where}: its {len(tokens)} tokens and {n_new} new ones do not fit the "
                    f"model's context of {limit}"
                )
            texts.append(tokens)
        return texts

    def _open(self, tokens: list[list[list[int]]]) -> None:
        longest = max(len(prompt) for texts in tokens for prompt in texts)
        n_ctx = longest + self.subject.bench.max_tokens + SPARE_CTX
        for mode, worker in self._workers.items():
            self.screen.doing(f"warming up {mode}")
            answer = worker.ask("open", n_ctx=n_ctx, warm_up=tokens[0][0])
            self._exits[mode] = answer["exits"]
            self.settings = self.settings or answer["settings"]
            if answer["notice"]:
                self.notices.append(answer["notice"])

    def _draft(self, mode: str) -> str | None:
        return "lens" if self._exits[mode] else None

    def _run_prompt(
        self, of_mode: dict[str, Measured], i: int, prompt: list[int], where: str
    ) -> None:
        bench = self.subject.bench
        first: dict[str, Output] = {}
        for repeat in range(bench.repeats):
            outputs: dict[str, Output] = {}
            for mode in rotated(list(self._workers), i + repeat):
                again = f", repeat {repeat + 1}/{bench.repeats}" if bench.repeats > 1 else ""
                self.screen.doing(f"{where}{again}: {mode}")
                outputs[mode], peak = self._workers[mode].generate(prompt, bench.max_tokens)
                of_mode[mode].peak_rss_bytes = peak
                self.screen.done()
            for mode, output in outputs.items():
                pair = Pair(i, repeat, len(prompt), outputs[STOCK], output)
                of_mode[mode].pairs.append(pair)
            first = first or outputs
        self.screen.doing(f"{where}: comparing with full depth")
        for mode, output in first.items():
            self._judge(of_mode[mode], i, prompt, first[STOCK].tokens, output.tokens)

    def _judge(
        self,
        measured: Measured,
        i: int,
        prompt: list[int],
        stock: tuple[int, ...],
        emitted: tuple[int, ...],
    ) -> None:
        begin, judged = divergence(stock, emitted), None
        if begin is not None and begin < len(emitted):
            judged = self._workers[STOCK].judge(prompt, emitted, begin)
            if begin < len(stock) and judged.greedy[0] != stock[begin]:
                self.notices.append(
                    f"{measured.workload} prompt {i + 1}: stock itself decodes token {begin + 1} "
                    f"differently when asked again"
                )
            if measured.mode != "calibrated":
                self.divergences.append(
                    {
                        "workload": measured.workload,
                        "prompt": i,
                        "mode": measured.mode,
                        "position": begin,
                        "stock_token": judged.greedy[0],
                        "other_token": emitted[begin],
                        "stock_top1_logit": judged.top1_logit,
                        "stock_logit_of_other": judged.emitted_logit,
                    }
                )
        measured.fidelity += fidelity(stock, emitted, judged)

    def _own_cpu_s(self) -> float:
        return time.process_time() + sum(worker.cpu_s for worker in self._workers.values())

    def warnings(self, measured: list[Measured]) -> list[str]:
        """What makes the figures doubtful."""
        lines = list(self.subject.warnings)
        n_cpu = len(machine.usable_cpus())
        if self._load and (line := self._load.warning(n_cpu, "during the runs")):
            lines.append(line)
        for one in measured:
            if one.mode == STOCK and one.unsteadiness() > report.STEADY:
                lines.append(
                    f"{one.workload}: stock's own speed varied by {one.unsteadiness():.0%}: ratios "
                    f"are doubtful, run again on an idle machine"
                )
            if unsteady := one.unsteady_prompts():
                numbers = ", ".join(str(i + 1) for i in unsteady)
                lines.append(
                    f"{one.workload}: {one.mode} gave other outputs in another repeat of prompt "
                    f"{numbers}"
                )
        return lines


def start_worker(mode: str) -> WorkerProcess:
    """A fresh worker."""
    return WorkerProcess(mode)


def rotated(modes: list[str], by: int) -> list[str]:
    """The same order, begun elsewhere, so that nobody always comes first."""
    by %= len(modes)
    return modes[by:] + modes[:by]


# ---- after the runs ----


def describe(divergence: dict[str, Any]) -> str:
    """A divergence as a line."""
    d = divergence
    return (
        f"{d['workload']} prompt {d['prompt'] + 1}: {d['mode']} leaves stock's output at token "
        f"{d['position'] + 1}: {d['other_token']} instead of {d['stock_token']}; stock's logits "
        f"are {d['stock_logit_of_other']:.4f} and {d['stock_top1_logit']:.4f}"
    )


def full_report(
    subject: Subject, turns: Turns, rows: list[dict[str, Any]], warnings: list[str]
) -> dict[str, Any]:
    """The report, as bench-report.schema.json describes it."""
    bench, header, bundle = subject.bench, subject.header, subject.bundle
    system = str(turns.settings["system_info"])
    devices = [part.split(" : ")[0].strip() for part in system.split("|") if " : " in part]
    return {
        "format": report.FORMAT,
        "specee_pc": __version__,
        "llama_cpp_commit": subject.builds[STOCK]["llama_cpp_commit"],
        "machine": {
            "cpu": machine.cpu_name(),
            "threads": subject.threads,
            "devices": devices,
        },
        "model": {
            "path_name": header.path.name,
            "sha256": model_files.sha256_of(header.path),
            "architecture": header.architecture,
            "n_layer": header.n_layer,
            "n_vocab": header.n_vocab,
            "size_bytes": header.size,
        },
        "settings": {
            "command": command_line(bench),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "modes": list(bench.modes),
            "max_tokens": bench.max_tokens,
            "repeats": bench.repeats,
            "limit": bench.limit,
            **turns.settings,
            "libraries": subject.builds,
            "bundle": None
            if bundle is None
            else {"name": bundle.path.name, "calibration": bundle.calibration},
            "workloads": [
                {"name": w.name, "file": w.file, "sha256": w.sha256, "n_prompts": len(w.prompts)}
                for w in subject.workloads
            ],
            "divergences": turns.divergences,
            "notices": turns.notices,
            "warnings": warnings,
        },
        "runs": rows,
    }


def command_line(bench: options.BenchOptions) -> str:
    """The command that repeats this run; files by their names, not by where they lie here."""
    words = ["specee-pc", "bench"]
    words += [bench.model.name] if bench.model is not None else []
    for path in bench.prompts:
        words += ["--prompts", path.name]
    if bench.limit is not None:
        words += ["--limit", str(bench.limit)]
    words += ["--max-tokens", str(bench.max_tokens), "--modes", ",".join(bench.modes)]
    words += ["--repeats", str(bench.repeats)]
    if bench.threads is not None:
        words += ["--threads", str(bench.threads)]
    if bench.bundle != "auto":
        words += ["--bundle", Path(bench.bundle).name]
    return shlex.join(words)
