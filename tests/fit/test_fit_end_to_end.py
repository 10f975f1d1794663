"""fit on a tiny random model: the bundle that comes out is one that chat can use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

import tiny

from specee_pc.bundle import Bundle
from specee_pc.errors import BundleError, InvalidOption, SpeceeError
from specee_pc.fit import run_fit
from specee_pc.gguf_header import read_header
from specee_pc.options import FitOptions

pytestmark = pytest.mark.usefixtures("user")


def write_prompts(path: Path, n: int) -> Path:
    lines = [json.dumps({"turns": [f"Question {i}: {i * 37 % 101} + {i}?"]}) for i in range(n)]
    path.write_text("\n".join(lines))
    return path


def test_the_bundle_works(tmp_path: Path) -> None:
    from specee_pc import Llama

    model = tiny.write_model(tmp_path / "tiny.gguf", seed=3)
    prompts = write_prompts(tmp_path / "prompts.jsonl", 240)
    out = tmp_path / "tiny.specee"
    run_fit(FitOptions(model=model, out=out, threads=1, fidelity=0.9, prompts=prompts))

    bundle = Bundle.load(out)
    bundle.require(read_header(model))
    report = bundle.calibration
    assert report["promised_fidelity"] == 0.9
    assert report["tokens"]["calibration"] >= 2000
    assert 0 <= report["test"]["fidelity"] <= 1
    assert 0 <= report["bare_rule"]["fidelity"] <= 1
    assert 0 < report["lens_coverage"] <= 1
    assert report["oracle_layers"] <= read_header(model).n_layer
    assert report["seconds"]["recording"] > 0
    assert not list(tmp_path.glob(".*")), "a half-written bundle is left"

    texts = []
    for mode in ("off", "exact"):
        llm = Llama(model, mode=mode, bundle=out, n_ctx=256, n_threads=1)
        answer = llm.create_completion("Question 7:", max_tokens=48, temperature=0.0)
        assert isinstance(answer, dict)
        texts.append(answer["choices"][0]["text"])
        llm.close()
    assert texts[0] == texts[1]


def test_too_few_tokens_say_how_many_are_needed(tmp_path: Path, tiny_model: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 48)
    options = FitOptions(model=tiny_model, out=tmp_path / "out", threads=1, prompts=prompts)
    with pytest.raises(SpeceeError, match="a promise needs 2000"):
        run_fit(options)
    assert not (tmp_path / "out").exists()


def test_impossible_outputs_and_prompts(tmp_path: Path, tiny_model: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(BundleError, match="is a file"):
        run_fit(FitOptions(model=tiny_model, out=file))
    with pytest.raises(InvalidOption, match="cannot be read"):
        run_fit(FitOptions(model=tiny_model, out=tmp_path / "x", prompts=tmp_path / "missing"))
