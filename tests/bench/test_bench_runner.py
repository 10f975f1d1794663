from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import fake_worker
import jsonschema
import pytest
from test_bench_process import gone

from specee_pc.bench import machine, report, runner
from specee_pc.bench.process import WorkerError, WorkerProcess
from specee_pc.bench.prompts import PromptFileError
from specee_pc.bench.runner import command_line, describe, rotated, run_bench
from specee_pc.errors import (
    BundleError,
    FileAccessError,
    InvalidOption,
    ModelFileError,
    NativeLibraryError,
    PromptTooLong,
    SpeceeError,
)
from specee_pc.options import BenchOptions

ROOT = Path(__file__).parent.parent.parent
SCHEMA = json.loads((ROOT / "docs" / "bench-report.schema.json").read_text())
STOCK_TOKENS = [1, 2, 3, 4, 5]


class Bench:
    """A bench of fake workers: a tiny model's file, two fake libraries, one prompt file."""

    def __init__(self, folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.model, self.log = folder, model, folder / "log"
        self.settings: dict[str, Any] = {
            "stock": {"tokens": STOCK_TOKENS, "greedy": [3, 6, 8], "speed": 10.0},
            "off": {"tokens": STOCK_TOKENS, "speed": 10.0},
            "exact": {"tokens": STOCK_TOKENS, "speed": 15.0},
            "calibrated": {"tokens": [1, 2, 9, 6, 7], "speed": 20.0},
        }
        self.workers: list[WorkerProcess] = []
        for library in (folder / "lib", folder / "lib" / "stock"):
            library.mkdir()
            for name in ("libllama.so", "libllama.dylib", "llama.dll"):
                (library / name).touch()
            (library / "build_info.json").write_text(json.dumps(fake_worker.BUILD))
        self.prompts = folder / "mt.jsonl"
        self.prompts.write_text('{"turns": ["ab"]}\n{"turns": ["cde"]}\n')
        monkeypatch.setenv("SPECEE_PC_LIB_PATH", str(folder / "lib"))
        monkeypatch.setattr(runner, "start_worker", self.start)
        monkeypatch.setattr(machine, "load_before", lambda: None)

    def start(self, mode: str) -> WorkerProcess:
        fake = str(Path(__file__).parent / "fake_worker.py")
        arguments = [mode, json.dumps(self.settings), str(self.log)]
        self.workers.append(WorkerProcess(mode, [sys.executable, fake, *arguments]))
        return self.workers[-1]

    def run(self, **options: Any) -> dict[str, Any]:
        """The report of a run."""
        given: dict[str, Any] = {"model": self.model, "prompts": (self.prompts,), "repeats": 1}
        run_bench(BenchOptions(**{**given, "json": self.folder / "r.json", **options}))
        report: dict[str, Any] = json.loads((self.folder / "r.json").read_text())
        return report

    def commands(self, *which: str) -> list[str]:
        """What the workers were asked, in order, as "mode command"."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line for line in lines if line.split()[1] in which]


@pytest.fixture
def bench(tmp_path: Path, user: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    (tmp_path / "bench").mkdir()
    return Bench(tmp_path / "bench", tiny_model, monkeypatch)


def of_mode(report: dict[str, Any], mode: str) -> dict[str, Any]:
    (row,) = (row for row in report["runs"] if row["mode"] == mode)
    return dict(row)


# ---- the runs ----


def test_the_report_is_what_the_schema_says(bench: Bench, tiny_bundle: Path) -> None:
    report = bench.run(bundle=str(tiny_bundle), repeats=2)
    jsonschema.validate(report, SCHEMA)
    assert [row["mode"] for row in report["runs"]] == ["stock", "off", "exact", "calibrated"]
    assert report["llama_cpp_commit"] == "abc"
    assert report["machine"]["devices"] == ["CPU"]
    assert report["model"]["path_name"] == "tiny.gguf"
    assert report["settings"]["bundle"]["name"] == "tiny.specee"
    assert str(bench.folder) not in json.dumps(report)


def test_the_figures_are_those_of_the_workers(bench: Bench) -> None:
    report = bench.run(repeats=2)
    stock, exact = of_mode(report, "stock"), of_mode(report, "exact")
    assert stock["speedup"] == {"min": 1.0, "median": 1.0, "max": 1.0}
    assert exact["speedup"]["median"] == pytest.approx(1.5)
    assert stock["mean_layers"] is None
    assert exact["mean_layers"] == pytest.approx((4 + 3 * 4) / 5)
    assert exact["exit_histogram"] == [0, 0, 0, 16, 4]
    assert (exact["n_prompts"], exact["n_tokens"]) == (2, 10)
    assert exact["identical_outputs"] == 2
    assert exact["fidelity"] == 1.0
    assert (stock["draft"], exact["draft"]) == (None, "lens")
    assert exact["peak_rss_bytes"] == 1 << 20


def test_fidelity_is_stocks_verdict_after_the_divergence(bench: Bench) -> None:
    calibrated = of_mode(bench.run(), "calibrated")
    assert calibrated["fidelity"] == pytest.approx(3 / 5)
    assert calibrated["identical_outputs"] == 0
    assert bench.commands("judge") == ["stock judge", "stock judge"]


def test_stock_and_the_candidates_take_turns_in_a_rotated_order(bench: Bench) -> None:
    bench.run(modes=("off", "exact"), repeats=2)
    order = [line.split()[0] for line in bench.commands("generate")]
    assert order == [
        *("stock", "off", "exact"),
        *("off", "exact", "stock"),
        *("off", "exact", "stock"),
        *("exact", "stock", "off"),
    ]


def test_the_model_is_loaded_once_in_each_worker(bench: Bench) -> None:
    bench.run(modes=("off", "exact"), repeats=2)
    loads = ["stock load", "off load", "exact load"]
    assert bench.commands("load") == loads
    assert len(bench.commands("starts")) == 3
    assert all(gone(worker.pid) for worker in bench.workers)


def test_all_sides_get_stocks_tokens(bench: Bench) -> None:
    bench.run(modes=("off",))
    assert bench.commands("prompt_tokens") == ["stock prompt_tokens"] * 2


def test_each_file_is_a_workload(bench: Bench) -> None:
    other = bench.folder / "gsm.jsonl"
    other.write_text('{"turns": ["x"]}\n')
    report = bench.run(modes=("off",), prompts=(bench.prompts, other), limit=1)
    rows = [(row["workload"], row["mode"], row["n_prompts"]) for row in report["runs"]]
    assert rows == [("mt", "stock", 1), ("mt", "off", 1), ("gsm", "stock", 1), ("gsm", "off", 1)]


def test_quick_is_few_prompts_once(bench: Bench) -> None:
    bench.prompts.write_text('{"turns": ["ab"]}\n' * 7)
    report = bench.run(modes=("off",), quick=True, repeats=5, max_tokens=500)
    assert of_mode(report, "off")["n_prompts"] == 4
    assert (report["settings"]["max_tokens"], report["settings"]["repeats"]) == (64, 1)


def test_a_divergence_of_exact_is_told_with_both_logits(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.settings["exact"]["tokens"] = [1, 2, 9, 6, 7]
    report = bench.run(modes=("exact", "calibrated"), limit=1)
    (divergence,) = report["settings"]["divergences"]  # calibrated may diverge, exact may not
    assert divergence == {
        "workload": "mt",
        "prompt": 0,
        "mode": "exact",
        "position": 2,
        "stock_token": 3,
        "other_token": 9,
        "stock_top1_logit": 2.5,
        "stock_logit_of_other": 2.25,
    }
    assert f"note: {describe(divergence)}" in capsys.readouterr().err
    assert "9 instead of 3; stock's logits are 2.2500 and 2.5000" in describe(divergence)


def test_a_model_without_windows_says_so(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.settings["exact"]["notice"] = "exact runs at full depth: no windows"
    report = bench.run(modes=("exact",))
    assert "exact runs at full depth: no windows" in report["settings"]["notices"]
    assert "note: exact runs at full depth: no windows" in capsys.readouterr().err


def test_without_a_bundle_it_runs_at_full_depth_and_says_so(bench: Bench) -> None:
    report = bench.run(modes=("exact",))
    assert any("at full depth: exact: no bundle" in x for x in report["settings"]["notices"])
    assert report["settings"]["bundle"] is None


def test_the_tables_go_to_standard_output_without_colours(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.run(modes=("exact", "calibrated"))
    out = capsys.readouterr().out
    assert "\x1b" not in out
    (exact,) = (line for line in out.splitlines() if "exact" in line and "MiB" in line)
    for figure in ("mt", "15.0", "1.50x (1.50-1.50)", "1.0000", "2/2", "0.00%", "3.2", "1 MiB"):
        assert figure in exact
    assert "decoding time" in out


def test_a_busy_machine_and_an_unsteady_stock_are_told(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "load_before", lambda: machine.Load(1.5, 0.0))
    monkeypatch.setattr(report.Measured, "unsteadiness", lambda self: 0.25)
    warnings = bench.run(modes=("off",))["settings"]["warnings"]
    assert any("busy before the start" in line for line in warnings)
    assert sum("speed varied by 25%" in line for line in warnings) == 1


# ---- refusals, all before the first run ----


@pytest.mark.parametrize(
    "options",
    [
        {"modes": ("fast",)},
        {"modes": ()},
        {"modes": ("off", "off")},
        {"threads": 0},
        {"repeats": 0},
        {"max_tokens": 0},
        {"limit": 0},
    ],
)
def test_impossible_options(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption):
        BenchOptions(**options)


def test_other_libraries_are_not_compared(bench: Bench) -> None:
    info = bench.folder / "lib" / "build_info.json"
    for change in ({"llama_cpp_commit": "def"}, {"flags": "-O2"}, {"compiler": "Clang"}):
        info.write_text(json.dumps({**fake_worker.BUILD, **change}))
        with pytest.raises(NativeLibraryError, match=f"cannot be compared: {next(iter(change))}"):
            bench.run()
    assert not bench.workers


def test_the_loaded_librarys_own_word_counts(bench: Bench) -> None:
    bench.settings["off"]["build"] = {"flags": "-O2"}
    with pytest.raises(NativeLibraryError, match=r"flags is '-O3' .* and '-O2'"):
        bench.run(modes=("off",))
    assert bench.commands("generate") == []


@pytest.mark.parametrize("text", [None, "{", "[]", "{}"])
def test_a_library_of_unknown_build(bench: Bench, text: str | None) -> None:
    info = bench.folder / "lib" / "stock" / "build_info.json"
    info.unlink() if text is None else info.write_text(text)
    with pytest.raises(NativeLibraryError, match="build_info"):
        bench.run()


def test_a_missing_stock_library(bench: Bench) -> None:
    for file in (bench.folder / "lib" / "stock").glob("*llama*"):
        file.unlink()
    with pytest.raises(NativeLibraryError, match="missing"):
        bench.run()


def test_bad_input_starts_no_worker(bench: Bench, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    cases: list[tuple[type[SpeceeError], dict[str, Any]]] = [
        (FileAccessError, {"json": tmp_path / "none" / "r.json"}),
        (ModelFileError, {"model": tmp_path / "none.gguf"}),
        (ModelFileError, {"model": None}),
        (ModelFileError, {"model": empty}),
        (PromptFileError, {"prompts": (empty,)}),
        (BundleError, {"bundle": str(tmp_path / "none.specee")}),
    ]
    for error, options in cases:
        with pytest.raises(error):
            bench.run(**options)
    assert not bench.workers


def test_a_prompt_that_is_too_long_is_told_with_its_place(bench: Bench) -> None:
    bench.prompts.write_text('{"turns": ["ab"]}\n{"turns": ["' + "x" * 1000 + '"]}\n')
    with pytest.raises(PromptTooLong, match=r"mt\.jsonl:2: its 1000 tokens and 128 new"):
        bench.run()
    assert bench.commands("generate") == []


def test_short_memory_is_told(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda: 1000)
    warnings = bench.run(modes=("off",))["settings"]["warnings"]
    assert any("memory may be short: 2 processes" in line for line in warnings)


# ---- failures amid the runs ----


def test_a_failed_run_ends_all_workers_and_writes_nothing(bench: Bench) -> None:
    (bench.folder / "r.json").write_text("old")
    bench.settings["exact"]["fail"] = {"generate": "die"}
    with pytest.raises(WorkerError, match="exact worker ended"):
        bench.run()
    assert all(gone(worker.pid) for worker in bench.workers)
    assert (bench.folder / "r.json").read_text() == "old"


def test_a_prompt_that_the_template_refuses_is_told_with_its_place(bench: Bench) -> None:
    bench.settings["stock"]["fail"] = {"prompt_tokens": "ChatTemplateError"}
    with pytest.raises(SpeceeError, match=r"^mt\.jsonl:1: the reason$"):
        bench.run()


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_ends_all_workers(bench: Bench) -> None:
    """bench runs in a process of its own, which gets the signal amid a worker's computation."""
    bench.settings["exact"]["fail"] = {"generate": "hang"}
    tests = str(Path(__file__).parent)
    program = (
        f"import sys; sys.path[:0] = [{tests!r}, {str(ROOT)!r}]\n"
        "from pathlib import Path\n"
        "from specee_pc.bench import machine, runner\n"
        "from specee_pc.bench.process import WorkerProcess\n"
        "from specee_pc.options import BenchOptions\n"
        f"rest = [{json.dumps(bench.settings)!r}, {str(bench.log)!r}]\n"
        f"fake = [sys.executable, {str(Path(__file__).parent / 'fake_worker.py')!r}]\n"
        "runner.start_worker = lambda mode: WorkerProcess(mode, [*fake, mode, *rest])\n"
        "machine.load_before = lambda: None\n"
        f"model, prompts = Path({str(bench.model)!r}), Path({str(bench.prompts)!r})\n"
        "runner.run_bench(BenchOptions(model=model, prompts=(prompts,), modes=('exact',)))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE)
    end = time.monotonic() + 30
    while "exact generate" not in bench.commands("generate") and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode != 0
    assert b"KeyboardInterrupt" in errors
    pids = [int(line.split()[2]) for line in bench.commands("starts")]
    assert len(pids) == 2
    assert all(gone(pid) for pid in pids)


# ---- small parts ----


def test_nobody_always_comes_first() -> None:
    modes = ["stock", "off", "exact"]
    assert [rotated(modes, i)[0] for i in range(4)] == ["stock", "off", "exact", "stock"]
    assert sorted(rotated(modes, 2)) == sorted(modes)


def test_the_command_names_files_but_not_where_they_lie() -> None:
    options = BenchOptions(
        model=Path("/secret/m.gguf"), prompts=(Path("/secret/a b.jsonl"),), limit=3, threads=2
    )
    assert command_line(options) == (
        "specee-pc bench m.gguf --prompts 'a b.jsonl' --limit 3 --max-tokens 128 "
        "--modes off,exact,calibrated --repeats 3 --threads 2"
    )
