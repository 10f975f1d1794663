"""bench on real models, through both libraries."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import tiny

from specee_pc.bench.process import WorkerProcess
from specee_pc.bench.runner import run_bench
from specee_pc.errors import BundleModelMismatch, ModelFileError
from specee_pc.options import BenchOptions

ROOT = Path(__file__).parent.parent.parent
SCHEMA = json.loads((ROOT / "docs" / "bench-report.schema.json").read_text())


def start(mode: str, model: Path, bundle: Path | None = None) -> WorkerProcess:
    worker = WorkerProcess(mode)
    folder = None if bundle is None else str(bundle)
    worker.ask("load", model=str(model), mode=mode, bundle=folder, threads=1)
    return worker


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "words.jsonl"
    lines = [json.dumps({"turns": [text]}) for text in ("Good morning", "x", "One, two, " * 60)]
    file.write_text("\n".join(lines))
    return file


@pytest.mark.usefixtures("user")
def test_the_whole_path_on_a_tiny_model(
    tmp_path: Path, tiny_model: Path, tiny_bundle: Path, prompts: Path
) -> None:
    """Random exits: exact must undo the wrong ones, calibrated must lose fidelity by them."""
    file = tmp_path / "r.json"
    run_bench(
        BenchOptions(
            model=tiny_model,
            prompts=(prompts,),
            max_tokens=24,
            threads=1,
            repeats=2,
            json=file,
            bundle=str(tiny_bundle),
        )
    )
    report = json.loads(file.read_text())
    jsonschema.validate(report, SCHEMA)
    stock, off, exact, calibrated = report["runs"]
    assert stock["identical_outputs"] == off["identical_outputs"] == 3
    assert exact["identical_outputs"] == 3, report["settings"]["divergences"]
    assert stock["fidelity"] == off["fidelity"] == exact["fidelity"] == 1.0
    assert off["mean_layers"] == tiny.N_LAYER
    assert 0.0 < calibrated["fidelity"] < 1.0
    assert calibrated["identical_outputs"] < 3
    assert 2 <= calibrated["mean_layers"] < tiny.N_LAYER
    assert sum(calibrated["exit_histogram"][: tiny.N_LAYER]) > 0
    assert sum(calibrated["time_share"].values()) > 0
    assert [row["draft"] for row in report["runs"]] == [None, None, "lens", "lens"]
    assert not any("when asked again" in line for line in report["settings"]["notices"])


def test_stock_judges_its_own_output_as_right_wherever_it_begins(tiny_model: Path) -> None:
    """Whatever the KV cache still holds: of this text, of a longer one, of another prompt."""
    with start("stock", tiny_model) as worker:
        prompts = [worker.ask("prompt_tokens", text=text)["tokens"] for text in ("ab", "abc", "z")]
        worker.ask("open", n_ctx=256, warm_up=prompts[0])
        texts = [worker.generate(prompt, 12)[0].tokens for prompt in prompts]
        for which in (2, 0, 1, 1, 0):
            for begin in (11, 3, 0, 5, 1, 2):
                judged = worker.judge(prompts[which], texts[which], begin)
                assert judged.greedy == texts[which][begin:]
                assert judged.top1_logit == judged.emitted_logit


def test_stock_judges_after_the_emitted_prefix(tiny_model: Path) -> None:
    """A wrong token in the prompt's answer: the verdict after it is that of a prompt with it."""
    with start("stock", tiny_model) as worker:
        prompt = worker.ask("prompt_tokens", text="abc")["tokens"]
        worker.ask("open", n_ctx=256, warm_up=prompt)
        stock = worker.generate(prompt, 8)[0].tokens
        wrong = (stock[3] + 1) % tiny.N_VOCAB
        continued = worker.generate([*prompt, *stock[:3], wrong], 4)[0].tokens
        judged = worker.judge(prompt, [*stock[:3], wrong, *continued], 3)
        assert judged.greedy == (stock[3], *continued)
        assert judged.top1_logit > judged.emitted_logit


def test_a_waiting_worker_does_not_spin(tiny_model: Path) -> None:
    with start("stock", tiny_model) as worker:
        prompt = worker.ask("prompt_tokens", text="abc")["tokens"]
        worker.ask("open", n_ctx=256, warm_up=prompt)
        worker.generate(prompt, 8)
        time.sleep(1.0)
        before = worker.cpu_s
        worker.ask("judge", prompt=prompt, emitted=[1], start=1)
        assert worker.cpu_s - before < 0.2


@pytest.mark.usefixtures("user")
def test_models_and_bundles_that_cannot_be_compared(
    tmp_path: Path, tiny_bundle: Path, prompts: Path
) -> None:
    other = tiny.write_model(tmp_path / "other.gguf", seed=2)
    with pytest.raises(BundleModelMismatch, match="another"):
        run_bench(BenchOptions(model=other, prompts=(prompts,), bundle=str(tiny_bundle)))
    unknown = tiny.write_model(tmp_path / "unknown.gguf", arch="no-such-arch")
    with pytest.raises(ModelFileError, match="llama.cpp cannot load it"):
        run_bench(BenchOptions(model=unknown, prompts=(prompts,), modes=("off",)))


@pytest.mark.model
def test_bench_quick_on_smollm2(tmp_path: Path, smollm2: Path) -> None:
    """What it says must be right on a busy machine, too: one thread does not wait for others."""
    file = tmp_path / "r.json"
    command = [sys.executable, "-m", "specee_pc.cli", "bench", str(smollm2), "--quick"]
    command += ["--threads", "1", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    jsonschema.validate(report, SCHEMA)
    rows: dict[str, dict[str, Any]] = {row["mode"]: row for row in report["runs"]}
    assert rows["off"]["fidelity"] == rows["stock"]["fidelity"] == 1.0
    assert rows["off"]["identical_outputs"] == rows["stock"]["n_prompts"] == 4
    told = [d["prompt"] for d in report["settings"]["divergences"] if d["mode"] == "exact"]
    assert len(told) == 4 - rows["exact"]["identical_outputs"]
    assert "decode tok/s" in done.stdout
